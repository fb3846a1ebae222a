"""One head as maps: what is shipped to the page holds what the page needs to form every pair's
contribution, windows are never more than asked for, and what does not fit is refused or said."""

from __future__ import annotations

import base64
import dataclasses
import json
import math
import re
import tracemalloc

import numpy as np
import pytest
import torch
from allocations import Largest
from report_fixtures import HOSTILE, build_gallery, random_capture, rope

import lens_rope as lr
from lens_rope.decomposition import decompose
from lens_rope.errors import InputError
from lens_rope.records import LayerCapture
from lens_rope.reporting.gallery import Shortlist
from lens_rope.sinks import head_shares, sink_shares
from lens_rope.views.heads import MAX_WINDOW, head_maps
from lens_rope.views.libraries import script_json
from lens_rope.views.tokens import display_text

# Whole, partial with a gap in front, adjacent pairs, without RoPE, with a window.
ROPES = (
    rope(0),
    rope(1, rotary_dim=8, rotary_start=4),
    rope(2, pairing="adjacent"),
    rope(3, rotary_dim=0),
    rope(4, window=16),
)


@pytest.fixture(scope="module")
def qk():
    return random_capture(ROPES, n_pos=100)


def shipped(maps) -> dict:
    return json.loads(maps.to_json())


def floats(text: str, width: int) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), "<f4").reshape(-1, width)


@pytest.mark.parametrize("layer", range(len(ROPES)))
def test_what_is_shipped_gives_every_contribution_and_score(qk, layer):
    """The sum that the page forms, in a loop of its own, against the decomposition."""
    split = decompose(qk, layer, 3)
    data = shipped(head_maps(split, [], start=10, size=30))
    q, k = floats(data["q"], 16).astype(float), floats(data["k"], 16).astype(float)
    expected, rest = split.contributions(), split.pass_through()
    window = next(w for w in data["windows"] if w["start"] == 60)
    for m in range(0, window["size"], 7):
        for n in range(max(0, data["first_key"][window["at"] + m] - 60), m + 1, 3):
            i, j = window["at"] + m, window["at"] + n
            parts = [
                data["scale"] * (q[i, a] * k[j, a] + q[i, b] * k[j, b])
                for a, b in zip(data["first"], data["second"], strict=True)
            ]
            passed = data["scale"] * sum(q[i, c] * k[j, c] for c in data["rest"])
            np.testing.assert_allclose(parts, expected[:, 60 + m, 60 + n], atol=1e-5)
            assert passed == pytest.approx(rest[60 + m, 60 + n], abs=1e-5)
            assert sum(parts) + passed == pytest.approx(split.scores()[60 + m, 60 + n], abs=1e-4)


def test_attention_and_visibility_are_shipped_as_they_are(qk):
    split = decompose(qk, 4, 1)
    data = shipped(head_maps(split, start=64, size=32))
    for window in data["windows"]:
        a, n = window["start"], window["size"]
        pattern = np.frombuffer(base64.b64decode(window["pattern"]), "<u2").reshape(n, n) / 1e4
        np.testing.assert_allclose(pattern, split.pattern()[a : a + n, a : a + n], atol=5.1e-5)
        before = split.pattern()[a : a + n, :a].sum(axis=1)
        np.testing.assert_allclose(window["before"], before, atol=5.1e-5)
    first = [int(np.flatnonzero(row)[0]) for row in split.record.visible.numpy()]
    positions = head_maps(split, start=64, size=32).positions
    assert data["first_key"] == [first[p] for p in positions]
    received = sink_shares(split.record, 1)[positions]
    np.testing.assert_allclose(data["received"], received, atol=5.1e-5)


@pytest.mark.parametrize(
    ("start", "size", "windows"),
    [
        (0, 64, [(0, 64), (36, 100)]),
        (0, 50, [(0, 50), (50, 100)]),
        (30, 40, [(0, 40), (30, 70), (40, 80), (60, 100)]),
        (90, 64, [(0, 64), (36, 100), (90, 100)]),
        (0, 1, [(i, i + 1) for i in range(100)]),
    ],
)
def test_windows_cover_the_prompt(qk, start, size, windows):
    maps = head_maps(decompose(qk, 0, 0), start=start, size=size)
    assert [(w.start, w.stop) for w in maps.windows] == windows
    assert maps.window.start == start
    assert maps.skipped == 0
    covered = {p for w in maps.windows for p in range(w.start, w.stop)}
    assert maps.positions.tolist() == sorted(covered) == list(range(100))


def test_windows_are_cut_to_the_bytes_there_are_and_the_page_says_so(qk):
    split = decompose(qk, 0, 0)
    whole = head_maps(split, start=40, size=10)
    assert len(whole.windows) == 10
    assert whole.notes() == []
    small = head_maps(split, start=40, size=10, max_bytes=4 * 2400)
    assert [w.start for w in small.windows] == [0, 10, 40, 90]
    assert small.positions.tolist() == [*range(20), *range(40, 50), *range(90, 100)]
    assert small.skipped == 6
    assert small.notes()[0].startswith("Of 10 windows of this prompt 4 are here (0–9, 10–19, 40–49")
    np.testing.assert_allclose(small.split().scores(), whole.split().scores())
    limited = decompose(qk, 4, 0)
    gaps = head_maps(limited, start=40, size=10, max_bytes=4 * 2400)
    first = [int(np.flatnonzero(row)[0]) for row in limited.record.visible.numpy()]
    assert gaps.first_key.tolist() == [first[position] for position in small.positions]
    assert gaps.tokens == tuple(limited.prompt.tokens[position] for position in small.positions)
    least = head_maps(split, start=40, size=10, max_bytes=0)
    assert [w.start for w in least.windows] == [40]
    # Cut afterwards, a head is what it is when it is cut at once.
    for most in (0, 4 * 2400, 10**6):
        at_once = head_maps(limited, start=40, size=10, max_bytes=most)
        assert head_maps(limited, start=40, size=10).cut(most).to_json() == at_once.to_json()
    assert len(whole.to_json()) < 10 * 2400 + 5000


def test_a_gallery_of_many_long_wide_heads_stays_small():
    wide = tuple(rope(i, rotary_dim=256, d_head=256) for i in range(2))
    qk = random_capture(wide, n_pos=512)
    heads = [(layer, head) for layer in range(2) for head in range(4)]
    gallery, _ = build_gallery(qk, [head_shares(r) for r in qk.records[0]], heads)
    assert sum(len(head.maps.to_json()) for head in gallery) < 6e6
    for head in gallery:
        # The same pairs as in the bars beside them, which are over the whole prompt.
        best = np.argsort(-np.abs(head.by_pair.share), kind="stable")[:4]
        assert [group[0] for group in head.maps.groups] == best.tolist()
        assert [w.start for w in head.maps.windows] == [0, 64, 448]
        assert head.maps.skipped == 5


def dense_attention(record: LayerCapture, head: int) -> np.ndarray:
    """`[query, key]` Attention of one head from all scores at once, in float64."""
    q = record.q[:, head].double().numpy()
    k = record.k[:, head // (record.n_heads // record.n_kv_heads)].double().numpy()
    scores = record.scale * q @ k.T
    if record.softcap is not None:
        scores = record.softcap * np.tanh(scores / record.softcap)
    m, n = np.indices(scores.shape)
    weights = np.where((n <= m) & (m - n < (record.rope.window or np.inf)), np.exp(scores), 0)
    sink = 0 if record.sinks is None else np.exp(float(record.sinks[head]))
    return weights / (weights.sum(axis=1, keepdims=True) + sink)


@pytest.mark.parametrize("window", [None, 30, 200])
@pytest.mark.parametrize("head", [0, 3])
def test_windows_are_cut_from_the_attention_of_the_whole_prompt(window, head):
    """More queries than a block of them, a soft-cap, and a learned sink per head."""
    qk = random_capture((rope(0, window=window),), n_pos=300)
    changes = {"softcap": 3.0, "sinks": torch.tensor([-2.0, 0.0, 1.0, 3.0])}
    record = dataclasses.replace(qk.layer(0), **changes)
    split = dataclasses.replace(decompose(qk, 0, head), record=record)
    maps, dense = head_maps(split, []), dense_attention(record, head)
    for shown in maps.windows:
        rows = dense[shown.start : shown.stop]
        np.testing.assert_allclose(shown.pattern, rows[:, shown.start : shown.stop], atol=1e-6)
        np.testing.assert_allclose(shown.before, rows[:, : shown.start].sum(axis=1), atol=1e-6)
    received = dense.sum(axis=0) / (dense > 0).sum(axis=0)
    np.testing.assert_allclose(maps.received, received[maps.positions], atol=1e-6)
    assert maps.first_key.tolist() == (dense[maps.positions] > 0).argmax(axis=1).tolist()


def test_a_gallery_of_a_long_prompt_holds_no_pattern_of_it():
    n_pos = 3000
    qk = random_capture((rope(0), rope(1, window=700)), n_pos=n_pos)
    shortlist = Shortlist(qk.prompts[0], [(0, 1), (1, 2)])
    for record in qk.records[0]:
        shortlist.add(record, head_shares(record))
    tracemalloc.start()
    with Largest() as largest:
        shortlist.gallery()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert largest.numel < n_pos**2 / 8
    assert peak < n_pos**2  # bytes: a whole pattern has 4 or 8 times as many


def test_the_window_is_that_of_the_whole_decomposition(qk):
    for layer in (1, 3, 4):
        whole = decompose(qk, layer, 2)
        part = head_maps(whole, start=30, size=20).split()
        square = slice(30, 50), slice(30, 50)
        np.testing.assert_allclose(part.scores(), whole.scores()[square], atol=1e-5)
        np.testing.assert_allclose(part.pass_through(), whole.pass_through()[square], atol=1e-5)


def test_maps_add_up_to_the_score_and_the_table_holds_them(qk):
    for layer, pairs in ((0, [3, (0, 1)]), (1, [0]), (1, [(0, 1, 2, 3)]), (4, [(2, 5)])):
        shown = lr.show_head(qk, layer, 0, pairs=pairs, start=20, size=30)
        values = shown.values()
        names = list(values)[2:]
        assert names[-1] == "the rest"
        np.testing.assert_allclose(sum(values[n] for n in names), values["score"], atol=1e-4)
        table = shown.to_dataframe()
        np.testing.assert_allclose(table[names].sum(axis=1), table["score"], atol=1e-4)
        split = decompose(qk, layer, 0)
        row = table.iloc[len(table) // 2]
        m, n = row["query"], row["key"]
        assert row["score"] == pytest.approx(split.at(m, n).score, abs=1e-4)
        assert row["attention"] == pytest.approx(split.pattern()[m, n], rel=1e-6)
        assert (row["query_token"], row["key_token"]) == (
            split.prompt.tokens[m],
            split.prompt.tokens[n],
        )
        assert len(table) == split.record.visible[20:50, 20:50].sum()


def test_there_is_no_rest_when_all_pairs_are_shown(qk):
    assert "the rest" not in lr.show_head(qk, 0, 0, pairs=[range(8)]).values()
    assert "the rest" in lr.show_head(qk, 0, 0, pairs=[range(7)]).values()


def test_the_pairs_that_are_chosen_carry_most_of_the_variance_in_the_window(qk):
    shown = lr.show_head(qk, 0, 1, start=40, size=30)
    split = decompose(qk, 0, 1)
    score = split.scores()[40:70, 40:70]
    centred = score - np.nanmean(score, axis=1, keepdims=True)
    share = [
        np.nansum(centred * c[40:70, 40:70]) / np.nansum(centred * score)
        for c in split.contributions()
    ]
    order = np.argsort(-np.abs(share))[:4]
    assert [group[0] for group in shown.maps.groups] == order.tolist()
    np.testing.assert_allclose(shown.pairs_table()["share"], np.array(share)[order], rtol=1e-3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer": 9}, "layer 9 was not captured"),
        ({"head": 4}, "head 4 is out of range"),
        ({"prompt": 1}, "prompt 1 is out of range"),
        ({"start": 100}, "starts at 100; the prompt has 100 tokens"),
        ({"start": -1}, "starts at -1"),
        ({"size": 0}, "1 to 64 tokens, not 0"),
        ({"size": MAX_WINDOW + 1}, "1 to 64 tokens, not 65"),
        ({"pairs": [8]}, "pair 8 is out of range; there are 8"),
        ({"pairs": [-1]}, "pair -1 is out of range"),
        ({"pairs": [(1, 9)]}, "pair 9 is out of range"),
        ({"pairs": [()]}, "must name at least one pair"),
        ({"pairs": [(1, 1)]}, "each pair once"),
        ({"pairs": [1.5]}, "no index of a pair"),
        ({"pairs": [True]}, "no index of a pair"),
        ({"pairs": ["ab"]}, "no index of a pair"),
        ({"pairs": 3}, "give a list of pairs and bands"),
        ({"pairs": "3"}, "give a list of pairs and bands"),
        ({"pairs": [0] * 13}, "at most 12"),
        ({"layer": 3, "pairs": [0]}, "pair 0 is out of range; there are 0"),
    ],
)
def test_what_cannot_be_shown_is_refused(qk, change, message):
    arguments = {"layer": 0, "head": 0, **change}
    with pytest.raises(InputError, match=re.escape(message)):
        lr.show_head(qk, arguments.pop("layer"), arguments.pop("head"), **arguments)


def test_attention_that_is_not_a_number_is_refused(qk):
    record = dataclasses.replace(qk.layer(0), scale=float("nan"))
    split = dataclasses.replace(decompose(qk, 0, 0), record=record)
    with pytest.raises(InputError, match="NaN or infinity"):
        head_maps(split, [])


def test_soft_cap_window_and_learned_sink_are_said(qk):
    split = decompose(qk, 4, 2)
    record = dataclasses.replace(split.record, softcap=30.0, sinks=torch.zeros(4))
    text = " ".join(head_maps(dataclasses.replace(split, record=record)).notes())
    assert "before the soft-cap of 30" in text
    assert "learned sink" in text
    assert "the last 16 keys" in text


def test_text_and_page_say_which_head_and_bring_everything(qk):
    shown = lr.show_head(qk, 0, 3, pairs=[2, (4, 5, 6), (1, 7)], start=10, size=20)
    assert "layer 0 head 3 (key head 1)" in repr(shown)
    assert "tokens 10–29 of 100, pair 2, pairs 4–6, pairs 1, 7" in repr(shown)
    assert "over tokens 10–29 of 100" in shown._repr_html_()
    for page in (shown.html(), shown._repr_html_()):
        assert "layer 0 head 3 (key head 1)" in page
        assert not re.search(r"""(src|href)=["'](?!data:)""", page)
        assert not re.search(r"@import|url\(", page)
    assert (
        shown.html()
        == lr.show_head(qk, 0, 3, pairs=[2, (4, 5, 6), (1, 7)], start=10, size=20).html()
    )


def test_heads_without_pairs_and_prompts_of_one_token_show_themselves(qk):
    for shown in (
        lr.show_head(qk, 3, 0),
        lr.show_head(random_capture((rope(0),), n_pos=1), 0, 0),
        lr.show_head(random_capture((rope(0, rotary_dim=4),), n_pos=2), 0, 0),
    ):
        assert repr(shown)
        assert "lens-rope-head" in shown._repr_html_()
        assert len(shown.plot().data) == len(shown.values())
        assert shown.to_dataframe()["attention"].notna().all()


def test_the_figure_holds_the_maps(qk):
    shown = lr.show_head(qk, 4, 0, pairs=[(0, 1)], start=30, size=20)
    fig = shown.plot()
    for trace, (name, value) in zip(fig.data, shown.values().items(), strict=True):
        assert trace.name == name
        np.testing.assert_allclose(trace.z, value, rtol=1e-6)
        assert list(trace.x) == list(trace.y) == list(range(30, 50))
        assert trace.coloraxis == ("coloraxis2" if name == "attention" else "coloraxis")
    assert fig.layout.coloraxis.cmin == -fig.layout.coloraxis.cmax
    assert fig.layout.meta["scales"] == {"coloraxis": "diverging", "coloraxis2": "sequential"}


def test_hostile_tokens_are_text():
    qk = random_capture((rope(0),), tokens=HOSTILE)
    shown = lr.show_head(qk, 0, 0)
    text = shown.maps.to_json()
    assert not re.search("[<>&\u2028\u2029]", text)
    assert json.loads(text)["tokens"] == [display_text(token) for token in HOSTILE]
    assert [text.count("</script>") for text in (shown.html(), shown._repr_html_())] == [2, 1]
    for customdata in shown.plot().data[0].customdata:
        assert not any("<" in token for pair in customdata for token in pair)


def test_json_in_a_script_holds_numbers_only():
    with pytest.raises(ValueError, match="JSON"):
        script_json(math.nan)
