"""Environments that show pictures, for system tests."""

import random
from base64 import b64encode
from collections.abc import Mapping
from io import BytesIO
from typing import Any

from PIL import Image

from titan_rl.ext.vision.find_square import FindSquare, drawn

Parts = list[dict[str, Any]]


class Pictures(FindSquare):
    """Shows pictures in all ways that there are, from the first turn on."""

    def reset(self, answer: str, row: Mapping[str, Any]) -> Any:
        super().reset(answer, row)
        kind = row["seed"] % 3
        self._silent = kind == 0
        if self._silent:
            return "no picture?"
        picture = drawn(1, self._chance)
        shown: Any = (
            Image.open(BytesIO(picture)) if kind == 1 else f"data:image/png;base64,{b64encode(picture).decode()}"
        )
        return [{"type": "image", "image": shown}]

    def step(self, reply: Any) -> tuple[Any, float, bool, dict[str, Any]]:
        observation, _, done, info = super().step(reply)
        if self._silent:
            observation = "same?"
        return observation, sum(reply.tokens) % 7 / 7, done, info


class Torn(FindSquare):
    """Shows half of a picture's file in some rollouts of a group."""

    def reset(self, answer: str, row: Mapping[str, Any], seed: int = 0) -> None:
        super().reset(answer, row)
        self._torn = random.Random(seed).random() < 0.3

    def step(self, reply: Any) -> tuple[Any, float, bool, dict[str, Any]]:
        found = super().step(reply)
        if self._torn and isinstance(found[0], list):
            found[0][0]["image"] = found[0][0]["image"][:99]
        return found


class Camera:
    """Has a tool that takes a picture."""

    def __init__(self, row: Mapping[str, Any]) -> None:
        self._chance = random.Random(row["seed"])

    def picture(self) -> Parts:
        """Take a picture."""
        return [{"type": "image", "image": drawn(2, self._chance)}]
