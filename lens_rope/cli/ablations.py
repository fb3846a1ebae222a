"""`lens-rope ablate`: what removing pairs does to the running model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from lens_rope.cli.options import (
    Attention,
    Backend,
    BackendOption,
    Device,
    Dtype,
    File,
    Format,
    HowToAblate,
    MaxTokens,
    ModelArgument,
    Prompts,
    Seed,
    TableFormat,
    Text,
    Threads,
)
from lens_rope.cli.parsing import parse_layers, parse_pairs
from lens_rope.cli.reading import prepare, show
from lens_rope.cli.running import errors, progress
from lens_rope.errors import InputError

if TYPE_CHECKING:
    from lens_rope.records import ModelInfo, RotaryCapture

    HeadPairs = dict[tuple[int | None, int | None], list[int]]


def ablate(
    model: ModelArgument,
    text: Text = None,
    file: File = None,
    prompts: Prompts = None,
    pairs: Annotated[
        str | None,
        typer.Option(
            help="Pairs to ablate as layer.head:pair,pair with ; between heads and * for all of "
            "them, like '16.0:23,24;27.*:23'. Default: the best pair of each sink head."
        ),
    ] = None,
    how: Annotated[
        HowToAblate,
        typer.Option(
            help="Set the pairs of the queries to zero or to their mean, or undo the rotation of "
            "queries and keys."
        ),
    ] = HowToAblate.zero,
    controls: Annotated[
        int,
        typer.Option(
            min=1, help="How many times to draw as many other pairs at random, to compare."
        ),
    ] = 3,
    seed: Seed = 0,
    layers: Annotated[
        str | None,
        typer.Option(
            help="Layers to look for sink heads in, like 0-3,7; not with --pairs. Default: all."
        ),
    ] = None,
    max_tokens: MaxTokens = None,
    backend: BackendOption = Backend.auto,
    device: Device = None,
    dtype: Dtype = "float32",
    attention: Annotated[
        Attention,
        typer.Option(
            help="How the model computes attention while it is read to find sink heads or means, "
            "as for sinks. The runs that are compared use the model's own; not with --pairs "
            "alone."
        ),
    ] = Attention.auto,
    threads: Threads = None,
    format: Format = TableFormat.table,
) -> None:
    """Run a model without some rotary pairs: what becomes of its loss and of its heads."""
    with errors():
        chosen, wanted = parse_pairs(pairs), parse_layers(layers)
        if chosen is not None and wanted is not None:
            raise InputError(
                "--layers says where to look for sink heads; with --pairs, name the layers there"
            )
        is_read = chosen is None or how is HowToAblate.mean
        if attention is not Attention.auto and not is_read:
            raise InputError(
                "--attention says how the model is read to find sink heads or means, and pairs "
                f"from --pairs with --how {how.value} need neither; leave it out: the runs that "
                "are compared use the model's own attention"
            )
        reading = prepare(
            model, text, file, prompts, wanted, max_tokens, None, backend, device, dtype,
            attention, threads,
        )  # fmt: skip
        from lens_rope.ablation_effects import ablation_report
        from lens_rope.reporting.schema import ablation_to_dict
        from lens_rope.views.analysis_tables import ablation_table

        qk = None
        if chosen is None:
            qk = reading.capture()
            chosen = _best_pairs(qk, how)
        offsets = None
        if how is HowToAblate.mean:
            offsets = qk or reading.capture(_layers(chosen))
        with progress() as step:
            step("running the model without the pairs", 0, 0)
            done = ablation_report(
                reading.model, reading.texts, chosen, how.value, offsets=offsets,
                controls=controls, seed=seed, max_tokens=reading.max_tokens, names=reading.names,
            )  # fmt: skip
        show(
            reading,
            format,
            notes=done.notes,
            table=lambda: ablation_table(done),
            frame=done.to_dataframe,
            content=lambda: {"ablation": ablation_to_dict(done)},
        )


def _best_pairs(qk: RotaryCapture, how: HowToAblate) -> HeadPairs:
    """The best pair of each sink head.

    Raises:
        InputError: There is no sink head with a pair.
    """
    from lens_rope.sink_heads import explain_sinks

    with progress() as step:
        step("explaining sinks", 0, 0)
        found = explain_sinks(qk)
    best = found.best_pairs()
    if not best:
        raise InputError(
            " ".join([*found.notes, "There is no sink head to ablate; name pairs with --pairs"])
        )
    return _by_group(best, qk.model) if how is HowToAblate.unrotate else {**best}


def _by_group(best: dict[tuple[int, int], list[int]], info: ModelInfo) -> HeadPairs:
    """The pairs of each head for all heads that share its key, which turn together."""
    size = info.n_heads // info.n_kv_heads
    groups: dict[tuple[int, int], set[int]] = {}
    for (layer, head), pairs in best.items():
        groups.setdefault((layer, head // size), set()).update(pairs)
    return {
        (layer, head): sorted(pairs)
        for (layer, group), pairs in groups.items()
        for head in range(group * size, (group + 1) * size)
    }


def _layers(pairs: HeadPairs) -> list[int] | None:
    """The layers that are named, None where one entry means all."""
    layers = {layer for layer, _ in pairs}
    return None if None in layers else sorted(layer for layer in layers if layer is not None)
