"""One class per tracker, with the same four methods. They run in a tracker's own process and may block.

Each begins or continues a run when it is made. `id` names that run for the next process. `where` is a command or an
address that shows it.
"""

import json
import os
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

from titan_rl.ext.trackers.messages import Begin, Service
from titan_rl.record.sample_rows import COLUMNS, FIRST
from titan_rl.record.sinks import Axis, State

Histograms = Mapping[str, tuple[Sequence[float], Sequence[float]]]
"""By name: counts, and the edges between which they are."""

# A run sends what metrics.trackers asks for, and no reports about itself to the trackers' makers.
ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "WANDB_ERROR_REPORTING": "false",
    "WANDB_DISABLE_CODE": "true",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",  # seconds; the default is 120
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3",
}


class Tracker(Protocol):
    id: str
    where: str

    def log(self, axis: Axis, step: int, scalars: Mapping[str, float], histograms: Histograms) -> None: ...

    def samples(self, step: int, rows: Sequence[Sequence[Any]]) -> None:
        """Log rows of COLUMNS."""
        ...

    def attempt(self, attempt: int) -> None:
        """Note that the points from now on are of another attempt."""
        ...

    def finish(self, state: State, summary: Mapping[str, Any]) -> None: ...


class Wandb:
    """Points have their own axes: W&B's own step only grows, and would drop the points of steps that are repeated."""

    def __init__(self, begin: Begin) -> None:
        import wandb

        self._wandb = wandb
        self.id = begin.id or secrets.token_hex(4)
        self._run = wandb.init(
            project=begin.project,
            name=begin.name,
            id=self.id,
            group=begin.group,
            tags=list(begin.tags) or None,
            config={**begin.config, "attempt": begin.attempt},
            dir=os.environ.get("WANDB_DIR", begin.folder),
            allow_val_change=True,
            resume="allow",
            settings=wandb.Settings(console="off", silent=True),
        )
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        self._run.define_metric("cold_start/step", hidden=True)
        self._run.define_metric("cold_start/*", step_metric="cold_start/step")
        offline = f"wandb sync {Path(self._run.dir).parent.parent}/offline-run-*"  # a resumed run has several
        self.where = offline if self._run.offline else self._run.url or ""

    def log(self, axis: Axis, step: int, scalars: Mapping[str, float], histograms: Histograms) -> None:
        drawn = {name: self._wandb.Histogram(np_histogram=cast(Any, pair)) for name, pair in histograms.items()}
        self._run.log({"step" if axis == "rl" else "cold_start/step": step, **scalars, **drawn})

    def samples(self, step: int, rows: Sequence[Sequence[Any]]) -> None:
        table = self._wandb.Table(columns=list(COLUMNS), data=[list(row) for row in rows])
        self._run.log({"step": step, f"{FIRST}/samples": table})

    def attempt(self, attempt: int) -> None:
        self._run.config.update({"attempt": attempt}, allow_val_change=True)

    def finish(self, state: State, summary: Mapping[str, Any]) -> None:
        self._run.summary.update({"run": dict(summary), "state": state})
        self._run.finish(exit_code=0 if state == "finished" else 1)


class Trackio:
    """Trackio continues a run by its name, so a name ends with the run's id."""

    def __init__(self, begin: Begin) -> None:
        import trackio  # pyright: ignore[reportMissingImports]

        self._trackio = trackio
        self.id = begin.id or f"{begin.name}-{secrets.token_hex(2)}"
        trackio.init(
            begin.project,
            name=self.id,
            group=begin.group,
            config={**begin.config, "tags": list(begin.tags)},
            resume="allow",
            embed=False,
            auto_log_cpu=False,
        )
        server = os.environ.get("TRACKIO_SPACE_ID") or os.environ.get("TRACKIO_SERVER_URL", "").partition("?")[0]
        self.where = server or f"trackio show --project {begin.project}"
        self.attempt(begin.attempt)

    def log(self, axis: Axis, step: int, scalars: Mapping[str, float], histograms: Histograms) -> None:
        drawn = {name: self._trackio.Histogram(np_histogram=pair) for name, pair in histograms.items()}
        self._trackio.log({**scalars, **drawn, "run/attempt": self._attempt}, step=step)

    def samples(self, step: int, rows: Sequence[Sequence[Any]]) -> None:
        table = self._trackio.Table(columns=list(COLUMNS), data=[list(row) for row in rows])
        self._trackio.log({"samples": table}, step=step)

    def attempt(self, attempt: int) -> None:
        self._attempt = attempt

    def finish(self, state: State, summary: Mapping[str, Any]) -> None:
        level = self._trackio.AlertLevel.INFO if state == "finished" else self._trackio.AlertLevel.ERROR
        self._trackio.alert(f"run {state}", json.dumps(summary, default=str), level=level)
        self._trackio.finish()


class Mlflow:
    """Parameters of an MLflow run cannot change: they are the first process's. config.json is the newest one's."""

    def __init__(self, begin: Begin) -> None:
        import mlflow  # pyright: ignore[reportMissingImports]

        self._mlflow = mlflow
        mlflow.set_experiment(begin.project)
        own = {"config": begin.group, "folder": begin.folder, "mlflow.source.name": "titan_rl"}
        tags = {**own, **{f"tag.{tag}": "true" for tag in begin.tags}}
        run = mlflow.start_run(run_id=begin.id or None, run_name=begin.name, tags=tags, log_system_metrics=False)
        self.id = run.info.run_id
        if not begin.id:
            values = {f"{s}.{key}": value for s, keys in begin.config.items() for key, value in keys.items()}
            mlflow.log_params({key: str(value)[:6000] for key, value in values.items()})
        mlflow.log_dict({section: dict(keys) for section, keys in begin.config.items()}, "config.json")
        store = mlflow.get_tracking_uri()
        page = f"{store}/#/experiments/{run.info.experiment_id}/runs/{self.id}"
        self.where = PASSWORD.sub("//", page) if store.startswith("http") else f"mlflow ui --backend-store-uri {store}"
        self.attempt(begin.attempt)

    def log(self, axis: Axis, step: int, scalars: Mapping[str, float], histograms: Histograms) -> None:
        self._mlflow.log_metrics({MLFLOW_FORBIDS.sub("_", name): value for name, value in scalars.items()}, step=step)

    def samples(self, step: int, rows: Sequence[Sequence[Any]]) -> None:
        columns = {name: [row[at] for row in rows] for at, name in enumerate(COLUMNS)}
        self._mlflow.log_table(columns, "samples.json")

    def attempt(self, attempt: int) -> None:
        self._mlflow.set_tag("attempt", attempt)

    def finish(self, state: State, summary: Mapping[str, Any]) -> None:
        self._mlflow.log_dict(dict(summary), "summary.json")
        self._mlflow.end_run({"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}[state])


MLFLOW_FORBIDS = re.compile(r"[^\w\-. :/]")  # in names of metrics
PASSWORD = re.compile(r"//[^/@]*@")
CLASSES: dict[Service, Callable[[Begin], Tracker]] = {"wandb": Wandb, "trackio": Trackio, "mlflow": Mlflow}
