"""The shell blocks of README and of the pages, pasted one by one into a checkout, as a reader does."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from titan_rl.ext.fork_servers.fork_servers import VARIABLE

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", *(f"docs/{page.name}" for page in sorted(ROOT.glob("docs/*.md"))))
BLOCK = re.compile(r"```(?:bash|sh)\n(.*?)```", re.DOTALL)
SECONDS = 900.0
MINE = """\
base = "grpo_llama"
[job]
dump_folder = "outputs/my_run"
[cold_start]
steps = 20
stop_at = 0
[training]
steps = 4
[eval]
keep_best = "eval/score"
"""
"""The reader's own config. Those of the pages need a model that no package brings."""

ELSEWHERE = {
    r"phone|make_rows|phonebook|venv/bin/activate": "tests/system/test_tutorial.py",
    r"grpo_smollm2\.toml|policies_smollm2|grpo_smollm2_lora": "tests/system/test_smollm2.py, test_policies.py",
    r"--scale tiny$": "tests/system/test_tiny_scale.py",
    r"rlhf": "tests/system/test_rlhf.py",
    r"serve": "tests/system/test_deployed.py, test_tinker.py",
    r"chaos": "tests/system/test_chaos.py",
    r"worker|attach": "tests/system/test_hosts.py, test_namespaces.py",
    r"--on slurm": "tests/system/test_real_slurm.py, test_cluster_jobs.py",
    r"pip install": "tests/system/test_install.py",
    r"scripts/(test|check)|\.ci/run": "what runs this test",
}
"""Commands that another test runs."""
NEEDED = {
    r"/models/|path/to/|hf_folder|model\.gguf": "a model or file of the reader",
    r"OPENAI_|TINKER_|^export|lm_eval|curl|docker": "a server, or another program",
    r"grpo_llama3_\w+b?( --dry-run)?$|grpo_llama3_8b --dry-run|launch --config": "a model of the Hub",
    r"--debug": "a person at the debugger",
    r"outputs/mine": "a run with another evaluation set",
}
"""Commands that need what no test has."""


def commands(page: str) -> list[str]:
    """Return the commands of a page's shell blocks, each on one line and without its comment."""
    text = "\n".join(BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))).replace("\\\n", " ")
    lines = (re.sub(r"\s+", " ", re.sub(r"(^|\s)#.*", "", line)).strip() for line in text.splitlines())
    return [line for line in dict.fromkeys(lines) if line]


def left_out(command: str) -> bool:
    return any(re.search(pattern, command) for pattern in (*ELSEWHERE, *NEEDED))


PASTED = [(page, command) for page in PAGES for command in commands(page) if not left_out(command)]


class Reader:
    """A copy of the checkout, with the environment of this one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        ignored = shutil.ignore_patterns(".venv", ".git", "outputs", "__pycache__", ".*_cache", ".hypothesis")
        shutil.copytree(ROOT, folder, symlinks=True, ignore=ignored)
        (folder / ".venv").symlink_to(ROOT / ".venv")
        (folder / "my_run.toml").write_text(MINE)
        self.paste("./scripts/run --config grpo_llama.toml")
        self.paste("./scripts/run --config grpo_llama --training.steps 42 --record.batches 2 --job.dump_folder RUN")
        for name in ("a", "b"):
            shutil.copytree(folder / "outputs/grpo_llama", folder / "outputs" / name)

    def paste(self, command: str) -> str:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        environment = {**{k: v for k, v in os.environ.items() if k != VARIABLE}, "PATH": path}
        process = subprocess.Popen(
            ["bash", "-c", command],
            cwd=self.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        if "--watch" in command:  # until Ctrl-C
            assert process.stdout is not None
            said = process.stdout.readline()
            time.sleep(1)
            os.killpg(process.pid, signal.SIGINT)
            said += process.communicate(timeout=60)[0]
            assert process.returncode in (0, 130), said
            return said
        try:
            said, _ = process.communicate(timeout=SECONDS)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        assert process.returncode == 0, f"{command}\n{said}"
        return said


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Reader:
    return Reader(tmp_path_factory.mktemp("reader") / "titan_rl")


@pytest.mark.parametrize(("page", "command"), PASTED, ids=[command[:100] for _, command in PASTED])
def test_a_pasted_command_does_what_the_page_says(reader: Reader, page: str, command: str) -> None:
    if "--config my_run.toml" in command:
        shutil.rmtree(reader.folder / "outputs/my_run", ignore_errors=True)
    assert reader.paste(command).strip(), f"{page}: {command} prints nothing"
