"""The picture of the package: its stages, their modules, and a check that imports flow one way.

`STAGES` is the one place that says which module belongs where. A module without a stage, and an
import from a later stage, end the build. Run as a program, it writes the picture to
`docs/images/architecture.svg`, which CONTRIBUTING.md shows where there is no site.
"""

from __future__ import annotations

import ast
import html
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import lens_rope

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "lens_rope"
PICTURE = ROOT / "docs" / "images" / "architecture.svg"


@dataclass(frozen=True)
class Stage:
    """A step between a model's name and what a reader sees.

    Attributes:
        title: Its name.
        what: What it does, in a few words.
        modules: Modules of the package; one with modules of its own stands for all of them.
    """

    title: str
    what: str
    modules: tuple[str, ...]


GROUND = Stage(
    "Common ground",
    "Under every stage: each formula and each word once, records, errors.",
    ("errors", "grams", "quiet", "records", "rotation", "scores", "spec", "storage", "words"),
)
FLOW = (
    Stage(
        "Models",
        "From a name to weights, compared with transformers.",
        ("checkpoints", "demo", "models"),
    ),
    Stage(
        "Hosts",
        "The one place that knows hook names and quirks of models.",
        ("hosts",),
    ),
    Stage(
        "Capture",
        "Fits the rotation, verifies each layer, or refuses.",
        ("capturing", "fit", "memory", "streaming", "text", "verify"),
    ),
    Stage(
        "Decomposition",
        "One head's scores, pair by pair.",
        ("decomposition", "distance", "results"),
    ),
    Stage(
        "Measures",
        "Numbers of one layer that explanations are made of.",
        ("advantage", "attention", "removal", "sinks", "targets", "usage"),
    ),
    Stage(
        "Explanations",
        "Results with a name and a definition; they merge in any order.",
        (
            "bounds",
            "heads",
            "metrics",
            "offset_shares",
            "offsets",
            "patterns",
            "sink_heads",
            "spectrum",
        ),
    ),
    Stage(
        "Interventions",
        "The running model without some pairs.",
        ("ablation", "ablation_effects"),
    ),
    Stage(
        "Views",
        "Figures, tables and descriptions, made from results.",
        ("views",),
    ),
    Stage(
        "Reporting",
        "Many prompts to one page, JSON, tables; comparison.",
        ("reporting",),
    ),
    Stage("Command line", "Parses, calls, writes.", ("cli",)),
)
STAGES = (GROUND, *FLOW)
VIEWS = next(stage for stage in FLOW if stage.title == "Views")

# What names the libraries that models come from: beyond these stages it is numbers alone.
HOST_LIBRARY = "transformer_lens"
KNOW_THE_HOST = ("Models", "Hosts")


@dataclass(frozen=True)
class Import:
    """One import inside the package.

    Attributes:
        source: The importing module, such as `hosts.bridge`.
        target: The imported module, or another package.
        is_deferred: Whether it stands inside a function or is for types alone, so that importing
            the one does not import the other.
    """

    source: str
    target: str
    is_deferred: bool


def modules() -> dict[str, Path]:
    """Every module of the package by its name below `lens_rope`; the package itself is left out."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if name:
            found[name] = path
    return found


def stage_of(module: str) -> Stage:
    """The stage of a module.

    Raises:
        ValueError: It has none.
    """
    for stage in STAGES:
        if module.split(".")[0] in stage.modules:
            return stage
    raise ValueError(
        f"lens_rope.{module} has no stage; name it in STAGES of scripts/docs_build/architecture.py"
    )


def imports(name: str, source: str, known: set[str]) -> Iterator[Import]:
    """What one module imports: modules of the package, and TransformerLens.

    Args:
        name: Name of the module.
        source: Its text.
        known: Names of all modules.
    """
    tree = ast.parse(source)
    deferred = {
        id(inner)
        for outer in ast.walk(tree)
        if isinstance(outer, ast.FunctionDef)
        or (isinstance(outer, ast.If) and ast.unparse(outer.test) == "TYPE_CHECKING")
        for inner in ast.walk(outer)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            raise ValueError(f"lens_rope.{name} has a relative import; name the module in full")
        if isinstance(node, ast.ImportFrom) and node.module == "lens_rope":
            # A public name of the package stands for the module that has it.
            targets = [
                lens_rope._HOME.get(alias.name, f"lens_rope.{alias.name}") for alias in node.names
            ]
        elif isinstance(node, ast.ImportFrom) and node.module:
            targets = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        else:
            continue
        for target in targets:
            parts = target.split(".")
            if parts[0] == HOST_LIBRARY:
                yield Import(name, HOST_LIBRARY, id(node) in deferred)
            elif parts[0] == "lens_rope":
                below = ".".join(parts[1:])
                module = below if below in known else below.rpartition(".")[0]
                if module:  # else the package itself, for its version or its public names
                    yield Import(name, module, id(node) in deferred)


def against_the_flow(found: list[Import]) -> list[str]:
    """A sentence for each import that goes the wrong way.

    An import may go to the same stage or an earlier one. Results draw themselves, so a deferred
    import may also go to a view.
    """
    wrong = []
    for each in found:
        here = stage_of(each.source)
        if each.target == HOST_LIBRARY:
            if here.title not in KNOW_THE_HOST:
                wrong.append(f"lens_rope.{each.source} imports {HOST_LIBRARY}; only hosts may")
            continue
        there = stage_of(each.target)
        draws_itself = each.is_deferred and there is VIEWS
        if STAGES.index(there) > STAGES.index(here) and not draws_itself:
            wrong.append(
                f"lens_rope.{each.source} ({here.title}) imports lens_rope.{each.target} "
                f"({there.title}), which is a later stage"
            )
    return wrong


def checked() -> dict[str, Path]:
    """All modules, after a look at their imports.

    Raises:
        ValueError: A module has no stage, a stage names what does not exist, or an import goes
            against the flow.
    """
    known = modules()
    for stage in STAGES:
        for name in stage.modules:
            if name not in known:
                raise ValueError(f"{stage.title} names lens_rope.{name}, which does not exist")
    found = [
        each
        for name, path in known.items()
        for each in imports(name, path.read_text(encoding="utf-8"), set(known))
    ]
    for name in known:
        stage_of(name)
    if wrong := against_the_flow(found):
        raise ValueError("imports against the flow: " + "; ".join(wrong))
    return known


_WIDTH, _LEFT, _ROW, _PAD = 800, 230, 22, 12
_GAP = 20  # between stages, for the arrow
_STYLE = """
.lr-flow { --ink: var(--md-default-fg-color, #1f2328); --soft: var(--md-default-fg-color--light,
 #59636e); --paper: var(--md-code-bg-color, #f6f8fa); --edge: var(--md-typeset-a-color, #3b5b92);
 font-family: var(--md-text-font-family, system-ui), system-ui, sans-serif; }
@media (prefers-color-scheme: dark) { .lr-flow { --ink: var(--md-default-fg-color, #e6edf3);
 --soft: var(--md-default-fg-color--light, #9198a1); --paper: var(--md-code-bg-color, #161b22);
 --edge: var(--md-typeset-a-color, #8fb0ea); } }
.lr-architecture .lr-flow { width: 100%; height: auto; }
.lr-flow text { fill: var(--ink); font-size: 13px; }
.lr-flow .lr-title { font-weight: 700; font-size: 15px; }
.lr-flow .lr-what, .lr-flow .lr-note { fill: var(--soft); font-size: 12px; }
.lr-flow .lr-module { font: 12px var(--md-code-font-family, ui-monospace), ui-monospace, monospace;
 fill: var(--ink); }
.lr-flow .lr-box { fill: var(--paper); stroke: var(--edge); }
.lr-flow .lr-ground { stroke-width: 3; }
.lr-flow .lr-arrow { stroke: var(--edge); fill: none; stroke-width: 2; }
.lr-flow .lr-back { stroke-dasharray: 4 4; }
.lr-flow .lr-head { fill: var(--edge); }
"""


def picture() -> str:
    """The stages as an SVG that follows the colours of the site, or else of the reader's system."""
    known = checked()
    body: list[str] = []
    top, tops = 2, {}
    for stage in (*FLOW, GROUND):
        if stage is GROUND:
            top += 14
        height = _stage(stage, known, top, body)
        tops[stage.title] = (top, height)
        following = top + height
        if stage not in (FLOW[-1], GROUND):
            body.append(
                f'<path class="lr-arrow" d="M40 {following} v{_GAP - 7}"/>'
                f'<path class="lr-head" d="M34 {following + _GAP - 8} h12 l-6 8 z"/>'
            )
        top = following + _GAP
    body.append(_back(tops))
    total = top - _GAP + 2
    names = ", then ".join(stage.title for stage in FLOW)
    return (
        f'<svg class="lr-flow" xmlns="http://www.w3.org/2000/svg" role="img" '
        f'viewBox="0 0 {_WIDTH} {total}" width="{_WIDTH}" height="{total}" '
        'aria-labelledby="lr-flow-title lr-flow-text">'
        '<title id="lr-flow-title">How data flows through lens_rope</title>'
        f'<desc id="lr-flow-text">{names}. Each stage imports from itself and from earlier stages '
        "alone; all of them stand on the common ground.</desc>"
        f"<style>{_STYLE}</style>{''.join(body)}</svg>"
    )


def _stage(stage: Stage, known: dict[str, Path], top: int, body: list[str]) -> int:
    """Draws one stage; returns its height."""
    names = [
        name
        for name in known
        if stage_of(name) is stage and not (name in stage.modules and f"{name}." in " ".join(known))
    ]
    # Packages are named by their modules, which are many: their common name is left out.
    prefix = f"{stage.modules[0]}." if len(stage.modules) == 1 else ""
    chips, x, row = [], _LEFT, 0
    for name in names:
        label = name.removeprefix(prefix)
        if label.startswith("_"):
            continue
        width = round(7.3 * len(label)) + 14
        if x + width > _WIDTH - 26:
            x, row = _LEFT, row + 1
        first = (ast.get_docstring(ast.parse(known[name].read_text(encoding="utf-8"))) or "").split(
            "\n\n"
        )[0]
        chips.append(
            f'<text class="lr-module" x="{x}" y="{top + _PAD + 14 + row * _ROW}">'
            f"{html.escape(label)}<title>{html.escape(' '.join(first.split()))}</title></text>"
        )
        x += width
    what = textwrap.wrap(stage.what, 29)
    height = 2 * _PAD + max((row + 1) * _ROW, 18 + 16 * len(what)) - 4
    kind = "lr-box lr-ground" if stage is GROUND else "lr-box"
    body.append(
        f'<rect class="{kind}" x="2" y="{top}" width="{_WIDTH - 22}" height="{height}" rx="6"/>'
        f'<text class="lr-title" x="16" y="{top + _PAD + 13}">{stage.title}</text>'
    )
    for i, line in enumerate(what):
        y = top + _PAD + 31 + 16 * i
        body.append(f'<text class="lr-what" x="16" y="{y}">{html.escape(line)}</text>')
    body.extend(chips)
    return height


def _back(tops: dict[str, tuple[int, int]]) -> str:
    """The one way back: a result imports its view when it is drawn."""
    (first, height), (last, depth) = tops["Decomposition"], tops["Views"]
    start, end, x = last + depth // 2, first + height // 2, _WIDTH - 20
    return (
        f'<path class="lr-arrow lr-back" d="M{x} {end} h12 V{start} h-12">'
        "<title>A result imports its view when it is drawn, not before</title></path>"
        f'<path class="lr-head" d="M{x + 8} {start - 6} v12 l-8 -6 z"/>'
    )


def markdown() -> str:
    """The picture as a block of its own."""
    return f'<div class="lr-architecture">{" ".join(picture().split())}</div>'


def main() -> None:
    """Writes the picture as a file."""
    PICTURE.write_text(picture() + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
