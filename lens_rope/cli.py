"""The command line: parses, calls, writes. Everything it does has a Python function behind it.

Nothing heavy is imported until a command runs. What goes wrong on purpose (`LensRopeError`) is one
sentence on stderr and an exit code of its own; anything else is a bug and shows its traceback.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lens_rope.errors import InputError, LensRopeError, VerificationError
from lens_rope.reporting.prompts import read_prompts

if TYPE_CHECKING:
    from lens_rope.reporting import Report

# The same as lens_rope.demo.DEMO_MODEL, which cannot be imported here because it needs torch.
DEMO_MODEL = "smollm2-135m"
DEFAULT_MAX_TOKENS = 1024
CHECK_MAX_TOKENS = 128
_INTERRUPTED = 130

app = typer.Typer(
    name="lens-rope",
    help="How a language model uses its rotary position embedding, frequency by frequency.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


class Backend(str, Enum):
    """How the model is run."""

    auto = "auto"
    hooked = "hooked"
    bridge = "bridge"


class ReportFormat(str, Enum):
    """What a report is written as."""

    html = "html"
    json = "json"
    csv = "csv"


class TableFormat(str, Enum):
    """What a table is printed as."""

    table = "table"
    json = "json"
    csv = "csv"


# Options that several commands share. Typer reads these annotations at run time.
_ModelArgument = Annotated[
    str, typer.Argument(help="Hub name, local directory, .gguf file, or smollm2-135m (the demo).")
]
_Text = Annotated[
    list[str] | None, typer.Option("--text", help="A prompt. Can be repeated.")
]  # fmt: skip
_File = Annotated[
    list[Path] | None, typer.Option("--file", help="A text file as a prompt. Can be repeated.")
]
_Prompts = Annotated[
    Path | None,
    typer.Option("--prompts", help='JSON lines, each an object with "text" and maybe "name".'),
]
_Layers = Annotated[str | None, typer.Option(help="Layers to read, like 0-3,7. Default: all.")]
_Context = Annotated[
    int | None,
    typer.Option(min=1, help="Trained context in tokens, where the model is said to have another."),
]
_Backend = Annotated[Backend, typer.Option(help="How to run the model.")]
_Device = Annotated[str | None, typer.Option(help="Such as cpu or cuda. Default: best there is.")]
_Dtype = Annotated[str, typer.Option(help="float32, bfloat16 or float16.")]
_TableFormat = Annotated[TableFormat, typer.Option("--format", help="What to print.")]


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


@app.command()
def report(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL]...",
            help="Hub names, local directories, .gguf files. Default: the demo model smollm2-135m.",
        ),
    ] = None,
    text: _Text = None,
    file: _File = None,
    prompts: _Prompts = None,
    layers: _Layers = None,
    heads: Annotated[
        str | None,
        typer.Option(
            help="Heads of the gallery as layer.head, like 16.0,27.7. Default: the most telling."
        ),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=f"Cut longer prompts to this many tokens. Default: {DEFAULT_MAX_TOKENS:,}, or the "
            "model's context where that is shorter.",
        ),
    ] = None,
    context: _Context = None,
    out: Annotated[Path, typer.Option(help="Folder to write into, one folder per model.")] = Path(
        "lens-rope-report"
    ),
    backend: _Backend = Backend.auto,
    device: _Device = None,
    dtype: _Dtype = "float32",
    format: Annotated[
        list[ReportFormat] | None,
        typer.Option("--format", help="What to write. Can be repeated. Default: all."),
    ] = None,
) -> None:
    """Write a report on each model: a page, JSON and tables."""
    with _errors():
        names, texts = read_prompts(text, file, prompts)
        wanted_layers, wanted_heads = _parse_layers(layers), _parse_heads(heads)
        formats = [entry.value for entry in dict.fromkeys(format or ReportFormat)]
        folders = _folders(out, models or [DEMO_MODEL])
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
                _complain(f"{model}: {error}" if len(folders) > 1 else str(error))
                failed.append((model, error))
                continue
            for note in done.data.notes:
                _complain(f"note: {note}")
            typer.echo(str(done))
            typer.echo(f"Wrote {folder / 'report.html' if 'html' in formats else folder}")
        if "html" in formats:
            _write_index(out, failed if len(folders) > 1 else [])
        if failed:
            if len(folders) > 1:
                _complain(f"no report on {', '.join(model for model, _ in failed)}")
            raise typer.Exit(failed[0][1].exit_code)


@app.command()
def inspect(
    model: _ModelArgument,
    layers: _Layers = None,
    context: _Context = None,
    backend: _Backend = Backend.auto,
    device: _Device = None,
    dtype: _Dtype = "float32",
    format: _TableFormat = TableFormat.table,
) -> None:
    """Print what RoPE does in each layer of a model."""
    with _errors():
        wanted = _parse_layers(layers)
        loaded = _load(model, backend, device, dtype)
        from lens_rope.capturing import read_rope

        with _progress() as step:
            step("reading the rotation", 0, 0)
            spec = read_rope(loaded, wanted, context=context)
        if format is TableFormat.table:
            from lens_rope.views.terminal import rope_table

            typer.echo(rope_table(spec), nl=False)
        elif format is TableFormat.csv:
            typer.echo(spec.to_dataframe().to_csv(index=False, lineterminator="\n"), nl=False)
        else:
            from lens_rope.reporting.schema import rope_to_dict

            content = {"model": spec.model, "rope": rope_to_dict(spec)}
            typer.echo(json.dumps(content, allow_nan=False, indent=1))


@app.command()
def check(
    model: _ModelArgument,
    text: _Text = None,
    file: _File = None,
    prompts: _Prompts = None,
    layers: _Layers = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=f"Cut longer prompts to this many tokens. Default: {CHECK_MAX_TOKENS:,}, or the "
            "model's context where that is shorter.",
        ),
    ] = None,
    context: _Context = None,
    backend: _Backend = Backend.auto,
    device: _Device = None,
    dtype: _Dtype = "float32",
    format: _TableFormat = TableFormat.table,
) -> None:
    """Verify that a model can be read exactly; exit 1 when a layer cannot."""
    with _errors():
        names, texts = read_prompts(text, file, prompts)
        wanted = _parse_layers(layers)
        loaded = _load(model, backend, device, dtype)
        rows, failures = _check_layers(loaded, texts, names, wanted, max_tokens, context)
        from lens_rope.views.terminal import check_table

        typer.echo(check_table(rows, format.value), nl=False)
        for failure in failures:
            _complain(str(failure))
        if failures:
            raise typer.Exit(1)


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
    loaded = _load(model, backend, device, dtype)
    from lens_rope.reporting import report as make_report

    max_tokens = _token_limit(loaded, max_tokens, DEFAULT_MAX_TOKENS)
    with _progress() as step:
        return make_report(
            loaded, texts, layers=layers, heads=heads, max_tokens=max_tokens, context=context,
            names=names, progress=step,
        )  # fmt: skip


def _token_limit(model: Any, asked: int | None, default: int) -> int:
    """What was asked for as it is; a default no longer than what the model takes."""
    from lens_rope.hosts import host_of

    return min(default, host_of(model).max_tokens) if asked is None else asked


def _load(model: str, backend: Backend, device: str | None, dtype: str) -> Any:
    with _progress() as step:
        step(f"loading {model}", 0, 0)
        from lens_rope.models import load_model

        return load_model(model, backend.value, device=device, dtype=dtype)


def _check_layers(
    model: Any,
    texts: list[str] | None,
    names: list[str] | None,
    layers: list[int] | None,
    max_tokens: int | None,
    context: int | None,
) -> tuple[list[dict[str, Any]], list[VerificationError]]:
    """One row per prompt and layer, and the errors of the layers that cannot be read."""
    from lens_rope.capturing import capture
    from lens_rope.hosts import host_of
    from lens_rope.reporting.sample import SAMPLE_NAME, sample_text

    if texts is None:
        texts, names = [sample_text()], [SAMPLE_NAME]
    max_tokens = _token_limit(model, max_tokens, CHECK_MAX_TOKENS)
    rows: list[dict[str, Any]] = []
    failures: list[VerificationError] = []

    def run(text: str, name: str, some: list[int] | None, step: Callable[..., None]) -> None:
        qk = capture(
            model, text, some, names=[name], max_tokens=max_tokens, context=context,
            progress=lambda done, total: step(f"checking {name}", done, total),
        )  # fmt: skip
        rows.extend({**row, "ok": True} for row in qk.verification().to_dict("records"))

    for text, name in zip(texts, names or [], strict=True):
        with _progress() as step:
            try:
                run(text, name, layers, step)
                continue
            except VerificationError:
                pass  # a capture ends at the first such layer; the table should show them all
            for layer in layers if layers is not None else host_of(model).attention_layers:
                try:
                    run(text, name, [layer], step)
                except VerificationError as error:
                    failures.append(error)
                    rows.append(
                        {
                            "prompt": name, "layer": error.layer, "route": None,
                            f"{'relative' if error.check == 'score' else error.check}_error":
                            error.error, "ok": False,
                        }
                    )  # fmt: skip
    return rows, failures


def _write_index(out: Path, failed: list[tuple[str, LensRopeError]]) -> None:
    from lens_rope.reporting.page import render_index
    from lens_rope.reporting.write import read_markers, write_index

    entries = read_markers(out)
    if entries:
        write_index(out, render_index(entries, [(model, str(error)) for model, error in failed]))


def _folders(out: Path, models: list[str]) -> dict[str, Path]:
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


def _parse_layers(value: str | None) -> list[int] | None:
    """`0-3,7` as numbers, ascending."""
    if value is None:
        return None
    layers: set[int] = set()
    for part in value.split(","):
        match = re.fullmatch(r"\s*(\d{1,5})(?:\s*-\s*(\d{1,5}))?\s*", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last:
            raise InputError(f"--layers {value!r} is not understood; write it like 0-3,7")
        layers.update(range(first, last + 1))
    return sorted(layers)


def _parse_heads(value: str | None) -> list[tuple[int, int]] | None:
    """`16.0,27.7` as (layer, head), in the order given."""
    if value is None:
        return None
    heads: dict[tuple[int, int], None] = {}
    for part in value.split(","):
        match = re.fullmatch(r"\s*(\d{1,5})\.(\d{1,5})\s*", part)
        if not match:
            raise InputError(
                f"--heads {value!r} is not understood; write layer.head, like 16.0,27.7"
            )
        heads[int(match[1]), int(match[2])] = None
    return list(heads)


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar on stderr, as a function of (stage, done, total); silent when piped."""
    if not sys.stderr.isatty():
        yield lambda stage, done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    with Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as bar:
        tasks: dict[str, Any] = {}

        def step(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=total or None)
            bar.update(tasks[stage], completed=done)

        yield step


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    """Turns what can go wrong into a sentence on stderr and an exit code."""
    with warnings.catch_warnings():
        # Other libraries' warnings are for programmers; ours are for the user.
        warnings.simplefilter("ignore")
        warnings.filterwarnings("always", category=UserWarning, module=r"lens_rope(\.|$)")
        warnings.showwarning = lambda message, *rest, **kept: _complain(f"warning: {message}")
        try:
            yield
        except LensRopeError as error:
            _complain(str(error))
            raise typer.Exit(error.exit_code) from error
        except KeyboardInterrupt as interrupt:
            _complain("interrupted; nothing was left half-written")
            raise typer.Exit(_INTERRUPTED) from interrupt


def _complain(sentence: str) -> None:
    typer.echo("lens-rope: " + " ".join(sentence.split()), err=True)


if __name__ == "__main__":
    main()
