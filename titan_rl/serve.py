"""`python -m titan_rl.serve RUN|CHECKPOINT|FOLDER`: an OpenAI-compatible endpoint over trained weights, until Ctrl-C.

Exit codes: 0 ended by a signal, 1 an engine failed, 2 bad usage.
"""

import argparse
import asyncio
import ipaddress
import os
import secrets
import socket
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from titan_rl import isolation
from titan_rl.config.sections import Config
from titan_rl.deployed import (
    TARGET,
    Chosen,
    Refused,
    choose,
    drive,
    exported,
    in_own_network,
    named_refusals,
    overrides_of,
    setup_of,
)
from titan_rl.wire.program import DONE, STOPPED, command_of, enter, path_argument

if TYPE_CHECKING:
    from titan_rl.preflight.plan import Setup
    from titan_rl.record.terminal import Terminal

PROG = "titan_rl.serve"
KEY = "TITAN_RL_API_KEY"


def main(argv: Sequence[str]) -> int:
    with named_refusals(PROG):
        options, other_arguments = parser().parse_known_args(argv)
        chosen = choose(options.target, options.step, options.config, overrides_of(other_arguments))
        config = without_task(chosen.config)
        return in_own_network(PROG, config, lambda scratch: serve(chosen, config, options, scratch))


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=command_of("serve"),
        description="Serve trained weights to any OpenAI client: /v1/models, /v1/chat/completions, /v1/completions and "
        "token ids at /inference/v1/generate. Ctrl-C ends it.",
        epilog=f"A key is required. It is the value of {KEY}, or a new one, which is printed. Any key of the config: "
        "--section.key VALUE, such as --generator.replicas 2.",
        allow_abbrev=False,
    )
    parser.add_argument("target", metavar="RUN|CHECKPOINT|FOLDER", type=path_argument, help=TARGET)
    parser.add_argument("--step", metavar="N", help="step of the checkpoint, or cold_start/N; default: the newest")
    parser.add_argument("--config", metavar="NAME|FILE", help="config to serve by; default: the run's")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; default: this machine only")
    parser.add_argument("--port", type=int, default=0, help="port to listen on; default: a free one, which is printed")
    return parser


def without_task(config: Config) -> Config:
    """Return the config without tasks, rewards, environments and evaluations."""
    return replace(
        config,
        task=replace(
            config.task,
            name="addition",
            reward="exact",
            eval_reward="",
            rewards={},
            grader="",
            agent="",
            path="",
            eval_path="",
        ),
        environment=replace(config.environment, name=""),
        eval=replace(config.eval, size=0, sets={}, keep_best=""),
    )


def serve(chosen: Chosen, config: Config, options: argparse.Namespace, scratch: Path) -> int:
    from titan_rl.record.terminal import Terminal

    terminal = Terminal()
    bound = bound_socket(options.host, options.port)
    with terminal.phase(f"weights: {chosen.name}"):
        folder = exported(chosen, scratch)
    setup = setup_of(config, folder, scratch)
    code = drive(lambda: served(setup, chosen.name, bound, terminal), terminal)
    return DONE if code == STOPPED else code


def bound_socket(host: str, port: int) -> socket.socket:
    """Listen in the host's network, where clients are; Monarch's sockets are in this process's own."""
    try:
        kind = socket.AF_INET6 if ":" in host else socket.AF_INET
        return isolation.outside(lambda: socket.create_server((host, port), family=kind))
    except (OSError, OverflowError, TypeError, ValueError) as error:  # no host can have such a name
        raise Refused(f"--host, --port: expected an address to listen on, found {host}:{port} ({error})") from error


async def served(setup: "Setup", name: str, bound: socket.socket, terminal: "Terminal") -> int:
    from titan_rl.agents.conversation import ChatText, PlainText
    from titan_rl.agents.policy_endpoint import PolicyEndpoint
    from titan_rl.rollout.session import SessionLimits
    from titan_rl.train.bring_up import launch_loaded

    config, tokenizer = setup.config, setup.tokenizer
    chat = config.task.template == "chat"
    renderer = ChatText(tokenizer) if chat else PlainText(tokenizer, setup.sampling.stop_token_ids)
    user_key = os.environ.get(KEY, "")
    key = user_key or f"sk-{secrets.token_hex(16)}"
    async with launch_loaded(setup, terminal) as (generators, _, watch):
        endpoint = PolicyEndpoint(
            generators,
            renderer,
            key=key,
            sampling=setup.sampling,
            context=SessionLimits.of(config, played=True).context,
            model="policy",
        )
        await endpoint.listen(bound)
        host, port = bound.getsockname()[:2]
        terminal.note(f"serving {name} until Ctrl-C")
        terminal.note(f"OPENAI_BASE_URL=http://{f'[{host}]' if ':' in host else host}:{port}/v1")
        terminal.note(f"OPENAI_API_KEY={f'${KEY}' if user_key else key}")
        if not ipaddress.ip_address(host).is_loopback:
            terminal.warn(f"{host} is reachable from other machines, and HTTP is not encrypted: the key can be read")
        try:
            await watch.drive(asyncio.Event().wait())
        finally:
            await endpoint.close()
    return DONE


def entry() -> None:
    enter(lambda: main(sys.argv[1:]))


if __name__ == "__main__":
    entry()
