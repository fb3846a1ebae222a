"""Help, the version and `import lens_rope` load none of the libraries that take seconds to import;
these come when a command or function first needs them."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = (
    "torch", "numpy", "scipy", "transformers", "transformer_lens", "pandas", "plotly", "datasets",
    "circuitsvis", "huggingface_hub", "safetensors", "jinja2", "jaxtyping",
)  # fmt: skip
COMMANDS = [
    ["--help"], ["--version"], ["report", "--help"], ["inspect", "--help"], ["ablate", "--help"],
    ["report", "--layers", "what"],
]  # fmt: skip


def loaded_by(code: str) -> set[str]:
    """Which heavy packages a fresh interpreter has loaded once `code` has run."""
    tail = f"\nimport sys\nprint('LOADED', *(n for n in {HEAVY!r} if n in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code + tail], capture_output=True, text=True, check=True
    )
    last = done.stdout.splitlines()[-1].split()
    assert last[0] == "LOADED"
    return set(last[1:])


def test_package_alone_loads_nothing_heavy() -> None:
    assert loaded_by("import lens_rope\nlens_rope.__version__, dir(lens_rope)") == set()


def test_a_name_loads_what_it_needs() -> None:
    # That what is looked for would be found.
    assert {"torch", "numpy"} <= loaded_by("import lens_rope\nlens_rope.capture")


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_command_that_runs_no_model_loads_nothing_heavy(arguments: list[str]) -> None:
    code = f"""
import sys
sys.argv = ["lens-rope", *{arguments!r}]
from lens_rope.cli import main
try:
    main()
except SystemExit:
    pass
"""
    assert loaded_by(code) == set()
