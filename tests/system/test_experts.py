"""A mixture of experts on gloo ranks: the mesh, and experts over ranks, show in no loss, gradient, count or export."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.async_gather import needs_gradient, train_tensor_parallel
from support.gloo_ranks import on_ranks
from support.overlays import overlay
from support.rank_programs import STEPS, Case, train_and_export
from support.slow_cases import slow_except
from titan_rl.config.choices import Family

FAMILIES: tuple[Family, ...] = ("qwen3_moe", "gpt_oss", "glm4_moe")
ALONE = Case(family="qwen3_moe", share=False)
LAYOUTS = {
    2: ("fsdp2_ep2", "tp2_ep2", "tp2"),
    4: ("fsdp2_tp2_ep2", "hsdp_2x2_ep2"),
}
EXPORTS = 3  # the last layouts


def case(family: Family, layout: str, **keys: Any) -> Case:
    return replace(ALONE, family=family, layout=layout, **keys)


def answers(ranks: int, cases: Sequence[Case]) -> tuple[list[Any], list[Any]]:
    return on_ranks(ranks, train_and_export, cases, cases[-EXPORTS:])


@pytest.fixture(scope="module")
def alone() -> tuple[list[Any], list[Any]]:
    return answers(1, [replace(ALONE, family=family) for family in FAMILIES])


@pytest.mark.parametrize("ranks", LAYOUTS)
@pytest.mark.parametrize("family", slow_except(FAMILIES, 0, 1))
def test_ranks_compute_what_one_does(family: Family, ranks: int, alone: tuple[list[Any], list[Any]]) -> None:
    first = case(family, "fsdp2" if ranks == 2 else "fsdp2_tp2_ep4", sync="microbatch")
    cases = [first, *(case(family, layout) for layout in LAYOUTS[ranks])]
    losses, exports = answers(ranks, cases)
    expected, whole = (found[FAMILIES.index(family)] for found in alone)
    assert len(expected) == STEPS
    assert expected[0] != expected[1], "the steps differ"
    assert all(len(step) == 5 and 1 < step[2] <= step[3] for step in expected), "and the experts are used unevenly"
    for each, found in zip(cases, losses, strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6, err_msg=each.layout)
    assert exports == [whole] * EXPORTS


def test_an_unfinished_gather_loses_its_gradient_in_local_map() -> None:
    """This is why Mixture copies its input. If it fails, torch may have been mended, and the copy can go."""
    assert on_ranks(2, needs_gradient) == {
        "waited for": True,
        "unfinished": False,
        "unfinished, copied": True,
    }


PROGRAM = """
import json
from support.async_gather import train_tensor_parallel
from support.gloo_ranks import on_ranks

if __name__ == "__main__":
    print(json.dumps(on_ranks(2, train_tensor_parallel)))
"""


def trained_with(contribution: str, folder: Path) -> tuple[list[bool], list[list[float]]]:
    """Run train_tensor_parallel in processes whose package has a change of docs/upstream."""
    program = folder / "program.py"
    program.write_text(PROGRAM)
    paths = [overlay(contribution, folder)["PYTHONPATH"], *sys.path]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run([sys.executable, program], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_input_is_copied_unless_torch_keeps_its_gradient(
    tmp_path: Path, alone: tuple[list[Any], list[Any]]
) -> None:
    expected = alone[0][FAMILIES.index("qwen3_moe")]
    copies, found = on_ranks(2, train_tensor_parallel)
    assert copies == [True, True]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
    copies, found = trained_with("local-map-gradient", tmp_path)
    assert copies == [False, False]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
