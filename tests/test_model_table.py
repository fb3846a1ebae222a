"""The table of supported models says what the installed versions do, row by row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matrix
import pytest
import torch

from docs_build import supported_models
from lens_rope.verify import TOLERANCE

DATA = Path(__file__).parents[1] / "docs" / "data"
PATH = matrix.path_of(DATA, matrix.installed())
COMMITTED = json.loads(PATH.read_text(encoding="utf-8")) if PATH.exists() else {}

needs_rows = pytest.mark.skipif(not COMMITTED, reason="this transformer-lens is not a tested set")


def assert_same(found: dict[str, Any], committed: dict[str, Any]) -> None:
    assert matrix.same(found) == matrix.same(committed), "run scripts/models and read what changed"
    if "error_below" in found:
        # Another processor may round across the border of a decade.
        assert 0 < found["error_below"] <= 10 * committed["error_below"]
        assert committed["error_below"] <= TOLERANCE[torch.float32]


@needs_rows
@pytest.mark.parametrize("name", matrix.architectures())
def test_architecture_is_read_as_the_table_says(name: str) -> None:
    found, committed = matrix.architecture(name), COMMITTED["architectures"][name]
    assert found.keys() == committed.keys()
    for host, row in found.items():
        assert_same(row, committed[host])


@needs_rows
@pytest.mark.parametrize("name", matrix.configurations())
def test_configuration_is_read_as_the_table_says(name: str) -> None:
    assert_same(matrix.configuration(name), COMMITTED["configurations"][name])


@needs_rows
def test_table_has_a_row_for_every_model_of_the_suite() -> None:
    assert list(COMMITTED["architectures"]) == matrix.architectures()
    assert list(COMMITTED["configurations"]) == matrix.configurations()


def test_rows_differ_where_anything_but_digits_does() -> None:
    says = "layer 0 of m cannot be read exactly: norm error 7.4e-01 exceeds 1e-05: reason"
    row = {"status": "refused", "says": says}
    assert matrix.same(row) == matrix.same({**row, "says": says.replace("7.4e-01", "7.5e-01")})
    for other in (says.replace("norm", "score"), says.replace("1e-05", "2e-02")):
        assert matrix.same(row) != matrix.same({**row, "says": other})
    read = {"status": "read", "routes": ["hook_rot"], "error_below": 1e-6, "layers": []}
    assert matrix.same(read) == matrix.same({**read, "error_below": 1e-7})
    assert matrix.same(read) != matrix.same({**read, "routes": ["hook_cos"]})


def test_both_sets_are_shown_with_what_was_said_in_full() -> None:
    shown = supported_models.markdown()
    for data in supported_models.load().values():
        for hosts in data["architectures"].values():
            for row in hosts.values():
                if row["status"] == "refused":
                    assert " ".join(row["says"].split()) in shown
    for row in ("| **Llama**<br>", "| **Cohere**<br>"):
        (line, *_) = (line for line in shown.splitlines() if line.startswith(row))
        assert line.count(" | ") == 4
    # Cohere is refused on the first bridge and read on the second.
    cohere = line.split(" | ")
    assert ">refused</a>" in cohere[2] and ">read</span>" in cohere[3]


def test_facts_are_those_of_the_row() -> None:
    rows = supported_models.load()["4.3"]["architectures"]
    facts = {name: supported_models.facts(rows[name]["bridge"]) for name in rows if "says" not in
             rows[name]["bridge"]}  # fmt: skip
    assert facts["llama"] == "whole head, half pairs"
    assert facts["gpt-neox"] == "1/4 of a head, half pairs"
    assert facts["gpt-j"] == "1/2 of a head, adjacent pairs"
    assert facts["gemma3"] == "whole head, half pairs, window in 5 of 6 layers"
    assert facts["smollm3"] == "whole head, half pairs, no RoPE in 1 of 4 layers"
    assert facts["deepseek-v3"].startswith("last 1/2 of a head")
    assert "attention factor" in facts["llama-yarn"] and "factor" not in facts["llama"]


def test_row_without_a_text_ends_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = dict(supported_models.ARCHITECTURES)
    del texts["glm"]
    monkeypatch.setattr(supported_models, "ARCHITECTURES", texts)
    with pytest.raises(ValueError, match="differ in: glm"):
        supported_models.markdown()


def test_refusal_without_advice_ends_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {**supported_models.ARCHITECTURES, "gpt2": supported_models.Text("GPT-2", "none")}
    monkeypatch.setattr(supported_models, "ARCHITECTURES", texts)
    with pytest.raises(ValueError, match="gpt2 is refused"):
        supported_models.markdown()
