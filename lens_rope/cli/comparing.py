"""`lens-rope compare`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from lens_rope.cli.options import Format, TableFormat
from lens_rope.cli.running import complain, errors


def compare(
    report_a: Annotated[
        Path, typer.Argument(metavar="A", help="Folder of a report, or its report.json.")
    ],
    report_b: Annotated[Path, typer.Argument(metavar="B", help="The same of the other report.")],
    names: Annotated[
        list[str] | None,
        typer.Option(
            "--name",
            help="What to call a report; give it twice, for A and B. Default: their models.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder to write compare.html, comparison.json and tables into."),
    ] = None,
    format: Format = TableFormat.table,
) -> None:
    """Say what differs between two reports; no model is needed."""
    with errors():
        from lens_rope.reporting.comparison import compare as compare_reports

        done = compare_reports(report_a, report_b, names=names or None)
        if out is not None:
            done.save(out)
        for note in done.notes:
            complain(f"note: {note}")
        if format is TableFormat.table:
            from lens_rope.reporting.comparison_page import describe
            from lens_rope.views.terminal import description_text

            typer.echo(description_text(describe(done)), nl=False)
        elif format is TableFormat.csv:
            from lens_rope.reporting.tables import to_csv

            typer.echo(to_csv(done.to_dataframe()), nl=False)
        else:
            typer.echo(json.dumps(done.to_dict(), allow_nan=False, indent=1))
        if out is not None:
            # On stderr where stdout is data.
            typer.echo(f"Wrote {out / 'compare.html'}", err=format is not TableFormat.table)
