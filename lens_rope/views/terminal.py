"""Tables for a terminal, as text. Nothing is printed here."""

from __future__ import annotations

import csv
import io
import json
import math
import textwrap
from typing import TYPE_CHECKING, Any, Literal

from lens_rope.views.head_descriptions import describe_rope
from lens_rope.views.rope_figures import rope_groups
from lens_rope.views.tables import Description, Table
from lens_rope.words import number

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import pandas as pd

    from lens_rope.spec import RopeSpec

CHECK_COLUMNS = (
    "prompt", "layer", "route", "relative_error", "pattern_error", "norm_error", "angle_error",
    "max_residual", "ok",
)  # fmt: skip
MAX_ROWS = 40
"""Rows that `frame_table` shows at most."""

WIDTH = 140
"""Columns of a terminal that tables and sentences are made for."""


def rope_table(spec: RopeSpec) -> str:
    """The rotation of each kind of layer, then its pairs one by one.

    Args:
        spec: The rotation of each layer.
    """
    groups = rope_groups(spec.layers)
    kinds = describe_rope(spec).table
    tables = [] if kinds is None else [table_text(kinds)]
    for layers, rope in groups:
        if rope.n_pairs:
            values = zip(rope.inv_freq, rope.wavelength, rope.cycles, strict=True)
            tables.append(
                _table(
                    f"Pairs of layers {layers}",
                    ("pair", "rad/token", "wavelength (tokens)", f"cycles over {rope.context:,}"),
                    [
                        (str(pair), f"{w:.6g}", number(length), number(turns))
                        for pair, (w, length, turns) in enumerate(values)
                    ],
                )
            )
    return "\n".join(tables)


def check_table(rows: Sequence[dict[str, Any]], form: Literal["table", "json", "csv"]) -> str:
    """The verification, one row per prompt and layer.

    A check that was not made is empty, or null in JSON.

    Args:
        rows: Values by the names in `CHECK_COLUMNS`.
        form: What to write.
    """

    def known(value: Any) -> Any:
        return None if isinstance(value, float) and not math.isfinite(value) else value

    cells = [{name: known(row.get(name)) for name in CHECK_COLUMNS} for row in rows]
    if form == "json":
        return json.dumps({"layers": cells}, allow_nan=False, indent=1) + "\n"
    if form == "csv":
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(CHECK_COLUMNS)
        writer.writerows([row.values() for row in cells])
        return text.getvalue()

    def shown(name: str, value: Any) -> str:
        if name == "ok":
            return "yes" if value else "FAILS"
        if value is None:
            return ""
        return f"{value:.1e}" if isinstance(value, float) else str(value)

    return _table(
        "Verification (relative errors against the model's own scores)",
        CHECK_COLUMNS,
        [[shown(name, row[name]) for name in CHECK_COLUMNS] for row in cells],
    )


def frame_table(
    title: str,
    frame: pd.DataFrame,
    columns: Mapping[str, tuple[str, Callable[[Any], str]]],
    *,
    wraps: Sequence[str] = (),
) -> str:
    """The first rows of a table, as many as a terminal shows well.

    A value that does not exist is empty.

    Args:
        title: Title of the table.
        frame: The table.
        columns: Heading and form of each column that is shown, by its name.
        wraps: Headings of columns that may take several lines.
    """
    return table_text(Table(title, frame, columns, tuple(wraps)))


def table_text(table: Table) -> str:
    """The first rows of a table, and how many more there are."""
    text = _table(table.title, table.headings, table.cells(MAX_ROWS), table.wraps)
    more = table.n_more(MAX_ROWS)
    return text + (f"  and {more:,} more; csv and json have all of them\n" if more > 0 else "")


def description_text(description: Description) -> str:
    """Sentences and table; the notes are shown apart."""
    text = "".join(f"{textwrap.fill(line, WIDTH)}\n" for line in description.sentences)
    return text if description.table is None else text + table_text(description.table)


def _table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    wraps: Sequence[str] = (),
) -> str:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for index, name in enumerate(columns):
        table.add_column(
            name.replace("_", " "),
            justify="left" if index == 0 else "right",
            no_wrap=name not in wraps,
        )
    for row in rows:
        table.add_row(*row)
    # Cells are plain text, never markup, and columns keep their width when output is piped. In a
    # notebook, rich would show the table by itself besides.
    text = io.StringIO()
    Console(
        file=text,
        width=WIDTH,
        markup=False,
        highlight=False,
        color_system=None,
        force_jupyter=False,
    ).print(table)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"
