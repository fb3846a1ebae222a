"""Where a model came from: what its name stood for when it was loaded, told without loading it.

A hub model is told by the hash of its commit. Local files are told by a fingerprint: the names and
sizes of the files that hold weights, settings or the tokenizer, and SHA-256 of all their content:
one changed matrix is another model. That takes less time than loading them.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SUFFIXES = frozenset((".bin", ".gguf", ".jinja", ".json", ".model", ".safetensors"))
_TEXTS = frozenset(("merges.txt", "vocab.txt"))
# What training leaves beside a model, and what nobody reads to load one.
_OF_TRAINING = ("optimizer", "rng_state", "scheduler", "trainer_state", "training_args")
_BLOCK = 8 << 20


@dataclass(frozen=True)
class ModelSource:
    """What a model's name stood for.

    Attributes:
        asked: The name that was asked for.
        kind: `hub`, `directory`, `file` (GGUF), or `package` (the demo model).
        repository: Name on the hub, or the package with its version; None for local files.
        revision: The hub commit, where it is known.
        fingerprint: SHA-256 over names, sizes and content of local files, see the module; for the
            demo model that of the file in its package. None for hub models.
        files: (name, size in bytes) of the local files.
    """

    asked: str
    kind: str
    repository: str | None = None
    revision: str | None = None
    fingerprint: str | None = None
    files: tuple[tuple[str, int], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "kind": self.kind,
            "repository": self.repository,
            "revision": self.revision,
            "fingerprint": self.fingerprint,
            "files": [{"name": name, "bytes": size} for name, size in self.files],
        }


def model_source(name: str, *, ask_hub: bool = False) -> ModelSource:
    """What a model's name stands for now, as `load_model` takes it.

    Args:
        name: A hub name, a local directory, a `.gguf` file, or the demo model.
        ask_hub: Whether to ask the hub for the newest commit; else, and where it cannot be reached,
            the commit in the local cache counts, which is the one that was loaded last.
    """
    path = Path(name).expanduser()
    # In the order of `load_checkpoint`.
    from lens_rope.demo import DEMO_MODEL, demo_source

    if name == DEMO_MODEL:
        package, sha256 = demo_source()
        return ModelSource(name, "package", repository=package, fingerprint=sha256)
    if path.is_dir():
        found = _model_files(path)
        sizes = tuple((file.name, file.stat().st_size) for file in found)
        return ModelSource(name, "directory", fingerprint=_fingerprint(found), files=sizes)
    if path.is_file():
        sizes = ((path.name, path.stat().st_size),)
        return ModelSource(name, "file", fingerprint=_fingerprint([path]), files=sizes)
    from lens_rope.checkpoints import official_name

    repository = official_name(name)
    revision = _newest_commit(repository) if ask_hub else None
    return ModelSource(
        name, "hub", repository=repository, revision=revision or _cached_commit(repository)
    )


def newest_file(name: str) -> float:
    """When the newest of a local model's files was changed, in seconds since the epoch; else 0."""
    path = Path(name).expanduser()
    files = _model_files(path) if path.is_dir() else [path] if path.is_file() else []
    return max((file.stat().st_mtime for file in files), default=0.0)


def _model_files(folder: Path) -> list[Path]:
    """The files of a directory that can be part of a model, by name."""
    return sorted(
        path
        for path in folder.iterdir()
        if (path.suffix in _SUFFIXES or path.name in _TEXTS)
        and not path.name.startswith((".", *_OF_TRAINING))
        and path.is_file()
    )


def _fingerprint(files: list[Path]) -> str:
    total = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        content = hashlib.sha256()
        with path.open("rb") as file:
            while block := file.read(_BLOCK):
                content.update(block)
        total.update(f"{path.name}\n{size}\n{content.hexdigest()}\n".encode(errors="replace"))
    return total.hexdigest()


def _newest_commit(repository: str) -> str | None:
    from huggingface_hub import HfApi

    try:
        return HfApi().model_info(repository, timeout=10).sha
    except Exception:  # no hub, no such model, not a name: loading says which
        return None


def _cached_commit(repository: str) -> str | None:
    from huggingface_hub import try_to_load_from_cache

    try:
        path = try_to_load_from_cache(repository, "config.json")
    except Exception:  # not a name that the hub could have
        return None
    # .../snapshots/COMMIT/config.json
    return Path(path).parent.name if isinstance(path, str) else None
