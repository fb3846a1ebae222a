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
# # 3. What makes an attention sink
#
# **Question.** Many heads give most of their attention to one token that says nothing, usually the
# first token of the prompt. Which part of the score puts it there? And does the model need that
# part?
#
# We start from what can be seen, the attention pattern, and go down: from the pattern to the
# scores, from the scores to the rotary pairs, and to the one pair that carries the sink of one
# head. Then we take that pair away, first on paper and then in the running model.
#
# You need two ideas from [tutorial 2](2_one_score.py). A *pair* is two components of a query or a
# key that RoPE turns together. The *contribution* of a pair is what it adds to one attention score,
# and all contributions together are the score.

# %%
import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from IPython.display import Markdown, display
from plotly.subplots import make_subplots

import lens_rope as lr

N_TOKENS = 256
model = lr.load_model("smollm2-135m")
text = lr.sample_text()
qk = lr.capture(model, text, max_tokens=N_TOKENS)
print(qk)

SINK, OTHERS, QUIET = "#d9822b", "#3497a9", "#9aa1a8"


def styled(figure: go.Figure, label: str, height: int = 340, **layout) -> go.Figure:
    """One look for the figures below; the label is for readers who cannot see them."""
    return figure.update_layout(
        template="none",
        height=height,
        margin={"l": 60, "r": 20, "t": 36, "b": 50},
        plot_bgcolor="rgba(0,0,0,0)",
        font={"size": 12},
        meta={"label": label, "scales": {}},
        **layout,
    )


# %% [markdown]
# ## A head that looks away
#
# Here is the pattern of one head on the first 48 tokens. A row is a query, a column is a key, and
# each row sums to 1.

# %%
LAYER, HEAD = 27, 7
split = lr.decompose(qk, LAYER, HEAD)
pattern = split.pattern().astype(np.float64)  # [q_pos, k_pos]
tokens = qk.prompts[0].tokens

shown = np.where(np.tril(np.ones((48, 48))) > 0, pattern[:48, :48], np.nan)
figure = go.Figure(
    go.Heatmap(
        z=shown,
        coloraxis="coloraxis",
        customdata=[[[repr(tokens[m]), repr(tokens[n])] for n in range(48)] for m in range(48)],
        hovertemplate="query %{y} %{customdata[0]}<br>key %{x} %{customdata[1]}<br>"
        "attention %{z:.2f}<extra></extra>",
    )
)
styled(figure, f"Attention of layer {LAYER} head {HEAD}, queries by keys", height=420)
figure.update_xaxes(title="key (position)").update_yaxes(
    title="query (position)", autorange="reversed"
)
figure.update_layout(
    coloraxis={"colorscale": "Teal", "cmin": 0, "cmax": 1, "colorbar": {"title": "attention"}}
)

# %% [markdown]
# **What to look at.** The first column. For most queries, most of the attention goes to position 0,
# the beginning-of-sequence token (BOS). Such a key is called an *attention sink* (Xiao et al. 2023,
# [arXiv 2309.17453](https://arxiv.org/abs/2309.17453)).
#
# To say how strong a sink is, take the mean of the attention $P$ to a key $n$ over all queries that
# can see it:
#
# $$\text{sink share}[n] = \frac{1}{T - n} \sum_{m = n}^{T - 1} P[m, n]$$
#
# where $T$ is the number of tokens. A head is a *sink head* if some key has a sink share above 0.3.
# Definition and threshold are those of Gu et al. 2024
# ([arXiv 2410.10781](https://arxiv.org/abs/2410.10781)). Keys that fewer than half of the queries
# see do not count: the very last key is seen by the last query alone, and a mean over one query is
# no habit.

# %%
seen_by = N_TOKENS - np.arange(N_TOKENS)
share = pattern.sum(axis=0) / seen_by
possible = np.flatnonzero(seen_by >= N_TOKENS / 2)
largest = possible[np.argsort(-share[possible])][:4]
uniform = np.mean(1 / np.arange(1, N_TOKENS + 1))  # what equal attention would give key 0

display(
    Markdown(
        f"The sink share of position 0 is **{share[0]:.2f}**. Attention spread evenly over the "
        f"visible keys would give it {uniform:.3f}."
    )
)
pd.DataFrame(
    {"position": largest, "token": [repr(tokens[n]) for n in largest], "share": share[largest]}
).round(3)

# %% [markdown]
# ## Where the sinks of the model are
#
# [`lr.explain_sinks`](../docs/api/sinks.md) does this for every head of the capture.

# %%
sinks = lr.explain_sinks(qk)
sink = sinks.head(LAYER, HEAD)
assert np.isclose(share[0], sink.share)  # the formula above, and the package

found = sinks.to_dataframe()
places = found.groupby("position").agg(
    heads=("head", "size"), first_layer=("layer", "min"), last_layer=("layer", "max")
)
places.insert(0, "token", [repr(tokens[position]) for position in places.index])
display(
    Markdown(
        f"**{len(found)} of {qk.model.n_layers * qk.model.n_heads} heads** are sink heads on this "
        f"text."
    )
)
places.reset_index()

# %% [markdown]
# Sinks are no rarity in this model, and not all of them are BOS. In some early layers the sink is
# an ordinary word. Is it its position that matters, or the token? Put other texts in front of the
# same layers: two passages that begin elsewhere, and the sample text with every “the” replaced by
# “a”. (128 tokens here, so the counts differ from those above.)

# %%
elsewhere = found[found["position"] > 0]
early = sorted(set(elsewhere["layer"]))
word = tokens[elsewhere["position"].mode()[0]]
passages = text.split("\n\n")
trials = {
    "the sample text": text,
    "from its second paragraph": "\n\n".join(passages[1:]),
    "from its eighth paragraph": "\n\n".join(passages[7:]),
    "every “the” replaced by “a”": text.replace(" the ", " a "),
}
rows = []
for name, trial in trials.items():
    other = lr.capture(model, trial, early, max_tokens=128)
    read = other.prompts[0].tokens
    counted = lr.explain_sinks(other).to_dataframe()["position"].value_counts()
    # Most sinks of these layers are at the first copy of the word, or at BOS where there is none.
    assert counted.index[0] == (read.index(word) if word in read else 0)
    rows.append(
        {
            "text": name,
            f"first {word!r} at": read.index(word) if word in read else None,
            "sinks (position, token: heads)": "; ".join(
                f"{position}, {read[position]!r}: {n}" for position, n in counted.items()
            ),
        }
    )
display(Markdown(f"Sinks in layers {early[0]} to {early[-1]}:"))
with pd.option_context("display.max_colwidth", None):
    display(pd.DataFrame(rows).astype({f"first {word!r} at": "Int64"}))

# %% [markdown]
# The sink follows the first occurrence of that word, wherever it is, and without the word it goes
# back to BOS. So a sink is no property of position 0. We do not find out here why these layers
# treat that token in this way; we only note that “look at position 0” would have missed it. For the
# rest we stay with the head from above, whose sink is BOS.
#
# ## From the pattern to the scores
#
# Attention is a softmax of scores $S$, so the odds of two keys depend on the difference of their
# scores alone:
#
# $$\frac{P[m, s]}{P[m, n]} = \mathrm{e}^{S[m, s] - S[m, n]}$$
#
# How far above the others must the score of the sink $s$ be? If the $N$ other keys all had the same
# score, a share $a$ would take a gap of $\ln\left(N a / (1 - a)\right)$.

# %%
scores = split.scores().astype(np.float64)  # nan where the query does not see the key
queries = np.arange(1, N_TOKENS)  # the first query has no choice
at_sink = scores[queries, 0]
others = np.array([scores[m, 1 : m + 1].mean() for m in queries])
gap, gap_last = (
    np.log((N_TOKENS - 1) * part / (1 - part)) for part in (sink.share, pattern[-1, 0])
)

figure = go.Figure()
for values, name, colour in (
    (at_sink, "the sink", SINK),
    (others, "mean of the other keys", OTHERS),
):
    figure.add_scatter(x=queries, y=values, name=name, mode="lines", line={"color": colour})
styled(figure, "Score of the sink and mean score of the other keys, by query")
figure.update_xaxes(title="query (position)").update_yaxes(title="score (score units)")
figure.update_layout(legend={"orientation": "h", "y": 1.12})
display(
    Markdown(
        f"With {N_TOKENS - 1} equal rivals a share of {sink.share:.2f} takes a gap of {gap:.1f} "
        f"score units. For the last query of this text the gap to the mean of the others is "
        f"{at_sink[-1] - others[-1]:.1f}. It gives the sink {pattern[-1, 0]:.2f}, for which equal "
        f"rivals would take {gap_last:.1f}. The rest is that rivals are not equal: the softmax is "
        f"ruled by the highest of them, not by their mean, so a gap to the mean overstates the "
        f"lead. The sink's own score hardly moves: {at_sink.mean():.1f} on average, with a "
        f"standard deviation of {at_sink.std():.1f}."
    )
)
figure

# %% [markdown]
# **What to look at.** Two things make the gap. The sink's score lies above zero, and the other
# scores lie below zero and sink further as the text grows. So it is a fair question whether this
# head *lifts* the sink or *pushes* the others down.
#
# ## Advantage: the question as a sum over pairs
#
# Scores are sums of contributions $c_i$, so their gaps are sums, too. Take the mean over queries
# $m$ of the contribution at the sink, minus the mean contribution over all $m + 1$ keys that the
# query sees:
#
# $$
# \text{advantage}_i = \text{lift}_i + \text{push}_i, \qquad
# \text{lift}_i = \operatorname{mean}_m c_i[m, s], \qquad
# \text{push}_i = -\operatorname{mean}_m \frac{1}{m + 1} \sum_{n \le m} c_i[m, n]
# $$
#
# A positive lift raises the sink, a positive push holds the keys at large down. Summed over all
# pairs this is, exactly, the same kind of gap, now to the mean of all visible keys, the sink among
# them ([advantage](../docs/mathematics.md#advantage)). Here it is from its definition, beside what
# the package says.

# %%
contributions = split.contributions().astype(np.float64)  # [pair, q_pos, k_pos]
lift = contributions[:, queries, 0].mean(axis=1)
push = -np.nanmean(contributions[:, queries], axis=2).mean(axis=1)
advantage = lift + push

total = (scores[queries, 0] - np.nanmean(scores[queries], axis=1)).mean()
assert np.allclose(advantage.sum(), total, atol=1e-3)  # the pairs add up to the whole
assert np.allclose(advantage, sink.advantage.pairs, atol=1e-3)  # and the package agrees

Markdown(
    f"The sink of layer {LAYER} head {HEAD} has an advantage of **{total:.2f}** score units: "
    f"{lift.sum():.2f} by lifting it and {push.sum():.2f} by pushing the keys at large down. The "
    f"sum over the {len(advantage)} pairs is {advantage.sum():.2f}."
)

# %% [markdown]
# > **A caution about the two words.** A softmax cannot tell a lift from a push; only their sum
# > acts. The split says how the model does it, measured from zero, which is the score of a key at a
# > right angle to the query. If a pair adds 5 to every key alike, its lift is 5, its push is −5 and
# > its advantage 0.
#
# ## The pair that carries it

# %%
best, second = sink.advantage.strongest(2)
pairs = np.arange(len(advantage))
figure = go.Figure()
for values, name, colour in ((lift, "lift", SINK), (push, "push", OTHERS)):
    figure.add_bar(x=pairs, y=values, name=name, marker_color=colour)
styled(figure, "Lift and push of each pair", barmode="relative")
figure.update_xaxes(title="pair, fastest first").update_yaxes(title="score units")
figure.update_layout(legend={"orientation": "h", "y": 1.12})
display(
    Markdown(
        f"Pair **{best}** carries {advantage[best]:.1f} of the {total:.1f}, pair {second} another "
        f"{advantage[second]:.1f}. All other {len(pairs) - 2} pairs together: "
        f"{total - advantage[best] - advantage[second]:.1f}."
    )
)
display(figure)
print(next(said for said in sinks.sentences() if said.startswith(f"Layer {LAYER} head {HEAD} ")))

# %% [markdown]
# That leaves two pairs to explain.
#
# ## How a pair holds everything else down
#
# Read a pair as a complex number: $z_q$ for a query and $z_k$ for a key, before rotation. Over
# tokens each has a mean, the *offset* $\bar z$. Put the two offsets in place of $z_q$ and $z_k$ and
# multiply by the model's scale: what they contribute is a cosine of the distance $\Delta = m - n$
# ([derivation](../docs/mathematics.md#offset-and-content)):
#
# $$A \cos(\varphi + w \Delta)$$
#
# with an amplitude $A$ in score units, the angle $\varphi$ between the two offsets, and the pair's
# angular frequency $w$ in rad per token. *Constancy* (at most 1) says how nearly all queries, or
# all keys, are equal to their offset. The sinks themselves are left out of these means.

# %%
features = lr.offset_features(qk)
of_layer = features.layer(LAYER)
rope = of_layer.rope
# For contrast: of the pairs that turn at least ten times, the one with the largest amplitude.
fast = max(np.flatnonzero(rope.cycles >= 10), key=lambda pair: of_layer.amplitude[HEAD, pair])
chosen = [best, second, int(fast)]
kv_head = of_layer.kv_heads[HEAD]
pd.DataFrame(
    {
        "pair": chosen,
        "wavelength (tokens)": rope.wavelength[chosen].round(),
        f"cycles over {rope.context} tokens": rope.cycles[chosen].round(2),
        "amplitude (score units)": of_layer.amplitude[HEAD, chosen].round(1),
        "angle (π rad)": (of_layer.angle[HEAD, chosen] / np.pi).round(3),
        "query constancy": of_layer.query.constancy[HEAD, chosen].round(3),
        "key constancy": of_layer.key.constancy[kv_head, chosen].round(3),
        "lift": lift[chosen].round(2),
        "push": push[chosen].round(2),
    }
)

# %% [markdown]
# Both slow pairs are nearly constant: almost the same in every query, and almost the same in every
# key. Something the same in every key looks useless, since the softmax ignores what is added to all
# keys. It is useful because of the one key that is different. The next figure shows the keys as
# points. It is turned and scaled so that the horizontal coordinate *is* the contribution at
# distance 0 to the score of the mean query, that is, the points are $s\, \bar z_q z_k^{*}$ with $s$
# the model's scale. With distance a point turns counter-clockwise about the origin, by $w$ rad per
# token.

# %%
record = qk.layer(LAYER)
first, second_half = (np.asarray(part) for part in rope.components)
key = record.k[:, record.kv_head(HEAD)].numpy().astype(np.float64)
turned_back = np.exp(-1j * np.outer(np.arange(N_TOKENS), rope.inv_freq))
keys = (key[:, first] + 1j * key[:, second_half]) * turned_back / rope.attention_factor
points = record.scale * of_layer.query.mean[HEAD] * keys.conj() * rope.attention_factor**2
cloud = points[1:].mean(axis=0)[chosen[:2]]
assert np.allclose(abs(cloud), of_layer.amplitude[HEAD, chosen[:2]], rtol=1e-3)  # A ...
assert np.allclose(np.angle(cloud), of_layer.angle[HEAD, chosen[:2]], atol=1e-3)  # ... and phi

figure = make_subplots(1, 2, subplot_titles=[f"pair {pair}" for pair in chosen[:2]])
for column, pair in enumerate(chosen[:2], start=1):
    for where, name, colour, size in (
        (slice(1, None), "all other keys", OTHERS, 5),
        (slice(0, 1), "the sink (BOS)", SINK, 12),
    ):
        figure.add_scatter(
            x=points[where, pair].real,
            y=points[where, pair].imag,
            mode="markers",
            name=name,
            marker={"color": colour, "size": size, "opacity": 0.8},
            showlegend=column == 1,
            row=1,
            col=column,
        )
    top = 1.1 * abs(points[:, pair]).max()
    figure.update_xaxes(title="contribution (score units)", range=[-top, top], row=1, col=column)
    figure.update_yaxes(range=[-top, top], row=1, col=column)
styled(figure, "Keys of two pairs in the complex plane", height=400)
figure.update_layout(legend={"orientation": "h", "y": 1.24}, margin_t=80)

# %% [markdown]
# **What to look at.** Right of the vertical line through 0 a key is lifted, left of it it is pushed
# down.
#
# - *Left:* the keys form a cloud on the far side from the query, and BOS lies on the query's own
#   side. This pair pushes the others down and lifts the sink as well.
# - *Right:* the cloud is large and stands at little more than a right angle, so it contributes
#   something moderately negative. BOS has almost nothing in this pair. It is not lifted at all; it
#   escapes the push.
#
# The pair with the largest amplitude is the one on the right, and it is not the one that carries
# most of the sink. Amplitude is what a pair *could* contribute; the angle decides what it does
# contribute.
#
# What is missing is the rotation. Pushing down is of use only if it holds at every distance.

# %%
distance = np.arange(rope.context + 1)
curves = of_layer.amplitude[HEAD] * np.cos(of_layer.angle[HEAD] + np.outer(distance, rope.inv_freq))
measured = split.by_distance()
figure = go.Figure()
for pair, colour in zip(chosen, (SINK, OTHERS, QUIET), strict=True):
    width = 1 if pair == fast else 2.5
    figure.add_scatter(
        x=distance[::4],
        y=curves[::4, pair],
        name=f"pair {pair}",
        mode="lines",
        line={"color": colour, "width": width},
    )
figure.add_hline(y=0, line={"color": QUIET, "dash": "dot"})
figure.add_vrect(x0=0, x1=N_TOKENS, fillcolor=QUIET, opacity=0.3, line_width=0)
styled(figure, "Offset curves of three pairs over the whole context")
figure.update_xaxes(title="distance (tokens)").update_yaxes(title="contribution (score units)")
figure.update_layout(legend={"orientation": "h", "y": 1.12})

# Over the distances of this text the curve is what all keys but the sink get on average.
near = np.arange(1, 100)
without_sink = [
    np.mean([contributions[best, m, m - d] for m in range(d + 1, N_TOKENS)]) for d in near
]
assert np.allclose(without_sink, curves[near, best], atol=0.3)
assert curves[:, [best, second]].max() < 0  # both stay negative, at every distance
display(
    Markdown(
        f"Over all distances up to {rope.context} tokens, pair {best} stays between "
        f"{curves[:, best].min():.1f} and {curves[:, best].max():.1f}, and pair {second} between "
        f"{curves[:, second].min():.1f} and {curves[:, second].max():.1f}. Pair {fast} crosses "
        f"zero {np.count_nonzero(np.diff(np.sign(curves[:, fast])))} times."
    )
)
figure

# %% [markdown]
# **What to look at.** A pair that turns often must lift some keys, whatever its angle: its cosine
# is positive half of the time. A pair can push *every* key down only if it starts at an angle of at
# least $\pi/2$ and then turns so little, at most half a cycle over the whole context, that it never
# comes out again. The grey band at the left is all that this text covers. Why these two bounds
# follow, and how well they hold over the whole model, is
# [tutorial 5](5_offset_features_and_bounds.py).
#
# ## Taking the pair away, on paper
#
# If the pair carries the sink, the sink should go with it. First the arithmetic: subtract the
# contributions of the pair from the scores and form the softmax again. The control is the same with
# each of the other pairs, of which we take the median.


# %%
def share_of_sink(scores: np.ndarray) -> float:
    """Mean attention to key 0; nan scores are keys that are not seen."""
    weights = np.exp(scores - np.nanmax(scores, axis=1, keepdims=True))
    return float((weights[:, 0] / np.nansum(weights, axis=1)).mean())


assert np.isclose(share_of_sink(scores), sink.share, atol=1e-4)
assert np.isclose(share_of_sink(scores - contributions[best]), sink.share_without_best, atol=1e-4)
pd.DataFrame(
    {
        "removed": [
            "nothing",
            f"pair {best}",
            f"pair {second}",
            f"pairs {best} and {second}",
            "another pair than the best (median)",
        ],
        "sink share": [
            sink.share,
            sink.share_without_best,
            share_of_sink(scores - contributions[second]),
            sink.share_without_two,
            sink.control_share,
        ],
    }
).round(3)

# %% [markdown]
# Now the same for all sink heads, each without its own best pair.

# %%
sinks.plot()

# %%
stand = found[found["share_without_best"] >= 0.1]
slow = (found["cycles"] <= 0.5).mean()
assert slow == 1  # every best pair is a slow one
rate = np.mean([entry.rope.cycles <= 0.5 for entry in sinks.heads])
# A pair beside the best that would do as well, the sink falling below the threshold:
rivals = sum(np.delete(e.share_without, e.best_pair).min() < 0.3 for e in sinks.heads)
display(
    Markdown(
        f"In {slow:.0%} of the sink heads the best pair turns at most half a cycle over the "
        f"context; {rate:.0%} of all pairs do. {len(found) - len(stand)} of the {len(found)} "
        f"sinks fall below 0.1 without it, and the control keeps more than half of the share in "
        f"{(found['control_share'] > found['sink_share'] / 2).sum()}. In {rivals} heads some "
        f"other single pair, taken alone, also brings the share below the threshold of 0.3: the "
        f"median says what a *typical* pair does. These are the {len(stand)} sinks that do not "
        f"fall below 0.1:"
    )
)
columns = ["layer", "head", "position", "sink_share", "best_pair"]
stand[[*columns, "share_without_best", "share_without_two", "control_share"]].round(3)

# %% [markdown]
# In these the sink rests on more than one pair: see the column without the two best.
#
# Be careful with what this shows. The pair was *chosen* for its large advantage, so that the share
# falls is close to arithmetic; what is not arithmetic is that one pair is nearly always enough, and
# that it is a slow one. A typical other pair does next to nothing; a strong one often ends the sink
# as well. And nothing in the model answered. To let it, change the model.
#
# ## Taking it away in the running model: one head
#
# [`lr.ablate_frequencies`](../docs/api/ablation.md) runs the model with some pairs of some heads
# changed. With `how="zero"` a pair of the head's query is set to zero, so its contribution to all
# scores of this head is gone, and no other head is touched.
# [`lr.ablation_report`](../docs/api/ablation.md) does this, measures loss and attention, and does
# it again with random other pairs.

# %%
one = lr.ablation_report(
    model, text, {(LAYER, HEAD): [best]}, max_tokens=N_TOKENS, controls=1, seed=0
)
effect = one.heads[0]
# Nothing below this layer changed, so here the model must agree with the arithmetic.
assert np.isclose(effect.sink_after, sink.share_without_best, atol=1e-4)
Markdown(
    f"Without pair {best} the sink share of layer {LAYER} head {HEAD} falls from "
    f"{effect.sink_before:.2f} to {effect.sink_after:.2f} (with a random other pair: "
    f"{effect.sink_control:.2f}), and the loss goes from {one.loss_before:.3f} to "
    f"{one.loss_after:.3f} nats/token. One sink in one head is hardly missed."
)

# %% [markdown]
# ## All sinks at once

# %%
report = lr.ablation_report(
    model, text, sinks.best_pairs(), max_tokens=N_TOKENS, controls=2, seed=0
)
for said in report.sentences():
    print(said)

# %%
report.plot()

# %% [markdown]
# One pair in each of these heads, and the loss rises far more than with as many random pairs. (They
# are not matched in size; the last table has larger ones.) Two things are worth a second look.
#
# *The model does not follow the arithmetic any more.* Each layer now reads what changed layers
# wrote, so its queries and keys are others.

# %%
both = report.to_dataframe().merge(found, on=["layer", "head"])
grew = both[both["sink_after"] > both["sink_before"]]
display(
    Markdown(
        f"On paper {(both['share_without_best'] < 0.1).sum()} of {len(both)} sinks fall below "
        f"0.1, in the running model {(both['sink_after'] < 0.1).sum()}. {len(grew)} sinks even "
        f"grew:"
    )
)
grew[["layer", "head", "sink_before", "sink_after", "share_without_best"]].round(3)

# %% [markdown]
# *A higher loss does not say what the pair is for.* Setting a pair to zero takes away its constant
# part, its variation from token to token, and its rotation. Which of them does the model miss? Two
# other interventions take away less:
#
# - `how="mean"` sets the pair of every query to its offset. The constant part of the query and the
#   rotation stay; what varies in the query is gone. The keys stay as they are.
# - `how="unrotate"` leaves the values as they are and stops the pair from turning, in queries and
#   keys. Heads of one group share their keys, so the pair has to be named for all heads of the
#   group.
#
# And a better control: zero in each head the pair that contributes most (root mean square) among
# the others. Inside the context the model is a TransformerLens model as ever, so we read its loss
# and its patterns with `run_with_cache`.


# %%
def group_of(layer: int, head: int) -> list[tuple[int, int]]:
    """The query heads that share a key head with this one."""
    size = qk.model.n_heads // qk.model.n_kv_heads
    return [(layer, head // size * size + i) for i in range(size)]


def for_groups(pairs: dict) -> dict:
    """The pairs of each head, for all heads of its group."""
    named: dict = {}
    for at, some in pairs.items():
        for member in group_of(*at):
            named.setdefault(member, set()).update(some)
    return {at: sorted(some) for at, some in named.items()}


grouped = for_groups(sinks.best_pairs())
rng = np.random.default_rng(0)
random_pairs = {}  # as many other pairs for each group
for at, some in grouped.items():
    leader = group_of(*at)[0]
    if leader not in random_pairs:
        rest = [pair for pair in range(rope.n_pairs) if pair not in some]
        random_pairs[leader] = [int(pair) for pair in rng.choice(rest, len(some), replace=False)]
    random_pairs[at] = random_pairs[leader]

largest_other, sizes = {}, []  # rms of contributions, relative to that of the best pair
for s in sinks.heads:
    rms = lr.decompose(qk, s.layer, s.head).by_pair().rms
    rest = np.delete(np.arange(len(rms)), s.best_pair)
    other_pair = int(rest[rms[rest].argmax()])
    largest_other[s.layer, s.head] = [other_pair]
    sizes.append([rms[other_pair], np.median(rms[rest])] / rms[s.best_pair])
largest_size, typical_size = np.median(sizes, axis=0)

token_ids = torch.tensor([qk.prompts[0].token_ids])


def measured_now() -> tuple[float, float]:
    """Loss in nats per token, and which part of the sinks lies below 0.1."""
    with torch.inference_mode():
        loss, cache = model.run_with_cache(
            token_ids, return_type="loss", names_filter=lambda name: name.endswith("hook_pattern")
        )
    shares = [
        float(
            cache[f"blocks.{s.layer}.attn.hook_pattern"][0, s.head, s.position :, s.position].mean()
        )
        for s in sinks.heads
    ]
    return float(loss), float(np.mean(np.array(shares) < 0.1))


losses = {"the model as it is": (report.loss_before, 0.0)}
losses["zero: best pair of each sink head"] = (report.loss_after, report.collapsed().collapsed)
losses["zero: random pairs (mean of the draws)"] = (
    float(np.mean(report.loss_controls)),
    report.collapsed().control_collapsed,
)
for name, pairs_now, how, offsets in (
    ("zero: the largest other pair of each head", largest_other, "zero", None),
    ("mean: best pairs", sinks.best_pairs(), "mean", features),
    ("unrotate: best pairs, in their groups", grouped, "unrotate", None),
    ("unrotate: random pairs, in the same groups", random_pairs, "unrotate", None),
):
    with lr.ablate_frequencies(model, pairs_now, how, offsets=offsets):
        losses[name] = measured_now()

table = pd.DataFrame(losses, index=["loss (nats/token)", "sinks below 0.1"]).T
table.round(3)

# %%
loss, ended = table["loss (nats/token)"], table["sinks below 0.1"]
base, zeroed, by_chance, by_size, mean_loss, freed, freed_random = loss
assert ended.iloc[1] > 2 * ended.iloc[3] and by_size > by_chance
assert by_chance < mean_loss < by_size
assert mean_loss - base < 0.5 * (zeroed - base)
assert freed - base < 0.5 * (freed_random - base)
first_turning = min(pair for pairs in sinks.best_pairs().values() for pair in pairs)
deg = np.degrees(rope.inv_freq[first_turning] * (N_TOKENS - 1))
Markdown(
    f"""**What to look at.** Compare with the first row.

- *Size counts.* Zeroing the best pairs costs {zeroed - base:.2f} nats per token, random pairs
  {by_chance - base:.2f}. But most pairs contribute little: the median pair has {typical_size:.2f}
  of the best pair's size. The largest other pairs, at {largest_size:.2f} of it, cost
  {by_size - base:.2f}. They end far fewer sinks, {ended.iloc[3]:.0%} against {ended.iloc[1]:.0%}.
- With the queries' pair at its *mean*, the sinks stay and most of the loss comes back. What the
  sinks need is the constant part of the *query*: it asks the same of the keys at every token. Its
  variation is worth another {mean_loss - base:.2f}, more than as many random pairs zeroed.
- With the best pairs *freed from rotation* the loss hardly moves ({freed - base:.3f}). It could
  not: over {N_TOKENS} tokens the fastest of them turns by {deg:.0f} degrees. So this does not tell
  a fixed direction from a slow clock; that would need a text near the length of the context. Random
  pairs, fast ones among them, do turn, and freeing them costs more ({freed_random - base:.2f})."""
)

# %% [markdown]
# ## What was shown, and what was not
#
# Shown, on this model and this text:
#
# - A sink is a gap between scores, and the gap splits exactly over pairs into lift and push.
# - In the head we looked at, two slow pairs make nearly all of it: one by holding the other keys
#   down and lifting BOS, one by a push that BOS escapes. In every sink head the best pair is a slow
#   one.
# - Taking that pair away ends most sinks, on paper and in the running model, and random other
#   pairs, most of which contribute little, do not. Large other pairs cost much as well, and end
#   fewer sinks.
# - What the sinks need is the constant part of the query in that pair.
#
# Not shown:
#
# - That this holds elsewhere: this is one model and the beginning of one text.
#   [What two models show](../docs/findings.md) has longer texts and a second model, in which one
#   pair is seldom the whole sink.
# - That heads are independent. Several query heads share a key head, so the number of sink heads is
#   not a number of independent cases.
# - That the best pair is special beyond its size. The random pairs are not matched in size, and the
#   largest other pairs, whose loss comes nearer, are still smaller than the best.
# - Whether these pairs serve as a fixed direction or as a slow clock: over this length they hardly
#   turn.
# - That the loss rises *because* the sinks are gone. Zeroing takes the pair away at all keys, and
#   later layers have never seen what they then read.
# - Why BOS, or in early layers the first “the”, has such different keys. Here that is where the
#   explanation ends.
#
# Definitions: [sink share](../docs/mathematics.md#sink-share),
# [advantage](../docs/mathematics.md#advantage), [removal](../docs/mathematics.md#removal). On the
# command line: `lens-rope sinks` and `lens-rope ablate`.
#
# Next: [4. Positional heads and content heads](4_positional_and_content_heads.py).
