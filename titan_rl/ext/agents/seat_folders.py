"""Folders of whole models that play seats: checks, the setups of their engines, and digests of their files."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from titan_rl.config.model_sections import LoraSection, ModelSection
from titan_rl.config.sections import Config
from titan_rl.config.system_sections import EnvironmentSection, OpponentsSection
from titan_rl.preflight.checks.model import check_weights
from titan_rl.preflight.plan import Setup, policy_of
from titan_rl.record.lines import must_write, write_whole
from titan_rl.record.run_names import SEAT_MODELS
from titan_rl.text.template import own_template
from titan_rl.text.tokenizer import TextTokenizer
from titan_rl.wire.errors import RunError
from titan_rl.wire.model_shape import shape_of_folder

READ = ("*.safetensors", "*.json", "*.jinja")
"""Files of a folder that an engine or a tokenizer reads."""


def folder_problems(config: Config) -> Iterator[str]:
    """Yield why no engine can play by the folders of environment.endpoints."""
    for folder, (seat, *_) in config.environment.folders.items():
        key = f"environment.endpoints.{seat}.folder"
        try:
            shape = shape_of_folder(folder, key)
            tokenizer = TextTokenizer.load(Path(folder))
        except Exception as error:  # tokenizers raises Exception itself
            yield str(error) if key in str(error) else f"{key}: expected a tokenizer, found {error}"
            continue
        if shape.head == "value":
            yield f"{key}: expected a language model (*ForCausalLM), found a reward model in {folder}"
            continue
        yield from check_weights(Path(folder), key, shape)
        if tokenizer.size > shape.vocab_size:
            least = f"a vocab_size of at least the tokenizer's {tokenizer.size} in {folder}/config.json"
            yield f"{key}: expected {least}, found {shape.vocab_size}"
        if not any(own_template(tokenizer.folder, tokenizer.settings)):
            yield f"{key}: expected a model with a chat template, found none in {folder}"
        length = config.generator.max_model_len or config.training.seq_len
        if shape.max_seq_len < length:
            longest = f"a model of at least {length} tokens (generator.max_model_len, or training.seq_len)"
            yield f"{key}: expected {longest}, found one of {shape.max_seq_len} in {folder}"


def setups_of_seats(setup: Setup) -> dict[str, Setup]:
    """Return a setup of each model, by the name of its engine."""
    return {
        f"generator_{seats[0]}": _setup_of(setup, folder) for folder, seats in setup.config.environment.folders.items()
    }


def _setup_of(setup: Setup, folder: str) -> Setup:
    config, resolved = _alone(setup.config, folder), _alone(setup.resolved, folder)
    if setup.device == "cuda":  # else the cache would be sized for the policy, beside its trainer
        cache = setup.config.generator.kv_cache_memory_mb
        resolved = replace(resolved, generator=replace(resolved.generator, kv_cache_memory_mb=cache))
    policy = policy_of(config, Path())
    return replace(
        setup,
        config=config,
        resolved=resolved,
        shape=policy.shape,
        tokenizer=policy.tokenizer,
        sampling=policy.sampling,
        model_folder=policy.folder,
        policies={},
    )


def _alone(config: Config, folder: str) -> Config:
    """Return the config of one engine for a folder, which samples from the model's own distribution."""
    own = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "stop_token_ids": list[int]()}
    engine = {"replicas": 1, "tensor_parallel_degree": 1, "quantization": "none", "drafts": "none"}
    return replace(
        config,
        model=replace(ModelSection(), hf_assets_path=folder, head_dtype=config.model.head_dtype),
        task=replace(config.task, chat_template="", chat_template_kwargs={}),
        rollout=replace(config.rollout, **own),
        generator=replace(config.generator, **engine),
        placement=replace(config.placement, kind="disaggregated"),
        fault=replace(config.fault, min_replicas=1),
        lora=LoraSection(),
        opponents=OpponentsSection(),
    )


def record_models(e: EnvironmentSection, run: Path) -> dict[str, str]:
    """Write the digest of each seat's folder into the run's, and return them. Raise RunError if an earlier process of
    the run played by other files."""
    path, found = run / SEAT_MODELS, dict[str, str]()
    for folder, seats in e.folders.items():
        found |= dict.fromkeys(seats, digest_of(Path(folder)))
    before: Mapping[str, str] = json.loads(path.read_text()) if path.exists() else {}
    for seat, digest in found.items():
        if before.get(seat, digest) != digest:
            expected = f"the files that this run began with, whose digest is {before[seat]}"
            raise RunError(f"environment.endpoints.{seat}.folder: expected {expected}, found {digest}", again=True)
    if found:
        with must_write(path):
            write_whole(path, json.dumps({**before, **found}, indent=2) + "\n")
    return found


def digest_of(folder: Path) -> str:
    """Return one digest of the files that are read."""
    whole = hashlib.sha256()
    for path in sorted({path for pattern in READ for path in folder.glob(pattern) if path.is_file()}):
        with path.open("rb") as file:
            whole.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return whole.hexdigest()
