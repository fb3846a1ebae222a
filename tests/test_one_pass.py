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
from lens_rope.hosts.state import alone

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
