#!/usr/bin/env python3
"""Measure what the controller itself computes in a step of long samples: CPU seconds of each part, without engines or
trainers. Appends rows to a CSV.

    .venv/bin/python scripts/bench_controller.py                      # 64 groups of 8 samples of 4,096 tokens
    .venv/bin/python scripts/bench_controller.py --groups 8 --csv /tmp/controller.csv

The parts run in turn on the same groups, in one process: what the generators' answers cost to unpickle, what turns them
into batches for four ranks, shipping them, writing. Nothing here depends on the model but its vocabulary.
Then rollouts of several turns: what a turn costs from the driver to the request and back, with its line in the ledger.
"""

import argparse
import asyncio
import pickle
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.rows import BENCHMARKS, FIGURES, RAN_ON, Row, report
from titan_rl.batch.experience import dead, samples_of, with_advantages
from titan_rl.batch.packing import pack
from titan_rl.config.sections import Config
from titan_rl.record.ledger import Ledger, digest
from titan_rl.record.metrics import ages_of
from titan_rl.record.run_log import RunLog
from titan_rl.rollout.player import Play, Player
from titan_rl.rollout.session import SessionLimits
from titan_rl.wire.sessions import Outcome, Session
from titan_rl.wire.types import Branch, Completion, Group, Prompt, Request, Rollout, Sampling, Turn

COLUMNS = ("variant", "measure", *FIGURES, *RAN_ON)
PROMPT, SAMPLES, SHARDS, VOCABULARY = 200, 8, 4, 128256
PARTS: dict[str, list[float]] = {}


def timed(part: str, work: Callable[[], Any]) -> Any:
    began = time.process_time()
    result = work()
    PARTS.setdefault(part, []).append(time.process_time() - began)
    return result


def completions_of(groups: int, length: int) -> list[list[bytes]]:
    """Return what the generators send: a pickle per sample."""
    draw = random.Random(0)

    def sample() -> bytes:
        tokens = [draw.randrange(VOCABULARY) for _ in range(length)]
        return pickle.dumps(Completion(tokens, [-draw.random() for _ in tokens], [3] * length, "length"), protocol=5)

    return [[sample() for _ in range(SAMPLES)] for _ in range(groups)]


def step(number: int, sent: list[list[bytes]], length: int, log: RunLog, ledger: Ledger) -> None:
    """Do everything that the controller does with a step's samples between two awaits."""
    algorithm = Config().algorithm
    answers: list[list[Completion]] = timed(
        "unpickle", lambda: [[pickle.loads(sample) for sample in group] for group in sent]
    )
    prompts = [Prompt(i, "p" * 800, [i % VOCABULARY] * PROMPT, "1") for i in range(len(answers))]
    timed("digests", lambda: [digest(c.tokens, c.versions) for group in answers for c in group])
    text = "x" * 4 * length
    groups = [
        Group(prompt, [Rollout([Branch([Turn(prompt.tokens, c)])], text, float(i % 2)) for i, c in enumerate(group)])
        for prompt, group in zip(prompts, answers, strict=True)
    ]
    timed("versions", lambda: [group.version for group in groups])
    samples = timed("samples", lambda: samples_of(groups, algorithm))
    judged, samples = timed("advantages", lambda: with_advantages(groups, samples, algorithm))
    timed("health", lambda: dead(samples))
    seq_len = PROMPT + length
    batches = timed("pack", lambda: pack(samples, shards=SHARDS, seq_len=seq_len, rows_per_microbatch=1, pad_id=0))
    timed("ship", lambda: [pickle.dumps(batch, protocol=5) for batch in batches])
    timed("ages", lambda: ages_of(number, judged))
    timed("write", lambda: log.step(number, {}, {}, judged))


class Tools:
    """Samples a turn, reads 24 tokens, and so on."""

    def __init__(self, turns: int) -> None:
        self.turns = turns

    async def drive(self, session: Session) -> Outcome:
        tokens = list(session.prompt.tokens)
        for _ in range(self.turns):
            tokens += (await session.sample(tokens)).tokens
            tokens += [7] * 24
        return Outcome(reward=1.0)


class Engine:
    async def generate(self, request: Request) -> list[Completion]:
        await asyncio.sleep(0)
        return [Completion([5] * 16, [-0.5] * 16, [0] * 16, "stop")]


def cost_of_turns(sessions: int, turns: int) -> float:
    """Return the CPU milliseconds of one turn, of sessions that run at the same time."""

    async def play(folder: str) -> None:
        limits = SessionLimits(context=1 << 20, seconds=600)
        player = Player(Tools(turns), Engine(), lambda tokens: "", limits=limits, ledger=Ledger(Path(folder)))
        prompts = [Prompt(i, "", [1] * PROMPT, "") for i in range(sessions)]
        plays = [Play(id=f"prompt-{p.id}.0", prompt=p, sampling=Sampling(16), group="g") for p in prompts]
        await asyncio.gather(*map(player.play, plays))

    with tempfile.TemporaryDirectory() as folder:
        began = time.process_time()
        asyncio.run(play(folder))
        return (time.process_time() - began) / (sessions * turns) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=64)
    parser.add_argument("--length", type=int, default=3896, help="sampled tokens")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--variant", default="this commit")
    parser.add_argument("--csv", type=Path, default=BENCHMARKS / "controller.csv")
    a = parser.parse_args()
    sent = completions_of(a.groups, a.length)
    with tempfile.TemporaryDirectory() as folder, RunLog(Path(folder), "bench", Config()) as log:
        ledger = Ledger(Path(folder))
        for number in range(1, a.repeats + 1):
            step(number, sent, a.length, log, ledger)
        written = (Path(folder) / "rollouts.jsonl").stat().st_size / a.repeats
    case = f"{a.groups} x {SAMPLES} samples of {a.length} tokens"
    sums = [sum(values) for values in zip(*PARTS.values(), strict=True)]
    rows = [Row("controller", case, f"{part}: CPU s", values, a.variant) for part, values in PARTS.items()]
    rows += [
        Row("controller", case, "all: CPU s", sums, a.variant),
        Row("controller", case, "rollouts.jsonl: MB", [written / 1e6], a.variant),
    ]
    for sessions, turns in ((1000, 4), (100, 32), (20, 128)):
        costs = [cost_of_turns(sessions, turns) for _ in range(a.repeats)]
        rows.append(Row("controller", f"{sessions} sessions of {turns} turns", "a turn: CPU ms", costs, a.variant))
    report(a.csv, COLUMNS, rows)


if __name__ == "__main__":
    main()
