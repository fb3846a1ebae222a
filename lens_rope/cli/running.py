"""What every command does around its one call: load, show progress, say what went wrong."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import typer

from lens_rope.errors import LensRopeError

if TYPE_CHECKING:
    from lens_rope.cli.options import Backend

_INTERRUPTED = 130


def load(model: str, backend: Backend, device: str | None, dtype: str) -> Any:
    """Loads a model, as `load_model`."""
    with progress() as step:
        step(f"loading {model}", 0, 0)
        from lens_rope.models import load_model

        return load_model(model, backend.value, device=device, dtype=dtype)


def token_limit(model: Any, asked: int | None, default: int) -> int:
    """What was asked for as it is; a default no longer than what the model takes."""
    from lens_rope.hosts import host_of

    return min(default, host_of(model).max_tokens) if asked is None else asked


def or_sample(names: list[str] | None, texts: list[str] | None) -> tuple[list[str], list[str]]:
    """The names and texts that were given, or the sample text."""
    from lens_rope.reporting.sample import SAMPLE_NAME, sample_text

    if names is None or texts is None:
        return [SAMPLE_NAME], [sample_text()]
    return names, texts


@contextlib.contextmanager
def progress() -> Iterator[Callable[[str, int, int], None]]:
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
def errors() -> Iterator[None]:
    """Turns what can go wrong into a sentence on stderr and an exit code."""
    with warnings.catch_warnings():
        # Other libraries' warnings are for programmers; ours are for the user.
        warnings.simplefilter("ignore")
        warnings.filterwarnings("always", category=UserWarning, module=r"lens_rope(\.|$)")
        warnings.showwarning = lambda message, *rest, **kept: complain(f"warning: {message}")
        try:
            yield
        except LensRopeError as error:
            complain(str(error))
            raise typer.Exit(error.exit_code) from error
        except KeyboardInterrupt as interrupt:
            complain("interrupted; nothing was left half-written")
            raise typer.Exit(_INTERRUPTED) from interrupt


def complain(sentence: str) -> None:
    """A sentence on stderr."""
    typer.echo("lens-rope: " + " ".join(sentence.split()), err=True)
