"""`python -m titan_rl launch --config X --on slurm|kubernetes`: submit a run to a cluster's scheduler, and follow it.

    check, as --dry-run does ── --print ──> the script, or the manifests
                             ├─ --here ───> the script runs in the allocation of this shell
                             └─ submit ──> in the queue, and why ──> the run's log ──> its exit code

Exit codes: the run's own; 1 if the scheduler refused or lost the job, 2 bad input, 130 also if Ctrl-C ended the
following: the job continues.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from titan_rl.config import toml as config_file
from titan_rl.config.sections import Config, HostsSection
from titan_rl.environment import private_folder
from titan_rl.ext.tiny.shrink import HOSTS
from titan_rl.preflight.checks import judged
from titan_rl.preflight.load import Arguments, Invocation, load, read
from titan_rl.preflight.refusal import refuse, refusing
from titan_rl.record.run_folder import FolderRefused, check_folder
from titan_rl.record.run_lock import RunLock
from titan_rl.record.terminal import Terminal, open_console
from titan_rl.tools.launch import sbatch
from titan_rl.tools.launch.cluster_api import find_cluster
from titan_rl.tools.launch.following import ENDED, SubmissionFailed, follow
from titan_rl.tools.launch.job import Job, check_submission
from titan_rl.tools.launch.kubernetes_job import KubernetesJob, live_kubernetes_job, submit_manifests
from titan_rl.tools.launch.manifests import as_yaml, manifests, new_secret, tls_secret
from titan_rl.tools.launch.slurm_queue import SlurmJob, check_allocation, run_script, submit_script
from titan_rl.wire.program import DONE, FAILED, command_of, enter

RECORD = "job.json"  # the job that was submitted last
RUNS_ALREADY = " runs this already: it is followed, nothing is submitted"
ONLY_SLURM = "--here: expected --on slurm, found kubernetes"
WHERE = ("kind", "count", "addresses", "own_address", "tls", "insecure")  # keys of [hosts] that --scale leaves
POLL_SECONDS = 5.0  # schedulers ask not to be asked more often


def main(argv: Sequence[str]) -> int:
    options, rest = parser().parse_known_args(argv)
    with private_folder():
        invocation = checked(options, rest)
    job = Job.of(invocation.config, invocation.config_name)
    scaled = "\n  ".join(["--scale tiny changes", *invocation.scaled]) if invocation.scaled else ""
    if options.print:
        for warning in filter(None, [scaled, *invocation.warnings]):
            print(f"titan_rl launch: {warning}", file=sys.stderr)
        print(sbatch.script(job, Path.cwd()) if options.on == "slurm" else printed(job, options.with_secret), end="")
        return DONE
    terminal = Terminal()
    if scaled:
        terminal.note(scaled)
    for warning in invocation.warnings:
        terminal.warn(warning)
    try:
        if options.here:
            return run_script(written_script(job, fresh=invocation.config.job.fresh))
        on = on_slurm if options.on == "slurm" else on_kubernetes
        submit = partial(on, job, terminal, fresh=invocation.config.job.fresh)
        return follow(submit, terminal, options.poll)
    except FolderRefused as error:
        refuse(invocation.config_name, [str(error)])
    except SubmissionFailed as error:
        terminal.error(str(error), "")
        return FAILED


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=command_of("launch"),
        usage=f"{command_of('launch')} --config NAME|FILE --on SCHEDULER [--print] [--section.key VALUE ...]",
        description="Submit a run to a cluster's scheduler, and follow it until it ends. [launch] of the TOML lists "
        "the resources to request, hosts.count is the number of nodes. The same command later follows the same job.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="NAME|FILE", required=True, help="a shipped config, or a TOML file")
    parser.add_argument("--on", choices=("slurm", "kubernetes"), required=True, help="scheduler")
    parser.add_argument("--print", action="store_true", help="print what would be submitted, and start nothing")
    parser.add_argument(
        "--with-secret", action="store_true", help="with --print: also the Secret, whose keys let the pods talk"
    )
    parser.add_argument(
        "--here", action="store_true", help="on Slurm: run in the allocation that this shell is in (salloc)"
    )
    parser.add_argument(
        "--poll",
        metavar="SECONDS",
        type=float,
        default=POLL_SECONDS,
        help=f"between two looks; default {POLL_SECONDS:g}",
    )
    return parser


@refusing
def checked(options: argparse.Namespace, rest: Sequence[str]) -> Invocation:
    """Return the run, checked as --dry-run checks it. Exit with 2 after printing every problem. Its addresses are not
    known yet: stand-ins are checked instead, and left out of the returned config."""
    argv, hosts = ["--config", options.config, *rest], HostsSection()
    with suppress(Exception):  # refused below
        hosts = wanted_hosts(read(argv), options.config)
    invocation = load([*argv, *stand_ins(hosts.number), "--dry-run"], submits=not options.print)
    refused, warned = judged(invocation)
    elsewhere = [text for text in refused if only_in_pods(options.on, invocation.config, text)]
    problems = [*check_submission(invocation.config, on=options.on, prints=options.print)]
    if options.with_secret and not (options.print and options.on == "kubernetes"):
        problems.append("--with-secret: expected --print and --on kubernetes next to it, found them missing")
    if options.here:
        problems += check_allocation(invocation.config.hosts.number) if options.on == "slurm" else [ONLY_SLURM]
    problems = [*problems, *(text for text in refused if text not in elsewhere)]
    if problems:
        refuse(invocation.given_name, problems)
    try:
        check_folder(invocation.config.job)
    except FolderRefused as error:
        refuse(invocation.config_name, [str(error)])
    warned = [text for text in warned if hosts.insecure or not text.startswith("hosts.insecure")]
    where = {key: getattr(hosts, key) for key in WHERE}
    config = replace(invocation.config, hosts=replace(invocation.config.hosts, **where))
    own = tuple(f"hosts.{key}:" for key in WHERE if key != "count")  # the stand-ins'
    scaled = [line for line in invocation.scaled if not line.startswith(own)]
    warnings = (*invocation.warnings, *warned, *elsewhere)
    return replace(invocation, config=config, warnings=warnings, scaled=tuple(scaled))


def wanted_hosts(arguments: Arguments, config: str) -> HostsSection:
    """Return where the run is to be. --scale makes several nodes two, unless the command line gives their number."""
    hosts = config_file.load(config_file.find(config), arguments.overrides).hosts
    fixed = not arguments.scale or "hosts.count" in dict(arguments.overrides)
    return hosts if fixed or hosts.number == 1 else replace(hosts, count=HOSTS, addresses=[])


def only_in_pods(on: str, config: Config, problem: str) -> bool:
    """Return True if a problem concerns a folder that the pods mount and this machine does not have."""
    if problem.startswith("launch."):
        return False
    targets = [mount.split(":")[1] for mount in config.launch.mounts if ":" in mount] if on == "kubernetes" else []
    text = f"{config.job.dump_folder} {problem}" if problem.startswith("job.dump_folder:") else problem
    return any(target in text and not Path(target).exists() for target in targets)


def stand_ins(nodes: int) -> list[str]:
    if nodes == 1:
        return ["--hosts.kind=local", "--hosts.count=0", "--hosts.addresses=[]"]
    addresses = ",".join(f"tcp://node{number}:1" for number in range(nodes))
    return ["--hosts.kind=attach", f"--hosts.addresses={addresses}", "--hosts.insecure=true"]


def on_slurm(job: Job, terminal: Terminal, *, fresh: bool) -> SlurmJob:
    """Return the job that was submitted for this run before, if it has not ended; else submit one."""
    with suppress(FileNotFoundError, ValueError, KeyError):
        before = SlurmJob(str(json.loads((job.own / RECORD).read_text())["slurm"]), job.own)
        if before.look() != ENDED:
            terminal.note(f"{before.name}{RUNS_ALREADY}")
            return before
    submitted = SlurmJob(submit_script(written_script(job, fresh=fresh)), job.own)
    (job.own / RECORD).write_text(json.dumps({"slurm": submitted.number}) + "\n")
    return submitted


def written_script(job: Job, *, fresh: bool) -> Path:
    with RunLock(job.folder) as lock:
        if fresh:
            lock.move_old_run()
        job.own.mkdir(exist_ok=True)
        path = job.own / "job.sbatch"
        path.write_text(sbatch.script(job, Path.cwd()))
    return path


def on_kubernetes(job: Job, terminal: Terminal, *, fresh: bool) -> KubernetesJob:
    assert not fresh  # refused: a pod that starts again would start over
    cluster = find_cluster(job.config.launch.namespace)
    live = live_kubernetes_job(job, cluster)
    if live:
        terminal.note(f"{live.name}{RUNS_ALREADY}")
        return live
    return submit_manifests(job, cluster)


def printed(job: Job, with_secret: bool) -> str:
    secret, objects = tls_secret(job), manifests(job)
    if not secret or with_secret:
        return as_yaml([*objects, *([new_secret(job)] if secret else [])])
    note = f"# The pods wait for the Secret {secret}, which titan_rl launch makes; --with-secret prints a new one.\n"
    return note + as_yaml(objects)


if __name__ == "__main__":
    open_console(sys.stdout)
    enter(lambda: main(sys.argv[1:]))
