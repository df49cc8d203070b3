"""Writes a model as a Hugging Face folder, which transformers and vLLM load without knowing this project."""

import asyncio
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan_rl.config.plain_files import text_of
from titan_rl.preflight.plan import Policy, Setup
from titan_rl.record.lines import Unwritable, must_write
from titan_rl.record.model_card import CARD, model_card
from titan_rl.record.provenance import versions
from titan_rl.record.run_folder import aside
from titan_rl.text.template import MORE_TEMPLATES
from titan_rl.wire.checkpoint_sums import sum_files
from titan_rl.wire.errors import RankFailed

if TYPE_CHECKING:
    from titan_rl.meshes.model_mesh import ModelMesh

COPIED = (
    "config.json",
    "added_tokens.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
)
"""Files that an exported model has in common with the folder that training took its tokenizer from."""


async def export_policy(setup: Setup, trainers: "ModelMesh", final: Path, *, card: str = "") -> Path:
    """Write the trainers' weights, and what belongs to them, to `final`; with a model card, if there is one. A full
    disk is named, and no fault of a rank's: another one would meet it too."""
    try:
        with must_write(final), new_folder(final) as partial:
            await trainers.export(str(partial))
            write_assets(setup.policy, partial, setup.config.training.dtype)
            await asyncio.to_thread(sum_files, partial)
            write_card(partial, card)
    except RankFailed as error:
        raise Unwritable.of_rank(final, error) or error from None
    return final


def card_of(setup: Setup, *, step: str = "", scores: Mapping[str, float] | None = None, own_loop: bool = False) -> str:
    """Return the model card of weights of this run, by default the last ones."""
    found, head = versions(), setup.shape.head
    return model_card(setup.folder, setup.config, found, step=step, scores=scores, head=head, own_loop=own_loop)


def write_card(folder: Path, card: str) -> None:
    """Write a model card, after the checksums: users edit it."""
    if card:
        (folder / CARD).write_text(card, encoding="utf-8")


@contextmanager
def new_folder(final: Path) -> Iterator[Path]:
    """Yield a temporary folder, and rename it to `final` at the end: the folder is whole or absent. An older one is
    moved aside."""
    partial = final.with_name(f".{final.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    if final.exists():
        final.rename(aside(final))
    partial.rename(final)


def write_assets(policy: Policy, folder: Path, dtype: str) -> None:
    """Write everything but the weights, which have this dtype."""
    for name in COPIED:
        if (policy.folder / name).exists():
            shutil.copyfile(policy.folder / name, folder / name)
    if given_template := policy.tokenizer.chat_settings.template:
        (folder / "chat_template.jinja").write_text(given_template, encoding="utf-8")
    elif (policy.folder / MORE_TEMPLATES).is_dir():
        shutil.copytree(policy.folder / MORE_TEMPLATES, folder / MORE_TEMPLATES)
    policy.tokenizer.tokenizer.save(str(folder / "tokenizer.json"))  # as training used it: nothing truncated or padded
    source_config = json.loads(text_of(policy.folder / "config.json"))
    source_config.pop("torch_dtype", None)  # the name that transformers 4 has for "dtype"
    source_config.pop("quantization_config", None)  # the weights are not quantized any more
    _write_json(folder / "config.json", source_config | _config(policy, source_config, dtype))
    if policy.shape.head == "lm":
        _write_json(folder / "generation_config.json", _generation_config(policy))


def _config(policy: Policy, source: dict[str, Any], dtype: str) -> dict[str, Any]:
    tokenizer = policy.tokenizer
    eos = source.get("eos_token_id")
    pad = source.get("pad_token_id")
    pad = tokenizer.pad if pad is None else pad
    if policy.shape.head == "value" and pad in tokenizer.eos_ids:
        # transformers scores the last token that is not padding, which would be the one before EOS. Without a padding
        # token it scores the last one, and refuses batches.
        pad = None
    ids = {
        "bos_token_id": tokenizer.bos if source.get("bos_token_id") is None else source["bos_token_id"],
        "eos_token_id": tokenizer.eos if eos is None else eos,
        "pad_token_id": pad,
    }
    return {**policy.shape.hf_head, "dtype": dtype, **ids}


def _generation_config(policy: Policy) -> dict[str, Any]:
    """Return the defaults of `model.generate`: a greedy answer, as in an evaluation of the run. (vLLM samples unless it
    is given a temperature of 0; in this file transformers would refuse that.)"""
    stops = list(policy.sampling.stop_token_ids)
    return {
        "bos_token_id": policy.tokenizer.bos,
        "eos_token_id": stops if len(stops) > 1 else stops[0],
        "pad_token_id": policy.tokenizer.pad,
        "do_sample": False,
        "max_new_tokens": policy.sampling.max_new_tokens,
    }


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
