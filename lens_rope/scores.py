"""Attention scores and patterns from rotated queries and keys, as the model forms them.

Pure functions of tensors; the sum over rotary pairs and pass-through is formed as such, so that
what is compared with the model is what the contributions add up to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from einops import rearrange, repeat

from lens_rope.rotation import to_pairs

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

    from lens_rope.spec import LayerRope


def visibility(
    n_pos: int, window: int | None, *, device: torch.device | str = "cpu"
) -> Bool[torch.Tensor, "q_pos k_pos"]:
    """`[q_pos, k_pos]` Which keys each query of a causal model sees, from positions alone.

    Masked scores are `-inf` in one host and a large finite number in the other, and real scores
    can be as low; so the mask is never read off the scores.

    Args:
        n_pos: Number of positions.
        window: Sliding window in tokens (a query and the `window - 1` keys before it), or None.
        device: Where to put the result.
    """
    positions = torch.arange(n_pos, device=device)
    distance = positions[:, None] - positions[None, :]
    seen = distance >= 0
    return seen if window is None else seen & (distance < window)


def scores_of(
    q: Float[torch.Tensor, "q_pos head d_head"],
    k: Float[torch.Tensor, "k_pos kv_head d_head"],
    rope: LayerRope,
    scale: float,
) -> Float[torch.Tensor, "head q_pos k_pos"]:
    """`[head, q_pos, k_pos]` Scores before soft-cap and mask: all pairs plus the pass-through.

    Args:
        q: `[q_pos, head, d_head]` Rotated queries.
        k: `[k_pos, kv_head, d_head]` Rotated keys; a key head serves `head // kv_head` consecutive
            query heads.
        rope: The layer's rotation.
        scale: What query-key products are multiplied by.
    """
    groups = q.shape[1] // k.shape[1]
    z_q, rest_q = (rearrange(x, "pos head c -> head pos c") for x in to_pairs(q, rope))
    z_k, rest_k = (
        repeat(x, "pos kv c -> (kv groups) pos c", groups=groups) for x in to_pairs(k, rope)
    )
    # Re(z_q conj(z_k)) = re re + im im: two real products instead of a complex one.
    scores = z_q.real @ z_k.real.mT + z_q.imag @ z_k.imag.mT + rest_q @ rest_k.mT
    return scale * scores


def soft_capped(
    scores: Float[torch.Tensor, "..."], softcap: float | None
) -> Float[torch.Tensor, "..."]:
    """`c tanh(s / c)`, or the scores themselves where there is no soft-cap."""
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def pattern_of(
    scores: Float[torch.Tensor, "head q_pos k_pos"],
    visible: Bool[torch.Tensor, "q_pos k_pos"],
    sinks: Float[torch.Tensor, " head"] | None,
) -> Float[torch.Tensor, "head q_pos k_pos"]:
    """`[head, q_pos, k_pos]` Attention over the visible keys.

    Args:
        scores: `[head, q_pos, k_pos]` Scores after soft-cap.
        visible: `[q_pos, k_pos]` Which keys each query sees.
        sinks: `[head]` Learned sink logits. They take part in the softmax and are not keys, so rows
            then sum to less than 1; they are not renormalised.
    """
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    scores = scores.masked_fill(~visible, -torch.inf)
    if sinks is None:
        return torch.softmax(scores, dim=-1)
    sink = sinks.to(scores)[:, None, None].expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat([scores, sink], dim=-1), dim=-1)[..., :-1]
