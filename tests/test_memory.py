"""A prompt that does not fit is refused with three numbers, and the length it names does fit."""

import dataclasses
import re

import pytest
import torch
import zoo

import lens_rope as lr
from lens_rope.errors import PromptError
from lens_rope.memory import (
    MemoryShape,
    _group_left,
    available_bytes,
    check_fits,
    estimate_bytes,
    longest_that_fits,
)

DEMO = {
    "n_layers": 30, "n_heads": 9, "n_kv_heads": 3, "d_head": 64, "d_model": 576, "d_mlp": 1536,
    "d_vocab": 49152, "itemsize": 4, "attention": "eager", "squares": 5, "kept_layers": 1,
}  # fmt: skip


def shape(**changes):
    return MemoryShape(**{**DEMO, **changes})


def test_estimate_counts_the_squares_of_eager_attention():
    """Once and twice the tokens: what grows with the square is five squares per head and a mask."""
    n = 2048
    square = estimate_bytes(shape(), 2 * n) - 2 * estimate_bytes(shape(), n)
    assert square == 2 * n**2 * 4 * (5 * 9 + 1)


def test_fused_attention_has_no_square():
    fused = [estimate_bytes(shape(attention="fused"), n) for n in (1000, 2000, 3000)]
    assert fused[2] - fused[1] == fused[1] - fused[0]
    assert fused[0] < estimate_bytes(shape(), 2000)


def test_what_is_kept_and_logits_are_added():
    n = 100
    base = estimate_bytes(shape(kept_layers=0), n)
    # Queries of 9 heads and keys of 3, 64 float32 components each.
    assert estimate_bytes(shape(kept_layers=30), n) - base == 30 * (9 + 3) * 64 * 4 * n
    # Logits in the model's precision, and in float32 where that is another.
    assert estimate_bytes(shape(kept_layers=0, logits=True), n) - base == 49152 * 4 * n
    half = shape(kept_layers=0, itemsize=2)
    logits = dataclasses.replace(half, logits=True)
    assert estimate_bytes(logits, n) - estimate_bytes(half, n) == 49152 * (2 + 4) * n


def test_estimates_lie_above_what_was_measured_and_below_twice_that():
    """Peaks above the loaded SmolLM2-135M, in MB: the largest resident size while it was read."""
    hooked, bridge = shape(), shape(squares=4)
    for made, n_tokens, measured in (
        (hooked, 1024, 199), (hooked, 2048, 722), (bridge, 1024, 120), (bridge, 2048, 445),
        (shape(logits=True), 2048, 727),
        (shape(attention="fused"), 8192, 518), (shape(attention="fused"), 8192, 411),
        (shape(attention="fused", logits=True), 2048, 586),
    ):  # fmt: skip
        assert 1 < estimate_bytes(made, n_tokens) / 1e6 / measured < 2


def test_a_prompt_that_does_not_fit_is_refused_before_the_model_runs(monkeypatch):
    model = zoo.bridge("llama")
    monkeypatch.setattr("lens_rope.memory.available_bytes", lambda device: 10**5)
    monkeypatch.setattr(model, "forward", lambda *a, **k: pytest.fail("the model was run"))
    token_ids = torch.arange(100)[None]
    for read in (lr.capture, lr.report):
        with pytest.raises(PromptError, match=r"100 tokens, and reading it takes .* available"):
            read(model, token_ids)


@pytest.mark.parametrize("attention", ["eager", "fused"])
@pytest.mark.parametrize("available", [3 * 10**8, 10**9, 8 * 10**9])
def test_the_length_that_is_named_fits_and_one_more_does_not(attention, available):
    small = shape(attention=attention)
    with pytest.raises(PromptError) as caught:
        check_fits(small, 10**7, available, name="notes.txt")
    message = str(caught.value)
    named = int(re.search(r"fits has ([\d,]+) tokens", message)[1].replace(",", ""))
    check_fits(small, named, available, name="notes.txt")
    with pytest.raises(PromptError):
        check_fits(small, named + 1, available, name="notes.txt")
    assert named == longest_that_fits(small, available)
    assert message.startswith("notes.txt has 10,000,000 tokens, and reading it takes about ")
    assert f"{available / 1e9:.1f} GB is available" in message
    assert f"{estimate_bytes(small, 10**7) / 1e9:.1f} GB of memory" in message


def test_no_prompt_fits_into_nothing():
    with pytest.raises(PromptError, match="no prompt fits"):
        check_fits(shape(), 1, 0, name="p")


def test_limits_of_a_control_group(tmp_path):
    assert _group_left(tmp_path) == []
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("300\n")
    (tmp_path / "memory.stat").write_text("anon 200\ninactive_file 50\n")
    assert _group_left(tmp_path) == []
    (tmp_path / "memory.max").write_text("1000\n")
    assert _group_left(tmp_path) == [750]


def test_unknown_memory_refuses_nothing():
    assert available_bytes("meta") is None
    check_fits(shape(), 10**9, name="p", device="meta")


def test_shapes_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="d_head is 0"):
        shape(d_head=0)
    with pytest.raises(ValueError, match="31 kept layers"):
        shape(kept_layers=31)
