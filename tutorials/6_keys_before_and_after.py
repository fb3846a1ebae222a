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
# # 6. Keys before and after RoPE
#
# **Question.** How many dimensions do the keys of a layer fill before RoPE turns them, and how many
# after it? What does that mean for compressing a cache of keys?
#
# The claim to check is one that one meets, shown as a histogram for Mistral-7B-Instruct: the
# eigenvalues of the keys' covariance are concentrated near zero before RoPE and spread out after
# it. This tutorial
#
# 1. shows in two dimensions the two ways in which rotation spreads variance;
# 2. measures the spectrum of every layer of a real model, with an identity that says where the
#    added variance comes from;
# 3. separates the two ways in the real model, and looks at longer and longer texts;
# 4. compares low-rank approximations of keys before and after rotation on text that they were not
#    fitted to.
#
# It uses offsets, the constant part of queries and keys ([tutorial
# 5](5_offset_features_and_bounds.py)). Here the offset is the mean key over *all* tokens, because a
# covariance counts them all; in tutorial 5 it leaves out the first token and other sinks. The
# formulas are in [the mathematics](../docs/mathematics.md#key-spectrum).

# %%
import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from IPython.display import Markdown, display
from plotly.subplots import make_subplots

import lens_rope as lr

pd.set_option("display.precision", 3)
BEFORE, AFTER, MIXED = "#e08a2e", "#1f9e77", "#8e6bbf"

# %% [markdown]
# ## Two ways to spread, in two dimensions
#
# A single pair is two components, so its keys are points in a plane, and RoPE turns the point of
# position $m$ by $w m$. Take 400 positions and three kinds of key:
#
# - **an offset**: every token has the same key. Before rotation there is no variance at all. After
#   it the points lie on an arc, or on a circle if the pair completes a turn.
# - **content along a line**: the keys differ from token to token, in one direction only. Rotation
#   turns each by another angle, and the line becomes a disc.
# - **both**, as in a real pair.

# %%
rng = np.random.default_rng(0)
position = np.arange(400)
w = 2 * np.pi / 400  # one turn over the text
line = rng.normal(size=400) + 0.05j * rng.normal(size=400)
toys = {
    "offset": np.full(400, 3.0) + 0.02 * line,
    "content along a line": line,
    "both": 3.0 + line,
}


def eigenvalues(x):
    """Descending eigenvalues of the covariance (divisor n) of the rows of x."""
    return np.linalg.eigvalsh(np.cov(x, rowvar=False, bias=True))[::-1]


fig = make_subplots(rows=1, cols=3, subplot_titles=list(toys), horizontal_spacing=0.06)
rows = []
for col, (name, z) in enumerate(toys.items(), start=1):
    turned = z * np.exp(1j * w * position)
    for points, side, color in ((z, "before", BEFORE), (turned, "after", AFTER)):
        fig.add_scatter(
            x=points.real, y=points.imag, mode="markers", name=f"{side} rotation",
            marker={"size": 4, "color": color, "opacity": 0.7}, showlegend=col == 1, row=1, col=col,
        )  # fmt: skip
        values = eigenvalues(np.stack([points.real, points.imag], axis=1))
        rows.append(
            {
                "keys": name, "rotation": side, "larger eigenvalue": values[0],
                "smaller eigenvalue": values[1], "trace": values.sum(),
                "|mean|²": abs(points.mean()) ** 2,
            }
        )  # fmt: skip
    axis = "" if col == 1 else str(col)
    fig.update_yaxes(scaleanchor=f"x{axis}", row=1, col=col)
fig.update_layout(template="plotly_white", height=340, legend={"orientation": "h", "y": -0.15})
display(fig)
toy = pd.DataFrame(rows).set_index(["keys", "rotation"])
toy

# %%
for name in toys:
    before, after = toy.loc[(name, "before")], toy.loc[(name, "after")]
    assert np.isclose(after.trace - before.trace, before["|mean|²"] - after["|mean|²"])
    assert after["smaller eigenvalue"] > before["smaller eigenvalue"]
"trace after - trace before = |mean before|² - |mean after|², for each of them"

# %% [markdown]
# Read the last two columns together. A rotation keeps the length of every key, so it keeps the mean
# of $|k|^2$; and the mean of $|k|^2$ is the variance summed over components (the *trace*) plus
# $|\text{mean}|^2$. Hence
#
# $$
# \operatorname{trace}_\text{after} - \operatorname{trace}_\text{before}
# = |\bar k_\text{before}|^2 - |\bar k_\text{after}|^2 .
# $$
#
# **What rotation adds to the variance is the drop of $|\text{mean}|^2$**: the rotated offset, as in
# the first toy, up to the small mean of rotated content. The second toy has next to no offset and
# gains no variance; it loses a little, because its turned points do not cancel completely. Still
# its small eigenvalue grows, because the large one gives to it. Rotation *mixes*: it averages the
# covariance over many turns, and an average of turned copies is never less even than the original.
# So there are two effects, and the trace sees only one of them. Keep them apart below.
#
# ## The claim, on a real model
#
# [`lr.key_spectrum`](../docs/api/spectrum.md) takes the keys of each layer, all key heads side by
# side, undoes the rotation for the spectrum *before* it, and computes the eigenvalues of both
# covariances. The histogram counts the eigenvalues of all layers together. The model is
# SmolLM2-135M-Instruct with weights of 4 bits, expanded to float32.

# %%
model = lr.load_model("smollm2-135m")
text = lr.sample_text()
qk = lr.capture(model, text)
spectrum = lr.key_spectrum(qk)
spectrum.plot()

# %%
near = {side: spectrum.near_zero(side) for side in ("pre", "post")}
assert near["pre"] > near["post"] + 0.1
_, n_kv_heads, d_head = qk.layer(0).k.shape
n_components = n_kv_heads * d_head
Markdown(
    f"A layer has {n_kv_heads} key heads of {d_head} components, so {n_components} eigenvalues. "
    f"Over {spectrum.n_tokens} tokens, {near['pre']:.0%} of the eigenvalues of all layers lie "
    f"below 0.5 (activation units²) before rotation and {near['post']:.0%} after "
    f"it; the median eigenvalue goes from {spectrum.median('pre'):.2f} to "
    f"{spectrum.median('post'):.2f}. Look at the inset: before rotation the eigenvalues crowd at "
    f"the left edge, after it they are further right. *The claim holds here*, as a shift: the heap "
    f"near zero gets smaller and does not vanish."
)

# %%
table = spectrum.to_dataframe()
gap = table.trace_post - table.trace_pre
assert np.allclose(gap, table.offset_energy, rtol=1e-6, atol=1e-6)
columns = ["rank90", "participation_ratio", "near_zero", "trace"]
shown = table[["layer", *(f"{c}_{s}" for c in columns for s in ("pre", "post")), "offset_share"]]
shown.iloc[[0, 1, 5, 10, 15, 20, 25, 29]]

# %% [markdown]
# The `assert` is the identity from above, in every layer. The columns:
#
# - `rank90`: how many eigenvalues hold 90 % of the variance;
# - `participation_ratio`: $(\sum \lambda)^2 / \sum \lambda^2$, how many *equal* eigenvalues would
#   be as spread. It is ruled by the large ones;
# - `near_zero`: the share below 0.5. This threshold is absolute, so it depends on how large keys
#   are in this model;
# - `offset_share`: the part of the variance after rotation that rotation has added, which is
#   rotated offset.

# %%
fig = make_subplots(
    rows=1, cols=2, subplot_titles=("eigenvalues for 90 % of the variance", "traces")
)
for side, color, name in (("pre", BEFORE, "before RoPE"), ("post", AFTER, "after RoPE")):
    for col, column in ((1, "rank90"), (2, "trace")):
        fig.add_scatter(
            x=table.layer, y=table[f"{column}_{side}"], mode="lines+markers", line_color=color,
            name=name, showlegend=col == 1, row=1, col=col,
        )  # fmt: skip
fig.update_xaxes(title_text="layer")
fig.update_yaxes(rangemode="tozero")
fig.update_yaxes(title_text="activation units²", row=1, col=2)
fig.update_layout(template="plotly_white", height=340, legend={"orientation": "h", "y": -0.25})
fig

# %%
grows = (table.rank90_post > table.rank90_pre).sum()
widest = table.loc[(table.rank90_post - table.rank90_pre).idxmax()]
Markdown(
    f"The rank grows in {grows} of {len(table)} layers, most in layer {widest.layer:.0f} "
    f"({widest.rank90_pre:.0f} to {widest.rank90_post:.0f}); the median over layers goes from "
    f"{table.rank90_pre.median():g} to {table.rank90_post.median():g}. In the median layer "
    f"{table.offset_share.median():.0%} of the variance after rotation is rotated offset."
)

# %% [markdown]
# ## Which of the two ways?
#
# Undo the rotation, take the mean key out, and rotate what is left. Now there is content alone, and
# the mixing can be seen by itself. The rotation is a few lines: read each pair as a complex number
# and multiply it by $e^{\mathrm{j} w m}$, or by $e^{-\mathrm{j} w m}$ to undo it.


# %%
def turn(keys, rope, n_kv_heads, direction):
    """Rotates keys [pos, component] forwards (+1) or back (-1); position = row."""
    x = keys.reshape(len(keys), n_kv_heads, -1).copy()
    first, second = rope.components
    phase = np.exp(1j * direction * rope.inv_freq * np.arange(len(keys))[:, None])
    z = (x[..., first] + 1j * x[..., second]) * phase[:, None, :]
    x[..., first], x[..., second] = z.real, z.imag
    return x.reshape(len(keys), -1)


def keys_of(record):
    """[pos, component] rotated keys of a layer, key heads side by side, in float64."""
    return record.k.double().flatten(1).numpy()


def measures(values):
    """Near-zero share, rank for 90 % of the variance, participation ratio and trace."""
    rank = int(np.searchsorted(values.cumsum(), 0.9 * values.sum())) + 1
    return [(values < 0.5).mean(), rank, values.sum() ** 2 / (values**2).sum(), values.sum()]


found = []
for layer in qk.layer_indices:
    record = qk.layer(layer)
    n_kv = record.n_kv_heads
    after = keys_of(record)
    before = turn(after, record.rope, n_kv, -1)
    assert np.allclose(turn(before, record.rope, n_kv, 1), after)
    content = turn(before - before.mean(axis=0), record.rope, n_kv, 1)
    found.append([measures(eigenvalues(x)) for x in (before, content, after)])
    # The same numbers as key_spectrum's.
    assert np.allclose(found[-1][2][3], spectrum.layer(layer).post.trace)
found = np.array(found)  # [layer, kind, measure]
names = ["near-zero share", "rank for 90 %", "participation ratio", "trace"]
kinds = ["before rotation", "content alone, rotated", "offset and content, rotated"]
separated = pd.DataFrame(found.mean(axis=0), index=kinds, columns=names)
separated

# %%
drop = separated["near-zero share"]
by_mixing = (drop.iloc[0] - drop.iloc[1]) / (drop.iloc[0] - drop.iloc[2])
trace = separated["trace"]
assert abs(trace.iloc[1] / trace.iloc[0] - 1) < 0.01 and 0 < by_mixing < 1
more = (found[:, 1, 1] > found[:, 2, 1]).sum()
Markdown(
    f"(Means over layers, activation units².) Rotation adds {trace.iloc[2] - trace.iloc[0]:.1f} to "
    f"a trace of {trace.iloc[0]:.1f}. That is the offset's: content alone loses "
    f"{trace.iloc[0] - trace.iloc[1]:.2f} ({1 - trace.iloc[1] / trace.iloc[0]:.1%}), the |mean|² "
    f"of rotated content. The *small eigenvalues* are another matter: {by_mixing:.0%} of the drop "
    f"of the near-zero share is there without any offset. And the offset does not raise the rank, "
    f"on the contrary: in {more} of {len(found)} layers rotated content alone needs more "
    f"dimensions "
    f"for 90 % of its variance than content with offset. A rotated offset is large and lies in "
    f"few dimensions, two "
    f"for each pair that has one, so it draws a large part of the variance into those. "
    "In short: **the offset brings the variance, mixing fills the small dimensions.**"
)

# %% [markdown]
# ## Longer texts
#
# How far a constant is spread depends on how far the pair has turned. A constant $\bar z$ at
# frequency $w$ keeps the mean $|\bar z| \cdot D$ over $T$ tokens, with
#
# $$D = \left| \frac{1}{T} \sum_{m=0}^{T-1} e^{\mathrm{j} w m} \right|
# = \left| \frac{\sin(w T / 2)}{T \sin(w / 2)} \right| ,$$
#
# so it gives $|\bar z|^2 (1 - D^2)$ to the variance: nearly nothing while $w T$ is small, all of it
# after a full turn. Slow pairs hold the largest offsets, so a longer text should show more. Measure
# it on the first tokens of the same capture: earlier keys do not depend on later tokens.
#
# A longer text also has more tokens, and a covariance of few tokens looks concentrated for that
# reason alone. The last row is the control: as few tokens as in the first row, drawn from all over
# the text. A layer has no rank on fewer tokens than components, so take each key head by itself;
# the numbers are therefore others than above.

# %%
n_all, n_few = len(qk.prompts[0]), 128
drawn = np.sort(np.random.default_rng(0).choice(np.arange(1, n_all), n_few - 1, replace=False))
samples = {f"first {n}": np.arange(n) for n in (n_few, 256, 512)} | {
    f"all {n_all}": np.arange(n_all),
    f"{n_few}, spread": np.concatenate([[0], drawn]),
}
rows = []
for name, chosen in samples.items():
    for layer in qk.layer_indices:
        record = qk.layer(layer)
        after = keys_of(record)
        before = turn(after, record.rope, n_kv_heads, -1)
        # What the constants of the whole text would give at the chosen positions.
        kept = np.abs(np.exp(1j * np.outer(chosen, record.rope.inv_freq)).mean(axis=0)) ** 2
        first, second = record.rope.components
        for offset, head_before, head_after in zip(
            before.mean(axis=0).reshape(n_kv_heads, -1),
            before[chosen].reshape(len(chosen), n_kv_heads, -1).swapaxes(0, 1),
            after[chosen].reshape(len(chosen), n_kv_heads, -1).swapaxes(0, 1),
            strict=True,
        ):
            near_before, rank_before, _, trace_before = measures(eigenvalues(head_before))
            near_after, rank_after, _, trace_after = measures(eigenvalues(head_after))
            rows.append(
                {
                    "tokens": name, "near zero before": near_before, "near zero after": near_after,
                    "rank90 before": rank_before, "rank90 after": rank_after,
                    "offset share": 1 - trace_before / trace_after,
                    "added variance": trace_after - trace_before,
                    "predicted": ((offset[first] ** 2 + offset[second] ** 2) * (1 - kept)).sum(),
                }
            )  # fmt: skip
by_length = pd.DataFrame(rows).groupby("tokens", sort=False).mean()
# The same numbers as key_spectrum's.
assert np.isclose(
    by_length.loc[f"all {n_all}", "offset share"], spectrum.heads_dataframe().offset_share.mean()
)
by_length

# %%
start, control = by_length.loc[f"first {n_few}"], by_length.loc[f"{n_few}, spread"]
end = by_length.loc[f"all {n_all}"]
deviation = by_length["predicted"] / by_length["added variance"] - 1
assert end["offset share"] > start["offset share"] + 0.1
assert control["offset share"] > start["offset share"] + 0.1
assert deviation.abs().max() < 0.2
sampling = (control["near zero after"] - end["near zero after"]) / (
    start["near zero after"] - end["near zero after"]
)
Markdown(
    f"From {n_few} to {n_all} tokens the share of rotated offset grows from "
    f"{start['offset share']:.0%} to {end['offset share']:.0%}. Few tokens are not the reason: "
    f"{n_few} tokens spread over the text have {control['offset share']:.0%}. For the *small* "
    f"eigenvalues it is a good part of the reason: the near-zero share after rotation goes from "
    f"{start['near zero after']:.0%} to {end['near zero after']:.0%}, but for the spread tokens it "
    f"is {control['near zero after']:.0%}, so {sampling:.0%} of the drop comes from more tokens "
    f"and not from more turning. Do not compare near-zero shares or ranks of texts of different "
    f"length.\n\nThe last two columns (activation units², mean over key heads) compare the "
    f"variance that rotation adds with what constants turned at their frequencies give; each row "
    f"takes "
    f"the means of the whole text. At the full length the two agree almost by construction "
    f"({deviation[f'all {n_all}']:+.1%}); at the first {n_few} tokens the prediction is "
    f"{abs(deviation[f'first {n_few}']):.0%} too "
    f"{'high' if deviation[f'first {n_few}'] > 0 else 'low'}. The largest deviation is "
    f"{deviation.abs().max():.0%}."
)

# %% [markdown]
# ## What it means for a cache of keys
#
# When text is generated, the keys of all earlier tokens are kept. They can be stored in fewer
# numbers: fit a basis of $r$ directions, store each key's $r$ coordinates. The spectrum suggests to
# do that *before* RoPE, and to rotate after reading. (Others have found the same for quantisation:
# KVQuant, arXiv 2401.18079, quantises keys before RoPE.) How much is there to gain at equal rank,
# and does it reach the attention pattern?
#
# Two choices, so four variants: approximate keys before or after rotation; and either subtract the
# mean key first (it is stored once) or take the directions through the origin.
#
# An honest test fits the basis on other tokens than it is judged on. So read the two halves of the
# text as two prompts of their own, each from position 0 and with its own BOS: fit on the first,
# judge on the second. One key is the same in both: that of BOS, which stands at position 0 and sees
# nothing else. It would not be held out. So it is left out of the fit and stored as it is; what
# happens otherwise comes at the end.

# %%
ids = model.to_tokens(text)[0].cpu()
n_half = (len(ids) - 1) // 2
halves = torch.stack(
    [torch.cat([ids[:1], part]) for part in (ids[1 : 1 + n_half], ids[1 + n_half : 1 + 2 * n_half])]
)
two = lr.capture(
    model, halves, attention_mask=torch.ones_like(halves), names=["first half", "second half"]
)
print(two)

VARIANTS = {
    "before RoPE, mean subtracted": (True, True),
    "before RoPE": (True, False),
    "after RoPE, mean subtracted": (False, True),
    "after RoPE": (False, False),
}


def scores_and_pattern(record, keys):
    """[head, query, key] scores and attention of a layer, were its keys these."""
    k = torch.as_tensor(keys).reshape(record.n_pos, record.n_kv_heads, -1)
    k = k.repeat_interleave(record.n_heads // record.n_kv_heads, dim=1)
    scores = record.scale * torch.einsum("qhd,khd->hqk", record.q.double(), k)
    return scores, scores.masked_fill(~record.visible, -torch.inf).softmax(dim=-1)


def centred(scores, visible):
    """Scores without the mean of each row, which the softmax does not see; 0 where not visible."""
    weight = visible.double()
    return (
        scores - (scores * weight).sum(-1, keepdim=True) / weight.sum(-1, keepdim=True)
    ) * weight


def compare(fit, test, ranks, first="exact"):
    """One row per rank and variant: errors on `test` with a basis fitted to the keys of `fit`.

    first: The key of the first token is stored "exact", or approximated and "held out" of the fit
        like all others, or approximated and "in the fit".
    """
    n_kv, rope, visible = test.n_kv_heads, test.rope, test.visible
    true = keys_of(test)
    scores, pattern = scores_and_pattern(test, true)
    spread = (centred(scores, visible) ** 2).sum()
    rows = []
    for name, (undo, subtract) in VARIANTS.items():
        known = turn(keys_of(fit), rope, n_kv, -1) if undo else keys_of(fit)
        known = known if first == "in the fit" else known[1:]
        keys = turn(true, rope, n_kv, -1) if undo else true
        mean = known.mean(axis=0) * subtract
        directions = np.linalg.svd(known - mean, full_matrices=False)[2]
        for rank in ranks:
            basis = directions[:rank]
            rebuilt = mean + (keys - mean) @ basis.T @ basis
            rebuilt = turn(rebuilt, rope, n_kv, 1) if undo else rebuilt
            if first == "exact":
                rebuilt[0] = true[0]
            new_scores, new_pattern = scores_and_pattern(test, rebuilt)
            score_error = (centred(new_scores - scores, visible) ** 2).sum() / spread
            rows.append(
                {
                    "layer": rope.layer, "rank": rank, "variant": name,
                    "key error": ((rebuilt - true)[1:] ** 2).sum() / (true[1:] ** 2).sum(),
                    "score error": float(score_error),
                    "attention moved": float((new_pattern - pattern).abs().sum(-1).mean() / 2),
                }
            )  # fmt: skip
    return rows


LAYER, RANKS = 16, [8, 16, 32, 48, 64, 96, 128, 160, n_components]
curves = pd.DataFrame(compare(two.layer(LAYER, prompt=0), two.layer(LAYER, prompt=1), RANKS))
full = curves[curves["rank"] == n_components]
assert full["key error"].max() < 1e-9 and full["attention moved"].max() < 1e-6

fig = make_subplots(
    rows=1, cols=3, subplot_titles=("key error", "score error", "attention moved"),
    horizontal_spacing=0.08,
)  # fmt: skip
for (name, (undo, subtract)), part in zip(
    VARIANTS.items(), [curves[curves.variant == name] for name in VARIANTS], strict=True
):
    style = {"color": BEFORE if undo else AFTER, "dash": "solid" if subtract else "dot"}
    for col, column in enumerate(["key error", "score error", "attention moved"], start=1):
        fig.add_scatter(
            x=part["rank"], y=part[column], name=name, line=style, mode="lines+markers",
            showlegend=col == 1, row=1, col=col,
        )  # fmt: skip
fig.update_xaxes(title_text=f"rank (of {n_components})")
fig.update_layout(template="plotly_white", height=380, legend={"orientation": "h", "y": -0.25})
fig

# %% [markdown]
# - **Key error**: squared error over squared length of the keys, without the first. Rotation keeps
#   lengths, so the error before and after it is comparable.
# - **Score error**: squared error of the scores over their variance within each row. A constant
#   added to a row is left out, as the softmax does not see it.
# - **Attention moved**: half the sum of $|\text{new} - \text{old}|$ over the keys, mean over
#   queries and heads: the share of attention that goes elsewhere, between 0 and 1.
#
# All three are 0 at full rank, as they must be. Now every layer, at a third of the dimensions.

# %%
RANK = n_components // 3
every = pd.DataFrame(
    row
    for layer in two.layer_indices
    for row in compare(two.layer(layer, prompt=0), two.layer(layer, prompt=1), [RANK])
)
fig = go.Figure()
for name, (undo, subtract) in VARIANTS.items():
    part = every[every.variant == name]
    style = {"color": BEFORE if undo else AFTER, "dash": "solid" if subtract else "dot"}
    fig.add_scatter(x=part.layer, y=part["attention moved"], name=name, line=style)
fig.update_layout(
    template="plotly_white", height=360, xaxis_title="layer", yaxis_rangemode="tozero",
    yaxis_title=f"attention moved, rank {RANK} of {n_components}",
    legend={"orientation": "h", "y": -0.25},
)  # fmt: skip
fig

# %%
errors = ["key error", "score error", "attention moved"]
mean_errors = every.groupby("variant", sort=False)[errors].mean()
mean_errors

# %%
moved = every.pivot(index="layer", columns="variant", values="attention moved")
best, same_after = "before RoPE, mean subtracted", "after RoPE, mean subtracted"
wins = int((moved[best] < moved[same_after]).sum())
ratio = mean_errors.loc[same_after, "key error"] / mean_errors.loc[best, "key error"]
assert wins > 0.9 * len(moved)
Markdown(
    f"At rank {RANK}, approximating before rotation makes {ratio:.1f} times less key error than "
    f"after it (means over layers, mean subtracted), and moves less attention in {wins} of "
    f"{len(moved)} layers: {mean_errors.loc[best, 'attention moved']:.0%} against "
    f"{mean_errors.loc[same_after, 'attention moved']:.0%}. "
    f"And {mean_errors.loc[best, 'attention moved']:.0%} of moved attention is not small: a key "
    f"error of {mean_errors.loc[best, 'key error']:.1%} still matters where scores are large."
)

# %% [markdown]
# ### The key of the first token
#
# Subtracting the mean made next to no difference above: the rows of the table agree, and nearly
# everywhere the dotted lines lie on the solid ones. Now approximate the first key, too, with bases
# that were fitted without it, and with it. The latter is no held-out test of that key, as it is the
# same in both halves.

# %%
moved_by = {"exact": mean_errors["attention moved"]}
for first in ("held out", "in the fit"):
    moved_by[first] = (
        pd.DataFrame(
            row
            for layer in two.layer_indices
            for row in compare(
                two.layer(layer, prompt=0), two.layer(layer, prompt=1), [RANK], first
            )
        )
        .groupby("variant", sort=False)["attention moved"]
        .mean()
    )
first_key = pd.DataFrame(moved_by).rename_axis(columns="attention moved, if the first key is")
first_key

# %%
plain, plain_after = "before RoPE", "after RoPE"
lengths, first_attention = [], []
for record in two.records[1]:
    squares = (keys_of(record) ** 2).sum(axis=1)
    lengths.append(squares[0] / squares[1:].mean())
    first_attention += [record.pattern(h)[1:, 0].mean().item() for h in range(record.n_heads)]
exact, out, fitted = (first_key[c] for c in ("exact", "held out", "in the fit"))
assert (out > exact + 0.05).all()
assert out[best] > out[plain] and out[same_after] > out[plain_after]
assert fitted[best] < fitted[plain] and fitted[same_after] < fitted[plain_after]
assert max(abs(exact[best] - exact[plain]), abs(exact[same_after] - exact[plain_after])) < 0.01
assert max(exact[best], exact[plain]) < 0.7 * min(exact[same_after], exact[plain_after])
Markdown(
    f"Left out of the fit, the first key is served badly by every basis, worst where the mean of "
    f"the others is subtracted ({out[best]:.0%} against {out[plain]:.0%} before RoPE, "
    f"{out[same_after]:.0%} against {out[plain_after]:.0%} after it): it lacks that mean, and its "
    f"squared length is {np.median(lengths):.0%} of the others' (median over layers). One key "
    f"counts for so much because it is a sink: {np.mean(first_attention):.0%} of the attention "
    f"goes to it. With it in the fit, subtracting the mean is the better choice "
    f"({fitted[best]:.0%} against {fitted[plain]:.0%} before RoPE), again by way of that key "
    f"alone. "
    f"Stored exactly, it takes the question away: {exact[best]:.1%} and {exact[plain]:.1%} before "
    f"RoPE, still better "
    f"than {exact[same_after]:.1%} and {exact[plain_after]:.1%} after it. For a cache this "
    f"suggests to store the sink's key as it is."
)

# %% [markdown]
# ### Positions that the basis has not seen
#
# Both halves above cover the same positions, which favours the bases after rotation: slow pairs
# have then reached the same angles in both. In use, a text goes on. So fit on the first half of the
# *one* long capture, and judge the keys of its second half, which lie at later positions.

# %%
rows = []
for layer in qk.layer_indices:
    record = qk.layer(layer)
    true = keys_of(record)
    half = len(true) // 2
    for name, (undo, subtract) in VARIANTS.items():
        keys = turn(true, record.rope, record.n_kv_heads, -1) if undo else true
        mean = keys[1:half].mean(axis=0) * subtract
        basis = np.linalg.svd(keys[1:half] - mean, full_matrices=False)[2][:RANK]
        error = keys[half:] - mean - (keys[half:] - mean) @ basis.T @ basis
        rows.append({"variant": name, "later": (error**2).sum() / (true[half:] ** 2).sum()})
later = pd.DataFrame(rows).groupby("variant", sort=False).later.mean()
positions = pd.DataFrame({"same positions": mean_errors["key error"], "later positions": later})
positions

# %%
worse = positions["later positions"] / positions["same positions"]
assert later[best] < later[same_after]
Markdown(
    f"Before rotation the key error stays what it was ({worse[best]:.1f} times), after rotation it "
    f"grows to {worse[same_after]:.1f} times. Before RoPE the angle of a key's position is not in "
    f"it, so a basis for one place serves the others; after it, the basis is fitted to angles that "
    f"later tokens have left."
)

# %% [markdown]
# ## What was shown, and what was not
#
# Shown, for this model and this text:
#
# - The eigenvalues of the keys are more concentrated near zero before RoPE than after it, in the
#   mean and by rank in most layers.
# - The variance that rotation adds is the drop of $|\text{mean}|^2$, exactly, and that is the
#   rotated offset up to the small mean of rotated content. A good part of the growth of the *small*
#   eigenvalues is no offset: it is content, mixed by rotation.
# - The share of rotated offset grows with the length of the text, about as the frequencies of the
#   offsets predict, and not because there are more tokens. Near-zero shares and ranks depend on the
#   number of tokens as well.
# - At equal rank, keys approximated before rotation have smaller errors on held-out tokens, in
#   keys, scores and attention, and the difference grows at positions that the basis has not seen.
# - The first token's key is a case of its own: approximated by a basis of the others it costs a
#   large part of the attention. Stored exactly, it leaves nothing to gain from subtracting the
#   mean.
#
# Not shown:
#
# - Quality of generation. No loss and no generated text was measured; each layer was changed by
#   itself, with queries and other layers as they were, so errors that add up over layers are
#   missing.
# - Quantisation, or values. Low rank is one way to compress, and only keys were compressed. The
#   cost of rotating at every read was not counted.
# - Other texts. The two halves are of one short story, which is kind to a basis fitted on the first
#   of them.
# - The threshold of 0.5 is a convention in this model's units; do not compare near-zero shares
#   between models whose keys differ in size.
#
# [What two models show](../docs/findings.md) has the spectrum of a second architecture, and layers
# in which rotation does *not* raise the rank.
#
# Next: [tutorial 7](7_your_own_model.py) brings in a model of your own.
