"""What every command does around its one call: load, show progress, say what went wrong."""

from __future__ import annotations

import contextlib
import gc
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import typer

from lens_rope.errors import LensRopeError

if TYPE_CHECKING:
    from lens_rope.cli.options import Backend

_INTERRUPTED = 130
_TERMINATED = 128 + signal.SIGTERM
# Stages that are shown below each other; a run over many prompts has thousands.
_SHOWN = 6


class _Terminated(KeyboardInterrupt):
    """The process was asked to end; everything that tidies up after an interrupt does so."""


def use_threads(threads: int | None) -> None:
    """Sets how many threads torch computes with on the CPU; None leaves it as it is."""
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Looks for no cyclic garbage meanwhile.

    Importing torch, transformers and TransformerLens makes millions of objects that stay; going
    through them again and again takes a fifth of the time of the imports.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def load(
    model: str, backend: Backend, device: str | None, dtype: str, threads: int | None = None
) -> Any:
    """Loads a model, as `load_model`; it runs with this many threads."""
    with _no_collection(), progress() as step:
        use_threads(threads)
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
                while len(tasks) >= _SHOWN:
                    bar.remove_task(tasks.pop(next(iter(tasks))))
                tasks[stage] = bar.add_task(stage, total=total or None)
            bar.update(tasks[stage], completed=done)

        yield step


class Bars:
    """Progress bars that open when they are first needed and can be closed in between.

    What is printed while bars are drawn would be drawn over.
    """

    def __init__(self) -> None:
        self._open = contextlib.ExitStack()
        self._step: Callable[[str, int, int], None] | None = None

    def __call__(self, stage: str, done: int, total: int) -> None:
        """As the function that `progress` gives."""
        if self._step is None:
            self._step = self._open.enter_context(progress())
        self._step(stage, done, total)

    def close(self) -> None:
        """Ends the bars that are drawn."""
        self._step = None
        self._open.close()


@contextlib.contextmanager
def _ends_like_an_interrupt() -> Iterator[None]:
    """While this runs, being asked to end (SIGTERM) tidies up as an interrupt does."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread hears signals
        return

    def end(*_: Any) -> None:
        raise _Terminated

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def errors() -> Iterator[None]:
    """Turns what can go wrong into a sentence on stderr and an exit code."""
    with warnings.catch_warnings(), _ends_like_an_interrupt():
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
            is_asked = isinstance(interrupt, _Terminated)
            raise typer.Exit(_TERMINATED if is_asked else _INTERRUPTED) from interrupt


def complain(sentence: str) -> None:
    """A sentence on stderr."""
    typer.echo("lens-rope: " + " ".join(sentence.split()), err=True)
