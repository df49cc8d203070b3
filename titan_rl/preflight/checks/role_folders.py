"""Checks of the models besides the policy: the algorithm has those it needs, and their folders fit the policy."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from titan_rl.config.sections import Config
from titan_rl.preflight.checks.assets import policy_tokenizer
from titan_rl.preflight.checks.weights import check_weights
from titan_rl.text.tokenizer import TextTokenizer
from titan_rl.wire.model_shape import ModelShape, shape_of_folder


def check_roles(config: Config, shape: ModelShape) -> Iterator[str]:
    a = config.algorithm
    if a.needs_reference and config.reference.mesh == "none":
        why = f"algorithm.kl_coef = {a.kl_coef:g}" if a.kind == "rl" else f'algorithm.name = "{a.name}"'
        yield f'reference.mesh: expected "trainer" or "own", because {why} needs a reference, found "none"'
    if a.needs_critic and config.critic.lr == 0:
        yield f'critic.lr: expected a value above 0, because algorithm.name = "{a.name}" trains a critic, found 0'
    if a.needs_teacher:
        folder = config.teacher.hf_assets_path
        yield from _check_folder(config, shape, "teacher", folder, f'algorithm.name = "{a.name}"')
    if a.needs_critic and config.critic.hf_assets_path:
        yield from _check_folder(config, shape, "critic", config.critic.hf_assets_path, "")
    if a.kind == "rl" and config.task.reward == "model":
        folder = config.reward_model.hf_assets_path
        yield from _check_folder(config, shape, "reward_model", folder, 'task.reward = "model"')
    if config.samples_rollouts and config.eval.size and config.task.reward == "model" and not config.task.eval_reward:
        why = 'because task.reward is "model" (eval.size = 0 disables evaluation)'
        yield f'task.eval_reward: expected a reward for the held-out answers, {why}, found ""'


def _check_folder(config: Config, shape: ModelShape, role: str, folder: str, why: str) -> Iterator[str]:
    key = f"{role}.hf_assets_path"
    if not folder:
        yield f'{key}: expected a Hugging Face folder, required by {why}, found ""'
        return
    try:
        found = shape_of_folder(folder, key)
        vocabulary = TextTokenizer.load(Path(folder)).tokenizer.get_vocab()
    except Exception as error:  # tokenizers raises Exception itself
        yield str(error) if key in str(error) else f"{key}: expected a tokenizer, found {error}"
        return
    misfit = (found.head == "value") != (role == "reward_model") and role != "critic"
    new_head = role == "critic" and found.head == "lm"
    yield from check_weights(Path(folder), key, None if misfit else found, head=not new_head)
    if misfit:
        wanted = "a reward model (*ForSequenceClassification)" if role == "reward_model" else "a language model"
        yield f"{key}: expected {wanted}, found another kind of model in {folder}"
    if role == "teacher" and config.teacher.mesh == "trainer" and found != shape:
        yield 'teacher.mesh: expected "own", because teacher and policy differ in shape, found "trainer"'
    if role == "critic" and replace(found, head=shape.head, tied=shape.tied) != shape:
        yield f"{key}: expected the policy's shape, found another shape in {folder}"
    with policy_tokenizer(config) as own:
        ours = vocabulary if own is None else own.tokenizer.get_vocab()
    if ours != vocabulary:
        yield (
            f"{key}: expected the policy's tokenizer, found another in {folder}: the same token ids would mean "
            f"different text ({len(ours)} and {len(vocabulary)} entries)"
        )


def shape_of_role(config: Config, role: str) -> ModelShape | None:
    """Return the shape of a role that may differ from the policy's; None for other roles and for unusable folders."""
    folders = {"teacher": config.teacher.hf_assets_path, "reward_model": config.reward_model.hf_assets_path}
    with suppress(ValueError):
        return shape_of_folder(folders[role], f"{role}.hf_assets_path") if role in folders else None
    return None
