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
# # 2. One score, frequency by frequency
#
# **Question.** In SmolLM2-135M, head 0 of layer 16 reads "the tall oak clock" and sends most of
# the attention of " clock" to " oak". Why so strongly, and why to that key?
#
# An attention score is a sum over rotary pairs, so the question can be put to each pair: how much
# did *you* add? This page takes one score apart, and then takes care that the parts are read for
# what they are. It assumes what [tutorial 1](1_reading_rotary_qk.py) shows: pairs as arrows, and
# what the rotation does to them.

# %%
import numpy as np
import pandas as pd
import plotly.graph_objects as go
from IPython.display import Markdown

import lens_rope as lr

LAYER, HEAD = 16, 0
model = lr.load_model("smollm2-135m")
qk = lr.capture(model, lr.sample_text(), layers=[LAYER], max_tokens=512)
d = lr.decompose(qk, LAYER, HEAD)
print(qk)

# %% [markdown]
# ## The score to explain
#
# The words stand twice in the text. We take the second place.

# %%
tokens = qk.prompts[0].tokens
query = [i for i in range(1, len(tokens)) if tokens[i - 1 : i + 1] == (" oak", " clock")][1]
key = query - 1
scores, attention = d.scores()[query, : query + 1], d.pattern()[query, : query + 1]

row = pd.DataFrame({"key": range(query + 1), "token": tokens[: query + 1]})
row["score"], row["attention"] = scores, attention
row.sort_values("attention", ascending=False, ignore_index=True).head(6).round(4)

# %%
rival = key - 1
assert list(np.argsort(-attention)[:3]) == [key, rival, 0]
Markdown(
    f"Query {query} gives {attention[key]:.0%} of its attention to key {key}. Yet the score is "
    f"{scores[key]:.2f}, not a large number. What is large is the gap: over all the keys that "
    f"this query sees the mean score is {scores.mean():.1f}. Second, with {attention[rival]:.0%}, "
    f"comes the token before, key {rival}. Third, with {attention[0]:.0%}, is the first token of "
    f"the prompt. Its score is {scores[0]:.2f}. Keep all this in mind."
)

# %% [markdown]
# ## One score, one number per pair
#
# With the rotated pairs of query and key as complex numbers, the
# [contribution](../docs/mathematics.md#contribution) of pair $i$ is
#
# $$c_i[m, n] = \text{scale} \cdot \operatorname{Re}(z^R_{q,i}[m] \cdot \overline{z^R_{k,i}[n]})$$
#
# [`.at`](../docs/api/decomposition.md) gives all of them for one query and one key:

# %%
score = d.at(query=query, key=key)
score

# %% [markdown]
# Look at the figure from left to right: fast pairs add, slow pairs take away. The largest bar of
# all is *negative*.
#
# First, do the parts make the whole? They have to sum to the model's own score. The capture
# verified that when it was made, and it takes a few lines to see it again at the model's own hook:

# %%
hook = f"blocks.{LAYER}.attn.hook_attn_scores"
_, cache = model.run_with_cache(
    model.to_tokens(lr.sample_text())[:, : len(tokens)], names_filter=[hook]
)
model_score = float(cache[hook][0, HEAD, query, key])
assert abs(score.contribution.sum() + score.pass_through - model_score) < 1e-4
assert abs(score.score - model_score) < 1e-4
print(f"sum of {len(score.contribution)} contributions: {score.contribution.sum():.5f}")
print(f"pass-through (components that no pair turns): {score.pass_through:.5f}")
print(f"the model's own score: {model_score:.5f}")

# %% [markdown]
# *Conservation* is what makes the split worth reading: nothing is left over, and nothing was
# fitted. (A model with soft-cap or mask applies them after this sum. In this model all components
# are turned, so there is no pass-through.)

# %% [markdown]
# ## What a negative contribution is
#
# A contribution is the product of two lengths and the cosine of the angle between two arrows. When
# the arrows of query and key stand less than a right angle apart, the pair raises the score. When
# they stand further apart, it lowers the score. By hand, from the arrays in the capture:

# %%
record, rope = d.record, d.rope
positions = np.arange(len(tokens))


def pairs_of(x):
    """[position, component] as [position, pair], complex."""
    first, second = rope.components
    return x.double().numpy()[:, first] + 1j * x.double().numpy()[:, second]


rotated_q = pairs_of(record.q[:, HEAD])
rotated_k = pairs_of(record.k[:, record.kv_head(HEAD)])
z_q, z_k = rotated_q[query], rotated_k[key]
by_hand = record.scale * np.abs(z_q) * np.abs(z_k) * np.cos(np.angle(z_q * z_k.conj()))
assert np.allclose(by_hand, score.contribution, atol=1e-4)

table = pd.DataFrame(
    {
        "wavelength (tokens)": rope.wavelength,
        "query length": np.abs(z_q),
        "key length": np.abs(z_k),
        "angle (degrees)": np.degrees(np.abs(np.angle(z_q * z_k.conj()))),
        "contribution": by_hand,
    }
).rename_axis("pair")
strongest = np.argsort(-np.abs(score.contribution))[:6]
table.loc[strongest].round(2)

# %%
low, high = int(score.contribution.argmin()), int(score.contribution.argmax())
assert score.contribution[low] < 0 < score.contribution[high]
Markdown(
    f"In pair {high} query and key point nearly the same way. In pair {low} they point "
    f"{np.degrees(np.abs(np.angle(z_q[low] * z_k[low].conj()))):.0f} degrees apart, both arrows "
    f"are long, and the pair takes {-score.contribution[low]:.1f} from the score."
)

# %% [markdown]
# Does the head then attend to " oak" *in spite of* that pair? It is tempting to say so, and it
# would be wrong. To see why, look at what the same two pairs contribute to the scores of all the
# *other* keys of this query. `contributions(pairs=..., queries=...)` gives an array
# `[pair, query, key]`:

# %%
two = d.contributions(pairs=[high, low], queries=[query])[:, 0, : query + 1]
lines = go.Figure()
for values, pair in zip(two, [high, low], strict=True):
    lines.add_scatter(
        x=np.arange(query + 1),
        y=values,
        mode="lines+markers",
        marker_size=5,
        customdata=tokens[: query + 1],
        hovertemplate="key %{x} “%{customdata}”<br>%{y:.2f} score units",
        name=f"pair {pair} (wavelength {rope.wavelength[pair]:,.1f} tokens)",
    )
lines.add_vline(x=key, line_dash="dot", annotation_text="the key asked about")
lines.update_layout(
    template="plotly_white",
    height=360,
    xaxis_title=f"key position (query at {query})",
    yaxis_title="contribution (score units)",
    legend={"orientation": "h", "y": 1.15},
)
lines

# %%
flat = two[1, 1:]
Markdown(
    f"Pair {low} takes about the same from every key: {flat.mean():.1f} on average, with a "
    f"standard deviation of {flat.std():.1f}. The one exception is key 0, to which it gives "
    f"{two[1, 0]:+.1f}. Pair {high} goes up and down with the key, between {two[0].min():.1f} and"
    f" {two[0].max():.1f}."
)

# %% [markdown]
# ## The softmax sees differences only
#
# Add the same number to all scores of a query, and its attention does not change. So a contribution
# that is equal for all keys does nothing, however large it is. What counts is how a contribution
# *differs* between the keys of one row.
#
# The direct test is to take a pair out of the row and to form the softmax again. This is exact for
# this head and this row, and says nothing about what the rest of the model would do.

# %%
every = d.contributions(queries=[query])[:, 0, : query + 1].astype(float)


def softmax(row):
    """Attention of one row of scores."""
    weights = np.exp(row - row.max())
    return weights / weights.sum()


def attention_without(pairs):
    """The row's attention when some pairs contribute nothing."""
    return softmax(np.delete(every, pairs, axis=0).sum(axis=0))


assert np.allclose(softmax(scores + 100), softmax(scores), atol=1e-5)  # a constant does nothing
assert np.allclose(attention_without([]), attention, atol=1e-5)

removed = pd.DataFrame(
    {
        name: {
            f"to key {key}": weights[key],
            "to key 0": weights[0],
            "to all others": 1 - weights[key] - weights[0],
        }
        for name, weights in {
            "as it is": attention_without([]),
            f"without pair {low}": attention_without([low]),
            f"without pair {high}": attention_without([high]),
        }.items()
    }
).T
removed.round(3)

# %%
assert removed.iloc[1, 1] < 0.01 and removed.iloc[2, 0] < 0.5 * removed.iloc[0, 0]
Markdown(
    f"Without pair {low}, the largest contribution of all, key {key} keeps most of its attention "
    f"({removed.iloc[0, 0]:.2f} before, {removed.iloc[1, 0]:.2f} after), and key 0 loses all of "
    f"its own ({removed.iloc[0, 1]:.3f} before, {removed.iloc[1, 1]:.6f} after). So this pair "
    "does not choose among the words. It holds all of them down against key 0, so that key 0 is "
    f"there when no other key matches: an attention sink. Without pair {high} key {key} is left "
    f"with {removed.iloc[2, 0]:.2f}."
)

# %% [markdown]
# (How models make such sinks is the subject of [tutorial 3](3_attention_sinks.py).) A number per
# pair that has this built in is the contribution *minus its mean over the keys that the query
# sees*. For one query and one key this is the [advantage](../docs/mathematics.md#advantage). It
# also sums to something known: the score minus the row's mean score.

# %%
gained = every[:, key] - every.mean(axis=1)
assert np.isclose(gained.sum(), scores[key] - scores.mean(), atol=1e-3)
compared = pd.DataFrame({"contribution": every[:, key], "minus mean over keys": gained})
compared.insert(0, "wavelength (tokens)", rope.wavelength)
compared.rename_axis("pair").sort_values("minus mean over keys", ascending=False).head(8).round(2)

# %%
best = np.argsort(-gained)[:3]
Markdown(
    f"The answer for this score, then: key {key} stands {gained.sum():.1f} score units above the "
    f"mean of its row, and {gained[best].sum():.1f} of them come from pairs "
    f"{', '.join(str(pair) for pair in best)}. Pair {low}, first by size, gives "
    f"{gained[low]:.2f}."
)

# %%
over_rival, over_first = every[:, key] - every[:, rival], every[:, key] - every[:, 0]
assert np.argmax(over_rival) == high and np.argmin(over_first) == low
Markdown(
    "The mean of the row is one yardstick, a rival another. Over the nearest rival, key "
    f"{rival} (“{tokens[rival].strip()}”), key {key} leads by {over_rival.sum():.1f}: pair "
    f"{high} alone makes {over_rival[high]:+.1f}, and all other pairs together "
    f"{over_rival.sum() - over_rival[high]:+.1f}. Over key 0 it leads by "
    f"{over_first.sum():.1f}. Against that rival pair {low} counts {over_first[low]:+.1f}, and the "
    f"others have to make up for it, pair {high} with {over_first[high]:+.1f}."
)

# %% [markdown]
# ## All scores of the head, by pair
#
# One score is one score. Over all queries and keys of the prompt, `by_pair` gives three numbers per
# pair:
#
# - **mean**: the mean contribution. It is where the pair puts scores at large.
# - **rms**: the root mean square of the contribution, its typical size, of either sign.
# - **share**: the share of the variance *within rows* that the pair carries,
#   $\sum c_i (s - \bar s) / \sum (s - \bar s)^2$, where $\bar s$ is the mean score of the query's
#   row.
#
# The first two count what the softmax cannot see. The share does not.

# %%
summary = d.by_pair()
assert np.isclose(summary.share.sum() + summary.pass_through_share, 1)
summary

# %%
pairs = summary.to_dataframe()
by_rms, by_share = pairs.loc[pairs["rms"].idxmax()], pairs.loc[pairs["share"].idxmax()]
assert by_rms["pair"] == low and by_share["pair"] == high
Markdown(
    f"Pair {low} has by far the largest contributions (rms {by_rms['rms']:.1f}) and carries "
    f"{by_rms['share']:.1%} of the variance. Pair {high} is smaller (rms {by_share['rms']:.1f}) "
    f"and carries {by_share['share']:.0%}. What was true of one score is true of the head."
)

# %% [markdown]
# Shares sum to 1, and that is about all that they have in common with percentages of a cake.
# Contributions of different pairs are correlated, and the share of a pair is a covariance: its own
# variance, plus half of what it shares with every other pair. So a share can be negative (the pair
# works against the rest), and it can exceed 1 (others work against it). Two made-up pairs show
# both:

# %%
x = np.array([-1.0, 0.0, 1.0])
opposed = np.array([2 * x, -x])  # the second undoes half of the first
total = opposed.sum(axis=0)
toy = (opposed * total).sum(axis=1) / (total**2).sum()
assert np.allclose(toy, [2, -1])
print("shares of two opposed pairs:", toy)

# %% [markdown]
# In this layer, how far from a cake is it? For every head, the smallest and the largest share, and
# the sum of the pairs' *own* variances, which would be 1 if contributions were uncorrelated:

# %%
visible = record.visible.numpy()


def within_rows(x):
    """x minus its mean over the keys of each row, nan elsewhere."""
    x = np.where(visible, x, np.nan)
    return x - np.nanmean(x, axis=1, keepdims=True)


rows = []
for head in range(record.n_heads):
    other = lr.decompose(qk, LAYER, head)
    centred = (np.nansum(within_rows(c) ** 2) for c in other.contributions())
    own = sum(centred) / np.nansum(within_rows(other.scores()) ** 2)
    share = other.by_pair().share
    rows.append((head, share.min(), share.max(), own))
shares = pd.DataFrame(rows, columns=["head", "smallest share", "largest share", "own variances"])
shares.round(4)

# %%
negative = int((shares["smallest share"] < 0).sum())
Markdown(
    f"{negative} of {len(shares)} heads have a pair with a negative share; the lowest is "
    f"{shares['smallest share'].min():.3f}. The largest share is "
    f"{shares['largest share'].max():.2f}, so none exceeds 1 here. Own variances sum to "
    f"{shares['own variances'].min():.2f} to {shares['own variances'].max():.2f}: where the sum "
    "is below 1, pairs rise and fall together, and part of the variance belongs to no pair "
    "alone."
)

# %% [markdown]
# ## By distance
#
# Each pair turns with distance, so the mean contribution at each distance shows what a pair does
# for the head as a ruler. `by_distance` averages over all queries and keys that are $\Delta$ tokens
# apart.

# %%
profile = d.by_distance()
profile

# %% [markdown]
# The total has its peak at distance 1, the previous token. The curve of the fastest pair shows why
# one pair is not enough: its peaks repeat every wavelength, about 6.3 tokens, so from distance 1
# the next is near 7, then 14. Yet the head does not attend to the key seven tokens back. What
# prevents it?

# %%
fast, partial = rope.wavelength < 32, rope.cycles < 1
bands = {
    "fast: wavelength below 32 tokens": fast,
    "middle": ~fast & ~partial,
    "partial cycles": partial,
}
shown = [0, 1, 2, 3, 4, 7, 13, 20]
by_band = pd.DataFrame(
    {
        f"{name} ({int(chosen.sum())} pairs)": profile.mean[shown][:, chosen].sum(axis=1)
        for name, chosen in bands.items()
    },
    index=pd.Index(shown, name="distance"),
)
by_band["total"] = by_band.sum(axis=1)
by_band.insert(0, f"pair {high} alone", profile.mean[shown, high])
assert np.allclose(by_band["total"], profile.total[shown], atol=1e-3)
by_band.round(2)

# %%
near, seven, twenty = by_band.loc[1], by_band.loc[7], by_band.loc[20]
names = list(by_band.columns[1:4])
assert twenty.iloc[0] > 0.9 * near.iloc[0] and twenty[names[0]] > 0.75 * near[names[0]]
assert twenty[names[1]] < 0.25 * near[names[1]]
Markdown(
    f"From distance 1 to distance 7 pair {high} loses {near.iloc[0] - seven.iloc[0]:.1f}. The "
    f"fast band as a whole loses {near[names[0]] - seven[names[0]]:.1f}: its other pairs have "
    "other wavelengths, agree at distance 1 and no longer at 7. The middle band loses "
    f"{near[names[1]] - seven[names[1]]:.1f}. The partial cycles lose "
    f"{near[names[2]] - seven[names[2]]:.1f}; they stand near {by_band[names[2]].mean():.0f} at "
    f"all of these distances.\n\nAt distance 20 it is the other way round: pair {high} has come "
    f"back, and the fast band nearly so ({twenty[names[0]]:.1f} of {near[names[0]]:.1f}). By then "
    f"the middle band has lost {near[names[1]] - twenty[names[1]]:.1f} of its "
    f"{near[names[1]]:.1f}, and the total stays {near['total'] - twenty['total']:.1f} below "
    "that of distance 1."
)

# %% [markdown]
# Several clocks that all agree at one moment only: where fast ones meet again, slower ones have
# moved on. That is how a sum of waves makes a single peak. *Bands* are only sums of pairs. The
# borders chosen here (32 tokens, one cycle) are ours.

# %% [markdown]
# ## The same two vectors, elsewhere
#
# `by_distance` averages over many queries and keys, so content is mixed in. `lr.distance_curve`
# asks a narrower question: keep *this* query and *this* key exactly as they are before the
# rotation, and change only how far apart they stand.

# %%
curve = lr.distance_curve(qk, LAYER, HEAD, query=query, key=key)
assert np.isclose(curve.score, score.score, atol=1e-4)
curve

# %%
lower = int((curve.total < curve.score - 1e-9).sum())
assert curve.distance[curve.total.argmax()] == query - key
Markdown(
    f"Of the distances 0 to {int(curve.distance[-1]):,} the score is highest at "
    f"{int(curve.distance[curve.total.argmax()])}, where the two stand, and lower at all the "
    f"other {lower:,}. At distance 2 it would be {curve.total[2]:.2f}, at distance 100 "
    f"{curve.total[100]:.2f}. So it is not the word “oak” by itself that draws this query: it has"
    " to stand right before it."
)

# %% [markdown]
# The figure has a logarithmic axis. Where it is dense, a line gives the mean of a bin and a band
# its lowest and highest value; fast pairs turn many times within a bin.
#
# Distances beyond the prompt are an extrapolation in one sense: the rotation is exactly what the
# model would do, but a query that far away would hold something else.

# %% [markdown]
# ## Before the rotation, and after
#
# What is the content of a pair, apart from where it stands? Undo the rotation:
# $z = z^R \cdot e^{-jwm}$ ([before rotation](../docs/mathematics.md#before-rotation)).

# %%
phase = np.exp(1j * np.outer(positions, rope.inv_freq))
before_q, before_k = rotated_q / phase, rotated_k / phase  # the attention factor is 1 here
assert rope.attention_factor == 1

unturned = record.scale * (before_q[query] * before_k[key].conj()).real
assert np.isclose(unturned.sum(), curve.total[0], atol=1e-4)  # the same as at distance 0
print(f"score without any rotation: {unturned.sum():.2f}   as in the model: {score.score:.2f}")

# %% [markdown]
# Without rotation the score is what the curve above has at distance 0, since the rotations of query
# and key cancel there. One token of distance makes the difference. Below are the keys of all tokens
# in the fastest of the strong pairs, as points in the plane, after the rotation and before it:

# %%
from plotly.subplots import make_subplots

panels = make_subplots(1, 2, subplot_titles=["after the rotation", "before the rotation"])
for column, z in enumerate([rotated_k[1:, high], before_k[1:, high]], start=1):
    points = go.Scatter(
        x=z.real,
        y=z.imag,
        mode="markers",
        marker={"size": 4, "color": "#2b6f91", "opacity": 0.6},
        customdata=tokens[1:],
        hovertemplate="“%{customdata}”<extra></extra>",
    )
    panels.add_trace(points, row=1, col=column)
reach = 1.1 * np.abs(rotated_k[1:, high]).max()
panels.update_xaxes(range=[-reach, reach], title=f"first component of pair {high}")
panels.update_yaxes(range=[-reach, reach], scaleanchor="x", title="second component", col=1)
panels.update_yaxes(range=[-reach, reach], scaleanchor="x2", col=2)
panels.update_layout(template="plotly_white", height=420, showlegend=False)
panels

# %%
z = before_k[1:, high]
constancy = np.abs(z.mean()) / np.abs(z).mean()
after = np.abs(rotated_k[1:, high].mean()) / np.abs(z).mean()
assert constancy > 0.8 > after
Markdown(
    "After the rotation the keys lie all around the circle, as positions do. Before it they lie "
    f"together: whatever the token, the key of pair {high} points the same way. The length of "
    f"their mean over their mean length, the *constancy*, is {constancy:.2f} before the rotation "
    f"and {after:.2f} after it."
)

# %% [markdown]
# ## Offset and content: four parts by hand
#
# The [constancy](../docs/glossary.md#constancy) near 1 suggests to write every query and key as a
# constant plus a rest. The constant is the mean over tokens, the
# [*offset*](../docs/mathematics.md#offset-and-content) $\bar z$; the rest, $z - \bar z$, is
# *content*. A product of two sums has four terms:
#
# - **offset·offset** depends on distance alone: it is purely positional;
# - **offset·content**: what this key holds, seen by the mean query;
# - **content·offset**: what this query holds, seen by the mean key;
# - **content·content**: what both hold together.
#
# The first token is left out of the means, because it is a sink and holds something else than
# tokens do.

# %%
mean_q, mean_k = before_q[1:].mean(axis=0), before_k[1:].mean(axis=0)
assert np.allclose(mean_q, lr.offset_features(qk).query_offset(LAYER, HEAD), atol=1e-4)

turn = np.exp(1j * rope.inv_freq * (query - key))
query_parts = {"offset": mean_q, "content": before_q[query] - mean_q}
key_parts = {"offset": mean_k, "content": before_k[key] - mean_k}
parts = {
    f"{of_q}·{of_k}": record.scale * (x * y.conj() * turn).real
    for of_q, x in query_parts.items()
    for of_k, y in key_parts.items()
}
assert np.allclose(sum(parts.values()), score.contribution, atol=1e-4)  # exact for every pair

by_part = pd.DataFrame(parts).rename_axis("pair").loc[[high, 1, low]]
by_part.loc["all pairs"] = pd.DataFrame(parts).sum()
by_part["sum"] = by_part.sum(axis=1)
assert np.isclose(by_part.loc["all pairs", "sum"], score.score, atol=1e-3)
by_part.round(2)

# %%
oo, oc, co, cc, whole = by_part.loc["all pairs"]
Markdown(
    f"Of the score of {whole:.2f}, offset·offset makes {oo:+.2f}: any query and any previous "
    f"token would get that much. What “oak” holds makes {oc:+.2f}, what “clock” holds {co:+.2f}, "
    f"and both together {cc:+.2f}."
)

# %% [markdown]
# Over distance, offset·offset draws a curve of its own, made from two mean vectors alone. Here it
# is beside the mean of all scores from `by_distance`:

# %%
reach = 60
delta = np.arange(reach)
from_offsets = record.scale * (
    mean_q * mean_k.conj() * np.exp(1j * np.outer(delta, rope.inv_freq))
).real.sum(axis=1)
both = go.Figure()
both.add_scatter(x=delta, y=profile.total[:reach], name="mean of all scores at this distance")
both.add_scatter(x=delta, y=from_offsets, name="offset·offset alone", line_dash="dash")
both.update_layout(
    template="plotly_white",
    height=340,
    xaxis_title="distance between query and key (tokens)",
    yaxis_title="score units",
    legend={"orientation": "h", "y": 1.15},
)
both

# %% [markdown]
# The two curves nearly coincide. Do not take that for more than it is: content has mean zero by
# construction, so in a mean over hundreds of queries and keys the two mixed parts cancel in any
# head, and content·content cancels too where what stands at that distance is unrelated. (In heads
# that match tokens it does not: neighbours resemble each other.) How much of the *single* scores
# follows the curve is another question. It has the same answer as before, a share of the variance
# within rows, now of offset·offset and over all keys but the first:

# %%
distances = positions[:, None] - positions[None, :]
kept = visible & (positions[None, :] > 0) & (positions[:, None] > 0)
curve_of_offsets = record.scale * (
    mean_q * mean_k.conj() * np.exp(1j * np.outer(positions, rope.inv_freq))
).real.sum(axis=1)
offset_scores = np.where(kept, curve_of_offsets[np.abs(distances)], np.nan)
all_scores = np.where(kept, d.scores(), np.nan)[1:]
deviation = all_scores - np.nanmean(all_scores, axis=1, keepdims=True)
offset_share = np.nansum(offset_scores[1:] * deviation) / np.nansum(deviation**2)
assert offset_share > 0.8
Markdown(
    f"Offset·offset carries {offset_share:.0%} of the variance of this head's scores within a "
    "row. The other three parts carry the rest."
)

# %% [markdown]
# So this head finds the previous token with vectors that hardly depend on the tokens. Heads of this
# kind, heads of the opposite kind, and how to tell them apart are the subject of
# [tutorial 4](4_positional_and_content_heads.py).
#
# ## What was shown, and what was not
#
# Shown:
#
# - A score is exactly the sum of one contribution per pair (and the pass-through), and this sum is
#   the model's own number.
# - A negative contribution means that two arrows stand more than a right angle apart. It does not
#   mean that the head avoids the key: the same amount may be taken from every key.
# - The softmax needs differences between keys. The largest contribution to this score decided
#   little among the words, and a pair with a smaller one decided most.
# - Many waves make one peak: where the fastest pair would be fooled, the other fast pairs differ
#   (distance 7) or the middle ones have fallen (distance 20).
# - In this head, nearly all of that comes from two mean vectors and the distance between tokens.
#
# Not shown:
#
# - What would happen in the running model. Everything here is *frozen*: queries and keys are taken
#   as they are, after the fact. Changing a pair in an early layer changes what later layers read.
#   For that, [`ablate_frequencies`](../docs/api/ablation.md) runs the model.
# - That the attention matters for the output. A split of scores describes where a head looks, not
#   what it moves from there, nor whether anything later uses it.
# - Anything causal about means and shares. They describe scores after the fact, over one text of a
#   few hundred tokens; they do not say what the model would do without the pair.
#
# Next: [attention sinks](3_attention_sinks.py), and how slow pairs make them.
