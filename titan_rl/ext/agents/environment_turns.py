"""The turns of one rollout: its session samples each once; later processes are answered from memory."""

import asyncio
from collections.abc import Awaitable, Callable

from titan_rl.ext.agents.environment_process import EnvironmentProcess, Episode, ProcessLost, TurnNews
from titan_rl.ext.agents.episode_news import Answer, Ask, Contexts, Line
from titan_rl.wire.sessions import DriverLost, LimitReached, Outcome, Session


class TurnScript:
    def __init__(self, session: Session, in_step: Callable[[Episode], Awaitable[None]] | None) -> None:
        """`in_step` waits for the other rollouts before a turn is sampled."""
        self._session, self._in_step = session, in_step
        self._answers: dict[int, tuple[Ask, Answer]] = {}  # by turn

    async def play(self, process: EnvironmentProcess, episode: Episode) -> Outcome:
        """Answer a rollout's turns in a process until it ends there."""
        prompt = self._session.prompt
        contexts = Contexts(prompt.tokens, prompt.images)
        sampling: dict[int, asyncio.Task[None]] = {}
        failed: list[Exception] = []

        async def answer(ask: Ask, line: Line) -> None:
            reply: Answer | None = None
            try:
                reply = await self._answer(ask, line, episode)
            except Exception as error:  # it ends the rollout, or the run
                failed.append(error)
                episode.fail(error)
            finally:
                sampling.pop(ask.turn, None)
                sampled = None if reply is None or reply.over is not None else reply.tokens
                contexts.close(line, None if sampled is None else ask.turn, sampled or ())
            if reply is not None:
                process.answer(episode, reply._replace(id=episode.id))

        def take(news: TurnNews) -> None:
            if isinstance(news, Ask):
                line = contexts.open(news.after, news.kept, news.new, news.images)
                sampling[news.turn] = asyncio.create_task(answer(news, line))
            elif (task := sampling.get(news.turn)) is not None:
                task.cancel()

        try:
            return await episode.listen(take)
        except ProcessLost:
            if sampling:  # the next process is answered from memory
                await asyncio.wait(list(sampling.values()))
            if failed:
                raise failed[0] from None
            raise
        finally:
            for task in sampling.values():
                task.cancel()
            if sampling:
                await asyncio.wait(list(sampling.values()))

    async def _answer(self, ask: Ask, line: Line, episode: Episode) -> Answer:
        if (earlier := self._answers.get(ask.turn)) is None:
            if self._in_step is not None:
                await self._in_step(episode)
            answer = await _sampled(self._session, ask, line)
            self._answers[ask.turn] = (ask, answer)
            return answer
        earlier_ask, answer = earlier
        if earlier_ask[1:] != ask[1:]:
            raise DriverLost(
                f"turn {ask.turn} differs when it is replayed: the environment is not a function of its seed"
            )
        return answer


async def _sampled(session: Session, ask: Ask, line: Line) -> Answer:
    try:
        completion = await session.sample(line.tokens, max_new_tokens=ask.most, seat=ask.seat, images=line.images)
    except LimitReached as limit:
        return Answer(-1, [], "abort", limit.status, ask.turn)
    logprobs = completion.logprobs if ask.logprobs else ()
    return Answer(-1, completion.tokens, completion.finish, None, ask.turn, logprobs)
