"""What `--help` prints: how to start a run, and the keys of the TOML by section."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from titan_rl.config import toml as config_file
from titan_rl.config.policies import POLICIES
from titan_rl.config.toml import as_toml, did_you_mean, schema
from titan_rl.preflight.refusal import print_shipped, refuse
from titan_rl.record.plan_view import print_trimmed
from titan_rl.wire.program import command_of

PIPED_WIDTH = 700  # columns without a terminal: each key is whole on one line, for grep
ALL = "all"

USAGE = """\
titan_rl: RL post-training of language models

usage: {command} --config NAME|FILE [--dry-run] [--section.key VALUE ...]

  {command} --config grpo_llama
  {command} --config my.toml --training.steps 20 --optimizer.lr=3e-5

  --config NAME|FILE    a shipped config, or a TOML file
  --dry-run             check everything and print the plan, but start nothing
  --scale tiny          shrink the run to this machine: the same roles, meshes
                        and algorithm (docs/clusters.md)
  --help [SECTION|all]  list the sections, or the keys of one or all of them
  --section.key VALUE   any key that --help lists; a boolean needs no value
                        (--job.fresh)

{programs} lists the other programs: to look at runs, to
evaluate, export and serve their models, to check a machine.

shipped configs:"""

SECTIONS = {
    "job": "the run's folder",
    "task": "rows, prompts, chat template and rewards",
    "model": "the policy: a Hugging Face folder, or sizes of a new model",
    "lora": "adapters that are trained in place of all weights",
    "cold_start": "supervised steps before RL",
    "curriculum": "which problems come again, and when",
    "rollout": "how many answers are sampled, how long, how hot, how old",
    "environment": "your environment or tools, and its limits",
    "opponents": "who plays against the policy in environment.seats",
    "sandbox": "limits of code that the model writes",
    "algorithm": "the preset, and each of its parts",
    "reference": "the frozen model of the KL penalty",
    "critic": "the value model of PPO",
    "reward_model": "a model that rewards answers",
    "teacher": "the model of distillation, and its prompt",
    "eval": "evaluation sets, and how often",
    "training": "steps, batch, precision, gradient clipping",
    "optimizer": "AdamW: rate, betas, weight decay",
    "lr_scheduler": "warm-up and decay of the rate",
    "parallelism": "the trainers' mesh: FSDP2, TP, HSDP, experts",
    "activation_checkpoint": "activations that are computed again instead of stored",
    "compile": "torch.compile of the trainers' blocks",
    "override": "your modules that TorchTitan imports",
    "generator": "vLLM: replicas, TP, precision, memory",
    "weight_sync": "how weights go to the generators, and how they are verified",
    "placement": "which host or GPU each mesh gets",
    "hosts": "several machines",
    "memory": "allowances of the estimate of a GPU's memory",
    "launch": "resources of a job of Slurm or Kubernetes",
    "checkpoint": "how often, and how many are kept",
    "metrics": "TensorBoard, W&B, Trackio, MLflow, Prometheus, alerts",
    "record": "batches that are kept, to make a step again",
    "profiling": "traces and memory snapshots",
    "comm": "timeouts of collectives",
    "fault": "how failures are noticed and healed",
    "debug": "the seed, and determinism",
}


def print_usage(console: Console) -> None:
    """Print how to start a run."""
    print_trimmed(console, USAGE.format(command=command_of("run"), programs=f"{command_of('')} --help"))
    print_shipped(console)


def print_help(argv: Sequence[str]) -> None:
    """Print what the words after --help ask for: nothing lists the sections. Exit with 2 if one is no section."""
    console = Console(highlight=False, markup=False)
    topics = [word.strip("[]").partition(".")[0].replace("-", "_") for word in asked(argv)]
    if unknown := [topic for topic in topics if topic not in (ALL, *schema())]:
        refuse("", [f"--help: there is no section {as_toml(unknown[0])}{did_you_mean(unknown[0], schema())}"])
    if topics:
        sections = schema() if ALL in topics else {topic: schema()[topic] for topic in topics}
        if not console.is_terminal:
            console.width = PIPED_WIDTH
        print_trimmed(console, key_table(sections))
        return
    print_usage(console)
    table = Table.grid(padding=(0, 2, 0, 2))
    table.add_column(no_wrap=True)
    for section in schema():
        table.add_row(Text(f"[{section}]", style="bold cyan"), SECTIONS[section])
    table.add_row(
        Text(f"[{POLICIES}.NAME.SECTION]", style="bold cyan"), "keys of one of several policies (docs/models.md)"
    )
    console.file.write("\nsections of the TOML:\n")
    print_trimmed(console, table)
    console.file.write(f"\n{command_of('run')} --help optimizer lists the keys of a section, --help all every key.\n")


def asked(argv: Sequence[str]) -> list[str]:
    """Return the words that follow --help or -h, up to the next flag."""
    at = min(argv.index(flag) for flag in ("--help", "-h") if flag in argv)
    words = list[str]()
    for word in argv[at + 1 :]:
        if word.startswith("--"):
            break
        words.append(word)
    return words


def key_table(sections: dict[str, dict[str, config_file.Key]]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 2))
    table.add_column(no_wrap=True)
    for section, keys in sections.items():
        if table.row_count:
            table.add_row()
        table.add_row(Text(f"[{section}]", style="bold cyan"), Text(SECTIONS[section], style="dim"))
        for name, key in keys.items():
            value = Text(f"({key.kind}; default {as_toml(key.default)})", style="dim")
            table.add_row(Text(name, style="bold"), Text.assemble(key.doc, " ", value))
    return table
