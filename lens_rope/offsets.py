"""The constant part of queries and keys: offsets, offset features and outliers.

Read a pair before rotation as a complex number `z`. Its mean over tokens, `z̄`, is the offset. At
distance `Δ` the offsets of query and key alone contribute `A cos(φ + w Δ)` to a score, with the
amplitude `A = scale g² |z̄_q| |z̄_k|` and the angle `φ = arg(z̄_q conj z̄_k)`. Offset features are
pairs that are large and nearly constant on both sides; they and the claims about them are those of
"Rotary Offset Features in Large Language Models" (Jonasson 2025, arXiv 2503.01832).

The first position and attention sinks are left out of the means: what a sink holds is not what
tokens in general hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lens_rope.errors import InputError
from lens_rope.rotation import phases, split
from lens_rope.usage import exact_mean, pair_lengths

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go
    from jaxtyping import Complex, Float

    from lens_rope.bounds import BoundsCheck
    from lens_rope.records import LayerCapture, ModelInfo, RotaryCapture
    from lens_rope.spec import LayerRope

CONSTANCY = 0.8
"""An offset feature has at least this constancy in query and key."""

RELATIVE = 2.0
"""An offset feature, and an outlier, has at least this relative magnitude."""

MIN_OFFSET_TOKENS = 32
"""With fewer tokens a mean is not an offset: random directions alone give high constancy."""


@dataclass(frozen=True, eq=False)
class SideOffsets:
    """Statistics of the queries, or of the keys, of one layer over its analysed tokens.

    Attributes:
        mean: `[head, pair]` Mean of the pair before rotation (the offset), complex, activation
            units.
        magnitude: `[head, pair]` Mean length of the pair before rotation, activation units.
        largest: `[head, pair]` Largest length of the pair before rotation, likewise.
        component_mean: `[d_head]` Mean absolute value of a component after rotation, over heads.
        component_largest: `[d_head]` Largest absolute value of a component after rotation.
        rest_mean: `[head, rest]` Mean of the components that are not rotated, activation units.
    """

    mean: Complex[np.ndarray, "head pair"]
    magnitude: Float[np.ndarray, "head pair"]
    largest: Float[np.ndarray, "head pair"]
    component_mean: Float[np.ndarray, " d_head"]
    component_largest: Float[np.ndarray, " d_head"]
    rest_mean: Float[np.ndarray, "head rest"]

    @property
    def constancy(self) -> Float[np.ndarray, "head pair"]:
        """`[head, pair]` Length of the mean over mean of the length, in [0, 1]."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.abs(self.mean) / self.magnitude

    @property
    def relative_magnitude(self) -> Float[np.ndarray, "head pair"]:
        """`[head, pair]` Mean length over the median of the head's pairs, dimensionless."""
        if not self.magnitude.size:
            return self.magnitude  # numpy warns of medians of nothing
        with np.errstate(invalid="ignore", divide="ignore"):
            return self.magnitude / np.median(self.magnitude, axis=1, keepdims=True)


@dataclass(frozen=True, eq=False)
class LayerOffsets:
    """Offsets of one layer.

    Attributes:
        rope: The layer's rotation.
        scale: What the model multiplies query-key products by.
        n_tokens: Number of tokens behind the statistics, those left out not counted.
        n_left_out: Number of tokens left out: first positions and attention sinks.
        query: Statistics of queries, by query head.
        key: Statistics of keys, by key head.
    """

    rope: LayerRope
    scale: float
    n_tokens: int
    n_left_out: int
    query: SideOffsets
    key: SideOffsets

    @property
    def layer(self) -> int:
        """Index of the layer."""
        return self.rope.layer

    @property
    def n_heads(self) -> int:
        """Number of query heads."""
        return len(self.query.mean)

    @property
    def kv_heads(self) -> np.ndarray:
        """`[head]` The key head that each query head reads."""
        return np.arange(self.n_heads) // (self.n_heads // len(self.key.mean))

    @property
    def is_known(self) -> bool:
        """Whether there are enough tokens for offsets."""
        return self.n_tokens >= MIN_OFFSET_TOKENS

    @property
    def amplitude(self) -> Float[np.ndarray, "head pair"]:
        """`[head, pair]` `scale g² |z̄_q| |z̄_k|`, in score units; nan with too few tokens."""
        product = np.abs(self.query.mean) * np.abs(self.key.mean[self.kv_heads])
        amplitude = self.scale * self.rope.attention_factor**2 * product
        return amplitude if self.is_known else np.full_like(amplitude, np.nan)

    @property
    def angle(self) -> Float[np.ndarray, "head pair"]:
        """`[head, pair]` `arg(z̄_q conj z̄_k)` in (-π, π], rad; nan with too few tokens.

        At distance `Δ` the offsets alone contribute `amplitude cos(angle + w Δ)`.
        """
        angle = np.angle(self.query.mean * self.key.mean[self.kv_heads].conj())
        return angle if self.is_known else np.full_like(angle, np.nan)

    def is_feature(self, constancy: float = CONSTANCY, relative: float = RELATIVE) -> np.ndarray:
        """`[head, pair]` Whether the pair is an offset feature of the head; never with few tokens.

        Args:
            constancy: Smallest constancy, in query and key.
            relative: Smallest relative magnitude, in query and key.
        """
        if not self.is_known:
            return np.zeros(self.query.mean.shape, dtype=bool)
        key = (self.key.constancy >= constancy) & (self.key.relative_magnitude >= relative)
        query = (self.query.constancy >= constancy) & (self.query.relative_magnitude >= relative)
        return query & key[self.kv_heads]


def layer_offsets(record: LayerCapture, left_out: Sequence[int] = (0,)) -> LayerOffsets:
    """Offsets of one layer on one prompt.

    Args:
        record: Queries and keys of the layer.
        left_out: Positions to leave out of all statistics, see `sinks.sink_positions`.
    """
    kept = _kept(record.n_pos, left_out)

    rope = record.rope
    # The mean of what is not rotated yet is one product of the rotated pairs with the phases.
    turn = phases(record.positions, rope)[kept].conj() / rope.attention_factor
    cos, sin = turn.real.float(), turn.imag.float()

    def mean(x: torch.Tensor) -> torch.Tensor:
        return x.mean(dim=0).double()

    def side(x: torch.Tensor) -> SideOffsets:
        x = x[kept]
        first, second, rest = split(x, rope)
        if not len(kept):
            nothing = np.full(first.shape[1:], np.nan)
            flat = np.full(x.shape[-1], np.nan)
            no_rest = np.full(rest.shape[1:], np.nan)
            return SideOffsets(nothing.astype(complex), nothing, nothing, flat, flat, no_rest)
        size = pair_lengths(x, rope)
        values = x.abs()
        real = mean(first * cos[:, None] - second * sin[:, None])
        imag = mean(first * sin[:, None] + second * cos[:, None])
        return SideOffsets(
            mean=torch.complex(real, imag).numpy(),
            magnitude=(mean(size) / rope.attention_factor).numpy(),
            largest=(size.amax(dim=0).double() / rope.attention_factor).numpy(),
            component_mean=mean(values).mean(dim=0).numpy(),
            component_largest=values.amax(dim=(0, 1)).double().numpy(),
            rest_mean=mean(rest).numpy(),
        )

    return LayerOffsets(
        rope=record.rope,
        scale=record.scale,
        n_tokens=len(kept),
        n_left_out=record.n_pos - len(kept),
        query=side(record.q),
        key=side(record.k),
    )


def no_offsets(like: LayerOffsets, rope: LayerRope) -> LayerOffsets:
    """Offsets of no token at all under a rotation, which leave every merge as it is.

    Args:
        like: Offsets of the same layer, for the shapes.
        rope: The rotation.
    """

    def side(of: SideOffsets) -> SideOffsets:
        arrays = {name: np.full_like(value, np.nan) for name, value in vars(of).items()}
        return SideOffsets(**arrays)

    return LayerOffsets(rope, like.scale, 0, 0, side(like.query), side(like.key))


def merge_offsets(offsets: Iterable[LayerOffsets]) -> LayerOffsets:
    """Offsets over several prompts: means weighted by tokens, whatever the order.

    Raises:
        InputError: There is nothing to merge, or layers, shapes or rotations differ.
    """
    offsets = list(offsets)
    if not offsets:
        raise InputError("there are no offsets to merge")
    first = offsets[0]
    for other in offsets[1:]:
        if (
            other.layer != first.layer
            or other.query.mean.shape != first.query.mean.shape
            or not other.rope.same_rotation(first.rope)
        ):
            raise InputError("only offsets of one layer with the same rotation can be merged")
    known = [entry for entry in offsets if entry.n_tokens] or [first]
    weights = [max(entry.n_tokens, 1) for entry in known]

    def mean(values: list[np.ndarray]) -> np.ndarray:
        return exact_mean([v.ravel() for v in values], weights).reshape(values[0].shape)

    def side(name: str) -> SideOffsets:
        sides: list[SideOffsets] = [getattr(entry, name) for entry in known]
        return SideOffsets(
            mean=mean([np.real(s.mean) for s in sides])
            + 1j * mean([np.imag(s.mean) for s in sides]),
            magnitude=mean([s.magnitude for s in sides]),
            largest=np.max([s.largest for s in sides], axis=0),
            component_mean=mean([s.component_mean for s in sides]),
            component_largest=np.max([s.component_largest for s in sides], axis=0),
            rest_mean=mean([s.rest_mean for s in sides]),
        )

    return LayerOffsets(
        rope=first.rope,
        scale=first.scale,
        n_tokens=sum(entry.n_tokens for entry in offsets),
        n_left_out=sum(entry.n_left_out for entry in offsets),
        query=side("query"),
        key=side("key"),
    )


@dataclass(frozen=True, eq=False)
class OffsetFeatures:
    """Offsets of every layer, head and pair, and the offset features among them.

    Attributes:
        model: Name and shape of the model.
        layers: Offsets of each layer, over all prompts.
        constancy: Smallest constancy of an offset feature, in query and key.
        relative: Smallest relative magnitude of an offset feature, in query and key.
        notes: What a reader has to know, one sentence each.
    """

    model: ModelInfo
    layers: tuple[LayerOffsets, ...]
    constancy: float
    relative: float
    notes: tuple[str, ...]

    def layer(self, layer: int) -> LayerOffsets:
        """Offsets of one layer.

        Args:
            layer: Index of the layer in the model.

        Raises:
            InputError: The layer was not captured.
        """
        for entry in self.layers:
            if entry.layer == layer:
                return entry
        known = ", ".join(str(entry.layer) for entry in self.layers)
        raise InputError(f"layer {layer} was not captured; captured layers: {known}")

    def query_offset(self, layer: int, head: int) -> Complex[np.ndarray, " pair"]:
        """`[pair]` Mean query of a head before rotation, complex, activation units.

        Args:
            layer: Index of the layer.
            head: Index of the query head.

        Raises:
            InputError: The layer was not captured, or the head does not exist.
        """
        entry = self.layer(layer)
        if not 0 <= head < entry.n_heads:
            raise InputError(f"head {head} is out of range; layer {layer} has {entry.n_heads}")
        return entry.query.mean[head]

    def to_dataframe(self) -> pd.DataFrame:
        """One row per layer, head and pair.

        Columns: `layer`, `head`, `kv_head`, `pair`, `wavelength` (tokens), `cycles` (over the
        effective context); `query_mean`, `query_largest` (length of the pair before rotation,
        activation units), `query_relative` (relative magnitude), `query_constancy` (in [0, 1]) and
        the same of the key, `key_mean`, `key_largest`, `key_relative`, `key_constancy`;
        `amplitude` (score units), `angle` (rad), `is_feature`.
        """
        return offset_table(self.layers, self.constancy, self.relative)

    def features(self) -> pd.DataFrame:
        """The offset features alone, the largest amplitude first.

        Columns as `to_dataframe`, without `is_feature`.
        """
        table = self.to_dataframe().query("is_feature").drop(columns="is_feature")
        return table.sort_values(
            ["amplitude", "layer", "head", "pair"], ascending=[False, True, True, True],
            ignore_index=True,
        )  # fmt: skip

    def outliers(self, relative: float = RELATIVE) -> pd.DataFrame:
        """Pairs that are large in the queries or keys of a head, constant or not.

        One row per layer, side, head (key heads for keys) and pair; the largest first. Columns:
        `layer`, `side` (`query` or `key`), `head`, `pair`, `wavelength` (tokens), `cycles`, `mean`,
        `largest` (length of the pair before rotation, activation units), `relative` (relative
        magnitude), `constancy`.

        Args:
            relative: Smallest relative magnitude.
        """
        return outlier_table(self.layers, relative)

    def check_bounds(self, strong: float = 5.0, *, context: int | None = None) -> BoundsCheck:
        """Whether strong offset features keep the bounds on frequency and angle.

        Each layer is judged against its own effective context.

        Args:
            strong: Features with an amplitude above this are judged, in score units.
            context: Effective context in tokens in place of each layer's own.

        Raises:
            InputError: The context is not positive, or the amplitude not a number.
        """
        from lens_rope.bounds import check_bounds

        return check_bounds(self, strong, context=context)

    def plot(self, side: str = "key", statistic: str = "largest") -> go.Figure:
        """Absolute value of each component by layer, with the halves of the pairs marked.

        Args:
            side: `query` or `key`.
            statistic: `largest` or `mean` over tokens and heads.

        Raises:
            InputError: The side or the statistic is unknown.
        """
        from lens_rope.views.offset_figures import component_map

        return component_map(self.layers, side, statistic)

    def _repr_html_(self) -> str:
        """For a notebook: how many there are, the strongest, and the map of key components."""
        from lens_rope.views.descriptions import describe_features
        from lens_rope.views.result_html import result_html

        return result_html(describe_features(self), [self.plot()])

    def __repr__(self) -> str:
        """How many there are, and the strongest."""
        features = self.features()
        head = (
            f"{len(features)} offset features in {self.model.name} (constancy at least "
            f"{self.constancy:g}, magnitude at least {self.relative:g} times the head's median, in "
            "query and key)"
        )
        table = features.head(20).to_string(index=False) if len(features) else ""
        return "\n".join([head, *([table] if table else []), *self.notes])


def offset_features(
    capture: RotaryCapture, *, constancy: float = CONSTANCY, relative: float = RELATIVE
) -> OffsetFeatures:
    """Mean, size, constancy, amplitude and angle of every pair, and the offset features.

    Means are over the tokens of all prompts but the first of each and those that a head of the
    layer uses as an attention sink.

    Args:
        capture: A verified capture.
        constancy: Smallest constancy of an offset feature, in query and key.
        relative: Smallest relative magnitude of an offset feature, in query and key.

    Returns:
        Offsets of every layer, head and pair over all prompts.

    Raises:
        InputError: A threshold is out of range, or prompts were rotated differently.
    """
    from lens_rope.attention import read_attention
    from lens_rope.sinks import sink_positions

    if not 0 <= constancy <= 1 or not relative >= 0:
        raise InputError(
            f"constancy {constancy} must lie in [0, 1] and relative {relative} must be at least 0"
        )
    merged = []
    for index in range(len(capture.layer_indices)):
        records = [layers[index] for layers in capture.records]
        merged.append(
            merge_offsets(
                layer_offsets(record, sink_positions(read_attention(record))) for record in records
            )
        )
    return OffsetFeatures(capture.model, tuple(merged), constancy, relative, offset_notes(merged))


def offset_notes(layers: Sequence[LayerOffsets]) -> tuple[str, ...]:
    """What has to be said about offsets of these layers."""
    if all(entry.is_known for entry in layers):
        return ()
    fewest = min(entry.n_tokens for entry in layers)
    return (
        f"Offsets are left out where fewer than {MIN_OFFSET_TOKENS} tokens can be analysed (here "
        f"{fewest}, first tokens and sinks not counted); give a longer prompt.",
    )


def offset_table(
    layers: Sequence[LayerOffsets], constancy: float = CONSTANCY, relative: float = RELATIVE
) -> pd.DataFrame:
    """One row per layer, head and pair; columns as `OffsetFeatures.to_dataframe`."""
    import pandas as pd

    frames = []
    for entry in layers:
        n_pairs, kv = entry.rope.n_pairs, entry.kv_heads
        columns: dict[str, Any] = {
            "layer": entry.layer,
            "head": np.repeat(np.arange(entry.n_heads), n_pairs),
            "kv_head": np.repeat(kv, n_pairs),
            "pair": np.tile(np.arange(n_pairs), entry.n_heads),
            "wavelength": np.tile(entry.rope.wavelength, entry.n_heads),
            "cycles": np.tile(entry.rope.cycles, entry.n_heads),
        }
        for name, side, heads in (("query", entry.query, slice(None)), ("key", entry.key, kv)):
            columns[f"{name}_mean"] = side.magnitude[heads].ravel()
            columns[f"{name}_largest"] = side.largest[heads].ravel()
            columns[f"{name}_relative"] = side.relative_magnitude[heads].ravel()
            columns[f"{name}_constancy"] = side.constancy[heads].ravel()
        columns["amplitude"] = entry.amplitude.ravel()
        columns["angle"] = entry.angle.ravel()
        columns["is_feature"] = entry.is_feature(constancy, relative).ravel()
        frames.append(pd.DataFrame(columns))
    return pd.concat(frames, ignore_index=True)


def outlier_table(layers: Sequence[LayerOffsets], relative: float = RELATIVE) -> pd.DataFrame:
    """One row per layer, side, head and pair of at least this relative magnitude."""
    import pandas as pd

    frames = []
    for entry in layers:
        for name, side in (("query", entry.query), ("key", entry.key)):
            head, pair = np.nonzero(side.relative_magnitude >= relative)
            frames.append(
                pd.DataFrame(
                    {
                        "layer": entry.layer,
                        "side": name,
                        "head": head,
                        "pair": pair,
                        "wavelength": entry.rope.wavelength[pair],
                        "cycles": entry.rope.cycles[pair],
                        "mean": side.magnitude[head, pair],
                        "largest": side.largest[head, pair],
                        "relative": side.relative_magnitude[head, pair],
                        "constancy": side.constancy[head, pair],
                    }
                )
            )
    table = pd.concat(frames, ignore_index=True)
    order = ["relative", "layer", "side", "head", "pair"]
    return table.sort_values(order, ascending=[False, *[True] * 4], ignore_index=True)


def _kept(n_pos: int, left_out: Sequence[int]) -> torch.Tensor:
    """The analysed positions."""
    return torch.tensor(sorted(set(range(n_pos)) - set(left_out)), dtype=torch.long)
