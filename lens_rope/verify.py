"""Does what was read reproduce what the model computed? Four checks, each a relative error.

- `pattern`: the host's scores, under our visibility, soft-cap and sinks, give the host's pattern.
  This also tells whether `hook_attn_scores` holds scores at all.
- `score`: our scores (all pairs plus pass-through) equal the host's.
- `norm`: rotation kept each pair's length up to the attention factor, and left the rest alone.
- `angle`: each pair turned by `inv_freq * position`.

The last two matter because a wrong pairing of rotated components still adds up to the right
score. Where the host shows vectors on one side of the rotation only, we rotate ourselves, and a
wrong pairing, base or factor shows in the scores.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lens_rope.errors import VerificationError
from lens_rope.records import LayerCheck
from lens_rope.rotation import rotate, to_pairs
from lens_rope.scores import pattern_of, scores_of, soft_capped, visibility

if TYPE_CHECKING:
    from jaxtyping import Float

    from lens_rope.hosts import LayerReading
    from lens_rope.spec import LayerRope

TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-2}
"""Largest relative error that is accepted, by the precision of queries and keys in the model."""

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
    norm, angle = rotation_errors(rope, reading)
    residual, score = score_errors(q, k, rope, reading)
    check = LayerCheck(
        layer=reading.layer,
        route=reading.route,
        score=score,
        pattern=pattern_error(q, k, rope, reading),
        norm=norm,
        angle=angle,
        head_residual=tuple(residual.tolist()),
    )
    tolerance = TOLERANCE[reading.q.dtype]
    for name in ("pattern", "norm", "angle", "score"):
        error = getattr(check, name)
        is_unknown = name in ("norm", "angle") and reading.sample is None
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
    ours = soft_capped(scores_of(q, k, rope, reading.scale), reading.softcap)
    usable = visibility(len(q), rope.window, device=q.device).expand_as(ours)
    size = ours.masked_fill(~usable, 0).abs().amax(dim=(1, 2))
    if reading.route == "hook_cos_pattern":
        # The logarithm of a softmax is the score up to a constant per query, as exact as the weight
        # itself, until weights leave the range of their precision.
        usable = usable & (reading.pattern >= torch.finfo(reading.pattern.dtype).tiny)
        is_compared = usable.sum(-1) > 1
        if len(q) > 1:
            # A head that attends to one key alone in every row shows nothing of its scores.
            size = torch.where(is_compared.any(-1), size, torch.nan)
        ours = _row_centred(ours, usable)
        theirs = _row_centred(reading.pattern.to(ours.dtype).log(), usable)
    else:
        theirs = reading.scores.to(ours.dtype)
    difference = (ours - theirs).masked_fill(~usable, 0).abs().amax(dim=(1, 2))
    # nan stays nan here, and is refused.
    relative = difference / torch.where(size == 0, torch.finfo(size.dtype).tiny, size)
    return difference.cpu(), float(relative.max())


def pattern_error(
    q: Float[torch.Tensor, "pos head d_head"],
    k: Float[torch.Tensor, "pos kv_head d_head"],
    rope: LayerRope,
    reading: LayerReading,
) -> float:
    """The largest difference between the host's pattern and the one its scores imply.

    The host's own scores are used, because rounding of large scores would be magnified; ours only
    where the host shows none.
    """
    if reading.route == "hook_cos_pattern":
        scores = soft_capped(scores_of(q, k, rope, reading.scale), reading.softcap)
    else:
        scores = reading.scores
    visible = visibility(len(q), rope.window, device=q.device)
    implied = pattern_of(scores, visible, reading.sinks)
    return float((implied - reading.pattern).abs().max())


def rotation_errors(rope: LayerRope, reading: LayerReading) -> tuple[float, float]:
    """Lengths and angles of the pairs across the host's own rotation.

    Returns:
        The largest change of a pair's length beyond the attention factor (or of a pass-through
        component), and the largest distance of a rotated pair from where `inv_freq` puts it, both
        relative to the pair's largest length. `nan` twice where the host shows one side only.
    """
    if reading.sample is None:
        return torch.nan, torch.nan
    (before, rest_before), (after, rest_after) = (to_pairs(x, rope) for x in reading.sample)
    norm = _relative(rest_after - rest_before, rest_before)
    if rope.n_pairs == 0:
        return norm, 0.0
    lengths = rope.attention_factor * before.abs()
    norm = max(norm, _relative(after.abs() - lengths, lengths))
    positions = torch.arange(len(before))
    off = (after - rotate(before, positions, rope)).abs()
    # Hosts form `inv_freq * position` in float32, so their own angles are off by this much (rad).
    rounding = positions[:, None] * torch.tensor(
        rope.inv_freq * (_FLOAT32_EPS + rope.inv_freq_error)
    )
    off = (off - lengths * rounding[:, None, :].to(lengths)).clamp_min(0)
    return norm, _relative(off, lengths)


def _relative(
    difference: Float[torch.Tensor, "pos head component"],
    reference: Float[torch.Tensor, "pos head component"],
) -> float:
    """The largest difference, relative to its component's largest reference."""
    if difference.numel() == 0:
        return 0.0
    size = reference.abs().amax(dim=(0, 1)).clamp_min(torch.finfo(reference.dtype).tiny)
    return float((difference.abs().amax(dim=(0, 1)) / size).max())


def _row_centred(
    x: Float[torch.Tensor, "head q_pos k_pos"], usable: torch.Tensor
) -> Float[torch.Tensor, "head q_pos k_pos"]:
    """`x` less its mean over the usable keys of each query."""
    kept = x.masked_fill(~usable, 0)
    return x - kept.sum(-1, keepdim=True) / usable.sum(-1, keepdim=True).clamp_min(1)
