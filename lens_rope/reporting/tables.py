"""The tables of a report as CSV: one row per layer, pair or head, and no derived wording."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from lens_rope.bounds import kept_bounds
from lens_rope.heads import head_table
from lens_rope.metrics import METRICS
from lens_rope.offsets import offset_table, outlier_table
from lens_rope.sink_heads import sink_table

if TYPE_CHECKING:
    from lens_rope.reporting.data import ReportData
    from lens_rope.spec import LayerRope


def tables(data: ReportData) -> dict[str, pd.DataFrame]:
    """Every table of the report by name, in the order in which the page shows them."""
    return {
        "prompts": _prompts(data),
        "verification": _verification(data),
        "rope": data.rope.to_dataframe(),
        "usage": _usage(data),
        "offset_features": features_of(data),
        "outliers": outlier_table([entry.offsets for entry in data.layers]),
        "bounds": data.bounds.to_dataframe(),
        "bounds_by_layer": data.bounds.by_layer(),
        "sinks": sink_table(data.sinks),
        "sink_pairs": _sink_pairs(data),
        "heads": head_table(data.heads),
        "head_pairs": _head_pairs(data),
        "spectrum": _spectrum(data),
        "metrics": _metrics(data),
        **({} if data.ablation is None else {"ablation": data.ablation.to_dataframe()}),
        "gallery_by_pair": _gallery_by_pair(data),
        "gallery_by_distance": _gallery_by_distance(data),
    }


def to_csv(frame: pd.DataFrame) -> str:
    """A table as CSV text with Unix line ends; a value that does not exist is an empty field."""
    # Ten digits: more than float32 has, and half the size of what a double would print.
    return frame.to_csv(index=False, lineterminator="\n", float_format="%.10g")


def _prompts(data: ReportData) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "prompt": [prompt.name for prompt in data.prompts],
            "tokens": [prompt.n_tokens for prompt in data.prompts],
            "cut_from": pd.array([prompt.cut_from for prompt in data.prompts], dtype="Int64"),
            "starts_with_bos": pd.array(
                [prompt.starts_with_bos for prompt in data.prompts], dtype="boolean"
            ),
        }
    )


def _verification(data: ReportData) -> pd.DataFrame:
    return pd.DataFrame(
        [
            {
                "layer": check.layer,
                "route": check.route,
                "relative_error": check.relative_error,
                "pattern_error": check.pattern,
                "norm_error": check.norm,
                "angle_error": check.angle,
                "max_residual": max(check.head_residual),
                "checked_queries": check.checked_queries,
                "output_error": check.output,
            }
            for check in data.checks
        ]
    ).astype({"checked_queries": "Int64"})


def _usage(data: ReportData) -> pd.DataFrame:
    frames = [
        pd.DataFrame(
            {
                "layer": rope.layer,
                "pair": range(rope.n_pairs),
                "wavelength": rope.wavelength,
                "cycles": rope.cycles,
                "query": entry.query,
                "key": entry.key,
            }
        )
        for rope, entry in zip(data.rope.layers, data.usage, strict=True)
    ]
    return pd.concat(frames, ignore_index=True)


def features_of(data: ReportData) -> pd.DataFrame:
    """The offset features, with whether each keeps the bounds, the largest amplitude first."""
    table = offset_table([entry.offsets for entry in data.layers])
    table = table.query("is_feature").drop(columns="is_feature")
    turn = table["cycles"].to_numpy() * 2 * np.pi
    angle = table["angle"].to_numpy()
    for name, kept in kept_bounds(angle, turn).items():
        table[f"within_{name}"] = kept
    return table.sort_values(
        ["amplitude", "layer", "head", "pair"], ascending=[False, True, True, True],
        ignore_index=True,
    )  # fmt: skip


def _sink_pairs(data: ReportData) -> pd.DataFrame:
    columns = [
        "layer", "head", "pair", "wavelength", "lift", "push", "advantage", "share_without",
        "share_without_error",
    ]  # fmt: skip
    frames = []
    for sink in data.sinks:
        # The pass-through comes last; it cannot be removed as a pair can.
        names, waves, without = _with_pass_through(sink.rope, sink.share_without)
        n = len(names)
        error = sink.share_without_error
        error = error if error.size else np.full(sink.rope.n_pairs, np.nan)
        frames.append(
            pd.DataFrame(
                {
                    "layer": sink.layer,
                    "head": sink.head,
                    "pair": names,
                    "wavelength": waves,
                    "lift": sink.advantage.lift[:n],
                    "push": sink.advantage.push[:n],
                    "advantage": (sink.advantage.lift + sink.advantage.push)[:n],
                    "share_without": without,
                    "share_without_error": np.append(error, np.full(n - len(error), np.nan)),
                }
            )
        )
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=columns)


def _head_pairs(data: ReportData) -> pd.DataFrame:
    frames = []
    for head in data.heads:
        names, waves, _ = _with_pass_through(head.rope, head.rope.wavelength)
        advantage = (head.advantage.lift + head.advantage.push)[: len(names)]
        frames.append(
            pd.DataFrame(
                {
                    "layer": head.layer,
                    "head": head.head,
                    "target": head.target,
                    "pair": names,
                    "wavelength": waves,
                    "advantage": advantage,
                }
            )
        )
    return pd.concat(frames, ignore_index=True)


def _with_pass_through(
    rope: LayerRope, values: np.ndarray
) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Names, wavelengths and values of all pairs, then of the pass-through if there is one."""
    names, waves = [*map(str, range(rope.n_pairs))], rope.wavelength
    if not len(rope.pass_components):
        return names, waves, values
    return [*names, "pass-through"], np.append(waves, np.nan), np.append(values, np.nan)


def _spectrum(data: ReportData) -> pd.DataFrame:
    frames = [
        pd.DataFrame(
            {
                "layer": entry.layer,
                "index": range(len(entry.pre.eigenvalues)),
                "pre": entry.pre.eigenvalues,
                "post": entry.post.eigenvalues,
            }
        )
        for entry in data.spectra
    ]
    return pd.concat(frames, ignore_index=True)


def _metrics(data: ReportData) -> pd.DataFrame:
    frames = [
        pd.DataFrame(
            {
                "layer": entry.metrics.layer,
                "head": range(len(entry.metrics.sink_share)),
                **{name: getattr(entry.metrics, name) for name in METRICS},
            }
        )
        for entry in data.layers
    ]
    return pd.concat(frames, ignore_index=True)


def _gallery_by_pair(data: ReportData) -> pd.DataFrame:
    columns = ["layer", "head", "pair", "wavelength", "mean", "rms", "share"]
    frames = []
    for head in data.gallery:
        part = pd.DataFrame(
            {
                "layer": head.layer,
                "head": head.head,
                "pair": [*map(str, range(head.rope.n_pairs)), "pass-through"],
                "wavelength": [*head.rope.wavelength, float("nan")],
                "mean": [*head.by_pair.mean, head.by_pair.pass_through_mean],
                "rms": [*head.by_pair.rms, head.by_pair.pass_through_rms],
                "share": [*head.by_pair.share, head.by_pair.pass_through_share],
            }
        )
        frames.append(part if len(head.rope.pass_components) else part.iloc[:-1])
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=columns)


def _gallery_by_distance(data: ReportData) -> pd.DataFrame:
    frames = []
    for head in data.gallery:
        profile = head.by_distance
        frames.append(
            pd.DataFrame(
                {
                    "layer": head.layer,
                    "head": head.head,
                    "distance": profile.distance,
                    "count": profile.count,
                    "total": profile.total,
                    "pass_through": profile.pass_through,
                    **{f"pair_{i}": profile.mean[:, i] for i in range(head.rope.n_pairs)},
                }
            )
        )
    columns = ["layer", "head", "distance", "count", "total", "pass_through"]
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=columns)
