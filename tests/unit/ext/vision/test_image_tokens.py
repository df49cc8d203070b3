"""Prompts with images have the tokens that transformers' own processor gives them."""

import json
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from PIL import Image

from titan_rl.ext.vision import image_tokens, tiny_folder
from titan_rl.ext.vision.image_tokens import image_text, read_prompt
from titan_rl.tasks.examples import Example, RowImage
from titan_rl.text.template import ChatSettings
from titan_rl.text.tokenizer import TextTokenizer

Template = Literal["plain", "chat"]
TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' }}{% for p in m.content %}{% if p.type == 'image' %}<image>"
    "{% else %}{{ p.text }}{% endif %}{% endfor %}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SIZES = ((56, 56), (200, 60), (40, 170))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a folder whose processor cuts large images into tiles, and forget it afterwards."""
    made = tmp_path_factory.mktemp("folder")
    tiny_folder.write_tokenizer(made)
    tiny_folder.write_processor(made, 56, 4)
    file = made / "preprocessor_config.json"
    settings = json.loads(file.read_text()) | {"do_image_splitting": True, "size": {"longest_edge": 168}}
    file.write_text(json.dumps(settings))
    yield made
    image_tokens._known.clear()


def example(prompt: Any, *sizes: tuple[int, int]) -> Example:
    images = []
    for width, height in sizes:
        file = BytesIO()
        Image.new("RGB", (width, height)).save(file, "PNG")
        images.append(RowImage(f"{width}" * 32, width, height, len(file.getvalue()), file.getvalue()))
    return Example(prompt, "", where="rows.jsonl:3", images=tuple(images))


def test_tokens_are_those_of_transformers(folder: Path) -> None:
    from transformers import AutoProcessor

    processor: Any = AutoProcessor.from_pretrained(folder)
    reader = TextTokenizer.load(folder, ChatSettings(TEMPLATE))
    rng = np.random.default_rng(0)
    image_text(folder, SIZES)
    lengths = set[int]()
    for _ in range(12):
        sizes = [SIZES[i] for i in rng.integers(0, len(SIZES), rng.integers(1, 4))]
        words = ["".join(rng.choice(list("abc 12\n"), 4)) for _ in range(len(sizes) + 1)]
        plain = "<image>".join(words)
        parts = [part for word in words for part in ({"type": "image"}, {"type": "text", "text": word})][1:]
        chat = [{"role": "system", "content": "count <image>"}, {"role": "user", "content": parts}]
        images = [
            Image.open(BytesIO(each.source)) for each in example("", *sizes).images if isinstance(each.source, bytes)
        ]
        prompts: list[tuple[Any, Template]] = [(plain, "plain"), (chat, "chat")]
        for prompt, template in prompts:
            _, tokens, expanded, places = read_prompt(example(prompt, *sizes), reader, template, "")
            small = [image_text(folder, SIZES).tokens[size] for size in sizes]
            for (_, begin), image in zip(places, small, strict=True):
                assert expanded[begin : begin + len(image)] == image
            text = reader.tokenizer.decode(tokens, skip_special_tokens=False)
            if template == "chat":  # what a message spells is no image
                assert text.startswith("<|system|>count <unk>image<unk></s>")
                head = len(reader.chat.prompt(chat[:1])) - 1
                tokens, expanded = tokens[head:], expanded[head:]
                text = reader.tokenizer.decode(tokens, skip_special_tokens=False)
            theirs = processor(text=text, images=images, add_special_tokens=False)["input_ids"][0]
            assert expanded == theirs
            lengths.add(len(expanded))
    assert len(lengths) > 8, "images of other sizes have other tokens"


def test_images_of_a_column_come_before_a_text(folder: Path) -> None:
    reader = TextTokenizer.load(folder, ChatSettings(TEMPLATE))
    small = image_text(folder, SIZES).tokens[SIZES[0]]
    prompt, tokens, expanded, _ = read_prompt(example("12", SIZES[0], SIZES[0]), reader, "plain", "")
    assert prompt == "<image><image>12"
    assert expanded == [*reader.opening, *small, *small, *reader.encode("12")]
    assert len(tokens) == len(reader.opening) + 4
    (message,), *_ = read_prompt(example("12", SIZES[0]), reader, "chat", "")
    assert isinstance(message, dict)
    image, text = message["content"]
    assert image["type"] == "image"
    assert text == {"type": "text", "text": "12"}


def test_other_numbers_of_images_and_placeholders_are_refused_with_the_row(folder: Path) -> None:
    reader = TextTokenizer.load(folder, ChatSettings("{{ messages[0].content[-1].text }}"))
    cases: list[tuple[str, Template, int]] = [("<image>1", "plain", 1), ("1", "chat", 0)]
    for prompt, template, found in cases:
        match = f"rows.jsonl:3: expected 2 <image>, one for each image, found {found} in the rendered prompt"
        with pytest.raises(ValueError, match=match):
            read_prompt(example(prompt, SIZES[0], SIZES[0]), reader, template, "")


def test_a_folder_without_a_processor_is_refused(tmp_path: Path) -> None:
    tiny_folder.write_tokenizer(tmp_path)
    with pytest.raises(ValueError, match=r"model.hf_assets_path: expected a folder whose processor reads images"):
        image_text(tmp_path, [SIZES[0]])
