"""Checks of the models: dimensions against each other and against meshes and rows, and Hugging Face folders, of whose
weights only the headers are read."""

import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from titan_rl.config.plain_files import refuse_other, text_of
from titan_rl.config.sections import Config, ParallelismSection
from titan_rl.preflight.refusal import problem
from titan_rl.preflight.shapes import shape_of_role
from titan_rl.tasks.task import chat_settings
from titan_rl.text.template import own_template
from titan_rl.text.tokenizer import SIZE, TextTokenizer, build
from titan_rl.wire.model_shape import BLOCKS, SCALES, ModelShape, SpecShape, shape_of_folder

ADDITION_PROMPT = 7  # tokens: BOS and "47+38="
EXPERT_MULTIPLE = 8  # torch's grouped products take rows of whole 16 bytes; bfloat16 has 2
FLOATS = ("F64", "F32", "BF16", "F16")
MOST_NAMED = 5  # tensors of a kind that a message names


def check_dimensions(config: Config, shape: ModelShape) -> Iterator[str]:
    model = config.model
    if shape.n_heads % shape.n_kv_heads:
        yield f"model.n_kv_heads: expected a divisor of the model's {shape.n_heads} heads, found {shape.n_kv_heads}"
    if shape.head_dim % 2:
        why = "because rotary embeddings pair its elements"
        yield f"model.head_dim: expected an even number, {why}, found {shape.head_dim}"
    if not model.hf_assets_path and shape.parts.heads_fill_dim and model.head_dim * shape.n_heads not in (0, shape.dim):
        product = f"head_dim x n_heads = {shape.head_dim} x {shape.n_heads}"
        yield f"model.dim: expected {product}, as vLLM's {shape.parts.architectures['lm']} has, found {shape.dim}"
    elif not (model.hf_assets_path or model.head_dim) and model.dim % model.n_heads:
        yield f"model.dim: expected a multiple of n_heads = {model.n_heads}, because head_dim is 0, found {model.dim}"
    if shape.experts_per_token > shape.experts:
        most = f"at most the model's {shape.experts} experts"
        yield f"model.experts_per_token: expected {most}, found {shape.experts_per_token}"
    if shape.tied and not shape.parts.ties:
        yield f"model.enable_weight_tying: expected false, as vLLM ignores it for {shape.family}, found true"
    valued = "critic" in config.roles or config.algorithm.kind == "reward"
    if valued and "value" not in shape.parts.architectures:
        why = f"whose folder transformers could not load, because it has no such class for {shape.family}"
        yield f"algorithm.name: expected one without a value head, {why}, found {json.dumps(config.algorithm.name)}"
    if not model.hf_assets_path and shape.vocab_size < SIZE:
        yield f"model.vocab_size: expected at least the built-in tokenizer's {SIZE}, found {shape.vocab_size}"


def check_spec(config: Config, shape: ModelShape) -> Iterator[str]:
    """Refuse features that only models of our blocks have."""
    if not isinstance(shape, SpecShape):
        return
    wrong = partial(problem, config)
    if config.algorithm.kind == "reward":
        yield wrong("algorithm.name", f"another, because {shape.family} has no value head here")
    if "critic" in config.roles:
        yield wrong("algorithm.name", f"one without a critic, because {shape.family} has no value head here")
    if not shape.recurrent_heads:
        return
    if config.lora.on:
        yield wrong("lora.rank", f"0, because layers of {shape.family} with a recurrent state have no adapters here")
    if config.generator.quantization != "none":
        yield wrong("generator.quantization", f'"none", because {shape.family} has layers with a recurrent state')


def check_parallelism(config: Config, shape: ModelShape) -> Iterator[str]:
    seq_len = config.training.seq_len
    for mesh, p in {"parallelism": config.parallelism, **{n: r.parallelism for n, r in config.roles.items()}}.items():
        key, tp = f"{mesh}.tensor_parallel_degree", p.tensor_parallel_degree
        own = shape_of_role(config, mesh) or shape
        for size in ("n_heads", "n_kv_heads", "recurrent_heads", "hidden_dim", "dense_hidden_dim", "vocab_size"):
            if getattr(own, size) % tp:
                yield f"{key}: expected a divisor of the model's {size} = {getattr(own, size)}, found {tp}"
        if own.recurrent_heads and p.context_parallel_degree > 1:
            why, found = "whose state no rank hands on to the next", p.context_parallel_degree
            yield f"{mesh}.context_parallel_degree: expected 1 for {own.family}, {why}, found {found}"
        if own.parts.wide_norms and tp > 1:
            yield f"{key}: expected 1 for {own.family}, whose norms go over all heads at once, found {tp}"
        yield from _check_experts(mesh, p, own)
        if seq_len % tp:
            yield f"training.seq_len: expected a multiple of {key} = {tp} (sequence parallelism), found {seq_len}"

    key, tp = "generator.tensor_parallel_degree", config.generator.tensor_parallel_degree
    for size in ("n_heads", "recurrent_heads", "hidden_dim", "dense_hidden_dim"):
        if getattr(shape, size) % tp:
            yield f"{key}: expected a divisor of the model's {size} = {getattr(shape, size)}, found {tp}"
    if shape.parts.wide_norms and tp > 1:
        yield f"{key}: expected 1 for {shape.family}, whose norms go over all heads at once, found {tp}"
    if shape.parts.clamped_experts and tp > 1:
        why = "because all but vLLM's first rank have zeros for a bias of the experts, which no sync can write"
        yield f"{key}: expected 1 for {shape.family}, {why}, found {tp}"
    if shape.n_kv_heads % tp and tp % shape.n_kv_heads:
        yield f"{key}: expected a divisor or a multiple of the model's n_kv_heads = {shape.n_kv_heads}, found {tp}"


def _check_experts(mesh: str, p: ParallelismSection, shape: ModelShape) -> Iterator[str]:
    tp, shards, ep = p.tensor_parallel_degree, p.shards, p.expert_parallel_degree
    sharded = "data_parallel_shard_degree" + (" x context_parallel_degree" if p.context_parallel_degree > 1 else "")
    if not shape.experts:
        if ep > 1:
            yield f"{mesh}.expert_parallel_degree: expected 1 for {shape.family}, which has no experts, found {ep}"
        return
    cuts = tp if ep == 1 else 1  # tensor parallelism cuts the experts' matrices, unless whole experts are dealt out
    for size, multiple in (("dim", EXPERT_MULTIPLE), ("hidden_dim", EXPERT_MULTIPLE * cuts)):
        if (found := getattr(shape, size)) % multiple:
            cut = f" that {mesh}.tensor_parallel_degree = {tp} cuts" if multiple > EXPERT_MULTIPLE else ""
            yield f"model.{size}: expected a multiple of {multiple} with experts{cut}, found {found}"
    if shards * tp % ep:
        ranks = f"{sharded} x tensor_parallel_degree = {shards * tp}"
        yield f"{mesh}.expert_parallel_degree: expected a divisor of {ranks}, found {ep}"
    dealt = shards * tp // cuts
    if shape.experts % dealt:
        key = sharded + (" x tensor_parallel_degree" if dealt > shards else "")
        yield f"{mesh}.{key}: expected a divisor of the model's {shape.experts} experts, found {dealt}"


def check_lengths(config: Config, shape: ModelShape) -> Iterator[str]:
    wrong, new = partial(problem, config), config.rollout.max_new_tokens
    seq_len, longest = config.training.seq_len, config.generator.max_model_len
    # check_row_lengths measures the rows of files and chat templates. At least one token, so that these keys fit.
    prompt = ADDITION_PROMPT if (config.task.name, config.task.template) == ("addition", "plain") else 1
    needed = f"at least {prompt + new} (a prompt of {prompt} and rollout.max_new_tokens = {new})"
    most = f"at most the model's max_seq_len = {shape.max_seq_len}"
    if seq_len > shape.max_seq_len:
        yield wrong("training.seq_len", most)
    if prompt + new > seq_len:
        yield wrong("training.seq_len", needed)
    if longest > shape.max_seq_len:
        yield wrong("generator.max_model_len", most)
    elif longest > seq_len:
        why = "because a rollout must fit a packed row"
        yield wrong("generator.max_model_len", f"at most training.seq_len = {seq_len}, {why}")
    if 0 < longest < prompt + new:
        yield wrong("generator.max_model_len", needed)


def check_assets(config: Config, shape: ModelShape | None) -> Iterator[str]:
    folder = Path(config.model.hf_assets_path)
    if not config.model.hf_assets_path or not os.path.isdir(folder):
        return
    key = "model.hf_assets_path"
    if shape is None:
        yield from check_weights(folder, key)
        return  # the tokenizer needs the same config.json
    trains_head = config.algorithm.kind == "reward"  # a new one, even if the folder has one
    unusable = shape.head == "value" and not trains_head
    if unusable:
        yield f"{key}: expected a language model (*ForCausalLM), found a reward model in {folder}"
    yield from check_weights(folder, key, None if unusable else shape, head=not trains_head)
    try:
        tokenizer = TextTokenizer.load(folder)
    except Exception as error:  # tokenizers raises Exception itself
        yield f"{key}: expected a tokenizer, found {error}"
        return
    if tokenizer.size > shape.vocab_size:
        least = f"a vocab_size of at least the tokenizer's {tokenizer.size} in {folder / 'config.json'}"
        yield f"{key}: expected {least}, found {shape.vocab_size}"
    if config.task.template == "chat" and not (
        config.task.chat_template or any(own_template(folder, tokenizer.settings))
    ):
        yield problem(
            config, "task.template", f'"plain", or a task.chat_template, because {folder} has no chat template'
        )


def policy_tokenizer(config: Config) -> TextTokenizer | None:
    """Return the policy's tokenizer; None if it cannot be loaded, which check_assets reports."""
    with suppress(Exception), tempfile.TemporaryDirectory() as scratch:
        folder = Path(config.model.hf_assets_path or scratch)
        if not config.model.hf_assets_path:
            build(folder)
        return TextTokenizer.load(folder, chat_settings(config))
    return None


def check_roles(config: Config, shape: ModelShape) -> Iterator[str]:
    """Check that the algorithm has the models that it needs besides the policy, and that their folders fit it."""
    wrong, a, modelled = partial(problem, config), config.algorithm, config.task.reward == "model"
    named = f'algorithm.name = "{a.name}"'
    if a.needs_reference and config.reference.mesh == "none":
        why = f"algorithm.kl_coef = {a.kl_coef:g}" if a.kind == "rl" else named
        why = f'algorithm.pair_loss = "{a.pair_loss}"' if a.online_pairs else why
        why = why if a.compares_with_reference else 'algorithm.teacher_weights = "reference"'
        yield wrong("reference.mesh", f'"trainer" or "own", because {why} needs a reference')
    if a.needs_critic and config.critic.lr == 0:
        yield wrong("critic.lr", f"a value above 0, because {named} trains a critic")
    if a.loads_teacher:
        why = named if a.advantage == "teacher" else f"algorithm.teacher_coef = {a.teacher_coef:g}"
        yield from _check_folder(config, shape, "teacher", why)
    if a.needs_critic and config.critic.hf_assets_path:
        yield from _check_folder(config, shape, "critic", "")
    if a.kind == "rl" and modelled:
        yield from _check_folder(config, shape, "reward_model", 'task.reward = "model"')
    if config.samples_rollouts and config.eval.size and modelled and not config.task.eval_reward:
        why = 'because task.reward is "model" (eval.size = 0 disables evaluation)'
        yield wrong("task.eval_reward", f"a reward for the held-out answers, {why}")


def _check_folder(config: Config, shape: ModelShape, role: str, why: str) -> Iterator[str]:
    key, folder = f"{role}.hf_assets_path", getattr(config, role).hf_assets_path
    if not folder:
        yield problem(config, key, f"a Hugging Face folder, required by {why}")
        return
    try:
        own_shape = shape_of_folder(folder, key)
        vocabulary = TextTokenizer.load(Path(folder)).tokenizer.get_vocab()
    except Exception as error:  # tokenizers raises Exception itself
        yield str(error) if key in str(error) else f"{key}: expected a tokenizer, found {error}"
        return
    length = {"max_seq_len": shape.max_seq_len}  # it may differ
    misfit = (own_shape.head == "value") != (role == "reward_model") and role != "critic"
    new_head = role == "critic" and own_shape.head == "lm"
    yield from check_weights(Path(folder), key, None if misfit else own_shape, head=not new_head)
    if misfit:
        wanted = "a reward model (*ForSequenceClassification)" if role == "reward_model" else "a language model"
        yield f"{key}: expected {wanted}, found another kind of model in {folder}"
    if role == "teacher" and config.teacher.mesh == "trainer" and replace(own_shape, **length) != shape:
        yield problem(config, "teacher.mesh", '"own", because teacher and policy differ in shape')
    if role == "critic" and replace(own_shape, head=shape.head, tied=shape.tied, **length) != shape:
        yield f"{key}: expected the policy's shape, found another shape in {folder}"
    own = policy_tokenizer(config)
    ours = own.tokenizer.get_vocab() if own else vocabulary
    if ours != vocabulary:
        yield (
            f"{key}: expected the policy's tokenizer, found another in {folder}: the same token ids would mean "
            f"different text ({len(ours)} and {len(vocabulary)} entries)"
        )


class Header(NamedTuple):
    """A tensor as its file's header describes it."""

    file: str
    dtype: str
    shape: tuple[int, ...]


def check_weights(folder: Path, key: str, shape: ModelShape | None = None, *, head: bool = True) -> Iterator[str]:
    """Check that the safetensors files are whole and that an index agrees with them. With a `shape`, check that they
    have its tensors, with its output head if `head`. Other tensors are not looked for."""
    paths = sorted(folder.glob("*.safetensors"))
    index = folder / "model.safetensors.index.json"
    if index.exists():
        listed = _listed(index)
        if isinstance(listed, str):
            yield f"{key}: expected a weight_map in {index}, found {listed}"
            return
        if missing := sorted({file for file in listed.values() if not (folder / file).is_file()}):
            yield f"{key}: expected every file listed in {index}, found no {', '.join(missing)}"
            return
    else:
        listed = None
        if not paths:
            yield f"{key}: expected *.safetensors in {folder}, found none"
            return
    tensors: dict[str, Header] = {}
    unreadable = False
    for path in paths:  # all files of the folder are loaded, listed in the index or not
        found = _headers(path)
        unreadable |= isinstance(found, str)
        if isinstance(found, str):
            yield f"{key}: expected a whole safetensors file at {path}, found {found}"
            continue
        if twice := sorted(found.keys() & tensors.keys()):
            other = tensors[twice[0]].file
            yield f"{key}: expected each tensor in one file of {folder}, found {twice[0]} in {other} and {path.name}"
        tensors |= found
    if unreadable:
        return
    if listed is not None and (lost := [name for name, file in listed.items() if _file(tensors, name) != file]):
        yield f"{key}: expected the tensors listed in {index}, found no {lost[0]} in {listed[lost[0]]}"
        return
    if shape is not None:
        yield from _check_tensors(tensors, folder, key, shape, head)


def _check_tensors(
    tensors: Mapping[str, Header], folder: Path, key: str, shape: ModelShape, head: bool
) -> Iterator[str]:
    expected = shape.folder_tensors(head=head, mxfp4=shape.mxfp4)
    if (own := shape.hf_head_weight) in expected and own not in tensors:
        why = "because tie_word_embeddings is false" if shape.head == "lm" else "the head of a reward model"
        yield f"{key}: expected {own} in the weights of {folder}, {why}, found none"
    if missing := [name for name in expected if name not in tensors and name != own]:
        named = ", ".join(missing[:MOST_NAMED]) + (", ..." if len(missing) > MOST_NAMED else "")
        yield f"{key}: expected the {len(expected)} tensors of {folder / 'config.json'}, found no {named}"
    there = {name: tensors[name] for name in expected if name in tensors}
    sizes = [f"{list(t.shape)} of {n} (not {list(expected[n])})" for n, t in there.items() if t.shape != expected[n]]
    if sizes:
        more = f", and {len(sizes) - 1} other tensors" if len(sizes) > 1 else ""
        yield f"{key}: expected the sizes of {folder / 'config.json'} in the weights, found {sizes[0]}{more}"
    floats = {name: t for name, t in there.items() if not (t.dtype == "U8" and name.endswith((BLOCKS, SCALES)))}
    if odd := [f"{t.dtype} of {name}" for name, t in floats.items() if t.dtype not in FLOATS]:
        yield f"{key}: expected weights in one of {', '.join(FLOATS)} in {folder}, found {odd[0]}"


def _file(tensors: Mapping[str, Header], name: str) -> str:
    return tensors[name].file if name in tensors else ""


def _listed(index: Path) -> dict[str, str] | str:
    """Return an index's weight_map (tensor -> file), or the text found in its place."""
    try:
        found = json.loads(text_of(index))["weight_map"]
    except (OSError, KeyError, TypeError, ValueError, RecursionError) as error:
        return repr(error)
    if not isinstance(found, dict) or not found:
        return json.dumps(found)[:80]
    if odd := [name for name, file in found.items() if not isinstance(file, str) or Path(file).name != file]:
        return f"{odd[0]} in {json.dumps(found[odd[0]])[:80]}, which is no file of the folder"
    if odd := [file for file in found.values() if not re.search(r"\d", file)]:  # TorchTitan reads the number
        return f"{odd[0]}, a file without a number (if the folder has no other, delete the index)"
    return found


def _headers(path: Path) -> dict[str, Header] | str:
    """Return the tensors of a safetensors file, or why it cannot be read. Nothing but its header is."""
    from safetensors import safe_open

    opened: Any = safe_open
    try:
        refuse_other(path)
        with path.open("rb"), opened(str(path), framework="np") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
            return {n: Header(path.name, s.get_dtype(), tuple(s.get_shape())) for n, s in slices.items()}
    except Exception as error:  # SafetensorError, OSError
        return str(error)
