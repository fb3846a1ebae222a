"""`report.schema.json` describes all of every report, and nothing that no report has: with every
object closed, reports of many models on both hosts are valid, every key that it documents occurs,
and what it calls nullable is null somewhere. The page of the documentation is made from it."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, get_args

import jsonschema
import pytest
import torch
import zoo
from planted import make_capture, named_heads, planted_capture, random_record, sink_by_push
from report_fixtures import random_capture, report_data, rope

import lens_rope.sink_heads
from docs_build import report_schema, report_tables
from lens_rope.ablation import How
from lens_rope.ablation_effects import ablation_report
from lens_rope.bounds import BANDS, BOUNDS
from lens_rope.metrics import METRICS
from lens_rope.offset_shares import PARTS
from lens_rope.patterns import PATTERNS
from lens_rope.records import LayerCapture, Route
from lens_rope.reporting import report
from lens_rope.reporting.batch import report_models
from lens_rope.reporting.data import SCHEMA, ReportData
from lens_rope.reporting.manifest import manifest
from lens_rope.reporting.schema import to_json
from lens_rope.reporting.source import ModelSource
from lens_rope.reporting.tables import tables
from lens_rope.spec import PAIRINGS
from lens_rope.verify import TOLERANCE

PAGE = Path(__file__).parent.parent / "docs/schema.md"
OPEN = json.loads(files("lens_rope.reporting").joinpath("report.schema.json").read_text("utf-8"))
UNITS = {*OPEN["x-units"], None}
WORDS = " ".join(f"t{40 + (7 * i) % 50}" for i in range(80))
BRIDGES = ("llama-yarn", "mistral", "gpt-neox", "gpt-j", "gpt-oss", "smollm3", "deepseek-v3")


def closed(schema: Any) -> Any:
    """The schema with no key allowed that it does not name."""
    if isinstance(schema, list):
        return [closed(entry) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: closed(value) for key, value in schema.items()}
    if isinstance(made.get("properties"), dict) and "required" in made:
        made["additionalProperties"] = False
    return made


CLOSED = jsonschema.Draft202012Validator(closed(OPEN))


def errors(content: Any) -> list[str]:
    return [f"{error.json_path}: {error.message}" for error in CLOSED.iter_errors(content)]


def resolved(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema with what its `$ref` stands for."""
    if "$ref" not in schema:
        return schema
    target: Any = OPEN
    for name in schema["$ref"].removeprefix("#/").split("/"):
        target = target[name]
    return {**target, **{key: value for key, value in schema.items() if key != "$ref"}}


def types(schema: Mapping[str, Any]) -> set[str]:
    kind = schema.get("type", ())
    return {kind} if isinstance(kind, str) else set(kind)


def is_number(schema: Mapping[str, Any]) -> bool:
    """Whether it is a number, or a list of numbers."""
    schema = schema.get("items", schema)
    return bool(types(schema) & {"number", "integer"})


def nullable(schema: Mapping[str, Any]) -> bool:
    return "null" in types(schema) or None in schema.get("enum", ())


def properties(schema: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Mapping]]:
    """Every property at any depth as (path, schema); `[]` is an element of a list."""
    schema = resolved(schema)
    for name, inner in schema.get("properties", {}).items():
        inner = resolved(inner)
        yield f"{path}.{name}".lstrip("."), inner
        yield from properties(inner, f"{path}.{name}")
    if "items" in schema:
        yield from properties(schema["items"], f"{path}[]")


def values(content: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every value at any depth as (path, value), paths as those of `properties`."""
    if isinstance(content, dict):
        for name, inner in content.items():
            yield f"{path}.{name}".lstrip("."), inner
            yield from values(inner, f"{path}.{name}")
    elif isinstance(content, list):
        for inner in content:
            yield f"{path}[]".lstrip("."), inner
            yield from values(inner, f"{path}[]")


DOCUMENTED = dict(properties(OPEN))


# Reports


def without_a_model() -> Iterator[ReportData]:
    """Reports on captures made by hand."""
    # Every name that a head can have.
    yield report_data(planted_capture(list(named_heads(96).values())))
    # A layer without RoPE, one with a single pair; windows and components that are not rotated.
    mixed = (rope(0, rotary_dim=0), rope(1, rotary_dim=2), rope(2, window=20), rope(3, 8))
    for n_pos in (3, 40, 70):
        yield report_data(random_capture(mixed, n_pos=n_pos))
    # One pair alone, a sink among its keys; and keys that are all the same.
    single = random_record(96, frequencies=(0.02,), offset=3.0, size=1.5)
    for k in (sinking(single), torch.zeros_like(single.k)):
        yield report_data(make_capture(dataclasses.replace(single, k=k)))
    for n_pos in (1, 24):
        layers = (rope(0), rope(1, pairing="adjacent"))
        yield report_data(random_capture(layers, n_pos=n_pos))


def sinking(record: LayerCapture) -> torch.Tensor:
    """The keys of a record, all but the first turned against its queries."""
    k = record.k.clone()
    k[1:] = -record.q[1:].abs() * record.q[1:].mean(dim=0).sign()
    return k


def on_a_host(data: ReportData) -> ReportData:
    """With a host, which captures made by hand do not have."""
    versions = {"transformer_lens": "3.9.0", "transformers": "5.9.0", "torch": "2.6.0"}
    model = dataclasses.replace(data.model, host="TransformerBridge", versions=versions)
    return dataclasses.replace(data, model=model)


@pytest.fixture(scope="module")
def reports() -> list[ReportData]:
    """Reports with and without sinks, interventions, RoPE, BOS, window, and enough tokens."""
    made = [on_a_host(data) for data in without_a_model()]
    for name in BRIDGES:
        made.append(report(zoo.bridge(name), zoo.tokens(70)).data)
    llama = zoo.bridge("llama")
    made.append(report(llama, [WORDS, WORDS[:60], "t5"], names=["a", "b", "c"]).data)
    made.append(report(llama, WORDS, max_tokens=20, layers=[1], interventions=False).data)
    made.append(report(llama, torch.tensor([5])).data)
    with pytest.MonkeyPatch.context() as patch:
        # Random models have no sinks; with this, some of their heads count as if they had.
        patch.setattr(lens_rope.sink_heads, "SINK_THRESHOLD", 0.05)
        made.append(report(llama, [WORDS, WORDS[::-1]], context=64).data)
        # One query of several, which tells no error of what removal leaves.
        patch.setattr(lens_rope.sink_heads, "REMOVAL_QUERIES", 1)
        one_query = report_data(planted_capture([sink_by_push(96, 0)]))
        made.insert(0, on_a_host(one_query))
    # As of long prompts, of which a fused pass compares some of the queries.
    checks = [
        dataclasses.replace(check, checked_queries=70 + check.layer, output=1e-6)
        for check in made[-1].checks
    ]
    made.append(dataclasses.replace(made[-1], checks=tuple(checks)))
    if zoo.HookedTransformer is not None:
        made.append(report(zoo.hooked(rotary_dim=4), zoo.tokens(40)).data)
    # As of a model without a tokenizer, which only HookedTransformer can be.
    prompts = [dataclasses.replace(p, starts_with_bos=None) for p in made[-1].prompts]
    made.append(dataclasses.replace(made[-1], prompts=type(made[-1].prompts)(prompts)))
    pairs = {(0, 0): [2], (1, 3): [0, 1]}
    for prompt in (WORDS, zoo.tokens(8), torch.tensor([5])):
        done = ablation_report(llama, prompt, pairs)
        made.append(dataclasses.replace(made[-1], ablation=done))
    return made


@pytest.fixture(scope="module")
def contents(reports) -> list[dict[str, Any]]:
    return [json.loads(to_json(data)) for data in reports]


def test_the_schema_is_one():
    jsonschema.Draft202012Validator.check_schema(OPEN)


def test_reports_are_valid_with_every_object_closed(contents):
    assert {content["host"]["class"] for content in contents} >= {"TransformerBridge"}
    assert {content["ablation"] is None for content in contents} == {True, False}
    for content in contents:
        assert errors(content) == []


def test_every_documented_key_occurs(contents):
    seen = {path for content in contents for path, _ in values(content)}
    assert set(DOCUMENTED) - seen == set()


def test_what_is_nullable_is_null_somewhere_and_a_value_elsewhere(contents):
    null, value = set(), set()
    for content in contents:
        for path, found in values(content):
            (null if found is None else value).add(path)
    for path, schema in DOCUMENTED.items():
        elements = schema.get("items", {})
        if nullable(schema):
            assert path in null, f"{path} is never null"
            assert path in value, f"{path} is always null"
        if nullable(elements):
            assert f"{path}[]" in null, f"no element of {path} is null"
            assert f"{path}[]" in value, f"every element of {path} is null"


@pytest.mark.demo
@pytest.mark.slow
def test_a_report_on_the_demo_model_is_valid():
    import lens_rope as lr

    model = lr.load_model("smollm2-135m")
    # Layer 16 has the strongest sink of this model.
    content = lr.report(model, max_tokens=96, layers=[3, 16]).to_dict()
    assert content["ablation"]["heads"] and content["sinks"]["heads"]
    assert errors(json.loads(json.dumps(content))) == []


@pytest.mark.parametrize(
    ("where", "error"),
    [
        (lambda c: c.update(more=1), "'more' was unexpected"),
        (lambda c: c["model"].update(more=1), "'more' was unexpected"),
        (lambda c: c["spectrum"][0]["pre"].update(more=1), "'more' was unexpected"),
        (lambda c: c["bounds"]["p_values"]["angle"].update(more=1), "'more' was unexpected"),
        (lambda c: c["sinks"]["heads"][0]["frequencies"][0].pop("lift"), "'lift' is a required"),
        (lambda c: c["heads"][0].update(pattern="other"), "'other' is not one of"),
        (lambda c: c["heads"][0].update(sink_share=None), "None is not of type 'number'"),
        (lambda c: c["prompts"][0].update(tokens=1.5), "1.5 is not of type 'integer'"),
        (lambda c: c.update(schema="lens-rope-report/2"), "'lens-rope-report/1' was expected"),
    ],
)
def test_what_differs_is_not_valid(contents, where, error):
    content = copy.deepcopy(next(c for c in contents if c["sinks"]["heads"]))
    where(content)
    assert len(errors(content)) == 1 and error in errors(content)[0]


def test_the_published_schema_is_open(contents):
    content = copy.deepcopy(contents[0])
    content["later"] = content["model"]["later"] = 1
    content["heads"][0]["later"] = None
    assert list(jsonschema.Draft202012Validator(OPEN).iter_errors(content)) == []
    assert "only ever added" in OPEN["description"]


# What the schema says


@pytest.mark.parametrize("path", DOCUMENTED)
def test_every_property_says_what_it_is(path):
    schema = DOCUMENTED[path]
    assert schema["description"].endswith(".")
    assert types(schema) or {"const", "enum"} & set(schema)
    if is_number(schema):
        assert schema["x-unit"] in UNITS
    else:
        assert "x-unit" not in schema
    if "properties" in schema:
        assert schema["required"] == list(schema["properties"])


def test_every_unit_is_used_and_explained():
    used = {schema["x-unit"] for schema in DOCUMENTED.values() if "x-unit" in schema}
    assert used == UNITS
    for unit, text in OPEN["x-units"].items():
        assert f"| {unit} | {text} |" in report_schema.markdown()


def test_sets_of_values_are_those_of_the_package():
    def enum(path: str) -> set:
        return set(DOCUMENTED[path].get("items", DOCUMENTED[path])["enum"])

    assert DOCUMENTED["schema"]["const"] == OPEN["title"] == SCHEMA
    assert list(OPEN["properties"]) == OPEN["required"]
    assert enum("rope[].pairing") == {*PAIRINGS, None}
    assert enum("heads[].pattern") == {*PATTERNS, None}
    assert enum("heads[].also") == set(PATTERNS) - {"mixed"}
    assert enum("heads[].band") == {*BANDS, None}
    targets = {path.rpartition(".")[2] for path in DOCUMENTED if ".masses." in path}
    assert enum("heads[].target") == targets | {"sink", "attended"}
    assert targets < set(PATTERNS)
    assert enum("ablation.how") == set(get_args(How))
    assert enum("verification.layers[].route") == set(get_args(Route))
    assert enum("model.dtype") == {str(dtype).removeprefix("torch.") for dtype in TOLERANCE}
    assert set(DOCUMENTED["bounds.p_values"]["properties"]) == set(BOUNDS)
    assert set(DOCUMENTED["heads[].offset_shares"]["properties"]) == set(PARTS)
    assert {f"metrics[].{name}" for name in METRICS} <= set(DOCUMENTED)


# The page


def cells(row: str) -> list[str]:
    """The cells of a row of a table in Markdown."""
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]]


def test_the_page_has_a_row_for_every_property():
    rows, told = {}, {}
    for section in re.split(r"^###+ ", report_schema.markdown(), flags=re.M)[1:]:
        heading, *_ = section.split("\n")
        paths = re.findall("`(.*?)`", heading) or [""]
        told[paths[0]] = section
        is_list = types(DOCUMENTED.get(paths[0], {})) == {"array"}
        for row in re.findall(r"^\| `.*", section, flags=re.M):
            key, kind, unit, text = cells(row)
            name, anchor = re.fullmatch(r"`(.*?)`{ #report\.(\S+) .name }", key).groups()
            found = [f"{path}{'[]' * is_list}.{name}".lstrip(".") for path in paths]
            assert anchor == found[0].replace("[]", "").replace(" ", "-")
            for path in found:
                assert path not in rows
                rows[path] = kind, unit, text
    for path, schema in DOCUMENTED.items():
        if path in OPEN["properties"] and path not in rows:
            assert schema["description"] in told[path]
            continue
        kind, unit, text = rows.pop(path)
        assert schema["description"].replace("|", "\\|") in text
        assert unit == (schema.get("x-unit") or "")
        assert ("null" in kind) == (nullable(schema) or nullable(schema.get("items", {}))), path
        for allowed in schema.get("items", schema).get("enum", ()):
            assert allowed is None or f"`{allowed}`" in text
    assert not rows


def test_the_schema_can_be_downloaded():
    ((name, content),) = report_schema.files().items()
    assert json.loads(content) == OPEN
    assert f"]({name})" in report_schema.markdown()


def test_every_table_and_column_is_described(reports):
    found: dict[str, set[str]] = {}
    for data in reports:
        for name, frame in tables(data).items():
            columns = {re.sub(r"^pair_\d+$", "pair_0, pair_1, ...", c) for c in frame.columns}
            found.setdefault(name, set()).update(columns)
    described = {name: set(table.columns) for name, table in report_tables.TABLES.items()}
    assert described == found
    page = report_tables.markdown()
    for name, table in report_tables.TABLES.items():
        assert f"### `{name}.csv`" in page
        for column, (unit, text) in table.columns.items():
            assert text.endswith(".") and unit in UNITS
            cell = f"`{column}`{{ #{report_tables.anchor(name, column)} .name }}"
            assert f"| {cell} | {unit or ''} | {text} |" in page


def test_anchors_of_the_page_are_written_out_and_unique():
    """An anchor that is derived from its heading would move with the words."""
    page = report_schema.markdown() + "\n\n" + report_tables.markdown()
    headings = re.findall(r"^####? .*", page, flags=re.M)
    assert [line for line in headings if not re.search(r" \{ #\S+ \}$", line)] == []
    ids = re.findall(r"\{ #(\S+)", page)
    assert len(set(ids)) == len(ids) > 300
    assert {"keys-of.sinks.heads", "table-sinks.band", "table-gallery_by_distance.pair_0"} <= {*ids}


def test_numbers_in_tables_have_the_units_of_the_schema():
    """Where a column says the same as a key of `report.json`, it says it in the same unit."""
    same = {
        "rope": "rope[]", "usage": "usage[]", "offset_features": "offset_features[]",
        "heads": "heads[]", "metrics": "metrics[]", "verification": "verification.layers[]",
        "bounds_by_layer": "bounds.layers[]",
    }  # fmt: skip
    compared = 0
    for name, path in same.items():
        for column, (unit, _) in report_tables.TABLES[name].columns.items():
            schema = DOCUMENTED.get(f"{path}.{column}")
            if schema is not None and is_number(schema):
                assert schema["x-unit"] == unit, f"{name}.{column}"
                compared += 1
    assert compared > 40


def documented_on_page(heading: str) -> list[str]:
    """Keys in the first column of the table below a heading of the page."""
    section = re.split(r"^##+ ", PAGE.read_text("utf-8"), flags=re.M)
    (text,) = [part for part in section if part.startswith(heading)]
    return [re.match("`(.*?)`", cells(row)[0])[1] for row in re.findall(r"^\| `.*", text, re.M)]


def keys(content: Any) -> set[str]:
    return {path for path, _ in values(content) if not path.endswith("[]")}


@pytest.mark.skipif(not PAGE.is_file(), reason="the tests run outside the repository")
def test_the_keys_of_the_manifest_and_of_a_run_are_on_the_page(reports, tmp_path):
    source = ModelSource("m", "directory", fingerprint="0", files=(("config.json", 2),))
    arguments = dict.fromkeys(("layers", "heads"))
    content = manifest(reports[-1], ["json"], source=source, arguments=arguments)
    # What was asked for is said by its names, which are those of `report`.
    shown = set(documented_on_page("`manifest.json`"))
    found = keys(content)
    assert shown == {key for key in found if not key.startswith("arguments.")}
    report_models([str(tmp_path / "none"), str(tmp_path / "nothing")], tmp_path / "out")
    run = json.loads((tmp_path / "out/run.json").read_text("utf-8"))
    found = {key for key in keys(run) if not key.startswith("arguments.")}
    assert set(documented_on_page("`run.json`")) == found
