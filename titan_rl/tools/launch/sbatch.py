"""The script of a Slurm job.

    srun, on every node      python -m titan_rl worker     if there are several nodes; one log per node
    srun, on the first node  python -m titan_rl.run        joins the workers

The run's step writes its number to launch/step-run, by which it is signalled: a container has its own process ids. The
workers end at the end of their input: Slurm takes no signals for steps of a job that it is ending.
"""

import re
import shlex
from collections.abc import Mapping
from pathlib import Path

from titan_rl.tools.launch.job import REQUEUES, RETRIES, WAIT, Job
from titan_rl.wire.program import STOPPED

FIRST_PORT, PORTS = 20000, 10000  # below the ports that kernels deal out by themselves
END_SECONDS = 30  # for the workers to end; a lost node's never answers

SCRIPT = """\
#!/bin/bash
@SBATCH@

# The log's folder must exist when the job starts: mkdir -p @LAUNCH@
launch=@LAUNCH@
mkdir -p "$launch"
rm -f "$launch/step-run" "$launch/exit-$SLURM_JOB_ID"
cat > "$launch"/@CONFIG_FILE@ <<'END_OF_CONFIG'
@CONFIG@END_OF_CONFIG
# srun hands these limits on: sockets of many ranks, memory for RDMA.
ulimit -Sn "$(ulimit -Hn)"
ulimit -Sl "$(ulimit -Hl)"
nodes=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))
restarts=${SLURM_RESTART_COUNT:-0}
run= asked= interrupted= stopping=

stop_run() {
    [ -n "$run" ] && [ -z "$stopping" ] || return
    stopping=1
    until [ -s "$launch/step-run" ] || ! kill -0 "$run" 2> /dev/null; do sleep 1; done
    [ ! -s "$launch/step-run" ] || scancel --ctld --signal=TERM "$SLURM_JOB_ID.$(cat "$launch/step-run")"
}
# Before the time limit Slurm signals this script only (USR1). When it ends the job, it signals all steps (TERM).
trap 'asked=1 interrupted=1; stop_run' USR1
trap 'interrupted=1' TERM

preempted() {  # since this start
    local facts started at
    facts=$(scontrol show job --oneliner "$SLURM_JOB_ID")
    started=${facts#* StartTime=} at=${facts#* PreemptTime=}
    started=${started%% *} at=${at%% *}
    [[ "$at" = [0-9]* && ! "$at" < "$started" ]]
}
requeue() {
    echo "titan_rl launch: $1"
    trap exit TERM  # by which Slurm ends this script
    scontrol requeue "$SLURM_JOB_ID" || return
    sleep 600 &
    wait
    exit
}
finish() {
    [ "$code" != 143 ] || code=130  # the step was stopped before the run handled signals
    [ "$1" != here ] || exit "$code"  # an allocation is not requeued
    if [ "$code" = 130 ] && { [ -n "$asked" ] || preempted; } && [ "$restarts" -lt @REQUEUES@ ]; then
        requeue "back to the queue, to continue (at most @REQUEUES@ times)"
    elif [ "$code" = 1 ]; then
        echo failed >> "$launch/failed-$SLURM_JOB_ID"
        failed=$(wc -l < "$launch/failed-$SLURM_JOB_ID")
        [ "$failed" -gt @RETRIES@ ] || requeue "the run failed; retry $failed of at most @RETRIES@"
    fi
    echo "$code" > "$launch/exit-$SLURM_JOB_ID"
    exit "$code"
}
@WORKERS@
step=@RUN_COMMAND@
srun@RUN_ARGS@ --nodelist="${nodes[0]}" bash -c "$step" run@RUN_VALUES@ &
run=$!
[ -z "$asked" ] || stop_run
@WATCH@@WAIT@@END_WORKERS@finish "$1"
"""

WORKERS = """
port=$((@FIRST_PORT@ + (SLURM_JOB_ID + 101 * restarts) % @PORTS@))
addresses=$(printf "@SCHEME@://%s:$port," "${nodes[@]}")
addresses=${addresses%,}
@CERTIFICATES@step=@WORKER_COMMAND@
exec 9> >(exec srun@WORKER_ARGS@ bash -c "$step" worker "$port" "$tls")
workers=$!
"""

CERTIFICATES = """\
tls=$launch/tls-$SLURM_JOB_ID
trap 'rm -rf "$tls"' EXIT
step=@INIT_COMMAND@
@INIT_STEP@bash -c "$step" certificates "$tls" "$(IFS=,; echo "${nodes[*]}")"
code=$?
rm -f "$tls/ca.key"
[ "$code" = 0 ] || finish "$1"
"""

WATCH = """\
{
    while kill -0 "$workers" 2> /dev/null; do sleep 1; done
    echo "titan_rl launch: the workers ended before the run; their logs: $launch/NODE.log"
    stop_run
} 9>&- &
watch=$!
"""

END_WORKERS = """\
kill -0 "$workers" 2> /dev/null || case $code in 130 | 143) code=1 ;; esac
kill "$watch" 2> /dev/null
exec 9>&-
for ((second = 0; second < @END_SECONDS@; second++)); do
    kill -0 "$workers" 2> /dev/null || break
    sleep 1
done
kill -KILL "$workers" 2> /dev/null
"""


def script(job: Job, cwd: Path) -> str:
    """Return the script of a job that runs in the folder `cwd`."""
    several = job.nodes > 1
    parts = {
        "SBATCH": "\n".join(f"#SBATCH {argument}" for argument in arguments(job, cwd)),
        "LAUNCH": shlex.quote(str(job.own)),
        "CONFIG_FILE": shlex.quote(job.config_file),
        "CONFIG": job.toml(),
        "WORKERS": workers(job, cwd) if several else "",
        "RUN_COMMAND": shlex.quote(run_command(job)),
        "RUN_ARGS": first_node_arguments(job, cwd) if several else step_arguments(job, cwd, 1),
        "RUN_VALUES": ' "$addresses" "$tls"' if several else "",
        "WATCH": WATCH if several else "",
        "WAIT": WAIT,
        "END_WORKERS": filled(END_WORKERS, {"END_SECONDS": str(END_SECONDS)}) if several else "",
        "REQUEUES": str(REQUEUES),
        "RETRIES": str(RETRIES),
    }
    return filled(SCRIPT, parts)


def workers(job: Job, cwd: Path) -> str:
    tls = job.config.hosts.tls
    make = f'exec {python(job)} -m titan_rl.worker --init-tls "$1" --hosts "$2" > /dev/null'
    own = {
        "INIT_COMMAND": shlex.quote(commands(job, make)),
        "INIT_STEP": f"srun{first_node_arguments(job, cwd)} " if job.config.launch.image else "",
    }
    made = filled(CERTIFICATES, own) if job.scheme == "tls" and not tls else f"tls={shlex.quote(tls)}\n"
    parts = {
        "SCHEME": job.scheme,
        "FIRST_PORT": str(FIRST_PORT),
        "PORTS": str(PORTS),
        "CERTIFICATES": made,
        "WORKER_COMMAND": shlex.quote(worker_command(job)),
        "WORKER_ARGS": step_arguments(
            job, cwd, job.nodes, "--no-kill", "--kill-on-bad-exit=0", "--open-mode=append", f"--output={job.own}/%N.log"
        ),
    }
    return filled(WORKERS, parts)


def filled(template: str, parts: Mapping[str, str]) -> str:
    return re.sub(r"@([A-Z_]+)@", lambda match: parts[match[1]], template)


def arguments(job: Job, cwd: Path) -> list[str]:
    launch = job.config.launch
    options = {
        "job-name": job.name,
        "nodes": job.nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": job.gpus,
        "cpus-per-task": launch.cpus_per_node,
        "mem": f"{launch.memory_gb_per_node}G" if launch.memory_gb_per_node else "",
        "account": launch.account,
        "partition": launch.partition,
        "time": launch.minutes,
        "signal": f"B:USR1@{job.stop_seconds}",
        "chdir": cwd,
        "output": job.own / "job-%j.log",
    }
    whole = [] if launch.cpus_per_node else ["--exclusive", *([] if launch.memory_gb_per_node else ["--mem=0"])]
    named = [f"--{name}={shlex.quote(str(value))}" for name, value in options.items() if value]
    several = ["--no-kill"] if job.nodes > 1 else []  # the run outlives lost nodes
    return [*named, *whole, *several, "--open-mode=append", "--requeue", *launch.extra_args]


def first_node_arguments(job: Job, cwd: Path) -> str:
    """Return the arguments of a step on the first node, next to the workers' step, which has the GPUs."""
    return step_arguments(job, cwd, 1, "--overlap", *(["--gpus-per-node=0"] if job.gpus else []))


def step_arguments(job: Job, cwd: Path, nodes: int, *own: str) -> str:
    """Return the arguments of an srun step: one process on each of `nodes` nodes, with all their cores. Each step has
    its own --ntasks: sbatch exports the job's number of tasks, which srun would take."""
    launch = job.config.launch
    options = [f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--cpu-bind=none", "--mpi=none", *own]
    if launch.cpus_per_node:
        options.append(f"--cpus-per-task={launch.cpus_per_node}")  # srun does not take it from sbatch
    if launch.image:
        mounts = [*launch.mounts, *(f"{path}:{path}" for path in dict.fromkeys((cwd, job.folder)))]
        options += [f"--container-image={launch.image}", f"--container-mounts={','.join(dict.fromkeys(mounts))}"]
        options.append(f"--container-workdir={cwd}")
    return "".join(f" {shlex.quote(argument)}" for argument in options)


def commands(job: Job, *lines: str) -> str:
    setup = job.config.launch.setup
    return "\n".join([*([setup] if setup else []), *lines])


def python(job: Job) -> str:
    return shlex.quote(job.python)


def worker_command(job: Job) -> str:
    """$1 is the port, $2 the folder of the certificates. The worker alone reads the input."""
    own = "" if job.config.hosts.tls else "/$SLURMD_NODENAME"
    tls = f' --tls "$2{own}"' if job.scheme == "tls" else " --insecure"
    address = f'"{job.scheme}://$SLURMD_NODENAME:$1"'
    return "\n".join(
        [
            "exec 3<&0 < /dev/null",
            commands(
                job,
                "trap '' TERM HUP INT  # ranks stay until the run has saved",
                f"{python(job)} -m titan_rl.worker --address {address}{tls} --until-eof <&3 3<&- || [ $? = {STOPPED} ]",
            ),
        ]
    )


def run_command(job: Job) -> str:
    """With several nodes, $1 are the addresses of the workers, $2 the folder of the certificates."""
    own = "" if job.config.hosts.tls else "/$SLURMD_NODENAME"
    joined = ' --hosts.kind=attach --hosts.addresses="$1" --hosts.own_address="$SLURMD_NODENAME"'
    joined += f' --hosts.tls="$2{own}"' if job.scheme == "tls" else ""
    joined += job.joining
    config = shlex.quote(str(job.own / job.config_file))
    return "\n".join(
        [
            f'echo "$SLURM_STEP_ID" > {shlex.quote(str(job.own / "step-run"))}',
            commands(job, f"exec {python(job)} -m titan_rl.run --config {config}{joined if job.nodes > 1 else ''}"),
        ]
    )
