"""A run's trackers get its config, metrics, samples and end, and never hold it up."""

import asyncio
import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from support.wandb_files import history, records
from titan_rl.config.sections import Config, HostsSection, LaunchSection, MetricsSection, TaskSection
from titan_rl.ext.trackers import tracking as parent
from titan_rl.ext.trackers.messages import SERVICES, grouped, public_config
from titan_rl.ext.trackers.tracking import Trackers, read_ids, tracking
from titan_rl.record.run_log import RunLog
from titan_rl.record.sample_rows import COLUMNS, overview, sample_rows
from titan_rl.wire.program import command_of
from titan_rl.wire.types import Branch, Completion, Group, Prompt, Rollout, Turn

ROOT = Path(__file__).parents[4]
METRICS = {"reward/mean": 0.5, "loss": 0.1, "entropy": 1.5, "logprob_gap/mean": 1e-7, "eval/hard/pass@2": 0.25}
HISTOGRAMS = {"policy_age/histogram": [3.0, 1.0]}


def rollout(reward: float, text: str) -> Rollout:
    completion = Completion(tokens=[9, 2], logprobs=[-0.25, -0.5], versions=[0, 0], finish="stop")
    return Rollout([Branch([Turn([1, 4], completion)])], text=text, reward=reward, advantage=reward - 0.5)


def group() -> Group:
    return Group(Prompt(7, "12+34=", [1, 4], "640"), [rollout(0.5, "6"), rollout(1.0, "640"), rollout(0.0, "")])


def config_of(*trackers: str, **keys: Any) -> Config:
    return Config(metrics=MetricsSection(trackers=list(trackers), tags=["tiny"], sample_interval=2, **keys))


class Recorded(list[str]):
    """Warnings."""

    def warn(self, text: str) -> None:
        self.append(text)


def train(
    folder: Path,
    config: Config,
    steps: range,
    *,
    resumed: int | None = None,
    error: type[BaseException] | None = None,
    warn: Callable[[str], None] = pytest.fail,
) -> list[str]:
    """Write a run's steps as a session does, and return where its trackers are."""

    async def written() -> list[str]:
        async with tracking(folder, "tiny", config, resumed=resumed is not None, warn=warn) as trackers:
            with RunLog(folder, "tiny", config, resume_step=resumed, trackers=trackers) as log:
                if resumed is None:
                    log.cold_start(1, {"loss": 2.0})
                for step in steps:
                    log.step(step, METRICS, HISTOGRAMS, [group()])
                log.eval(steps[-1], {"eval/score": 0.75}, seconds=1.5)
                if error is not None:
                    raise error
                log.summary({"final_eval": 0.75})
        return log.hints

    return asyncio.run(written())


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install Trackio and MLflow in another folder: they would lower versions that other tests use."""
    folder = tmp_path_factory.mktemp("packages")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    install = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", sys.executable]
    subprocess.run([*install, "--target", str(folder), *extras["trackio"], *extras["mlflow"]], check=True)
    return folder


@pytest.fixture
def extras(elsewhere: Path, packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the trackers' processes, and this one, find the packages."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(packages), os.environ["PYTHONPATH"]]))
    monkeypatch.syspath_prepend(packages)


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder for the trackers' files, without a network."""
    for name, value in {"WANDB_MODE": "offline", "TRACKIO_DIR": str(tmp_path / "trackio")}.items():
        monkeypatch.setenv(name, value)
    for name in ("WANDB_DIR", "MLFLOW_TRACKING_URI", "TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH", "")])))
    monkeypatch.setattr(parent, "FLUSH_SECONDS", dict.fromkeys(parent.FLUSH_SECONDS, 400.0))  # on a busy machine
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_wandb_gets_a_run_that_is_resumed_and_fails(elsewhere: Path) -> None:
    folder = elsewhere / "run"
    _, hint = train(folder, config_of("wandb", project="mine"), range(1, 4))
    with pytest.raises(ZeroDivisionError):
        train(folder, config_of("wandb", project="mine"), range(3, 5), resumed=2, error=ZeroDivisionError)
    assert hint == f"wandb sync {folder}/wandb/offline-run-*"
    found = list(records(folder))
    runs = [record.run for record in found if record.WhichOneof("record_type") == "run"]
    assert {(run.run_id, run.project, run.display_name, run.run_group, *run.tags) for run in runs} == {
        (read_ids(folder)["wandb"], "mine", "run", "tiny", "tiny")
    }
    assert {update.key for run in runs for update in run.config.update} >= {"task", "optimizer", "attempt"}
    points = history(folder)
    assert [point["step"] for point in points if "reward/mean" in point] == [1, 2, 3, 3, 4]
    assert [point["cold_start/step"] for point in points if "cold_start/loss" in point] == [1]
    assert [point["step"] for point in points if "eval/score" in point] == [3, 4]
    assert [point["step"] for point in points if "0_overview/samples/_type" in point] == [1, 2, 4]
    assert points[1]["0_overview/reward"] == 0.5
    assert points[1]["policy_age/histogram/values"] == [3, 1]
    table = json.loads(next(folder.glob("wandb/*/files/media/table/**/*.json")).read_text())
    assert table["columns"] == list(COLUMNS)
    assert [row[COLUMNS.index("text")] for row in table["data"]] == ["640", ""]
    axes = {(r.metric.name or r.metric.glob_name, r.metric.step_metric) for r in found if r.HasField("metric")}
    assert axes >= {("*", "step"), ("cold_start/*", "cold_start/step")}
    assert [record.exit.exit_code for record in found if record.HasField("exit")] == [0, 1]


@pytest.mark.slow
@pytest.mark.usefixtures("extras")
def test_mlflow_gets_a_run_that_is_resumed_and_stopped(elsewhere: Path) -> None:
    folder = elsewhere / "run"
    _, hint = train(folder, config_of("mlflow"), range(1, 4))
    with pytest.raises(asyncio.CancelledError):
        train(folder, config_of("mlflow"), range(3, 5), resumed=2, error=asyncio.CancelledError)
    store = f"sqlite:///{elsewhere}/mlflow.db"
    assert hint == f"mlflow ui --backend-store-uri {store}"
    program = """if True:
        import json, sys, mlflow
        mlflow.set_tracking_uri(sys.argv[1])
        mlflow.set_experiment("titan_rl")
        client = mlflow.MlflowClient()
        (run,) = mlflow.search_runs(output_format="list")
        steps = [point.step for point in client.get_metric_history(run.info.run_id, "reward/mean")]
        files = sorted(file.path for file in client.list_artifacts(run.info.run_id))
        rows = mlflow.load_table("samples.json", run_ids=[run.info.run_id])["step"].tolist()
        data, info = run.data, run.info
        found = [info.run_id, info.run_name, info.status, data.tags, data.params["task.name"], data.metrics]
        print(json.dumps([*found, steps, files, rows]))
    """
    output = subprocess.run([sys.executable, "-c", program, store], capture_output=True, check=True, text=True).stdout
    id, name, status, tags, task, metrics, steps, files, rows = json.loads(output.splitlines()[-1])
    assert (id, name, status, task) == (read_ids(folder)["mlflow"], "run", "KILLED", "addition")
    assert tags.items() >= {"config": "tiny", "tag.tiny": "true", "attempt": "2"}.items()
    assert metrics.items() >= {"train/loss": 0.1, "0_overview/score": 0.75, "eval/hard/pass_2": 0.25}.items()
    assert (steps, files) == ([1, 2, 3, 3, 4], ["config.json", "samples.json", "summary.json"])
    assert rows == [1, 1, 2, 2, 4, 4]


@pytest.mark.slow
@pytest.mark.usefixtures("extras")
def test_trackio_gets_a_run_that_is_resumed_and_fails(elsewhere: Path) -> None:
    folder = elsewhere / "run"
    _, hint = train(folder, config_of("trackio"), range(1, 4))
    with pytest.raises(ZeroDivisionError):
        train(folder, config_of("trackio"), range(3, 5), resumed=2, error=ZeroDivisionError)
    assert hint == "trackio show --project titan_rl"
    (database,) = (elsewhere / "trackio").glob("titan_rl*.db")
    with sqlite3.connect(database) as store:
        ((name,),) = store.execute("SELECT DISTINCT run_name FROM metrics")
        points = [(step, json.loads(m)) for step, m in store.execute("SELECT step, metrics FROM metrics ORDER BY id")]
        titles = [title for (title,) in store.execute("SELECT title FROM alerts ORDER BY id")]
    assert name == read_ids(folder)["trackio"]
    assert name.startswith("run-")
    attempts = [(step, point["run/attempt"]) for step, point in points if "reward/mean" in point]
    assert attempts == [(1, 1), (2, 1), (3, 1), (3, 2), (4, 2)]
    assert [step for step, point in points if "samples" in point] == [1, 2, 4]
    assert titles == ["run finished", "run failed"]


class HangingServer:
    """Accepts connections and never answers."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    def __enter__(self) -> "HangingServer":
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()


def test_a_server_that_hangs_holds_up_no_step_and_the_end_only_until_the_deadline(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parent, "FLUSH_SECONDS", {"finished": 2.0})
    monkeypatch.setattr(parent, "MOST_WAITING", 50)
    monkeypatch.setattr(parent, "LATE_SECONDS", 0.0)
    warnings = Recorded()
    with HangingServer() as server:
        for name, value in {"WANDB_MODE": "online", "WANDB_BASE_URL": server.url, "WANDB_API_KEY": "a" * 40}.items():
            monkeypatch.setenv(name, value)
        began = time.monotonic()
        train(elsewhere / "run", config_of("wandb"), range(1, 201), warn=warnings.warn)
        assert 2.0 <= time.monotonic() - began < 10.0
    assert [text.partition(".")[0] for text in warnings] == [
        "wandb: has not answered for 0 s; the run continues, and its points wait",
        "wandb: does not keep up: 50 messages wait, and later ones are dropped",
        "wandb: did not finish in time: 51 messages were not sent",
    ]
    assert "metrics.jsonl has every point" in warnings[0]


@pytest.mark.parametrize("kind", ["fails", "dies"])
def test_a_tracker_that_fails_is_named_and_the_run_continues(
    kind: str, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = "raise OSError('no key')" if kind == "fails" else "import os; os._exit(3)"
    (elsewhere / "packages").mkdir()
    (elsewhere / "packages" / "wandb.py").write_text(package)
    monkeypatch.setenv("PYTHONPATH", f"{elsewhere}/packages{os.pathsep}{os.environ['PYTHONPATH']}")
    warnings = Recorded()
    train(elsewhere / "run", config_of("wandb"), range(1, 3), warn=warnings.warn)
    why = "OSError: no key" if kind == "fails" else "has ended with status 3"
    assert warnings[0].startswith(f"wandb: {why}. metrics.jsonl has every point; ")
    assert len([line for line in (elsewhere / "run" / "metrics.jsonl").read_text().splitlines() if '"rl"' in line]) == 2


def test_a_tracker_ends_its_run_after_the_controller_was_killed(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (elsewhere / "packages").mkdir()
    (elsewhere / "packages" / "wandb.py").write_text((Path(__file__).parents[3] / "support/tiny_wandb.py").read_text())
    monkeypatch.setenv("PYTHONPATH", f"{elsewhere}/packages{os.pathsep}{os.environ['PYTHONPATH']}")
    program = """if True:
        import sys, time
        from pathlib import Path
        from titan_rl.config.sections import Config, MetricsSection
        from titan_rl.ext.trackers.tracking import IDS, Trackers
        config = Config(metrics=MetricsSection(trackers=["wandb"]))
        trackers = Trackers(Path("run"), "tiny", config, resumed=False, warn=print)
        trackers.log("rl", 1, {"loss": 1.0}, {})
        while not Path("run", IDS).exists(): time.sleep(0.01)
        print("ready", flush=True)
        time.sleep(600)
    """
    run = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    assert run.stdout.readline() == "ready\n"
    run.send_signal(signal.SIGKILL)
    run.wait()
    deadline = time.monotonic() + 30
    while not (done := elsewhere / "run" / "ended").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert done.read_text() == "1 failed"


def test_a_run_that_starts_over_is_another_one_and_a_rewound_one_is_not(tmp_path: Path) -> None:
    (tmp_path / parent.IDS).write_text('{"attempt": 3, "wandb": "abc"}')
    continued = Trackers(tmp_path, "tiny", config_of(), resumed=True, warn=pytest.fail)
    assert (continued._ids, continued._attempt) == ({"attempt": 4, "wandb": "abc"}, 4)
    assert Trackers(tmp_path, "tiny", config_of(), resumed=False, warn=pytest.fail)._ids == {"attempt": 1}
    (tmp_path / parent.IDS).write_text("torn")
    assert read_ids(tmp_path) == {}


def test_passwords_stay_on_this_machine() -> None:
    config = Config(
        task=TaskSection(
            reward_args={"judge_url": "http://me:hush@judge/v1", "judge_key": "hush", "api_token": "hush", "tokens": 5}
        ),
        hosts=HostsSection(ssh="sshpass -p hush ssh"),
        launch=LaunchSection(extra_args=["--token=hush"]),
    )
    found = public_config(config)
    assert "hush" not in json.dumps(found)
    assert found["task"]["reward_args"] == {
        "judge_url": "http://(hidden)@judge/v1",
        "judge_key": "(hidden)",
        "api_token": "(hidden)",
        "tokens": 5,
    }
    assert found["optimizer"]["lr"] == config.optimizer.lr


def test_the_overview_comes_first_and_samples_are_the_best_and_the_worst() -> None:
    names = sorted(grouped({**METRICS, **overview(METRICS)}))
    assert names[:3] == ["0_overview/entropy", "0_overview/gap", "0_overview/reward"]
    assert overview({"loss": 0.5, "eval/score": 1.0}) == {"0_overview/loss": 0.5, "0_overview/score": 1.0}
    assert sample_rows(3, [group()] * 9)[:2] == [
        [3, 7, "12+34=", "640", "640", 1.0, 0.5, "stop"],
        [3, 7, "12+34=", "640", "", 0.0, -0.5, "stop"],
    ]
    assert len(sample_rows(3, [group()] * 9)) == 8
    assert sample_rows(1, [Group(group().prompt, [rollout(1.0, "\ud800" + 9000 * "x")])])[0][4] == "?" + 7999 * "x"
    assert sample_rows(1, [Group(group().prompt, [])]) == []


def test_tensorboard_has_the_overview_the_config_and_samples(tmp_path: Path) -> None:
    train(tmp_path, config_of("tensorboard"), range(1, 4))
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    assert [point.value for point in events.Scalars("0_overview/reward")] == [0.5] * 3
    assert "[optimizer]" in events.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    assert [point.step for point in events.Tensors("samples/text_summary")] == [1, 2]
    assert "text: 640" in events.Tensors("samples/text_summary")[0].tensor_proto.string_val[0].decode()


def test_no_tracker_starts_no_process(tmp_path: Path) -> None:
    assert SERVICES == ("wandb", "trackio", "mlflow")
    assert train(tmp_path, config_of(), range(1, 2)) == [f"{command_of('view')} {tmp_path}"]
    assert not (tmp_path / "trackers").exists()
    assert not (tmp_path / parent.IDS).exists()
