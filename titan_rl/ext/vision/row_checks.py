"""Checks of a run whose rows have images."""

from collections.abc import Iterator, Sequence

from titan_rl.config.sections import Config
from titan_rl.config.toml import as_toml
from titan_rl.ext.vision.image_tokens import image_text
from titan_rl.preflight.refusal import problem
from titan_rl.tasks.examples import Example
from titan_rl.text.tokenizer import TextTokenizer


def image_problems(config: Config, examples: Sequence[Example], tokenizer: TextTokenizer) -> Iterator[str]:
    """Yield why a run cannot read the images of these rows, and ask the processor for the tokens of all of them."""
    where = f"for the images of {examples[0].where}"
    if config.model.vision == "none":
        yield problem(config, "model.vision", f'"frozen" {where}')
        return
    if not config.rollout_code:
        yield from blind_problems(config, where)
    try:
        image_text(tokenizer.folder, [(image.width, image.height) for each in examples for image in each.images])
    except ValueError as error:
        yield str(error)


def blind_problems(config: Config, where: str) -> Iterator[str]:
    """Yield what a run uses that reads no images. `where`: the images."""
    unsupported = (
        ("record.batches", config.record.batches, "without kept batches,"),
        ("algorithm.teacher_context", config.algorithm.teacher_context, "whose teacher reads the policy's prompt,"),
        ("algorithm.name", config.algorithm.kind == "reward", "that trains no reward model,"),
    )
    for key, used, needed in unsupported:
        if used:
            section, _, name = key.partition(".")
            yield f"{key}: expected a run {needed} {where}, found {as_toml(getattr(getattr(config, section), name))}"
    for role in ("reward_model", "critic"):  # checks.py refuses a teacher
        if role in config.roles:
            yield f"{role}: expected none {where}, found one, and only the policy and its reference read images"
