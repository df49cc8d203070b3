"""The planned live parameters, compared with the parameters that vLLM's loader makes from the same tensors."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from support.forked_programs import output_of
from support.loaded_weights import write_models

COMPARE = f"""
import os
os.environ["VLLM_DIST_IDENT"] = "weight_plan_{os.getpid()}"  # names shared memory; vLLM's CPU worker would set it
sys.path.append({str(Path(__file__).parents[1])!r})
from support.loaded_weights import compare_with_vllm
compare_with_vllm(*sys.argv[1:])
"""


@pytest.mark.parametrize("tp", [1, 2])
def test_the_plan_equals_what_vllm_loads(tp: int, tmp_path: Path) -> None:
    write_models(tmp_path)
    with ThreadPoolExecutor() as ranks:
        outputs = ranks.map(lambda rank: output_of("generator", COMPARE, tmp_path, tp, rank), range(tp))
    assert all("9 models equal" in output for output in outputs)
