"""A fused pass on the bridge: the same queries, keys and rotation, and never all scores at once.

Identity: attention computed in blocks by the Hugging Face model's own modules is attention computed
score by score by the bridge. So `capture(..., attention="fused")` hands out what
`capture(..., attention="eager")` does, logits included, and what transformers alone hands to its
attention function; what cannot be shown to be so is refused.
"""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Iterator
from typing import Any

import numpy as np
import oracle
import pytest
import torch
import transformers as hf
import zoo
from allocations import Largest
from oracle import EXPECTED
from transformer_lens.hook_points import HookPoint

from lens_rope import streaming
from lens_rope.ablation import ablate_frequencies
from lens_rope.capturing import capture
from lens_rope.errors import InputError, LensRopeError, VerificationError
from lens_rope.fit import fit_rope, rotated
from lens_rope.hosts import LayerReading, blocked, bridge_fused, host_of
from lens_rope.scores import soft_capped

IS_FIRST_BRIDGE = int(importlib.metadata.version("transformer-lens").split(".")[0]) < 4
NAMES = [name for name in EXPECTED if not (name == "cohere" and IS_FIRST_BRIDGE)]
N_TOKENS = 100  # beyond every window and every original context of the zoo
each_model = pytest.mark.parametrize("name", NAMES)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tensors as small as these take longer to share out than to work on."""
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n_threads)


@pytest.fixture(autouse=True)
def sample_of_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """40 of the 100 queries, so that what is not sampled is there to be read as well."""
    monkeypatch.setattr(blocked, "MAX_SAMPLED_QUERIES", 40)


def readings(model: Any, attention: Any) -> tuple[dict[int, LayerReading], torch.Tensor]:
    """Every layer's reading, and the logits."""
    host, seen = host_of(model), {}
    logits = host.read_logits(
        zoo.tokens(N_TOKENS)[0].tolist(),
        host.attention_layers,
        lambda reading: seen.update({reading.layer: reading}),
        attention,
    )
    return seen, logits


def off(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Largest difference relative to the largest true value."""
    assert ours.shape == theirs.shape
    return float((ours - theirs).abs().max() / theirs.abs().max())


@each_model
def test_queries_keys_and_rotation_are_those_of_an_eager_capture(name: str) -> None:
    model, tokens = zoo.bridge(name), zoo.tokens(N_TOKENS)
    eager, fused = (capture(model, tokens, attention=a) for a in ("eager", "fused"))
    for layer in eager.layer_indices:
        ours, theirs = fused.layer(layer), eager.layer(layer)
        assert off(ours.q, theirs.q) < 1e-5
        assert off(ours.k, theirs.k) < 1e-5
        assert ours.scale == theirs.scale
        assert ours.softcap == theirs.softcap
        assert (ours.sinks is None) == (theirs.sinks is None)
        if ours.sinks is not None and theirs.sinks is not None:
            assert torch.equal(ours.sinks, theirs.sinks)
        assert ours.rope.pairing == theirs.rope.pairing
        assert ours.rope.rotary_dim == theirs.rope.rotary_dim
        assert ours.rope.rotary_start == theirs.rope.rotary_start
        assert ours.rope.window == theirs.rope.window == EXPECTED[name].windows[layer]
        assert ours.rope.attention_factor == pytest.approx(theirs.rope.attention_factor, rel=1e-6)
        np.testing.assert_allclose(ours.rope.inv_freq, theirs.rope.inv_freq, rtol=1e-6)
        assert ours.check.checked_queries == 40
        assert ours.check.output < 1e-5


@each_model
def test_queries_and_keys_are_those_of_transformers_alone(name: str) -> None:
    fused = capture(zoo.bridge(name), zoo.tokens(N_TOKENS), attention="fused")
    theirs = oracle.spy(zoo.hf_model(name, attention="spy"), zoo.tokens(N_TOKENS))
    for layer, attention in enumerate(theirs):
        assert off(fused.layer(layer).q.double(), torch.as_tensor(attention.q)) < 1e-5
        assert off(fused.layer(layer).k.double(), torch.as_tensor(attention.k)) < 1e-5


@each_model
def test_logits_scores_and_patterns_are_those_of_an_eager_pass(name: str) -> None:
    model = zoo.bridge(name)
    eager, eager_logits = readings(model, "eager")
    fused, fused_logits = readings(model, "fused")
    assert fused.keys() == eager.keys()
    assert off(fused_logits, eager_logits) < 1e-4
    for layer, ours in fused.items():
        theirs = eager[layer]
        assert ours.rows is not None
        assert ours.rows.tolist() == sorted(set(ours.rows.tolist()))
        assert {0, N_TOKENS - 1} <= set(ours.rows.tolist())
        assert (ours.pattern - theirs.pattern[:, ours.rows]).abs().max() < 1e-5
        assert ours.output_error is not None
        assert ours.output_error < 1e-5
        assert ours.scores is None  # the model's eager attention shows the pattern alone
        if theirs.route == "hook_cos_pattern":
            continue
        q, k = rotated(ours, fit_rope(ours))
        k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        scores = soft_capped(
            ours.scale * torch.einsum("mhd,nhd->hmn", q[ours.rows], k), ours.softcap
        )
        seen = torch.as_tensor(oracle.visible(N_TOKENS, ours.window))[ours.rows]
        expected = torch.as_tensor(theirs.scores)[:, ours.rows]
        assert off(scores[:, seen], expected[:, seen]) < 1e-5


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt-oss", "gemma2"])
def test_nothing_of_size_query_by_key_is_made(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocked, "MAX_SAMPLED_QUERIES", 16)
    monkeypatch.setattr(blocked, "_BLOCK_BYTES", 2**18)
    model, n_tokens = zoo.bridge(name), 1024
    host = host_of(model)
    assert host.fused_refusal([0]) is None
    largest = {}
    for attention in ("eager", "fused"):
        with Largest() as mode:
            host.read(zoo.tokens(n_tokens)[0].tolist(), [0], lambda reading: None, attention)
        largest[attention] = mode.numel
    assert largest["eager"] >= 4 * n_tokens**2
    # Not even one mask for all heads.
    assert largest["fused"] < n_tokens**2 / 2


@pytest.mark.parametrize("attention", ["eager", "fused"])
@pytest.mark.parametrize("ends", ["well", "in an error"])
def test_the_model_is_left_as_it_was(attention: Any, ends: str) -> None:
    model = zoo.bridge("gemma3")
    config: Any = model.original_model.config
    host = host_of(model)

    def state() -> tuple[Any, ...]:
        points = [m for m in model.modules() if isinstance(m, HookPoint)]
        return (
            config._attn_implementation,
            config.use_cache,
            sum(len(p.fwd_hooks) + len(p._forward_hooks) for p in points),
            [m for m in model.modules() if "forward" in vars(m)],
            {name: buffer.sum() for name, buffer in model.original_model.named_buffers()},
            model(zoo.tokens(20)).sum(),
        )

    def visit(reading: LayerReading) -> None:
        if ends == "in an error" and reading.layer == 1:
            raise KeyError("mine")

    before = state()
    assert before[0] == "eager"
    # A trial run, which must leave nothing behind either.
    assert host.fused_refusal(host.attention_layers) is None
    try:
        host.read(zoo.tokens(N_TOKENS)[0].tolist(), [0, 1], visit, attention)
    except KeyError as error:
        assert ends == "in an error"
        assert error.args == ("mine",)
    assert state() == before


@pytest.mark.parametrize("attention", ["eager", "fused"])
@pytest.mark.parametrize("last", [0, 1, 5])
def test_nothing_runs_after_the_last_layer_that_is_read(attention: Any, last: int) -> None:
    model = zoo.bridge("gemma3")
    host, ran = host_of(model), []
    assert host.fused_refusal([last]) is None
    handles = [
        block.attn.register_forward_pre_hook(lambda *args, layer=layer: ran.append(layer))
        for layer, block in enumerate(model.blocks)
    ]
    handles.append(model.unembed.register_forward_pre_hook(lambda *args: ran.append("logits")))
    try:
        host.read(zoo.tokens(20)[0].tolist(), [last], lambda reading: None, attention)
    finally:
        for handle in handles:
            handle.remove()
    assert ran == list(range(last + 1))


@pytest.mark.parametrize("n_tokens", [1, 3])
@pytest.mark.parametrize("name", ["llama", "gpt-oss", "smollm3"])
def test_short_prompts(name: str, n_tokens: int) -> None:
    model, tokens = zoo.bridge(name), zoo.tokens(n_tokens)
    eager, fused = (capture(model, tokens, attention=a) for a in ("eager", "fused"))
    for layer in eager.layer_indices:
        assert off(fused.layer(layer).q, eager.layer(layer).q) < 1e-5
        assert off(fused.layer(layer).k, eager.layer(layer).k) < 1e-5
        ours, theirs = fused.layer(layer).rope, eager.layer(layer).rope
        assert (ours.pairing, ours.rotary_dim) == (theirs.pairing, theirs.rotary_dim)
        np.testing.assert_allclose(ours.inv_freq, theirs.inv_freq, rtol=1e-6)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt-neox", "qwen3"])
def test_half_precision(name: str) -> None:
    model = zoo.bridge_of(zoo.hf_model(name).to(torch.bfloat16), name)
    eager, fused = (capture(model, zoo.tokens(N_TOKENS), attention=a) for a in ("eager", "fused"))
    for layer in eager.layer_indices:
        assert off(fused.layer(layer).k, eager.layer(layer).k) < 2e-2
        assert fused.layer(layer).rope.pairing == eager.layer(layer).rope.pairing
        np.testing.assert_allclose(
            fused.layer(layer).rope.inv_freq, eager.layer(layer).rope.inv_freq, rtol=1e-3
        )


def test_what_is_attached_to_attention_is_not_passed_over() -> None:
    model = zoo.bridge("llama")
    assert host_of(model).fused_refusal([1]) is None
    with model.hooks(fwd_hooks=[("blocks.0.attn.hook_pattern", lambda value, hook: value * 0)]):
        why = host_of(model).fused_refusal([1])
        assert why is not None
        assert "layers 0 have hooks or edits" in why
        with pytest.raises(InputError, match="hooks or edits"):
            capture(model, zoo.tokens(20), [1], attention="fused")
    with ablate_frequencies(model, {(0, 1): [2]}):
        assert host_of(model).fused_refusal([1]) is not None
    assert host_of(model).fused_refusal([1]) is None


def test_what_is_attached_after_the_last_layer_that_runs_does_not_matter() -> None:
    model = zoo.bridge("gemma3")
    host, last = host_of(model), model.cfg.n_layers - 1
    hook = ("blocks.3.attn.hook_pattern", lambda value, hook: value)
    with model.hooks(fwd_hooks=[hook]):
        assert host.fused_refusal([0, 2]) is None
        assert not np.isnan(
            capture(model, zoo.tokens(20), [2], attention="fused").layer(2).check.output
        )
        for layers in ([3], [4], host.attention_layers):
            assert "layers 3 have hooks" in str(host.fused_refusal(layers))
    with ablate_frequencies(model, {(3, 0): [2]}):
        assert host.fused_refusal([0, 1]) is None
    # Read to the logits all layers run, though edited ones are not read.
    with ablate_frequencies(model, {(last, 0): [2], (last - 1, 0): [2]}):
        for attention in ("fused", "auto"):
            stream = streaming.LayerStream(model, [0], attention=attention)
            assert stream.host.fused_refusal(range(last - 1)) is not None
            assert stream.host.fused_refusal(range(last - 2)) is None
        prompt = stream.prompt("prompt", zoo.tokens(50)[0].tolist())
        theirs = streaming.LayerStream(model, [0], attention="eager")
        expected = theirs.run_to_logits(prompt, lambda record: None)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(streaming, "MAX_EAGER_BYTES", 1)
            assert stream.attention_for(50) == "fused"
            torch.testing.assert_close(stream.run_to_logits(prompt, lambda record: None), expected)


def test_a_trial_that_fails_names_the_hooks_that_it_ran_without() -> None:
    """Here one of them is what makes the model run at all."""
    model: Any = zoo.bridge_of(zoo.hf_model("llama"), "llama")
    mlp = model.original_model.model.layers[0].mlp
    own, needed = mlp.forward, []

    def forward(x: torch.Tensor) -> torch.Tensor:
        return own(x) if needed else own(x[..., 1:])

    mlp.__dict__["forward"] = forward
    handles = [
        mlp.register_forward_pre_hook(lambda module, args: needed.append(None)),
        *(model.blocks[1].ln2.register_forward_hook(lambda *args: None) for _ in range(2)),
    ]
    expected = (
        r"a trial of the model without the hooks of the caller \(modules blocks\.0\.[\w.]*mlp, "
        r"blocks\.1\.[\w.]*\) failed: the forward pass"
    )
    with pytest.raises(InputError, match=expected):
        capture(model, zoo.tokens(20), attention="fused")
    assert needed == []
    capture(model, zoo.tokens(20), attention="eager")
    assert needed
    for handle in handles:
        handle.remove()
    needed.clear()
    why = host_of(model).fused_refusal([0, 1])
    assert why is not None
    assert "hooks" not in why


def test_a_trial_that_fails_on_several_devices_says_so() -> None:
    model: Any = zoo.bridge_of(zoo.hf_model("llama"), "llama")
    assert host_of(model).fused_refusal([0]) is None
    model.original_model.model.layers[1].to("meta")
    # Whether it matters a trial tells: what runs may be on one of them.
    assert host_of(model).fused_refusal([0]) is None
    why = host_of(model).fused_refusal([0, 1])
    assert why is not None
    assert why.startswith("a trial of the model on several devices (cpu, meta) failed: ")


def _parts(model: Any, layer: int = 0) -> dict[str, torch.nn.Module]:
    """Modules inside the attention of a layer of a Llama bridge."""
    attn = model.blocks[layer].attn
    own = attn.original_component
    return {
        "the bridge's attention": attn,
        "transformers' attention": own,
        "the bridge's projection": attn.k,
        "transformers' projection": own.k_proj.original_component,
        "the output projection": own.o_proj.original_component,
        "a hook point of it": attn.v.hook_in,
    }


PARTS = list(_parts(zoo.bridge("llama")))


@pytest.mark.parametrize("kind", ["after", "before", "before, by name"])
@pytest.mark.parametrize("part", PARTS)
def test_torch_hooks_inside_attention_keep_the_pass_eager(
    part: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "MAX_EAGER_BYTES", 1)
    model = zoo.bridge_of(zoo.hf_model("llama"), "llama")
    module = _parts(model)[part]
    handle = {
        "after": lambda: module.register_forward_hook(lambda module, args, output: None),
        "before": lambda: module.register_forward_pre_hook(lambda module, args: None),
        "before, by name": lambda: module.register_forward_pre_hook(
            lambda module, args, kwargs: None, with_kwargs=True
        ),
    }[kind]()
    with pytest.raises(InputError, match="layers 0 have hooks or edits in their attention"):
        capture(model, zoo.tokens(20), [1], attention="fused")
    assert np.isnan(capture(model, zoo.tokens(20), [1]).layer(1).check.output)
    handle.remove()
    assert not np.isnan(capture(model, zoo.tokens(20), [1]).layer(1).check.output)


def test_a_hook_that_reads_weights_gets_them_and_its_change_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(streaming, "MAX_EAGER_BYTES", 1)
    model, sums = zoo.bridge_of(zoo.hf_model("llama"), "llama"), []
    untouched = capture(model, zoo.tokens(20), [1])

    def sharpen(module: Any, args: Any, output: tuple[Any, ...]) -> tuple[Any, ...]:
        sums.append(output[1].sum(-1))
        return (output[0] * output[1].mean(), *output[1:])

    handle = model.blocks[0].attn.register_forward_hook(sharpen)
    changed = capture(model, zoo.tokens(20), [1])
    handle.remove()
    torch.testing.assert_close(sums[0], torch.ones(1, 4, 20))
    assert off(changed.layer(1).q, untouched.layer(1).q) > 0.01


def test_what_transformers_attaches_to_attention_does_not_matter() -> None:
    from transformers.utils.output_capturing import install_output_capuring_hook

    model = zoo.bridge_of(zoo.hf_model("llama"), "llama")
    untouched = capture(model, zoo.tokens(20), attention="fused")
    # As after a run in which attention weights were asked for; it does nothing in other runs.
    install_output_capuring_hook(model.blocks[0].attn.original_component, "attentions", 1)
    again = capture(model, zoo.tokens(20), attention="fused")
    assert torch.equal(again.layer(1).q, untouched.layer(1).q)


def test_hooks_outside_attention_act_in_a_fused_pass_and_see_no_other_prompt() -> None:
    """Neither the trial nor what reads vectors before the rotation calls them."""
    model, seen = zoo.bridge_of(zoo.hf_model("llama"), "llama"), []
    untouched = capture(model, zoo.tokens(40))

    def look(module: Any, args: Any, output: Any) -> Any:
        seen.append((type(module).__name__, output.shape[1]))
        return 1.5 * output

    def look_first(where: str, module: Any, args: Any) -> None:
        seen.append((where, args[0].shape[1]))

    own = model.original_model.model.layers[0]
    handles = [
        own.mlp.register_forward_hook(look),
        own.input_layernorm.original_component.register_forward_pre_hook(
            functools.partial(look_first, "norm")
        ),
    ]
    point = "blocks.0.hook_resid_pre"
    captures = {}
    for attention in ("eager", "fused"):
        seen.clear()
        hook = (point, lambda value, hook: seen.append(("point", value.shape[1])))
        with model.hooks(fwd_hooks=[hook]):
            captures[attention] = capture(model, zoo.tokens(40), attention=attention)
        assert sorted(seen) == [(type(own.mlp).__name__, 40), ("norm", 40), ("point", 40)]
    for handle in handles:
        handle.remove()
    eager, fused = captures["eager"].layer(1), captures["fused"].layer(1)
    assert off(fused.q, eager.q) < 1e-5
    assert off(fused.q, untouched.layer(1).q) > 0.01


@pytest.mark.parametrize("changed", ["replaced", "left out"])
@pytest.mark.parametrize("layers", [[0, 1], [1]], ids=["read", "not read"])
def test_a_mask_that_a_hook_changes_is_not_passed_over(changed: str, layers: list[int]) -> None:
    model = zoo.bridge_of(zoo.hf_model("llama"), "llama")
    host = host_of(model)

    def change(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        mask = kwargs["attention_mask"]
        mask = None if changed == "left out" else torch.zeros(mask.shape)
        return args, {**kwargs, "attention_mask": mask}

    handle = model.original_model.model.layers[0].register_forward_pre_hook(
        change, with_kwargs=True
    )
    assert host.fused_refusal(layers) is None
    with pytest.raises(LensRopeError, match="its mask is not one that the model asks"):
        host.read(zoo.tokens(20)[0].tolist(), layers, lambda reading: None, "fused")
    handle.remove()
    host.read(zoo.tokens(20)[0].tolist(), layers, lambda reading: None, "fused")


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_an_attention_that_was_replaced_is_tried_and_stays(factor: float) -> None:
    model = zoo.bridge_of(zoo.hf_model("llama"), "llama")
    attn = model.blocks[0].attn
    own = attn.forward

    def scaled(*args: Any, **kwargs: Any) -> Any:
        output, weights = own(*args, **kwargs)
        return factor * output, weights

    attn.__dict__["forward"] = scaled
    if factor == 1:
        capture(model, zoo.tokens(20), attention="fused")
    else:
        with pytest.raises(InputError, match="attention output of layer 0 would differ by 5"):
            capture(model, zoo.tokens(20), attention="fused")
    assert attn.__dict__["forward"] is scaled


def _count_passes(model: Any) -> list[int]:
    """Lengths of all that is embedded from now on; no hook, which a trial would leave out."""
    embed, lengths = model.original_model.get_input_embeddings().original_component, []
    own = embed.forward

    def counted(tokens: torch.Tensor) -> torch.Tensor:
        lengths.append(tokens.shape[1])
        return own(tokens)

    embed.__dict__["forward"] = counted
    return lengths


@pytest.mark.parametrize("fits", [True, False], ids=["fused", "refused"])
def test_one_trial_serves_all_prompts(fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "MAX_EAGER_BYTES", 1)
    model = zoo.bridge_of(zoo.hf_model("gpt-neox"), "gpt-neox")
    if not fits:
        with torch.no_grad():
            model.blocks[0].attn.original_component.query_key_value.weight.mul_(1.5)
    lengths = _count_passes(model)
    both = torch.cat([zoo.tokens(50), zoo.tokens(50, seed=1)])
    ours = capture(model, both)
    assert lengths == [16, 50, 50]
    assert np.isnan([r.check.output for prompt in ours.records for r in prompt]).all() != fits


def test_projections_are_not_computed_twice() -> None:
    """The layer is run once more without rotation, on the same input."""
    model = zoo.bridge_of(zoo.hf_model("llama"), "llama")
    host = host_of(model)
    assert host.fused_refusal([0]) is None
    linear = model.blocks[0].attn.original_component.k_proj.original_component
    own, calls = linear.forward, []
    linear.__dict__["forward"] = lambda x: calls.append(x.shape) or own(x)
    host.read(zoo.tokens(50)[0].tolist(), [0], lambda reading: None, "fused")
    assert calls == [(1, 50, 64)]
    assert "forward" in vars(linear)


def test_what_was_changed_since_is_projected_anew() -> None:
    linear = torch.nn.Linear(3, 2)
    x = torch.randn(1, 4, 3)
    with torch.no_grad(), bridge_fused.projected_once(linear):
        first = linear(x)
        assert linear(x) is first
        torch.testing.assert_close(linear(x.clone()), first)
        assert linear(x) is not first  # the last input alone is kept
        x.mul_(2)
        assert off(linear(x), first) > 0.01
        output = linear(x)
        output.zero_()
        assert linear(x).abs().max() > 0
    assert "forward" not in vars(linear)
    with torch.inference_mode(), bridge_fused.projected_once(linear):
        y = torch.randn(1, 4, 3)
        first = linear(y).clone()
        y.zero_()
        assert off(linear(y), first) > 0.01


def test_a_bridge_that_computes_something_else_is_refused() -> None:
    """The modules that a fused pass runs are not those whose hooks are shown."""
    model = zoo.bridge_of(zoo.hf_model("gpt-neox"), "gpt-neox")
    with torch.no_grad():
        # The bridge has split this weight, and runs its own copies.
        model.blocks[0].attn.original_component.query_key_value.weight.mul_(1.5)
    why = host_of(model).fused_refusal([0])
    assert why is not None
    assert "from what the bridge computes" in why


@pytest.mark.parametrize("name", ["falcon"])
def test_what_does_not_let_attention_be_replaced_is_refused(name: str) -> None:
    import matrix

    model = zoo.bridge_of(zoo.hf_model(name, config=matrix._config(name)), name)
    with pytest.raises(InputError, match="its attention function cannot be replaced"):
        capture(model, zoo.tokens(20), attention="fused")


def _own(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
    return hf.models.llama.modeling_llama.eager_attention_forward(
        module, query, key, value, mask, **{**kwargs, "scaling": 1.1 * kwargs["scaling"]}
    )


def test_another_scale_in_the_models_eager_attention_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = zoo.bridge_of(zoo.hf_model("qwen2"), "qwen2")
    monkeypatch.setattr(hf.models.qwen2.modeling_qwen2, "eager_attention_forward", _own)
    with pytest.raises(VerificationError, match=r"output|pattern"):
        capture(model, zoo.tokens(N_TOKENS), attention="fused")


@pytest.mark.parametrize("config", [{"sliding_window": None}, {"sliding_window": 40}])
def test_a_window_that_the_mask_does_not_have_is_refused(config: dict[str, Any]) -> None:
    model = zoo.bridge_of(zoo.hf_model("mistral"), "mistral")
    host = host_of(model)
    assert host.fused_refusal([0]) is None
    text_config = model.original_model.config
    # The model builds its mask from this; what is attended to is taken from the attention module.
    attn = model.blocks[0].attn.original_component
    attn.sliding_window = 16
    for key, value in config.items():
        setattr(text_config, key, value)
    with pytest.raises(LensRopeError, match="hides other keys than window"):
        host.read(zoo.tokens(N_TOKENS)[0].tolist(), [0], lambda reading: None, "fused")


def test_the_attention_function_is_only_for_modules_in_a_fused_pass() -> None:
    hf.AttentionInterface.register(bridge_fused._NAME, bridge_fused._attention)
    hf.AttentionMaskInterface.register(bridge_fused._NAME, bridge_fused._mask)
    model = zoo.hf_model("llama", attention=bridge_fused._NAME)
    with pytest.raises(bridge_fused.NotFusedError, match="nobody asked"):
        model(zoo.tokens(20))
