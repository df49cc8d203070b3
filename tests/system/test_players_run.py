"""Whole runs whose episodes have several players."""

import json
import os
import shutil
import signal
import zlib
from pathlib import Path
from typing import Any

import pytest

from support.chat_endpoint import answering
from support.chat_folders import chat_folder
from support.forging import rollouts
from support.openai_server import serving
from support.outputs import losses, sampled
from support.running import Run, Runs
from support.slow_cases import slow_except
from support.tiny import tiny_model
from titan_rl.record.run_names import SEAT_MODELS
from titan_rl.tools.inspect.audit_rules import audit

FEW: dict[str, Any] = {
    "cold_start__steps": 0,
    "training__steps": 4,
    "rollout__groups_per_step": 6,
    "rollout__group_size": 4,
    "environment__concurrency": 16,
    "generator__max_num_seqs": 24,
}
ROLE_MEAN = {"algorithm__advantage": "role_mean", "rollout__group_size": 1, "rollout__groups_per_step": 24}


def tokens_of(run: Run, seat: str) -> int:
    turns = [turn for line in run.lines("rollouts.jsonl") for turn in line["turns"]]
    return sum(turn["sampled"] for turn in turns if turn["seat"] == seat)


def trained_on(run: Run) -> float:
    return sum(step["tokens/trained"] for step in run.lines("metrics.jsonl"))


@pytest.mark.parametrize("keys", slow_except([{}, ROLE_MEAN], 1), ids=["group", "role_mean"])
def test_a_run_that_is_stopped_and_loses_an_environment_is_one_that_is_not(
    runs: Runs, tmp_path: Path, keys: dict[str, Any]
) -> None:
    keys = {**FEW, **keys, "training__steps": 16}
    whole = runs.finish(tmp_path / "whole", "kuhn_llama", **keys)
    assert trained_on(whole) == tokens_of(whole, "first") + tokens_of(whole, "second")
    assert all(line["reward_seat/first"] == -line["reward_seat/second"] for line in whole.lines("metrics.jsonl"))
    part = runs.start(tmp_path / "part", "kuhn_llama", **keys)
    part.wait_for_step(1)
    os.kill(part.workers()["environment0[env=0]"], signal.SIGKILL)
    part.wait_for_step(2)
    part.process.send_signal(signal.SIGINT)
    part.finish()
    resumed = runs.finish(tmp_path / "part", "kuhn_llama", **keys)
    assert losses(resumed) == losses(whole)
    assert sampled(resumed) == sampled(whole)
    assert audit(resumed.folder)[0] == []


def test_no_token_of_a_frozen_player_is_trained_on_and_the_audit_finds_a_forged_one(runs: Runs, tmp_path: Path) -> None:
    run = runs.finish(tmp_path / "run", "kuhn_llama", **FEW, environment__frozen_seats='["second"]')
    assert trained_on(run) == tokens_of(run, "first") > 0
    assert tokens_of(run, "second") > 0
    assert audit(run.folder)[0] == []
    assert "reward_seat/second" not in run.lines("metrics.jsonl")[0]

    def thaw(lines: list[dict[str, Any]]) -> None:
        lines[0]["trained"]["second"] = lines[0]["trained"]["first"]

    def exchange(lines: list[dict[str, Any]]) -> None:
        for turn in lines[0]["turns"]:
            turn["seat"] = {"first": "second", "second": "first"}[turn["seat"]]

    for name, forge, problem in (
        ("thaw", thaw, "it was trained on tokens of second, which has no reward"),
        ("exchange", exchange, "is of player second, in the ledger of first"),
    ):
        shutil.copytree(run.folder, tmp_path / name)
        rollouts(forge)(tmp_path / name)
        assert any(problem in found for found in audit(tmp_path / name)[0])


@pytest.mark.parametrize(
    "keys",
    slow_except(
        [
            {"generator__dtype": "bfloat16", "rollout__max_staleness_steps": 1, "environment__lockstep": False},
            {"lora__rank": 8, "lora__sync": "adapter"},
            {"training__stream_groups": 2, "rollout__max_staleness_steps": 1, "environment__lockstep": False},
        ],
        0,
    ),
    ids=["bfloat16_lag", "adapters", "streamed"],
)
def test_players_learn_beside_other_features(runs: Runs, tmp_path: Path, keys: dict[str, Any]) -> None:
    run = runs.finish(tmp_path / "run", "kuhn_llama", **FEW, **keys)
    assert trained_on(run) == tokens_of(run, "first") + tokens_of(run, "second")
    assert audit(run.folder)[0] == []
    lines = run.lines("rollouts.jsonl")
    assert all(line["seats"]["first"] == -line["seats"]["second"] for line in lines)
    assert json.dumps(lines).count('"name": "second"') > 0


def endpoint(url: str) -> dict[str, Any]:
    """Return the keys of a run whose second player is a model at a URL."""
    table = f'{{url = "{url}", model = "policy", api_key_env = "SECOND_KEY", max_tokens = 1}}'
    return {"environment__endpoints": f"{{second = {table}}}", "hosts__isolation": "off"}


def test_an_endpoint_plays_beside_adapters_of_16_bits_and_a_lag_and_a_lost_environment(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the weights that were trained are the endpoint of another run."""
    keys: dict[str, Any] = {
        **FEW,
        "lora__rank": 8,
        "lora__sync": "adapter",
        "generator__dtype": "bfloat16",
        "rollout__max_staleness_steps": 1,
        "environment__lockstep": False,
    }
    monkeypatch.setenv("SECOND_KEY", "sk-very-secret-9")

    def reply(body: dict[str, Any]) -> str:
        return "az"[zlib.crc32(json.dumps(body["messages"]).encode()) % 2]

    with answering(reply) as (url, seen):
        run = runs.start(tmp_path / "run", "kuhn_llama", **keys, **endpoint(url))
        run.wait_for_step(1)
        os.kill(run.workers()["environment0[env=0]"], signal.SIGKILL)
        out = run.finish()
        assert run.code == 0, out
    assert {request["key"] for request in seen} == {"Bearer sk-very-secret-9"}
    assert {move for _, move in moves(run, "second")} == {"a", "z"}
    assert alone(run, "first")
    texts = [out.encode(), *(path.read_bytes() for path in run.folder.rglob("*") if path.is_file())]
    assert not any(b"sk-very-secret-9" in text for text in texts)

    (tmp_path / "serve").mkdir()
    with serving(tmp_path / "serve", str(run.folder), "--task.template", "chat") as (_, url, key):
        monkeypatch.setenv("SECOND_KEY", key)
        other = runs.finish(tmp_path / "other", "kuhn_llama", **FEW, **endpoint(url))
    assert alone(other, "first")
    assert moves(other, "second")


def test_a_model_of_another_family_plays_from_a_folder_and_is_as_if_it_had_not_been_lost(
    runs: Runs, tmp_path: Path
) -> None:
    folder = tmp_path / "qwen"
    tiny_model("qwen3", vocab_size=640).save_pretrained(folder)
    chat_folder(folder, "qwen3")  # with another tokenizer, too
    keys: dict[str, Any] = {
        **FEW,
        "training__steps": 16,
        "parallelism__data_parallel_shard_degree": 1,
        "environment__processes": 1,
        "environment__turn_seconds": 240,
        "environment__endpoints": f'{{second = {{folder = "{folder}", max_tokens = 3}}}}',
    }
    whole = runs.finish(tmp_path / "whole", "kuhn_llama", **keys)
    assert alone(whole, "first")
    assert len({move for _, move in moves(whole, "second")}) > 20
    part = runs.start(tmp_path / "part", "kuhn_llama", **keys)
    part.wait_for_step(1)
    os.kill(part.workers()["generator_second0[tp=0]"], signal.SIGKILL)
    out = part.finish()
    assert "generator_second0[tp=0] died: its process was killed by signal 9" in out
    assert "generator_second0 is back" in out
    assert losses(part) == losses(whole)
    assert sampled(part) == sampled(whole)
    assert moves(part, "second") == moves(whole, "second")
    assert (part.folder / SEAT_MODELS).read_text() == (whole.folder / SEAT_MODELS).read_text()
    assert not part.workers()


def moves(run: Run, seat: str) -> list[tuple[str, str]]:
    """Return the text that a player read before each move, and the move."""
    spoken = [[m["content"] for m in line["messages"] if m["name"] == seat] for line in run.lines("rollouts.jsonl")]
    return [pair for texts in spoken for pair in zip(texts[::2], texts[1::2], strict=True)]


def alone(run: Run, seat: str) -> bool:
    """Return True if all turns are a player's, and all that it sampled was trained on."""
    lines = run.lines("rollouts.jsonl")
    assert audit(run.folder)[0] == []
    assert all(turn["seat"] == seat for line in lines for turn in line["turns"])
    assert all(reward is None for line in lines for name, reward in line["seats"].items() if name != seat)
    return trained_on(run) == tokens_of(run, seat) > 0
