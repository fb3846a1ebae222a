"""A capture holds what the model saw: each prompt alone, unpadded, and the model left as it was.

Identity: every row of a padded batch equals the capture of that row's own tokens.
"""

import dataclasses

import numpy as np
import pytest
import torch
import zoo
from conftest import needs_hooked

from lens_rope.capturing import capture, model_shape, read_rope
from lens_rope.errors import InputError, PromptError
from lens_rope.records import Prompt


def words(n_tokens, seed=0):
    # Words that do not begin with a special token, which the tokenizer would split off.
    return " ".join(f"t{40 + i % 60}" for i in zoo.tokens(n_tokens, seed)[0].tolist())


def assert_same(a, b, layer, prompt_a=0, prompt_b=0):
    left, right = a.layer(layer, prompt=prompt_a), b.layer(layer, prompt=prompt_b)
    torch.testing.assert_close(left.q, right.q, rtol=0, atol=0)
    torch.testing.assert_close(left.k, right.k, rtol=0, atol=0)


def test_texts_one_by_one_and_together_give_the_same_numbers(host_model):
    texts = [words(30), words(7, seed=1), words(19, seed=2)]
    together = capture(host_model, texts)
    for i, text in enumerate(texts):
        alone = capture(host_model, text)
        assert alone.prompts[0].token_ids == together.prompts[i].token_ids
        for layer in (0, 1):
            assert_same(alone, together, layer, prompt_b=i)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_row_equals_its_unpadded_run(host_model, side):
    rows = [zoo.tokens(n, seed=n)[0] for n in (24, 11)]
    batch, mask = torch.zeros(2, 24, dtype=torch.long), torch.zeros(2, 24, dtype=torch.long)
    for i, row in enumerate(rows):
        where = slice(24 - len(row), None) if side == "left" else slice(len(row))
        batch[i, where], mask[i, where] = row, 1
    padded = capture(host_model, batch, attention_mask=mask)
    for i, row in enumerate(rows):
        assert padded.prompts[i].token_ids == tuple(row.tolist())
        assert padded.layer(0, prompt=i).n_pos == len(row)
        assert_same(capture(host_model, row), padded, 1, prompt_b=i)


def test_batch_that_looks_padded_is_refused_without_a_mask(host_model):
    batch = torch.stack([zoo.tokens(12)[0], zoo.tokens(12, seed=1)[0]])
    batch[1, :3] = 0
    with pytest.raises(InputError, match="begin or end with the padding token 0; pass attention"):
        capture(host_model, batch)
    assert capture(host_model, batch, attention_mask=torch.ones_like(batch)).prompts[1].token_ids[
        0
    ] == (0)


def test_mask_with_a_gap_is_refused(host_model):
    mask = torch.ones(1, 12, dtype=torch.long)
    mask[0, 5] = 0
    with pytest.raises(InputError, match="gap in row 0"):
        capture(host_model, zoo.tokens(12), attention_mask=mask)


def test_row_of_padding_alone_is_refused(host_model):
    mask = torch.stack([torch.ones(12, dtype=torch.long), torch.zeros(12, dtype=torch.long)])
    with pytest.raises(PromptError, match="row 1 of the token ids is all padding"):
        capture(host_model, torch.cat([zoo.tokens(12)] * 2), attention_mask=mask)


@pytest.mark.parametrize("prepend_bos", [True, False])
def test_tokens_are_those_the_model_saw(host_model, prepend_bos):
    text, seen = words(9), []
    name = "hook_embed" if type(host_model).__name__ == "HookedTransformer" else "embed.hook_in"
    first_layer = capture(host_model, text, prepend_bos=prepend_bos)
    tokens = host_model.to_tokens(text, prepend_bos=prepend_bos)
    assert first_layer.prompts[0].token_ids == tuple(tokens[0].tolist())
    assert first_layer.prompts[0].starts_with_bos is prepend_bos
    host_model.run_with_hooks(
        tokens, fwd_hooks=[(name, lambda value, hook: seen.append(value.shape[1]))]
    )
    assert seen == [first_layer.layer(0).n_pos]


@pytest.mark.parametrize("n_bos", [0, 1, 2])
def test_bos_is_reported_as_found(host_model, n_bos):
    token_ids = torch.cat([torch.ones(n_bos, dtype=torch.long), zoo.tokens(10)[0]])
    prompt = capture(host_model, token_ids).prompts[0]
    assert prompt.starts_with_bos is (n_bos > 0)
    assert len(prompt) == 10 + n_bos


def test_one_token(host_model):
    one = capture(host_model, torch.tensor([5]))
    many = capture(host_model, torch.tensor([5] + [7] * 30))
    assert one.layer(0).q.shape[0] == 1
    assert one.layer(0).rope.same_rotation(many.layer(0).rope)
    torch.testing.assert_close(one.layer(1).q[0], many.layer(1).q[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("n_tokens", [2, 3, 7, 8, 9])
def test_short_prompts_have_the_same_frequencies(host_model, n_tokens):
    short = capture(host_model, zoo.tokens(n_tokens)[0]).layer(0).rope
    expected = 10000.0 ** (-np.arange(8) / 8)
    np.testing.assert_allclose(short.inv_freq, expected, rtol=1e-6)


def test_prompt_is_cut_only_where_asked(host_model):
    assert capture(host_model, zoo.tokens(129), max_tokens=128).layer(0).n_pos == 128
    assert capture(host_model, zoo.tokens(129)).layer(0).n_pos == 129


def test_queries_and_keys_are_the_callers_own(host_model):
    record = capture(host_model, zoo.tokens(20)).layer(0)
    q = record.q.clone()
    record.q.mul_(2.0)
    assert torch.equal(record.q, 2 * q)
    record.k.requires_grad_()
    record.k.sum().backward()
    assert record.k.grad is not None and bool((record.k.grad == 1).all())
    assert torch.equal(capture(host_model, zoo.tokens(20)).layer(0).q, q)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_record_that_holds_no_numbers_is_refused_with_the_place(host_model, value):
    record = capture(host_model, zoo.tokens(20)).layer(0)
    k = record.k.clone()
    k[7, 1, 3] = value
    with pytest.raises(ValueError, match=r"k of layer 0 .* first in head 1 at position 7"):
        dataclasses.replace(record, k=k)


def test_cut_prompt_says_how_long_it_was(host_model):
    prompt = capture(host_model, words(40), max_tokens=16).prompts[0]
    whole = len(capture(host_model, words(40)).prompts[0])
    assert len(prompt) == 16
    assert prompt.cut_from == whole
    assert capture(host_model, words(10), max_tokens=128).prompts[0].cut_from is None


@pytest.mark.parametrize("text", ["", "   ", "\n\t"])
def test_empty_text_is_refused(host_model, text):
    with pytest.raises(PromptError, match="the prompt is empty; give some text"):
        capture(host_model, text)


def test_no_prompt_at_all_is_refused(host_model):
    with pytest.raises(PromptError, match="there is no prompt"):
        capture(host_model, [])


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (torch.zeros(1, 4), "integer tensor"),
        (torch.zeros(0, dtype=torch.long), "non-empty"),
        (torch.zeros(1, 1, 4, dtype=torch.long), "integer tensor"),
        (torch.tensor([4, 128]), "between 0 and 127"),
        (torch.tensor([-1, 4]), "between 0 and 127"),
        ([1, 2, 3], "prompts must be texts"),
    ],
    ids=["float", "empty", "3-D", "beyond the vocabulary", "negative", "list of ints"],
)
def test_bad_token_ids_are_refused(host_model, bad, message):
    with pytest.raises(InputError, match=message):
        capture(host_model, bad)


@pytest.mark.parametrize("layers", [[2], [-1], [], [0, 5]])
def test_layers_out_of_range_are_refused(host_model, layers):
    with pytest.raises(InputError, match=r"cannot be read; .* numbered 0 to 1"):
        capture(host_model, zoo.tokens(10), layers)


def test_some_layers_only(host_model):
    some, whole = capture(host_model, zoo.tokens(20), [1]), capture(host_model, zoo.tokens(20))
    assert some.layer_indices == (1,)
    assert_same(some, whole, 1)
    with pytest.raises(InputError, match="layer 0 was not captured; captured layers: 1"):
        some.layer(0)
    with pytest.raises(InputError, match="prompt 1 is out of range"):
        some.layer(1, prompt=1)


def test_arguments_that_do_not_go_together_are_refused(host_model):
    with pytest.raises(InputError, match="texts are never padded"):
        capture(host_model, words(5), attention_mask=torch.ones(1, 5))
    with pytest.raises(InputError, match="token ids are taken as they are"):
        capture(host_model, zoo.tokens(5), prepend_bos=True)
    with pytest.raises(InputError, match="2 names for 1 prompts"):
        capture(host_model, words(5), names=["a", "b"])
    with pytest.raises(InputError, match="max_tokens is 0"):
        capture(host_model, words(5), max_tokens=0)
    with pytest.raises(InputError, match=r"does not match token ids"):
        capture(host_model, zoo.tokens(5), attention_mask=torch.ones(1, 4))
    with pytest.raises(InputError, match="cannot read a Linear"):
        capture(torch.nn.Linear(2, 2), words(5))


def test_progress_counts_every_layer_of_every_prompt(host_model):
    calls = []
    capture(host_model, [words(9), words(12)], progress=lambda *at: calls.append(at))
    assert calls == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_tokens_need_no_tokenizer(host_model):
    host_model.tokenizer = None
    prompt = capture(host_model, zoo.tokens(9)).prompts[0]
    assert prompt.tokens[0] == f"#{prompt.token_ids[0]}"
    assert prompt.starts_with_bos is None
    with pytest.raises(PromptError, match="no tokenizer; pass a tensor"):
        capture(host_model, words(9))


def state_of(model):
    """Everything a capture could disturb."""
    root = getattr(model, "original_model", model)
    modules = dict(root.named_modules()) | {f"host.{n}": m for n, m in model.named_modules()}
    return {
        "tensors": {n: (id(t), t.clone()) for n, t in root.state_dict(keep_vars=True).items()},
        "buffers": {
            (n, key): (id(value), value.clone())
            for n, m in modules.items()
            for key, value in m._buffers.items()
            if value is not None
        },
        "training": {n: m.training for n, m in modules.items()},
        "scalars": {
            (n, key): value
            for n, m in modules.items()
            for key, value in vars(m).items()
            if isinstance(value, (int, float, str)) and key != "context_level"
        },
        "hooks": {
            name: (len(point.fwd_hooks), len(point._forward_hooks), len(point.bwd_hooks))
            for name, point in model.hook_dict.items()
        },
        "grad": {n: p.requires_grad for n, p in root.named_parameters()},
        "level": model.context_level,
    }


def assert_as_before(before, after):
    for kind in ("tensors", "buffers"):
        assert before[kind].keys() == after[kind].keys()
        for name, (identity, value) in before[kind].items():
            assert after[kind][name][0] == identity, f"{kind} {name} was replaced"
            assert torch.equal(after[kind][name][1], value), f"{kind} {name} was changed"
    for kind in ("training", "scalars", "hooks", "grad", "level"):
        assert before[kind] == after[kind], kind


@pytest.mark.parametrize("fails", [False, True], ids=["success", "exception"])
def test_model_is_left_as_it_was(host_model, fails, monkeypatch):
    seen = []
    host_model.add_hook("blocks.0.attn.hook_pattern", lambda value, hook: seen.append(hook.name))
    host_model.train()
    tokens = zoo.tokens(40)
    kept = tokens.clone()
    host_model(tokens)  # the bridge wires itself up in its first forward pass
    seen.clear()
    before = state_of(host_model)
    if fails:
        monkeypatch.setattr("lens_rope.streaming.verify", lambda *a: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            capture(host_model, tokens)
    else:
        capture(host_model, tokens)
    assert_as_before(before, state_of(host_model))
    assert torch.equal(tokens, kept)
    assert seen, "the caller's own hook did not run"
    seen.clear()
    host_model(tokens)
    assert seen, "the caller's own hook is gone"


def test_capture_shares_no_memory_with_the_model():
    model = zoo.bridge("gpt-oss")
    captured = capture(model, zoo.tokens(12))
    owned = {p.untyped_storage().data_ptr() for p in model.original_model.parameters()}
    for record in captured.records[0]:
        for tensor in (record.q, record.k, record.sinks):
            assert tensor.untyped_storage().data_ptr() not in owned


@pytest.mark.parametrize("name", ["llama-dynamic", "phi3-longrope"])
def test_scaling_by_length_is_undone(name):
    model = zoo.bridge_of(zoo.hf_model(name), name)
    model(zoo.tokens(12))
    before = state_of(model)
    capture(model, zoo.tokens(40))
    assert_as_before(before, state_of(model))


@needs_hooked
def test_tables_that_grow_are_put_back():
    model = zoo.hooked(n_ctx=4096)
    before = state_of(model)
    capture(model, zoo.tokens(2200), [0])
    assert_as_before(before, state_of(model))


def test_context_can_be_given(host_model):
    given = read_rope(host_model, context=1000)[0]
    assert given.context == 1000
    np.testing.assert_allclose(given.cycles, given.inv_freq * 1000 / (2 * np.pi))
    assert capture(host_model, zoo.tokens(12), context=1000).layer(1).rope.trained_context == 1000
    with pytest.raises(InputError, match="context is 0"):
        read_rope(host_model, context=0)


def test_text_that_cannot_be_encoded_is_refused(host_model):
    with pytest.raises(PromptError, match="not valid text"):
        capture(host_model, "t44 \ud800")


def test_failure_inside_the_host_is_named(host_model):
    from lens_rope.errors import UnsupportedModelError

    def fail(value, hook):
        raise AttributeError("no such thing")

    host_model.add_hook("blocks.1.attn.hook_pattern", fail)
    with pytest.raises(UnsupportedModelError, match=r"forward pass of .* failed \(AttributeError"):
        capture(host_model, zoo.tokens(12))


def test_read_rope_equals_the_rotation_of_a_capture(host_model):
    spec = read_rope(host_model)
    of_prompt = capture(host_model, zoo.tokens(40)).rope()
    assert all(spec[layer].same_rotation(of_prompt[layer]) for layer in (0, 1))
    assert [rope.layer for rope in read_rope(host_model, [1]).layers] == [1]
    with pytest.raises(InputError, match="layer 3 was not read; the layers at hand are 0, 1"):
        spec[3]


def test_same_rotation_tells_scalings_apart():
    model = zoo.bridge_of(zoo.hf_model("phi3-longrope"), "phi3-longrope")
    short, long = (capture(model, zoo.tokens(n)).layer(0).rope for n in (16, 17))
    assert not short.same_rotation(long)
    assert short.same_rotation(capture(model, zoo.tokens(12)).layer(0).rope)
    assert not short.same_rotation(dataclasses.replace(short, attention_factor=1.5))
    assert not short.same_rotation(dataclasses.replace(short, pairing="adjacent"))


def test_model_shape_needs_no_forward_pass(host_model, monkeypatch):
    monkeypatch.setattr(host_model, "forward", lambda *a, **k: 1 / 0)
    shape = model_shape(host_model)
    assert (shape.n_layers, shape.n_heads, shape.n_kv_heads, shape.d_head) == (2, 4, 2, 16)
    assert shape.host == type(host_model).__name__
    assert shape.dtype == "float32"


def test_capture_says_what_it_is(host_model):
    text = repr(capture(host_model, [words(9), words(12)], names=["first", "second"]))
    assert "layers: 0-1   heads: 4   KV heads: 2   d_head: 16" in text
    assert "first (10 tokens), second (13 tokens)" in text
    assert "verified: scores within" in text


@pytest.mark.parametrize(
    ("token_ids", "tokens", "message"),
    [((), (), "at least one token"), ((1, 2), ("a",), "1 token texts for 2 positions")],
)
def test_prompt_refuses_missing_texts(token_ids, tokens, message):
    with pytest.raises(ValueError, match=message):
        Prompt("name", token_ids, tokens, None)
