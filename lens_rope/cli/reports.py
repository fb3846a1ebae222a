"""`lens-rope report`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lens_rope.cli.options import (
    DEMO_MODEL,
    Attention,
    AttentionOption,
    Backend,
    BackendOption,
    Context,
    Device,
    Dtype,
    File,
    Layers,
    MaxTokens,
    Prompts,
    ReportFormat,
    Text,
    Threads,
)
from lens_rope.cli.parsing import parse_heads, parse_layers
from lens_rope.cli.running import Bars, complain, errors, use_threads
from lens_rope.reporting.prompts import open_prompts

if TYPE_CHECKING:
    from lens_rope.reporting import Report
    from lens_rope.reporting.batch import Outcome


def report(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL",
            help="Hub names, local directories, .gguf files. Default: the demo model smollm2-135m.",
        ),
    ] = None,
    text: Text = None,
    file: File = None,
    prompts: Prompts = None,
    layers: Layers = None,
    heads: Annotated[
        str | None,
        typer.Option(
            help="Heads to show in the gallery as layer.head, like 16.0,27.7. Default: the most "
            "telling ones."
        ),
    ] = None,
    max_tokens: MaxTokens = None,
    context: Context = None,
    interventions: Annotated[
        bool,
        typer.Option(
            " /--no-interventions",
            help="Do not run the first prompt again without the best pair of each sink head.",
            show_default=False,
        ),
    ] = True,
    out: Annotated[
        Path,
        typer.Option(
            help="Folder to write into: one folder per model, index.html that compares them, and "
            "run.json with what became of each."
        ),
    ] = Path("lens-rope-report"),
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Leave reports as they are that would come out the same: same model, prompts, "
            "options, formats and version. The others are made.",
        ),
    ] = False,
    backend: BackendOption = Backend.auto,
    device: Device = None,
    dtype: Dtype = "float32",
    attention: AttentionOption = Attention.auto,
    threads: Threads = None,
    format: Annotated[
        list[ReportFormat] | None,
        typer.Option("--format", help="What to write. Can be repeated. Default: all."),
    ] = None,
) -> None:
    """Write a report on each model: a page, JSON and tables, and an index that compares them.

    A model that fails is told and does not stop the others. A stopped run goes on with --resume.
    """
    with errors():
        found = open_prompts(text, file, prompts)
        wanted_layers, wanted_heads = parse_layers(layers), parse_heads(heads)
        formats: list[Any] = [entry.value for entry in dict.fromkeys(format or ReportFormat)]
        asked = list(dict.fromkeys(models or [DEMO_MODEL]))
        bars = Bars()

        def finished(outcome: Outcome, made: Report | None) -> None:
            bars.close()
            _say(outcome, made, is_alone=len(asked) == 1, has_page="html" in formats)

        from lens_rope.reporting.batch import BatchOptions, report_models

        options = BatchOptions(
            layers=None if wanted_layers is None else tuple(wanted_layers),
            heads=None if wanted_heads is None else tuple(wanted_heads),
            max_tokens=max_tokens, context=context, interventions=interventions,
            backend=backend.value, device=device, dtype=dtype, attention=attention.value,
        )  # fmt: skip
        use_threads(threads)
        try:
            outcomes = report_models(
                asked, out, found, options=options, formats=formats, resume=resume,
                progress=bars, tell=complain, finished=finished,
            )  # fmt: skip
        finally:
            bars.close()
        failed = [outcome for outcome in outcomes if outcome.status == "failed"]
        if failed:
            if len(asked) > 1:
                complain(f"failed: {', '.join(outcome.model for outcome in failed)}")
            raise typer.Exit(failed[0].exit_code)


def _say(outcome: Outcome, made: Report | None, *, is_alone: bool, has_page: bool) -> None:
    """What became of one model: failures and notes on stderr, findings on stdout."""
    page = outcome.folder / "report.html" if has_page else outcome.folder
    if outcome.status == "failed":
        complain(f"{outcome.reason}" if is_alone else f"{outcome.model}: {outcome.reason}")
    elif made is None:
        typer.echo(f"Kept {page}")
    else:
        for note in made.data.notes:
            complain(f"note: {note}")
        typer.echo(str(made))
        typer.echo(f"Wrote {page}")
