"""Key spectra: rotation adds to the variance of the keys exactly the energy that their mean loses.

Identity: `trace(post) - trace(pre) = |mean_pre|² - |mean_post|²` for every kind of rotation.
Oracle: keys unrotated in complex128 loops, or read before the model rotated them; singular values
of the centred matrix; closed forms of geometric sums for a planted offset.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import oracle
import pytest
import test_hooked
import torch
import zoo
from conftest import needs_hooked
from test_architectures import NAMES
from test_decompose import random_capture

from lens_rope.capturing import capture
from lens_rope.errors import InputError
from lens_rope.records import RotaryCapture
from lens_rope.spectrum import (
    KeySpectrum,
    LayerSpectrum,
    Spectrum,
    key_spectrum,
    layer_keys,
    layer_spectrum,
    merge_keys,
)

N = 40


def unrotated(k, pairs, inv_freq):
    """`[pos, kv_head, d_head]` Keys turned back pair by pair and position by position."""
    keys = np.asarray(k, dtype=np.float64)
    result = keys.copy()
    for m in range(len(keys)):
        for (a, b), w in zip(pairs, inv_freq, strict=True):
            z = (keys[m, :, a] + 1j * keys[m, :, b]) * np.exp(-1j * w * m)
            result[m, :, a], result[m, :, b] = z.real, z.imag
    return result


def squared_singular_values(keys):
    """`[component]` Eigenvalues of the covariance, descending, without forming it."""
    x = keys.reshape(len(keys), -1)
    values = np.linalg.svd(x - x.mean(axis=0), compute_uv=False) ** 2 / len(x)
    return np.concatenate([values, np.zeros(x.shape[1] - len(values))])


def agrees(spectrum: Spectrum, keys: np.ndarray, rtol: float = 1e-5) -> None:
    """A spectrum is that of these keys."""
    expected = squared_singular_values(keys)
    largest = expected[0]
    np.testing.assert_allclose(spectrum.eigenvalues, expected, rtol=0, atol=rtol * largest)
    assert spectrum.trace == pytest.approx(expected.sum(), rel=rtol)
    mean = keys.reshape(len(keys), -1).mean(axis=0)
    assert spectrum.mean_energy == pytest.approx((mean**2).sum(), rel=rtol, abs=1e-9)
    assert spectrum.n_tokens == len(keys)


def check_layer(entry: LayerSpectrum, before: np.ndarray, after: np.ndarray, rtol=1e-5) -> None:
    agrees(entry.pre, before, rtol)
    agrees(entry.post, after, rtol)
    assert len(entry.heads) == before.shape[1]
    for head, (pre, post) in enumerate(entry.heads):
        agrees(pre, before[:, head : head + 1], rtol)
        agrees(post, after[:, head : head + 1], rtol)
        check_identity(pre, post)
    check_identity(entry.pre, entry.post)
    assert entry.offset_energy == pytest.approx(
        entry.post.trace - entry.pre.trace, abs=1e-6 * (entry.post.trace + entry.pre.mean_energy)
    )
    assert entry.offset_share == pytest.approx(entry.offset_energy / entry.post.trace)


def check_identity(pre: Spectrum, post: Spectrum) -> None:
    energy = pre.trace + pre.mean_energy
    assert post.trace + post.mean_energy == pytest.approx(energy, rel=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_every_architecture_on_the_bridge(name):
    qk, expected = capture(zoo.bridge(name), zoo.tokens(N)), oracle.EXPECTED[name]
    spectrum = key_spectrum(qk)
    assert [entry.layer for entry in spectrum.layers] == list(qk.layer_indices)
    for entry in spectrum.layers:
        k = qk.layer(entry.layer).k.double().numpy()
        pairs, inv_freq = expected.pairs(entry.layer), expected.frequencies(entry.layer, N)
        check_layer(entry, unrotated(k, pairs, inv_freq), k)
        if entry.layer in expected.unrotated:
            assert entry.offset_energy == 0
            np.testing.assert_array_equal(entry.pre.eigenvalues, entry.post.eigenvalues)


@needs_hooked
@pytest.mark.parametrize("name", test_hooked.VARIANTS if zoo.HookedTransformer else ())
def test_every_rotation_of_hooked_transformer(name):
    """Before rotation is what the model's own hook showed before it rotated, times the factor."""
    spectrum, factor = (
        key_spectrum(test_hooked.captured(name, N)),
        test_hooked.VARIANTS[name].factor,
    )
    for entry in spectrum.layers:
        before = factor * test_hooked.before_rotation(name, N, entry.layer, "k")
        k = test_hooked.captured(name, N).layer(entry.layer).k.double().numpy()
        check_layer(entry, before, k)


def test_both_hosts(host_model):
    entry = key_spectrum(capture(host_model, zoo.tokens(N))).layer(1)
    check_identity(entry.pre, entry.post)
    assert entry.pre.trace != pytest.approx(entry.post.trace, rel=1e-3)


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"pairing": "adjacent"},
        {"rotary_dim": 12},
        {"rotary_dim": 0},
        {"start": 4},
        {"n_kv": 1},
        {"n_pos": 1},
        {"n_pos": 200, "n_kv": 4},
    ],
    ids=str,
)
@pytest.mark.parametrize("factor", [1.0, 1.4])
def test_hand_made_keys(shape, factor):
    record = with_factor(random_capture(**shape).layer(5), factor)
    rope = record.rope
    pairs = oracle.pair_components(rope.pairing, rope.rotary_dim, rope.rotary_start)
    keys = record.k.double().numpy()
    moments = layer_keys(record)
    before = unrotated(keys, pairs, rope.inv_freq)
    # The spectrum cannot tell a turn by one angle for all tokens; the sums can.
    for got, side in (
        (moments.sum_pre, before),
        (moments.sum_post, keys),
    ):
        np.testing.assert_allclose(got, side.reshape(len(keys), -1).sum(axis=0), atol=1e-9)
    entry = layer_spectrum(moments)
    if len(keys) > 1:
        check_layer(entry, before, keys, rtol=1e-9)
    else:
        assert entry.pre.trace == entry.post.trace == 0
        assert np.isnan(entry.offset_share) and np.isnan(entry.post.participation_ratio)


def with_factor(record, factor):
    return dataclasses.replace(
        record, rope=dataclasses.replace(record.rope, attention_factor=factor)
    )


def planted(n_pos=500, offset=3.0, w=0.02, factor=1.0):
    """One KV head of 6 components: a constant in pair 1, and what is not rotated at random.

    The random part is orthogonal to the rotating constant and its mean is zero, so that spectra
    are known in closed form. Pair 0 is empty.
    """
    qk = random_capture(n_pos=n_pos, rotary_dim=4, d_head=6, n_heads=1, n_kv=1)
    record = qk.layer(5)
    rope = dataclasses.replace(record.rope, inv_freq=np.array([1.0, w]), attention_factor=factor)
    angle = 0.4 + w * np.arange(n_pos)
    constant = np.stack([np.ones(n_pos), np.cos(angle), np.sin(angle)], axis=1)
    noise = np.random.default_rng(0).standard_normal((n_pos, 2))
    noise -= constant @ np.linalg.lstsq(constant, noise, rcond=None)[0]
    keys = np.zeros((n_pos, 1, 6))
    keys[:, 0, 1], keys[:, 0, 3] = factor * offset * np.cos(angle), factor * offset * np.sin(angle)
    keys[:, 0, 4:] = noise
    record = dataclasses.replace(record, rope=rope, k=torch.from_numpy(keys))
    return dataclasses.replace(qk, records=((record,),)), noise


@pytest.mark.parametrize("factor", [1.0, 1.3])
@pytest.mark.parametrize("w", [0.002, 0.02, 1.1])
def test_a_planted_offset_is_spread_over_two_directions(w, factor):
    """The mean of `e^{jwm}` over m < n is `(1 - e^{jwn}) / (1 - e^{jw}) / n`."""
    n_pos, offset = 500, 3.0
    qk, noise = planted(n_pos, offset, w, factor)
    entry = key_spectrum(qk).layer(5)
    energy = (factor * offset) ** 2

    def mean_phase(w):
        return (1 - np.exp(1j * w * n_pos)) / (1 - np.exp(1j * w)) / n_pos

    added = energy * (1 - abs(mean_phase(w)) ** 2)
    assert entry.pre.mean_energy == pytest.approx(energy)
    assert entry.offset_energy == pytest.approx(added)
    assert entry.post.trace - entry.pre.trace == pytest.approx(added)
    # A complex number's covariance has the eigenvalues (E|x|² ± |E x²|) / 2 around its mean.
    pseudo = energy * abs(mean_phase(2 * w) - mean_phase(w) ** 2)
    noises = squared_singular_values(noise)
    after = sorted([(added + pseudo) / 2, (added - pseudo) / 2, *noises, 0, 0], reverse=True)
    np.testing.assert_allclose(entry.pre.eigenvalues, [*noises, 0, 0, 0, 0], atol=1e-9)
    np.testing.assert_allclose(entry.post.eigenvalues, after, atol=1e-9)
    assert (entry.pre.rank(1 - 1e-6), entry.post.rank(1 - 1e-6)) == (2, 4)


# What is read off a spectrum


def test_numbers_of_a_known_spectrum():
    spectrum = Spectrum(np.array([4.0, 3.0, 2.0, 0.5, 0.4, 0.1]), 10.0, 0.0, 7)
    assert [spectrum.rank(share) for share in (0.4, 0.41, 0.7, 0.9, 1)] == [1, 2, 2, 3, 6]
    assert (spectrum.rank90, spectrum.rank95, spectrum.rank99) == (3, 4, 5)
    assert isinstance(spectrum.rank90, int)
    assert spectrum.participation_ratio == pytest.approx(100 / (16 + 9 + 4 + 0.25 + 0.16 + 0.01))
    assert spectrum.near_zero() == pytest.approx(2 / 6)
    assert spectrum.near_zero(2.5) == pytest.approx(4 / 6)
    assert spectrum.median == pytest.approx(1.25)
    for share in (0, -1, 1.01, np.nan):
        with pytest.raises(InputError, match="above 0 and at most 1"):
            spectrum.rank(share)


def test_keys_without_variance_have_no_rank():
    spectrum = Spectrum(np.zeros(3), 0.0, 4.0, 10)
    assert np.isnan(spectrum.rank90) and np.isnan(spectrum.participation_ratio)
    assert (spectrum.near_zero(), spectrum.median) == (1, 0)


def test_equal_eigenvalues_participate_equally():
    assert Spectrum(np.full(8, 0.3), 2.4, 0.0, 9).participation_ratio == pytest.approx(8)


@pytest.mark.parametrize(("n_pos", "layer_is_known", "head_is_known"),
                         [(12, False, False), (13, False, True), (24, False, True),
                          (25, True, True)])  # fmt: skip
def test_too_few_tokens_give_no_ranks(n_pos, layer_is_known, head_is_known):
    """Two heads of 12 components; n centred keys span n - 1 directions."""
    spectrum = key_spectrum(random_capture(n_pos=n_pos))
    entry = spectrum.layer(5)
    for side, known in (
        *((s, layer_is_known) for s in (entry.pre, entry.post)),
        *((s, head_is_known) for pair in entry.heads for s in pair),
    ):
        doubtful = (side.rank90, side.rank95, side.rank99, side.near_zero(), side.median)
        assert [np.isnan(value) for value in doubtful] == [not known] * 5
        assert side.trace > 0 and side.participation_ratio > 1
        assert (side.eigenvalues[-1] > 1e-6) == known
    assert np.isnan(spectrum.near_zero("pre")) == (not layer_is_known)
    assert np.isnan(spectrum.median("post")) == (not layer_is_known)
    assert len(spectrum.notes) == (not layer_is_known)
    if not layer_is_known:
        assert f"{n_pos} tokens for up to 24 components" in spectrum.notes[0]
        assert spectrum.notes[0] in repr(spectrum)
        assert "nan%" not in repr(spectrum)
    table = spectrum.to_dataframe().iloc[0]
    assert np.isnan(table["rank90_pre"]) == (not layer_is_known)


# Several prompts


def of_one_model(n_tokens):
    """Captures of one model whose prompts have these lengths."""
    return [random_capture(n_pos=n, seed=n) for n in n_tokens]


def test_merged_in_any_order_is_all_tokens_at_once():
    captures = of_one_model([5, 11, 30])
    records = [c.layer(5) for c in captures]
    after = np.concatenate([r.k.double().numpy() for r in records])
    pairs = oracle.pair_components("half", 8)
    before = np.concatenate([unrotated(r.k, pairs, r.rope.inv_freq) for r in records])
    for order in itertools.permutations(range(3)):
        merged = merge_keys(layer_keys(records[i]) for i in order)
        assert merged.n_tokens == 46
        check_layer(layer_spectrum(merged), before, after, rtol=1e-9)
        whole = key_spectrum(captures[i] for i in order)
        assert whole.n_tokens == 46
        np.testing.assert_allclose(
            whole.layer(5).post.eigenvalues, squared_singular_values(after), atol=1e-9
        )
    nested = merge_keys([merge_keys(map(layer_keys, records[:2])), layer_keys(records[2])])
    np.testing.assert_allclose(nested.gram_pre, merged.gram_pre, rtol=1e-12)


def test_prompts_of_one_capture_count_as_captures_do():
    a, b = of_one_model([30, 40])
    both = dataclasses.replace(a, prompts=a.prompts + b.prompts, records=a.records + b.records)
    expected, got = key_spectrum([a, b]), key_spectrum(both)
    assert got.n_tokens == expected.n_tokens == 70
    np.testing.assert_array_equal(got.eigenvalues("pre"), expected.eigenvalues("pre"))


def test_captures_are_taken_one_by_one():
    alive = []

    def stream():
        for qk in of_one_model([30, 31, 32]):
            alive.append(qk)
            yield qk
            assert alive.pop() is qk

    assert key_spectrum(stream()).n_tokens == 93
    assert not alive


def test_what_does_not_belong_together_is_refused():
    moments = layer_keys(random_capture().layer(5))
    for other in (
        layer_keys(random_capture(n_kv=1).layer(5)),
        layer_keys(random_capture(d_head=10).layer(5)),
        layer_keys(random_capture(n_kv=4, d_head=6, rotary_dim=4).layer(5)),
        dataclasses.replace(moments, layer=4),
    ):
        with pytest.raises(InputError, match="only keys of one layer"):
            merge_keys([moments, other])
    with pytest.raises(InputError, match="only keys of one layer"):
        merge_keys([])
    a = random_capture()
    renamed = dataclasses.replace(a, model=dataclasses.replace(a.model, name="other"))
    for other in (renamed, random_capture(n_kv=1)):
        with pytest.raises(InputError, match="captures are of different models"):
            key_spectrum([a, other])
    with pytest.raises(InputError, match="different layers, 5 and 3-4"):
        key_spectrum([a, layered((3, 4))])


def test_bad_arguments():
    with pytest.raises(InputError, match="nothing to analyse"):
        key_spectrum([])
    with pytest.raises(InputError, match="nothing to analyse"):
        key_spectrum(random_capture(), layers=[])
    with pytest.raises(InputError, match="layer 6 was not captured"):
        key_spectrum(random_capture(), layers=[5, 6])
    with pytest.raises(InputError, match="captures holds a str"):
        key_spectrum(["text"])  # pyright: ignore[reportArgumentType]
    spectrum = key_spectrum(random_capture())
    with pytest.raises(InputError, match="choose among layers 5"):
        spectrum.layer(0)
    with pytest.raises(InputError, match="must be 'pre' or 'post'"):
        spectrum.eigenvalues("both")  # pyright: ignore[reportArgumentType]
    with pytest.raises(InputError, match="no layer is given"):
        spectrum.eigenvalues("pre", [])


# The whole result


def layered(layers, n_pos=60, **shape) -> RotaryCapture:
    """Random keys of several layers, larger from layer to layer."""
    one = random_capture(n_pos=n_pos, **shape)
    records = []
    for layer in layers:
        record = random_capture(n_pos=n_pos, seed=layer, **shape).layer(5)
        records.append(
            dataclasses.replace(
                record, rope=dataclasses.replace(record.rope, layer=layer), k=record.k * (layer / 9)
            )
        )
    return dataclasses.replace(one, layer_indices=tuple(layers), records=(tuple(records),))


@pytest.fixture(scope="module")
def spectrum() -> KeySpectrum:
    return key_spectrum(layered((1, 2, 4)))


def test_layers_are_pooled(spectrum):
    for side in ("pre", "post"):
        parts = [getattr(spectrum.layer(layer), side).eigenvalues for layer in (1, 2, 4)]
        np.testing.assert_array_equal(spectrum.eigenvalues(side), np.concatenate(parts))
        some = spectrum.eigenvalues(side, [4, 1, 4])
        np.testing.assert_array_equal(some, np.concatenate([parts[0], parts[2]]))
        pooled = np.concatenate(parts)
        assert 0 < spectrum.near_zero(side) < 1
        assert spectrum.near_zero(side) == np.mean(pooled < 0.5)
        assert spectrum.near_zero(side, 0.1) == np.mean(pooled < 0.1)
        assert spectrum.near_zero(side, layers=[1]) == np.mean(parts[0] < 0.5)
        assert spectrum.median(side) == np.median(pooled)
        assert spectrum.median(side, layers=[4]) == np.median(parts[2])


def test_only_the_layers_asked_for(spectrum):
    some = key_spectrum(layered((1, 2, 4)), layers=[4, 1])
    assert [entry.layer for entry in some.layers] == [1, 4]
    np.testing.assert_array_equal(some.eigenvalues("post"), spectrum.eigenvalues("post", [1, 4]))
    assert [entry.layer for entry in key_spectrum(layered((4, 1, 2))).layers] == [1, 2, 4]
    mixed = key_spectrum([layered((1, 2, 4)), layered((2, 4))], layers=[4])
    assert mixed.n_tokens == 120


def test_tables_hold_the_numbers(spectrum):
    table, heads = spectrum.to_dataframe(), spectrum.heads_dataframe()
    assert table["layer"].tolist() == [1, 2, 4]
    assert heads[["layer", "kv_head"]].to_numpy().tolist() == [
        [layer, head] for layer in (1, 2, 4) for head in (0, 1)
    ]
    cases = [(row, spectrum.layer(row.layer).pre, spectrum.layer(row.layer).post)
             for row in table.itertuples()]  # fmt: skip
    cases += [(row, *spectrum.layer(row.layer).heads[row.kv_head]) for row in heads.itertuples()]
    for row, pre, post in cases:
        for end, side in (("pre", pre), ("post", post)):
            for name in ("rank90", "rank95", "rank99", "participation_ratio", "trace", "median"):
                assert getattr(row, f"{name}_{end}") == getattr(side, name)
            assert getattr(row, f"near_zero_{end}") == side.near_zero()
        assert row.offset_energy == pytest.approx(post.trace - pre.trace)
        assert row.offset_share == pytest.approx(row.offset_energy / post.trace)
    assert table["rank90_pre"].dtype.kind == "i"


def test_text_says_what_rotation_did(spectrum):
    text = repr(spectrum)
    pre, post = spectrum.near_zero("pre"), spectrum.near_zero("post")
    assert text.startswith(
        f"Key spectrum of random, 60 tokens, layers 1-2, 4: {pre:.0%} of the eigenvalues lie below "
        f"0.5 before rotation and {post:.0%} after it; their median is "
        f"{spectrum.median('pre'):.3g} before and {spectrum.median('post'):.3g} after"
    )
    assert len(text.splitlines()) == 5
    assert "note" not in text


def test_notes_name_layers_without_rope_and_mixed_rotations():
    flat = key_spectrum(layered((1, 2), rotary_dim=0))
    assert flat.notes == ("Layers 1-2 have no RoPE: before and after are the same.",)
    np.testing.assert_array_equal(flat.eigenvalues("pre"), flat.eigenvalues("post"))
    a = random_capture(n_pos=60)
    record = a.layer(5)
    slower = dataclasses.replace(
        record, rope=dataclasses.replace(record.rope, inv_freq=record.rope.inv_freq / 2)
    )
    mixed = key_spectrum([a, dataclasses.replace(a, records=((slower,),))])
    assert len(mixed.notes) == 1 and "Layers 5 rotate some prompts" in mixed.notes[0]
    check_identity(mixed.layer(5).pre, mixed.layer(5).post)
    assert key_spectrum([a, a]).notes == ()
