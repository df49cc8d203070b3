"""The audit names what was changed in rollouts.jsonl or metrics.jsonl of a finished run: one forgery at a time, of 8
steps with 2 prompts of 2 samples each."""

from pathlib import Path

import pytest

from support.forging import Forge, every, found_in, metrics, of, rollouts, swap, without

COMPLETION = ("text", "tokens", "mask", "logprobs", "versions")

ROLLOUTS: dict[str, tuple[Forge, str]] = {
    "completions of two prompts swapped": (
        lambda r: [swap(a, b, *COMPLETION) for a, b in zip(every(r, prompt_id=4), every(r, prompt_id=7), strict=True)],
        "prompt 4, sample 0 at step 3: ",
    ),
    "completions of a prompt's samples swapped": (
        lambda r: swap(of(r, prompt_id=5, sample=0), of(r, prompt_id=5, sample=1), *COMPLETION),
        "prompt 5, sample 0 at step 3: ",
    ),
    "one token changed": (
        lambda r: (t := of(r, prompt_id=9)["tokens"]).__setitem__(-1, t[-1] + 1),
        "prompt 9, sample 0 at step 5: its tokens or versions are not those",
    ),
    "all tokens of step 6 of version 0": (
        lambda r: [line.update(versions=[0] * len(line["versions"])) for line in every(r, step=6)],
        "prompt 10, sample 0 at step 6: sampled from version 0, from [5, 5] in the ledger",
    ),
    "versions from the future": (
        lambda r: of(r, step=6)["versions"].__setitem__(-1, 99),
        "at step 6: sampled from version 99",
    ),
    "versions that fall": (
        lambda r: of(r, step=6).update(versions=[5, 4, 5][: len(of(r, step=6)["versions"])]),
        "at step 6: its versions fall",
    ),
    "one version less than tokens": (
        lambda r: of(r, step=2)["versions"].pop(),
        "sampled tokens have",
    ),
    "sample 0 twice and 1 missing": (
        lambda r: of(r, prompt_id=3, sample=1).update(of(r, prompt_id=3, sample=0)),
        "sample 0 of prompt 3 at step 2 is there twice",
    ),
    "a sample missing": (
        lambda r: without(r, of(r, prompt_id=3, sample=1)),
        "prompt 3 at step 2 has the samples [0], expected 0 to 1",
    ),
    "a sample too many": (
        lambda r: r.insert(1, {**r[0], "sample": 2}),
        "prompt 0, sample 2 at step 1: the ledger has 2 samples",
    ),
    "every reward 1": (
        lambda r: [line.update(reward=1.0) for line in r],
        "reward 1.0, ",
    ),
    "rewards of a group swapped": (
        lambda r: swap(of(r, prompt_id=1, sample=0), of(r, prompt_id=1, sample=1), "reward"),
        "prompt 1, sample 0 at step 1: reward",
    ),
    "reward NaN": (lambda r: r[2].update(reward=float("nan")), "line 3: prompt 1, sample 0 at step 1: reward nan"),
    "tokens emptied": (
        lambda r: [line.update(tokens=[], mask=[], logprobs=[], versions=[]) for line in r],
        "0 sampled tokens, ",
    ),
    "mask shifted": (
        lambda r: r[0].update(mask=[0, *r[0]["mask"][:-1]]),
        "prompt 0, sample 0 at step 1: 1 sampled tokens have",
    ),
    "a log-prob less": (lambda r: r[0]["logprobs"].pop(), "log-probs"),
    "log-probs changed": (
        lambda r: r[0].update(logprobs=[p * 2 for p in r[0]["logprobs"]]),
        "rollouts.jsonl: the lines of step 1 are not those that the run wrote",
    ),
    "texts swapped": (
        lambda r: swap(of(r, prompt_id=12), of(r, prompt_id=13), "text"),
        "rollouts.jsonl: the lines of step 7 are not those that the run wrote",
    ),
    "advantages changed": (
        lambda r: of(r, step=7).update(advantage=3.0),
        "rollouts.jsonl: the lines of step 7 are not those that the run wrote",
    ),
    "another prompt's question": (
        lambda r: of(r, prompt_id=6, sample=1).update(prompt="1+1=", answer="20"),
        "sample 1 of prompt 6 has another prompt than the samples before it",
    ),
    "another step": (
        lambda r: [line.update(step=5) for line in every(r, prompt_id=7)],
        "rollouts.jsonl has prompt 7 at step 5, the ledger does not",
    ),
    "another prompt": (
        lambda r: [line.update(prompt_id=70) for line in every(r, prompt_id=7)],
        "the ledger has prompt 7 at step 4, rollouts.jsonl does not",
    ),
    "groups swapped": (
        lambda r: swap(of(r, prompt_id=6), of(r, prompt_id=7), "group"),
        "prompt 6, sample 0 at step 4: it is in group 1",
    ),
    "a step missing": (
        lambda r: without(r, *every(r, step=8)),
        "the ledger has prompt 14 at step 8, rollouts.jsonl does not",
    ),
    "steps out of order": (lambda r: r.reverse(), "step 7 follows step 8"),
    "a step that was never made": (
        lambda r: r.extend({**line, "step": 9} for line in every(r, step=8)),
        "rollouts.jsonl has prompt 14 at step 9, the ledger does not",
    ),
}


@pytest.mark.parametrize("name", ROLLOUTS)
def test_a_forged_rollout_is_named(finished: Path, tmp_path: Path, name: str) -> None:
    forge, said = ROLLOUTS[name]
    problems = found_in(finished, tmp_path, rollouts(forge))
    assert any(said in problem and "rollouts.jsonl" in problem for problem in problems), problems


METRICS: dict[str, tuple[Forge, str]] = {
    "rewards replaced": (
        lambda m: [line.update({"reward/mean": 0.9}) for line in every(m, kind="rl")],
        "reward/mean of step 1 is 0.9",
    ),
    "lengths replaced": (
        lambda m: of(m, step=3, kind="rl").update({"completions/mean_length": 64.0}),
        "completions/mean_length of step 3 is 64.0",
    ),
    "tokens replaced": (
        lambda m: of(m, step=3, kind="rl").update({"tokens/sampled": 1.0}),
        "tokens/sampled of step 3 is 1.0",
    ),
    "dropped groups invented": (
        lambda m: of(m, step=3, kind="rl").update({"dropped/failed": 1.0}),
        "dropped/failed of step 3 is 1.0, 0 by the ledger",
    ),
    "ages hidden": (
        lambda m: of(m, step=3, kind="rl").update({"policy_age/max": 4.0}),
        "policy_age/max of step 3 is 4.0, 0 by the ledger",
    ),
    "a metric that is no number": (
        lambda m: of(m, step=3, kind="rl").update({"reward/mean": "high"}),
        "reward/mean of step 3 is high",
    ),
    "loss replaced": (
        lambda m: of(m, step=3, kind="rl").update(loss=0.25),
        "metrics.jsonl: the lines of step 3 are not those that the run wrote",
    ),
    "last line missing": (lambda m: m.pop(), "metrics.jsonl: step 8 is missing"),
    "a line missing": (
        lambda m: without(m, of(m, step=4, kind="rl")),
        "metrics.jsonl: step 4 is missing",
    ),
    "a line twice": (lambda m: m.append(m[-1]), "step 8 follows step 8"),
    "a step that was never made": (
        lambda m: m.append({**m[-1], "step": 9}),
        "step 9, which the ledger has not trained",
    ),
    "no line at all": (lambda m: m.clear(), "metrics.jsonl: step 1 is missing"),
}


@pytest.mark.parametrize("name", METRICS)
def test_a_forged_metric_is_named(finished: Path, tmp_path: Path, name: str) -> None:
    forge, said = METRICS[name]
    problems = found_in(finished, tmp_path, metrics(forge))
    assert any(said in problem and "metrics.jsonl" in problem for problem in problems), problems
