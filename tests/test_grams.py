"""Sums over visible (query, key) equal the same sums with every product formed, in float64.

Oracle: the dense `[query, key]` square of each head, masked by hand.
"""

import dataclasses

import numpy as np
import planted
import pytest
import torch
from test_decompose import random_capture

from lens_rope.decomposition import (
    decompose,
    layer_distance_profiles,
    layer_pair_summaries,
    pair_shares,
)
from lens_rope.grams import centred_rows, precisions, running_sums, visible_products

# Around the 64 positions of a block, with windows within and across them.
SHAPES = [
    (1, None), (2, None), (63, None), (64, 1), (65, 64), (130, 7), (200, 65), (200, 300),
    (700, None), (700, 90), (700, 600),
]  # fmt: skip


def seen(n_pos, window):
    distance = np.arange(n_pos)[:, None] - np.arange(n_pos)
    return (distance >= 0) & (distance < (window or n_pos))


@pytest.mark.parametrize(("n_pos", "window"), SHAPES)
@pytest.mark.parametrize("offset", [0.0, 30.0])
def test_products_equal_the_dense_ones(n_pos, window, offset):
    """Also where what rows have in common is much larger than what differs."""
    rng = np.random.default_rng(n_pos)
    q, x = rng.normal(size=(n_pos, 6, 10)), rng.normal(size=(2, n_pos, 6, 5))
    k, y = rng.normal(size=(n_pos, 2, 10)) + offset, rng.normal(size=(3, n_pos, 2, 5))
    kept = rng.random(n_pos) > 0.1
    k, y, x = k * kept[:, None, None], y * kept[:, None, None], x * kept[:, None, None]
    visible = seen(n_pos, window) & kept
    counts = np.maximum(visible.sum(axis=1), 1)
    of_q, of_x, of_k, of_y = (torch.from_numpy(a) for a in (q, x, k, y))
    of_kept = torch.from_numpy(kept).double()
    *rows, squares = centred_rows(of_q, of_k, of_kept, window, torch.float64)
    for centre in (False, True):
        pair = rows if centre else (of_q, of_k)
        found = visible_products(list(of_x), pair[0], list(of_y), pair[1], window)
        expected = np.empty((2, 3, 6, 5))
        for head in range(6):
            scores = np.where(visible, q[:, head] @ k[:, head // 3].T, 0)
            row = scores.sum(axis=1, keepdims=True) / counts[:, None]
            if centre:
                square = (counts * kept) @ row[:, 0] ** 2
                np.testing.assert_allclose(squares[head], square, rtol=1e-9)
                scores = np.where(visible, scores - row, 0)
            expected[:, :, head] = np.einsum(
                "xmc,mn,ync->xyc", x[:, :, head], scores, y[:, :, head // 3], optimize=True
            )
        size = 1 + np.abs(expected).max()
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-9 * size)
        if centre and torch.float32 in precisions(n_pos, window):
            *single, _ = centred_rows(of_q, of_k, of_kept, window, torch.float32)
            x32, y32 = list(of_x.float()), list(of_y.float())
            found = visible_products(x32, single[0], y32, single[1], window)
            assert found.dtype == torch.float64
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6 * size)


def test_a_window_that_cuts_keys_off_needs_float64():
    """Elsewhere no sum is the difference of two, and float32 is tried first."""
    assert precisions(500, 499) == (torch.float64,)
    assert precisions(500, 500) == precisions(500, None) == (torch.float32, torch.float64)


@pytest.mark.parametrize(("n_pos", "window"), SHAPES)
def test_running_sums_equal_the_dense_ones(n_pos, window):
    y = np.random.default_rng(0).normal(size=(n_pos, 2, 3))
    expected = np.einsum("mn,nhc->mhc", seen(n_pos, window), y)
    np.testing.assert_allclose(running_sums(torch.from_numpy(y), window), expected, atol=1e-11)


def test_nothing_to_multiply_is_zero():
    nothing, q, k = torch.zeros(9, 4, 0), torch.zeros(9, 4, 3), torch.zeros(9, 2, 3)
    assert visible_products([nothing], q, [nothing[:, :2]], k).shape == (1, 1, 4, 0)
    some = torch.ones(9, 4, 2)
    found = visible_products([some], nothing, [some[:, :2]], nothing[:, :2])
    np.testing.assert_array_equal(found, np.zeros((1, 1, 4, 2)))


LAYERS = {
    "plain": {},
    "window": {"window": 70},
    "partial": {"rotary_dim": 6, "start": 2, "pairing": "adjacent"},
    "one key head": {"n_kv": 1, "rotary_dim": 12},
    "no rotation": {"rotary_dim": 0},
}


@pytest.mark.parametrize("shape", LAYERS)
def test_all_heads_of_a_long_prompt(shape):
    """Over several blocks: summaries, shares and profiles of every head, from the dense scores."""
    captured = random_capture(n_pos=333, **LAYERS[shape])
    record = captured.layer(5)
    summaries, profiles = layer_pair_summaries(record), layer_distance_profiles(record)
    assert len(summaries) == len(profiles) == 4
    visible = seen(333, record.rope.window)
    first, second = record.rope.components
    rest = record.rope.pass_components
    for head in range(4):
        q = record.q[:, head].double().numpy()
        k = record.k[:, record.kv_head(head)].double().numpy()
        parts = [
            record.scale * (q[:, c] @ k[:, c].T) for c in (*np.stack([first, second], 1), rest)
        ]
        scores = sum(parts)
        row = (scores * visible).sum(axis=1, keepdims=True) / visible.sum(axis=1, keepdims=True)
        deviation = np.where(visible, scores - row, 0)
        summary, profile = summaries[head], profiles[head]
        mean = [*summary.mean, summary.pass_through_mean]
        rms = [*summary.rms, summary.pass_through_rms]
        share = [*summary.share, summary.pass_through_share]
        curves = [*profile.mean.T, profile.pass_through]
        for i, part in enumerate(parts):
            assert mean[i] == pytest.approx(part[visible].mean(), rel=1e-9, abs=1e-10)
            assert rms[i] == pytest.approx(np.sqrt((part[visible] ** 2).mean()), rel=1e-9)
            expected = (deviation * part).sum() / (deviation**2).sum()
            assert share[i] == pytest.approx(expected, abs=1e-6)
            along = [np.diagonal(part, -distance).mean() for distance in profile.distance]
            np.testing.assert_allclose(curves[i], along, rtol=0, atol=1e-10)
        one = decompose(captured, 5, head)
        np.testing.assert_allclose(one.by_pair().share, summary.share, rtol=0, atol=1e-6)
        np.testing.assert_allclose(one.by_distance().mean, profile.mean, atol=1e-12)
    np.testing.assert_array_equal(pair_shares(record), [s.share for s in summaries])


def test_what_all_keys_share_costs_no_digits():
    """Shares of deviations that are a thousandth of the scores."""
    record = random_capture(n_pos=333, rotary_dim=6, start=2).layer(5)
    record = dataclasses.replace(record, k=record.k + 1000)
    shares, visible = pair_shares(record), seen(333, None)
    for head in range(4):
        q, k = record.q[:, head].double(), record.k[:, record.kv_head(head)].double()
        parts = [(q[:, c] @ k[:, c].T).numpy() for c in np.stack(record.rope.components, 1)]
        scores = (q @ k.T).numpy()
        row = (scores * visible).sum(axis=1, keepdims=True) / visible.sum(axis=1, keepdims=True)
        deviation = np.where(visible, scores - row, 0)
        expected = [(deviation * part).sum() / (deviation**2).sum() for part in parts]
        np.testing.assert_allclose(shares[head], expected, rtol=0, atol=1e-6)


def test_queries_nearly_orthogonal_to_keys_have_shares_in_float64():
    """Sums over keys cancel, and what float32 would leave of them is not shared out."""
    rng = np.random.default_rng(0)
    shares = []
    for size in (1e-4, 0.0):
        plant = planted.Plant(300)
        plant.rest_q[:, :2] = 0.3, 0.7
        across, along = rng.normal(size=(2, 300, 1))
        plant.rest_k[:, :2] = 7.7 + across * [0.7, -0.3] + size * along * [0.3, 0.7]
        plant.z_k[:, 3] = size * rng.normal(size=300)
        plant.z_q[:, 3] = 1
        record = planted.planted_record([plant])
        found = layer_pair_summaries(record)[0]
        shares.append(found.pass_through_share)
        q, k = record.q[:, 0].double().numpy(), record.k[:, 0].double().numpy()
        rest = record.rope.pass_components
        scores, part, visible = q @ k.T, q[:, rest] @ k[:, rest].T, seen(300, None)
        row = (scores * visible).sum(axis=1, keepdims=True) / visible.sum(axis=1, keepdims=True)
        deviation = np.where(visible, scores - row, 0)
        if size:
            expected = (deviation * part).sum() / (deviation**2).sum()
            assert found.pass_through_share == pytest.approx(expected, abs=1e-6)
    assert np.isnan(shares[1])


def test_rows_of_equal_scores_have_no_shares():
    """Rounding of running sums is not shared out."""
    plant = planted.Plant(200)
    plant.rest_q[:], plant.rest_k[:] = 0.3, 7.7
    record = planted.planted_record([plant, planted.content(200)])
    summaries = layer_pair_summaries(record)
    assert np.isnan(summaries[0].share).all() and np.isnan(summaries[0].pass_through_share)
    assert np.isnan(pair_shares(record)[0]).all()
    assert summaries[1].pass_through_share == pytest.approx(1)
