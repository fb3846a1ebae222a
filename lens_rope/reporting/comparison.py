"""Two reports compared: two models, two checkpoints, or one model before and after a change."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lens_rope.errors import InputError
from lens_rope.reporting import comparison_notes, differences, matching
from lens_rope.reporting.report_files import read_report
from lens_rope.reporting.report_metrics import metric_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd
    import plotly.graph_objects as go

    from lens_rope.reporting.saved import SavedReport

SCHEMA = "lens-rope-comparison/1"
"""Version of `comparison.json`; within a version keys are only ever added."""


@dataclass(frozen=True, eq=False)
class Comparison:
    """What differs between two reports.

    Attributes:
        names: What the two are called.
        first: The first report, of the layers that are compared.
        second: The second.
        sentences: What differs and what does not, one sentence each.
        notes: What besides the model differs, and what is not compared, one sentence each.
    """

    names: tuple[str, str]
    first: SavedReport
    second: SavedReport
    sentences: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def is_matched(self) -> bool:
        """Whether layers and heads are matched by number, as the two have the same shape."""
        return self.first.shape == self.second.shape

    @property
    def has_same_rotation(self) -> bool:
        """Whether pairs are matched by index too, as they turn at the same frequencies."""
        return matching.has_same_rotation(self.first, self.second)

    def to_dataframe(self) -> pd.DataFrame:
        """One row per metric.

        Columns: `metric`, `unit`, `a` (the first report), `b`, `difference` (b minus a), `what`
        (the metric in words). Shares are in [0, 1]. A number that a report does not have is nan.
        """
        table = metric_table([self.first, self.second]).rename(columns={0: "a", 1: "b"})
        table["difference"] = table["b"] - table["a"]
        return table.reindex(columns=["metric", "unit", "a", "b", "difference", "what"])

    def layers(self) -> pd.DataFrame:
        """One row per layer of either report.

        Columns: `layer`, and for each number below one of the first report that ends in `_a`, one
        of the second in `_b`, and one in `_difference`, b minus a: `sink_heads` (how many),
        `mean_sink_share` (over heads), `features` (offset features), `rank90_pre`, `rank90_post`
        (of the keys, in components), `offset_share` (of the rotated offset in the variance of the
        keys), `query_partial`, `key_partial` (shares of the summed mean magnitude in partial
        cycles). Differences are nan where the two have different shapes.
        """
        return matching.layer_rows(self.first, self.second)

    def heads(self) -> pd.DataFrame:
        """One row per head: pattern, shares and best pair of both, and the differences.

        Columns: `layer`, `head`, and with the endings of those of `layers`: `pattern`,
        `sink_share`, `previous_share`, `entropy`, `offset_offset`, `strength` and `best_pair` (of
        the sink; -1 where there is none). The pattern and the best pair have no difference, but
        there is `pattern_changed`. Differences are nan where the two have different shapes.
        """
        return matching.head_rows(self.first, self.second)

    def pairs(self) -> pd.DataFrame:
        """One row per layer and pair: magnitudes of both, and their ratio, b over a.

        Columns: `layer`, `pair`, `wavelength` (tokens), `cycles_a`, `cycles_b`; `query_a`,
        `query_b`, `query_ratio`, `key_a`, `key_b`, `key_ratio` (mean length of the pair, activation
        units). Empty where the two rotate at different frequencies.
        """
        return matching.pair_rows(self.first, self.second)

    def features(self) -> pd.DataFrame:
        """One row per offset feature of either, the largest change of amplitude first.

        Columns: `layer`, `head`, `pair`, `change` (`kept`, `gained` or `lost`), `cycles`,
        `amplitude_a`, `amplitude_b` (score units), `angle_a`, `angle_b` (rad). Empty where the two
        rotate at different frequencies.
        """
        return matching.feature_rows(self.first, self.second)

    def plot(self) -> go.Figure:
        """Magnitude of queries and keys against cycles over the context, one curve per report."""
        from lens_rope.reporting.comparison_page import usage_figure

        return usage_figure(self)

    def to_dict(self) -> dict[str, Any]:
        """The comparison as plain values; `schema` names its version."""
        from lens_rope import __version__

        return {
            "schema": SCHEMA,
            "lens_rope": __version__,
            "names": list(self.names),
            "reports": [_origin(report) for report in (self.first, self.second)],
            "sentences": list(self.sentences),
            "notes": list(self.notes),
            **{name: _records(table) for name, table in self.tables().items()},
        }

    def tables(self) -> dict[str, pd.DataFrame]:
        """Every table by name: metrics, layers, heads, pairs, features."""
        return {
            "metrics": self.to_dataframe(),
            "layers": self.layers(),
            "heads": self.heads(),
            "pairs": self.pairs(),
            "features": self.features(),
        }

    def html(self) -> str:
        """The page: one HTML document that loads nothing from anywhere."""
        from lens_rope.reporting.comparison_page import render

        return render(self)

    def save(self, folder: str | Path) -> Path:
        """Writes `compare.html`, `comparison.json` and `tables/*.csv` into a folder.

        Everything is written beside the folder first and moved into place when it is whole. A
        comparison that is already there is replaced, unless other files were put beside it.

        Args:
            folder: Where to write; a new or empty folder, or an earlier comparison.

        Returns:
            The folder.

        Raises:
            OutputError: The folder holds files that no comparison has, or cannot be written.
        """
        from lens_rope.reporting.comparison_files import write_comparison

        return write_comparison(folder, self)

    def __repr__(self) -> str:
        """The two names, what differs, and what has to be known about it."""
        lines = [f"{self.names[0]} and {self.names[1]} compared", *self.sentences]
        return "\n  ".join(lines + [f"Note: {note}" for note in self.notes])

    def _repr_html_(self) -> str:
        """For a notebook: what differs, the metrics as a table, and the usage of both."""
        from lens_rope.reporting.comparison_page import notebook_output

        return notebook_output(self)


def compare(report_a: Any, report_b: Any, *, names: Sequence[str] | None = None) -> Comparison:
    """Says what differs between two reports, without their models.

    Where the two have the same shape (two checkpoints, or one model before and after a change),
    layers and heads are matched by number, and pairs by index if they turn at the same
    frequencies; reports of different layers are compared on those that both have. Models of
    different shape are compared by what does not depend on it: shares, and distributions over
    cycles and over depth.

    Inside `ablate_frequencies` a report cannot read the layers that are being changed, because
    there the queries are not what the rotation made of them. Give it the others, and the later
    ones show what the change does to them:

        before = lr.report(model)
        with lr.ablate_frequencies(model, {(8, None): [20, 21]}):
            after = lr.report(model, layers=[i for i in range(30) if i != 8])
        lr.compare(before, after, names=["before", "after"])

    Args:
        report_a: A `Report`, the path of a report's folder or of its `report.json`, or what
            `to_dict()` gives.
        report_b: Another, in any of these forms.
        names: What to call the two; None takes the names of the models, or of the folders where
            the models have the same name.

    Returns:
        The comparison; nothing is written until `save`.

    Raises:
        InputError: One of the two is not a report, or of another version of the schema, they have
            no layer in common, or there are not two different names.
    """
    whole = read_report(report_a), read_report(report_b)
    called = _names(whole, (report_a, report_b), names)
    first, second = whole
    if first.shape == second.shape:
        common = set(first.layers) & set(second.layers)
        if not common:
            raise InputError(
                "the two reports have no layer in common; make one of them again with layers of "
                "the other"
            )
        first, second = first.only(common), second.only(common)
    return Comparison(
        names=called,
        first=first,
        second=second,
        sentences=differences.sentences(first, second, called),
        notes=comparison_notes.notes(whole, (first, second), called),
    )


def _names(
    reports: tuple[SavedReport, SavedReport],
    sources: tuple[Any, Any],
    names: Sequence[str] | None,
) -> tuple[str, str]:
    if names is not None:
        given = [names] if isinstance(names, str) else list(names)
        if len(given) != 2 or len(set(given)) != 2 or not all(isinstance(n, str) for n in given):
            raise InputError(f"names are two different texts; {given} are not")
        return given[0], given[1]
    models = reports[0].model, reports[1].model
    if models[0] != models[1]:
        return models
    paths = [Path(s) if isinstance(s, (str, Path)) else None for s in sources]
    folders = [
        None if path is None else (path.parent if path.is_file() else path).resolve()
        for path in paths
    ]
    if folders[0] is not None and folders[1] is not None and folders[0] != folders[1]:
        ends = folders[0].name, folders[1].name
        # Folders of the same name lie in different ones.
        return ends if ends[0] != ends[1] else (str(paths[0]), str(paths[1]))
    return f"{models[0]} (a)", f"{models[1]} (b)"


def _origin(report: SavedReport) -> dict[str, Any]:
    return {
        "model": report.model,
        "created": report.created,
        "lens_rope": report.version,
        "host": dict(report.host),
        "dtype": report.dtype,
        "layers": list(report.layers),
        "prompts": [{"name": name, "tokens": n} for name, n in report.prompts],
        "missing": list(report.missing),
    }


def _records(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows as plain values; a value that does not exist is None."""

    def plain(value: Any) -> Any:
        value = value.item() if hasattr(value, "item") else value
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return [
        {str(name): plain(value) for name, value in row.items()} for row in table.to_dict("records")
    ]
