"""Every result is an output of a notebook: its sentences, the table that the terminal has too, and
figures. None fails, whatever the capture; nothing that a model or a prompt is called is markup."""

from __future__ import annotations

import dataclasses
import math
import re
import unicodedata

import pytest
import torch
from planted import named_heads, planted_capture
from public_results import RESULTS, Parsed, ablation, public_results
from report_fixtures import HOSTILE, random_capture, rope

import lens_rope as lr
from lens_rope.views import analysis_tables, notebook
from lens_rope.views.result_html import CLEAREST, NOTEBOOK_ROWS, result_html, table_html, text_html
from lens_rope.views.tables import Description, Table

CAPTURES = {
    "planted": lambda: planted_capture(list(named_heads(96).values())),
    "two prompts": lambda: planted_capture(
        list(named_heads(96).values()), list(named_heads(70).values())
    ),
    "one token": lambda: random_capture((rope(0), rope(1)), n_pos=1),
    "two tokens": lambda: random_capture((rope(0), rope(1)), n_pos=2),
    "short": lambda: random_capture((rope(0), rope(1)), n_pos=24),
    "every kind of layer": lambda: random_capture(
        (rope(0), rope(1, rotary_dim=8), rope(2, rotary_dim=0), rope(3, window=16)), n_pos=70
    ),
    "no RoPE": lambda: random_capture((rope(0, rotary_dim=0), rope(1, rotary_dim=0)), n_pos=70),
    "one pair": lambda: random_capture((rope(0, rotary_dim=2, d_head=2),), n_pos=70),
    "soft-cap and learned sinks": lambda: _changed(
        random_capture((rope(0), rope(1)), n_pos=70), softcap=5.0, sinks=torch.ones(4)
    ),
    "zero": lambda: _zero(random_capture((rope(0), rope(1)), n_pos=70)),
}


def _changed(qk, **values):
    """The same capture with other values in every record."""
    records = tuple(
        tuple(dataclasses.replace(record, **values) for record in layers) for layers in qk.records
    )
    return dataclasses.replace(qk, records=records)


def _zero(qk):
    """Nothing varies: no shares, no sinks, no advantage."""
    records = tuple(
        tuple(dataclasses.replace(record, q=0 * record.q, k=0 * record.k) for record in layers)
        for layers in qk.records
    )
    return dataclasses.replace(qk, records=records)


@pytest.fixture(scope="module")
def captures():
    return {name: make() for name, make in CAPTURES.items()}


@pytest.fixture(scope="module", autouse=True)
def small_libraries():
    """Outputs hold 2 MB of library each, which nothing here looks at."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(notebook, "packed", lambda library: f"the code of {library}")
        notebook._brought.cache_clear()
        yield
    notebook._brought.cache_clear()


@pytest.fixture(scope="module")
def qk(captures):
    return captures["planted"]


def test_every_public_result_is_covered():
    found = public_results()
    assert len(found) >= 17
    assert set(found) == set(RESULTS)
    for name, kind in found.items():
        assert callable(getattr(kind, "_repr_html_", None)), name
        assert callable(getattr(kind, "plot", None)), name


@pytest.mark.parametrize("name", RESULTS)
def test_an_output_has_a_sentence_and_a_figure(name, qk, capsys):
    result = RESULTS[name](qk)
    assert type(result).__name__ == name
    html = result._repr_html_()
    page = Parsed(html)
    assert len(page.text.split()) > 10
    assert page.scripts == 1
    # Whatever is drawn later says so where scripts do not run.
    assert "run the cell, or trust the notebook" in page.text
    # The same output can be on a page twice.
    assert "id" not in dict(page.attributes)
    assert capsys.readouterr().out == ""
    if name != "HeadDisplay":
        assert html.count('class="lr-plot"') >= 1
        assert len(result.plot().data)
        assert f"lensRopeOutput({html.split('data-lens-rope=')[1][:18]}" in html


@pytest.mark.parametrize("name", RESULTS)
def test_a_figure_by_itself_is_dark_on_white(name, qk):
    """Plotly's own renderer puts it on the ground of the page, whatever that is."""
    assert RESULTS[name](qk).plot().layout.paper_bgcolor == "#ffffff"


@pytest.mark.parametrize("name", RESULTS)
def test_the_same_result_is_the_same_output(name, qk):
    assert RESULTS[name](qk)._repr_html_() == RESULTS[name](qk)._repr_html_()


@pytest.mark.parametrize("kind", CAPTURES)
@pytest.mark.parametrize("name", RESULTS)
def test_no_legitimate_result_fails(name, kind, captures):
    html = RESULTS[name](captures[kind])._repr_html_()
    page = Parsed(html)
    assert "nan" not in re.findall(r"\w+", page.text.partition("Note:")[0])
    for table in page.tables:
        assert not {"nan", "inf", "None", "<NA>"} & {cell for row in table for cell in row}
        assert len({len(row) for row in table}) == 1
        assert len(table) > 1


@pytest.mark.parametrize("done", [
    ablation(loss_before=math.nan, loss_after=math.nan, loss_controls=(math.nan,)),
    dataclasses.replace(ablation(1), heads=(dataclasses.replace(
        ablation(1).heads[0], sink_before=math.nan, sink_after=math.nan, sink_control=math.nan,
        previous_before=math.nan, previous_after=math.nan, previous_control=math.nan,
    ),)),
    ablation(60),
], ids=["no loss", "one token", "many heads"])  # fmt: skip
def test_interventions_without_values_are_shown(done):
    assert "nan" not in Parsed(done._repr_html_()).text


# What it shows


TERMINAL = {
    "SinkExplanation": analysis_tables.sinks_table,
    "HeadExplanation": analysis_tables.heads_table,
    "OffsetFeatures": analysis_tables.features_table,
    "BoundsCheck": analysis_tables.bounds_table,
    "KeySpectrum": analysis_tables.spectrum_table,
    "AblationReport": analysis_tables.ablation_table,
}


@pytest.mark.parametrize("name", TERMINAL)
def test_notebook_and_terminal_say_the_same(name, qk):
    """Every cell of the notebook's table is on a line of the terminal's, row by row."""
    result = RESULTS[name](qk)
    text = TERMINAL[name](result)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    (headings, *rows), *_ = Parsed(result._repr_html_()).tables
    assert " ".join(" ".join(headings).split()) in lines
    assert rows
    for row in rows:
        assert " ".join(" ".join(row).split()) in lines
    assert lines[0].startswith(Parsed(result._repr_html_()).text[:40])


def test_long_tables_say_how_much_is_left_out(qk):
    d = lr.decompose(qk, 0, 2)
    n_distances = len(qk.prompts[0])
    page = Parsed(d.by_distance()._repr_html_())
    assert len(page.tables[0]) == 1 + NOTEBOOK_ROWS
    assert f"and {n_distances - NOTEBOOK_ROWS} more; to_dataframe() has all of them" in page.text
    assert "more" not in Parsed(d.by_pair()._repr_html_()).text


def test_a_profile_speaks_of_the_distances_in_its_figure(qk):
    """Extremes, and which pairs are named, are over distances that enough pairs have."""
    profile = lr.decompose(qk, 0, 2).by_distance()
    mean = profile.mean.copy()
    mean[-1, 5] = 1e6  # one query and key alone
    mean[:, 3] = 1e3  # large, and the same everywhere
    mean[10, 4] += 500
    page = Parsed(dataclasses.replace(profile, mean=mean)._repr_html_())
    last = len(profile.distance) - 8
    assert f"at distances 0 to {last}: " in page.text
    assert "at 10 tokens" in page.text
    assert "fewer than 8 query-key pairs" in page.text
    pairs = [name for name in page.tables[0][0] if name.startswith("pair ")]
    assert pairs[0] == "pair 4"
    assert "pair 3" not in pairs


def test_what_scores_were_compared_is_said(qk, captures):
    assert "soft-cap" not in Parsed(qk._repr_html_()).text
    capped = captures["soft-cap and learned sinks"]
    check = dataclasses.replace(qk.layer(0).check, route="hook_cos_pattern")
    for result, words in (
        (capped, "after the soft-cap of 5"),
        (_changed(qk, check=check), "up to a constant per query"),
    ):
        for shown in (result, lr.decompose(result, 0, 0)):
            assert words in Parsed(shown._repr_html_()).text


def test_many_heads_are_the_clearest_of_each_pattern():
    qk = planted_capture(2 * list(named_heads(96).values()))
    found = lr.explain_heads(qk)
    page = Parsed(found._repr_html_())
    shown = [row[1] for row in page.tables[0][1:]]
    assert sorted(shown) == sorted(found.counts())
    assert len(shown) == CLEAREST * len(found.counts())
    assert f"and {len(found.heads) - len(shown)} more" in page.text


def test_words_are_at_the_left_and_numbers_at_the_right():
    import pandas as pd

    frame = pd.DataFrame({"a": [1, 2], "b": ["some", "words"], "c": ["80%", "none"], "d": "∞"})
    columns = {name: (name, str) for name in frame}
    html = table_html(Table("title", frame, columns))
    assert html.count("lr-words") == 3
    assert html.count('<th scope="col" class="lr-words">b</th>') == 1


def test_an_empty_table_and_no_figures_are_an_output():
    import pandas as pd

    empty = Table("nothing", pd.DataFrame({"a": []}), {"a": ("a", str)})
    assert Parsed(result_html(Description(("A sentence",), empty), [])).tables == [[["a"]]]
    assert Parsed(result_html(Description(()), [])).tables == []


# Text of others


# Tokens can be half a character, too.
TOKENS = (*HOSTILE, "$x$ and $y$", "\ud800", "a\u202eb", "<img src=x onerror=alert(1)>")


def _renamed(qk, name):
    prompts = tuple(
        dataclasses.replace(
            prompt, name=name, tokens=tuple(TOKENS[i % len(TOKENS)] for i in range(len(prompt)))
        )
        for prompt in qk.prompts
    )
    return dataclasses.replace(qk, model=dataclasses.replace(qk.model, name=name), prompts=prompts)


@pytest.mark.parametrize("name", RESULTS)
def test_no_name_is_markup(name, qk):
    """The same tags as with harmless names, and no character that cannot be seen."""
    plain = Parsed(RESULTS[name](qk)._repr_html_())
    for text in ("</script><b>&amp;<!--", "\x00\u202e\n\u2028", "{{ 7 * 7 }}'\""):
        html = RESULTS[name](_renamed(qk, text))._repr_html_()
        page = Parsed(html)
        html.encode()
        assert page.tags == plain.tags
        seen = {unicodedata.category(char) for char in page.text.replace("\n", "")}
        assert not seen & {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}


def test_names_are_shown_as_they_are(qk):
    name = "</script><b>&amp;"
    assert name in Parsed(_renamed(qk, name)._repr_html_()).text
    assert text_html("a\x00b\u202e👩\u200d💻 ·") == "a\\x00b\\u202e👩\u200d💻 ·"


def test_dollar_signs_are_no_formulas(qk):
    """Jupyter typesets what lies between dollar signs, but not under these classes."""
    html = _renamed(qk, "$x$")._repr_html_()
    assert '<div class="lens-rope tex2jax_ignore mathjax_ignore"' in html
    assert "typesetMath: false" in html


def test_styles_stay_within_the_output(qk):
    for name in RESULTS:
        css = re.sub(r"/\*.*?\*/", "", Parsed(RESULTS[name](qk)._repr_html_()).css, flags=re.S)
        css = re.sub(r"@media[^{]*\{", "", css)
        selectors = [
            part.strip() for rule in re.findall(r"([^{}]+)\{", css) for part in rule.split(",")
        ]
        assert len(selectors) > 5
        assert [s for s in selectors if not s.startswith(".lens-rope")] == [], name


def test_a_report_says_where_the_rest_is(qk):
    page = Parsed(RESULTS["Report"](qk)._repr_html_())
    assert page.tags.count("li") == 5
    assert 'report.save("folder")' in page.text
