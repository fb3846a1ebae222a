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
    modules = _modules_of(model, getattr(model, "original_model", model))
    training = [m for m in modules if m.training]
    rotary = [
        _RotaryState(m)
        for m in modules
        if m._buffers and any("inv_freq" in name or "rotary_" in name for name in m._buffers)
    ]
    try:
        for m in training:
            m.training = False
        yield
    finally:
        for m in training:
            m.training = True
        for state in rotary:
            state.restore()


def _modules_of(*roots: torch.nn.Module) -> list[torch.nn.Module]:
    """Each module once; `Module.modules` passes every one up through all the levels above it."""
    found: dict[int, torch.nn.Module] = {}
    to_visit = list(roots)
    while to_visit:
        module = to_visit.pop()
        if id(module) not in found:
            found[id(module)] = module
            to_visit.extend(child for child in module._modules.values() if child is not None)
    return list(found.values())


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
