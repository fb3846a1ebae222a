"""What all pages share: their figures, their scripts, how values are written."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from lens_rope.reporting.report_metrics import SHARE
from lens_rope.reporting.write import GENERATOR
from lens_rope.views.colors import THEME
from lens_rope.views.libraries import asset, plotly_js, safe_json, script_json
from lens_rope.words import number, percent

if TYPE_CHECKING:
    import plotly.graph_objects as go


@dataclass(frozen=True)
class SheetFigure:
    """A figure as a page needs it.

    Attributes:
        id: Id of its element.
        label: What a screen reader calls the element.
        title: What its downloads are called.
        height: Height of the element in pixels.
        json: The figure for its script.
    """

    id: str
    label: str
    title: str
    height: int
    json: Markup


@dataclass
class SheetFigures:
    """Numbers the figures of one page, so that the same page is the same text."""

    count: int = field(default=0, init=False)

    def add(self, fig: go.Figure, of: str = "") -> SheetFigure:
        """A figure in the common style, made ready for the page.

        Args:
            fig: The figure.
            of: What it is of, which tells its title from those of other figures of its kind.
        """
        layout: Any = fig.layout
        if of:
            fig.update_layout(meta={**layout.meta, "title": f"{layout.meta['title']}, {of}"})
        self.count += 1
        return SheetFigure(
            id=f"fig-{self.count - 1}",
            label=layout.meta["label"],
            title=layout.meta["title"],
            height=int(layout.height),
            # Plotly's own JSON packs arrays of numbers.
            json=Markup(safe_json(fig.to_json(remove_uids=True) or "{}")),
        )


def drawing() -> dict[str, Any]:
    """What a page that draws figures needs besides them; Plotly is in it once."""
    from lens_rope import __version__

    return {
        "generator": Markup(GENERATOR + f' {__version__}">'),
        "version": __version__,
        "plotly_js": Markup(plotly_js()),
        "figure_js": Markup(asset("figure.js")),
        "theme": Markup(script_json(THEME)),
    }


def shown(value: float, unit: str) -> str:
    """A value as people read it: shares in percent, a dash where there is none."""
    if not math.isfinite(value):
        return "–"
    return percent(value) if unit == SHARE else number(value)
