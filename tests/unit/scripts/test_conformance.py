"""The tables of conformance are of the kept figures, which include every family, with keys that a seed has drawn."""

import json
from pathlib import Path

import conformance
import pytest

from bench.family_folders import CASES
from titan_rl.wire.model_families import BY_MODEL_TYPE, SPECS


def test_every_family_has_a_case_and_a_drawn_one() -> None:
    known = {*BY_MODEL_TYPE, *SPECS}
    assert known <= {model_type for name, (model_type, _) in CASES.items() if "drawn" not in name}
    assert known == {model_type for name, (model_type, _) in CASES.items() if "drawn" in name}


def test_every_case_has_figures_within_the_bound() -> None:
    figures = json.loads(conformance.RESULTS.read_text())
    assert list(figures) == list(CASES), "scripts/conformance.py --case NAME measures the missing ones"
    assert conformance.wrong(figures) == []
    of_vllm = {name: figures[name] | {"vLLM - transformers": [1e-4, 1e-3], "refit": False} for name in ("Llama 2",)}
    assert conformance.wrong(of_vllm) == [
        "Llama 2: vLLM - transformers is 1.0e-04",
        "Llama 2: vLLM's loader makes other parameters than the weight plan",
    ]


@pytest.mark.parametrize("page", conformance.TABLES, ids=lambda page: page.name)
def test_a_table_is_of_the_figures(page: Path) -> None:
    assert conformance.with_table(page, json.loads(conformance.RESULTS.read_text())) == page.read_text()
