"""The API pages name everything that is public, once, and each docstring there says what the code
says: its parameters, its errors, the shapes of its arrays and the columns of its tables."""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import re
import textwrap
from pathlib import Path

import griffe
import pytest
from planted import named_heads, planted_capture
from public_results import RESULTS, public_results

import lens_rope as lr
from lens_rope import errors

ROOT = Path(__file__).parents[1]
API = ROOT / "docs" / "api"

ERRORS = {
    name: value
    for name, value in vars(errors).items()
    if inspect.isclass(value) and issubclass(value, errors.LensRopeError)
}
RAISE_NOTHING = {"sample_text", "explain_sinks"}
"""Functions with nothing to refuse: they take no argument, or a capture that was verified."""

SOMETIMES = {"pair 23", "the rest"}
"""Columns of examples, which a head of few pairs does not have."""

DATAFRAME_METHODS = 28
"""At least so many methods give a table; fewer would mean that they are not found any more."""


@functools.cache
def package() -> griffe.Module:
    loaded = griffe.load("lens_rope", search_paths=[str(ROOT)], docstring_parser="google")
    assert isinstance(loaded, griffe.Module)
    return loaded


def resolved(identifier: str) -> griffe.Object:
    """What an identifier names, where it is defined."""
    found = package()[identifier.removeprefix("lens_rope.")]
    target = found.final_target if isinstance(found, griffe.Alias) else found
    assert isinstance(target, griffe.Object)
    return target


@functools.cache
def blocks() -> tuple[tuple[str, str, griffe.Object], ...]:
    """(page, identifier, object) of every `:::` block."""
    return tuple(
        (page.name, identifier, resolved(identifier) if identifier != "lens_rope" else package())
        for page in sorted(API.glob("*.md"))
        for identifier in re.findall(r"^::: (\S+)$", page.read_text(), re.M)
    )


def pages_of(path: str) -> list[str]:
    return [page for page, _, found in blocks() if found.path == path]


def classes() -> list[griffe.Class]:
    return [found for _, _, found in blocks() if isinstance(found, griffe.Class)]


def members(kind: type, label: str | None = None) -> list:
    """Public members, of one kind, of the classes on the pages."""
    return [
        member
        for found in classes()
        for name, member in found.members.items()
        if isinstance(member, kind)
        and (not name.startswith("_") or name in ("__getitem__", "__len__"))
        and (label is None or label in member.labels)
    ]


def functions() -> list[griffe.Function]:
    return [found for _, _, found in blocks() if isinstance(found, griffe.Function)]


def methods() -> list[griffe.Function]:
    return members(griffe.Function)


def sections(found: griffe.Object) -> dict[str, list]:
    """The parts of a docstring by kind; the text is a list of one."""
    assert found.docstring is not None, f"{found.path} has no docstring"
    parts: dict[str, list] = {"text": []}
    for section in found.docstring.parsed:
        if section.kind is griffe.DocstringSectionKind.text:
            parts["text"].append(section.value)
        else:
            value = section.value
            parts[section.kind.value] = value if isinstance(value, list) else [value]
    return parts


def text_of(found: griffe.Object) -> str:
    return "\n\n".join(sections(found)["text"])


_ARRAY = re.compile(r"(?:Float|Int|Bool|Complex)\[[\w.]+, [\"']([^\"']+)[\"']\]")


def missing_shapes(annotation: object, said: str) -> list[str]:
    """Shapes of the arrays in an annotation that a description does not give."""
    text = str(annotation)
    shapes = [f"[{', '.join(axes.split())}]" for axes in _ARRAY.findall(text)]
    missing = [shape for shape in shapes if f"`{shape}`" not in said and shape not in said]
    if not shapes and re.search(r"\b(?:ndarray|Tensor)\b", text) and not re.search(r"`\[\w", said):
        missing.append(text)
    return missing


# --- Every public name is there, once ---


def nested(found: griffe.Class) -> set[str]:
    """Paths of the package's classes in the annotations of a class's fields."""
    paths = set()
    for member in found.members.values():
        if isinstance(member, griffe.Attribute) and isinstance(member.annotation, griffe.Expr):
            for name in member.annotation.iterate(flat=True):
                if isinstance(name, griffe.ExprName) and name.canonical_path.startswith("lens_r"):
                    paths.add(name.canonical_path)
    return {
        target.path
        for target in map(resolved, sorted(paths))
        if isinstance(target, griffe.Class) and not target.name.startswith("_")
    }


def public_paths() -> set[str]:
    """Every path that has to have a place: names, results with all that they hold, errors."""
    names = {resolved(f"lens_rope.{name}").path for name in lr.__all__ if name != "__version__"}
    results = {f"{value.__module__}.{name}" for name, value in public_results().items()}
    assert {path.rpartition(".")[2] for path in results} >= set(RESULTS)
    shards = re.search(
        r"`lens_rope\.reporting\.(gather\.read_shard)`, `(shard\.merge_shards)`, "
        r"`(finishing\.finish)`",
        (ROOT / "docs" / "report.md").read_text().replace("\n", " "),
    )
    assert shards, "docs/report.md names the functions of a report in parts"
    parts = {f"lens_rope.reporting.{name}" for name in shards.groups()}
    found = {resolved(path).path for path in names | results | parts}
    held = [path for path in found if isinstance(resolved(path), griffe.Class)]
    while held:
        more = nested(resolved(held.pop()))  # type: ignore[arg-type]
        held += sorted(more - found)
        found |= more
    return found | {f"lens_rope.errors.{name}" for name in ERRORS}


def test_every_public_name_and_result_is_on_exactly_one_page():
    wanted = public_paths()
    assert len(wanted) > 60
    places = {path: pages_of(path) for path in sorted(wanted)}
    assert {path: pages for path, pages in places.items() if len(pages) != 1} == {}


def test_nothing_is_on_two_pages_or_twice_on_one():
    paths = [found.path for _, _, found in blocks()]
    assert sorted(paths) == sorted(set(paths))


def test_the_table_of_names_links_each_name_and_the_page_it_is_on():
    stage, seen = "", []
    for row in re.findall(r"^\| (.*) \|$", (API / "index.md").read_text(), re.M):
        cells = [cell.strip() for cell in re.split(r"(?<!\|)\|", row)]
        link = re.fullmatch(r"\[[^]]+\]\((\w+\.md)\)", cells[0])
        stage = link[1] if link else stage
        name = re.fullmatch(r"\[`(\w+)`\]\[(lens_rope\.[\w.]+)\]", cells[-2])
        if name is None:
            continue
        assert name[2].rpartition(".")[2] == name[1]
        assert pages_of(resolved(name[2]).path) == [stage], name[2]
        assert cells[-1]
        seen.append(name[1])
    assert sorted(seen) == sorted({*lr.__all__, "LensRopeError"} - {"__version__"})
    assert "`__version__`" in (API / "index.md").read_text()


def test_the_table_of_errors_has_their_exit_codes():
    rows = re.findall(
        r"^\| \[`(\w+)`\]\[lens_rope\.errors\.(\w+)\] \| (\d+) \|",
        (API / "errors.md").read_text(), re.M,
    )  # fmt: skip
    assert all(name == target for name, target, _ in rows)
    told = {name: int(code) for name, _, code in rows}
    assert told == {name: value.exit_code for name, value in ERRORS.items()}


# --- Docstrings say what the code says ---


def test_functions_document_all_parameters_what_they_return_and_their_errors():
    wrong = []
    for found in functions():
        parts = sections(found)
        documented = [entry.name for entry in parts.get("parameters", [])]
        if documented != [parameter.name for parameter in found.parameters]:
            wrong.append(f"{found.path}: documents {documented}")
        # A second line that is not indented would be read as another value that is returned.
        returned = parts.get("returns") or parts.get("yields") or []
        if [str(entry.annotation) in str(found.returns) for entry in returned] != [True]:
            wrong.append(f"{found.path}: returns {[entry.description for entry in returned]}")
        if ("raises" in parts) == (found.name in RAISE_NOTHING):
            wrong.append(f"{found.path}: errors")
    assert wrong == []
    assert len(functions()) >= len(lr.__all__)


def test_methods_document_their_parameters_in_a_section_or_in_their_text():
    wrong = []
    for found in methods():
        parts, text = sections(found), text_of(found)
        documented = [entry.name for entry in parts.get("parameters", [])]
        names = [parameter.name for parameter in found.parameters if parameter.name != "self"]
        in_text = [name for name in names if f"`{name}`" in text]
        if documented != names and (documented or in_text != names):
            wrong.append(f"{found.path}: documents {documented or in_text} of {names}")
        returned = parts.get("returns", [])
        if any(str(entry.annotation) != str(found.returns) for entry in returned):
            wrong.append(f"{found.path}: returns {[entry.description for entry in returned]}")
    assert wrong == []
    assert len(methods()) > 100


def test_errors_are_real_and_those_raised_on_the_spot_are_documented():
    wrong = []
    for found in [*functions(), *methods()]:
        named = [str(entry.annotation) for entry in sections(found).get("raises", [])]
        for name in named:
            known = ERRORS.get(name) or getattr(builtins, name, None)
            if not (inspect.isclass(known) and issubclass(known, Exception)):
                wrong.append(f"{found.path}: there is no {name}")
        raised = {
            node.exc.func.id
            for node in ast.walk(ast.parse(textwrap.dedent(found.source)))
            if isinstance(node, ast.Raise)
            and isinstance(node.exc, ast.Call)
            and isinstance(node.exc.func, ast.Name)
        }
        wrong += [f"{found.path}: raises {name}" for name in sorted(raised - set(named))]
        if len(named) > len(set(named)):
            wrong.append(f"{found.path}: an error twice")
    assert wrong == []


def test_classes_document_their_fields_in_order_with_the_shapes_of_arrays():
    wrong, n_arrays = [], 0
    for found in classes():
        if "dataclass" not in found.labels:
            continue
        fields = {
            name: member
            for name, member in found.members.items()
            if isinstance(member, griffe.Attribute)
            and "instance-attribute" in member.labels
            and not name.startswith("_")
        }
        documented = sections(found).get("attributes", [])
        if [entry.name for entry in documented] != list(fields):
            wrong.append(f"{found.path}: documents {[entry.name for entry in documented]}")
            continue
        for entry in documented:
            annotation = fields[entry.name].annotation
            n_arrays += bool(_ARRAY.search(str(annotation)))
            for shape in missing_shapes(annotation, entry.description):
                wrong.append(f"{found.path}.{entry.name}: has no {shape}")
    assert wrong == []
    assert n_arrays > 50


def test_properties_and_functions_give_the_shapes_of_what_they_take_and_return():
    wrong = []
    for found in members(griffe.Attribute, "property"):
        for shape in missing_shapes(found.annotation, text_of(found)):
            wrong.append(f"{found.path}: has no {shape}")
    for found in [*functions(), *methods()]:
        parts, text = sections(found), text_of(found)
        told = {entry.name: entry.description for entry in parts.get("parameters", [])}
        for parameter in found.parameters:
            for shape in missing_shapes(parameter.annotation, told.get(parameter.name, text)):
                wrong.append(f"{found.path}({parameter.name}): has no {shape}")
        said = "\n".join([text, *(entry.description for entry in parts.get("returns", []))])
        for shape in missing_shapes(found.returns, said):
            wrong.append(f"{found.path}: returns no {shape}")
    assert wrong == []


def test_constants_that_are_defaults_are_on_a_page_with_their_value():
    named = {
        default.canonical_path
        for found in [*functions(), *methods()]
        for default in (parameter.default for parameter in found.parameters)
        if isinstance(default, griffe.ExprName) and default.canonical_path.startswith("lens_rope.")
    }
    assert len(named) > 5
    assert [path for path in sorted(named) if not pages_of(resolved(path).path)] == []


def test_constants_types_and_errors_say_what_they_are():
    others = [found for _, _, found in blocks() if isinstance(found, griffe.Attribute)]
    assert len(others) > 20
    for found in [*others, *classes()]:
        assert text_of(found).strip(), found.path


# --- Tables ---


@functools.cache
def results() -> dict[str, object]:
    qk = planted_capture(list(named_heads(96).values()))
    return {name: make(qk) for name, make in RESULTS.items()}


def table_methods() -> list[tuple[str, str]]:
    return [
        (name, method)
        for name, value in public_results().items()
        for method, function in inspect.getmembers(value, inspect.isfunction)
        if not method.startswith("_") and function.__annotations__.get("return") == "pd.DataFrame"
    ]


def columns_told(cls: griffe.Class, method: str) -> set[str]:
    """Names in backticks after “Columns”, those in brackets left out; other methods looked up."""
    text = text_of(cls.members[method])  # type: ignore[arg-type]
    assert "Columns" in text, f"{cls.name}.{method} does not list its columns"
    start = text.index("Columns")
    paragraph = text[start:].partition("\n\n")[0]
    told = _names(paragraph)
    for other in re.findall(r"\bas `(\w+)`", paragraph):
        told.discard(other)
        told |= _told_by(cls, other)
    for left_out in re.findall(r"without `(\w+)`", paragraph):
        told.discard(left_out)
    return told


def _told_by(cls: griffe.Class, other: str) -> set[str]:
    if isinstance(cls.members[other], griffe.Function):
        return columns_told(cls, other)
    (entry,) = [entry for entry in sections(cls)["attributes"] if entry.name == other]
    return _names(entry.description)


def _names(text: str) -> set[str]:
    """What stands in backticks outside of brackets; endings such as `_a` are no names."""
    found = re.findall(r"`([^`]+)`", re.sub(r"\([^()]*\)", "", text))
    return {name for name in found if not name.startswith("_")}


_ENDINGS = re.compile(r"_(?:a|b|difference|pre|post)$")


def bare(column: str) -> set[str]:
    """What a column may be called in a docstring: it stands for others that end differently."""
    if re.fullmatch(r"pair_\d+", column):
        return {"pair_0"}
    if re.fullmatch(r"pairs? [\d–, ]+", column):
        return {"pair 23"}
    once = _ENDINGS.sub("", column)
    return {column, once, _ENDINGS.sub("", once)}


def test_methods_that_give_tables_are_found():
    assert len(table_methods()) >= DATAFRAME_METHODS
    assert {name for name, _ in table_methods()} <= set(RESULTS)


@pytest.mark.parametrize(("name", "method"), table_methods())
def test_a_table_has_the_columns_that_its_docstring_lists(name, method):
    value = results()[name]
    cls = resolved(f"{type(value).__module__}.{name}")
    assert isinstance(cls, griffe.Class)
    told = columns_told(cls, method)
    columns = [str(column) for column in getattr(value, method)().columns]
    assert [column for column in columns if not bare(column) & told] == []
    known = {alias for column in columns for alias in bare(column)} | set(cls.members)
    assert sorted(told - known - SOMETIMES) == []
