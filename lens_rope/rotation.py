"""Pairs as complex numbers: the one place where components become pairs.

Everything here is a pure function of arrays and a `LayerRope`. Angles are computed in float64
from integer positions, so they are right at any position; values stay in the precision given.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

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
        `[..., pair]` each pair as `x[a] + 1j x[b]`, and `[..., rest]` the pass-through components.
    """
    if not x.dtype.is_floating_point or torch.finfo(x.dtype).bits < 32:
        x = x.float()
    first, second = (torch.as_tensor(c, device=x.device) for c in rope.components)
    rest = torch.as_tensor(rope.pass_components, device=x.device)
    pairs = torch.complex(x.index_select(-1, first), x.index_select(-1, second))
    return pairs, x.index_select(-1, rest)


def from_pairs(
    pairs: Complex[torch.Tensor, "... pair"],
    rest: Float[torch.Tensor, "... rest"],
    rope: LayerRope,
) -> Float[torch.Tensor, "... d_head"]:
    """`[..., d_head]` Queries or keys again: the inverse of `to_pairs`."""
    first, second = rope.components
    x = torch.empty((*rest.shape[:-1], rope.d_head), dtype=rest.dtype, device=rest.device)
    x[..., torch.as_tensor(first)] = pairs.real
    x[..., torch.as_tensor(second)] = pairs.imag
    x[..., torch.as_tensor(rope.pass_components)] = rest
    return x


def phases(
    positions: Int[torch.Tensor, " pos"], rope: LayerRope
) -> Complex[torch.Tensor, "pos pair"]:
    """`[pos, pair]` Unit phases `exp(1j * inv_freq * position)` in complex128.

    Args:
        positions: `[pos]` Integer positions in tokens.
        rope: The layer's rotation.
    """
    # On the CPU: some accelerators have no float64.
    angles = positions.cpu().to(torch.float64)[:, None] * torch.tensor(rope.inv_freq)[None, :]
    return torch.polar(torch.ones_like(angles), angles)


def rotate(
    z: Complex[torch.Tensor, "pos head pair"],
    positions: Int[torch.Tensor, " pos"],
    rope: LayerRope,
) -> Complex[torch.Tensor, "pos head pair"]:
    """`[pos, head, pair]` Each pair times its phase and the attention factor, as the model does."""
    turn = (phases(positions, rope) * rope.attention_factor).to(z.device, z.dtype)
    return z * turn[:, None, :]


def unrotate(
    z_rot: Complex[torch.Tensor, "pos head pair"],
    positions: Int[torch.Tensor, " pos"],
    rope: LayerRope,
) -> Complex[torch.Tensor, "pos head pair"]:
    """`[pos, head, pair]` Values before rotation, by undoing it.

    Rotated values are the ones the scores are made of. Values read at an earlier hook point may
    still be normalised or clipped before they are rotated.
    """
    turn = (phases(positions, rope).conj() / rope.attention_factor).to(z_rot.device, z_rot.dtype)
    return z_rot * turn[:, None, :]
