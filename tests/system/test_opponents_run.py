"""Whole runs against opponents: earlier adapters of the run, and another run's."""

import copy
import json
import os
import shutil
import signal
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from support.forging import rollouts
from support.outputs import losses, sampled
from support.running import Run, Runs
from support.slow_cases import slow_except
from titan_rl.tools.inspect.audit_rules import audit

if TYPE_CHECKING:
    from torch import Tensor

FEW: dict[str, Any] = {
    "cold_start__steps": 0,
    "training__steps": 10,
    "rollout__groups_per_step": 6,
    "rollout__group_size": 4,
    "environment__concurrency": 24,
    "generator__max_num_seqs": 24,
    "lora__rank": 8,
    "lora__sync": "adapter",
    "optimizer__lr": 1e-2,
    "opponents__pool": '["start", "best", "history", "steps-ago 3"]',
    "opponents__weighting": "hard",
    "opponents__share": 0.8,
    "opponents__interval": 2,
}


def turns(run: Run) -> list[tuple[dict[str, Any], dict[str, Any], int]]:
    """Return (line, turn, the place of the first token that was sampled) of all turns."""
    found = list[tuple[dict[str, Any], dict[str, Any], int]]()
    for line in run.lines("rollouts.jsonl"):
        at = 0
        for turn in line["turns"]:
            found.append((line, turn, at + turn["read"]))
            at += turn["read"] + turn["sampled"]
    return found


def own_tokens(run: Run) -> int:
    return sum(turn["sampled"] for line, turn, _ in turns(run) if turn["seat"] not in line.get("opponents", {}))


def trained_on(run: Run) -> float:
    return sum(step["tokens/trained"] for step in run.lines("metrics.jsonl"))


def add(model: Any, tensors: "Mapping[str, Tensor]", scale: float) -> None:
    """Add adapters, by PEFT's names, to a model's weights."""
    from titan_rl.wire.weight_plan import LORA_A, LORA_B

    for name, a in tensors.items():
        if name.endswith(LORA_A):
            layer = name.removesuffix(LORA_A)
            model.get_submodule(layer).weight.data.add_(scale * (tensors[layer + LORA_B] @ a))


def test_a_run_that_is_stopped_and_loses_its_generator_meets_the_same_opponents(runs: Runs, tmp_path: Path) -> None:
    keys = {**FEW, "checkpoint__interval": 1}
    whole = runs.finish(tmp_path / "whole", "kuhn_llama", **keys)
    assert trained_on(whole) == own_tokens(whole)
    part = runs.start(tmp_path / "part", "kuhn_llama", **keys)
    part.wait_for_step(3)
    os.kill(part.workers()["generator0[tp=0]"], signal.SIGKILL)
    part.wait_for_step(5)
    part.process.send_signal(signal.SIGINT)
    part.finish()
    resumed = runs.finish(tmp_path / "part", "kuhn_llama", **keys)
    assert losses(resumed) == losses(whole)
    assert sampled(resumed) == sampled(whole)
    named = [[line.get("opponents") for line in run.lines("rollouts.jsonl")] for run in (whole, resumed)]
    assert named[0] == named[1]
    for run in (whole, resumed):
        assert audit(run.folder)[0] == []
    elo = [[line["elo/policy"] for line in run.lines("metrics.jsonl")] for run in (whole, resumed)]
    assert elo[0] == elo[1]
    opponents_play_by_the_adapters_of_their_step(whole)
    a_forged_opponent_is_found(whole, tmp_path)


def opponents_play_by_the_adapters_of_their_step(run: Run) -> None:
    """Compare each opponent's log-probs with transformers', and expect other ones of the policy's own step."""
    import torch
    from transformers import AutoModelForCausalLM

    from titan_rl.ext.adapters.layers import PEFT_FOLDER
    from titan_rl.ext.adapters.ranks.lora import read_peft

    scale = 32.0 / 8
    base = AutoModelForCausalLM.from_pretrained(run.folder / "hf", dtype=torch.float32)
    add(base, read_peft(run.folder / "hf" / PEFT_FOLDER), -scale)
    played, versions = defaultdict[str, list[Any]](list), set[int]()
    for line, turn, begin in turns(run):
        opponent = line.get("opponents", {}).get(turn["seat"])
        if opponent is not None:
            played[opponent].append((line["tokens"][:begin], line["tokens"][begin], line["logprobs"][begin]))
    assert len(played) > 3
    for line, turn, begin in turns(run):
        before = sum(line["mask"][:begin])
        of = line["versions"][before : before + turn["sampled"]]
        opponent = line.get("opponents", {}).get(turn["seat"])
        assert set(of) == {int(opponent.removeprefix("step-")) if opponent else line["step"] - 1}
        versions |= {*of}
    for opponent, asked in played.items():
        (folder,) = (run.folder / "opponents").glob(f"{opponent}.*")
        model, others = copy.deepcopy(base), 0.0
        add(model, read_peft(folder), scale)
        for tokens, token, logprob in asked[:40]:
            first = max(i for i, each in enumerate(tokens) if each == tokens[0])  # branches begin with BOS
            with torch.no_grad():
                scores, plain = (m(torch.tensor([tokens[first:]])).logits[0, -1].log_softmax(-1) for m in (model, base))
            assert abs(float(scores[token]) - logprob) < 1e-4
            others = max(others, abs(float(plain[token]) - logprob))
        assert (others > 1e-3) == (opponent != "step-0")


def a_forged_opponent_is_found(run: Run, tmp_path: Path) -> None:
    def against(lines: list[dict[str, Any]]) -> dict[str, Any]:
        return next(line for line in lines if line.get("opponents"))

    def rename(lines: list[dict[str, Any]]) -> None:
        line = against(lines)
        line["opponents"] = dict.fromkeys(line["opponents"], "step-99")

    def dismiss(lines: list[dict[str, Any]]) -> None:
        del against(lines)["opponents"]

    def train(lines: list[dict[str, Any]]) -> None:
        (seat,) = (line := against(lines))["opponents"]
        line["trained"][seat] = "00c0ffee"

    for forge, problem in (
        (rename, "was played by step-99, in the ledger by step-"),
        (dismiss, "was played by the policy, in the ledger by step-"),
        (train, "whom step-"),
    ):
        shutil.copytree(run.folder, tmp_path / forge.__name__)
        rollouts(forge)(tmp_path / forge.__name__)
        assert any(problem in found for found in audit(tmp_path / forge.__name__)[0])


@pytest.mark.parametrize(
    "keys",
    slow_except(
        [
            {
                "generator__dtype": "bfloat16",
                "rollout__max_staleness_steps": 2,
                "environment__lockstep": False,
                "generator__replicas": 2,
            },
            {"training__stream_groups": 2, "rollout__max_staleness_steps": 1, "environment__lockstep": False},
            {"algorithm__advantage": "role_mean", "rollout__group_size": 1, "rollout__groups_per_step": 24},
        ],
        0,
    ),
    ids=["bfloat16_lag_two_engines", "streamed", "role_mean"],
)
def test_opponents_beside_other_features(runs: Runs, tmp_path: Path, keys: dict[str, Any]) -> None:
    together: dict[str, Any] = FEW | {"training__steps": 6} | keys
    run = runs.finish(tmp_path / "run", "kuhn_llama", **together)
    assert trained_on(run) == own_tokens(run)
    assert audit(run.folder)[0] == []
    lines = run.lines("metrics.jsonl")
    assert all(line["policy_age/max"] <= keys.get("rollout__max_staleness_steps", 0) for line in lines)
    assert {"elo/policy", "elo/steps-ago-3", "won_against/start"} <= lines[-1].keys()


def test_another_runs_adapter_takes_a_seat_in_training_and_in_held_out_episodes(runs: Runs, tmp_path: Path) -> None:
    alone: dict[str, Any] = FEW | {"training__steps": 2, "opponents__pool": "[]"} | OFF
    other = runs.finish(tmp_path / "other", "kuhn_llama", **alone)
    folder = tmp_path / "other_player"
    shutil.copytree(other.folder / "hf" / "adapter", folder)
    keys: dict[str, Any] = {
        "opponents__pool": json.dumps([str(folder)]),
        "opponents__seats": '["second"]',
        "opponents__held_out": str(folder),
        "environment__frozen_seats": '["second"]',
        "eval__size": 8,
        "training__steps": 3,
        "eval__interval": 1,
        "opponents__share": 1,
    }
    together: dict[str, Any] = FEW | keys
    run = runs.finish(tmp_path / "run", "kuhn_llama", **together)
    assert {json.dumps(line["opponents"]) for line in run.lines("rollouts.jsonl")} == {'{"second": "other_player"}'}
    assert trained_on(run) == own_tokens(run)
    assert audit(run.folder)[0] == []
    scores = [line["eval/score"] for line in run.lines("metrics.jsonl") if "eval/score" in line]
    assert any(scores)  # of the first player alone: the mean of both is 0


OFF = {"opponents__weighting": "even", "opponents__share": 1, "opponents__interval": 10}
