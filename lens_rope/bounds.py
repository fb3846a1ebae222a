"""Where offset features can be: bounds on frequency and angle, and whether a model keeps them.

An offset feature contributes `A cos(φ + w Δ)` at distance `Δ`. To build a sink it has to push every
other key down: `cos(φ + w Δ) ≤ 0` at every distance from 0 to the effective context `L`. With φ in
[0, 2π) the cosine is not positive on [π/2, 3π/2] only, and `w Δ` moves right from φ without a jump,
so the whole stretch from φ to φ + w L has to lie in there:

- minimum angle: `φ ≥ π/2`, and as φ ≤ 3π/2 too, query and key are at least a right angle apart;
- frequency: `w L ≤ π`, at most half a cycle over the context, because that is as long as it gets;
- together: `φ + w L ≤ 3π/2`.

The weaker form of the frequency bound is the partial cycle, `w L < 2π`. "Rotary Offset Features in
Large Language Models" (Jonasson 2025, arXiv 2503.01832) derives bounds on the frequency and the
least angle of these features; the derivation here is our own and need not give the same numbers.

A share of features within a bound says little without its base rate, the share among all pairs.
Heads share keys, and the heads of a layer their frequencies, so features are no independent
samples: besides features, distinct (layer, key head, pair) are counted, and the p-value to quote
comes from permutations that move whole layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np

from lens_rope.errors import InputError

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go
    from jaxtyping import Bool, Float, Int

    from lens_rope.offsets import LayerOffsets, OffsetFeatures

Band = Literal["full cycles", "partial cycle", "below half a cycle"]
"""At least one cycle over the effective context; below one; at most half a one."""

BANDS: tuple[Band, ...] = get_args(Band)

PERMUTATIONS = 9999
"""Permutations behind a clustered p-value; the smallest it can be is one in `PERMUTATIONS + 1`."""

NOTHING_STRONG = "No offset feature is that strong, so there is nothing to judge."

SMALLEST_P = 1 / (PERMUTATIONS + 1)
"""A permutation p-value cannot be smaller, so it is a bound where it is this small."""

BOUNDS = ("half_cycle", "partial_cycle", "angle", "region")
"""The bounds that are checked, in the order of the module's text; `region` is all together."""


def band(cycles: float) -> Band:
    """In which band a pair of so many cycles over the context lies, in words."""
    if cycles >= 1:
        return "full cycles"
    return "partial cycle" if cycles > 0.5 else "below half a cycle"


def within_half_cycle(turn: Float[np.ndarray, "..."]) -> Bool[np.ndarray, "..."]:
    """The frequency bound.

    Args:
        turn: `w L`, the turn over the effective context, rad.
    """
    return np.asarray(turn) <= np.pi


def within_partial_cycle(turn: Float[np.ndarray, "..."]) -> Bool[np.ndarray, "..."]:
    """The weak frequency bound: never a full cycle. `turn` as for `within_half_cycle`."""
    return np.asarray(turn) < 2 * np.pi


def within_angle(angle: Float[np.ndarray, "..."]) -> Bool[np.ndarray, "..."]:
    """The minimum angle: query and key offsets are at least a right angle apart.

    Args:
        angle: φ in (-π, π], rad.
    """
    return np.abs(angle) >= np.pi / 2


def within_region(
    angle: Float[np.ndarray, "..."], turn: Float[np.ndarray, "..."]
) -> Bool[np.ndarray, "..."]:
    """Whether the offset curve is nowhere positive at distances from 0 to the context.

    Args:
        angle: φ in (-π, π], rad.
        turn: `w L`, rad.
    """
    start = np.mod(angle, 2 * np.pi)
    return (start >= np.pi / 2) & (start + np.asarray(turn) <= 3 * np.pi / 2)


def kept_bounds(
    angle: Float[np.ndarray, "..."], turn: Float[np.ndarray, "..."]
) -> dict[str, Bool[np.ndarray, "..."]]:
    """Whether each of `BOUNDS` is kept, by name; arguments as for `within_region`."""
    return {
        "half_cycle": within_half_cycle(turn),
        "partial_cycle": within_partial_cycle(turn),
        "angle": within_angle(angle),
        "region": within_region(angle, turn),
    }


@dataclass(frozen=True)
class BoundShare:
    """How many strong offset features keep one bound.

    Attributes:
        name: One of `BOUNDS`.
        n: Number of features.
        within: Number of features within the bound.
        base_rate: Share of all (layer, head, pair) within the bound.
        p_binomial: Exact binomial p-value, features taken as independent draws at the base rate.
            They are not; it is there for comparison.
        n_distinct: Number of distinct (layer, key head, pair) among the features.
        within_distinct: Those of them that are within it in all heads in which they are features.
        p_binomial_distinct: Exact binomial p-value of these counts.
        p_value: Permutation p-value clustered by layer: each layer's pairs are shuffled, the same
            way in all of its heads, and the share is counted again. Layers are taken as
            independent. This is the one to quote.
    """

    name: str
    n: int
    within: int
    base_rate: float
    p_binomial: float
    n_distinct: int
    within_distinct: int
    p_binomial_distinct: float
    p_value: float

    @property
    def share(self) -> float:
        """Share of the features within the bound; nan without features."""
        return self.within / self.n if self.n else np.nan


@dataclass(frozen=True, eq=False)
class BoundsCheck:
    """Strong offset features against the bounds.

    Attributes:
        strong: Features with an amplitude above this were judged, in score units.
        table: One row per strong feature: `layer`, `head`, `kv_head`, `pair`, `amplitude` (score
            units), `angle` (rad, in (-π, π]), `turn` (`w L`, rad), `cycles`, `context` (tokens) and
            whether it keeps each bound, `within_half_cycle`, `within_partial_cycle`,
            `within_angle`, `within_region`. The largest amplitude first.
        shares: One entry per bound, in the order of `BOUNDS`.
        positive_angle: Share of the strong features with an angle above 0; nan without features.
        positive_angle_base_rate: The same among all (layer, head, pair).
        notes: What a reader has to know, one sentence each.
    """

    strong: float
    table: pd.DataFrame
    shares: tuple[BoundShare, ...]
    positive_angle: float
    positive_angle_base_rate: float
    notes: tuple[str, ...]

    def __getitem__(self, name: str) -> BoundShare:
        """The share within one bound.

        Args:
            name: One of `BOUNDS`.

        Raises:
            InputError: There is no such bound.
        """
        for entry in self.shares:
            if entry.name == name:
                return entry
        raise InputError(f"there is no bound {name!r}; the bounds are {', '.join(BOUNDS)}")

    def exceptions(self) -> pd.DataFrame:
        """The strong features outside of the bounds taken together, the largest first.

        Columns as `table`.
        """
        return self.table.query("within_region == False").reset_index(drop=True)

    def by_layer(self) -> pd.DataFrame:
        """One row per layer with strong features: how many there are, and how many keep a bound.

        Columns: `layer`, `context` (tokens), `features`, and how many of these keep each bound,
        `within_half_cycle`, `within_partial_cycle`, `within_angle`, `within_region`.
        """
        kept = {f"within_{name}": (f"within_{name}", "sum") for name in BOUNDS}
        return self.table.groupby("layer", as_index=False).agg(
            context=("context", "first"), features=("pair", "size"), **kept
        )

    def to_dataframe(self) -> pd.DataFrame:
        """One row per bound, see `BoundShare`.

        Columns: `bound`, `features`, `within` (counts), `share`, `base_rate`, `p_value`,
        `p_binomial`, `distinct`, `within_distinct` (counts), `p_binomial_distinct`.
        """
        import pandas as pd

        return pd.DataFrame(
            [
                {
                    "bound": entry.name, "features": entry.n, "within": entry.within,
                    "share": entry.share, "base_rate": entry.base_rate, "p_value": entry.p_value,
                    "p_binomial": entry.p_binomial, "distinct": entry.n_distinct,
                    "within_distinct": entry.within_distinct,
                    "p_binomial_distinct": entry.p_binomial_distinct,
                }
                for entry in self.shares
            ]
        )  # fmt: skip

    def plot(self) -> go.Figure:
        """Angle against `w L` of every strong feature, with the allowed region shaded."""
        from lens_rope.views.offset_figures import bounds_plot

        return bounds_plot(self)

    def _repr_html_(self) -> str:
        """For a notebook: the shares, and every strong feature with the allowed region."""
        from lens_rope.views.descriptions import describe_bounds
        from lens_rope.views.result_html import result_html

        return result_html(describe_bounds(self), [self.plot()])

    def __repr__(self) -> str:
        """The shares as a table."""
        head = f"{len(self.table)} offset features with an amplitude above {self.strong:g}"
        return "\n".join([head, self.to_dataframe().to_string(index=False), *self.notes])


def check_bounds(
    features: OffsetFeatures, strong: float = 5.0, *, context: int | None = None, seed: int = 0
) -> BoundsCheck:
    """Whether strong offset features keep the bounds on frequency and angle.

    Each layer is judged against its own effective context: its sliding window where it has one,
    else the trained context.

    Args:
        features: Offsets of every layer.
        strong: Features with an amplitude above this are judged, in score units.
        context: Effective context in tokens in place of each layer's own.
        seed: Seed of the permutations.

    Raises:
        InputError: The context is not positive, or the amplitude not a number of at least 0.
    """
    import pandas as pd

    if context is not None and context < 1:
        raise InputError(f"context is {context}; it must be at least 1 token")
    if not strong >= 0:
        raise InputError(f"strong is {strong}; it must be an amplitude of at least 0 score units")
    judged = [_judge(entry, features, strong, context) for entry in features.layers]
    judged = [entry for entry in judged if entry.is_strong.size and entry.offsets.is_known]
    frames = [entry.table() for entry in judged]
    table = pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=_COLUMNS)
    table = table.sort_values(
        ["amplitude", "layer", "head", "pair"], ascending=[False, True, True, True],
        ignore_index=True,
    )  # fmt: skip
    rng = np.random.default_rng(seed)
    # One set of permutations for all bounds.
    orders = [
        np.argsort(rng.random((PERMUTATIONS, entry.is_strong.shape[1])), axis=1)
        if entry.is_strong.any()
        else np.empty((0, entry.is_strong.shape[1]), dtype=int)
        for entry in judged
    ]
    permuted = _permuted(judged, orders)
    shares = tuple(_share(name, judged, permuted[name]) for name in BOUNDS)
    angles = np.concatenate([np.empty(0), *(entry.offsets.angle.ravel() for entry in judged)])
    return BoundsCheck(
        strong=strong,
        table=table,
        shares=shares,
        positive_angle=float((table["angle"] > 0).mean()) if len(table) else np.nan,
        positive_angle_base_rate=float((angles > 0).mean()) if angles.size else np.nan,
        notes=features.notes + _notes(table),
    )


_COLUMNS = (
    "layer", "head", "kv_head", "pair", "amplitude", "angle", "turn", "cycles", "context",
    *(f"within_{name}" for name in BOUNDS),
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class _JudgedLayer:
    """One layer's pairs against the bounds; arrays are `[head, pair]`."""

    offsets: LayerOffsets
    context: int
    is_strong: Bool[np.ndarray, "head pair"]
    turn: Float[np.ndarray, "head pair"]
    within: dict[str, Bool[np.ndarray, "head pair"]]

    def table(self) -> pd.DataFrame:
        import pandas as pd

        head, pair = np.nonzero(self.is_strong)
        turn = self.turn[head, pair]
        return pd.DataFrame(
            {
                "layer": self.offsets.layer,
                "head": head,
                "kv_head": self.offsets.kv_heads[head],
                "pair": pair,
                "amplitude": self.offsets.amplitude[head, pair],
                "angle": self.offsets.angle[head, pair],
                "turn": turn,
                "cycles": turn / (2 * np.pi),
                "context": self.context,
                **{f"within_{name}": self.within[name][head, pair] for name in BOUNDS},
            }
        )


def _judge(
    entry: LayerOffsets, features: OffsetFeatures, strong: float, context: int | None
) -> _JudgedLayer:
    length = entry.rope.context if context is None else context
    angle = entry.angle
    turn = np.broadcast_to(entry.rope.inv_freq * length, angle.shape)
    is_feature = entry.is_feature(features.constancy, features.relative)
    return _JudgedLayer(
        offsets=entry,
        context=length,
        is_strong=is_feature & (np.nan_to_num(entry.amplitude) > strong),
        turn=turn,
        within=kept_bounds(angle, turn),
    )


def _permuted(
    judged: list[_JudgedLayer], orders: list[Int[np.ndarray, "permutation pair"]]
) -> dict[str, Int[np.ndarray, " permutation"]]:
    """By bound, `[permutation]` how many features keep it when each layer's pairs are shuffled.

    Args:
        judged: The layers.
        orders: By layer, the pair that each pair stands for in each permutation; no row where the
            layer has no feature.
    """
    kept = np.zeros((PERMUTATIONS, len(BOUNDS)), dtype=np.int64)
    for entry, order in zip(judged, orders, strict=True):
        if not len(order):
            continue
        within = np.stack([entry.within[name] for name in BOUNDS], axis=-1).astype(np.int64)
        for pair in np.flatnonzero(entry.is_strong.any(axis=0)):
            # `[pair, bound]` Of the heads in which this pair is a feature, how many would keep the
            # bound if it were another one.
            n_kept = within[entry.is_strong[:, pair]].sum(axis=0)
            kept += n_kept[order[:, pair]]
    return dict(zip(BOUNDS, kept.T, strict=True))


def _share(
    name: str, judged: list[_JudgedLayer], permuted: Int[np.ndarray, " permutation"]
) -> BoundShare:
    from scipy.stats import binom

    n = sum(int(entry.is_strong.sum()) for entry in judged)
    within = sum(int((entry.is_strong & entry.within[name]).sum()) for entry in judged)
    total = sum(entry.is_strong.size for entry in judged)
    base = sum(int(entry.within[name].sum()) for entry in judged) / total if total else np.nan
    n_distinct = within_distinct = 0
    for entry in judged:
        kv_heads = entry.offsets.kv_heads
        for kv_head in np.unique(kv_heads):
            strong = entry.is_strong[kv_heads == kv_head]
            fails = strong & ~entry.within[name][kv_heads == kv_head]
            n_distinct += int(strong.any(axis=0).sum())
            within_distinct += int((strong.any(axis=0) & ~fails.any(axis=0)).sum())
    if not n:
        return BoundShare(name, 0, 0, base, np.nan, 0, 0, np.nan, np.nan)
    return BoundShare(
        name=name,
        n=n,
        within=within,
        base_rate=base,
        p_binomial=float(binom.sf(within - 1, n, base)),
        n_distinct=n_distinct,
        within_distinct=within_distinct,
        p_binomial_distinct=float(binom.sf(within_distinct - 1, n_distinct, base)),
        # The observed arrangement is one of those that are possible.
        p_value=float((1 + (permuted >= within).sum()) / (1 + PERMUTATIONS)),
    )


def _notes(table: pd.DataFrame) -> tuple[str, ...]:
    if len(table):
        return ()
    return (NOTHING_STRONG,)
