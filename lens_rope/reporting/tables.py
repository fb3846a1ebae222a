"""The tables of a report as CSV: one row per layer, pair or head, and no derived wording."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

if TYPE_CHECKING:
    from lens_rope.reporting.data import ReportData


def tables(data: ReportData) -> dict[str, pd.DataFrame]:
    """Every table of the report by name, in the order in which the page shows them."""
    return {
        "prompts": _prompts(data),
        "verification": _verification(data),
        "rope": data.rope.to_dataframe(),
        "usage": _usage(data),
        "heads": _heads(data),
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
            }
            for check in data.checks
        ]
    )


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


def _heads(data: ReportData) -> pd.DataFrame:
    frames = [
        pd.DataFrame(
            {
                "layer": entry.layer,
                "head": range(len(entry.sink_share)),
                "sink_share": entry.sink_share,
                "sink_position": entry.sink_position,
                "previous_share": entry.previous_share,
            }
        )
        for entry in data.shares
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
