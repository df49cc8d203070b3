"""The user's side of a multi-turn rollout.

    reset(row) -> observation
    step(reply) -> observation, reward, done, info      until done
    close()

An environment is a class, one instance per rollout. Its constructor and `reset` may also take prompt, answer and seed,
by keyword; `close` is optional. Its methods are async or plain. A plain method runs on a thread, so it may block; an
async one must not block. `tools`, a sequence of functions, is optional: calls are answered without `step`. A class
without `step` is a set of tools: the policy may call its public methods, and its `get_reward()` scores the rollout when
the policy answers without a call.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from titan_rl.ext.agents.tools import IMAGE_PARTS, ToolCall
from titan_rl.tasks.user_code import shortened
from titan_rl.text.template import Message
from titan_rl.wire.sessions import Status
from titan_rl.wire.types import Finish

Observation = str | Message | Sequence[Message] | None
"""Text, one message or several, or the parts of one, which the policy reads next. None or "": nothing."""
PARTS = ("text", *IMAGE_PARTS)


@dataclass(frozen=True, slots=True)
class Reply:
    """One turn of the policy.

    >>> Reply("?347*862", [32, 10, 11, 14, 18, 15, 13, 9, 2], "stop")
    """

    text: str
    tokens: Sequence[int]  # as sampled, with the token that ended the turn
    finish: Finish  # "length": the turn was cut off
    calls: Sequence[ToolCall] = ()
    problem: str = ""  # why `text` has calls that cannot be read
    message: Message = field(default_factory=dict)  # the turn as a chat message


@dataclass(frozen=True, slots=True)
class Step:
    """An environment's answer to a reply. `step` may return the plain tuple instead."""

    observation: Observation = None
    reward: float | None = 0.0  # this turn's. None in the last turn: task.reward judges the rollout
    done: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)
    """Its numbers are summed over the rollout and logged. "rewards" may be a mapping with the reward's components, and
    "feedback" a text about the rollout so far (algorithm.teacher_context)."""
    status: Status = "completed"  # why the rollout ended, if it is done


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one rollout."""

    max_turns: int
    max_tokens: int  # sampled and read after the prompt; 0: only the model's length
    turn_seconds: float  # longest call into the user's code
    rollout_seconds: float


class EpisodeOver(Exception):
    """The rollout has reached a limit. A rollout function may catch it to return a reward."""

    def __init__(self, status: Status) -> None:
        super().__init__(status)
        self.status: Status = status


def as_step(found: object, name: str) -> Step:
    """Return the value of `step` as a Step: it is one, or has its first four fields, or Gymnasium's five."""
    if isinstance(found, tuple) and len(found) == 5:
        observation, reward, terminated, truncated, info = found
        found = (observation, reward, bool(terminated) or bool(truncated), info)
    if isinstance(found, tuple) and len(found) == 4:
        found = Step(*found)
    if not isinstance(found, Step):
        raise TypeError(f"{name}: expected step to return (observation, reward, done, info), found {shortened(found)}")
    if not isinstance(found.info, Mapping):
        raise TypeError(f"{name}: expected a mapping as the info of a step, found {shortened(found.info)}")
    reward = None if found.reward is None else finite(found.reward, f"{name}: the reward of a step")
    return Step(found.observation, reward, bool(found.done), found.info, found.status)


def finite(value: Any, what: str) -> float:
    """Return a finite number as a float: also one of numpy."""
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{what}: expected a number, found {shortened(value)}") from error
    if isinstance(value, str | bytes) or not math.isfinite(number):
        raise ValueError(f"{what}: expected a finite number, found {shortened(value)}")
    return number


def messages_from(observation: Observation) -> list[Message]:
    """Return an observation as messages. Text becomes a user's message."""
    if not observation:
        return []
    if isinstance(observation, str):
        return [{"role": "user", "content": observation}]
    found: Any = observation
    messages = list(found) if isinstance(found, Iterable) and not isinstance(found, Mapping) else [found]
    if all(isinstance(each, Mapping) and "type" in each and "role" not in each for each in messages):
        return [{"role": "user", "content": [dict(each) for each in messages]}]
    if bad := [each for each in messages if not (isinstance(each, Mapping) and isinstance(each.get("role"), str))]:
        raise TypeError(f'observation: expected text or messages with a "role", found {shortened(bad[0])}')
    return [dict(each) for each in messages]


def text_of(observation: Observation) -> str:
    """Return an observation as text, for a policy without a chat template."""
    if isinstance(observation, str):
        return observation
    return "".join(str(part["text"]) for message in messages_from(observation) for part in parts_of(message))


def parts_of(message: Message) -> list[dict[str, Any]]:
    """Return the parts of a message, texts and images."""
    content = message.get("content") or ""
    if isinstance(content, list) and all(isinstance(part, Mapping) and part.get("type") in PARTS for part in content):
        return content
    return [{"type": "text", "text": str(content)}]
