"""A report holds what the functions behind it return, in the keys that others rely on, the same
bytes for the same input, and is written whole or not at all."""

from __future__ import annotations

import csv
import dataclasses
import itertools
import json
import math
import re
import weakref
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
import zoo
from planted import named_heads, planted_capture, random_record, sink_by_push
from report_fixtures import (
    HOSTILE,
    alike,
    build_gallery,
    random_capture,
    report_data,
    rope,
    with_pairs,
)

import lens_rope.reporting.first_prompt as first_module
import lens_rope.reporting.gather as gather_module
import lens_rope.sink_heads
from lens_rope.ablation_effects import CONTROLS, ablation_report
from lens_rope.bounds import BOUNDS
from lens_rope.capturing import capture, token_rows
from lens_rope.decomposition import decompose
from lens_rope.errors import InputError, OutputError, PromptError, VerificationError
from lens_rope.heads import repeated_patterns
from lens_rope.offsets import RELATIVE
from lens_rope.records import Prompt
from lens_rope.reporting import report
from lens_rope.reporting.analysis import analyse, judge, merge
from lens_rope.reporting.findings import findings, notes
from lens_rope.reporting.gallery import PER_REASON, RULE_ASKED, Shortlist
from lens_rope.reporting.index import render_index
from lens_rope.reporting.page import render
from lens_rope.reporting.sample import sample_text
from lens_rope.reporting.schema import to_dict
from lens_rope.reporting.tables import tables
from lens_rope.reporting.write import MARKER, check_folder, read_markers, write_index
from lens_rope.sinks import head_shares, merge_shares
from lens_rope.spectrum import layer_keys, layer_spectrum, merge_keys
from lens_rope.usage import merge_usage, pair_usage
from lens_rope.views.tokens import display_text

TEXTS = [
    # Words from t40 on: t1 and the like are special tokens, also at the start of a word.
    " ".join(f"t{40 + (7 * i) % 50}" for i in range(40)),
    " ".join(f"t{40 + i % 11}" for i in range(25)),
]


@pytest.fixture(scope="module")
def model():
    return zoo.bridge("llama")


@pytest.fixture(scope="module")
def done(model):
    return report(model, TEXTS, names=["one", "two"])


def strict(text: str) -> dict:
    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


# Numbers


def test_a_report_adds_up_what_each_prompt_gives(model, done):
    records = [capture(model, text).records[0] for text in TEXTS]
    for layer in range(2):
        usage = merge_usage([pair_usage(prompt[layer]) for prompt in records])
        shares = merge_shares([head_shares(prompt[layer]) for prompt in records])
        np.testing.assert_allclose(done.data.usage[layer].query, usage.query, rtol=1e-6)
        np.testing.assert_allclose(done.data.usage[layer].key, usage.key, rtol=1e-6)
        np.testing.assert_allclose(done.data.shares[layer].sink_share, shares.sink_share, rtol=1e-5)
        np.testing.assert_array_equal(done.data.shares[layer].sink_position, shares.sink_position)
        worst = max(prompt[layer].check.score for prompt in records)
        assert done.data.checks[layer].score == pytest.approx(worst, rel=0.5)
    assert done.data.max_relative_error < 1e-5


def test_the_order_of_prompts_does_not_matter(model, done):
    turned = report(model, TEXTS[::-1], names=["two", "one"])
    for mine, other in zip(done.data.usage, turned.data.usage, strict=True):
        np.testing.assert_array_equal(mine.key, other.key)
    for mine, other in zip(done.data.shares, turned.data.shares, strict=True):
        np.testing.assert_array_equal(mine.sink_share, other.sink_share)


def test_one_layer_of_one_prompt_is_in_memory_at_a_time(model, monkeypatch):
    seen, alive = [], []

    def spy(record, token_ids, *args):
        assert not any(ref() is not None for ref in alive), "an earlier layer is still held"
        alive.append(weakref.ref(record))
        seen.append((record.rope.layer, list(token_ids)))
        return analyse(record, token_ids, *args)

    monkeypatch.setattr(gather_module, "analyse", spy)
    report(model, TEXTS)
    rows = token_rows(model, TEXTS)
    assert seen == [(layer, row) for row in rows for layer in (0, 1)]


def test_a_streamed_report_has_the_numbers_of_a_full_capture(model):
    """Analyses of whole captures, added up, and the gallery of all heads of the first prompt."""
    texts = [" ".join(f"t{40 + (7 * i) % 50}" for i in range(90)), TEXTS[1]]
    done = report(model, texts, interventions=False).data
    captures = [capture(model, text, names=[f"prompt {i}"]) for i, text in enumerate(texts, 1)]
    own = [
        [analyse(record, qk.prompts[0].token_ids) for record in qk.records[0]] for qk in captures
    ]
    layers = tuple(judge(merge(list(entries))) for entries in zip(*own, strict=True))
    alike(done.layers, layers, rtol=1e-6)
    expected, _ = build_gallery(captures[0], [entry.shares for entry in own[0]], None)
    alike(done.gallery, expected, rtol=1e-6)
    for layer in (0, 1):
        moments = merge_keys([layer_keys(qk.layer(layer)) for qk in captures])
        alike(done.spectra[layer], layer_spectrum(moments), rtol=1e-6)
    repeated = repeated_patterns(model, captures[0])
    heads = tuple(
        head
        for entry, of_repeated in zip(layers, repeated, strict=True)
        for head in entry.heads(is_long=True, repeated=of_repeated)
    )
    alike(done.heads, heads, rtol=1e-6)
    whole = dataclasses.replace(
        done, layers=layers, heads=heads, gallery=expected, findings=(), notes=()
    )
    assert findings(whole) == done.findings
    assert notes(whole) == done.notes


def test_the_numbers_do_not_depend_on_the_number_of_threads(model):
    text = " ".join(f"t{40 + (7 * i) % 50}" for i in range(90))
    before, found = torch.get_num_threads(), []
    try:
        for n in (1, 2):
            torch.set_num_threads(n)
            found.append(report(model, text, interventions=False).data)
    finally:
        torch.set_num_threads(before)
    alike(found[0].layers, found[1].layers, rtol=1e-5)
    alike(found[0].heads, found[1].heads, rtol=1e-5)
    assert found[0].findings[1:] == found[1].findings[1:]  # the first says how exactly it was read


def read_lengths(model):
    """A list that grows by the length of each prompt that the model runs, and its handle."""
    lengths = []

    def note(module, args):
        lengths.append(args[0].shape[1])

    return lengths, model.register_forward_pre_hook(note)


def test_interventions_are_those_of_the_public_report(model, monkeypatch):
    """Beside what is read of it, the prompt runs once without the pairs and once per control."""
    monkeypatch.setattr(lens_rope.sink_heads, "SINK_THRESHOLD", 0.05)
    text = " ".join(f"t{40 + (7 * i) % 50}" for i in range(90))
    lengths, handle = read_lengths(model)
    try:
        found = report(model, text).data.ablation
        assert [n for n in lengths if n == 91] == [91] * (1 + 1 + CONTROLS)
        lengths.clear()
        again = ablation_report(model, text, found.pairs, names=["prompt 1"])
        assert [n for n in lengths if n == 91] == [91] * (1 + 1 + CONTROLS)
    finally:
        handle.remove()
    assert len(found.heads) > 2
    alike(found, again, rtol=1e-6)


def test_long_prompts_are_ablated_on_their_first_tokens(model, monkeypatch):
    monkeypatch.setattr(lens_rope.sink_heads, "SINK_THRESHOLD", 0.05)
    monkeypatch.setattr(first_module, "INTERVENTION_TOKENS", 70)
    tokens = zoo.tokens(100)[0]
    data = report(model, tokens, names=["long"]).data
    expected = ablation_report(model, tokens[:70], data.ablation.pairs, names=["long"])
    alike(dataclasses.replace(data.ablation, notes=()), expected, rtol=1e-6)
    note = (
        "The model was run without the best pairs on the first 70 of 100 tokens of long, and "
        "compared with itself there."
    )
    assert data.ablation.notes == (note,)
    assert note in data.notes


def test_notes_on_long_prompts_and_fused_passes(model):
    assert not any(
        "trained context" in note or "fused" in note for note in report(model, "t5 t6").data.notes
    )
    long = report(model, zoo.tokens(140), attention="fused", layers=[0, 1]).data
    assert (
        "The prompt is longer than the trained context of 128 tokens; positions beyond it are "
        "outside of what the model was trained on." in long.notes
    )
    checks = [
        dataclasses.replace(check, checked_queries=9 - check.layer, output=2e-7)
        for check in long.checks
    ]
    some = notes(dataclasses.replace(long, checks=tuple(checks), prompts=long.prompts * 2))
    assert "2 of 2 prompts are longer than the trained context of 128 tokens" in some[0]
    assert (
        "Layers 0-1 were read in a fused pass, which never forms all scores of a layer at once: "
        "the model's own attention was formed for a sample of 8 queries of each longer prompt, and "
        "the attention output of the pass is the same there within 2.0e-07 (relative)." in some
    )
    first = findings(dataclasses.replace(long, checks=tuple(checks)))[0]
    assert ", on a sample of 8 queries of the prompt (relative error" in first
    (fused,) = [note for note in long.notes if "fused" in note]
    assert "was formed for all queries" in fused
    assert not any(np.isnan(check.output) for check in long.checks)


def test_rows_that_look_padded_are_refused_without_their_neighbours_being_read(model):
    batch = zoo.tokens(12).repeat(2, 1)
    batch[1, -3:] = 0
    with pytest.raises(InputError, match="begin or end with the padding token 0"):
        report(model, batch)


def test_the_model_is_left_as_it_was(host_model):
    before = {name: value.clone() for name, value in host_model.state_dict().items()}
    hooks = sum(len(point.fwd_hooks) for point in host_model.hook_dict.values())
    report(host_model, TEXTS[1])
    assert hooks == sum(len(point.fwd_hooks) for point in host_model.hook_dict.values())
    after = host_model.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def test_progress_reaches_the_end_of_every_stage(model):
    calls = []
    report(model, TEXTS, progress=lambda *call: calls.append(call))
    last = {stage: (done, total) for stage, done, total in calls}
    # Reading two prompts, splitting, repeating; too short for sinks.
    assert len(last) == 4
    assert all(done == total for done, total in last.values())


def test_token_ids_and_the_sample_text_are_prompts_too(model):
    ids = report(model, zoo.tokens(12))
    assert [p.n_tokens for p in ids.data.prompts] == [12]
    sample = report(model, max_tokens=32)
    assert sample.data.prompts[0].name == "sample text"
    assert sample.data.prompts[0].n_tokens == 32


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (
            {"heads": [(0, 4)]},
            "head 0.4 does not exist; llama has layers 0 to 1 with heads 0 to 3; choose among them",
        ),
        ({"heads": [(2, 0)]}, "head 2.0 does not exist"),
        ({"heads": [(-1, 0)]}, "head -1.0 does not exist"),
        ({"heads": [(0, 0)], "layers": [1]}, "layer 0 is not among the layers to read"),
        ({"heads": [(0, 0)], "layers": [1]}, "add it to the layers or leave the head out"),
        ({"context": 0}, "context is 0; it must be at least 1"),
        ({"layers": [5]}, "layers [5] cannot be read"),
        ({"names": ["one"]}, "1 names for 2 prompts"),
    ],
)
def test_what_is_out_of_range_is_refused_before_the_model_runs(model, monkeypatch, kwargs, message):
    def must_not_run(*args, **kwargs):
        raise AssertionError("the model ran")

    monkeypatch.setattr(type(model), "run_with_hooks", must_not_run)
    monkeypatch.setattr(type(model), "forward", must_not_run)
    with pytest.raises(InputError, match=re.escape(message)):
        report(model, TEXTS, **kwargs)


def test_no_prompt_is_refused(model):
    with pytest.raises(PromptError):
        report(model, [])
    with pytest.raises(PromptError):
        report(model, ["t5 t6", " "])


# JSON


def test_json_has_the_keys_of_the_schema(done):
    content = strict(json.dumps(done.to_dict()))
    assert list(content) == [
        "schema", "lens_rope", "created", "model", "host", "prompts", "rope", "verification",
        "usage", "offset_features", "bounds", "sinks", "heads", "spectrum", "metrics", "ablation",
        "findings", "notes",
    ]  # fmt: skip
    assert content["schema"] == "lens-rope-report/1"
    assert content["model"] == {
        "name": "llama", "layers": 2, "heads": 4, "kv_heads": 2, "d_head": 16, "dtype": "float32",
    }  # fmt: skip
    assert content["host"]["class"] == "TransformerBridge"
    assert {"transformer_lens", "transformers", "torch"} <= set(content["host"])
    assert [(p["name"], p["tokens"]) for p in content["prompts"]] == [("one", 41), ("two", 26)]
    assert [len(entry["inv_freq"]) for entry in content["rope"]] == [8, 8]
    np.testing.assert_allclose(
        content["rope"][0]["inv_freq"], 1e4 ** (-np.arange(8) / 8), rtol=1e-6
    )
    assert [entry["inv_freq_error"] for entry in content["rope"]] == [
        r.inv_freq_error.tolist() for r in done.data.rope.layers
    ]
    layers = content["verification"]["layers"]
    assert content["verification"]["max_relative_error"] == max(e["relative_error"] for e in layers)
    assert [(e["layer"], len(e["query"]), len(e["key"])) for e in content["usage"]] == [
        (0, 8, 8), (1, 8, 8),
    ]  # fmt: skip
    assert len(content["heads"]) == 8
    assert content["sinks"]["heads"] == []  # too short to tell
    assert content["ablation"] is None
    assert {head["pattern"] for head in content["heads"]} == {None}
    assert content["sinks"]["threshold"] == 0.3
    # Uniform attention gives the first key 1 / (t + 1) from each query t.
    base = [np.mean(1 / np.arange(1, n + 1)) for n in (41, 26)]
    assert content["sinks"]["uniform_share"] == pytest.approx(np.average(base, weights=[41, 26]))
    assert content["findings"] == list(done.data.findings)


def test_a_value_that_does_not_exist_is_null(model):
    content = strict(json.dumps(report(model, "t5", layers=[0]).to_dict()))
    assert [h["offset_shares"]["offset_offset"] for h in content["heads"]] == [None] * 4
    ids = report(model, torch.tensor([5]))
    content = strict(json.dumps(ids.to_dict(), allow_nan=False))
    assert {h["previous_share"] for h in content["heads"]} == {None}


def test_every_table_has_its_rows(done):
    frames = tables(done.data)
    assert {name: len(frame) for name, frame in frames.items() if "gallery" not in name} == {
        "prompts": 2, "verification": 2, "rope": 16, "usage": 16, "heads": 8, "head_pairs": 64,
        "bounds": 4, "bounds_by_layer": len(done.data.bounds.by_layer()), "metrics": 8,
        "spectrum": 64, "sinks": 0, "sink_pairs": 0,
        "offset_features": sum(e.offsets.is_feature().sum() for e in done.data.layers),
        "outliers": sum(
            (side.relative_magnitude >= RELATIVE).sum()
            for e in done.data.layers
            for side in (e.offsets.query, e.offsets.key)
        ),
    }  # fmt: skip
    gallery = {(head.layer, head.head) for head in done.data.gallery}
    for name in ("gallery_by_pair", "gallery_by_distance"):
        assert set(zip(frames[name]["layer"], frames[name]["head"], strict=True)) == gallery
    shares = frames["gallery_by_pair"].groupby(["layer", "head"])["share"].sum()
    np.testing.assert_allclose(shares, 1, atol=1e-6)


# Gallery


def test_the_gallery_holds_the_leaders_of_each_reason():
    qk = random_capture(tuple(rope(layer) for layer in range(6)), n_pos=30)
    shares = [head_shares(record) for record in qk.records[0]]
    gallery, _ = build_gallery(qk, shares, None)
    where = [(head.layer, head.head) for head in gallery]
    assert len(where) == len(set(where)) == 3 * PER_REASON
    sink = np.array([entry.sink_share for entry in shares])
    assert where[0] == np.unravel_index(sink.argmax(), sink.shape)
    assert where[0][0] != where[1][0]
    previous = np.array([entry.previous_share for entry in shares])
    for taken in where[:2]:
        previous[taken] = -1
    assert where[2] == np.unravel_index(previous.argmax(), previous.shape)
    single = np.array(
        [[decompose(qk, layer, h).by_pair().share.max() for h in range(4)] for layer in range(6)]
    )
    for taken in where[:4]:
        single[taken] = -1
    assert where[4] == np.unravel_index(single.argmax(), single.shape)


def all_at_once(sink, previous, single):
    """`[(layer, head)]` The gallery's heads by going through all of them, reason by reason."""
    chosen: list[tuple[int, int]] = []
    for reason in (sink, previous, single):
        known = [where for where in np.ndindex(reason.shape) if np.isfinite(reason[where])]
        order = sorted(known, key=lambda where: (-reason[where], *where))
        layers: set[int] = set()
        taken = tuple(chosen)
        for where in order:
            is_free = where not in taken and where[0] not in layers
            if is_free and len(layers) < PER_REASON:
                layers.add(where[0])
                chosen.append(where)
    return chosen


@pytest.mark.parametrize("seed", range(60))
def test_the_short_list_holds_what_a_choice_among_all_heads_finds(seed):
    """Few values, so that there are ties, and all large ones in one layer in some of the seeds."""
    rng = np.random.default_rng(seed)
    n_layers, n_heads = int(rng.integers(1, 7)), 8
    record = random_record(8, n_heads=n_heads, n_kv=4)
    values = rng.integers(0, 4 + 3 * (seed % 3), size=(3, n_layers, n_heads)) / 10
    values[:, rng.integers(n_layers)] += seed % 2
    values[2][values[2] > 1] = 1.0
    if seed % 5 == 0:
        values[rng.random(values.shape) < 0.3] = np.nan
    sink, previous, single = values

    shortlist = Shortlist(Prompt("p", (0,) * 8, ("t",) * 8, None))
    for layer in range(n_layers):
        of = dataclasses.replace(
            head_shares(record), sink_share=sink[layer], previous_share=previous[layer]
        )
        of_pairs = np.zeros((n_heads, record.rope.n_pairs))
        of_pairs[:, 1] = single[layer]
        of_pairs[np.isnan(single[layer])] = np.nan
        rope_here = dataclasses.replace(record.rope, layer=layer)
        shortlist.add(dataclasses.replace(record, rope=rope_here), of, of_pairs)
        assert len(shortlist.held) <= 2 + 6 + 10
    gallery, _ = shortlist.gallery()
    assert [(h.layer, h.head) for h in gallery] == all_at_once(sink, previous, single)
    for shown in gallery:
        assert shown.kv_head == shown.maps.kv_head == shown.head // 2
        assert shown.maps.head == shown.head
        torch.testing.assert_close(shown.maps.record.q[:, 0], record.q[:, shown.head])
        torch.testing.assert_close(shown.maps.record.k[:, 0], record.k[:, shown.kv_head])


def test_the_rule_says_what_was_found():
    one_layer, rule = _gallery(random_capture((rope(0),)))
    assert len(one_layer) == 3
    assert rule.endswith(
        "1 for the largest sink share, 1 for the largest attention to the previous token, 1 for "
        "the largest share, at most 100%, of score variance in one rotary pair."
    )
    without_rope, rule = _gallery(random_capture((rope(0, rotary_dim=0),)))
    assert len(without_rope) == 2
    assert "none for the largest share, at most 100%, of score variance" in rule


def _gallery(qk):
    return build_gallery(qk, [head_shares(record) for record in qk.records[0]], None)


def test_heads_are_called_sink_or_previous_token_above_the_thresholds_only():
    qk = random_capture((rope(0), rope(1)), n_pos=70)
    weak = [reason for head in _gallery(qk)[0] for reason in head.reasons]
    assert [reason.split(":")[0] for reason in weak[:4]] == [
        "largest sink share", "largest sink share",
        "largest attention to the previous token", "largest attention to the previous token",
    ]  # fmt: skip
    for n_pos, label in [(70, "sink: gives"), (30, "largest sink share:")]:
        record = random_capture((rope(0),), n_pos=n_pos).records[0][0]
        k = torch.zeros_like(record.k)
        k[0] = 6.0
        record = dataclasses.replace(record, q=torch.ones_like(record.q), k=k)
        strong = random_capture((rope(0),), n_pos=n_pos)
        strong = dataclasses.replace(strong, records=((record,),))
        assert head_shares(record).sink_share[0] > 0.9
        # In a short prompt uniform attention alone comes near, so nothing is called a sink there.
        assert _gallery(strong)[0][0].reasons[0].startswith(label)


def test_the_gallery_is_about_the_first_prompt_alone(model, done):
    first = capture(model, TEXTS[0])
    alone, rule = _gallery(first)
    assert [(head.layer, head.head, head.reasons) for head in done.data.gallery] == [
        (head.layer, head.head, head.reasons) for head in alone
    ]
    merged, _ = build_gallery(first, done.data.shares, None)
    assert [head.reasons for head in merged] != [head.reasons for head in alone]
    assert done.data.gallery_rule == f"{rule} All on one alone, the first of 2 prompts."


def test_a_pair_that_others_work_against_does_not_carry_a_head():
    ropes, long = (rope(0), rope(1)), 64  # tokens; less is too short to say so
    # Pair 0 has 1 / (1 - 0.8) = 500% of the variance, pair 1 -400%.
    qk = with_pairs(random_capture(ropes, long), 0, (1.0, -0.8))
    assert decompose(qk, 0, 0).by_pair().share.max() == pytest.approx(5)
    singles = [h for h in _gallery(qk)[0] if h.reasons[0].startswith("one pair")]
    assert [head.layer for head in singles] == [1]
    assert not any("One frequency" in f for f in report_data(qk, heads=((0, 0),)).findings)
    # 60% is a lot, 25% is not.
    carried = report_data(
        with_pairs(random_capture(ropes, long), 0, (0.2, 0.6, 0.2)), heads=((0, 0),)
    )
    sentence = next(f for f in carried.findings if "One frequency" in f)
    assert "among the heads shown, it is clearest in layer 0 head 0, where pair 1 " in sentence
    assert "accounts for 60% of the variance of its scores within a query on a prompt;" in sentence
    spread = report_data(with_pairs(random_capture(ropes, long), 0, (0.25,) * 4), heads=((0, 0),))
    assert not any("One frequency" in f for f in spread.findings)


def test_heads_that_were_asked_for_are_shown_in_that_order(model):
    data = report(model, TEXTS, heads=[(1, 3), (0, 0)]).data
    assert [(head.layer, head.head, head.kv_head) for head in data.gallery] == [
        (1, 3, 1),
        (0, 0, 0),
    ]
    assert data.gallery_rule == RULE_ASKED
    split = decompose(capture(model, TEXTS[0]), 1, 3)
    np.testing.assert_allclose(data.gallery[0].maps.window.pattern, split.pattern(), atol=5.1e-5)
    np.testing.assert_allclose(data.gallery[0].by_pair.share, split.by_pair().share, atol=1e-6)


def test_the_gallery_shows_a_window_of_at_most_64_tokens(model):
    data = report(model, " ".join(["t5", "t6", "t9"] * 30), heads=[(0, 0)]).data
    head = data.gallery[0]
    assert [(w.start, w.stop) for w in head.maps.windows] == [(0, 64), (27, 91)]
    assert head.maps.window.pattern.shape == (64, 64)
    assert len(head.maps.tokens) == head.maps.n_tokens == 91


# Findings


def test_findings_quote_the_numbers(done):
    text = "\n".join(done.data.findings)
    assert f"within {done.data.max_relative_error:.1e}" in text
    ropes, usage = done.data.rope.layers, done.data.usage
    partial = sum((r.cycles < 1).sum() for r in ropes) / sum(r.n_pairs for r in ropes)
    key = sum(u.key[r.cycles < 1].sum() for r, u in zip(ropes, usage, strict=True)) / sum(
        u.key.sum() for u in usage
    )
    assert f"{partial:.0%} of all pairs" in text
    assert f"{key:.0%} of key magnitude" in text


def changed(done, shares=None, **changes):
    if shares is not None:
        changes["layers"] = tuple(
            dataclasses.replace(entry, shares=of_layer)
            for entry, of_layer in zip(done.data.layers, shares, strict=True)
        )
    return dataclasses.replace(done.data, **changes)


def test_findings_follow_the_sinks(done):
    def with_sinks(share, position, same=(True,) * 4):
        return [
            dataclasses.replace(
                entry,
                sink_share=np.array(share, float),
                sink_position=np.array(position),
                same_position=np.array(same),
            )
            for entry in done.data.shares
        ]

    def sentence(shares, bos=True):
        prompts = tuple(
            dataclasses.replace(p, starts_with_bos=bos, n_tokens=64) for p in done.data.prompts
        )
        data = changed(done, shares=tuple(shares), prompts=prompts, tokens=("t",) * 64)
        return next(f for f in findings(data) if "ttention sinks" in f)

    none = with_sinks([0.1] * 4, [0] * 4)
    assert sentence(none) == (
        "No attention sinks: none of 8 heads gives more than 30% of its attention (mean over the "
        "queries that see the key) to any one key."
    )
    all_bos = [none[0], with_sinks([0.9, 0.2, 0.2, 0.4], [0, 0, 0, 0])[1]]
    assert sentence(all_bos) == (
        "Attention sinks: 2 of 8 heads (25%) give more than 30% of their attention (mean over the "
        "queries that see the key) to one key, always the first token (BOS); the first such head "
        "is in layer 1."
    )
    assert "always the first token (not BOS);" in sentence(all_bos, bos=False)
    assert "always the first token;" in sentence(all_bos, bos=None)
    mixed = with_sinks([0.9, 0.2, 0.2, 0.4], [0, 0, 0, 5])
    assert "2 to the first token (BOS), from layer 0 on, and 2 to a key elsewhere, most often " in (
        sentence(mixed)
    )
    assert "position 5" in sentence(mixed)
    assert "where prompts differ" not in sentence(mixed)
    # Merged positions say nothing of single prompts; a head below the threshold does not matter.
    share = [0.9, 0.2, 0.2, 0.4]
    apart = with_sinks(share, [0, 0, 0, 0], same=[True, True, True, False])
    assert "most often the first token (BOS);" in sentence(apart)
    below = with_sinks(share, [0, 0, 0, 0], same=[True, False, True, True])
    assert "always the first token (BOS);" in sentence(below)
    apart = with_sinks(share, [0, 0, 0, 5], same=[False, True, True, True])
    assert sentence(apart).endswith(
        "; where prompts differ, the position with the largest share over all counts."
    )


def test_short_prompts_have_no_sinks_and_no_previous_token_heads(done):
    text = "\n".join(done.data.findings)
    longest = max(prompt.n_tokens for prompt in done.data.prompts)
    uniform = np.mean(1 / np.arange(1, longest + 1))
    assert (
        f"Attention sinks: prompts of {longest} tokens or fewer are too short to tell sinks, "
        f"because uniform attention alone would give the first key {uniform:.0%}; give at least "
        "64 tokens."
    ) in text
    assert 0.1 < done.data.uniform_share < 0.16
    assert "previous" not in text
    page = done.html()
    assert "The prompts of this report are too short to tell sinks, so none is marked." in page
    assert "strongest sink head" not in page
    assert f"uniform attention would give the first key {done.data.uniform_share:.0%}." in page
    one = dataclasses.replace(done.data.prompts[0], n_tokens=63)
    assert any("too short" in f for f in findings(changed(done, prompts=(one,))))
    one = dataclasses.replace(done.data.prompts[0], n_tokens=64)
    heads = tuple(dataclasses.replace(head, pattern="mixed") for head in done.data.heads)
    long = changed(done, prompts=(one,), heads=heads)
    assert not any("too short" in f for f in findings(long))
    assert any("previous-token head" in f for f in findings(long))
    assert "too short to tell" not in render(dataclasses.replace(long, findings=()))


def planted_report(*prompts, **kept):
    """A report on planted heads, without a model."""
    return report_data(planted_capture(*prompts), **kept)


def test_findings_on_planted_heads_follow_the_numbers():
    data = planted_report(list(named_heads(96).values()))
    text = "\n".join(data.findings)
    sink = data.sinks[0]
    assert (sink.head, sink.best_pair, sink.is_collapsed) == (0, 7, True)
    assert "One pair makes most sinks: without the contributions of their best pair, " in text
    counts = {name: sum(h.pattern == name for h in data.heads) for name in named_heads(96)}
    for name, count in counts.items():
        assert f"{count} {name}" in text
    shown = re.sub(r"<(script|style).*?</\1>", "", render(data), flags=re.DOTALL)
    assert not re.search(r"\bnan\b", shown)
    content = to_dict(data)
    (entry,) = [s for s in content["sinks"]["heads"] if s["head"] == 0]
    assert entry["frequencies"][0]["frequency"] == 7
    assert entry["frequencies"][0]["share_after_removal"] < 0.1 < entry["control_share"]
    (layer,) = content["bounds"]["layers"]
    strong = data.bounds.table
    assert layer == {
        "layer": 0, "context": 128, "features": len(strong),
        **{f"within_{name}": int(strong[f"within_{name}"].sum()) for name in BOUNDS},
    }  # fmt: skip


def test_sinks_that_no_single_pair_makes_are_not_said_to_be_made_by_one():
    data = planted_report([sink_by_push(96, 0)])
    sink = dataclasses.replace(data.sinks[0], share_without=np.full(8, 0.9))
    layer = dataclasses.replace(data.layers[0], sinks=(sink,))
    text = "\n".join(findings(dataclasses.replace(data, layers=(layer,))))
    assert (
        "Sinks without one pair: without the contributions of their best pair, 0 of 1 sink " in text
    )
    assert "One pair makes" not in text


def test_a_report_of_short_prompts_marks_no_sinks():
    qk = planted_capture([sink_by_push(96, 0)])
    one = report_data(qk)
    assert [sink.head for sink in one.sinks] == [0]
    short = dataclasses.replace(one.prompts[0], n_tokens=20)
    both = dataclasses.replace(one, prompts=(one.prompts[0], short))
    assert both.sinks == one.sinks and both.short_prompts == (short,)
    alone = dataclasses.replace(one, prompts=(short, short))
    assert alone.sinks == ()
    assert "What makes them" not in render(alone)


def test_a_pattern_alone_verifies_scores_up_to_a_constant(done):
    checks = tuple(dataclasses.replace(c, route="hook_cos_pattern") for c in done.data.checks)
    changed_data = changed(done, checks=checks)
    assert "compared up to a constant per query, match" in findings(changed_data)[0]
    sentence = "scores were compared up to a constant per query"
    assert sentence in render(changed_data)
    assert sentence not in done.html()


def test_the_context_can_be_given(model):
    given = report(model, TEXTS[1], context=4096).data
    assert {r.context for r in given.rope.layers} == {4096}
    assert given.notes[0].startswith("Cycles are counted over a context of 4,096 tokens")
    own = report(model, TEXTS[1]).data
    assert {r.context for r in own.rope.layers} == {128}
    assert not any("Cycles" in note for note in own.notes)


def test_notes_say_what_a_reader_must_know(model, done):
    assert done.data.notes == ()
    cut = report(model, TEXTS, max_tokens=30, names=["one", "two"], layers=[1])
    assert cut.data.notes == (
        "One was cut: the first 30 of 41 tokens were read.",
        "Only layers 1 of 2 were read.",
    )
    both = report(model, TEXTS, max_tokens=10)
    assert "2 of 2 prompts were cut to 10 tokens; together they had 67." in both.data.notes
    half = notes(changed(done, tolerance=2e-2, same_rope=False))
    assert any("verified to 2e-02 only" in note for note in half)
    assert any("differs between prompts" in note for note in half)


def test_prompts_of_different_rotation_are_noticed():
    model = zoo.bridge("llama-dynamic")
    long = " ".join(f"t{40 + i % 60}" for i in range(50))
    assert report(model, ["t5 t6 t7 t8 t9 t40 t41 t42", "t5 t6 t7 t8 t9 t40"]).data.same_rope
    assert not report(model, ["t5 t6 t7 t8 t9 t40 t41 t42", long]).data.same_rope


def test_an_unread_model_gives_no_report(model, monkeypatch):
    def fail(*args, **kwargs):
        raise VerificationError("off", layer=1, check="score", error=1.0, tolerance=1e-5)

    monkeypatch.setattr("lens_rope.streaming.verify", fail)
    with pytest.raises(VerificationError):
        report(model, TEXTS)


# The page


def test_the_page_loads_nothing(done):
    page = done.html()
    without_scripts = re.sub(r"<script.*?</script>", "", page, flags=re.S)
    assert not re.search(r"""(src|href)=["']?(https?:)?//(?!arxiv)""", without_scripts)
    assert not re.search(r"@import|url\(", without_scripts)
    assert "default-src 'none'" in page
    assert page.count("var CircuitsVis=") == 1
    assert page.count("plotly.js v") == 1
    assert len(page.encode()) < 15e6


def test_a_page_with_little_room_leaves_windows_out_and_says_so(monkeypatch):
    data = report_data(random_capture((rope(0),), n_pos=300), heads=((0, 0), (0, 3)))
    whole = render(data)
    assert "left out to keep" not in whole
    monkeypatch.setattr("lens_rope.reporting.page.PAGE_BYTES", len(whole.encode()) - 50_000)
    small = render(data)
    assert len(whole.encode()) - 100_000 < len(small.encode()) <= len(whole.encode()) - 50_000
    assert small.count("windows of this prompt") == 2
    monkeypatch.setattr("lens_rope.reporting.page.PAGE_BYTES", 0)
    assert render(data).count("1 is here (0–63)") == 2


def test_headings_are_in_order_and_figures_have_labels(done):
    body = re.sub(r"<script.*?</script>", "", done.html(), flags=re.S)
    levels = [int(level) for level in re.findall(r"<h(\d)", body)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(b - a <= 1 for a, b in itertools.pairwise(levels))
    plots = re.findall(r'<div class="(?:plot|cv)[^>]*>', body)
    assert len(plots) >= 8
    assert all(re.search(r'role="img" aria-label="[^"]{15,}"', plot) for plot in plots)
    ids = re.findall(r' id="([^"]+)"', done.html())
    assert len(ids) == len(set(ids))
    for target in re.findall(r'href="#([^"]+)"', body):
        assert target in ids


def test_hostile_names_and_tokens_are_text(done):
    qk = random_capture(tuple(rope(i) for i in range(2)), tokens=HOSTILE)
    gallery, _ = build_gallery(qk, [head_shares(r) for r in qk.records[0]], [(0, 1)])
    name = '</title><script>alert(1)</script>{{ 7 * 7 }}"'
    prompt = dataclasses.replace(done.data.prompts[0], name=name, n_tokens=len(HOSTILE))
    data = changed(
        done,
        gallery=gallery,
        prompts=(prompt,),
        tokens=HOSTILE,
        model=dataclasses.replace(done.data.model, name=name),
        findings=(f"{name}: {name}",),
        notes=(name,),
    )
    page = render(data)

    class Reader(HTMLParser):
        def __init__(self):
            super().__init__()
            self.inside, self.texts, self.scripts = [], [], []

        def handle_starttag(self, tag, attrs):
            self.inside.append(tag)
            if tag == "script":
                self.scripts.append("")

        def handle_endtag(self, tag):
            self.inside.append(f"/{tag}")

        def handle_data(self, data):
            if self.inside[-1:] == ["script"]:
                self.scripts[-1] += data
            else:
                self.texts.append(data)

    reader = Reader()
    reader.feed(page)
    assert f"{name} · RoPE report" in reader.texts
    assert reader.texts.count(name) >= 2  # heading and note
    assert "alert(1)" not in reader.scripts
    assert reader.inside.count("script") == reader.inside.count("/script") == len(reader.scripts)
    views = [strict(text) for text in reader.scripts if text.startswith('{"layer"')]
    assert len(views) == 1
    assert views[0]["tokens"] == [display_text(token) for token in HOSTILE]


def test_the_same_input_gives_the_same_bytes(model, monkeypatch):
    def made(moment):
        monkeypatch.setenv("SOURCE_DATE_EPOCH", moment)
        result = report(model, TEXTS)
        return result.html(), json.dumps(result.to_dict())

    first, again, later = made("1000"), made("1000"), made("2000")
    assert first == again
    for one, other in zip(first, later, strict=True):
        assert one != other
        assert one.replace("1970-01-01T00:16:40Z", "1970-01-01T00:33:20Z") == other


@pytest.mark.parametrize(("n_kinds", "more"), [(4, None), (5, "1 more kind"), (6, "2 more kinds")])
def test_four_kinds_of_layer_are_drawn_over_distance(n_kinds, more):
    ropes = tuple(rope(layer, window=16 * (layer + 1)) for layer in range(n_kinds))
    page = render(report_data(random_capture(ropes), heads=()))
    assert page.count("What distance looks like to each pair.") == 4
    assert (f"{more} of layer" in page) if more else ("not drawn this way" not in page)


def test_captions_say_what_holds(done):
    page = done.html()
    for sentence in (
        "of a head, relative to that head’s largest score; each dot is the worst head of its layer",
        "less than a quarter of a cycle stays warm",
        "Attention patterns and attention received are on this page only.",
        "seen by at least half as many queries as the key that most queries see",
    ):
        assert sentence in page
    assert "every number in it" not in page


def test_a_layer_without_rope_is_shown_as_such():
    page = report(zoo.bridge("smollm3"), TEXTS[1]).html()
    assert "no RoPE" in page
    assert "Layers differ in their rotation." in page


# Writing


def names(folder):
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def test_save_writes_the_files(done, tmp_path):
    folder = done.save(tmp_path / "a" / "b")
    assert folder == tmp_path / "a" / "b"
    assert names(folder) == sorted(
        [
            MARKER,
            "manifest.json",
            "report.html",
            "report.json",
            *(f"tables/{n}.csv" for n in tables(done.data)),
        ]
    )
    assert strict((folder / "report.json").read_text("utf-8")) == json.loads(
        json.dumps(done.to_dict())
    )
    with (folder / "tables" / "heads.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 8
    assert float(rows[5]["sink_share"]) == pytest.approx(done.data.shares[1].sink_share[1])
    assert (folder.stat().st_mode & 0o077) == (tmp_path / "a").stat().st_mode & 0o077
    assert names(tmp_path) == [f"a/b/{name}" for name in names(folder)]


def test_save_replaces_an_earlier_report(done, tmp_path):
    done.save(tmp_path / "r")
    (tmp_path / "r" / "tables" / ".DS_Store").write_text("")  # left by whoever looked at it
    done.save(tmp_path / "r", formats=["json"])
    assert names(tmp_path / "r") == [MARKER, "manifest.json", "report.json"]
    assert [p.name for p in tmp_path.iterdir()] == ["r"]


@pytest.mark.parametrize("mine", ["notes.txt", "tables/mine.csv", "deep/er/thesis.tex", "link"])
def test_save_leaves_alone_a_report_with_other_files_beside_it(done, tmp_path, mine):
    folder = done.save(tmp_path / "r", formats=["html", "csv"])
    path = folder / mine
    path.parent.mkdir(parents=True, exist_ok=True)
    if mine == "link":
        path.symlink_to(tmp_path)
    else:
        path.write_text("precious")
    before = {name: (folder / name).read_bytes() for name in names(folder)}
    for write in (lambda: check_folder(folder), lambda: done.save(folder, formats=["json"])):
        with pytest.raises(OutputError, match=f"holds {mine} beside a report.*choose another"):
            write()
    assert {name: (folder / name).read_bytes() for name in names(folder)} == before
    path.unlink()
    done.save(folder, formats=["json"])
    assert names(folder) == [MARKER, "manifest.json", "report.json"]


def test_save_takes_a_new_or_an_empty_folder(done, tmp_path):
    (tmp_path / "empty").mkdir()
    done.save(tmp_path / "empty", formats=["json"])
    assert names(tmp_path / "empty") == [MARKER, "manifest.json", "report.json"]


def test_save_leaves_alone_what_is_not_a_report(done, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("precious")
    (tmp_path / "file").write_text("precious")
    for target, message in [("mine", "is not a lens-rope report"), ("file", "is a file")]:
        with pytest.raises(OutputError, match=message):
            done.save(tmp_path / target)
        with pytest.raises(OutputError, match=message):
            check_folder(tmp_path / target)
    with pytest.raises(OutputError, match="cannot write"):
        done.save(tmp_path / "file" / "below")
    assert names(tmp_path) == ["file", "mine/thesis.tex"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failed_write_leaves_the_earlier_report_and_nothing_else(
    done, tmp_path, monkeypatch, error
):
    done.save(tmp_path / "r", formats=["json"])
    before = (tmp_path / "r" / "report.json").read_bytes()
    import pathlib

    write = pathlib.Path.write_text

    def full(self, text, *args, **kwargs):
        if self.name == "report.json":
            write(self, text[:100], *args, **kwargs)
            raise error
        return write(self, text, *args, **kwargs)

    monkeypatch.setattr(pathlib.Path, "write_text", full)
    expected = OutputError if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(expected):
        done.save(tmp_path / "r")
    with pytest.raises(expected):
        done.save(tmp_path / "new" / "r")
    monkeypatch.undo()
    assert (tmp_path / "r" / "report.json").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["r"]


def test_a_failed_rename_puts_the_earlier_report_back(done, tmp_path, monkeypatch):
    import os

    done.save(tmp_path / "r", formats=["json"])
    rename = os.rename
    target = str(tmp_path / "r")

    def refuse(source, destination):
        if str(destination) == target and "old" not in str(source):
            raise OSError(13, "Permission denied")
        rename(source, destination)

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(OutputError, match="permission denied"):
        done.save(tmp_path / "r")
    assert names(tmp_path) == [f"r/{MARKER}", "r/manifest.json", "r/report.json"]


def test_check_folder_leaves_no_trace(tmp_path):
    check_folder(tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []


def test_unknown_formats_are_refused(done, tmp_path):
    with pytest.raises(InputError, match="pdf"):
        done.save(tmp_path / "r", formats=["pdf"])
    with pytest.raises(InputError, match="none"):
        done.save(tmp_path / "r", formats=[])


def test_the_index_links_every_report_in_the_folder(done, tmp_path):
    done.save(tmp_path / "a&b", formats=["html"])
    done.save(tmp_path / "plain", formats=["json"])
    entries = read_markers(tmp_path)
    assert [folder for folder, _ in entries] == ["a&b", "plain"]
    page = render_index(tmp_path, [("broken", "no <such> model")])
    assert 'href="a%26b/report.html"' in page
    assert 'href="plain/report.json"' in page
    assert "plain/report.html" not in page
    assert "no &lt;such&gt; model" in page
    path = write_index(tmp_path, page)
    assert path.read_text("utf-8") == page
    write_index(tmp_path, page)  # our own index is replaced
    path.write_text("<h1>My homepage</h1>")
    with pytest.raises(OutputError, match="left alone"):
        write_index(tmp_path, page)
    assert path.read_text() == "<h1>My homepage</h1>"


@pytest.mark.parametrize(
    "change",
    [
        "not JSON", "[" * 200_000, "[]", '{"schema": "lens-rope-report/1"}', {"schema": "other/1"},
        {"tokens": None}, {"max_relative_error": "small"}, {"files": "report.html"},
        {"files": [1]}, {"findings": [None]},
    ],
)  # fmt: skip
def test_a_marker_that_is_not_ours_is_passed_over(done, tmp_path, change):
    done.save(tmp_path / "good", formats=["html"])
    done.save(tmp_path / "odd", formats=["html"])
    path = tmp_path / "odd" / MARKER
    if isinstance(change, dict):
        change = json.dumps({**json.loads(path.read_text("utf-8")), **change})
    path.write_text(change)
    entries = read_markers(tmp_path)
    assert [folder for folder, _ in entries] == ["good"]
    render_index(tmp_path)
    with pytest.raises(OutputError, match="is not a lens-rope report"):
        done.save(tmp_path / "odd")


def test_the_sample_text_has_what_heads_look_for():
    text = sample_text()
    assert 500 < len(text.split()) < 700
    assert text.count("Mirela Oskarsdottir") > 5
    lines = [line for line in text.splitlines() if re.match(r"\d\. ", line)]
    assert lines[: len(lines) // 2] == lines[len(lines) // 2 :]  # the list comes back
    assert any(ord(char) > 127 for char in text)
    assert not math.isclose(len(text), len(text.encode()))
