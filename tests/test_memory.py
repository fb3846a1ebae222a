"""A prompt that does not fit is refused with three numbers, and the length it names does fit."""

import dataclasses
import re

import pytest
import torch
import zoo

import lens_rope as lr
from lens_rope.errors import PromptError
from lens_rope.hosts.blocked import MAX_SAMPLED_BYTES
from lens_rope.memory import (
    _SAMPLED_BYTES,
    MemoryShape,
    _group_left,
    available_bytes,
    check_fits,
    has_room,
    kept_bytes,
    pass_bytes,
)
from lens_rope.streaming import LayerStream

DEMO = {
    "n_layers": 30, "n_heads": 9, "n_kv_heads": 3, "d_head": 64, "d_model": 576, "d_mlp": 1536,
    "d_vocab": 49152, "itemsize": 4, "attention": "eager", "squares": 5, "kept_layers": 1,
}  # fmt: skip


def estimate_bytes(made, n_tokens):
    return pass_bytes(made, n_tokens) + kept_bytes(made, n_tokens)


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


def test_a_fused_pass_holds_scores_and_pattern_of_the_sampled_queries():
    assert _SAMPLED_BYTES == 2 * MAX_SAMPLED_BYTES


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


def test_prompts_that_are_kept_are_counted_together(monkeypatch):
    """Room for one pass and what is kept of three prompts: of five the fourth is named."""
    model, token_ids = zoo.bridge("llama"), torch.arange(100).expand(5, -1)
    layers = list(range(model.cfg.n_layers))
    own = LayerStream(model, layers, attention="eager", keeps_layers=True)._memory_shape("eager")
    # 4 query heads and 2 key heads of 16 components, float32.
    assert kept_bytes(own, 100) == len(layers) * (4 + 2) * 16 * 4 * 100
    room = pass_bytes(own, 100) + 3 * kept_bytes(own, 100)
    monkeypatch.setattr("lens_rope.memory.available_bytes", lambda device: room)
    mask = torch.ones_like(token_ids)
    assert len(lr.capture(model, token_ids[:3], attention_mask=mask[:3]).prompts) == 3
    monkeypatch.setattr(model, "forward", lambda *a, **k: pytest.fail("the model was run"))
    for attention in ("eager", "auto"):
        with pytest.raises(PromptError) as caught:
            lr.capture(model, token_ids, attention_mask=mask, attention=attention)
        assert str(caught.value).startswith(
            "prompt 3 has 100 tokens, and reading it beside what is kept of the prompts before it "
            f"takes about {(room + kept_bytes(own, 100)) / 1e6:.1f} MB of memory, of which "
            f"{room / 1e6:.1f} MB is available; those before it fit: capture them and the others"
        )
    # A prompt that does not fit alone is not better off apart.
    long = torch.cat([token_ids.flatten()] * 2)[None]
    with pytest.raises(PromptError, match=r"1,000 tokens, and reading it takes .*the longest"):
        lr.capture(model, long, attention_mask=torch.ones_like(long))


def test_a_report_keeps_no_layer_and_takes_any_number_of_prompts(monkeypatch):
    model = zoo.bridge("llama")
    one = LayerStream(model)._memory_shape("eager")
    assert one.kept_layers == 1
    room = estimate_bytes(one, 100)
    monkeypatch.setattr("lens_rope.memory.available_bytes", lambda device: room)
    token_ids = torch.arange(100).expand(5, -1).clone()
    assert len(lr.report(model, token_ids, interventions=False).data.prompts) == 5


def test_on_a_gpu_what_is_kept_counts_against_main_memory(monkeypatch):
    kept = shape(kept_layers=30)
    needed = {"cuda": pass_bytes(kept, 1000), "cpu": kept_bytes(kept, 1000)}
    left = dict(needed)
    monkeypatch.setattr("lens_rope.memory.available_bytes", lambda at: left[torch.device(at).type])
    check_fits(kept, 1000, name="p", device="cuda")
    assert has_room(kept, 1000, device="cuda:1")
    assert not has_room(kept, 1000)
    for place, other, advice in (
        ("cuda", "cpu", "a device with more memory, or the model in bfloat16"),
        ("cpu", "cuda", "fewer layers"),
    ):
        left.update({place: needed[place] - 1, other: 10**12})
        assert not has_room(kept, 1000, device="cuda")
        with pytest.raises(PromptError) as caught:
            check_fits(kept, 1000, name="p", device="cuda")
        size = "0.2 GB of cuda memory" if place == "cuda" else "92.2 MB of main memory"
        assert f"reading it takes about {size}, of which" in str(caught.value)
        assert "the longest prompt that fits has 999 tokens" in str(caught.value)
        assert str(caught.value).endswith(f"or try {advice}")
    left.update(cuda=10**12, cpu=2 * needed["cpu"])
    check_fits(kept, 1000, name="p", device="cuda", before=needed["cpu"])
    with pytest.raises(PromptError, match="beside what is kept of the prompts before it"):
        check_fits(kept, 1000, name="p", device="cuda", before=needed["cpu"] + 1)


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
    assert message.startswith("notes.txt has 10,000,000 tokens, and reading it takes about ")
    assert f"{available / 1e9:.1f} GB is available" in message
    assert f"{estimate_bytes(small, 10**7) / 1e9:.1f} GB of memory" in message


def test_no_prompt_fits_into_nothing():
    with pytest.raises(PromptError, match="no prompt fits"):
        check_fits(shape(), 1, 0, name="p")


def write_group(folder, limit, used, stat, files=("memory.max", "memory.current")):
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in zip((*files, "memory.stat"), (limit, used, stat), strict=True):
        (folder / name).write_text(f"{value}\n")


def test_limits_of_a_control_group(tmp_path):
    own = tmp_path / "own"
    assert _group_left(tmp_path, own) == []
    write_group(tmp_path, "max", 300, "anon 200\ninactive_file 50")
    assert _group_left(tmp_path, own) == []
    write_group(tmp_path, 1000, 300, "anon 200\ninactive_file 50")
    assert _group_left(tmp_path, own) == [750]
    write_group(tmp_path, 100, 300, "anon 200")
    assert _group_left(tmp_path, own) == [0]


def test_limits_of_the_groups_around_a_process(tmp_path):
    """Those of a unit, of the slice it is in and of the root, and not those beside them."""
    root, own = tmp_path / "mount", tmp_path / "own"
    own.write_text("0::/user.slice/job:1.scope/task\n")
    write_group(root / "user.slice", 5000, 4000, "active_file 100\ninactive_file 200")
    write_group(root / "user.slice" / "job:1.scope", "max", 700, "anon 1")
    write_group(root / "user.slice" / "job:1.scope" / "task", 900, 600, "anon 500")
    write_group(root / "user.slice" / "other", 10, 10, "anon 1")
    assert sorted(_group_left(root, own)) == [300, 1300]
    # What a container mounts can be the group itself, whatever its path outside.
    write_group(root, 400, 250, "anon 1")
    own.write_text("0::/docker/0123\n")
    assert _group_left(root, own) == [150]
    own.write_text("0::/\n")
    assert _group_left(root, own) == [150]


@pytest.mark.parametrize("controllers", ["memory", "cpu,memory"])
def test_limits_of_nested_groups_of_the_first_version(tmp_path, controllers):
    root, own = tmp_path / "mount", tmp_path / "own"
    files = ("memory.limit_in_bytes", "memory.usage_in_bytes")
    stat = "inactive_file 7\ntotal_inactive_file 30\ntotal_active_file 20"
    write_group(root / "memory", 2**63 - 4096, 10**6, stat, files)
    write_group(root / "memory" / "slurm", 800, 500, stat, files)
    write_group(root / "memory" / "slurm" / "job_7", 600, 500, stat, files)
    write_group(root / "memory" / "elsewhere", 50, 0, stat, files)
    write_group(root / "unified" / "session", 450, 50, "active_file 1")
    own.write_text(
        f"12:{controllers}:/slurm/job_7\n3:cpuset:/elsewhere\n1:name=systemd:/x\n0::/session\n"
    )
    assert sorted(_group_left(root, own))[:3] == [150, 350, 401]
    assert len(_group_left(root, own)) == 4


def test_unknown_memory_refuses_nothing():
    assert available_bytes("meta") is None
    check_fits(shape(kept_layers=0), 10**9, name="p", device="meta")


def test_shapes_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="d_head is 0"):
        shape(d_head=0)
    with pytest.raises(ValueError, match="31 kept layers"):
        shape(kept_layers=31)
