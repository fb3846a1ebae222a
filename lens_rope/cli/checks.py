"""`lens-rope inspect` and `lens-rope check`: what RoPE does, and whether it is read exactly."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import typer

from lens_rope.cli.options import (
    CHECK_MAX_TOKENS,
    Attention,
    AttentionOption,
    Backend,
    BackendOption,
    CheckMaxTokens,
    Context,
    Device,
    Dtype,
    File,
    Format,
    Layers,
    ModelArgument,
    Prompts,
    TableFormat,
    Text,
    Threads,
)
from lens_rope.cli.parsing import parse_layers
from lens_rope.cli.running import complain, errors, load, or_sample, progress, token_limit
from lens_rope.errors import VerificationError
from lens_rope.reporting.prompts import read_prompts


def inspect(
    model: ModelArgument,
    layers: Layers = None,
    context: Context = None,
    backend: BackendOption = Backend.auto,
    device: Device = None,
    dtype: Dtype = "float32",
    threads: Threads = None,
    format: Format = TableFormat.table,
) -> None:
    """Print what RoPE does in each layer: pairing, rotated part, window, wavelengths, cycles."""
    with errors():
        wanted = parse_layers(layers)
        loaded = load(model, backend, device, dtype, threads)
        from lens_rope.capturing import read_rope

        with progress() as step:
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


def check(
    model: ModelArgument,
    text: Text = None,
    file: File = None,
    prompts: Prompts = None,
    layers: Layers = None,
    max_tokens: CheckMaxTokens = None,
    context: Context = None,
    backend: BackendOption = Backend.auto,
    device: Device = None,
    dtype: Dtype = "float32",
    attention: AttentionOption = Attention.auto,
    threads: Threads = None,
    format: Format = TableFormat.table,
) -> None:
    """Verify that a model can be read exactly; exit 1 when a layer cannot."""
    with errors():
        names, texts = or_sample(*read_prompts(text, file, prompts))
        wanted = parse_layers(layers)
        loaded = load(model, backend, device, dtype, threads)
        rows, failures, notes = _check_layers(
            loaded, texts, names, wanted, max_tokens, context, attention
        )
        from lens_rope.views.terminal import check_table

        typer.echo(check_table(rows, format.value), nl=False)
        for note in notes:
            complain(f"note: {note}")
        for failure in failures:
            complain(str(failure))
        if failures:
            raise typer.Exit(1)


def _check_layers(
    model: Any,
    texts: list[str],
    names: list[str],
    layers: list[int] | None,
    max_tokens: int | None,
    context: int | None,
    attention: Attention,
) -> tuple[list[dict[str, Any]], list[VerificationError], list[str]]:
    """One row per prompt and layer, the errors of the layers that cannot be read, and notes."""
    from lens_rope.capturing import capture
    from lens_rope.hosts import host_of

    max_tokens = token_limit(model, max_tokens, CHECK_MAX_TOKENS)
    rows: list[dict[str, Any]] = []
    failures: list[VerificationError] = []
    notes: list[str] = []

    def run(text: str, name: str, some: list[int] | None, step: Callable[..., None]) -> None:
        qk = capture(
            model, text, some, names=[name], max_tokens=max_tokens, context=context,
            attention=attention.value,
            progress=lambda done, total: step(f"checking {name}", done, total),
        )  # fmt: skip
        notes.extend(qk.notes)
        rows.extend({**row, "ok": True} for row in qk.verification().to_dict("records"))

    for text, name in zip(texts, names, strict=True):
        with progress() as step:
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
    return rows, failures, notes
