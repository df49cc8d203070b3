"""What is printed for Slurm: pure text, which bash can parse."""

import re
import subprocess
from pathlib import Path

import pytest

from support.fake_slurm import FakeSlurm
from titan_rl.config.sections import Config
from titan_rl.config.toml import find, load, shipped
from titan_rl.tools.launch.__main__ import main
from titan_rl.tools.launch.job import Job, changed_toml
from titan_rl.tools.launch.sbatch import script


def config_of(*flags: str, name: str = "grpo_llama") -> Config:
    return load(find(name), [(key, value) for key, _, value in (flag.partition("=") for flag in flags)])


def script_of(*flags: str) -> str:
    return script(Job.of(config_of(*flags), "grpo_llama"), Path("/code"))


def asked(text: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]


def steps(text: str) -> list[str]:
    return re.findall("srun -.*", text)


def test_a_minimal_job_asks_for_one_whole_node_and_names_nothing_else() -> None:
    text = script_of("job.dump_folder=/runs/a")
    assert asked(text) == [
        "--job-name=a",
        "--nodes=1",
        "--ntasks-per-node=1",
        "--signal=B:USR1@55",
        "--chdir=/code",
        "--output=/runs/a/launch/job-%j.log",
        "--exclusive",
        "--mem=0",
        "--open-mode=append",
        "--requeue",
    ]
    assert "titan_rl.worker" not in text
    assert len(steps(text)) == 1


def test_every_key_reaches_sbatch() -> None:
    keys = ["account=a", "partition=p", "minutes=90", "cpus_per_node=64"]
    more = ["memory_gb_per_node=512", "extra_args=--constraint=h100,--nodelist=n[1-3]"]
    text = script_of(
        "job.dump_folder=/runs/a", "hosts.count=3", "hosts.slots=8", *(f"launch.{key}" for key in [*keys, *more])
    )
    assert asked(text) == [
        "--job-name=a",
        "--nodes=3",
        "--ntasks-per-node=1",
        "--gpus-per-node=8",
        "--cpus-per-task=64",
        "--mem=512G",
        "--account=a",
        "--partition=p",
        "--time=90",
        "--signal=B:USR1@55",
        "--chdir=/code",
        "--output=/runs/a/launch/job-%j.log",
        "--no-kill",
        "--open-mode=append",
        "--requeue",
        "--constraint=h100",
        "--nodelist=n[1-3]",
    ]
    assert all("--cpus-per-task=64" in step for step in steps(text))


def test_gpus_follow_from_the_slots_unless_the_run_is_on_the_cpu() -> None:
    assert "--gpus-per-node=8" in asked(script_of("hosts.slots=8"))
    assert not any("gpus" in line for line in asked(script_of("hosts.slots=8", "hosts.device=cpu")))


def test_steps_have_their_own_number_of_tasks_and_only_the_workers_have_gpus() -> None:
    """srun takes from the environment what a step does not name."""
    certificates, workers, run = steps(script_of("hosts.slots=8", "hosts.count=3", "launch.image=rl"))
    for step in (certificates, run):
        assert " --nodes=1 --ntasks=1 " in step
        assert " --gpus-per-node=0 " in step
    assert " --nodes=3 --ntasks=3 " in workers
    assert " --no-kill " in workers, "a lost node ends no others"
    assert "gpus" not in workers
    assert "gpus" not in "".join(steps(script_of("hosts.slots=8")))
    assert "gpus" not in "".join(steps(script_of("hosts.count=2", "hosts.device=cpu")))


def test_the_grace_of_the_run_is_within_that_of_the_job() -> None:
    assert "--signal=B:USR1@330" in asked(script_of("fault.stop_grace_seconds=300"))


def test_steps_run_in_the_container_with_the_folders_that_they_need() -> None:
    text = script_of(
        "job.dump_folder=/runs/a", "hosts.count=2", "launch.image=/images/rl.sqsh", "launch.mounts=/data:/data:ro"
    )
    for step in steps(text):
        assert "--container-image=/images/rl.sqsh" in step
        assert "--container-mounts=/data:/data:ro,/code:/code,/runs/a:/runs/a" in step
        assert "--container-workdir=/code" in step
    assert "exec python3 -m titan_rl.run" in text  # this machine's Python is not in the image


@pytest.mark.parametrize("setup", ["", "source '/a b/activate' && export X=\"$HOME\"", "module load cuda\nset -x"])
@pytest.mark.parametrize("count", [1, 4])
def test_bash_can_parse_every_script(setup: str, count: int) -> None:
    text = script_of("job.dump_folder=/runs/it's $(here)", f"hosts.count={count}", f"launch.setup={setup}")
    checked = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    assert checked.stderr == ""


def test_the_setup_line_runs_in_every_step() -> None:
    text = script_of("hosts.count=2", "launch.setup=module load cuda")
    assert text.count("module load cuda\n") == 3
    assert len(steps(text)) == 2, "certificates are made by the script itself, without a container"
    assert 'setup = "module load cuda"' in text


def test_without_encryption_there_are_no_certificates() -> None:
    text = script_of("hosts.count=2", "hosts.insecure=true")
    assert "--init-tls" not in text
    assert '"tcp://%s:$port,"' in text
    assert "--tls" not in text.replace("--init-tls", "")


def test_given_certificates_are_named_by_their_folder_only(tmp_path: Path) -> None:
    (tmp_path / "key.pem").write_text("-----BEGIN PRIVATE KEY-----")
    text = script_of("hosts.count=2", f"hosts.tls={tmp_path}")
    assert f"tls={tmp_path}" in text
    assert "--init-tls" not in text
    assert "PRIVATE" not in text


@pytest.mark.parametrize("name", shipped())
def test_the_jobs_config_is_the_one_that_was_launched(name: str, tmp_path: Path) -> None:
    config = config_of("rollout.max_staleness_steps=1", 'job.description=a "quote" and a \\ and é', name=name)
    (tmp_path / "job.toml").write_text(changed_toml(config))
    assert load(tmp_path / "job.toml") == config
    assert len(changed_toml(config)) < 3000


def test_keys_that_a_preset_sets_otherwise_stay_as_they_are(tmp_path: Path) -> None:
    for flags in (
        ["algorithm.name=dapo", "algorithm.clip_high=0.2", "algorithm.dynamic_sampling=false"],
        ["rollout.max_staleness_steps=2", "algorithm.proximal=trainer"],
        ["rollout.max_staleness_steps=2", "algorithm.name=opd", "algorithm.correction=none"],
        ["generator.dtype=bfloat16", "algorithm.name=gspo", "algorithm.clip_high=0.0004"],
        ["generator.dtype=bfloat16", "algorithm.name=gspo", "algorithm.proximal=generator"],
        ["rollout.max_staleness_steps=2", "algorithm.proximal=generator", "algorithm.correction=token_tis"],
    ):
        config = config_of(*flags)
        (tmp_path / "job.toml").write_text(changed_toml(config))
        assert load(tmp_path / "job.toml") == config


def launch(*flags: str) -> int:
    return main(["--config", "grpo_llama", "--on", "slurm", "--eval.size=16", *flags])


def test_print_starts_nothing_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", "sk-secret")
    slurm, run = FakeSlurm(tmp_path, monkeypatch), tmp_path / "run"
    assert launch("--print", f"--job.dump_folder={run}", "--hosts.count=2") == 0
    out = capsys.readouterr().out
    assert out.startswith("#!/bin/bash\n#SBATCH --job-name=run\n#SBATCH --nodes=2\n")
    assert "sk-secret" not in out
    assert not slurm.jobs()
    assert not run.exists()


def test_all_problems_are_named_before_anything_is_submitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("SLURM_JOB_NUM_NODES", raising=False)
    with pytest.raises(SystemExit) as stop:
        launch(
            "--here",
            f"--job.dump_folder={tmp_path}/run",
            "--launch.minutes=1",
            "--launch.mounts=pvc/runs:/runs",
            "--launch.partition=a\nb",
            "--launch.extra_args=constraint",
            "--hosts.device=cuda",
            "--fault.stop_grace_seconds=100",
            "--rollout.max_new_tokens=500",
        )
    assert stop.value.code == 2
    found = capsys.readouterr().err
    for expected in (
        "launch.minutes: expected at least 3 with fault.stop_grace_seconds = 100, found 1",
        'launch.mounts: expected a folder of the nodes with --on slurm, found "pvc/runs:/runs"',
        "launch.mounts: expected none without launch.image, found some",
        r'launch.partition: expected one line of printable text, found "a\nb"',
        "launch.extra_args: expected arguments of sbatch, such as --constraint=h100, found 'constraint'",
        'hosts.slots: expected the GPUs of each node with hosts.device = "cuda", found 0',
        "--on slurm: expected sbatch, squeue, scontrol on PATH, found no sbatch, squeue, scontrol; --print needs none",
        "training.seq_len: expected at least 507",
        "--here: expected an allocation of hosts.count nodes (salloc --nodes=1), found 0 nodes",
    ):
        assert expected in found
    assert not (tmp_path / "run").exists()


def test_a_printed_script_moves_no_old_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        launch("--print", "--job.fresh", f"--job.dump_folder={tmp_path}/run")
    assert "job.fresh: expected false with --print" in capsys.readouterr().err


def test_a_tiny_trial_is_a_job_of_two_nodes_without_gpus(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The printed lines are the changes, without the hosts that stood in for the nodes."""
    folder = f"--job.dump_folder={tmp_path}/run"
    assert main(["--config=grpo_llama3_70b", "--on=slurm", "--print", "--scale=tiny", folder]) == 0
    said = capsys.readouterr()
    text = said.out
    assert "--nodes=2" in asked(text)
    assert not any("gpus" in argument for argument in asked(text))
    assert "hosts.count: 8 -> 2" in said.err
    assert not any(key in said.err for key in ("hosts.addresses:", "hosts.kind:"))
    path = tmp_path / "job.toml"
    path.write_text(text.partition("<<'END_OF_CONFIG'\n")[2].partition("END_OF_CONFIG")[0])
    tiny = load(path, [])
    assert (tiny.generator.replicas, tiny.hosts.device, tiny.hosts.slots, tiny.hosts.number) == (2, "cpu", 4, 1)
    assert main(["--config=grpo_llama3_70b", "--on=slurm", "--print", "--scale=tiny", folder, "--hosts.count=4"]) == 0
    assert "--nodes=4" in asked(capsys.readouterr().out)
    assert list(tmp_path.iterdir()) == [path]
