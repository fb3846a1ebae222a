"""The table of supported models, from what the test suite read of each on the tested sets.

`docs/data/models-*.json` holds what `capture` said (see `tests/matrix.py`); here it is put into
words. What an architecture is called, and what to do where it is refused, is written by hand below,
and a row that lacks either ends the build.
"""

from __future__ import annotations

import html
import json
import re
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

DATA = Path(__file__).parents[2] / "docs" / "data"
SETS = ("3.9", "4.3")
# Narrow columns for the hosts leave room for the words of the others.
_STYLE = (
    "<style>.lr-models table td, .lr-models table th { min-width: 0 !important; "
    "padding: 0.5em 0.8em !important; } "
    ".lr-models small { line-height: 1.3; display: inline-block; } "
    '.lr-models td > a[href^="#refused"] { font-weight: 700; }</style>'
)
N_TOKENS = 40  # as many as `tests/matrix.py` reads where the host allows it
Row = dict[str, Any]


@dataclass(frozen=True)
class Text:
    """What is said of a row by hand.

    Attributes:
        name: The architecture or configuration.
        rope: Its kind of RoPE.
        examples: Published models that are built like it, or nothing.
        refused: Why it is refused where it is, and what to do.
    """

    name: str
    rope: str
    examples: str = ""
    refused: str = ""


ARCHITECTURES = {
    "llama": Text("Llama", "plain", "Llama 2, SmolLM2, TinyLlama"),
    "llama-llama3": Text("Llama", "llama3 scaling (by parts)", "Llama 3.1, Llama 3.2"),
    "llama-llama3-8192": Text("Llama", "llama3 scaling from 8,192 tokens", "Llama 3.1, Llama 3.2"),
    "llama-linear": Text("Llama", "linear scaling", "DeepSeek-Coder"),
    "llama-dynamic": Text("Llama", "dynamic NTK", "any Llama with `dynamic` scaling"),
    "llama-yarn": Text("Llama", "YaRN", "any Llama with `yarn` scaling"),
    "mistral": Text("Mistral", "plain", "Mistral 7B"),
    "mixtral": Text("Mixtral", "plain", "Mixtral 8x7B"),
    "qwen2": Text("Qwen2", "plain", "Qwen2, Qwen2.5"),
    "qwen3": Text("Qwen3", "plain, after QK-norm", "Qwen3"),
    "gemma": Text("Gemma", "plain", "Gemma 2B, Gemma 7B"),
    "gemma2": Text("Gemma 2", "plain", "Gemma 2 2B, 9B, 27B"),
    "gemma3": Text("Gemma 3", "two bases, after QK-norm", "Gemma 3 270M, 1B"),
    "phi": Text("Phi", "partial", "Phi-1.5, Phi-2"),
    "phi3": Text("Phi-3", "plain", "Phi-3 mini 4k"),
    "phi3-longrope": Text("Phi-3", "longrope", "Phi-3 mini 128k"),
    "gpt-neox": Text("GPT-NeoX", "partial", "Pythia, GPT-NeoX-20B"),
    "gpt-j": Text("GPT-J", "partial", "GPT-J-6B"),
    "stablelm": Text("StableLM", "partial", "StableLM 3B"),
    "stablelm-qk-norm": Text("StableLM", "partial, after QK-norm", "StableLM 2 12B"),
    "olmo-clip": Text("OLMo", "plain, after clipping", "OLMo with `clip_qkv`"),
    "olmo2": Text("OLMo 2", "plain, after QK-norm", "OLMo 2"),
    "gpt-oss": Text("GPT-OSS", "YaRN", "gpt-oss-20b, gpt-oss-120b"),
    "cohere": Text(
        "Cohere",
        "plain",
        "Command R",
        "The bridge of transformer-lens 3.9 does not apply this model's rotation, so what it "
        "computes is not the model. Use transformer-lens 4.3, which does.",
    ),
    "glm": Text("GLM", "partial", "GLM-4 9B"),
    "smollm3": Text("SmolLM3", "plain, not in every layer", "SmolLM3 3B"),
    "deepseek-v3": Text("DeepSeek-V3", "latent attention", "DeepSeek-V3 without interleaving"),
    "deepseek-v3-interleaved": Text(
        "DeepSeek-V3", "latent attention, interleaved", "DeepSeek-V3, DeepSeek-R1"
    ),
    "gpt2": Text(
        "GPT-2",
        "none",
        "GPT-2",
        "It adds learned position vectors to its tokens, so there are no rotary pairs to read. "
        "Choose a model with RoPE.",
    ),
    "falcon": Text("Falcon", "plain", "Falcon 7B"),
    "falcon-alibi": Text(
        "Falcon",
        "none (ALiBi)",
        "Falcon-RW 1B",
        "It adds a bias by distance to its scores, so there are no rotary pairs to read. Choose a "
        "model with RoPE.",
    ),
    "exaone4": Text("EXAONE 4", "plain, not in every layer", "EXAONE 4.0 32B"),
    "hunyuan": Text(
        "HunYuan dense",
        "plain, before QK-norm",
        "HunYuan 7B",
        "The model normalises queries and keys after the rotation. The bridge of transformer-lens "
        "3.9 does so before it; on the one of 4.3, more than a rotation lies between what is shown "
        "before and after. There is no way to read it yet.",
    ),
    "llama4": Text(
        "Llama 4",
        "complex angles",
        "Llama 4 Scout",
        "The bridge shows neither rotated queries and keys nor the angles, which this model keeps "
        "as complex numbers. There is no way to read it yet.",
    ),
    "deepseek-v2": Text(
        "DeepSeek-V2",
        "latent attention, complex angles",
        "DeepSeek-V2-Lite",
        "The bridge shows queries and keys but not the angles, which this model keeps as complex "
        "numbers. DeepSeek-V3 is read.",
    ),
    "qwen2.5-vl": Text(
        "Qwen2.5-VL",
        "three position streams",
        "Qwen2.5-VL 3B, 7B",
        "Its tokens have positions in time, height and width, and a pair follows one of them. "
        "lens_rope knows one position per token. Read the text model Qwen2.5 instead.",
    ),
}

CONFIGURATIONS = {
    "half": Text("plain", "`rotary_dim=16` of 16"),
    "adjacent": Text("adjacent pairs", "`rotary_adjacent_pairs`"),
    "base-1e6": Text("another base", "`rotary_base`"),
    "partial": Text("partial rotary", "`rotary_dim=4` of 16"),
    "partial-adjacent": Text(
        "partial rotary, adjacent pairs", "`rotary_dim=8` of 16, `rotary_adjacent_pairs`"
    ),
    "grouped": Text("grouped-query attention", "`n_key_value_heads=2`"),
    "multi-query": Text("multi-query attention", "`n_key_value_heads=1`"),
    "grouped-expanded": Text("ungrouped keys", "`ungroup_grouped_query_attention`"),
    "qk-norm": Text("QK-norm", "`use_qk_norm`"),
    "clip": Text("clipped queries and keys", "`clip_qkv`"),
    "softcap": Text("soft-cap of scores", "`attn_scores_soft_cap`"),
    "ntk-by-parts": Text("NTK by parts", "`use_NTK_by_parts_rope`"),
    "ntk-by-parts-8192": Text("NTK by parts from 8,192 tokens", "`NTK_original_ctx_len`"),
    "yarn": Text("YaRN", "`use_yarn_rope`"),
    "linear": Text("linear scaling", "`rotary_scaling_factor`"),
    "dynamic": Text("dynamic NTK", "`use_dynamic_ntk_rope`"),
    "local-base-with-window": Text("local base and window", "`rotary_base_local`, `window_size`"),
    "inverse-layer-scale": Text("scale by layer", "`scale_attn_by_inverse_layer_idx`"),
    "no-scale": Text("no scale", "`use_attn_scale=False`"),
    "other-scale": Text("another scale", "`attn_scale`"),
    "split-input": Text("split input of queries and keys", "`use_split_qkv_input`"),
    "sinks": Text("learned sinks", "`use_attention_sinks`"),
    "log-n-within": Text("log-n scale, within the trained length", "`use_logn_attn`"),
    "log-n-beyond": Text(
        "log-n scale, beyond the trained length",
        "`use_logn_attn`",
        refused="The model rescales its queries by their position after the rotation, so a score "
        "is not what the rotated queries and keys give. Cut the prompt to the trained length, "
        "within which nothing is rescaled.",
    ),
    "standard": Text(
        "learned positions",
        '`positional_embedding_type="standard"`',
        refused="There are no rotary pairs to read. Choose a model with RoPE.",
    ),
    "shortformer": Text(
        "Shortformer",
        '`positional_embedding_type="shortformer"`',
        refused="Positions are added to queries and keys, and nothing is rotated. Choose a model "
        "with RoPE.",
    ),
    "alibi": Text(
        "ALiBi",
        '`positional_embedding_type="alibi"`',
        refused="A bias by distance is added to the scores, and nothing is rotated. Choose a model "
        "with RoPE.",
    ),
}


def load() -> dict[str, dict[str, Any]]:
    """What was read on each tested set, by its name."""
    return {
        name: json.loads((DATA / f"models-{name}.json").read_text(encoding="utf-8"))
        for name in SETS
    }


def facts(row: Row, *, with_heads: bool = False) -> str:
    """What was read of the rotation, in words: `1/4 of a head, half pairs, window in 1 of 2`.

    Args:
        row: A row that was read.
        with_heads: Whether to say how query heads share key heads, which is nothing of RoPE.
    """
    layers = [(count(kind["layers"]), kind) for kind in row["layers"]]
    total = sum(number for number, _ in layers)
    rotating = [kind for _, kind in layers if kind["rotary_dim"]]
    first = rotating[0]
    share = Fraction(first["rotary_dim"], first["d_head"])
    words = ["whole head" if share == 1 else f"{share} of a head"]
    if first["start"]:
        words[0] = f"last {share} of a head"
    words.append(f"{first['pairing']} pairs")

    def in_layers(what: str, has: Any) -> None:
        number = sum(n for n, kind in layers if has(kind))
        if number == total:
            words.append(what)
        elif number:
            words.append(f"{what} in {number} of {total} layers")

    in_layers("no RoPE", lambda kind: not kind["rotary_dim"])
    in_layers("window", lambda kind: kind["window"])
    in_layers("attention factor", lambda kind: kind["attention_factor"] != 1)
    in_layers("soft-cap", lambda kind: kind["softcap"])
    in_layers("learned sinks", lambda kind: kind["learned_sinks"])
    if with_heads and row["key_heads"] == 1:
        words.append("one key head")
    elif with_heads and row["key_heads"] < row["heads"]:
        words.append("grouped keys")
    return ", ".join(words)


def count(layers: str) -> int:
    """How many layers `0-4, 6` are."""
    runs = [run.split("-") for run in layers.split(", ")]
    return sum(int(run[-1]) - int(run[0]) + 1 for run in runs)


def markdown() -> str:
    """The tables, and below them what is refused and why."""
    found = load()
    return "\n\n".join(
        [
            _STYLE,
            _summary(found),
            "## By architecture",
            f'<div class="lr-models" markdown>\n\n{_architectures(found)}\n\n</div>',
            "## Settings of HookedTransformer",
            "A `HookedTransformer` can also be set up by hand, and each setting is tested by "
            "itself (transformer-lens 3.9):",
            '<div class="lr-models" markdown>\n\n'
            + _configurations(found["3.9"]["configurations"])
            + "\n\n</div>",
            "## What is refused, and what to do",
            _refusals(found),
            "## What HookedTransformer does not load",
            _not_loaded(found["3.9"]["architectures"]),
        ]
    )


def _every(found: dict[str, dict[str, Any]]) -> list[Row]:
    rows = [
        row for data in found.values() for hosts in data["architectures"].values()
        for row in hosts.values()
    ]  # fmt: skip
    return rows + [row for data in found.values() for row in data["configurations"].values()]


def _summary(found: dict[str, dict[str, Any]]) -> str:
    rows = _every(found)
    read = [row for row in rows if "error_below" in row]
    refused = [row for row in rows if row["status"] == "refused"]
    worst = max(row["error_below"] for row in read)
    exponent = f"{worst:.0e}".split("e")[1].lstrip("-0")
    return (
        f"The suite reads {len(read)} combinations of model, host and version, and the relative "
        f"error of a score stays below $10^{{-{exponent}}}$ in all of them; it refuses "
        f"{len(refused)}."
    )


def _architectures(found: dict[str, dict[str, Any]]) -> str:
    old, new = (found[name]["architectures"] for name in SETS)
    _same_names(ARCHITECTURES, {**old, **new})
    lines = [
        "| architecture | RoPE, as read | bridge 3.9 | bridge 4.3 | Hooked<wbr>Transformer 3.9 |",
        "|---|---|---|---|---|",
    ]
    for name, text in ARCHITECTURES.items():
        rows = [old[name]["bridge"], new[name]["bridge"], old[name].get("hooked")]
        examples = f"<br><small>{text.examples}</small>" if text.examples else ""
        read = next((row for row in rows if row and "layers" in row), None)
        rope = text.rope + (f"<br><small>{facts(read)}</small>" if read else "")
        cells = " | ".join(_cell(name, row) for row in rows)
        lines.append(f"| **{text.name}**{examples} | {rope} | {cells} |")
    return "\n".join(lines)


def _configurations(rows: dict[str, Row]) -> str:
    _same_names(CONFIGURATIONS, rows)
    lines = ["| setting | by | Hooked<wbr>Transformer 3.9 | as read |", "|---|---|---|---|"]
    for name, text in CONFIGURATIONS.items():
        row = rows[name]
        read = facts(row, with_heads=True) if "layers" in row else ""
        lines.append(f"| {text.name} | {text.rope} | {_cell(name, row)} | {read} |")
    return "\n".join(lines)


def _same_names(texts: dict[str, Text], rows: dict[str, Row]) -> None:
    if texts.keys() != rows.keys():
        differing = ", ".join(sorted(texts.keys() ^ rows.keys()))
        raise ValueError(f"rows and texts of supported models differ in: {differing}")


def _cell(name: str, row: Row | None) -> str:
    if row is None:
        return "–"
    if "says" in row:
        target = f"refused-{_anchor(name)}" if row["status"] == "refused" else "not-loaded"
        word = {"by name": "by hub name"}.get(row["status"], row["status"])
        return f'<a href="#{target}" title="{_inline(row["says"])}">{word}</a>'
    title = (
        f"by {' and '.join(row['routes'])}, on {row['tokens']} tokens; relative error of a score "
        f"below {row['error_below']:.0e}"
    )
    # Some scalings begin beyond the trained context, which this host does not go past.
    is_cut = name in ARCHITECTURES and row["tokens"] < N_TOKENS
    status = f"{row['status']} up to the context" if is_cut else row["status"]
    return f'<span title="{title}">{status}</span>'


def _refusals(found: dict[str, dict[str, Any]]) -> str:
    parts = []
    for name, text in {**ARCHITECTURES, **CONFIGURATIONS}.items():
        said: dict[str, list[str]] = {}
        for version, data in found.items():
            for host, row in data["architectures"].get(name, {}).items():
                if row["status"] == "refused":
                    said.setdefault(row["says"], []).append(f"{_host(host)} {version}")
            row = data["configurations"].get(name)
            if row and row["status"] == "refused":
                said.setdefault(row["says"], []).append(f"HookedTransformer {version}")
        if not said:
            continue
        if not text.refused:
            raise ValueError(f"{name} is refused, and supported_models says not what to do")
        examples = f" ({text.examples})" if text.examples and text.examples != text.name else ""
        title = text.name[0].upper() + text.name[1:] + examples
        parts.append(f"### {title} {{ #refused-{_anchor(name)} }}\n\n{text.refused}")
        for says, hosts in said.items():
            parts.append(
                f'??? quote "What lens_rope says on {" and ".join(hosts)}"\n\n    {_inline(says)}'
            )
    return "\n\n".join(parts)


def _not_loaded(rows: dict[str, dict[str, Row]]) -> str:
    named, unknown, others = [], [], []
    for name, text in ARCHITECTURES.items():
        row = rows[name].get("hooked")
        if row is None or row["status"] not in ("not loaded", "by name"):
            continue
        if row["status"] == "by name":
            named.append(text.name)
            continue
        if "NotImplementedError" in row["says"]:
            unknown.append(text.name)
            continue
        # The end is the same for all, and is said once above.
        says = _inline(row["says"].removesuffix("; use backend='bridge'"))
        others.append(f"| {text.name}, {text.rope} | {says} |")
    return "\n\n".join(
        [
            '<a id="not-loaded"></a>`load_model` takes the bridge for these by itself '
            '(`backend="auto"`), and refuses them with `backend="hooked"`.',
            f"**By hub name.** {', '.join(named)}: transformer-lens 3.9 holds the shapes of the "
            "published models as constants under their hub names, so it does not load the tiny "
            "random ones of the test suite. `load_model` loads published ones by name (of Gemma "
            "also local copies, by their shape) and compares their logits with transformers.",
            f"**Unknown to it.** {', '.join(dict.fromkeys(unknown))}: transformer-lens 3.9 has no "
            "`HookedTransformer` of these architectures.",
            "**Known, but not loaded.** What `load_model` says:",
            "| architecture | HookedTransformer 3.9 … |\n|---|---|\n" + "\n".join(others),
        ]
    )


def _host(name: str) -> str:
    return {"bridge": "the bridge of", "hooked": "HookedTransformer"}[name]


def _anchor(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name)


def _inline(text: str) -> str:
    """A message on one line, in which neither Markdown nor HTML finds anything of its own."""
    one_line = html.escape(" ".join(text.split()), quote=False)
    # Markdown leaves an underscore between letters alone, and a colon before a space.
    return re.sub(
        r"[\"*`|\\\[\]$~^]|:(?=[\w+-])|(?<!\w)_|_(?!\w)",
        lambda match: f"&#{ord(match[0])};",
        one_line,
    )
