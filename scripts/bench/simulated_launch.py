"""Starts the meshes of a run with simulated ranks, many in a process: what is above the ranks' endpoints is real."""

import asyncio
import gc
import os
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
from monarch.actor import ProcMesh, this_host

from bench.ranks import IMPORTABLE
from bench.simulated_ranks import CallCounter, SimulatedGenerator, SimulatedTrainer
from titan_rl.actors.endpoint import without_lines
from titan_rl.actors.vllm.engine import EngineSettings
from titan_rl.config.sections import Config
from titan_rl.meshes.faults import Watch, label
from titan_rl.meshes.generator_mesh import GeneratorMesh
from titan_rl.meshes.model_mesh import ModelMesh
from titan_rl.meshes.replica import Replica
from titan_rl.preflight.plan import Setup
from titan_rl.record.incidents import Incidents
from titan_rl.record.terminal import Terminal
from titan_rl.train.bring_up import Meshes, generator_policy
from titan_rl.wire.model_shape import ModelShape
from titan_rl.wire.reports import StepStats

SHARE = 64  # ranks of a process
MONARCH = ("monarch", "telemetry", "OpenTelemetry", "tokio")  # beginnings of the names of its threads


@dataclass(frozen=True, slots=True)
class Mark:
    """What the controller had used when it called the trainers."""

    wall: float
    cpu: float
    rss: int
    main: float  # seconds of CPU: of the thread that runs the loop
    monarch: float  # of Monarch's threads
    collecting: float  # garbage, on any thread


class Collections:
    """Counts the CPU seconds of garbage collections, from its creation on."""

    def __init__(self) -> None:
        self.seconds, self._began = 0.0, 0.0
        gc.callbacks.append(self._heard)

    def _heard(self, phase: str, _: object) -> None:
        self.seconds += time.thread_time() - self._began if phase == "stop" else 0.0
        self._began = time.thread_time()


def cpu_by_thread() -> dict[str, float]:
    """Return the CPU seconds of this process's threads, by their names. Monarch's are not Python's."""
    found = defaultdict[str, float](float)
    for folder in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            name = "main" if int(folder.name) == os.getpid() else (folder / "comm").read_text().strip()
            found[name] += int((folder / "schedstat").read_text().split()[0]) / 1e9
    return found


@dataclass(slots=True)
class Observed:
    """What a simulated run cost its controller. The ranks of other processes compute meanwhile."""

    collections: Collections = field(default_factory=Collections)
    marks: list[Mark] = field(default_factory=list)  # at the start, then as each step's update is made
    calls: Counter[str] = field(default_factory=Counter)  # of all steps after the first, by endpoint

    def mark(self) -> None:
        threads, rss = cpu_by_thread(), psutil.Process().memory_info().rss
        monarch = sum(seconds for name, seconds in threads.items() if name.startswith(MONARCH))
        cpu, main = time.process_time(), threads["main"]
        self.marks.append(Mark(time.perf_counter(), cpu, rss, main, monarch, self.collections.seconds))


class SimulatedProcs:
    """Processes that ranks share. The spawned actors are theirs, whichever a mesh asks for."""

    def __init__(self, ranks: int) -> None:
        os.environ |= {**IMPORTABLE, "OMP_NUM_THREADS": "1"}
        with without_lines(b"Monarch internal logs are being written"):
            host = this_host()
        self._procs = [host.spawn_procs(per_host={"tp": 1}, name=f"simulated{k}") for k in range(-(-ranks // SHARE))]
        self._counters: list[Any] = [procs.spawn("calls", CallCounter) for procs in self._procs]

    def of(self, rank: int) -> ProcMesh:
        return self._procs[rank // SHARE]

    async def calls(self) -> Counter[str]:
        """Return the calls to all ranks since the last time, by endpoint."""
        found = await asyncio.gather(*(counter.take.call_one().as_asyncio() for counter in self._counters))
        return sum(map(Counter[str], found), Counter[str]())


class SimulatedTrainers(ModelMesh):
    """Trainers in processes that they share; they observe the controller at each of their steps."""

    def __init__(self, config: Config, shape: ModelShape, observed: Observed, others: SimulatedProcs) -> None:
        super().__init__(lambda: [], "trainer", config, shape, {})
        self._model, self._observed, self._others = (config, shape, config.parallelism), observed, others

    async def start(self) -> list[int]:
        self._shared = SimulatedProcs(self.dp)
        for rank in range(self.dp):
            actor: Any = self._shared.of(rank).spawn(f"trainer{rank}", SimulatedTrainer, self.name, *self._model, rank)
            self._ranks[label(self.name, {"dp": rank, "tp": 0})] = actor.slice(tp=0)
        return await self._all("start", "")

    async def step(self, updates: Sequence[Sequence[Any]]) -> StepStats:
        stats = await super().step(updates)
        self._observed.mark()
        if len(self._observed.marks) == 2:
            await self.calls()  # of the start
        return stats

    async def calls(self) -> Counter[str]:
        return await self._shared.calls() + await self._others.calls()


class _OwnProcess:
    """The process mesh of one replica, as its Replica sees it."""

    def __init__(self, procs: ProcMesh, vocabulary: int, pace: float) -> None:
        self._procs, self._given = procs, (vocabulary, pace)

    def spawn(self, name: str, actor: type, settings: EngineSettings) -> Any:
        return self._procs.spawn(name, SimulatedGenerator, settings, *self._given)


def settings_of(setup: Setup) -> EngineSettings:
    return EngineSettings(**asdict(setup.config.generator), model_dir=str(setup.model_folder))


def generators_of(setup: Setup, incidents: Incidents, procs: SimulatedProcs, pace: float) -> GeneratorMesh:
    policy = generator_policy(setup.config, incidents)

    def replica(index: int) -> Replica:
        own: Any = _OwnProcess(procs.of(index), setup.shape.vocab_size, pace)
        return Replica(index, f"generator{index}", own, settings_of(setup), policy)

    return GeneratorMesh(map(replica, range(setup.config.generator.replicas)), policy)


@asynccontextmanager
async def simulated(
    setup: Setup,
    terminal: Terminal,
    incidents: Incidents,
    hurries: Callable[[], bool],
    *,
    observed: Observed,
    pace: float,
) -> AsyncIterator[tuple[Meshes, Watch]]:
    """As train.bring_up.launch. A step of an engine takes `pace` seconds."""
    watch = Watch(tended=["generator"])
    observed.mark()
    procs = SimulatedProcs(setup.config.generator.replicas)
    trainers = SimulatedTrainers(setup.resolved, setup.shape, observed, procs)
    generators = generators_of(setup, incidents, procs, pace)
    with terminal.phase("simulated ranks"):
        await asyncio.gather(trainers.start(), generators.start())
    try:
        yield Meshes(trainers, generators), watch
        observed.calls = await trainers.calls()
        await asyncio.gather(trainers.close(), generators.close())
    finally:
        watch.close()
