"""Environments with the shapes of other packages, which are not installed here. Only the standard library is imported,
so another Python can import them too."""

import asyncio
import os
import sys
import time
from dataclasses import dataclass, field
from typing import Any, ClassVar


class Discrete:
    def __init__(self, n: int, start: int = 0) -> None:
        self.n, self.start = n, start


class Walk:
    """Gymnasium: walk right to 3. The seed decides where to begin."""

    action_space = Discrete(2)
    metadata: ClassVar = {"render_modes": ["ansi"]}

    def __init__(self, render_mode: str | None = None, goal: int = 3) -> None:
        self.render_mode, self._goal, self._at = render_mode, goal, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        self._at = (seed or 0) % 2
        return self._at, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        self._at += 1 if action else -1
        return (
            self._at,
            float(self._at == self._goal),
            self._at == self._goal,
            self._at < -2,
            {"at": self._at, "x": "y"},
        )

    def render(self) -> str:
        return "".join("\x1b[41mo\x1b[0m" if at == self._at else "." for at in range(self._goal + 1))

    def close(self) -> None: ...


class Riddle:
    """SkyRL-gym: answers are rewarded, the last of `max_turns` ends it."""

    def __init__(self, env_config: Any, extras: dict[str, Any] | None = None) -> None:
        self.turns, self.max_turns = 0, env_config.get("turns", 2)
        self.truth = (extras or {})["reward_spec"]["ground_truth"]

    def init(self, prompt: list[dict[str, str]]) -> tuple[list[dict[str, str]], dict[str, Any]]:
        return [*prompt, {"role": "user", "content": "+"}], {}

    def step(self, action: str) -> dict[str, Any]:
        self.turns += 1
        right = action == self.truth
        done = right or self.turns >= self.max_turns
        observations = [] if done else [{"role": "user", "content": "no"}]
        return {"observations": observations, "reward": float(right), "done": done, "metadata": {"tries": 1}}

    def close(self) -> None: ...

    def get_metrics(self) -> dict[str, Any]:
        return {"steps": self.turns}


@dataclass
class MessageStepResult:
    reward: float
    episode_done: bool
    next_messages: list[dict[str, Any]]
    metrics: dict[str, float] = field(default_factory=dict)


class Echo:
    """Tinker: a MessageEnv. After "b" it forgets the conversation."""

    def __init__(self, question: str, other: str = "") -> None:
        assert not other, "only required parameters are columns"
        self._said: list[dict[str, Any]] = [{"role": "user", "content": question}]

    async def initial_observation(self) -> list[dict[str, Any]]:
        return self._said

    async def step(self, message: dict[str, Any]) -> MessageStepResult:
        await asyncio.sleep(0)
        said = message["content"]
        self._said = [*self._said, message, {"role": "user", "content": f"={said}"}]
        if said == "b":
            self._said = [{"role": "user", "content": "again"}]
        return MessageStepResult(0.5, said == "c", self._said, {"letters": float(len(said))})


class Number:
    """TextArena: guess it."""

    def reset(self, num_players: int, seed: int | None = None) -> None:
        assert num_players == 1, "The number of players has to be 1"
        self._secret, self._over = str(seed), False

    def get_observation(self) -> tuple[int, Any]:
        return 0, [(0, "mine", 2), (-1, "guess", 1), (-1, "again", 1)]

    def step(self, action: str) -> tuple[bool, dict[str, Any]]:
        self._over = action == self._secret
        return self._over, {"turns": 1}

    def close(self) -> tuple[dict[int, float], dict[int, dict[str, Any]]]:
        return {0: float(self._over)}, {}


class Increment:
    """TRL's environment_factory: methods are tools, columns are keywords, and the text of `reset` ends the prompt."""

    def reset(self, start: int, **columns: Any) -> str:
        self._count = start
        return f" from {start}"

    def increment(self, step: int) -> int:
        """Add to the counter.

        Args:
            step: How much.
        """
        if step < 0:
            raise ValueError("only upwards")
        self._count += step
        return self._count

    def get_reward(self) -> float:
        return float(self._count)


class Unruly:
    """Acts as its row demands."""

    def reset(self, row: dict[str, Any]) -> str:
        self._row = row
        print("no answer of ours")
        return sys.executable

    def step(self, reply: Any) -> tuple[str, float, bool, dict[str, Any]]:
        match self._row["does"]:
            case "raise":
                raise LookupError("as asked")
            case "exit":
                os._exit(7)
            case "block":
                time.sleep(self._row["seconds"])
        return "", 1.0, True, {}


class Raises(Unruly):
    def reset(self, row: dict[str, Any]) -> str:
        return super().reset({"does": "raise"})


class Selfish(Unruly):
    async def step(self, reply: Any) -> tuple[str, float, bool, dict[str, Any]]:  # type: ignore[override]
        return super().step(reply)


async def with_policy(policy: Any) -> float:
    return 0.0


async def agent(row: dict[str, Any], base_url: str, api_key: str) -> dict[str, Any]:
    return {"reward": 1.0, "python": 1, "url": base_url.startswith("http://127.0.0.1")}
