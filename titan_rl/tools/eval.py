"""`python -m titan_rl eval RUN|CHECKPOINT|FOLDER`: evaluate trained weights, without training.

Exit codes: 0 evaluated, 1 it failed, or a set has no score, 2 bad usage, 130 stopped.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan_rl.config.eval_sets import HELD_OUT, problems_of
from titan_rl.config.sections import Config
from titan_rl.tools.deployed import (
    TARGET,
    Chosen,
    choose,
    drive,
    exported,
    in_own_network,
    overrides_of,
    refuse_sets,
    setup_of,
)
from titan_rl.tools.refused_input import UsageError, named_refusals
from titan_rl.wire.program import DONE, FAILED, command_of, enter, path_argument

if TYPE_CHECKING:
    from titan_rl.preflight.plan import Setup
    from titan_rl.record.evaluation import Evaluation
    from titan_rl.record.terminal import Terminal

PROG = "titan_rl eval"


def main(argv: Sequence[str]) -> int:
    with named_refusals(PROG):
        options, other_arguments = parser().parse_known_args(argv)
        chosen = choose(options.target, options.step, options.config, overrides_of(other_arguments))
        config, default = with_sets(chosen.config, options)
        return in_own_network(PROG, config, lambda scratch: evaluate(chosen, config, default, options, scratch))


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=command_of("eval"),
        description="Sample and score evaluation sets with trained weights, as the run itself does: the same problems, "
        "seeds, rewards and engine. Nothing is written to the run, which may be active.",
        epilog="Any key of the config: --section.key VALUE, such as --generator.replicas 2. Start it in the folder in "
        "which the run was started, if its config has relative paths.",
        allow_abbrev=False,
    )
    parser.add_argument("target", metavar="RUN|CHECKPOINT|FOLDER", type=path_argument, help=TARGET)
    parser.add_argument("--step", metavar="N", help="step of the checkpoint, or cold_start/N; default: the newest")
    parser.add_argument("--config", metavar="NAME|FILE", help="config to evaluate by; default: the run's")
    names = f'a set of [eval.sets], "{HELD_OUT}", or NAME=FILE.jsonl; may be repeated. Default: all of the config\'s'
    parser.add_argument("--set", metavar="NAME[=FILE]", action="append", default=[], dest="sets", help=names)
    parser.add_argument(
        "--samples", metavar="N", type=int, help="answers per problem; greedy sets are sampled at rollout.temperature"
    )
    parser.add_argument("--temperature", metavar="T", type=float, help="of the sampling; 0: greedy")
    parser.add_argument("--size", metavar="N", type=int, help="first problems of each set; 0: all")
    parser.add_argument("--reward", metavar="NAME", help="reward, as task.eval_reward")
    shown = "also show N answers of each set whole: failed ones first, then the lowest rewards"
    parser.add_argument("--show", metavar="N", type=int, default=0, help=shown)
    printed = "print the scores, and the answers of --show, as JSON, and the progress to stderr"
    parser.add_argument("--json", action="store_true", help=printed)
    return parser


def with_sets(config: Config, options: argparse.Namespace) -> tuple[Config, bool]:
    """Return the config with the chosen sets, and whether the held-out problems are measured as the run does."""
    known: dict[str, dict[str, Any]] = {**config.eval.sets}
    if HELD_OUT not in known and config.eval.size:
        known = {HELD_OUT: {}, **known}
    chosen: dict[str, str] = {}
    for name, _, path in (text.partition("=") for text in options.sets):
        if name in chosen:
            raise UsageError(f"--set: expected each set once, found {name} again")
        chosen[name] = path
    for name, path in chosen.items():
        if path:
            known[name] = {**known.get(name, {}), "path": path}
        elif name not in known:
            expected = f"one of {', '.join(known)}, or NAME=FILE" if known else "NAME=FILE.jsonl"
            raise UsageError(f"--set: expected {expected}, found {name}")
    wishes = {key: getattr(options, key) for key in ("samples", "temperature", "size", "reward")}
    wishes = {key: value for key, value in wishes.items() if value is not None}
    tables = {name: {**known[name], **wishes} for name in chosen or known}
    for keys in tables.values():
        if (options.samples or 1) > 1 and not keys.get("temperature") and options.temperature is None:
            keys["temperature"] = config.rollout.temperature
    default = tables.get(HELD_OUT) == {} and HELD_OUT not in config.eval.sets
    if default:
        del tables[HELD_OUT]
        if "model" in [config.task.eval_reward or config.task.reward, *config.task.rewards]:
            raise UsageError(
                "--reward: expected one for the held-out problems, because the run's reward is a model, found none"
            )
    if not tables and not default:
        raise UsageError("--set: expected NAME=FILE.jsonl, because the config has no evaluation set, found none")
    problems = list(problems_of(tables))
    if problems:
        raise UsageError("; ".join(problems))
    return replace(config, eval=replace(config.eval, sets=tables)), default


def evaluate(chosen: Chosen, config: Config, default: bool, options: argparse.Namespace, scratch: Path) -> int:
    from titan_rl.record.terminal import Terminal, open_console

    terminal = Terminal(open_console(sys.stderr) if options.json else None)
    if chosen.folder is None:
        refuse_sets(config)  # before an export of half a minute
    with terminal.phase(f"weights: {chosen.name}"):
        folder = exported(chosen, scratch)
    setup = setup_of(config, folder, scratch)
    problems = [*([setup.heldout] if default else []), *setup.eval_sets]
    evaluations: list[Evaluation] = []

    async def work() -> int:
        try:
            evaluations.extend(await measured(setup, problems, terminal))
        finally:
            await setup.judges.close()
        return FAILED if any(evaluation.hopeless for evaluation in evaluations) else DONE

    code = drive(work, terminal)
    if evaluations:
        print_found(chosen, evaluations, options)
    return code


def print_found(chosen: Chosen, evaluations: "Sequence[Evaluation]", options: argparse.Namespace) -> None:
    """Print the scores, and the worst answers of each set if they are asked for."""
    from titan_rl.record.lines import encode
    from titan_rl.record.terminal import open_console
    from titan_rl.tools.inspect.sample_view import as_data, sample_lines
    from titan_rl.tools.inspect.samples import RunSample

    def worst(evaluation: "Evaluation") -> list[RunSample]:
        samples = RunSample.of_evaluation({"step": -1, **evaluation.answers_line(everything=True)})
        return sorted(samples, key=lambda sample: -math.inf if sample.reward is None else sample.reward)[: options.show]

    if options.json:
        found = scores_of(chosen, evaluations)
        for evaluation in evaluations if options.show else ():
            name = evaluation.name or HELD_OUT
            found["sets"][name]["answers"] = [as_data(sample) for sample in worst(evaluation)]
        print(encode(found).decode())
        return
    console = open_console(sys.stdout)
    console.print(table(evaluations))
    for sample in (sample for evaluation in evaluations for sample in worst(evaluation)):
        for line in ["", *sample_lines(sample, width=console.width if console.is_terminal else 0)]:
            console.print(line, soft_wrap=True)


async def measured(setup: "Setup", problems: Sequence[Any], terminal: "Terminal") -> "list[Evaluation]":
    from titan_rl.ext.sandbox.local import configure
    from titan_rl.rollout.player import DRIVER_ATTEMPTS, Player
    from titan_rl.rollout.session import SessionLimits
    from titan_rl.train.bring_up import launch_loaded

    config, evaluations = setup.config, []
    configure(config.sandbox)  # rewards may execute code
    try:
        async with launch_loaded(setup, terminal) as (generators, environments, watch):
            player = Player(
                environments,
                generators,
                setup.tokenizer.decode,
                limits=SessionLimits.of(config, played=environments is not None),
                attempts=DRIVER_ATTEMPTS,
            )
            for eval_set in problems:
                with terminal.phase(f"{eval_set.name or HELD_OUT}: {len(eval_set.prompts)} x {eval_set.samples}"):
                    evaluations.append(await watch.drive(eval_set.measure(player.play_for_evaluation, terminal.warn)))
    finally:
        await setup.judges.close()
    return evaluations


def scores_of(chosen: Chosen, evaluations: "Sequence[Evaluation]") -> dict[str, Any]:
    sets = {e.name or HELD_OUT: {"problems": e.size, "metrics": e.metrics, **e.line} for e in evaluations}
    return {"weights": chosen.name, "sets": sets}


def table(evaluations: "Sequence[Evaluation]") -> Any:
    """Return a table with one row per metric of a set."""
    from rich.table import Table

    shown = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("set", "metric"):
        shown.add_column(name)
    for name in ("value", "95% interval", "problems", "failed"):
        shown.add_column(name, justify="right")
    for evaluation in evaluations:
        name, failed = (
            evaluation.name or HELD_OUT,
            f"{len(evaluation.failures)} of {evaluation.size * evaluation.samples}",
        )
        rows = evaluation.estimates if evaluation.name else {"eval/score": evaluation.average}
        for metric, e in rows.items():
            value = ("no score", "") if evaluation.hopeless else (f"{e.value:.4f}", f"{e.low:.4f} - {e.high:.4f}")
            shown.add_row(name, metric, *value, str(evaluation.size), failed)
    return shown


def entry() -> None:
    enter(lambda: main(sys.argv[1:]))


if __name__ == "__main__":
    entry()
