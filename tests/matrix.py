"""What is read of every model of the test suite on each host: the table of supported models.

`architectures()` names one tiny random model per architecture and kind of RoPE, `configurations()`
the ways in which a `HookedTransformer` can be set up by hand. A row is found by running `capture`,
so it says what this version does and not what somebody believes it does. `scripts/models` writes
the rows of the installed versions to `docs/data/`, and `test_model_table.py` finds them again.

Usage: matrix.py FOLDER
"""

from __future__ import annotations

import importlib.metadata
import inspect
import json
import math
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import test_architectures
import test_hooked
import torch
import transformers as hf
import zoo

from lens_rope.capturing import capture
from lens_rope.errors import LensRopeError, ModelLoadError
from lens_rope.hosts import host_of
from lens_rope.models import load_model
from lens_rope.records import LayerCapture, RotaryCapture
from lens_rope.spec import ranges

N_TOKENS = 40
VISION = "qwen2.5-vl"
Row = dict[str, Any]


def _falcon(**kwargs: Any) -> Callable[[], Any]:
    values = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return lambda: hf.FalconConfig(
        vocab_size=zoo.VOCAB, bos_token_id=1, eos_token_id=2, **values, **kwargs
    )


EXTRA: dict[str, Callable[[], Any]] = {
    "falcon": _falcon(multi_query=True, alibi=False),
    "falcon-alibi": _falcon(alibi=True),
    "exaone4": zoo._config(
        hf.Exaone4Config, num_hidden_layers=4, sliding_window=16, sliding_window_pattern=4
    ),
    "hunyuan": zoo._config(hf.HunYuanDenseV1Config, head_dim=16),
    "llama4": test_architectures._llama4,
    "deepseek-v2": test_architectures._deepseek_v2,
    VISION: zoo.qwen2_5_vl,
}
"""Architectures beyond those of `zoo.CONFIGS`, most of which cannot be read."""

LOGN = {"use_logn_attn": True, "train_seq_length": 16}
HAND_MADE: dict[str, tuple[dict[str, Any], int]] = {
    **{name: (variant.overrides, N_TOKENS) for name, variant in test_hooked.VARIANTS.items()},
    "log-n-within": (LOGN, 16),
    "log-n-beyond": (LOGN, N_TOKENS),
    **{
        kind: ({"positional_embedding_type": kind}, N_TOKENS)
        for kind in ("standard", "shortformer", "alibi")
    },
}
"""Settings of `HookedTransformerConfig` and the number of tokens to read."""


def architectures() -> list[str]:
    """Every architecture that has a row, in the order of the zoo."""
    return [*zoo.CONFIGS, *EXTRA]


def configurations() -> list[str]:
    """Every configuration of `HookedTransformer` that has a row; none where there is no such."""
    return [] if zoo.HookedTransformer is None else list(HAND_MADE)


def installed() -> str:
    """The installed transformer-lens as the names of the tested sets have it, such as `3.9`."""
    return ".".join(importlib.metadata.version("transformer-lens").split(".")[:2])


def architecture(name: str) -> dict[str, Row]:
    """What is read of one architecture, by host."""
    found = {"bridge": _row(lambda: _on_bridge(name))}
    is_for_both = name != VISION and "has no RoPE" not in found["bridge"].get("says", "")
    if zoo.HookedTransformer is not None and is_for_both:
        row = found["hooked"] = _row(lambda: _on_hooked(name))
        if "NotImplementedError" in row.get("says", "") and _is_converted(name):
            row["status"] = "by name"
    return found


def configuration(name: str) -> Row:
    """What is read of one configuration of `HookedTransformer`."""
    overrides, n_tokens = HAND_MADE[name]
    if name in test_hooked.VARIANTS:
        return _row(lambda: test_hooked.captured(name, n_tokens))
    model = zoo.hooked(**overrides, model_name=name)
    return _row(lambda: capture(model, zoo.tokens(n_tokens)))


def same(row: Row) -> Row:
    """A row without what may differ in its last digits between machines."""
    kept = {key: value for key, value in row.items() if key != "error_below"}
    if "says" in kept:
        kept["says"] = re.sub(r"\d\.\de[+-]\d\d(?= (of|exceeds))", "…", kept["says"])
    return kept


def _row(read: Callable[[], RotaryCapture]) -> Row:
    try:
        qk = read()
    except ModelLoadError as error:
        # It begins with the host's name, which the table says anyway.
        says = str(error).removeprefix("HookedTransformer ")
        return {"status": "not loaded", "error": type(error).__name__, "says": says}
    except LensRopeError as error:
        return {"status": "refused", "error": type(error).__name__, "says": str(error)}
    layers = qk.records[0]
    routes = sorted({layer.check.route for layer in layers})
    return {
        "status": "read" if routes == ["hook_rot"] else "second route",
        "routes": routes,
        "error_below": 10.0 ** math.ceil(math.log10(qk.max_relative_error or 1e-16)),
        "tokens": len(qk.prompts[0]),
        "heads": qk.model.n_heads,
        "key_heads": qk.model.n_kv_heads,
        "layers": _kinds(layers),
    }


def _kinds(layers: tuple[LayerCapture, ...]) -> list[Row]:
    """The facts of each kind of layer, and which layers are of this kind."""
    kinds: dict[str, tuple[Row, list[int]]] = {}
    for layer in layers:
        rope = layer.rope
        facts = {
            "rotary_dim": rope.rotary_dim,
            "d_head": rope.d_head,
            "start": rope.rotary_start,
            "pairing": rope.pairing if rope.n_pairs else None,
            "window": rope.window,
            # Four digits: the model computes it in float32.
            "attention_factor": round(rope.attention_factor, 4),
            "scale": round(layer.scale, 4),
            "softcap": layer.softcap,
            "learned_sinks": layer.sinks is not None,
        }
        kinds.setdefault(json.dumps(facts), (facts, []))[1].append(rope.layer)
    return [{"layers": ranges(indices), **facts} for facts, indices in kinds.values()]


def _config(name: str) -> Any:
    return {**zoo.CONFIGS, **EXTRA}[name]()


def _on_bridge(name: str) -> RotaryCapture:
    if name in zoo.CONFIGS:
        return test_architectures.captured(name, N_TOKENS)
    if name != VISION:
        bridge = zoo.bridge_of(zoo.hf_model(name, config=_config(name)), name)
        return capture(bridge, zoo.tokens(N_TOKENS))
    return capture(zoo.qwen2_5_vl_bridge(), zoo.tokens(N_TOKENS))


def _on_hooked(name: str) -> RotaryCapture:
    """Loaded from a directory by `load_model`, which compares its logits with transformers'."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        zoo.hf_model(name, config=_config(name)).save_pretrained(path)
        zoo.tokenizer().save_pretrained(path)
        model = load_model(str(path), "hooked", device="cpu")
    return capture(model, zoo.tokens(min(N_TOKENS, host_of(model).max_tokens)))


def _is_converted(name: str) -> bool:
    """Whether TransformerLens converts the weights of an architecture it does not know by shape.

    It then holds the shapes of the published models as constants, by their names on the hub.
    """
    from transformer_lens import loading_from_pretrained as loading

    (kind,) = zoo.hf_model(name, config=_config(name)).config.architectures
    source = inspect.getsource(loading.get_pretrained_state_dict)
    return f'original_architecture == "{kind}"' in source


def table() -> dict[str, Any]:
    """All rows of the installed versions."""
    return {
        "transformer_lens": installed(),
        "architectures": {name: architecture(name) for name in architectures()},
        "configurations": {name: configuration(name) for name in configurations()},
    }


def path_of(folder: Path, version: str) -> Path:
    """Where the rows of one tested set lie."""
    return folder / f"models-{version}.json"


def main(folder: Path) -> None:
    """Writes the rows of the installed versions."""
    torch.set_num_threads(1)
    path = path_of(folder, installed())
    path.write_text(json.dumps(table(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
