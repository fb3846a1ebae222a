"""From the tables of one forward pass to a `LayerRope`.

A host shows cosines and sines `[pos, width]` in one of three layouts: each pair's angle twice (in
two halves, or side by side), or once. Which components form a pair is found by trying: the right
pairing turns the vectors before the rotation into those after it.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import torch

from lens_rope.errors import UnsupportedModelError
from lens_rope.rotation import from_pairs, rotate, to_pairs
from lens_rope.spec import PAIRINGS, LayerRope
from lens_rope.verify import rotation_maxima, score_errors

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jaxtyping import Complex, Float, Int

    from lens_rope.hosts import LayerReading

MIN_TOKENS = 8
"""Tokens that a forward pass needs for its tables to tell their layout and angles."""

_FIRST_POSITIONS, _LAST_POSITIONS = 64, 4
_FLOAT32_EPS = float(np.finfo(np.float32).eps)


def fit_rope(reading: LayerReading) -> LayerRope:
    """The rotation of one layer, not yet verified.

    Args:
        reading: What the host showed in a forward pass of at least `MIN_TOKENS` tokens.

    Raises:
        UnsupportedModelError: The tables are in no known layout.
    """
    if reading.cos is None or reading.sin is None:
        return _layer_rope(reading, np.ones((1, 0), complex), np.zeros(1, int))
    positions = _telling_positions(len(reading.q))
    rows = torch.from_numpy(positions).to(reading.cos.device)
    cos, sin = (x[rows].cpu().double() for x in (reading.cos, reading.sin))
    table = torch.complex(cos, sin).numpy()
    room = reading.q.shape[-1] - reading.rotary_start
    ropes = [
        _layer_rope(reading, turn, positions) for turn in _turns(table) if 2 * turn.shape[1] <= room
    ]
    if not ropes:
        raise UnsupportedModelError(
            f"cannot read layer {reading.layer}: its rotary table has {table.shape[1]} columns for "
            f"{room} components, a layout lens_rope does not know"
        )
    candidates = [
        dataclasses.replace(rope, pairing=pairing) for rope in ropes for pairing in PAIRINGS
    ]
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
    n_pos = len(reading.q)
    positions = torch.from_numpy(_telling_positions(n_pos))
    if reading.sample is not None:
        errors = rotation_maxima(rope, reading, positions).tolist()
        return np.inf if np.isnan(errors).any() else max(errors)
    if reading.rows is None and len(positions) < n_pos:
        rows = positions.to(reading.q.device)
        scores = None if reading.scores is None else reading.scores[:, rows]
        reading = dataclasses.replace(
            reading, rows=rows, scores=scores, pattern=reading.pattern[:, rows]
        )
    error = score_errors(*rotated(reading, rope), rope, reading)[1]
    return np.inf if np.isnan(error) else error


def _telling_positions(n_pos: int) -> Int[np.ndarray, " some"]:
    """`[some]` Positions by which candidates are told apart, ascending; verification is by all.

    The first ones, in which each pair makes a step, the powers of two, by which `_inv_freq` counts
    turns, and the last ones, which are the most precise.
    """
    doubled = 2 ** np.arange(max(n_pos - 1, 1).bit_length())
    some = np.concatenate(
        [np.arange(_FIRST_POSITIONS), doubled, np.arange(n_pos - _LAST_POSITIONS, n_pos)]
    )
    return np.unique(some[(some >= 0) & (some < n_pos)])


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
    turn: Complex[np.ndarray, "some pair"],
    positions: Int[np.ndarray, " some"],
) -> LayerRope:
    """The rotation that the turns at some positions tell, as if its pairs were halves."""
    eps = 0.0 if reading.cos is None else float(torch.finfo(reading.cos.dtype).eps)
    inv_freq, error = _inv_freq(turn, positions, eps, reading.inv_freq_candidates)
    # The turn at position 0 is the factor itself, to the table's precision; a coarse table says
    # more by the mean of its many rounded numbers.
    if reading.cos is None or reading.sin is None:
        factor = 1.0
    elif eps <= _FLOAT32_EPS:
        factor = float(np.abs(turn[:1]).mean())
    else:
        factor = float(torch.hypot(reading.cos.float(), reading.sin.float()).mean())
    if abs(factor - 1) <= eps:
        factor = 1.0
    return LayerRope(
        layer=reading.layer,
        inv_freq=inv_freq,
        inv_freq_error=error,
        pairing="half",
        rotary_dim=2 * turn.shape[1],
        d_head=reading.q.shape[-1],
        attention_factor=factor,
        window=reading.window,
        trained_context=reading.trained_context,
        rotary_start=reading.rotary_start if turn.size else 0,
    )


def _inv_freq(
    turn: Complex[np.ndarray, "some pair"],
    positions: Int[np.ndarray, " some"],
    eps: float,
    candidates: tuple[np.ndarray, ...],
) -> tuple[Float[np.ndarray, " pair"], Float[np.ndarray, " pair"]]:
    """Angular frequencies in rad/token, and a bound on their relative error.

    The angle at position 1 gives each frequency to the table's precision, and doubling the
    position halves the error, whole turns being counted from the estimate so far. Where an array
    that the model holds gives the same table within rounding, it is the exact answer.
    """
    n_pairs = turn.shape[1]
    inv_freq, last = np.zeros(n_pairs), 1
    if n_pairs == 0:
        return inv_freq, np.zeros(0)
    angle = np.angle(turn)
    for row in np.flatnonzero((positions & (positions - 1) == 0) & (positions > 0)):
        last = int(positions[row])
        whole_turns = np.round((inv_freq * last - angle[row]) / (2 * np.pi))
        inv_freq = (angle[row] + 2 * np.pi * whole_turns) / last
    with np.errstate(divide="ignore"):
        error = eps * np.minimum(1, 1 / (last * inv_freq)) + _FLOAT32_EPS
    unit = np.exp(1j * angle)
    at = positions[:, None]
    for candidate in candidates:
        if candidate.shape != inv_freq.shape:
            continue
        off = np.abs(np.exp(1j * at * candidate) - unit)
        if (off <= 2 * eps + at * candidate * _FLOAT32_EPS).all():
            return candidate, np.full(n_pairs, _FLOAT32_EPS)
    return inv_freq, error
