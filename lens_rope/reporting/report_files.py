"""Reading `report.json`.

Within a version of the schema keys are only ever added, so an earlier report can lack a section;
what it lacks is named in `missing`, and its tables are empty. Whatever else is not as the schema
says is an error, because numbers that are half read would be compared all the same.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from lens_rope.errors import InputError
from lens_rope.reporting.data import SCHEMA
from lens_rope.reporting.manifest import read_manifest
from lens_rope.reporting.saved import SavedReport
from lens_rope.spec import LayerRope

if TYPE_CHECKING:
    from collections.abc import Callable

FILE = "report.json"
PARTS = ("offset_offset", "offset_content", "content_offset", "content_content")

_USAGE = ("layer", "pair", "wavelength", "cycles", "query", "key")
_HEADS = (
    "layer", "head", "pattern", "strength", "sink_share", "previous_share", "entropy",
    "token_consistency", *PARTS,
)  # fmt: skip
_SINKS = ("layer", "head", "position", "sink_share", "best_pair", "share_without", "control_share")
_FEATURES = (
    "layer", "head", "pair", "amplitude", "angle", "cycles", "within_half_cycle", "within_angle",
    "within_region",
)  # fmt: skip
_SPECTRUM = (
    "layer", "components", "rank90_pre", "rank90_post", "participation_ratio_pre",
    "participation_ratio_post", "trace_pre", "trace_post", "offset_share",
)  # fmt: skip
_BOUNDS = ("layer", "features", "within_half_cycle", "within_angle", "within_region")
_INDICES = ("layer", "head", "pair", "position")
_SECTIONS = ("usage", "heads", "sinks", "offset_features", "bounds", "spectrum")


def read_report(source: Any) -> SavedReport:
    """A report from wherever it is.

    Args:
        source: A `Report`, what its `to_dict()` gives, the path of a report's folder, or of its
            `report.json`.

    Raises:
        InputError: It is none of these, or cannot be read.
    """
    if hasattr(source, "to_dict") and not isinstance(source, pd.DataFrame):
        report = _parsed(_plain(source.to_dict()), "the report")
        known = getattr(getattr(source, "data", None), "provenance", None)
        return dataclasses.replace(report, prompts_sha256=getattr(known, "prompts_sha256", None))
    if isinstance(source, Mapping):
        return _parsed(_plain(source), "the report")
    if not isinstance(source, (str, Path)):
        raise InputError(
            f"a {type(source).__name__} is not a report; give a Report, the folder of one, its "
            f"{FILE}, or what its to_dict() gives"
        )
    path = Path(source)
    try:
        if path.is_dir():
            path = path / FILE
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError(
            f"{path} does not exist; give the folder of a report that was written with the format "
            "json"
        ) from error
    except OSError as error:
        raise InputError(
            f"{str(path)[:200]} cannot be read ({error.strerror or error}); give the folder of a "
            "report"
        ) from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not JSON; write the report again") from error
    report = _parsed(content, str(path))
    return dataclasses.replace(report, prompts_sha256=_checksum(path.parent))


def _checksum(folder: Path) -> str | None:
    """The checksum of the prompts, None where no manifest has one."""
    try:
        found = (read_manifest(folder) or {})["prompts"]["sha256"]
    except (KeyError, TypeError):
        return None
    return found if isinstance(found, str) else None


def _plain(content: Any) -> Any:
    """What JSON makes of it, so that a report in memory and the same on disk are one."""
    try:
        return json.loads(json.dumps(content))
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError("the report holds something that JSON cannot; give a report") from error


def _parsed(content: Any, where: str) -> SavedReport:
    schema = content.get("schema") if isinstance(content, dict) else None
    if not isinstance(schema, str) or not schema.startswith("lens-rope-report/"):
        raise InputError(f"{where} is not a report of lens-rope; give the folder of a report")
    if schema != SCHEMA:
        raise InputError(
            f"{where} is written as {schema} and this version reads {SCHEMA}; make the report "
            "again with this version, or read it with the one that wrote it"
        )
    try:
        return _checked(content)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
        raise InputError(
            f"{where} is damaged ({type(error).__name__}: {error}); make the report again"
        ) from error


def _checked(content: dict[str, Any]) -> SavedReport:
    model = content["model"]
    shape = {f"n_{name}": _count(model[name]) for name in ("layers", "heads", "kv_heads")}
    ropes = tuple(_rope(entry, _count(model["d_head"])) for entry in content["rope"])
    if not ropes or len({rope.layer for rope in ropes}) != len(ropes):
        raise ValueError("no layers, or a layer twice")
    missing = [name for name in _SECTIONS if name not in content]
    bounds = content.get("bounds") or {}
    if "bounds" in content and "layers" not in bounds:
        missing.append("bounds_by_layer")
    sinks = content.get("sinks") or {}
    ablation = content.get("ablation")
    return SavedReport(
        model=_text(model["name"]),
        **shape,
        d_head=_count(model["d_head"]),
        dtype=_text(model.get("dtype") or "unknown"),
        host={str(name): str(value) for name, value in (content.get("host") or {}).items()},
        version=_text(content.get("lens_rope") or "unknown"),
        created=_text(content.get("created") or "unknown"),
        prompts=tuple(
            (_text(entry["name"]), _count(entry["tokens"])) for entry in content.get("prompts", [])
        ),
        prompts_sha256=None,
        is_cut=any(entry.get("cut_from") is not None for entry in content.get("prompts", [])),
        ropes=ropes,
        usage=_usage(content.get("usage", []), ropes),
        heads=_table(content.get("heads", []), _HEADS, _head),
        sinks=_table(sinks.get("heads", []), _SINKS, _sink),
        features=_table(content.get("offset_features", []), _FEATURES, _feature),
        spectrum=_table(content.get("spectrum", []), _SPECTRUM, _spectrum),
        bounds={
            name: _number(value)
            for name, value in bounds.items()
            if value is None or isinstance(value, (int, float))
        },
        bounds_by_layer=_table(bounds.get("layers", []), _BOUNDS, lambda row: row),
        sink_threshold=_number(sinks.get("threshold")),
        collapsed_below=_number(sinks.get("collapsed_below")),
        loss=(
            None
            if ablation is None
            else (_number(ablation["loss_before"]), _number(ablation["loss_after"]))
        ),
        findings=tuple(map(_text, content.get("findings", []))),
        missing=tuple(missing),
    )


def _rope(entry: dict[str, Any], d_head: int) -> LayerRope:
    context = _count(entry["context"])
    inv_freq = np.array(entry["inv_freq"], dtype=np.float64)
    return LayerRope(
        layer=_count(entry["layer"]),
        inv_freq=inv_freq,
        inv_freq_error=np.array(
            [_number(x) for x in entry.get("inv_freq_error", np.zeros(len(inv_freq)))]
        ),
        pairing=entry["pairing"] or "half",
        rotary_dim=_count(entry["rotary_dim"]),
        d_head=d_head,
        attention_factor=_number(entry["attention_factor"]),
        window=None if entry["window"] is None else _count(entry["window"]),
        # What is saved is the effective context, which is what counts cycles.
        trained_context=context,
    )


def _usage(entries: list[Any], ropes: tuple[LayerRope, ...]) -> pd.DataFrame:
    by_layer = {rope.layer: rope for rope in ropes}
    frames = []
    for entry in entries:
        rope = by_layer[entry["layer"]]
        sides = {
            side: np.array([_number(x) for x in entry[side]], dtype=np.float64)
            for side in ("query", "key")
        }
        frames.append(
            pd.DataFrame(
                {
                    "layer": rope.layer, "pair": np.arange(rope.n_pairs),
                    "wavelength": rope.wavelength, "cycles": rope.cycles, **sides,
                }
            )
        )  # fmt: skip
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=list(_USAGE))


def _table(
    entries: list[Any], columns: tuple[str, ...], row: Callable[[dict[str, Any]], dict[str, Any]]
) -> pd.DataFrame:
    rows = [row(entry) for entry in entries]
    table: dict[str, Any] = {}
    for name in columns:
        values = [entry.get(name) for entry in rows]
        # Text where a number belongs is an error here and not somewhere in a figure.
        if name == "pattern":
            table[name] = pd.Series(values, dtype=object)
        elif name in _INDICES:
            table[name] = np.array([_count(value) for value in values], dtype=np.int64)
        elif name == "best_pair":  # of layers without RoPE there is none
            table[name] = np.array(
                [-1 if value is None else _count(value) for value in values], dtype=np.int64
            )
        else:
            table[name] = np.array([_number(value) for value in values], dtype=np.float64)
    return pd.DataFrame(table)


def _head(entry: dict[str, Any]) -> dict[str, Any]:
    pattern = entry["pattern"]
    return {
        **entry,
        **(entry.get("offset_shares") or {}),
        "pattern": None if pattern is None else _text(pattern),
    }


def _sink(entry: dict[str, Any]) -> dict[str, Any]:
    best = (entry.get("frequencies") or [{}])[0]
    return {
        **entry,
        "best_pair": best.get("frequency"),
        "share_without": best.get("share_after_removal"),
    }


def _feature(entry: dict[str, Any]) -> dict[str, Any]:
    return {**entry, "pair": entry["frequency"]}


def _spectrum(entry: dict[str, Any]) -> dict[str, Any]:
    row = {
        "layer": entry["layer"],
        "components": len(entry["pre"]["eigenvalues"]),
        "offset_share": entry.get("offset_share"),
    }
    for name in ("rank90", "participation_ratio", "trace"):
        for side in ("pre", "post"):
            row[f"{name}_{side}"] = entry[side][name]
    return row


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.40} is not text")
    return value


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise TypeError(f"{value!r:.40} is not a number of something")
    return value


def _number(value: Any) -> float:
    if value is None:
        return float("nan")
    if not isinstance(value, (int, float)):
        raise TypeError(f"{value!r:.40} is not a number")
    return float(value)
