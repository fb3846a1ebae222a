"""A result as the output of a notebook: its sentences, its table and its figures."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

from lens_rope.views.notebook import figures_output
from lens_rope.views.tokens import display_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    import plotly.graph_objects as go

    from lens_rope.views.tables import Description, Table

NOTEBOOK_ROWS = 12
"""Rows of a table that an output shows."""

CLEAREST = 1
"""Heads of each pattern that an output shows where there are too many to show all."""

_JOINER = "\u200d"


def result_html(description: Description, figures: Sequence[go.Figure]) -> str:
    """One output: what a result says of itself, with its figures below.

    Args:
        description: Sentences, table and notes, as text that is not escaped.
        figures: Figures in the common style.
    """
    parts = [f"<p>{text_html(sentence)}</p>" for sentence in description.sentences]
    if description.sentences:
        parts[0] = f"<p><strong>{text_html(description.sentences[0])}</strong></p>"
    if description.table is not None:
        parts.append(table_html(description.table))
    parts += [f'<p class="lr-note">Note: {text_html(note)}</p>' for note in description.notes]
    return figures_output("".join(parts), figures, subject=description.subject)


def table_html(table: Table, *, n_rows: int = NOTEBOOK_ROWS) -> str:
    """The first rows of a table as HTML, and how many more there are.

    Args:
        table: The table.
        n_rows: Rows that are shown at most.
    """
    cells = table.cells(n_rows)
    # Words begin at the left, numbers end at the right.
    classes = [
        ' class="lr-words"' if _is_words([row[i] for row in cells]) else ""
        for i in range(len(table.headings))
    ]
    headings = "".join(
        f'<th scope="col"{style}>{text_html(name)}</th>'
        for style, name in zip(classes, table.headings, strict=True)
    )
    rows = []
    for first, *others in cells:
        rest = "".join(
            f"<td{style}>{text_html(cell)}</td>"
            for style, cell in zip(classes[1:], others, strict=True)
        )
        rows.append(f'<tr><th scope="row">{text_html(first)}</th>{rest}</tr>')
    more = table.n_more(n_rows)
    left_out = (
        f'<p class="lr-small">and {more:,} more; <code>{text_html(table.source)}</code> has all of '
        "them</p>"
        if more > 0
        else ""
    )
    return (
        # A caption would be no wider than its table.
        f'<p class="lr-title" aria-hidden="true">{text_html(table.title)}</p>'
        f'<div class="lr-scroll" role="group" aria-label="{text_html(table.title)}" tabindex="0">'
        f'<table aria-label="{text_html(table.title)}">'
        f"<thead><tr>{headings}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>{left_out}"
    )


def _is_words(cells: Sequence[str]) -> bool:
    text = "".join(cells)
    return any(map(str.isalpha, text)) and not any(map(str.isdigit, text))


def text_html(text: str) -> str:
    """Text among markup: escaped, and with nothing in it that is not a visible character or space.

    Names of models and prompts can hold control characters and marks that turn the direction of
    what follows; they are spelled out, as in tokens.
    """
    visible = (
        char if char.isprintable() or char == _JOINER else display_text(char) for char in text
    )
    return html.escape("".join(visible), quote=True)
