"""A run begins if its trainers and engines see an image, and the same one."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from support.images import draw_image
from titan_rl.ext.vision import image_tokens
from titan_rl.ext.vision.image_tokens import ImageText
from titan_rl.ext.vision.sight import Sight, with_picture, write_negative
from titan_rl.train.engine_proof import Continuation
from titan_rl.wire.errors import RunError
from titan_rl.wire.types import Completion, ContextScore, ImagePlace, Prompt, Request, Sample

PROMPT, ANSWER = [2, 50, 50, 9], [4, 5, 2]


class Seeing:
    """Trainers and engines whose log-probs depend on the image, by as much as `change`."""

    def __init__(self, change: float, *, first: str, pixels: str = "same") -> None:
        self._change, self._first, self._pixels = change, first, pixels

    async def pixel_sums(self, images: list[str]) -> list[list[str]]:
        return [[f"{self._pixels} {name}" for name in images]] * 2

    def logprob(self, images: tuple[ImagePlace, ...]) -> float:
        return -1.0 + self._change * (images[0].name != self._first)

    async def generate(self, request: Request) -> list[Completion]:
        assert request.tokens == [*PROMPT, *ANSWER]
        assert request.sampling.scores_context
        scores = [ContextScore(self.logprob(request.images), 0, 0.0)] * (len(request.tokens) - 1)
        return [Completion([7], [-1.0], [0], "length", context=scores)]

    async def scores(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        return [np.array([0.0] * len(PROMPT) + [self.logprob(each.images)] * len(ANSWER)) for each in samples]


def proof(directory: Path, **sides: dict[str, Any]) -> str:
    first = draw_image(directory, 0)
    trainers, engines = (Seeing(**{"change": 0.5, "first": first, **sides.get(s, {})}) for s in ("trainers", "engines"))
    sight = Sight(
        Continuation(PROMPT, Completion(ANSWER, [-1.0] * 3, [0] * 3, "stop"), (ImagePlace(first, 1),)), directory
    )

    async def prove() -> str:
        await sight.ask_engines(engines)
        return await sight.proven(trainers, trainers.scores)

    return asyncio.run(prove())


def test_both_see(tmp_path: Path) -> None:
    assert proof(tmp_path) == "the model sees: another image changes a log-prob by 5.0e-01"


@pytest.mark.parametrize(("side", "named"), [("trainers", "trainers"), ("engines", "generators")])
@pytest.mark.parametrize("change", [0.0, 1e-7, float("nan")])
def test_a_side_that_is_blind_ends_the_run(tmp_path: Path, side: str, named: str, change: float) -> None:
    with pytest.raises(RunError, match=f"^the {named} are blind") as raised:
        proof(tmp_path, **{side: {"change": change}})
    assert "over 3 tokens" in raised.value.details


def test_sides_that_see_other_pixels_end_the_run(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="see different pixels"):
        proof(tmp_path, engines={"pixels": "other"})


def test_a_prompt_without_an_image_proves_nothing(tmp_path: Path) -> None:
    sight = Sight(Continuation(PROMPT, Completion(ANSWER, [-1.0] * 3, [0] * 3, "stop")), tmp_path)
    assert "nothing proves" in asyncio.run(sight.proven(None, None))  # pyright: ignore[reportArgumentType]


def test_a_prompt_without_an_image_may_follow_a_drawn_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = ImageText("<image>", 50, {(56, 56): [3, 50, 50, 3]})
    monkeypatch.setitem(image_tokens._known, str(tmp_path), known)
    prompt = with_picture(Prompt(0, "?", [1, 9], ""), tmp_path, tmp_path / "images")
    ((name, begin),) = prompt.images
    assert (begin, prompt.tokens) == (0, [3, 50, 50, 3, 1, 9])
    assert Image.open(tmp_path / "images" / name).size == (56, 56)


def test_a_negative_has_the_size_of_the_image(tmp_path: Path) -> None:
    name = draw_image(tmp_path, 1, sides=(40, 30))
    negative = write_negative(tmp_path, name)
    one, other = (np.asarray(Image.open(tmp_path / each)).astype(int) for each in (name, negative))
    assert (one + other == 255).all()
    assert write_negative(tmp_path, name) == negative
