"""A whole run whose rollouts are chats."""

import subprocess
import sys
from itertools import pairwise
from pathlib import Path

from support.running import Runs

BOS, END, USER, ASSISTANT = 1, 2, 4, 5  # as in the built-in tokenizer


def test_a_run_trains_on_chats_with_an_environment(runs: Runs, tmp_path: Path) -> None:
    """The environment spells control tokens in all of its messages. Every turn is opened and ended by the template, and
    the mask covers the sampled tokens."""
    keys = {"task__template": "chat", "environment__name": "chatty_environment:chatty", "cold_start__steps": 0}
    run = runs.finish(tmp_path / "run", training__steps=2, rollout__max_new_tokens=6, **keys)
    rollouts = run.lines("rollouts.jsonl")
    assert len(rollouts) == 32
    for rollout in rollouts:
        turns, tokens, mask = rollout["turns"], rollout["tokens"], rollout["mask"]
        assert [turn["branch"] for turn in turns] == [0, 0, 0]
        assert mask == [bit for turn in turns for bit in (*[0] * turn["read"], *[1] * turn["sampled"])]
        cuts, at = list[int](), 0
        for turn in turns:
            cuts += [at, at + turn["read"]]
            at += turn["read"] + turn["sampled"]
        first, second, third = (tokens[begin:end] for begin, end in (cuts[:2], cuts[2:4], cuts[4:6]))
        control = [[token for token in read if token in (BOS, END, USER, ASSISTANT)] for read in (first, second, third)]
        assert control[0] == [BOS, USER, END, USER, END, ASSISTANT]
        for turn, found in zip(turns, control[1:], strict=False):
            assert found == [*([END] if turn["finish"] == "length" else []), USER, END, ASSISTANT]
        assert all(begin < end for begin, end in pairwise(cuts))
    audit = [sys.executable, "-m", "titan_rl", "audit", str(run.folder)]
    done = subprocess.run(audit, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
