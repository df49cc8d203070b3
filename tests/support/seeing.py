"""A model that sees, on both sides: an engine that takes one version of its weights after the other, and trainers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support.images import places_of, prompt_of
from titan_rl.config.sections import Config, JobSection, ModelSection, ParallelismSection, TrainingSection
from titan_rl.ext.vision import tiny_folder
from titan_rl.ext.vision.pixels import placeholders_of
from titan_rl.preflight.shapes import shape_of
from titan_rl.wire.types import IMAGES, ImagePlace

SEQ_LEN, NEW = 96, 10
TEXT: dict[str, Any] = {  # a head has 32 numbers, which vLLM's CPU kernels take
    **tiny_folder.TEXT,
    **{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "num_key_value_heads": 2},
}
KEYS: dict[str, Any] = {
    **{"model__vision": "frozen", "task__images_key": "image"},
    "task__name": "titan_rl.ext.vision.squares:counted",
}
"""Keys with which a run counts squares."""
FIRST = 4  # sequences whose gradients are compared: two without an image, and then two with one
WATCHED = [
    *("model.text_model.norm.weight", "model.connector.modality_projection.proj.weight"),
    *(f"model.vision_model.encoder.layers.0.{part}" for part in ("mlp.fc1.weight", "layer_norm1.bias")),
]
Case = dict[str, Any]  # "tokens" of a prompt, its "images", an "answer", and its "logprobs"


def cases(folder: Path, images: Sequence[str]) -> list[Case]:
    """Return prompts with no image, one and two, some of which differ in their images only."""
    one, other = images
    found = list[Case]()
    for names in ([], [one], [other], [one, other], [other, one]):
        tokens = prompt_of(folder, ["how many?", *["more"] * len(names)])
        found.append({"tokens": tokens, "images": places_of(folder, tokens, names)})
    return [*found, sampled_placeholders(folder, found[1], found[2])]


def sampled_placeholders(folder: Path, first: Case, second: Case) -> Case:
    """Return a context of two turns with an image each, in which the policy sampled a run of placeholders as long
    as an image's."""
    placeholders = placeholders_of(str(folder))
    tokens = [*first["tokens"], *[placeholders.token] * placeholders.run, 9]
    (name, begin), *_ = second["images"]
    return {
        "tokens": [*tokens, *second["tokens"]],
        "images": (*first["images"], ImagePlace(name, len(tokens) + begin)),
    }


def images_of(case: Case) -> tuple[ImagePlace, ...]:
    return tuple(ImagePlace(*each) for each in case["images"])


def sample(run: Path, folders: Sequence[Path], vision: str, prompts: list[Case]) -> dict[str, Any]:
    """Return, for the weights of each folder, the answers of an engine; and hashes of the pixels that it saw."""
    from support.synced_engine import SyncedEngine
    from titan_rl.wire.types import Request, Sampling

    synced, answers = SyncedEngine(folders[0], folders[0], images=str(run / IMAGES), vision=vision), list[list[Case]]()
    for version, folder in enumerate(folders):
        synced.take(folder, version)
        for i, each in enumerate(prompts):
            images = images_of(each)
            synced.engine.add([Request(str(i), each["tokens"], [1, 2], Sampling(NEW), images=images)])
        answers.append([])
        while synced.engine.busy:
            for done in synced.engine.step():
                assert not done.refused
                for found in done.completions:
                    answers[-1].append(prompts[int(done.id)] | {"answer": found.tokens, "logprobs": found.logprobs})
    names = sorted({name for each in prompts for name, _ in each["images"]})
    (image,) = images_of(prompts[1])
    beyond = ImagePlace(names[0], image.begin + 1)
    wrong = [
        Request(str(images), prompts[1]["tokens"], [1], Sampling(NEW), images=images)
        for images in ((beyond,), (image, image))
    ]
    synced.engine.add(wrong)
    refused = [done.refused for done in synced.engine.step()]
    return {"answers": answers, "pixels": synced.engine.pixel_sums(names), "refused": refused}


def config_of(run: Path, folder: Path, vision: Any, data: int, tensor: int) -> Config:
    return Config(
        job=JobSection(dump_folder=str(run)),
        model=ModelSection(hf_assets_path=str(folder), vision=vision),
        training=TrainingSection(seq_len=SEQ_LEN, local_batch_size=1),
        parallelism=ParallelismSection(data_parallel_shard_degree=data, tensor_parallel_degree=tensor),
    )


def score(
    out: Path, run: str, folder: str, vision: str, mesh: tuple[int, int], sequences: list[Case]
) -> dict[str, Any]:
    """Return a trainer's log-probs of answers, hashes of the pixels that it saw, and gradients of the first answers,
    which its data ranks share; export its model."""
    import torch.distributed as dist

    from titan_rl.actors.titan.model import TitanModel
    from titan_rl.batch.packing import pack, unpack
    from titan_rl.wire.types import Sample

    config = config_of(Path(run), Path(folder), vision, *mesh)
    model = TitanModel(config, shape_of(config.model), config.parallelism)
    model.begin()
    samples = [
        Sample(
            each["tokens"] + each["answer"],
            [0] * len(each["tokens"]) + [1] * len(each["answer"]),
            {},
            len(each["tokens"]),
            images=images_of(each),
        )
        for each in sequences
    ]
    batches = pack(samples, shards=1, seq_len=SEQ_LEN, rows_per_microbatch=2, pad_id=0, share=True)
    scored = unpack(batches, [[model.score(rows) for rows in batch.microbatches] for batch in batches], samples)
    exported = Path(run, "export")
    model.write(exported)
    dist.barrier()
    names = sorted({name for each in sequences for name, _ in each["images"]})
    logprobs = [row[len(each["tokens"]) :].tolist() for row, each in zip(scored, sequences, strict=True)]
    rank, each = dist.get_rank() // mesh[1], FIRST // mesh[0]
    own = samples[rank * each : (rank + 1) * each]
    packed = pack(own, shards=1, seq_len=SEQ_LEN, rows_per_microbatch=1, pad_id=0)
    placed = [model.placed(rows) for batch in packed for rows in batch.microbatches]
    for i, rows in enumerate(placed):
        model.sync_gradients(i == len(placed) - 1)
        model.backward((model.logprobs(rows, temperature=1.0)[0] * rows.mask).sum())
    model.reshard()
    gradients = {model.names[name]: parameter.grad for name, parameter in model.model.named_parameters()}
    wanted = [name for name in WATCHED if name in gradients]
    found = {name: whole(gradients[name]).flatten().tolist() for name in wanted}
    return {"logprobs": logprobs, "pixels": model.pixel_sums(names), "gradients": found}


def whole(tensor: Any) -> Any:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
