"""`load_model` returns what computes the same as transformers, or raises one clear error."""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from pathlib import Path

import pytest
import tiny
import torch
import transformers

from lens_rope import checkpoints, models
from lens_rope.errors import InputError, ModelLoadError
from lens_rope.models import load_model

try:
    from transformer_lens import HookedTransformer
except ImportError:
    HookedTransformer = None

needs_hooked = pytest.mark.skipif(
    HookedTransformer is None, reason="this TransformerLens has no HookedTransformer"
)
BACKENDS = ["auto", pytest.param("hooked", marks=needs_hooked), "bridge"]
EXPECTED = {
    "auto": "TransformerBridge" if HookedTransformer is None else "HookedTransformer",
    "hooked": "HookedTransformer",
    "bridge": "TransformerBridge",
}
TOKENS = torch.arange(4, 60)[None]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # "llama" in the path makes TransformerLens guess the architecture from it.
    folder = tmp_path_factory.mktemp("models") / "my-llama"
    tiny.save_model(folder)
    return folder


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def copy_of(directory: Path, target: Path) -> Path:
    target.mkdir()
    for file in directory.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


def logits(model, tokens: torch.Tensor = TOKENS) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens.to(model.cfg.device), return_type="logits").float().cpu()


def reference(source: Path, **kwargs) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        source, dtype=torch.float32, attn_implementation="eager", **kwargs
    )
    with torch.no_grad():
        return model(TOKENS, use_cache=False).logits


# --- what is loaded ---------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_directory_gives_the_models_own_logits(directory: Path, backend: str) -> None:
    model = load_model(str(directory), backend)
    assert type(model).__name__ == EXPECTED[backend]
    torch.testing.assert_close(logits(model), reference(directory), atol=1e-4, rtol=1e-4)
    assert not model.training
    assert model.cfg.model_name == "my-llama"
    assert model.cfg.n_ctx == tiny.CONTEXT


@pytest.mark.parametrize("backend", BACKENDS)
def test_gguf_gives_the_files_own_logits(gguf_file: Path, backend: str) -> None:
    model = load_model(str(gguf_file), backend)
    assert type(model).__name__ == EXPECTED[backend]
    expected = reference(gguf_file.parent, gguf_file=gguf_file.name)
    torch.testing.assert_close(logits(model), expected, atol=1e-4, rtol=1e-4)
    assert model.cfg.model_name == "tiny.gguf"
    assert model.cfg.n_ctx == tiny.CONTEXT
    # BOS, then the one merge of the vocabulary, then single bytes.
    assert model.to_str_tokens("hello") == ["<s>", "he", "l", "l", "o"]


def test_gguf_is_not_taken_for_quantised(gguf_file: Path) -> None:
    hf_model, _ = checkpoints.load_gguf(gguf_file, torch.float32)
    assert getattr(hf_model, "hf_quantizer", None) is None
    assert not hasattr(hf_model.config, "quantization_config")
    assert {weight.dtype for weight in hf_model.parameters()} == {torch.float32}


@needs_hooked
def test_nothing_is_folded_or_centred(directory: Path) -> None:
    model = load_model(str(directory), "hooked")
    hf_model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    layer = hf_model.model.layers[0]
    assert model.cfg.normalization_type == "RMS"
    assert torch.equal(model.W_U, hf_model.lm_head.weight.T)
    assert torch.equal(model.W_E, hf_model.model.embed_tokens.weight)
    query = layer.self_attn.q_proj.weight.view(4, 16, 64).transpose(1, 2)
    assert torch.equal(model.blocks[0].attn.W_Q, query)
    assert torch.equal(model.blocks[0].ln1.w, layer.input_layernorm.weight)


@needs_hooked
def test_context_is_the_trained_one_where_transformer_lens_caps_it(tmp_path: Path) -> None:
    config = transformers.MistralConfig(
        vocab_size=tiny.VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16384,
        sliding_window=4096,
    )
    tiny.save_model(tmp_path / "mistral", config)
    assert load_model(str(tmp_path / "mistral"), "hooked").cfg.n_ctx == 16384


@needs_hooked
@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, "google/gemma-3-270m"),
        ({"sliding_window": 1024}, None),
        ({"num_hidden_layers": 17}, None),
        ({"architectures": ["Gemma2ForCausalLM"]}, None),
    ],
)
def test_local_gemma_is_known_by_its_shape(changed: dict, expected: str | None) -> None:
    shape = {
        "vocab_size": 262144,
        "hidden_size": 640,
        "intermediate_size": 2048,
        "num_hidden_layers": 18,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "sliding_window": 512,
        "architectures": ["Gemma3ForCausalLM"],
    }
    config = transformers.Gemma3TextConfig(**(shape | changed))
    assert models._gemma_name(config) == expected


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["bfloat16", torch.bfloat16])
def test_dtype(directory: Path, backend: str, dtype: str | torch.dtype) -> None:
    model = load_model(str(directory), backend, dtype=dtype)
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
    assert model.cfg.dtype == torch.bfloat16


def test_auto_takes_the_bridge_for_what_hooked_does_not_support(tmp_path: Path) -> None:
    config = transformers.StableLmConfig(
        vocab_size=tiny.VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=tiny.CONTEXT,
    )
    tiny.save_model(tmp_path / "stablelm", config)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # nothing is lost, so nothing to warn about
        model = load_model(str(tmp_path / "stablelm"))
    assert type(model).__name__ == "TransformerBridge"
    if HookedTransformer is not None:
        with pytest.raises(ModelLoadError, match=r"HookedTransformer cannot load .*backend='br"):
            load_model(str(tmp_path / "stablelm"), "hooked")


@needs_hooked
def test_hooked_that_computes_something_else_is_not_used(tmp_path: Path) -> None:
    # TransformerLens ignores linear scaling: its rotation is the unscaled one.
    config = transformers.LlamaConfig(
        vocab_size=tiny.VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=tiny.CONTEXT,
        rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    )
    folder = tmp_path / "scaled"
    tiny.save_model(folder, config)
    with pytest.warns(UserWarning, match="does not compute what transformers computes"):
        model = load_model(str(folder))
    assert type(model).__name__ == "TransformerBridge"
    torch.testing.assert_close(logits(model), reference(folder), atol=1e-4, rtol=1e-4)
    with pytest.raises(ModelLoadError, match=r"does not compute what .* use backend='bridge'"):
        load_model(str(folder), "hooked")


def test_a_bridge_that_computes_something_else_is_refused(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = models._to_bridge

    def broken(*args):
        model = build(*args)
        for module in model.original_model.modules():
            if hasattr(module, "inv_freq"):
                module.inv_freq.mul_(0.5)
        return model

    monkeypatch.setattr(models, "_to_bridge", broken)
    with pytest.raises(ModelLoadError, match=r"TransformerBridge does not compute .* try another"):
        load_model(str(directory), "bridge")


@pytest.mark.skipif(HookedTransformer is not None, reason="this TransformerLens has it")
def test_hooked_without_hooked_transformer(directory: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"no HookedTransformer; install transformer-lens 3"):
        load_model(str(directory), "hooked")


# --- nothing else changes ---------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["auto", "bridge"])
def test_loading_is_silent_and_restores_every_setting(
    directory: Path, backend: str, capfd: pytest.CaptureFixture[str]
) -> None:
    from huggingface_hub.utils import are_progress_bars_disabled
    from transformers.utils import logging as hf_logging

    def settings() -> tuple:
        return (
            hf_logging.get_verbosity(),
            hf_logging.is_progress_bar_enabled(),
            are_progress_bars_disabled(),
            logging.root.manager.disable,
            list(logging.root.handlers),
            list(warnings.filters),
            sys.stdout,
            sys.stderr,
            torch.get_default_dtype(),
            torch.is_grad_enabled(),
            dict(os.environ),
        )

    before = settings()
    load_model(str(directory), backend)
    with pytest.raises(ModelLoadError):
        load_model(str(directory / "missing.gguf"), backend)
    assert settings() == before
    assert capfd.readouterr() == ("", "")


def test_gguf_is_silent(gguf_file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    load_model(str(gguf_file), "bridge")
    assert capfd.readouterr() == ("", "")


def test_random_state_is_left_alone(directory: Path) -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    load_model(str(directory), "bridge")
    assert torch.equal(torch.rand(4), expected)


# --- what is refused --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"backend": "hook"}, "unknown backend 'hook'; choose one of auto, hooked, bridge"),
        ({"dtype": "int8"}, "unsupported dtype int8; choose one of float32, bfloat16, float16"),
        ({"dtype": torch.int64}, "unsupported dtype torch.int64"),
        ({"device": "gpu"}, "the device 'gpu' cannot be used here"),
        ({"device": "meta"}, "the device 'meta' cannot be used here"),
        ({"device": "cuda:63"}, "the device 'cuda:63' cannot be used here"),
        ({"name": " "}, "the model's name is empty"),
    ],
)
def test_bad_arguments(directory: Path, kwargs: dict, message: str) -> None:
    arguments = {"name": str(directory), **kwargs}
    with pytest.raises(InputError, match=message):
        load_model(**arguments)


def test_unknown_name_without_a_hub_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelLoadError) as caught:
        load_model("nobody/no-such-model")
    assert str(caught.value) == (
        "there is no local model 'nobody/no-such-model', the hub cannot be reached, and its local "
        "cache does not hold the model; check the spelling, give a local directory or a .gguf "
        "file, or use the demo model 'smollm2-135m'"
    )
    assert caught.value.__cause__ is not None


def test_a_name_the_hub_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.errors import RepositoryNotFoundError

    def model_info(self, name, **kwargs):
        # Its initialiser wants an HTTP response, whose class depends on the library's version.
        raise RepositoryNotFoundError.__new__(RepositoryNotFoundError)

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    with pytest.raises(ModelLoadError, match=r"the hub has no model 'a/b' .*`hf auth login`"):
        load_model("a/b")


def test_hub_cache_serves_where_there_is_no_hub(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    def model_info(self, name, **kwargs):
        raise ConnectionError("no route to host")

    def snapshot_download(name, **kwargs):
        assert name == "EleutherAI/pythia-70m"  # behind TransformerLens' short name
        assert kwargs == {"local_files_only": True}
        return str(directory)

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    model = load_model("pythia-70m", "bridge")
    assert model.cfg.model_name == "pythia-70m"
    torch.testing.assert_close(logits(model), reference(directory), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["a/b/c", "./here", "../x", "/no/where", "~/no", "m.gguf", "."])
def test_paths_are_never_looked_up_on_the_hub(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(checkpoints, "_load_hub", lambda *_: pytest.fail("asked the hub"))
    with pytest.raises(ModelLoadError, match=r"there is no file or directory|holds no config\.js"):
        load_model(name)


def test_directory_without_config(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"holds no config\.json; give the directory"):
        load_model(str(tmp_path))


def test_directory_without_tokenizer(tmp_path: Path) -> None:
    tiny.save_model(tmp_path / "m", tokenizer=False)
    with pytest.raises(ModelLoadError, match=r"tokenizer .* cannot be read .*save_pretrained"):
        load_model(str(tmp_path / "m"))


def test_damaged_config(directory: Path, tmp_path: Path) -> None:
    folder = copy_of(directory, tmp_path / "m")
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match="cannot be loaded"):
        load_model(str(folder))


@pytest.mark.parametrize("keep", [0, 100, -1])
def test_truncated_weights(directory: Path, tmp_path: Path, keep: int) -> None:
    folder = copy_of(directory, tmp_path / "m")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:keep])
    with pytest.raises(ModelLoadError, match="truncated or damaged weight file"):
        load_model(str(folder))


def test_missing_weights_are_not_made_up(directory: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = copy_of(directory, tmp_path / "m")
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.self_attn.k_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"lacks 1 of its weights, .*1\.self_attn\.k_proj"):
        load_model(str(folder))


def test_no_weights_at_all(directory: Path, tmp_path: Path) -> None:
    folder = copy_of(directory, tmp_path / "m")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match="cannot be loaded"):
        load_model(str(folder))


def test_not_a_decoder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit"}))
    with pytest.raises(ModelLoadError, match="cannot be loaded"):
        load_model(str(tmp_path))


@pytest.mark.parametrize("content", [b"", b"GG", b"PK\x03\x04 a zip file", b"\x00" * 64])
def test_file_that_is_not_gguf(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelLoadError, match="is not a GGUF file"):
        load_model(str(path))


@pytest.mark.parametrize("share", [0.001, 0.02, 0.5, 0.999])
def test_truncated_gguf(gguf_file: Path, tmp_path: Path, share: float) -> None:
    content = gguf_file.read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(ModelLoadError, match=r"cut\.gguf' is truncated or damaged; download it"):
        load_model(str(path))
