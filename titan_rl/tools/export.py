"""`python -m titan_rl export RUN`: write a checkpoint of a run as a Hugging Face folder, and prove it.

    RUN/checkpoint/step-N (DCP) ── TorchTitan model in this process ──> safetensors, config, tokenizer
                                          └── log-probs on held-out answers == transformers' on that folder

Exit codes: 0 written and proven, 1 the checkpoint cannot be read, the proof or the upload failed, 2 bad usage. Unless
the upload failed, nothing is written if it is not 0.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from titan_rl.config.sections import Config
from titan_rl.config.toml import CONFIG, ConfigError
from titan_rl.ext.adapters.layers import PEFT_FOLDER, PEFT_WEIGHTS
from titan_rl.preflight.checks.folders import unwritable
from titan_rl.preflight.plan import Policy, policy_of
from titan_rl.record.model_card import NOT_AUDITED, model_card
from titan_rl.tasks.task import Task, load_task
from titan_rl.tools.export_proof import ProofFailed, by_trainer, compare_models, compare_prompts, sequences_of
from titan_rl.tools.inspect.audit_rules import audit
from titan_rl.tools.inspect.live_copy import frozen
from titan_rl.tools.inspect.run_files import RunFiles
from titan_rl.tools.push import check_exported, check_push, push
from titan_rl.tools.refused_input import UsageError
from titan_rl.tools.saved_steps import saved_steps
from titan_rl.train.hf_folder import new_folder, write_assets, write_card
from titan_rl.wire.checkpoint_sums import FOLDER, damage
from titan_rl.wire.counted import counted
from titan_rl.wire.program import DONE, FAILED, command_of, enter, path_argument
from titan_rl.wire.seeds import derive
from titan_rl.wire.types import IMAGES, Sample

if TYPE_CHECKING:
    from titan_rl.actors.titan.checkpoint_model import CheckpointModel

DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, slots=True)
class ExportSource:
    """A checkpoint, and the model that it belongs to."""

    run: Path
    config: Config
    policy: Policy
    task: Task
    step: str
    folder: Path

    @property
    def judges(self) -> bool:
        return self.policy.shape.head == "value"


def main(argv: Sequence[str]) -> int:
    options = parser().parse_args(argv)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # both models compute in float32 on the CPU
    os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
    try:
        check_push(options.push, options.yes)
        with tempfile.TemporaryDirectory() as scratch:
            source = find_source(options.run, options.step, options.critic, Path(scratch))
            dtype = options.dtype or source.config.training.dtype
            name = "-".join(["hf", *(["critic"] if options.critic else []), source.step.replace("/", "-"), dtype])
            final = options.out or options.run / name
            if options.push and final.exists():
                check_exported(final)
                print(f"{final} is there already: it is pushed as it is")
            else:
                _refuse_place(final)
                try:
                    verdict = verdict_on(options.run) if options.audit else NOT_AUDITED
                    print(write_proven(source, final.absolute(), dtype, Path(scratch), verdict))
                except OSError as error:  # a full disk
                    raise UsageError(f"nothing was written to {final}: {error}", FAILED) from error
            if options.push:
                print(push(final, options.push, options.yes))
    except UsageError as error:
        print(f"titan_rl export: {error}", file=sys.stderr)
        return error.code
    except ProofFailed as error:
        print(f"titan_rl export: the proof failed, nothing was written: {error}", file=sys.stderr)
        return FAILED
    return DONE


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=command_of("export"),
        description="Write a checkpoint of a run as a Hugging Face folder for transformers and vLLM, and prove that "
        "transformers computes the same log-probs from it as the trainer's own model.",
        epilog="Run it in the folder in which the run was started, if its config has relative paths. It needs no GPU, "
        "and memory for two copies of the model in float32.",
        allow_abbrev=False,
    )
    parser.add_argument("run", metavar="RUN", type=path_argument, help="dump folder of the run, which may be active")
    parser.add_argument("--step", metavar="N", help="step of the checkpoint, or cold_start/N; default: the newest")
    parser.add_argument("--dtype", choices=DTYPES, help="dtype of the weights; default: training.dtype of the run")
    parser.add_argument(
        "--out",
        metavar="FOLDER",
        type=path_argument,
        help="folder to write; default: RUN/hf-step-N-DTYPE. It must not exist",
    )
    parser.add_argument("--audit", action="store_true", help="audit the run, and write the verdict into the model card")
    parser.add_argument("--critic", action="store_true", help="export the critic instead of the policy")
    parser.add_argument(
        "--push",
        metavar="OWNER/NAME",
        default="",
        help="list what an upload to this repository of the Hub would send; a folder that is there already is not "
        "written again. The token is HF_TOKEN, or the one of `hf auth login`",
    )
    parser.add_argument("--yes", action="store_true", help="with --push: upload; a new repository is private")
    return parser


def find_source(run: Path, step: str | None, critic: bool, scratch: Path) -> ExportSource:
    """Read the run's config, and find the checkpoint."""
    files = RunFiles(run)
    if not (files / CONFIG).is_file():
        raise UsageError(f"RUN: expected the dump folder of a run, with its {CONFIG}, {files.absence}")
    try:
        config = files.config()
        name, folder = _checkpoint(run, step, critic)
        policy = policy_of(config, scratch / "model")
        if critic:
            policy = replace(policy, shape=policy.shape.with_value_head())
        pairs = config.algorithm.kind in ("preference", "reward")
        task = load_task(config.task, seed=derive(config.debug.seed, "task"), eval_size=config.eval.size, pairs=pairs)
    except (ConfigError, OSError, ValueError) as error:
        raise UsageError(f"{run}: {'; '.join(str(error).splitlines())}") from error
    return ExportSource(run, config, policy, task, name, folder)


def _checkpoint(run: Path, step: str | None, critic: bool) -> tuple[str, Path]:
    """Return the name and the folder of a step's checkpoint; by default of the newest."""
    folders, checkpoints = saved_steps(run, critic=critic), run / FOLDER / ("critic" if critic else "")
    if not folders:
        raise UsageError(f"RUN: expected a whole checkpoint in {checkpoints}, found none")
    name = step or list(folders)[-1]
    if name not in folders:
        raise UsageError(f"--step: expected one of {', '.join(folders)} (in {checkpoints}), found {name}")
    return name, folders[name]


def _refuse_place(final: Path) -> None:
    """Refuse a folder that exists, or that cannot be written."""
    if final.exists():
        raise UsageError(f"--out: expected a folder that does not exist yet, found {final}")
    reason = unwritable(final.absolute().parent)
    if reason:
        raise UsageError(f"--out: expected a folder that can be written, found {reason}")


def verdict_on(run: Path) -> str:
    """Audit a run for the card of its model."""
    with frozen(RunFiles(run)) as (files, note):
        problems, checked = audit(files.folder, active=bool(note))
    if problems:
        return f"**{counted(len(problems), 'problem')}** (`titan_rl audit` prints them)."
    still = ", while it was active" if note else ""
    return f"`titan_rl audit` found nothing lost, nothing twice and nothing stale in the run{still}: {checked}."


def write_proven(source: ExportSource, final: Path, dtype: str, scratch: Path, verdict: str = NOT_AUDITED) -> str:
    """Write the folder, prove it, and only then give it its name. Return a line for the user."""
    reason = damage(source.folder, read=True)
    if reason:
        raise UsageError(f"{source.folder} is damaged: {reason}", FAILED)
    import torch
    from torch.distributed.checkpoint.api import CheckpointException
    from transformers.utils import logging

    from titan_rl.actors.endpoint import quiet
    from titan_rl.actors.titan.checkpoint_model import CheckpointModel

    quiet()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    policy, seq_len, images = source.policy, source.config.training.seq_len, scratch / IMAGES
    if source.config.model.vision != "none":
        images.symlink_to((source.run / IMAGES).absolute())
    try:
        model = CheckpointModel(source.config, policy.shape, source.folder, scratch)
    except (CheckpointException, OSError, RuntimeError, ValueError) as error:
        causes = [cause for cause, _ in error.failures.values()] if isinstance(error, CheckpointException) else [error]
        reason = "; ".join(" ".join(f"{type(cause).__name__} {cause}".split()) for cause in causes)
        raise UsageError(f"{source.folder} cannot be read: {reason}", FAILED) from error
    spoilt = model.not_finite()
    if spoilt:
        raise UsageError(f"{source.folder}: expected finite weights, found NaN or infinity in {spoilt}", FAILED)
    sequences = sequences_of(source.task, policy.tokenizer, seq_len, judged=source.judges)
    with new_folder(final) as partial:
        model.write(partial, getattr(torch, dtype))
        write_assets(policy, partial, dtype)
        size = sum(file.stat().st_size for file in partial.iterdir() if file.is_file())
        exact = by_trainer(model, sequences)
        adapted = adapters_proof(source, model, partial, exact, sequences, scratch) if model.config.lora.on else ""
        model.round_weights(getattr(torch, dtype))
        rounded = by_trainer(model, sequences)
        compare_prompts(partial, source.task, policy.tokenizer)
        proof = compare_models(sequences, partial, rounded, judged=source.judges, images=images)
        write_card(partial, card_of_source(source, dtype, verdict))
    numbers = "scores" if source.judges else "log-probs"
    moved = float(abs(rounded - exact).max())
    cause = f"merging and {dtype}" if adapted else f"{dtype} itself"
    rounding = f"; {cause} moved them by up to {moved:.1e}" if moved else ""
    return (
        f"step {source.step} is in {final} ({dtype}, {size / 1e6:.1f} MB): {rounded.size} {numbers} from transformers "
        f"equal the trainer's, {proof}{rounding}{adapted}"
    )


def card_of_source(source: ExportSource, dtype: str, verdict: str) -> str:
    """Return the card, with the versions that trained the model: the run's summary has them."""
    config, run = source.config, RunFiles(source.run)
    found = run.summary().get("versions")
    known = {str(name): str(version) for name, version in found.items()} if isinstance(found, dict) else {}
    head = source.policy.shape.head
    return model_card(source.run, config, known, step=source.step, verdict=verdict, head=head, dtype=dtype)


def adapters_proof(
    source: ExportSource,
    model: "CheckpointModel",
    folder: Path,
    exact: np.ndarray,
    sequences: Sequence[Sample],
    scratch: Path,
) -> str:
    """Prove the adapters that were written in PEFT's layout, over the weights that they were trained on. Merge the
    model's own. Return a line for the user."""
    from titan_rl.ext.adapters.ranks.lora import merge

    base = Path(source.config.model.hf_assets_path or scratch / "base")
    if not source.config.model.hf_assets_path:
        base.mkdir()
        model.write(base, adapters=False)
        write_assets(source.policy, base, "float32")
    images = scratch / IMAGES
    proof = compare_models(sequences, base, exact, judged=False, images=images, adapters=folder / PEFT_FOLDER)
    merge(model)
    nbytes = (folder / PEFT_FOLDER / PEFT_WEIGHTS).stat().st_size
    return f"; {PEFT_FOLDER}/ has the adapters for PEFT ({nbytes / 1e6:.1f} MB), {proof}"


if __name__ == "__main__":
    enter(lambda: main(sys.argv[1:]))
