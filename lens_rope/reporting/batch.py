"""Reports on several models into one folder: what `lens-rope report` does.

Models are read one after another. One that fails is told and does not stop the others. After each
the folder is up to date: a report per model, `index.html` that compares them, and `run.json` that
says what became of each model. With `resume`, a report that would come out the same is left as it
is, so that a run which was stopped at any moment goes on where it was.
"""

from __future__ import annotations

import contextlib
import gc
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lens_rope import __version__
from lens_rope.demo import DEMO_MODEL
from lens_rope.errors import LensRopeError, ModelLoadError, PromptError
from lens_rope.reporting import FORMATS, Format, Report, report
from lens_rope.reporting.manifest import outdated, read_manifest
from lens_rope.reporting.prompts import DEFAULT_MAX_TOKENS, PromptSource, sample_prompts
from lens_rope.reporting.write import (
    RUN_SCHEMA,
    check_folder,
    check_index,
    check_run,
    now,
    read_marker,
    read_markers,
    recover,
    write_index,
    write_run,
)

if TYPE_CHECKING:
    from lens_rope.models import Backend
    from lens_rope.reporting.gather import StageProgress
    from lens_rope.streaming import AttentionChoice

Status = Literal["done", "skipped", "failed"]


@dataclass(frozen=True)
class Outcome:
    """What became of one model.

    Attributes:
        model: The name that was asked for.
        folder: Where its report is, or would be.
        status: `done`, `skipped` (its report would come out the same), or `failed`.
        reason: Why it failed, as a sentence; else None.
        error: Name of the error's class; else None.
        exit_code: What the command line returns for it; 0 unless it failed.
    """

    model: str
    folder: Path
    status: Status
    reason: str | None = None
    error: str | None = None
    exit_code: int = 0


@dataclass(frozen=True)
class BatchOptions:
    """What every report of a batch is made with; see `report` and `load_model`.

    Attributes:
        layers: Layers to read; None reads all.
        heads: (layer, head) of the gallery; None chooses the most telling ones.
        max_tokens: Longer prompts are cut to this many tokens; None cuts to `DEFAULT_MAX_TOKENS`,
            or to the model's context where that is shorter.
        context: Trained context in tokens, in place of the model's own.
        interventions: Whether to run the first prompt again without the best pairs.
        attention: How the models compute attention while they are read.
        backend: How to run the models.
        device: Where to run them; None is the best there is.
        dtype: Their precision.
    """

    layers: tuple[int, ...] | None = None
    heads: tuple[tuple[int, int], ...] | None = None
    max_tokens: int | None = None
    context: int | None = None
    interventions: bool = True
    attention: AttentionChoice = "auto"
    backend: Backend = "auto"
    device: str | None = None
    dtype: str = "float32"

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for manifests."""
        return {
            "layers": None if self.layers is None else list(self.layers),
            "heads": None if self.heads is None else [list(head) for head in self.heads],
            "max_tokens": self.max_tokens,
            "context": self.context,
            "interventions": self.interventions,
            "attention": self.attention,
            "backend": self.backend,
            "device": self.device,
            "dtype": self.dtype,
        }


def report_models(
    models: Sequence[str],
    out: str | Path,
    prompts: PromptSource | None = None,
    *,
    options: BatchOptions | None = None,
    formats: Sequence[Format] = FORMATS,
    resume: bool = False,
    progress: StageProgress | None = None,
    tell: Callable[[str], None] | None = None,
    finished: Callable[[Outcome, Report | None], None] | None = None,
) -> tuple[Outcome, ...]:
    """Writes a report on each model, an index of all reports in the folder, and `run.json`.

    Args:
        models: Hub names, local directories, `.gguf` files, or the demo model.
        out: The folder; each model gets a folder of its own in it.
        prompts: The prompts, which are gone through once per model; None is the sample text.
        options: What every report is made with.
        formats: What to write.
        resume: Leave reports as they are that would come out the same: those of the same model,
            prompts, options, formats and version of lens_rope.
        progress: Called as `progress(stage, done, total)`.
        tell: Called with a sentence before a report is made again that was there already.
        finished: Called with each outcome, and the report where one was made.

    Returns:
        What became of each model, in the order given. When there is one model only, an exception
        that is not a `LensRopeError` is a bug to be seen and is raised.

    Raises:
        OutputError: Something in the way is not ours, or the folder cannot be written.
    """
    out, options = Path(out), options or BatchOptions()
    prompts = sample_prompts() if prompts is None else prompts
    recover(out)
    folders = folders_of(out, models)
    check_run(out)
    if "html" in formats:
        check_index(out)
    kept: set[str] = set()
    # Before any model is loaded: loading takes long, and finding out afterwards is a waste.
    for model, folder in folders.items():
        reason = _why_again(model, folder, prompts, options, formats) if resume else ""
        if reason is None:
            kept.add(model)
            continue
        check_folder(folder)
        if reason and tell is not None and read_marker(folder) is not None:
            tell(f"the report on {model} is made again: {reason}")
    outcomes: list[Outcome] = []
    run = _Run(out, list(folders), prompts, options, formats, outcomes)
    for model, folder in folders.items():
        made: Report | None = None
        if model in kept:
            outcome = Outcome(model, folder, "skipped")
        else:
            try:
                made = _make(model, folder, prompts, options, formats, progress)
                outcome = Outcome(model, folder, "done")
            except Exception as error:
                if len(folders) == 1 and not isinstance(error, LensRopeError):
                    raise
                outcome = _failure(model, folder, error)
        outcomes.append(outcome)
        run.keep(is_last=len(outcomes) == len(folders))
        if finished is not None:
            finished(outcome, made)
        del made
        gc.collect()  # models hold themselves by their hooks, and the next one needs the room
    return tuple(outcomes)


def folders_of(out: Path, models: Sequence[str]) -> dict[str, Path]:
    """A folder for each model, named so that no two are the same.

    A folder that holds the report of another model is not taken.
    """
    folders: dict[str, Path] = {}
    for model in dict.fromkeys(models):
        path = Path(model).expanduser()
        # A path is named by its end, a hub name by both its parts.
        name = path.resolve().name if path.exists() or path.suffix == ".gguf" else model
        name = name.removesuffix(".gguf").replace("/", "--")
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip(".-") or "model"
        taken = {folder.name for folder in folders.values()}
        folders[model] = next(
            out / unique
            for unique in _numbered(name)
            if unique not in taken and not _is_of_another(out / unique, model)
        )
    return folders


def _numbered(name: str) -> Iterator[str]:
    yield name
    count = 2
    while True:
        yield f"{name}-{count}"
        count += 1


def _is_of_another(folder: Path, model: str) -> bool:
    """Whether a folder holds the report of another model that a folder of this name is made for."""
    content = read_manifest(folder)
    described = None if content is None else content.get("model")
    if not isinstance(described, dict) or not isinstance(described.get("source"), dict):
        return False
    asked, kind = described.get("asked"), described["source"].get("kind")
    path = Path(model).expanduser()
    is_local = model != DEMO_MODEL and path.exists()
    if not isinstance(asked, str) or is_local != (kind in ("directory", "file")):
        return isinstance(asked, str)
    if asked == model or not is_local:
        return asked != model
    # One local model can be asked for in several ways.
    other = Path(asked).expanduser()
    return not (other.exists() and other.samefile(path))


def _why_again(
    model: str,
    folder: Path,
    prompts: PromptSource,
    options: BatchOptions,
    formats: Sequence[Format],
) -> str | None:
    """Why a report has to be made; None where it is there already."""
    from lens_rope.reporting.source import model_source, newest_file

    if read_marker(folder) is None:
        return "there is no whole report"  # without asking what the model is now
    try:
        source, changed = model_source(model, ask_hub=True), newest_file(model)
    except OSError as error:
        return f"its model cannot be looked at ({error.strerror or error})"
    return outdated(
        folder, arguments=options.to_dict(), formats=formats, prompts_sha256=prompts.sha256,
        source=source, changed=changed,
    )  # fmt: skip


def _make(
    model: str,
    folder: Path,
    prompts: PromptSource,
    options: BatchOptions,
    formats: Sequence[Format],
    progress: StageProgress | None,
) -> Report:
    if progress is not None:
        progress(f"loading {model}", 0, 0)
    from lens_rope.hosts import host_of
    from lens_rope.models import load_model
    from lens_rope.reporting.source import model_source

    # Before loading, so that what changes meanwhile is seen as changed later.
    try:
        source = model_source(model)
    except OSError as error:
        raise ModelLoadError(
            f"{error.filename or model} cannot be read ({error.strerror or error}); check the "
            "model's files"
        ) from error
    loaded = load_model(model, options.backend, device=options.device, dtype=options.dtype)
    if source.kind == "hub":
        source = model_source(model)  # the commit that is in the cache now was loaded
    max_tokens = options.max_tokens
    if max_tokens is None:
        max_tokens = min(DEFAULT_MAX_TOKENS, host_of(loaded).max_tokens)
    made = report(
        loaded, prompts, layers=options.layers, heads=options.heads, max_tokens=max_tokens,
        context=options.context, interventions=options.interventions,
        attention=options.attention, progress=progress,
    )  # fmt: skip
    known = made.data.provenance
    if known is not None and known.prompts_sha256 != prompts.sha256:
        raise PromptError(f"{prompts.name} changed while it was read; run it again")
    made.save(folder, formats=formats, source=source, arguments=options.to_dict())
    return made


def _failure(model: str, folder: Path, error: Exception) -> Outcome:
    is_ours = isinstance(error, LensRopeError)
    reason = " ".join(str(error).split())
    if not is_ours:
        reason = (
            f"unexpected {type(error).__name__}: {reason or 'no message'}; run it alone to see "
            "where it comes from"
        )
    if read_marker(folder) is not None:
        reason += " (the report of an earlier run is still there)"
    exit_code = error.exit_code if isinstance(error, LensRopeError) else 1
    return Outcome(model, folder, "failed", reason, type(error).__name__, exit_code)


@dataclass(frozen=True)
class _Run:
    """Keeps `run.json` and `index.html` up to date while outcomes come in."""

    out: Path
    models: Sequence[str]
    prompts: PromptSource
    options: BatchOptions
    formats: Sequence[Format]
    outcomes: Sequence[Outcome]

    def keep(self, *, is_last: bool) -> None:
        """Writes both; before the last model an error here does not stop the others."""
        # One model that fails alone leaves no folder behind, just as a mistyped name should.
        if not read_markers(self.out) and len(self.models) == 1:
            return
        with contextlib.nullcontext() if is_last else contextlib.suppress(Exception):
            write_run(self.out, self._record())
            if "html" in self.formats:
                from lens_rope.reporting.index import render_index

                failed = [(o.model, o.reason or "") for o in self.outcomes if o.status == "failed"]
                write_index(self.out, render_index(self.out, failed))

    def _record(self) -> Mapping[str, Any]:
        reached = [
            {
                "model": outcome.model,
                "folder": outcome.folder.name,
                "outcome": outcome.status,
                "reason": outcome.reason,
                "error": outcome.error,
                "exit_code": outcome.exit_code,
            }
            for outcome in self.outcomes
        ]
        others = [
            {
                "model": model, "folder": None, "outcome": "not reached", "reason": None,
                "error": None, "exit_code": None,
            }
            for model in self.models[len(reached) :]
        ]  # fmt: skip
        return {
            "schema": RUN_SCHEMA,
            "lens_rope": __version__,
            "created": now(),
            "arguments": self.options.to_dict(),
            "formats": sorted(self.formats),
            "prompts": {
                "file": self.prompts.name or None,
                "sha256": self.prompts.sha256,
                "count": self.prompts.count,
            },
            "models": [*reached, *others],
        }
