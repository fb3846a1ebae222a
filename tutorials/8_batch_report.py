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
# # 8. A batch report from the command line, and reading it
#
# **Question.** What does one command tell me about a model, and which of its numbers may I believe?
#
# `lens-rope report` does what the other tutorials did step by step: it reads every layer on all
# prompts, and writes one folder per model with a page, the numbers as JSON and as tables, and a
# manifest that says what they were made of. This tutorial makes such a report, opens every file of
# it, makes it again, breaks it, compares it with another one, and then goes through the page
# section by section: what each number means, what it has to be held against, and when not to trust
# it.
#
# ## Prompts in a file
#
# Prompts go into a JSONL file, one object per line, with `"text"` and, if you like, `"name"`. Sinks
# and patterns need prompts of at least 64 tokens, because in a shorter prompt uniform attention
# alone makes shares that look like sinks. Two short stories are enough for a demonstration:

# %%
import json
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pandas as pd
from IPython.display import Markdown

import lens_rope as lr

kept = tempfile.TemporaryDirectory()  # goes when this notebook's process ends
folder = Path(kept.name)
parts = lr.sample_text().split("\n\n")


def write_prompts(file: str, prompts: dict[str, str]) -> None:
    lines = [json.dumps({"name": name, "text": text}) for name, text in prompts.items()]
    (folder / file).write_text("\n".join(lines) + "\n", encoding="utf-8")


write_prompts(
    "stories.jsonl",
    {"clocks": "\n\n".join(parts[:2]), "supply boat": "\n\n".join(parts[2:5])},
)
print(
    *[line[:90] + " ..." for line in (folder / "stories.jsonl").read_text().splitlines()], sep="\n"
)

# %% [markdown]
# ## The command
#
# In a terminal you would type
#
# ```bash
# lens-rope report smollm2-135m --prompts stories.jsonl --out reports \
#     --layers 12-17 --no-interventions
# ```
#
# Two options make it quick here. `--layers 12-17` reads six layers. `--no-interventions` leaves out
# the runs in which the model goes without some pairs. Leave both out for a real report.
#
# A notebook does not always have the terminal's `PATH`, so the cells below call the same program
# through the notebook's own Python, as `python -m lens_rope.cli`. Everything else is what you would
# see.


# %%
def lens_rope(*arguments: str) -> int:
    """Runs `lens-rope` in the folder, shows what it prints, and gives its exit code."""
    done = subprocess.run(
        [sys.executable, "-m", "lens_rope.cli", *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
    )
    print("$ lens-rope", *arguments)
    for line in done.stdout.splitlines():
        print(textwrap.fill(line, 120, subsequent_indent="    ") if len(line) > 140 else line)
    print(f"exit code {done.returncode}")
    return done.returncode


OPTIONS = ["--layers", "12-17", "--no-interventions"]
code = lens_rope(
    "report", "smollm2-135m", "--prompts", "stories.jsonl", *OPTIONS, "--out", "reports"
)
assert code == 0

# %% [markdown]
# On stdout are the findings, most basic first. They are sentences computed from the numbers, each
# with its base rate or control beside it. On stderr are notes (`lens-rope: note: ...`) that a
# reader has to know.
#
# ## The folder


# %%
def files(of: Path) -> pd.DataFrame:
    found = [path for path in sorted(of.rglob("*")) if path.is_file()]
    return pd.DataFrame(
        {
            "file": [str(path.relative_to(of)) for path in found],
            "kB": [round(path.stat().st_size / 1000, 1) for path in found],
        }
    )


files(folder / "reports")

# %% [markdown]
# - `report.html` is the page, in one file that loads nothing from anywhere. Send it by mail, open
#   it in ten years.
# - `report.json` has the same numbers for programs, in a versioned [schema](../docs/schema.md).
# - `tables/*.csv` has them one row per layer, head or pair, for pandas or a spreadsheet.
# - `manifest.json` says what the report was made of.
# - `index.html` and `run.json`, one level up, are about all models of the run.
# - The hidden file marks the folder as a report. A folder that holds anything else is never written
#   over.
#
# ## The numbers, in pandas
#
# The JSON opens as plain values. Every list has one entry per layer, head or feature, and every
# value its unit in the schema.

# %%
report = json.loads((folder / "reports/smollm2-135m/report.json").read_text(encoding="utf-8"))
pd.Series(
    {
        key: f"{type(value).__name__} of {len(value)}"
        if isinstance(value, (list, dict))
        else str(value)
        for key, value in report.items()
        if key != "created"  # the time, which is the only value that differs between two runs
    },
    name="report.json",
).to_frame()

# %%
tables = {
    path.stem: pd.read_csv(path)
    for path in sorted((folder / "reports/smollm2-135m/tables").glob("*.csv"))
}
pd.DataFrame(
    {
        "rows": {name: len(table) for name, table in tables.items()},
        "columns": {name: ", ".join(table.columns[:8]) for name, table in tables.items()},
    }
)

# %% [markdown]
# Take one claim of the findings and recompute it. "Without their best pair, the sinks fall" rests
# on three columns of `sinks.csv`: the sink share as it is, without the head's best pair, and the
# control, which is the share without some other pair (the median over the others).

# %%
sinks = tables["sinks"]
shares = sinks[["sink_share", "share_without_best", "control_share"]]
below = report["sinks"]["collapsed_below"]
fallen = int((sinks["share_without_best"] < below).sum())
standing = int((sinks["control_share"] > sinks["sink_share"] / 2).sum())
sentence = next(text for text in report["findings"] if "sink head" in text and "best pair" in text)
assert f"{fallen} of {len(sinks)}" in sentence and f"{standing} of" in sentence
shares.describe().loc[["min", "50%", "max"]].rename(index={"50%": "median"}).round(3)

# %%
Markdown(
    f"From the table: {fallen} of {len(sinks)} sinks fall below {below:g} without their best pair, "
    f"and {standing} keep more than half of their share without another. "
    "The report's sentence says\n\n"
    f"> {sentence}"
)

# %% [markdown]
# Without the control the first number would prove nothing. A head that loses its sink without *any*
# pair has no pair that makes it.
#
# It is a weak control, though: most other pairs are small, and a sink often falls without its
# second pair as well ([tutorial 3](3_attention_sinks.py)). `sink_pairs.csv` has every pair of every
# sink:

# %%
ranked = tables["sink_pairs"].sort_values("advantage", ascending=False).groupby(["layer", "head"])
second = ranked.nth(1).merge(sinks, on=["layer", "head"])
assert len(second) == len(sinks)
halved = int((second["share_without"] < second["sink_share"] / 2).sum())
Markdown(
    f"Without the pair of the second largest advantage, {halved} of {len(sinks)} sinks fall below "
    f"half of their share; without another pair (the median), {len(sinks) - standing} do."
)

# %% [markdown]
# ## The manifest, and `--resume`
#
# The manifest holds versions, arguments, the source of the model with a checksum, and a checksum of
# the prompts. Nothing in it depends on the machine or the time, but for the date, the device and
# the versions.

# %%
manifest = json.loads((folder / "reports/smollm2-135m/manifest.json").read_text(encoding="utf-8"))
print(json.dumps(manifest["model"], indent=1))
print(json.dumps(manifest["prompts"], indent=1))

# %% [markdown]
# With `--resume` the same command leaves a report as it is that would come out the same, and makes
# the others: with another model file, other prompts, other options or another version it would be
# made again. So an interrupted batch goes on where it was. Reports are written beside their folder
# and moved into place when they are whole, so what is there is whole.

# %%
page = folder / "reports/smollm2-135m/report.html"
before = page.stat().st_mtime_ns
code = lens_rope(
    "report", "smollm2-135m", "--prompts", "stories.jsonl", *OPTIONS, "--out", "reports", "--resume"
)
assert code == 0 and page.stat().st_mtime_ns == before  # nothing was written again

# %% [markdown]
# ## When something goes wrong
#
# Each kind of failure has its own exit code and one sentence on stderr. A script can tell them
# apart:
#
# | exit code | what |
# |---|---|
# | 0 | done |
# | 1 | `lens-rope check`: something was not verified |
# | 2 | an argument is out of range |
# | 3 | the model cannot be found, fetched or read |
# | 4 | the model has no RoPE, or cannot be read exactly |
# | 5 | what was read does not reproduce the model's scores |
# | 6 | the output cannot be written |
# | 7 | a prompt is empty, not text, or too long |
# | 8 | a saved capture cannot be read |
# | 130 | interrupted |
#
# A wrong argument is found before a model is loaded:

# %%
assert lens_rope("report", "smollm2-135m", "--layers", "17-12") == 2

# %% [markdown]
# One bad line in the prompts, likewise, with its number:

# %%
(folder / "broken.jsonl").write_text('{"text": "one"}\n{"txt": "two"}\n', encoding="utf-8")
assert lens_rope("report", "smollm2-135m", "--prompts", "broken.jsonl") != 0

# %% [markdown]
# In a batch, a model that fails is told and does not stop the others. The exit code is that of the
# first failure, and `run.json` says what became of each model. The first model below is there
# already, the second is not:

# %%
code = lens_rope(
    "report", "smollm2-135m", "no-such-model.gguf", "--prompts", "stories.jsonl", *OPTIONS,
    "--out", "reports", "--resume",
)  # fmt: skip
assert code == 3
run = json.loads((folder / "reports/run.json").read_text(encoding="utf-8"))
pd.DataFrame(run["models"])[["model", "outcome", "exit_code", "error"]]

# %% [markdown]
# ## How much of this is the text?
#
# A report describes a model *on some prompts*. Which of its numbers belong to the model? Make a
# second report with other prompts and compare. Here are two that are nothing like a story: a
# program and a list of numbers.

# %%
program = '''def rotate(pairs, positions, inv_freq):
    """Turns each pair by its frequency times the position."""
    turned = []
    for position, row in zip(positions, pairs):
        angles = [position * w for w in inv_freq]
        turned.append([z * complex(cos(a), sin(a)) for z, a in zip(row, angles)])
    return turned


def score(query, key, scale):
    """Adds up what every pair contributes."""
    return scale * sum((q * k.conjugate()).real for q, k in zip(query, key))
'''
squares = "\n".join(f"{n} squared is {n * n}, and {n} cubed is {n**3}." for n in range(2, 14))
write_prompts("other.jsonl", {"program": program, "numbers": squares})
code = lens_rope(
    "report", "smollm2-135m", "--prompts", "other.jsonl", *OPTIONS, "--out", "other",
    "--format", "json",
)  # fmt: skip
assert code == 0

# %% [markdown]
# `lens-rope compare` needs no model, two folders are enough:
#
# ```bash
# lens-rope compare reports/smollm2-135m other/smollm2-135m --name stories --name other
# ```

# %%
code = lens_rope(
    "compare", "reports/smollm2-135m", "other/smollm2-135m", "--name", "stories", "--name", "other"
)
assert code == 0

# %% [markdown]
# The note comes first: the prompts differ, so that is what a difference can come from (here it is
# all that differs). Then what changed, in sentences, then every metric side by side. With `--out`
# the comparison is written as a page, JSON and tables too. In Python it is
# [`lr.compare`](../docs/api/reports.md), whose tables can be sorted. Here are the shares, those
# that moved most first:

# %%
comparison = lr.compare(
    folder / "reports/smollm2-135m", folder / "other/smollm2-135m", names=["stories", "other"]
)
metrics = comparison.to_dataframe()
of_shares = metrics[metrics["unit"] == "share"].dropna(subset=["difference"])
moved = of_shares.reindex(of_shares["difference"].abs().sort_values(ascending=False).index)
moved[["what", "a", "b", "difference"]].round(3)

# %% [markdown]
# The rows about the cycles of all pairs cannot move: they are the rotation. Of the rest, what
# hardly moves between a story and a program is a fair candidate for a property of the model. What
# moves is a property of the model on that text. Look at the sinks: *whether* a head counts as a
# sink head is one thing, *which pair* makes its sink another.

# %%
both = comparison.heads().query("best_pair_a >= 0 and best_pair_b >= 0")
same = int((both["best_pair_a"] == both["best_pair_b"]).sum())
Markdown(
    f"Sink heads: {len(comparison.first.sinks)} on the stories, {len(comparison.second.sinks)} on "
    f"the other prompts, {len(both)} on both. Of these, {same} have the same best pair both times."
)

# %% [markdown]
# Two sets of two prompts are a beginning. The next step is more of them, not a longer sentence.
#
# ## Reading the page
#
# The page begins like this. The picture is of all layers on the sample text, so its numbers differ
# from those above.
#
# ![First screen of a report](../docs/images/report.png)
#
# **The line below the name** says what was read: shape, precision, host, prompts. Read it first.
# Everything below is about these prompts, in this precision.
#
# **The green badge** is the largest error of a rebuilt score in any layer, relative to the largest
# score of its head. There is no report without it. It says that the numbers are those of the host,
# and nothing about whether they are many enough to conclude anything ([tutorial
# 7](7_your_own_model.py) has the difference).
#
# **Findings** are five headlines; each topic is a link to its section. Below them, folded, are all
# findings in full.
#
# **The map** shows which layer uses which frequency: magnitude of each pair over the median of its
# layer. Pairs to the right of the dashed line never complete a turn over the context. A column that
# is warm in many layers is a frequency that the whole model favours.
#
# Then, section by section:
#
# ### Frequencies and their cycles
#
# Wavelengths, cycles over the effective context, pairing, window. No measurement of usage yet: this
# is the rotation itself. Hold it against the model's card. **Not to be trusted** where the host
# does not know the trained context; then say `--context`.
#
# ### Usage
#
# Mean length of each pair in queries and keys, in activation units. The base rate is the share of
# pairs: what a group of pairs holds is special only where it is more than their number.

# %%
usage = tables["usage"]
partial = usage[usage["cycles"] < 1]
Markdown(
    f"Partial cycles are {len(partial) / len(usage):.0%} of the pairs read, and hold "
    f"{partial['query'].sum() / usage['query'].sum():.0%} of query magnitude and "
    f"{partial['key'].sum() / usage['key'].sum():.0%} of key magnitude."
)

# %% [markdown]
# Large does not mean important. A contribution that is the same for every key a query sees moves no
# softmax, however large it is; what moves it is in the sections on sinks and heads.
#
# ### Outliers, offset features and their bounds
#
# Pairs that are large and nearly constant, and whether the strong ones among them keep the
# [bounds](../docs/mathematics.md#bounds). Each share has three things beside it:

# %%
bounds = tables["bounds"].set_index("bound")
bounds.apply(lambda column: column.map("{:.3g}".format))

# %% [markdown]
# - `base_rate`: the share of all pairs that keep the bound. A share means nothing without it.
# - `distinct`: heads of a group share their keys, so the same key pair can be counted several
#   times. Here each (layer, key head, pair) counts once.
# - `p_value`: how often shuffling the pairs of each layer gives as large a share. It takes layers
#   as independent, which they are not quite. The binomial p-values besides take every feature as
#   independent; they are far too small, and stand there for comparison with the literature.
#
# **Not to be trusted** with few tokens (a mean over few tokens is not an offset), or where
# `features` is a handful. The strongest exceptions are listed on the page: look at them before you
# quote a share.
#
# ### Attention sinks and the previous token
#
# Sink share: mean attention to the strongest key, over the queries that see it. The base rate is
# what uniform attention gives the first key; it falls with the length of the prompt:

# %%
uniform = report["sinks"]["uniform_share"]
Markdown(
    f"Here uniform attention would give the first key {uniform:.1%}, and a head is called a sink "
    f"head above {report['sinks']['threshold']:.0%}. "
    f"{len(sinks)} of {len(report['heads'])} heads are."
)

# %% [markdown]
# *One pair removed* forms the pattern again from the scores, one layer at a time; the model does
# not run again, so later layers do not answer. With interventions on (the default), a table below
# it shows the running model without the best pairs, its loss, and the control: as many random other
# pairs removed, in several draws. Where the control falls too, the removal says nothing. Where it
# stands, the removal beats a typical pair, which is small: the control is not matched in size.
#
# **Not to be trusted**: a sink share just above the threshold (0.31 and 0.29 are not two kinds of
# head), or sinks on prompts that all start alike. Whether the sink is BOS or "whatever comes first"
# cannot be told from prompts that all start with BOS.
#
# ### What the heads do
#
# A name for each head that clears a stated threshold and, for targets, at least twice the base rate
# of uniform attention. Else the head is *mixed*: that is an answer, too. In the table, `strength`
# is what the name rests on and `base_rate` what uniform attention would give:

# %%
heads = tables["heads"]
named = heads[heads["pattern"] != "mixed"].sort_values("strength", ascending=False)
named.groupby("pattern", sort=False).head(2)[
    ["layer", "head", "pattern", "also", "strength", "base_rate", "offset_offset", "pair", "band"]
].round(3)

# %% [markdown]
# The four offset shares of a head sum to 1; a single one can be slightly negative. `offset_offset`
# is what depends on distance alone. Induction, duplicate token and first occurrence are measured on
# random tokens that come back, because a text repeats too little. **Not to be trusted**: a name as
# the whole truth. `also` lists other names that hold.

# %%
parts_of = heads[["offset_offset", "offset_content", "content_offset", "content_content"]]
assert (parts_of.sum(axis=1) - 1).abs().max() < 1e-3

# %% [markdown]
# ### Keys before and after RoPE
#
# Eigenvalues of the covariance of a layer's keys. Rotation keeps the length of every key, so
# $\operatorname{trace}(\text{post}) - \operatorname{trace}(\text{pre})$ is exactly the energy of
# the mean key that rotation spreads over positions, the rotated offset. That identity is in the
# JSON:

# %%
spectrum = pd.DataFrame(
    [
        {
            "layer": entry["layer"],
            "trace before": entry["pre"]["trace"],
            "trace after": entry["post"]["trace"],
            "rotated offset": entry["offset_energy"],
            "rank 90% before": entry["pre"]["rank90"],
            "rank 90% after": entry["post"]["rank90"],
        }
        for entry in report["spectrum"]
    ]
).set_index("layer")
gained = spectrum["trace after"] - spectrum["trace before"]
assert (gained - spectrum["rotated offset"]).abs().max() < 1e-3 * spectrum["trace after"].max()
spectrum.round(1)

# %%
n_tokens = manifest["prompts"]["tokens"]
n_components = report["model"]["kv_heads"] * report["model"]["d_head"]
Markdown(
    f"**Not to be trusted** with few tokens. These keys have {n_components} components side by "
    f"side, and {n_tokens} tokens were read. A covariance needs several times as many tokens as "
    "components, so the ranks above are likely too low. With fewer tokens than components they "
    "are left out, and a note says so."
)

# %% [markdown]
# ### Head gallery
#
# The most telling heads, each with the reason why it was chosen: attention, scores and what single
# pairs add, token by token, on the first prompt alone. It is there for looking, not for counting.
# Choose your own with `--heads 16.0,14.3`.
#
# ### Verification, and About
#
# The errors of every layer and the route by which it was read, then versions, prompts and what was
# left out.
#
# ## A few habits
#
# 1. Read the notes before the findings.
# 2. Quote a share with its base rate, a removal with its control, and both with the number of
#    tokens.
# 3. Run a second set of prompts, and quote what survived.
# 4. Keep the manifest with any figure that you publish.
#
# ## What was shown, and what was not
#
# Shown, and asserted above:
#
# - One command writes a page, JSON, tables and a manifest; the findings can be recomputed from the
#   tables.
# - `--resume` writes nothing again that would come out the same, and failures have their own exit
#   codes.
# - Two reports can be compared without a model, and what differs besides the model is said first.
#
# Not shown:
#
# - The running model without pairs: leave out `--no-interventions`. It is in [tutorial
#   3](3_attention_sinks.py).
# - Layers outside of 12 to 17. Base rates and counts above are of these six.
# - Anything that two prompts per set are too few for. A few thousand tokens of your own text are a
#   better start.
#
# Next: the [report in pictures](../docs/report.md), every [option](../docs/cli.md), or what [two
# real models](../docs/findings.md) show. Back to the [first tutorial](1_reading_rotary_qk.py).
