"""Does what was read reproduce what the model computed? Each check is a relative error.

- `pattern`: the host's scores, under our visibility, soft-cap and sinks, give the host's pattern.
  This also tells whether `hook_attn_scores` holds scores at all.
- `score`: our scores (all pairs plus pass-through) equal the host's.
- `norm`: rotation kept each pair's length up to the attention factor, and left the rest alone.
- `angle`: each pair turned by `inv_freq * position`.
- `output`: where the pass was fused, its attention output is that of the host's own attention, on
  the same queries.

`norm` and `angle` matter because a wrong pairing of rotated components still adds up to the right
score. Where the host shows vectors on one side of the rotation only, we rotate ourselves, and a
wrong pairing, base or factor shows in the scores.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lens_rope.errors import VerificationError
from lens_rope.records import LayerCheck
from lens_rope.rotation import split, turns
from lens_rope.scores import blocks_of, query_blocks, scores_of, softmaxed

if TYPE_CHECKING:
    from jaxtyping import Complex, Float, Int

    from lens_rope.hosts import LayerReading
    from lens_rope.scores import QueryBlock
    from lens_rope.spec import LayerRope

TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-2}
"""Largest relative error that is accepted, by the precision of queries and keys in the model."""

OUTPUT_TOLERANCE = {
    torch.float64: 1e-4, torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 2e-2,
}  # fmt: skip
"""Largest relative difference of a fused pass's attention output from the host's own."""

_POSITION_BLOCK = 256
_FLOAT32_EPS = torch.finfo(torch.float32).eps

_CAUSES = {
    "pattern": (
        "the attention pattern does not follow from the scores with a causal mask, window {window} "
        "and soft-cap or sinks as read; the model may use another mask or bias"
    ),
    "score": (
        "the scores of the visible keys do not follow from queries, keys and scale as read; the "
        "model may rescale or bias them after the rotation, or hide more keys than window {window}"
    ),
    "norm": (
        "the rotation does not keep the length of the {pairing} pairs up to the attention factor "
        "{factor:g}; either they were misread or the host does not apply a rotation"
    ),
    "output": (
        "the attention output of the fused pass is not that of the model's own attention; the "
        "model's attention does something beyond scores, softmax and values, so read it with "
        'attention="eager"'
    ),
    "angle": (
        "the pairs do not turn by a constant angle per token; the frequencies or positions were "
        "misread or the host does not apply RoPE"
    ),
}


def check_finite(reading: LayerReading, model_name: str) -> None:
    """Refuses queries and keys that are not numbers, before anything is made of them.

    Args:
        reading: What the host showed.
        model_name: Named in the error.

    Raises:
        VerificationError: A query or key holds NaN or an infinite value; it names the head and the
            position.
    """
    # One pass without a copy tells that all is well: a sum keeps NaN and infinity.
    wide = torch.promote_types(reading.q.dtype, torch.float32)
    total = reading.q.sum(dtype=wide) + reading.k.sum(dtype=wide)
    if torch.isfinite(total):
        return
    for side, head, x in (("queries", "head", reading.q), ("keys", "key head", reading.k)):
        wrong = (~torch.isfinite(x)).any(dim=-1).nonzero()
        if len(wrong):
            position, index = wrong[0].tolist()
            raise VerificationError(
                f"layer {reading.layer} of {model_name} cannot be read exactly: its {side} hold "
                f"NaN or infinite values, first in {head} {index} at position {position}; float16 "
                "overflows in some models (load it in bfloat16 or float32), otherwise check the "
                "weights",
                layer=reading.layer,
                check="finite",
                error=torch.inf,
                tolerance=0.0,
            )


def verify(
    q: Float[torch.Tensor, "pos head d_head"],
    k: Float[torch.Tensor, "pos kv_head d_head"],
    rope: LayerRope,
    reading: LayerReading,
    model_name: str,
) -> LayerCheck:
    """Runs all checks on one layer.

    Args:
        q: Rotated queries as they will be handed out.
        k: Rotated keys, likewise.
        rope: The rotation as it will be handed out.
        reading: What the host showed.
        model_name: Named in the error.

    Raises:
        VerificationError: An error exceeds the tolerance of the model's precision, or is nan.
    """
    rotation = rotation_maxima(rope, reading)
    residual, score, pattern = compared(q, k, rope, reading)
    # One transfer from an accelerator, at the end.
    norm, angle, score, pattern, *head_residual = torch.cat(
        [rotation.to(residual), torch.stack([score, pattern]), residual]
    ).tolist()
    check = LayerCheck(
        layer=reading.layer,
        route=reading.route,
        score=score,
        pattern=pattern,
        norm=norm,
        angle=angle,
        head_residual=tuple(head_residual),
        checked_queries=None if reading.rows is None else len(reading.rows),
        output=torch.nan if reading.output_error is None else reading.output_error,
    )
    for name in ("pattern", "norm", "angle", "score", "output"):
        tolerance = (OUTPUT_TOLERANCE if name == "output" else TOLERANCE)[reading.q.dtype]
        error = getattr(check, name)
        is_unknown = (name in ("norm", "angle") and reading.sample is None) or (
            name == "output" and reading.output_error is None
        )
        if not is_unknown and not error <= tolerance:
            cause = _CAUSES[name].format(
                window=rope.window, pairing=rope.pairing, factor=rope.attention_factor
            )
            raise VerificationError(
                f"layer {reading.layer} of {model_name} cannot be read exactly: {name} error "
                f"{error:.1e} exceeds {tolerance:.0e}: {cause}. Nothing was returned; try the "
                "other backend or another version of transformer-lens, or report the model",
                layer=reading.layer,
                check=name,
                error=error,
                tolerance=tolerance,
            )
    return check


def compared(
    q: Float[torch.Tensor, "pos head d_head"],
    k: Float[torch.Tensor, "pos kv_head d_head"],
    rope: LayerRope,
    reading: LayerReading,
) -> tuple[Float[torch.Tensor, " head"], Float[torch.Tensor, ""], Float[torch.Tensor, ""]]:
    """Our scores against the host's, and the host's pattern against the one its scores imply.

    For the pattern the host's own scores are used, because rounding of large scores would be
    magnified; ours only where the host shows none. Everything is done in blocks of queries, so that
    no array of all scores is made beside the host's.

    Args:
        q: Rotated queries as they will be handed out.
        k: Rotated keys, likewise.
        rope: The rotation as it will be handed out.
        reading: What the host showed.

    Returns:
        On the device of `q`: `[head]` the largest absolute difference of scores over visible keys,
        in score units (up to a constant per query where the host shows the pattern alone); the
        largest over heads of that difference relative to the head's largest score; and the largest
        difference of the pattern over all keys.
    """
    if reading.rows is None:
        blocks = query_blocks(len(q), rope.window, device=q.device)
    else:
        q, blocks = q[reading.rows], blocks_of(reading.rows, rope.window)
    maxima = [
        _compared_block(block, q[block.rows], k[block.keys], rope, reading) for block in blocks
    ]
    size, difference, pattern, is_compared = (
        torch.stack(x).amax(dim=0) for x in zip(*maxima, strict=True)
    )
    if len(k) > 1:
        # A head that attends to one key alone in every row shows nothing of its scores.
        size = torch.where(is_compared > 0, size, torch.nan)
    # nan stays nan here, and is refused.
    relative = difference / torch.where(size == 0, torch.finfo(size.dtype).tiny, size)
    return difference, relative.amax(), pattern.amax()


def _compared_block(
    block: QueryBlock,
    q: Float[torch.Tensor, "row head d_head"],
    k: Float[torch.Tensor, "key kv_head d_head"],
    rope: LayerRope,
    reading: LayerReading,
) -> tuple[torch.Tensor, ...]:
    """`[head]` each: size, difference, difference of patterns, and whether scores are compared."""
    ours = scores_of(q, k, rope, reading.scale)
    if reading.softcap is not None:
        ours = ours.div_(reading.softcap).tanh_().mul_(reading.softcap)
    pattern = reading.pattern[:, block.rows, block.keys]
    is_compared = ours.new_ones(len(ours))
    if reading.route == "hook_cos_pattern" or reading.scores is None:
        scores = ours.clone()
        size = _largest(block.hide(ours, 0))
        # The logarithm of a softmax is the score up to a constant per query, as exact as the weight
        # itself, until weights leave the range of their precision.
        usable = pattern >= torch.finfo(pattern.dtype).tiny
        if block.hidden is not None:
            usable &= ~block.hidden
        theirs = _row_centred(pattern.to(ours.dtype).log(), usable)
        difference = _largest((_row_centred(ours, usable) - theirs).masked_fill_(~usable, 0))
        is_compared = (usable.sum(-1) > 1).any(-1).to(ours)
    else:
        shown = reading.scores[:, block.rows, block.keys]
        size = _largest(block.hide(ours, 0))
        difference = _largest(block.hide(ours.sub_(shown), 0))
        scores = ours.copy_(shown)
    implied = softmaxed(block.hide(scores, -torch.inf), reading.sinks)
    unlike = _largest(implied.sub_(pattern))
    # What no query of the block sees has no weight.
    for outside in (slice(block.keys.stop, None), slice(0, block.keys.start)):
        weights = reading.pattern[:, block.rows, outside]
        if weights.shape[-1]:
            unlike = torch.maximum(unlike, _largest(weights).to(unlike))
    return size, difference, unlike, is_compared


def score_errors(
    q: Float[torch.Tensor, "pos head d_head"],
    k: Float[torch.Tensor, "pos kv_head d_head"],
    rope: LayerRope,
    reading: LayerReading,
) -> tuple[Float[torch.Tensor, " head"], float]:
    """Our scores against the host's.

    Returns:
        `[head]` the largest absolute difference over visible keys, in score units, and the largest
        over heads of that difference relative to the head's largest score.
    """
    difference, relative, _ = compared(q, k, rope, reading)
    return difference.cpu(), float(relative)


def pattern_error(
    q: Float[torch.Tensor, "pos head d_head"],
    k: Float[torch.Tensor, "pos kv_head d_head"],
    rope: LayerRope,
    reading: LayerReading,
) -> float:
    """The largest difference between the host's pattern and the one its scores imply."""
    return float(compared(q, k, rope, reading)[2])


def rotation_maxima(
    rope: LayerRope,
    reading: LayerReading,
    positions: Int[torch.Tensor, " some"] | None = None,
) -> Float[torch.Tensor, " check"]:
    """Lengths and angles of the pairs across the host's own rotation.

    Args:
        rope: The rotation as it will be handed out.
        reading: What the host showed.
        positions: Positions to look at; None is all.

    Returns:
        `[check]` The largest change of a pair's length beyond the attention factor (or of a
        pass-through component), and the largest distance of a rotated pair from where `inv_freq`
        puts it, both relative to the pair's largest length; on the host's device. `nan` twice where
        the host shows one side only.
    """
    if reading.sample is None:
        return torch.full((2,), torch.nan)
    sample = reading.sample
    if positions is None:
        positions = torch.arange(len(reading.q))
    else:
        at = positions.to(sample[0].device)
        sample = (sample[0][at], sample[1][at])
    turn = turns(positions, rope)
    # Hosts form `inv_freq * position` in float32, so their own angles are off by this much (rad).
    rounding = positions[:, None] * torch.tensor(
        rope.inv_freq * (_FLOAT32_EPS + rope.inv_freq_error)
    )
    maxima = []
    for start in range(0, len(positions), _POSITION_BLOCK):
        at = slice(start, start + _POSITION_BLOCK)
        before, after = sample[0][at], sample[1][at]
        maxima.append(_rotation_block(before, after, turn[at], rounding[at], rope))
    rest, rest_size, length, angle, size = (
        torch.stack(x).amax(dim=0) for x in zip(*maxima, strict=True)
    )
    norm = torch.cat([_relative(rest, rest_size), _relative(length, size)]).amax()
    # A layer without pairs turns none of them wrongly.
    angle = _relative(angle, size).amax() if rope.n_pairs else torch.zeros_like(norm)
    return torch.stack([norm, angle])


def _rotation_block(
    before: Float[torch.Tensor, "pos n d_head"],
    after: Float[torch.Tensor, "pos n d_head"],
    turn: Complex[torch.Tensor, "pos pair"],
    rounding: Float[torch.Tensor, "pos pair"],
    rope: LayerRope,
) -> tuple[Float[torch.Tensor, " component"], ...]:
    """`[rest]` or `[pair]` each: the largest of five things.

    Of each pass-through component, change and size; of each pair, change of length, distance from
    where it should be, and length after the rotation.
    """
    # In real numbers, because the absolute value of complex ones is slow.
    (a, b, rest), (a_after, b_after, rest_after) = (split(x, rope) for x in (before, after))
    turn = turn.to(a.device, torch.complex128 if a.dtype == torch.float64 else torch.complex64)
    cos, sin = turn.real[:, None, :].contiguous(), turn.imag[:, None, :].contiguous()
    length = torch.hypot(a, b).mul_(rope.attention_factor)
    change = torch.hypot(a_after, b_after).sub_(length).abs_()
    off_a = (a * cos).addcmul_(b, sin, value=-1).sub_(a_after)
    off_b = (b * cos).addcmul_(a, sin).sub_(b_after)
    off = torch.hypot(off_a, off_b)
    off.addcmul_(length, rounding.to(length)[:, None, :], value=-1).clamp_min_(0)
    sizes = ((rest_after - rest).abs_(), rest.abs(), change, off, length)
    return tuple(x.amax(dim=(0, 1)) for x in sizes)


def _relative(
    difference: Float[torch.Tensor, " component"], size: Float[torch.Tensor, " component"]
) -> Float[torch.Tensor, " component"]:
    """The largest difference of each component, relative to its largest size."""
    return difference / size.clamp_min(torch.finfo(size.dtype).tiny)


def _largest(x: Float[torch.Tensor, "head row key"]) -> Float[torch.Tensor, " head"]:
    """`[head]` The largest absolute value, without a copy of it all; nan where there is one."""
    return torch.maximum(x.amax(dim=(1, 2)), -x.amin(dim=(1, 2)))


def _row_centred(
    x: Float[torch.Tensor, "head q_pos k_pos"], usable: torch.Tensor
) -> Float[torch.Tensor, "head q_pos k_pos"]:
    """`x` less its mean over the usable keys of each query."""
    kept = x.masked_fill(~usable, 0)
    return x - kept.sum(-1, keepdim=True) / usable.sum(-1, keepdim=True).clamp_min(1)
