"""Heads of a capture explained, with a running model beside it and with targets of the user."""

import dataclasses

import numpy as np
import planted
import pytest
import torch
import zoo
from conftest import needs_hooked

from lens_rope.advantage import advantage
from lens_rope.capturing import capture
from lens_rope.errors import InputError
from lens_rope.heads import (
    REPEATED_TOKENS,
    explain_heads,
    repeated_patterns,
    repeated_tokens,
    rule,
)
from lens_rope.offset_shares import layer_offset_shares
from lens_rope.offsets import layer_offsets
from lens_rope.targets import target_from_weights

OFFSETS = {0: (14.0, 1), 1: (14.0, 1), 2: (14.0, 1), 3: (14.0, 1)}
"""By pair, amplitude and distance of the peak of the head that the weights are set to."""


FREQUENCIES = 1e4 ** -(np.arange(8) / 8)


def previous_token_head(weight_q, weight_k, bias_q, bias_k):
    """Sets head 0 of a running model to the token before: constant queries and keys."""
    with torch.no_grad():
        for tensor in (weight_q, weight_k, bias_q, bias_k):
            tensor.zero_()
        for pair, (amplitude, peak) in OFFSETS.items():
            z = 4 * amplitude * np.exp(-1j * FREQUENCIES[pair] * peak)  # the divisor is 4
            bias_q[pair], bias_q[pair + 8] = float(z.real), float(z.imag)
            bias_k[pair] = 1.0


def check_previous_token_head(model):
    entry = explain_heads(capture(model, zoo.tokens(96)), model=model).head(0, 0)
    assert entry.pattern == "previous token" and entry.strength > 0.9
    assert set(entry.advantage.strongest(4)) == set(OFFSETS)
    np.testing.assert_allclose(entry.offset_shares, [1, 0, 0, 0], atol=1e-4)
    for pair, (amplitude, peak) in OFFSETS.items():
        queries = np.arange(1, 96)
        curve = amplitude * np.cos(FREQUENCIES[pair] * (np.arange(96) - peak))
        expected = np.mean([curve[1] - curve[: m + 1].mean() for m in queries])
        assert entry.advantage.pairs[pair] == pytest.approx(expected, rel=1e-4)


@needs_hooked
def test_a_head_with_set_weights_on_a_running_hooked_model():
    model = zoo.hooked(n_layers=1)
    attention = model.blocks[0].attn
    previous_token_head(attention.W_Q[0], attention.W_K[0], attention.b_Q[0], attention.b_K[0])
    check_previous_token_head(model)


def test_a_head_with_set_weights_on_a_running_bridge():
    model = zoo.hf_model(
        "llama", config=zoo.hf.Qwen2Config(**{**zoo._BASE, "num_hidden_layers": 1})
    )
    attention = model.model.layers[0].self_attn
    q, k = attention.q_proj, attention.k_proj
    previous_token_head(q.weight[:16], k.weight[:16], q.bias[:16], k.bias[:16])
    check_previous_token_head(zoo.bridge_of(model, "qwen2"))


def test_with_a_model(host_model):
    qk = capture(host_model, zoo.tokens(70))
    tokens = repeated_tokens(host_model, qk.prompts[0], seed=0)
    n = len(tokens) // 3
    assert n == min(REPEATED_TOKENS, zoo.CONTEXT // 3) and tokens == tokens[:n] * 3
    assert len(set(tokens)) == n and not set(tokens) & {0, 1, 2, 3}
    assert tokens == repeated_tokens(host_model, qk.prompts[0], seed=0)
    assert tokens != repeated_tokens(host_model, qk.prompts[0], seed=1)
    found = explain_heads(qk, model=host_model)
    assert repr(found) == repr(explain_heads(qk, model=host_model)) and found.is_repeated
    other = explain_heads(qk, model=host_model, seed=1)
    alone = explain_heads(qk)
    assert not alone.is_repeated and "pass model=" in alone.notes[0] and found.notes == ()
    repeats = repeated_patterns(host_model, qk)
    for layer in (0, 1):
        for head in range(4):
            entry, without = found.head(layer, head), alone.head(layer, head)
            for name in ("induction", "duplicate token", "first occurrence"):
                share = repeats[layer].targets[name]
                assert entry.masses[name] == share.mass[head] != without.masses[name]
                assert entry.masses[name] != other.head(layer, head).masses[name]
                assert entry.base_rates[name] == share.uniform_mass
            assert entry.masses["local"] == without.masses["local"]
            assert entry.sink_share == without.sink_share


def test_repeated_tokens_start_with_bos_where_the_capture_does(host_model):
    qk = capture(host_model, "t5 t6 t7", prepend_bos=True)
    tokens = repeated_tokens(host_model, qk.prompts[0])
    assert tokens[0] == 1 == qk.prompts[0].token_ids[0]
    assert tokens[1:] == tokens[1 : 1 + len(tokens) // 3] * 3
    without = capture(host_model, "t5 t6 t7", prepend_bos=False)
    assert repeated_tokens(host_model, without.prompts[0])[0] != 1


def test_some_layers_with_a_model(host_model):
    found = explain_heads(capture(host_model, zoo.tokens(70), [1]), model=host_model)
    assert [(e.layer, e.head) for e in found.heads] == [(1, h) for h in range(4)]
    both = repeated_patterns(host_model, capture(host_model, zoo.tokens(70)))
    for head, entry in enumerate(found.heads):
        assert entry.masses["induction"] == both[1].targets["induction"].mass[head]


@pytest.mark.parametrize("name", ["gemma2", "gpt-oss", "smollm3", "gpt-j", "deepseek-v3"])
def test_architectures_run_with_and_without_their_model(name):
    qk = planted.captured(name)
    for found in (explain_heads(qk), explain_heads(qk, model=zoo.bridge(name))):
        assert len(found.heads) == 4 * len(qk.layer_indices)
        for entry in found.heads:
            assert entry.pattern is not None
            assert entry.offset_shares.sum() == pytest.approx(1)
        assert qk.model.name in repr(found)
        assert found.to_dataframe()["pattern"].notna().all()


def test_another_model_is_refused(host_model):
    qk = planted.captured("phi")
    message = "the capture is of phi; give the model that was captured"
    with pytest.raises(InputError, match=message):
        explain_heads(qk, model=host_model)
    own = capture(host_model, zoo.tokens(9))
    for change in ({"n_layers": 5}, {"n_heads": 8}):
        other = dataclasses.replace(own, model=dataclasses.replace(own.model, **change))
        with pytest.raises(InputError, match="give the model that was captured"):
            explain_heads(other, model=host_model)


@needs_hooked
def test_a_context_too_short_for_repeats_is_refused():
    model = zoo.hooked(n_ctx=23)
    with pytest.raises(InputError, match="needs a context of at least 25 tokens and 8 tokens"):
        explain_heads(capture(model, zoo.tokens(9)), model=model)
    model = zoo.hooked(n_ctx=24)
    assert len(repeated_tokens(model, capture(model, zoo.tokens(9)).prompts[0])) == 24
    model = zoo.hooked(n_ctx=27)
    model.set_tokenizer(zoo.tokenizer())
    with_bos = capture(model, "t5 t6 t7", prepend_bos=True)
    assert len(repeated_tokens(model, with_bos.prompts[0])) == 25


def random_prompts(*lengths, **changes):
    records = [planted.random_record(n, seed=n, **changes) for n in lengths]
    return planted.make_capture(*records, token_ids=[[i % 13 for i in range(n)] for n in lengths])


def weights_of(n_pos):
    weights = np.tril(np.random.default_rng(n_pos).random((n_pos, n_pos)))
    weights[::2] = 0
    return weights


def test_a_target_of_the_user():
    qk = random_prompts(70, 90)
    targets = [weights_of(70), weights_of(90)]
    found = explain_heads(qk, target=targets)
    gains = [
        advantage(records[0], 1, target_from_weights(w, records[0].visible.numpy()))
        for records, w in zip(qk.records, targets, strict=True)
    ]
    entry = found.head(0, 1)
    assert entry.target == "target" and entry.advantage.n_queries == 35 + 45
    pairs = (35 * gains[0].pairs + 45 * gains[1].pairs) / 80
    np.testing.assert_allclose(entry.advantage.pairs, pairs)
    scaled = [w / np.maximum(w.sum(1, keepdims=True), 1e-9) > 0 for w in targets]
    masses = [
        (records[0].pattern(1).numpy() * mask)[1::2].sum(1).mean()
        for records, mask in zip(qk.records, scaled, strict=True)
    ]
    mass = (35 * masses[0] + 45 * masses[1]) / 80
    assert entry.masses["target"] == pytest.approx(mass)
    assert 0 < entry.base_rates["target"] <= 1
    plain = explain_heads(qk).head(0, 1)
    assert entry.pattern == plain.pattern and "target" not in plain.masses
    row = found.to_dataframe().iloc[1]
    assert row["target"] == "target" and row["target_share"] == pytest.approx(mass)


def test_kinds_of_arrays_for_a_target():
    qk = random_prompts(70)
    weights = weights_of(70)
    same = [weights, torch.tensor(weights), [weights], (torch.tensor(weights),)]
    expected = explain_heads(qk, target=weights).head(0, 0).advantage.pairs
    for target in same:
        found = explain_heads(qk, target=target).head(0, 0).advantage.pairs
        np.testing.assert_array_equal(found, expected)
    mask = weights > 0.5
    assert np.isfinite(explain_heads(qk, target=mask).head(0, 0).advantage.total)


def test_a_target_is_cut_to_each_layers_window():
    qk = random_prompts(70, window=9)
    weights = weights_of(70)
    near = np.where(planted.seen_by_hand(qk.records[0][0]), weights, 0)
    far = explain_heads(qk, target=weights).head(0, 0).advantage
    same = explain_heads(qk, target=near).head(0, 0).advantage
    np.testing.assert_allclose(far.pairs, same.pairs)
    assert far.n_queries == same.n_queries == 35
    hidden = np.zeros((70, 70))
    hidden[60, 3] = 1
    entry = explain_heads(qk, target=hidden).head(0, 0)
    assert entry.advantage.n_queries == 0 and np.isnan(entry.masses["target"])
    assert len(repr(explain_heads(qk, target=hidden))) > 0


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (np.ones(70), r"one target \[q_pos, k_pos\] per prompt; there are 1 prompts and 1 targets"),
        ([np.eye(70)] * 2, "there are 1 prompts and 2 targets"),
        (np.eye(69), r"the target is \[69, 69\]; it must be \[q_pos, k_pos\], here \[70, 70\]"),
        (-np.eye(70), "finite weights of at least 0"),
        (np.ones((70, 70)), "key 1 for query 0, which does not see it"),
        (np.zeros((70, 70)), "the target is 0 everywhere"),
    ],
)
def test_bad_targets_are_refused(target, message):
    with pytest.raises(InputError, match=message):
        explain_heads(random_prompts(70), target=target)


def test_merging_prompts_is_naming_by_all_of_them():
    lengths = (70, 96, 80)
    prompts = [list(planted.named_heads(n).values()) for n in lengths]
    found = explain_heads(planted.planted_capture(*prompts))
    assert [entry.pattern for entry in found.heads] == list(planted.named_heads(70))
    assert found.head(0, 1).advantage.n_queries == sum(n - 1 for n in lengths)
    # 0 is left out as a sink of head 0 anyway
    assert found.head(0, 0).advantage.n_queries == sum(n - 1 for n in lengths)


def test_table_and_text():
    found = explain_heads(planted.planted_capture(list(planted.named_heads(96).values())))
    table = found.to_dataframe()
    assert table["head"].tolist() == list(range(8))
    assert table["pattern"].tolist() == [entry.pattern for entry in found.heads]
    first = table.iloc[0]
    assert first["pair"] == 7 and first["band"] == "below half a cycle"
    assert first["advantage"] == found.head(0, 0).advantage.pairs[7]
    assert first["total_advantage"] == found.head(0, 0).advantage.total
    assert first["wavelength"] == pytest.approx(2 * np.pi / 0.015)
    assert table["also"][1] == "local" and table["also"][0] == ""
    assert table["previous_share"][1] == found.head(0, 1).masses["previous token"]
    assert table["duplicate_token"][4] == found.head(0, 4).masses["duplicate token"]
    assert table["offset_content"][6] == pytest.approx(1, abs=1e-4)
    assert "8 heads of planted: 1 content, 1 duplicate token, 1 first occurrence" in repr(found)
    assert list(found.counts().values()) == [1] * 8
    nope = explain_heads(planted.make_capture(planted.random_record(70, frequencies=())))
    assert nope.to_dataframe()["pair"].tolist() == [-1, -1] and nope.heads[0].band is None
    assert nope.to_dataframe()["wavelength"].isna().all() and len(repr(nope)) > 0
    assert "50%" in rule() and "2 times" in rule() and "30%" in rule()


def test_sinks_are_left_out_of_offset_shares():
    """A sink of one head is neither query nor key in those of another."""
    plants = [planted.sink_by_lift(80, 9), planted.random_head(80, 3.0, 0)]
    qk = planted.planted_capture(plants)
    record, tokens = qk.records[0][0], qk.prompts[0].token_ids
    found = explain_heads(qk).head(0, 1).offset_shares
    for left_out, is_same in (((0, 9), True), ((0,), False)):
        shares = layer_offset_shares(record, tokens, layer_offsets(record, left_out), left_out)
        assert np.array_equal(shares.shares[1], found) == is_same


def test_unknown_heads_are_refused():
    with pytest.raises(InputError, match="layer 3 head 0 is not among the 2 heads read"):
        explain_heads(random_prompts(70)).head(3, 0)
