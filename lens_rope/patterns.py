"""What each head does, by name: sink, previous token, induction, ..., and the pairs behind it.

A head is named by where its attention goes, against a stated threshold and, for targets, the base
rate of uniform attention; nothing is named that does not clear them. What the head is named after
is also the target whose advantage is split over pairs (see `advantage`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np

from lens_rope.advantage import Advantage, merge_advantages
from lens_rope.bounds import Band, band
from lens_rope.errors import InputError
from lens_rope.sinks import MIN_TOKENS, SINK_THRESHOLD
from lens_rope.targets import (
    Target,
    local_target,
    previous_target,
    repeat_targets,
)
from lens_rope.usage import exact_mean

if TYPE_CHECKING:
    from jaxtyping import Float

    from lens_rope.attention import LayerAttention
    from lens_rope.offset_shares import OffsetShares
    from lens_rope.records import LayerCapture
    from lens_rope.sinks import HeadShares
    from lens_rope.spec import LayerRope

Pattern = Literal[
    "first occurrence", "induction", "duplicate token", "previous token", "sink", "local",
    "uniform", "content", "mixed",
]  # fmt: skip
PATTERNS: tuple[Pattern, ...] = get_args(Pattern)
"""Names of head patterns, from the most specific to the most general: the first that holds names
the head, the others are listed beside it."""

MASS_THRESHOLD = 0.5
"""A head is named after a target that gets more than this share of the attention of its queries."""

BASE_FACTOR = 2.0
"""And at least this many times what uniform attention would give it."""

UNIFORM_THRESHOLD = 0.95
"""A head is uniform from this normalised entropy on."""

CONTENT_THRESHOLD = 0.5
"""A content head has at least this share of its score variance outside of offset·offset, and at
least this token consistency: its scores depend on which tokens the keys hold."""


@dataclass(frozen=True, eq=False)
class TargetShare:
    """What the heads of one layer give to one target.

    Attributes:
        name: Name of the target.
        n_queries: Number of queries that have such a target.
        mass: `[head]` Mean attention of these queries to the target's keys.
        uniform_mass: The same under uniform attention, the base rate.
        advantages: `[head]` Advantage of the target, by pair.
    """

    name: str
    n_queries: int
    mass: Float[np.ndarray, " head"]
    uniform_mass: float
    advantages: tuple[Advantage, ...]


@dataclass(frozen=True, eq=False)
class LayerPatterns:
    """Where the attention of one layer goes.

    Attributes:
        layer: Index of the layer.
        n_tokens: Number of tokens behind the numbers.
        entropy: `[head]` Mean normalised entropy of attention, in [0, 1].
        targets: What each target gets, by name.
        attended: `[head]` Advantage of what the head attends to, by pair.
        n_prompts: Number of prompts behind the numbers.
    """

    layer: int
    n_tokens: int
    entropy: Float[np.ndarray, " head"]
    targets: Mapping[str, TargetShare]
    attended: tuple[Advantage, ...]
    n_prompts: int = 1

    @property
    def n_queries(self) -> int:
        """Number of queries that see more than one key: all but the first of each prompt."""
        return self.n_tokens - self.n_prompts


def pattern_targets(token_ids: Sequence[int], rope: LayerRope) -> tuple[Target, ...]:
    """The targets that name heads, for one prompt in one layer."""
    return (
        previous_target(len(token_ids), rope.window),
        local_target(len(token_ids), rope.window),
        *repeat_targets(token_ids, rope.window),
    )


def layer_patterns(
    record: LayerCapture, attention: LayerAttention, targets: Sequence[Target]
) -> LayerPatterns:
    """Where the attention of one layer goes on one prompt.

    Args:
        record: Queries and keys of the layer.
        attention: What `read_attention` says of the record and the targets.
        targets: The targets.
    """
    return LayerPatterns(
        layer=attention.layer,
        n_tokens=attention.n_pos,
        entropy=attention.entropy,
        targets={
            target.name: TargetShare(
                name=target.name,
                n_queries=len(target.queries),
                mass=attention.mass[target.name],
                uniform_mass=target.uniform_mass(record.rope.window),
                advantages=attention.advantages[target.name],
            )
            for target in targets
        },
        attended=attention.attended,
    )


def merge_patterns(patterns: Iterable[LayerPatterns]) -> LayerPatterns:
    """Over several prompts: means weighted by queries, whatever the order.

    Raises:
        InputError: There is nothing to merge, or the layers or numbers of heads differ.
    """
    patterns = list(patterns)
    if len({(entry.layer, len(entry.entropy)) for entry in patterns}) != 1:
        raise InputError("only patterns of one layer with the same heads can be merged")
    defined = [entry for entry in patterns if entry.n_queries] or patterns[:1]
    weights = [max(entry.n_queries, 1) for entry in defined]
    return LayerPatterns(
        layer=patterns[0].layer,
        n_tokens=sum(entry.n_tokens for entry in patterns),
        entropy=exact_mean([entry.entropy for entry in defined], weights),
        targets={
            name: merge_targets([entry.targets[name] for entry in patterns])
            for name in patterns[0].targets
        },
        attended=_merge_heads([entry.attended for entry in patterns]),
        n_prompts=sum(entry.n_prompts for entry in patterns),
    )


def merge_targets(shares: Sequence[TargetShare]) -> TargetShare:
    """One target over several prompts: means weighted by queries, whatever the order."""
    known = [share for share in shares if share.n_queries]
    if not known:
        return shares[0]
    weights = [share.n_queries for share in known]
    base = exact_mean([np.array([share.uniform_mass]) for share in known], weights)
    return TargetShare(
        name=known[0].name,
        n_queries=sum(weights),
        mass=exact_mean([share.mass for share in known], weights),
        uniform_mass=float(base[0]),
        advantages=_merge_heads([share.advantages for share in known]),
    )


def _merge_heads(advantages: list[tuple[Advantage, ...]]) -> tuple[Advantage, ...]:
    return tuple(merge_advantages(heads) for heads in zip(*advantages, strict=True))


@dataclass(frozen=True, eq=False)
class HeadPattern:
    """What one head does.

    Attributes:
        layer: Index of the layer.
        head: Index of the query head.
        rope: The layer's rotation.
        pattern: Its name, `mixed` where nothing clears its threshold, None where the prompts are
            too short to tell.
        also: Other names that hold, more general ones.
        strength: What the name rests on: sink share, attention mass of the target, normalised
            entropy (uniform) or token consistency (content); the largest mass of a target for
            `mixed` and None.
        base_rate: The same under uniform attention; nan for all but sinks and targets.
        masses: Attention mass of every target, by name.
        base_rates: The same under uniform attention.
        sink_share: Sink share of the strongest key.
        sink_position: Its position.
        previous_share: Mean attention to the token before.
        entropy: Mean normalised entropy of attention, in [0, 1].
        offset_shares: `[part]` Shares of offset·offset, offset·content, content·offset and
            content·content (query first) in the variance of the scores; they sum to 1.
        token_consistency: Correlation of the scores that a query gives to two keys with the same
            token; nan with too few repeats.
        target: What the advantage is of: the target that names the head, else `attended`; `target`
            where a target was given.
        advantage: Advantage of that target, by pair, in score units.
    """

    layer: int
    head: int
    rope: LayerRope
    pattern: Pattern | None
    also: tuple[Pattern, ...]
    strength: float
    base_rate: float
    masses: Mapping[str, float]
    base_rates: Mapping[str, float]
    sink_share: float
    sink_position: int
    previous_share: float
    entropy: float
    offset_shares: Float[np.ndarray, " part"]
    token_consistency: float
    target: str
    advantage: Advantage

    @property
    def band(self) -> Band | None:
        """In which band the pair with the largest advantage lies; None without pairs."""
        best = self.advantage.strongest(1)
        return band(float(self.rope.cycles[best[0]])) if best else None


def judge_layer(
    rope: LayerRope,
    patterns: LayerPatterns,
    shares: HeadShares,
    offset_shares: OffsetShares,
    sink_advantages: Mapping[int, Advantage],
    *,
    repeated: LayerPatterns | None = None,
    is_long: bool = True,
    wanted: TargetShare | None = None,
) -> tuple[HeadPattern, ...]:
    """Names the heads of one layer.

    Args:
        rope: The layer's rotation.
        patterns: Where its attention goes.
        shares: Its sink and previous-token shares.
        offset_shares: Its offset shares.
        sink_advantages: Advantage of the sink, of the heads that have one.
        repeated: The same on a prompt of repeated random tokens; what needs a token to come back
            is then taken from there.
        is_long: Whether the prompts are long enough to name anything.
        wanted: A user's target; its advantage is then shown instead.
    """
    repeats = ("induction", "duplicate token", "first occurrence")
    targets = dict(patterns.targets)
    if repeated is not None:
        targets.update({name: repeated.targets[name] for name in repeats})
    heads = []
    for head in range(len(patterns.entropy)):
        masses = {name: float(share.mass[head]) for name, share in targets.items()}
        bases = {name: share.uniform_mass for name, share in targets.items()}
        sink_share = float(shares.sink_share[head])
        of_offsets = offset_shares.shares[head]
        consistency = float(offset_shares.token_consistency[head])
        entropy = float(patterns.entropy[head])
        holds = {
            **{name: _is_named(masses[name], bases[name]) for name in targets},
            "sink": sink_share > SINK_THRESHOLD and head in sink_advantages,
            "uniform": entropy >= UNIFORM_THRESHOLD,
            "content": consistency >= CONTENT_THRESHOLD and 1 - of_offsets[0] >= CONTENT_THRESHOLD,
        }
        names: list[Pattern] = [name for name in PATTERNS if holds.get(name)] if is_long else []
        pattern: Pattern | None = (names[0] if names else "mixed") if is_long else None
        strengths = {**masses, "sink": sink_share, "uniform": entropy, "content": consistency}
        largest = max((m for m in masses.values() if np.isfinite(m)), default=np.nan)
        rates = {**bases, "sink": shares.uniform_share}
        if wanted is not None:
            target, gained = wanted.name, wanted.advantages[head]
        elif pattern == "sink":
            target, gained = "sink", sink_advantages[head]
        elif pattern in targets:
            target, gained = str(pattern), targets[str(pattern)].advantages[head]
        else:
            target, gained = "attended", patterns.attended[head]
        heads.append(
            HeadPattern(
                layer=patterns.layer,
                head=head,
                rope=rope,
                pattern=pattern,
                also=tuple(names[1:]),
                strength=strengths.get(str(pattern), largest),
                base_rate=rates.get(str(pattern), np.nan),
                masses=masses
                if wanted is None
                else {**masses, wanted.name: float(wanted.mass[head])},
                base_rates=bases if wanted is None else {**bases, wanted.name: wanted.uniform_mass},
                sink_share=sink_share,
                sink_position=int(shares.sink_position[head]),
                previous_share=float(shares.previous_share[head]),
                entropy=entropy,
                offset_shares=of_offsets,
                token_consistency=consistency,
                target=target,
                advantage=gained,
            )
        )
    return tuple(heads)


def is_long_enough(n_tokens: Iterable[int]) -> bool:
    """Whether prompts of these lengths can tell patterns: each has at least 64 tokens."""
    return min(n_tokens) >= MIN_TOKENS


def _is_named(mass: float, base: float) -> bool:
    # nan, where no query has such a target, is never named.
    return bool(mass > MASS_THRESHOLD and mass >= BASE_FACTOR * base)
