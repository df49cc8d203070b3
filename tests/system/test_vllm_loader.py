"""The learned layout of live parameters, compared with what vLLM's loader makes from the same tensors."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from support.forked_programs import IMPORTS, output_of
from support.loaded_weights import models
from support.slow_cases import slow_except

COMPARE = (
    IMPORTS
    + f"""
import os
os.environ["VLLM_DIST_IDENT"] = "weight_plan_{os.getpid()}"  # names shared memory; vLLM's CPU worker would set it
from support.loaded_weights import compare_with_vllm, write_models
"""
)


@pytest.mark.parametrize("tp", slow_except([1, 2], 1))
def test_the_learned_layout_equals_what_vllm_loads(tp: int, tmp_path: Path) -> None:
    output_of("generator", COMPARE + "write_models(*sys.argv[1:])", tmp_path, tp)
    compare = COMPARE + "compare_with_vllm(*sys.argv[1:])"
    with ThreadPoolExecutor() as ranks:
        outputs = list(ranks.map(lambda rank: output_of("generator", compare, tmp_path, tp, rank), range(tp)))
    assert all(f"{len(models(tp))} models equal" in output for output in outputs)
