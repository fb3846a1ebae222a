"""One pass of a model at a time: what is read is told by hooks, which cannot tell whose pass it is.

A model that is being read is not read or run once more, by a hook of that pass or in another
thread: the second is refused, the first goes on undisturbed, and the model is left as it was.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import zoo
from test_capture import assert_as_before, state_of

from lens_rope.capturing import capture
from lens_rope.errors import InputError
from lens_rope.hosts import host_of
from lens_rope.hosts.state import alone, without_callers_hooks

POINT = "blocks.0.hook_resid_pre"
each_attention = pytest.mark.parametrize("attention", ["eager", "fused"])


def shown(model: Any, attention: Any) -> tuple[torch.Tensor, torch.Tensor]:
    record = capture(model, zoo.tokens(30), attention=attention).layer(1)
    return record.q, record.k


def assert_same(ours: tuple[torch.Tensor, torch.Tensor], theirs: Any) -> None:
    for own, true in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, true, rtol=1e-5, atol=1e-5)


@each_attention
@pytest.mark.parametrize("inner", ["read", "run", "run with hooks"])
def test_a_hook_cannot_read_or_run_the_model_that_is_being_read(
    host_model, attention: Any, inner: str
) -> None:
    other = zoo.tokens(30, seed=1)
    again = {
        "read": lambda: capture(host_model, other),
        "run": lambda: host_model(other),
        "run with hooks": lambda: host_model.run_with_hooks(other, fwd_hooks=[]),
    }[inner]
    expected, before = shown(host_model, attention), state_of(host_model)
    errors: list[Exception] = []

    def hook(value: torch.Tensor, hook: Any) -> None:
        try:
            again()
        except InputError as error:
            errors.append(error)

    # Whoever catches the error gets what was asked for, of the prompt that was asked for.
    with host_model.hooks(fwd_hooks=[(POINT, hook)]):
        assert_same(shown(host_model, attention), expected)
    assert errors
    assert all("do one after the other" in str(error) for error in errors)
    assert_as_before(before, state_of(host_model))

    def uncaught(value: torch.Tensor, hook: Any) -> None:
        again()

    with (
        host_model.hooks(fwd_hooks=[(POINT, uncaught)]),
        pytest.raises(InputError, match="do one after the other"),
    ):
        capture(host_model, zoo.tokens(30), attention=attention)
    assert_as_before(before, state_of(host_model))
    assert_same(shown(host_model, attention), expected)


@each_attention
def test_a_hook_can_read_another_model(host_model, attention: Any) -> None:
    other = zoo.bridge("qwen2")
    expected, others = shown(host_model, attention), shown(other, attention)
    seen: list[Any] = []

    def hook(value: torch.Tensor, hook: Any) -> None:
        seen.append(shown(other, attention))

    with host_model.hooks(fwd_hooks=[(POINT, hook)]):
        assert_same(shown(host_model, attention), expected)
    assert len(seen) == 1
    assert_same(seen[0], others)


@each_attention
def test_a_second_thread_is_refused_and_the_first_goes_on(host_model, attention: Any) -> None:
    expected, before = shown(host_model, attention), state_of(host_model)
    host, token_ids = host_of(host_model), zoo.tokens(30)[0].tolist()
    outcomes: list[Any] = []

    def second() -> None:
        for what in (
            lambda: capture(host_model, zoo.tokens(30, seed=1)),
            lambda: host_model(zoo.tokens(30, seed=1)),
        ):
            try:
                outcomes.append(what())
            except InputError as error:
                outcomes.append(str(error))

    seen = {}

    def visit(reading: Any) -> None:
        if reading.layer == 0:
            thread = threading.Thread(target=second)
            thread.start()
            thread.join()
        seen[reading.layer] = reading

    host.read(token_ids, (0, 1), visit, attention)
    assert sorted(seen) == [0, 1]
    assert len(outcomes) == 2
    assert all("in another thread" in outcome for outcome in outcomes)
    assert_same(shown(host_model, attention), expected)
    torch.testing.assert_close(seen[1].q, expected[0], rtol=1e-5, atol=1e-5)
    assert_as_before(before, state_of(host_model))


@each_attention
def test_a_pass_that_failed_does_not_keep_the_model(host_model, attention: Any) -> None:
    expected = shown(host_model, attention)

    def visit(reading: Any) -> None:
        raise KeyError("mine")

    for _ in range(2):
        with pytest.raises(KeyError, match="mine"):
            host_of(host_model).read(zoo.tokens(30)[0].tolist(), (0, 1), visit, attention)
    assert_same(shown(host_model, attention), expected)


def test_the_second_is_refused_before_it_prepares_the_model(host_model) -> None:
    """What it puts back at its end would be what the first had prepared."""
    with alone(host_model):
        with pytest.raises(InputError, match="do one after the other"), alone(host_model):
            pass
        with pytest.raises(InputError, match="do one after the other"), alone(host_model):
            pass
    with alone(host_model):
        host_model(zoo.tokens(4))


class Looked:
    """A hook that tells how often somebody asked what it is, as who sets it aside has to."""

    def __init__(self) -> None:
        self.times = 0

    @property
    def func(self) -> None:
        self.times += 1

    def __call__(self, module: Any, args: Any, output: Any) -> None:
        pass


def test_a_trial_leaves_the_hooks_of_a_pass_in_another_thread_alone() -> None:
    model = zoo.bridge_of(zoo.hf_model("llama"), "llama")
    host, hook, errors = host_of(model), Looked(), []
    model.blocks[1].mlp.register_forward_hook(hook)

    def second() -> None:
        try:
            host.fused_refusal((0, 1))
        except InputError as error:
            errors.append(str(error))

    with alone(model):
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()
    assert len(errors) == 1
    assert "in another thread" in errors[0]
    assert hook.times == 0
    # Afterwards the trial is made, which does set it aside.
    assert host.fused_refusal((0, 1)) is None
    assert hook.times > 0


def hooks_of(model: Any) -> list[list[str]]:
    """Names of the torch hooks of each module that has some, in order."""
    hooks = [
        [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
        for module in model.modules()
    ]
    return [[getattr(hook, "__name__", repr(hook)) for hook in some] for some in hooks if some]


def test_what_the_host_attaches_in_its_first_pass_stays_where_that_is_a_trial() -> None:
    ran: list[Any] = []

    def first(module: Any, args: Any) -> None:
        ran.append(module)

    wired = []
    for is_trial in (False, True):
        model = zoo.bridge_of(zoo.hf_model("llama"), "llama")
        own = [
            *(block.ln1.register_forward_pre_hook(first) for block in model.blocks),
            *(block.ln2.register_forward_hook(lambda *args: None) for block in model.blocks),
        ]
        before = hooks_of(model)
        if is_trial:
            assert host_of(model).fused_refusal((0, 1)) is None
        else:
            model(zoo.tokens(4))
        assert len(ran) == (2 if not is_trial else 0)
        ran.clear()
        wired.append(hooks_of(model))
        assert wired[-1] != before
        for handle in own:
            handle.remove()
        model(zoo.tokens(4))
        assert ran == []
    assert wired[1] == wired[0]


def test_hooks_come_back_in_order_and_what_changed_meanwhile_stays_changed() -> None:
    model = zoo.bridge_of(zoo.hf_model("llama"), "llama")
    module, ran = model.blocks[0].mlp, []

    def add(name: str, **options: Any) -> Any:
        return module.register_forward_hook(lambda *args: ran.append(name), **options)

    model(zoo.tokens(4))
    first, removed, last = add("first"), add("removed"), add("last")
    with pytest.raises(KeyError), without_callers_hooks(model) as hooked:
        assert hooked == [module]
        model(zoo.tokens(4))
        assert ran == []
        removed.remove()
        add("new")
        model(zoo.tokens(4))
        assert ran == ["new"]
        raise KeyError
    ran.clear()
    model(zoo.tokens(4))
    assert ran == ["first", "last", "new"]
    ran.clear()
    first.remove()
    last.remove()
    model(zoo.tokens(4))
    assert ran == ["new"]
