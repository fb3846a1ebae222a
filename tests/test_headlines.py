"""Headlines are few and short, and their numbers are those of the data, counted again here."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest
from planted import named_heads, planted_capture
from report_fixtures import random_capture, report_data, rope

from lens_rope.reporting.headlines import MOST, headlines
from lens_rope.reporting.page import render
from lens_rope.words import percent


@pytest.fixture(scope="module")
def planted():
    """A model with a head of each pattern, a sink among them."""
    return report_data(planted_capture(list(named_heads(96).values())), heads=((0, 0),))


def by_topic(data):
    return {headline.topic: headline for headline in headlines(data)}


def test_there_are_at_most_five_and_each_is_short(planted):
    found = headlines(planted)
    assert 3 <= len(found) <= MOST == 5
    assert len({headline.topic for headline in found}) == len(found)
    for headline in found:
        assert len(headline.topic) < 25
        assert len(headline.text) < 240
        assert headline.text.endswith(".")
        assert "nan" not in headline.text


def test_each_leads_to_a_section_of_the_page(planted):
    page = render(planted)
    for headline in headlines(planted):
        assert f'<section id="{headline.section}">' in page


def test_slow_pairs_hold_their_share_of_the_magnitude():
    data = report_data(random_capture((rope(0), rope(1, window=16)), n_pos=70), heads=())
    slow = [layer.cycles < 1 for layer in data.rope.layers]
    share = np.concatenate(slow).mean()
    magnitudes = {
        side: np.concatenate([np.asarray(getattr(entry, side)) for entry in data.usage])
        for side in ("query", "key")
    }
    held = {side: m[np.concatenate(slow)].sum() / m.sum() for side, m in magnitudes.items()}
    text = by_topic(data)["Slow pairs"].text
    assert re.findall(r"\d+(?:\.\d+)?%", text) == [
        percent(share), percent(held["query"]), percent(held["key"]),
    ]  # fmt: skip


def test_sinks_are_counted(planted):
    shares = np.concatenate([entry.sink_share for entry in planted.shares])
    above = int((shares > planted.threshold).sum())
    assert above
    assert by_topic(planted)["Sinks"].text.startswith(f"{above} of {len(shares)} heads give")


def test_patterns_are_counted(planted):
    names = [head.pattern for head in planted.heads]
    text = by_topic(planted)["Heads"].text
    counted = re.findall(r"(\d+) (sink|local|content|induction|previous token|uniform)", text)
    assert counted
    assert all(names.count(name) == int(n) for n, name in counted)
    assert f"{names.count('mixed')} of {len(names)} clear no threshold" in text


def test_short_prompts_say_so_and_the_rest_moves_up():
    data = report_data(random_capture((rope(0), rope(1)), n_pos=24), heads=((0, 0),))
    found = by_topic(data)
    assert "too short" in found["Sinks"].text
    assert "Heads" not in found
    assert "What stands out" in found


def test_a_model_without_rope_has_nothing_about_frequencies():
    data = report_data(random_capture((rope(0, rotary_dim=0),), n_pos=70), heads=())
    found = by_topic(data)
    assert "No RoPE" in found
    assert not {"Slow pairs", "Offset features", "Keys", "What stands out"} & set(found)


def test_full_cycles_only_are_counted():
    data = report_data(random_capture((rope(0, trained_context=10**6),), n_pos=70), heads=())
    assert "Each of the 8 rotary pairs" in by_topic(data)["Full cycles only"].text


def test_the_page_shows_the_headlines_first_and_every_finding_below(planted):
    hostile = dataclasses.replace(planted, findings=("One <b>: 1", "Two"))
    page = render(hostile)
    for headline in headlines(planted):
        link = f'<a class="topic" href="#{headline.section}">{headline.topic}</a>'
        assert page.count(link) == 1
    assert "All 2 findings in full" in page
    assert page.index(headlines(planted)[0].topic) < page.index("All 2 findings in full")
    assert "One &lt;b&gt;" in page
