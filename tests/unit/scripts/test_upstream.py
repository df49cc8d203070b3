"""docs/upstream and scripts/upstream: patches have the form of git am, and the command reports each outcome."""

import subprocess
import sys
from pathlib import Path

import pytest
import upstream

KNOWN = upstream.contributions()
MOST_LINES = 150  # changed lines of one patch without tests
EARLIER = sorted(upstream.FOLDER.glob("*/earlier/*.patch"))
PATCHES = [*EARLIER, *(patch for each in KNOWN.values() for patch in each.patches)]


def command(*args: str) -> subprocess.CompletedProcess[str]:
    program = upstream.ROOT / "scripts/upstream.py"
    return subprocess.run([sys.executable, program, *args], capture_output=True, text=True)


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: f"{patch.parent.name}/{patch.name}")
def test_a_patch_has_the_form_of_git_am_and_is_small(patch: Path, tmp_path: Path) -> None:
    files = [tmp_path / "message", tmp_path / "patch"]
    text = patch.read_text(encoding="utf-8")
    mail = subprocess.run(["git", "mailinfo", *files], input=text, capture_output=True, text=True, check=True).stdout
    assert "Author: titan_rl authors" in mail
    assert "Subject: " in mail
    assert len(files[0].read_text().split()) > 20, "the message tells problem, cause and fix"
    lines = [sum(pair) for path, pair in upstream.changes([patch]).items() if not upstream.in_tests(path)]
    assert sum(lines) < MOST_LINES


@pytest.mark.parametrize("name", KNOWN)
def test_a_contribution_is_whole(name: str) -> None:
    each = KNOWN[name]
    assert (upstream.FOLDER / name / "README.md").exists()
    assert each.patches
    assert each.project in upstream.PROJECTS
    assert set(each.tests) <= set(upstream.changes(each.patches)), "the new tests are in the patches"
    assert set(each.after) <= set(KNOWN)
    for removal in each.removes:
        assert removal.lines() > 0
        assert f"docs/upstream/{name}" in (upstream.ROOT / removal.file).read_text(), "a work-around names its patch"


def test_the_page_has_the_table_of_lines_that_go_here() -> None:
    assert upstream.lines_table() in (upstream.FOLDER / "README.md").read_text(encoding="utf-8")


def test_the_page_has_each_contribution_once_in_the_order_of_sending() -> None:
    page = (upstream.FOLDER / "README.md").read_text(encoding="utf-8")
    order = page.partition("## Sending order")[2].partition("\n## ")[0]
    for name, each in KNOWN.items():
        assert order.count(f"**[{each.title}]({name}/README.md)**") == 1
        assert f"{each.diffstat()}; `scripts/upstream {name}" in order


def test_changes_apply_to_the_installed_packages_or_the_command_names_those_that_do_not() -> None:
    done = command("--check")
    assert done.returncode in (0, 1), done.stderr
    assert "Traceback" not in done.stderr
    for name in KNOWN:
        row = next(line for line in done.stdout.splitlines() if line.startswith(f"| {name} |"))
        assert row.endswith("| yes |") or f"{name}: does not apply to " in done.stdout


def test_a_source_of_another_version_is_answered_by_name(tmp_path: Path) -> None:
    (tmp_path / "torchtitan/models").mkdir(parents=True)
    name = next(each.name for each in KNOWN.values() if each.project == "torchtitan")
    done = command(name, "--source", f"torchtitan={tmp_path}")
    assert done.returncode == 1
    assert f"{name}: does not apply to {tmp_path}: torchtitan/" in done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("folder", ["rl", "experiments/rl"])
def test_a_change_of_rl_is_tried_under_the_names_from_before_the_move(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, line = f"torchtitan/{folder}/loss.py", f"import torchtitan.{folder.replace('/', '.')}.types\n"
    (tmp_path / "tree" / module).parent.mkdir(parents=True)
    (tmp_path / "tree" / module).write_text(line)
    (tmp_path / "change").mkdir()
    head = "--- a/torchtitan/rl/loss.py\n+++ b/torchtitan/rl/loss.py\n@@ -1 +1,2 @@\n"
    (tmp_path / "change/0001.patch").write_text(f"{head} import torchtitan.rl.types\n+import torchtitan.rl.rubric\n")
    monkeypatch.setattr(upstream, "FOLDER", tmp_path)
    change = upstream.Contribution("change", "torchtitan", "", "", tests=())
    trial = upstream.Trial(change, {"torchtitan": tmp_path / "tree"}, tmp_path / "copies")
    trial.make_copy(checkout=True)
    assert not trial.apply(change.patches)
    added = "torchtitan.rl.rubric" if folder == "rl" else "torchtitan.experiments.rl.rubrics"
    assert (trial.copy / module).read_text() == f"{line}import {added}\n"


@pytest.mark.parametrize("folder", ["rl", "experiments/rl"])
def test_a_tree_from_before_the_move_gets_the_earlier_form_of_a_patch(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tree/torchtitan" / folder).mkdir(parents=True)
    head = "--- /dev/null\n+++ b/{}\n@@ -0,0 +1 @@\n+{}\n"
    (tmp_path / "change/earlier").mkdir(parents=True)
    (tmp_path / "change/0001.patch").write_text(head.format("torchtitan/rl/gpu.py", "new"))
    (tmp_path / "change/earlier/0001.patch").write_text(head.format("torchtitan/experiments/rl/cpu.py", "old"))
    monkeypatch.setattr(upstream, "FOLDER", tmp_path)
    change = upstream.Contribution("change", "torchtitan", "", "", tests=())
    trial = upstream.Trial(change, {"torchtitan": tmp_path / "tree"}, tmp_path / "copies")
    trial.make_copy(checkout=True)
    assert not trial.apply(change.patches)
    found = [path.name for path in (trial.copy / "torchtitan" / folder).iterdir()]
    assert found == (["gpu.py"] if folder == "rl" else ["cpu.py"])


def test_an_earlier_form_belongs_to_a_patch() -> None:
    assert EARLIER
    for patch in EARLIER:
        assert (patch.parents[1] / patch.name).exists()


def test_tests_that_the_release_is_too_old_for_are_not_begun() -> None:
    done = command("cispo-loss")
    assert done.returncode == 1
    assert "cispo-loss: needs a tree newer than torchtitan " in done.stdout


def test_wrong_calls_are_answered_together_before_anything_runs(tmp_path: Path) -> None:
    done = command("no-such", "--source", "torchtitan", "--keep", str(tmp_path), "--all")
    assert done.returncode == 2
    assert not done.stdout
    for part in ("no contribution 'no-such'", "--source: expected PROJECT=PATH", "--keep: ", "--all takes no NAME"):
        assert part in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", KNOWN)
def test_new_tests_fail_before_the_change_and_pass_after_it(name: str) -> None:
    done = command(name)
    if done.returncode and ("does not apply to" in done.stdout or " needs " in done.stdout):
        pytest.skip(done.stdout.splitlines()[-1])  # another version than the change's, or packages that only it needs
    assert done.returncode == 0, done.stdout
