"""Key spectra before and after rotation: what RoPE does to the eigenvalues of a layer's keys.

The spectrum is that of the covariance (divisor n) of a layer's keys, all KV heads side by side, and
of each KV head by itself. Before rotation means that the rotation alone is undone; the attention
factor stays on the keys. Then `|k|²` is the same on both sides for every token, and

    trace(post) - trace(pre) = |mean_pre|² - |mean_post|²

The variance that rotation adds is what `|mean|²` loses: the mean key, which rotation spreads over
positions, up to the small mean that rotated content keeps.

All tokens count, BOS and other sinks included. Eigenvalues are in activation units squared.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
import torch

from lens_rope.errors import InputError
from lens_rope.records import LayerCapture, ModelInfo, RotaryCapture
from lens_rope.rotation import from_pairs, to_pairs, unrotate
from lens_rope.spec import LayerRope, ranges

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go
    from jaxtyping import Float

Side = Literal["pre", "post"]
"""Before or after rotation."""

NEAR_ZERO = 0.5
"""Eigenvalues below this count as near zero, in activation units squared."""


@dataclass(frozen=True, eq=False)
class KeyMoments:
    """Sums over tokens from which the covariance of a layer's keys follows.

    A component here is one component of one KV head, heads side by side:
    `component = kv_head * d_head + c`.

    Attributes:
        layer: Index of the layer.
        n_tokens: Number of tokens behind the sums.
        n_kv_heads: Number of key heads.
        d_head: Components of a key.
        sum_pre: `[component]` Sum of keys before rotation, float64, activation units.
        gram_pre: `[component, component]` Sum of their products, float64, activation units squared.
        sum_post: `[component]` Likewise after rotation.
        gram_post: `[component, component]` Likewise after rotation.
    """

    layer: int
    n_tokens: int
    n_kv_heads: int
    d_head: int
    sum_pre: Float[np.ndarray, " component"]
    gram_pre: Float[np.ndarray, "component component"]
    sum_post: Float[np.ndarray, " component"]
    gram_post: Float[np.ndarray, "component component"]


def layer_keys(record: LayerCapture) -> KeyMoments:
    """Sums over the keys of one layer on one prompt, before and after rotation."""
    post = record.k.double()
    pairs, rest = to_pairs(post, record.rope)
    # `unrotate` takes the attention factor off, which would scale one side of the comparison only.
    undone = unrotate(pairs, record.positions, record.rope) * record.rope.attention_factor
    before, after = (keys.flatten(1) for keys in (from_pairs(undone, rest, record.rope), post))
    # By torch, whose threads the model uses too: those of numpy's BLAS wait for work beside them,
    # which slows the layers that follow.
    return KeyMoments(
        layer=record.rope.layer,
        n_tokens=record.n_pos,
        n_kv_heads=record.n_kv_heads,
        d_head=record.rope.d_head,
        sum_pre=before.sum(dim=0).numpy(),
        gram_pre=(before.T @ before).numpy(),
        sum_post=after.sum(dim=0).numpy(),
        gram_post=(after.T @ after).numpy(),
    )


def no_keys(like: KeyMoments) -> KeyMoments:
    """Moments of no token at all, which leave every merge as it is.

    Args:
        like: Moments of the same layer, for the shapes.
    """
    sums = {
        name: np.zeros_like(getattr(like, name))
        for name in ("sum_pre", "gram_pre", "sum_post", "gram_post")
    }
    return replace(like, n_tokens=0, **sums)


def merge_keys(moments: Iterable[KeyMoments]) -> KeyMoments:
    """Moments over several prompts. The order does not matter, up to rounding of float64 sums.

    Raises:
        InputError: There is nothing to merge, or the layers or shapes differ.
    """
    moments = list(moments)
    if len({(entry.layer, entry.n_kv_heads, entry.d_head) for entry in moments}) != 1:
        raise InputError("only keys of one layer with the same heads can be merged")
    return reduce(_added, moments)


@dataclass(frozen=True, eq=False)
class Spectrum:
    """Eigenvalues of the covariance of keys.

    With no more tokens than components the smallest eigenvalues are zero for lack of tokens. Ranks,
    the share near zero and the median would tell of the number of tokens, so they are nan then.

    Attributes:
        eigenvalues: `[component]` Descending, none below zero, activation units squared.
        trace: Variance of the keys summed over components, activation units squared.
        mean_energy: `|mean|²` of the keys, activation units squared.
        n_tokens: Number of tokens behind the covariance.
    """

    eigenvalues: Float[np.ndarray, " component"]
    trace: float
    mean_energy: float
    n_tokens: int

    @property
    def has_enough_tokens(self) -> bool:
        """Whether there are more tokens than components."""
        return self.n_tokens > len(self.eigenvalues)

    @property
    def participation_ratio(self) -> float:
        """`(sum λ)² / sum λ²`, how many equal eigenvalues would be as spread; nan if all are 0."""
        squares = float((self.eigenvalues**2).sum())
        return float(self.eigenvalues.sum()) ** 2 / squares if squares else np.nan

    def rank(self, share: float) -> int | float:
        """Smallest number of eigenvalues that hold this share of their sum, or nan.

        Args:
            share: Share of the variance, above 0 and at most 1.

        Raises:
            InputError: The share is out of range.
        """
        if not 0 < share <= 1:
            raise InputError(f"share is {share}; it must be above 0 and at most 1")
        held = self.eigenvalues.cumsum()
        if not self.has_enough_tokens or held[-1] == 0:
            return np.nan
        return int(np.searchsorted(held, share * held[-1])) + 1

    @property
    def rank90(self) -> int | float:
        """Number of eigenvalues that hold 90 % of the variance, or nan."""
        return self.rank(0.90)

    @property
    def rank95(self) -> int | float:
        """Number of eigenvalues that hold 95 % of the variance, or nan."""
        return self.rank(0.95)

    @property
    def rank99(self) -> int | float:
        """Number of eigenvalues that hold 99 % of the variance, or nan."""
        return self.rank(0.99)

    def near_zero(self, threshold: float = NEAR_ZERO) -> float:
        """Share of the eigenvalues below a threshold, or nan.

        Args:
            threshold: In activation units squared.
        """
        return float((self.eigenvalues < threshold).mean()) if self.has_enough_tokens else np.nan

    @property
    def median(self) -> float:
        """Median eigenvalue in activation units squared, or nan."""
        return float(np.median(self.eigenvalues)) if self.has_enough_tokens else np.nan


@dataclass(frozen=True, eq=False)
class LayerSpectrum:
    """Spectra of one layer's keys before and after rotation.

    Attributes:
        layer: Index of the layer.
        pre: Spectrum before rotation, all KV heads side by side.
        post: Spectrum after rotation.
        heads: (before, after) of each KV head by itself.
    """

    layer: int
    pre: Spectrum
    post: Spectrum
    heads: tuple[tuple[Spectrum, Spectrum], ...]

    @property
    def offset_energy(self) -> float:
        """`|mean_pre|² - |mean_post|²`, equal to `trace(post) - trace(pre)`: the rotated offset.

        In activation units squared.
        """
        return _offset_energy(self.pre, self.post)

    @property
    def offset_share(self) -> float:
        """Share of the variance after rotation that is the rotated offset; nan without variance."""
        return _offset_share(self.pre, self.post)


def layer_spectrum(moments: KeyMoments) -> LayerSpectrum:
    """Spectra of one layer from its moments."""
    n, d_head = moments.n_tokens, moments.d_head
    sides = []
    for total, gram in (
        (moments.sum_pre, moments.gram_pre),
        (moments.sum_post, moments.gram_post),
    ):
        mean = total / n
        sides.append((gram / n - np.outer(mean, mean), mean))

    def spectra(part: slice) -> tuple[Spectrum, Spectrum]:
        pre, post = (_spectrum(covariance[part, part], mean[part], n) for covariance, mean in sides)
        return pre, post

    heads = (slice(h * d_head, (h + 1) * d_head) for h in range(moments.n_kv_heads))
    return LayerSpectrum(moments.layer, *spectra(slice(None)), tuple(map(spectra, heads)))


@dataclass(frozen=True, eq=False)
class KeySpectrum:
    """Key spectra of a model, layer by layer, before and after rotation.

    Attributes:
        model: The model and its host.
        layers: One entry per layer, ascending.
        n_tokens: Number of tokens behind the spectra, over all prompts.
        notes: What to know before the numbers are quoted.
    """

    model: ModelInfo
    layers: tuple[LayerSpectrum, ...]
    n_tokens: int
    notes: tuple[str, ...]

    def layer(self, layer: int) -> LayerSpectrum:
        """The spectra of one layer.

        Args:
            layer: Index of the layer in the model.

        Raises:
            InputError: The layer was not analysed.
        """
        for entry in self.layers:
            if entry.layer == layer:
                return entry
        raise InputError(
            f"layer {layer} has no spectrum; choose among layers {_indices(self.layers)}"
        )

    def eigenvalues(
        self, side: Side, layers: Sequence[int] | None = None
    ) -> Float[np.ndarray, " eigenvalue"]:
        """`[eigenvalue]` Eigenvalues of all layers or the given ones, in activation units squared.

        Layers are ascending, and the eigenvalues of each are descending.

        Args:
            side: `pre` or `post`, before or after rotation.
            layers: Indices of layers; None takes all.

        Raises:
            InputError: The side is neither, no layer is given, or one was not analysed.
        """
        return np.concatenate([entry.eigenvalues for entry in self._spectra(side, layers)])

    def near_zero(
        self, side: Side, threshold: float = NEAR_ZERO, *, layers: Sequence[int] | None = None
    ) -> float:
        """Share of the eigenvalues of all layers below a threshold.

        nan where some layer has no more tokens than its keys have components.

        Args:
            side: `pre` or `post`, before or after rotation.
            threshold: In activation units squared.
            layers: Indices of layers; None takes all.

        Raises:
            InputError: As `eigenvalues`.
        """
        spectra = self._spectra(side, layers)
        if not all(entry.has_enough_tokens for entry in spectra):
            return np.nan
        return float((self.eigenvalues(side, layers) < threshold).mean())

    def median(self, side: Side, *, layers: Sequence[int] | None = None) -> float:
        """Median eigenvalue of all layers in activation units squared, or nan as `near_zero`.

        Args:
            side: `pre` or `post`, before or after rotation.
            layers: Indices of layers; None takes all.

        Raises:
            InputError: As `eigenvalues`.
        """
        spectra = self._spectra(side, layers)
        if not all(entry.has_enough_tokens for entry in spectra):
            return np.nan
        return float(np.median(self.eigenvalues(side, layers)))

    def to_dataframe(self) -> pd.DataFrame:
        """One row per layer; columns end in `_pre` before rotation and `_post` after it.

        Columns: `layer`; `rank90_pre`, `rank90_post`, and likewise `rank95` and `rank99` (numbers
        of eigenvalues), `participation_ratio`, `trace` (activation units squared), `near_zero`
        (share of the eigenvalues below 0.5), `median` (activation units squared); `offset_energy`
        (activation units squared), `offset_share`.
        """
        import pandas as pd

        return pd.DataFrame(
            [{"layer": entry.layer, **_row(entry.pre, entry.post)} for entry in self.layers]
        )

    def heads_dataframe(self) -> pd.DataFrame:
        """One row per layer and KV head, each head by itself.

        Columns: `layer`, `kv_head`, then as `to_dataframe`.
        """
        import pandas as pd

        return pd.DataFrame(
            [
                {"layer": entry.layer, "kv_head": head, **_row(pre, post)}
                for entry in self.layers
                for head, (pre, post) in enumerate(entry.heads)
            ]
        )

    def plot(self, layers: Sequence[int] | None = None) -> go.Figure:
        """Histograms of the eigenvalues before and after rotation.

        Args:
            layers: Indices of layers; None takes all.

        Raises:
            InputError: No layer is given, or one was not analysed.
        """
        from lens_rope.views.spectrum_figures import spectrum_histogram

        return spectrum_histogram(self, layers)

    def _repr_html_(self) -> str:
        """For a notebook: the sentence, the layers, the notes and the histograms."""
        from lens_rope.views.descriptions import describe_spectrum
        from lens_rope.views.result_html import result_html

        return result_html(describe_spectrum(self), [self.plot()])

    def __repr__(self) -> str:
        """A sentence with the shares near zero and medians, the main columns, and the notes."""
        table = self.to_dataframe().drop(
            columns=[f"{rank}_{side}" for rank in ("rank95", "rank99") for side in get_args(Side)]
        )
        pre, post = self.near_zero("pre"), self.near_zero("post")
        where = f"{self.model.name}, {self.n_tokens} tokens, layers {_indices(self.layers)}"
        head = f"Key spectrum of {where}: too few tokens for shares near zero and medians."
        if not np.isnan(pre):
            head = (
                f"Key spectrum of {where}: {pre:.0%} of the eigenvalues lie below {NEAR_ZERO:g} "
                f"before rotation and {post:.0%} after it; their median is "
                f"{self.median('pre'):.3g} before and {self.median('post'):.3g} after "
                "(activation units squared)."
            )
        rows = table.to_string(index=False, float_format=lambda x: f"{x:.3g}")
        return "\n".join([head, rows, *(f"note: {note}" for note in self.notes)])

    def _spectra(self, side: Side, layers: Sequence[int] | None) -> list[Spectrum]:
        if side not in get_args(Side):
            raise InputError(f"side is {side!r}; it must be 'pre' or 'post'")
        if layers is not None and len(layers) == 0:
            raise InputError("no layer is given; give at least one, or None for all")
        chosen = self.layers
        if layers is not None:
            chosen = [self.layer(layer) for layer in sorted(set(layers))]
        return [entry.pre if side == "pre" else entry.post for entry in chosen]


def key_spectrum(
    captures: RotaryCapture | Iterable[RotaryCapture], *, layers: Sequence[int] | None = None
) -> KeySpectrum:
    """Eigenvalues of the keys of each layer before and after rotation, over all prompts.

    Args:
        captures: A capture, or several of one model. They are taken one by one and only sums are
            kept, so a generator can go through more prompts than fit into memory. The sums take
            `2 (kv_heads * d_head)²` float64 numbers per layer.
        layers: Layers to analyse; None takes all that were captured.

    Returns:
        The spectra of each layer, all KV heads side by side and each by itself.

    Raises:
        InputError: There is no capture, captures are of different models, shapes or layers, or a
            layer was not captured.
    """
    if isinstance(captures, RotaryCapture):
        captures = (captures,)
    sums: dict[int, KeyMoments] = {}
    ropes: dict[int, LayerRope] = {}
    differs: set[int] = set()
    model: ModelInfo | None = None
    for capture in captures:
        if not isinstance(capture, RotaryCapture):
            raise InputError(
                f"captures holds a {type(capture).__name__}; give what capture returns"
            )
        wanted = capture.layer_indices if layers is None else sorted(set(layers))
        if model is None:
            model = capture.model
        _refuse_other(model, tuple(sums) or tuple(wanted), capture.model, tuple(wanted))
        for layer in wanted:
            for prompt in range(len(capture.prompts)):
                record = capture.layer(layer, prompt=prompt)
                entry = layer_keys(record)
                sums[layer] = merge_keys([sums[layer], entry]) if layer in sums else entry
                if not record.rope.same_rotation(ropes.setdefault(layer, record.rope)):
                    differs.add(layer)
    if model is None or not sums:
        raise InputError("there is nothing to analyse; give at least one capture and one layer")
    spectra = tuple(layer_spectrum(sums[layer]) for layer in sorted(sums))
    return KeySpectrum(
        model=model,
        layers=spectra,
        n_tokens=max(entry.n_tokens for entry in sums.values()),
        notes=_notes(spectra, ropes, differs),
    )


def _added(a: KeyMoments, b: KeyMoments) -> KeyMoments:
    return KeyMoments(
        a.layer, a.n_tokens + b.n_tokens, a.n_kv_heads, a.d_head,
        a.sum_pre + b.sum_pre, a.gram_pre + b.gram_pre,
        a.sum_post + b.sum_post, a.gram_post + b.gram_post,
    )  # fmt: skip


def _spectrum(
    covariance: Float[np.ndarray, "component component"],
    mean: Float[np.ndarray, " component"],
    n_tokens: int,
) -> Spectrum:
    found = torch.linalg.eigvalsh(torch.from_numpy(np.ascontiguousarray(covariance))).numpy()
    eigenvalues = found[::-1].clip(min=0)
    return Spectrum(eigenvalues, float(np.trace(covariance)), float(mean @ mean), n_tokens)


def _offset_energy(pre: Spectrum, post: Spectrum) -> float:
    return pre.mean_energy - post.mean_energy


def _offset_share(pre: Spectrum, post: Spectrum) -> float:
    return _offset_energy(pre, post) / post.trace if post.trace > 0 else np.nan


def _row(pre: Spectrum, post: Spectrum) -> dict[str, int | float]:
    row: dict[str, int | float] = {}
    for name in ("rank90", "rank95", "rank99", "participation_ratio", "trace"):
        row |= {f"{name}_pre": getattr(pre, name), f"{name}_post": getattr(post, name)}
    row |= {"near_zero_pre": pre.near_zero(), "near_zero_post": post.near_zero()}
    row |= {"median_pre": pre.median, "median_post": post.median}
    energy, share = _offset_energy(pre, post), _offset_share(pre, post)
    return {**row, "offset_energy": energy, "offset_share": share}


def _indices(layers: Iterable[LayerSpectrum]) -> str:
    return ranges(entry.layer for entry in layers)


def _refuse_other(
    model: ModelInfo, layers: tuple[int, ...], other: ModelInfo, wanted: tuple[int, ...]
) -> None:
    shapes = [(m.name, m.n_layers, m.n_heads, m.n_kv_heads, m.d_head) for m in (model, other)]
    if shapes[0] != shapes[1]:
        raise InputError(
            f"captures are of different models, {shapes[0]} and {shapes[1]} (name, layers, heads, "
            "KV heads, d_head); analyse each model by itself"
        )
    if layers != wanted:
        raise InputError(
            f"captures hold different layers, {ranges(layers)} and {ranges(wanted)}; name those "
            "that all of them hold with layers"
        )


def _notes(
    spectra: tuple[LayerSpectrum, ...], ropes: dict[int, LayerRope], differs: set[int]
) -> tuple[str, ...]:
    notes = []
    short = [entry for entry in spectra if not entry.pre.has_enough_tokens]
    if short:
        most = max(len(entry.pre.eigenvalues) for entry in short)
        notes.append(
            f"Layers {_indices(short)} have {short[0].pre.n_tokens} tokens "
            f"for up to {most} components, so the smallest eigenvalues are zero for lack of "
            "tokens: ranks, shares near zero and medians are left out. Give more than "
            f"{most} tokens."
        )
    unrotated = [layer for layer in sorted(ropes) if not ropes[layer].n_pairs]
    if unrotated:
        notes.append(f"Layers {ranges(unrotated)} have no RoPE: before and after are the same.")
    if differs:
        notes.append(
            f"Layers {ranges(sorted(differs))} rotate some prompts by other frequencies than "
            "others, so the spectrum after rotation is of a mixture."
        )
    return tuple(notes)
