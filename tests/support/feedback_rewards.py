"""Rewards that return a text beside their number, in each library's way."""

from typing import Any


def of_dict(completion: str) -> dict[str, Any]:
    return {"score": 0.5, "feedback": f"not {completion}", "seconds": 2}


def of_verl(solution_str: str) -> dict[str, Any]:
    return of_dict(solution_str)


def of_trl(prompts: Any, completions: list[str], log_extra: Any, **_: Any) -> list[float]:
    log_extra("feedback", [f"not {completion}" for completion in completions])
    return [0.5] * len(completions)
