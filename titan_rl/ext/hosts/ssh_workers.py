"""Workers of one run on other machines, started through ssh (hosts.kind = "ssh").

ssh HOST 'cd FOLDER && exec PYTHON -m titan_rl.worker --address ADDRESS --tls TLS/HOST --until-eof'
  stdin     its end ends the worker; it stays open until the run is over or its process has died
  output    RUN/hosts/hostN.log
"""

import asyncio
import os
import shlex
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from titan_rl.config.sections import HostsSection
from titan_rl.ext.hosts.worker_address import split_address
from titan_rl.ext.hosts.worker_processes import POLL_SECONDS, last_lines
from titan_rl.wire.errors import RunError

END_SECONDS = 5.0  # from the end of a worker's input to its end


@asynccontextmanager
async def ssh_workers(hosts: HostsSection, logs: Path, say: Callable[[str], None]) -> AsyncIterator[None]:
    """Start a worker at each of hosts.addresses, and end them at the end. `say` shows which one waits, and why."""
    logs.mkdir(parents=True, exist_ok=True)
    started: list[SshWorker] = []
    try:
        for number, address in enumerate(hosts.addresses):
            started.append(SshWorker(hosts, address, logs / f"host{number}.log"))
        deadline = time.monotonic() + hosts.join_seconds
        reasons = await asyncio.gather(*(worker.failure(deadline, say) for worker in started))
        if failures := list(filter(None, reasons)):
            failed = (worker for worker, reason in zip(started, reasons, strict=True) if reason)
            details = "\n".join(line for worker in failed for line in worker.last_output())
            raise RunError(f"{len(failures)} of {len(reasons)} workers did not start: {'; '.join(failures)}", details)
        yield
    finally:
        for worker in started:
            worker.close_input()
        await asyncio.gather(*(asyncio.to_thread(worker.end) for worker in started))


class SshWorker:
    """A worker on another machine, and the ssh process that runs it."""

    def __init__(self, hosts: HostsSection, address: str, log: Path) -> None:
        self._address, self._log, self._join_seconds = address, log, hosts.join_seconds
        _, host, _ = split_address(address)
        self._command = [*shlex.split(hosts.ssh), host]
        with open(log, "wb") as output:
            self._process = subprocess.Popen(
                [*self._command, remote_command(hosts, address)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                process_group=0,  # Ctrl-C in the terminal reaches the controller only
            )

    async def failure(self, deadline: float, say: Callable[[str], None]) -> str:
        """Wait until the worker is up and return "", or return why it failed."""
        waits = ""
        while f"worker at {self._address}" not in (log := self._log.read_text(errors="replace")):
            _, begins, rest = log.partition(f"waiting for {self._address}: ")
            if not waits and "\n" in rest:
                waits, remaining = rest.partition("\n")[0], max(0.0, deadline - time.monotonic())
                limit = f"at most {remaining:.0f} s (hosts.join_seconds = {self._join_seconds:g})"
                say(f"{begins[:-2]}, for {limit}: {waits}")
            if (code := self._process.poll()) is not None:
                return f"{self._address}: {shlex.join(self._command)} ended with exit code {code}"
            if time.monotonic() > deadline:
                return f"{self._address}: no worker within hosts.join_seconds = {self._join_seconds:g}"
            await asyncio.sleep(POLL_SECONDS)
        return ""

    def last_output(self) -> list[str]:
        """Return the last lines of its output, each with its address."""
        return [f"{self._address}: {line}" for line in last_lines(self._log).splitlines()]

    def close_input(self) -> None:
        """End the worker's input, which ends the worker."""
        assert self._process.stdin is not None
        with suppress(OSError):  # ssh has ended
            self._process.stdin.close()

    def end(self) -> None:
        """Wait until ssh has ended, or kill it: either way the worker's input ends."""
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def remote_command(hosts: HostsSection, address: str) -> str:
    """Return the shell command that starts a worker on a host. Python and the current folder have this machine's
    paths."""
    scheme, host, _ = split_address(address)
    allowed = ["--tls", str(certificate_of(hosts, host))] if scheme == "tls" else ["--insecure"]
    worker = [sys.executable, "-m", "titan_rl.worker", "--address", address, *allowed, "--until-eof"]
    worker += ["--ports", hosts.ports] if hosts.ports else []
    return f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(worker)}"


def certificate_of(hosts: HostsSection, host: str) -> Path:
    """Return the folder of a host's certificate: --init-tls makes it next to this machine's."""
    return Path(hosts.tls).absolute().parent / host
