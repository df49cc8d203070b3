"""A tracker without its package, name or key is answered before anything starts."""

import sys
from pathlib import Path

import pytest

from titan_rl.config.sections import Config, MetricsSection
from titan_rl.ext.trackers import checks
from titan_rl.preflight.checks import problems, warnings


def config_of(*trackers: str) -> Config:
    return Config(metrics=MetricsSection(trackers=list(trackers)))


def about_trackers(found: list[str]) -> list[str]:
    return [line for line in found if line.startswith("metrics.")]


@pytest.mark.parametrize("name", ["wandb", "trackio", "mlflow"])
def test_a_missing_package_is_refused_with_what_installs_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "is_installed", lambda package: package != name)
    assert about_trackers(problems(config_of("tensorboard", name))) == [
        f"metrics.trackers: \"{name}\" needs the package {name}: pip install 'titan-rl[{name}]'"
    ]


def test_mlflow_needs_a_database_only_without_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "is_installed", lambda package: package == "mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    (problem,) = about_trackers(problems(config_of("mlflow")))
    assert "needs the package sqlalchemy and alembic: pip install 'titan-rl[mlflow]'" in problem
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://mlflow")
    assert about_trackers(problems(config_of("mlflow"))) == []


def test_what_wandb_left_in_the_current_folder_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "left_by_a_tracker").mkdir()
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    assert not checks.is_installed("left_by_a_tracker")
    assert checks.is_installed("tensorboard")


def test_an_unknown_tracker_is_refused() -> None:
    (problem,) = about_trackers(problems(config_of("wadnb")))
    assert problem.endswith("found \"wadnb\"; did you mean 'wandb'?")


def test_wandb_without_a_key_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    (warning,) = about_trackers(warnings(config_of("wandb")))
    assert "WANDB_MODE=offline" in warning
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password hush")
    (tmp_path / "netrc").chmod(0o600)
    assert about_trackers(warnings(config_of("wandb"))) == []
    (tmp_path / "netrc").unlink()
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert about_trackers(warnings(config_of("wandb"))) == []
