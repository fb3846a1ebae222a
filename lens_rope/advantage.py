"""Why a head attends to a target: what each rotary pair adds to its score over the other keys.

With target weights `T[m, n]` that sum to 1 over the keys a query sees, and uniform weights `U` over
the same keys, `advantage_i = mean over queries of sum_n (T - U)[m, n] c_i[m, n]`, where `c_i` is
the contribution of pair `i`. Advantages are in score units and add up, over pairs and pass-through,
to the advantage of the whole score. The part under `T` is what lifts the target, minus the part
under `U` is what pushes the keys at large down. No contribution is ever formed: sums over keys
factor through the keys, `sum_n W[m, n] (q[m] . k[n]) = q[m] . (W k)[m]`, component by component.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from lens_rope.errors import InputError
from lens_rope.usage import exact_mean

if TYPE_CHECKING:
    from jaxtyping import Float

    from lens_rope.records import LayerCapture
    from lens_rope.spec import LayerRope
    from lens_rope.targets import Target


@dataclass(frozen=True, eq=False)
class Advantage:
    """What each pair adds to the score of a target over the mean of all visible keys.

    Attributes:
        n_queries: Number of queries behind the means.
        lift: `[pair_and_rest]` Mean contribution at the target, in score units; the last entry is
            the pass-through.
        push: `[pair_and_rest]` Minus the mean contribution over all visible keys, likewise.
    """

    n_queries: int
    lift: Float[np.ndarray, " pair_and_rest"]
    push: Float[np.ndarray, " pair_and_rest"]

    @property
    def pairs(self) -> Float[np.ndarray, " pair"]:
        """`[pair]` Advantage of each pair, in score units."""
        return (self.lift + self.push)[:-1]

    @property
    def pass_through(self) -> float:
        """Advantage of the components that are not rotated, in score units."""
        return float((self.lift + self.push)[-1])

    @property
    def total(self) -> float:
        """Advantage of the whole score, before soft-cap, in score units."""
        return float((self.lift + self.push).sum())

    def strongest(self, n: int) -> tuple[int, ...]:
        """The pairs with the largest advantages, the largest first; ties to the faster pair.

        Args:
            n: How many, at most.
        """
        order = np.argsort(-self.pairs, kind="stable")
        return tuple(int(pair) for pair in order[:n] if np.isfinite(self.pairs[pair]))


def advantage(record: LayerCapture, head: int, target: Target) -> Advantage:
    """The advantage of a target in one head; nan where no query has a target."""
    rows = torch.as_tensor(target.queries)
    k = record.k[:, record.kv_head(head)]
    at_target = torch.zeros(len(rows), k.shape[1], dtype=torch.float64)
    weight = torch.as_tensor(target.weight, dtype=torch.float64)[:, None]
    at_target.index_add_(0, torch.as_tensor(target.row), weight * k[torch.as_tensor(target.key)])
    return _advantage(record, head, rows, at_target, uniform_keys(record, head)[rows])


def attended_advantage(
    record: LayerCapture, head: int, pattern: Float[torch.Tensor, "q_pos k_pos"]
) -> Advantage:
    """The advantage of what the head attends to: its own pattern is the target.

    Rows are scaled to sum to 1 where a learned sink takes a part, and left out where it takes all.
    Queries that see one key only have no choice and are left out too.
    """
    k = record.k[:, record.kv_head(head)]
    total = pattern.double().sum(dim=1, keepdim=True)
    attended = (pattern.to(k.dtype) @ k).double() / total
    rows = torch.arange(1, record.n_pos)
    rows = rows[total[rows, 0] > 0]
    return _advantage(record, head, rows, attended[rows], uniform_keys(record, head)[rows])


def uniform_keys(record: LayerCapture, head: int) -> Float[torch.Tensor, "q_pos d_head"]:
    """`[q_pos, d_head]` Mean of the keys that each query sees, in float64, by running sums."""
    k = record.k[:, record.kv_head(head)].double()
    total = k.cumsum(dim=0)
    count = torch.arange(1, record.n_pos + 1, dtype=torch.float64)[:, None]
    window = record.rope.window
    if window is not None and window < record.n_pos:
        total = torch.cat([total[:window], total[window:] - total[:-window]])
        count = count.clamp(max=window)
    return total / count


def by_pair(
    components: Float[torch.Tensor, "... d_head"], rope: LayerRope
) -> Float[torch.Tensor, "... pair_and_rest"]:
    """`[..., pair_and_rest]` Sums of components over each pair; the last is of all not rotated."""
    first, second = (torch.as_tensor(c) for c in rope.components)
    rest = components[..., torch.as_tensor(rope.pass_components)].sum(dim=-1, keepdim=True)
    return torch.cat([components[..., first] + components[..., second], rest], dim=-1)


def merge_advantages(advantages: Iterable[Advantage]) -> Advantage:
    """Over several prompts: means weighted by queries, whatever the order.

    Raises:
        InputError: There is nothing to merge, or the numbers of pairs differ.
    """
    advantages = list(advantages)
    if len({len(entry.lift) for entry in advantages}) != 1:
        raise InputError("only advantages over the same pairs can be merged")
    known = [entry for entry in advantages if entry.n_queries]
    if not known:
        return advantages[0]
    weights = [entry.n_queries for entry in known]
    return Advantage(
        n_queries=sum(weights),
        lift=exact_mean([entry.lift for entry in known], weights),
        push=exact_mean([entry.push for entry in known], weights),
    )


def _advantage(
    record: LayerCapture,
    head: int,
    rows: torch.Tensor,
    at_target: Float[torch.Tensor, "row d_head"],
    uniform: Float[torch.Tensor, "row d_head"],
) -> Advantage:
    if not len(rows):
        nothing = np.full(record.rope.n_pairs + 1, np.nan)
        return Advantage(0, nothing, nothing)
    q = record.q[rows, head].double()
    lift, mean = (
        (record.scale * by_pair((q * keys).mean(dim=0), record.rope)).numpy()
        for keys in (at_target, uniform)
    )
    return Advantage(len(rows), lift, -mean)
