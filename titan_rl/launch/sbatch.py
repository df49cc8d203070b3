"""The script of a Slurm job.

    srun, on every node      python -m titan_rl.worker     if there are several nodes; one log per node
    srun, on the first node  python -m titan_rl.run        joins the workers

Each step writes its number to launch/step-*, by which it is signalled: a container has its own process ids.
"""

import re
import shlex
from collections.abc import Mapping
from pathlib import Path

from titan_rl.launch.job import REQUEUES, RETRIES, WAIT, Job

FIRST_PORT, PORTS = 20000, 10000  # below the ports that kernels deal out by themselves

SCRIPT = """\
#!/bin/bash
@SBATCH@

# The log's folder must exist when the job starts: mkdir -p @LAUNCH@
launch=@LAUNCH@
mkdir -p "$launch"
rm -f "$launch"/step-*
cat > "$launch"/@CONFIG_FILE@ <<'END_OF_CONFIG'
@CONFIG@END_OF_CONFIG
@WORKERS@
step=@RUN_COMMAND@
srun@RUN_ARGS@ --nodelist="$SLURMD_NODENAME" bash -c "$step" run@RUN_VALUES@ &
run=$!

signal_step() { [ ! -s "$launch/step-$2" ] || scancel --signal="$1" "$SLURM_JOB_ID.$(cat "$launch/step-$2")"; }
# Before the time limit Slurm signals this script only (USR1). When it ends the job, it signals all steps (TERM).
asked= interrupted=
trap 'asked=1 interrupted=1; signal_step TERM run' USR1
trap 'interrupted=1' TERM
@WAIT@@END_WORKERS@
requeue() {
    echo "titan_rl.launch: $1"
    scontrol requeue "$SLURM_JOB_ID" && sleep 600  # Slurm ends this script
}
restarts=${SLURM_RESTART_COUNT:-0}
if [ "$code" = 130 ] && [ -n "$asked" ] && [ "$restarts" -lt @REQUEUES@ ]; then
    requeue "back to the queue, to continue (at most @REQUEUES@ times)"
elif [ "$code" = 1 ]; then
    echo failed >> "$launch/failed-$SLURM_JOB_ID"
    failed=$(wc -l < "$launch/failed-$SLURM_JOB_ID")
    [ "$failed" -gt @RETRIES@ ] || requeue "the run failed; retry $failed of at most @RETRIES@"
fi
echo "$code" > "$launch/exit-$SLURM_JOB_ID"
exit "$code"
"""

WORKERS = """
port=$((@FIRST_PORT@ + SLURM_JOB_ID % @PORTS@))
nodes=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))
addresses=$(printf "@SCHEME@://%s:$port," "${nodes[@]}")
addresses=${addresses%,}
@CERTIFICATES@step=@WORKER_COMMAND@
srun@WORKER_ARGS@ bash -c "$step" worker "$port" "$tls" &
workers=$!
"""

CERTIFICATES = """\
tls=$launch/tls-$SLURM_JOB_ID
step=@INIT_COMMAND@
srun@INIT_ARGS@ bash -c "$step" certificates "$tls" "$(IFS=,; echo "${nodes[*]}")" || exit 1
"""

END_WORKERS = """\
until [ -s "$launch/step-workers" ] || ! kill -0 "$workers" 2> /dev/null; do sleep 1; done
signal_step KILL workers
wait "$workers"
rm -rf "$launch/tls-$SLURM_JOB_ID"
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
        "WAIT": WAIT,
        "END_WORKERS": END_WORKERS if several else "",
        "REQUEUES": str(REQUEUES),
        "RETRIES": str(RETRIES),
    }
    return filled(SCRIPT, parts)


def workers(job: Job, cwd: Path) -> str:
    tls = job.config.hosts.tls
    own = {
        "INIT_COMMAND": shlex.quote(
            commands(job, f'exec {python(job)} -m titan_rl.worker --init-tls "$1" --hosts "$2"')
        ),
        "INIT_ARGS": first_node_arguments(job, cwd),
    }
    made = filled(CERTIFICATES, own) if job.scheme == "tls" and not tls else f"tls={shlex.quote(tls)}\n"
    parts = {
        "SCHEME": job.scheme,
        "FIRST_PORT": str(FIRST_PORT),
        "PORTS": str(PORTS),
        "CERTIFICATES": made,
        "WORKER_COMMAND": shlex.quote(worker_command(job)),
        "WORKER_ARGS": step_arguments(
            job, cwd, job.nodes, "--kill-on-bad-exit=0", "--open-mode=append", f"--output={job.own}/%N.log"
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
    return [*named, *whole, "--open-mode=append", "--requeue", *launch.extra_args]


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
    """$1 is the port, $2 the folder of the certificates."""
    own = "" if job.config.hosts.tls else "/$SLURMD_NODENAME"
    tls = f' --tls "$2{own}"' if job.scheme == "tls" else " --insecure"
    return commands(
        job,
        f'echo "$SLURM_STEP_ID" > {shlex.quote(str(job.own / "step-workers"))}',
        "trap '' TERM HUP INT  # ranks stay until the run has saved",
        f'exec {python(job)} -m titan_rl.worker --address "{job.scheme}://$SLURMD_NODENAME:$1"{tls}',
    )


def run_command(job: Job) -> str:
    """With several nodes, $1 are the addresses of the workers, $2 the folder of the certificates."""
    own = "" if job.config.hosts.tls else "/$SLURMD_NODENAME"
    joined = ' --hosts.kind=attach --hosts.addresses="$1" --hosts.own_address="$SLURMD_NODENAME"'
    joined += f' --hosts.tls="$2{own}"' if job.scheme == "tls" else ""
    return commands(
        job,
        f'echo "$SLURM_STEP_ID" > {shlex.quote(str(job.own / "step-run"))}',
        f"exec {python(job)} -m titan_rl.run --config {shlex.quote(str(job.own / job.config_file))}"
        f"{joined if job.nodes > 1 else ''}",
    )
