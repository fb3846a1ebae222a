"""What was read wrongly is refused, whatever it is that was misread.

Each test misreads one thing on the way from the host to the capture and expects the check that is
meant to notice it, with the layer, the size of the error and what to do in the message.
"""

import dataclasses

import pytest
import torch
import zoo

from lens_rope import streaming
from lens_rope.capturing import capture
from lens_rope.errors import VerificationError

BRIDGE_ROUTES = {"hook_rot": "llama", "hook_cos": "phi3", "hook_cos, pattern only": "gpt-j"}


@pytest.fixture
def misread(monkeypatch):
    """Replaces fields of the fitted rotation of layer 1 before it is used."""

    def install(**changes):
        fit = streaming.fit_rope

        def wrong(reading):
            rope = fit(reading)
            if reading.layer != 1:
                return rope
            values = {
                name: value(getattr(rope, name)) if callable(value) else value
                for name, value in changes.items()
            }
            return dataclasses.replace(rope, **values)

        monkeypatch.setattr(streaming, "fit_rope", wrong)

    return install


@pytest.fixture
def misshow(monkeypatch):
    """Replaces fields of the reading of layer 1 before it is used."""

    def install(**changes):
        host_of = streaming.host_of

        def wrong(model):
            host = host_of(model)
            read = host.read

            def read_wrongly(token_ids, layers, visit, *options):
                def change(reading):
                    if reading.layer == 1:
                        values = {n: v(getattr(reading, n)) for n, v in changes.items()}
                        reading = dataclasses.replace(reading, **values)
                    visit(reading)

                read(token_ids, layers, change, *options)

            host.read = read_wrongly
            return host

        monkeypatch.setattr(streaming, "host_of", wrong)

    return install


def refusal(model, n_tokens=40):
    with pytest.raises(VerificationError) as caught:
        capture(model, zoo.tokens(n_tokens))
    error = caught.value
    assert error.layer == 1
    assert not error.error <= error.tolerance
    assert f"layer 1 of {model.cfg.model_name} cannot be read exactly" in str(error)
    assert f"{error.check} error {error.error:.1e} exceeds {error.tolerance:.0e}" in str(error)
    assert "Nothing was returned; try the other backend" in str(error)
    return error


def test_right_reading_passes(host_model, misread):
    misread(pairing="half")
    assert capture(host_model, zoo.tokens(40)).max_relative_error < 1e-6


@pytest.mark.parametrize(
    ("changes", "check"),
    [
        ({"pairing": "adjacent"}, "norm"),
        ({"attention_factor": 1.001}, "norm"),
        ({"inv_freq": lambda w: w * 1.0001}, "angle"),
        ({"inv_freq": lambda w: w**1.01}, "angle"),
        ({"inv_freq": lambda w: w[::-1]}, "angle"),
        ({"inv_freq": lambda w: -w}, "angle"),
        ({"window": 12}, "pattern"),
    ],
    ids=["pairing", "factor", "frequency", "base", "order", "direction", "window"],
)
def test_misread_rotation_is_refused(host_model, misread, changes, check):
    misread(**changes)
    assert refusal(host_model).check == check


def test_fewer_pairs_than_the_model_rotates_are_refused(host_model, misread):
    half = {"inv_freq": lambda w: w[:4], "inv_freq_error": lambda e: e[:4], "rotary_dim": 8}
    misread(**half)
    assert refusal(host_model).check == "norm"


@pytest.mark.parametrize("route", BRIDGE_ROUTES)
@pytest.mark.parametrize(
    "changes",
    [
        {"pairing": lambda p: {"half": "adjacent", "adjacent": "half"}[p]},
        {"attention_factor": 1.001},
        {"inv_freq": lambda w: w * 1.001},
    ],
    ids=["pairing", "factor", "base"],
)
def test_misread_rotation_is_refused_by_every_route(misread, route, changes):
    """Where lens_rope rotates itself, the scores notice what norm and angle cannot."""
    misread(**changes)
    error = refusal(zoo.bridge(BRIDGE_ROUTES[route]))
    assert error.check in (("score", "pattern") if route != "hook_rot" else ("norm", "angle"))


@pytest.mark.parametrize("route", BRIDGE_ROUTES)
def test_misread_scale_is_refused(misshow, route):
    misshow(scale=lambda scale: scale * 1.001)
    assert refusal(zoo.bridge(BRIDGE_ROUTES[route])).check in ("score", "pattern")


def test_misread_scale_is_refused_on_each_host(host_model, misshow):
    misshow(scale=lambda scale: scale * 1.0001)
    assert refusal(host_model).check == "score"


@pytest.mark.parametrize(
    ("name", "changes", "check"),
    [
        ("gemma2", {"softcap": lambda cap: cap * 1.01}, "score"),
        ("gemma2", {"softcap": lambda cap: None}, "score"),
        ("gpt-oss", {"sinks": lambda sinks: sinks + 0.1}, "pattern"),
        ("gpt-oss", {"sinks": lambda sinks: None}, "pattern"),
        ("mistral", {"window": lambda window: window - 1}, "pattern"),
        ("mistral", {"window": lambda window: window + 1}, "score"),
        ("mistral", {"window": lambda window: None}, "score"),
    ],
    ids=["cap", "no cap", "sinks", "no sinks", "narrow window", "wide window", "no window"],
)
def test_misread_softmax_is_refused(misshow, name, changes, check):
    misshow(**changes)
    assert refusal(zoo.bridge(name)).check == check


@pytest.mark.parametrize("what", ["q", "k"])
def test_queries_and_keys_that_are_off_are_refused(host_model, misshow, what):
    misshow(**{what: lambda x: x * (1 + 1e-3 * torch.sin(torch.arange(x.numel()).view_as(x)))})
    assert refusal(host_model).check == "score"


def test_pairs_scrambled_alike_in_queries_and_keys_are_refused(host_model):
    """The scores stay what they were, so they cannot tell."""
    for side in ("q", "k"):
        host_model.add_hook(
            f"blocks.1.attn.hook_rot_{side}", lambda value, hook: value.roll(1, dims=-1)
        )
    assert refusal(host_model).check == "norm"


def test_pattern_that_shows_nothing_of_the_scores_is_refused(misshow):
    """Each query attends to one key alone; any scale would give that pattern."""
    eye = torch.eye(40).expand(4, 40, 40)
    misshow(pattern=lambda p: eye, scores=lambda s: eye, scale=lambda s: 0.0)
    error = refusal(zoo.bridge("gpt-j"))
    assert error.check == "pattern"
    far = {"q": lambda q: far_apart(q), "k": lambda k: far_apart(k), "scale": lambda s: 1e4}
    misshow(pattern=lambda p: eye, scores=lambda s: eye, **far)
    error = refusal(zoo.bridge("gpt-j"))
    assert error.check == "score" and error.error != error.error


def far_apart(x):
    """A component of its own for each position, none of them rotated: a query sees its own key."""
    out = torch.zeros_like(x)
    angle = torch.arange(len(x)) * (2 * torch.pi / len(x))
    out[..., 8], out[..., 9] = angle.cos()[:, None], angle.sin()[:, None]
    return out


def test_shared_key_heads_in_the_wrong_order_are_refused(host_model, misshow):
    misshow(k=lambda k: k.flip(1))
    assert refusal(host_model).check == "score"


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_values_that_are_not_finite_are_refused(host_model, misshow, value):
    misshow(q=lambda q: q.index_fill(0, torch.tensor([3]), value))
    with pytest.raises(VerificationError) as caught:
        capture(host_model, zoo.tokens(40))
    error = caught.value
    assert (error.check, error.layer) == ("finite", 1)
    assert "its queries hold NaN or infinite values, first in head 0 at position 3;" in str(error)


def test_a_key_that_is_not_finite_is_named(host_model, misshow):
    def spoil(k):
        k = k.clone()
        k[5, 1, 2] = torch.inf
        return k

    misshow(k=spoil)
    message = (
        "layer 1 of .* its keys hold NaN or infinite values, first in key head 1 at position 5;"
    )
    with pytest.raises(VerificationError, match=message):
        capture(host_model, zoo.tokens(40))


def test_tolerance_follows_the_precision(host_model, misread):
    host_model.to(torch.bfloat16)
    misread(attention_factor=1.001)
    coarse = capture(host_model, zoo.tokens(40))
    assert coarse.model.dtype == "bfloat16"
    assert 1e-5 < coarse.max_relative_error <= 2e-2
    misread(attention_factor=1.1)
    assert refusal(host_model).tolerance == 2e-2


def test_other_precisions_are_refused(host_model):
    from lens_rope.errors import InputError

    host_model.to(torch.float64)
    double = capture(host_model, zoo.tokens(20))
    assert double.max_relative_error < 1e-6
    assert double.layer(0).q.dtype == torch.float32
    with pytest.raises(InputError, match="load it in float32, bfloat16 or float16"):
        streaming._layer_capture(
            dataclasses.make_dataclass("Reading", ["q"])(torch.zeros(1, 1, 2, dtype=torch.int8)),
            None,
            "model",
        )


def test_an_output_of_a_fused_pass_that_is_off_is_refused(host_model, misshow):
    misshow(output_error=lambda error: 2e-4)
    error = refusal(host_model)
    assert (error.check, error.tolerance) == ("output", 1e-4)


def test_sampled_queries_are_compared_at_their_own_positions(host_model, misshow):
    rows = torch.tensor([0, 3, 17, 18, 39])
    sampled = {
        "rows": lambda _: rows,
        "scores": lambda s: s[:, rows],
        "pattern": lambda p: p[:, rows],
    }
    misshow(**sampled)
    check = capture(host_model, zoo.tokens(40)).layer(1).check
    assert check.checked_queries == 5 and check.score < 1e-6 and check.pattern < 1e-6
    misshow(rows=lambda rows: rows + torch.tensor([0, 0, 1, 1, 0]))
    assert refusal(host_model).check in ("score", "pattern")
