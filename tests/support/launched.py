"""titan_rl.tools.launch as its user starts it, with a stand-in for the job's Python."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from support.ctrl_c import hears_ctrl_c


class Launched:
    """Launches jobs whose Python is `stand_in`, which takes what to do from the file `codes`."""

    def __init__(self, folder: Path, run: str, stand_in: str, *flags: str) -> None:
        self.folder, self.run, self._flags = folder, folder / run, flags
        self.started: list[subprocess.Popen[str]] = []
        self.python = folder / "python"
        self.python.write_text(stand_in)
        self.python.chmod(0o755)

    def flags(self, *more: str) -> list[str]:
        own = [f"--job.dump_folder={self.run}", f"--launch.python={self.python}", "--eval.size=16"]
        return ["--config", "grpo_llama", "--poll", "0.05", *own, *self._flags, *more]

    def start(self, codes: Sequence[object], *more: str) -> subprocess.Popen[str]:
        (self.folder / "codes").write_text("".join(f"{code}\n" for code in codes))
        process = subprocess.Popen(
            [sys.executable, "-m", "titan_rl", "launch", *self.flags(*more)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=self.folder,
            preexec_fn=hears_ctrl_c,
        )
        self.started.append(process)
        return process

    def finish(self, codes: Sequence[object], *more: str) -> tuple[int, str]:
        process = self.start(codes, *more)
        out, _ = process.communicate(timeout=120)
        return process.returncode, out

    def calls(self) -> list[str]:
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []

    def end(self) -> None:
        for process in self.started:
            process.kill()  # a test that failed left it
            process.communicate()
