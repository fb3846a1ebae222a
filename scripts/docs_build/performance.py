"""The tables of the performance page, from what `scripts/bench` measured.

`docs/data/bench.json` holds the numbers; here is said what they are of. A case without a text ends
the build.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DATA = Path(__file__).parents[2] / "docs" / "data" / "bench.json"
Row = dict[str, Any]


@dataclass(frozen=True)
class Work:
    """What is said of a case by hand.

    Attributes:
        name: What lens_rope does.
        other: What it is compared with, or nothing.
    """

    name: str
    other: str = ""


WORK = {
    "report": Work(
        "Report without interventions, no page written", "the plain forward pass with logits"
    ),
    "report-interventions": Work(
        "Whole report, no page written", "the plain forward pass with logits"
    ),
    "dense-time": Work(
        "Advantages and distance profiles of all heads of a layer",
        "all contributions `[head, pair, query, key]` by one einsum",
    ),
    "dense-memory": Work(
        "The same, in memory", "all contributions `[head, pair, query, key]` by one einsum"
    ),
    "shift": Work(
        "Distance profiles of all heads of a layer",
        "shift and multiply: one distance after another",
    ),
    "report-memory": Work("Whole report, memory above the loaded model"),
    "report-peak": Work("Whole report, memory of the process"),
    "long": Work("Capture with fused attention and distance profiles, memory of the process"),
    "growth": Work("Everything but attention itself: exponent of the length"),
    "help": Work("`lens-rope --help`"),
    "inspect": Work("`lens-rope inspect` of a local directory"),
}
_HOSTS = {"hooked": "HookedTransformer", "bridge": "TransformerBridge"}
_HEAD = ("Host", "Tokens", "lens_rope", "The other", "Measured", "At most")


def markdown() -> str:
    """All of it, from the file in `docs/data/`."""
    return rendered(json.loads(DATA.read_text(encoding="utf-8")))


def rendered(content: dict[str, Any]) -> str:
    """The tables of what was measured, and on what.

    Args:
        content: What `scripts/bench` wrote.

    Raises:
        ValueError: There is a case that nothing is said of.
    """
    rows: list[Row] = content["rows"]
    unknown = sorted({row["case"] for row in rows} - WORK.keys())
    if unknown:
        raise ValueError(f"docs_build/performance.py says nothing of: {', '.join(unknown)}")
    done = [row for row in rows if "error" not in row]
    order = list(WORK)
    rows = sorted(rows, key=lambda row: (order.index(row["case"]), row["tokens"], row["host"]))
    parts = [_measured_on(content)]
    for case, of_case in itertools.groupby(rows, key=lambda row: row["case"]):
        work = WORK[case]
        parts.append(f"**{work.name}**" + (f", over {work.other}" if work.other else ""))
        parts.append(_table(_HEAD, [_cells(row) for row in of_case]))
    profiled = [row for row in done if "parts" in row]
    if profiled:
        parts += ["## Where the time goes", *_parts(max(profiled, key=_for_the_profile))]
    grown = [row for row in done if "exponents" in row]
    if grown:
        parts += ["## How each part grows", _growth(grown[-1])]
    return "\n\n".join(parts)


def _for_the_profile(row: Row) -> tuple[bool, bool, int]:
    return row["host"] == "hooked", row["case"] == "report", -abs(row["tokens"] - 512)


def _measured_on(content: dict[str, Any]) -> str:
    machine, versions = content["machine"], content["versions"]
    dates = sorted({row["date"][:10] for row in content["rows"] if "date" in row})
    revisions = dict.fromkeys(row["revision"] for row in content["rows"] if row.get("revision"))
    memory = "" if machine["memory_gb"] is None else f", {machine['memory_gb']:g} GB of memory"
    when = " to ".join(dict.fromkeys([dates[0], dates[-1]])) if dates else ""
    return (
        f"Measured on {machine['cpu']}, {machine['cores']} cores{memory}, with "
        f"{machine['threads']} threads, under {machine['system']}"
        + (f", {when}" if when else "")
        + ": "
        + ", ".join(f"{name} {version}" for name, version in versions.items())
        + (", at revision " + ", ".join(f"`{name}`" for name in revisions) if revisions else "")
        + "."
    )


def _cells(row: Row) -> tuple[str, ...]:
    of = f"{row['tokens']:,}" if row["tokens"] else ""
    if "layers" in row:
        of += f", {row['layers']} layers"
    head = (_HOSTS[row["host"]], of)
    if "error" in row:
        return (*head, "failed", "", "", "")
    unit = "GB" if "memory" in row["measure"] else "s" if row["measure"] == "time" else ""
    ours, other = (
        "" if number is None or not unit else f"{number:.3g} {unit}"
        for number in (row["ours"], row["other"])
    )
    if "seconds" in row:
        ours += f" in {row['seconds']:.0f} s"
    is_ratio = row["other"] is not None
    value = _value(row["value"], is_ratio, unit)
    limit = "" if row["limit"] is None else _value(row["limit"], is_ratio, unit)
    verdict = {True: "", False: " **(missed)**", None: ""}[row["met"]]
    return (*head, ours, other, value + verdict, limit)


def _value(number: float, is_ratio: bool, unit: str) -> str:
    """A ratio below 1 as a fraction, which is how many times less it is."""
    if is_ratio:
        return f"1/{1 / number:.3g}" if number < 0.5 else f"{number:.3g}×"
    return f"{number:.3g} {unit}".strip()


def _parts(row: Row) -> list[str]:
    parts = sorted(row["parts"].items(), key=lambda entry: -entry[1])
    return [
        f"{WORK[row['case']].name}, {row['tokens']:,} tokens, {_HOSTS[row['host']]}, under a "
        "profiler (which itself adds to what makes many small calls):",
        _table(("Part", "Share of the time"), [(name, f"{share:.0%}") for name, share in parts]),
    ]


def _growth(row: Row) -> str:
    lengths = row["lengths"]
    slopes = sorted(row["exponents"].items(), key=lambda entry: -entry[1])
    return _table(
        ("Part, of one layer", "Exponent", *(f"{n:,} tokens" for n in lengths)),
        [
            (name, f"{slope:.2f}", *(f"{1000 * s:.3g} ms" for s in row["stage_seconds"][name]))
            for name, slope in slopes
        ],
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
