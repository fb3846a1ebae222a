"""A report gathered in parts is the report of the whole: whatever the parts, their order and how
often they were merged, also through pickle; and what is kept does not grow with the prompts."""

from __future__ import annotations

import dataclasses
import itertools
import json
import pickle
import weakref

import numpy as np
import planted
import pytest
import zoo
from report_fixtures import alike

import lens_rope.reporting.gather as gather_module
from lens_rope.capturing import capture
from lens_rope.errors import InputError, PromptError
from lens_rope.hosts import host_of
from lens_rope.reporting import report
from lens_rope.reporting.analysis import analyse, judge, merge
from lens_rope.reporting.finishing import finish
from lens_rope.reporting.gather import ShardPrompt, gather, read_shard
from lens_rope.reporting.page import render
from lens_rope.reporting.prompts import NamedText, checksum, prompt_digest
from lens_rope.reporting.schema import to_dict
from lens_rope.reporting.shard import ReadOptions, common_tokens, merge_shards
from lens_rope.reporting.tables import tables
from lens_rope.sink_heads import sinks_over_all
from lens_rope.sinks import SINK_THRESHOLD, head_shares, merge_shares
from lens_rope.views.tokens import display_text


def words(n: int, step: int) -> str:
    return " ".join(f"t{40 + (step * i) % 50}" for i in range(n))


# One that tells sinks, others; a single token; the same first token everywhere but in the last.
PROMPTS = [
    ShardPrompt(0, "zero", words(80, 7)),
    ShardPrompt(1, "one", words(70, 3)),
    ShardPrompt(2, "two", words(100, 11)),
    ShardPrompt(3, "three", words(64, 1)),
    ShardPrompt(4, "four", tuple(range(30, 110))),
]


@pytest.fixture(scope="module")
def model():
    return zoo.bridge("llama")


@pytest.fixture(scope="module")
def whole(model):
    return read_shard(model, PROMPTS, ReadOptions())


# Merging what was merged


def planted_layers():
    """A layer on prompts with sinks at different keys, without one, and of one token."""
    plants = [
        planted.sink_by_push(100, 0), planted.sink_by_push(80, 7), planted.Plant(90),
        planted.sink_by_push(70, 7), planted.Plant(1), planted.sink_by_push(66, 3),
    ]  # fmt: skip
    qk = planted.planted_capture(*([plant] for plant in plants))
    return [
        analyse(records[0], prompt.token_ids)
        for records, prompt in zip(qk.records, qk.prompts, strict=True)
    ]


def test_a_merge_of_merges_is_the_merge_of_all():
    parts = planted_layers()
    expected = judge(merge(parts))
    assert [sink.head for sink in expected.sinks] == [0]
    assert expected.sinks[0].n_prompts == 4
    for order in [(0, 1, 2, 3, 4, 5), (5, 4, 3, 2, 1, 0), (2, 4, 1, 0, 5, 3)]:
        a = [parts[i] for i in order]
        groupings = [
            merge([merge(a[:2]), merge(a[2:4]), merge(a[4:])]),
            merge([a[0], merge([a[1], merge([a[2], merge(a[3:])])])]),
            merge([merge([merge([merge(a[:3]), a[3]]), a[4]]), a[5]]),
        ]
        for grouped in groupings:
            alike(judge(grouped), expected)


def test_positions_of_sinks_are_counted_over_all_prompts():
    """Merged two by two, position 7 loses every comparison; over all prompts it has most."""
    shares = [
        head_shares(planted.planted_record([planted.sink_by_push(n, position)]))
        for n, position in [(100, 0), (64, 7), (80, 0), (64, 7), (64, 7)]
    ]
    at_once = merge_shares(shares)
    weights = {0: 0.0, 7: 0.0}
    for entry in shares:
        weights[int(entry.sink_position[0])] += entry.n_tokens * float(entry.sink_share[0])
    assert at_once.sink_position[0] == max(weights, key=weights.__getitem__) == 7
    pairs = merge_shares([merge_shares(shares[:2]), merge_shares(shares[2:4]), shares[4]])
    assert pairs.sink_position[0] == 7
    assert not pairs.same_position[0]


def test_queries_before_which_there_is_a_token_are_counted_by_prompt():
    shares = [head_shares(planted.random_record(n, seed=n)) for n in (5, 9, 30)]
    nested = merge_shares([merge_shares(shares[:2]), shares[2]])
    expected = np.average([s.previous_share for s in shares], axis=0, weights=[4, 8, 29])
    np.testing.assert_allclose(nested.previous_share, expected)


def test_a_head_that_falls_below_the_threshold_on_the_way_is_not_lost():
    sink = planted_layers()[0]
    qk = planted.planted_capture([planted.Plant(100)])
    plain = analyse(qk.records[0][0], qk.prompts[0].token_ids)
    share = merge_shares([sink.shares, *[plain.shares] * 3]).sink_share[0]
    assert share < SINK_THRESHOLD
    folded = sink
    for entry in [plain, plain, plain]:
        folded = merge([folded, entry])
    assert judge(folded).sinks == ()
    for entry in [sink] * 6:
        folded = merge([folded, entry])
    (found,) = judge(folded).sinks
    assert found.n_prompts == 7
    assert found.share_of_all == pytest.approx(
        (7 * sink.shares.sink_share[0] + 3 * plain.shares.sink_share[0]) / 10
    )
    assert found.share == pytest.approx(sink.sinks[0].share)
    # Judging is for the end: what it leaves out is gone.
    early = sinks_over_all(
        merge([sink, *[plain] * 3]).sinks, merge_shares([sink.shares, *[plain.shares] * 3])
    )
    assert early == ()


# Shards


SPLITS = [
    [[0], [1], [2], [3], [4]],
    [[0, 1], [2, 3, 4]],
    [[0, 3], [1, 4], [2]],
    [[1, 2, 3], [0, 4]],
]


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_shards_of_any_split_and_order_give_the_same_report(model, whole, split, monkeypatch):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "0")
    expected = finish(whole)
    parts = [
        pickle.loads(pickle.dumps(read_shard(model, [PROMPTS[i] for i in shard], ReadOptions())))
        for shard in split
    ]
    for order in itertools.islice(itertools.permutations(parts), 0, None, 7):
        merged = order[0]
        for part in order[1:]:
            merged = merge_shards([pickle.loads(pickle.dumps(merged)), part])
        data = finish(merged)
        alike(to_dict(data), to_dict(expected))
        assert data.findings == expected.findings
        assert data.notes == expected.notes
        assert data.provenance == expected.provenance
    # The same from one merge of all; and its page and tables can be made.
    data = finish(merge_shards(parts[::-1]))
    alike(to_dict(data), to_dict(expected))
    assert len(tables(data)["prompts"]) == 5
    assert render(data)


def test_a_report_of_texts_is_that_of_its_shards(model, whole, monkeypatch):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "0")
    texts = [prompt for prompt in PROMPTS if isinstance(prompt.content, str)]
    named = [NamedText(prompt.name, prompt.content) for prompt in texts]
    data = gather(model, iter(named))
    shards = [read_shard(model, [prompt], ReadOptions()) for prompt in texts]
    expected = finish(merge_shards(shards))
    alike(to_dict(data), to_dict(expected))
    assert data.provenance == expected.provenance
    assert [p.name for p in data.prompts] == ["zero", "one", "two", "three"]
    # In another order it is another first prompt, and the same sums.
    turned = gather(model, named[::-1])
    alike(turned.usage, data.usage)
    assert turned.prompts[0].name == "three"


def test_prompts_of_another_rotation_are_left_out_of_offsets_in_any_split():
    model = zoo.bridge("llama-dynamic")
    prompts = [ShardPrompt(i, f"p{i}", words(n, 3 + i)) for i, n in enumerate([20, 60, 25, 50])]
    whole = read_shard(model, prompts, ReadOptions())
    assert not whole.same_rope
    assert whole.layers[0].offsets.n_tokens < 21 + 26
    assert whole.keys[0].n_tokens == 21 + 26
    expected = finish(whole)
    reference = capture(model, prompts[0].content).rope()
    for split in ([[0], [1], [2], [3]], [[1, 3], [0, 2]], [[1, 2, 3], [0]]):
        parts = [
            read_shard(model, [prompts[i] for i in shard], ReadOptions(rope=reference))
            for shard in split
        ]
        data = finish(merge_shards(parts))
        alike(data.layers, expected.layers)
        alike(data.spectra, expected.spectra)
        assert data.same_rope == expected.same_rope
        assert data.notes == expected.notes
    unaware = [read_shard(model, [prompt], ReadOptions()) for prompt in prompts]
    with pytest.raises(InputError, match="read every shard with the rotation of prompt 0"):
        merge_shards(unaware)
    wrong = read_shard(model, [prompts[0]], ReadOptions(rope=unaware[1].rope))
    with pytest.raises(InputError, match="no prompt is rotated"):
        finish(wrong)


def test_short_prompts_tell_no_sinks_and_take_none_away(model, whole):
    """Wherever the short ones stand, sinks and patterns are those of the long ones alone."""
    short = [ShardPrompt(5, "five", words(20, 5)), ShardPrompt(6, "six", words(9, 2))]
    alone = finish(whole)
    found = finish(merge_shards([read_shard(model, short, ReadOptions()), whole]))
    alike(found.shares, alone.shares)
    alike(found.sinks, alone.sinks)
    assert [head.pattern for head in found.heads] == [head.pattern for head in alone.heads]
    assert any("without 2 of 7 prompts" in note for note in found.notes)
    assert not any("are told without" in note for note in alone.notes)
    # All the rest is of every token.
    added = sum(prompt.n_tokens for prompt in found.prompts[-2:])
    assert found.spectra[0].pre.n_tokens == alone.spectra[0].pre.n_tokens + added
    parts = [read_shard(model, [prompt], ReadOptions()) for prompt in (short[0], *PROMPTS[:2])]
    for order in itertools.permutations(parts):
        alike(merge_shards(order).layers, merge_shards(parts).layers)


def test_a_head_with_a_sink_in_some_prompts_only_is_no_sink_head_of_the_report(whole):
    (sink,) = planted_layers()[0].sinks
    layer = whole.layers[0]
    shares = dataclasses.replace(layer.shares, sink_share=np.array([0.1, 0.8, 0.2, 0.1]))
    candidates = tuple(dataclasses.replace(sink, head=head) for head in (0, 1))
    layer = dataclasses.replace(layer, shares=shares, sinks=candidates)
    data = finish(dataclasses.replace(whole, layers=(layer, *whole.layers[1:])))
    (found,) = [entry for entry in data.sinks if entry.layer == 0]
    assert (found.head, found.share_of_all) == (1, 0.8)


def test_what_does_not_belong_together_is_refused(model, whole):
    with pytest.raises(InputError, match="no results to merge"):
        merge_shards([])
    with pytest.raises(InputError, match="prompt 0 is in more than one result"):
        merge_shards([whole, read_shard(model, PROMPTS[:1], ReadOptions())])
    one = read_shard(model, PROMPTS[1:2], ReadOptions())
    with pytest.raises(InputError, match="prompt 0 is missing"):
        finish(one)
    gap = merge_shards([read_shard(model, PROMPTS[:1], ReadOptions()), _at(one, 2)])
    with pytest.raises(InputError, match=r"prompt 1 is missing from the results.*0 to 2"):
        finish(gap)
    first = read_shard(model, PROMPTS[:1], ReadOptions())
    cut = read_shard(model, PROMPTS[1:2], ReadOptions(max_tokens=20))
    with pytest.raises(InputError, match="different options"):
        merge_shards([first, cut])
    other = dataclasses.replace(one, model=dataclasses.replace(one.model, name="other"))
    with pytest.raises(InputError, match="results of llama and other"):
        merge_shards([first, other])
    with pytest.raises(PromptError, match="there is no prompt"):
        read_shard(model, [], ReadOptions())


def _at(result, index):
    return dataclasses.replace(result, prompts=((index, result.prompts[0][1]),))


# Streams


def test_prompts_are_taken_one_at_a_time_and_dropped(model, monkeypatch):
    alive: list[weakref.ref] = []
    taken = []

    def spy(record, token_ids, *args):
        assert not any(ref() for ref in alive), "an earlier prompt is still held"
        alive.append(weakref.ref(record))
        return analyse(record, token_ids, *args)

    def prompts():
        for index in range(4):
            # A prompt is asked for when the one before it was read.
            assert len(alive) == 2 * index
            taken.append(index)
            yield words(30 + index, 3)

    monkeypatch.setattr(gather_module, "analyse", spy)
    data = report(model, prompts(), names=iter("abcd")).data
    assert taken == [0, 1, 2, 3]
    assert [prompt.name for prompt in data.prompts] == ["a", "b", "c", "d"]


def test_what_is_kept_does_not_grow_with_the_number_of_prompts(model):
    def kept(n):
        result = read_shard(
            model, (ShardPrompt(i, f"p{i}", words(64, 1 + i % 3)) for i in range(n)), ReadOptions()
        )
        assert len(result.prompts) == n
        return len(pickle.dumps(dataclasses.replace(result, prompts=(), first=None)))

    assert kept(9) < 1.02 * kept(3)


def test_names_go_with_prompts(model):
    with pytest.raises(InputError, match="1 names for 2 prompts"):
        report(model, [words(9, 1)] * 2, names=["a"])
    with pytest.raises(InputError, match="there are 1 names and more prompts"):
        report(model, iter([words(9, 1)] * 2), names=["a"])
    with pytest.raises(InputError, match="more names than prompts"):
        report(model, iter([words(9, 1)]), names=["a", "b"])
    with pytest.raises(InputError, match="prompts must be texts"):
        report(model, [3])
    with pytest.raises(PromptError, match="prompt 2: the prompt is empty"):
        report(model, iter([words(9, 1), " "]))
    with pytest.raises(PromptError, match="there is no prompt"):
        report(model, iter([]))


def test_a_prompt_that_is_too_long_is_found_before_anything_is_read(model, monkeypatch):
    monkeypatch.setattr(gather_module, "analyse", None)
    monkeypatch.setattr(type(host_of(model)), "longest_prompt", 128)
    with pytest.raises(PromptError, match="prompt 3 has 131 tokens and llama has angles for 128"):
        report(model, [words(9, 1), words(9, 2), words(130, 1)])


def test_tokens_that_prompts_have_in_common():
    assert common_tokens([]) == ()
    rows = [("a", "b", "c"), ("a", "x"), ("a", "b", "c", "d")]
    assert common_tokens(rows) == ("a", None, "c", "d")
    for order in itertools.permutations(rows):
        nested = common_tokens([common_tokens(order[:2]), order[2]])
        assert nested == ("a", None, "c", "d")


def test_sinks_are_called_by_a_token_that_all_prompts_have(model, whole):
    data = finish(whole)
    rows = [capture(model, p.content).prompts[0].tokens for p in PROMPTS[:4]]
    assert data.tokens[0] is None  # BOS in texts, not in the token ids
    texts = gather(model, [p.content for p in PROMPTS[:4]])
    assert texts.token_at(0) == display_text(rows[0][0])
    same = {row[2] for row in rows}
    assert texts.token_at(2) == (display_text(same.pop()) if len(same) == 1 else None)
    assert texts.token_at(100) == display_text(rows[2][100])
    assert texts.token_at(101) is None


def test_the_checksum_is_that_of_names_and_contents_in_order(model, whole):
    import hashlib

    def by_hand(prompts):
        total = hashlib.sha256()
        for prompt in prompts:
            content = prompt.content if isinstance(prompt.content, str) else list(prompt.content)
            entry = json.dumps([prompt.name, content], separators=(",", ":")).encode()
            total.update(hashlib.sha256(entry).hexdigest().encode() + b"\n")
        return total.hexdigest()

    provenance = finish(whole).provenance
    assert provenance.prompts_sha256 == by_hand(PROMPTS)
    assert checksum(prompt_digest(p.name, p.content) for p in PROMPTS[::-1]) != by_hand(PROMPTS)
    assert provenance.arguments["interventions"] is True
    assert provenance.device == "cpu"


def test_progress_of_a_stream_counts_up(model):
    stages = []
    report(model, iter([words(9, 1)] * 2), progress=lambda stage, *_: stages.append(stage))
    assert [s for s in dict.fromkeys(stages) if s.startswith("reading")] == [
        "reading prompt 1", "reading prompt 2",
    ]  # fmt: skip
