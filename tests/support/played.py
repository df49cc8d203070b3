"""Plays rollouts in this process: an EpisodeLoop and a policy that follows a script."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from titan_rl.ext.agents.conversation import ChatText, PlainText, ReadsImages
from titan_rl.ext.agents.episode_loop import EpisodeLoop, LoopSettings
from titan_rl.ext.agents.episode_news import Answer, Ask, Begin, Contexts, Ended, News
from titan_rl.ext.agents.episodes import Limits
from titan_rl.ext.agents.players import Seats
from titan_rl.text import tokenizer as characters
from titan_rl.text.template import ChatSettings
from titan_rl.text.tokenizer import OWN_CHAT, VOCABULARY, TextTokenizer
from titan_rl.wire.sessions import Outcome
from titan_rl.wire.types import ImagePlace, Prompt

BOS, EOS = VOCABULARY["<s>"], VOCABULARY["</s>"]
CLOSE_SECONDS = 10.0
"""For an environment's loop to end. Code that blocks it for longer is left behind."""
PATIENCE = 30.0
ONE_PLAYER = Seats()
LIMITS = Limits(max_turns=8, max_tokens=0, turn_seconds=20.0, rollout_seconds=60.0)


def encoded(text: str) -> list[int]:
    return [VOCABULARY[character] for character in text]


def prompt_of(text: str, row: Mapping[str, Any] | None = None, id: int = 0, answer: str = "") -> Prompt:
    return Prompt(id, text, [BOS, *encoded(text)], answer, dict(row or {}))


class Played:
    """One loop, its news, and what the policy read in each rollout."""

    def __init__(self, loop: EpisodeLoop, wake: threading.Event, tokenizer: TextTokenizer) -> None:
        self.loop, self.tokenizer = loop, tokenizer
        self.contexts: dict[int, list[list[int]]] = {}
        self.lines: dict[int, list[tuple[list[int], list[ImagePlace]]]] = {}  # the same, with images
        self.seats: dict[int, list[str]] = {}  # the seat of each turn, in the order of requests
        self._wake = wake

    def news(self, count: int = 1, seconds: float = PATIENCE) -> list[News]:
        """Return `count` news, which must come in time."""
        found: list[News] = []
        deadline = time.monotonic() + seconds
        while len(found) < count:
            assert time.monotonic() < deadline, f"expected {count} news, found {found}"
            self._wake.wait(0.05)
            self._wake.clear()
            found += self.loop.take_news()
        return found

    def answer(self, ask: Ask, text: str) -> None:
        self.loop.answer([Answer(ask.id, [*encoded(text), EOS], "stop", turn=ask.turn)])

    def play(
        self, prompts: Sequence[Prompt], answers: Callable[[int, int], str | list[int]], end: int = EOS
    ) -> list[Outcome]:
        """Play a rollout per prompt, in which `answers(prompt, turn)` is the policy."""
        self.loop.begin([Begin(i, prompt, seed=i) for i, prompt in enumerate(prompts)])
        outcomes: dict[int, Outcome] = {}
        known = {i: Contexts(prompt.tokens, prompt.images) for i, prompt in enumerate(prompts)}
        self.lines = {i: [] for i in known}
        self.contexts, self.seats = {i: [] for i in known}, {i: [] for i in known}
        while len(outcomes) < len(prompts):
            for news in self.news():
                if isinstance(news, Ask):
                    said = answers(news.id, len(self.contexts[news.id]))
                    said = [*encoded(said), EOS] if isinstance(said, str) else said
                    line = known[news.id].open(news.after, news.kept, news.new, news.images)
                    self.lines[news.id].append((list(line.tokens), list(line.images)))
                    self.contexts[news.id].append(list(line.tokens))
                    self.seats[news.id].append(news.seat)
                    known[news.id].close(line, news.turn, said)
                    self.loop.answer([Answer(news.id, said, "stop" if said[-1] == end else "length", turn=news.turn)])
                elif isinstance(news, Ended):
                    metrics = dict(news.outcome.metrics)
                    assert metrics.pop("seconds", 0.0) >= 0
                    outcomes[news.id] = replace(news.outcome, metrics=metrics)
        return [outcomes[i] for i in range(len(prompts))]


@contextmanager
def playing(
    name: str,
    folder: Path,
    limits: Limits = LIMITS,
    concurrency: int = 16,
    chat: ChatSettings | None = None,
    python: str = "",
    seats: Seats = ONE_PLAYER,
    images: ReadsImages | None = None,
    **args: Any,
) -> Iterator[Played]:
    if not (folder / "tokenizer.json").exists():
        characters.build(folder)
    wake, tokenizer = threading.Event(), TextTokenizer.load(folder, chat or OWN_CHAT)
    loop = EpisodeLoop(
        LoopSettings(name, concurrency, limits, python=python, args=args, seats=seats),
        ChatText(tokenizer, images) if chat else PlainText(tokenizer, images=images),
        wake.set,
    )
    try:
        yield Played(loop, wake, tokenizer)
    finally:
        loop.close(CLOSE_SECONDS)
