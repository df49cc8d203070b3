"""One environment process as a Monarch actor: thin endpoints around the loop that runs the user's code.

    begin, answer, cancel ──> EpisodeLoop (another thread) ──> take

The endpoints stay responsive while user code blocks. The process needs neither torch nor vLLM.
"""

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from monarch.actor import Actor, concurrent_endpoint

from titan_rl.actors.endpoint import fallible
from titan_rl.config.system_sections import SandboxSection
from titan_rl.ext.agents.conversation import ChatText, PlainText, ReadsImages
from titan_rl.ext.agents.episode_loop import EpisodeLoop, LoopSettings
from titan_rl.ext.agents.episode_news import Answer, Begin, Blocked, News
from titan_rl.text.template import ChatSettings
from titan_rl.text.tokenizer import TextTokenizer
from titan_rl.wire.parts import needed_part, part
from titan_rl.wire.spans import Recorded


@dataclass(frozen=True, slots=True)
class EnvironmentSettings:
    loop: LoopSettings
    tokenizer: Path  # folder
    ends: tuple[int, ...] = ()  # tokens that end a turn; empty: the tokenizer's
    chat: ChatSettings | None = None  # None: conversations are plain text
    sandbox: SandboxSection = field(default_factory=SandboxSection)
    images: str = ""  # folder of the run's images; empty: the model reads none


class Taken(NamedTuple):
    news: list[News]
    blocked: Blocked | None
    stuck: int  # rollouts that were given up, but whose code still runs


def images_of(settings: EnvironmentSettings) -> ReadsImages | None:
    """Return the reader of images, which takes seconds to import."""
    if not settings.images:
        return None
    return needed_part("images of turns", "model.vision")(settings.tokenizer, Path(settings.images))


class EnvironmentRank(Actor):
    def __init__(self, settings: EnvironmentSettings) -> None:
        self._settings = settings
        self._wake = asyncio.Event()

    @concurrent_endpoint
    @fallible
    async def start(self) -> None:
        """Import the user's environment. It may take as long as it likes: a thread does it."""
        main = asyncio.get_running_loop()

        def notify() -> None:
            main.call_soon_threadsafe(self._wake.set)

        settings = self._settings
        if configure := part("sandbox settings"):
            configure(settings.sandbox)
        images = await asyncio.to_thread(images_of, settings)
        if settings.chat is None:
            renderer = PlainText(TextTokenizer.load(settings.tokenizer), settings.ends, images)
        else:
            renderer = ChatText(TextTokenizer.load(settings.tokenizer, settings.chat), images)
        self._loop = await asyncio.to_thread(EpisodeLoop, settings.loop, renderer, notify)

    @concurrent_endpoint
    @fallible
    async def begin(self, begins: list[Begin]) -> None:
        self._loop.begin(begins)

    @concurrent_endpoint
    @fallible
    async def answer(self, answers: list[Answer]) -> None:
        self._loop.answer(answers)

    @concurrent_endpoint
    @fallible
    async def cancel(self, ids: list[int]) -> None:
        """End rollouts without news of their end."""
        self._loop.cancel(ids)

    @concurrent_endpoint
    @fallible
    async def take(self, within: float) -> Taken:
        """Wait for news, at most `within` seconds. Return all there is."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), within)
        self._wake.clear()  # before the news is read: what comes later wakes the next call
        return Taken(self._loop.take_news(), self._loop.look(), self._loop.stuck)

    @concurrent_endpoint
    @fallible
    async def spans(self) -> Recorded:
        return await self._loop.take_spans()

    @concurrent_endpoint
    @fallible
    async def running(self) -> int:
        """Return the number of rollouts whose code runs."""
        return self._loop.running + self._loop.stuck
