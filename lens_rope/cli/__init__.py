"""The command line: parses, calls, writes. Everything it does has a Python function behind it.

Nothing heavy is imported until a command runs. What goes wrong on purpose (`LensRopeError`) is one
sentence on stderr and an exit code of its own; anything else is a bug and shows its traceback.
"""

from __future__ import annotations

from typing import Annotated

import typer

from lens_rope.cli.ablations import ablate
from lens_rope.cli.analyses import features, heads, sinks, spectrum
from lens_rope.cli.checks import check, inspect
from lens_rope.cli.comparing import compare
from lens_rope.cli.options import DEMO_MODEL
from lens_rope.cli.reports import report

app = typer.Typer(
    name="lens-rope",
    help="How a language model uses its rotary position embedding, frequency by frequency.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for _command in (report, compare, inspect, check, sinks, heads, features, spectrum, ablate):
    app.command()(_command)


def main() -> None:
    """Entry point of `lens-rope`."""
    app()


def _show_version(wanted: bool) -> None:
    if wanted:
        from lens_rope import __version__

        typer.echo(f"lens-rope {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    pass


__all__ = ["DEMO_MODEL", "app", "main"]
