"""The order of calls, the end of sessions, and the models that they leave. A list of calls replaces the trainers."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from support.shapes import TINY
from titan_rl.config.sections import Config, LoraSection
from titan_rl.ext.tinker import service as module
from titan_rl.ext.tinker.messages import BadInput
from titan_rl.ext.tinker.served import FACTS
from titan_rl.ext.tinker.service import Failed, NotFound, Service
from titan_rl.wire.errors import RankDied, RunError

LORA = {"rank": 4}
ADAM = {"adam_params": {"learning_rate": 0.1}}


class Trainers:
    """Answers calls, after an event if one holds them back."""

    def __init__(self) -> None:
        self.dp = 2
        self.calls: list[tuple[Any, ...]] = []
        self.problem = ""
        self.open = asyncio.Event()
        self.open.set()

    async def served(self, call: str, name: str, *arguments: Any) -> list[Any]:
        await self.open.wait()
        self.calls.append((call, name, *arguments))
        if call == "save" and not self.problem:
            folder = Path(arguments[0])
            folder.mkdir(parents=True)
            (folder / FACTS).write_text(
                json.dumps({**arguments[1], "rank": 4, "alpha": 32.0, "targets": ["q"], "seed": 1})
            )
        answers: dict[str, list[Any]] = {"optim_step": [1.0], "save": [self.problem], "load": [""]}
        return answers.get(call, [None])


def started(folder: Path, trainers: Trainers) -> tuple[Service, list[str]]:
    config = Config(lora=LoraSection(rank=8))
    setup = SimpleNamespace(config=config, resolved=config, shape=TINY, folder=folder, tokenizer=None)
    warnings: list[str] = []
    return Service(
        cast(Any, setup), Path("/models/base"), cast(Any, trainers), cast(Any, None), warnings.append
    ), warnings


def on_loop(test: Callable[[Service, Trainers, list[str]], Awaitable[None]], folder: Path) -> None:
    async def run() -> None:
        trainers = Trainers()
        service, warnings = started(folder, trainers)
        await test(service, trainers, warnings)

    asyncio.run(asyncio.wait_for(run(), 20))


async def created(service: Service, seq: int = 0) -> tuple[str, str]:
    session = service.open_session()
    id = service.create_model(
        {"session_id": session.id, "model_seq_id": seq, "base_model": "org/Base", "lora_config": LORA}
    )
    assert await service.fetch(id, 5) == {"model_id": f"{session.id}:train:{seq}", "type": "create_model"}
    return session.id, f"{session.id}:train:{seq}"


def test_calls_keep_their_order(tmp_path: Path) -> None:
    """Also if they arrive in another, are sent twice, or if one between them is refused."""

    async def test(service: Service, trainers: Trainers, warnings: list[str]) -> None:
        _, model = await created(service)
        late = service.call(service.optim_step, {**ADAM, "model_id": model, "seq_id": 3})
        assert await service.fetch(late, 0.05) is None
        with pytest.raises(BadInput, match="learning_rate: expected a number from 0 to 1000, found -1"):
            service.call(service.optim_step, {"adam_params": {"learning_rate": -1}, "model_id": model, "seq_id": 2})
        assert await service.fetch(late, 0.05) is None
        first = service.call(service.save_weights, {"model_id": model, "seq_id": 1, "path": "a"})
        assert service.call(service.save_weights, {"model_id": model, "seq_id": 1, "path": "a"}) == first
        assert await service.fetch(late, 5) == {"metrics": {"grad_norm:mean": 1.0, "lr:mean": 0.1}}
        assert await service.fetch(late, 5) == await service.fetch(late, 5)
        assert [call[0] for call in trainers.calls] == ["create", "save", "optim_step"]
        with pytest.raises(BadInput, match="seq_id: expected 4 or more, found 2"):
            service.call(service.optim_step, {**ADAM, "model_id": model, "seq_id": 2})
        with pytest.raises(NotFound, match="model_id: expected a model that is in use"):
            service.call(service.optim_step, {**ADAM, "model_id": "none", "seq_id": 1})

    on_loop(test, tmp_path)


def test_a_session_without_heartbeats_is_saved_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(service: Service, trainers: Trainers, warnings: list[str]) -> None:
        monkeypatch.setattr(module, "SWEEP_SECONDS", 0.01)
        gone, model = await created(service)
        stays, other = await created(service)
        await service.fetch(service.call(service.optim_step, {**ADAM, "model_id": model, "seq_id": 1}), 5)
        waits = service.call(service.optim_step, {**ADAM, "model_id": model, "seq_id": 9})
        service.sessions[gone].seen -= 2 * module.SESSION_SECONDS
        trainers.problem = "OSError: no space left"
        sweeping = asyncio.create_task(service.run())
        while not warnings:
            await asyncio.sleep(0.01)
        assert "no space left" in warnings[0]
        assert model in service.models
        trainers.problem = ""
        service.sessions[gone].seen -= 2 * module.SESSION_SECONDS
        while gone in service.sessions:
            await asyncio.sleep(0.01)
        assert trainers.calls[-1] == ("drop", model)
        assert (tmp_path / "tinker" / model / "weights" / "unsaved-1").is_dir()
        assert list(service.models) == [other]
        assert list(service.sessions) == [stays]
        with pytest.raises(NotFound):
            await service.fetch(waits, 5)
        sweeping.cancel()

    on_loop(test, tmp_path)


def test_what_was_saved_is_not_saved_again(tmp_path: Path) -> None:
    async def test(service: Service, trainers: Trainers, warnings: list[str]) -> None:
        _, model = await created(service)
        await service.fetch(service.call(service.optim_step, {**ADAM, "model_id": model, "seq_id": 1}), 5)
        await service.fetch(service.call(service.save_weights, {"model_id": model, "seq_id": 2, "path": "end"}), 5)
        assert await service.close() == []
        assert [call[0] for call in trainers.calls] == ["create", "optim_step", "save", "drop"]

    on_loop(test, tmp_path)


def test_a_full_disk_fails_one_call(tmp_path: Path) -> None:
    async def test(service: Service, trainers: Trainers, warnings: list[str]) -> None:
        _, model = await created(service)
        trainers.problem = "OSError: no space left"
        with pytest.raises(Failed, match="weights/a cannot be saved: OSError: no space left"):
            await service.fetch(service.call(service.save_weights, {"model_id": model, "seq_id": 1, "path": "a"}), 5)
        trainers.problem = ""
        assert await service.fetch(service.call(service.save_weights, {"model_id": model, "seq_id": 2, "path": "a"}), 5)

    on_loop(test, tmp_path)


def test_steps_that_a_full_disk_loses_are_named_at_the_end(tmp_path: Path) -> None:
    async def test(service: Service, trainers: Trainers, warnings: list[str]) -> None:
        _, model = await created(service)
        await service.fetch(service.call(service.optim_step, {**ADAM, "model_id": model, "seq_id": 1}), 5)
        trainers.problem = "OSError: no space left"
        assert await service.close() == []
        with pytest.raises(RunError, match=f"1 models could not be saved: {model}"):
            service.refuse_unsaved()
        trainers.problem = ""
        assert await service.close() == [f"tinker://{model}/weights/unsaved-1"]
        service.refuse_unsaved()

    on_loop(test, tmp_path)


def test_a_call_that_fails_in_an_unforeseen_way_has_had_its_turn(tmp_path: Path) -> None:
    def fails(model: object, body: object) -> Any:
        raise ZeroDivisionError

    async def test(service: Service, trainers: Trainers, warnings: list[str]) -> None:
        _, model = await created(service)
        with pytest.raises(ZeroDivisionError):
            service.call(fails, {"model_id": model, "seq_id": 1})
        later = service.call(service.optim_step, {**ADAM, "model_id": model, "seq_id": 2})
        assert await service.fetch(later, 5) == {"metrics": {"grad_norm:mean": 1.0, "lr:mean": 0.1}}

    on_loop(test, tmp_path)


def test_a_removed_folder_ends_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(service: Service, trainers: Trainers, warnings: list[str]) -> None:
        monkeypatch.setattr(module, "SWEEP_SECONDS", 0.01)
        serving = asyncio.create_task(service.run())
        await asyncio.sleep(0)
        (tmp_path / "run").rmdir()
        with pytest.raises(RunError, match="was removed or renamed"):
            await serving

    (tmp_path / "run").mkdir()
    on_loop(test, tmp_path / "run")


def test_a_dead_rank_answers_every_call(tmp_path: Path) -> None:
    async def test(service: Service, trainers: Trainers, warnings: list[str]) -> None:
        _, model = await created(service)
        trainers.open.clear()
        ids = [service.call(service.optim_step, {**ADAM, "model_id": model, "seq_id": seq}) for seq in (1, 2)]
        service.fail(RankDied("trainer[dp=0 tp=0]", "was killed by signal 9"))
        for id in ids:
            with pytest.raises(RankDied, match=r"trainer\[dp=0 tp=0\] died"):
                await service.fetch(id, 5)
        with pytest.raises(RankDied):
            await service.run()

    on_loop(test, tmp_path)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"base_model": "org/other"}, "base_model: expected /models/base"),
        ({"lora_config": None}, "lora_config: expected a LoraConfig"),
        ({"lora_config": {"rank": 9}}, "lora_config.rank: expected an integer from 1 to 8, found 9"),
        ({"lora_config": {"rank": True}}, "lora_config.rank: expected an integer"),
        ({"optimizer_config": {"type": "dimuon"}}, "optimizer_config: expected adamw, found 'dimuon'"),
        ({"lora_config": [4]}, "lora_config: expected an object, found .4."),
        ({"user_metadata": 3}, "user_metadata: expected an object, found 3"),
        ({"model_seq_id": "0"}, "model_seq_id: expected an integer"),
    ],
)
def test_models_that_are_refused(tmp_path: Path, body: dict[str, Any], expected: str) -> None:
    async def test(service: Service, trainers: Trainers, warnings: list[str]) -> None:
        good = {"session_id": service.open_session().id, "model_seq_id": 0, "base_model": "base", "lora_config": LORA}
        with pytest.raises(BadInput, match=expected):
            service.create_model({**good, **body})
        assert not service.models

    on_loop(test, tmp_path)


@pytest.mark.parametrize("name", ["../up", ".hidden", "a/b", "", "é", "x" * 200, "tinker://a"])
def test_names_stay_in_their_folder(tmp_path: Path, name: str) -> None:
    async def test(service: Service, trainers: Trainers, warnings: list[str]) -> None:
        _, model = await created(service)
        with pytest.raises(BadInput, match="expected a path tinker://MODEL"):
            service.saved(f"tinker://{model}/weights/{name}")

    on_loop(test, tmp_path)
