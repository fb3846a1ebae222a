"""`report.json` key by key, from the JSON Schema that ships with the package."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from importlib.resources import files as resources
from typing import Any

FILE = "report.schema.json"
"""Name of the schema in the package and on the site."""

FORMULAS = {
    "rope": "rotation",
    "verification": "verification",
    "usage": "usage",
    "offset_features": "offset-and-content",
    "bounds": "bounds",
    "sinks": "sink-share",
    "heads": "patterns",
    "spectrum": "key-spectrum",
    "metrics": "head-metrics",
    "ablation": "ablation",
}
"""Where in the mathematics the numbers of a section are defined."""

Schema = Mapping[str, Any]


def files() -> dict[str, str]:
    """Files of the site by their path: the schema, to download."""
    return {FILE: _text()}


def markdown() -> str:
    """A table per key of the top level, in the order in which a report holds them."""
    schema = json.loads(_text())
    sections = {name: _resolved(inner, schema) for name, inner in schema["properties"].items()}
    plain = {name: inner for name, inner in sections.items() if _is_plain(inner)}
    units = [f"| {unit} | {text} |" for unit, text in schema["x-units"].items()]
    parts = [
        f"All of this section is made from the JSON Schema (draft 2020-12) of this version: "
        f"[{FILE}]({FILE}), in the package `lens_rope/reporting/{FILE}`.",
        "### Units { #units }",
        "\n".join(["| Unit | |", "|---|---|", *units]),
        "### Single values { #single-values }",
        _table(plain.items()),
    ]
    for name, inner in sections.items():
        if name not in plain:
            text = inner["description"]
            if name in FORMULAS:
                text += f" [Definitions](mathematics.md#{FORMULAS[name]})."
            parts += [f"### `{name}` {{ #{name} }}", text]
            parts += _tables([name], inner, schema)
    return "\n\n".join(parts)


def _text() -> str:
    return resources("lens_rope.reporting").joinpath(FILE).read_text(encoding="utf-8")


def _is_plain(schema: Schema) -> bool:
    return "properties" not in schema and "items" not in schema


def _resolved(schema: Schema, root: Schema) -> dict[str, Any]:
    """A schema with what its `$ref` stands for."""
    if "$ref" not in schema:
        return dict(schema)
    target: Any = root
    for part in schema["$ref"].removeprefix("#/").split("/"):
        target = target[part]
    return {**target, **{key: value for key, value in schema.items() if key != "$ref"}}


def _tables(paths: list[str], schema: Schema, root: Schema) -> Iterator[str]:
    """A table of the keys of an object, then those of the objects in it, each under its path.

    Args:
        paths: Where objects of this kind are; `[]` is an element of a list.
        schema: The object, or a list of such objects.
        root: The whole schema.
    """
    if "items" in schema:
        paths, schema = [f"{path}[]" for path in paths], _resolved(schema["items"], root)
    inner = {name: _resolved(inner, root) for name, inner in schema.get("properties", {}).items()}
    if not inner:
        return
    if paths[0].count(".") or len(paths) > 1:
        heading = ", ".join(f"`{path}`" for path in paths)
        yield f"#### {heading} {{ #keys-of.{_path(paths[0])} }}"
    yield _table(inner.items(), paths[0])
    # Keys that hold the same kind of object share a table.
    kinds: dict[str, list[str]] = {}
    for name, entry in schema["properties"].items():
        kinds.setdefault(entry.get("$ref", name), []).append(name)
    for names in kinds.values():
        below = [f"{path}{_step(name)}" for path in paths for name in names]
        yield from _tables(below, inner[names[0]], root)


def _step(name: str) -> str:
    """A key as a part of a path; one with a space in it cannot be written after a dot."""
    return f".{name}" if name.isidentifier() else f'["{name}"]'


def _table(rows: Iterable[tuple[str, Schema]], section: str = "") -> str:
    lines = ["| Key | Type | Unit | |", "|---|---|---|---|"]
    for name, schema in rows:
        text = schema["description"]
        if "const" in schema:
            text += f" Always `{schema['const']}`."
        allowed = schema.get("items", schema).get("enum", ())
        values = [f"`{value}`" for value in allowed if value is not None]
        if not all(value in text for value in values):
            text += f" One of {', '.join(values)}."
        cells = [
            f"`{name}`{{ #{_anchor(section, name)} .name }}",
            _kind(schema),
            schema.get("x-unit") or "",
            text.replace("|", "\\|"),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _anchor(section: str, name: str) -> str:
    return _path(".".join(["report", *([section] if section else []), name]))


def _path(path: str) -> str:
    """A path as an id of the page."""
    return re.sub(r"[^\w.-]+", "-", path.replace("[]", "")).strip("-")


def _kind(schema: Schema) -> str:
    """The type in words."""
    if "items" in schema:
        inner = schema["items"]
        length = "" if "minItems" not in schema else f"{schema['minItems']} "
        first, *rest = ("object" if "properties" in inner else _kind(inner)).split(" or ")
        return f"list of {length}{' or '.join([f'{first}s', *rest])}"
    kinds = schema.get("type", "string")  # what has no type is a set of names
    kinds = [kinds] if isinstance(kinds, str) else [*kinds]
    return " or ".join([*kinds, "null"] if None in schema.get("enum", ()) else kinds)
