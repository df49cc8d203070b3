"""Proves that an exported folder is the trainer's model: transformers, which knows nothing of this project, loads it
and must give the same tokens and the same log-probs (a reward model or critic: the same scores)."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from titan_rl.batch.packing import pack, unpack
from titan_rl.ext.adapters.layers import PEFT_CONFIG, PEFT_PREFIX, PEFT_WEIGHTS, adapter_names
from titan_rl.tasks.prompts import to_judge
from titan_rl.tasks.task import Task
from titan_rl.text.tokenizer import TextTokenizer, messages_of
from titan_rl.wire.parts import needed_part
from titan_rl.wire.types import Sample, names_of

if TYPE_CHECKING:
    from titan_rl.actors.titan.model import TitanModel

EXAMPLES = 16
TOLERANCE = 1e-5
NOISE = 4  # times the rounding error of transformers' own float32, where that exceeds the tolerance


class ProofFailed(Exception):
    """transformers computes other numbers from the folder than the trainer did."""


def sequences_of(task: Task, tokenizer: TextTokenizer, seq_len: int, *, judged: bool) -> list[Sample]:
    """Return held-out prompts with their answers, or training examples if there are no held-out ones."""
    examples = list((task.heldout or task.train)[:EXAMPLES])
    prompts = [task.prompt(example, i, tokenizer) for i, example in enumerate(examples)]
    answers = [(p, answer) for p in prompts for answer in (p.answer, *([p.rejected] if p.rejected else []))]
    whole = [[*p.tokens, *tokenizer.encode(answer), tokenizer.eos][:seq_len] for p, answer in answers]
    if judged:
        return [to_judge(tokens, tokenizer.pad) for tokens in whole]
    read = [prompt.images for prompt, _ in answers]
    masks = [[0] + [1] * (len(tokens) - 1) for tokens in whole]
    return [Sample(tokens, mask, images=images) for tokens, mask, images in zip(whole, masks, read, strict=True)]


def by_trainer(model: "TitanModel", sequences: Sequence[Sample]) -> np.ndarray:
    """Return the log-prob of every token but the first of each sequence; or the score of each sequence."""
    (batch,) = batches = pack(
        sequences, shards=1, seq_len=model.config.training.seq_len, rows_per_microbatch=1, pad_id=0
    )
    answers = unpack(batches, [[model.score(rows) for rows in batch.microbatches]], sequences)
    return np.concatenate([a[np.array(s.mask) > 0] for a, s in zip(answers, sequences, strict=True)])


def by_transformers(
    folder: Path,
    sequences: Sequence[Sample],
    dtype: str,
    *,
    judged: bool,
    images: Path,
    adapters: Path | None = None,
) -> np.ndarray:
    """Return the same from transformers' model of the folder, computed in this dtype. `images`: of the run. `adapters`:
    a folder in PEFT's layout, whose adapters are added to the weights."""
    import torch
    import transformers

    (name,) = json.loads((folder / "config.json").read_text(encoding="utf-8"))["architectures"]
    kind: Any = getattr(transformers, name, None)
    if kind is None:
        raise ProofFailed(f"expected a model of transformers {transformers.__version__}, found {name}")
    model = kind.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    if adapters is not None:
        add_adapters(model, adapters)
    results: list[torch.Tensor] = []
    files: Any = None
    if any(sample.images for sample in sequences):
        files = needed_part("files of images", "model.vision")(images, str(folder))
    with torch.no_grad():
        for sample in sequences:
            seen = pixels_of(sample, files, model.dtype) if sample.images else {}
            logits = model(torch.tensor([sample.tokens[:-1]]), **seen).logits[0]
            if not judged:
                logits = logits.log_softmax(-1).gather(-1, torch.tensor(sample.tokens[1:])[:, None])
            results.append(logits.flatten())
    return torch.cat(results).numpy()


def pixels_of(sample: Sample, files: Any, dtype: Any) -> dict[str, Any]:
    """Return a sample's images as transformers' model takes them. `files`: ext/vision/pixels.py's, of the run."""
    import torch

    pixels = files.pixels(names_of(sample.images))
    values = torch.from_numpy(np.concatenate([each.values for each in pixels]))
    mask = torch.from_numpy(np.concatenate([each.mask for each in pixels]))
    return {"pixel_values": values[None].to(dtype), "pixel_attention_mask": mask[None]}


def add_adapters(model: Any, folder: Path) -> None:
    """Add adapters to the weights of transformers' model, as PEFT defines them."""
    import torch
    from safetensors.torch import load_file

    settings = json.loads((folder / PEFT_CONFIG).read_text(encoding="utf-8"))
    tensors = {name.removeprefix(PEFT_PREFIX): tensor for name, tensor in load_file(folder / PEFT_WEIGHTS).items()}
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, weight in parameters.items():
            a, b = adapter_names(name)
            if a in tensors:
                change = tensors.pop(b).to(weight.dtype) @ tensors.pop(a).to(weight.dtype)
                weight += settings["lora_alpha"] / settings["r"] * change
    if tensors:
        raise ProofFailed(f"expected a weight of {folder.parent} for every adapter, found none for {min(tensors)}")


def compare_models(
    sequences: Sequence[Sample],
    folder: Path,
    expected: np.ndarray,
    *,
    judged: bool,
    images: Path,
    adapters: Path | None = None,
) -> str:
    """Return how far transformers is from the trainer's model. Raise if that is above the tolerance, and more than
    float32 arithmetic explains: a sharp model magnifies its rounding."""
    theirs = by_transformers(folder, sequences, "float32", judged=judged, images=images, adapters=adapters)
    apart = np.abs(theirs - expected).max()
    if apart <= TOLERANCE:
        return f"largest difference {apart:.1e}"
    exact = by_transformers(folder, sequences, "float64", judged=judged, images=images, adapters=adapters)
    errors, noise = np.abs(expected - exact), np.abs(theirs - exact).max()
    if not errors.max() <= NOISE * noise:  # NaN fails
        worst = int(errors.argmax())
        raise ProofFailed(f"expected {expected[worst]:.7g}, as from the trainer's own model, found {exact[worst]:.7g}")
    return f"largest difference {apart:.1e}, of which float32 explains {noise:.1e}"


def compare_prompts(folder: Path, task: Task, tokenizer: TextTokenizer) -> None:
    """Raise unless transformers' tokenizer of the folder gives the tokens that training used. Skip a chat that spells
    control tokens: they are text here, and control tokens there."""
    from transformers import AutoTokenizer

    theirs: Any = AutoTokenizer.from_pretrained(folder)
    for example in list((task.heldout or task.train)[:EXAMPLES]):
        expected = tokenizer.prompt(example.prompt, task.template, task.system_prompt)
        if task.template == "chat":
            messages = messages_of(example.prompt, task.system_prompt)
            if tokenizer.chat.outside.masked(messages) != messages:
                continue
            keys = {**tokenizer.chat_settings.kwargs, "add_generation_prompt": True, "return_dict": False}
            tokens = theirs.apply_chat_template(messages, **keys)
        else:
            tokens = theirs(example.prompt).input_ids
        if list(tokens) != expected:
            raise ProofFailed(
                f"expected the tokens {expected} for {example.prompt!r}, as in training, from transformers; "
                f"found {list(tokens)}"
            )
