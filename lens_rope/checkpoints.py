"""From a model's name to its weights and tokenizer, as transformers loads them.

A name is a local directory, a `.gguf` file, the demo model, or a model on the hub, in this order.
What is loaded is complete: transformers fills weights that a checkpoint lacks with random numbers
and only warns, here that is an error.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lens_rope.demo import DEMO_MODEL, demo_directory
from lens_rope.errors import InputError, ModelLoadError

_WHAT_TO_DO = (
    "check the spelling, give a local directory or a .gguf file, "
    f"or use the demo model {DEMO_MODEL!r}"
)


@dataclass(frozen=True)
class Checkpoint:
    """A loaded model, before TransformerLens.

    Attributes:
        hf_model: The transformers model, on the CPU, in eager attention, in eval mode.
        tokenizer: Its tokenizer. TransformerLens loads it again from its `name_or_path`.
        label: The name to show: the given name, or the last part of a path.
        hub_name: The model's name on the hub; None for a local model.
    """

    hf_model: Any
    tokenizer: Any
    label: str
    hub_name: str | None = None


def load_checkpoint(name: str, dtype: torch.dtype) -> Checkpoint:
    """Loads the model that `name` stands for.

    Args:
        name: A local directory, a `.gguf` file, `smollm2-135m`, or a hub name.
        dtype: The type of the weights in memory.

    Raises:
        InputError: The name is empty.
        ModelLoadError: There is no such model, or it cannot be read completely.
    """
    if not name.strip():
        raise InputError(f"the model's name is empty; {_WHAT_TO_DO}")
    if name == DEMO_MODEL:
        return load_directory(demo_directory(), dtype, label=DEMO_MODEL)
    path = Path(name).expanduser()
    label = path.name or path.resolve().name
    if path.is_dir():
        return load_directory(path, dtype, label=label)
    if path.is_file():
        hf_model, tokenizer = load_gguf(path, dtype)
        return Checkpoint(hf_model, tokenizer, label)
    if _looks_like_path(name):
        raise ModelLoadError(f"there is no file or directory {name!r}; {_WHAT_TO_DO}")
    return _load_hub(name, dtype)


def load_directory(path: Path, dtype: torch.dtype, *, label: str) -> Checkpoint:
    """Loads a directory in the layout of `save_pretrained`.

    Raises:
        ModelLoadError: Something in it is missing or damaged.
    """
    if not (path / "config.json").is_file():
        raise ModelLoadError(
            f"the directory {str(path)!r} holds no config.json; give the directory that "
            "save_pretrained wrote, or the path of a .gguf file"
        )
    hf_model = _load_model(str(path), dtype, what=f"the model in {str(path)!r}")
    return Checkpoint(hf_model, _load_tokenizer(str(path)), label)


def load_gguf(path: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    """Loads a GGUF file, its quantised weights expanded to `dtype`.

    Nothing is cached: expanded, a quantised 8B model takes 32 GB, which nobody expects to find
    in a cache folder. Only the demo model, which is small, is kept expanded.

    Returns:
        The model and its tokenizer.

    Raises:
        ModelLoadError: The file is not GGUF, is truncated, or holds an architecture that
            transformers cannot read.
    """
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ModelLoadError(
                f"{str(path)!r} is not a GGUF file; give a .gguf file, or a directory that "
                "holds a config.json beside the weights"
            )
    folder = str(path.parent)
    try:
        # The conversion draws a bar on stderr that no setting turns off.
        with contextlib.redirect_stderr(io.StringIO()):
            hf_model = _load_model(
                folder,
                dtype,
                what=f"the GGUF file {str(path)!r}",
                gguf_file=path.name,
                quantization_config=_expand_all(),
            )
    except ModelLoadError as exc:
        if _is_damaged(path):
            raise ModelLoadError(
                f"the GGUF file {str(path)!r} is truncated or damaged; download it again"
            ) from exc
        raise
    # Releases without GgufConfig leave the mark of a quantised model, which this one no longer is.
    if hasattr(hf_model.config, "quantization_config"):
        del hf_model.config.quantization_config
    # TransformerLens reads a tokenizer again from its directory, and a GGUF file's directory
    # holds none, so its tokenizer is read back from one that stays until the process ends.
    saved = tempfile.mkdtemp(prefix="lens-rope-")
    atexit.register(shutil.rmtree, saved, ignore_errors=True)
    _load_tokenizer(folder, gguf_file=path.name).save_pretrained(saved)
    return hf_model, _load_tokenizer(saved)


def _expand_all() -> Any | None:
    """What tells transformers to keep no weight quantised; older releases never do."""
    try:
        from transformers import GgufConfig
    except ImportError:
        return None
    return GgufConfig(dequantize=True)


def _is_damaged(path: Path) -> bool:
    """True when the header or a tensor of a GGUF file reaches past the file's end."""
    import gguf

    try:
        gguf.GGUFReader(path)
    except Exception:  # the reader indexes a memory map, and checks nothing
        return True
    return False


def _load_hub(name: str, dtype: torch.dtype) -> Checkpoint:
    """Loads a model from the hub, or from the hub's local cache where there is no hub."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    hub_name = official_name(name)
    # One request without retries: transformers retries each of several files for half a minute.
    try:
        HfApi().model_info(hub_name, timeout=10)
    except HFValidationError as exc:
        raise ModelLoadError(f"{name!r} is neither a path nor a hub name; {_WHAT_TO_DO}") from exc
    except RepositoryNotFoundError as exc:
        raise ModelLoadError(
            f"the hub has no model {name!r} that you may read; {_WHAT_TO_DO}, and log in with "
            "`hf auth login` if the model is private or gated"
        ) from exc
    except HfHubHTTPError:
        pass  # a busy hub, or a mirror without this request: the download itself decides
    except Exception as unreachable:  # the HTTP library, and so the error, differs by version
        try:
            cached = snapshot_download(hub_name, local_files_only=True)
        except (LocalEntryNotFoundError, OSError, ValueError):
            raise ModelLoadError(
                f"there is no local model {name!r}, the hub cannot be reached, and its local "
                f"cache does not hold the model; {_WHAT_TO_DO}"
            ) from unreachable
        return Checkpoint(
            _load_model(cached, dtype, what=f"the cached hub model {name!r}"),
            _load_tokenizer(cached),
            label=name,
            hub_name=hub_name,
        )
    hf_model = _load_model(hub_name, dtype, what=f"the hub model {name!r}")
    return Checkpoint(hf_model, _load_tokenizer(hub_name), label=name, hub_name=hub_name)


def official_name(name: str) -> str:
    """The hub name behind TransformerLens' short names, such as `pythia-70m`."""
    from transformer_lens.supported_models import MODEL_ALIASES, OFFICIAL_MODEL_NAMES

    wanted = name.lower()
    for official in OFFICIAL_MODEL_NAMES:
        aliases = MODEL_ALIASES.get(official, [])
        if wanted == official.lower() or wanted in (alias.lower() for alias in aliases):
            return official
    return name


def _looks_like_path(name: str) -> bool:
    """True for what can only be a path: a hub name has at most one slash and no suffix."""
    separators = name.count("/") + name.count("\\")
    suffix = name.lower().endswith((".gguf", ".safetensors", ".bin", ".pt"))
    return name.startswith(("/", ".", "~")) or separators > 1 or suffix


def _load_model(source: str, dtype: torch.dtype, *, what: str, **kwargs: Any) -> Any:
    """`AutoModelForCausalLM.from_pretrained`, refusing an incomplete checkpoint."""
    from transformers import AutoModelForCausalLM

    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source,
            dtype=dtype,
            attn_implementation="eager",
            trust_remote_code=False,
            output_loading_info=True,
            **kwargs,
        )
    except Exception as exc:
        raise ModelLoadError(_explain(what, exc)) from exc
    hf_model, info = loaded
    missing = sorted(info["missing_keys"])
    if missing:
        raise ModelLoadError(
            f"{what} lacks {len(missing)} of its weights, {missing[0]} among them; "
            "download or save it again"
        )
    # TransformerLens chooses its adapter by this, and a GGUF file does not say it.
    hf_model.config.architectures = hf_model.config.architectures or [type(hf_model).__name__]
    return hf_model.eval()


def _load_tokenizer(source: str, **kwargs: Any) -> Any:
    """`AutoTokenizer.from_pretrained`, with an error that says what is missing."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(source, trust_remote_code=False, **kwargs)
    except Exception as exc:
        raise ModelLoadError(
            f"the tokenizer of {source!r} cannot be read ({first_line(exc)}); save it beside "
            "the model with tokenizer.save_pretrained"
        ) from exc


def _explain(what: str, exc: Exception) -> str:
    """One sentence for an error of transformers, with what to do where it is known."""
    from huggingface_hub.errors import GatedRepoError
    from safetensors import SafetensorError

    causes: list[BaseException] = []
    cause: BaseException | None = exc
    while cause is not None:
        causes.append(cause)
        cause = cause.__cause__ or cause.__context__
    if any(isinstance(cause, GatedRepoError) for cause in causes):
        return (
            f"{what} is gated: accept its terms on its page on the hub, then log in with "
            "`hf auth login`"
        )
    if any(isinstance(cause, SafetensorError) for cause in causes):
        return f"{what} has a truncated or damaged weight file; download or save it again"
    return f"{what} cannot be loaded: {first_line(exc)}"


def first_line(exc: BaseException) -> str:
    """The first line of an error's message, to be quoted inside another."""
    lines = str(exc).strip().splitlines()
    return lines[0].strip().rstrip(".:") if lines else type(exc).__name__
