"""Plans a run before anything is started: placement, parallelism, batch, weight sync, seconds per step and their split,
what may fail, and the first kernel to write. Writes the TOML that it recommends.

Exit codes: 0 planned, 1 nothing fits, 2 bad input, 130 stopped.
"""

import argparse
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil, inf, log2
from pathlib import Path
from typing import Any

from titan_rl.config.changes import valued
from titan_rl.config.sections import Config
from titan_rl.config.toml import ConfigError, as_toml, find
from titan_rl.config.toml import load as load_toml
from titan_rl.preflight.checks import judged
from titan_rl.preflight.load import Invocation, planned_gpus, read
from titan_rl.preflight.memory import count as short
from titan_rl.preflight.refusal import refuse
from titan_rl.preflight.shapes import MAX_SEQ_LEN
from titan_rl.tools.plan.cheaper import Budget, budget, cheaper, objections
from titan_rl.tools.plan.choose import LAGS, Case, choose, slower, smallest
from titan_rl.tools.plan.draft_gains import described, read_drafted
from titan_rl.tools.plan.facts import Facts, Gpu, read_facts
from titan_rl.tools.plan.rates import NOTHING, Spread, Work
from titan_rl.tools.plan.screen import comparison, day_count, folded, row, screen
from titan_rl.wire.cores import usable_cores
from titan_rl.wire.counted import counted
from titan_rl.wire.gpus import NO_GPUS, found_gpus
from titan_rl.wire.model_shape import ModelShape, shape_of_folder
from titan_rl.wire.program import DONE, FAILED, command_of, enter

PART = re.compile(r"(?:([a-z]+)\s+)?(\d+(?:\.\d+)?)(?:\s*\+-\s*(\d+(?:\.\d+)?))?(?:\s+at most\s+(\d+))?(?:\s+s)?")
GPUS = re.compile(r"(\d+)\s*[x*]\s*(.+)", re.IGNORECASE)
MANY = 3  # deviations above the mean, where answers are cut off unless "at most" is given
ROW = 8192
"""Tokens of a packed row if the longest rollout is short: a row then holds several answers of a group, and the prompt
once."""
ROUNDED = 256  # tokens
DRIVEN = 256  # rollouts of an environment process
FEWEST_STEPS, GROUPS, GROUP_SIZE = 8, (8, 512), 16
"""All prompts take at least FEWEST_STEPS steps, whose groups are a power of two in this range."""
FLAGS = {
    "model": ("", "a folder with a config.json, or a name, such as Llama-3.1-70B"),
    "gpus": ("", "such as '64 x H100' (default: this machine's)"),
    "days": (1.0, "time of the run"),
    "prompts": (1000, "training prompts"),
    "tokens": ("prompt 300, answer 1000 +- 700", "mean, '+-' deviation, 'at most' most"),
    "turns": ("", "such as '4 +- 2, observation 200, environment 3 s'"),
    "price": (0.0, "of a GPU-hour"),
    "drafts": ("", "also estimate what drafts gain: the share of them that is accepted, or a run's folder"),
    "out": ("plan.toml", "the TOML to write"),
    "facts": ("", "a TOML with rows of titan_rl/tools/plan/facts.toml to replace or add"),
}


def main(argv: Sequence[str] | None = None) -> int:
    options, rest = parser().parse_known_args(sys.argv[1:] if argv is None else argv)
    if options.run:
        from titan_rl.tools.plan.advice import advise

        return advise(options.run)
    case = read_case(options, rest)
    chosen = choose(case)
    title = title_of(options.model, case)
    if not chosen:
        least = smallest(case)
        room = f"{least} are the smallest cluster on which it fits" if least else "no larger one that was tried does"
        room = "--gpus plans others" if case.device == "cpu" else room
        print(
            "\n".join([*comparison(list(dict.fromkeys(case.rejected))), *folded(f"{title}: does not fit; {room}")]),
            file=sys.stderr,
        )
        return FAILED
    best, out = budget(case, chosen[0], options.days), Path(options.out)
    written = {out: checked(out, options.model, case, best)}
    notes = [("note", text) for text in objections(case, best, options.prompts)]
    if notes and (found := cheaper(case, best, options.prompts)):
        less = out.with_name(f"{out.stem}_cheaper{out.suffix}")
        written[less] = checked(less, options.model, *found)
        notes.append(("cheaper", f"{instead(best, found[1], options.prompts, options.price)}: {less.name}"))
    nodes = f", {case.nodes} nodes of {case.gpu.per_node}" * (case.nodes > 1)
    title = f"{title}{nodes}, {day_count(options.days)}"
    print("\n".join(screen(case, best, title, notes, options.prompts, options.price)))
    if options.drafts:
        print("\n".join(row("drafts", described(best.plan.line, options.drafts))))
    if options.compare:
        print("\n".join(comparison([*slower(chosen), *case.rejected])))
    for path, text in written.items():
        path.write_text(text, encoding="utf-8")
    print(f"\nwrote {' and '.join(map(str, written))}\n{command_of('run')} --config {out} --dry-run")
    return DONE


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=command_of("plan"),
        description=(__doc__ or "").strip(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Any key of a run can be set, as in --rollout.group_size 8: no choice changes it (docs/plan.md).",
        allow_abbrev=False,
    )
    for name, (default, about) in FLAGS.items():
        about = f"{about} (default: {default})" if default else about
        parser.add_argument(f"--{name}", type=type(default), default=default, metavar=name.upper(), help=about)
    parser.add_argument("--compare", action="store_true", help="list the rejected plans, and why")
    parser.add_argument("--from", dest="run", default="", metavar="RUN", help="dump folder of a run, to make faster")
    return parser


def read_case(options: argparse.Namespace, rest: Sequence[str]) -> Case:
    """Read the command line, or refuse it with every problem."""
    arguments = read(rest)
    problems, facts = [*arguments.problems], read_facts()
    shape, machine = None, (facts.gpus["CPU"], 1)
    try:
        facts = read_facts(options.facts)
    except ValueError as error:
        problems += str(error).splitlines()
    try:
        load_toml(find("grpo_llama"), arguments.overrides)  # only to check the keys
    except ConfigError as error:
        problems += error.problems
    here = Path(options.model).is_dir() and options.model
    try:
        shape = shape_of_folder(options.model, "--model") if here else facts.shape(options.model)
    except ValueError as error:
        problems.append(str(error))
    try:
        machine = cluster(options.gpus, facts)
    except ValueError as error:
        problems.append(f"--gpus: {error}")
    try:
        options.drafts = options.drafts and read_drafted(options.drafts)
    except ValueError as error:
        problems.append(f"--drafts: {error}")
    texts = spreads("--tokens", options.tokens, ("prompt", "answer"), problems)
    turns = (
        spreads("--turns", options.turns, ("turns", "observation", "environment"), problems) if options.turns else {}
    )
    for name, sound in {
        "days": 0 < options.days < inf,
        "prompts": options.prompts > 0,
        "price": options.price >= 0,
    }.items():
        if not sound:
            above = "of 0 or more" if name == "price" else "above 0"
            problems.append(f"--{name}: expected a number {above}, found {getattr(options, name):g}")
    if problems or shape is None:
        refuse("", problems)
    work = Work(**texts, turns=turns.get("turns", Spread(1.0)), observation=turns.get("observation", NOTHING))
    work = replace(work, answer=cut(work, shape.max_seq_len if here else MAX_SEQ_LEN))
    keys: dict[str, Any] = {"job.dump_folder": f"./outputs/{Path(options.out).stem}"} | model_keys(options.model, shape)
    keys |= batch_keys(work, options.prompts, shape.max_seq_len if here else MAX_SEQ_LEN)
    keys |= task_keys(work, keys["rollout.groups_per_step"] * GROUP_SIZE * (1 + LAGS[-1]))
    base = loaded(toml_text(keys), Path(options.out), arguments.overrides, gpu=machine[0].name != "CPU")
    pinned = {key: valued(base, key) for key, _ in arguments.overrides}
    gpu, count = machine
    if gpu.name != "CPU":  # the user knows the machine better than its data sheet
        memory, slots = (pinned.get(f"hosts.{key}") for key in ("gpu_memory_gb", "slots"))
        gpu = replace(gpu, memory_gb=memory or gpu.memory_gb, per_node=slots or gpu.per_node)
    if count > gpu.per_node and count % gpu.per_node:
        refuse("", [f"--gpus: expected whole nodes of {gpu.per_node}, found {count}"])
    return Case(base, keys, pinned, shape, gpu, count, facts, work, turns.get("environment", NOTHING))


def loaded(text: str, out: Path, overrides: Sequence[tuple[str, str]] = (), *, gpu: bool = True) -> Config:
    """Read a TOML's text, or refuse it."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, out.with_suffix(".toml").name)
        path.write_text(text, encoding="utf-8")
        try:
            return load_toml(path, overrides, gpus=gpu)
        except ConfigError as error:
            refuse("", error.problems)


def checked(out: Path, model: str, case: Case, spent: Budget) -> str:
    """Return the TOML of a plan, or refuse what its dry run would refuse."""
    keys = {**spent.plan.keys, "training.steps": spent.steps, **case.pinned}
    text = toml_text(keys, heading(title_of(model, case), model, case))
    config = loaded(text, out)
    gpus = planned_gpus(config) if config.hosts.gpu_memory_gb else NO_GPUS
    problems = judged(Invocation(config_name=out.stem, config=config, dry_run=True, gpus=gpus))[0]
    if problems:
        refuse(str(out), problems)
    return text


def title_of(model: str, case: Case) -> str:
    return f"{model}, {short(case.shape.parameters)} parameters, on {case.count} x {case.gpu.name}"


def instead(spent: Budget, less: Budget, prompts: int, price: float) -> str:
    """Describe a cheaper plan."""
    new, old = less.plan.config, spent.plan.config
    groups = f", groups of {new.rollout.group_size}" * (new.rollout.group_size != old.rollout.group_size)
    groups += f", LoRA of rank {new.lora.rank}" * (new.lora.on and not old.lora.on)
    groups += ", engines in fp8" * (new.generator.quantization == "fp8" != old.generator.quantization)
    what = f"{counted(less.gpus, 'GPU')}{groups}: {counted(less.steps, 'step')} of {less.seconds:.1f} s"
    hours = f"{less.hours:,.0f} GPU-hours instead of {spent.hours:,.0f}"
    cost = f", {price * less.hours:,.0f} instead of {price * spent.hours:,.0f}" * bool(price)
    return f"{what} in {day_count(less.days)}, {less.passes(prompts):,.0f} passes, {hours}{cost}"


def cluster(text: str, facts: Facts) -> tuple[Gpu, int]:
    """Return the GPUs of "64 x H100", or this machine's."""
    if text:
        match = GPUS.fullmatch(text.strip())
        if match is None or not int(match[1]):
            raise ValueError(f"expected a number and a name, such as '64 x H100', found {text!r}")
        return facts.gpu(match[2]), int(match[1])
    here = found_gpus()
    if not here.count:
        row, cores = facts.gpus["CPU"], usable_cores()
        return replace(row, flops=row.flops * cores, hbm=row.hbm * cores), 1
    return replace(facts.gpu(here.name), memory_gb=here.nbytes / 2**30, per_node=here.count), here.count


def spreads(flag: str, text: str, names: Sequence[str], problems: list[str]) -> dict[str, Spread]:
    """Read "prompt 300, answer 2000 +- 1500"; the first part may leave out its name."""
    found = dict[str, Spread]()
    for index, part in enumerate(text.split(",")):
        match = PART.fullmatch(part.strip())
        name = str(match and (match[1] or (names[0] if index == 0 else "")))
        if match and name in names and float(match[2]):
            mean, deviation = float(match[2]), float(match[3] or 0)
            found[name] = Spread(mean, deviation, max(mean, float(match[4] or mean + MANY * deviation)))
    if (flag == "--tokens" and len(found) < len(names)) or len(found) < len(text.split(",")):
        problems.append(
            f"{flag}: expected parts such as '{names[-1]} 2000 +- 1500', of {', '.join(names)}, found {text!r}"
        )
    return found


def cut(work: Work, context: int) -> Spread:
    """Return the answers, cut off where the context ends, unless "at most" was given."""
    answer, room = work.answer, context - max(ROUNDED, ceil(work.prompt.most))
    unbound = answer.most == answer.mean + MANY * answer.deviation
    return replace(answer, most=float(room)) if unbound and answer.mean <= room < answer.most else answer


def model_keys(model: str, shape: ModelShape) -> dict[str, Any]:
    """Return the keys that name a folder, or describe a model by its sizes."""
    if Path(model).is_dir():
        return {"model.hf_assets_path": model}
    names = ["dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "hidden_dim", "vocab_size"]
    names += ["experts", "experts_per_token"] * bool(shape.experts)
    sizes = {f"model.{name}": getattr(shape, name) for name in names}
    return {"model.name": shape.family, **sizes, "model.enable_weight_tying": shape.tied}


def task_keys(work: Work, samples: int) -> dict[str, Any]:
    """Return the shipped task that stands for the user's, with room for this number of rollouts at once."""
    if work.turns.mean == 1:
        return {"task.name": "addition"}
    together = {"environment.processes": ceil(samples / DRIVEN), "environment.concurrency": DRIVEN}
    return {"task.name": "calc", "environment.name": "calc", "environment.max_turns": ceil(work.turns.most)} | together


def batch_keys(work: Work, prompts: int, context: int) -> dict[str, Any]:
    """Return the keys of a step's size."""
    groups = 2 ** int(log2(max(1, prompts / FEWEST_STEPS)))
    turns = max(1, ceil(work.turns.mean if work.turns.most == inf else work.turns.most))
    read = (turns - 1) * work.observation.most if turns > 1 and work.observation.mean else 0
    longest = ROUNDED * ceil((work.prompt.most + turns * work.answer.most + read) / ROUNDED)
    longest = min(longest, context)
    return {
        "rollout.groups_per_step": min(GROUPS[1], max(GROUPS[0], groups)),
        "rollout.group_size": GROUP_SIZE,
        "rollout.max_new_tokens": ceil(work.answer.most),
        "generator.max_model_len": longest,
        "training.seq_len": longest if longest > ROW / 2 else min(ROW, 4 * longest),
        "algorithm.clip_high": 0.28,
        "optimizer.lr": 1e-6,
        "lr_scheduler.warmup_steps": 5,
    }


def heading(title: str, model: str, case: Case) -> list[str]:
    """Return the comment above the TOML."""
    lines = [f"{title}, by {command_of('plan')} (docs/plan.md)."]
    if not Path(model).is_dir():
        repo = case.facts.row(model)["repo"]
        lines += [f"[model] has the sizes of {repo}. To train it, put its folder in their place:"]
        lines += [f"hf download {repo} --local-dir FOLDER, then model.hf_assets_path = FOLDER."]
    if "task.path" not in case.pinned:
        lines.append("[task] is a shipped one: name your prompts by task.path (docs/data.md).")
    return lines


def toml_text(keys: Mapping[str, Any], head: Sequence[str] = ()) -> str:
    """Write keys as a TOML, below a comment."""
    by_section: dict[str, list[str]] = {}
    for key, value in keys.items():
        section, _, name = key.partition(".")
        by_section.setdefault(section, [f"[{section}]"]).append(f"{name} = {as_toml(value)}")
    blocks = "\n\n".join("\n".join(lines) for lines in by_section.values())
    return "".join(f"# {line}\n" for line in head) + blocks + "\n"


if __name__ == "__main__":
    enter(main)
