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
# # 5. Outliers, offset features and the two bounds
#
# **Question.** A few components of queries and keys are many times larger than the rest, on nearly
# every token. Why are they there, and why do they sit in slow rotary pairs?
#
# One answer has been published: bounds predict in which rotary frequencies such features arise, and
# the least angle between query and key ("Rotary Offset Features in Large Language Models", arXiv
# 2503.01832). This tutorial
#
# 1. looks at such features, first as outliers and then as constants;
# 2. derives a bound on their frequency and a bound on their angle from one requirement;
# 3. checks both bounds on a real model, beside the rate at which pairs keep them anyway;
# 4. lists what does not fit, tests the test, and repeats the check on a second architecture.
#
# You need to know that RoPE turns pair $i$ of a query or key at position $m$ by the angle $w_i m$.
# A pair is written as one complex number $z$, as in [tutorial 1](1_reading_rotary_qk.py). Terms are
# in the [glossary](../docs/glossary.md), formulas in [the
# mathematics](../docs/mathematics.md#offset-and-content).
#
# The demo model is SmolLM2-135M-Instruct, stored in 4 bits (Q4_1) and expanded to float32 when it
# is loaded. All numbers are those of the quantised model.

# %%
import os
import warnings

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from IPython.display import Markdown, display
from plotly.subplots import make_subplots

import lens_rope as lr

pd.set_option("display.precision", 3)
PI = np.pi

model = lr.load_model("smollm2-135m")
text = lr.sample_text()
qk = lr.capture(model, text)
print(qk)

# %% [markdown]
# ## Outliers are pairs
#
# [`lr.offset_features`](../docs/api/offsets.md) reads everything that this tutorial needs from the
# capture. Its `.plot()` shows, for each layer, the largest absolute value of each component of the
# keys. Look for columns: the same few components stand out in many layers.

# %%
features = lr.offset_features(qk)
features.plot("key", "largest")

# %% [markdown]
# This model pairs component $i$ with component $i + 32$, so the dashed line divides the first
# components of the pairs from the second ones. Frequencies fall from left to right in each half.
# How the length of a pair is divided between its two components depends on where it points, and
# RoPE turns it, so single components are an accident of direction and position. **The natural unit
# is the pair**, and its length $|z|$ is what rotation leaves alone.
#
# `outliers()` lists pairs that are large in the queries or keys of a head. *Relative magnitude* is
# the mean of $|z_i|$ over tokens, divided by its median over the pairs of the head; an outlier has
# at least 2.

# %%
outliers = features.outliers()
display(
    Markdown(
        f"{len(outliers):,} outliers, {(outliers.side == 'key').sum():,} of them in keys. "
        "The largest:"
    )
)
outliers.head(8)

# %% [markdown]
# `cycles` counts the turns of the pair over the context that the model was trained for; below 1 it
# never comes round. The next figure shows which pairs the outliers are in, beside the cycles of
# each pair.

# %%
rope = qk.layer(0).rope
counts = outliers.groupby(["side", "pair"]).size().unstack(fill_value=0)
counts = counts.reindex(columns=range(rope.n_pairs), fill_value=0)
fig = go.Figure()
for side, color in (("query", "#8e6bbf"), ("key", "#e08a2e")):
    fig.add_bar(x=counts.columns, y=counts.loc[side], name=f"{side} outliers", marker_color=color)
half = int(np.argmax(rope.cycles <= 0.5))
fig.add_vline(x=half - 0.5, line_dash="dash", annotation_text="at most half a cycle →")
fig.update_layout(
    template="plotly_white",
    barmode="stack",
    height=320,
    xaxis_title="pair (0 is the fastest)",
    yaxis_title="outliers over all layers and heads",
    yaxis_range=[0, 1.2 * counts.sum().max()],
    legend={"orientation": "h", "y": 1.15},
)
fig

# %%
slow_share = (outliers.cycles <= 0.5).mean()
slow_base = (rope.cycles <= 0.5).mean()
Markdown(
    f"{slow_share:.0%} of the outliers turn at most half a cycle over {rope.context:,} tokens, and "
    f"{slow_base:.0%} of all pairs do. So outliers lean towards slow pairs, but being large alone "
    f"is far from a rule: {1 - slow_share:.0%} are elsewhere. The rule appears when we ask for "
    f"more than size."
)

# %% [markdown]
# ## Most of them hardly change
#
# Look at one of them closely. RoPE's rotation is known, so it can be undone: multiply the pair at
# position $m$ by $e^{-\mathrm{j} w m}$. What is left is what the token itself wrote there.
# (`/ rope.attention_factor` is for models that also scale; here it is 1.)


# %%
def pairs_of(record, side):
    """[pos, head, pair] complex: rotated pairs of the queries or keys, as the model used them."""
    x = {"query": record.q, "key": record.k}[side].double().numpy()
    first, second = record.rope.components
    return x[..., first] + 1j * x[..., second]


def before_rotation(record, side):
    """[pos, head, pair] complex: the same with the rotation undone."""
    turn = np.exp(-1j * record.positions.numpy()[:, None] * record.rope.inv_freq)
    return pairs_of(record, side) * turn[:, None, :] / record.rope.attention_factor


top = features.features().iloc[0]
layer, head, kv_head, pair = (int(top[name]) for name in ("layer", "head", "kv_head", "pair"))
record = qk.layer(layer)
usual = int(np.argsort(np.abs(features.layer(layer).key.mean[kv_head]))[16])  # a middling pair

fig = make_subplots(
    rows=1,
    cols=2,
    subplot_titles=("before rotation", "after rotation, as in the scores"),
    horizontal_spacing=0.12,
)
for col, read in ((1, before_rotation), (2, pairs_of)):
    query, key = read(record, "query")[:, head], read(record, "key")[:, kv_head]
    for z, name, color in (
        (query[1:, pair], f"queries, pair {pair}", "#8e6bbf"),
        (key[1:, pair], f"keys, pair {pair}", "#e08a2e"),
        (key[1:, usual], f"keys, pair {usual} (middling)", "#9aa5ae"),
        (key[:1, pair], f"key of the first token, pair {pair}", "#d62728"),
    ):
        marker = {"size": 13 if len(z) == 1 else 4, "color": color}
        marker |= {"symbol": "star"} if len(z) == 1 else {"opacity": 0.6}
        fig.add_scatter(
            x=z.real, y=z.imag, mode="markers", marker=marker, name=name, showlegend=col == 1,
            row=1, col=col,
        )  # fmt: skip
    fig.update_xaxes(title_text="first component", row=1, col=col)
    fig.update_yaxes(scaleanchor=f"x{'' if col == 1 else 2}", row=1, col=col)
fig.update_yaxes(title_text="second component", row=1, col=1)
fig.update_layout(
    template="plotly_white",
    height=460,
    legend={"orientation": "h", "y": -0.2, "itemsizing": "constant"},
)
fig

# %% [markdown]
# Left: before rotation nearly all keys (orange) sit in one spot far from the origin, and all
# queries (violet) in another one. What differs from token to token is small beside what is common
# to all: a constant. Right: RoPE turns that constant with position. The pair is slow, so over this
# text each spot becomes a short arc. The grey pair is of middling size: a cloud, off the origin but
# wide. And the red star, the key of the first token, does *not* take part. Keep that in mind.
#
# The mean over tokens $\bar z$ is called the *offset*. How constant a pair is, is measured by
#
# $$\text{constancy} = \frac{|\bar z|}{\overline{|z|}} \in [0, 1] .$$
#
# It is 1 when all tokens point the same way with the same length, and about $1/\sqrt{T}$ for $T$
# random directions. The means leave out the first token and attention sinks, because these hold
# something else.

# %%
z = before_rotation(record, "key")[1:, kv_head, pair]
constancy = abs(z.mean()) / np.abs(z).mean()
assert abs(constancy - top.key_constancy) < 1e-2


def spread(side):
    """[layer, head, pair]: RMS of z - mean over its median over pairs, first token left out."""
    records = [qk.layer(layer) for layer in qk.layer_indices]
    varying = np.stack([before_rotation(one, side)[1:].std(axis=0) for one in records])
    return varying / np.median(varying, axis=-1, keepdims=True)


table = features.to_dataframe()
table["query_spread"] = spread("query")[table.layer, table["head"], table.pair]
table["key_spread"] = spread("key")[table.layer, table.kv_head, table.pair]
rows = []
for side in ("query", "key"):
    # Heads of a group share their keys, so each key head is counted once.
    once = table if side == "query" else table.drop_duplicates(["layer", "kv_head", "pair"])
    for name, part in once.groupby(once[f"{side}_relative"] >= 2):
        rows.append(
            {
                "side": side,
                "pairs": "outliers" if name else "others",
                "count": len(part),
                "median constancy": part[f"{side}_constancy"].median(),
                "constancy ≥ 0.8": (part[f"{side}_constancy"] >= 0.8).mean(),
                "median spread": part[f"{side}_spread"].median(),
            }
        )
grey = features.layer(layer).key.constancy[kv_head, usual]
display(
    Markdown(f"Constancy of these keys: {constancy:.3f} (orange), {grey:.2f} (grey). All pairs:")
)
pd.DataFrame(rows)

# %% [markdown]
# Outliers are nearly constant as a rule, in this sense: their mean is far larger than what varies.
# They do not vary *less* than other pairs. *Spread* is the RMS of $z - \bar z$, divided by its
# median over the pairs of the head, and in outliers it is about as large as in an ordinary pair or
# larger. The converse does not hold: many pairs of ordinary size have a large mean, too. An
# **offset feature** is both large and constant, in the query *and* in the key of a head: constancy
# of at least 0.8, relative magnitude of at least 2. These are conventions, with no natural place to
# cut; they are options of `lr.offset_features`.
#
# ## What a constant does to a score
#
# A pair contributes to the score of query position $m$ and key position $n$
#
# $$
# c[m, n] = \text{scale} \cdot g^2 \cdot \operatorname{Re}\left(
# z_q e^{\mathrm{j} w m} \, \overline{z_k e^{\mathrm{j} w n}} \right) ,
# $$
#
# where $g$ is the attention factor. Put the constants $\bar z_q$ and $\bar z_k$ in. Both phases
# merge into one that depends on the distance $\Delta = m - n$ alone:
#
# $$
# c(\Delta) = A \cos(\varphi + w \Delta), \qquad
# A = \text{scale} \cdot g^2 \, |\bar z_q| |\bar z_k|, \qquad
# \varphi = \operatorname{arg}\left( \bar z_q \overline{\bar z_k} \right) .
# $$
#
# This is the **offset curve**. The *amplitude* $A$ is in score units: a difference of $A$ between
# two keys changes the ratio of their attention by $e^A$. The *angle* $\varphi$ is where the curve
# starts, at distance 0. Does it hold for real tokens? Compare it with the mean contribution that
# the pair really made at each distance.

# %%
contribution = lr.decompose(qk, layer, head).contributions(pairs=[pair])[0]  # [query, key]
distance = np.arange(0, 600)
# The diagonal of distance Δ, without its first entry: that is the first token as a key.
measured = np.array([np.diagonal(contribution, -d)[1:].mean() for d in distance])
w = record.rope.inv_freq[pair]
curve = top.amplitude * np.cos(top.angle + w * distance)
worst = np.abs(measured - curve).max()
assert worst < 0.05 * top.amplitude

fig = make_subplots(
    rows=1,
    cols=2,
    subplot_titles=("mean contribution by distance", "contribution to each key, mean over queries"),
)
fig.add_scatter(x=distance, y=measured, name="measured", line_color="#1f9e77", row=1, col=1)
fig.add_scatter(
    x=distance, y=curve, name="A cos(φ + wΔ)", line={"color": "#333", "dash": "dash"}, row=1, col=1
)
last = contribution[-200:]
fig.add_scatter(
    y=np.nanmean(last[:, :600], axis=0), name="last 200 queries", mode="lines",
    line_color="#e08a2e", row=1, col=2,
)  # fmt: skip
fig.add_scatter(
    x=[0], y=[last[:, 0].mean()], name="first token", mode="markers",
    marker={"symbol": "star", "size": 13, "color": "#d62728"}, row=1, col=2,
)  # fmt: skip
fig.update_xaxes(title_text="distance Δ (tokens)", row=1, col=1)
fig.update_xaxes(title_text="key position", row=1, col=2)
fig.update_yaxes(title_text="score units", row=1, col=1)
fig.update_layout(template="plotly_white", height=360, legend={"orientation": "h", "y": -0.25})
fig

# %%
sink_attention = record.pattern(head)[1:, 0].mean().item()
Markdown(
    f"Layer {layer} head {head} pair {pair}: amplitude {top.amplitude:.1f} score units, angle "
    f"{top.angle / PI:.2f}π. The curve is within {worst:.2f} score units of what was measured. At "
    f"the right is what it is good for. Every ordinary key is pushed down, by "
    f"{-np.nanmean(last[:, 1:400]):.1f} score units on average over the first 400. The first "
    f"token, whose key lacks the constant, gets {last[:, 0].mean():+.2f}. So it stands out by "
    f"staying where it is, and it receives {sink_attention:.0%} of the head's attention: an "
    f"**attention sink**, the subject of tutorial 3."
)

# %% [markdown]
# ## Two bounds from one requirement
#
# Suppose that a constant is there to push every ordinary key down, however far away it is, and that
# it contributes about nothing to the score of the sink. (That is a premise: a pair that lifts the
# sink enough makes one at any angle.) Then the offset curve must not be positive at any distance up
# to the effective context $L$:
#
# $$\cos(\varphi + w \Delta) \le 0 \quad \text{for all } 0 \le \Delta \le L .$$
#
# Take $\varphi$ in $[0, 2\pi)$. As the distance grows, the point $\varphi + w\Delta$ walks
# anticlockwise along the unit circle, from $\varphi$ to $\varphi + wL$, without a jump. The cosine
# is not positive on the left half of the circle, from $\pi/2$ to $3\pi/2$. The whole walk has to
# stay there:
#
# - **Minimum angle.** It has to start there: $\varphi \ge \pi/2$ (and at most $3\pi/2$), so the
#   offsets of query and key are at least a right angle apart.
# - **Frequency bound.** The left half is $\pi$ long, so the walk can be no longer: $wL \le \pi$, at
#   most *half a cycle* over the context.
# - **Both together.** It has to end there, too: $\varphi + wL \le 3\pi/2$. The later it starts, the
#   shorter it must be.
#
# The weaker form $wL < 2\pi$, a *partial cycle*, says only that the pair never comes round. The
# paper derives bounds of its own; the derivation here starts from one requirement and may differ
# from it ([the mathematics](../docs/mathematics.md#bounds) has it in full). In the figure each walk
# has the colour of its curve.

# %%
cases = {  # name: (angle φ, turn w L), both in units of π
    "keeps both bounds": (0.55, 0.7, "#1f9e77"),
    "starts too early (angle)": (0.25, 0.7, "#e08a2e"),
    "walks too far, still a partial cycle": (0.6, 1.6, "#8e6bbf"),
    "many cycles": (0.6, 7.0, "#d62728"),
}
fig = make_subplots(
    rows=1, cols=2, column_widths=[0.36, 0.64],
    subplot_titles=("the walk of φ + wΔ", "cos(φ + wΔ) over the context"),
)  # fmt: skip
left_half = np.linspace(0.5, 1.5, 60) * PI
fig.add_scatter(
    x=1.25 * np.cos(left_half), y=1.25 * np.sin(left_half), fill="toself", mode="lines",
    line={"width": 0}, fillcolor="rgba(31,158,119,0.16)", hoverinfo="skip", showlegend=False,
    row=1, col=1,
)  # fmt: skip
way = np.linspace(0, 1, 400)
for number, (name, (start, turn, color)) in enumerate(cases.items()):
    angle, radius = (start + turn * way) * PI, 0.55 + 0.17 * number
    x, y = radius * np.cos(angle), radius * np.sin(angle)
    fig.add_scatter(
        x=x, y=y, mode="lines", line={"color": color, "width": 3}, showlegend=False, row=1, col=1
    )
    fig.add_scatter(
        x=x[:1], y=y[:1], mode="markers", marker={"color": color, "size": 9}, showlegend=False,
        row=1, col=1,
    )  # fmt: skip
    fig.add_scatter(
        x=way, y=np.cos(angle), name=name, line={"color": color, "width": 3}, row=1, col=2
    )
fig.add_hrect(y0=-1.1, y1=0, fillcolor="rgba(31,158,119,0.16)", line_width=0, row=1, col=2)
fig.update_xaxes(range=[-1.35, 1.35], showticklabels=False, row=1, col=1)
fig.update_yaxes(scaleanchor="x", showticklabels=False, row=1, col=1)
fig.update_xaxes(title_text="distance Δ as a share of the context L", row=1, col=2)
fig.update_layout(template="plotly_white", height=400, legend={"orientation": "h", "y": -0.2})
fig


# %%
def keeps(start, turn):
    """Whether A cos(φ + wΔ) is nowhere positive; both arguments in units of π."""
    return start >= 0.5 and start + turn <= 1.5


grid = np.linspace(0, 1, 2001)
for start in np.arange(0.02, 2, 0.05):
    for turn in np.arange(0.02, 3, 0.05):
        assert keeps(start, turn) == (np.cos((start + turn * grid) * PI).max() <= 0)
"The two inequalities say the same as the requirement, on a grid of angles and turns."

# %% [markdown]
# ## Do the features keep them?
#
# `check_bounds()` takes the offset features with an amplitude above 5 score units, and for each
# layer that layer's own effective context $L$: its sliding window where it has one, otherwise the
# trained context. The figure places each feature at its turn $wL$ and angle $\varphi$. The green
# region is what the two bounds allow together.

# %%
check = features.check_bounds()
check.plot()

# %%
check.to_dataframe()

# %%
half_cycle, region, angle_bound = check["half_cycle"], check["region"], check["angle"]
assert half_cycle.share > 2 * half_cycle.base_rate and region.share > 2 * region.base_rate
assert region.p_value < 0.01
Markdown(
    f"Of {half_cycle.n} strong offset features, {half_cycle.share:.1%} turn at most half a cycle; "
    f"of all pairs {half_cycle.base_rate:.0%} do. {angle_bound.share:.0%} have an angle of at "
    f"least π/2 (base rate {angle_bound.base_rate:.0%}), and {region.share:.0%} keep both bounds "
    f"(base rate {region.base_rate:.0%}). Besides, {check.positive_angle:.0%} have a positive "
    f"angle (base rate {check.positive_angle_base_rate:.0%}): they start in the upper half of the "
    f"circle, where there is way left to walk."
)

# %% [markdown]
# ### How to read the columns
#
# - **`base_rate`**: the share of *all* (layer, head, pair) that keep the bound. A share is only
#   news if it is well above. Frequencies fall geometrically, so a good part of all pairs is slow
#   anyway.
# - **`distinct`**: query heads that share a key head are not separate finds. These columns count
#   each (layer, key head, pair) once, and call it within the bound only if it is so in every query
#   head in which it is a strong feature.
# - **`p_binomial`** takes the features as independent draws at the base rate. They are not, so it
#   is far too small.
# - **`p_value`** is the one to quote. Within each layer, which pair has which place is shuffled, in
#   the same way for all heads of the layer, and the features within the bound are counted again,
#   9,999 times. This keeps the number of features in each layer and the way in which heads share
#   pairs. The smallest value that it can take is 0.0001.
#
# What the p-value assumes: that under "no relation" any pair of a layer could have held the
# features, and that **layers are independent**. The second is doubtful. All layers read one
# residual stream, and the map above shows the same pairs again and again. It speaks about this
# model on this text, too, not about models in general: one model that has a habit in 30 layers is
# one habit.
#
# ### Does it hang on two choices?
#
# The threshold of 5 is a convention, and the context is what a configuration says. Vary both.

# %%
rows = []
for label, strong, context in [
    *((f"amplitude above {strong}", strong, None) for strong in (2, 5, 8, 12)),
    *((f"context {context:,} tokens", 5, context) for context in (2048, 8192, 16384, 32768)),
]:
    varied = features.check_bounds(strong, context=context)
    row = {"choice": label, "features": len(varied.table)}
    for name in ("half_cycle", "partial_cycle", "region"):
        row[name] = varied[name].share
        row[f"{name} base"] = varied[name].base_rate
    rows.append({**row, "p (half_cycle)": varied["half_cycle"].p_value})
choices = pd.DataFrame(rows)
choices

# %%
slow = check.table[check.table.within_half_cycle]
fastest = int(slow.pair.min())
halves = PI / rope.inv_freq
by_pair = check.table.groupby("pair").within_region.agg(["size", "sum"])
inside = int(by_pair.index[by_pair["sum"] > 0].min())
assert by_pair["sum"][fastest] == 0 and inside > fastest
Markdown(
    f"Two things to see. The stronger the features, the better they keep the bounds. And the "
    f"context matters: the fastest pair with strong features within the bound is pair {fastest}, "
    f"which turns half a cycle in {halves[fastest]:,.0f} tokens; the next faster pair, "
    f"{fastest - 1}, in {halves[fastest - 1]:,.0f}. The model's context is {rope.context:,} "
    f"tokens, between the two. Were the context twice as long or more, a large part of these "
    f"features would break the frequency bound. But every one of the {by_pair['size'][fastest]} "
    f"features in pair {fastest} misses the minimum angle. Those that keep both bounds begin at "
    f"pair {inside} ({by_pair['sum'][inside]} of {by_pair['size'][inside]}), which turns half a "
    f"cycle in {halves[inside]:,.0f} tokens. So the edge lies at this context for the frequency "
    f"bound alone, not for the requirement from which it follows. And it is one coincidence on one "
    f"grid of frequencies: no proof that the context is the cause."
)

# %% [markdown]
# ## What does not fit
#
# `exceptions()` lists every strong feature outside of the green region. They fail for two different
# reasons.

# %%
exceptions = check.exceptions()
fast = exceptions[~exceptions.within_half_cycle]
# What is slow enough can still start too early, or start late and walk out at the end.
early = exceptions[exceptions.within_half_cycle & ~exceptions.within_angle].copy()
late = exceptions[exceptions.within_half_cycle & exceptions.within_angle]
assert len(fast) + len(early) + len(late) == len(exceptions)
display(
    Markdown(
        f"{len(exceptions)} exceptions: {len(fast)} too fast, {len(early)} with too small an "
        f"angle, {len(late)} that start in time and leave the region before the context ends. "
        "The too fast ones, with what their heads attend to:"
    )
)
fast = fast[["layer", "head", "pair", "amplitude", "angle", "cycles"]].copy()
for row in fast.index:
    pattern = qk.layer(fast.layer[row]).pattern(fast["head"][row]).numpy()
    fast.loc[row, "attention to previous token"] = np.diagonal(pattern, -1).mean()
    fast.loc[row, "attention to first token"] = pattern[1:, 0].mean()
fast

# %%
lone = fast.iloc[0]
wavelength = 2 * PI / rope.inv_freq[int(lone.pair)]
Markdown(
    f"A pair that turns {lone.cycles:,.0f} times over the context cannot push all keys down, and "
    f"its head does nothing of the kind. It attends to the previous token. For telling one "
    f"position from the next, a fast pair with a constant in it is the right tool: its offset "
    f"curve has narrow peaks, one every {wavelength:.1f} tokens; the head's other pairs have to "
    f"choose among them. So this feature is an exception to the bounds and not to the reason for "
    f"them: the requirement behind them is one for sinks."
)

# %% [markdown]
# [Tutorial 4](4_positional_and_content_heads.py) is about heads that attend to the previous token.
#
# Now the angles. With a shortfall of $\delta = \pi/2 - |\varphi|$ and a positive angle, the curve
# begins at $A \sin\delta$ above zero and goes negative from a distance of $\delta / w$ tokens on.

# %%
early["shortfall (π)"] = 0.5 - early.angle.abs() / PI
early["at distance 0 (score units)"] = early.amplitude * np.cos(early.angle)
inv_freq = early.turn / early.context
early["negative from (tokens)"] = (PI / 2 - early.angle.abs()) / inv_freq
early.groupby("pair").agg(
    features=("pair", "size"),
    median_shortfall=("shortfall (π)", "median"),
    largest_shortfall=("shortfall (π)", "max"),
    median_at_distance_0=("at distance 0 (score units)", "median"),
    median_negative_from=("negative from (tokens)", "median"),
)

# %%
n_tokens = len(qk.prompts[0])
beyond = (early["negative from (tokens)"] > n_tokens).mean()
negative = early[early.angle < 0]
Markdown(
    f"The median shortfall is {early['shortfall (π)'].median():.3f}π and the largest "
    f"{early['shortfall (π)'].max():.2f}π, so most miss the bound by little. But little is not "
    f"nothing. The pairs are slow, so a small angle takes long to make up: {beyond:.0%} of these "
    f"features become negative only beyond the {n_tokens} tokens of this text. There they lift "
    f"ordinary keys throughout, by less than their amplitude. "
    + (
        f"{len(negative)} of them have a negative angle; their curve rises first and the last "
        f"column does not apply to them. "
        if len(negative)
        else ""
    )
    + "Can such a feature make a sink?"
)

# %% [markdown]
# [`lr.explain_sinks`](../docs/api/sinks.md) finds, for each sink head, its *best pair*: the one
# that adds most to the sink's score over the mean of the other keys ([tutorial
# 3](3_attention_sinks.py)). Do best pairs keep the bounds more often?
#
# This is no independent test: the best pair is chosen for a score below the sink's, so with random
# angles, too, it would keep the bounds more often than others. How often? Keep all amplitudes and
# frequencies, draw every angle anew, let the constant contribute nothing to the sink, choose the
# best pairs again from the offset curves, and count.

# %%
sinks = lr.explain_sinks(qk).to_dataframe()[["layer", "head", "sink_share", "best_pair"]]
judged = check.table.merge(sinks, how="left", on=["layer", "head"])
ROLES = ("best pair of a sink head", "another pair of a sink head", "in a head without a sink")
judged["role"] = np.select(
    [judged.pair == judged.best_pair, judged.best_pair.notna()], ROLES[:2], ROLES[2]
)
roles = pd.crosstab(judged.role, judged.within_region.map({True: "keeps", False: "breaks"}))
roles["share that keeps the bounds"] = roles.keeps / roles.sum(axis=1)

amplitude = np.nan_to_num(np.stack([features.layer(i).amplitude for i in qk.layer_indices]))
strong, is_sink = np.zeros(amplitude.shape, dtype=bool), np.zeros(amplitude.shape, dtype=bool)
strong[check.table.layer, check.table["head"], check.table.pair] = True
is_sink[sinks.layer, sinks["head"]] = True
# e^{jwΔ}, averaged over the keys that a query sees, then over the queries.
turned = np.exp(1j * rope.inv_freq * np.arange(len(qk.prompts[0]))[:, None])
mean_turn = (turned.cumsum(axis=0) / np.arange(1, len(turned) + 1)[:, None])[1:].mean(axis=0)
rng = np.random.default_rng(0)
drawn = {role: [] for role in ROLES}
for _ in range(50):
    angle = rng.uniform(0, 2 * PI, amplitude.shape)
    keep = (angle >= PI / 2) & (angle + rope.inv_freq * rope.context <= 1.5 * PI)
    pushed = -amplitude * np.real(np.exp(1j * angle) * mean_turn)
    is_best = is_sink & (pushed == pushed.max(axis=-1, keepdims=True))
    for role, chosen in zip(ROLES, (is_best, is_sink & ~is_best, ~is_sink), strict=True):
        drawn[role].append(keep[strong & chosen].mean())
roles["with random angles"] = pd.Series({role: np.mean(shares) for role, shares in drawn.items()})
roles = roles.loc[list(ROLES)]
roles

# %%
measured_share, random_share = roles["share that keeps the bounds"], roles["with random angles"]
assert (measured_share > random_share + 0.2).all()
best = sinks.merge(
    table, left_on=["layer", "head", "best_pair"], right_on=["layer", "head", "pair"]
)
Markdown(
    f"Where a strong feature is the best pair of a sink head, {measured_share.iloc[0]:.0%} keep "
    f"both bounds, but {random_share.iloc[0]:.0%} would with random angles. The lead over the "
    f"other strong features could be one of selection. What selection does not explain is how far "
    f"each row exceeds its own random share: {measured_share.iloc[1]:.0%} against "
    f"{random_share.iloc[1]:.0%} in the other pairs of sink heads, {measured_share.iloc[2]:.0%} "
    f"against {random_share.iloc[2]:.0%} in heads without a sink. The angles fit the requirement "
    f"there, too.\n\n"
    f"The other way round: of {len(best)} sink heads, the best pair is an offset feature in "
    f"{best.is_feature.mean():.0%} ({table.is_feature.mean():.1%} of all pairs are), and turns at "
    f"most {best.cycles.max():.2f} cycles over the context in every one of them. The best pair is "
    f"the strongest, and not alone: tutorial 3 measures what the second one adds.\n\n"
    f"Pushing every key down is neither sufficient for a sink ({roles.keeps.iloc[2]} such features "
    f"are in heads without one) nor necessary ({roles.breaks.iloc[0]} best pairs break the "
    f"bounds): what counts is the *difference* between the sink and the rest, over all pairs "
    f"together."
)

# %% [markdown]
# ## Can the check say no?
#
# A test that always says yes is worth nothing. So run it where the answer is known: on a GPT-NeoX
# model (the architecture of Pythia) with random weights. It differs from the demo model in the ways
# that matter for reading: half of each head is not rotated, queries and keys have biases, and there
# is no grouping of heads.
#
# This is a control of the *method*. It says nothing about trained models, because nothing was
# trained. A bias is a constant, so offset features can be planted at will:
#
# - **as initialised**: nothing planted;
# - **random pair, random angles**: in each layer one pair, the same for all heads. There is no
#   relation to find, so the share should be near the base rate and `p_value` seldom small;
# - **as the bounds ask**: one of the slow pairs, with query and key $0.6\pi$ apart. The share
#   should be 1.

# %%
from transformer_lens.model_bridge import TransformerBridge
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

HEADS, D_HEAD = 4, 64


def control(seed, plant=None):
    """Bounds check of a random GPT-NeoX model; plant(rng) gives a pair and the angles of q, k."""
    torch.manual_seed(seed)
    config = GPTNeoXConfig(
        vocab_size=1000, hidden_size=HEADS * D_HEAD, intermediate_size=256, num_hidden_layers=8,
        num_attention_heads=HEADS, max_position_embeddings=2048,
        architectures=["GPTNeoXForCausalLM"],
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    hf_model = GPTNeoXForCausalLM._from_config(config, attn_implementation="eager").eval()
    rng = np.random.default_rng(seed)
    for block in hf_model.gpt_neox.layers if plant else ():
        pair, angle_q, angle_k = plant(rng)
        # Queries, keys and values of a head lie one after the other.
        bias = block.attention.query_key_value.bias.data.view(HEADS, 3, D_HEAD)
        for side, angle in ((0, angle_q), (1, angle_k)):
            bias[:, side, pair] = 8 * torch.tensor(np.cos(angle), dtype=torch.float32)
            bias[:, side, pair + D_HEAD // 4] = 8 * torch.tensor(np.sin(angle), dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        bridge = TransformerBridge.boot_transformers(
            "random-gpt-neox", hf_model=hf_model, tokenizer=model.tokenizer
        )
    tokens = torch.as_tensor(rng.integers(1, 1000, 200))
    return lr.offset_features(lr.capture(bridge, tokens)).check_bounds()


def anywhere(rng):
    """A random pair, and random angles for all heads."""
    return int(rng.integers(16)), rng.uniform(0, 2 * PI, HEADS), rng.uniform(0, 2 * PI, HEADS)


def as_the_bounds_ask(rng):
    """One of the three slowest pairs, query and key 0.6 π apart."""
    angle_k = rng.uniform(0, 2 * PI, HEADS)
    return int(rng.integers(13, 16)), angle_k + 0.6 * PI, angle_k


rows = []
for name, plant, seeds in [
    ("as initialised", None, [0]),
    ("random pair, random angles", anywhere, range(8)),
    ("as the bounds ask", as_the_bounds_ask, [0]),
]:
    for seed in seeds:
        found = control(seed, plant)
        row = {"planted": name, "seed": seed, "features": len(found.table)}
        for bound in ("half_cycle", "region"):
            entry = found[bound]
            row |= {f"{bound}": entry.share, f"{bound} base": entry.base_rate}
            row |= {f"{bound} p": entry.p_value, f"{bound} p_binomial": entry.p_binomial}
        rows.append(row)
controls = pd.DataFrame(rows)
controls

# %%
null = controls[controls.planted == "random pair, random angles"]
asked = controls[controls.planted == "as the bounds ask"].iloc[0]
assert controls.features[0] == 0
assert asked.half_cycle == 1 and asked.region == 1 and asked["half_cycle p"] < 0.01
assert null.half_cycle.mean() < 0.6 and null.region.mean() < 0.3


def falsely(column):
    """How many of the random plantings are called significant at 5 %."""
    return int((null[column] < 0.05).sum())


Markdown(
    f"Without planting there is no strong feature, so nothing is judged. Planted at random, "
    f"{null.half_cycle.mean():.0%} are within half a cycle on average (base rate "
    f"{null['half_cycle base'].mean():.0%}) and {null.region.mean():.0%} within both bounds (base "
    f"rate {null['region base'].mean():.0%}). Planted as the bounds ask, all are, and the check "
    f"says so. Among the {len(null)} random plantings, the binomial p-value of the frequency bound "
    f"falls below 0.05 in {falsely('half_cycle p_binomial')}, the permutation p-value in "
    f"{falsely('half_cycle p')}: heads of a layer share their pair here, and only the second knows."
)

# %% [markdown]
# ## A second architecture
#
# A control is no second finding. For that you need another trained model, and of another family
# than the demo model, which is of the Llama type. Set `LENS_ROPE_SECOND_MODEL` to a hub name, a
# directory or a `.gguf` file before you start, and the next cell runs the same check on it. From a
# clone of the project:
#
# ```bash
# export LENS_ROPE_SECOND_MODEL="$(scripts/gemma)"  # Gemma-3 270M (240 MB, Gemma terms of use)
# ```
#
# That file is in 4 bits, too (Q4_K_M). Gemma-3 is a good second case: it normalises queries and
# keys, has heads four times as wide, and most of its layers see only a sliding window, so that $L$,
# and with it the bound, differs between layers.


# %%
def summary(name, check):
    """One row of the table below."""
    shares = {
        f"{bound}{what}": getattr(check[bound], attribute)
        for bound in ("half_cycle", "partial_cycle", "angle", "region")
        for what, attribute in (("", "share"), (" base", "base_rate"))
    }
    contexts = ", ".join(f"{context:,}" for context in sorted(set(check.table.context)))
    return {
        "model": name, "contexts": contexts, "features": check["region"].n,
        "distinct": check["region"].n_distinct, **shares,
        "p (region)": f"{check['region'].p_value:.4f}",
    }  # fmt: skip


both = [summary("smollm2-135m", check)]
second_name = os.environ.get("LENS_ROPE_SECOND_MODEL", "").strip()
if second_name:
    second = lr.capture(lr.load_model(second_name), text)
    second_check = lr.offset_features(second).check_bounds()
    both.append(summary(second.model.name, second_check))
    outcome = (
        f"Run on {second.model.name} ({second.model.host}): {second_check['half_cycle'].n} strong "
        f"offset features, {second_check['half_cycle'].share:.0%} within half a cycle and "
        f"{second_check['partial_cycle'].share:.0%} within a partial cycle of their layer's "
        f"context."
    )
else:
    second_check = None
    outcome = (
        "**Not run with a second trained model:** `LENS_ROPE_SECOND_MODEL` is not set, so the "
        "table has the demo model alone. The project's own results for Gemma-3 270M are on the "
        "page linked below."
    )
display(Markdown(outcome))
pd.DataFrame(both).set_index("model").T

# %%
if second_check is not None:
    display(second_check.by_layer())
    display(second_check.exceptions())
    display(second_check.plot())
else:
    display(Markdown("Nothing to show: no second model was given."))

# %% [markdown]
# [What two models show](../docs/findings.md) has the numbers for SmolLM2-135M and Gemma-3 270M on a
# longer text, exceptions included, and how to run them again. In short: both bounds are kept far
# above their base rates in both; the frequency bound holds in Gemma when each layer is judged
# against its own window; the angle bound is the weaker one in both.
#
# ## What was shown, and what was not
#
# Shown, on this model and this text:
#
# - The outliers of queries and keys belong to pairs, and most of them are nearly constant: the mean
#   is far larger than what varies from token to token (what varies is about as large as in an
#   ordinary pair, or larger).
# - A constant contributes $A \cos(\varphi + w\Delta)$, which matched the measured contribution of
#   the strongest feature.
# - If it must not lift any ordinary key within the context, then $\varphi \ge \pi/2$, $wL \le \pi$
#   and $\varphi + wL \le 3\pi/2$.
# - Strong offset features keep these bounds far above the base rate, and more often than with
#   random angles, in heads with a sink and without. The check stays silent on planted features that
#   have no such relation.
#
# Not shown:
#
# - That the bounds are *why* training put the features there. They fit a purpose; nothing here
#   intervened on training.
# - That the angle bound is sharp. A part of the strong features miss it, most of them by little.
# - That it holds for models in general, for other texts, or at other lengths than the trained
#   context. Layers of one model are not independent samples, whatever the p-value.
# - Anything about a second trained model, unless you gave one.
#
# Next: [tutorial 6](6_keys_before_and_after.py) asks what turning such constants does to the
# spectrum of the keys.
