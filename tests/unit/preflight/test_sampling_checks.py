"""What the engines would refuse is refused before they are started."""

from pathlib import Path

import pytest

from support.checked_configs import config, edit
from titan_rl.preflight.checks import problems
from titan_rl.run import main


@pytest.mark.parametrize(
    "toml",
    [
        '[algorithm]\nname = "sft"\n[rollout]\ntemperature = 2.5',  # it samples greedily
        '[algorithm]\nname = "sft"\n[eval]\nsize = 0\n[debug]\nseed = 1099511627776',  # it has no engines
    ],
)
def test_no_problem(tmp_path: Path, toml: str) -> None:
    assert problems(config(tmp_path, toml)) == []


def test_an_end_of_sequence_beyond_the_vocabulary(tmp_path: Path, folder: Path) -> None:
    edit(folder / "config.json", eos_token_id=[2, 99])
    (problem,) = problems(config(tmp_path, f'[model]\nhf_assets_path = "{folder}"'))
    assert problem.startswith(
        "model.hf_assets_path: expected an eos_token_id of the model's vocabulary, 0 to 63, found 99"
    )


def test_all_of_it_is_refused_at_once_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--rollout.temperature=2.5", "--rollout.stop_token_ids=[64]", "--debug.seed=1099511627776"]
    with pytest.raises(SystemExit) as stop:
        main(["--config", "grpo_llama", "--job.dump_folder", str(tmp_path / "run"), *flags])
    assert stop.value.code == 2
    err = capsys.readouterr().err
    assert [key for key in ("rollout.temperature", "rollout.stop_token_ids", "debug.seed") if key in err] == [
        "rollout.temperature",
        "rollout.stop_token_ids",
        "debug.seed",
    ]
    assert "3 problems" in err
    assert not (tmp_path / "run").exists()
