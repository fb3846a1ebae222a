"""From the tables of one forward pass to a `LayerRope`.

A host shows cosines and sines `[pos, width]` in one of three layouts: each pair's angle twice (in
two halves, or side by side), or once. Which components form a pair is found by trying: the right
pairing turns the vectors before the rotation into those after it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from lens_rope.errors import UnsupportedModelError
from lens_rope.rotation import from_pairs, rotate, to_pairs
from lens_rope.spec import PAIRINGS, LayerRope, Pairing
from lens_rope.verify import rotation_errors, score_errors

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jaxtyping import Complex, Float

    from lens_rope.hosts import LayerReading

MIN_TOKENS = 8
"""Tokens that a forward pass needs for its tables to tell their layout and angles."""

_FLOAT32_EPS = float(np.finfo(np.float32).eps)


def fit_rope(reading: LayerReading) -> LayerRope:
    """The rotation of one layer, not yet verified.

    Args:
        reading: What the host showed in a forward pass of at least `MIN_TOKENS` tokens.

    Raises:
        UnsupportedModelError: The tables are in no known layout.
    """
    if reading.cos is None or reading.sin is None:
        return _layer_rope(reading, turn=np.ones((len(reading.q), 0), complex), eps=0.0)
    table = torch.complex(reading.cos.double(), reading.sin.double()).cpu().numpy()
    eps = float(torch.finfo(reading.cos.dtype).eps)
    room = reading.q.shape[-1] - reading.rotary_start
    candidates = [
        _layer_rope(reading, turn=turn, eps=eps, pairing=pairing)
        for turn in _turns(table)
        if 2 * turn.shape[1] <= room
        for pairing in PAIRINGS
    ]
    if not candidates:
        raise UnsupportedModelError(
            f"cannot read layer {reading.layer}: its rotary table has {table.shape[1]} columns for "
            f"{room} components, a layout lens_rope does not know"
        )
    return min(candidates, key=lambda rope: _misfit(rope, reading))


def rotated(
    reading: LayerReading, rope: LayerRope
) -> tuple[Float[torch.Tensor, "pos head d_head"], Float[torch.Tensor, "pos kv_head d_head"]]:
    """Rotated queries `[pos, head, d_head]` and keys `[pos, kv_head, d_head]`.

    As hooked, or rotated here where the host hooks them before.
    """
    if reading.route == "hook_rot":
        return reading.q, reading.k
    positions = torch.arange(len(reading.q))
    both = []
    for x in (reading.q, reading.k):
        z, rest = to_pairs(x, rope)
        both.append(from_pairs(rotate(z, positions, rope), rest, rope))
    return both[0], both[1]


def _misfit(rope: LayerRope, reading: LayerReading) -> float:
    """How badly a candidate explains the vectors after rotation, or else the scores."""
    if reading.sample is not None:
        return max(rotation_errors(rope, reading))
    error = score_errors(*rotated(reading, rope), rope, reading)[1]
    return np.inf if np.isnan(error) else error


def _turns(table: Complex[np.ndarray, "pos width"]) -> Iterator[Complex[np.ndarray, "pos pair"]]:
    """`[pos, pair]` in each layout that the table can be in."""
    half = table.shape[1] // 2
    in_halves = np.array_equal(table[:, :half], table[:, half:])
    side_by_side = np.array_equal(table[:, ::2], table[:, 1::2])
    if in_halves:
        yield table[:, :half]
    if side_by_side:
        yield table[:, ::2]
    # A table that repeats itself holds each angle twice, so it is not read as holding it once.
    if not in_halves and not side_by_side:
        yield table


def _layer_rope(
    reading: LayerReading,
    *,
    turn: Complex[np.ndarray, "pos pair"],
    eps: float,
    pairing: Pairing = "half",
) -> LayerRope:
    inv_freq, error = _inv_freq(turn, eps, reading.inv_freq_candidates)
    # The turn at position 0 is the factor itself, to the table's precision; a coarse table says
    # more by the mean of its many rounded numbers.
    is_fine = eps <= _FLOAT32_EPS
    factor = float(np.abs(turn[:1] if is_fine else turn).mean()) if turn.size else 1.0
    if abs(factor - 1) <= eps:
        factor = 1.0
    return LayerRope(
        layer=reading.layer,
        inv_freq=inv_freq,
        inv_freq_error=error,
        pairing=pairing,
        rotary_dim=2 * turn.shape[1],
        d_head=reading.q.shape[-1],
        attention_factor=factor,
        window=reading.window,
        trained_context=reading.trained_context,
        rotary_start=reading.rotary_start if turn.size else 0,
    )


def _inv_freq(
    turn: Complex[np.ndarray, "pos pair"], eps: float, candidates: tuple[np.ndarray, ...]
) -> tuple[Float[np.ndarray, " pair"], Float[np.ndarray, " pair"]]:
    """Angular frequencies in rad/token, and a bound on their relative error.

    The angle at position 1 gives each frequency to the table's precision, and doubling the
    position halves the error, whole turns being counted from the estimate so far. Where an array
    that the model holds gives the same table within rounding, it is the exact answer.
    """
    n_pos, n_pairs = turn.shape
    angle = np.angle(turn)
    inv_freq, last = np.zeros(n_pairs), 1
    for position in (2**i for i in range((n_pos - 1).bit_length() if n_pairs else 0)):
        if position >= n_pos:
            break
        whole_turns = np.round((inv_freq * position - angle[position]) / (2 * np.pi))
        inv_freq, last = (angle[position] + 2 * np.pi * whole_turns) / position, position
    with np.errstate(divide="ignore"):
        error = eps * np.minimum(1, 1 / (last * inv_freq)) + _FLOAT32_EPS
    unit = np.exp(1j * angle)
    positions = np.arange(n_pos)[:, None]
    for candidate in candidates:
        if candidate.shape != inv_freq.shape:
            continue
        off = np.abs(np.exp(1j * positions * candidate) - unit)
        if (off <= 2 * eps + positions * candidate * _FLOAT32_EPS).all():
            return candidate, np.full(n_pairs, _FLOAT32_EPS)
    return inv_freq, error
