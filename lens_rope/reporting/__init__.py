"""The report: one model on some prompts, as one page, one JSON file and tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from lens_rope.errors import InputError
from lens_rope.reporting.data import ReportData

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    import plotly.graph_objects as go
    import torch
    from jaxtyping import Int

    from lens_rope.reporting.gather import StageProgress
    from lens_rope.reporting.prompts import NamedText
    from lens_rope.reporting.source import ModelSource
    from lens_rope.streaming import AttentionChoice

Format = Literal["html", "json", "csv"]
"""What a report can be written as."""

FORMATS: tuple[Format, ...] = get_args(Format)
"""All formats; a report is written in each of them unless told otherwise."""


@dataclass(frozen=True, eq=False)
class Report:
    """A finished report.

    Attributes:
        data: The numbers, and the sentences computed from them.
    """

    data: ReportData

    def to_dict(self) -> dict[str, Any]:
        """The content of `report.json` as plain values; `schema` names its version."""
        from lens_rope.reporting.schema import to_dict

        return to_dict(self.data)

    def html(self) -> str:
        """The page: one HTML document that loads nothing from anywhere."""
        from lens_rope.reporting.page import render

        return render(self.data)

    def save(
        self,
        folder: str | Path,
        *,
        formats: Sequence[Format] = FORMATS,
        source: ModelSource | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> Path:
        """Writes `report.html`, `report.json`, `tables/*.csv` and `manifest.json` into a folder.

        Everything is written beside the folder first and moved into place when it is whole. A
        report that is already there is replaced, unless other files were put beside it.

        Args:
            folder: Where to write; a new or empty folder, or an earlier report.
            formats: What to write; the manifest is always written.
            source: Where the model came from (`source.model_source`), for the manifest.
            arguments: What the report was asked for, for the manifest; None is what `report` was
                called with.

        Returns:
            The folder.

        Raises:
            InputError: A format is unknown, or none was given.
            OutputError: The folder holds files that no report has, or cannot be written.
        """
        from lens_rope.reporting.manifest import MANIFEST, manifest
        from lens_rope.reporting.manifest import to_json as manifest_to_json
        from lens_rope.reporting.schema import to_json
        from lens_rope.reporting.tables import tables, to_csv
        from lens_rope.reporting.write import write_report

        unknown = [name for name in formats if name not in FORMATS]
        if unknown or not formats:
            raise InputError(f"formats are {', '.join(FORMATS)}; not {unknown or 'none'}")
        content = manifest(self.data, formats, source=source, arguments=arguments)
        files = {MANIFEST: manifest_to_json(content)}
        if "html" in formats:
            files["report.html"] = self.html()
        if "json" in formats:
            files["report.json"] = to_json(self.data)
        if "csv" in formats:
            for name, frame in tables(self.data).items():
                files[f"tables/{name}.csv"] = to_csv(frame)
        return write_report(folder, files, self.data)

    def plot(self) -> go.Figure:
        """Mean magnitude of queries and keys by layer and pair, over the layer's median."""
        from lens_rope.views.figures import usage_map

        return usage_map(self.data.rope.layers, self.data.usage, "both", relative=True)

    def _repr_html_(self) -> str:
        """For a notebook: the findings, the usage of the pairs, and where to see the rest."""
        from lens_rope.reporting.report_html import report_html

        return report_html(self.data, self.plot())

    def __repr__(self) -> str:
        """Model, prompts and findings."""
        of = f"Report on {self.data.model.name}: {self.data.named_prompts()}"
        lines = [of, *self.data.findings]
        return "\n  ".join(lines + list(self.data.notes))


def report(
    model: Any,
    prompts: str | Iterable[str | NamedText] | Int[torch.Tensor, "batch pos"] | None = None,
    *,
    layers: Sequence[int] | None = None,
    heads: Sequence[tuple[int, int]] | None = None,
    max_tokens: int | None = None,
    context: int | None = None,
    names: Iterable[str] | None = None,
    interventions: bool = True,
    attention: AttentionChoice = "auto",
    progress: StageProgress | None = None,
) -> Report:
    """Reads a model on some prompts and reports how it uses its rotary frequencies.

    Args:
        model: A `HookedTransformer` or `TransformerBridge`. It is left as it was.
        prompts: A text, several texts, token ids `[pos]` or `[batch, pos]`, or None for the sample
            text that ships with the package. Texts can also come from a generator, which is taken
            one prompt at a time: what is kept does not grow with their number. Statistics are over
            all tokens of all prompts; the head gallery shows the first.
        layers: Layers to read; None reads all.
        heads: (layer, head) to show in the gallery; None chooses the most telling ones.
        max_tokens: Cut longer prompts to this many tokens.
        context: Trained context in tokens, in place of the model's own; cycles are counted over it.
        names: A name per prompt.
        interventions: Whether to run the first prompt again without the best pair of each sink
            head, and without random others, to see what the model makes of it. On a longer prompt
            than 2,048 tokens this is done on its first 2,048.
        attention: How the model computes attention while it is read: `eager` as it always does,
            `fused` without forming all scores of a layer at once, and `auto` eager where these take
            little room, see `capture`.
        progress: Called as `progress(stage, done, total)`.

    Returns:
        The report; nothing is written until `save`.

    Raises:
        InputError: A layer, head or other argument is out of range.
        PromptError: A prompt is empty, or longer than the model can run.
        UnsupportedModelError: The model has no RoPE, or cannot be read.
        VerificationError: What was read does not reproduce the model's scores.
    """
    # Here and not above: whoever only writes reports or checks folders needs no torch.
    from lens_rope.reporting.gather import gather

    return Report(
        gather(
            model, prompts, layers=layers, heads=heads, max_tokens=max_tokens, context=context,
            names=names, interventions=interventions, attention=attention, progress=progress,
        )
    )  # fmt: skip


__all__ = ["FORMATS", "Format", "Report", "ReportData", "report"]
