"""The two hosts, `HookedTransformer` and `TransformerBridge`, behind one small interface.

This package is the only place that knows TransformerLens' models: the names of hook points, where
a layer keeps its scale, window, soft-cap and sinks, and by which route rotated queries and keys are
obtained. A host runs one unpadded prompt and hands over one `LayerReading` per layer, as that
layer's hooks fire; nothing of size query x key outlives its layer.
"""

from __future__ import annotations

from typing import Any

from transformer_lens.model_bridge import TransformerBridge

from lens_rope.errors import InputError
from lens_rope.hosts.base import Attention, Host, LayerReading
from lens_rope.hosts.bridge import BridgeHost
from lens_rope.hosts.hooked import HookedHost, HookedTransformer


def host_of(model: Any) -> Host:
    """The host interface of a model.

    Args:
        model: A `HookedTransformer` or a `TransformerBridge`.

    Raises:
        InputError: It is neither.
        UnsupportedModelError: It has no rotary position embedding.
    """
    if HookedTransformer is not None and isinstance(model, HookedTransformer):
        return HookedHost(model)
    if isinstance(model, TransformerBridge):
        return BridgeHost(model)
    raise InputError(
        f"cannot read a {type(model).__name__}; pass a HookedTransformer or a TransformerBridge, "
        "for example from lens_rope.load_model"
    )


__all__ = ["Attention", "Host", "LayerReading", "host_of"]
