"""A report as the output of a notebook: the headlines, the key figure, and where the rest is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lens_rope.reporting.headlines import headlines
from lens_rope.views.notebook import figures_output
from lens_rope.views.result_html import text_html

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from lens_rope.reporting.data import ReportData


def report_html(data: ReportData, key_figure: go.Figure) -> str:
    """The headlines as a list, with the figure below.

    Args:
        data: The numbers of the report, and the sentences computed from them.
        key_figure: The one picture that says most.
    """
    of = f"Report on {data.model.name}: {data.named_prompts()}"
    found = "".join(
        f"<li><strong>{text_html(topic)}.</strong> {text_html(text)}</li>"
        for topic, text, _ in headlines(data)
    )
    notes = "".join(f'<p class="lr-note">Note: {text_html(note)}</p>' for note in data.notes)
    return figures_output(
        f"<p><strong>{text_html(of)}</strong></p>"
        f"<ul>{found}</ul>{notes}"
        '<p class="lr-small"><code>print(report)</code> has all findings; '
        '<code>report.save("folder")</code> writes the page, the numbers as JSON, and every table '
        "as CSV.</p>",
        [key_figure],
        subject=data.model.name,
    )
