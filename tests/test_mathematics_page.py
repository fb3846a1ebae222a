"""The pages with the mathematics say what the code does.

Every displayed formula of `docs/mathematics.md` stands in `FORMULAS`, word for word, beside the
test that evaluates it in plain loops; a formula that is changed, added or taken away fails here,
and so does a test that is not there. Those that no other file proves are proved below, in
complex128 and from values before rotation that the package never sees. Thresholds are compared
with the package, and links to the pages' anchors with the anchors.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import planted
import pytest

from docs_build.mathematics import mathml
from lens_rope import ablation, models, verify
from lens_rope.advantage import advantage
from lens_rope.decomposition import decompose
from lens_rope.offset_shares import offset_and_content
from lens_rope.offsets import layer_offsets
from lens_rope.rotation import to_pairs, unrotate
from lens_rope.spectrum import layer_keys, layer_spectrum
from lens_rope.targets import previous_target
from lens_rope.views import heads

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
NAMES = ("mathematics", "glossary", "faq")
PAGES = {name: (DOCS / f"{name}.md").read_text(encoding="utf-8") for name in NAMES}
SOURCES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(DOCS.rglob("*.md")),
    *sorted((ROOT / "tutorials").glob("*.py")),
]

FORMULAS = (
    (
        r"z_i = x[a_i] + \mathrm{j}\, x[b_i]",
        "test_decompose::test_contributions_equal_loops",
    ),
    (
        r"(a_i, b_i) = \begin{cases} (i,\ i + r/2) & \text{half} \\ (2i,\ 2i + 1) & "
        r"\text{adjacent} \end{cases}",
        "test_decompose::test_contributions_equal_loops",
    ),
    (
        r"z^{R}[m] = g\, z[m]\, \mathrm{e}^{\mathrm{j} w m}",
        "test_mathematics_page::test_rotation_and_relative_position",
    ),
    (
        r"z^{R}_{q}[m]\, z^{R}_{k}[n]^{*} = g^2\, z_q[m]\, z_k[n]^{*}\, "
        r"\mathrm{e}^{\mathrm{j} w (m - n)}",
        "test_mathematics_page::test_rotation_and_relative_position",
    ),
    (
        r"c_i[m,n] = s \operatorname{Re}\left(z^{R}_{q,i}[m]\, z^{R}_{k,i}[n]^{*}\right)",
        "test_mathematics_page::test_rotation_and_relative_position",
    ),
    (
        r"p[m,n] = s \sum_{c \ \text{not rotated}} x_q[m,c]\, x_k[n,c]",
        "test_decompose::test_contributions_equal_loops",
    ),
    (
        r"S[m,n] = \sum_i c_i[m,n] + p[m,n]",
        "test_decompose::test_conservation_whatever_the_shape",
    ),
    (
        r"S^{\kappa}[m,n] = \kappa\, \tanh\left(S[m,n] / \kappa\right)",
        "test_attention::test_equals_loops",
    ),
    (
        r"P[m,n] = \frac{\mathrm{e}^{S^{\kappa}[m,n]}}{\mathrm{e}^{\beta} + \sum_{l \in V(m)} "
        r"\mathrm{e}^{S^{\kappa}[m,l]}}",
        "test_attention::test_equals_loops",
    ),
    (
        r"\text{share}_i = \frac{\sum c_i[m,n] \left(S[m,n] - \bar S[m]\right)}{\sum "
        r"\left(S[m,n] - \bar S[m]\right)^2}",
        "test_decompose::test_by_pair_equals_its_definition",
    ),
    (
        r"S(\Delta) = \sum_i s\, g^2 \operatorname{Re}\left(z_{q,i}\, z_{k,i}^{*}\, "
        r"\mathrm{e}^{\mathrm{j} w_i \Delta}\right) + p",
        "test_distance::test_curve_equals_loops",
    ),
    (
        r"z[m] = z^{R}[m]\, \mathrm{e}^{-\mathrm{j} w m} / g",
        "test_offsets::test_statistics_equal_loops",
    ),
    (
        r"\bar z = \frac{1}{N} \sum_{m \in K} z[m]",
        "test_offsets::test_statistics_equal_loops",
    ),
    (
        r"c[m,n] = s\, g^2 \operatorname{Re}\left(\left(\bar z_q + u[m]\right) \left(\bar z_k "
        r"+ v[n]\right)^{*}\, \mathrm{e}^{\mathrm{j} w \Delta}\right)",
        "test_mathematics_page::test_four_parts",
    ),
    (
        r"c_{\text{offset·offset}}(\Delta) = A\, \cos(\varphi + w \Delta)",
        "test_mathematics_page::test_four_parts",
    ),
    (
        r"A = s\, g^2\, \left|\bar z_q\right|\, \left|\bar z_k\right|",
        "test_offsets::test_statistics_equal_loops",
    ),
    (
        r"\varphi = \operatorname{arg}\left(\bar z_q\, \bar z_k^{*}\right) \in (-\pi, \pi]",
        "test_offsets::test_statistics_equal_loops",
    ),
    (
        r"\text{constancy}_i = \frac{\left|\bar z_i\right|}{\mu_i}",
        "test_offsets::test_statistics_equal_loops",
    ),
    (
        r"\text{relative}_i = \frac{\mu_i}{\operatorname{median}_j \mu_j}",
        "test_offsets::test_statistics_equal_loops",
    ),
    (
        r"\frac{\pi}{2} \le \varphi \quad \text{and} \quad \varphi + wL \le \frac{3\pi}{2}",
        "test_bounds::test_region_is_where_the_curve_is_nowhere_positive",
    ),
    (
        r"\underset{\varphi}{\operatorname{min}}\ \underset{0 \le \Delta \le "
        r"L}{\operatorname{max}}\ \cos(\varphi + w \Delta) = \begin{cases} -\cos(wL/2) & wL "
        r"\le 2\pi \\ 1 & wL > 2\pi \end{cases}",
        "test_mathematics_page::test_lowest_possible_highest_point_of_a_curve",
    ),
    (
        r"\frac{\mathrm{d}}{\mathrm{d}\Delta} A\, \cos(\varphi + w \Delta) = -A\, w\, \sin\, "
        r"\varphi",
        "test_mathematics_page::test_slope_at_distance_zero",
    ),
    (
        r"\text{advantage}_i = \operatorname{mean}_m \sum_{n \in V(m)} \left(T[m,n] - "
        r"U[m,n]\right) c_i[m,n]",
        "test_advantage::test_every_pair_equals_loops",
    ),
    (
        r"\text{lift}_i = \operatorname{mean}_m \sum_n T[m,n]\, c_i[m,n]",
        "test_advantage::test_every_pair_equals_loops",
    ),
    (
        r"\text{push}_i = -\operatorname{mean}_m \sum_n U[m,n]\, c_i[m,n]",
        "test_advantage::test_every_pair_equals_loops",
    ),
    (
        r"\text{share}_{\pi} = \frac{\sum S_{\pi}[m,n] \left(S[m,n] - \bar S[m]\right)}{\sum "
        r"\left(S[m,n] - \bar S[m]\right)^2}",
        "test_offset_shares::test_shares_equal_loops",
    ),
    (
        r"\text{consistency} = \frac{\sum D[m,n]\, D[m,l]}{\sum D[m,n]^2}",
        "test_offset_shares::test_token_consistency_equals_loops",
    ),
    (
        r"\text{sink share}[n] = \frac{1}{\left|\{m : n \in V(m)\}\right|} \sum_{m\,:\,n \in "
        r"V(m)} P[m,n]",
        "test_usage_and_sinks::test_sink_shares_equal_loops",
    ),
    (
        r"\frac{1}{T} \sum_{m=1}^{T} \frac{1}{m}",
        "test_mathematics_page::test_uniform_attention_to_the_first_token",
    ),
    (
        r"S_{-i}[m,n] = S[m,n] - c_i[m,n]",
        "test_removal::test_equals_loops",
    ),
    (
        r"\frac{1}{N} \sum_h M_h\, v_h",
        "test_removal::test_the_error_equals_loops",
    ),
    (
        r"\frac{1}{N} \sqrt{\sum_h M_h (M_h - 1) \frac{1}{2 \left|B_h\right|} \sum_{b \in "
        r"B_h} (v_h - b)^2}",
        "test_removal::test_the_error_equals_loops",
    ),
    (
        r"\frac{-\sum_{n \in V(m)} P[m,n]\, \log P[m,n]}{\log \left|V(m)\right|}",
        "test_attention::test_equals_loops",
    ),
    (
        r"\operatorname{tr}_{\text{post}} - \operatorname{tr}_{\text{pre}} = \left|\bar "
        r"k_{\text{pre}}\right|^2 - \left|\bar k_{\text{post}}\right|^2",
        "test_spectrum::test_hand_made_keys",
    ),
    (
        r"D = \frac{1}{T} \sum_{m=0}^{T-1} \mathrm{e}^{\mathrm{j} w m}, \qquad \left|D\right| "
        r"= \left|\frac{\sin(w T / 2)}{T\, \sin(w / 2)}\right|",
        "test_mathematics_page::test_mean_of_a_constant_pair_after_rotation",
    ),
    (
        r"\frac{\left(\sum_j \lambda_j\right)^2}{\sum_j \lambda_j^2}",
        "test_spectrum::test_numbers_of_a_known_spectrum",
    ),
    (
        r"\bar c_i(\Delta) = \frac{s}{T - \Delta} \operatorname{Re} \sum_{m=\Delta}^{T-1} "
        r"z^{R}_{q,i}[m]\, z^{R}_{k,i}[m - \Delta]^{*}",
        "test_decompose::test_by_distance_equals_its_definition",
    ),
    (
        r"\sum_m x[m]\, y[m - \Delta]^{*} = F^{-1}\left(F(x)\, F(y)^{*}\right)[\Delta]",
        "test_mathematics_page::test_cross_correlation_by_fft",
    ),
    (
        r"\frac{\sum_{i\,:\,w_i L \ge 2\pi} \mu_i}{\sum_i \mu_i}",
        "test_metrics::test_full_cycle_shares_equal_loops",
    ),
    (
        r"\frac{1}{N - 1} \sum_{\Delta = 0}^{N - 2} \frac{\left|S(\Delta + 1) - "
        r"S(\Delta)\right|}{\sqrt{\sum_i \left|a_i\right|^2}}",
        "test_metrics::test_shift_metrics_equal_loops",
    ),
    (
        r"\Phi\left(-\operatorname{sign}\left(G(0)\right) a / \sigma\right)",
        "test_metrics::test_shift_metrics_equal_loops",
    ),
)


# Fences, code in a line, and the options of what mkdocstrings fills in.
CODE = re.compile(r"^```.*?^```|`+[^`]*`+|^::: \S+\n(?:    .*\n)*", re.S | re.M)
# What is displayed stands between two dollar signs each, what is inline on one line.
DISPLAYED = re.compile(r"\$\$(.+?)\$\$", re.S)
INLINE = re.compile(r"(?<![\\$\w])\$([^\s$](?:[^$\n]*?[^\s$\\])?)\$(?![\w$])")


def prose(path: Path) -> str:
    """The Markdown of a page, or of the Markdown cells of a tutorial, without code."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        cells = re.split(r"^# %%(.*)$", text, flags=re.M)[1:]
        kinds = zip(cells[::2], cells[1::2], strict=True)
        text = "\n\n".join(
            re.sub(r"^# ?", "", cell, flags=re.M) for kind, cell in kinds if "[markdown]" in kind
        )
    return CODE.sub("", text)


def formulas(path: Path) -> list[tuple[str, bool]]:
    """Each formula of a page, and whether it is displayed."""
    text = prose(path)
    inline = INLINE.findall(DISPLAYED.sub("", text))
    return [(latex, True) for latex in DISPLAYED.findall(text)] + [(x, False) for x in inline]


def spaced(latex: str) -> str:
    return " ".join(latex.split())


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_formulas_are_rendered(path):
    """With no command that the converter does not know, and as well-formed MathML."""
    for latex, display in formulas(path):
        element = ElementTree.fromstring(mathml(latex, display))
        assert "\\" not in "".join(element.itertext()), latex
    # What is left has no dollar sign that opens a formula by mistake.
    rest = INLINE.sub("", DISPLAYED.sub("", prose(path)))
    assert "$" not in rest.replace("\\$", ""), re.findall(r".{0,40}\$.{0,40}", rest)


def test_what_the_converter_does_not_know_is_refused():
    for wrong in (r"\unknowncommand x", r"\begin{aligned} a &= b \end{aligned}"):
        with pytest.raises((ValueError, ElementTree.ParseError)):
            ElementTree.fromstring(mathml(wrong, True))


def test_tables_are_not_broken_by_bars():
    for name, text in PAGES.items():
        for line in text.splitlines():
            if line.startswith("|"):
                bars = [latex for latex in INLINE.findall(line) if "|" in latex]
                assert not bars, f"{name}: {bars}"


def test_every_displayed_formula_has_its_proof():
    printed = [spaced(latex) for latex in DISPLAYED.findall(PAGES["mathematics"])]
    assert printed == [latex for latex, _ in FORMULAS]


@pytest.mark.parametrize("where", sorted({proof for _, proof in FORMULAS}))
def test_proofs_exist(where):
    module, name = where.split("::")
    tree = ast.parse((ROOT / "tests" / f"{module}.py").read_text(encoding="utf-8"))
    assert name in [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]


# Thresholds

ROW = re.compile(r"^\| `([\w.]+)([\[(]\w+[\])])?` \| ([\d.e-]+) \|", re.M)
NAMED = re.compile(r"`(\w+)\.([A-Z_]+) = ([\d.]+)`")


def constant(path: str, inside: str) -> float:
    """A constant of the package, an entry of it, or the default of an argument."""
    module, name = path.rsplit(".", 1)
    value = getattr(importlib.import_module(f"lens_rope.{module}"), name)
    if inside.startswith("("):
        return inspect.signature(value).parameters[inside[1:-1]].default
    if inside:
        return {str(key).removeprefix("torch."): v for key, v in value.items()}[inside[1:-1]]
    return value


def thresholds() -> dict[str, tuple[float, float]]:
    """By name, the value in the table and that of the package."""
    rows = ROW.findall(PAGES["mathematics"].split("## Thresholds")[1])
    return {path + inside: (float(value), constant(path, inside)) for path, inside, value in rows}


def test_thresholds_are_those_of_the_package():
    found = thresholds()
    assert {name: printed for name, (printed, _) in found.items()} == {
        name: actual for name, (_, actual) in found.items()
    }
    assert found["verify.TOLERANCE[bfloat16]"][0] == 0.02 and len(found) >= 27
    assert found["bounds.check_bounds(strong)"][0] == 5


def test_no_threshold_is_missing():
    """Every public number in capitals of the modules that analyse is in the table."""
    listed = {name.split("[")[0] for name in thresholds()}
    for module in (
        "offsets", "bounds", "sinks", "sink_heads", "patterns", "targets", "heads",
        "offset_shares", "spectrum", "metrics", "distance", "fit",
    ):  # fmt: skip
        tree = ast.parse((ROOT / "lens_rope" / f"{module}.py").read_text(encoding="utf-8"))
        names = {
            target.id
            for node in tree.body if isinstance(node, ast.Assign)
            for target in node.targets if isinstance(target, ast.Name)
        }  # fmt: skip
        for name in names:
            value = getattr(importlib.import_module(f"lens_rope.{module}"), name)
            if name.isupper() and not name.startswith("_") and isinstance(value, (int, float)):
                assert f"{module}.{name}" in listed


@pytest.mark.parametrize("name", NAMES)
def test_numbers_named_in_the_text_are_those_of_the_package(name):
    found = NAMED.findall(PAGES[name])
    assert found or name != "mathematics"
    for module, constant_name, value in found:
        assert float(value) == constant(f"{module}.{constant_name}", ""), constant_name


def test_numbers_that_follow_from_constants():
    """What the prose says without naming a constant."""
    text = {name: " ".join(page.split()) for name, page in PAGES.items()}
    value = {name: actual for name, (_, actual) in thresholds().items()}
    reach = value["targets.LOCAL_REACH"]
    assert f"the query and the {reach - 1} keys before it" in text["mathematics"]
    assert (
        f"those that see at least {2 * reach}; none in a layer with a window below {2 * reach}"
        in text["mathematics"]
    )
    assert f"below {value['bounds.SMALLEST_P']:g}" in text["mathematics"]
    assert (
        f"A forward pass of up to {ablation._PROBE_TOKENS} tokens".lower()
        in text["mathematics"].lower()
    )
    assert f"Prompts of fewer than {value['sinks.MIN_TOKENS']} tokens" in text["mathematics"]
    assert (
        f"when $A$ is above {value['bounds.check_bounds(strong)']:g} score" in text["mathematics"]
    )
    assert f"whose share is below {value['sink_heads.COLLAPSED']:g}" in text["glossary"]
    assert f"at least {value['sinks.MIN_TOKENS']} tokens for sinks".lower() in text["faq"].lower()
    assert f"at most {value['sink_heads.CONTROL_QUERIES']} queries" in text["faq"]
    assert f"from {value['bounds.PERMUTATIONS']:,} permutations" in text["faq"]
    assert f"at most {value['metrics.MAX_CELLS']} samples" in text["faq"]
    assert f"at least {value['offsets.MIN_OFFSET_TOKENS']} analysed tokens" in text["faq"]
    assert f"threshold of {value['sinks.SINK_THRESHOLD']:g}" in text["faq"]
    assert f"transformers on {models._PROBE_TOKENS} tokens" in text["mathematics"]
    for phrase in (
        f"constancy at least {value['offsets.CONSTANCY']:g}, relative magnitude at least "
        f"{value['offsets.RELATIVE']:g} (",
        f"above an amplitude of {value['bounds.check_bounds(strong)']:g} score units",
        f"[sink share](#sink-share) above {value['sinks.SINK_THRESHOLD']:g}",
        f"below {value['spectrum.NEAR_ZERO']:g} activation units squared",
        f"normalised entropy of at least {value['patterns.UNIFORM_THRESHOLD']:g}",
        f"(#token-consistency) is at least {value['patterns.CONTENT_THRESHOLD']:g}",
        f"the smallest it can be is {value['bounds.SMALLEST_P']:g}",
        f"the {reach - 1} keys before it",
        f"the {heads.MAX_WINDOW} tokens that a map",
    ):
        assert phrase in text["glossary"], phrase
    by_dtype = {str(dtype).removeprefix("torch."): t for dtype, t in verify.TOLERANCE.items()}
    assert by_dtype["float32"] == 1e-5 and "error of 1e-5; in bfloat16" in text["faq"]
    assert by_dtype["bfloat16"] == 2e-2 and "2e-2 is accepted" in text["faq"]
    assert r"$10^{-5}$ where the model computes in float32" in text["mathematics"]


def test_memory_of_a_capture():
    """As the questions and answers say: (heads + KV heads) × d_head float32 per layer and token."""
    record = planted.random_record(10, n_heads=9, n_kv=3)
    assert record.q.nbytes + record.k.nbytes == 10 * (9 + 3) * record.rope.d_head * 4
    assert "92 kB a token" in PAGES["faq"] and round(30 * (9 + 3) * 64 * 4 / 1e3) == 92
    assert "2.4 GB" in PAGES["faq"] and round(9 * 8192**2 * 4 / 1e9, 1) == 2.4


# Anchors

HEADING = re.compile(r"^(#+) (.+?)(?: \{ #([\w-]+) \})?$", re.M)
EXPECTED = {
    "pair", "rotation", "contribution", "before-rotation", "offset-and-content", "bounds",
    "advantage", "offset-shares", "removal", "sink-share", "key-spectrum", "by-distance",
    "verification", "head-metrics", "ablation", "patterns",
}  # fmt: skip


def slug(heading: str) -> str:
    return re.sub(r"[^\w]+", "-", heading.lower()).strip("-")


def anchors(name: str) -> list[str]:
    text = CODE.sub("", PAGES[name])
    others = re.findall(r'<span id="([\w-]+)"></span>', text)
    return [given or slug(heading) for _, heading, given in HEADING.findall(text)] + others


@pytest.mark.parametrize("name", NAMES)
def test_anchors_are_written_out_and_unique(name):
    """An anchor that is derived from its heading would move with the words."""
    headings = HEADING.findall(CODE.sub("", PAGES[name]))
    assert [text for marks, text, given in headings if len(marks) > 1 and not given] == []
    assert len(set(anchors(name))) == len(anchors(name)) >= len(headings)


def test_sections_that_other_pages_count_on():
    assert set(anchors("mathematics")) >= EXPECTED


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_to_anchors_lead_somewhere(path):
    text = prose(path)
    target = rf"(?:[\w./:-]*/)?({'|'.join(NAMES)})\.(?:md|html)"
    for name, anchor in re.findall(rf"\]\({target}#([\w-]+)\)", text):
        assert anchor in anchors(name), f"{name}#{anchor}"
    if path.parent == DOCS and path.stem in NAMES:
        for anchor in re.findall(r"\]\(#([\w-]+)\)", text):
            assert anchor in anchors(path.stem), anchor


def test_glossary_is_in_order_and_each_term_stands_once():
    terms = [
        (text, given) for marks, text, given in HEADING.findall(PAGES["glossary"]) if marks == "###"
    ]
    assert len(terms) > 100
    assert [given for _, given in terms] == [slug(text) for text, _ in terms]
    assert [given for _, given in terms] == sorted({given for _, given in terms})


def test_every_term_is_explained():
    parts = re.split(r"^### .*$", PAGES["glossary"], flags=re.M)[1:]
    assert min(len(part.split()) for part in parts) >= 8


# Proofs of the formulas that no other file evaluates

SHAPES = {
    "plain": {},
    "adjacent": {"pairing": "adjacent"},
    "everything rotated": {"n_rest": 0},
    "factor": {"attention_factor": 1.3},
    "rotated part last": {"rotary_start": 3},
    "window": {"window": 7},
}
N_POS, SCALE = 40, 0.3


def before_rotation(shape: dict, seed: int = 0):
    """A record of 4 query heads on 2 key heads, and the pairs and rest that it was made of."""
    rope = planted.make_rope(**{"frequencies": planted.FREQUENCIES[::2], "n_rest": 4, **shape})
    rng = np.random.default_rng(seed)

    def draw(heads: int):
        z = rng.normal(size=(N_POS, heads, rope.n_pairs, 2)) @ np.array([1, 1j])
        mean = rng.normal(size=(heads, rope.n_pairs, 2)) @ np.array([1, 1j])
        return z + mean, 1 + rng.normal(size=(N_POS, heads, rope.d_head - rope.rotary_dim))

    q, k = draw(4), draw(2)
    return planted.make_record(rope, q, k, scale=SCALE), q, k


@pytest.mark.parametrize("shape", SHAPES)
def test_rotation_and_relative_position(shape):
    record, (z_q, rest_q), (z_k, rest_k) = before_rotation(SHAPES[shape])
    rope, g = record.rope, record.rope.attention_factor
    for x, z in ((record.q, z_q), (record.k, z_k)):
        rotated = to_pairs(x, rope)[0]
        for m, i in itertools.product(range(0, N_POS, 7), range(rope.n_pairs)):
            expected = g * z[m, :, i] * np.exp(1j * rope.inv_freq[i] * m)
            np.testing.assert_allclose(rotated[m, :, i], expected, rtol=1e-5, atol=1e-5)
        undone = unrotate(rotated, record.positions, rope).numpy()
        np.testing.assert_allclose(undone, z, rtol=1e-4, atol=1e-5)
    for head in (0, 3):
        d = decompose(planted.make_capture(record), 0, head)
        ours, passed = d.contributions(), d.pass_through()
        for m, n in itertools.product(range(0, N_POS, 3), range(N_POS)):
            is_seen = 0 <= m - n < (rope.window or N_POS)
            assert np.isfinite(ours[:, m, n]).all() == is_seen
            if is_seen:
                turn = np.exp(1j * rope.inv_freq * (m - n))
                product = z_q[m, head] * z_k[n, head // 2].conj() * turn
                np.testing.assert_allclose(ours[:, m, n], SCALE * g**2 * product.real, atol=2e-5)
                rest = SCALE * sum(rest_q[m, head] * rest_k[n, head // 2])
                assert passed[m, n] == pytest.approx(rest, abs=2e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_four_parts(shape):
    """Each of the four, by hand and by the package; together they are the contribution."""
    record, (z_q, rest_q), (z_k, rest_k) = before_rotation(SHAPES[shape])
    rope, g = record.rope, record.rope.attention_factor
    left_out = (0, 5)
    kept = [m for m in range(N_POS) if m not in left_out]
    offsets = layer_offsets(record, left_out)
    queries, keys = offset_and_content(record, offsets)
    for head in (0, 3):
        kv = head // 2
        mean_q, mean_k = z_q[kept, head].mean(axis=0), z_k[kept, kv].mean(axis=0)
        u, v = z_q[:, head] - mean_q, z_k[:, kv] - mean_k
        rests = [x.mean(axis=0) for x in (rest_q[kept, head], rest_k[kept, kv])]
        r_q, r_k = rest_q[:, head] - rests[0], rest_k[:, kv] - rests[1]
        for m, n in itertools.product(range(0, N_POS, 11), range(0, N_POS, 3)):
            turn = np.exp(1j * rope.inv_freq * (m - n))
            factor = SCALE * g**2
            by_hand = [
                factor * (mean_q * mean_k.conj() * turn).real,
                factor * (mean_q * v[n].conj() * turn).real,
                factor * (u[m] * mean_k.conj() * turn).real,
                factor * (u[m] * v[n].conj() * turn).real,
            ]
            whole = factor * (z_q[m, head] * z_k[n, kv].conj() * turn).real
            np.testing.assert_allclose(sum(by_hand), whole, atol=1e-12)
            np.testing.assert_allclose(
                by_hand[0],
                offsets.amplitude[head] * np.cos(offsets.angle[head] + rope.inv_freq * (m - n)),
                atol=1e-4,
            )
            passed = [rests[0] @ rests[1], rests[0] @ r_k[n], r_q[m] @ rests[1], r_q[m] @ r_k[n]]
            for part, (x, y) in enumerate(itertools.product(queries, keys)):
                ours = SCALE * float(x[m, head] @ y[n, kv])
                expected = by_hand[part].sum() + SCALE * passed[part]
                assert ours == pytest.approx(expected, abs=1e-4)


def test_lowest_possible_highest_point_of_a_curve():
    """No angle is better than the one that puts the stretch symmetrically about π."""
    angles = np.linspace(-np.pi, np.pi, 721)[:, None]
    for turn in np.linspace(0, 3 * np.pi, 25):
        along = np.linspace(0, turn, 2001)
        expected = -np.cos(turn / 2) if turn <= 2 * np.pi else 1.0
        assert np.cos(np.pi - turn / 2 + along).max() == pytest.approx(expected, abs=1e-5)
        assert np.cos(angles + along).max(axis=1).min() >= expected - 1e-5
        # Half a cycle and a full one are where it passes 0 and reaches 1.
        assert (expected <= 1e-9) == (turn <= np.pi + 1e-9)
        assert (expected < 1 - 1e-9) == (turn < 2 * np.pi - 1e-9)


def test_slope_at_distance_zero():
    step = 1e-6
    for amplitude, w, angle in itertools.product((0.5, 7.0), (0.01, 1.3), (-2.5, -0.4, 0.3, 2.0)):
        curve = [amplitude * np.cos(angle + w * distance) for distance in (-step, step)]
        slope = (curve[1] - curve[0]) / (2 * step)
        assert slope == pytest.approx(-amplitude * w * np.sin(angle), abs=1e-7)
        assert (slope < 0) == (angle > 0)


def test_what_all_keys_get_alike_has_no_advantage():
    """Rows of target minus uniform weights sum to 0."""
    record, q, (z_k, rest_k) = before_rotation({})
    raised = planted.make_record(record.rope, q, (z_k, rest_k + 3.0), scale=SCALE)
    target = previous_target(N_POS, None)
    one, other = advantage(record, 1, target), advantage(raised, 1, target)
    np.testing.assert_allclose(one.pairs, other.pairs, atol=1e-6)
    assert other.pass_through == pytest.approx(one.pass_through, abs=1e-5)
    assert abs(other.lift[-1] - one.lift[-1]) > 0.1


def test_uniform_attention_to_the_first_token():
    for n_tokens, said in ((8, "0.34 for 8"), (64, "0.07 for 64")):
        share = sum(1 / m for m in range(1, n_tokens + 1)) / n_tokens
        assert said.startswith(f"{share:.2f}") and said in PAGES["mathematics"]
        head = planted.planted_record([planted.Plant(n_tokens)])
        pattern = head.pattern(0).double().numpy()
        assert pattern[:, 0].mean() == pytest.approx(share, abs=1e-6)


@pytest.mark.parametrize("w", [2.5, 0.2, 0.05, 0.001])
@pytest.mark.parametrize("factor", [1.0, 1.4])
def test_mean_of_a_constant_pair_after_rotation(w, factor):
    rope = planted.make_rope([w], n_rest=0, attention_factor=factor)
    z, none = np.full((N_POS, 1, 1), 2 - 1j), np.zeros((N_POS, 1, 0))
    moments = layer_keys(planted.make_record(rope, (z, none), (z, none)))
    looped = sum(np.exp(1j * w * m) for m in range(N_POS)) / N_POS
    length = abs(np.sin(w * N_POS / 2) / (N_POS * np.sin(w / 2)))
    assert abs(looped) == pytest.approx(length, rel=1e-9)
    mean = factor * (2 - 1j) * looped
    np.testing.assert_allclose(
        moments.sum_post / N_POS, [mean.real, mean.imag], rtol=1e-5, atol=1e-6
    )
    # All that the mean loses is variance.
    spectrum = layer_spectrum(moments)
    assert spectrum.pre.trace == pytest.approx(0, abs=1e-6)
    gained = factor**2 * abs(2 - 1j) ** 2 * (1 - length**2)
    assert spectrum.post.trace == pytest.approx(gained, rel=1e-5, abs=1e-6)


def test_cross_correlation_by_fft():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, 17, 2)) @ np.array([1, 1j])
    spectra = np.fft.fft(x, 34) * np.fft.fft(y, 34).conj()
    ours = np.fft.ifft(spectra)
    for distance in range(17):
        expected = sum(x[m] * y[m - distance].conj() for m in range(distance, 17))
        assert ours[distance] == pytest.approx(expected)
    # Without the padding the end does wrap around.
    short = np.fft.ifft(np.fft.fft(x) * np.fft.fft(y).conj())
    assert abs(short[3] - ours[3]) > 1e-3
