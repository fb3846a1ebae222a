"""How the score of one frozen query and key changes as their distance changes.

A query and a key keep their values before rotation, and only their distance `D = query - key`
moves. Pair `i` then contributes `scale * g² * Re(z_q conj(z_k) exp(1j * w_i * D))`, which is what
RoPE is (Su et al. 2021, arXiv 2104.09864) for a query and a key `D` tokens apart. At the distance
that they have in the prompt, the sum over pairs and pass-through is the model's own score.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from lens_rope.decomposition import HeadDecomposition, decompose
from lens_rope.errors import InputError
from lens_rope.rotation import phases, to_pairs

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go
    from jaxtyping import Float, Int

    from lens_rope.records import RotaryCapture
    from lens_rope.spec import LayerRope

MAX_ALL_DISTANCES = 8192
"""Up to this context every distance is computed; above it distances are spread evenly in log."""

_ALL_NEAR, _N_FAR = 256, 2000


def distance_curve(
    capture: RotaryCapture,
    layer: int,
    head: int,
    query: int,
    key: int,
    *,
    prompt: int = 0,
    distances: Sequence[int] | None = None,
) -> DistanceCurve:
    """The score of one query and key, had they been at other distances.

    The values before rotation are frozen, so this answers what the rotation alone does to this
    query and key. A key that the query does not see (one after the query, or beyond the sliding
    window) is allowed: its values are taken as they are, and the model never forms that score.

    Args:
        capture: A verified capture.
        layer: Index of the layer.
        head: Index of the query head.
        query: Position of the query.
        key: Position of the key.
        prompt: Index of the prompt.
        distances: Distances in tokens, 0 and up, also beyond the context. None gives every
            distance from 0 to the layer's effective context where that is at most 8192 tokens,
            else 0 to 256 and about 2000 more, spread evenly in the logarithm up to the context
            (pairs that turn fast are then sampled more coarsely than they turn). The distance in
            the prompt is among those, unless the key comes after the query.

    Returns:
        What each pair contributes at each distance, and the pass-through.

    Raises:
        InputError: The layer, head, prompt or a position is not in the capture, or a distance is
            negative or no integer, or there is none.
    """
    head_scores = decompose(capture, layer, head, prompt=prompt)
    record, rope = head_scores.record, head_scores.rope
    HeadDecomposition._checked("query", [query], record.n_pos)
    HeadDecomposition._checked("key", [key], record.n_pos)
    actual = query - key
    if distances is None:
        distance = _all_distances(rope.context, actual)
    else:
        distance = _checked_distances(distances)
    # The pair of the rotated values is already turned by the actual distance.
    z_q, rest_q = to_pairs(record.q[query, head].double(), rope)
    z_k, rest_k = to_pairs(record.k[key, head_scores.kv_head].double(), rope)
    product = record.scale * z_q * z_k.conj()
    frozen = product * phases(torch.tensor([actual]), rope)[0].conj()
    contribution = (phases(torch.from_numpy(distance), rope) * frozen).real
    tokens = head_scores.prompt.tokens
    return DistanceCurve(
        head=head,
        query=query,
        key=key,
        query_token=tokens[query],
        key_token=tokens[key],
        distance=distance,
        contribution=contribution.numpy(),
        pass_through=float(record.scale * (rest_q @ rest_k)),
        actual_contribution=product.real.numpy(),
        rope=rope,
    )


@dataclass(frozen=True, eq=False)
class DistanceCurve:
    """The score of one frozen query and key over their distance, pair by pair.

    Attributes:
        head: Index of the query head.
        query: Position of the query.
        key: Position of the key.
        query_token: The query's token.
        key_token: The key's token.
        distance: `[distance]` Distance `query - key` in tokens.
        contribution: `[distance, pair]` What each pair contributes, in score units before
            soft-cap.
        pass_through: What the components that are not rotated contribute at every distance, in
            score units.
        actual_contribution: `[pair]` What each pair contributes at the distance in the prompt, in
            score units.
        rope: The layer's rotation.
    """

    head: int
    query: int
    key: int
    query_token: str
    key_token: str
    distance: Int[np.ndarray, " distance"]
    contribution: Float[np.ndarray, "distance pair"]
    pass_through: float
    actual_contribution: Float[np.ndarray, " pair"]
    rope: LayerRope

    @property
    def actual(self) -> int:
        """Distance in the prompt, in tokens; negative where the key comes after the query."""
        return self.query - self.key

    @property
    def score(self) -> float:
        """Score at the distance in the prompt, before soft-cap: the model's own."""
        return float(self.actual_contribution.sum()) + self.pass_through

    @property
    def total(self) -> Float[np.ndarray, " distance"]:
        """`[distance]` Score at each distance, in score units."""
        return self.contribution.sum(axis=1) + self.pass_through

    @property
    def pair_range(self) -> Float[np.ndarray, " pair"]:
        """`[pair]` Largest minus smallest contribution over the distances, in score units."""
        return np.ptp(self.contribution, axis=0)

    def largest_pairs(self, n_pairs: int) -> list[int]:
        """The pairs whose contribution changes most over the distances, the largest range first.

        Args:
            n_pairs: How many, at most.
        """
        order = np.argsort(-self.pair_range, kind="stable")
        return [int(pair) for pair in order[:n_pairs]]

    def pair_table(self, n_pairs: int = 8) -> pd.DataFrame:
        """The pairs whose contribution changes most: its range, and what it is in the prompt.

        Columns: `pair`, `wavelength` (tokens), `cycles`, `lowest`, `highest` (over the distances),
        `in_prompt` (score units).

        Args:
            n_pairs: How many, at most.
        """
        import pandas as pd

        chosen = self.largest_pairs(n_pairs)
        return pd.DataFrame(
            {
                "pair": chosen,
                "wavelength": self.rope.wavelength[chosen],
                "cycles": self.rope.cycles[chosen],
                "lowest": self.contribution[:, chosen].min(axis=0),
                "highest": self.contribution[:, chosen].max(axis=0),
                "in_prompt": self.actual_contribution[chosen],
            }
        )

    def to_dataframe(self) -> pd.DataFrame:
        """One row per distance.

        Columns: `distance` (tokens), `total`, `pass_through`, and one for each pair, `pair_0` and
        up (score units).
        """
        import pandas as pd

        columns = [f"pair_{i}" for i in range(self.rope.n_pairs)]
        table = pd.DataFrame(self.contribution, columns=columns)
        table.insert(0, "pass_through", self.pass_through)
        table.insert(0, "total", self.total)
        table.insert(0, "distance", self.distance)
        return table

    def plot(self, pairs: Sequence[int] | None = None) -> go.Figure:
        """The total and some pairs over distance.

        Args:
            pairs: The pairs to draw; None takes those that change most.

        Raises:
            InputError: A pair is out of range.
        """
        from lens_rope.views.distance_figures import distance_curve_figure

        return distance_curve_figure(self, pairs=pairs)

    def _repr_html_(self) -> str:
        """For a notebook: how the total moves, the pairs that move it most, and the curves."""
        from lens_rope.views.head_descriptions import describe_curve
        from lens_rope.views.result_html import result_html

        return result_html(describe_curve(self), [self.plot()])

    def __repr__(self) -> str:
        """Where this is from, how the total moves, and the pairs that move it most."""
        total, table = self.total, self.pair_table()
        # The rows that the total reaches its extremes in, by distance.
        low, high = int(total.argmin()), int(total.argmax())
        lines = [
            f"query {self.query} ({self.query_token!r}) and key {self.key} ({self.key_token!r}) of "
            f"layer {self.rope.layer} head {self.head}, distance {self.actual} in the prompt: "
            f"score {self.score:.4f}",
            f"over distances {self.distance.min()} to {self.distance.max()}: from "
            f"{total[low]:.4f} at {self.distance[low]} to {total[high]:.4f} at "
            f"{self.distance[high]}, pass-through {self.pass_through:.4f}",
        ]
        if len(table):
            lines.append(table.to_string(index=False))
        return "\n".join(lines)


def _all_distances(context: int, actual: int) -> Int[np.ndarray, " distance"]:
    if context <= MAX_ALL_DISTANCES:
        distance = np.arange(context + 1)
    else:
        far = np.rint(np.geomspace(_ALL_NEAR, context, _N_FAR)).astype(np.int64)
        distance = np.concatenate([np.arange(_ALL_NEAR), far])
    return np.unique(np.append(distance, actual) if actual >= 0 else distance)


def _checked_distances(distances: Sequence[int]) -> Int[np.ndarray, " distance"]:
    wanted = list(distances)
    if not wanted:
        raise InputError("distances is empty; give at least one, or None for all of the context")
    for d in wanted:
        if int(d) != d or d < 0:
            raise InputError(f"distance {d} is no distance in tokens; give integers, 0 and up")
    return np.array([int(d) for d in wanted], dtype=np.int64)
