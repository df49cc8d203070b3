"""Checks of model.vision."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from titan_rl.config.sections import Config
from titan_rl.ext.vision.row_checks import blind_problems
from titan_rl.preflight.refusal import problem
from titan_rl.wire.model_shape import ModelShape

FAMILIES = ("idefics3", "smolvlm")
PROCESSOR = "preprocessor_config.json"


def problems(config: Config, shape: ModelShape, device: str) -> Iterator[str]:
    wrong, folder = partial(problem, config), Path(config.model.hf_assets_path)
    if shape.family not in FAMILIES:
        yield wrong("model.vision", f'"none", because only folders of {" and ".join(FAMILIES)} can see here')
        return
    if not (folder / PROCESSOR).is_file():
        yield f"model.vision: expected a {PROCESSOR} in {folder}, found none"
    for mesh, p in {"parallelism": config.parallelism, **{n: r.parallelism for n, r in config.roles.items()}}.items():
        if p.context_parallel_degree > 1:
            found = p.context_parallel_degree
            why = "as the places of images are in whole rows"
            yield f"{mesh}.context_parallel_degree: expected 1, {why}, found {found}"
    if config.rollout_code:
        yield from blind_problems(config, f"for images of {config.rollout_code}")
    if config.model.vision != "frozen":
        if config.lora.rank:
            yield wrong(
                "model.vision", '"frozen" with lora.rank, as adapters leave all weights of the model as they are'
            )
        if config.model.spec:
            yield wrong("model.vision", '"frozen" with model.spec, whose function chooses the trained weights')
    if config.generator.quantization != "none":
        yield wrong("generator.quantization", '"none", because it would round the vision tower too')
    if config.generator.drafts != "none":
        yield wrong("generator.drafts", '"none", because a draft does not tell images apart')
    if config.algorithm.loads_teacher:
        yield wrong("algorithm.teacher_weights", "other than a folder, whose tower may need other placeholders")
    if device == "cuda" and config.placement.kind == "colocated" and config.placement.sleep is not False:
        yield wrong("placement.sleep", "false, because an engine that sleeps loses its tower, which no sync writes")


def warnings(config: Config, shape: ModelShape, device: str) -> Iterator[str]:
    yield from ()
