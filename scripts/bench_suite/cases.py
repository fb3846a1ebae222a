"""What is measured: each case runs in a process of its own and returns one row.

A row says what was measured (`case`, `host`, `tokens`, `measure`), what it came to (`ours`, and
`other` for what it is compared with, in seconds or GB), the number that is judged (`value`: their
ratio, or `ours`), its `limit`, and whether it is `met`. Where both sides give the same numbers, the
case ends in an error when they do not.
"""

from __future__ import annotations

import cProfile
import math
import pstats
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench_suite.measure import forget_peak, interleaved, medians, peak, resident

ROOT = Path(__file__).parents[2]
TEXT = ROOT / "tests" / "data" / "gpl-3.0.txt"
AGREE = 1e-3
"""Largest difference from a float32 baseline, over the largest number."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """One case to run.

    Attributes:
        case: A name in `CASES`.
        host: `hooked` or `bridge`.
        tokens: Length of the prompt; for `growth`, the longest.
        model: What `load_model` takes.
        rounds: How many times each side runs.
        shortest: For `growth`, the shortest prompt.
        layers: For `long`, how many layers are read.
    """

    case: str
    host: str = "hooked"
    tokens: int = 0
    model: str = "smollm2-135m"
    rounds: int = 3
    shortest: int = 512
    layers: int = 6


def run(task: Task) -> Row:
    """Measures one case in this process, with whether its limit is met."""
    found = CASES[task.case](task)
    row = {"case": task.case, "host": task.host, "tokens": task.tokens, "rounds": task.rounds}
    row |= found
    limit = LIMITS.get((task.case, task.tokens), LIMITS.get((task.case, None)))
    met = None if limit is None or row["value"] is None else row["value"] <= limit
    return {**row, "limit": limit, "met": met}


LIMITS: dict[tuple[str, int | None], float] = {
    ("report", 512): 2.0,
    ("report", 2048): 2.0,
    ("dense-time", 512): 1 / 30,
    ("dense-memory", 512): 1 / 10,
    ("shift", 4096): 1 / 50,
    ("report-memory", 2048): 1.5,
    ("report-peak", 8192): 8.0,
    ("long", 32768): 6.0,
    ("growth", None): 1.2,
    ("help", None): 1.0,
    ("inspect", None): 5.0,
}
"""The largest value of a case at a length; None stands for every length."""


def _load(task: Task) -> tuple[Any, Any]:
    """The model and `[pos]` token ids of a prompt; its text is repeated until it is long enough."""
    import torch

    import lens_rope as lr

    model: Any = lr.load_model(task.model, task.host)  # type: ignore[arg-type]
    ids = model.to_tokens(TEXT.read_text(encoding="utf-8"))[0].cpu()
    longest = max(task.tokens, 1)
    ids = torch.cat([ids, ids[1:].repeat(math.ceil(longest / (len(ids) - 1)))])
    return model, ids[:longest]


def _forward(model: Any, ids: Any) -> Callable[[], Any]:
    """The plain forward pass with logits."""
    import torch

    def forward() -> None:
        with torch.inference_mode():
            model(ids[None], return_type="logits")

    return forward


def _gather(model: Any, ids: Any, **options: Any) -> Callable[[], Any]:
    """The whole analysis of a report, without writing a page."""
    from lens_rope.reporting.gather import gather

    return lambda: gather(model, ids, **options)


def _agree(what: str, ours: Any, theirs: Any) -> float:
    """Largest difference over the largest number.

    Raises:
        ArithmeticError: It is more than rounding, so the two sides do not do the same work.
    """
    import numpy as np

    ours, theirs = np.asarray(ours), np.asarray(theirs)
    error = float(np.abs(ours - theirs).max() / np.abs(theirs).max())
    if not error <= AGREE:
        raise ArithmeticError(f"{what}: ours and the baseline differ by {error:.1e}")
    return error


def _report(task: Task, *, interventions: bool) -> Row:
    model, ids = _load(task)
    forward = _forward(model, ids)
    ours = _gather(model, ids, interventions=interventions)
    _gather(model, ids[:64], interventions=interventions)()  # what is imported and made once
    forward()
    found = medians(interleaved(task.rounds, ours, forward))
    row = {"measure": "time", **found, "value": found.pop("ratio")}
    return row if interventions else {**row, "parts": _parts(ours)}


_PARTS = {
    ("fit.py", "fit_rope"): "fit of the rotation",
    ("fit.py", "rotated"): "fit of the rotation",
    ("verify.py", "check_finite"): "verification",
    ("verify.py", "verify"): "verification",
    ("attention.py", "read_attention"): "attention, its sums and advantages",
    ("sink_heads.py", "layer_sinks"): "sinks",
    ("offsets.py", "layer_offsets"): "offsets",
    ("usage.py", "pair_usage"): "pair magnitudes",
    ("patterns.py", "layer_patterns"): "patterns of heads",
    ("patterns.py", "pattern_targets"): "patterns of heads",
    ("offset_shares.py", "layer_offset_shares"): "offset shares",
    ("metrics.py", "layer_metrics"): "head metrics",
    ("spectrum.py", "layer_keys"): "key spectra",
    ("finishing.py", "finish"): "putting the report together",
    ("decomposition.py", "pair_shares"): "gallery",
    ("gallery.py", "gallery"): "gallery",
}
"""What functions of the package are for that do not call each other, but for `_WITHIN`."""

_WITHIN = "sink_shares"
"""A part of the gallery that calls `read_attention`."""


def _parts(work: Callable[[], Any]) -> dict[str, float]:
    """Share of the time by what it is for; the rest is the model's own passes."""
    profile = cProfile.Profile()
    profile.enable()
    work()
    profile.disable()
    stats = pstats.Stats(profile)
    total = stats.total_tt  # type: ignore[attr-defined]
    parts: dict[str, float] = {}
    for (file, _, name), (*_, callers) in stats.stats.items():  # type: ignore[attr-defined]
        path = Path(file)
        part = _PARTS.get((path.name, name)) if "lens_rope" in path.parts else None
        if part is not None:
            seconds = sum(
                spent for (_, _, caller), (*_, spent) in callers.items() if caller != _WITHIN
            )
            parts[part] = parts.get(part, 0.0) + seconds / total
    return {"the model's passes and the rest": max(0.0, 1 - sum(parts.values())), **parts}


def _one_layer(task: Task) -> tuple[Any, Any]:
    """A capture of the middle layer, its queries and keys; others of the model cost the same."""
    import lens_rope as lr

    model, ids = _load(task)
    layer = model.cfg.n_layers // 2
    qk = lr.capture(model, ids, [layer])
    record = qk.layer(layer)
    sides = (record.q, record.k, record.rope.pairing, record.scale)
    return record, sides


def _profiles(record: Any) -> Any:
    """By head, `[pair, distance]` distance profiles of a layer."""
    from lens_rope.decomposition import layer_distance_profiles

    return [profile.mean.T for profile in layer_distance_profiles(record)]


def _advantages(record: Any) -> Any:
    """`[head, pair]` Advantages of what each head attends to."""
    import numpy as np

    from lens_rope.attention import read_attention

    return np.stack([entry.pairs for entry in read_attention(record).attended])


def _dense_time(task: Task) -> Row:
    import torch

    from bench_suite import baselines

    record, sides = _one_layer(task)
    with torch.inference_mode():
        advantages, profiles = baselines.dense(*sides)
        agreement = max(
            _agree("advantages", _advantages(record), advantages),
            _agree("distance profiles", _profiles(record), profiles),
        )
        found = medians(
            interleaved(
                task.rounds,
                lambda: (_advantages(record), _profiles(record)),
                lambda: baselines.dense(*sides),
            )
        )
    return {"measure": "time", **found, "value": found.pop("ratio"), "agreement": agreement}


def _dense_memory(task: Task) -> Row:
    import torch

    from bench_suite import baselines

    record, sides = _one_layer(task)
    _advantages(record), _profiles(record)  # what is imported and made once
    with torch.inference_mode():
        # Ours first: what the other leaves with the allocator would hide ours.
        ours = _above(lambda: (_advantages(record), _profiles(record)))
        other = _above(lambda: baselines.dense(*sides))
    return {"measure": "memory", "ours": ours, "other": other, "value": ours / other}


def _above(work: Callable[[], Any]) -> float:
    """Peak memory above what is held now, in GB."""
    forget_peak()
    before = resident()
    work()
    return max(peak() - before, 1e-6)


def _shift(task: Task) -> Row:
    import torch

    from bench_suite import baselines

    record, sides = _one_layer(task)
    with torch.inference_mode():
        theirs = baselines.shift_and_multiply(*sides)
        agreement = _agree("distance profiles", _profiles(record), theirs)
        found = medians(
            interleaved(
                task.rounds,
                lambda: _profiles(record),
                lambda: baselines.shift_and_multiply(*sides),
            )
        )
    return {"measure": "time", **found, "value": found.pop("ratio"), "agreement": agreement}


def _report_memory(task: Task) -> Row:
    model, ids = _load(task)
    _gather(model, ids[:64])()
    ours = _above(_gather(model, ids))
    return {"measure": "memory above the loaded model", "ours": ours, "other": None, "value": ours}


def _report_peak(task: Task) -> Row:
    model, ids = _load(task)
    start = time.perf_counter()
    _gather(model, ids)()
    seconds = time.perf_counter() - start
    ours = peak()
    return {
        "measure": "memory of the process", "ours": ours, "other": None, "value": ours,
        "seconds": seconds,
    }  # fmt: skip


def _long(task: Task) -> Row:
    import lens_rope as lr

    model, ids = _load(task)
    start = time.perf_counter()
    qk = lr.capture(model, ids, range(task.layers), attention="fused")
    for layer in qk.layer_indices:
        _profiles(qk.layer(layer))
    seconds = time.perf_counter() - start
    ours = peak()
    return {
        "measure": "memory of the process", "ours": ours, "other": None, "value": ours,
        "seconds": seconds, "layers": task.layers,
    }  # fmt: skip


def _growth(task: Task) -> Row:
    """Exponent of each stage: the slope of log time over log length, and the largest of them."""
    lengths = [task.shortest]
    while lengths[-1] * 2 <= task.tokens:
        lengths.append(lengths[-1] * 2)
    model, ids = _load(task)
    seconds: dict[str, dict[int, float]] = {}
    for n_tokens in lengths:
        for stage, work in _stages(model, ids[:n_tokens]).items():
            work()
            taken = [row[0] for row in interleaved(task.rounds, work)]
            seconds.setdefault(stage, {})[n_tokens] = statistics.median(taken)
        seconds["fit and verification"] = {
            **seconds.get("fit and verification", {}),
            n_tokens: statistics.median(
                _fit_and_verify(model, ids[:n_tokens]) for _ in range(task.rounds)
            ),
        }
    slopes = {
        stage: statistics.linear_regression(
            [math.log(n) for n in found], [math.log(s) for s in found.values()]
        ).slope
        for stage, found in seconds.items()
    }
    return {
        "measure": "exponent of the length", "ours": max(slopes.values()), "other": None,
        "value": max(slopes.values()), "exponents": slopes,
        "stage_seconds": {stage: list(found.values()) for stage, found in seconds.items()},
        "lengths": lengths,
    }  # fmt: skip


def _stages(model: Any, ids: Any) -> dict[str, Callable[[], Any]]:
    """What is worked out of one layer, but for its attention, by name."""
    import lens_rope as lr
    from lens_rope.advantage import layer_advantages
    from lens_rope.attention import read_attention
    from lens_rope.decomposition import layer_pair_summaries, pair_shares
    from lens_rope.metrics import layer_metrics
    from lens_rope.offset_shares import layer_offset_shares
    from lens_rope.offsets import layer_offsets
    from lens_rope.patterns import pattern_targets
    from lens_rope.removal import head_shares_without
    from lens_rope.sink_heads import EXACT_PAIRS, REMOVAL_QUERIES
    from lens_rope.spectrum import layer_keys
    from lens_rope.targets import sink_target
    from lens_rope.usage import pair_usage

    layer = 1 if model.cfg.n_layers > 1 else 0
    qk = lr.capture(model, ids, [layer], attention="auto")
    record = qk.layer(layer)
    token_ids = qk.prompts[0].token_ids
    attention = read_attention(record)
    # As of a layer all of whose heads have their sink at the first key.
    pairs = [[[pair] for pair in range(min(EXACT_PAIRS, record.rope.n_pairs))]] * record.n_heads
    offsets = layer_offsets(record, ())
    first_key = sink_target(0, record.n_pos, record.rope.window)
    return {
        "advantages of one key": lambda: layer_advantages(record, first_key),
        "removal of pairs": lambda: head_shares_without(
            record, range(record.n_heads), 0, pairs, max_queries=REMOVAL_QUERIES
        ),
        "shares of score variance": lambda: pair_shares(record),
        "distance profiles": lambda: _profiles(record),
        "split by pair": lambda: layer_pair_summaries(record),
        "offsets": lambda: layer_offsets(record, ()),
        "offset shares": lambda: layer_offset_shares(record, token_ids, offsets, ()),
        "head metrics": lambda: layer_metrics(record, attention),
        "key spectra": lambda: layer_keys(record),
        "pair magnitudes": lambda: pair_usage(record),
        "pattern targets": lambda: pattern_targets(token_ids, record.rope),
    }


def _fit_and_verify(model: Any, ids: Any) -> float:
    """Seconds of fitting and verifying one layer whose attention is fused."""
    from lens_rope.fit import fit_rope, rotated
    from lens_rope.hosts import host_of
    from lens_rope.verify import verify

    taken: list[float] = []

    def visit(reading: Any) -> None:
        start = time.perf_counter()
        rope = fit_rope(reading)
        verify(*rotated(reading, rope), rope, reading, "the model")
        taken.append(time.perf_counter() - start)

    layer = 1 if model.cfg.n_layers > 1 else 0
    host_of(model).read(ids.tolist(), [layer], visit, "fused")
    return sum(taken)


def _command(task: Task, *arguments: str) -> Row:
    """Seconds of a command, from its start to its end."""
    command = [sys.executable, "-m", "lens_rope.cli", *arguments]

    def call() -> None:
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

    call()  # the files are in the system's cache then, for all
    taken = [row[0] for row in interleaved(task.rounds, call)]
    seconds = statistics.median(taken)
    return {"measure": "time", "ours": seconds, "other": None, "value": seconds}


def _inspect(task: Task) -> Row:
    from lens_rope.demo import DEMO_MODEL, demo_directory

    folder = str(demo_directory()) if task.model == DEMO_MODEL else task.model
    return _command(task, "inspect", folder, "--backend", task.host)


CASES: dict[str, Callable[[Task], Row]] = {
    "report": lambda task: _report(task, interventions=False),
    "report-interventions": lambda task: _report(task, interventions=True),
    "dense-time": _dense_time,
    "dense-memory": _dense_memory,
    "shift": _shift,
    "report-memory": _report_memory,
    "report-peak": _report_peak,
    "long": _long,
    "growth": _growth,
    "help": lambda task: _command(task, "--help"),
    "inspect": _inspect,
}
