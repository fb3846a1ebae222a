"""A loaded model with the prompts it is to read, and how an analysis of them is printed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from lens_rope.cli.options import DEFAULT_MAX_TOKENS, Attention, Backend, TableFormat
from lens_rope.cli.running import complain, load, or_sample, progress, token_limit
from lens_rope.reporting.prompts import read_prompts

if TYPE_CHECKING:
    import pandas as pd

    from lens_rope.records import RotaryCapture


@dataclass(frozen=True, eq=False)
class Reading:
    """A model and what it is to read.

    Attributes:
        model: The loaded model.
        names: A name per prompt.
        texts: The prompts.
        n_tokens: Number of tokens of each prompt as it was given.
        max_tokens: Longer prompts are cut to this many tokens.
        layers: Layers to read; None reads all.
        context: Trained context in tokens, where the model is said to have another.
        attention: How the model computes attention while it is read.
        said: Notes of what was read so far.
    """

    model: Any
    names: list[str]
    texts: list[str]
    n_tokens: list[int]
    max_tokens: int
    layers: list[int] | None
    context: int | None
    attention: Attention
    said: list[str] = field(default_factory=list)

    def capture(self, layers: Sequence[int] | None = None) -> RotaryCapture:
        """All prompts at once.

        Args:
            layers: Layers to read in place of those that were asked for.
        """
        from lens_rope.capturing import capture

        stage = f"reading {self.names[0] if len(self.names) == 1 else 'prompts'}"
        with progress() as step:
            found = capture(
                self.model, self.texts, self.layers if layers is None else layers,
                names=self.names, max_tokens=self.max_tokens, context=self.context,
                attention=self.attention.value,
                progress=lambda done, total: step(stage, done, total),
            )  # fmt: skip
        self.said.extend(found.notes)
        return found

    def captures(self) -> Iterator[RotaryCapture]:
        """One prompt after another, so that only one is held at a time."""
        from lens_rope.capturing import capture

        with progress() as step:
            for name, text in zip(self.names, self.texts, strict=True):
                found = capture(
                    self.model, text, self.layers, names=[name], max_tokens=self.max_tokens,
                    context=self.context, attention=self.attention.value,
                    progress=lambda done, total, name=name: step(f"reading {name}", done, total),
                )  # fmt: skip
                self.said.extend(found.notes)
                yield found

    def prompts(self) -> list[dict[str, Any]]:
        """Name and length of each prompt, with the keys that a report has."""
        return [
            {
                "name": name,
                "tokens": min(n, self.max_tokens),
                "cut_from": n if n > self.max_tokens else None,
            }
            for name, n in zip(self.names, self.n_tokens, strict=True)
        ]

    def notes(self) -> tuple[str, ...]:
        """Which prompts were cut, and what else is to be said of those that were read."""
        return tuple(dict.fromkeys([*self._cut(), *self.said]))

    def _cut(self) -> tuple[str, ...]:
        cut = [entry for entry in self.prompts() if entry["cut_from"] is not None]
        if len(cut) == 1:
            return (
                f"{cut[0]['name']} was cut: the first {cut[0]['tokens']} of "
                f"{cut[0]['cut_from']} tokens were read.",
            )
        if cut:
            return (
                f"{len(cut)} of {len(self.names)} prompts were cut to {self.max_tokens} tokens; "
                f"together they had {sum(entry['cut_from'] for entry in cut):,}.",
            )
        return ()


def prepare(
    model: str,
    text: list[str] | None,
    file: list[Path] | None,
    prompts: Path | None,
    layers: list[int] | None,
    max_tokens: int | None,
    context: int | None,
    backend: Backend,
    device: str | None,
    dtype: str,
    attention: Attention,
    threads: int | None,
) -> Reading:
    """Reads the prompts, then loads the model; arguments as the options of the same names.

    Raises:
        LensRopeError: A prompt cannot be used, or the model cannot be loaded.
    """
    names, texts = or_sample(*read_prompts(text, file, prompts))
    loaded = load(model, backend, device, dtype, threads)
    from lens_rope.capturing import token_rows

    return Reading(
        model=loaded,
        names=names,
        texts=texts,
        n_tokens=[len(row) for row in token_rows(loaded, texts)],
        max_tokens=token_limit(loaded, max_tokens, DEFAULT_MAX_TOKENS),
        layers=layers,
        context=context,
        attention=attention,
    )


def show(
    reading: Reading,
    form: TableFormat,
    *,
    notes: Sequence[str],
    table: Callable[[], str],
    frame: Callable[[], pd.DataFrame],
    content: Callable[[], dict[str, Any]],
) -> None:
    """Prints one analysis on stdout, and what has to be known about it on stderr.

    Args:
        reading: What was read.
        form: What to print.
        notes: Notes of the analysis; those of the reading are added.
        table: The analysis as a table for people.
        frame: The analysis as the table behind the CSV.
        content: The analysis as plain values, with the keys that a report has.
    """
    notes = tuple(dict.fromkeys([*reading.notes(), *notes]))
    for note in notes:
        complain(f"note: {note}")
    if form is TableFormat.table:
        typer.echo(table(), nl=False)
    elif form is TableFormat.csv:
        from lens_rope.reporting.tables import to_csv

        typer.echo(to_csv(frame()), nl=False)
    else:
        from lens_rope.capturing import model_shape

        head = {"model": model_shape(reading.model).name, "prompts": reading.prompts()}
        whole = {**head, **content(), "notes": list(notes)}
        typer.echo(json.dumps(whole, allow_nan=False, indent=1))
