"""One head's attention scores, frequency by frequency.

The contribution of pair `i` to the score of query `m` and key `n` is
`scale * Re(zR_q[m] conj(zR_k[n]))`, with `zR` the rotated pair as a complex number. Contributions
over all pairs plus the pass-through (components that are not rotated) sum to the model's own score
before soft-cap and mask. Reductions never form a `[pair, query, key]` array: means over keys or
distances factor through sums of keys, or are cross-correlations (one FFT per pair).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch

from lens_rope.errors import InputError
from lens_rope.records import LayerCapture, Prompt, RotaryCapture
from lens_rope.results import DistanceProfile, PairSummary, ScoreBreakdown
from lens_rope.rotation import to_pairs
from lens_rope.spec import LayerRope

if TYPE_CHECKING:
    import plotly.graph_objects as go
    from jaxtyping import Complex, Float


def decompose(
    capture: RotaryCapture, layer: int, head: int, *, prompt: int = 0
) -> HeadDecomposition:
    """Splits the scores of one head into what each rotary pair contributes.

    Args:
        capture: A verified capture.
        layer: Index of the layer.
        head: Index of the query head.
        prompt: Index of the prompt.

    Returns:
        The head's scores by pair, at one query and key, over all of them, or by distance.

    Raises:
        InputError: The layer, head or prompt is not in the capture.
    """
    record = capture.layer(layer, prompt=prompt)
    if not 0 <= head < record.n_heads:
        raise InputError(
            f"head {head} is out of range; layer {layer} has {record.n_heads} heads, "
            "numbered from 0"
        )
    return HeadDecomposition(record, head, capture.prompts[prompt])


@dataclass(frozen=True, eq=False)
class HeadDecomposition:
    """The scores of one head on one prompt, split over rotary pairs.

    Attributes:
        record: Rotated queries and keys of the layer.
        head: Index of the query head.
        prompt: The prompt.
    """

    record: LayerCapture
    head: int
    prompt: Prompt

    @property
    def layer(self) -> int:
        """Index of the layer."""
        return self.record.rope.layer

    @property
    def kv_head(self) -> int:
        """Index of the key head that this head reads."""
        return self.record.kv_head(self.head)

    @property
    def rope(self) -> LayerRope:
        """The layer's rotation."""
        return self.record.rope

    @property
    def residual(self) -> float:
        """Largest difference from the model's own scores when this was captured, in score units."""
        return self.record.check.head_residual[self.head]

    def contributions(
        self,
        pairs: Sequence[int] | None = None,
        *,
        queries: Sequence[int] | None = None,
        keys: Sequence[int] | None = None,
    ) -> Float[np.ndarray, "pair q_pos k_pos"]:
        """`[pair, q_pos, k_pos]` Contributions in score units, nan where the key is not visible.

        Args:
            pairs: Which pairs; None gives all.
            queries: Which query positions; None gives all.
            keys: Which key positions; None gives all.

        Raises:
            InputError: A pair or position is out of range.
        """
        pairs = self._checked("pair", pairs, self.rope.n_pairs)
        queries = self._checked("query", queries, self.record.n_pos)
        keys = self._checked("key", keys, self.record.n_pos)
        (z_q, _), (z_k, _) = self._split
        product = z_q[queries][:, None, pairs] * z_k[keys][None, :, pairs].conj()
        contribution = (self.record.scale * product.real).permute(2, 0, 1)
        visible = self.record.visible[queries][:, keys]
        return contribution.masked_fill(~visible, torch.nan).numpy()

    def pass_through(self) -> Float[np.ndarray, "q_pos k_pos"]:
        """`[q_pos, k_pos]` What unrotated components contribute; nan where not visible.

        In score units.
        """
        (_, rest_q), (_, rest_k) = self._split
        product = self.record.scale * (rest_q @ rest_k.T)
        return product.masked_fill(~self.record.visible, torch.nan).numpy()

    def scores(self) -> Float[np.ndarray, "q_pos k_pos"]:
        """`[q_pos, k_pos]` Scores before soft-cap, in score units; nan where not visible."""
        return self._scores.masked_fill(~self.record.visible, torch.nan).numpy()

    def pattern(self) -> Float[np.ndarray, "q_pos k_pos"]:
        """`[q_pos, k_pos]` Attention; rows sum to less than 1 where there is a learned sink."""
        return self.record.pattern(self.head).numpy()

    def at(self, query: int, key: int) -> ScoreBreakdown:
        """Every pair's contribution to the score of one query and one key.

        Args:
            query: Position of the query.
            key: Position of the key.

        Raises:
            InputError: A position is out of range, or the query does not see the key.
        """
        self._checked("query", [query], self.record.n_pos)
        self._checked("key", [key], self.record.n_pos)
        if not self.record.visible[query, key]:
            window = self.rope.window
            seen = "keys up to its own position" if window is None else f"the last {window} keys"
            raise InputError(f"query {query} does not see key {key}; a query sees {seen}")
        contribution = self.contributions(queries=[query], keys=[key])[:, 0, 0]
        (_, rest_q), (_, rest_k) = self._split
        rest = float(self.record.scale * (rest_q[query] @ rest_k[key]))
        return ScoreBreakdown(
            query=query,
            key=key,
            query_token=self.prompt.tokens[query],
            key_token=self.prompt.tokens[key],
            score=float(contribution.sum(dtype=np.float64)) + rest,
            contribution=contribution,
            pass_through=rest,
            rope=self.rope,
        )

    def by_pair(self) -> PairSummary:
        """What each pair contributes over all visible queries and keys."""
        (z_q, rest_q), (z_k, rest_k) = self._split
        visible = self.record.visible.double()
        scale, count = self.record.scale, visible.sum()
        scores = self._scores.double()
        deviation = visible * (
            scores - (visible * scores).sum(1, keepdim=True) / visible.sum(1, keepdim=True)
        )
        variance = float((deviation * scores).sum())

        def summed(x: torch.Tensor, weights: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            """`[component]` sum over queries and keys of `weights * x[query] * y[key]`."""
            return (x * (weights @ y)).sum(0)

        def both(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            """Sums of `x[query] * y[key]` over what is visible, and with the deviation."""
            return summed(x, visible, y), summed(x, deviation, y)

        (a_q, b_q), (a_k, b_k) = ((z.real.double(), z.imag.double()) for z in (z_q, z_k))
        mean_a, share_a = both(a_q, a_k)
        mean_b, share_b = both(b_q, b_k)
        # (aa' + bb')² over queries and keys, term by term.
        square = (
            summed(a_q**2, visible, a_k**2)
            + 2 * summed(a_q * b_q, visible, a_k * b_k)
            + summed(b_q**2, visible, b_k**2)
        )
        rest = scale * (rest_q.double() @ rest_k.double().T)
        nan = np.full(self.rope.n_pairs, np.nan)
        # A row of one key, or rows of equal scores, have no variance to share out.
        has_variance = variance > 1e-12 * float((visible * scores**2).sum())
        return PairSummary(
            mean=(scale * (mean_a + mean_b) / count).numpy(),
            rms=(scale * (square / count).clamp_min(0).sqrt()).numpy(),
            share=(scale * (share_a + share_b) / variance).numpy() if has_variance else nan,
            pass_through_mean=float((visible * rest).sum() / count),
            pass_through_rms=float(((visible * rest**2).sum() / count).sqrt()),
            pass_through_share=(
                float((deviation * rest).sum() / variance) if has_variance else np.nan
            ),
            rope=self.rope,
        )

    def by_distance(self) -> DistanceProfile:
        """The mean contribution of each pair at each distance, by FFT."""
        (z_q, rest_q), (z_k, rest_k) = self._split
        n_pos = self.record.n_pos
        reach = n_pos if self.rope.window is None else min(n_pos, self.rope.window)
        count = n_pos - np.arange(reach)
        mean = self.record.scale * np.real(_correlation(z_q, z_k)[:reach]) / count[:, None]
        rest = np.real(_correlation(rest_q, rest_k)[:reach]).sum(axis=1)
        return DistanceProfile(
            distance=np.arange(reach),
            count=count,
            mean=mean,
            pass_through=self.record.scale * rest / count,
            rope=self.rope,
        )

    @cached_property
    def _split(self) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
        """Pairs and pass-through of this head's queries and of its keys."""
        q, k = self.record.q[:, self.head], self.record.k[:, self.kv_head]
        return to_pairs(q, self.rope), to_pairs(k, self.rope)

    @cached_property
    def _scores(self) -> Float[torch.Tensor, "q_pos k_pos"]:
        return self.record.scores(self.head)

    @staticmethod
    def _checked(what: str, wanted: Sequence[int] | None, n: int) -> list[int]:
        if wanted is None:
            return list(range(n))
        wanted = [int(i) for i in wanted]
        for i in wanted:
            if not 0 <= i < n:
                raise InputError(f"{what} {i} is out of range; there are {n}, numbered from 0")
        return wanted

    def plot(self) -> go.Figure:
        """Share of the score variance that each pair carries, see `by_pair`.

        `by_distance().plot()` draws the mean score over distance, `at(query, key).plot()` one
        score.
        """
        return self.by_pair().plot()

    def _repr_html_(self) -> str:
        """For a notebook: where this is from, the strongest pairs, and curves by distance."""
        from lens_rope.views.head_descriptions import describe_decomposition
        from lens_rope.views.head_figures import distance_curves
        from lens_rope.views.result_html import result_html

        summary = self.by_pair()
        curves = distance_curves(self.by_distance(), summary, self.rope)
        return result_html(describe_decomposition(self, summary), [summary.plot(), curves])

    def __repr__(self) -> str:
        """Where this is from."""
        return (
            f"HeadDecomposition of layer {self.layer} head {self.head} (KV head {self.kv_head}) "
            f"on {self.prompt.name}: {self.record.n_pos} tokens, {self.rope.n_pairs} pairs"
        )


def _correlation(
    x: Complex[torch.Tensor, "pos component"], y: Complex[torch.Tensor, "pos component"]
) -> Complex[np.ndarray, "distance component"]:
    """`[distance, component]` sum over `m` of `x[m] conj(y[m - distance])`, distances 0 and up."""
    n_pos = len(x)
    # Twice the length, so that the end does not wrap around to the start.
    spectra = (np.fft.fft(side.numpy().astype(np.complex128), 2 * n_pos, axis=0) for side in (x, y))
    f_x, f_y = spectra
    return np.fft.ifft(f_x * f_y.conj(), axis=0)[:n_pos]
