"""What exact mode cannot keep exact is refused by key, all at once."""

from pathlib import Path

import pytest

from support.checked_configs import config
from titan_rl.preflight.checks import problems
from titan_rl.run import main
from titan_rl.wire.gpus import Gpus

EXACT = "[debug]\nexact = true\n"


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ('[algorithm]\nname = "sft"', 'debug.exact: expected false with algorithm.name = "sft"'),
        (
            "[parallelism]\ntensor_parallel_degree = 2",
            "parallelism.tensor_parallel_degree: expected 1 with debug.exact",
        ),
        ("[generator]\ntensor_parallel_degree = 2", "generator.tensor_parallel_degree: expected 1 with debug.exact"),
        (
            '[generator]\ndtype = "bfloat16"',
            'generator.dtype: expected training.mixed_precision_param = "float32" with debug.exact, found "bfloat16"',
        ),
        ('[weight_sync]\nin_flight = "keep"', 'weight_sync.in_flight: expected "swap" or "drain" with debug.exact'),
        ("[hosts]\nthreads = 2", "hosts.threads: expected 0 or 1 with debug.exact, which computes on one, found 2"),
        ('[model]\nname = "qwen3_moe"', "model.name: expected a dense model with debug.exact"),
        ("[compile]\nenable = true", "compile.enable: expected false with debug.exact"),
    ],
)
def test_one_problem(tmp_path: Path, toml: str, message: str) -> None:
    (problem,) = [p for p in problems(config(tmp_path, EXACT + toml)) if "debug.exact" in p]
    assert problem.startswith(message)


def test_a_gpu_is_refused_by_name(tmp_path: Path) -> None:
    gpus = Gpus(8)
    (problem,) = [p for p in problems(config(tmp_path, EXACT), gpus=gpus) if "debug.exact" in p]
    assert problem.startswith("debug.exact: expected a run on CPU")
    on_cpu = config(tmp_path, EXACT + '[hosts]\ndevice = "cpu"')
    assert not [p for p in problems(on_cpu, gpus=gpus) if "debug.exact" in p]


@pytest.mark.parametrize(
    "toml",
    [
        "",
        '[training]\nmixed_precision_param = "bfloat16"\n[generator]\ndtype = "bfloat16"\nreplicas = 2',
        "[rollout]\ntop_p = 0.9\ntop_k = 8\nmin_p = 0.05",
        "[rollout]\nlag = 2\ntemperature = 0.7\n[parallelism]\ndata_parallel_shard_degree = 2\n[hosts]\nthreads = 1",
    ],
)
def test_no_problem(tmp_path: Path, toml: str) -> None:
    assert problems(config(tmp_path, EXACT + toml)) == []


def test_all_of_it_is_refused_at_once_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--debug.exact=true", "--compile.enable=true", "--weight_sync.in_flight=keep", "--hosts.threads=4"]
    with pytest.raises(SystemExit) as stop:
        main(["--config", "grpo_qwen3", "--job.dump_folder", str(tmp_path / "run"), *flags])
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert all(key in said for key in ("compile.enable", "weight_sync.in_flight", "hosts.threads"))
    assert not (tmp_path / "run").exists()
