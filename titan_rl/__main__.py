"""`titan_rl COMMAND ...`, which is `python -m titan_rl COMMAND ...`: each program of this package by its name.

`titan_rl audit RUN` runs tools/audit.py, and imports nothing else. `titan_rl --config X` is `titan_rl run --config X`.
"""

import os
import runpy
import sys

TABLE = {
    "run": ("--config X", "train; the command if none is named"),
    "plan": ("--model X", "a run on a cluster: placement, seconds and risks"),
    "doctor": ("", "problems of this machine and of the install"),
    "check_env": ("NAME", "an environment, played without a model"),
    "lint": ("--config X", "what the chat template does to messages"),
    "fetch": ("NAME", "a pretrained model, or a GGUF file, as a folder"),
    "ctl": ("RUN status", "a running run: status, pause, checkpoint, stop, scale"),
    "look": ("RUN", "samples of a run: best, worst, longest, cut off"),
    "why": ("RUN", "why a run does not learn"),
    "view": ("RUN", "runs as one HTML file, or served while they last"),
    "compare": ("RUN RUN", "runs: settings, scores, curves, speed and samples"),
    "audit": ("RUN", "whether prompts were lost, and whether its files agree"),
    "eval": ("RUN", "scores of a checkpoint"),
    "serve": ("RUN", "a checkpoint behind an OpenAI-compatible endpoint"),
    "export": ("RUN", "a checkpoint as a Hugging Face folder"),
    "replay": ("RUN --step N", "a trainer's step, made again and compared"),
    "launch": ("--config X", "a run as a job of Slurm or Kubernetes"),
    "worker": ("", "this machine as a host of runs that start elsewhere"),
    "warm": ("", "engines, kept imported between runs"),
    "chaos": ("--config X", "a run that is harmed on purpose, and its audit"),
}
"""The arguments of each program, and its purpose. RUN is a run's job.dump_folder."""

HERE = os.path.dirname(os.path.abspath(__file__))


def module_of(name: str) -> str:
    """Return the module of a program; empty if this installation has none."""
    for folder in ("", "tools"):
        path = os.path.join(HERE, folder, name)
        if os.path.isfile(f"{path}.py") or os.path.isfile(os.path.join(path, "__main__.py")):
            return ".".join(filter(None, ("titan_rl", folder, name)))
    return ""


COMMANDS = {name: line for name, line in TABLE.items() if module_of(name)}
"""The programs of this installation."""

USAGE = 2


def entry() -> None:
    from titan_rl.wire import program

    typed = os.environ.pop("TITAN_RL_COMMAND", "") or os.path.basename(sys.argv[0])
    program.typed = "python -m titan_rl" if typed == "__main__.py" else typed
    words = sys.argv[1:]
    if words and words[0].startswith("-") and words not in (["--help"], ["-h"]):
        words = ["run", *words]  # the flags of a run
    if words and words[0] in COMMANDS:
        sys.argv[1:] = words[1:]
        runpy.run_module(module_of(words[0]), run_name="__main__", alter_sys=True)
    elif words in (["--help"], ["-h"], ["help"]):
        program.outlive_readers()
        print(help_text(program.typed))
    elif words:
        print(f"titan_rl: there is no command {words[0]!r}{hint(words[0], program.typed)}", file=sys.stderr)
        sys.exit(USAGE)
    else:
        print(help_text(program.typed), file=sys.stderr)
        sys.exit(USAGE)


def help_text(typed: str) -> str:
    """Return how to use this, and a line for each program."""
    width = max(len(f"{name} {takes}") for name, (takes, _) in COMMANDS.items())
    lines = [f"  {f'{name} {takes}':<{width}}  {about}" for name, (takes, about) in COMMANDS.items()]
    return "\n".join(
        [
            "titan_rl: RL post-training of language models",
            "",
            f"usage: {typed} COMMAND ...",
            f"       {typed} --config NAME|FILE ...    the same as {typed} run --config ...",
            "",
            *lines,
            "",
            f"RUN is a run's job.dump_folder. {typed} COMMAND --help explains each;",
            f"{typed} run --help lists the shipped configs and the sections of a TOML.",
            *(f"docs/: {address}" for address in documentation()),
        ]
    )


def documentation() -> list[str]:
    """Return the address of docs/, which a released wheel knows; a checkout has the folder."""
    from importlib import metadata

    try:
        lines = metadata.metadata("titan-rl").get_all("Project-URL") or []
    except metadata.PackageNotFoundError:
        return []
    return [line.partition(", ")[2] for line in lines if line.startswith("Documentation, ")]


def hint(word: str, typed: str) -> str:
    """Return the end of a message about an unknown command: the nearest one, or the flag that a config needs."""
    from difflib import get_close_matches

    if word.endswith(".toml"):
        return f"; a config needs its flag: {typed} --config {word}"
    near = get_close_matches(word.replace("-", "_"), COMMANDS, n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else f"; {typed} --help lists all"


if __name__ == "__main__":
    entry()
