"""Adapts environments of other packages. They are recognized by their methods, so no package is imported for that.

    Gymnasium    reset(seed=, options=) -> observation, info        step(action) -> five values
    TextArena    reset(num_players=, seed=), get_observation() -> player, text    step(text) -> done, info
    OpenSpiel    new_initial_state() -> state                       apply_action(action)
    SkyRL-gym    init(prompt) -> messages, metadata                 step(text) -> {observations, reward, done, metadata}
    Tinker       initial_observation() -> messages                  step(message) -> MessageStepResult

An adapter has the methods that episodes.py describes. TRL's environment_factory needs none: a class without `step` is a
set of tools. Only the standard library is imported, because external_program.py runs this in another Python.
"""

import importlib
import inspect
import json
import random
import re
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from io import BytesIO
from typing import Any

from titan_rl.ext.agents.openenv import openenv
from titan_rl.tasks.user_code import call_user
from titan_rl.wire.user_functions import load

Message = dict[str, Any]


class Conversation(list[Message]):
    """An observation that is the whole conversation: it replaces what the policy has read so far."""


class Settings(dict[str, Any]):
    """environment.args, whose keys are attributes too, as packages expect of a config."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(name) from error


class GymnasiumText:
    """Reads text as an action of the action_space, or by the environment's own `parse_action(text)`. Text that is no
    action is answered with an error, and does not step. With render_mode "ansi" the policy reads the drawing."""

    def __init__(self, environment: Any) -> None:
        self._environment = environment
        self._drawn = getattr(environment, "render_mode", None) == "ansi"
        self._own = getattr(getattr(environment, "unwrapped", environment), "parse_action", None)

    def reset(self, task_seed: int, row: Mapping[str, Any]) -> str:
        observation, _ = self._environment.reset(seed=task_seed, options=row.get("options"))
        return self._shown(observation)

    def step(self, reply: Any) -> tuple[str, float, bool, dict[str, Any]]:
        space = getattr(self._environment, "action_space", None)
        try:
            action = self._own(reply.text) if self._own else action_of(reply.text, space)
        except ValueError as error:
            return f"error: {error}", 0.0, False, {"unreadable": 1}
        observation, reward, terminated, truncated, info = self._environment.step(action)
        return self._shown(observation), reward, bool(terminated) or bool(truncated), numbers(info)

    def close(self) -> None:
        self._environment.close()

    def _shown(self, observation: Any) -> str:
        return without_colours(str(self._environment.render())) if self._drawn else text_of(observation)


class TextArenaGame:
    """A game for one player, whose reward at the end is the rollout's, or one for environment.seats in their order.
    Games are made without wrappers: those return only the new text of a turn, wrapped ones the whole game."""

    def __init__(self, environment: Any) -> None:
        self._environment = environment
        self._player = 0  # who moves
        self._alone = True

    def reset(self, task_seed: int, seats: Sequence[str]) -> str:
        self._alone = not seats
        self._environment.reset(num_players=len(seats) or 1, seed=task_seed)
        return self._read()

    def to_move(self) -> int:
        return self._player

    def step(self, reply: Any) -> tuple[str, float, bool, dict[str, Any]]:
        done, info = self._environment.step(action=reply.text)
        if not done:
            return self._read(), 0.0, False, {}
        closed = self._environment.close()
        rewards = (closed[0] if isinstance(closed, tuple) else closed) or {}
        if self._alone:
            return "", float(rewards.get(0, 0.0)), True, numbers(info)
        return "", 0.0, True, {**numbers(info), "seats": {str(player): float(r) for player, r in rewards.items()}}

    def _read(self) -> str:
        self._player, observation = self._environment.get_observation()
        if isinstance(observation, str):
            return observation
        return "\n".join(text for sender, text, *_ in observation if sender != self._player)  # not the policy's own


class SkyRLText:
    """`get_metrics()` is logged at the end. A `postprocessed_action` is not used: sampled tokens are never changed."""

    def __init__(self, environment: Any) -> None:
        self._environment = environment

    def reset(self, messages: Sequence[Message], prompt: str) -> Any:
        conversation = list(messages) or [{"role": "user", "content": prompt}]
        replaced, _ = self._environment.init([dict(message) for message in conversation])
        length = len(conversation)
        return list(replaced[length:]) if list(replaced[:length]) == conversation else Conversation(replaced)

    def step(self, reply: Any) -> tuple[Any, float, bool, dict[str, Any]]:
        result = self._environment.step(reply.text)
        info, done = numbers(result.get("metadata")), bool(result["done"])
        if done and hasattr(self._environment, "get_metrics"):
            info |= numbers(self._environment.get_metrics())
        return list(result.get("observations") or ()), result["reward"], done, info

    def close(self) -> None:
        self._environment.close()


class TinkerMessages:
    """A MessageEnv. Its messages replace the prompt, and each of its steps returns the whole conversation. Tokens of
    earlier turns stay, unless their messages were edited."""

    def __init__(self, environment: Any) -> None:
        self._environment = environment
        self._said: list[Message] = []

    async def reset(self) -> Conversation:
        observation = await call_user(self._environment.initial_observation)
        if not (isinstance(observation, list) and all(isinstance(message, dict) for message in observation)):
            what = f"found {type(observation).__name__}: its tokens are of another tokenizer"
            raise TypeError(f"initial_observation: expected a list of messages (MessageEnv), {what}")
        self._said = list(observation)
        return Conversation(observation)

    async def step(self, reply: Any) -> tuple[Any, float, bool, dict[str, Any]]:
        message = dict(reply.message)
        result = await call_user(self._environment.step, message)
        before, whole = [*self._said, message], list(result.next_messages)
        self._said = whole
        news = whole[len(before) :] if whole[: len(before)] == before else Conversation(whole)
        return [] if result.episode_done else news, result.reward, bool(result.episode_done), numbers(result.metrics)

    async def close(self) -> None:
        for name in ("close", "cleanup"):
            if hasattr(self._environment, name):
                await call_user(getattr(self._environment, name))


def adapted(environment: Any) -> Any:
    """Return the environment itself, or an adapter with the methods that episodes.py describes."""
    if hasattr(environment, "initial_observation"):
        return TinkerMessages(environment)
    if hasattr(environment, "init") and not hasattr(environment, "reset"):
        return SkyRLText(environment)
    if hasattr(environment, "get_observation") and _takes(environment, "num_players"):
        return TextArenaGame(environment)
    if hasattr(environment, "step") and _takes(environment, "options"):
        return GymnasiumText(environment)
    return environment


def _takes(environment: Any, parameter: str) -> bool:
    try:
        return parameter in inspect.signature(environment.reset).parameters
    except (AttributeError, TypeError, ValueError):
        return False


class OpenSpielGame:
    """A game of OpenSpiel, for environment.seats in their order. Chance follows the task's seed, so that all rollouts
    of a group have the same cards. A move is one of the listed actions; another text loses the game."""

    def __init__(self, game: Any) -> None:
        self._game = game

    def reset(self, task_seed: int) -> str:
        self._random = random.Random(task_seed)
        self._state = self._game.new_initial_state()
        self._play_chance()
        return self._shown()

    def to_move(self) -> int:
        return int(self._state.current_player())

    def step(self, reply: Any) -> tuple[str, float, bool, dict[str, Any]]:
        player = self.to_move()
        by_name = {self._state.action_to_string(player, a): a for a in self._state.legal_actions()}
        if (action := by_name.get(reply.text.strip())) is None:
            return "", float(self._game.min_utility()), True, {"illegal_moves": 1}
        self._state.apply_action(action)
        self._play_chance()
        if not self._state.is_terminal():
            return self._shown(), 0.0, False, {}
        return "", 0.0, True, {"seats": {str(i): float(r) for i, r in enumerate(self._state.returns())}}

    def _play_chance(self) -> None:
        while self._state.is_chance_node():
            actions, odds = zip(*self._state.chance_outcomes(), strict=True)
            self._state.apply_action(self._random.choices(actions, odds)[0])

    def _shown(self) -> str:
        player = self.to_move()
        shows = self._game.get_type().provides_information_state_string
        seen = self._state.information_state_string(player) if shows else self._state.observation_string(player)
        moves = ", ".join(self._state.action_to_string(player, action) for action in self._state.legal_actions())
        return f"{seen}\nMoves: {moves}\n"


def openspiel(id: str, args: Mapping[str, Any], seats: Sequence[str] = ()) -> Callable[[], OpenSpielGame]:
    """Make games of OpenSpiel by their name, such as "leduc_poker"."""
    game = importlib.import_module("pyspiel").load_game(id, dict(args))
    if not game.get_type().dynamics.name == "SEQUENTIAL":
        raise ValueError(f"expected a game in which players move in turn, found {id}")
    if game.num_players() != len(seats):
        raise ValueError(f"environment.seats: expected {game.num_players()}, found {len(seats)}")
    return lambda: OpenSpielGame(game)


def gymnasium(id: str, args: Mapping[str, Any], seats: Sequence[str] = ()) -> Callable[[], Any]:
    """Make a registered environment, drawn as text if it can be."""
    package = importlib.import_module("gymnasium")
    first = package.make(id, **args)
    drawn = "ansi" in first.metadata.get("render_modes", ()) and "render_mode" not in args
    first.close()
    options = {"render_mode": "ansi", **args} if drawn else args
    return lambda: package.make(id, **options)


def textarena(id: str, args: Mapping[str, Any], seats: Sequence[str] = ()) -> Callable[[], Any]:
    package = importlib.import_module("textarena")
    with suppress(ValueError):  # there is none of that name
        package.make(f"{id}-raw", **args)
        id = f"{id}-raw"
    try:
        package.make(id, **args).reset(num_players=len(seats) or 1, seed=0)
    except AssertionError as error:
        players = f"the {len(seats)} players of environment.seats" if seats else "one player"
        more = "" if seats else "; environment.seats may list several players"
        raise ValueError(f"expected a game for {players}, found {id}: {error}{more}") from error
    return lambda: package.make(id, **args)


def skyrl(id: str, args: Mapping[str, Any], seats: Sequence[str] = ()) -> Callable[..., Any]:
    """Make a registered environment, or "module:Class"."""
    if ":" in id:
        return load(id, "environment.name")
    package = importlib.import_module("skyrl_gym")
    package.spec(id)

    def make(env_config: Settings, extras: Mapping[str, Any]) -> Any:
        return package.make(id, env_config=env_config, extras=extras)

    return make


MAKERS: dict[str, Callable[[str, Mapping[str, Any], Sequence[str]], Callable[..., Any]]] = {
    "gymnasium": gymnasium,
    "openspiel": openspiel,
    "textarena": textarena,
    "skyrl": skyrl,
    "openenv": openenv,
}
"""What makes an environment of "PREFIX:REST", by prefix."""


def action_of(text: str, space: Any) -> Any:
    """Return the action that a text means in an action space: the last integer of it for a Discrete one, JSON for
    others, the text itself without a space or for a Text one. Raise ValueError if it means none."""
    kind, text = type(space).__name__, text.strip()
    if space is None or kind == "Text":
        return text
    if kind == "Discrete":
        integers = re.findall(r"-?\d+", text)
        start, n = int(getattr(space, "start", 0)), int(space.n)
        if integers and len(integers[-1]) < 19 and start <= int(integers[-1]) < start + n:
            return int(integers[-1])
        raise ValueError(f"expected an action from {start} to {start + n - 1}")
    try:
        value: Any = json.loads(text)
        if getattr(space, "dtype", None) is not None and isinstance(value, int | float | list):
            value = importlib.import_module("numpy").asarray(value, dtype=space.dtype)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"expected an action in JSON, of {space}") from error
    if not space.contains(value):
        raise ValueError(f"expected an action of {space}")
    return value


def numbers(info: Any) -> dict[str, Any]:
    """Return the finite numbers of a mapping, "rewards", its components, and "feedback", a text."""
    if not isinstance(info, Mapping):
        return {}
    finite = {str(key): number for key, value in info.items() if (number := _number(value)) is not None}
    kinds = {"rewards": Mapping, "feedback": str}
    return finite | {key: info[key] for key, kind in kinds.items() if isinstance(info.get(key), kind)}


def _number(value: Any) -> float | None:
    if value is None or isinstance(value, str | bytes | list | tuple | Mapping):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if abs(number) < float("inf") else None


def text_of(observation: Any) -> str:
    """Return an observation as text."""
    if isinstance(observation, str):
        return observation
    if isinstance(observation, Mapping | list | tuple):
        return json.dumps(observation, default=plain)
    return str(observation)


def without_colours(drawn: str) -> str:
    """Return a drawing in which brackets stand for colours, as around the player on a board."""
    return re.sub(r"\x1b\[[0-9;]*m", "[", re.sub(r"\x1b\[0*m", "]", drawn))


def plain(value: Any) -> Any:
    """Return a value of numpy as JSON has it, and an image of Pillow's, or bytes, as a data URL; else its text."""
    if hasattr(value, "getexif"):
        file = BytesIO()
        value.save(file, "PNG")
        value = file.getvalue()
    if isinstance(value, bytes):
        return f"data:;base64,{b64encode(value).decode()}"
    return value.tolist() if hasattr(value, "tolist") else str(value)
