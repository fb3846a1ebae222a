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
# # 1. Reading rotary queries and keys
#
# **Question.** A transformer with rotary position embeddings (RoPE) turns its queries and keys
# before it compares them. What does that turn do to an attention score, where in the model can the
# turned values be read, and how do you know that what you read is what the model used?
#
# You need to know what queries, keys, attention scores and softmax are. You need to know nothing
# about RoPE. The page runs on a laptop's CPU, on SmolLM2-135M, which `lr.load_model` fetches once.

# %%
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from IPython.display import Markdown
from plotly.subplots import make_subplots

import lens_rope as lr
from lens_rope.errors import LensRopeError

# %% [markdown]
# ## The problem: attention does not know the order of its keys
#
# A query scores every key by a dot product, the softmax turns the scores into weights, and the
# output is the weighted sum of the values. Nothing in that depends on where a key stands. Shuffle
# keys and values together, and the output stays the same:

# %%
rng = np.random.default_rng(0)
query, keys, values = rng.normal(size=8), rng.normal(size=(5, 8)), rng.normal(size=(5, 8))


def attend(query, keys, values):
    """One query's attention output, without any position."""
    weights = np.exp(keys @ query / np.sqrt(len(query)))
    return weights / weights.sum() @ values


shuffled = [3, 0, 4, 1, 2]
change = np.abs(attend(query, keys, values) - attend(query, keys[shuffled], values[shuffled])).max()
assert change < 1e-12
print(f"largest change of the output when the keys are shuffled: {change:.1e}")

# %% [markdown]
# To such a head, "the dog bit the man" and "the man bit the dog" hold the same keys. So position
# has to enter somewhere. (A causal mask alone tells a model something about position, and some
# models have layers that rely on it; but it says nothing directly about distance.) The first
# transformers added a position vector to each token's embedding. Then content and position share
# one vector, and nothing in that form ties what a head learns at position 10 to what it does at
# position 1,000.
#
# What one would like is a score that depends on *what* the query holds, on *what* the key holds,
# and on the *distance* between them, but not on where in the text the two stand. RoPE (Su et al.
# 2021, arXiv 2104.09864) gets this from a single idea: leave the embeddings alone, and turn each
# query and each key by an angle that is proportional to its position.

# %% [markdown]
# ## One pair of components: an arrow that turns
#
# RoPE takes the components of a query or key two at a time. Two components are the coordinates of
# an arrow in the plane. At position $m$ the arrow is turned by the angle $w \cdot m$. The *angular
# frequency* $w$ (radians per token) belongs to the pair and is the same for every token.
#
# Below, one and the same arrow is drawn at positions 0 to 7, once for a pair that turns fast and
# once for a pair that turns slowly.

# %%
arrow = 0.9 + 0.3j
panels = make_subplots(1, 2, subplot_titles=["fast: w = 0.7 rad/token", "slow: w = 0.1 rad/token"])
for column, w in enumerate([0.7, 0.1], start=1):
    for m in range(8):
        tip = arrow * np.exp(1j * w * m)
        line = go.Scatter(
            x=[0, tip.real],
            y=[0, tip.imag],
            mode="lines+markers+text",
            text=["", str(m)],
            textposition="top center",
            line={"color": f"hsl(200, 60%, {75 - 7 * m}%)", "width": 3},
            marker={"size": [0, 9], "symbol": "arrow", "angleref": "previous"},
            hovertemplate=f"position {m}<extra></extra>",
        )
        panels.add_trace(line, row=1, col=column)
panels.update_xaxes(range=[-1.3, 1.3], title="first component of the pair")
panels.update_yaxes(range=[-1.3, 1.3], title="second component", scaleanchor="x", col=1)
panels.update_yaxes(range=[-1.3, 1.3], scaleanchor="x2", col=2)
panels.update_layout(template="plotly_white", height=420, showlegend=False)
panels

# %% [markdown]
# The numbers at the tips are positions. The arrow keeps its length: a rotation changes where a pair
# points, and never how large it is. After a few tokens the fast arrow has gone most of the way
# round, while the slow arrow has turned by 40 degrees.
#
# It is convenient to read the two components $a$ and $b$ as one complex number $z = a + jb$.
# Turning by an angle $\theta$ is then multiplication by $e^{j\theta}$, and the
# [rotation](../docs/mathematics.md#rotation) at position $m$ is
#
# $$z^R = z \cdot e^{j w m}$$
#
# Here is that this is the rotation matrix of school geometry:

# %%
a, b, w, m = 0.9, 0.3, 0.7, 3
turned = (a + 1j * b) * np.exp(1j * w * m)
matrix = np.array([[np.cos(w * m), -np.sin(w * m)], [np.sin(w * m), np.cos(w * m)]])
assert np.allclose(matrix @ [a, b], [turned.real, turned.imag])
print("matrix: ", matrix @ [a, b])
print("complex:", turned)

# %% [markdown]
# ## Distance falls out of the product
#
# The dot product of two arrows is, in complex numbers, the real part of one times the conjugate of
# the other: $aa' + bb' = \operatorname{Re}(z \, \overline{z'})$. Now let the query be turned at
# position $m$ and the key at position $n$:
#
# $$z_q e^{jwm} \cdot \overline{z_k e^{jwn}} = z_q \overline{z_k} \cdot e^{jw(m-n)}$$
#
# The conjugate turns $+n$ into $-n$, and the two positions are left only as the difference $m - n$.
# That is all of RoPE. Check it: the rows of the table have different positions, and two rows with
# the same distance have the same product.

# %%
z_q, z_k, w = 0.8 - 0.5j, 0.4 + 0.9j, 0.7


def product(m, n):
    """What the pair adds to the score of a query at m and a key at n, before scaling."""
    return float(((z_q * np.exp(1j * w * m)) * np.conj(z_k * np.exp(1j * w * n))).real)


places = [(3, 1), (10, 8), (1002, 1000), (3, 0), (500, 497), (7, 7)]
table = pd.DataFrame([(m, n, m - n, product(m, n)) for m, n in places])
table.columns = ["query at", "key at", "distance", "product"]
assert np.isclose(product(3, 1), product(10, 8)) and np.isclose(product(3, 1), product(1002, 1000))
table

# %% [markdown]
# For this pair the score is a cosine over the distance $\Delta = m - n$. Its height is the product
# of the two lengths, and where it starts depends on the angle $\varphi$ between query and key
# before they are turned:
#
# $$|z_q|\,|z_k| \cos(\varphi + w\Delta), \quad \varphi = \operatorname{arg}(z_q\overline{z_k})$$
#
# Over a whole head the score is the sum of one such cosine per pair, times a scale.

# %% [markdown]
# ## Many pairs, from fast to slow
#
# One cosine is a poor ruler. With $w = 0.7$ the product at distance 0 comes back nearly unchanged
# at distance 9. Clocks have the same difficulty and the same way out: a second hand for small
# differences, an hour hand for large ones. A head has many pairs, each with a frequency of its own.
#
# [`lr.read_rope`](../docs/api/reading.md) reads the frequencies from the model. It does not trust
# the configuration: it runs a short forward pass, takes the tables that the model multiplied with,
# and checks that they explain the scores.

# %%
model = lr.load_model("smollm2-135m")
rope = lr.read_rope(model)
rope

# %% [markdown]
# Three ways to say the same frequency:
#
# - $w$, the *angular frequency*, in radians per token;
# - the [*wavelength*](../docs/glossary.md#wavelength) $2\pi / w$, in tokens: after that many tokens
#   the arrow is back where it was;
# - the [*cycles*](../docs/glossary.md#cycles) $w L / 2\pi$: how often the arrow goes round over the
#   context of $L$ tokens.
#
# Pair 0 is the fastest. The frequencies fall by the same factor from each pair to the next, so the
# figure, whose axis is logarithmic, shows a straight line. The shaded zone below one cycle is worth
# remembering: pairs there are [*partial cycles*](../docs/glossary.md#partial-cycle). They never
# turn all the way round within the context.

# %%
layer = rope[16]
ratio = layer.inv_freq[0] / layer.inv_freq[1]
base = ratio ** (layer.rotary_dim / 2)
assert np.allclose(layer.inv_freq, base ** (-2 * np.arange(layer.n_pairs) / layer.rotary_dim))
Markdown(
    f"Each pair turns {ratio:.3f} times as fast as the next one. In the usual notation this is "
    f"$w_i = \\theta^{{-2i/r}}$ with the *base* $\\theta$ = {base:,.0f} and the rotary dimension "
    f"$r$ = {layer.rotary_dim}. Pair 0 turns once in {layer.wavelength[0]:.2f} tokens. Pair "
    f"{layer.n_pairs - 1} would need {layer.wavelength[-1]:,.0f} tokens, and the model was trained "
    f"on {layer.context:,}; {int((layer.cycles < 1).sum())} of the {layer.n_pairs} pairs are "
    "partial cycles."
)

# %% [markdown]
# What can a pair of each kind tell a head? Suppose query and key point the same way before the
# rotation. Then the pair adds a multiple of $\cos(w \Delta)$ at distance $\Delta$:

# %%
distance = np.arange(121)
curves = go.Figure()
for pair in [0, 5, 12, 25]:
    curves.add_scatter(
        x=distance,
        y=np.cos(layer.inv_freq[pair] * distance),
        name=f"pair {pair}: wavelength {layer.wavelength[pair]:,.1f} tokens",
    )
curves.update_layout(
    template="plotly_white",
    height=360,
    xaxis_title="distance between query and key (tokens)",
    yaxis_title="cos(w · distance)",
    legend={"orientation": "h", "y": 1.15},
)
curves

# %% [markdown]
# Look at the left edge first. Pair 0 separates a neighbour from the token next to it, and at a
# distance of about six tokens it is fooled. Pair 5 separates near from far within a sentence. Pair
# 12 falls from one to about zero over this range. Pair 25 is flat: at these distances it says
# nothing about distance, and can carry something else. Much of what follows in these tutorials is
# about what models do with such slow pairs.

# %% [markdown]
# ## Reading one head by hand
#
# Back to the model. TransformerLens gives names to the values inside a forward pass. For attention
# in layer $l$, these matter here:
#
# - `blocks.l.attn.hook_q`, `hook_k`: queries and keys as the layer projects them;
# - `blocks.l.attn.hook_rot_q`, `hook_rot_k`: the same after the rotation;
# - `blocks.l.attn.hook_attn_scores`: the scores before the softmax.
#
# transformer-lens 3.9 has two model classes: `HookedTransformer`, which has its own implementation
# of each architecture, and `TransformerBridge`, which wraps the Hugging Face model. From version 4
# on there is only the second. For this model both give the same names, so the cells below run on
# either.

# %%
try:
    from transformer_lens import HookedTransformer

    print("HookedTransformer is available:", isinstance(model, HookedTransformer))
except ImportError:
    print("HookedTransformer needs transformer-lens 3.9; the next cells use TransformerBridge.")
print("reading from", type(model).__name__)

text = "The lighthouse has two clocks, and they have never agreed."
names = [f"blocks.16.attn.hook_{name}" for name in ["q", "k", "rot_q", "rot_k", "attn_scores"]]
tokens = model.to_tokens(text)
_, cache = model.run_with_cache(tokens, names_filter=names)
cache = {name.rpartition("hook_")[2]: cache[name][0].detach() for name in names}
pd.DataFrame([(name, tuple(value.shape)) for name, value in cache.items()]).set_axis(
    ["hook", "shape without batch"], axis=1
)

# %% [markdown]
# Queries are `[position, head, component]`, scores are `[head, query, key]`. Notice that there are
# fewer key heads than query heads. This is grouped-query attention: several query heads read the
# same keys, and query head $h$ of $H$ reads key head $\lfloor h K / H \rfloor$ of $K$.
#
# Now rebuild the scores of head 0 from the rotated values, with the usual division by the square
# root of the head's width, and compare:

# %%
head = 0
n_heads, n_kv_heads = cache["rot_q"].shape[1], cache["rot_k"].shape[1]
kv_head = head * n_kv_heads // n_heads
q, k = (cache["rot_q"][:, head].double(), cache["rot_k"][:, kv_head].double())
by_hand = q @ k.T / q.shape[1] ** 0.5

visible = torch.ones_like(by_hand).tril().bool()
theirs = cache["attn_scores"][head].double()
error = float((by_hand - theirs)[visible].abs().max() / theirs[visible].abs().max())
assert error < 1e-5
print(f"scores by hand against the model's own: relative error {error:.1e}")
print(
    f"a masked score reads as {float(cache['attn_scores'][head, 0, 1])} in {type(model).__name__}"
)

# %% [markdown]
# The scores agree. (The last line is a trap: `HookedTransformer` writes minus infinity where a
# query must not look, `TransformerBridge` writes the most negative finite number. So the mask is
# built from positions here, and not read off the scores.)
#
# Next, the rotation itself. In this model pair $i$ consists of components $i$ and $i + r/2$. Turn
# `hook_q` by hand and compare with `hook_rot_q`:

# %%
first, second = layer.components  # of each pair: i and i + r/2 in this model
positions = np.arange(len(by_hand))
phase = np.exp(1j * np.outer(positions, layer.inv_freq))


def pairs_of(x, first, second):
    """Components of [position, component] as one complex number per pair."""
    x = x.double().numpy()
    return x[:, first] + 1j * x[:, second]


before, after = (pairs_of(cache[name][:, head], first, second) for name in ["q", "rot_q"])
assert np.abs(before * phase - after).max() < 1e-4
print(f"largest difference after turning by hand: {np.abs(before * phase - after).max():.1e}")

# %% [markdown]
# And the step that the whole package is about: the score is a sum over pairs, so each pair has a
# [contribution](../docs/mathematics.md#contribution) to it.
#
# $$c_i = \frac{1}{\sqrt{d}} \operatorname{Re}\left(z^R_{q,i} \cdot \overline{z^R_{k,i}}\right)$$

# %%
query, key = 6, 5  # "," and " clocks"
z_q, z_k = pairs_of(q, first, second)[query], pairs_of(k, first, second)[key]
contribution = (z_q * z_k.conj()).real / q.shape[1] ** 0.5
assert np.isclose(contribution.sum(), float(theirs[query, key]), atol=1e-4)
print(f"sum over {len(contribution)} pairs: {contribution.sum():.5f}")
print(f"the model's own score: {float(theirs[query, key]):.5f}")

# %% [markdown]
# ## A correct sum does not prove a correct split
#
# Suppose we had guessed that pairs are neighbours, $(0, 1), (2, 3), \ldots$, as they are in GPT-J.
# The sum over all pairs does not notice, because it runs over all components either way. Every
# contribution would be wrong, and the total would still be right:

# %%
wrong = np.arange(0, q.shape[1], 2), np.arange(1, q.shape[1], 2)
wrong_q, wrong_k = pairs_of(q, *wrong)[query], pairs_of(k, *wrong)[key]
wrong_contribution = (wrong_q * wrong_k.conj()).real / q.shape[1] ** 0.5
assert np.isclose(wrong_contribution.sum(), contribution.sum())

change_right = np.abs(np.abs(after) / np.abs(before) - 1).max()
wrong_before, wrong_after = (pairs_of(cache[name][:, head], *wrong) for name in ["q", "rot_q"])
change_wrong = np.abs(np.abs(wrong_after) / np.abs(wrong_before) - 1).max()
assert change_right < 1e-3 < change_wrong
pd.DataFrame(
    {
        "sum of contributions": [contribution.sum(), wrong_contribution.sum()],
        "contribution of pair 0": [contribution[0], wrong_contribution[0]],
        "largest relative change of a pair's length": [change_right, change_wrong],
    },
    index=["(i, i + r/2), right", "(2i, 2i + 1), wrong"],
).round(6)

# %% [markdown]
# The last column gives the mistake away. A rotation keeps the length of each pair. Read with the
# wrong partners, "pairs" grow and shrink. This is why comparing scores is not enough, and why
# lens_rope checks lengths and angles, too.
#
# ## Why reading by hand goes wrong on the next model
#
# The cells above work for this model. On others, each of the following breaks them, some with an
# error message and most without:
#
# - **Grouped keys** (Llama 3, Mistral, Qwen2). Head $h$ of the keys does not belong to head $h$ of
#   the queries, and a small $h$ reads the wrong one in silence.
# - **Partial rotary** (Pythia, Phi, StableLM). Some components are never turned. They belong to no
#   pair and form a term of their own, the [pass-through](../docs/glossary.md#pass-through).
# - **Adjacent pairs** (GPT-J, Cohere). The sum is right and the split is wrong, as above.
# - **QK-norm** (Qwen3, Gemma 3, OLMo 2). Queries and keys are normalised after `hook_q` and
#   `hook_k`, so these are not "before the rotation".
# - **Hooks that do not fire** (Pythia, Phi-3 and GPT-J on `TransformerBridge`). `hook_rot_q` is in
#   the list of names, and nothing arrives in the cache.
# - **Scale** (Gemma 2 and 3). The divisor need not be $\sqrt{d}$.
# - **Soft-cap** (Gemma 2). Scores are squeezed between the sum of contributions and the softmax.
# - **Layers that differ** (Gemma 3: sliding windows and another base in local layers; SmolLM3:
#   layers without RoPE). Which keys a query sees, and how fast pairs turn, depends on the layer.
# - **Scaled frequencies** (Llama 3.1, YaRN, longrope). Frequencies do not follow from the base, and
#   with YaRN and longrope the rotation also changes all lengths by one factor.
#
# [The page on models](../docs/models.md) lists what is read, and how, and what is refused.

# %% [markdown]
# ## The same with `lr.capture`, verified
#
# [`lr.capture`](../docs/api/reading.md) reads rotated queries and keys of all layers, on either
# model class, and hands out only what passed its checks on that very forward pass.

# %%
qk = lr.capture(model, text)
qk

# %% [markdown]
# The contract has four checks, made for every layer and every prompt.
# [Their definitions](../docs/mathematics.md#verification) are on the page of the mathematics.
#
# - **score**: all contributions plus the pass-through, against the model's own scores. It catches a
#   wrong scale, a wrong key head, and a bias or rescaling after the rotation.
# - **pattern**: the softmax under mask, window, soft-cap and learned sinks (a logit that takes part
#   in the softmax and is no key; GPT-OSS) as read, against the model's own attention. It catches a
#   wrong mask or window and a missed soft-cap.
# - **norm**: each pair's length before and after the rotation. It catches a wrong pairing and a
#   wrong attention factor (the common factor on lengths, 1 in most models).
# - **angle**: each pair's turn, against `inv_freq × position`. It catches wrong frequencies and
#   positions.
#
# Errors of score, norm and angle are relative, and that of the pattern is the largest difference of
# a weight. The tolerance is 1e-5 for a model in float32 and 2e-2 in bfloat16 and float16. (Where a
# model class shows only one side of the rotation, norm and angle cannot be checked and read `nan`;
# then lens_rope rotates by itself, and a wrong rotation shows in the scores.)

# %%
checks = qk.verification()
errors = checks[["relative_error", "pattern_error", "norm_error", "angle_error"]]
assert (errors <= 1e-5).all(axis=None)
errors.max().rename("largest over layers").to_frame()

# %% [markdown]
# What we read by hand is in the capture:

# %%
record = qk.layer(16)
assert torch.allclose(record.q.double(), cache["rot_q"].double(), atol=1e-4)
assert torch.allclose(record.k.double(), cache["rot_k"].double(), atol=1e-4)
assert np.allclose(lr.decompose(qk, 16, head).at(query, key).contribution, contribution, atol=1e-4)
print(f"q {tuple(record.q.shape)}, k {tuple(record.k.shape)}, scale {record.scale:.4f}")
print(f"head {head} reads key head {record.kv_head(head)}; route: {record.check.route}")

# %% [markdown]
# ## What a refusal looks like
#
# A check is worth something only if it can fail. So let us make it fail. The hook below adds to
# each score one hundredth of the key's position. Nothing that can be read from queries and keys
# explains such a bias (ALiBi adds biases of this kind), so a split into pairs would leave something
# out.


# %%
def add_bias(scores, hook):
    """Adds 0.01 times the position of the key to each score."""
    return scores + 0.01 * torch.arange(scores.shape[-1])


def attempt(what, make):
    """Prints how an attempt was refused; fails if it was not."""
    try:
        made = make()
    except LensRopeError as error:
        print(f"{what}\n  {type(error).__name__}: {error}\n")
    else:
        raise AssertionError(f"{what} was not refused: {made}")


with model.hooks(fwd_hooks=[("blocks.16.attn.hook_attn_scores", add_bias)]):
    attempt("scores with a bias", lambda: lr.capture(model, text, layers=[16]))

# %% [markdown]
# The message names the layer, the check, how far off it was, the likely cause and what to do.
# Nothing is returned: there is no half-right capture. The same holds for mistakes of a simpler
# kind:

# %%
attempt("an empty prompt", lambda: lr.capture(model, ""))
attempt("a layer that does not exist", lambda: lr.capture(model, text, layers=[99]))
attempt("a key after the query", lambda: lr.decompose(qk, 16, 0).at(query=3, key=5))

# %% [markdown]
# And for a model that has no RoPE. Here is one: a tiny GPT-2 with random weights and learned
# positions.

# %%
import transformers
from transformer_lens.model_bridge import TransformerBridge

config = transformers.GPT2Config(
    n_layer=1, n_head=2, n_embd=16, n_positions=64, vocab_size=model.cfg.d_vocab
)
gpt2 = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
gpt2.config.architectures = ["GPT2LMHeadModel"]
without_rope = TransformerBridge.boot_transformers(
    "gpt2", hf_model=gpt2, tokenizer=model.tokenizer, device="cpu"
)
attempt("a model without RoPE", lambda: lr.capture(without_rope, text))

# %% [markdown]
# All of these are children of `LensRopeError`; [the list is here](../docs/api/errors.md). After a
# refusal the model is as it was before:

# %%
again = lr.capture(model, text, layers=[16])
assert torch.equal(again.layer(16).q, record.q)
print(again)

# %% [markdown]
# ## Keeping a capture
#
# A capture holds plain arrays on the CPU, and everything that follows in these tutorials needs only
# the capture (but for what runs the model again). So it can be made where the model is, and read
# anywhere else.

# %%
with tempfile.TemporaryDirectory() as folder:
    path = qk.save(Path(folder) / "lighthouse.safetensors")
    size = path.stat().st_size / 1e6
    loaded = lr.RotaryCapture.load(path)
assert torch.equal(loaded.layer(16).k, qk.layer(16).k)
assert loaded.max_relative_error == qk.max_relative_error
print(f"{size:.1f} MB for {len(loaded.prompts[0])} tokens and {len(loaded.layer_indices)} layers")
print(loaded)

# %% [markdown]
# The checks travel with it: a loaded capture still says how exactly it was read, and on which
# versions (`loaded.model.versions`).
#
# ## What was shown, and what was not
#
# Shown:
#
# - RoPE turns each pair of components by an angle proportional to position, and the score of two
#   turned arrows depends on their distance alone.
# - Pairs differ in speed by orders of magnitude. Fast ones separate neighbours, and partial cycles
#   never turn once within the context.
# - The scores of this model can be rebuilt from `hook_rot_q` and `hook_rot_k`, and split into one
#   contribution per pair.
# - A right total does not prove a right split, so lengths and angles are checked as well, and what
#   fails is refused.
#
# Not shown:
#
# - That the loaded model is the published one. A capture compares with what the host computed;
#   `lr.load_model` compares logits with transformers before it hands a model out.
# - Anything about what heads *do* with their pairs. One sentence and one score were enough for the
#   reading, and are not enough for that.
#
# Next: [one score, frequency by frequency](2_one_score.py).
