"""Adam's moments in bfloat16: steps are AdamW's with rounded moments to the last bit, and so are resumed ones."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from support.gloo_ranks import on_ranks
from support.moment_ranks import updated
from support.rank_programs import Case
from support.slow_cases import slow_except
from titan_rl.config.sections import Dtype

STEPS = 6


@pytest.mark.parametrize(("lora", "compute"), slow_except([(0, "float32"), (4, "bfloat16")], 1))
def test_each_step_is_adamws_with_rounded_moments(tmp_path: Path, lora: int, compute: Dtype) -> None:
    case = Case(layout="fsdp2", lora=lora, compute=compute)
    found = on_ranks(2, updated, str(tmp_path), case, ("master", "bfloat16", "rounded"), 0, STEPS)
    digests = {kind: [digest for digest, _, _ in steps] for kind, steps in found.items()}
    assert digests["bfloat16"] == digests["rounded"] != digests["master"]
    assert digests["bfloat16"][0] == digests["master"][0], "the first step reads no moments"
    dtypes = {kind: {dtype for _, _, dtype in steps} for kind, steps in found.items()}
    assert dtypes == {"master": {"torch.float32"}, "bfloat16": {"torch.bfloat16"}, "rounded": {"torch.float32"}}
    ours, theirs = (np.array(found[kind][-1][1]) for kind in ("bfloat16", "master"))
    moved = np.abs(theirs - np.array(found["master"][0][1])).mean()
    assert np.abs(ours - theirs).mean() < moved / 100

    half = STEPS // 2
    first = on_ranks(2, updated, str(tmp_path / "again"), case, ("bfloat16",), 0, half)["bfloat16"]
    rest = on_ranks(2, updated, str(tmp_path / "again"), case, ("bfloat16",), half, STEPS)["bfloat16"]
    assert [*first, *rest] == found["bfloat16"]


def test_a_run_resumes_on_another_mesh_and_with_other_moments(tmp_path: Path) -> None:
    two, one = Case(layout="fsdp2"), Case()
    found = on_ranks(2, updated, str(tmp_path), two, ("master", "bfloat16"), 0, 2)
    for before, after in (("bfloat16", "bfloat16"), ("master", "bfloat16"), ("bfloat16", "master")):
        shutil.copytree(tmp_path / before, tmp_path / f"from-{before}" / after)
        ((_, values, dtype),) = on_ranks(1, updated, str(tmp_path / f"from-{before}"), one, (after,), 2, 3)[after]
        assert dtype == {"master": "torch.float32", "bfloat16": "torch.bfloat16"}[after]
        moved = np.abs(np.array(values) - np.array(found[before][-1][1]))
        assert 0 < moved.max() < 0.02, "one step of a rate of 0.01"
