"""What the numbers of a report say, in plain words. Every number in a sentence is computed here."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from lens_rope.bounds import BANDS, NOTHING_STRONG, SMALLEST_P, band
from lens_rope.patterns import PATTERNS
from lens_rope.reporting.facts import (
    capital,
    count,
    key_spectra,
    partial_share,
    single_pair,
    standing_out,
)
from lens_rope.sink_heads import COLLAPSED, CONTROL_QUERIES, EXACT_PAIRS, REMOVAL_QUERIES
from lens_rope.sinks import MIN_TOKENS
from lens_rope.spec import ranges
from lens_rope.spectrum import NEAR_ZERO
from lens_rope.words import BAND_PHRASES, number, percent

if TYPE_CHECKING:
    from lens_rope.reporting.data import ReportData

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
        (_too_short(data),)
        if data.is_too_short_for_sinks
        else (_sinks(data), _makers(data), _intervention(data), _patterns(data))
    )
    sentences = (
        _verified(data), _partial_cycles(data), _outlier(data), _bounds(data), *attention,
        _single_pair(data), _spectrum(data),
    )  # fmt: skip
    return tuple(sentence for sentence in sentences if sentence)


def notes(data: ReportData) -> tuple[str, ...]:
    """What a reader has to know about the data before reading numbers off it."""
    out = []
    cut = [prompt for prompt in data.prompts if prompt.cut_from is not None]
    if len(cut) == 1:
        out.append(
            f"{capital(cut[0].name)} was cut: the first {cut[0].n_tokens} of {cut[0].cut_from} "
            "tokens were read."
        )
    elif cut:
        out.append(
            f"{len(cut)} of {len(data.prompts)} prompts were cut to {cut[0].n_tokens} tokens; "
            f"together they had {sum(prompt.cut_from or 0 for prompt in cut):,}."
        )
    short = len(data.short_prompts)
    if 0 < short < len(data.prompts):
        out.append(
            f"Sinks and patterns are told without {short} of {len(data.prompts)} prompts "
            f"(fewer than {MIN_TOKENS} tokens)."
        )
    if data.context is not None:
        out.append(
            f"Cycles are counted over a context of {data.context:,} tokens, which was asked for in "
            "place of the model's own."
        )
    if not data.same_rope:
        out.append(
            "The rotation depends on the length of the prompt and differs between prompts; "
            "frequencies are those of the first prompt. Usage, sinks, heads and metrics are added "
            "up by pair index over all prompts; offsets, bounds and key spectra are of the prompts "
            "that are rotated like the first."
        )
    read = [rope.layer for rope in data.rope.layers]
    if len(read) < data.model.n_layers:
        out.append(f"Only layers {ranges(read)} of {data.model.n_layers} were read.")
    out += _reading_notes(data)
    ablated = () if data.ablation is None else data.ablation.notes
    for entry in (data.bounds.notes, ablated, data.left_out):
        out.extend(note for note in entry if note != NOTHING_STRONG)
    unread = [entry.layer for entry in data.spectra if not entry.pre.has_enough_tokens]
    if unread:
        spectrum = data.spectra[0].pre
        out.append(
            f"{count(spectrum.n_tokens, 'token')} cannot fill the {len(spectrum.eigenvalues)} "
            "components of a layer's keys, so ranks and the share of eigenvalues near zero are "
            "left out; give more text."
        )
    if data.tolerance > 1e-4:
        out.append(
            f"The model computes in {data.model.dtype}, so scores are verified to "
            f"{data.tolerance:.0e} only."
        )
    return tuple(out)


def _reading_notes(data: ReportData) -> list[str]:
    """Prompts beyond the trained context, and layers that were not compared on all queries."""
    out = []
    context = max((rope.trained_context for rope in data.rope.layers), default=0)
    longer = sum(prompt.n_tokens > context for prompt in data.prompts)
    if longer:
        which = (
            "The prompt is" if len(data.prompts) == 1
            else f"{longer} of {len(data.prompts)} prompts are"
        )  # fmt: skip
        out.append(
            f"{which} longer than the trained context of {context:,} tokens; positions beyond it "
            "are outside of what the model was trained on."
        )
    fused = [check for check in data.checks if not math.isnan(check.output)]
    if fused:
        on = _sampled(data) or "all queries"
        out.append(
            f"Layers {ranges(check.layer for check in fused)} were read in a fused pass, which "
            "never forms all scores of a layer at once: the model's own attention was formed for "
            f"{on}, and the attention output of the pass is the same there within "
            f"{max(check.output for check in fused):.1e} (relative)."
        )
    sampled = [
        sink for sink in data.sinks
        if sink.share_without_error.size and (sink.share_without_error > 0).any()
    ]  # fmt: skip
    errors = [sink.share_without_best_error for sink in sampled]
    largest = max((error for error in errors if error > 0), default=0.0)  # nan is not known
    if largest > 0:
        out.append(
            f"What removing a pair does to a sink was told from {REMOVAL_QUERIES:,} queries of "
            f"each longer prompt, drawn along it, and from {CONTROL_QUERIES:,} where the pair is "
            f"not among its {EXACT_PAIRS} strongest; the standard error of the share without the "
            f"best pair is at most {largest:.1g}."
        )
    return out


def _sampled(data: ReportData) -> str:
    """On how many queries scores were compared with the model's own; empty where on all."""
    fewest = [n for check in data.checks if (n := check.checked_queries) is not None]
    if not fewest:
        return ""
    some = "of the prompt" if len(data.prompts) == 1 else "of each longer prompt"
    return f"a sample of {min(fewest):,} queries {some}"


def _verified(data: ReportData) -> str:
    worst = max(data.checks, key=lambda check: check.relative_error)
    routes = sorted({check.route for check in data.checks})
    how = " or ".join(_ROUTES.get(route, route) for route in routes)
    on = f", on {sampled}" if (sampled := _sampled(data)) else ""
    return (
        f"Verified: the attention scores of {count(len(data.checks), 'layer')} × "
        f"{count(data.model.n_heads, 'head')}, rebuilt from queries and keys {how}, match the "
        f"model's own within {worst.relative_error:.1e}{on} (relative error, worst in layer "
        f"{worst.layer}; {data.tolerance:.0e} is accepted)."
    )


def _partial_cycles(data: ReportData) -> str:
    pairs = sum(rope.n_pairs for rope in data.rope.layers)
    partial = sum(int((rope.cycles < 1).sum()) for rope in data.rope.layers)
    if not pairs:
        return ""
    without = sum(not rope.n_pairs for rope in data.rope.layers)
    tail = f" {count(without, 'layer')} without RoPE left out." if without else ""
    if not partial:
        return (
            f"Every one of the {pairs} rotary pairs (layers × pairs) turns at least once over the "
            f"layer's context.{tail}"
        )
    query, key = (partial_share(data, side) for side in ("query", "key"))
    if query is None or key is None:
        return ""
    contrast = "but" if min(query, key) > 1.2 * partial / pairs else "and"
    return (
        "Partial cycles, the pairs too slow to turn once over the context, are "
        f"{percent(partial / pairs)} of all pairs {contrast} hold {percent(query)} of query "
        f"magnitude and {percent(key)} of key magnitude.{tail}"
    )


def _outlier(data: ReportData) -> str:
    """The pair that stands out most in its layer's keys."""
    best = standing_out(data)
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
    n = max(prompt.n_tokens for prompt in data.prompts)
    uniform = sum(1 / seen for seen in range(1, n + 1)) / n
    return (
        f"Attention sinks: prompts of {count(n, 'token')} or fewer are too short to tell sinks, "
        f"because uniform attention alone would give the first key {percent(uniform)}; give at "
        f"least {MIN_TOKENS} tokens."
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
    others = f"{sum(elsewhere.values())} to a key elsewhere, most often {where} ({times})"
    if not is_same:
        others += "; where prompts differ, the position with the largest share over all counts"
    if not at_zero:
        return f"{text}: {others}."
    return f"{text}: {len(at_zero)} to {first}, from layer {at_zero[0]} on, and {others}."


def _makers(data: ReportData) -> str:
    """Which pairs make the sinks, and what their removal does after the fact."""
    sinks = [sink for sink in data.sinks if sink.best_pair >= 0]
    if not sinks:
        return ""
    bands = Counter(band(sink.rope.cycles[sink.best_pair]) for sink in sinks)
    most, times = min(bands.items(), key=lambda item: (-item[1], BANDS.index(item[0])))
    pairs = Counter(sink.best_pair for sink in sinks)
    often = ", ".join(
        f"pair {pair} in {times_best}"
        for pair, times_best in sorted(pairs.items(), key=lambda item: (-item[1], item[0]))[:3]
    )
    total = sum(rope.n_pairs for rope in data.rope.layers)
    base = sum(band(c) == most for rope in data.rope.layers for c in rope.cycles) / total
    collapsed = sum(sink.is_collapsed for sink in sinks)
    compared = [sink for sink in sinks if np.isfinite(sink.control_share)]
    standing = sum(sink.is_control_standing for sink in compared)
    pushing = sum(
        sink.advantage.push[sink.best_pair] > sink.advantage.lift[sink.best_pair] for sink in sinks
    )
    lead = "One pair makes most sinks" if collapsed > len(sinks) / 2 else "Sinks without one pair"
    control = (
        f"; without another pair (the median over the others), {standing} of {len(compared)} keep "
        "more than half of theirs"
        if compared
        else ""
    )
    return (
        f"{lead}: without the contributions of their best pair, {collapsed} of "
        f"{count(len(sinks), 'sink head')} ({percent(collapsed / len(sinks))}) fall below a sink "
        f"share of {percent(COLLAPSED)}{control}. The best pair is most often "
        f"{BAND_PHRASES[most]} ({times} of {len(sinks)}; {percent(base)} of all pairs are): "
        f"{often}. It pushes the other keys down more than it lifts the sink in {pushing} of "
        f"{len(sinks)}."
    )


def _intervention(data: ReportData) -> str:
    """The same in the running model."""
    done = data.ablation
    if done is None:
        return ""
    collapse = done.collapsed()
    low, high = min(done.loss_controls), max(done.loss_controls)
    controls = f"{low:.2f}" if f"{low:.2f}" == f"{high:.2f}" else f"{low:.2f} to {high:.2f}"
    fallen, control_fallen = "", ""
    if collapse.n_heads:
        fallen = (
            f", and {percent(collapse.collapsed)} of {count(collapse.n_heads, 'sink')} fall below "
            f"{percent(collapse.below)}"
        )
        control_fallen = f", and {percent(collapse.control_collapsed)} of the sinks fall"
    return (
        f"In the running model: with the best pair of {count(len(done.heads), 'sink head')} "
        f"removed from the queries, the loss on {done.prompts[0]} goes from {done.loss_before:.2f} "
        f"to {done.loss_after:.2f} nats per token{fallen}; with as many random other pairs removed "
        f"the loss is {controls} ({count(len(done.loss_controls), 'draw')}){control_fallen}."
    )


def _patterns(data: ReportData) -> str:
    """How many heads have which pattern, and the clearest positional head."""
    counts = Counter(head.pattern for head in data.heads if head.pattern)
    if not counts:
        return ""
    order = sorted(counts.items(), key=lambda item: (-item[1], PATTERNS.index(item[0])))
    named = ", ".join(f"{n} {name}" for name, n in order if name != "mixed")
    mixed = counts["mixed"]
    text = f"Heads by what they do: {named or 'none is named'}"
    text += f"; {mixed} of {len(data.heads)} clear no threshold" if mixed else ""
    scored = [head for head in data.heads if np.isfinite(head.previous_share)]
    if not scored:
        return f"{text}."
    best = max(scored, key=lambda head: (head.previous_share, -head.layer, -head.head))
    share = best.offset_shares[0]
    positional = (
        f", and {percent(share)} of its score variance depends on distance alone (offset·offset)"
        if np.isfinite(share)
        else ""
    )
    return (
        f"{text}. The strongest previous-token head is layer {best.layer} head {best.head}: it "
        f"gives {percent(best.previous_share)} of its attention to the token before{positional}."
    )


def _bounds(data: ReportData) -> str:
    """Whether strong offset features keep the bounds."""
    check = data.bounds
    half, angle, region = check["half_cycle"], check["angle"], check["region"]
    if not half.n:
        return ""
    chance = (
        f"p {'≤' if half.p_value <= SMALLEST_P else '='} {half.p_value:.1g} under permutations of "
        "each layer's pairs"
    )
    return (
        f"Offset features: {count(half.n, 'pair')} of heads with an amplitude above "
        f"{check.strong:g} score units ({half.n_distinct} distinct by key head); "
        f"{percent(half.share)} turn at most half "
        f"a cycle over the context ({percent(half.base_rate)} of all pairs do; {chance}), "
        f"{percent(angle.share)} hold query and key at least a right angle apart "
        f"({percent(angle.base_rate)} do), and {half.n - region.within} break the bound that the "
        "two make together."
    )


def _spectrum(data: ReportData) -> str:
    """What rotation does to the keys."""
    found = key_spectra(data)
    if found is None:
        return ""
    return (
        f"Keys before and after rotation: {percent(found.near_zero_before)} of the eigenvalues of "
        f"the layers' keys lie below {NEAR_ZERO:g} before RoPE and "
        f"{percent(found.near_zero_after)} after it; 90% of the variance takes "
        f"{number(found.rank_before)} dimensions before and {number(found.rank_after)} after "
        f"(medians over layers; more in {found.ups} of {found.layers}). The variance that "
        f"rotation adds is the rotated offset: {percent(found.offset_share)} of the variance after "
        "it (median)."
    )


def _single_pair(data: ReportData) -> str:
    """The head of the gallery whose scores vary most through one pair, if any is carried by one."""
    best = single_pair(data)
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
