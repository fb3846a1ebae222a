"""The figure of an intervention: loss and attention before and after, beside random pairs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import plotly.graph_objects as go

from lens_rope.errors import InputError
from lens_rope.spec import ranges
from lens_rope.views.colors import MARK, MISSING
from lens_rope.views.downloads import add_table
from lens_rope.views.layout import figure
from lens_rope.words import number, percent

if TYPE_CHECKING:
    from lens_rope.ablation_effects import AblationReport, HeadEffect

Attention = Literal["sink", "previous"]

BEFORE = "#3497a9"
MAX_NAMED = 24
"""With more ablated heads than this their names would run into each other."""

_NAMES: dict[Attention, str] = {
    "sink": "attention to the head's sink",
    "previous": "attention to the previous token",
}


def ablation_dots(done: AblationReport, *, attention: Attention | None = None) -> go.Figure:
    """Loss of the model at the left, attention of each ablated head at the right.

    Both before and after, and with random other pairs in place of the head's own: every draw for
    the loss, the median over the draws for a head.

    Args:
        done: What the intervention did.
        attention: `sink`, the key that was the head's sink, or `previous`, the token before. None
            takes the sink where any head has one, else the previous token.

    Raises:
        InputError: The attention is neither.
    """
    if attention is None:
        is_sink = any(np.isfinite(head.sink_before) for head in done.heads)
        attention = "sink" if is_sink else "previous"
    if attention not in get_args(Attention):
        raise InputError(
            f"attention is {attention!r}; it must be one of {', '.join(get_args(Attention))}"
        )
    fig = figure(
        height=360,
        label=(
            f"Dots: loss of the model, and {_NAMES[attention]} for each ablated head, before and "
            "after the intervention and with random other pairs"
        ),
        yaxis_title="loss (nats/token)",
        showlegend=True,
        legend={"orientation": "h", "x": 0, "y": 1.02, "xanchor": "left", "yanchor": "bottom"},
    )
    axis = {**fig.layout.xaxis.to_plotly_json(), "domain": [0.32, 1], "anchor": "y2"}  # type: ignore[attr-defined]
    fig.update_layout(
        xaxis_domain=[0, 0.2],
        xaxis2=axis,
        yaxis2={**fig.layout.yaxis.to_plotly_json(), "anchor": "x2"},  # type: ignore[attr-defined]
    )
    _add_loss(fig, done)
    _add_heads(fig, done.heads, attention)
    fig.update_xaxes(showgrid=False, zeroline=False)
    fig.update_yaxes(zeroline=False)
    n_heads = len(done.heads)
    names = [f"{head.layer}.{head.head}" for head in done.heads]
    step = max(1, -(-n_heads // MAX_NAMED))
    fig.update_layout(
        yaxis_title_text="loss (nats/token)",
        xaxis={
            "range": [-0.6, 2.6], "tickvals": [0, 1, 2], "ticktext": ["before", "after", "random"],
        },
        xaxis2={
            "range": [-0.7, max(n_heads, 1) - 0.3], "title_text": "ablated heads (layer.head)",
            "tickvals": list(range(0, n_heads, step)), "ticktext": names[::step],
        },
        yaxis2={
            "range": [-0.02, 1.02], "tickvals": [0, 0.25, 0.5, 0.75, 1],
            "title_text": f"{_NAMES[attention]} (share)",
        },
    )  # fmt: skip
    return add_table(
        fig,
        "What an intervention does to loss and attention, beside random pairs",
        _columns(done, attention),
    )


def _columns(done: AblationReport, attention: Attention) -> dict[str, Any]:
    """One row for each mark: the loss of the model first, then the attention of each head."""
    rows: list[tuple[str, str, str, float]] = [
        ("loss_nats_per_token", "all", "before", done.loss_before),
        ("loss_nats_per_token", "all", "after", done.loss_after),
        *(("loss_nats_per_token", "all", "random", loss) for loss in done.loss_controls),
    ]
    for head in done.heads:
        for key, name in (("before", "before"), ("after", "after"), ("control", "random")):
            value = getattr(head, f"{attention}_{key}")
            rows.append((f"{attention}_share", f"{head.layer}.{head.head}", name, value))
    what, where, when, values = zip(*rows, strict=True)
    return {"quantity": what, "head": where, "pairs_ablated": when, "value": values}


_MARKS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("random other pairs", "control",
     {"symbol": "line-ew-open", "size": 12, "color": MISSING, "line": {"width": 2}}),
    ("after", "after", {"symbol": "diamond", "size": 9, "color": MARK}),
    ("before", "before", {"symbol": "circle", "size": 9, "color": BEFORE}),
)  # fmt: skip
"""Shapes tell the marks apart where colours do not; what was before is drawn on top."""


def _add_loss(fig: go.Figure, done: AblationReport) -> None:
    values = {
        "control": [(2, loss, f"random other pairs, draw {i}") for i, loss in
                    enumerate(done.loss_controls, 1)],
        "after": [(1, done.loss_after, "after")],
        "before": [(0, done.loss_before, "before")],
    }  # fmt: skip
    for name, key, marker in _MARKS:
        known = [entry for entry in values[key] if np.isfinite(entry[1])]
        fig.add_trace(
            go.Scatter(
                x=[x for x, _, _ in known],
                y=[loss for _, loss, _ in known],
                mode="markers",
                marker=marker,
                customdata=[f"loss {number(loss)} nats/token<br>{what}" for _, loss, what in known],
                hovertemplate="%{customdata}<extra></extra>",
                name=name,
                legendgroup=key,
                showlegend=False,
            )
        )
    if not np.isfinite(done.loss_before):
        _say(fig, "no loss: one token has no next", "x", "y")


def _add_heads(fig: go.Figure, heads: tuple[HeadEffect, ...], attention: Attention) -> None:
    shares = {
        key: np.array([getattr(head, f"{attention}_{key}") for head in heads], dtype=np.float64)
        for _, key, _ in _MARKS
    }
    x: list[float | None] = []
    y: list[float | None] = []
    for column, (before, after) in enumerate(zip(shares["before"], shares["after"], strict=True)):
        if np.isfinite(before) and np.isfinite(after):
            x += [column, column, None]
            y += [before, after, None]
    fig.add_trace(
        go.Scatter(
            x=x, y=y, mode="lines", line={"color": MISSING, "width": 1}, opacity=0.6,
            hoverinfo="skip", showlegend=False, name="from before to after", xaxis="x2", yaxis="y2",
        )
    )  # fmt: skip
    for rank, (name, key, marker) in enumerate(_MARKS):
        fig.add_trace(
            go.Scatter(
                x=list(range(len(heads))),
                y=shares[key].astype(np.float32),
                mode="markers",
                marker=marker,
                customdata=[
                    f"layer {head.layer} head {head.head}, pairs {ranges(head.pairs)}<br>"
                    f"{_NAMES[attention]} {name}: {percent(share)}<br>"
                    f"attention moved {number(head.change)} (random {number(head.change_control)})"
                    for head, share in zip(heads, shares[key], strict=True)
                ],
                hovertemplate="%{customdata}<extra></extra>",
                name=name if key != "control" else "random other pairs (median for heads)",
                legendgroup=key,
                legendrank=1000 - rank,
                xaxis="x2",
                yaxis="y2",
            )
        )
    if not any(np.isfinite(values).any() for values in shares.values()):
        _say(fig, "no value on prompts this short", "x2", "y2")


def _say(fig: go.Figure, text: str, x: str, y: str) -> None:
    """Writes into the middle of an empty plot."""
    fig.add_annotation(
        x=0.5, y=0.5, xref=f"{x} domain", yref=f"{y} domain", text=text, showarrow=False,
        font={"size": 14},
    )  # fmt: skip
