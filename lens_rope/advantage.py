"""Why a head attends to a target: what each rotary pair adds to its score over the other keys.

With target weights `T[m, n]` that sum to 1 over the keys a query sees, and uniform weights `U` over
the same keys, `advantage_i = mean over queries of sum_n (T - U)[m, n] c_i[m, n]`, where `c_i` is
the contribution of pair `i`. Advantages are in score units and add up, over pairs and pass-through,
to the advantage of the whole score. The part under `T` is what lifts the target, minus the part
under `U` is what pushes the keys at large down. No contribution is ever formed: sums over keys
factor through the keys, `sum_n W[m, n] (q[m] . k[n]) = q[m] . (W k)[m]`, component by component.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from lens_rope.errors import InputError
from lens_rope.usage import exact_mean

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

    from lens_rope.records import LayerCapture
    from lens_rope.spec import LayerRope
    from lens_rope.targets import Target

_CHUNK = 2**22
"""Key heads are taken together as long as their queries, keys and targets have fewer values."""

_PRODUCTS = 2**16
"""Products of queries and the keys of one target that are formed at a time: with those of a few
targets they fit the cache. Whatever the number of targets, so that sums are in the same order."""

_SLOTS = 8192
"""How many entries of a user's weights are added up at a time."""


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


@dataclass(frozen=True, eq=False)
class Attended:
    """What the heads of one layer attend to, as sums over queries.

    Queries that see one key only have no choice and are left out, and so are those whose attention
    a learned sink takes whole.

    Attributes:
        lift: `[head, d_head]` Sum over queries of query times attended key (rows scaled to sum to
            1), component by component, in score units.
        kept: `[head, q_pos]` Which queries are not left out.
    """

    lift: Float[torch.Tensor, "head d_head"]
    kept: Bool[torch.Tensor, "head q_pos"]


def advantage(record: LayerCapture, head: int, target: Target) -> Advantage:
    """The advantage of a target in one head; nan where no query has a target."""
    kv_head = record.kv_head(head)
    q, k = record.q[:, head : head + 1], record.k[:, kv_head : kv_head + 1]
    return _advantages(q, k, record.rope, record.scale, (target,), None)[0][0]


def layer_advantages(record: LayerCapture, target: Target) -> tuple[Advantage, ...]:
    """`[head]` The advantage of a target in every head; nan where no query has a target."""
    return target_advantages(record, (target,))[0]


def target_advantages(
    record: LayerCapture, targets: Sequence[Target], attended: Attended | None = None
) -> tuple[tuple[Advantage, ...], ...]:
    """Advantages of several targets in every head, for little more than those of one.

    Args:
        record: Queries and keys of the layer.
        targets: The targets.
        attended: What the heads attend to, where that is wanted too.

    Returns:
        By target, `[head]` advantages; those of what is attended come last.
    """
    return _advantages(record.q, record.k, record.rope, record.scale, targets, attended)


def first_key_advantages(
    record: LayerCapture, attended: Sequence[Advantage]
) -> tuple[Advantage, ...] | None:
    """`[head]` The advantage of key 0, from those of what the heads attend to.

    Where both are over all queries but the first, so is the mean over all visible keys.

    Args:
        record: Queries and keys of the layer.
        attended: `[head]` What `target_advantages` says of what the heads attend to.

    Returns:
        As `layer_advantages`; None where some query does not see the key, or is left out.
    """
    n = record.n_pos - 1
    window = record.rope.window
    if n < 1 or (window is not None and window <= n) or any(own.n_queries != n for own in attended):
        return None
    key = record.k[0].double().repeat_interleave(record.n_heads // record.n_kv_heads, dim=0)
    lift = record.scale * record.q[1:].sum(dim=0, dtype=torch.float64) * key
    by_head = by_pair(lift, record.rope).numpy() / n
    return tuple(Advantage(n, lift, own.push) for lift, own in zip(by_head, attended, strict=True))


def _advantages(
    q: Float[torch.Tensor, "pos head d_head"],
    k: Float[torch.Tensor, "pos kv_head d_head"],
    rope: LayerRope,
    scale: float,
    targets: Sequence[Target],
    attended: Attended | None,
) -> tuple[tuple[Advantage, ...], ...]:
    """By target, `[head]` advantages; those of what is attended come last."""
    n_pos, n_heads, d_head = q.shape
    n_kv = k.shape[1]
    groups = n_heads // n_kv
    rows = torch.zeros(len(targets), n_pos, dtype=torch.float64, device=q.device)
    for index, target in enumerate(targets):
        rows[index, torch.as_tensor(target.queries)] = 1.0
    # The rows over which the mean key is taken: of each target, and of what each head attends to,
    # which as a rule is the same for all heads.
    kept = rows[:0] if attended is None else _distinct(attended.kept).double()
    rows = torch.cat([rows, kept])
    lift = torch.zeros(len(targets), n_kv, groups, d_head, dtype=torch.float64)
    mean = lift.new_zeros(len(rows), n_kv, groups, d_head)
    stretches = _Stretches(targets, n_pos, rope.window)
    step = max(1, _CHUNK // (n_pos * d_head * (groups + 4)))
    for start in range(0, n_kv, step):
        kv = slice(start, start + step)
        keys = k[:, kv].double()
        queries = q.unflatten(1, (n_kv, groups))[:, kv]
        means = stretches.means(keys)
        # With the uniform weights last, the products of all targets in one go.
        size = min(n_pos, max(1, _PRODUCTS // queries[0].numel()))
        buffer = lift.new_empty(size, stretches.n, *queries.shape[1:])
        for first in range(0, n_pos, size):
            at = slice(first, min(first + size, n_pos))
            of_queries = queries[at, None].double()
            products = torch.mul(
                of_queries, means(at)[:, :, :, None], out=buffer[: len(of_queries)]
            )
            lift[:, kv] += products.sum(dim=0)[:-1]
            mean[:, kv] += (rows[:, at] @ products[:, -1].flatten(1)).view(-1, *queries.shape[1:])
    counts = [torch.full((n_heads,), len(target.queries)) for target in targets]
    lift, mean = scale * lift.flatten(1, 2), scale * mean.flatten(1, 2)
    if attended is not None:
        which = (attended.kept[:, None] == kept[None].bool()).all(dim=-1).int().argmax(dim=-1)
        own = mean[len(targets) :][which, torch.arange(n_heads)]
        lift, mean = (
            torch.cat([lift, attended.lift[None]]),
            torch.cat([mean[: len(targets)], own[None]]),
        )
        counts.append(attended.kept.sum(dim=1))
    lift, mean = (by_pair(x, rope).numpy() for x in (lift, mean))
    return tuple(
        tuple(
            _mean_advantage(int(n), lift[index, head], mean[index, head])
            for head, n in enumerate(n_queries.tolist())
        )
        for index, n_queries in enumerate(counts)
    )


def _distinct(kept: Bool[torch.Tensor, "head q_pos"]) -> Bool[torch.Tensor, "row q_pos"]:
    """The different rows of an array that, as a rule, has one."""
    return kept[:1] if bool((kept == kept[:1]).all()) else kept.unique(dim=0)


class _Stretches:
    """The keys of each query's targets, and all that it sees, as stretches of lists of keys.

    The mean over a stretch is a difference of two running sums.
    """

    def __init__(self, targets: Sequence[Target], n_pos: int, window: int | None) -> None:
        self.targets, self.n = targets, len(targets) + 1
        self.lists: list[slice | torch.Tensor] = [slice(0, n_pos)]
        first = np.zeros((n_pos, self.n), dtype=np.int64)
        last, share = first.copy(), np.zeros(first.shape)
        begins: dict[int, int] = {}
        n_sums = n_pos + 1
        for index, target in enumerate(targets):
            if target.weights is not None or not len(target.queries):
                continue
            name = id(target.keys)  # targets can share a list
            if name not in begins:
                listed = _index(target.keys)
                if isinstance(listed, slice):
                    begins[name] = listed.start
                else:
                    begins[name] = n_sums
                    n_sums += len(target.keys) + 1
                    self.lists.append(listed)
            first[target.queries, index] = target.start + begins[name]
            last[target.queries, index] = target.stop + begins[name]
            share[target.queries, index] = 1 / target.count
        last[:, -1] = np.arange(1, n_pos + 1)
        first[:, -1] = 0 if window is None else np.maximum(last[:, -1] - window, 0)
        share[:, -1] = 1 / (last[:, -1] - first[:, -1])
        self.n_sums = n_sums
        self.first, self.last, self.share = map(torch.as_tensor, (first, last, share))

    def means(
        self, keys: Float[torch.Tensor, "pos kv_head d_head"]
    ) -> Callable[[slice], Float[torch.Tensor, "row target_and_one kv_head d_head"]]:
        """By query, the mean key of each target, 0 where it has none, and last of all it sees."""
        sums = keys.new_zeros(self.n_sums, keys[0].numel())
        begin = 0
        for listed in self.lists:
            of_list = keys[listed].flatten(1)
            torch.cumsum(of_list, dim=0, out=sums[begin + 1 : begin + 1 + len(of_list)])
            begin += len(of_list) + 1
        weighted = {
            index: torch.zeros_like(keys).index_copy_(
                0, torch.as_tensor(target.queries), _weighted_means(keys, target)
            )
            for index, target in enumerate(self.targets)
            if target.weights is not None
        }

        def of(rows: slice) -> Float[torch.Tensor, "row target_and_one kv_head d_head"]:
            out = sums.index_select(0, self.last[rows].flatten())
            out -= sums.index_select(0, self.first[rows].flatten())
            out *= self.share[rows].flatten()[:, None]
            out = out.view(-1, self.n, *keys.shape[1:])
            for index, means in weighted.items():
                out[:, index] = means[rows]
            return out

        return of


def _mean_advantage(
    n_queries: int,
    lift: Float[np.ndarray, " pair_and_rest"],
    mean: Float[np.ndarray, " pair_and_rest"],
) -> Advantage:
    """The advantage from sums over queries of what is at the target and of what is at all keys."""
    if not n_queries:
        nothing = np.full(len(lift), np.nan)
        return Advantage(0, nothing, nothing)
    return Advantage(n_queries, lift / n_queries, -mean / n_queries)


def _weighted_means(
    keys: Float[torch.Tensor, "pos kv_head d_head"], target: Target
) -> Float[torch.Tensor, "row kv_head d_head"]:
    """Mean of each query's target keys under a user's weights, by running sums over the list.

    Args:
        keys: The keys.
        target: A target with weights.
    """
    # The stretches of a user's weights follow one another and can hold half of all entries.
    out = keys.new_empty(len(target.queries), *keys.shape[1:])
    weights = torch.as_tensor(target.weights)[:, None, None]
    first = 0
    while first < len(out):
        begin = int(target.start[first])
        last = max(first + 1, int(np.searchsorted(target.stop, begin + _SLOTS, side="right")))
        slots = slice(begin, int(target.stop[last - 1]))
        part = _running(weights[slots] * keys[_index(target.keys[slots])])
        of = slice(first, last)
        out[of] = part[target.stop[of] - begin] - part[target.start[of] - begin]
        first = last
    return out


def _index(positions: Int[np.ndarray, " n"]) -> slice | torch.Tensor:
    """A slice where positions follow one another, which copies nothing; else the positions."""
    if len(positions) and (np.diff(positions) == 1).all():
        return slice(int(positions[0]), int(positions[-1]) + 1)
    return torch.as_tensor(positions)


def _running(x: Float[torch.Tensor, "slot ..."]) -> Float[torch.Tensor, "slot_and_one ..."]:
    """Running sums, from that of nothing to that of all."""
    out = x.new_zeros(len(x) + 1, *x.shape[1:])
    torch.cumsum(x, dim=0, out=out[1:])
    return out


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
