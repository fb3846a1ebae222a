"""Hand-made captures, and models on disk, for the tests of views, report and command line."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
import zoo

from lens_rope.bounds import check_bounds
from lens_rope.offsets import CONSTANCY, RELATIVE, OffsetFeatures
from lens_rope.patterns import is_long_enough
from lens_rope.records import LayerCapture, LayerCheck, ModelInfo, Prompt, RotaryCapture
from lens_rope.reporting.analysis import analyse, merge
from lens_rope.reporting.data import PromptSummary, ReportData
from lens_rope.reporting.findings import findings, notes
from lens_rope.reporting.gallery import Shortlist
from lens_rope.sinks import SINK_THRESHOLD
from lens_rope.spec import LayerRope
from lens_rope.spectrum import layer_keys, layer_spectrum

# Everything that a page can get wrong: markup, the end of a script, quotes, white space, control
# characters, more bytes than characters, right-to-left marks.
HOSTILE = (
    "</script>", "<b>", "&amp;", '"q"', "a\n\n\tb", " é", "💩", "\u202e", "", " ", "<!--", "\x00",
    "\\u003c", "{{ 7 * 7 }}", "\u2028", "'",
)  # fmt: skip


def rope(layer: int, rotary_dim: int = 16, d_head: int = 16, **changes) -> LayerRope:
    """A rotation; rotary_dim 0 is a layer without RoPE."""
    n_pairs = rotary_dim // 2
    inv_freq = 10000.0 ** (-np.arange(n_pairs) / max(n_pairs, 1))
    return LayerRope(
        **{
            "layer": layer, "inv_freq": inv_freq, "inv_freq_error": np.zeros(n_pairs),
            "pairing": "half", "rotary_dim": rotary_dim, "d_head": d_head,
            "attention_factor": 1.0, "window": None, "trained_context": 256, **changes,
        }
    )  # fmt: skip


def random_capture(
    ropes: tuple[LayerRope, ...], n_pos: int = 24, tokens: tuple[str, ...] | None = None
) -> RotaryCapture:
    """Random queries and keys, 4 query heads on 2 key heads, with the given rotations."""
    generator = torch.Generator().manual_seed(0)
    tokens = tokens or tuple(f" t{i % 7}" for i in range(n_pos))
    records = tuple(
        LayerCapture(
            rope=r,
            q=2 * torch.randn(len(tokens), 4, r.d_head, generator=generator),
            k=torch.randn(len(tokens), 2, r.d_head, generator=generator),
            scale=r.d_head**-0.5,
            softcap=None,
            sinks=None,
            check=LayerCheck(r.layer, "hook_rot", 1e-7, 0.0, 1e-7, float("nan"), (0.0,) * 4),
        )
        for r in ropes
    )
    info = ModelInfo("tiny", len(ropes), 4, 2, ropes[0].d_head, "float32", "HookedTransformer", {})
    prompt = Prompt("a prompt", tuple(range(len(tokens))), tokens, True)
    return RotaryCapture(info, (prompt,), tuple(r.layer for r in ropes), (records,))


def with_pairs(
    qk: RotaryCapture, layer: int, weights: tuple[float, ...], kv_head: int | None = None
) -> RotaryCapture:
    """A capture in which the pairs of one layer see the same keys, times a weight each.

    Without `kv_head` this holds for all key heads. The share of pair i is its weight over the sum.
    """
    records = list(qk.records[0])
    old = records[layer]
    q, k = old.q.clone(), old.k.clone()
    chosen = range(old.n_kv_heads) if kv_head is None else [kv_head]
    for key_head in chosen:
        k[:, key_head] = 0
        for head in range(old.n_heads):
            if old.kv_head(head) == key_head:
                q[:, head] = q[:, head, :1]
        for pair, weight in enumerate(weights):
            k[:, key_head, pair] = weight * old.k[:, key_head, 0]
    records[layer] = dataclasses.replace(old, q=q, k=k)
    return dataclasses.replace(qk, records=(tuple(records),))


@functools.cache
def _written(name: str, root: str) -> Path:
    folder = Path(root) / name
    zoo.hf_model(name).save_pretrained(folder)
    zoo.tokenizer().save_pretrained(folder)
    return folder


def saved_model(name: str, root: Path) -> Path:
    """A tiny random model of the zoo with its tokenizer, as a Hugging Face directory."""
    return _written(name, str(root))


def alike(one, other, where="it", rtol=1e-9):
    """Compares everything in two values; numbers up to rounding."""
    assert type(one) is type(other) or (one is None) == (other is None), where
    if dataclasses.is_dataclass(one):
        for field in dataclasses.fields(one):
            values = (getattr(one, field.name), getattr(other, field.name))
            alike(*values, f"{where}.{field.name}", rtol)
    elif isinstance(one, Mapping):
        assert list(one) == list(other), where
        for key in one:
            alike(one[key], other[key], f"{where}[{key!r}]", rtol)
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), where
        for index, values in enumerate(zip(one, other, strict=True)):
            alike(*values, f"{where}[{index}]", rtol)
    elif isinstance(one, torch.Tensor):
        alike(one.numpy(), other.numpy(), where, rtol)
    elif isinstance(one, (np.ndarray, float)):
        scale = np.nanmax(np.abs(one), initial=0) if np.size(one) else 0
        atol = 1e-12 * (scale if np.isfinite(scale) else 1)
        np.testing.assert_allclose(one, other, rtol=rtol, atol=atol, err_msg=where)
    else:
        assert one == other, where


def build_gallery(qk, shares, heads):
    """The gallery of the first prompt of a capture, with the rule that its heads were chosen by."""
    shortlist = Shortlist(qk.prompts[0], heads)
    for record, of_layer in zip(qk.records[0], shares, strict=True):
        shortlist.add(record, of_layer)
    return shortlist.gallery()


def report_data(qk: RotaryCapture, heads: tuple[tuple[int, int], ...] | None = None) -> ReportData:
    """A report on a capture, without a model: nothing is repeated, nothing ablated."""
    prompt = qk.prompts[0]
    layers = tuple(merge([analyse(record, prompt.token_ids)]) for record in qk.records[0])
    gallery, rule = build_gallery(qk, [entry.shares for entry in layers], heads)
    is_long = is_long_enough([len(prompt)])
    offsets = tuple(entry.offsets for entry in layers)
    features = OffsetFeatures(qk.model, offsets, CONSTANCY, RELATIVE, ())
    data = ReportData(
        version="0", created="2000-01-01T00:00:00Z", model=qk.model,
        prompts=(PromptSummary(prompt.name, len(prompt), None, True),), tokens=prompt.tokens,
        rope=qk.rope(), same_rope=True,
        checks=tuple(record.check for record in qk.records[0]), tolerance=1e-5,
        layers=layers,
        heads=tuple(h for entry in layers for h in entry.heads(is_long=is_long, repeated=None)),
        bounds=check_bounds(features),
        spectra=tuple(layer_spectrum(layer_keys(record)) for record in qk.records[0]),
        ablation=None, is_repeated=False,
        threshold=SINK_THRESHOLD, gallery=gallery, gallery_rule=rule,
        findings=(), notes=(),
    )  # fmt: skip
    return dataclasses.replace(data, findings=findings(data), notes=notes(data))
