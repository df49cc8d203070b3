"""Planted runs are named by their cause, effects are listed under it, and healthy runs get no word."""

import json
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from support.metric_histories import Line, config, metrics, ramp
from titan_rl.config.sections import Config
from titan_rl.tools.diagnosis.answer_facts import AnswerFacts
from titan_rl.tools.diagnosis.history import MetricsHistory
from titan_rl.tools.diagnosis.ranking import Diagnosis, diagnose
from titan_rl.tools.diagnosis.watch import MetricsWatch
from titan_rl.tools.inspect.reward_audit import JudgedSample, Suspicion
from titan_rl.tools.inspect.samples import RunSample

GRPO, SMOL = config(), config("grpo_smollm2")
GSPO, GSPO_4 = config("gspo_llama", rollout__max_staleness_steps=1), config("gspo_llama", algorithm__minibatches=4)
OPD, SDFT, GKD = config("opd_llama"), config("sdft_calc_llama"), config("gkd_llama")
ANCHORED, COLD = config(algorithm__kl_coef=0.01), config(rollout__temperature=0.3)


def found(lines: list[Line], cfg: Config, answers: AnswerFacts | None = None) -> Diagnosis:
    return diagnose(MetricsHistory(lines, cfg, answers))


def first(diagnosis: Diagnosis) -> tuple[str, str]:
    """Return the rule of the first problem, and the key that it would change."""
    finding = diagnosis.problems[0]
    return finding.rule, finding.changes[0].key


def warned(lines: list[Line], cfg: Config) -> list[tuple[int, str]]:
    """Return the warnings of a run, with the step that gave rise to each."""
    watch, warnings = MetricsWatch(cfg), list[tuple[int, str]]()
    for line in lines:
        if line["kind"] == "eval":
            watch.score(line["step"], line)
        elif line["kind"] in ("rl", "fit"):
            warnings += [(line["step"], text) for text in watch.step(line)]
    return warnings


def facts(answers: list[RunSample]) -> AnswerFacts:
    total = AnswerFacts()
    for answer in answers:
        total.add(answer)
    total.close_step()
    return total


def sample(step: int, prompt_id: int, number: int, **fields: Any) -> RunSample:
    known: dict[str, Any] = {"prompt": "p", "answer": "4711", "text": "t", "finish": "stop", "reward": 0.0}
    known |= {"group": 0, "penalty": 0.0, "advantage": 0.0, "sampled": 1}
    return RunSample(step=step, prompt_id=prompt_id, sample=number, **(known | fields))


def answers(
    steps: int, text: Callable[[int, int], str], reward: Callable[[int, int], float | None], **fields: Any
) -> list[RunSample]:
    """Return four answers to each of eight prompts in every step, which all ask for 4711."""
    return [
        sample(step, 8 * step + p, j, prompt=f"prompt {p}", text=text(p, j), reward=reward(p, j), **fields)
        for step in range(1, steps + 1)
        for p in range(8)
        for j in range(4)
    ]  # fmt: skip


# -- healthy runs -----------------------------------------------------------------------------------------------------

HEALTHY: dict[str, Callable[[int], tuple[list[Line], Config]]] = {
    "SmolLM2, 12 steps": lambda seed: (
        metrics(12, SMOL, seed=seed, reward=ramp(0.27, 0.56), score=ramp(0.27, 0.56)), SMOL),
    "SmolLM2, 3 steps": lambda seed: (metrics(3, SMOL, seed=seed, reward=ramp(0.27, 0.3), score=ramp(0.27, 0.3)), SMOL),
    "a tiny Llama that gets sure": lambda seed: (
        metrics(140, GRPO, seed=seed, reward=ramp(0.55, 0.97), entropy=ramp(0.25, 0.03), dead=ramp(0.3, 0.9),
                score=ramp(0.7, 0.98), problems=256, every=10), GRPO),
    "SmolLM2, most answers cut off at first": lambda seed: (
        metrics(16, SMOL, seed=seed, reward=ramp(0.1, 0.85), score=ramp(0.1, 0.8),
                change=lambda n, line: {"completions/clipped_ratio": max(0.05, 0.78 - 0.02 * n)}), SMOL),
    "two steps of lag in bfloat16": lambda seed: (
        metrics(60, GRPO, seed=seed, change=lambda n, line: {
            "policy_age/mean": 1.6, "policy_age/max": 2.0, "off_policy/ess": 0.93, "clip_ratio/high": 0.02,
            "logprob_gap/mean": 0.014, "logprob_gap/mult": 1.015, "logprob_gap/max": 2.1}), GRPO),
    "a lag of one step at a high rate": lambda seed: (
        metrics(60, GRPO, seed=seed, change=lambda n, line: {
            "policy_age/mean": 0.73, "policy_age/max": 1.0, "clip_ratio/high": 0.006, "logprob_gap/mean": 0.037,
            "logprob_gap/mult": 1.06, "logprob_gap/max": 1.5}), GRPO),
    "gspo with a lag of one step": lambda seed: (
        metrics(60, GSPO, seed=seed, change=lambda n, line: {
            "policy_age/mean": 0.8, "policy_age/max": 1.0, "clip_ratio/low": 0.21, "clip_ratio/high": 0.24,
            "logprob_gap/mean": 0.01, "logprob_gap/mult": 1.012, "logprob_gap/max": 0.8}), GSPO),
    "gspo with four updates, flat so far": lambda seed: (
        metrics(12, GSPO_4, seed=seed, reward=ramp(0.4, 0.4),
                change=lambda n, line: {"clip_ratio/low": 0.31, "clip_ratio/high": 0.22}), GSPO_4),
    "a teacher, and no answer is right": lambda seed: (
        metrics(40, OPD, seed=seed, entropy=ramp(1.2, 0.6),
                change=lambda n, line: dead_at(0.0)(n, line) | {"loss": 0.9 - 0.015 * n}), OPD),
    "a teacher with the answer, and no answer is right": lambda seed: (
        metrics(40, SDFT, seed=seed, entropy=ramp(1.2, 0.6), change=lambda n, line: dead_at(0.0)(n, line)
                | {"distill/gain": 0.04 * n - 2, "distill/covered": 1.0, "distill/too_long": 0.0}), SDFT),
    "divergences from a teacher": lambda seed: (
        metrics(40, GKD, seed=seed, entropy=ramp(1.2, 0.6), change=lambda n, line: dead_at(0.0)(n, line)
                | {"distill/divergence": 0.5 / n ** 0.5}), GKD),
    "rewards of -1 and 1": lambda seed: (metrics(60, GRPO, seed=seed, change=scaled(2, -1)), GRPO),
    "rewards of 0 to 10": lambda seed: (metrics(60, GRPO, seed=seed, change=scaled(10, 0)), GRPO),
    "rewards of -3 to 3": lambda seed: (metrics(60, GRPO, seed=seed, change=scaled(6, -3)), GRPO),
    "a ceiling at 0.88": lambda seed: (
        metrics(120, GRPO, seed=seed, reward=lambda x: min(0.88, 0.4 + 2 * x), score=lambda x: min(0.86, 0.4 + 2 * x),
                dead=ramp(0.4, 0.75)), GRPO),
    "an entropy that falls fast while the reward rises": lambda seed: (
        metrics(60, GRPO, seed=seed, entropy=lambda x: 0.25 + 1.35 * max(0, 1 - x * 7.5),
                reward=lambda x: min(0.8, 0.2 + 2.2 * x)), GRPO),
    "a cosine of the rate": lambda seed: (
        metrics(100, GRPO, seed=seed, reward=lambda x: min(0.7, 0.3 + x),
                change=lambda n, line: {"lr": 3e-3 * (1 - n / 101)}), GRPO),
    "a small KL that does not hold it": lambda seed: (
        metrics(60, ANCHORED, seed=seed, change=lambda n, line: {"kl/k3": 2e-4 * n}), ANCHORED),
    "a cold temperature that leaves a choice": lambda seed: (metrics(60, COLD, seed=seed), COLD),
    "a slow, large model that rises late": lambda seed: (
        metrics(40, SMOL, seed=seed, reward=lambda share: 0.3 + 0.3 * max(0.0, share - 0.4)), SMOL),
}  # fmt: skip


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_runs_get_no_word(name: str) -> None:
    for seed in range(12):
        lines, cfg = HEALTHY[name](seed)
        assert [(seed, finding.text) for finding in found(lines, cfg).problems] == []
        assert [(seed, *warning) for warning in warned(lines, cfg)] == []


def scaled(factor: float, least: float) -> Callable[[int, Line], Line]:
    """Return rewards from `least` on in place of those from 0 to 1."""
    return lambda step, line: {
        "reward/mean": factor * line["reward/mean"] + least,
        "reward/std": factor * line["reward/std"],
    }


# -- planted runs -----------------------------------------------------------------------------------------------------


def collapsed(step: int, line: Line) -> Line:
    """As grpo_llama's tenth of a learning rate too high: from 0.58 to 0 within a step, then all cut off."""
    if step < 12:
        return {}
    late = {"entropy": 3.4, "completions/clipped_ratio": 1.0, "frac_reward_zero_std": 1.0, "reward/mean": 0.0}
    now = late if step > 13 else late | {"entropy": 1.9, "completions/clipped_ratio": 0.3, "reward/mean": 0.02}
    return now | {"reward/std": 0.14 if step < 14 else 0.0, "grad_norm": 4.8}


def test_a_collapse_names_the_rate_and_its_effects_are_no_causes() -> None:
    cfg = config(optimizer__lr=0.03)
    lines = metrics(40, cfg, change=collapsed)
    diagnosis = found(lines, cfg)
    assert first(diagnosis) == ("collapse", "optimizer.lr")
    assert diagnosis.problems[0].changes[0].proposed == pytest.approx(0.003)
    assert len(diagnosis.problems) == 1
    assert {effect.rule for effect in diagnosis.problems[0].effects} >= {"truncation", "too_hard"}
    assert diagnosis.problems[0].since == 12


def test_a_collapse_is_a_warning_within_two_steps_and_one_only() -> None:
    cfg = config(optimizer__lr=0.03)
    warnings = warned(metrics(40, cfg, change=collapsed), cfg)
    assert [step for step, _ in warnings] == [12]
    assert warnings[0][1].startswith("step 12: entropy 0.5")
    assert "optimizer.lr = 0.03 is the first suspect; try 0.003" in warnings[0][1]


def test_a_collapse_in_the_warm_up_names_the_rate_of_that_step() -> None:
    cfg = config(optimizer__lr=0.03)

    def change(step: int, line: Line) -> Line:
        wild = {"reward/mean": 0.035, "entropy": 0.97, "reward/std": 0.18, "frac_reward_zero_std": 0.92}
        return {"lr": 0.006 * step} | (wild if step == 2 else {"reward/mean": 0.0, "entropy": 3.4} if step > 2 else {})

    lines = metrics(3, cfg, reward=ramp(0.58, 0.58), entropy=ramp(0.24, 0.24), change=change)
    assert [step for step, _ in warned(lines, cfg)] == [2]
    assert found(lines, cfg).problems[0].changes[0].proposed == pytest.approx(0.0006)


def test_an_entropy_that_falls_to_nothing_without_a_gain_is_a_collapse() -> None:
    lines = metrics(60, SMOL, reward=ramp(0.3, 0.3), entropy=lambda share: 0.6 if share < 0.5 else 0.01)
    diagnosis = found(lines, SMOL)
    assert first(diagnosis) == ("collapse", "optimizer.lr")
    assert "algorithm.entropy_coef" in [change.key for change in diagnosis.problems[0].changes]


def test_a_held_out_score_that_falls_under_a_noisy_reward_is_a_collapse() -> None:
    """As a small run at 40 times its rate: answers get longer and are cut off, and the reward is hardly lower."""
    cfg = config("grpo_smollm2", optimizer__lr=4e-4)

    def change(step: int, line: Line) -> Line:
        return {"completions/clipped_ratio": min(0.9, 0.45 * (step - 1)), "reward/std": 0.4}

    scores = lambda share: 0.6 - 0.5 * (share > 0)  # noqa: E731
    lines = metrics(8, cfg, reward=ramp(0.35, 0.15), score=scores, change=change)
    diagnosis = found(lines, cfg)
    assert first(diagnosis) == ("collapse", "optimizer.lr")
    assert "truncation" in [effect.rule for effect in diagnosis.problems[0].effects] or not diagnosis.problems[1:]


def test_a_reward_that_declines_over_many_steps_is_a_collapse() -> None:
    lines = metrics(100, GRPO, reward=lambda share: 0.8 - 0.7 * abs(share - 0.4), entropy=ramp(0.3, 0.9))
    assert first(found(lines, GRPO)) == ("collapse", "optimizer.lr")


@pytest.mark.parametrize(
    ("more", "cfg", "key"),
    [
        ({}, GRPO, "rollout.max_new_tokens"),
        ({"stop/max_tokens": 0.8}, config("calc_llama"), "environment.max_tokens"),
        ({"stop/context_overflow": 0.9}, config("calc_llama"), "training.seq_len"),
    ],
)
def test_truncation_from_the_start_is_the_cause_of_no_signal(more: Line, cfg: Config, key: str) -> None:
    cut = {"completions/clipped_ratio": 1.0, "reward/mean": 0.0, "reward/std": 0.0, "frac_reward_zero_std": 1.0} | more
    lines = metrics(25, cfg, change=lambda step, line: cut)
    diagnosis = found(lines, cfg)
    assert first(diagnosis) == ("truncation", key)
    assert len(diagnosis.problems) == 1
    assert "too_hard" in [effect.rule for effect in diagnosis.problems[0].effects]
    assert [step for step, _ in warned(lines, cfg)] == [3]


def test_truncation_of_a_run_with_signal_is_a_problem_once_it_does_not_learn() -> None:
    lines = metrics(30, GRPO, reward=ramp(0.16, 0.1), change=lambda step, line: {"completions/clipped_ratio": 0.88})
    assert first(found(lines, GRPO)) == ("truncation", "rollout.max_new_tokens")
    assert [step for step, _ in warned(lines, GRPO)] == [10]


def test_truncation_of_a_run_that_learns_all_the_same_is_a_note() -> None:
    lines = metrics(30, GRPO, change=lambda step, line: {"completions/clipped_ratio": 0.4})
    diagnosis = found(lines, GRPO)
    assert not diagnosis.problems
    assert [finding.rule for finding in diagnosis.findings] == ["truncation"]


def dead_at(value: float) -> Callable[[int, Line], Line]:
    return lambda step, line: {"reward/mean": value, "reward/std": 0.0, "frac_reward_zero_std": 1.0}


def test_a_constant_reward_is_the_reward_function() -> None:
    cfg = config(task__eval_reward="exact")
    lines = metrics(8, cfg, score=ramp(0.55, 0.55), change=dead_at(0.5))
    samples = facts(answers(8, lambda p, j: f"text {p} {j}", lambda p, j: 0.5))
    diagnosis = found(lines, cfg, samples)
    assert first(diagnosis) == ("constant_reward", "task.reward")
    assert "0.500 for all of 256 answers with 32 different texts" in diagnosis.problems[0].text
    assert diagnosis.problems[0].samples
    assert len(diagnosis.problems) == 1


def test_right_answers_that_earn_nothing_are_the_reward_function() -> None:
    samples = facts(answers(8, lambda p, j: "The answer is 4711." if j else "I do not know.", lambda p, j: 0.0))
    diagnosis = found(metrics(8, SMOL, change=dead_at(0.0)), SMOL, samples)
    assert first(diagnosis) == ("constant_reward", "task.reward")
    assert "192 of them contain the reference" in diagnosis.problems[0].text


def test_a_reward_of_0_is_a_task_that_is_too_hard() -> None:
    diagnosis = found(metrics(20, GRPO, score=ramp(0.0, 0.0), change=dead_at(0.0)), GRPO)
    assert first(diagnosis) == ("too_hard", "cold_start.steps")
    assert len(diagnosis.problems) == 1


def test_a_solved_task_is_a_note() -> None:
    diagnosis = found(metrics(20, GRPO, score=ramp(1.0, 1.0), change=dead_at(1.0)), GRPO)
    assert not diagnosis.problems
    assert [finding.rule for finding in diagnosis.findings] == ["solved"]


def test_groups_without_signal_ask_for_dynamic_sampling() -> None:
    lines = metrics(30, GRPO, reward=ramp(0.4, 0.4), dead=ramp(0.9, 0.9))
    assert first(found(lines, GRPO)) == ("no_signal", "algorithm.dynamic_sampling")


def test_a_component_that_is_never_earned_is_named() -> None:
    cfg = config(task__rewards="{exact = 1.0, format = 0.5}")
    parts = {"reward_part/exact": 0.4, "reward_part/format": 0.0}
    lines = metrics(20, cfg, change=lambda step, line: parts)
    diagnosis = found(lines, cfg)
    assert first(diagnosis) == ("format", "task.rewards")
    assert "'format'" in diagnosis.problems[0].text
    assert any("task.rewards" in text for _, text in warned(lines, cfg))


def test_a_held_out_score_that_falls_while_the_reward_rises_is_overfitting() -> None:
    lines = metrics(60, GRPO, reward=ramp(0.3, 0.9), score=lambda s: 0.6 - 0.5 * max(0.0, s - 0.3), problems=256)
    diagnosis = found(lines, GRPO)
    assert first(diagnosis) == ("overfit", "algorithm.kl_coef")
    assert "audit --rewards" in diagnosis.problems[0].advice
    assert warned(lines, GRPO)


def test_a_temperature_that_is_too_high_is_named_by_greedy_answers_that_are_right() -> None:
    cfg = config(rollout__temperature=2)
    lines = metrics(15, cfg, reward=ramp(0.2, 0.4), entropy=ramp(1.6, 0.85), score=ramp(0.85, 0.83), problems=256)
    assert first(found(lines, cfg)) == ("noise_sampling", "rollout.temperature")


def test_random_weights_need_supervised_steps_first() -> None:
    noise = {"completions/clipped_ratio": 0.95, "entropy": 3.9} | dead_at(0.0)(0, {})
    diagnosis = found(metrics(5, GRPO, change=lambda step, line: noise), GRPO)
    assert first(diagnosis) == ("noise_sampling", "cold_start.steps")
    assert len(diagnosis.problems) == 1
    assert " nats of at most 4.159 at step" in diagnosis.problems[0].text


def test_the_most_of_a_folders_entropy_is_not_that_of_the_default_vocabulary() -> None:
    cfg = config(model__hf_assets_path="folder")
    noise = {"completions/clipped_ratio": 0.95, "entropy": 3.9} | dead_at(0.0)(0, {})
    diagnosis = found(metrics(5, cfg, change=lambda step, line: noise), cfg)
    assert first(diagnosis) == ("noise_sampling", "model.hf_assets_path")
    assert " nats at step" in diagnosis.problems[0].text


def chat_folder(draw: random.Random, folder: Path) -> str:
    """Make a model's folder with a chat template, or with a name that has Instruct."""
    size, kind = draw.randint(100, 999), draw.choice(["jinja", "settings", "name"])
    name = f"Model-{size}M" + draw.choice(["-Instruct", "-instruct", "-Instruct-2507"]) * (kind == "name")
    model = folder / str(draw.random()) / name
    model.mkdir(parents=True)
    if kind == "jinja":
        (model / "chat_template.jinja").write_text("{{ messages }}")
    if kind == "settings":
        (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    return draw.choice(["fetch:", f"{model.parent}/"]) + name if kind == "name" else str(model)


@pytest.mark.parametrize("seed", range(8))
def test_a_chat_model_whose_answers_are_noise_is_not_told_to_follow_instructions(seed: int, tmp_path: Path) -> None:
    """Its prompts are suspected first, unless they are conversations."""
    draw = random.Random(seed)
    folder, noise = chat_folder(draw, tmp_path), {"entropy": draw.uniform(3.1, 9)} | dead_at(0.0)(0, {})
    for template, keys in (("plain", ["task.template", "model.hf_assets_path"]), ("chat", ["model.hf_assets_path"])):
        cfg = config(model__hf_assets_path=folder, task__template=template)
        finding = found(metrics(draw.randint(3, 9), cfg, seed=seed, change=lambda *_: noise), cfg).problems[0]
        assert [change.key for change in finding.changes] == keys
        assert "instructions" not in finding.warning


@pytest.mark.parametrize("text", ["", "[]", '{"chat_template": null}', "{", "\udcff"])
def test_a_model_without_a_chat_template_may_not_follow_instructions(text: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_bytes(text.encode(errors="surrogateescape"))
    cfg = config(model__hf_assets_path=tmp_path)
    noise = {"entropy": 3.9} | dead_at(0.0)(0, {})
    finding = found(metrics(5, cfg, change=lambda *_: noise), cfg).problems[0]
    assert "one that follows instructions" in finding.warning


def test_engines_that_disagree_are_the_cause_of_the_collapse_that_follows() -> None:
    def change(step: int, line: Line) -> Line:
        gap = {"logprob_gap/mean": 0.4, "logprob_gap/mult": 1.6, "logprob_gap/max": 5.0} if step >= 5 else {}
        return gap | collapsed(step, line)

    tokens = [sample(1, 1, j, logprobs=(-6.0, -0.1, -0.1, -0.2), mask=(1, 1, 1, 1)) for j in range(8)]
    diagnosis = found(metrics(40, GRPO, change=change), GRPO, facts(tokens))
    assert diagnosis.problems[0].rule == "gap"
    assert "from step 5 on" in diagnosis.problems[0].text
    assert "100% of the first tokens" in diagnosis.problems[0].text
    assert "collapse" in [effect.rule for effect in diagnosis.problems[0].effects]


def test_the_rounding_of_quantized_weights_is_no_disagreement_and_a_larger_gap_is_theirs() -> None:
    cfg = config(generator__quantization="int8")
    sound = {"logprob_gap/mean": 0.17, "logprob_gap/mult": 1.27, "logprob_gap/max": 2.4}
    assert not [p for p in found(metrics(20, cfg, change=lambda step, line: sound), cfg).problems if p.rule == "gap"]
    large = {"logprob_gap/mean": 0.6, "logprob_gap/mult": 2.1, "logprob_gap/max": 9.0}
    diagnosis = found(metrics(20, cfg, change=lambda step, line: large), cfg)
    assert first(diagnosis) == ("gap", "generator.quantization")


@pytest.mark.parametrize(("age", "key"), [(0.0, "algorithm.routing_replay"), (1.5, "rollout.max_staleness_steps")])
def test_misplaced_routes_are_the_cause_of_the_gap(age: float, key: str) -> None:
    cfg = config(algorithm__routing_replay=True, rollout__max_staleness_steps=2)
    wrong = {"routing/agreement": 0.3, "logprob_gap/mean": 0.4, "logprob_gap/mult": 1.6, "logprob_gap/max": 5.0,
             "policy_age/mean": age}  # fmt: skip
    right = {"routing/agreement": 0.98}
    diagnosis = found(metrics(20, cfg, change=lambda step, line: wrong if step >= 5 else right), cfg)
    assert first(diagnosis) == ("routes", key)
    assert "chosen 30% of the replayed experts from step 5 on" in diagnosis.problems[0].text
    assert "gap" in [effect.rule for effect in diagnosis.problems[0].effects]
    assert not found(metrics(20, cfg, change=lambda step, line: right), cfg).problems


@pytest.mark.parametrize("seed", range(6))
def test_drafts_that_cost_more_than_they_save_are_noted(seed: int) -> None:
    draws = random.Random(seed)
    sizes: dict[str, Any] = {
        "model__dim": 64 * draws.randint(16, 40),
        "model__n_layers": draws.randint(8, 24),
        "model__n_heads": 16,
    }
    sizes |= {"model__n_kv_heads": 16, "model__hidden_dim": 64 * draws.randint(32, 64)}
    batch: dict[str, Any] = {
        "rollout__groups_per_step": draws.randint(16, 64),
        "rollout__group_size": draws.randint(8, 16),
    }
    cfg = config(generator__drafts=draws.choice(["siblings", "ngram"]), **sizes, **batch)
    without = config(**sizes, **batch)

    def drafted(share: float) -> Callable[[int, Line], Line]:
        def change(step: int, line: Line) -> Line:
            steps = draws.randint(5_000, 9_000)
            accepted = round(4 * share * steps)
            return {"engine/drafted_tokens": 4 * steps, "engine/accepted_tokens": accepted,
                    "tokens/sampled": steps + accepted}  # fmt: skip

        return change

    few, many = draws.uniform(0, 0.4), draws.uniform(0.98, 1)
    notes = [each for each in found(metrics(20, cfg, change=drafted(few)), cfg).findings if each.rule == "drafts"]
    assert [(str(each.changes[0]), each.problem) for each in notes] == [
        (f"generator.drafts = none (now {cfg.generator.drafts})", False)
    ]
    assert "by estimate sampling takes " in notes[0].text
    for lines, given in (
        (metrics(20, cfg, change=drafted(many)), cfg),
        (metrics(9, cfg, change=drafted(few)), cfg),
        (metrics(20, cfg), cfg),
        (metrics(20, without), without),
    ):
        assert "drafts" not in [each.rule for each in found(lines, given).findings]


def test_stale_samples_ask_for_less_lag() -> None:
    cfg = config("grpo_llama_async", rollout__max_staleness_steps=8)
    old = {"policy_age/mean": 6.2, "policy_age/max": 8.0, "off_policy/ess": 0.31, "clip_ratio/high": 0.2,
           "clip_ratio/low": 0.11}  # fmt: skip
    diagnosis = found(metrics(40, cfg, reward=ramp(0.4, 0.4), change=lambda step, line: old), cfg)
    assert first(diagnosis) == ("stale", "rollout.max_staleness_steps")
    assert "samples are 6.2 steps old (at most 8)" in diagnosis.problems[0].text


def test_stale_samples_are_a_note_while_the_score_rises() -> None:
    """The clip acts from step 5 on, on one side only."""
    cfg = config("grpo_llama_async", rollout__max_staleness_steps=8)

    def change(step: int, line: Line) -> Line:
        return {"policy_age/mean": 3.0, "policy_age/max": 4.0, "clip_ratio/low": 0.3 if step >= 5 else 0.0}

    diagnosis = found(metrics(40, cfg, change=change), cfg)
    assert [(each.rule, each.problem, each.since) for each in diagnosis.findings] == [("stale", False, 5)]


def test_a_clip_of_nearly_all_sequences_is_too_much_for_gspo_too() -> None:
    wild = {"policy_age/mean": 3.0, "policy_age/max": 4.0, "clip_ratio/low": 0.4, "clip_ratio/high": 0.5}
    diagnosis = found(metrics(40, GSPO, reward=ramp(0.4, 0.4), change=lambda step, line: wild), GSPO)
    assert first(diagnosis) == ("stale", "rollout.max_staleness_steps")


@pytest.mark.parametrize(
    ("keys", "names_it"),
    [
        ({"generator__dtype": "bfloat16", "lora__sync": "merge"}, True),
        ({"generator__dtype": "bfloat16", "lora__sync": "adapter"}, False),
        ({"generator__dtype": "float32"}, False),
    ],
)
def test_merged_adapters_in_16_bits_are_the_first_suspect_of_a_gap(keys: dict[str, str], names_it: bool) -> None:
    cfg = config("grpo_smollm2_lora", **keys)
    rounded = {"logprob_gap/mean": 0.22, "logprob_gap/mult": 1.3, "logprob_gap/max": 2.0}
    diagnosis = found(metrics(20, cfg, reward=ramp(0.3, 0.3), change=lambda step, line: rounded), cfg)
    assert diagnosis.problems[0].rule == "gap"
    assert (first(diagnosis)[1] == "lora.sync") is names_it


# -- keys of the config that the curves show ---------------------------------------------------------------------------


@pytest.mark.parametrize(("weight", "kl", "entropy"), [(1.0, 3e-5, 0.6), (20.0, 3e-5, 0.3), (20.0, 0.08, 0.73)])
def test_a_kl_that_holds_the_policy_is_named(weight: float, kl: float, entropy: float) -> None:
    """Also one that costs more than the rewards pay: with large gradients of the KL the policy trembles around it."""
    cfg = config(algorithm__kl_coef=weight)
    lines = metrics(80, cfg, reward=ramp(0.3, 0.3), entropy=ramp(0.6, entropy), change=lambda n, line: {"kl/k3": kl})
    assert first(found(lines, cfg)) == ("tight_anchor", "algorithm.kl_coef")
    assert any("algorithm.kl_coef" in text for _, text in warned(lines, cfg))


def cut_then_random(step: int, line: Line) -> Line:
    """Answers are cut off a step before the entropy jumps."""
    cut = {"completions/clipped_ratio": min(0.9, 0.2 * (step - 5))} if step >= 6 else {}
    return cut | {"entropy": 1.1 if step < 7 else 3.5}


def test_an_entropy_bonus_is_the_cause_of_answers_that_are_cut_off() -> None:
    """Cuts are seen a step before the entropy's jump."""
    cfg = config(algorithm__entropy_coef=1.0)

    lines = metrics(45, cfg, reward=lambda share: 0.35 if share < 0.15 else 0.01, change=cut_then_random)
    diagnosis = found(lines, cfg)
    assert first(diagnosis) == ("entropy_bonus", "algorithm.entropy_coef")
    assert "truncation" in [effect.rule for effect in diagnosis.problems[0].effects]
    lines = metrics(60, cfg, entropy=ramp(0.5, 3.0), reward=lambda share: 0.5 if share < 0.2 else 0.6 - 0.5 * share)
    assert first(found(lines, cfg)) == ("entropy_bonus", "algorithm.entropy_coef")


def test_cuts_that_are_seen_a_step_before_the_entropy_are_its_effect() -> None:
    """Without a bonus: the ramp over two steps is the rate's."""

    lines = metrics(45, SMOL, reward=lambda share: 0.35 if share < 0.15 else 0.01, change=cut_then_random)
    diagnosis = found(lines, SMOL)
    assert first(diagnosis) == ("collapse", "optimizer.lr")
    assert "truncation" in [effect.rule for effect in diagnosis.problems[0].effects]


def test_an_entropy_that_drifts_up_without_a_bonus_is_the_rate() -> None:
    lines = metrics(60, SMOL, reward=ramp(0.3, 0.3), entropy=ramp(0.6, 2.4))
    assert first(found(lines, SMOL)) == ("collapse", "optimizer.lr")


def test_a_temperature_that_leaves_no_choice_is_named() -> None:
    cfg = config(rollout__temperature=0.1)
    lines = metrics(60, cfg, reward=ramp(0.4, 0.4), entropy=ramp(0.04, 0.03), dead=ramp(0.93, 0.93))
    assert first(found(lines, cfg)) == ("cold_sampling", "rollout.temperature")
    assert any("rollout.temperature" in text for _, text in warned(lines, cfg))


@pytest.mark.parametrize(
    ("keys", "reward", "change", "rule", "key"),
    [
        ({}, ramp(0.3, 0.35), lambda n, line: {} if n < 20 else {
            "logprob_gap/mean": 1e-5 + 0.004 * (n - 20), "logprob_gap/mult": 1 + 0.006 * (n - 20),
            "logprob_gap/max": 0.2 * (n - 20) + 0.1}, "gap", "algorithm.correction"),
        ({}, ramp(0.2, 0.2), lambda n, line: {"completions/clipped_ratio": 1.0},
         "truncation", "rollout.max_new_tokens"),
        ({"algorithm__overlong_filter": True}, ramp(0.3, 0.3), lambda n, line: {"completions/clipped_ratio": 0.8},
         "truncation", "rollout.max_new_tokens"),
        ({"algorithm__minibatches": 8}, ramp(0.3, 0.3),
         lambda n, line: {"clip_ratio/low": 0.15, "clip_ratio/high": 0.18},
         "stale", "algorithm.minibatches"),
        ({}, ramp(0.3, 0.9), lambda n, line: {"completions/mean_length": 8 + n * 0.1, "time/step": 7 + n * 0.2,
                                              "time/generate": 3 + n * 0.2}, "slow", "algorithm.overlong_buffer"),
    ],
)  # fmt: skip
def test_other_causes_are_named(
    keys: dict[str, Any],
    reward: Callable[[float], float],
    change: Callable[[int, Line], Line],
    rule: str,
    key: str,
) -> None:
    cfg = config(**keys)
    assert first(found(metrics(80, cfg, reward=reward, change=change), cfg)) == (rule, key)


def test_a_reward_that_is_inverted_on_the_training_set_is_named_by_the_score() -> None:
    lines = metrics(60, GRPO, reward=ramp(0.3, 0.95), score=ramp(0.6, 0.05), dead=ramp(0.4, 0.4))
    assert first(found(lines, GRPO))[0] == "overfit"


# -- rewards that are won without the task -----------------------------------------------------------------------------


@pytest.mark.parametrize(("factor", "least"), [(1, 0), (10, 0), (2, -1)])
def test_a_reward_that_rises_without_its_grader_is_named(factor: float, least: float) -> None:
    def change(step: int, line: Line) -> Line:
        return {"reward_part/grader": 0.4 + 0.02 * (step % 3)} | scaled(factor, least)(step, line)

    lines = metrics(30, GRPO, reward=ramp(0.3, 0.7), change=change)
    assert first(found(lines, GRPO)) == ("grader", "task.reward")
    assert any("grader" in text for _, text in warned(lines, GRPO))
    follows = lambda n, line: {"reward_part/grader": 0.3 + 0.01 * n}  # noqa: E731
    assert not found(metrics(30, GRPO, reward=ramp(0.3, 0.7), change=follows), GRPO).problems


def test_a_reward_that_leaves_the_held_out_score_behind_is_named() -> None:
    lines = metrics(60, GRPO, reward=ramp(0.3, 0.95), score=ramp(0.4, 0.4), problems=256)
    assert first(found(lines, GRPO)) == ("grader", "task.reward")


def test_what_the_audit_suspects_is_a_problem() -> None:
    said = "one text answers prompts with 9 different references"
    samples = facts(answers(8, lambda p, j: "a|b|c", lambda p, j: 1.0))
    samples.suspicions = [Suspicion("one_answer", said, [JudgedSample.of(sample(8, 64, 0), 1.0)])]
    diagnosis = found(metrics(30, GRPO), GRPO, samples)
    assert first(diagnosis) == ("one_answer", "task.reward")
    assert diagnosis.problems[0].text == said


# -- rewards of other scales -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dead", [0.88, 0.97])
def test_groups_without_signal_are_no_solved_task_at_any_scale(dead: float) -> None:
    flat = lambda n, line: scaled(10, 0)(n, line) | {"frac_reward_zero_std": dead}  # noqa: E731
    diagnosis = found(metrics(60, GRPO, reward=ramp(0.3, 0.3), change=flat), GRPO)
    assert first(diagnosis) == ("no_signal", "algorithm.dynamic_sampling")
    assert "solved" not in [finding.rule for finding in diagnosis.findings]


@pytest.mark.parametrize("worst", [-1.0, -3.0, 0.0])
def test_always_the_worst_reward_is_a_task_that_is_too_hard(worst: float) -> None:
    samples = facts(answers(8, lambda p, j: f"text {p} {j}", lambda p, j: worst))
    for known in (samples, None):
        assert first(found(metrics(40, GRPO, change=dead_at(worst)), GRPO, known)) == ("too_hard", "cold_start.steps")


@pytest.mark.parametrize(("score", "rule"), [(0.0, "too_hard"), (0.4, "constant_reward")])
def test_a_held_out_score_of_another_reward_has_its_own_scale(score: float, rule: str) -> None:
    cfg = config(task__reward="mine:signed", task__eval_reward="exact")
    lines = metrics(40, cfg, score=ramp(score, score), change=dead_at(-1.0))
    assert first(found(lines, cfg))[0] == rule


def test_one_right_answer_of_300_is_too_hard_where_a_wrong_one_earns_less_than_0() -> None:
    rare = lambda n, line: {"reward/mean": -1 + 0.004 * (n % 3), "reward/std": 0.06, "frac_reward_zero_std": 0.97}  # noqa: E731
    assert first(found(metrics(40, GRPO, change=rare), GRPO))[0] in ("too_hard", "no_signal")


# -- teachers ----------------------------------------------------------------------------------------------------------


def test_a_policy_that_leaves_its_teacher_is_a_collapse() -> None:
    gone = lambda n, line: dead_at(0.0)(n, line) | {"loss": 0.9 - 0.02 * n if n < 20 else 2.5}  # noqa: E731
    diagnosis = found(metrics(40, OPD, change=gone), OPD)
    assert first(diagnosis) == ("collapse", "optimizer.lr")
    assert diagnosis.problems[0].since == 20


def test_a_distance_to_the_teacher_that_stays_is_a_rate_that_is_too_small() -> None:
    same = {"distill/gain": -1.2, "distill/covered": 1.0, "distill/too_long": 0.0}
    diagnosis = found(metrics(60, SDFT, entropy=ramp(0.5, 0.5), change=lambda n, line: same), SDFT)
    assert first(diagnosis) == ("rate_too_small", "optimizer.lr")


def test_a_teacher_that_reads_nothing_more_is_named() -> None:
    bare = {"distill/gain": 0.0, "distill/covered": 0.02, "distill/too_long": 0.98}
    diagnosis = found(metrics(60, SDFT, change=lambda n, line: bare), SDFT)
    assert first(diagnosis) == ("uncovered", "training.seq_len")


def test_a_slower_part_is_named_with_its_step() -> None:
    def change(step: int, line: Line) -> Line:
        return {"time/step": line["time/step"] + 20, "time/wait": 20.5} if step >= 20 else {}

    diagnosis = found(metrics(40, GRPO, change=change), GRPO)
    assert first(diagnosis) == ("slow", "task.reward_workers")
    assert "since step 20" in diagnosis.problems[0].text


def test_rollouts_without_a_reward_are_named_by_their_error() -> None:
    broken = {"stop/error": 0.3, "stop/completed": 0.7, "rollouts/failed": 0.3 * 256}
    samples = facts(answers(3, lambda p, j: "", lambda p, j: None, status="error", error="ValueError: no such item"))
    diagnosis = found(metrics(20, config("calc_llama"), change=lambda s, line: broken), config("calc_llama"), samples)
    assert first(diagnosis) == ("failures", "environment.name")
    assert "30% of the rollouts ended as 'error'" in diagnosis.problems[0].text
    assert "ValueError: no such item" in diagnosis.problems[0].text


@pytest.mark.parametrize(
    ("ending", "key"), [("timeout", "environment.rollout_seconds"), ("tool_error", "task.system_prompt")]
)
def test_rollouts_that_end_badly_are_failures(ending: str, key: str) -> None:
    cfg = config("calc_llama")
    assert first(found(metrics(20, cfg, change=lambda s, line: {f"stop/{ending}": 0.4}), cfg)) == ("failures", key)


def test_a_rate_that_changes_nothing_is_too_small() -> None:
    cfg = config(optimizer__lr=1e-9)
    lines = metrics(60, cfg, reward=ramp(0.4, 0.4), entropy=ramp(0.5, 0.5))
    diagnosis = found(lines, cfg)
    assert first(diagnosis) == ("rate_too_small", "optimizer.lr")
    assert diagnosis.problems[0].changes[0].proposed == pytest.approx(1e-6)
    assert warned(lines, cfg)


def test_a_score_that_stays_while_the_policy_moves_is_flat() -> None:
    lines = metrics(60, GRPO, reward=ramp(0.4, 0.4), entropy=ramp(0.6, 0.3))
    assert first(found(lines, GRPO))[0] == "flat"
    assert warned(lines, GRPO) == []


def test_prompts_that_are_always_or_never_solved_ask_for_a_curriculum() -> None:
    samples = facts(answers(5, lambda p, j: "t", lambda p, j: float(p < 6)))
    lines = metrics(30, SMOL, reward=ramp(0.4, 0.4), entropy=ramp(0.6, 0.3))
    diagnosis = found(lines, SMOL, samples)
    assert first(diagnosis) == ("prompts", "curriculum.solved_visits")
    assert "of 8 prompts with at least 3 visits 6 were" in diagnosis.problems[0].text


@pytest.mark.parametrize("value", [{"grad_norm": None}, {"updates/skipped": 1.0}, {"loss": math.nan}])
def test_steps_with_numbers_that_are_not_finite_are_named(value: Line) -> None:
    lines = metrics(20, GRPO, change=lambda step, line: value if step in (7, 8) else {})
    diagnosis = found(lines, GRPO)
    assert first(diagnosis) == ("not_finite", "optimizer.lr")
    assert "2 of 20 steps" in diagnosis.problems[0].text


# -- runs on given data -----------------------------------------------------------------------------------------------


def fitted(steps: int, loss: Callable[[float], float], scores: Callable[[float], float] | None = None) -> list[Line]:
    draw = random.Random(0)
    lines = []
    for step in range(1, steps + 1):
        share = step / steps
        line: Line = {"kind": "fit", "step": step, "time": float(step), "time/step": 1.0, "grad_norm": 1.0, "lr": 2e-3}
        line |= {"loss": loss(share) * draw.gauss(1, 0.03), "updates/skipped": 0.0}
        if scores and step % 10 == 0:
            value = scores(share)
            line |= {"eval/score": value, "eval/low": value - 0.06, "eval/high": value + 0.06}
        lines.append(line)
    return lines


@pytest.mark.parametrize(
    ("lines", "rule"),
    [
        (fitted(60, ramp(2.0, 0.4), ramp(0.1, 0.9)), ""),
        (fitted(60, lambda s: 0.5 if s < 0.4 else 2.5), "collapse"),
        (fitted(60, lambda s: 3.0 + 15 * s * (s < 0.3)), "collapse"),
        (fitted(60, ramp(0.693, 0.692)), "rate_too_small"),
        (fitted(60, ramp(1.0, 0.1), lambda s: 0.8 - 0.6 * max(0, s - 0.3)), "overfit"),
    ],
)
def test_the_rules_that_apply_to_given_data(lines: list[Line], rule: str) -> None:
    assert [finding.rule for finding in found(lines, config("sft_llama")).problems] == [rule] * bool(rule)


# -- too few numbers ---------------------------------------------------------------------------------------------------


def test_too_few_steps_are_said_with_numbers() -> None:
    assert found([], GRPO).limits == ("no step was made yet",)
    limits = found(metrics(3, SMOL, score=ramp(0.27, 0.3)), SMOL).limits
    assert any(limit.startswith("3 steps are too few") for limit in limits)
    assert any("a change of the mean reward below" in limit for limit in limits)


@pytest.mark.parametrize("kind", ["rl", "fit"])
def test_lines_of_other_versions_may_lack_every_number(kind: str) -> None:
    bare = [{"kind": kind, "step": step, "time": 0.0} for step in range(1, 40)]
    assert found(bare, GRPO).findings == ()
    some = [{key: value for key, value in line.items() if "/" not in key} for line in metrics(40, GRPO)]
    assert found(some, GRPO).problems == ()


def test_every_missing_key_alone_is_survived() -> None:
    lines = metrics(40, GRPO, score=ramp(0.5, 0.5), change=collapsed)
    for missing in lines[-1].keys() - {"kind", "step", "time"}:
        found([{key: value for key, value in line.items() if key != missing} for line in lines], GRPO)
        found([{**line, missing: None} for line in lines], GRPO)


def written(folder: Path, lines: Sequence[Line]) -> Path:
    path = folder / "metrics.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def test_a_rule_that_fails_is_one_warning_and_no_error(tmp_path: Path) -> None:
    watch = MetricsWatch(GRPO)
    lines = metrics(5, GRPO, change=lambda step, line: {"completions/max_length": "long"} if step > 2 else {})
    watch.restart(written(tmp_path, lines[:3]))
    broken = [{**line, "entropy": math.nan, "step": "four"} for line in lines[3:]]
    warnings = [text for line in broken for text in watch.step(line)]
    assert len(warnings) == 1
    assert "a rule of tools/diagnosis failed and warns no more: " in warnings[0]
    assert watch.cause == ""


def test_a_resumed_run_begins_with_the_lines_before_and_repeats_no_warning(tmp_path: Path) -> None:
    cfg = config(optimizer__lr=0.03)
    lines = metrics(40, cfg, change=collapsed)
    watch = MetricsWatch(cfg)
    watch.restart(written(tmp_path, lines[:12]))
    assert [bool(watch.step(line)) for line in lines[12:15]] == [True, False, False]
    watch.restart(written(tmp_path, lines[:12]))  # a rewind
    assert not any(watch.step(line) for line in lines[12:15])
    assert "(no progress: docs/it_does_not_learn.md)" in watch.hint
    assert "optimizer.lr" in watch.cause
