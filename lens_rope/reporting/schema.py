"""The JSON form of a report: the keys that others may rely on.

`schema` names the version. Within a version keys are only ever added. A pair's index is its
frequency index; a value that does not exist (nan) is null. Sections that this version of the
package does not compute are absent, not empty; `ablation` is null where no intervention was run.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from lens_rope.bounds import BOUNDS, PERMUTATIONS, BoundsCheck, kept_bounds
from lens_rope.metrics import METRICS
from lens_rope.offset_shares import PARTS
from lens_rope.offsets import CONSTANCY, RELATIVE
from lens_rope.reporting.data import SCHEMA
from lens_rope.sink_heads import COLLAPSED, CONTROL_QUERIES
from lens_rope.sinks import SINK_THRESHOLD

if TYPE_CHECKING:
    from collections.abc import Iterable

    import pandas as pd

    from lens_rope.ablation_effects import AblationReport
    from lens_rope.offsets import LayerOffsets
    from lens_rope.patterns import HeadPattern
    from lens_rope.reporting.data import ReportData
    from lens_rope.sink_heads import SinkHead
    from lens_rope.spec import RopeSpec
    from lens_rope.spectrum import LayerSpectrum, Spectrum

TOP_PAIRS = 5
"""Pairs that a sink or head lists, the largest advantage first; the tables have them all."""


def to_dict(data: ReportData) -> dict[str, Any]:
    """The report as plain values, in a fixed order."""
    model = data.model
    return {
        "schema": SCHEMA,
        "lens_rope": data.version,
        "created": data.created,
        "model": {
            "name": model.name,
            "layers": model.n_layers,
            "heads": model.n_heads,
            "kv_heads": model.n_kv_heads,
            "d_head": model.d_head,
            "dtype": model.dtype,
        },
        "host": {"class": model.host, **model.versions},
        "prompts": [
            {
                "name": prompt.name,
                "tokens": prompt.n_tokens,
                "cut_from": prompt.cut_from,
                "starts_with_bos": prompt.starts_with_bos,
            }
            for prompt in data.prompts
        ],
        "rope": rope_to_dict(data.rope),
        "verification": {
            "max_relative_error": value(data.max_relative_error),
            "tolerance": data.tolerance,
            "layers": [
                {
                    "layer": check.layer,
                    "route": check.route,
                    "relative_error": value(check.relative_error),
                    "pattern_error": value(check.pattern),
                    "norm_error": value(check.norm),
                    "angle_error": value(check.angle),
                    "checked_queries": check.checked_queries,
                    "output_error": value(check.output),
                }
                for check in data.checks
            ],
        },
        "usage": [
            {"layer": entry.layer, "query": numbers(entry.query), "key": numbers(entry.key)}
            for entry in data.usage
        ],
        "offset_features": features_to_dict(layer.offsets for layer in data.layers),
        "bounds": bounds_to_dict(data.bounds),
        "sinks": sinks_to_dict(data.sinks, data.uniform_share, data.threshold),
        "heads": [head_to_dict(head) for head in data.heads],
        "spectrum": [spectrum_to_dict(entry) for entry in data.spectra],
        "metrics": [
            {
                "layer": entry.metrics.layer,
                **{name: numbers(getattr(entry.metrics, name)) for name in METRICS},
            }
            for entry in data.layers
        ],
        "ablation": None if data.ablation is None else ablation_to_dict(data.ablation),
        "findings": list(data.findings),
        "notes": list(data.notes),
    }


def features_to_dict(
    layers: Iterable[LayerOffsets], constancy: float = CONSTANCY, relative: float = RELATIVE
) -> list[dict[str, Any]]:
    """Every offset feature of these layers, and whether it keeps the bounds."""
    rows = []
    for entry in layers:
        kept = kept_bounds(entry.angle, entry.rope.inv_freq * entry.rope.context)
        for head, pair in np.argwhere(entry.is_feature(constancy, relative)):
            rows.append(
                {
                    "layer": entry.layer,
                    "head": int(head),
                    "frequency": int(pair),
                    "amplitude": value(entry.amplitude[head, pair]),
                    "angle": value(entry.angle[head, pair]),
                    "cycles": value(entry.rope.cycles[pair]),
                    "query_constancy": value(entry.query.constancy[head, pair]),
                    "key_constancy": value(entry.key.constancy[entry.kv_heads[head], pair]),
                    **{
                        f"within_{name}": bool(
                            np.broadcast_to(kept[name], entry.angle.shape)[head, pair]
                        )
                        for name in ("half_cycle", "angle", "region")
                    },
                }
            )
    return rows


def outliers_to_dict(table: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows of an `outlier_table`."""
    return [
        {
            "layer": int(row["layer"]),
            "side": row["side"],
            "head": int(row["head"]),
            "frequency": int(row["pair"]),
            **{name: value(row[name]) for name in ("mean", "largest", "relative", "constancy")},
        }
        for row in table.to_dict("records")
    ]


def bounds_to_dict(check: BoundsCheck) -> dict[str, Any]:
    """Strong offset features against the bounds. `p_value` is that of the permutations."""
    half = check["half_cycle"]
    return {
        "strong_amplitude": check.strong,
        "features": half.n,
        **{f"within_{name}": value(check[name].share) for name in BOUNDS},
        **{f"base_rate_{name}": value(check[name].base_rate) for name in BOUNDS},
        "positive_angle": value(check.positive_angle),
        "base_rate_positive_angle": value(check.positive_angle_base_rate),
        "p_value": value(half.p_value),
        "p_values": {
            name: {
                "permutation_by_layer": value(check[name].p_value),
                "binomial": value(check[name].p_binomial),
                "binomial_distinct": value(check[name].p_binomial_distinct),
            }
            for name in BOUNDS
        },
        "distinct_features": half.n_distinct,
        "layers": [
            {name: int(number) for name, number in row.items()}
            for row in check.by_layer().to_dict("records")
        ],
        "permutations": PERMUTATIONS,
    }


def sinks_to_dict(
    sinks: Iterable[SinkHead], uniform_share: float, threshold: float = SINK_THRESHOLD
) -> dict[str, Any]:
    """The sink heads, and what makes a head one.

    Args:
        sinks: The sink heads.
        uniform_share: Sink share that uniform attention would give the first key.
        threshold: Sink share above which a head is a sink head.
    """
    return {
        "threshold": threshold,
        "uniform_share": value(uniform_share),
        "collapsed_below": COLLAPSED,
        "control_queries": CONTROL_QUERIES,
        "heads": [sink_to_dict(sink) for sink in sinks],
    }


def sink_to_dict(sink: SinkHead) -> dict[str, Any]:
    """One sink head with its strongest pairs."""
    return {
        "layer": sink.layer,
        "head": sink.head,
        "position": sink.position,
        "same_position": sink.same_position,
        "prompts": sink.n_prompts,
        "sink_share": value(sink.share_of_all),
        # Over the prompts in which the head has a sink; what follows is measured there.
        "sink_share_there": value(sink.share),
        "advantage": value(sink.advantage.total),
        "pass_through_advantage": value(sink.advantage.pass_through),
        "frequencies": [
            {
                "frequency": pair,
                "advantage": value(sink.advantage.pairs[pair]),
                "lift": value(sink.advantage.lift[pair]),
                "push": value(sink.advantage.push[pair]),
                "share_after_removal": value(sink.share_without[pair]),
                "share_after_removal_error": _error(sink, pair),
            }
            for pair in sink.advantage.strongest(TOP_PAIRS)
        ],
        "share_after_removal_of_two": value(sink.share_without_two),
        "control_share": value(sink.control_share),
    }


def _error(sink: SinkHead, pair: int) -> float | None:
    """Standard error of the share after removal of a pair; None where it is not known."""
    return value(sink.share_without_error[pair]) if sink.share_without_error.size else None


def head_to_dict(head: HeadPattern) -> dict[str, Any]:
    """One head with its pattern and the pairs with the largest advantages."""
    return {
        "layer": head.layer,
        "head": head.head,
        "pattern": head.pattern,
        "also": list(head.also),
        "strength": value(head.strength),
        "base_rate": value(head.base_rate),
        "sink_share": value(head.sink_share),
        "previous_share": value(head.previous_share),
        "masses": {name: value(mass) for name, mass in head.masses.items()},
        "entropy": value(head.entropy),
        "token_consistency": value(head.token_consistency),
        "offset_shares": dict(zip(PARTS, numbers(head.offset_shares), strict=True)),
        "target": head.target,
        "band": head.band,
        "frequencies": [
            {"frequency": pair, "advantage": value(head.advantage.pairs[pair])}
            for pair in head.advantage.strongest(TOP_PAIRS)
        ],
    }


def spectrum_to_dict(entry: LayerSpectrum) -> dict[str, Any]:
    """Key spectra of one layer; eigenvalues are those of all key heads side by side."""

    def side(spectrum: Spectrum) -> dict[str, Any]:
        return {
            "rank90": value(spectrum.rank90),
            "rank95": value(spectrum.rank95),
            "rank99": value(spectrum.rank99),
            "participation_ratio": value(spectrum.participation_ratio),
            "trace": value(spectrum.trace),
            "near_zero": value(spectrum.near_zero()),
            "eigenvalues": numbers(spectrum.eigenvalues),
        }

    return {
        "layer": entry.layer,
        "pre": side(entry.pre),
        "post": side(entry.post),
        "offset_energy": value(entry.offset_energy),
        "offset_share": value(entry.offset_share),
    }


def ablation_to_dict(done: AblationReport) -> dict[str, Any]:
    """What an intervention does to the loss and to each ablated head."""
    collapse = done.collapsed()
    return {
        "how": done.how,
        "prompts": list(done.prompts),
        "tokens": done.n_tokens,
        "loss_before": value(done.loss_before),
        "loss_after": value(done.loss_after),
        "loss_controls": numbers(done.loss_controls),
        "sink_heads": collapse.n_heads,
        "collapsed_below": collapse.below,
        "collapsed": value(collapse.collapsed),
        "control_collapsed": value(collapse.control_collapsed),
        "control_kept": value(collapse.control_kept),
        "heads": [
            {
                "layer": effect.layer,
                "head": effect.head,
                "frequencies": list(effect.pairs),
                "sink_share": [
                    value(effect.sink_before), value(effect.sink_after), value(effect.sink_control)
                ],
                "change": value(effect.change),
                "change_control": value(effect.change_control),
            }
            for effect in done.heads
        ],
    }  # fmt: skip


def rope_to_dict(spec: RopeSpec) -> list[dict[str, Any]]:
    """The rotation of each layer as plain values."""
    return [
        {
            "layer": rope.layer,
            "rotary_dim": rope.rotary_dim,
            "pairing": rope.pairing if rope.n_pairs else None,
            "attention_factor": rope.attention_factor,
            "window": rope.window,
            "context": rope.context,
            "inv_freq": numbers(rope.inv_freq),
            "inv_freq_error": numbers(rope.inv_freq_error),
        }
        for rope in spec.layers
    ]


def to_json(data: ReportData) -> str:
    """The report as JSON text, the same for the same data."""
    return json.dumps(to_dict(data), ensure_ascii=False, allow_nan=False, indent=1) + "\n"


def value(number: Any) -> float | None:
    """A float that JSON can hold. Float32 values keep the digits they have."""
    number = float(number)
    return number if math.isfinite(number) else None


def numbers(values: Iterable[float]) -> list[float | None]:
    """Floats that JSON can hold."""
    return [value(entry) for entry in values]
