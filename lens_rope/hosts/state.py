"""Leaves a model as it was: flags, and rotary tables that a forward pass changes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


@contextmanager
def as_before(model: Any) -> Iterator[None]:
    """Evaluation mode inside; afterwards every flag and rotary table is what it was.

    Rotary tables grow with the longest prompt and some scalings switch on it, so a forward pass of
    ours would otherwise change what the caller's next one computes.
    """
    root = getattr(model, "original_model", model)
    modules = {id(m): m for owner in (model, root) for m in owner.modules()}.values()
    training = [(m, m.training) for m in modules]
    rotary = [
        _RotaryState(m)
        for m in modules
        if any("inv_freq" in name or "rotary_" in name for name in m._buffers)
    ]
    try:
        for m, _ in training:
            m.training = False
        yield
    finally:
        for m, flag in training:
            m.training = flag
        for state in rotary:
            state.restore()


class _RotaryState:
    """Tables and counters of one rotary module, which hosts replace or overwrite in place."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._buffers = dict(module._buffers)
        self._values = [
            (buffer, buffer.clone())
            for name, buffer in self._buffers.items()
            if buffer is not None and "inv_freq" in name
        ]
        self._counters = {
            name: value
            for name, value in vars(module).items()
            if isinstance(value, (int, float, Tensor)) and name != "training"
        }

    def restore(self) -> None:
        self._module._buffers.clear()
        self._module._buffers.update(self._buffers)
        for buffer, value in self._values:
            if not torch.equal(buffer, value):
                buffer.copy_(value)
        for name, value in self._counters.items():
            setattr(self._module, name, value)
