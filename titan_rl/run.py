"""`python -m titan_rl.run --config grpo_llama.toml`

Exit codes: 0 finished, 1 failed (the failing actor and rank are named), 2 bad input, 3 failed for want of a learning
signal, 130 stopped by a signal.
"""

import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from titan_rl import isolation
from titan_rl.environment import prepare_environment, private_folder, socket_folder
from titan_rl.meshes.starter import KINDS, NVIDIA, Servers, starter
from titan_rl.wire.parts import needed_part, part
from titan_rl.wire.program import DONE, FAILED, FAILED_AGAIN, STOPPED, enter

if TYPE_CHECKING:  # imported while the fork servers import too
    from titan_rl.config.sections import Config, HostsSection
    from titan_rl.preflight.load import Invocation
    from titan_rl.preflight.plan import Setup
    from titan_rl.record.terminal import Terminal

OPTED_OUT = 'hosts.isolation is "off"'
ATTACHED = "a run across hosts needs the network of this one"
REMEDIES = {OPTED_OUT: 'Leave hosts.isolation at "auto"', ATTACHED: "Use hosts without other users"}
POLICIES = "policies"
MODELS = ("model", "critic", "teacher", "reward_model")
EARLY_KEYS = ("hosts.isolation", "hosts.kind", *(f"{name}.hf_assets_path" for name in MODELS))


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if not argv or {"--dry-run", "--help", "-h"} & set(argv):
        with private_folder():
            return check_and_run(argv, None)
    with socket_folder() as folder, starter().serving(folder) as servers:
        if not NVIDIA.exists():
            servers.keep(KINDS)  # before anything else: their imports take longer than all the rest
        config = early_config(argv)
        if config is not None and not any(word.startswith("--scale") for word in argv):
            fetch_models(config)
        reason = opted_out(config.hosts) if config else ""
        exposed = reason or isolation.isolate()
        return check_and_run(argv, servers, exposed)


def early_config(argv: Sequence[str]) -> "Config | None":
    """Return the config before anything is checked, while this process has one thread and the host's network: only
    then can it be isolated. None: it cannot be read, and is refused later."""
    from titan_rl.config import toml

    flags = dict(zip(argv, [*argv[1:], ""], strict=True)) | dict(word.split("=", 1) for word in argv if "=" in word)
    overrides = [(key, flags[f"--{key}"]) for key in EARLY_KEYS if f"--{key}" in flags]
    with suppress(Exception):
        return toml.load(toml.find(flags.get("--config", "")), overrides)
    return None


def fetch_models(config: "Config") -> None:
    """Fetch the pretrained models that the config names, or refuse the run."""
    from titan_rl.preflight.pretrained import FetchFailed, with_models
    from titan_rl.preflight.refusal import refuse

    try:
        with_models(config)
    except FetchFailed as error:
        refuse("", [str(error)])


def opted_out(hosts: "HostsSection") -> str:
    if hosts.at_addresses:
        return ATTACHED
    return OPTED_OUT if hosts.isolation == "off" else ""


def check_and_run(argv: Sequence[str], servers: Servers | None, exposed: str = "") -> int:
    """`exposed`: why other users reach the sockets of this process. Without servers, it is a dry run."""
    from titan_rl.preflight.checks import checked_run
    from titan_rl.preflight.refusal import refuse
    from titan_rl.record.run_folder import FolderRefused
    from titan_rl.record.terminal import Terminal
    from titan_rl.wire.errors import RunError

    invocation, terminal = checked_run(argv), Terminal()
    hosts = invocation.config.hosts
    if servers is None:
        exposed = opted_out(hosts) or isolation.refusal()
    elif hosts.at_addresses and (wrong := list(needed_part("reachable hosts", "hosts.kind")(hosts))):
        refuse(invocation.config_name, wrong)
    if exposed and hosts.isolation == "require":
        expected = "hosts.isolation: expected a kernel that can isolate the run"
        refuse(invocation.config_name, [f"{expected}, found: {exposed}"])
    if exposed:
        invocation = replace(
            invocation,
            warnings=(*invocation.warnings, isolation.warning(exposed, REMEDIES.get(exposed, isolation.ALLOW))),
        )
    try:
        return check_folder_and_run(invocation, terminal, servers)
    except FolderRefused as error:
        refuse(invocation.config_name, [str(error)])
    except RunError as error:
        terminal.error(str(error), error.details)
        return FAILED


def check_folder_and_run(invocation: "Invocation", terminal: "Terminal", servers: Servers | None) -> int:
    """Check everything while this process alone uses the run's folder; move or write there only after that."""
    from titan_rl.preflight.plan import settle
    from titan_rl.record.run_folder import check_folder
    from titan_rl.record.run_lock import RunLock

    config, device = invocation.config, invocation.device
    if invocation.scaled:
        terminal.note("\n  ".join(["--scale tiny changes", *invocation.scaled]))
    check_folder(config.job)
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if servers is None:
            setup = prepared(invocation, scratch)
            show_plan(setup, invocation.warnings, terminal, dry=True)
            terminal.note("dry run: everything was checked, nothing was started")
            return DONE
        lock = stack.enter_context(RunLock(Path(config.job.dump_folder)))
        # None on CUDA: an import may initialize it, and then no process may fork.
        kinds = () if device == "cuda" else KINDS if config.samples_rollouts else KINDS[:1]
        servers.keep(kinds)
        setup = prepared(invocation, scratch)
        if not setup.finished:
            if setup.policies:
                setup = needed_part("folders of policies", POLICIES)(setup, lock, stack)
            else:
                setup = settle(setup, lock)
        show_plan(setup, invocation.warnings, terminal)
        if setup.finished:
            terminal.note(
                f"nothing is left to train in {setup.folder}: raise training.steps, or start over with --job.fresh"
            )
            return DONE
        return run(setup, terminal)


def prepared(invocation: "Invocation", scratch: Path) -> "Setup":
    """Plan a checked run, of one policy or several."""
    from titan_rl.preflight.plan import prepare

    if invocation.policies:
        return needed_part("setups of policies", POLICIES)(invocation, scratch)
    gpus, adapters = invocation.gpus, invocation.adapters
    device, config = invocation.device, invocation.config
    return prepare(invocation.config_name, config, device=device, gpus=gpus, adapters=adapters, scratch=scratch)


def show_plan(setup: "Setup", warnings: Sequence[str], terminal: "Terminal", *, dry: bool = False) -> None:
    if plan := part("plan of a run"):
        terminal.plan(plan(setup, warnings, dry=dry))
        return
    for warning in warnings:
        terminal.warn(warning)


def run(setup: "Setup", terminal: "Terminal") -> int:
    config = setup.config
    prepare_environment(config.fault.detect_seconds, config.hosts.tls, config.polled_meshes)
    import asyncio  # late: a Ctrl-C during the first imports prints a traceback

    from titan_rl.session import session
    from titan_rl.wire.errors import RunError

    driven = needed_part("session of policies", POLICIES) if setup.policies else session
    try:
        finished = asyncio.run(driven(setup, terminal))
    except RunError as error:
        terminal.error(str(error), error.details)
        terminal.note(resume_hint(setup))
        return FAILED_AGAIN if error.again else FAILED
    except asyncio.CancelledError:
        finished = False
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # the run has ended: only messages follow
    if not finished:
        terminal.note(f"stopped; {resume_hint(setup)}")
        return STOPPED
    return DONE


def resume_hint(setup: "Setup") -> str:
    from titan_rl.record.run_folder import sound_resume
    from titan_rl.wire.errors import RunError

    if setup.policies:
        return "; ".join(f"{name}: {resume_hint(policy)}" for name, policy in setup.policies.items())
    try:
        checkpoint = str(sound_resume(setup.folder, setup.config, dry=True)[0])
    except RunError as error:
        return str(error)
    if checkpoint:
        return f"the same command resumes from {checkpoint} in {setup.folder}"
    return "no checkpoint was written yet: the same command starts over"


def entry() -> None:
    enter(main, stopped="stopped before anything was started")  # later signals are the run's to handle


if __name__ == "__main__":
    entry()
