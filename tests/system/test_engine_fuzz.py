"""Random turns, withdrawals, weight swaps, sleeps and truncations on a real vLLM whose KV cache is too small for them.

Every sampled token is compared with Hugging Face's forward of the weights that sampled it. As in test_engine.py, each
test runs this file's check_* function in a separate pytest process.
"""

import os
import random
from collections import Counter
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.engine_runs import SCHEDULING, SCHEDULINGS, asynchronous, overwrite, reference, run_checks
from support.tiny import perturbed, tiny_llama
from titan_rl.actors.vllm.engine import Done, Engine, EngineSettings
from titan_rl.ext.kept_sets.kept_sets import KeptSets
from titan_rl.wire.types import Completion, Request, Sampling

STEPS = 400
STOPS = (2, 3)
LENGTHS = (1, 2, 7, 15, 31, 32, 33, 40, 63, 64, 65, 70)  # context lengths around the ends of blocks of 32 tokens
TOLERANCE = 5e-6
RECORDS_KEPT = "RECORDS_KEPT"


@pytest.mark.parametrize(
    ("records_kept", "scheduling"), [("", SCHEDULINGS[0]), ("1", SCHEDULINGS[0]), ("", SCHEDULINGS[1])]
)
def test_every_token_is_sampled_by_the_current_weights(records_kept: str, scheduling: str) -> None:
    run_checks(__file__, **{RECORDS_KEPT: records_kept, SCHEDULING: scheduling})


def check_every_token_is_sampled_by_the_current_weights(engine: Engine, models: list[Any]) -> None:
    fuzz = Fuzz(engine, models, seed=int(bool(os.environ[RECORDS_KEPT])))
    for _ in range(STEPS):
        fuzz.disturb()
        fuzz.step()
    while engine.busy:
        fuzz.step()
    assert not fuzz.live
    assert all(fuzz.counts[kind] > 5 for kind in ("resumed", "turns", "swaps", "kept swaps", "sleeps", "scored"))
    assert fuzz.counts["tokens"] > 3000
    assert fuzz.counts["truncated"] > 100 or not fuzz.records_kept
    assert engine.stats().recomputed > 0


@pytest.fixture(scope="module")
def models() -> list[Any]:
    model = tiny_llama(max_position_embeddings=256, eos_token_id=2)
    return [model, perturbed(model)]


@pytest.fixture(scope="module")
def engine(models: list[Any], tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder: Path = tmp_path_factory.mktemp("model")
    models[0].save_pretrained(folder)
    room: dict[str, Any] = {"max_model_len": 160, "max_num_seqs": 24, "kv_cache_memory_mb": 1}
    records = ("kept",) if os.environ[RECORDS_KEPT] else ()
    room["async_scheduling"] = asynchronous()
    return Engine(EngineSettings(model_dir=str(folder), load_format="auto", records=records, **room))


class Fuzz:
    def __init__(self, engine: Engine, models: Sequence[Any], seed: int) -> None:
        self.engine, self.models, self.rng = engine, models, random.Random(seed)
        self._exact = [deepcopy(model).double() for model in models]  # so that the gap is the engine's rounding alone
        self.records_kept = bool(os.environ[RECORDS_KEPT])
        self.live: dict[str, Request] = {}
        self.counts = Counter[str]()
        self._contexts = [[self.rng.randrange(4, 64) for _ in range(70)] for _ in range(3)]
        self._begun: list[tuple[Request, list[tuple[int, Completion]]]] = []  # withdrawn samples, with their seeds
        self._turns: list[list[int]] = []  # contexts of second turns
        self._weights = {0: 0}  # by version, which of the models it is
        overwrite(engine, models[0])
        engine.set_version(0)

    def disturb(self) -> None:
        """Add requests, withdraw some, or change the weights, or nothing of it."""
        rng = self.rng
        if len(self.live) < 6 and rng.random() < 0.4:
            requests = [self._request() for _ in range(rng.choice([1, 1, 2, 4]))]
            self.live |= {request.id: request for request in requests}
            self.engine.add(requests)
        if rng.random() < 0.05:
            for done in self.engine.withdraw(rng.sample([*self.live], rng.randrange(len(self.live) + 1))):
                self._check(done)
        if rng.random() < 0.08:
            self._swap()

    def _swap(self) -> None:
        """Serve the next version. Where keys and values are kept it has the same weights, so they stay right."""
        version, keep = len(self._weights), self.rng.random() < 0.4
        if self.rng.random() < 0.3:
            self.counts["sleeps"] += 1
            self.engine.sleep()
            self.engine.wake()
        self.engine.suspend()
        self._weights[version] = self._weights[version - 1] if keep else self.rng.randrange(2)
        overwrite(self.engine, self.models[self._weights[version]])
        self.engine.set_version(version, keep=keep)
        self.counts["kept swaps" if keep else "swaps"] += 1

    def _request(self) -> Request:
        rng = self.rng
        self.counts["requests"] += 1
        id = f"r{self.counts['requests']}"
        if self._begun and rng.random() < 0.5:
            self.counts["resumed"] += 1
            request, samples = self._begun.pop(rng.randrange(len(self._begun)))
            return replace(request, id=id, seeds=[seed for seed, _ in samples], begun=[one for _, one in samples])
        if self._turns and rng.random() < 0.6:
            self.counts["turns"] += 1
            context = self._turns.pop(rng.randrange(len(self._turns)))
        else:
            context = rng.choice(self._contexts)[: rng.choice(LENGTHS)]
        sampling = Sampling(
            rng.randrange(1, 50),
            rng.choice([0.0, 0.7, 1.0, 1.0]),
            stop_token_ids=rng.choice([STOPS, STOPS[:1], ()]),
            scores_context=rng.random() < 0.1,
        )
        if self.records_kept and rng.random() < 0.5:
            sampling = replace(
                sampling, top_p=rng.choice([0.7, 1.0]), top_k=rng.choice([0, 8]), min_p=rng.choice([0, 0.05])
            )
        seeds = [rng.randrange(2**31) for _ in range(rng.choice([1, 2, 3, 8, 13]))]
        return Request(id, context, seeds, sampling)

    def step(self) -> None:
        for done in self.engine.step():
            self._check(done)

    def _check(self, done: Done) -> None:
        request = self.live.pop(done.id)
        assert not done.refused
        unfinished = list[tuple[int, Completion]]()
        for seed, completion in zip(request.seeds, done.completions, strict=True):
            self._check_end(request.sampling, completion)
            if completion.tokens:
                self._check_logprobs(request, completion)
            if completion.finish == "abort":
                unfinished.append((seed, completion))
            elif len(request.tokens) + len(completion.tokens) < 100:
                self._turns.append([*request.tokens, *completion.tokens, self.rng.randrange(4, 64)])
        if unfinished:
            self._begun.append((replace(request, begun=[]), unfinished))

    def _check_end(self, sampling: Sampling, completion: Completion) -> None:
        count = len(completion.tokens)
        stops = [i for i, token in enumerate(completion.tokens) if token in sampling.stop_token_ids]
        assert count == len(completion.logprobs) == len(completion.versions)
        assert len(completion.extras.get("kept", ())) == (count if self.records_kept else 0)
        if completion.finish == "stop":
            assert stops == [count - 1]
        else:
            assert not stops
            assert count < sampling.max_new_tokens if completion.finish == "abort" else count == sampling.max_new_tokens

    def _check_logprobs(self, request: Request, completion: Completion) -> None:
        temperature = request.sampling.temperature or 1.0
        own = {
            version: reference(self._exact[self._weights[version]], request.tokens, completion.tokens, temperature)
            for version in set(completion.versions)
        }
        counts, ids = KeptSets.of(completion.extras["kept"]).ids() if self.records_kept else ((), np.array([]))
        begin = 0
        for i, (token, logprob, version) in enumerate(
            zip(completion.tokens, completion.logprobs, completion.versions, strict=True)
        ):
            row = own[version][i]
            if request.sampling.temperature == 0:
                assert row.max() - row[token] < 1e-4
            if self.records_kept and counts[i]:
                kept = ids[begin : begin + counts[i]].tolist()
                begin += int(counts[i])
                row = row - row[kept].logsumexp(0)
                assert token in kept
                self.counts["truncated"] += 1
            assert abs(row[token].item() - logprob) < TOLERANCE
            self.counts["tokens"] += 1
        self.counts["scored"] += bool(completion.context)
