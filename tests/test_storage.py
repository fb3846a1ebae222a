"""A capture read back is the capture that was saved, and half a file is no capture."""

import json
import math
import os

import pytest
import torch
import zoo

from lens_rope.capturing import capture
from lens_rope.errors import CaptureFileError, OutputError
from lens_rope.records import RotaryCapture


@pytest.fixture(scope="module", params=["llama", "gpt-oss", "smollm3", "deepseek-v3", "gemma3"])
def captured(request):
    both = torch.cat([zoo.tokens(20), zoo.tokens(20, seed=1)])
    return capture(zoo.bridge(request.param), both, names=["first </script>", "é 💩\n"])


def test_round_trip(captured, tmp_path):
    path = captured.save(tmp_path / "capture.safetensors")
    again = RotaryCapture.load(path)
    assert again.model == captured.model
    assert again.prompts == captured.prompts
    assert again.layer_indices == captured.layer_indices
    for p in (0, 1):
        for layer in captured.layer_indices:
            old, new = captured.layer(layer, prompt=p), again.layer(layer, prompt=p)
            assert torch.equal(old.q, new.q) and torch.equal(old.k, new.k)
            assert (old.sinks is None) == (new.sinks is None)
            assert old.sinks is None or torch.equal(old.sinks, new.sinks)
            assert (old.scale, old.softcap) == (new.scale, new.softcap)
            assert repr(old.rope) == repr(new.rope)
            assert repr(old.check) == repr(new.check)
    assert os.listdir(tmp_path) == ["capture.safetensors"]


def test_existing_file_is_replaced_whole(captured, tmp_path):
    path = tmp_path / "capture.safetensors"
    path.write_bytes(b"old")
    captured.save(path)
    assert RotaryCapture.load(path).model == captured.model


def test_missing_file(tmp_path):
    with pytest.raises(CaptureFileError, match=r"there is no capture at .*gone; check the path"):
        RotaryCapture.load(tmp_path / "gone")


@pytest.mark.parametrize("keep", [0.0, 0.001, 0.5, 0.999])
def test_truncated_file(captured, tmp_path, keep):
    whole = captured.save(tmp_path / "whole").read_bytes()
    (tmp_path / "part").write_bytes(whole[: int(len(whole) * keep)])
    with pytest.raises(CaptureFileError, match="is not a whole capture"):
        RotaryCapture.load(tmp_path / "part")


def test_other_safetensors_file(tmp_path):
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(2)}, tmp_path / "other")
    with pytest.raises(CaptureFileError, match="has format None"):
        RotaryCapture.load(tmp_path / "other")
    save_file({"x": torch.zeros(2)}, tmp_path / "next", metadata={"lens_rope": '{"format": "v9"}'})
    with pytest.raises(CaptureFileError, match="has format 'v9', this version reads"):
        RotaryCapture.load(tmp_path / "next")
    damaged = {"lens_rope": '{"format": "lens-rope-capture/1"}'}
    save_file({"x": torch.zeros(2)}, tmp_path / "damaged", metadata=damaged)
    with pytest.raises(CaptureFileError, match="is damaged"):
        RotaryCapture.load(tmp_path / "damaged")


def test_folder_that_does_not_exist(captured, tmp_path):
    with pytest.raises(OutputError, match="choose a folder that exists"):
        captured.save(tmp_path / "no" / "such" / "folder")
    assert os.listdir(tmp_path) == []
    with pytest.raises(OutputError, match="is a folder; give the name of a file in it"):
        captured.save(tmp_path)


def test_failed_write_keeps_the_old_file(captured, tmp_path, monkeypatch):
    path = captured.save(tmp_path / "capture")
    before = path.read_bytes()

    def full_disk(tensors, filename, metadata):
        with open(filename, "wb") as file:
            file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("lens_rope.storage.save_file", full_disk)
    with pytest.raises(OutputError, match="No space left"):
        captured.save(path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["capture"]


def test_file_without_the_fields_of_a_fused_pass_is_read(captured, tmp_path):
    from safetensors import safe_open
    from safetensors.torch import save_file

    path = captured.save(tmp_path / "new")
    with safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()["lens_rope"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for layers in header["records"]:
        for record in layers:
            del record["check"]["checked_queries"], record["check"]["output"]
    save_file(tensors, tmp_path / "old", metadata={"lens_rope": json.dumps(header)})
    check = RotaryCapture.load(tmp_path / "old").layer(0).check
    assert check.checked_queries is None and math.isnan(check.output)
    assert repr(check) == repr(captured.layer(0).check)
