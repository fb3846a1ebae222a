"""What rotations, captures and the scores of one head say of themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from lens_rope.spec import ranges
from lens_rope.views.head_figures import MIN_COUNT, kept_distances
from lens_rope.views.rope_figures import rope_groups
from lens_rope.views.score_figures import SHOWN_PAIRS, moving_pairs
from lens_rope.views.tables import Description, Form, Table, index
from lens_rope.views.tokens import SPACE, display_text
from lens_rope.words import number, percent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lens_rope.decomposition import HeadDecomposition
    from lens_rope.distance import DistanceCurve
    from lens_rope.records import LayerCapture, RotaryCapture
    from lens_rope.results import DistanceProfile, PairSummary, ScoreBreakdown
    from lens_rope.spec import LayerRope, RopeSpec

MAX_PROMPTS = 4
"""Prompts that a capture names; `verification()` has them all."""

_PAIR: dict[str, tuple[str, Form]] = {
    "pair": ("pair", lambda pair: "pass-through" if pair < 0 else str(int(pair))),
    "wavelength": ("wavelength", number),
    "cycles": ("cycles", number),
}


def describe_rope(spec: RopeSpec) -> Description:
    """The rotation of each kind of layer."""
    import pandas as pd

    groups = rope_groups(spec.layers)
    rows = [
        {
            "layers": layers,
            "pairs": str(rope.n_pairs),
            "rotated": f"{rope.rotary_dim} of {rope.d_head}",
            "pairing": rope.pairing if rope.n_pairs else "none",
            "factor": number(rope.attention_factor),
            "window": "none" if rope.window is None else f"{rope.window:,}",
            "context": f"{rope.context:,}",
            "wavelengths": _wavelengths(rope),
            "partial cycles": _partial(rope),
        }
        for layers, rope in groups
    ]
    rotary = [rope for _, rope in groups if rope.n_pairs]
    kinds = "rotation" if len(groups) == 1 else f"{len(groups)} kinds of rotation"
    n_layers = f"{len(spec.layers)} layer{'s' if len(spec.layers) != 1 else ''}"
    sentence = f"RoPE of {spec.model}: {n_layers}, none with RoPE"
    if len(groups) == 1 and rotary:
        rope = rotary[0]
        sentence = (
            f"RoPE of {spec.model}: {n_layers} with one {kinds}, wavelengths "
            f"{_wavelengths(rope)} tokens; {_partial(rope)} pairs are partial cycles, slower than "
            f"one turn over the context of {rope.context:,} tokens"
        )
    elif rotary:
        sentence = f"RoPE of {spec.model}: {n_layers} with {kinds}"
    frame = pd.DataFrame(rows)
    columns: dict[str, tuple[str, Form]] = {name: (name, str) for name in frame.columns}
    return Description(
        (sentence,), Table(f"RoPE of {spec.model}", frame, columns), subject=spec.model
    )


def describe_capture(capture: RotaryCapture) -> Description:
    """What was read, and how exactly."""
    info, n_prompts = capture.model, len(capture.prompts)
    records = [record for layers in capture.records for record in layers]
    prompts = [
        f"{_inline(prompt.name)} ({len(prompt):,} tokens)"
        for prompt in capture.prompts[:MAX_PROMPTS]
    ]
    if n_prompts > MAX_PROMPTS:
        prompts.append(f"{n_prompts - MAX_PROMPTS} more")
    return Description(
        (
            f"Queries and keys of {info.name} on {info.host}, layers "
            f"{ranges(capture.layer_indices)}: {info.n_heads} heads on {info.n_kv_heads} key heads "
            f"of {info.d_head} components. Prompts: {', '.join(prompts)}.",
            f"Verified: the scores that they give{_compared(records)} have a relative error of at "
            f"most {capture.max_relative_error:.1e} against the model's own.",
        ),
        Table(
            "Relative errors against the model's own scores",
            capture.verification(),
            {
                "prompt": ("prompt", _inline),
                "layer": ("layer", index),
                "route": ("read from", str),
                "relative_error": ("scores", _scientific),
                "pattern_error": ("attention", _scientific),
                "norm_error": ("pair lengths", _scientific),
                "angle_error": ("angles", _scientific),
                "max_residual": ("largest difference (score units)", _scientific),
            },
            source="verification()",
        ),
        subject=info.name,
    )


def describe_decomposition(d: HeadDecomposition, summary: PairSummary) -> Description:
    """Where the scores of one head come from.

    Args:
        d: The head.
        summary: Its `by_pair()`.
    """
    record = d.record
    return Description(
        (
            f"Layer {d.layer} head {d.head} (key head {d.kv_head}) on {_inline(d.prompt.name)}: "
            f"{record.n_pos:,} tokens, {d.rope.n_pairs} pairs; the contributions of the pairs and "
            f"of the pass-through sum{_compared([record])} to the model's scores within "
            f"{d.residual:.1e} score units",
            _share_sentence(summary),
        ),
        _share_table(summary, "by_pair().to_dataframe()"),
        subject=f"layer {d.layer} head {d.head}",
    )


def describe_score(score: ScoreBreakdown) -> Description:
    """The pairs that add or take most."""
    has_rest = len(score.rope.pass_components) > 0
    rest = f", pass-through {number(score.pass_through)} of it" if has_rest else ""
    return Description(
        (
            f"Score {number(score.score)} of query {score.query} “{display_text(score.query_token)}"
            f"” and key {score.key} “{display_text(score.key_token)}” in layer {score.rope.layer}"
            f"{rest} (score units, before soft-cap)",
        ),
        Table(
            "What each pair contributes, the largest first, of either sign",
            score.to_dataframe(),
            {**_PAIR, "contribution": ("contribution", number)},
        )
        if score.rope.n_pairs
        else None,
    )


def describe_pairs(summary: PairSummary) -> Description:
    """The pairs that carry most of the score variance."""
    return Description((_share_sentence(summary),), _share_table(summary, "to_dataframe()"))


def describe_profile(profile: DistanceProfile) -> Description:
    """The mean score by distance, and the pairs whose mean moves most."""
    kept = kept_distances(profile)
    total, distance = np.asarray(profile.total)[kept], np.asarray(profile.distance)[kept]
    low, high = int(total.argmin()), int(total.argmax())
    left_out = ""
    if not kept.all():
        least = min(MIN_COUNT, int(np.max(profile.count)))
        left_out = (
            f"; distances with fewer than {least} query-key pairs are left out here and in the "
            "figure"
        )
    columns: dict[str, tuple[str, Form]] = {
        "distance": ("distance", index),
        "count": ("query-key pairs", lambda count: f"{count:,}"),
        "total": ("total", number),
    }
    if len(profile.rope.pass_components):
        columns["pass_through"] = ("pass-through", number)
    for pair in moving_pairs(profile, SHOWN_PAIRS):
        columns[f"pair_{pair}"] = (f"pair {pair}", number)
    return Description(
        (
            f"Mean score of a head of layer {profile.rope.layer} at distances {distance[0]} to "
            f"{distance[-1]:,}: from {number(total[low])} at {distance[low]:,} to "
            f"{number(total[high])} at {distance[high]:,} tokens (score units{left_out})",
        ),
        Table("Mean contribution by distance (score units)", profile.to_dataframe(), columns),
    )


def describe_curve(curve: DistanceCurve) -> Description:
    """How the total moves, and the pairs that move it most."""
    table = Table(
        "The pairs whose contribution changes most (score units)",
        curve.pair_table(),
        {
            **_PAIR,
            "lowest": ("lowest", number),
            "highest": ("highest", number),
            "in_prompt": ("in the prompt", number),
        },
        n_all=curve.rope.n_pairs,
        source="to_dataframe()",
    )
    total, distance = curve.total, curve.distance
    low, high = int(total.argmin()), int(total.argmax())
    return Description(
        (
            f"Query {curve.query} “{display_text(curve.query_token)}” and key {curve.key} "
            f"“{display_text(curve.key_token)}” of layer {curve.rope.layer} head {curve.head}: "
            f"score {number(curve.score)} at their distance of {curve.actual:,} tokens (score "
            "units, before soft-cap)",
            f"Over distances {distance.min():,} to {distance.max():,} the score of the same two "
            f"goes from {number(total[low])} at {distance[low]:,} to {number(total[high])} at "
            f"{distance[high]:,} tokens",
        ),
        table if len(table.frame) else None,
    )


def _compared(records: Sequence[LayerCapture]) -> str:
    """What was done to scores before they were compared with the model's, as part of a sentence."""
    parts = [
        f"after the soft-cap of {number(cap)}"
        for cap in sorted({record.softcap for record in records if record.softcap is not None})
    ]
    if any(record.check.route == "hook_cos_pattern" for record in records):
        parts.append("up to a constant per query, which attention leaves open")
    return f" ({', '.join(parts)})" if parts else ""


def _share_sentence(summary: PairSummary) -> str:
    rope, share = summary.rope, np.asarray(summary.share)
    layer = f"layer {rope.layer}"
    if not rope.n_pairs:
        return f"A head of {layer}: there are no rotary pairs, the pass-through is all of the score"
    if not np.isfinite(share).any():
        return f"A head of {layer}: no row of scores varies, so there are no shares of the variance"
    best = int(np.nanargmax(share))
    rest = (
        f"; the pass-through carries {percent(summary.pass_through_share)}"
        if len(rope.pass_components)
        else ""
    )
    return (
        f"A head of {layer}: pair {best} (wavelength {number(rope.wavelength[best])} tokens) "
        f"carries the largest share of the score variance within a query's row, "
        f"{percent(float(share[best]))}"
        f"{rest}"
    )


def _share_table(summary: PairSummary, source: str) -> Table | None:
    table = summary.to_dataframe()
    # The largest share first, of either sign; without shares, the largest contribution.
    by = "share" if table["share"].notna().any() else "rms"
    table = table.sort_values(by, key=np.abs, ascending=False, kind="stable", ignore_index=True)
    if not len(table):
        return None
    return Table(
        "The pairs that carry most of the score variance (contributions in score units)",
        table,
        {
            **_PAIR,
            "share": ("share of variance", percent),
            "rms": ("rms contribution", number),
            "mean": ("mean contribution", number),
        },
        source=source,
    )


def _wavelengths(rope: LayerRope) -> str:
    if not rope.n_pairs:
        return ""
    return f"{number(rope.wavelength.min())} to {number(rope.wavelength.max())}"


def _partial(rope: LayerRope) -> str:
    return f"{int((rope.cycles < 1).sum())} of {rope.n_pairs}" if rope.n_pairs else ""


def _scientific(value: float) -> str:
    return f"{value:.1e}"


def _inline(text: str) -> str:
    """A name among words: on one line, spaces as they are."""
    return display_text(text).replace(SPACE, " ")
