"""`lens-rope report`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lens_rope.cli.options import (
    DEFAULT_MAX_TOKENS,
    DEMO_MODEL,
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
)
from lens_rope.cli.parsing import parse_heads, parse_layers
from lens_rope.cli.running import complain, errors, load, progress, token_limit
from lens_rope.errors import LensRopeError
from lens_rope.reporting.prompts import read_prompts

if TYPE_CHECKING:
    from lens_rope.reporting import Report


def report(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL]...",
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
            help="Heads of the gallery as layer.head, like 16.0,27.7. Default: the most telling."
        ),
    ] = None,
    max_tokens: MaxTokens = None,
    context: Context = None,
    out: Annotated[Path, typer.Option(help="Folder to write into, one folder per model.")] = Path(
        "lens-rope-report"
    ),
    backend: BackendOption = Backend.auto,
    device: Device = None,
    dtype: Dtype = "float32",
    format: Annotated[
        list[ReportFormat] | None,
        typer.Option("--format", help="What to write. Can be repeated. Default: all."),
    ] = None,
) -> None:
    """Write a report on each model: a page, JSON and tables."""
    with errors():
        names, texts = read_prompts(text, file, prompts)
        wanted_layers, wanted_heads = parse_layers(layers), parse_heads(heads)
        formats = [entry.value for entry in dict.fromkeys(format or ReportFormat)]
        folders = folders_of(out, models or [DEMO_MODEL])
        # Before any model is loaded: loading takes long, and finding out afterwards is a waste.
        from lens_rope.reporting.write import check_folder, check_index

        if "html" in formats:
            check_index(out)
        for folder in folders.values():
            check_folder(folder)

        failed: list[tuple[str, LensRopeError]] = []
        for model, folder in folders.items():
            try:
                done = _report_one(
                    model, texts, names, wanted_layers, wanted_heads, max_tokens, context, backend,
                    device, dtype,
                )  # fmt: skip
                done.save(folder, formats=formats)  # type: ignore[arg-type]
            except LensRopeError as error:
                complain(f"{model}: {error}" if len(folders) > 1 else str(error))
                failed.append((model, error))
                continue
            for note in done.data.notes:
                complain(f"note: {note}")
            typer.echo(str(done))
            typer.echo(f"Wrote {folder / 'report.html' if 'html' in formats else folder}")
        if "html" in formats:
            _write_index(out, failed if len(folders) > 1 else [])
        if failed:
            if len(folders) > 1:
                complain(f"no report on {', '.join(model for model, _ in failed)}")
            raise typer.Exit(failed[0][1].exit_code)


def _report_one(
    model: str,
    texts: list[str] | None,
    names: list[str] | None,
    layers: list[int] | None,
    heads: list[tuple[int, int]] | None,
    max_tokens: int | None,
    context: int | None,
    backend: Backend,
    device: str | None,
    dtype: str,
) -> Report:
    loaded = load(model, backend, device, dtype)
    from lens_rope.reporting import report as make_report

    max_tokens = token_limit(loaded, max_tokens, DEFAULT_MAX_TOKENS)
    with progress() as step:
        return make_report(
            loaded, texts, layers=layers, heads=heads, max_tokens=max_tokens, context=context,
            names=names, progress=step,
        )  # fmt: skip


def _write_index(out: Path, failed: list[tuple[str, LensRopeError]]) -> None:
    from lens_rope.reporting.index import render_index
    from lens_rope.reporting.write import read_markers, write_index

    if read_markers(out):
        write_index(out, render_index(out, [(model, str(error)) for model, error in failed]))


def folders_of(out: Path, models: list[str]) -> dict[str, Path]:
    """A folder for each model, named so that no two are the same."""
    folders: dict[str, Path] = {}
    for model in dict.fromkeys(models):
        path = Path(model).expanduser()
        # A path is named by its end, a hub name by both its parts.
        name = path.resolve().name if path.exists() or path.suffix == ".gguf" else model
        name = name.removesuffix(".gguf").replace("/", "--")
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip(".-") or "model"
        taken = {folder.name for folder in folders.values()}
        count, unique = 2, name
        while unique in taken:
            unique, count = f"{name}-{count}", count + 1
        folders[model] = out / unique
    return folders
