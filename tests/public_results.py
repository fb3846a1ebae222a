"""Every result that the package returns, made from one capture without a model, and how they look
as HTML."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import pkgutil
from html.parser import HTMLParser

from report_fixtures import report_data

import lens_rope as lr
from lens_rope.ablation_effects import AblationReport, HeadEffect
from lens_rope.records import RotaryCapture


def ablation(n_heads: int = 3, **changes) -> AblationReport:
    """An intervention as a model would show it, with numbers of its own for each head."""
    heads = tuple(
        HeadEffect(
            layer=2, head=h, pairs=(5, 6 + h), sink_positions=(0,),
            sink_before=0.8 - 0.01 * h, sink_after=0.05 + 0.01 * h, sink_control=0.75,
            previous_before=0.1, previous_after=0.2, previous_control=0.11,
            change=0.6, change_control=0.05,
        )
        for h in range(n_heads)
    )  # fmt: skip
    fields = {
        "model": "planted", "how": "zero", "pairs": {(e.layer, e.head): e.pairs for e in heads},
        "prompts": ("p",), "n_tokens": 96, "loss_before": 3.25, "loss_after": 5.5,
        "loss_controls": (3.375, 3.5, 3.3125), "heads": heads, "notes": (),
    }  # fmt: skip
    return AblationReport(**{**fields, **changes})


def _last(qk: RotaryCapture) -> int:
    return len(qk.prompts[0]) - 1


def _head(qk: RotaryCapture):
    return lr.decompose(qk, qk.layer_indices[0], 1)


@functools.cache
def _report(qk: RotaryCapture):
    from lens_rope.reporting import Report

    return Report(report_data(qk))


RESULTS = {
    "RopeSpec": lambda qk: qk.rope(),
    "RotaryCapture": lambda qk: qk,
    "HeadDecomposition": _head,
    "ScoreBreakdown": lambda qk: _head(qk).at(_last(qk), _last(qk) // 2),
    "PairSummary": lambda qk: _head(qk).by_pair(),
    "DistanceProfile": lambda qk: _head(qk).by_distance(),
    "DistanceCurve": lambda qk: lr.distance_curve(qk, qk.layer_indices[0], 1, _last(qk), 0),
    "OffsetFeatures": lr.offset_features,
    "BoundsCheck": lambda qk: lr.offset_features(qk).check_bounds(),
    "SinkExplanation": lr.explain_sinks,
    "HeadExplanation": lr.explain_heads,
    "KeySpectrum": lr.key_spectrum,
    "HeadMetrics": lr.head_metrics,
    "AblationReport": lambda qk: ablation(model=qk.model.name),
    "Report": _report,
    "HeadDisplay": lambda qk: lr.show_head(qk, qk.layer_indices[0], 1),
    "Comparison": lambda qk: lr.compare(_report(qk), _report(qk), names=("a", "b")),
}
"""By the name of its class, how each result comes from a capture."""


def public_results() -> dict[str, type]:
    """Every class that gives a table or prints itself, and what public functions return."""
    found: dict[str, type] = {}
    modules = [
        importlib.import_module(entry.name)
        for entry in pkgutil.walk_packages(lr.__path__, "lens_rope.")
        if not entry.name.endswith("__main__")
    ]
    classes = {
        name: value
        for module in modules
        for name, value in vars(module).items()
        if inspect.isclass(value) and value.__module__.startswith("lens_rope.")
    }
    for name, value in classes.items():
        # What dataclasses write is wrapped; a text of its own is written by hand.
        own_text = (
            dataclasses.is_dataclass(value)
            and "__repr__" in vars(value)
            and not hasattr(value.__repr__, "__wrapped__")
        )
        if not name.startswith("_") and (own_text or hasattr(value, "to_dataframe")):
            found[name] = value
    for name in lr.__all__:
        function = getattr(lr, name)
        returned = getattr(function, "__annotations__", {}).get("return")
        if returned in classes and inspect.isfunction(function):
            found[str(returned)] = classes[str(returned)]
    return found


class Parsed(HTMLParser):
    """The text, tables and ids of an output, as a browser without scripts would have them."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tables: list[list[list[str]]] = []
        self.text, self.css, self.scripts = "", "", 0
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self._open: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in ("input", "br", "meta"):
            self._open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
        self.scripts += tag == "script"

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        inside = self._open[-1] if self._open else ""
        if inside == "style":
            self.css += data
        elif inside != "script":
            self.text += data
        if inside in ("td", "th"):
            self.tables[-1][-1][-1] += data
