"""Changes queries or keys of a running model at its own hook points.

An `Edit` is an ordinary torch hook on the module behind a hook point: TransformerLens' own
`reset_hooks` leaves it alone, and it goes when its handle is removed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from lens_rope.errors import InputError

Layout = Literal["pos head", "head pos", "flat"]
Tables = Callable[[Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class EditPoint:
    """Where queries or keys of a layer can be changed so that the model goes on with the change.

    Attributes:
        name: Name of the hook point.
        is_rotated: Whether the values there are rotated already.
        layout: `pos head` for `[batch, pos, head, d_head]`, `head pos` for
            `[batch, head, pos, d_head]`, `flat` for `[batch, pos, head * d_head]`.
    """

    name: str
    is_rotated: bool
    layout: Layout = "pos head"


class Edit:
    """A forward hook that changes queries or keys, whatever layout the host holds them in.

    Attributes:
        is_active: Whether it changes anything, see `suspended`.
        is_recording: Whether to keep what is given to it.
        given: `[batch, pos, head, d_head]` What was given last while recording.
    """

    def __init__(
        self, point: EditPoint, n_heads: int, d_head: int, change: Callable[[Tensor], Tensor]
    ) -> None:
        """Changes `[batch, pos, head, d_head]` at a point by a function of the same shape."""
        self.point = point
        self._n_heads = n_heads
        self._d_head = d_head
        self._change = change
        self.is_active = True
        self.is_recording = False
        self.given: Tensor | None = None

    def install(self, model: Any) -> RemovableHandle:
        """Registers the hook; the handle removes it."""
        return model.hook_dict[self.point.name].register_forward_hook(self)

    def __call__(self, module: Any, args: Any, value: Tensor) -> Tensor | None:
        """The changed value, in the layout, precision and place of the given one."""
        if not self.is_active:
            return None
        # The host converts layouts for its own hooks, not for those of torch.
        conversion = getattr(module, "hook_conversion", None)
        if conversion is not None:
            value = conversion.convert(value)
        changed = self._from_heads_last(self._changed(self._heads_last(value)))
        return changed if conversion is None else conversion.revert(changed)

    def _changed(self, x: Tensor) -> Tensor:
        # Hosts may hold one key per query head; those of a group are one and the same.
        copies = x.shape[2] // self._n_heads
        x = x[:, :, ::copies]
        if self.is_recording:
            self.given = x.detach()
        return self._change(x).repeat_interleave(copies, dim=2)

    def _heads_last(self, value: Tensor) -> Tensor:
        if self.point.layout == "flat":
            return value.unflatten(-1, (-1, self._d_head))
        return value.transpose(1, 2) if self.point.layout == "head pos" else value

    def _from_heads_last(self, x: Tensor) -> Tensor:
        if self.point.layout == "flat":
            return x.flatten(-2)
        return x.transpose(1, 2) if self.point.layout == "head pos" else x


def edits_of(model: Any) -> list[Edit]:
    """All edits that a model has at present."""
    points = {id(point): point for point in model.hook_dict.values()}.values()
    return [
        hook for point in points for hook in point._forward_hooks.values() if isinstance(hook, Edit)
    ]


def layers_changed_after_rotation(model: Any) -> frozenset[int]:
    """Layers whose queries or keys are being changed after they are rotated."""
    points = [edit.point for edit in edits_of(model) if edit.is_active]
    # blocks.{layer}.attn....
    return frozenset(int(point.name.split(".")[1]) for point in points if point.is_rotated)


@contextmanager
def suspended(model: Any) -> Iterator[None]:
    """The model without its edits inside; they work again afterwards."""
    active = [edit for edit in edits_of(model) if edit.is_active]
    try:
        for edit in active:
            edit.is_active = False
        yield
    finally:
        for edit in active:
            edit.is_active = True


def refuse_cached(kwargs: dict[str, Any], layer: int) -> None:
    """Refuses an attention call that adds to a filled key-value cache.

    Raises:
        InputError: The cache holds keys of earlier tokens.
    """
    for value in kwargs.values():
        keys = getattr(value, "past_keys", None)
        length = keys.shape[1] if isinstance(keys, Tensor) else 0
        if hasattr(value, "get_seq_length"):
            length = value.get_seq_length(layer)
        if length:
            raise InputError(
                f"layer {layer} was run on a filled key-value cache, where positions are not "
                "known; run whole prompts, and generate with use_past_kv_cache=False"
            )


def turns(
    tables: tuple[Tensor, Tensor], columns: Tensor, *, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """`[row, pos, pair]` Complex turns, attention factor included, from cosines and sines."""
    cos, sin = (table.to(device).index_select(-1, columns.to(device)) for table in tables)
    real = torch.float64 if dtype == torch.complex128 else torch.float32
    return torch.complex(cos.to(real), sin.to(real))
