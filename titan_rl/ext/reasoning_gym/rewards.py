"""The built-in reward of reasoning-gym's problems."""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from titan_rl.ext.reasoning_gym.problems import NAME, package
from titan_rl.tasks.rewards import NUMBER, Answered
from titan_rl.wire.types import Prompt


def scored_by_gym(arguments: Mapping[str, Any], argument: Callable[..., Any]) -> Callable[[Prompt, Answered], float]:
    """The score of reasoning-gym's own scorer for a problem of task.name = "reasoning_gym". With extract = "tag" it
    reads the last <answer>...</answer>, or else the whole answer; with "number" the last number of the answer."""
    gym, extract = package(), argument(arguments, "extract", str, "tag")
    if extract not in ("tag", "number"):
        raise ValueError(f'task.reward_args: expected extract to be "tag" or "number", found {extract!r}')
    score_of = cache(gym.factory.get_score_answer_fn)

    def verify(prompt: Prompt, answer: Answered) -> float:
        if "dataset" not in prompt.row:
            raise ValueError(f'"{NAME}" judges only problems of task.name = "{NAME}"')
        found = gym.utils.extract_answer(answer.text) if "</answer>" in answer.text else answer.text.strip()
        if extract == "number":
            found = next((number[0] for number in reversed(list(NUMBER.finditer(answer.text)))), "")
        return score_of(prompt.row["dataset"])(found, prompt.row["entry"])

    return verify
