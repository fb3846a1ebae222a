"""What an intervention does to attention and loss, beside random pairs: `ablation_report`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lens_rope.ablation import How, LayerPlan, Offsets, Pairs, ablated, plan_ablation
from lens_rope.capturing import token_rows
from lens_rope.errors import InputError
from lens_rope.heads import only_heads
from lens_rope.hosts import Host, LayerReading, host_of
from lens_rope.hosts.editing import edits_of
from lens_rope.scores import pattern_of, query_blocks, soft_capped
from lens_rope.sink_heads import COLLAPSED
from lens_rope.sinks import MIN_TOKENS, SINK_THRESHOLD, head_shares
from lens_rope.streaming import LayerStream
from lens_rope.words import percent

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go
    from jaxtyping import Float, Int

    from lens_rope.records import LayerCapture, Prompt
    from lens_rope.sinks import HeadShares
    from lens_rope.views.ablation_figures import Attention

HeadPairs = dict[tuple[int, int], tuple[int, ...]]
"""Pairs by (layer, head)."""

CONTROLS = 3
"""Draws of other pairs, unless asked for otherwise."""

_PROBE_TOKENS = 16
"""Every change is checked before it is compared with; the text itself is much longer than this."""

_LOSS_ROWS = 256
"""Queries whose losses are formed at a time, so that logits are not held twice."""


@dataclass(frozen=True)
class HeadEffect:
    """One ablated head before and after, and with random other pairs in place of its own.

    Shares and distances are means over prompts weighted by tokens; those of the control are the
    median over its draws.

    Attributes:
        layer: Index of the layer.
        head: Index of the query head.
        pairs: The pairs that were ablated.
        sink_positions: One per prompt: the key with the head's largest sink share before (see
            `sinks.head_shares`).
        sink_before: Mean attention to that key over the queries that see it.
        sink_after: The same key after.
        sink_control: The same key with other pairs ablated.
        previous_before: Mean attention of a query to the token before it.
        previous_after: Likewise after.
        previous_control: Likewise with other pairs ablated.
        change: Total variation distance between the attention of a query before and after, mean
            over queries, in [0, 1]; a learned sink counts as one more key.
        change_control: Likewise with other pairs ablated.
    """

    layer: int
    head: int
    pairs: tuple[int, ...]
    sink_positions: tuple[int, ...]
    sink_before: float
    sink_after: float
    sink_control: float
    previous_before: float
    previous_after: float
    previous_control: float
    change: float
    change_control: float


@dataclass(frozen=True)
class SinkCollapse:
    """How many of the ablated sink heads lost their sink.

    Attributes:
        n_heads: Ablated heads that had a sink share above 0.3 before.
        below: Sink share below which a head has lost its sink.
        collapsed: Share of those heads whose sink share is below it after.
        control_collapsed: The same with random other pairs.
        control_kept: Share of those heads that keep more than half of their sink share with random
            other pairs. All shares are nan where there is no such head.
    """

    n_heads: int
    below: float
    collapsed: float
    control_collapsed: float
    control_kept: float


@dataclass(frozen=True)
class AblationReport:
    """Loss of the model and attention of the ablated heads, before and after.

    Attributes:
        model: Name of the model.
        how: `zero`, `mean` or `unrotate`.
        pairs: The ablated pairs of each `(layer, head)`.
        prompts: Names of the prompts.
        n_tokens: Number of tokens behind the numbers.
        loss_before: Mean next-token cross-entropy of the model, nats/token.
        loss_after: Likewise inside the intervention.
        loss_controls: Likewise for each draw of other pairs.
        heads: One entry per ablated head, in order of layer and head.
        notes: What the numbers cannot say, in sentences.
    """

    model: str
    how: How
    pairs: HeadPairs
    prompts: tuple[str, ...]
    n_tokens: int
    loss_before: float
    loss_after: float
    loss_controls: tuple[float, ...]
    heads: tuple[HeadEffect, ...]
    notes: tuple[str, ...]

    def collapsed(self, below: float = COLLAPSED) -> SinkCollapse:
        """How many of the ablated sink heads lost their sink.

        Args:
            below: Sink share below which a head has lost its sink.
        """
        sinks = [head for head in self.heads if head.sink_before > SINK_THRESHOLD]

        def share(holds: Callable[[HeadEffect], bool]) -> float:
            return sum(map(holds, sinks)) / len(sinks) if sinks else math.nan

        return SinkCollapse(
            n_heads=len(sinks),
            below=below,
            collapsed=share(lambda head: head.sink_after < below),
            control_collapsed=share(lambda head: head.sink_control < below),
            control_kept=share(lambda head: head.sink_control > 0.5 * head.sink_before),
        )

    def to_dataframe(self) -> pd.DataFrame:
        """One row per ablated head, see `HeadEffect`.

        Columns: `layer`, `head`, `pairs`, `sink_positions` (one per prompt; both as text with
        spaces), `sink_before`, `sink_after`, `sink_control`, `previous_before`, `previous_after`,
        `previous_control`, `change`, `change_control` (shares of attention).
        """
        import pandas as pd

        table = pd.DataFrame([vars(head) for head in self.heads])
        for column in ("pairs", "sink_positions"):
            # A cell that is a tuple would not survive a CSV.
            table[column] = [" ".join(map(str, cell)) for cell in table[column]]
        return table

    def sentences(self) -> tuple[str, ...]:
        """The numbers in words, without the notes."""
        n_pairs = sum(map(len, self.pairs.values()))
        done = f"{_DONE[self.how]} {n_pairs} pairs of {len(self.pairs)} heads of {self.model}"
        if math.isnan(self.loss_before):
            return (f"{done}: without a next token there is no loss to compare.",)
        sentences = [
            f"{done} moved the loss from {self.loss_before:.2f} to {self.loss_after:.2f} "
            f"nats/token; as many random other pairs, {min(self.loss_controls):.2f} to "
            f"{max(self.loss_controls):.2f} ({len(self.loss_controls)} draws)."
        ]
        sinks = self.collapsed()
        if sinks.n_heads:
            sentences.append(
                f"Of {sinks.n_heads} sink heads among them, {percent(sinks.collapsed)} fell below "
                f"a sink share of {sinks.below:g}, and {percent(sinks.control_collapsed)} with "
                f"the random pairs ({percent(sinks.control_kept)} kept more than half of it)."
            )
        return tuple(sentences)

    def summary(self) -> str:
        """The sentences and notes as one text."""
        return " ".join((*self.sentences(), *self.notes))

    def plot(self, attention: Attention | None = None) -> go.Figure:
        """Loss, and attention of each ablated head, before and after and with random pairs.

        Args:
            attention: `sink` or `previous`; None takes the sink where any head has one.

        Raises:
            InputError: The attention is neither.
        """
        from lens_rope.views.ablation_figures import ablation_dots

        return ablation_dots(self, attention=attention)

    def _repr_html_(self) -> str:
        """For a notebook: the sentences, the table, and the loss and attention."""
        from lens_rope.views.descriptions import describe_ablation
        from lens_rope.views.result_html import result_html

        return result_html(describe_ablation(self), [self.plot()])

    def __repr__(self) -> str:
        """The sentences, and the table."""
        table = self.to_dataframe().drop(columns="sink_positions")
        return f"{self.summary()}\n{table.round(3).to_string(index=False, max_rows=40)}"


_DONE = {
    "zero": "Setting to zero",
    "mean": "Setting to their mean",
    "unrotate": "Freeing from rotation",
}


def ablation_report(
    model: Any,
    prompts: str | Sequence[str] | Int[torch.Tensor, "batch pos"],
    pairs: Pairs,
    how: How = "zero",
    *,
    offsets: Offsets | None = None,
    controls: int = CONTROLS,
    seed: int = 0,
    max_tokens: int | None = None,
    names: Sequence[str] | None = None,
) -> AblationReport:
    """What `ablate_frequencies` does to the loss and to the attention of the ablated heads.

    Patterns and logits are those of the running model, one uncached pass per prompt before, after
    and for each control. A control ablates, in every ablated head, as many other pairs drawn at
    random (all other pairs where there are fewer); heads that share an unrotated key draw the same.

    Args:
        model: A `HookedTransformer` or `TransformerBridge`. It is left as it was.
        prompts: A text, several texts, or token ids `[pos]` or `[batch, pos]`, without padding.
        pairs: As for `ablate_frequencies`.
        how: As for `ablate_frequencies`.
        offsets: As for `ablate_frequencies`.
        controls: Number of draws of other pairs.
        seed: Seed of the draws.
        max_tokens: Cut longer prompts to this many tokens.
        names: A name per prompt.

    Returns:
        Loss and attention before, after, and with other pairs in place of the chosen ones.

    Raises:
        InputError: As `ablate_frequencies` and `capture`; a head has no other pairs; or the model
            is inside `ablate_frequencies` already.
        PromptError: A prompt is empty, longer than the model can run, or does not fit in memory.
        UnsupportedModelError: As `ablate_frequencies`.
        VerificationError: As `ablate_frequencies`.
    """
    host = host_of(model)
    if controls < 1:
        raise InputError(f"controls is {controls}; at least 1 draw is needed to compare with")
    _refuse_inside(model)
    plans = plan_ablation(host, pairs, how, offsets, n_tokens=_PROBE_TOKENS)
    runs = _planned_runs(plans, how, controls, seed)
    heads: dict[int, list[int]] = {}
    for layer, head in _by_head(plans):
        heads.setdefault(layer, []).append(head)
    # As the runs without the pairs, whose patterns are compared: another way of computing attention
    # rounds in another way.
    stream = LayerStream(model, sorted(plans), attention="eager")
    rows = token_rows(model, prompts)
    names = [f"prompt {i}" for i in range(len(rows))] if names is None else names
    if len(names) != len(rows):
        raise InputError(f"{len(names)} names for {len(rows)} prompts; give one each")
    named = [stream.prompt(name, row, max_tokens) for name, row in zip(names, rows, strict=True)]
    return _compared(host, how, runs, [_read_baseline(stream, prompt, heads) for prompt in named])


def compare_with_baseline(
    model: Any,
    baseline: Baseline,
    pairs: Pairs,
    *,
    controls: int = CONTROLS,
    seed: int = 0,
) -> AblationReport:
    """As `ablation_report` with `zero` on one prompt of which the unchanged model was read before.

    Args:
        model: The model, outside of `ablate_frequencies`.
        baseline: The prompt in the unchanged model, with every head that is ablated.
        pairs: As for `ablate_frequencies`.
        controls: Number of draws of other pairs.
        seed: Seed of the draws.

    Raises:
        InputError: As `ablation_report`.
        UnsupportedModelError: Likewise.
        VerificationError: Likewise.
    """
    host = host_of(model)
    _refuse_inside(model)
    plans = plan_ablation(host, pairs, "zero", n_tokens=_PROBE_TOKENS)
    return _compared(host, "zero", _planned_runs(plans, "zero", controls, seed), [baseline])


@dataclass(frozen=True, eq=False)
class BaselineLayer:
    """One layer of one prompt in the unchanged model.

    Attributes:
        heads: The heads that are ablated.
        record: Queries and keys of these heads alone.
        shares: Attention shares of all heads.
    """

    heads: tuple[int, ...]
    record: LayerCapture
    shares: HeadShares


@dataclass(frozen=True, eq=False)
class Baseline:
    """One prompt in the unchanged model.

    Attributes:
        prompt: The prompt.
        layers: By index, the layers with heads that are ablated.
        loss: Mean next-token cross-entropy, nats/token; nan for one token.
    """

    prompt: Prompt
    layers: Mapping[int, BaselineLayer]
    loss: float


def baseline_layer(record: LayerCapture, shares: HeadShares, heads: Sequence[int]) -> BaselineLayer:
    """What is kept of one layer to compare with: copies of what some of its heads need.

    Args:
        record: Queries and keys of the layer.
        shares: Its attention shares.
        heads: The heads that are ablated, ascending.
    """
    return BaselineLayer(tuple(heads), only_heads(record, heads), shares)


def next_token_loss(logits: Float[torch.Tensor, "pos vocab"], token_ids: Sequence[int]) -> float:
    """Mean next-token cross-entropy in nats/token; nan for one token.

    Args:
        logits: `[pos, vocab]` What the model predicts after each token.
        token_ids: `[pos]` The tokens.
    """
    if len(token_ids) < 2:
        return math.nan
    targets = torch.tensor(token_ids[1:], dtype=torch.long, device=logits.device)
    total = 0.0
    for start in range(0, len(targets), _LOSS_ROWS):
        of = slice(start, min(start + _LOSS_ROWS, len(targets)))
        losses = torch.nn.functional.cross_entropy(logits[of], targets[of], reduction="none")
        total += float(losses.double().cpu().sum())
    return total / len(targets)


@dataclass(frozen=True, eq=False)
class _Run:
    """What the ablated heads and the loss are in one forward pass, or their mean over several.

    Attributes:
        loss: Mean next-token cross-entropy, nats/token.
        sink: `[ablated]` Attention to the key that was the head's sink.
        previous: `[ablated]` Attention to the token before.
        change: `[ablated]` Total variation distance from the captured attention.
    """

    loss: float
    sink: Float[np.ndarray, " ablated"]
    previous: Float[np.ndarray, " ablated"]
    change: Float[np.ndarray, " ablated"]


def _by_head(plans: dict[int, LayerPlan]) -> HeadPairs:
    """The chosen pairs of each head that has any."""
    return {
        (layer, head): tuple(row.nonzero().flatten().tolist())
        for layer, plan in sorted(plans.items())
        for head, row in enumerate(plan.chosen)
        if row.any()
    }


def _draw(plans: dict[int, LayerPlan], how: How, generator: np.random.Generator) -> HeadPairs:
    """As many other pairs for each ablated head."""
    drawn: HeadPairs = {}
    shared: dict[tuple[int, int], tuple[int, ...]] = {}
    for (layer, head), pairs in _by_head(plans).items():
        plan = plans[layer]
        group = (layer, head // (len(plan.chosen) // plan.n_kv_heads))
        if how == "unrotate" and group in shared:
            drawn[layer, head] = shared[group]
            continue
        others = np.setdiff1d(np.arange(plan.rope.n_pairs), pairs)
        if len(others) == 0:
            raise InputError(
                f"layer {layer} head {head} has no pairs besides the ablated ones to compare with; "
                "ablate fewer"
            )
        wanted = min(len(pairs), len(others))
        draw = generator.choice(others, size=wanted, replace=False)
        drawn[layer, head] = shared[group] = tuple(sorted(draw.tolist()))
    return drawn


def _refuse_inside(model: Any) -> None:
    if edits_of(model):
        raise InputError(
            "the model is inside ablate_frequencies; leave that context, the report enters its own"
        )


def _planned_runs(
    plans: dict[int, LayerPlan], how: How, controls: int, seed: int
) -> list[dict[int, LayerPlan]]:
    """The plans as they are, and with other pairs for each control."""
    generator = np.random.default_rng(seed)
    draws = [_draw(plans, how, generator) for _ in range(controls)]
    return [plans, *(_with_pairs(plans, drawn) for drawn in draws)]


def _with_pairs(plans: dict[int, LayerPlan], pairs: HeadPairs) -> dict[int, LayerPlan]:
    """The same plans with other pairs of the same heads; all else holds for any pair."""
    out = {}
    for layer, plan in plans.items():
        chosen = torch.zeros_like(plan.chosen)
        for head in range(len(chosen)):
            chosen[head, list(pairs.get((layer, head), ()))] = True
        out[layer] = dataclasses.replace(plan, chosen=chosen)
    return out


def _read_baseline(
    stream: LayerStream, prompt: Prompt, heads: Mapping[int, Sequence[int]]
) -> Baseline:
    """One prompt in the unchanged model, by layer the heads that are ablated."""
    layers: dict[int, BaselineLayer] = {}

    def visit(record: LayerCapture) -> None:
        layer = record.rope.layer
        layers[layer] = baseline_layer(record, head_shares(record), heads[layer])

    logits = stream.run_to_logits(prompt, visit)
    return Baseline(prompt, layers, next_token_loss(logits, prompt.token_ids))


def _compared(
    host: Host, how: How, runs: Sequence[dict[int, LayerPlan]], baselines: Sequence[Baseline]
) -> AblationReport:
    """Every run on every prompt, beside the unchanged model. The first run is the one meant."""
    pairs = _by_head(runs[0])
    results = [[_unchanged(baseline, pairs) for baseline in baselines]]
    for plans in runs:
        with ablated(host, plans, n_tokens=_PROBE_TOKENS):
            results.append([_run(host, baseline, pairs) for baseline in baselines])
    lengths = [len(baseline.prompt) for baseline in baselines]
    merged = [_merged(run, lengths) for run in results]
    sinks = [
        tuple(int(baseline.layers[layer].shares.sink_position[head]) for layer, head in pairs)
        for baseline in baselines
    ]
    return AblationReport(
        model=host.info.name,
        how=how,
        pairs=pairs,
        prompts=tuple(baseline.prompt.name for baseline in baselines),
        n_tokens=sum(lengths),
        loss_before=merged[0].loss,
        loss_after=merged[1].loss,
        loss_controls=tuple(run.loss for run in merged[2:]),
        heads=tuple(_effects(pairs, sinks, merged)),
        notes=_notes(lengths),
    )


def _unchanged(baseline: Baseline, pairs: HeadPairs) -> _Run:
    """The unchanged model as a run."""
    shares = [(baseline.layers[layer].shares, head) for layer, head in pairs]
    return _Run(
        loss=baseline.loss,
        sink=np.array([entry.sink_share[head] for entry, head in shares]),
        previous=np.array([entry.previous_share[head] for entry, head in shares]),
        change=np.zeros(len(pairs)),
    )


def _run(host: Host, baseline: Baseline, pairs: HeadPairs) -> _Run:
    """One prompt through the model as it is now."""
    row = {key: i for i, key in enumerate(pairs)}
    numbers = np.full((len(pairs), 3), np.nan)

    def visit(reading: LayerReading) -> None:
        before = baseline.layers[reading.layer]
        rows = [row[reading.layer, head] for head in before.heads]
        numbers[rows] = _attention(before, reading.pattern).cpu().numpy()

    token_ids = baseline.prompt.token_ids
    logits = host.read_logits(token_ids, sorted(baseline.layers), visit)
    return _Run(next_token_loss(logits, token_ids), *numbers.T)


def _attention(
    before: BaselineLayer, pattern: Float[torch.Tensor, "head q_pos k_pos"]
) -> Float[torch.Tensor, "ablated 3"]:
    """`[ablated, 3]` Sink share, previous-token share and change of the ablated heads' patterns.

    Args:
        before: The layer in the unchanged model.
        pattern: `[head, q_pos, k_pos]` The pattern of all heads of the layer now.
    """
    record, device = before.record, pattern.device
    heads = torch.tensor(before.heads, device=device)
    n_pos, window = record.n_pos, record.rope.window
    # Rotated values give the score as they are: the sum over pairs and pass-through, in one.
    q, k = (x.to(device).movedim(1, 0) for x in (record.scale * record.q, record.k))
    sinks = None if record.sinks is None else record.sinks.to(device)
    distance = torch.zeros(len(heads), dtype=torch.float64)
    for block in query_blocks(n_pos, window, device=device):
        scores = soft_capped(q[:, block.rows] @ k[:, block.keys].mT, record.softcap)
        visible = torch.tensor(True) if block.hidden is None else ~block.hidden
        was = pattern_of(scores, visible.to(device), sinks)
        change = pattern[:, block.rows, block.keys][heads].float() - was
        # What is missing from a row goes to the learned sink.
        moved = 0.5 * (change.abs().sum(dim=-1) + change.sum(dim=-1).abs())
        distance += moved.cpu().sum(dim=-1, dtype=torch.float64)
    at = torch.tensor([int(before.shares.sink_position[head]) for head in before.heads])
    seen_by = (n_pos - at).clamp(max=n_pos if window is None else window)
    # On the CPU: some accelerators have no float64.
    received = pattern[heads, :, at.to(device)].cpu().sum(dim=1, dtype=torch.float64) / seen_by
    # nan for one token
    previous = pattern.diagonal(-1, dim1=1, dim2=2)[heads].cpu().double().mean(dim=1)
    return torch.stack([received, previous, distance / n_pos], dim=1)


def _merged(runs: list[_Run], lengths: list[int]) -> _Run:
    """Means over prompts, each weighted by the tokens that its numbers stand on."""
    long = [n if n >= MIN_TOKENS else 0 for n in lengths]
    after_first = [n - 1 for n in lengths]
    return _Run(
        loss=float(_mean([np.array(run.loss) for run in runs], after_first)),
        sink=_mean([run.sink for run in runs], long),
        previous=_mean([run.previous for run in runs], after_first),
        change=_mean([run.change for run in runs], lengths),
    )


def _mean(values: list[np.ndarray], weights: list[int]) -> np.ndarray:
    """Weighted mean over those that have weight; nan where none has."""
    kept = [(value, weight) for value, weight in zip(values, weights, strict=True) if weight]
    if not kept:
        return np.full_like(values[0], np.nan)
    return sum((value * weight for value, weight in kept), np.zeros(())) / sum(
        weight for _, weight in kept
    )


def _effects(
    ablated: HeadPairs, sinks: list[tuple[int, ...]], merged: list[_Run]
) -> list[HeadEffect]:
    before, after, controls = merged[0], merged[1], merged[2:]
    sink, previous, change = (
        np.median([getattr(run, name) for run in controls], axis=0)
        for name in ("sink", "previous", "change")
    )
    return [
        HeadEffect(
            layer=layer,
            head=head,
            pairs=pairs,
            sink_positions=tuple(positions[i] for positions in sinks),
            sink_before=float(before.sink[i]),
            sink_after=float(after.sink[i]),
            sink_control=float(sink[i]),
            previous_before=float(before.previous[i]),
            previous_after=float(after.previous[i]),
            previous_control=float(previous[i]),
            change=float(after.change[i]),
            change_control=float(change[i]),
        )
        for i, ((layer, head), pairs) in enumerate(ablated.items())
    ]


def _notes(lengths: list[int]) -> tuple[str, ...]:
    notes = []
    short = sum(n < MIN_TOKENS for n in lengths)
    if short:
        left = "no sink share is given" if short == len(lengths) else "they are left out of sinks"
        notes.append(
            f"{short} of {len(lengths)} prompts have fewer than {MIN_TOKENS} tokens, which say "
            f"little about sinks; {left}."
        )
    if max(lengths) == 1:
        notes.append("One token has no next token, so there is no loss and no previous token.")
    return tuple(notes)
