"""`scripts/bench` compares like with like: what a user would write gives the numbers of the
package, a side that gives others ends the case, and each case leaves a row for the site."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from bench_suite import __main__ as bench
from bench_suite import baselines, cases
from report_fixtures import saved_model

import lens_rope as lr
from docs_build import performance

SHORT = [
    "report", "report-interventions", "dense-time", "dense-memory", "shift", "report-memory",
    "report-peak", "growth",
]  # fmt: skip


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> str:
    return str(saved_model("llama", tmp_path_factory.mktemp("models")))


@pytest.mark.parametrize("case", SHORT)
def test_case_gives_a_row(case: str, tiny: str) -> None:
    task = cases.Task(case, "bridge", 64, model=tiny, rounds=1, shortest=32)
    row = json.loads(json.dumps(cases.run(task)))
    assert (row["case"], row["host"], row["tokens"]) == (case, "bridge", 64)
    assert row["value"] > 0 or case == "growth"
    assert row["met"] is (None if row["limit"] is None else row["value"] <= row["limit"])
    if row["other"] is not None and row["measure"] == "memory":
        assert row["value"] == pytest.approx(row["ours"] / row["other"])
    if case in ("dense-time", "shift"):
        assert row["agreement"] < 1e-4
    if "parts" in row:
        assert sum(row["parts"].values()) == pytest.approx(1, abs=0.05)
        assert row["parts"]["verification"] > 0
    assert case in performance.WORK


def test_bench_writes_the_file_that_the_site_shows(tiny: str, tmp_path, capsys) -> None:
    out = tmp_path / "bench.json"
    asked = ["--model", tiny, "--hosts", "bridge", "--rounds", "1", "--out", str(out), "--quick"]
    assert bench.main([*asked, "--only", "shift", "--lengths", "24"]) == 0
    assert bench.main([*asked, "--only", "shift", "--lengths", "48", "--update"]) == 0
    content = json.loads(out.read_text("utf-8"))
    assert [row["tokens"] for row in content["rows"]] == [24, 48]
    assert content["versions"]["torch"] == torch.__version__
    assert {"cpu", "cores", "memory_gb", "threads"} <= content["machine"].keys()
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert performance.WORK["shift"].name in performance.rendered(content)
    # A kept row says of itself what it was measured at, and goes with this machine alone.
    content["rows"][0]["revision"] = "older"
    assert "at revision `older`, `" in performance.rendered(content)
    content["versions"]["torch"] = "0.1"
    before = json.dumps(content)
    out.write_text(before, "utf-8")
    assert bench.main([*asked, "--only", "shift", "--lengths", "96", "--update"]) == 1
    assert "another machine or with other versions" in capsys.readouterr().err
    assert out.read_text("utf-8") == before


def test_a_case_that_fails_is_a_row_that_says_so(tiny: str, tmp_path) -> None:
    out = tmp_path / "bench.json"
    asked = ["--model", str(tmp_path / "nothing"), "--hosts", "bridge", "--out", str(out)]
    assert bench.main([*asked, "--only", "shift", "--lengths", "24"]) == 1
    (row,) = json.loads(out.read_text("utf-8"))["rows"]
    assert "nothing" in row["error"]
    assert "failed" in performance.rendered(json.loads(out.read_text("utf-8")))


def test_baselines_are_the_definitions(tiny: str) -> None:
    """Loops in complex128 over every query, key and pair."""
    model = lr.load_model(tiny, "bridge")
    record = lr.capture(model, torch.arange(3, 15), [1]).layer(1)
    q, k = record.q.double().numpy(), record.k.double().numpy()
    n, heads, half = len(q), q.shape[1], q.shape[2] // 2
    group = heads // k.shape[1]
    c = np.zeros((heads, half, n, n))
    for h in range(heads):
        for p in range(half):
            z_q = q[:, h, p] + 1j * q[:, h, half + p]
            z_k = k[:, h // group, p] + 1j * k[:, h // group, half + p]
            c[h, p] = record.scale * np.outer(z_q, z_k.conj()).real
    advantages, profiles = np.zeros((heads, half)), np.zeros((heads, half, n))
    for h in range(heads):
        for m in range(1, n):
            weights = np.exp(c[h, :, m, : m + 1].sum(0))
            weights = weights / weights.sum() - 1 / (m + 1)
            advantages[h] += c[h, :, m, : m + 1] @ weights / (n - 1)
        for d in range(n):
            profiles[h, :, d] = np.mean([c[h, :, m, m - d] for m in range(d, n)], axis=0)
    sides = (record.q, record.k, record.rope.pairing, record.scale)
    found = baselines.dense(*sides)
    np.testing.assert_allclose(found[0], advantages, atol=1e-5)
    np.testing.assert_allclose(found[1], profiles, atol=1e-5)
    np.testing.assert_allclose(baselines.shift_and_multiply(*sides), profiles, atol=1e-5)


def test_other_numbers_end_a_case() -> None:
    assert cases._agree("sum", [1.0, 2.0], np.array([1.0, 2.0 + 1e-6])) < 1e-6
    for wrong in ([1.0, 2.1], [1.0, np.nan]):
        with pytest.raises(ArithmeticError, match="sum: ours and the baseline differ"):
            cases._agree("sum", wrong, np.array([1.0, 2.0]))
