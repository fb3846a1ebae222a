"""Pairs as complex numbers: the one place where components become pairs.

Everything here is a pure function of arrays and a `LayerRope`. Angles are computed in float64
from integer positions, so they are right at any position; values stay in the precision given.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from jaxtyping import Complex, Float, Int

    from lens_rope.spec import LayerRope


def to_pairs(
    x: Float[torch.Tensor, "... d_head"], rope: LayerRope
) -> tuple[Complex[torch.Tensor, "... pair"], Float[torch.Tensor, "... rest"]]:
    """Splits queries or keys into rotary pairs and the components that are not rotated.

    Args:
        x: Queries or keys, last axis `d_head`. Values below float32 are widened to float32.
        rope: The layer's rotation, which names the pairs.

    Returns:
        `[..., pair]` each pair as `x[a] + 1j x[b]`, and `[..., rest]` the pass-through components,
        which may be a view of `x`.
    """
    first, second, rest = split(x, rope)
    return torch.complex(first, second), rest


def split(
    x: Float[torch.Tensor, "... d_head"], rope: LayerRope
) -> tuple[
    Float[torch.Tensor, "... pair"],
    Float[torch.Tensor, "... pair"],
    Float[torch.Tensor, "... rest"],
]:
    """As `to_pairs`, each pair as two real numbers, without a copy where that can be.

    Args:
        x: Queries or keys, or their spectra, last axis `d_head`. Values below float32 are widened
            to float32.
        rope: The layer's rotation, which names the pairs.

    Returns:
        `[..., pair]` first and second components of the pairs, and `[..., rest]` the pass-through.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    if wide != x.dtype:
        x = x.to(wide)
    first, second = rope.component_slices
    stop = rope.rotary_start + rope.rotary_dim
    before, after = x[..., : rope.rotary_start], x[..., stop:]
    rest = after if rope.rotary_start == 0 else torch.cat([before, after], dim=-1)
    return x[..., first], x[..., second], rest


def from_pairs(
    pairs: Complex[torch.Tensor, "... pair"],
    rest: Float[torch.Tensor, "... rest"],
    rope: LayerRope,
) -> Float[torch.Tensor, "... d_head"]:
    """`[..., d_head]` Queries or keys again: the inverse of `to_pairs`."""
    first, second = rope.component_slices
    x = torch.empty((*rest.shape[:-1], rope.d_head), dtype=rest.dtype, device=rest.device)
    x[..., first] = pairs.real
    x[..., second] = pairs.imag
    x[..., : rope.rotary_start] = rest[..., : rope.rotary_start]
    x[..., rope.rotary_start + rope.rotary_dim :] = rest[..., rope.rotary_start :]
    return x


def phases(
    positions: Int[torch.Tensor, " pos"], rope: LayerRope
) -> Complex[torch.Tensor, "pos pair"]:
    """`[pos, pair]` Unit phases `exp(1j * inv_freq * position)` in complex128.

    Args:
        positions: `[pos]` Integer positions in tokens.
        rope: The layer's rotation.
    """
    n_pos = len(positions)
    if n_pos and torch.equal(positions.cpu(), torch.arange(n_pos)):
        return _phases_from_zero(rope.inv_freq.tobytes(), n_pos).clone()
    return _phases(positions, rope.inv_freq)


def turns(
    positions: Int[torch.Tensor, " pos"], rope: LayerRope
) -> Complex[torch.Tensor, "pos pair"]:
    """`[pos, pair]` What `rotate` multiplies pairs by: phase times attention factor, complex128."""
    return phases(positions, rope) * rope.attention_factor


def rotate(
    z: Complex[torch.Tensor, "pos head pair"],
    positions: Int[torch.Tensor, " pos"],
    rope: LayerRope,
) -> Complex[torch.Tensor, "pos head pair"]:
    """`[pos, head, pair]` Each pair times its phase and the attention factor, as the model does."""
    return z * turns(positions, rope).to(z.device, z.dtype)[:, None, :]


def unrotate(
    z_rot: Complex[torch.Tensor, "pos head pair"],
    positions: Int[torch.Tensor, " pos"],
    rope: LayerRope,
) -> Complex[torch.Tensor, "pos head pair"]:
    """`[pos, head, pair]` Values before rotation, by undoing it.

    Rotated values are the ones the scores are made of. Values read at an earlier hook point may
    still be normalised or clipped before they are rotated.
    """
    turn = phases(positions, rope).conj() / rope.attention_factor
    return z_rot * turn.to(z_rot.device, z_rot.dtype)[:, None, :]


def _phases(
    positions: Int[torch.Tensor, " pos"], inv_freq: Float[np.ndarray, " pair"]
) -> Complex[torch.Tensor, "pos pair"]:
    # On the CPU: some accelerators have no float64.
    angles = positions.cpu().to(torch.float64)[:, None] * torch.tensor(inv_freq)[None, :]
    return torch.polar(torch.ones_like(angles), angles)


# Two, because layers with and without a sliding window can alternate; of a long prompt each takes
# 16 bytes per pair and position.
@lru_cache(maxsize=2)
def _phases_from_zero(inv_freq: bytes, n_pos: int) -> Complex[torch.Tensor, "pos pair"]:
    """Phases of positions 0, 1, 2, ...; most layers share them, and nobody may change them."""
    return _phases(torch.arange(n_pos), np.frombuffer(inv_freq))
