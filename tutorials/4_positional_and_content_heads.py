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
# # 4. Positional heads and content heads
#
# **Question.** Some heads attend by *where* a key is: the token before, the last few tokens. Others
# attend by *what* a key holds: an earlier copy of the same token, a comma. Both use the same
# rotated queries and keys. How can one tell which of the two a head does, and with which rotary
# pairs?
#
# We first say what kinds of heads there are and measure them, then split scores into a positional
# part and a content part, and then take apart one head of each kind. You need
# [tutorial 2](2_one_score.py); [tutorial 3](3_attention_sinks.py) explains sinks and advantage in
# more detail.

# %%
import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from IPython.display import Markdown, display
from plotly.subplots import make_subplots

import lens_rope as lr

N_TOKENS = 384
model = lr.load_model("smollm2-135m")
text = lr.sample_text()
qk = lr.capture(model, text, max_tokens=N_TOKENS)
print(qk)

WARM, COOL, QUIET = "#d9822b", "#3497a9", "#9aa1a8"


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
# ## What a head can attend to
#
# A *target* says which keys a query of that kind of head should attend to. Four of them, on a toy
# text in which the four words A B C D come three times after a BOS token:

# %%
toy = ["BOS", *"ABCDABCDABCD"]


def induction_mask(token_ids: list) -> np.ndarray:
    """`[q_pos, k_pos]` 1 at the keys right after an earlier copy of the query's token."""
    n = len(token_ids)
    mask = np.zeros((n, n))
    for query in range(n):
        for key in range(1, query):
            mask[query, key] = token_ids[key - 1] == token_ids[query]
    return mask


same = np.array([[a == b for b in toy] for a in toy])
masks = {
    "previous token": np.eye(len(toy), k=-1),
    "duplicate token": np.tril(same, k=-1).astype(float),
    "induction": induction_mask(toy),
    "sink (at BOS)": np.repeat(np.arange(len(toy)) == 0, len(toy)).reshape(-1, len(toy)).T,
}
figure = make_subplots(1, 4, subplot_titles=list(masks), horizontal_spacing=0.04)
visible = np.tril(np.ones((len(toy), len(toy)))) > 0
for column, mask in enumerate(masks.values(), start=1):
    shown = np.where(visible, mask.astype(float), np.nan)
    figure.add_heatmap(z=shown, coloraxis="coloraxis", xgap=1, ygap=1, row=1, col=column)
    figure.update_xaxes(tickvals=list(range(len(toy))), ticktext=toy, row=1, col=column)
    figure.update_yaxes(autorange="reversed", showticklabels=column == 1, row=1, col=column)
figure.update_yaxes(tickvals=list(range(len(toy))), ticktext=toy, title="query", row=1, col=1)
styled(figure, "Target keys of four kinds of heads on a toy text", height=300)
figure.update_layout(
    coloraxis={"colorscale": [[0, "rgba(154,161,168,0.25)"], [1, WARM]], "showscale": False}
)

# %% [markdown]
# **What to look at.** Rows are queries, columns are keys. The previous-token stripe lies at the
# same distance everywhere: it is a matter of position. Duplicates and induction also make stripes
# here, but only because this text repeats with one period. They follow the tokens. *Induction* is
# “find the earlier copy of this token, and attend to what came after it” (Olsson et al. 2022,
# [arXiv 2209.11895](https://arxiv.org/abs/2209.11895)); the head can then copy it.
#
# The *mass* of a target is the mean attention that its queries give to its keys.
# [`lr.explain_heads`](../docs/api/heads.md) names a head after a target that gets more than half of
# the attention **and** at least twice its *base rate*, which is the mass under uniform attention.
# Without the base rate a target with many keys would be reached by not choosing at all. The other
# names:
#
# - *sink*: a key with a sink share above 0.3;
# - *first occurrence*: the first of at least two earlier copies of the query's token;
# - *local*: the target is the query itself and the seven keys before it;
# - *content*: scores follow which token a key holds. Two keys with the same token get similar
#   scores from a query (a correlation of at least 0.5), and at least half of the score variance is
#   not purely positional (more on this below);
# - *uniform*: attention is spread nearly evenly;
# - *mixed*: nothing of this holds. It is not a kind of head; it says that no name is earned.
#
# Prompts need at least 64 tokens; below that, nothing is named.
#
# ## A text to measure induction on
#
# Ordinary text repeats words, but then position, grammar and topic all point to the same keys.
# Random tokens that come three times leave two reasons to attend to the token after an earlier
# copy: the tokens, or a fixed distance. For one head the second is excluded below, with another
# period; the names do not exclude it. With `model=`, `explain_heads` runs such a prompt of its own
# (BOS and 48 random tokens, three times) and takes the masses that need a repeat from there. All
# else is measured on the capture.
#
# In the second table, `strength` is what the name rests on (for *mixed*, the largest mass of any
# target) and `base_rate` is the same under uniform attention, where there is one. `pair` is the
# pair with the largest advantage. The *advantage* of a target is its mean score minus the mean
# score of all keys that the query sees, averaged over queries; it splits exactly over pairs. A head
# that is not named after a target is asked about the keys that it attends to.

# %%
heads = lr.explain_heads(qk, model=model)
table = heads.to_dataframe()
display(pd.Series(heads.counts(), name="heads").to_frame())
clearest = table.sort_values("strength", ascending=False).groupby("pattern", sort=False).head(2)
clearest[["layer", "head", "pattern", "also", "strength", "base_rate", "pair"]].round(3)

# %%
heads.plot()

# %% [markdown]
# **What to look at.** Sinks are everywhere from some layer on, content heads sit in the first
# layers, and only a few heads are clean previous-token or induction heads. The column `also` in the
# table holds further names that a head has earned; the name is the most specific one. A head whose
# attention rests on BOS until there is something to copy is an induction head *and* a sink head.
# The number of sink heads differs from tutorial 3 for this reason, and because it reads fewer
# tokens.
#
# ### A name is a threshold
#
# Nothing happens at one half. This is how many heads would count at other thresholds:

# %%
levels = [0.3, 0.4, 0.5, 0.6, 0.7]
pd.DataFrame(
    {
        "threshold": levels,
        "previous token": [(table["previous_share"] > level).sum() for level in levels],
        "induction": [(table["induction"] > level).sum() for level in levels],
        "local": [(table["local"] > level).sum() for level in levels],
        "sink": [(table["sink_share"] > level).sum() for level in levels],
    }
)

# %% [markdown]
# No column is flat: a name is a cut through a continuum, most of all for local heads and sinks, and
# the clearest of the mixed heads above miss a name by very little. Quote the mass, not only the
# name.
#
# ## Position and content, as shares of the score
#
# Names look at attention. The scores say more directly how a head chooses. Before rotation a pair
# of a query is a complex number $z_q$. Split it into its mean over tokens, the *offset* $\bar z_q$,
# and the rest, the *content*: $z_q = \bar z_q + (z_q - \bar z_q)$. Do the same with the key. A
# contribution is a product of query and key, so it falls into four parts, the query's part named
# first:
#
# - **offset·offset**: the same for all tokens, so it depends on distance alone. This is the purely
#   positional part.
# - **offset·content**: what this key holds, seen by the mean query. “Commas, whoever asks.”
# - **content·offset**: what this query holds, seen by the mean key. It is about distance again:
#   this query looks nearer or farther.
# - **content·content**: what this query holds meets what this key holds. This is matching.
#
# Each part, summed over pairs, is a share of the score variance within a query's row (only
# differences within a row reach the softmax). With $S$ the score, $\bar S$ its mean over the row
# and $S_\pi$ one part:
#
# $$\text{share}_\pi = \frac{\sum S_\pi \left(S - \bar S\right)}{\sum \left(S - \bar S\right)^2}$$
#
# The parts sum to $S$, so the shares sum to 1. They are covariances, so one can be negative: it
# then works against the rest. BOS and sinks are left out, since they are not what tokens in general
# hold.

# %%
parts = ["offset_offset", "offset_content", "content_offset", "content_content"]
assert np.allclose(table[parts].sum(axis=1), 1)  # for every head
medians = table.groupby("pattern")[parts].median()
medians.insert(0, "heads", table["pattern"].value_counts())
medians.sort_values("offset_offset", ascending=False).round(2)

# %%
kinds = ["previous token", "local", "content", "duplicate token", "induction", "sink", "mixed"]
palette = ["#d9822b", "#b8a13a", "#3f8f5b", "#7d5ba6", "#b04323", "#3497a9", "#9aa1a8"]
figure = go.Figure()
for kind, colour in reversed(list(zip(kinds, palette, strict=True))):
    some = table[table["pattern"] == kind]
    rare = kind not in ("sink", "mixed")
    figure.add_scatter(
        x=some["offset_offset"],
        y=some["content_content"],
        mode="markers",
        name=kind,
        marker={"color": colour, "size": 10 if rare else 6, "opacity": 0.9 if rare else 0.5},
        text=[
            f"layer {layer} head {head}"
            for layer, head in zip(some["layer"], some["head"], strict=True)
        ],
        hovertemplate="%{text}<br>offset·offset %{x:.2f}<br>content·content %{y:.2f}",
    )
styled(figure, "Offset shares of all heads: positional against matching", height=400)
figure.update_xaxes(title="offset·offset (position alone)")
figure.update_yaxes(title="content·content (matching)")
figure.update_layout(legend={"orientation": "h", "y": 1.15})

# %% [markdown]
# **What to look at.** The names (all but *content*, which asks for a low offset·offset share) were
# given by attention and these shares by the split of the scores, and for the most part they agree:
# previous-token heads lie at the lower right, induction
# and duplicate-token heads at the upper left. Most content heads are low on both axes: their main
# part is offset·content, a taste for some keys that does not depend on the query. Sink heads are
# spread out, because with the sink left out this shows what they do beside resting.
#
# ## A previous-token head, taken apart

# %%
clear = table[table["pattern"] == "previous token"].sort_values("strength").iloc[-1]
LAYER, HEAD = int(clear["layer"]), int(clear["head"])
previous = heads.head(LAYER, HEAD)
gain = previous.advantage
strongest = list(gain.strongest(5))
assert np.isclose(gain.pairs.sum() + gain.pass_through, gain.total)
assert previous.offset_shares[0] > 0.9  # nearly all of the variance is position
display(
    Markdown(
        f"Layer {LAYER} head {HEAD} gives {previous.previous_share:.0%} of its attention to the "
        f"token before (uniform attention would give {previous.base_rate:.1%}), and "
        f"{previous.offset_shares[0]:.0%} of its score variance is offset·offset. The advantage "
        f"of the token before is {gain.total:.1f} score units; these pairs add most to it:"
    )
)
features = lr.offset_features(qk)
of_layer = features.layer(LAYER)
rope = of_layer.rope
pd.DataFrame(
    {
        "pair": strongest,
        "wavelength (tokens)": rope.wavelength[strongest].round(1),
        "advantage (score units)": gain.pairs[strongest].round(2),
        "amplitude (score units)": of_layer.amplitude[HEAD, strongest].round(2),
        "angle (π rad)": (of_layer.angle[HEAD, strongest] / np.pi).round(3),
    }
)

# %% [markdown]
# The offsets of pair $i$ contribute $A_i \cos(\varphi_i + w_i \Delta)$ at distance $\Delta$. So the
# positional part of this head is a sum of cosines, a Fourier series with the frequencies that RoPE
# has. A narrow peak at one distance needs fast pairs. A negative angle $\varphi_i$ puts the first
# crest at $\Delta = -\varphi_i / w_i$; a positive one makes a curve that falls from the start.

# %%
distance = np.arange(41)
curves = of_layer.amplitude[HEAD] * np.cos(of_layer.angle[HEAD] + np.outer(distance, rope.inv_freq))
measured = lr.decompose(qk, LAYER, HEAD).by_distance()
figure = make_subplots(1, 2, subplot_titles=["the three strongest pairs", "all pairs"])
fine = np.linspace(0, 12, 241)
for pair, colour in zip(strongest[:3], (WARM, COOL, QUIET), strict=True):
    wave = of_layer.amplitude[HEAD, pair] * np.cos(
        of_layer.angle[HEAD, pair] + rope.inv_freq[pair] * fine
    )
    figure.add_scatter(
        x=fine, y=wave, name=f"pair {pair}", line={"color": colour}, mode="lines", row=1, col=1
    )
figure.add_vline(x=1, line={"color": QUIET, "dash": "dot"}, row=1, col=1)
figure.add_scatter(
    x=distance,
    y=curves.sum(axis=1),
    name="offsets alone",
    mode="lines",
    line={"color": COOL, "width": 2},
    row=1,
    col=2,
)
figure.add_scatter(
    x=distance,
    y=measured.total[distance],
    name="measured mean score",
    mode="markers",
    marker={"color": WARM, "size": 6},
    row=1,
    col=2,
)
figure.update_xaxes(title="distance (tokens)").update_yaxes(title="score units", row=1, col=1)
styled(figure, "A previous-token head as a sum of cosines over distance")
figure.update_layout(legend={"orientation": "h", "y": 1.3}, margin_t=80)
crest = -of_layer.angle[HEAD, strongest[:2]] / rope.inv_freq[strongest[:2]]
assert (abs(crest - 1) < 0.6).all()  # the two fast pairs, in tokens
assert curves.sum(axis=1).argmax() == 1  # the offsets alone put the peak one token back
assert np.allclose(curves.sum(axis=1)[1:], measured.total[1:41], atol=0.5)
figure

# %% [markdown]
# **What to look at.** On the left, the two fastest pairs have a crest close to distance 1 (the
# dotted line) and tell it from its neighbours. The third falls slowly with distance, which favours
# near keys over the later crests of the fast ones. On the right the dots are the mean score that
# the head really gives at each distance, and the line is the sum of the cosines. They agree, as
# such means do in many heads, content heads included ([tutorial 2](2_one_score.py)). That distance
# decides the *single* scores as well is what the offset·offset share above says. Pair by pair,
# measured beside predicted, at the first distances:

# %%
top = strongest[0]
pd.DataFrame(
    {
        "distance": distance[:5],
        f"pair {top}, measured": measured.mean[:5, top].round(2),
        f"pair {top}, from offsets": curves[:5, top].round(2),
        "all pairs, measured": measured.total[:5].round(2),
        "all pairs, from offsets": curves[:5].sum(axis=1).round(2),
    }
)

# %%
loudest = int(of_layer.amplitude[HEAD].argmax())
Markdown(
    f"The pair with the largest amplitude of the head is another one: pair {loudest} "
    f"({of_layer.amplitude[HEAD, loudest]:.1f} score units, wavelength "
    f"{rope.wavelength[loudest]:,.0f} tokens). It adds {gain.pairs[loudest]:.2f} to the advantage "
    f"of the token before. It is slow, so it does not tell neighbours apart; it pushes all keys "
    f"down alike, all but BOS, and so gives the head a place to rest ([tutorial "
    f"3](3_attention_sinks.py))."
)

# %% [markdown]
# ### Does the model use it in this way?
#
# An advantage describes scores after the fact; it does not say what the model would do without the
# pair. An intervention does: run the model with the strongest pair of this one head set to zero,
# with the second strongest, and with a random other pair instead.

# %%
runner_up = strongest[1]
report = lr.ablation_report(model, text, {(LAYER, HEAD): [top]}, max_tokens=256, controls=2)
next_report = lr.ablation_report(
    model, text, {(LAYER, HEAD): [runner_up]}, max_tokens=256, controls=1
)
effect, next_effect = report.heads[0], next_report.heads[0]
assert effect.previous_after < 0.5 * effect.previous_before
assert effect.previous_after < next_effect.previous_after < 0.8 * effect.previous_before
assert effect.previous_control > 0.9 * effect.previous_before
pd.DataFrame(
    {
        "attention to the token before": [
            effect.previous_before,
            effect.previous_after,
            next_effect.previous_after,
            effect.previous_control,
        ],
        "sink share": [
            effect.sink_before,
            effect.sink_after,
            next_effect.sink_after,
            effect.sink_control,
        ],
        "loss (nats/token)": [
            report.loss_before,
            report.loss_after,
            next_report.loss_after,
            float(np.median(report.loss_controls)),
        ],
    },
    index=[
        "as it is",
        f"without pair {top}",
        f"without pair {runner_up}",
        "without a random pair (median of two draws)",
    ],
).round(3)

# %% [markdown]
# Without its strongest pair the head does not find the token before any more and rests on its sink,
# and the whole model gets worse by the loss of one pair in one head. A random pair (two draws)
# changes next to nothing; the second strongest costs part of the habit.
#
# ## An induction head, taken apart
#
# For this we make a repeated prompt of our own, so that we can look into it: BOS and $p$ random
# tokens, three times. And we make two of them, with two different periods.

# %%
rng = np.random.default_rng(0)
special = set(model.tokenizer.all_special_ids)
usable = [token for token in range(model.cfg.d_vocab) if token not in special]
inductive = table[table["pattern"] == "induction"].sort_values("strength", ascending=False)
I_LAYER, I_HEAD = (int(i) for i in inductive[["layer", "head"]].iloc[0])
layers = sorted({LAYER, *map(int, inductive["layer"])})

repeated = {}
for period in (48, 30):
    drawn = [int(token) for token in rng.choice(usable, period, replace=False)]
    token_ids = [qk.prompts[0].token_ids[0]] + drawn * 3
    repeated[period] = lr.capture(model, torch.tensor(token_ids), layers)

figure = make_subplots(
    1, 2, subplot_titles=[f"layer {LAYER} head {HEAD}", f"layer {I_LAYER} head {I_HEAD}"]
)
peaks = {}
for (period, capture), colour in zip(repeated.items(), (WARM, COOL), strict=True):
    for column, (layer, head) in enumerate(((LAYER, HEAD), (I_LAYER, I_HEAD)), start=1):
        pattern = lr.decompose(capture, layer, head).pattern()
        third = range(2 * period + 1, len(pattern))  # the third time: two earlier copies
        reach = np.arange(2 * period + 1)
        by_distance = np.array([np.mean([pattern[m, m - d] for m in third]) for d in reach])
        peaks[period, column] = int(by_distance.argmax())
        figure.add_scatter(
            x=reach,
            y=by_distance,
            name=f"period {period}",
            mode="lines",
            line={"color": colour},
            showlegend=column == 1,
            row=1,
            col=column,
        )
figure.update_xaxes(title="distance (tokens)").update_yaxes(title="attention", row=1, col=1)
styled(figure, "Attention by distance of two heads on repeated tokens with two periods")
figure.update_layout(legend={"orientation": "h", "y": 1.3}, margin_t=80)
assert peaks[48, 1] == peaks[30, 1] == 1  # position: the period does not matter
assert peaks[48, 2] + 1 in (48, 96) and peaks[30, 2] + 1 in (30, 60)  # content: it does
figure

# %% [markdown]
# **What to look at.** The left head attends to distance 1 whatever the text. The peaks of the right
# head lie one less than one period or two periods back, and move when the period does. It follows
# the tokens and not the distance, although the rotation changes every pair of its queries and keys
# with distance. How? See which pairs it uses, and what its offset shares say.

# %%
PERIOD = 48
rep = repeated[PERIOD]
explained = lr.explain_heads(rep)  # no model: measured where this capture repeats
induction = explained.head(I_LAYER, I_HEAD)
split = lr.decompose(rep, I_LAYER, I_HEAD)
pattern = split.pattern().astype(np.float64)

mask = induction_mask(list(rep.prompts[0].token_ids))
asked = mask.any(axis=1)  # queries that have such a key
mass = (pattern * mask).sum(axis=1)[asked].mean()
assert np.isclose(mass, induction.masses["induction"], atol=1e-5)  # the mass, from its definition

of_pairs = induction.advantage.pairs
slow = [int(pair) for pair in np.flatnonzero(induction.rope.cycles <= 0.5)]
figure = go.Figure()
for values, name, colour in (
    (gain.pairs, f"layer {LAYER} head {HEAD}: the token before", WARM),
    (of_pairs, f"layer {I_LAYER} head {I_HEAD}: induction", COOL),
):
    figure.add_bar(x=np.arange(len(values)), y=values, name=name, marker_color=colour)
figure.add_vline(x=slow[0] - 0.5, line={"color": QUIET, "dash": "dot"})
styled(figure, "Advantage by pair of a positional and a content head", barmode="group")
figure.update_xaxes(title="pair, fastest first").update_yaxes(title="advantage (score units)")
figure.update_layout(legend={"orientation": "h", "y": 1.15})
display(
    Markdown(
        f"Layer {I_LAYER} head {I_HEAD} gives {mass:.0%} of its attention to the induction keys "
        f"(base rate {induction.base_rates['induction']:.1%}). Its offset shares on this prompt: "
        + ", ".join(
            f"{part.replace('_', '·')} {share:.2f}"
            for part, share in zip(parts, induction.offset_shares, strict=True)
        )
        + f". Of the advantage of {induction.advantage.total:.1f}, {of_pairs[slow].sum():.1f} "
        f"come from the {len(slow)} pairs that turn at most half a cycle over the context (right "
        f"of the dotted line)."
    )
)
figure

# %% [markdown]
# **What to look at.** The two heads use opposite ends of the spectrum. A fast pair tells distances
# apart, so it cannot compare contents over unknown distances. A slow pair hardly turns, so what a
# query and a key hold can be compared wherever they are. And this induction head spreads its work
# over many pairs. Do the other induction heads do the same?

# %%
parts_of = []
for layer, head in inductive[["layer", "head"]].itertuples(index=False):
    one = explained.head(int(layer), int(head))
    if one.target == "induction":  # named so on this prompt as well
        by_pair = one.advantage.pairs
        parts_of.append(
            {
                "layer": layer,
                "head": head,
                "advantage (score units)": one.advantage.total,
                "slow pairs (part)": by_pair[slow].sum() / one.advantage.total,
                "largest pair (part)": by_pair.max() / one.advantage.total,
            }
        )
parts_of = pd.DataFrame(parts_of)
assert (parts_of["slow pairs (part)"] > 0.8).all()
assert (parts_of["largest pair (part)"] < gain.pairs.max() / gain.total).all()
display(
    Markdown(
        f"Parts of the advantage, in the {len(parts_of)} of {len(inductive)} induction heads that "
        f"have this name on this prompt as well. In the previous-token head the largest pair has "
        f"{gain.pairs.max() / gain.total:.0%}."
    )
)
parts_of.round(2)

# %% [markdown]
# They do: in each the slow pairs carry nearly all of it (a part above 1 says that the other pairs
# work against it), and no pair stands out as in the previous-token head.
#
# ### What happens without some of them
#
# The same check as before, on paper this time: subtract the contributions of some pairs from the
# scores and form the attention again. Bands of eight pairs, so that each band is a quarter of the
# head.

# %%
contributions = np.nan_to_num(split.contributions().astype(np.float64))
scores = split.scores().astype(np.float64)


def without(pairs: list) -> np.ndarray:
    """`[q_pos, k_pos]` Attention after the contributions of some pairs are removed."""
    left = scores - contributions[pairs].sum(axis=0)
    weights = np.exp(left - np.nanmax(left, axis=1, keepdims=True))
    return np.nan_to_num(weights / np.nansum(weights, axis=1, keepdims=True))


assert np.allclose(without([]), pattern, atol=1e-4)
rows = []
n_pairs = len(of_pairs)
for start in range(0, n_pairs, 8):
    band = list(range(start, min(start + 8, n_pairs)))
    left = without(band)
    rows.append(
        {
            "removed": f"pairs {band[0]} to {band[-1]}",
            "their advantage": of_pairs[band].sum(),
            "attention to the induction keys": (left * mask).sum(axis=1)[asked].mean(),
            "attention to BOS": left[asked, 0].mean(),
        }
    )
pd.DataFrame(
    [
        {
            "removed": "nothing",
            "attention to the induction keys": mass,
            "attention to BOS": pattern[asked, 0].mean(),
        },
        *rows,
    ]
)[["removed", "their advantage", "attention to the induction keys", "attention to BOS"]].round(3)

# %% [markdown]
# The slowest band is needed, as its advantage says; the sink of this head stands on it as well. But
# look at the band before it: its advantage is small, and yet without it attention leaves the
# induction keys and goes to BOS. This is no contradiction. The advantage compares the target with
# the *mean* of all keys, and the softmax compares it with the *strongest rival*, which here is the
# sink. A pair that holds BOS down makes room for induction and earns no advantage over the mean. To
# ask about a rival, compare the two keys themselves:

# %%
keys_of = [np.flatnonzero(row) for row in mask[asked]]
at_target = np.array(
    [
        np.mean([contributions[:, m, n] for n in keys], axis=0)
        for m, keys in zip(np.flatnonzero(asked), keys_of, strict=True)
    ]
)
over_bos = (at_target - contributions[:, asked, 0].T).mean(axis=0)
widest = np.argsort(-over_bos)[:4]
pd.DataFrame(
    {
        "pair": widest,
        "over BOS (score units)": over_bos[widest],
        "over the mean key (advantage)": of_pairs[widest],
    }
).round(2)

# %% [markdown]
# ## Looking at a head
#
# [`lr.show_head`](../docs/api/heads.md) shows attention, scores and what pairs add to them, token
# by token; in the notebook every pair can be chosen. Here is the induction head on the repeated
# prompt, with its slow pairs summed, the pairs before them, and all the fast ones.

# %%
middle = [pair for pair in range(16, n_pairs) if pair not in slow]
lr.show_head(rep, I_LAYER, I_HEAD, pairs=[slow, middle, list(range(16))], start=PERIOD, size=48)

# %% [markdown]
# ## Your own target
#
# These names do not cover what heads do, and you can ask about any other habit: `target=` takes a
# mask or weights `[q_pos, k_pos]`, and the advantage is then that of your target. As an example:
# which heads attend to punctuation? The mask allows all commas, stops, quotation marks, dashes and
# line breaks before the query.

# %%
tokens = qk.prompts[0].tokens
is_mark = np.array([not any(char.isalnum() for char in token) for token in tokens])
is_mark[0] = False  # BOS is no punctuation
target = np.tril(np.tile(is_mark, (len(tokens), 1)), k=-1).astype(float)

first = lr.capture(model, text, layers=range(3), max_tokens=N_TOKENS)
asked_for = lr.explain_heads(first, target=target)
ranked = asked_for.to_dataframe().sort_values("target_share", ascending=False)
base = asked_for.heads[0].base_rates["target"]
marks = asked_for.head(*(int(i) for i in ranked[["layer", "head"]].iloc[0]))
assert marks.masses["target"] > 2 * base
display(
    Markdown(
        f"{is_mark.sum()} of {len(tokens)} tokens are punctuation, and uniform attention would "
        f"give them {base:.0%}. Layer {marks.layer} head {marks.head}, named “{marks.pattern}”, "
        f"gives them {marks.masses['target']:.0%}. Its largest offset share is "
        f"{parts[int(marks.offset_shares.argmax())].replace('_', '·')} "
        f"({marks.offset_shares.max():.2f}), and pair {marks.advantage.strongest(1)[0]} adds "
        f"{marks.advantage.pairs.max():.1f} of the advantage of {marks.advantage.total:.1f}."
    )
)
columns = ["layer", "head", "pattern", "target_share", "offset_content", "pair", "advantage"]
ranked[[*columns, "total_advantage"]].head(5).round(3)

# %% [markdown]
# So the name “content” can be made precise with a question of your own. The base rate belongs to
# the answer: with many keys in a target, a large mass may mean little.
#
# ## What was shown, and what was not
#
# Shown, on this model and these prompts:
#
# - Where attention goes, with thresholds and base rates; and, from the scores, four shares that sum
#   to 1 and say how much of a head is position and how much is content. The two views mostly agree,
#   where the name does not use the shares itself.
# - A previous-token head is a sum of cosines of fast pairs that peaks one token back: offset·offset
#   carries nearly all the variance of its single scores, and setting its strongest pair to zero in
#   the running model ends the habit.
# - The induction heads match contents in slow pairs; the one looked at closer moves with the period
#   of the text.
#
# Not shown:
#
# - That names are kinds. A label is a threshold on one prompt, and for many heads “mixed” is the
#   honest answer.
# - That the pairs with a large advantage are all that matters: advantage is over the mean key, and
#   the induction head needs pairs that have next to none. Only the previous-token head was tested
#   by an intervention in the running model; the induction head was taken apart on paper.
# - That heads work alone. An induction head needs an earlier head that writes into each key which
#   token came before it; the split of one score cannot see that.
# - That other models divide their frequencies in the same way. Run `lens-rope heads MODEL` and see.
#
# Definitions: [offset and content](../docs/mathematics.md#offset-and-content),
# [offset shares](../docs/mathematics.md#offset-shares),
# [advantage](../docs/mathematics.md#advantage).
#
# Next: [5. Offset features and the two bounds](5_offset_features_and_bounds.py).
