"""Inside `ablate_frequencies` the running model computes what the changed pairs imply.

Oracle: the pattern of the first ablated layer follows from a capture of the untouched model, with
the pair's contribution replaced by one formed in complex128, pair by pair. The model's own hooks
and logits say what it did.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
import types

import numpy as np
import pytest
import torch
import transformers
import zoo
from conftest import needs_hooked

import lens_rope.ablation as ablation
import lens_rope.ablation_effects as effects
from lens_rope.ablation import ablate_frequencies
from lens_rope.ablation_effects import ablation_report
from lens_rope.capturing import capture, token_rows
from lens_rope.decomposition import decompose
from lens_rope.errors import InputError, UnsupportedModelError, VerificationError
from lens_rope.hosts.editing import refuse_cached
from lens_rope.hosts.hooked import HookedHost
from lens_rope.scores import pattern_of, soft_capped

IS_FIRST_BRIDGE = importlib.metadata.version("transformer-lens").startswith("3.")
BRIDGES = [
    name
    for name in zoo.CONFIGS
    # The first bridge does not apply Cohere's rotation.
    if name not in ("gpt2", "llama-llama3", "mixtral")
    and not (name == "cohere" and IS_FIRST_BRIDGE)
]
HOOKED = {
    "plain": {},
    "grouped-expanded": {"n_key_value_heads": 2, "ungroup_grouped_query_attention": True},
    "partial-adjacent": {"rotary_dim": 8, "rotary_adjacent_pairs": True},
    "qk-norm": {"use_qk_norm": True, "n_key_value_heads": 2},
    "clip": {"clip_qkv": 0.5},
    "softcap-sinks": {"attn_scores_soft_cap": 2.0, "use_attention_sinks": True},
    "yarn": {
        "use_yarn_rope": True,
        "yarn_factor": 4.0,
        "yarn_original_max_position_embeddings": 32,
        "yarn_attention_factor": 1.1386,
    },
    "dynamic": {"use_dynamic_ntk_rope": True, "train_seq_length": 16},
}
MODELS = [*BRIDGES, *(pytest.param(f"hooked {name}", marks=needs_hooked) for name in HOOKED)]
N_TOKENS = 40


@functools.cache
def model_of(name):
    kind, _, variant = name.partition(" ")
    return zoo.hooked(**HOOKED[variant]) if kind == "hooked" else zoo.bridge(name)


@functools.cache
def captured(name):
    return capture(model_of(name), zoo.tokens(N_TOKENS))


def run(model, tokens=None, layer=0, mask=None):
    """`[batch, head, q, k]` pattern of one layer, and logits."""
    tokens = zoo.tokens(N_TOKENS) if tokens is None else tokens
    mask = torch.ones_like(tokens) if mask is None else mask
    seen = {}

    def keep(value, hook):
        seen["pattern"] = value.detach().float().clone()

    with torch.no_grad(), model.hooks(fwd_hooks=[(f"blocks.{layer}.attn.hook_pattern", keep)]):
        logits = model(tokens, attention_mask=mask)
    return seen["pattern"], logits.float()


def n_hooks(model):
    """Number of torch hooks, less those that the bridge wires when it first needs them."""
    modules = {id(m): m for owner in (model, getattr(model, "original_model", model))
               for m in owner.modules()}.values()  # fmt: skip
    hooks = [
        h for m in modules for h in (*m._forward_hooks.values(), *m._forward_pre_hooks.values())
    ]
    return sum(not getattr(hook, "__qualname__", "").startswith("BlockBridge") for hook in hooks)


def before_rotation(record, x, pair):
    """`[pos, head]` One pair before rotation, times the attention factor, in complex128."""
    rope = record.rope
    half, s = rope.rotary_dim // 2, rope.rotary_start
    a, b = (
        (s + pair, s + pair + half) if rope.pairing == "half" else (s + 2 * pair, s + 2 * pair + 1)
    )
    z = x[..., a].double().numpy() + 1j * x[..., b].double().numpy()
    turn = np.exp(-1j * rope.inv_freq[pair] * np.arange(len(z)))
    return z * turn[:, None]


def mean_query(record, head, pair):
    return before_rotation(record, record.q, pair)[1:, head].mean() / record.rope.attention_factor


def expected_pattern(capture_, layer, head, pairs, how):
    """`[q, k]` Pattern of a head with its pairs changed, from the untouched capture."""
    d, record = decompose(capture_, layer, head), capture_.layer(layer)
    scores = np.nan_to_num(d.scores()).astype(np.float64)
    scores -= np.nan_to_num(d.contributions(sorted(set(pairs)))).sum(axis=0)
    for pair in set(pairs):
        q = before_rotation(record, record.q, pair)[:, head]
        k = before_rotation(record, record.k, pair)[:, record.kv_head(head)]
        if how == "unrotate":
            scores += record.scale * (q[:, None] * k[None].conj()).real
        if how == "mean":
            q = np.full_like(q, q[1:].mean())
            w, m = record.rope.inv_freq[pair], np.arange(len(q))
            turn = np.exp(1j * w * (m[:, None] - m[None]))
            scores += record.scale * (q[:, None] * k[None].conj() * turn).real
    sinks = None if record.sinks is None else record.sinks[head : head + 1]
    capped = soft_capped(torch.tensor(scores), record.softcap)
    return pattern_of(capped[None], record.visible, sinks)[0]


def close(got, expected, atol=2e-5):
    np.testing.assert_allclose(got, expected, atol=atol, rtol=0)


@pytest.mark.parametrize("name", MODELS)
def test_running_model_computes_what_the_changed_pairs_imply(name):
    model, qk = model_of(name), captured(name)
    last = qk.rope()[0].n_pairs - 1
    pattern, logits = run(model)
    hooks = n_hooks(model)
    for how in ("zero", "mean"):
        offsets = qk if how == "mean" else None
        with ablate_frequencies(model, {(0, 1): [1, last]}, how, offsets=offsets):
            changed, other_logits = run(model)
        close(changed[0, 1], expected_pattern(qk, 0, 1, [1, last], how))
        assert (changed[0, 1] - pattern[0, 1]).abs().max() > 1e-2
        for head in (0, 2, 3):
            close(changed[0, head], pattern[0, head], atol=1e-6)
        assert not torch.allclose(logits, other_logits, atol=1e-3)
    with ablate_frequencies(model, {(0, None): [0, last]}, "unrotate"):
        changed, _ = run(model)
    for head in range(4):
        close(changed[0, head], expected_pattern(qk, 0, head, [0, last], "unrotate"))
    assert (changed - pattern).abs().max() > 1e-2
    assert torch.equal(run(model)[1], logits)
    assert n_hooks(model) == hooks


@pytest.mark.parametrize("name", ["gemma3", pytest.param("hooked plain", marks=needs_hooked)])
def test_later_layers_are_changed_as_named(name):
    model, qk = model_of(name), captured(name)
    with ablate_frequencies(model, {(1, 2): [3]}):
        first, _ = run(model, layer=0)
        changed, _ = run(model, layer=1)
    close(first, run(model, layer=0)[0], atol=0)
    close(changed[0, 2], expected_pattern(qk, 1, 2, [3], "zero"))


@pytest.mark.parametrize(
    "name",
    ["phi", "llama", "gpt-neox", pytest.param("hooked partial-adjacent", marks=needs_hooked)],
)
def test_without_any_pair_the_pass_through_remains(name):
    model, qk = model_of(name), captured(name)
    with ablate_frequencies(model, {(0, None): range(qk.rope()[0].n_pairs)}):
        changed, _ = run(model)
    for head in range(4):
        d = decompose(qk, 0, head)
        rest = torch.tensor(np.nan_to_num(d.pass_through()))
        close(changed[0, head], pattern_of(rest[None], qk.layer(0).visible, None)[0])


@needs_hooked
def test_mean_of_constant_queries_changes_nothing():
    model = zoo.hooked()
    with torch.no_grad():
        for block in model.blocks:
            block.attn.W_Q.zero_()
            block.attn.b_Q.normal_(std=2.0)
    _, logits = run(model)
    qk = capture(model, zoo.tokens(N_TOKENS))
    with ablate_frequencies(model, {(None, None): range(8)}, "mean", offsets=qk):
        close(run(model)[1], logits, atol=1e-4 * float(logits.abs().max()))


def test_offsets_can_be_a_capture_a_mapping_or_features(host_model):
    texts = zoo.tokens(80).reshape(2, 40)
    qk = capture(host_model, texts)
    z = np.array([
        np.concatenate([
            before_rotation(qk.layer(1, prompt=p), qk.layer(1, prompt=p).q, i)[1:, 2]
            for p in (0, 1)
        ]).mean()
        for i in range(8)
    ])  # fmt: skip
    features = types.SimpleNamespace(query_offset=lambda layer, head: {(1, 2): z}[layer, head])
    runs = []
    for offsets in (qk, {(1, 2): z}, features, {(1, 2): z * np.exp(0.5j)}):
        with ablate_frequencies(host_model, {(1, 2): [4, 7]}, "mean", offsets=offsets):
            runs.append(run(host_model, layer=1)[0])
    close(runs[1], runs[0], atol=1e-6)
    close(runs[2], runs[1], atol=0)
    assert (runs[3] - runs[1]).abs().max() > 1e-3


def test_none_is_every_head_and_every_layer(host_model):
    with ablate_frequencies(host_model, {(None, None): [7], (1, 3): [2]}):
        everywhere = run(host_model)[1]
    each = {(layer, head): [7] for layer in range(2) for head in range(4)}
    with ablate_frequencies(host_model, {**each, (1, 3): [7, 2]}):
        assert torch.equal(run(host_model)[1], everywhere)


def test_nested_contexts_compose(host_model):
    both, outer = {}, {}
    for how in ("zero", "unrotate"):
        with ablate_frequencies(host_model, {(0, 1): [2]}):
            outer[how] = run(host_model)[1]
            with ablate_frequencies(host_model, {(0, None): [5]}, how):
                both[how] = run(host_model)[0]
            assert torch.equal(run(host_model)[1], outer[how])
    with ablate_frequencies(host_model, {(0, 1): [2, 5], (0, None): [5]}):
        close(both["zero"], run(host_model)[0], atol=0)
    qk = capture(host_model, zoo.tokens(N_TOKENS))
    close(both["unrotate"][0, 0], expected_pattern(qk, 0, 0, [5], "unrotate"))
    # Head 1 has its pair 2 taken out as well.
    removed = decompose(qk, 0, 1).contributions([2])[0]
    before = expected_pattern(qk, 0, 1, [5], "unrotate").log() - torch.tensor(removed)
    close(both["unrotate"][0, 1], before.nan_to_num(-torch.inf).softmax(-1))


def test_nothing_is_left_after_an_exception(host_model):
    hooks, (_, logits) = n_hooks(host_model), run(host_model)
    with (
        pytest.raises(ZeroDivisionError),
        ablate_frequencies(host_model, {(None, None): [0]}, "unrotate"),
    ):
        assert n_hooks(host_model) > hooks
        raise ZeroDivisionError
    assert n_hooks(host_model) == hooks
    assert torch.equal(run(host_model)[1], logits)


def test_hooks_of_the_user_and_ours_leave_each_other_alone(host_model):
    calls = []
    host_model.add_hook("blocks.0.attn.hook_rot_q", lambda value, hook: calls.append(1))
    with ablate_frequencies(host_model, {(0, 1): [3]}):
        inside = run(host_model)[1]
        calls.clear()
        run(host_model)
        assert calls == [1]
        host_model.reset_hooks()
        assert torch.equal(run(host_model)[1], inside)
        host_model.add_hook("blocks.0.attn.hook_rot_q", lambda value, hook: calls.append(2))
    run(host_model)
    assert calls == [1, 2]


@pytest.mark.parametrize("how", ["zero", "mean", "unrotate"])
def test_rows_of_a_batch_are_as_on_their_own(host_model, how):
    rows = torch.cat([zoo.tokens(20, seed=1), zoo.tokens(20, seed=2)])
    offsets = capture(host_model, zoo.tokens(N_TOKENS)) if how == "mean" else None
    with ablate_frequencies(host_model, {(None, None): [1, 4]}, how, offsets=offsets):
        pattern, logits = run(host_model, rows)
        for i in (0, 1):
            alone, alone_logits = run(host_model, rows[i : i + 1])
            close(pattern[i], alone[0], atol=1e-5)
            close(logits[i], alone_logits[0], atol=1e-4 * float(logits.abs().max()))


@pytest.mark.parametrize("how", ["mean", "unrotate"])
def test_padding_on_the_left_shifts_no_angle(host_model, how):
    short, long = zoo.tokens(14, seed=1), zoo.tokens(20, seed=2)
    rows = torch.cat([torch.cat([torch.zeros(1, 6).long(), short], dim=1), long])
    mask = torch.ones_like(rows)
    mask[0, :6] = 0
    offsets = capture(host_model, zoo.tokens(N_TOKENS)) if how == "mean" else None
    with ablate_frequencies(host_model, {(0, None): [1, 4]}, how, offsets=offsets):
        padded, _ = run(host_model, rows, mask=mask)
        close(padded[0, :, 6:, 6:], run(host_model, short)[0][0], atol=1e-5)
        close(padded[1], run(host_model, long)[0][0], atol=1e-5)


@needs_hooked
@pytest.mark.parametrize("how", ["mean", "unrotate"])
def test_filled_cache_is_refused_where_positions_matter(how):
    model, tokens = zoo.hooked(), zoo.tokens(12)
    model.set_tokenizer(zoo.tokenizer())
    offsets = capture(model, tokens) if how == "mean" else None
    options = {"max_new_tokens": 2, "verbose": False, "do_sample": False, "stop_at_eos": False}
    with ablate_frequencies(model, {(1, None): [1]}, how, offsets=offsets):
        with pytest.raises(InputError, match=r"filled key-value cache.*use_past_kv_cache=False"):
            model.generate(tokens, use_past_kv_cache=True, **options)
        model.generate(tokens, use_past_kv_cache=False, **options)
    with ablate_frequencies(model, {(1, None): [1]}):
        model.generate(tokens, use_past_kv_cache=True, **options)


def test_cache_that_earlier_layers_filled_in_the_same_pass_is_empty_still():
    cache = transformers.DynamicCache()
    refuse_cached({"cache": cache, "use_cache": True}, 0)
    cache.update(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4), 0)
    refuse_cached({"cache": cache}, 1)
    with pytest.raises(InputError, match="layer 0 was run on a filled key-value cache"):
        refuse_cached({"cache": cache}, 0)


@pytest.mark.parametrize("name", ["llama", "gpt-neox", pytest.param("hooked", marks=needs_hooked)])
def test_half_precision(name):
    if name == "hooked":
        model = zoo.hooked(dtype=torch.bfloat16)
    else:
        model = zoo.bridge_of(zoo.hf_model(name, gain=4).bfloat16(), name)
    qk = capture(model, zoo.tokens(N_TOKENS))
    with ablate_frequencies(model, {(0, 1): [1]}):
        close(run(model)[0][0, 1], expected_pattern(qk, 0, 1, [1], "zero"), atol=2e-2)
    with ablate_frequencies(model, {(0, None): [1]}, "unrotate"):
        close(run(model)[0][0, 1], expected_pattern(qk, 0, 1, [1], "unrotate"), atol=4e-2)


def test_unrotating_a_shared_key_needs_all_its_heads(host_model):
    message = (
        r"heads 2, 3 of layer 1 share a key, which can only be unrotated for all of them: name "
        r"pairs \[5\] for each of these heads, or use head None"
    )
    partial = {(1, 2): [4, 5], (1, 3): [4]}
    with pytest.raises(InputError, match=message), ablate_frequencies(
        host_model, partial, "unrotate"
    ):  # fmt: skip
        pass
    with ablate_frequencies(host_model, {(1, 2): [4], (1, 3): [4]}, "unrotate"):
        changed = run(host_model, layer=1)[0]
    close(changed[0, :2], run(host_model, layer=1)[0][0, :2], atol=1e-6)
    qk = capture(host_model, zoo.tokens(N_TOKENS))
    for head in (2, 3):
        close(changed[0, head], expected_pattern(qk, 1, head, [4], "unrotate"))


@pytest.mark.parametrize(
    ("pairs", "options", "message"),
    [
        ({(0, 0): [1]}, {"how": "remove"}, "unknown how 'remove'; choose one of zero, mean, unrot"),
        ({}, {}, "at least one entry"),
        ([(0, 0)], {}, "pairs must be a mapping"),
        ({3: [1]}, {}, r"3 is not a \(layer, head\)"),
        ({(0, 0): []}, {}, r"no pair is chosen for \(0, 0\)"),
        ({(2, 0): [1]}, {}, r"layers \[2\] cannot be read; .* numbered 0 to 1"),
        ({(2, 0): [1], (None, 0): [1]}, {}, r"layers \[2\] cannot be read"),
        ({(0, 4): [1]}, {}, "head 4 is out of range; layer 0 has 4 heads"),
        ({(0, -1): [1]}, {}, "head -1 is out of range"),
        ({(0, 0): [8]}, {}, "pair 8 is out of range; layer 0 has 8 pairs"),
        ({(None, None): [-1]}, {}, "pair -1 is out of range"),
        ({(0, 0): [1]}, {"how": "mean"}, "how='mean' needs the mean queries: pass offsets as"),
        ({(0, 0): [1]}, {"offsets": {}}, "offsets goes with how='mean'; leave it out for 'zero'"),
        ({(0, 0): [1]}, {"how": "mean", "offsets": {(0, 1): np.ones(8)}}, "no entry for layer 0"),
        ({(0, 0): [1]}, {"how": "mean", "offsets": {(0, 0): np.ones(7)}}, r"it has shape \(7,\)"),
        (
            {(0, 0): [1]},
            {"how": "mean", "offsets": {(0, 0): np.full(8, np.nan)}},
            "8 finite complex numbers",
        ),
        ({(0, 0): [1]}, {"how": "mean", "offsets": 3.0}, "offsets cannot be a float; pass a capt"),
    ],
)
def test_bad_arguments_are_refused(host_model, pairs, options, message):
    hooks = n_hooks(host_model)
    with pytest.raises(InputError, match=message), ablate_frequencies(host_model, pairs, **options):
        pass
    assert n_hooks(host_model) == hooks


def test_gradients_flow_through_and_stop_at_what_was_zeroed(host_model):
    leaves = {}

    def leaf(value, hook):
        leaves[hook.name] = value.detach().requires_grad_()
        return leaves[hook.name]

    name = "blocks.0.attn.hook_rot_q"
    with host_model.hooks(fwd_hooks=[(name, leaf)]), ablate_frequencies(host_model, {(0, 1): [2]}):
        host_model(zoo.tokens(12)).float().logsumexp(-1).sum().backward()
    host_model.zero_grad()
    gradient = leaves[name].grad[0].abs().sum(dim=0)
    assert not gradient[1, [2, 10]].any()
    assert gradient[1, [3, 11]].all() and gradient[0].all()


def test_capture_of_one_token_has_no_offsets(host_model):
    qk = capture(host_model, torch.tensor([5]))
    with pytest.raises(InputError, match="no other tokens; capture a longer prompt"):
        ablation._mean_query(qk, 0, 0)


def test_layers_without_rope_are_refused_by_name_and_left_out_of_all():
    model = zoo.bridge("smollm3")
    with pytest.raises(InputError, match="layer 3 has no RoPE"), ablate_frequencies(
        model, {(3, 0): [1]}
    ):  # fmt: skip
        pass
    with ablate_frequencies(model, {(None, 0): [1]}):
        every = run(model)[1]
    with ablate_frequencies(model, {(0, 0): [1], (1, 0): [1], (2, 0): [1]}):
        assert torch.equal(run(model)[1], every)


def test_other_models_are_refused():
    with pytest.raises(InputError, match="cannot read a Linear"), ablate_frequencies(
        torch.nn.Linear(2, 2), {(0, 0): [1]}
    ):  # fmt: skip
        pass
    with pytest.raises(UnsupportedModelError, match="no RoPE"), ablate_frequencies(
        zoo.bridge("gpt2"), {(0, 0): [1]}
    ):  # fmt: skip
        pass


@needs_hooked
@pytest.mark.parametrize("how", ["zero", "unrotate"])
def test_change_that_the_model_does_not_take_over_is_refused(monkeypatch, how):
    model = zoo.hooked()
    reading_of = HookedHost._reading

    def misplaced(self, layer, seen):
        reading = reading_of(self, layer, seen)
        at = dataclasses.replace(reading.edit_at[1], name=f"blocks.{layer}.attn.hook_k")
        if how == "zero":
            at = dataclasses.replace(reading.edit_at[0], name=f"blocks.{layer}.attn.hook_z")
            return dataclasses.replace(reading, edit_at=(at, reading.edit_at[1]))
        return dataclasses.replace(reading, edit_at=(reading.edit_at[0], at))

    monkeypatch.setattr(HookedHost, "_reading", misplaced)
    hooks = n_hooks(model)
    side = "queries" if how == "zero" else "keys"
    message = f"the {side} of layer 1 .* cannot be changed"
    with pytest.raises(UnsupportedModelError, match=message), ablate_frequencies(
        model, {(1, None): [1]}, how
    ):  # fmt: skip
        pass
    assert n_hooks(model) == hooks


@needs_hooked
def test_scores_that_do_not_follow_are_refused():
    model = zoo.hooked()
    attention = model.blocks[1].attn
    own, untouched = attention.calculate_attention_scores, []
    # The model shows the changed queries and goes on with those that it had.
    attention.hook_rot_q.register_forward_hook(lambda m, args, value: untouched.append(value))
    attention.calculate_attention_scores = lambda q, k: own(untouched.pop(), k)
    caught = pytest.raises(VerificationError, match=r"layer 1 .* score error")
    with caught as found, ablate_frequencies(model, {(1, 0): [1]}):
        pass
    assert (found.value.layer, found.value.check) == (1, "score")


def spied(monkeypatch, makes=ablation.ablated):
    """Every intervention that a report makes."""
    chosen = []

    @contextlib.contextmanager
    def noted(host, plans, **kwargs):
        chosen.append(
            {
                (layer, head): tuple(row.nonzero().flatten().tolist())
                for layer, plan in plans.items()
                for head, row in enumerate(plan.chosen)
                if row.any()
            }
        )
        with makes(host, plans, **kwargs):
            yield

    monkeypatch.setattr(effects, "ablated", noted)
    return chosen


def by_hand(model, prompts, pairs, positions=None):
    """Loss, and of head 1 of layer 1: positions, sink share, previous share and patterns."""
    context = ablate_frequencies(model, pairs) if pairs else contextlib.nullcontext()
    losses, shares, previous, patterns = [], [], [], []
    with context:
        for tokens in prompts:
            pattern, logits = run(model, tokens, layer=1)
            pattern = pattern[0, 1].double().numpy()
            logits = logits[0].double().numpy()
            n = len(logits)
            for m in range(n - 1):
                target = logits[m, int(tokens[0, m + 1])]
                losses.append(np.log(np.exp(logits[m] - target).sum()))
            half = np.arange(n) <= n // 2
            received = np.array([pattern[k:, k].mean() for k in range(n)])
            shares.append(received)
            previous += [pattern[m, m - 1] for m in range(1, n)]
            patterns.append(pattern)
            if positions is not None and len(positions) < len(prompts):
                positions.append(int(np.where(half, received, 0).argmax()))
    return np.mean(losses), shares, np.mean(previous), patterns


def test_report_equals_numbers_computed_by_hand(host_model, monkeypatch):
    chosen = spied(monkeypatch)
    prompts = [zoo.tokens(80, seed=1), zoo.tokens(70, seed=2), zoo.tokens(20, seed=3)]
    batch, mask = torch.zeros(3, 80).long(), torch.zeros(3, 80).long()
    for i, tokens in enumerate(prompts):
        batch[i, : tokens.shape[1]], mask[i, : tokens.shape[1]] = tokens, 1
    host_model.tokenizer.pad_token = None
    monkeypatch.setattr(
        effects, "token_rows", lambda model, p: token_rows(model, p, attention_mask=mask)
    )
    wanted = {(1, 1): [2, 6], (0, 3): [7]}
    report = ablation_report(host_model, batch, wanted, controls=2, names=["a", "b", "c"])
    assert (report.prompts, report.n_tokens, report.how) == (("a", "b", "c"), 170, "zero")
    assert chosen[0] == report.pairs == {(0, 3): (7,), (1, 1): (2, 6)}
    head = report.heads[1]
    assert (head.layer, head.head, head.pairs) == (1, 1, (2, 6))

    positions = []
    loss, *before = by_hand(host_model, prompts, None, positions)
    assert report.loss_before == pytest.approx(loss, abs=1e-4)
    assert head.sink_positions == tuple(positions)
    lengths, share = np.array([80, 70]), lambda s: [s[i][positions[i]] for i in (0, 1)]
    expect = lambda values: np.average(values, weights=lengths)  # noqa: E731
    assert head.sink_before == pytest.approx(expect(share(before[0])), abs=1e-4)
    assert head.previous_before == pytest.approx(before[1], abs=1e-4)
    runs = [by_hand(host_model, prompts, pairs) for pairs in chosen]
    distances = [
        np.average(
            [0.5 * np.abs(p - q).sum(1).mean() for p, q in zip(r[3], before[2], strict=True)],
            weights=[80, 70, 20],
        )
        for r in runs
    ]
    assert report.loss_after == pytest.approx(runs[0][0], abs=1e-4)
    assert report.loss_controls == pytest.approx([r[0] for r in runs[1:]], abs=1e-4)
    assert head.sink_after == pytest.approx(expect(share(runs[0][1])), abs=1e-4)
    control = np.median([expect(share(r[1])) for r in runs[1:]])
    assert head.sink_control == pytest.approx(control, abs=1e-4)
    assert head.previous_after == pytest.approx(runs[0][2], abs=1e-4)
    assert head.previous_control == pytest.approx(np.median([r[2] for r in runs[1:]]), abs=1e-4)
    assert head.change == pytest.approx(distances[0], abs=1e-4)
    assert head.change_control == pytest.approx(np.median(distances[1:]), abs=1e-4)
    assert head.change > 0.01
    assert report.notes == (
        "1 of 3 prompts have fewer than 64 tokens, which say little about sinks; they are left out "
        "of sinks.",
    )


def test_control_draws_other_pairs_and_the_seed_decides(host_model, monkeypatch):
    chosen = spied(monkeypatch, lambda *args, **kwargs: contextlib.nullcontext())
    tokens = zoo.tokens(20)
    wanted = {(1, 1): [2, 6], (0, 3): range(6)}
    ablation_report(host_model, tokens, wanted, controls=3, seed=5)
    ablation_report(host_model, tokens, wanted, controls=3, seed=5)
    ablation_report(host_model, tokens, wanted, controls=3, seed=6)
    first, again, other = chosen[:4], chosen[4:8], chosen[8:]
    assert first == again != other
    for draw in first[1:]:
        assert len(draw[1, 1]) == len(set(draw[1, 1])) == 2
        assert not set(draw[1, 1]) & {2, 6}
        assert draw[0, 3] == (6, 7)  # there are no more
    assert len({draw[1, 1] for draw in chosen[1:4] + chosen[9:]}) > 1


def test_control_of_unrotated_heads_is_shared_like_their_key(host_model, monkeypatch):
    chosen = spied(monkeypatch)
    report = ablation_report(host_model, zoo.tokens(20), {(0, None): [1]}, "unrotate", controls=2)
    for draw in chosen[1:]:
        assert draw[0, 0] == draw[0, 1] and draw[0, 2] == draw[0, 3]
    assert all(np.isnan(head.sink_before) for head in report.heads)
    assert report.collapsed().n_heads == 0 and np.isnan(report.collapsed().collapsed)
    assert "no sink share is given" in repr(report)


def test_report_of_means_passes_the_offsets_on(host_model):
    qk = capture(host_model, zoo.tokens(N_TOKENS))
    report = ablation_report(
        host_model, zoo.tokens(20), {(0, 1): [3]}, "mean", offsets=qk, controls=1
    )
    with ablate_frequencies(host_model, {(0, 1): [3]}, "mean", offsets=qk):
        _, logits = run(host_model, zoo.tokens(20))
    loss = torch.nn.functional.cross_entropy(logits[0, :-1], zoo.tokens(20)[0, 1:])
    assert report.loss_after == pytest.approx(float(loss), abs=1e-4)
    assert repr(report).startswith("Setting to their mean 1 pairs of 1 heads")


def test_one_token_has_no_loss(host_model):
    report = ablation_report(host_model, torch.tensor([5]), {(0, 1): [3]}, controls=1)
    assert np.isnan(report.loss_before) and np.isnan(report.heads[0].previous_before)
    assert report.heads[0].change == 0
    assert "no next token" in report.notes[-1]


def test_learned_sink_is_one_more_key_of_the_distance():
    model, tokens = model_of("gpt-oss"), zoo.tokens(80)
    report = ablation_report(model, tokens, {(0, 1): [2]}, controls=1)
    before = run(model, tokens)[0][0, 1].double().numpy()
    with ablate_frequencies(model, {(0, 1): [2]}):
        after = run(model, tokens)[0][0, 1].double().numpy()
    rows = [
        0.5 * np.abs(np.append(p, 1 - p.sum()) - np.append(q, 1 - q.sum())).sum()
        for p, q in zip(after, before, strict=True)
    ]
    assert report.heads[0].change == pytest.approx(np.mean(rows), abs=1e-5)
    # Window 16: a key is seen by 16 queries.
    position = report.heads[0].sink_positions[0]
    seen = before[position : position + 16, position]
    assert report.heads[0].sink_before == pytest.approx(seen.mean(), abs=1e-5)


def effect(sink_before, sink_after, sink_control):
    return effects.HeadEffect(
        0, 0, (1,), (0,), sink_before, sink_after, sink_control, 0.1, 0.2, 0.1, 0.5, 0.1
    )


def test_collapse_counts_sink_heads_alone():
    heads = (
        effect(0.8, 0.05, 0.7),
        effect(0.5, 0.2, 0.05),
        effect(0.4, 0.09, 0.25),
        effect(0.3, 0.0, 0.3),
    )
    report = effects.AblationReport(
        "m", "zero", {(0, 0): (1,)}, ("p",), 100, 3.0, 4.0, (3.1, 3.2), heads, ()
    )
    found = report.collapsed()
    assert (found.n_heads, found.below) == (3, 0.1)
    assert found.collapsed == pytest.approx(2 / 3)
    assert found.control_collapsed == pytest.approx(1 / 3)
    assert found.control_kept == pytest.approx(2 / 3)
    assert report.collapsed(0.3).collapsed == 1
    assert "from 3.00 to 4.00 nats/token; as many random other pairs, 3.10 to 3.20" in repr(report)
    assert "Of 3 sink heads among them, 67% fell below" in report.summary()
    assert report.to_dataframe()["pairs"].tolist() == ["1"] * 4


@pytest.mark.parametrize(
    ("pairs", "options", "message"),
    [
        ({(0, 0): [1]}, {"controls": 0}, "controls is 0; at least 1 draw"),
        ({(0, 0): range(8)}, {}, "layer 0 head 0 has no pairs besides the ablated ones"),
    ],
)
def test_report_refuses_what_it_cannot_compare(host_model, pairs, options, message):
    with pytest.raises(InputError, match=message):
        ablation_report(host_model, zoo.tokens(20), pairs, **options)


def test_report_inside_a_context_is_refused(host_model):
    refused = pytest.raises(InputError, match="inside ablate_frequencies; leave that context")
    with ablate_frequencies(host_model, {(0, 0): [1]}), refused:
        ablation_report(host_model, zoo.tokens(20), {(0, 1): [1]})


def test_a_layer_that_is_being_changed_is_not_captured(host_model):
    tokens = zoo.tokens(20)
    before = capture(host_model, tokens)
    with ablate_frequencies(host_model, {(0, 1): [0]}):
        with pytest.raises(InputError, match="layers 0 are inside ablate_frequencies, "):
            capture(host_model, tokens)
        after = capture(host_model, tokens, [1])  # what the next layer makes of it
    assert not torch.equal(after.layer(1).q, before.layer(1).q)
    assert torch.equal(capture(host_model, tokens).layer(0).q, before.layer(0).q)
