"""Results as outputs of a notebook: HTML that brings all it needs and fetches nothing.

It is the same in Jupyter, VS Code and Colab. What is drawn by JavaScript is drawn where scripts
run; where they do not (a notebook that is not trusted, or is shown as a file), the body can still
be read.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

from lens_rope.views.colors import GRID, INK, SCALES
from lens_rope.views.libraries import Library, asset, packed, safe_json, script_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    import plotly.graph_objects as go

WAITING = (
    '<p class="lr-waiting">What belongs here is drawn by JavaScript: run the cell, or trust the '
    "notebook.</p>"
)
"""Stands in `body` where something will be drawn, and goes when it is."""

_DRAW_FIGURES = """
function (root, libraries) {
  var theme = %s, specs = [%s], mode = lensRopeMode(root);
  root.querySelectorAll(".lr-plot").forEach(function (element, i) {
    lensRopeRecolour(specs[i], theme, mode);
    libraries.Plotly.newPlot(element, specs[i].data, specs[i].layout, {
      displaylogo: false, responsive: true, showSendToCloud: false,
      modeBarButtons: [["toImage", "zoom2d", "resetScale2d"]],
      toImageButtonOptions: { format: "svg", filename: "lens_rope" }
    });
  });
}
"""


def output(
    body: str, *, libraries: Sequence[Library], scripts: Sequence[str], draw: str, css: str = ""
) -> str:
    """One output of a notebook.

    Args:
        body: HTML; everything in it that is text of a model or a user is escaped already.
        libraries: Libraries that `draw` needs.
        scripts: Names of assets that define functions which `draw` calls.
        draw: A JavaScript function `(root, libraries)` that draws into the element of the body,
            under which nothing has an id, because an output can be shown twice.
        css: Style sheet besides the common one; its selectors begin with `.lens-rope`.
    """
    code = "\n".join(asset(name) for name in ("output.js", *scripts))
    # Names are the result's own content, so that the same result is the same output.
    key = hashlib.sha256((body + draw).encode()).hexdigest()[:16]
    return (
        f"<style>{asset('notebook.css')}{css}</style>"
        f'<div class="lens-rope" data-lens-rope="{key}">{body}</div>'
        f"<script>(function () {{\n{code}\n"
        f"lensRopeOutput({json.dumps(key)}, "
        f"{script_json({name: packed(name) for name in libraries})}, {draw.strip()});\n"
        "}());</script>"
    )


def figures_output(body: str, figures: Sequence[go.Figure]) -> str:
    """A body with figures below it.

    Args:
        body: HTML, escaped already.
        figures: Figures in the common style.
    """
    from html import escape

    parts, specs = [body], []
    for fig in figures:
        label = escape(fig.layout.meta["label"], quote=True)  # type: ignore[attr-defined]
        parts.append(f'<div class="lr-plot" role="img" aria-label="{label}"></div>')
        specs.append(safe_json(fig.to_json(remove_uids=True) or "{}"))
    theme = script_json({"scales": SCALES, "ink": INK, "grid": GRID})
    return output(
        "".join(parts) + WAITING,
        libraries=["Plotly"],
        scripts=["figure.js"],
        draw=_DRAW_FIGURES % (theme, ",\n".join(specs)),
    )
