"""The JSON form of a report: the keys that others may rely on.

`schema` names the version. Within a version keys are only ever added. A pair's index is its
frequency index; a value that does not exist (nan) is null. Sections that this version of the
package does not compute are absent, not empty.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    from lens_rope.reporting.data import ReportData
    from lens_rope.spec import RopeSpec

SCHEMA = "lens-rope-report/1"


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
                }
                for check in data.checks
            ],
        },
        "usage": [
            {"layer": entry.layer, "query": numbers(entry.query), "key": numbers(entry.key)}
            for entry in data.usage
        ],
        "sinks": {
            "threshold": data.threshold,
            "uniform_share": value(data.uniform_share),
            "heads": [
                {
                    "layer": entry.layer,
                    "head": head,
                    "position": int(entry.sink_position[head]),
                    "sink_share": value(entry.sink_share[head]),
                }
                for entry in data.shares
                for head in range(len(entry.sink_share))
                if entry.sink_share[head] > data.threshold
            ],
        },
        "heads": [
            {
                "layer": entry.layer,
                "head": head,
                "sink_share": value(entry.sink_share[head]),
                "previous_share": value(entry.previous_share[head]),
            }
            for entry in data.shares
            for head in range(len(entry.sink_share))
        ],
        "findings": list(data.findings),
        "notes": list(data.notes),
    }


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


def value(number: float) -> float | None:
    """A float that JSON can hold. Float32 values keep the digits they have."""
    number = float(number)
    return number if math.isfinite(number) else None


def numbers(values: Iterable[float]) -> list[float | None]:
    """Floats that JSON can hold."""
    return [value(entry) for entry in values]
