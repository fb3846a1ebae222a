"""Four parts of offset and content sum to each score, their shares to 1; loops say the same."""

import itertools

import numpy as np
import planted
import pytest
from test_offsets import SHAPES

from lens_rope.errors import InputError
from lens_rope.offset_shares import (
    CONSISTENCY_QUERIES,
    MIN_REPEATS,
    PARTS,
    OffsetShares,
    layer_offset_shares,
    merge_offset_shares,
    offset_and_content,
)
from lens_rope.offsets import layer_offsets

TOKENS = [0, *[(i * i) % 11 for i in range(1, 200)]]


def split_by_hand(record, left_out):
    """Offset and content of each side, `[pos, head, d_head]`, by unrotating in numpy."""
    rope, kept = record.rope, [m for m in range(record.n_pos) if m not in left_out]
    first, second = rope.components
    turn = np.exp(1j * rope.inv_freq * np.arange(record.n_pos)[:, None])[:, None]
    out = []
    for x in (record.q.double().numpy(), record.k.double().numpy()):
        z = (x[..., first] + 1j * x[..., second]) / turn
        mean = z[kept].mean(axis=0) * turn
        offset = np.broadcast_to(x[kept].mean(axis=0), x.shape).copy()
        offset[..., first], offset[..., second] = mean.real, mean.imag
        out.append((offset, x - offset))
    return out


@pytest.mark.parametrize("shape", SHAPES)
def test_shares_equal_loops(shape):
    record = planted.random_record(40, offset=1.0, **SHAPES[shape])
    left_out = (0, 5)
    found = layer_offset_shares(record, TOKENS[:40], layer_offsets(record, left_out), left_out)
    queries, keys = split_by_hand(record, left_out)
    seen = planted.seen_by_hand(record)
    seen[list(left_out)] = False
    seen[:, list(left_out)] = False
    for head in range(record.n_heads):
        kv = head // (record.n_heads // record.n_kv_heads)
        scores = record.scale * record.q[:, head].double().numpy() @ record.k[:, kv].numpy().T
        expected, total = np.zeros(4), 0.0
        for m in range(40):
            row = np.flatnonzero(seen[m])
            if not row.size:
                continue
            centred = scores[m, row] - scores[m, row].mean()
            total += (centred**2).sum()
            for part, (q, k) in enumerate(itertools.product(queries, keys)):
                expected[part] += record.scale * (k[row, kv] @ q[m, head]) @ centred
        np.testing.assert_allclose(found.parts[head], expected, rtol=1e-4, atol=1e-3)
        np.testing.assert_allclose(found.shares[head], expected / total, atol=1e-5)
        assert found.shares[head].sum() == pytest.approx(1)
    assert found.n_tokens == 38 and found.layer == 0


@pytest.mark.parametrize("name", planted.MODELS)
def test_models(name):
    """In every architecture, parts sum to the record's own scores and shares to 1."""
    capture = planted.captured(name)
    for record in capture.records[0]:
        offsets = layer_offsets(record)
        queries, keys = offset_and_content(record, offsets)
        by_hand = split_by_hand(record, (0,))
        for ours, expected in zip(
            (*queries, *keys), itertools.chain.from_iterable(by_hand), strict=True
        ):
            size = max(1.0, float(np.abs(expected).max()))
            np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-6 * size)
        found = layer_offset_shares(record, capture.prompts[0].token_ids, offsets)
        for head in range(record.n_heads):
            kv = record.kv_head(head)
            total = sum(
                record.scale * q[:, head] @ k[:, kv].T for q in queries for k in keys
            ).numpy()
            scores = record.scores(head).numpy()
            np.testing.assert_allclose(total, scores, atol=1e-5 * np.abs(scores).max())
            assert found.shares[head].sum() == pytest.approx(1)


def test_offset_alone_is_offset_alone():
    """Constant queries and keys: everything is offset·offset, in pairs that turn."""
    record = planted.planted_record([planted.Plant(60).curve(3, 5.0, 2.0)])
    found = layer_offset_shares(record, TOKENS[:60], layer_offsets(record))
    np.testing.assert_allclose(found.shares, [[1, 0, 0, 0]], atol=1e-5)
    assert PARTS == ("offset_offset", "offset_content", "content_offset", "content_content")


def test_what_keys_hold_is_offset_content():
    plants = [planted.content(65)]
    record = planted.planted_record(plants)
    found = layer_offset_shares(record, plants[0].tokens.tolist(), layer_offsets(record))
    np.testing.assert_allclose(found.shares, [[0, 1, 0, 0]], atol=1e-5)


def test_what_queries_hold_of_a_constant_key_is_content_offset():
    plant = planted.Plant(60).curve(3, 5.0)
    plant.z_q[:, 3] *= np.tile([1, -1], 30)
    plant.z_q[0] = 0
    plant.z_q[1] = 0  # as many of each sign
    record = planted.planted_record([plant])
    found = layer_offset_shares(record, TOKENS[:60], layer_offsets(record))
    np.testing.assert_allclose(found.shares, [[0, 0, 1, 0]], atol=1e-5)


def looped_consistency(scores, seen, tokens, rows):
    """Sums over (query, key, other key of the same token), and how many there are."""
    product = square = count = 0
    for m in rows:
        row = np.flatnonzero(seen[m])
        if not row.size:
            continue
        centred = {n: scores[m, n] - scores[m, row].mean() for n in row}
        for n, other in itertools.permutations(row, 2):
            if tokens[n] == tokens[other]:
                product += centred[n] * centred[other]
                square += centred[n] ** 2
                count += 1
    return product, square, count


@pytest.mark.parametrize("shape", ["plain", "grouped", "window"])
def test_token_consistency_equals_loops(shape):
    record = planted.random_record(40, **SHAPES[shape])
    tokens = [*TOKENS[:36], 77, 77, 78, 77 + 2]  # one of them twice
    found = layer_offset_shares(record, tokens, layer_offsets(record, (0, 5)), (0, 5))
    seen = planted.seen_by_hand(record)
    seen[[0, 5]] = False
    seen[:, [0, 5]] = False
    for head in range(record.n_heads):
        scores = planted.scores_by_hand(record, head)
        product, square, count = looped_consistency(scores, seen, tokens, range(40))
        assert found.n_repeats == count > 0
        assert found.same_token[head] == pytest.approx(product, rel=1e-3, abs=1e-2)
        assert found.same_token_square[head] == pytest.approx(square, rel=1e-4)
        if count >= MIN_REPEATS:
            expected = product / square
            assert found.token_consistency[head] == pytest.approx(expected, abs=1e-4)


def test_long_prompts_give_some_queries_to_the_consistency():
    n = CONSISTENCY_QUERIES + 44
    record = planted.random_record(n, n_heads=1, n_kv=1, window=20)
    tokens = [i % 9 for i in range(n)]
    found = layer_offset_shares(record, tokens, layer_offsets(record))
    rows = [int(i * n / CONSISTENCY_QUERIES) for i in range(CONSISTENCY_QUERIES)]
    seen = planted.seen_by_hand(record)
    seen[0] = seen[:, 0] = False
    product, square, count = looped_consistency(
        planted.scores_by_hand(record, 0), seen, tokens, rows
    )
    assert found.n_repeats == count
    assert found.token_consistency[0] == pytest.approx(product / square, abs=1e-4)


def test_consistency_of_known_heads():
    plants = [planted.content(96), planted.random_head(96, 3.0, 0), planted.Plant(96)]
    record = planted.planted_record(plants)
    tokens = plants[0].tokens.tolist()
    found = layer_offset_shares(record, tokens, layer_offsets(record))
    assert found.token_consistency[0] == pytest.approx(1, abs=1e-5)
    assert abs(found.token_consistency[1]) < 0.2
    # Zero queries: no variance to share out.
    assert np.isnan(found.token_consistency[2]) and np.isnan(found.shares[2]).all()


def test_too_little_has_no_numbers():
    few_tokens = planted.random_record(32)
    found = layer_offset_shares(few_tokens, TOKENS[:32], layer_offsets(few_tokens))
    assert found.n_tokens == 31 and np.isnan(found.shares).all()
    all_different = planted.random_record(60)
    found = layer_offset_shares(all_different, range(60), layer_offsets(all_different))
    assert found.n_repeats == 0 and np.isnan(found.token_consistency).all()
    assert found.shares.sum(axis=1) == pytest.approx(1)
    few = OffsetShares(0, 60, np.ones((1, 4)), np.ones(1), np.ones(1), MIN_REPEATS - 1)
    enough = OffsetShares(0, 60, np.ones((1, 4)), np.ones(1), np.ones(1), MIN_REPEATS)
    assert np.isnan(few.token_consistency[0]) and enough.token_consistency[0] == 1
    for n in (1, 2):
        record = planted.random_record(n)
        assert np.isnan(layer_offset_shares(record, [3] * n, layer_offsets(record)).shares).all()


def test_merge_adds_up_in_any_order():
    parts = []
    for n in (40, 50, 70):
        record = planted.random_record(n, seed=n)
        parts.append(layer_offset_shares(record, TOKENS[:n], layer_offsets(record)))
    merged = merge_offset_shares(parts)
    assert merged.n_tokens == 39 + 49 + 69
    assert merged.n_repeats == sum(part.n_repeats for part in parts)
    np.testing.assert_allclose(merged.parts, sum(part.parts for part in parts))
    np.testing.assert_allclose(merged.same_token, sum(part.same_token for part in parts))
    square = sum(part.same_token_square for part in parts)
    np.testing.assert_allclose(merged.same_token_square, square)
    for order in itertools.permutations(parts):
        again = merge_offset_shares(order)
        for name in ("parts", "same_token", "same_token_square"):
            np.testing.assert_array_equal(getattr(again, name), getattr(merged, name))


def test_a_prompt_of_one_token_adds_nothing():
    records = [planted.random_record(n) for n in (1, 60)]
    parts = [layer_offset_shares(r, TOKENS[: r.n_pos], layer_offsets(r)) for r in records]
    np.testing.assert_array_equal(merge_offset_shares(parts).shares, parts[1].shares)
    assert np.isnan(merge_offset_shares(parts[:1]).shares).all()


def test_short_prompts_do_not_pass_for_a_long_one():
    """Each is split by its own mean, which is no offset where there are few tokens."""
    records = [planted.random_record(9, seed=seed) for seed in range(12)]
    parts = [layer_offset_shares(r, TOKENS[:9], layer_offsets(r)) for r in records]
    assert np.isnan(merge_offset_shares(parts).shares).all()


def test_merge_refuses_what_does_not_belong_together():
    def part(**changes):
        record = planted.random_record(9, **changes)
        return layer_offset_shares(record, TOKENS[:9], layer_offsets(record))

    for others in ([], [part(), part(layer=1)], [part(), part(n_heads=4)]):
        with pytest.raises(InputError, match="only offset shares of one layer with the same"):
            merge_offset_shares(others)
