"""Attention without an array of all scores, and a sample of its queries to compare.

A fused pass reads prompts whose scores of one layer would not fit in memory. Its attention is
`scaled_dot_product_attention`, which keeps running sums instead of scores, or, for what that does
not have (soft-cap, learned sinks), a softmax over one block of queries at a time. A few blocks of
queries go through the host's own attention as well, and the two must agree.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

from lens_rope.scores import query_blocks, soft_capped, softmaxed

MAX_SAMPLED_QUERIES = 256
"""Queries of one layer, at most, that go through the host's own attention in a fused pass."""

N_SAMPLED_BLOCKS = 8
"""Blocks of successive queries that these form, evenly spread, the first and the last included."""

MAX_SAMPLED_BYTES = 2**26
"""Bytes of the scores of these queries, at most, as long as each block has one."""

_BLOCK_BYTES = 2**25
_MAX_BLOCK = 512
# Without the kernel that forms all scores at once.
_KERNELS = [
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
]


@dataclass(frozen=True, eq=False)
class SampledAttention:
    """What the host's own attention makes of a sample of queries.

    Attributes:
        rows: `[row]` The queries, ascending; None is all.
        scores: `[head, row, k_pos]` Scores after soft-cap, `-inf` where a query does not see; None
            where the host's own attention gives the pattern alone.
        pattern: `[head, row, k_pos]` Attention after softmax.
        output_error: Largest difference of the fused attention output from that of `pattern` and
            the values, relative to the head's largest of the latter; the worst head.
    """

    rows: Int[Tensor, " row"] | None
    scores: Float[Tensor, "head row k_pos"] | None
    pattern: Float[Tensor, "head row k_pos"]
    output_error: float


def blocked_attention(
    q: Float[Tensor, "batch head pos d_head"],
    k: Float[Tensor, "batch kv_head pos d_head"],
    v: Float[Tensor, "batch kv_head pos d_value"],
    *,
    scale: float,
    softcap: float | None,
    sinks: Float[Tensor, " head"] | None,
    window: int | None,
) -> Float[Tensor, "batch head pos d_value"]:
    """`[batch, head, pos, d_value]` Output of causal attention; never an array of all scores.

    Args:
        q: `[batch, head, pos, d_head]` Rotated queries.
        k: `[batch, kv_head, pos, d_head]` Rotated keys; a key head serves `head // kv_head`
            consecutive query heads.
        v: `[batch, kv_head, pos, d_value]` Values.
        scale: What query-key products are multiplied by.
        softcap: `c` where scores `s` are replaced by `c tanh(s / c)`, or None.
        sinks: `[head]` Learned sink logits, which take part in the softmax and have no value.
        window: Sliding window in tokens (a query and the `window - 1` keys before it), or None.
    """
    n_pos = q.shape[-2]
    if window is not None and window >= n_pos:
        window = None
    if softcap is None and sinks is None:
        try:
            return _by_kernel(q, k, v, scale, window)
        except RuntimeError as error:
            # Which kernels there are depends on the device, the precision and d_head.
            if "kernel" not in str(error) or isinstance(error, torch.OutOfMemoryError):
                raise
    return _by_softmax(q, k, v, scale, softcap, sinks, window)


def sampled_blocks(n_pos: int, row_bytes: int) -> list[range]:
    """Blocks of successive queries to put through the host's own attention.

    Args:
        n_pos: Number of positions.
        row_bytes: Bytes of the scores of one query, all heads together.

    Returns:
        One block of all queries where these are few enough, else `N_SAMPLED_BLOCKS`.
    """
    n_rows = min(MAX_SAMPLED_QUERIES, MAX_SAMPLED_BYTES // row_bytes)
    size = max(1, n_rows // N_SAMPLED_BLOCKS)
    if n_pos <= size * N_SAMPLED_BLOCKS:
        return [range(n_pos)]
    last = n_pos - size
    starts = (round(i * last / (N_SAMPLED_BLOCKS - 1)) for i in range(N_SAMPLED_BLOCKS))
    return [range(start, start + size) for start in starts]


def sampled_attention(
    output: Float[Tensor, "pos head d_value"],
    own: Callable[[range], tuple[Tensor | None, Tensor, Tensor]],
    itemsize: int,
) -> SampledAttention:
    """Puts a sample of queries through the host's own attention and compares the output.

    Args:
        output: `[pos, head, d_value]` Attention output of the fused pass.
        own: Gives, for a block of queries that ends at `stop`, the host's scores (or None) and
            pattern `[head, row, stop]` over all keys before `stop`, and the output
            `[row, head, d_value]`.
        itemsize: Bytes of one score.
    """
    n_pos, n_heads = output.shape[:2]
    blocks = sampled_blocks(n_pos, n_heads * n_pos * itemsize)
    n_rows = sum(len(block) for block in blocks)
    scores, pattern, outputs = None, output.new_empty(0), []
    at = 0
    for block in blocks:
        own_scores, own_pattern, own_output = own(block)
        if at == 0:
            if own_scores is not None:
                scores = own_scores.new_empty((n_heads, n_rows, n_pos))
            pattern = own_pattern.new_empty((n_heads, n_rows, n_pos))
        rows, seen, unseen = (
            slice(at, at + len(block)), slice(0, block.stop), slice(block.stop, None),
        )  # fmt: skip
        if scores is not None and own_scores is not None:
            scores[:, rows, seen] = own_scores
            scores[:, rows, unseen] = -torch.inf
        pattern[:, rows, seen] = own_pattern
        pattern[:, rows, unseen] = 0
        outputs.append(own_output)
        at += len(block)
    true = torch.cat(outputs).float()
    ours = torch.cat([output[block.start : block.stop] for block in blocks]).float()
    # By head: one with small values could be wrong in all of them and not show beside the others.
    # Maxima keep nan: an output that is no number is not close to anything.
    largest = true.abs().amax(dim=(0, 2)).clamp_min(torch.finfo(torch.float32).tiny)
    error = ours.sub_(true).abs_().amax(dim=(0, 2)) / largest
    rows = None
    if n_rows < n_pos:
        rows = torch.cat([torch.arange(b.start, b.stop, device=output.device) for b in blocks])
    return SampledAttention(rows, scores, pattern, float(error.amax()))


def _by_kernel(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
    d_value, n_pos = v.shape[-1], q.shape[-2]
    # The kernels want queries, keys and values of one width; zeros change neither scores nor
    # output.
    width = max(q.shape[-1], d_value)
    if q.device.type != "cpu":
        width = -(-width // 8) * 8
    q, k, v = (x if x.shape[-1] == width else pad(x, (0, width - x.shape[-1])) for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    if grouped and q.device.type != "cpu":
        # Not every kernel of an accelerator takes grouped keys.
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        grouped = False
    with sdpa_kernel(_KERNELS), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # which kernels were passed over, and why
        if window is None:
            output = scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=scale, enable_gqa=grouped
            )
            return output[..., :d_value]
        output = torch.empty_like(q)
        size = min(_MAX_BLOCK, max(64, window))
        for block in query_blocks(n_pos, window, size, q.device):
            output[:, :, block.rows] = scaled_dot_product_attention(
                q[:, :, block.rows],
                k[:, :, block.keys],
                v[:, :, block.keys],
                attn_mask=None if block.hidden is None else ~block.hidden,
                scale=scale,
                enable_gqa=grouped,
            )
    return output[..., :d_value]


def _by_softmax(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    window: int | None,
) -> Tensor:
    batch, n_heads, n_pos, d_head = q.shape
    n_groups = k.shape[1]
    wide = torch.promote_types(q.dtype, torch.float32)
    k, v = k.to(wide), v.to(wide)
    output = q.new_empty(batch, n_heads, n_pos, v.shape[-1])
    row_bytes = batch * n_heads * n_pos * k.element_size()
    size = min(_MAX_BLOCK, max(16, _BLOCK_BYTES // row_bytes))
    for block in query_blocks(n_pos, window, size, q.device):
        n_rows, n_keys = (x.stop - x.start for x in (block.rows, block.keys))
        # The query heads of a group side by side, so that its keys are not copied per head.
        of_group = q[:, :, block.rows].to(wide).reshape(batch, n_groups, -1, d_head)
        scores = (of_group @ k[:, :, block.keys].mT).mul_(scale)
        scores = scores.view(batch, n_heads, n_rows, n_keys)
        scores = block.hide(soft_capped(scores, softcap), -torch.inf)
        weights = softmaxed(scores, sinks).reshape(batch, n_groups, -1, n_keys)
        output[:, :, block.rows] = (weights @ v[:, :, block.keys]).view(batch, n_heads, n_rows, -1)
    return output
