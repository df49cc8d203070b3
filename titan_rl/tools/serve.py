"""`python -m titan_rl serve RUN|CHECKPOINT|FOLDER`: an OpenAI-compatible endpoint over trained weights, until Ctrl-C.
`python -m titan_rl serve --tinker --config NAME`: training for clients of Tinker's SDK (docs/tinker.md).

Exit codes: 0 ended by a signal, 1 an engine failed, 2 bad usage.
"""

import argparse
import asyncio
import ipaddress
import os
import secrets
import shutil
import socket
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from titan_rl import isolation
from titan_rl.config import toml as config_file
from titan_rl.config.sections import Config
from titan_rl.config.toml import ConfigError
from titan_rl.meshes.starter import KINDS
from titan_rl.preflight.pretrained import FetchFailed, with_models
from titan_rl.tools.deployed import (
    TARGET,
    Chosen,
    choose,
    drive,
    exported,
    in_own_network,
    overrides_of,
    setup_of,
)
from titan_rl.tools.refused_input import UsageError, named_refusals
from titan_rl.wire.program import DONE, STOPPED, command_of, enter, path_argument

if TYPE_CHECKING:
    from titan_rl.ext.agents.policy_endpoint import ImagesOfRequests
    from titan_rl.meshes.model_mesh import ModelMesh
    from titan_rl.preflight.plan import Setup
    from titan_rl.record.terminal import Terminal

PROG = "titan_rl serve"
KEY = "TITAN_RL_API_KEY"
SIGHT = "ext.vision.checks"
TINKER_PREFIX = "tml-"  # Tinker's SDK sends no key without it
LAST_ANSWERS_SECONDS = 2.0  # in which clients fetch why the server ends


def main(argv: Sequence[str]) -> int:
    with named_refusals(PROG):
        options, other_arguments = parser(tinker="--tinker" in argv).parse_known_args(argv)
        if options.tinker:
            return serve_tinker(options, overrides_of(other_arguments))
        chosen = choose(options.target, options.step, options.config, overrides_of(other_arguments))
        config = without_task(chosen.config)
        return in_own_network(PROG, config, lambda scratch: serve(chosen, config, options, scratch))


def parser(*, tinker: bool = False) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=command_of("serve"),
        description="Serve trained weights to any OpenAI client: /v1/models, /v1/chat/completions, /v1/completions and "
        "token ids at /inference/v1/generate. Ctrl-C ends it.",
        epilog=f"A key is required. It is the value of {KEY}, or a new one, which is printed. Any key of the config: "
        "--section.key VALUE, such as --generator.replicas 2.",
        allow_abbrev=False,
    )
    if not tinker:
        parser.add_argument("target", metavar="RUN|CHECKPOINT|FOLDER", type=path_argument, help=TARGET)
        parser.add_argument("--step", metavar="N", help="step of the checkpoint, or cold_start/N; default: the newest")
    parser.add_argument(
        "--tinker", action="store_true", help="train for clients of Tinker's SDK, with --config and without RUN"
    )
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
            images_key="",
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
    images = images_of(setup, terminal)
    code = drive(lambda: served(setup, chosen.name, bound, images, terminal), terminal)
    return DONE if code == STOPPED else code


def images_of(setup: "Setup", terminal: "Terminal") -> "ImagesOfRequests | None":
    """Return the reader of clients' images. None: the model reads text."""
    from titan_rl.wire.parts import modules_of, needed_part
    from titan_rl.wire.types import IMAGES

    if setup.config.model.vision == "none":
        return None
    checks = modules_of([SIGHT])
    if problems := [found for each in checks for found in each.problems(setup.config, setup.shape, setup.device)]:
        raise UsageError("; ".join(problems))
    reader = needed_part("images of requests", "model.vision")
    try:
        with terminal.phase("images: processor of the folder"):
            from transformers.utils import logging

            logging.set_verbosity_error()  # on defaults of configs that the folder overrides
            return reader(setup.model_folder, setup.folder / IMAGES)
    except Exception as error:  # a folder may have any processor
        found = f"{type(error).__name__}: {error}"
        raise UsageError(f"model.vision: expected a processor in {setup.model_folder}, found {found}") from error


def serve_tinker(options: argparse.Namespace, overrides: Sequence[tuple[str, str]]) -> int:
    """Serve the calls of Tinker's SDK."""
    if not options.config:
        raise UsageError("--config: expected the config of the model to train with --tinker, found none")
    key = os.environ.get(KEY, "") or f"{TINKER_PREFIX}{secrets.token_hex(16)}"
    if not key.startswith(TINKER_PREFIX):
        raise UsageError(f"{KEY}: expected a key that begins with {TINKER_PREFIX}, as Tinker's SDK does, found another")
    try:
        config = config_file.load(config_file.find(options.config), overrides)
        with_models(config)  # fetched while this process has the host's network
    except (ConfigError, FetchFailed) as error:
        raise UsageError("; ".join(getattr(error, "problems", [str(error)]))) from error
    argv = ["--config", options.config, *(f"--{name}={text}" for name, text in overrides)]
    return in_own_network(PROG, config, lambda scratch: serve_models(argv, options, key, scratch), kinds=KINDS)


def serve_models(argv: Sequence[str], options: argparse.Namespace, key: str, scratch: Path) -> int:
    from titan_rl.ext.tinker.counts import SERVED
    from titan_rl.preflight.checks import checked_run
    from titan_rl.preflight.plan import prepare, settle
    from titan_rl.record.run_folder import FolderRefused
    from titan_rl.record.run_lock import RunLock
    from titan_rl.record.terminal import Terminal
    from titan_rl.wire.model_shape import SpecShape

    run, terminal = checked_run(argv, SERVED), Terminal()
    config = without_task(run.config)
    if config.lora.in_vllm is None:
        found = f'{config.lora.rank}, "{config.lora.sync}"'
        raise UsageError(f'lora.rank, lora.sync: expected at least 1, "adapter" with --tinker, found {found}')
    if config.placement.kind == "colocated" or not config.samples_rollouts:
        raise UsageError(
            'placement.kind, algorithm.name: expected "disaggregated" and an algorithm that samples with --tinker, '
            f"because trainers and generators work at once, found {config.placement.kind!r}, {config.algorithm.name!r}"
        )
    if config.optimizer.moments != "master":
        raise UsageError(f'optimizer.moments: expected "master" with --tinker, found "{config.optimizer.moments}"')
    bound = bound_socket(options.host, options.port)
    try:
        with RunLock(Path(config.job.dump_folder)) as lock:
            setup = prepare(
                run.config_name,
                config,
                device=run.device,
                gpus=run.gpus,
                scratch=scratch / "assets",
                adapters=run.adapters,
            )
            if isinstance(setup.shape, SpecShape):
                why = "because vLLM reads clients' adapters by itself, and leaves out keys that are values"
                raise UsageError(f"model.spec: expected another model with --tinker, {why}, found {setup.shape.family}")
            setup = settle(setup, lock)
            code = drive(lambda: served_models(setup, bound, key, terminal), terminal)
    except FolderRefused as error:
        raise UsageError(str(error)) from error
    return DONE if code == STOPPED else code


async def served_models(setup: "Setup", bound: socket.socket, key: str, terminal: "Terminal") -> int:
    """Serve until Ctrl-C or the death of a rank. Save unsaved models at the end."""
    from titan_rl.ext.tinker.endpoint import TinkerEndpoint
    from titan_rl.ext.tinker.service import Service
    from titan_rl.train.bring_up import launch_served
    from titan_rl.train.hf_folder import new_folder, write_assets
    from titan_rl.wire.errors import RunError

    drawn = not setup.config.model.hf_assets_path
    base = setup.folder / "base" if drawn else setup.model_folder

    async def base_of(trainers: "ModelMesh") -> Path:
        """Write weights that are drawn from the seed where engines and clients find them."""
        if drawn:
            shutil.rmtree(base, ignore_errors=True)
            with new_folder(base) as partial:
                await trainers.served("write_base", str(partial))
                write_assets(setup.policy, partial, setup.config.training.dtype)
        return base

    async with launch_served(setup, terminal, base_of) as (trainers, generators, watch):
        service = Service(setup, base, trainers, generators, terminal.warn)
        endpoint = TinkerEndpoint(service, key)
        await endpoint.listen(bound)
        host, port = bound.getsockname()[:2]
        terminal.note(f"training adapters of {base} for clients until Ctrl-C; they are saved in {service.root}")
        terminal.note(f"TINKER_BASE_URL=http://{f'[{host}]' if ':' in host else host}:{port}")
        terminal.note(f"TINKER_API_KEY={f'${KEY}' if os.environ.get(KEY) else key}")
        warn_of_network(host, terminal)
        trained = True  # the trainers still have what clients trained
        try:
            await watch.drive(service.run())
        except RunError as error:
            trained = error.mesh != trainers.name
            service.fail(error)
            await asyncio.sleep(LAST_ANSWERS_SECONDS)
            raise
        finally:
            if trained:
                for path in await service.close():
                    terminal.note(f"saved {path}")
            await endpoint.close()
            if trained:
                service.refuse_unsaved()
    return DONE


def bound_socket(host: str, port: int) -> socket.socket:
    """Listen in the host's network, where clients are; Monarch's sockets are in this process's own."""
    try:
        kind = socket.AF_INET6 if ":" in host else socket.AF_INET
        return isolation.outside(lambda: socket.create_server((host, port), family=kind))
    except (OSError, OverflowError, TypeError, ValueError) as error:  # no host can have such a name
        raise UsageError(f"--host, --port: expected an address to listen on, found {host}:{port} ({error})") from error


async def served(
    setup: "Setup", name: str, bound: socket.socket, images: "ImagesOfRequests | None", terminal: "Terminal"
) -> int:
    from titan_rl.ext.agents.conversation import ChatText, PlainText
    from titan_rl.ext.agents.policy_endpoint import PolicyEndpoint
    from titan_rl.rollout.session import SessionLimits
    from titan_rl.train.bring_up import launch_loaded

    config, tokenizer = setup.config, setup.tokenizer
    chat = config.task.template == "chat"
    if images and not chat:
        terminal.warn('images are parts of chats, which need task.template = "chat"')
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
            images=images,
        )
        await endpoint.listen(bound)
        host, port = bound.getsockname()[:2]
        terminal.note(f"serving {name} until Ctrl-C")
        terminal.note(f"OPENAI_BASE_URL=http://{f'[{host}]' if ':' in host else host}:{port}/v1")
        terminal.note(f"OPENAI_API_KEY={f'${KEY}' if user_key else key}")
        warn_of_network(host, terminal)
        try:
            await watch.drive(asyncio.Event().wait())
        finally:
            await endpoint.close()
    return DONE


def warn_of_network(host: str, terminal: "Terminal") -> None:
    if not ipaddress.ip_address(host).is_loopback:
        terminal.warn(f"{host} is reachable from other machines, and HTTP is not encrypted: the key can be read")


def entry() -> None:
    enter(lambda: main(sys.argv[1:]))


if __name__ == "__main__":
    entry()
