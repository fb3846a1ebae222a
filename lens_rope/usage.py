"""How large queries and keys are at each rotary frequency."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from lens_rope.errors import InputError
from lens_rope.rotation import split

if TYPE_CHECKING:
    from jaxtyping import Float

    from lens_rope.records import LayerCapture
    from lens_rope.spec import LayerRope


@dataclass(frozen=True, eq=False)
class LayerUsage:
    """Mean length of a layer's query and key pairs.

    Rotation changes no length but by the attention factor, so this is the same before and after.

    Attributes:
        layer: Index of the layer.
        n_tokens: Number of tokens behind the means.
        query: `[pair]` Mean over tokens and query heads of the rotated pair's length `|zR_q|`.
        key: `[pair]` Mean over tokens and key heads of `|zR_k|`.
    """

    layer: int
    n_tokens: int
    query: Float[np.ndarray, " pair"]
    key: Float[np.ndarray, " pair"]


def pair_usage(record: LayerCapture) -> LayerUsage:
    """Mean pair lengths of one layer on one prompt."""
    query, key = (mean_lengths(x, record.rope).mean(dim=0).numpy() for x in (record.q, record.k))
    return LayerUsage(record.rope.layer, record.n_pos, query, key)


def pair_lengths(
    x: Float[torch.Tensor, "... d_head"], rope: LayerRope
) -> Float[torch.Tensor, "... pair"]:
    """`[..., pair]` Length of each pair of queries or keys, activation units.

    In float32, or float64 where `x` is.

    Args:
        x: `[..., d_head]` Queries or keys.
        rope: The layer's rotation, which names the pairs.
    """
    first, second, _ = split(x, rope)
    return torch.hypot(first, second)


def mean_lengths(
    x: Float[torch.Tensor, "pos head d_head"], rope: LayerRope
) -> Float[torch.Tensor, "head pair"]:
    """`[head, pair]` Mean over tokens of `pair_lengths`, float64."""
    return pair_lengths(x, rope).mean(dim=0).double()


def merge_usage(usages: Iterable[LayerUsage]) -> LayerUsage:
    """Usage over several prompts: means weighted by tokens, whatever the order.

    Raises:
        InputError: There is nothing to merge, or the layers or numbers of pairs differ.
    """
    usages = list(usages)
    if len({(usage.layer, len(usage.query)) for usage in usages}) != 1:
        raise InputError("only usages of one layer with the same pairs can be merged")
    weights = [usage.n_tokens for usage in usages]
    return LayerUsage(
        layer=usages[0].layer,
        n_tokens=sum(weights),
        query=exact_mean([usage.query for usage in usages], weights),
        key=exact_mean([usage.key for usage in usages], weights),
    )


def exact_mean(
    values: list[Float[np.ndarray, " n"]], weights: list[int]
) -> Float[np.ndarray, " n"]:
    """`[n]` Weighted mean that does not depend on the order: each sum is rounded once."""
    from math import fsum

    total = sum(weights)
    if len(values) == 2:  # one addition is rounded once too, and all columns are added at once
        return (weights[0] * values[0] + weights[1] * values[1]) / total
    columns = zip(*(w * value for w, value in zip(weights, values, strict=True)), strict=True)
    return np.array([fsum(column) / total for column in columns])
