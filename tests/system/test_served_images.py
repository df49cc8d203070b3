"""`titan_rl serve` of a model that sees: OpenAI's client sends images, and an engine of 16 bits reads them."""

import random
from base64 import b64encode
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai import BadRequestError, OpenAI
from PIL import Image, ImageOps

from support.images import places_of, transformers_logprobs, transformers_model
from support.openai_server import serving
from titan_rl.ext.vision import tiny_folder
from titan_rl.ext.vision.kept_images import write_image
from titan_rl.ext.vision.squares import drawn

LONG = "how many squares? " * 12  # more than a block of the prefix cache, which equal beginnings share


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder.write_folder(tmp_path_factory.mktemp("seeing") / "model")


@pytest.fixture(scope="module")
def client(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    keys = {"task.template": "chat", "training.seq_len": "512"}
    keys |= {"generator.dtype": "bfloat16", "generator.kv_cache_memory_mb": "64"}
    given = [word for key, value in keys.items() for word in (f"--{key}", value)]
    log = tmp_path_factory.mktemp("serve")
    with serving(log, str(folder), "--config", "count_squares", *given) as (_, url, key):
        yield OpenAI(base_url=url, api_key=key)


def ask(client: OpenAI, *images: bytes, text: str = LONG) -> Any:
    shown: list[Any] = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{b64encode(each).decode()}"}}
        for each in images
    ]
    messages: Any = [{"role": "user", "content": [*shown, {"type": "text", "text": text}]}]
    ids = {"return_token_ids": True}
    return client.chat.completions.create(
        model="policy", messages=messages, temperature=1, seed=3, max_tokens=6, logprobs=True, extra_body=ids
    )


def test_each_answer_is_of_its_own_image(client: OpenAI, folder: Path, tmp_path: Path) -> None:
    """As transformers computes it in 32 bits. An image and its negative have equal texts, again and in one chat."""
    data, file = drawn(3, random.Random(0)), BytesIO()
    ImageOps.invert(Image.open(BytesIO(data)).convert("RGB")).save(file, "PNG")
    negative, model = file.getvalue(), transformers_model(folder)
    names = {each: write_image(tmp_path, each) for each in (data, negative)}
    found = list[tuple[list[int], list[float]]]()
    for shown in ([data], [negative], [data], [negative, data], []):
        reply = ask(client, *shown)
        (choice,) = reply.choices
        read, said = reply.prompt_token_ids, choice.token_ids
        logprobs = [each.logprob for each in choice.logprobs.content]
        images = places_of(folder, read, [names[each] for each in shown])
        wanted = transformers_logprobs(model, folder, tmp_path, read, said, images)
        np.testing.assert_allclose(logprobs, wanted.tolist(), atol=5e-2)
        found.append((said, logprobs))
    assert found[0] == found[2]
    assert abs(found[0][1][0] - found[1][1][0]) > 0.1 or found[0][0][0] != found[1][0][0]


def test_no_image_is_kept_or_downloaded(client: OpenAI) -> None:
    with pytest.raises(BadRequestError, match="expected an image as a data URL, found"):
        client.chat.completions.create(
            model="policy",
            messages=[
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}]}
            ],
        )
    with pytest.raises(BadRequestError, match="part 1 of message 1: expected a whole PNG"):
        ask(client, b"no image")
    with pytest.raises(BadRequestError, match="expected a prompt of at most 511 tokens, found"):
        ask(client, *[drawn(1, random.Random(0))] * 20)
