"""Plays one rollout: the policy's turns and the environment's, until one of them or a limit ends it.

play ── reset, step ──> environment        a user's rollout function
  └──── observe ──> Policy ── ask ──> the controller, which samples
"""

from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from titan_rl.ext.agents.adapters import Conversation
from titan_rl.ext.agents.conversation import Delta, Renderer, without_text
from titan_rl.ext.agents.environment_calls import make_environment, offered_by, reset_environment, tools_of
from titan_rl.ext.agents.episodes import (
    EpisodeOver,
    Limits,
    Observation,
    Reply,
    Step,
    as_step,
    finite,
    messages_from,
)
from titan_rl.ext.agents.tools import Schema, Toolbox
from titan_rl.tasks.user_code import call_user
from titan_rl.text.template import Message
from titan_rl.wire.sessions import Outcome, Status
from titan_rl.wire.types import Finish, Prompt
from titan_rl.wire.user_functions import keywords_of

NOTHING: Mapping[str, Any] = {}


class Sampled(NamedTuple):
    tokens: list[int]
    finish: Finish
    turn: int = 0  # its number in the rollout
    logprobs: Sequence[float] = ()  # if they were asked for


class Asks(Protocol):
    def __call__(
        self, delta: Delta, most: int | None, /, *, after: int | None = None, logprobs: bool = False
    ) -> Awaitable[Sampled]:
        """Sample at most `most` tokens after a context: the one up to the turn `after` (None: the last one that was
        answered), changed by `delta`. Raise EpisodeOver if a limit forbids it."""
        ...


class Policy:
    """A rollout's policy, as the user's code sees it."""

    def __init__(
        self,
        prompt: Prompt,
        renderer: Renderer,
        limits: Limits,
        ask: Asks,
        note: Callable[[Message], None] | None = None,
    ) -> None:
        """`note` is called with each message of the conversation after the prompt."""
        self._prompt, self._renderer, self._limits, self._ask, self._note = prompt, renderer, limits, ask, note
        self._tokens: list[int] = list(prompt.tokens)  # up to the last sampled one
        self._tools: Sequence[Schema] = ()
        self.turns = 0
        self.spent = 0  # tokens sampled and read after the prompt
        self.messages: list[Message] = [*prompt.messages]

    async def observe(self, observation: Observation = None, tools: Sequence[Schema] = ()) -> Reply:
        """Let the policy read the observation, and return its reply. `tools` are offered in the first turn."""
        if self.turns >= self._limits.max_turns:
            raise EpisodeOver("max_turns")
        self._tools = self._tools if self.turns else tools
        whole = isinstance(observation, Conversation)
        observation = await self._renderer.named(observation)
        if whole:
            self._prompt = without_text(self._prompt, self._renderer)
            self.messages = []
        if self.turns and not whole:
            delta = self._renderer.extend(self._tokens, self.messages, observation, self._tools)
        else:
            delta = self._renderer.open(self._prompt, observation, self._tools)
        read = (
            len(delta.new) if self.turns else 0
        )  # the first turn reads the prompt, with its tools and first observation
        most = self._limits.max_tokens - self.spent - read if self._limits.max_tokens else None
        if most is not None and most <= 0:
            raise EpisodeOver("max_tokens")
        sampled = await self._ask(delta, most)
        self._tokens = [*self._tokens[: delta.kept], *delta.new, *sampled.tokens]
        self.spent += read + len(sampled.tokens)
        self.turns += 1
        reply = self._renderer.reply(sampled.tokens, sampled.finish, self._tools)
        said = [*messages_from(observation), reply.message]
        self.messages += said
        if self._note is not None:
            for message in said:
                self._note(message)
        return reply


class Score:
    """The rewards and metrics of a rollout so far."""

    def __init__(self, *, judged: bool) -> None:
        """`judged`: task.reward judges the rollout, unless a turn is rewarded."""
        self._judged = judged
        self._turns: list[float] = []
        self._final = 0.0
        self._rewards: defaultdict[str, float] = defaultdict(float)
        self._metrics: defaultdict[str, float] = defaultdict(float)
        self._feedback = ""

    def turn(self, step: Step) -> None:
        self._judged = step.reward is None
        self._turns.append(step.reward or 0.0)
        self._add(step.info)

    def final(self, reward: float, info: Mapping[str, Any] = NOTHING) -> None:
        self._judged, self._final = False, reward
        self._add(info)

    def outcome(self, status: Status, turns: int, messages: Sequence[Message], tools: Toolbox | None = None) -> Outcome:
        rewards = [*self._turns, *[0.0] * (turns - len(self._turns))]
        if rewards:
            rewards[-1] += self._final
        metrics = {**self._metrics, **(tools.metrics() if tools else {})}
        if self._judged:
            return Outcome(status, None, dict(self._rewards), (), messages, metrics, feedback=self._feedback)
        reward = sum(self._turns) + self._final
        return Outcome(status, reward, dict(self._rewards), rewards, messages, metrics, feedback=self._feedback)

    def _add(self, info: Mapping[str, Any]) -> None:
        for name, value in info.items():
            if name == "rewards" and isinstance(value, Mapping):
                for part, reward in value.items():
                    self._rewards[str(part)] += finite(reward, f"reward {part}")
            elif name == "feedback" and isinstance(value, str):
                self._feedback = value
            elif isinstance(value, int | float):
                self._metrics[str(name)] += finite(value, f"info {name}")


async def play(
    make: Callable[..., Any],
    name: str,
    policy: Policy,
    prompt: Prompt,
    seed: int,
    bounded: "Bounded",
    args: Mapping[str, Any] = NOTHING,
) -> Outcome:
    """Play one rollout in the environment that `make` returns. `bounded` runs one call into the user's code. `args` are
    environment.args."""
    offered = offered_by(prompt.row, prompt.text, prompt.answer, seed, prompt.messages, prompt.id)
    environment = await bounded(make_environment(make, name, offered, args))
    score = Score(judged=not hasattr(environment, "step"))
    try:
        step = Step(await bounded(reset_environment(environment, name, offered)))
        tools = Toolbox(tools_of(environment))  # now, because reset may choose them
        try:
            while not step.done:
                reply = await policy.observe(step.observation, tools.schemas)
                step = await bounded(answer_to(environment, tools, reply, name))
                score.turn(step)
            status = step.status
        except EpisodeOver as over:
            status = over.status
        if hasattr(environment, "get_reward"):
            score.final(finite(await bounded(call_user(environment.get_reward)), f"{name}.get_reward"))
    finally:
        if hasattr(environment, "close"):
            await bounded(call_user(environment.close))
    return score.outcome(status, policy.turns, policy.messages, tools)


async def roll_out(
    function: Callable[..., Any], name: str, players: Mapping[str, Any], prompt: Prompt, seed: int
) -> tuple[Any, Status]:
    """Run the user's `async def rollout(policy, row) -> reward | {"reward": reward, **info} | Outcome | None`. One that
    lets EpisodeOver pass has result 0. `players`: {"policy": policy}, or {"policies": by seat}."""
    offered = {**players, "row": prompt.row, "prompt": prompt.text, "answer": prompt.answer, "seed": seed}
    try:
        return await call_user(function, **keywords_of(function, offered, name)), "completed"
    except EpisodeOver as over:
        return 0.0 if "policy" in players else None, over.status


def scored(result: object, status: Status, turns: int, messages: Sequence[Message], name: str) -> Outcome:
    """Return the outcome that a function means by a reward, {"reward": reward, **info}, or None."""
    score = Score(judged=True)
    info = result if isinstance(result, Mapping) else {"reward": result}
    if info.get("reward") is not None:
        score.final(finite(info["reward"], name), {key: value for key, value in info.items() if key != "reward"})
    return score.outcome(status, turns, messages)


Bounded = Callable[[Awaitable[Any]], Awaitable[Any]]
"""Awaits a call into the user's code within its deadline."""


async def answer_to(environment: Any, tools: Toolbox, reply: Reply, name: str) -> Step:
    """Return the environment's answer to a reply: the results of its tool calls, or a step."""
    stepped = hasattr(environment, "step")
    reward = 0.0 if stepped else None
    if reply.problem and tools:
        return Step([{"role": "user", "content": f"error: {reply.problem}"}], reward)
    if reply.calls and tools:
        answers = [(call, await tools.call(call)) for call in reply.calls]
        named = [{"role": "tool", "name": c.name, "tool_call_id": c.id, "content": text} for c, text in answers]
        return Step(named, reward)
    return as_step(await call_user(environment.step, reply), name) if stepped else Step(reward=None, done=True)
