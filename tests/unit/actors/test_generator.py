"""The generator's loop around an engine that only records its calls."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from titan_rl.actors.vllm import generator as module
from titan_rl.actors.vllm.engine import Done, EngineSettings
from titan_rl.wire.reports import EngineStats, ReaderCost


def events(monkeypatch: pytest.MonkeyPatch, *, offloads: bool = False, in_flight: str = "swap") -> list[str]:
    """Return what a sleep and the switch that follows it ask of the engine and the landing, in order."""
    asked = list[str]()

    def noting(name: str, answer: Any = None) -> Any:
        return lambda *arguments, **named: (
            asked.append(" ".join([name, *map(str, (*arguments, *named.items()))])) or answer
        )

    async def write_weights(timeout: float, version: int) -> ReaderCost:
        asked.append("write")
        return ReaderCost()

    async def body() -> None:
        monkeypatch.setattr(module, "current_rank", lambda: SimpleNamespace(rank=0))
        rank: Any = module.Generator(EngineSettings(model_dir="none"))
        verbs = {name: noting(name) for name in ("sleep", "wake", "suspend", "set_version")}
        rank._engine = SimpleNamespace(**verbs, offloads=offloads, busy=False, serves=False, asleep=False)
        rank._engine.stats = EngineStats
        rank._engine.ended = lambda: [Done(asked[-1], [])]
        rank._landings[0] = SimpleNamespace(forget=noting("forget"), write_weights=write_weights)
        rank._in_flight = in_flight
        loop = asyncio.create_task(rank._run())
        for change in ({"sleep": True}, {"switches": {0: (3, 30.0)}}, {"close": True}):
            for name, value in change.items():
                setattr(rank._next, name, value)
            rank._wake.set()
            await asyncio.sleep(0)
            while not loop.done() and rank._next != module.Decision():
                await asyncio.sleep(0.001)
        await loop
        assert [done.id for done in await module.drain(rank._done)] == ["sleep", "suspend 0"], "answered at once"

    asyncio.run(asyncio.wait_for(body(), 30))
    return asked


def test_parameters_that_a_sleep_has_emptied_are_not_believed_to_hold_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    switch = ["wake", "suspend 0", "write", "set_version 3 ('keep', False) ('slot', 0)"]
    assert events(monkeypatch, offloads=True) == ["sleep", "forget", *switch]
    assert events(monkeypatch) == ["sleep", *switch]  # on a CPU sleep frees no weights


@pytest.mark.parametrize("in_flight", ["swap", "keep", "drain"])
def test_a_switch_keeps_keys_and_values_only_if_asked_to(monkeypatch: pytest.MonkeyPatch, in_flight: str) -> None:
    assert events(monkeypatch, in_flight=in_flight)[-1] == f"set_version 3 ('keep', {in_flight == 'keep'}) ('slot', 0)"
