"""`lens-rope sinks`, `heads`, `features` and `spectrum`: one analysis of one model each."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import typer

from lens_rope.cli.options import (
    Attention,
    AttentionOption,
    Backend,
    BackendOption,
    Context,
    Device,
    Dtype,
    File,
    Format,
    Layers,
    MaxTokens,
    ModelArgument,
    Prompts,
    Seed,
    TableFormat,
    Text,
    Threads,
)
from lens_rope.cli.parsing import parse_layers
from lens_rope.cli.reading import prepare, show
from lens_rope.cli.running import errors, progress
from lens_rope.errors import InputError


def sinks(
    model: ModelArgument,
    text: Text = None,
    file: File = None,
    prompts: Prompts = None,
    layers: Layers = None,
    max_tokens: MaxTokens = None,
    context: Context = None,
    backend: BackendOption = Backend.auto,
    device: Device = None,
    dtype: Dtype = "float32",
    attention: AttentionOption = Attention.auto,
    threads: Threads = None,
    format: Format = TableFormat.table,
) -> None:
    """Print the attention sinks of a model, and which rotary pairs make them."""
    with errors():
        reading = prepare(
            model, text, file, prompts, parse_layers(layers), max_tokens, context, backend, device,
            dtype, attention, threads,
        )  # fmt: skip
        qk = reading.capture()
        from lens_rope.reporting.schema import sinks_to_dict
        from lens_rope.sink_heads import explain_sinks
        from lens_rope.views.analysis_tables import sinks_table

        with progress() as step:
            step("explaining sinks", 0, 0)
            found = explain_sinks(qk)
        show(
            reading,
            format,
            notes=found.notes,
            table=lambda: sinks_table(found),
            frame=found.to_dataframe,
            content=lambda: {
                "sinks": sinks_to_dict(
                    found.heads, max(entry.uniform_share for entry in found.shares)
                )
            },
        )


def heads(
    model: ModelArgument,
    text: Text = None,
    file: File = None,
    prompts: Prompts = None,
    layers: Layers = None,
    max_tokens: MaxTokens = None,
    context: Context = None,
    repeated: Annotated[
        bool,
        typer.Option(
            help="Measure induction, duplicate token and first occurrence on repeated random "
            "tokens, or else on the prompts."
        ),
    ] = True,
    seed: Seed = 0,
    backend: BackendOption = Backend.auto,
    device: Device = None,
    dtype: Dtype = "float32",
    attention: AttentionOption = Attention.auto,
    threads: Threads = None,
    format: Format = TableFormat.table,
) -> None:
    """Print what each head does (sink, previous token, induction, ...) and the pairs behind it."""
    with errors():
        reading = prepare(
            model, text, file, prompts, parse_layers(layers), max_tokens, context, backend, device,
            dtype, attention, threads,
        )  # fmt: skip
        qk = reading.capture()
        from lens_rope.heads import explain_heads, head_notes
        from lens_rope.reporting.schema import head_to_dict
        from lens_rope.views.analysis_tables import heads_table

        with progress() as step:
            step("explaining heads", 0, 0)
            why = ""
            try:
                found = explain_heads(qk, model=reading.model if repeated else None, seed=seed)
            except InputError:
                # The one thing that can be out of range here: the context, for repeated tokens.
                found = explain_heads(qk)
                why = "; the model is too small for repeated random tokens"
        # Said in the words of the options.
        notes = list(head_notes([len(prompt) for prompt in qk.prompts], is_repeated=True))
        if not found.is_repeated:
            notes.append(
                "Induction, duplicate token and first occurrence are measured where tokens of the "
                f"text come back{why or '; leave out --no-repeated for repeated random tokens'}."
            )
        show(
            reading,
            format,
            notes=notes,
            table=lambda: heads_table(found),
            frame=found.to_dataframe,
            content=lambda: {"heads": [head_to_dict(head) for head in found.heads]},
        )


def features(
    model: ModelArgument,
    text: Text = None,
    file: File = None,
    prompts: Prompts = None,
    layers: Layers = None,
    max_tokens: MaxTokens = None,
    context: Context = None,
    constancy: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            help="Smallest constancy of an offset feature, in query and key. Default: 0.8.",
        ),
    ] = None,
    relative: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Smallest magnitude of an offset feature or outlier, over the head's median. "
            "Default: 2.",
        ),
    ] = None,
    strong: Annotated[
        float,
        typer.Option(
            min=0,
            help="Offset features of a larger amplitude (score units) are held against the bounds.",
        ),
    ] = 5.0,
    outliers: Annotated[
        bool,
        typer.Option(
            "--outliers", help="Print outliers instead: all large pairs, constant or not."
        ),
    ] = False,
    bounds: Annotated[
        bool, typer.Option("--bounds", help="Print the check against the bounds only.")
    ] = False,
    backend: BackendOption = Backend.auto,
    device: Device = None,
    dtype: Dtype = "float32",
    attention: AttentionOption = Attention.auto,
    threads: Threads = None,
    format: Format = TableFormat.table,
) -> None:
    """Print the offset features of a model, and whether they keep the bounds."""
    with errors():
        if outliers and bounds:
            raise InputError("--outliers and --bounds print different tables; choose one of them")
        reading = prepare(
            model, text, file, prompts, parse_layers(layers), max_tokens, context, backend, device,
            dtype, attention, threads,
        )  # fmt: skip
        qk = reading.capture()
        from lens_rope.bounds import check_bounds
        from lens_rope.offsets import CONSTANCY, RELATIVE, offset_features
        from lens_rope.reporting.schema import bounds_to_dict, features_to_dict, outliers_to_dict
        from lens_rope.views import analysis_tables

        relative = RELATIVE if relative is None else relative
        with progress() as step:
            step("reading offsets", 0, 0)
            found = offset_features(
                qk, constancy=CONSTANCY if constancy is None else constancy, relative=relative
            )
            check = None if outliers else check_bounds(found, strong)
        if check is None:
            show(
                reading,
                format,
                notes=found.notes,
                table=lambda: analysis_tables.outliers_table(found, relative),
                frame=lambda: found.outliers(relative),
                content=lambda: {"outliers": outliers_to_dict(found.outliers(relative))},
            )
            return

        def content() -> dict[str, Any]:
            judged = {"bounds": bounds_to_dict(check)}
            if bounds:
                return judged
            return {
                "offset_features": features_to_dict(found.layers, found.constancy, relative),
                **judged,
            }

        show(
            reading,
            format,
            notes=check.notes,
            table=lambda: (
                ("" if bounds else analysis_tables.features_table(found) + "\n")
                + analysis_tables.bounds_table(check)
            ),
            frame=check.to_dataframe if bounds else found.features,
            content=content,
        )


def spectrum(
    model: ModelArgument,
    text: Text = None,
    file: File = None,
    prompts: Prompts = None,
    layers: Layers = None,
    max_tokens: MaxTokens = None,
    by_head: Annotated[
        bool, typer.Option("--by-head", help="One row per key head instead of per layer.")
    ] = False,
    backend: BackendOption = Backend.auto,
    device: Device = None,
    dtype: Dtype = "float32",
    attention: AttentionOption = Attention.auto,
    threads: Threads = None,
    format: Format = TableFormat.table,
) -> None:
    """Print the spectra of the keys of each layer, before and after rotation."""
    with errors():
        reading = prepare(
            model, text, file, prompts, parse_layers(layers), max_tokens, None, backend, device,
            dtype, attention, threads,
        )  # fmt: skip
        from lens_rope.reporting.schema import spectrum_to_dict
        from lens_rope.spectrum import key_spectrum
        from lens_rope.views.analysis_tables import spectrum_table

        # Sums over tokens are all it keeps, so prompts need not fit into memory together.
        found = key_spectrum(reading.captures())

        def entries() -> list[dict[str, Any]]:
            if not by_head:
                return [spectrum_to_dict(entry) for entry in found.layers]
            return [
                {
                    "kv_head": head,
                    **spectrum_to_dict(dataclasses.replace(entry, pre=pre, post=post)),
                }
                for entry in found.layers
                for head, (pre, post) in enumerate(entry.heads)
            ]

        show(
            reading,
            format,
            notes=found.notes,
            table=lambda: spectrum_table(found, by_head=by_head),
            frame=found.heads_dataframe if by_head else found.to_dataframe,
            content=lambda: {"spectrum": entries()},
        )
