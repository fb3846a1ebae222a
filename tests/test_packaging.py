"""The package as it is installed: metadata, tested sets of versions, scripts, and the wheel."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import lens_rope

ROOT = Path(__file__).parent.parent
SETS = {"3.9": ROOT / "constraints/transformer-lens-3.9.txt"}
SETS["4.3"] = ROOT / "constraints/transformer-lens-4.3.txt"
PYTHONS = ["3.10", "3.11", "3.12", "3.13"]

pytestmark = pytest.mark.skipif(
    not (ROOT / "pyproject.toml").is_file(), reason="the tests run outside the repository"
)


def pins(path: Path, python: str) -> dict[str, str]:
    """The version of each package that a constraints file pins for one Python."""
    found: dict[str, str] = {}
    for line in path.read_text().splitlines():
        if line.startswith("#"):
            continue
        pin = Requirement(line)
        if pin.marker and not pin.marker.evaluate({"python_version": python}):
            continue
        (specifier,) = pin.specifier
        assert specifier.operator == "==" and "+" not in specifier.version, line
        assert pin.name not in found, f"{pin.name} is pinned twice for Python {python}"
        found[canonicalize_name(pin.name)] = specifier.version
    return found


def requirements() -> list[Requirement]:
    """All requirements of the installed package, those of its extras too."""
    return [Requirement(line) for line in metadata.requires("lens-rope") or []]


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("name", SETS)
def test_tested_sets_satisfy_the_requirements(name: str, python: str) -> None:
    pinned = pins(SETS[name], python)
    for requirement in requirements():
        if requirement.name == "lens-rope":
            continue
        assert requirement.specifier.contains(pinned[canonicalize_name(requirement.name)])
    assert pinned["transformer-lens"].startswith(name)


@pytest.mark.parametrize("python", PYTHONS)
def test_tested_sets_differ_in_transformer_lens_alone(python: str) -> None:
    first, second = (pins(path, python) for path in SETS.values())
    differing = {n for n in first.keys() | second.keys() if first.get(n) != second.get(n)}
    assert differing == {"transformer-lens", "better-abc"}  # the latter is needed by 3.9 alone


def test_the_tested_sets_install_on_the_first_release_of_this_python() -> None:
    """Distributions ship early releases of a Python for years; Debian 12 has 3.11.2."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    first, pinned = f"{python}.0", pins(SETS["3.9"], python)
    needed = {
        dist.name: dist.metadata.get("Requires-Python") or ""
        for dist in metadata.distributions()
        if canonicalize_name(dist.name) in pinned
    }
    too_new = {name: needs for name, needs in needed.items() if first not in SpecifierSet(needs)}
    assert too_new == {}


def test_version_and_entry_point() -> None:
    (entry,) = metadata.entry_points(group="console_scripts", name="lens-rope")
    assert entry.value == "lens_rope.cli:main"
    assert metadata.version("lens-rope") == lens_rope.__version__


SHELL = [
    ".ci/run",
    *(
        path.relative_to(ROOT).as_posix()
        for path in sorted((ROOT / "scripts").iterdir())
        if path.is_file()
        and (path.suffix == ".sh" or path.read_text("utf-8").startswith("#!/usr/bin/env bash"))
    ),
]


@pytest.mark.parametrize("script", SHELL)
def test_scripts_parse(script: str) -> None:
    path = ROOT / script
    subprocess.run(["bash", "-n", str(path)], check=True)
    assert path.name.startswith("_") or os.access(path, os.X_OK)


def run_env(root: Path, call: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Sources `_env.sh` of a copied repository and calls a function of it."""
    return subprocess.run(
        ["bash", "-c", f'set -euo pipefail; . "{root}/scripts/_env.sh"; {call}'],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
    )


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """What the scripts read, and a `python` whose `venv` and `pip` only leave a trace."""
    root = tmp_path / "repo"
    for name in (
        "scripts/_env.sh",
        "pyproject.toml",
        *(f"constraints/{p.name}" for p in SETS.values()),
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, root / name)
    fake = tmp_path / "python"
    fake.write_text(
        f"""#!/usr/bin/env bash
echo "$*" >>"{tmp_path}/calls"
case "$*" in
-c*) exec "{sys.executable}" "$@" ;;
*venv*) mkdir -p "${{!#}}/bin" && cp "$0" "${{!#}}/bin/python" ;;
*pip*) [ ! -e "{tmp_path}/pip-fails" ] ;;
esac
"""
    )
    fake.chmod(0o755)
    return root


def installs(root: Path) -> int:
    """How often pip was called."""
    calls = root.parent / "calls"
    return calls.read_text().count("-m pip install") if calls.exists() else 0


def test_environment_is_made_once_and_again_when_its_inputs_change(repository: Path) -> None:
    python = str(repository.parent / "python")
    run_env(repository, "prepare_env 3.9", PYTHON=python).check_returncode()
    once = installs(repository)
    assert once > 0
    run_env(repository, "prepare_env 3.9", PYTHON=python).check_returncode()
    assert installs(repository) == once
    with (repository / "pyproject.toml").open("a") as file:
        file.write("# changed\n")
    run_env(repository, "prepare_env 3.9", PYTHON=python).check_returncode()
    assert installs(repository) == 2 * once
    (repository / ".venv/bin/python").unlink()
    run_env(repository, "prepare_env 3.9", PYTHON=python).check_returncode()
    assert installs(repository) == 3 * once
    run_env(repository, "prepare_env 4.3", PYTHON=python).check_returncode()
    assert installs(repository) == 4 * once
    assert "transformer-lens-4.3.txt" in (repository.parent / "calls").read_text()


def test_failed_installation_is_done_again(repository: Path) -> None:
    python = str(repository.parent / "python")
    (repository.parent / "pip-fails").touch()
    done = run_env(repository, "prepare_env 3.9", PYTHON=python)
    assert done.returncode == 1 and "the installation failed" in done.stderr
    failed = installs(repository)
    (repository.parent / "pip-fails").unlink()
    run_env(repository, "prepare_env 3.9", PYTHON=python).check_returncode()
    assert installs(repository) > failed


@pytest.mark.parametrize(
    ("call", "env", "message"),
    [
        ("prepare_env 3.9", {"PYTHON": "/bin/false"}, "PYTHON=/bin/false is not a Python 3.10 to"),
        ("prepare_env 2.0", {}, "no tested set '2.0'; there is: transformer-lens-3.9.txt tr"),
        ("usable_python() { false; }; prepare_env 3.9", {}, "no Python 3.10 to 3.13 with venv"),
    ],
)
def test_what_stops_the_scripts(repository: Path, call: str, env: dict, message: str) -> None:
    done = run_env(repository, call, **{"PYTHON": "", **env})
    assert done.returncode == 1
    assert message in done.stderr


@pytest.mark.slow
def test_wheel_holds_every_file_of_the_package(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
    package = {
        str(file.relative_to(ROOT))
        for file in (ROOT / "lens_rope").rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    assert "lens_rope/py.typed" in package
    assert package - held == set()
    assert any(name.endswith("licenses/LICENSE") for name in held)
