#!/usr/bin/env python3
"""RLHF from preferences to a checked policy: pairs, reward model, GRPO and PPO against it, grader, judge, audit.

    .venv/bin/python scripts/rlhf.py                                          # SmolLM2-135M, below outputs/rlhf
    .venv/bin/python scripts/rlhf.py --judge-url https://HOST/v1 --judge-model NAME      # its key: OPENAI_API_KEY
    .venv/bin/python scripts/rlhf.py --training.steps 24                      # any key of a config, for all its runs

    prompts -> answers -> pairs, labelled by a rule -> reward model -> GRPO, PPO -> audit -> table
                       -> grades by the same rule -> judge, a model that only evaluates

The rule is known (scripts/rlhf_rule.py), so that every stage can be checked. A stage that has ended is not repeated,
and one that was stopped resumes. docs/rlhf.md explains the stages and how to use your own pairs.
"""

import argparse
import json
import math
import os
import random
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import mean
from typing import Any

from rlhf_rule import PARTS, follows

from bench.rows import metric_lines
from titan_rl.config.sections import Config
from titan_rl.config.toml import ConfigError, as_toml, load
from titan_rl.environment import CONTROLLER_ENV
from titan_rl.preflight.pretrained import FetchFailed, with_models
from titan_rl.record.metric_docs import EVAL_SCORE
from titan_rl.tools.deployed import overrides_of
from titan_rl.tools.inspect.reward_audit import SUSPECT, reward_report
from titan_rl.tools.inspect.run_files import RunFiles
from titan_rl.tools.refused_input import UsageError
from titan_rl.wire.program import DONE, FAILED, USAGE, enter, path_argument

SCRIPTS = Path(__file__).resolve().parent
SUBJECTS = SCRIPTS / "bench" / "rlhf_subjects.txt"
HELD_OUT = 0.2
"""Share of the subjects whose prompts, pairs and grades are not trained on."""
MISLABELLED = 0.1
"""Share of the training pairs whose label is turned around, as people err."""
ANSWERS = 8  # to each prompt, from which its pairs are made
ALGORITHMS = ("grpo", "ppo")
ENDS = 3  # steps at each end of a run whose means the table compares
JUDGED = "eval/judged/avg@1"
RULE = "rlhf_rule:follows"
JUDGE_TOKENS = 8
JUDGE_START_SECONDS = 300
JUDGE_PROMPT = "Grade this description of {reference} from 0 to {scale}.\n\n{answer}"
OWN = ("job.", "task.", "algorithm.name", "reward_model.hf_assets_path")  # keys that tell the runs apart
KEYS = ("TITAN_RL_API_KEY", "OPENAI_API_KEY")  # where the judge's server and the runs read its key


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--folder", type=path_argument, default=Path("outputs/rlhf"), help="default: outputs/rlhf")
    parser.add_argument(
        "--judge-url", default="", help="OpenAI-compatible URL of a judge; default: one that is trained"
    )
    parser.add_argument("--judge-model", default="", help="the judge's name at that URL")
    parser.add_argument("--judge-port", type=int, default=8741, help="port of the judge that is trained; default: 8741")
    a, others = parser.parse_known_args()
    if bool(a.judge_url) != bool(a.judge_model):
        return refuse("--judge-url, --judge-model: expected both or none, found one")
    if not 0 < a.judge_port < 2**16:
        return refuse(f"--judge-port: expected a number from 1 to 65535, found {a.judge_port}")
    folder, judge_url = a.folder.absolute(), a.judge_url or f"http://127.0.0.1:{a.judge_port}/v1"
    try:
        overrides = overrides_of(others)
        folder.mkdir(parents=True, exist_ok=True)
        write_prompts(folder)
        write_configs(folder, judge_url, a.judge_model or "policy")
        for key in (key for key, _ in overrides if key.startswith(OWN)):
            raise UsageError(f"--{key}: expected a key that all runs may share; docs/rlhf.md runs a stage by itself")
        first = ["reward_model", *([] if a.judge_url else ["judge"])]
        configs = {stage: load(folder / f"{stage}.toml", overrides) for stage in (*first, *ALGORITHMS)}
        model = with_models(configs["grpo"]).model.hf_assets_path
    except (ConfigError, UsageError, FetchFailed) as error:
        return refuse(str(error))
    except OSError as error:
        return refuse(f"--folder: expected a folder that can be written, found {error}")
    flags = [f"--{key}={value}" for key, value in overrides]
    if not (folder / "pairs.jsonl").exists():
        write_pairs(folder, answers_of(folder, model, flags))
    for stages in (first, ALGORITHMS):
        waiting = [stage for stage in stages if not ended(configs[stage])]
        judged = waiting and stages == ALGORITHMS and not a.judge_url
        with serving(folder, a.judge_port) if judged else nullcontext():
            for stage in waiting:
                titan("run", "--config", folder / f"{stage}.toml", *flags)
    for stage in ALGORITHMS:
        titan("audit", folder / stage)
        titan("audit", "--rewards", folder / stage)
    print("\n".join(["", *report(folder, judged_here=not a.judge_url)]))
    return DONE


def refuse(problem: str) -> int:
    print(f"rlhf: {problem}", file=sys.stderr)
    return USAGE


# -- the commands -----------------------------------------------------------------------------------------------------


def start(command: str, *arguments: str | Path, **streams: Any) -> subprocess.Popen[str]:
    """Start a command of titan_rl in its own process group: Ctrl-C reaches it only through this program."""
    words = ["-m", f"titan_rl.{command}", *map(str, arguments)]
    print(f"\n$ PYTHONPATH=scripts python {' '.join(words)}", flush=True)
    path = os.pathsep.join(filter(None, [str(SCRIPTS), os.environ.get("PYTHONPATH")]))
    env = {**CONTROLLER_ENV, **os.environ, "PYTHONPATH": path}
    return subprocess.Popen([sys.executable, *words], env=env, process_group=0, text=True, **streams)


def titan(command: str, *arguments: str | Path, **streams: Any) -> str:
    """Run a command of titan_rl to its end. If it fails, exit with its code; if this program is stopped, stop it."""
    process = start(command, *arguments, **streams)
    try:
        printed, _ = process.communicate()
    except KeyboardInterrupt:
        process.send_signal(signal.SIGTERM)  # it saves its last finished step
        process.wait()
        raise
    if process.returncode:
        raise SystemExit(process.returncode)
    return printed


@contextmanager
def serving(folder: Path, port: int) -> Iterator[None]:
    """Serve the judge that was trained."""
    os.environ.update(dict.fromkeys(KEYS, secrets.token_hex(16)))
    log = folder / "judge.log"
    with log.open("w", encoding="utf-8") as file:
        server = start("serve", folder / "judge", "--port", str(port), stdout=file, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + JUDGE_START_SECONDS
        while "OPENAI_BASE_URL" not in log.read_text(encoding="utf-8"):
            if server.poll() is not None:
                print(log.read_text(encoding="utf-8"), file=sys.stderr)
                raise SystemExit(server.returncode)
            if time.monotonic() > deadline:
                raise SystemExit(f"rlhf: the judge did not serve within {JUDGE_START_SECONDS} s; its output: {log}")
            time.sleep(0.5)
        yield
    finally:
        server.terminate()
        server.wait()


def ended(config: Config) -> bool:
    """Return True if the config's run has trained all of its steps and exported its model."""
    folder = Path(config.job.dump_folder)
    if not ((folder / "summary.json").exists() and (folder / "hf").exists()):
        return False
    return json.loads((folder / "summary.json").read_text(encoding="utf-8"))["steps"] >= config.training.steps


# -- what the runs read -----------------------------------------------------------------------------------------------


def question(subject: str) -> str:
    return f"Describe {subject} in one short sentence."


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a JSONL file, whole or not at all."""
    part = path.with_suffix(".part")
    part.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    part.replace(path)


def parts_of(subjects: Sequence[str]) -> dict[str, Sequence[str]]:
    """Return the subjects by their use: training, or held out."""
    cut = round(len(subjects) * (1 - HELD_OUT))
    return {"train": subjects[:cut], "heldout": subjects[cut:]}


def write_prompts(folder: Path) -> None:
    """Write a prompt for each subject. The answer column, which the grader reads, is the subject."""
    subjects = SUBJECTS.read_text(encoding="utf-8").split()
    for name, part in (parts_of(subjects) | {"all": subjects}).items():
        write_rows(folder / f"{name}.jsonl", ({"question": question(each), "answer": each} for each in part))


def answers_of(folder: Path, model: str, flags: Sequence[str]) -> dict[str, list[str]]:
    """Let the policy answer each prompt several times. Return the answers by subject."""
    printed = titan(
        *("eval", model, "--config", folder / "grpo.toml", f"--task.reward={RULE}", "--task.reward_args={}"),
        *("--set", f"all={folder / 'all.jsonl'}", "--samples", str(ANSWERS), "--json", "--show", str(10**6), *flags),
        stdout=subprocess.PIPE,
    )
    by_subject = dict[str, list[str]]()
    for sample in json.loads(printed)["sets"]["all"]["answers"]:
        by_subject.setdefault(sample["answer"], []).append(sample["messages"][-1]["content"])
    return by_subject


def write_pairs(folder: Path, answers: Mapping[str, Sequence[str]]) -> None:
    """Write pairs of answers that the rule tells apart, and the grade of every answer for the judge to learn. Held-out
    pairs are labelled without mistakes."""
    rng = random.Random(0)
    for name, subjects in parts_of(SUBJECTS.read_text(encoding="utf-8").split()).items():
        pairs, grades = list[dict[str, str]](), list[dict[str, str]]()
        for subject in subjects:
            ordered = sorted(answers[subject], key=lambda answer: follows(answer, subject))
            for answer in ordered:
                fields = {"reference": subject, "scale": str(PARTS), "answer": answer}
                grade = str(round(PARTS * follows(answer, subject)))
                grades.append({"question": JUDGE_PROMPT.format(**fields), "answer": grade})
            for worse, better in zip(ordered[: len(ordered) // 2], ordered[::-1], strict=False):
                if follows(worse, subject) < follows(better, subject):
                    labels = [better, worse]
                    if name == "train" and rng.random() < MISLABELLED:
                        labels.reverse()
                    pairs.append({"prompt": question(subject), "chosen": labels[0], "rejected": labels[1]})
        if not pairs:
            print(f"rlhf: expected answers that the rule tells apart, found none ({name})", file=sys.stderr)
            raise SystemExit(FAILED)
        rng.shuffle(pairs)
        rng.shuffle(grades)
        prefix = "heldout_" if name == "heldout" else ""
        write_rows(folder / f"{prefix}grades.jsonl", grades)
        write_rows(folder / f"{prefix}pairs.jsonl", pairs)


def write_configs(folder: Path, judge_url: str, judge_model: str) -> None:
    """Write the config of each stage. Every run is evaluated at its start and at its end."""

    def stage(name: str, rows: str, heldout: str, base: str = "grpo_smollm2_lora") -> dict[str, Any]:
        return {
            "base": base,
            "job.dump_folder": str(folder / name),
            "job.description": f"RLHF: {name}",
            "task.name": "jsonl",
            "task.path": str(folder / rows),
            "task.eval_path": str(folder / heldout),
            "task.reward": "exact",
            "task.reward_args": {},
            "task.datasets": {},
            "task.system_prompt": "",
            "algorithm.name": name,
            "eval.size": 120,
            "eval.interval": 0,
        }

    reward_model = stage("reward_model", "pairs.jsonl", "heldout_pairs.jsonl", "grpo_smollm2") | {
        "training.steps": 30,
        "training.seq_len": 256,
        "training.global_batch_size": 16,  # pairs
        "training.local_batch_size": 2,  # rows of seq_len at a time: all at once take 8 GiB
        "optimizer.lr": 2e-5,
    }
    judge = stage("judge", "grades.jsonl", "heldout_grades.jsonl") | {
        "algorithm.name": "sft",
        "rollout.max_new_tokens": JUDGE_TOKENS,
        "training.steps": 24,
        "training.global_batch_size": 32,
    }
    judged = {"judge_url": judge_url, "judge_model": judge_model, "judge_prompt": JUDGE_PROMPT}
    policy = {
        "task.reward": "model",
        "task.grader": RULE,  # logged for rollouts, never trained on
        "task.eval_reward": RULE,  # scores held-out answers
        "task.reward_args": judged | {"judge_scale": PARTS, "judge_tokens": JUDGE_TOKENS},
        "eval.sets.judged": {"reward": "judge"},  # the same answers, by the judge
        "reward_model.hf_assets_path": f"{folder}/reward_model/hf",
        "algorithm.kl_coef": 0.02,  # to the policy without its adapters
        "eval.size": 40,
        "rollout.groups_per_step": 8,
        "rollout.group_size": 8,
        "rollout.max_new_tokens": 32,
        "rollout.temperature": 0.9,
        "training.steps": 12,
        "training.local_batch_size": 4,
    }
    critic = {"critic.lr": 2e-5, "critic.hf_assets_path": f"{folder}/reward_model/hf"}
    grpo, ppo = (stage(name, "train.jsonl", "heldout.jsonl") | policy for name in ALGORITHMS)
    configs = {"reward_model": reward_model, "judge": judge, "grpo": grpo, "ppo": ppo | critic}
    for name, keys in configs.items():
        text = "".join(f"{key} = {as_toml(value)}\n" for key, value in keys.items())
        (folder / f"{name}.toml").write_text(text, encoding="utf-8")


# -- the table --------------------------------------------------------------------------------------------------------


def report(folder: Path, *, judged_here: bool) -> list[str]:
    """Return the figures that tell whether each stage worked."""
    _, accuracy = scores(folder / "reward_model")
    lines = [f"reward model: {accuracy:.2f} of the held-out pairs in the rule's order (chance: 0.50)"]
    if judged_here:
        before, after = scores(folder / "judge")
        lines.append(f"judge: {after:.2f} of the held-out grades equal the rule's ({before:.2f} before it was trained)")
    lines.append(f"\n{'':6}{'reward model':>18}{'grader':>18}{'judge':>18}{'KL':>8}  suspicions of the audit")
    for name in ALGORITHMS:
        steps = metric_lines(folder / name, "rl")
        parts = [[line["reward/mean"] for line in part] for part in (steps[:ENDS], steps[-ENDS:])]
        pairs = [tuple(map(mean, parts)), scores(folder / name), scores(folder / name, JUDGED)]
        kl = mean(line[key] for line in steps[-ENDS:] for key in ("kl/k1", "kl/k3") if key in line)  # the one in use
        shown = "".join(f"{before:>9.3f} -> {after:.3f}" for before, after in pairs)
        suspicions = sum(line.startswith(SUSPECT) for line in reward_report(RunFiles(folder / name)))
        lines.append(f"{name:6}{shown}{kl:>8.3f}  {suspicions}")
    return lines


def scores(run: Path, metric: str = EVAL_SCORE) -> tuple[float, float]:
    """Return a metric of a run's first and last evaluation; NaN if it has none, as a judge that failed every time."""
    found = [line[metric] for line in metric_lines(run, "eval", "rl", "fit") if metric in line] or [math.nan]
    return found[0], found[-1]


if __name__ == "__main__":
    enter(main, "stopped: the same command continues")
