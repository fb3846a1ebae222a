"""Results as outputs of a notebook: HTML that brings all it needs and fetches nothing.

It is the same in Jupyter, VS Code and Colab. What is drawn by JavaScript is drawn where scripts
run; where they do not (a notebook that is not trusted, or is shown as a file), the body can still
be read.

An output with figures holds Plotly, about 2 MB of compressed text, because outputs are shown apart
from each other (Colab gives each a page of its own) and nothing may be fetched. On one page the
library is unpacked once. What `.plot()` returns is shown by Plotly's own renderer instead, which
may share one copy over a notebook, so a notebook that has to stay small shows figures that way.
"""

from __future__ import annotations

import hashlib
import html
import json
from functools import cache
from typing import TYPE_CHECKING

from lens_rope.views.colors import THEME
from lens_rope.views.libraries import Library, asset, packed, safe_json, script_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    import plotly.graph_objects as go

WAITING = (
    '<p class="lr-waiting">What belongs here is drawn by JavaScript: run the cell, or trust the '
    "notebook.</p>"
)
"""Stands in `body` where something will be drawn, and goes when it is."""

# Control characters, and marks that turn the direction of all that follows, as escapes: a name can
# hold them, and markup never does.
_UNSEEN = {
    code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
    for code in (
        *range(9), 11, 12, *range(14, 32), *range(127, 160), 0x200E, 0x200F, *range(0x2028, 0x202F),
        *range(0x2066, 0x206A),
    )
}  # fmt: skip

_DRAW = """
function (root, libraries) {
  return lensRopePlots(root, libraries.Plotly, %s, [%s], %s);
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
            under which nothing has an id, because an output can be shown twice. It may return a
            promise.
        css: Style sheet besides the common one; its selectors begin with `.lens-rope`.
    """
    code = "\n".join(asset(name) for name in ("output.js", *scripts))
    body, draw = _encodable(body.translate(_UNSEEN)), _encodable(draw)
    # Names are the result's own content, so that the same result is the same output.
    key = hashlib.sha256((body + draw).encode()).hexdigest()[:16]
    brought = script_json({name: _brought(name) for name in libraries})
    # Notebooks typeset what lies between dollar signs, unless a class forbids it.
    return (
        f"<style>{asset('notebook.css')}{css}</style>"
        f'<div class="lens-rope tex2jax_ignore mathjax_ignore" data-lens-rope="{key}">{body}</div>'
        f"<script>(function () {{\n{code}\n"
        f"lensRopeOutput({json.dumps(key)}, {brought}, {draw.strip()});\n"
        "}());</script>"
    )


def figures_output(body: str, figures: Sequence[go.Figure], *, subject: str = "") -> str:
    """A body with figures below it.

    Args:
        body: HTML, escaped already.
        figures: Figures in the common style.
        subject: What the figures are of, for the titles and file names of what is saved.
    """
    parts, specs = [body], []
    for fig in figures:
        meta = fig.layout.meta  # type: ignore[attr-defined]
        title = meta.get("title")
        caption = f"<figcaption>{html.escape(title)}</figcaption>" if title else ""
        label = html.escape(meta["label"], quote=True)
        parts.append(
            f'<figure class="lr-figure">{caption}<div class="lr-plot" role="img" '
            f'aria-label="{label}"></div>{WAITING}</figure>'
        )
        specs.append(safe_json(fig.to_json(remove_uids=True) or "{}"))
    return output(
        "".join(parts),
        libraries=["Plotly"],
        scripts=["figure.js", "plots.js"],
        draw=_DRAW % (script_json(THEME), ",\n".join(specs), script_json(subject)),
    )


def _encodable(text: str) -> str:
    """Text that can be saved as UTF-8: half a character, which a token can be, is an escape."""
    return text.encode("utf-8", "backslashreplace").decode()


@cache
def _brought(library: Library) -> dict[str, str]:
    """A library as an output holds it: its code, and a name for exactly this code."""
    code = packed(library)
    return {"id": hashlib.sha256(code.encode()).hexdigest()[:16], "code": code}
