"""What the numbers of a report say, in plain words. Every number in a sentence is computed here."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from lens_rope.reporting.data import PREVIOUS_THRESHOLD
from lens_rope.sinks import MIN_TOKENS
from lens_rope.spec import ranges
from lens_rope.words import number, percent

if TYPE_CHECKING:
    from lens_rope.reporting.data import ReportData

SINGLE_THRESHOLD = 0.3
"""A pair is said to carry a head from this share of its score variance on."""

_ROUTES = {
    "hook_rot": "read at the model's own hook_rot_q and hook_rot_k",
    "hook_cos": "read at hook_q and hook_k and rotated with the model's own cos and sin tables",
    "hook_cos_pattern": "read at hook_q and hook_k, rotated with the model's own cos and sin "
    "tables and, as the host shows the attention pattern only, compared up to a constant per query",
}


def findings(data: ReportData) -> tuple[str, ...]:
    """The sentences of the first screen, most basic first; none where there is nothing to say.

    Args:
        data: The numbers of the report (its own `findings` and `notes` are not looked at).
    """
    attention = (
        (_too_short(data),) if data.is_too_short_for_sinks else (_sinks(data), _previous(data))
    )
    sentences = (_verified(data), _partial_cycles(data), _outlier(data), *attention,
                 _single_pair(data))  # fmt: skip
    return tuple(sentence for sentence in sentences if sentence)


def notes(data: ReportData) -> tuple[str, ...]:
    """What a reader has to know about the data before reading numbers off it."""
    out = []
    cut = [prompt for prompt in data.prompts if prompt.cut_from is not None]
    if len(cut) == 1:
        out.append(
            f"{_capital(cut[0].name)} was cut: the first {cut[0].n_tokens} of {cut[0].cut_from} "
            "tokens were read."
        )
    elif cut:
        out.append(
            f"{len(cut)} of {len(data.prompts)} prompts were cut to {cut[0].n_tokens} tokens; "
            f"together they had {sum(prompt.cut_from or 0 for prompt in cut):,}."
        )
    if data.context is not None:
        out.append(
            f"Cycles are counted over a context of {data.context:,} tokens, which was asked for in "
            "place of the model's own."
        )
    if not data.same_rope:
        out.append(
            "The rotation depends on the length of the prompt and differs between prompts; "
            "frequencies are those of the first prompt, and usage is added up by pair index."
        )
    read = [rope.layer for rope in data.rope.layers]
    if len(read) < data.model.n_layers:
        out.append(f"Only layers {ranges(read)} of {data.model.n_layers} were read.")
    if data.tolerance > 1e-4:
        out.append(
            f"The model computes in {data.model.dtype}, so scores are verified to "
            f"{data.tolerance:.0e} only."
        )
    return tuple(out)


def _verified(data: ReportData) -> str:
    worst = max(data.checks, key=lambda check: check.relative_error)
    routes = sorted({check.route for check in data.checks})
    how = " or ".join(_ROUTES.get(route, route) for route in routes)
    return (
        f"Verified: the attention scores of {_count(len(data.checks), 'layer')} × "
        f"{_count(data.model.n_heads, 'head')}, rebuilt from queries and keys {how}, match the "
        f"model's own within {worst.relative_error:.1e} (relative error, worst in layer "
        f"{worst.layer}; {data.tolerance:.0e} is accepted)."
    )


def _partial_cycles(data: ReportData) -> str:
    pairs = sum(rope.n_pairs for rope in data.rope.layers)
    partial = sum(int((rope.cycles < 1).sum()) for rope in data.rope.layers)
    if not pairs:
        return ""
    without = sum(not rope.n_pairs for rope in data.rope.layers)
    tail = f" {_count(without, 'layer')} without RoPE left out." if without else ""
    if not partial:
        return (
            f"Every one of the {pairs} rotary pairs (layers × pairs) turns at least once over the "
            f"layer's context.{tail}"
        )
    query, key = (_partial_share(data, side) for side in ("query", "key"))
    if query is None or key is None:
        return ""
    contrast = "but" if min(query, key) > partial / pairs else "and"
    return (
        "Partial cycles, the pairs too slow to turn once over the context, are "
        f"{percent(partial / pairs)} of all pairs {contrast} hold {percent(query)} of query "
        f"magnitude and {percent(key)} of key magnitude.{tail}"
    )


def _partial_share(data: ReportData, side: str) -> float | None:
    """Share of the summed mean pair magnitude that lies in partial cycles."""
    inside = total = 0.0
    for rope, usage in zip(data.rope.layers, data.usage, strict=True):
        values = np.asarray(getattr(usage, side), dtype=np.float64)
        inside += float(values[rope.cycles < 1].sum())
        total += float(values.sum())
    return inside / total if total > 0 else None


def _outlier(data: ReportData) -> str:
    """The pair that stands out most in its layer's keys."""
    best: tuple[float, int, int] | None = None
    for rope, usage in zip(data.rope.layers, data.usage, strict=True):
        key = np.asarray(usage.key, dtype=np.float64)
        if key.size < 2 or not np.median(key) > 0:
            continue
        pair = int(np.argmax(key))
        ratio = float(key[pair] / np.median(key))
        if best is None or ratio > best[0]:
            best = (ratio, rope.layer, pair)
    if best is None:
        return ""
    ratio, layer, pair = best
    rope = data.rope[layer]
    turns = f"{number(rope.cycles[pair])} cycles over the context of {rope.context:,}"
    return (
        f"The pair that stands out most is pair {pair} in the keys of layer {layer}: {ratio:.1f} "
        f"times the layer's median magnitude, with a wavelength of "
        f"{number(rope.wavelength[pair])} tokens ({turns})."
    )


def _too_short(data: ReportData) -> str:
    shortest = min(prompt.n_tokens for prompt in data.prompts)
    return (
        f"Attention sinks: prompts of {_count(shortest, 'token')} are too short to tell sinks, "
        f"because uniform attention alone would give the first key {percent(data.uniform_share)}; "
        f"give at least {MIN_TOKENS} tokens."
    )


def _sinks(data: ReportData) -> str:
    above = [
        (entry.layer, int(entry.sink_position[head]), bool(entry.same_position[head]))
        for entry in data.shares
        for head in range(len(entry.sink_share))
        if entry.sink_share[head] > data.threshold
    ]
    total = sum(len(entry.sink_share) for entry in data.shares)
    if not above:
        return (
            f"No attention sinks: none of {total} heads gives more than "
            f"{percent(data.threshold)} of its attention (mean over the queries that see the key) "
            "to any one key."
        )
    text = (
        f"Attention sinks: {len(above)} of {total} heads ({percent(len(above) / total)}) give more "
        f"than {percent(data.threshold)} of their attention (mean over the queries that see the "
        "key) to one key"
    )
    first = "the first token"
    if all(prompt.starts_with_bos for prompt in data.prompts):
        first += " (BOS)"
    elif all(prompt.starts_with_bos is False for prompt in data.prompts):
        first += " (not BOS)"
    at_zero = [layer for layer, position, _ in above if position == 0]
    elsewhere = Counter(position for _, position, _ in above if position)
    is_same = all(same for _, _, same in above)
    if not elsewhere:
        often = "always" if is_same else "most often"
        return f"{text}, {often} {first}; the first such head is in layer {at_zero[0]}."
    position, times = min(elsewhere.items(), key=lambda entry: (-entry[1], entry[0]))
    token = data.token_at(position)
    where = f"position {position}" + (f", “{token}”" if token else "")
    count = sum(elsewhere.values())
    others = f"{count} to a key elsewhere, most often {where} ({times})"
    if not is_same:
        others += "; where prompts differ, the position with the largest share over all counts"
    if not at_zero:
        return f"{text}: {others}."
    return f"{text}: {len(at_zero)} to {first}, from layer {at_zero[0]} on, and {others}."


def _previous(data: ReportData) -> str:
    scored = [
        (float(entry.previous_share[head]), entry.layer, head)
        for entry in data.shares
        for head in range(len(entry.previous_share))
        if np.isfinite(entry.previous_share[head])
    ]
    if not scored:
        return ""
    above = sum(share > PREVIOUS_THRESHOLD for share, _, _ in scored)
    share, layer, head = max(scored, key=lambda entry: (entry[0], -entry[1], -entry[2]))
    most = f"the strongest is layer {layer} head {head} with {percent(share)}"
    if not above:
        return (
            f"No head gives more than {percent(PREVIOUS_THRESHOLD)} of its attention to the "
            f"previous token; {most}."
        )
    verb = "gives" if above == 1 else "give"
    return (
        f"Previous-token heads: {_count(above, 'head')} {verb} more than "
        f"{percent(PREVIOUS_THRESHOLD)} of attention to the previous token; {most}."
    )


def _single_pair(data: ReportData) -> str:
    """The head of the gallery whose scores vary most through one pair, if any is carried by one.

    Shares are signed and sum to 1: a share above 1 means that other pairs work against this one.
    """
    best: tuple[float, int, int, int] | None = None
    for head in data.gallery:
        share = np.asarray(head.by_pair.share, dtype=np.float64)
        if not share.size or not np.isfinite(share).any():
            continue
        pair = int(np.nanargmax(share))
        if not SINGLE_THRESHOLD <= share[pair] <= 1:
            continue
        if best is None or share[pair] > best[0]:
            best = (float(share[pair]), head.layer, head.head, pair)
    if best is None:
        return ""
    share, layer, head, pair = best
    rope = data.rope[layer]
    return (
        f"One frequency can carry a head: among the heads shown, it is clearest in layer {layer} "
        f"head {head}, where pair {pair} (wavelength {number(rope.wavelength[pair])} tokens) "
        f"accounts for {percent(share)} of the variance of its scores within a query on "
        f"{data.prompts[0].name}; an even spread over {rope.n_pairs} pairs would give "
        f"{percent(1 / rope.n_pairs)} each."
    )


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
