"""What a user would write in a notebook for the same numbers: vectorised torch, in float32.

Everything here is for one layer whose pairs are the halves of a head or adjacent components, wholly
rotated, without window, soft-cap or learned sinks, as in the demo model.
"""

from __future__ import annotations

import math

import torch


def pairs(x: torch.Tensor, pairing: str) -> torch.Tensor:
    """`[pos, head, pair, 2]` The two components of each pair, from `[pos, head, d_head]`."""
    if pairing == "adjacent":
        return x.unflatten(-1, (-1, 2))
    return torch.stack(x.chunk(2, dim=-1), dim=-1)


def dense(
    q: torch.Tensor, k: torch.Tensor, pairing: str, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages of the attended keys and distance profiles, through all contributions at once.

    Args:
        q: `[pos, head, d_head]` Rotated queries, float32.
        k: `[pos, kv_head, d_head]` Rotated keys, likewise.
        pairing: How components make pairs.
        scale: What the model multiplies query-key products by.

    Returns:
        `[head, pair]` and `[head, pair, distance]`, in score units.
    """
    n_pos, n_heads, _ = q.shape
    k = k.repeat_interleave(n_heads // k.shape[1], dim=1)
    contribution = scale * torch.einsum("mhpc,nhpc->hpmn", pairs(q, pairing), pairs(k, pairing))
    seen = torch.ones(n_pos, n_pos, dtype=torch.bool).tril()
    scores = contribution.sum(dim=1).masked_fill(~seen, -math.inf)
    uniform = seen / seen.sum(dim=1, keepdim=True)
    weights = scores.softmax(dim=-1) - uniform
    # The first query sees one key and has no choice; its row is zero.
    advantages = torch.einsum("hmn,hpmn->hp", weights, contribution) / (n_pos - 1)
    profiles = [contribution.diagonal(-d, 2, 3).mean(dim=-1) for d in range(n_pos)]
    return advantages, torch.stack(profiles, dim=-1)


def shift_and_multiply(
    q: torch.Tensor, k: torch.Tensor, pairing: str, scale: float
) -> torch.Tensor:
    """`[head, pair, distance]` Distance profiles, one distance after another, in complex64.

    Arguments as those of `dense`.
    """
    n_pos, n_heads, _ = q.shape
    z_q = torch.view_as_complex(pairs(q, pairing).contiguous())
    z_k = torch.view_as_complex(pairs(k, pairing).contiguous()).conj().resolve_conj()
    z_k = z_k.repeat_interleave(n_heads // k.shape[1], dim=1)
    rows = [(z_q[d:] * z_k[: n_pos - d]).real.mean(dim=0) for d in range(n_pos)]
    return scale * torch.stack(rows, dim=-1)
