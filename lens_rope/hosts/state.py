"""Leaves a model as it was, and to itself: flags, rotary tables, hooks, one pass at a time."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformer_lens.hook_points import HookPoint

from lens_rope.errors import InputError

_BEING_READ: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
_BEING_READ_LOCK = threading.Lock()

# Whose hooks belong to a model: routing inside a bridge, recorded outputs, weight norms.
_LIBRARIES = ("transformer_lens.", "transformers.", "accelerate.", "torch.")


@contextmanager
def as_before(model: Any) -> Iterator[None]:
    """Evaluation mode inside; afterwards every flag and rotary table is what it was.

    Rotary tables grow with the longest prompt and some scalings switch on it, so a forward pass of
    ours would otherwise change what the caller's next one computes.
    """
    modules = modules_of(model, _root(model))
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


@contextmanager
def alone(model: Any) -> Iterator[None]:
    """One forward pass inside, and no other of this model, in a hook or in another thread.

    What is read is told by hooks, which cannot tell whose pass they are in.

    Raises:
        InputError: The model is being read already, or is run once more inside.
    """
    root = _root(model)
    with _BEING_READ_LOCK:
        if root in _BEING_READ:
            raise _run_twice()
        _BEING_READ.add(root)
    own, forward, n_passes = vars(root).get("forward"), root.forward, 0

    @functools.wraps(forward)
    def once(*args: Any, **kwargs: Any) -> Any:
        nonlocal n_passes
        if n_passes:
            raise _run_twice()
        n_passes += 1
        return forward(*args, **kwargs)

    try:
        # Not a hook: hosts call it directly as well.
        root.__dict__["forward"] = once
        yield
    finally:
        root.__dict__.pop("forward", None)
        if own is not None:
            root.__dict__["forward"] = own
        _BEING_READ.discard(root)


def _run_twice() -> InputError:
    return InputError(
        "the model is being read, and was to be run or read once more at the same time, by a hook "
        "or in another thread; do one after the other"
    )


@contextmanager
def without_callers_hooks(model: Any) -> Iterator[list[torch.nn.Module]]:
    """Inside, no hook fires that somebody attached to the model before.

    Each stays in its place, where its handle finds it: one that is removed inside is gone, and what
    libraries attach inside, which they do in a first pass and once for all, is there afterwards.

    Returns:
        The modules that have such hooks.
    """
    silenced: list[tuple[torch.nn.Module, dict[int, Any], int, Any]] = []
    try:
        for module in modules_of(model, _root(model)):
            for hooks in (module._forward_hooks, module._forward_pre_hooks):
                for key, hook in list(hooks.items()):
                    if _is_callers(hook, module):
                        silenced.append((module, hooks, key, hook))
                        hooks[key] = _silent
        yield list(dict.fromkeys(module for module, *_ in silenced))
    finally:
        for _, hooks, key, hook in silenced:
            if key in hooks:
                hooks[key] = hook


def _silent(*args: Any, **kwargs: Any) -> None:
    """In place of a hook; changes nothing."""


def callers_hooks(module: torch.nn.Module) -> list[Callable[..., Any]]:
    """Forward hooks of one module that are no part of the model itself."""
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return [hook for hook in hooks if _is_callers(hook, module)]


def _is_callers(hook: Any, module: torch.nn.Module) -> bool:
    if isinstance(module, HookPoint):
        return True  # which is what hook points are for
    function = getattr(hook, "func", hook)  # of a partial
    return not (getattr(function, "__module__", None) or "").startswith(_LIBRARIES)


def _root(model: Any) -> torch.nn.Module:
    """The module that every pass of the model goes through."""
    return getattr(model, "original_model", model)


def modules_of(*roots: torch.nn.Module) -> list[torch.nn.Module]:
    """As `Module.modules`, which passes every module up through all the levels above it."""
    found: dict[int, torch.nn.Module] = {}
    to_visit = list(reversed(roots))
    while to_visit:
        module = to_visit.pop()
        if id(module) not in found:
            found[id(module)] = module
            children = [child for child in module._modules.values() if child is not None]
            to_visit.extend(reversed(children))
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
