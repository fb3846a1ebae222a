"""Captures made by hand, in which it is known why each head attends where it does.

Queries and keys are written down before rotation, as complex pairs and components that are not
rotated, and turned by a few lines of numpy that share no code with the package. `captured` holds
the tiny models of every architecture on one prompt.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
from collections.abc import Sequence

import numpy as np
import torch
import zoo
from oracle import EXPECTED

from lens_rope.capturing import capture
from lens_rope.records import LayerCapture, LayerCheck, ModelInfo, Prompt, RotaryCapture
from lens_rope.spec import LayerRope

# The bridge of transformer-lens 3 does not apply Cohere's rotation.
IS_FIRST_BRIDGE = int(importlib.metadata.version("transformer-lens").split(".")[0]) < 4
BRIDGES = [name for name in EXPECTED if not (name == "cohere" and IS_FIRST_BRIDGE)]
HOOKED = {
    "hooked": {},
    "hooked-grouped-soft-cap": {"n_key_value_heads": 2, "attn_scores_soft_cap": 2.0},
    "hooked-partial-sinks": {"rotary_dim": 4, "use_attention_sinks": True},
    "hooked-window": {"use_local_attn": True, "window_size": 16, "attn_types": ["local", "global"]},
}
MODELS = BRIDGES + ([] if zoo.HookedTransformer is None else list(HOOKED))

FREQUENCIES = (2.5, 1.7, 0.9, 0.2, 2 * np.pi / 90, 0.05, np.pi / 70, 0.015, 0.01)
BLOCK = 32
"""Number of tokens in the vocabulary of planted captures; a prompt goes through it again."""


@functools.cache
def captured(name: str, n_tokens: int = 70) -> RotaryCapture:
    """One prompt of random tokens, some of which come back, on a tiny model."""
    model = zoo.hooked(**HOOKED[name]) if name in HOOKED else zoo.bridge(name)
    return capture(model, zoo.tokens(n_tokens))


def make_rope(frequencies: Sequence[float] = FREQUENCIES, n_rest: int = BLOCK, **changes):
    """A rotation in halves with these frequencies; changes are fields of `LayerRope`."""
    n_pairs = len(frequencies)
    return LayerRope(
        **{
            "layer": 0, "inv_freq": np.array(frequencies, float), "pairing": "half",
            "inv_freq_error": np.zeros(n_pairs), "rotary_dim": 2 * n_pairs,
            "d_head": 2 * n_pairs + n_rest, "attention_factor": 1.0, "window": None,
            "trained_context": 128, **changes,
        }
    )  # fmt: skip


def turned(z, rest, rope: LayerRope) -> torch.Tensor:
    """`[pos, head, d_head]` Pairs `z` `[pos, head, pair]` turned by hand, with the rest."""
    z, rest = np.asarray(z, complex), np.asarray(rest, float)
    positions = np.arange(len(z))[:, None, None]
    z = rope.attention_factor * z * np.exp(1j * rope.inv_freq * positions)
    out = np.zeros((*z.shape[:2], rope.d_head))
    half, start = rope.n_pairs, rope.rotary_start
    rotated = []
    for i in range(half):
        a, b = (i, i + half) if rope.pairing == "half" else (2 * i, 2 * i + 1)
        out[..., start + a], out[..., start + b] = z[..., i].real, z[..., i].imag
        rotated += [start + a, start + b]
    out[..., [c for c in range(rope.d_head) if c not in rotated]] = rest
    return torch.tensor(out, dtype=torch.float32)


def make_record(rope: LayerRope, q, k, *, scale=1.0, softcap=None, sinks=None) -> LayerCapture:
    """A layer from `(pairs, rest)` of queries and of keys before rotation."""
    q, k = turned(*q, rope), turned(*k, rope)
    check = LayerCheck(rope.layer, "hook_rot", 0.0, 0.0, 0.0, 0.0, (0.0,) * q.shape[1])
    sinks = None if sinks is None else torch.tensor(sinks, dtype=torch.float32)
    return LayerCapture(rope, q, k, scale, softcap, sinks, check)


def make_capture(
    *prompts: LayerCapture | Sequence[LayerCapture], token_ids=None, bos: bool | None = True
) -> RotaryCapture:
    """A capture of one prompt per argument: a layer, or all of its layers."""
    records = tuple(tuple(p) if isinstance(p, (list, tuple)) else (p,) for p in prompts)
    first = records[0][0]
    named = []
    for number, layers in enumerate(records):
        ids = range(layers[0].n_pos) if token_ids is None else token_ids[number]
        named.append(Prompt(f"p{number}", tuple(ids), tuple(f"t{i}" for i in ids), bos))
    layers = tuple(record.rope.layer for record in records[0])
    info = ModelInfo(
        "planted", len(layers), first.n_heads, first.n_kv_heads, first.rope.d_head, "float32",
        "none", {},
    )  # fmt: skip
    return RotaryCapture(info, tuple(named), layers, records)


def random_record(n_pos: int, *, seed=0, size=1.0, n_heads=2, n_kv=2, offset=0.0, **changes):
    """Random queries and keys around a random offset; changes are fields of the rotation."""
    settings = {key: changes.pop(key) for key in ("softcap", "sinks", "scale") if key in changes}
    rope = make_rope(**{"frequencies": FREQUENCIES[1::2], "n_rest": 3, **changes})
    rng = np.random.default_rng(seed)

    def draw(heads: int):
        z = rng.normal(size=(n_pos, heads, rope.n_pairs, 2)) @ np.array([1, 1j])
        mean = offset * rng.normal(size=(heads, rope.n_pairs, 2)) @ np.array([1, 1j])
        rest = rng.normal(size=(n_pos, heads, rope.d_head - rope.rotary_dim))
        return size * (z + mean), size * (rest + offset)

    return make_record(rope, draw(n_heads), draw(n_kv), **settings)


def scores_by_hand(record: LayerCapture, head: int) -> np.ndarray:
    """`[q, k]` Scores in float64, nan where a query does not see a key."""
    q = record.q[:, head].double().numpy()
    k = record.k[:, head // (record.n_heads // record.n_kv_heads)].double().numpy()
    return np.where(seen_by_hand(record), record.scale * q @ k.T, np.nan)


def seen_by_hand(record: LayerCapture) -> np.ndarray:
    """`[q, k]` Which keys each query sees."""
    seen = np.tril(np.ones((record.n_pos, record.n_pos), bool))
    window = record.rope.window
    return seen if window is None else seen & ~np.tril(seen, -window)


def pattern_by_hand(record: LayerCapture, head: int, scores: np.ndarray) -> np.ndarray:
    """`[q, k]` Attention from scores, in float64."""
    if record.softcap is not None:
        scores = record.softcap * np.tanh(scores / record.softcap)
    weights = np.exp(scores - np.nanmax(scores, axis=1, keepdims=True))
    extra = 0.0
    if record.sinks is not None:
        extra = np.exp(float(record.sinks[head]) - np.nanmax(scores, axis=1, keepdims=True))
    return np.nan_to_num(weights / (np.nansum(weights, axis=1, keepdims=True) + extra))


@dataclasses.dataclass
class Plant:
    """One head before rotation, on a prompt that goes through `BLOCK` tokens again and again."""

    n_pos: int

    def __post_init__(self) -> None:
        self.z_q = np.zeros((self.n_pos, len(FREQUENCIES)), complex)
        self.z_k = np.zeros_like(self.z_q)
        self.rest_q, self.rest_k = np.zeros((2, self.n_pos, BLOCK))
        self.tokens = np.arange(self.n_pos) % BLOCK

    def curve(self, pair: int, amplitude: float, peak: float = 0.0) -> Plant:
        """Adds `amplitude cos(w (distance - peak))` to the score, by constants on both sides."""
        self.z_q[:, pair] = amplitude * np.exp(-1j * FREQUENCIES[pair] * peak)
        self.z_k[:, pair] = 1.0
        return self

    def match(self, size: float, shift: int = 0) -> Plant:
        """Adds `size` to keys whose token, `shift` before, is the query's."""
        self.rest_q[np.arange(self.n_pos), self.tokens] = size
        self.rest_k[np.arange(shift, self.n_pos), self.tokens[: self.n_pos - shift]] = 1.0
        return self


def sink_by_push(n_pos: int, position: int, pair: int = 7, size: float = 8.0) -> Plant:
    """A slow pair holds every key down but the sink's, which is 0 there."""
    plant = Plant(n_pos).curve(pair, -size)
    plant.z_k[position, pair] = 0.0
    return plant


def sink_by_lift(n_pos: int, position: int, pair: int = 7, size: float = 8.0) -> Plant:
    """The same pair is 0 in every key but the sink's."""
    plant = Plant(n_pos).curve(pair, size)
    plant.z_k[np.arange(n_pos) != position, pair] = 0.0
    return plant


def content(n_pos: int) -> Plant:
    """What a key gets depends on its token alone."""
    plant = Plant(n_pos)
    plant.rest_q[:, 0] = 1.5
    plant.rest_k[:, 0] = np.random.default_rng(1).normal(size=BLOCK)[plant.tokens]
    return plant


def random_head(n_pos: int, size: float, seed: int) -> Plant:
    """No structure at all: each position draws its own query and key, scores have this size."""
    plant, rng = Plant(n_pos), np.random.default_rng(seed)
    plant.rest_q, plant.rest_k = rng.normal(size=(2, n_pos, BLOCK)) * np.sqrt(size / BLOCK**0.5)
    return plant


def named_heads(n_pos: int) -> dict[str, Plant]:
    """One head of each pattern, by the name it has to get."""
    first = Plant(n_pos).match(30.0).curve(6, -14.0)
    return {
        "sink": sink_by_push(n_pos, 0),
        "previous token": Plant(n_pos).curve(0, 8.0, 1).curve(1, 8.0, 1).curve(2, 8.0, 1),
        "local": Plant(n_pos).curve(3, 30.0, 3.5).curve(5, 20.0, 3.5),
        "induction": Plant(n_pos).match(20.0, shift=1),
        "duplicate token": Plant(n_pos).match(20.0).curve(4, -12.0),
        "first occurrence": first,
        "content": content(n_pos),
        "uniform": Plant(n_pos),
    }


def planted_record(plants: Sequence[Plant], **changes) -> LayerCapture:
    """One layer with a head per plant; changes are fields of the rotation."""
    stack = lambda name: np.stack([getattr(p, name) for p in plants], axis=1)  # noqa: E731
    return make_record(
        make_rope(**changes), (stack("z_q"), stack("rest_q")), (stack("z_k"), stack("rest_k"))
    )


def planted_capture(*prompts: Sequence[Plant], bos: bool | None = True) -> RotaryCapture:
    """Prompts of one layer with a head per plant."""
    return make_capture(
        *(planted_record(plants) for plants in prompts),
        token_ids=[plants[0].tokens.tolist() for plants in prompts],
        bos=bos,
    )
