"""`python -m titan_rl chaos --config NAME --kills N --seed S`: start a run, inject faults into it, and audit it.

    schedule (from the seed) ── step reached, run healthy ──> inflict ──> detected ──> recovered ──> next fault
                                                                          end of the run ──> audits, report

Exit codes: 0 everything held, 1 something did not hold and is named, 2 bad usage, 130 stopped by Ctrl-C.
"""

import argparse
import asyncio
import datetime
import math
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from titan_rl.preflight.checks import checked_run
from titan_rl.preflight.load import Invocation
from titan_rl.preflight.refusal import refuse
from titan_rl.record.provenance import git_commit
from titan_rl.record.terminal import open_console
from titan_rl.tools.chaos.inflict import inflict
from titan_rl.tools.chaos.outcome import FaultOutcome
from titan_rl.tools.chaos.schedule import CONTROLLER, DOCS, KINDS, VICTIMS, Fault, cases, problems, role_of, schedule
from titan_rl.tools.chaos.subject import ChaosRun, RunEnded, RunStuck
from titan_rl.tools.chaos.table import Findings, show, write
from titan_rl.tools.chaos.verdict import audits, shared_memory
from titan_rl.tools.inspect.run_files import RunFiles
from titan_rl.wire.failpoints import FaultOrder, give
from titan_rl.wire.program import command_of

HELD, BROKEN, USAGE, STOPPED = 0, 1, 2, 130
DEFAULTS = {  # the run's keys; the command line overrides them
    "job.fresh": "true",
    "fault.max_restarts": "1000000",
    "fault.max_failed_saves": "1000000",
    "fault.hang_seconds": "5",
    "fault.snapshot_interval": "2",
    "comm.init_timeout_seconds": "60",  # hangs of processes that have just started must be noticed within PATIENCE
    "comm.train_timeout_seconds": "20",
    "algorithm.max_dead_steps": "0",
}
PATIENCE = 180.0
LAST_LINES = 20  # lines of output that are shown if the run failed


def main(argv: Sequence[str]) -> int:
    options, rest = parser().parse_known_args(argv)
    flags = [f"--{key}={value}" for key, value in {**DEFAULTS, "job.dump_folder": options.run}.items()]
    invocation = checked_run(["--config", options.config, *flags, *rest])
    console = open_console(sys.stdout)
    chaos = Chaos(options, ["--config", options.config, *flags, *rest], invocation, console)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # both signals end the run
    try:
        return chaos.run()
    except KeyboardInterrupt:
        show(chaos.findings, console)
        console.print("chaos: stopped, together with the run")
        return STOPPED


def parser() -> argparse.ArgumentParser:
    width = max(map(len, KINDS))
    parser = argparse.ArgumentParser(
        prog=command_of("chaos"),
        description="Start a run, inject random faults into it, and check that it survives them.",
        epilog="\n".join(
            [
                "faults:",
                *(f"  {kind:<{width}}  {doc}" for kind, doc in DOCS.items()),
                "",
                "All other flags, such as --training.steps 200, are passed to the run, after these defaults:",
                "  " + " ".join(f"--{key} {value}" for key, value in DEFAULTS.items()),
            ]
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="NAME|FILE", required=True, help="a shipped config, or a TOML file")
    parser.add_argument("--kills", metavar="N", type=int, default=20, help="number of faults; default 20")
    parser.add_argument("--seed", metavar="S", type=int, default=0, help="seed of the schedule of faults; default 0")
    parser.add_argument("--run", metavar="FOLDER", default="outputs/chaos", help="dump folder; default outputs/chaos")
    parser.add_argument("--only", metavar="KIND[:ROLE],...", default="", help="only these faults, of these roles")
    parser.add_argument("--overlap", action="store_true", help="inject the next fault before the run has recovered")
    parser.add_argument("--baseline", action="store_true", help="first do the same run without faults, to compare")
    parser.add_argument(
        "--pace", metavar="SECONDS", type=seconds, default=0.0, help="minimum duration of a step; default 0"
    )
    parser.add_argument(
        "--every",
        metavar="SECONDS",
        type=seconds,
        default=0.0,
        help="inject the faults this far apart, instead of at steps that the seed determines",
    )
    parser.add_argument(
        "--patience",
        metavar="SECONDS",
        type=seconds,
        default=PATIENCE,
        help=f"longest time without a new step before the run counts as stuck; default {PATIENCE:g}",
    )
    parser.add_argument("--csv", metavar="FILE", type=Path, help="append a row per class of fault")
    return parser


def seconds(text: str) -> float:
    if not 0 <= (value := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number of seconds of at least 0, found {text}")
    return value


class Chaos:
    """One invocation: at most two runs, one after the other."""

    def __init__(self, options: argparse.Namespace, argv: list[str], invocation: Invocation, console: Console) -> None:
        self._options, self._argv, self._config, self._console = options, argv, invocation.config, console
        self._only = [part for part in options.only.split(",") if part]
        if invocation.config.weight_sync.verify != "live":  # damage would not be detected
            self._only = [part for part in self._only or KINDS if not part.startswith("corrupt")]
        if options.overlap:  # faults of the controller are faults of everything
            self._only = [part for part in self._only or KINDS if VICTIMS.get(part.split(":")[0]) != (CONTROLLER,)]
        self._folder = Path(self._config.job.dump_folder).absolute()
        config = self._config
        roles = ["trainer", *(["generator"] if config.samples_rollouts else []), *config.roles]
        roles += ["environment"] if config.rollout_code else []
        found = problems(options.kills, roles, self._config.training.steps, self._only)
        if found:
            refuse("the command line", found)
        self.findings = Findings(options.seed, options.kills)

    def run(self) -> int:
        findings, options = self.findings, self._options
        if options.baseline:
            self._say("baseline: the same run without faults")
            folder = self._folder.with_name(f"{self._folder.name}.baseline")
            why_early = self._do_run(folder, [*self._argv, "--job.dump_folder", str(folder)], 0)
            if why_early:
                self._say(why_early)
                return BROKEN
            findings.facts["baseline held-out score"] = RunFiles(folder).summary().get("final_eval")
            findings.facts["baseline seconds"] = round(RunFiles(folder).summary().get("wall_seconds", 0.0), 1)
        findings.ended = self._do_run(self._folder, self._argv, options.kills)
        done = RunFiles(self._folder).summary()
        findings.facts["held-out score"] = done.get("final_eval")
        findings.facts["seconds"] = round(done.get("wall_seconds", 0.0), 1)
        if options.baseline and done:
            goodput = findings.facts["baseline seconds"] / findings.facts["seconds"]
            findings.facts["goodput"] = f"{goodput:.3f} of the baseline's"
        show(findings, self._console)
        machine, versions = done.get("machine", {}), done.get("versions", {})
        facts = {
            "date": str(datetime.date.today()),
            "commit": git_commit()[:12],
            "config": options.config,
            "seed": options.seed,
            "machine": f"{machine.get('cores')} x {machine.get('cpu')}",
            "engines": ", ".join(f"{name} {version}" for name, version in versions.items() if name != "python"),
        }
        write(findings, self._folder, options.csv, facts)
        self._say(f"results are in {self._folder}: chaos.json, chaos.log")
        return BROKEN if findings.problems else HELD

    def _do_run(self, folder: Path, argv: list[str], count: int) -> str:
        """Start a run, inject `count` faults and audit it; with 0 faults it is not audited. Return why it ended early,
        or ""."""
        shared = shared_memory()
        with tempfile.TemporaryDirectory(prefix="titan_rl-chaos-") as orders:
            run = ChaosRun(argv, folder, Path(orders), self._options.patience)
            try:
                why_early = asyncio.run(self._follow_run(run, count))
                failed = run.ended and run.process.returncode != 0
            finally:
                outlived = run.end()
                if folder.is_dir():
                    shutil.copy(run.log, folder / "chaos.log")
            if failed:
                self._say("the run's last output:\n" + "\n".join(line.text for line in run.output[-LAST_LINES:]))
                if run.process.returncode == USAGE:
                    raise SystemExit(USAGE)
            if count:
                self.findings.audits = audits(run, shared, outlived)
            elif failed:
                why_early = f"the run without faults failed: exit code {run.process.returncode}"
            return why_early

    async def _follow_run(self, run: ChaosRun, count: int) -> str:
        """Inject the faults and wait for the end of the run. Return why the run or the faults ended early, or ""."""
        following = asyncio.create_task(run.follow())
        why_early = ""
        try:
            await run.until("the first step", lambda: run.healthy)
            if self._options.pace:
                first = next(rank for rank in sorted(run.ranks) if role_of(rank) == "trainer")
                give(run.orders, first, "step", FaultOrder("wait", self._options.pace, keep=True))
            if count:
                await self._inject_all(run, count)
            await run.until("the end of the run", lambda: run.ended)
        except RunStuck as stuck:
            why_early = str(stuck)
        except RunEnded:
            pass
        finally:
            following.cancel()
            with suppress(asyncio.CancelledError):
                await following
        run.read_files()
        reached = len(self.findings.outcomes)
        if not why_early and run.process.returncode == 0 and count and reached < count:
            why_early = f"the run ended after {reached} of {count} faults: raise --training.steps or --pace"
        return why_early

    async def _inject_all(self, run: ChaosRun, count: int) -> None:
        every = cases(run.ranks, self._only)
        self._say(f"{count} faults from {len(every)} cases over {self._config.training.steps} steps")
        last, began, tasks = 0, time.monotonic(), list[asyncio.Task[None]]()
        try:
            for fault in schedule(self._options.seed, count, run.ranks, self._config.training.steps, self._only):
                every = self._options.every
                if every:
                    await asyncio.sleep(began + (len(tasks) + 1) * every - time.monotonic())
                    fault = replace(fault, step=0)
                await run.until(f"step {fault.step}", lambda f=fault, after=last: self._due(run, f, after))
                await asyncio.sleep(fault.delay)
                last = run.highest
                tasks.append(asyncio.create_task(self._inject(run, fault)))
                if not self._options.overlap:
                    await tasks[-1]
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _due(self, run: ChaosRun, fault: Fault, after: int) -> bool:
        """Return True if the fault may be injected now. Every fault has its own step, because the run takes a second
        exception at the same step for a bug."""
        ready = fault.victim in run.ranks if self._options.overlap else run.healthy
        return ready and run.step > after and run.step >= fault.step

    async def _inject(self, run: ChaosRun, fault: Fault) -> None:
        outcome = FaultOutcome(fault, run.step, alone=not self._options.overlap)
        self.findings.outcomes.append(outcome)
        number = len(self.findings.outcomes)
        self._say(f"{number:>3}  step {run.step}: {fault.what} of {fault.victim}")
        try:
            await inflict(fault, run, self._config.fault.hang_seconds, outcome)
        except RunEnded:
            outcome.note = "the run ended first"
            raise
        except RunStuck as stuck:
            outcome.wrong.append(str(stuck))
            raise
        except ProcessLookupError:  # happens if faults overlap
            outcome.note = f"{fault.victim} had already ended"
        detected = "" if outcome.detected is None else f"detected after {outcome.detected:.2f} s, "
        times = f"{number:>3}  {detected}recovered after {outcome.recovered or 0.0:.1f} s"
        self._say("; ".join([times, *outcome.wrong]))

    def _say(self, text: str) -> None:
        self._console.print(f"chaos: {text}", soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
