"""Images that a seed draws, in a run's folder, and prompts that have them."""

import hashlib
import json
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from titan_rl.ext.vision.pixels import placeholders_of
from titan_rl.wire.types import ImagePlace


def draw_image(directory: Path, seed: int, *, sides: tuple[int, int] = (56, 56)) -> str:
    """Write an image of random squares, and return its name: the SHA-256 of the file."""
    random = np.random.default_rng(seed)
    small = random.integers(0, 256, (4, 4, 3), dtype=np.uint8)
    written = BytesIO()
    Image.fromarray(small).resize(sides, Image.Resampling.NEAREST).save(written, "PNG")
    name = hashlib.sha256(written.getvalue()).hexdigest()
    directory.mkdir(parents=True, exist_ok=True)
    (directory / name).write_bytes(written.getvalue())
    return name


def prompt_of(folder: Path, texts: list[str]) -> list[int]:
    """Return the tokens of texts with an image between each two."""
    from titan_rl.ext.vision.tiny_folder import AROUND, WHOLE
    from titan_rl.text.tokenizer import TextTokenizer

    text, placeholders = TextTokenizer.load(folder), placeholders_of(str(folder))
    around, whole = text.encode(AROUND), text.encode(WHOLE)
    image = [*around, *whole, *[placeholders.token] * placeholders.run, *around]
    tokens = [*text.opening, *text.encode(texts[0])]
    for rest in texts[1:]:
        tokens += [*image, *text.encode(rest)]
    return tokens


def places_of(folder: Path, tokens: list[int], names: Sequence[str]) -> tuple[ImagePlace, ...]:
    """Return where images begin: at the runs of placeholders, of which none was sampled."""
    placeholders = placeholders_of(str(folder))
    first = np.flatnonzero(np.asarray(tokens) == placeholders.token)[:: placeholders.run].tolist()
    return tuple(ImagePlace(name, begin) for name, begin in zip(names, first, strict=True))


def transformers_model(folder: Path) -> Any:
    import torch
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()


def transformers_logprobs(
    model: Any, folder: Path, directory: Path, tokens: list[int], answer: list[int], images: Sequence[ImagePlace]
) -> Any:
    """Return transformers' log-probs of an answer. A sampled placeholder is embedded as any token: transformers itself
    would look for its image."""
    import torch
    from transformers import AutoImageProcessor

    ids, read = torch.tensor([tokens + answer]), model.get_input_embeddings()
    embedded = read(ids)
    if images:
        files: Any = [[Image.open(directory / name) for name, _ in images]]
        pixels = AutoImageProcessor.from_pretrained(folder)(files, return_tensors="pt")
        features = model.get_image_features(**pixels).pooler_output.flatten(0, 1)
        run = placeholders_of(str(folder)).run
        at = [place for _, begin in images for place in range(begin, begin + run)]
        embedded = embedded.clone()
        embedded[0, at] = features
    logits = model(inputs_embeds=embedded).logits[0, len(tokens) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, ids[0, len(tokens) :, None])[:, 0]


def as_smolvlm(folder: Path) -> None:
    """Make an Idefics 3 a SmolVLM, whose tensors have the same names."""
    config = json.loads((folder / "config.json").read_text())
    vision = config["vision_config"] | {"model_type": "smolvlm_vision"}
    changes = {"model_type": "smolvlm", "architectures": ["SmolVLMForConditionalGeneration"], "vision_config": vision}
    (folder / "config.json").write_text(json.dumps(config | changes))
    for name in ("preprocessor_config.json", "processor_config.json"):
        text = (folder / name).read_text()
        (folder / name).write_text(text.replace("Idefics3", "SmolVLM"))
