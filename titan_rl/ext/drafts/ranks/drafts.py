"""Drafts the next tokens of samples from tokens that the engine has already, which vLLM then verifies in one step.

A draft continues an earlier occurrence of a sample's last tokens: in its own text, or in the answers of samples that
read the same prompt. Drafts decide how many steps a sample takes, and never its tokens (matched_draws.py).
"""

from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from titan_rl.actors.vllm.engine import ColumnRecorder, EngineSettings, OpenRequest
from titan_rl.ext.drafts.checks import DRAFTED, reasons_against
from titan_rl.ext.drafts.ranks.matched_draws import MatchedDraws
from titan_rl.wire.types import Request

if TYPE_CHECKING:
    import numpy as np
    from vllm import CompletionOutput

MATCHED = (8, 4, 2)  # how many last tokens of a sample are looked for, the best first
MOST_BYTES, MOST_OF_PROMPT = 1 << 26, 1 << 17  # of answers kept
MOST_NAMES = 1 << 16  # of rollouts and groups
SIZE = 4  # bytes of a token
END = array("i", [-1]).tobytes()  # between answers; no token


class Answers:
    """Tokens of answers by prompt, as bytes. The oldest go first: of a prompt, and of all prompts."""

    def __init__(self, most: int = MOST_BYTES, most_of_prompt: int = MOST_OF_PROMPT) -> None:
        self._most, self._most_of_prompt = most, most_of_prompt
        self._texts = OrderedDict[bytes, bytes]()
        self.bytes = 0

    def of(self, prompt: bytes) -> bytes:
        return self._texts.get(prompt, b"")

    def add(self, prompt: bytes, answer: bytes) -> None:
        before = self._texts.pop(prompt, b"")
        self._texts[prompt] = after = (before + answer + END)[-self._most_of_prompt :]
        self.bytes += len(after) - len(before) + (0 if before else len(prompt))
        while self.bytes > self._most:
            prompt, text = self._texts.popitem(last=False)
            self.bytes -= len(prompt) + len(text)


class Drafts(ColumnRecorder):
    """Drafts for the samples of an engine, and keeps answers if it drafts from siblings."""

    def __init__(
        self, settings: EngineSettings, samples: Mapping[str, tuple[OpenRequest, int]], *, on_cpu: bool
    ) -> None:
        why = reasons_against(
            on_cpu=on_cpu, ahead=settings.async_scheduling is True, records=settings.records, shape=settings.shape
        )
        for reason in why:
            raise ValueError(f'generator.drafts: expected "none", because {reason}, found "{settings.drafts}"')
        self._samples = samples  # by their ids in vLLM
        self._answers = Answers() if settings.drafts == "siblings" else None
        self._prompts = OrderedDict[str, bytes]()  # by the names of rollouts and groups, which several turns have
        proposer = f"{__name__}.{Proposer.__name__}"
        speculative = {"method": "custom_class", "model": proposer, "num_speculative_tokens": DRAFTED}
        self.args = {"speculative_config": speculative}

    def begin(self, llm: Any) -> None:
        runner = llm.model_executor.driver_worker.worker.model_runner
        runner.drafter.drafts = self
        runner.rejection_sampler = self._draws = MatchedDraws(runner.sampler)
        runner.effective_drafter_max_model_len += DRAFTED  # or none is drafted while any sample is this near its end
        self._batch = runner.input_batch

    @property
    def drafted(self) -> int:
        return self._draws.drafted

    def left(self, id: str, open: OpenRequest, index: int, last: "CompletionOutput | None" = None) -> None:
        if self._answers is not None and open.samples[index].tokens:
            answer = [*open.request.tokens[-MATCHED[0] :], *open.samples[index].tokens]
            self._answers.add(self._prompt(open.request), array("i", answer).tobytes())

    def propose(self, sampled: Sequence[Sequence[int]], lengths: "np.ndarray", tokens: "np.ndarray") -> list[list[int]]:
        """Return a draft for each row of the batch that has `sampled` a token in this step, no longer than the row may
        sample on."""
        drafts = list[list[int]]()
        for row, own in enumerate(sampled):
            open, _ = self._samples[self._batch.req_ids[row].partition("-")[0]]  # vLLM adds a suffix to the id
            length = int(lengths[row])
            request = open.request
            left = request.sampling.max_new_tokens - (length - len(request.tokens))
            text = tokens[row, :length].tobytes()
            drafts.append(self._draft(request, text, min(DRAFTED, left - 1)) if own and left > 1 else [])
        return drafts

    def _draft(self, request: Request, text: bytes, most: int) -> list[int]:
        answers = b"" if self._answers is None else self._answers.of(self._prompt(request))
        return next_tokens(answers, text, most) or next_tokens(text, text, most)

    def _prompt(self, request: Request) -> bytes:
        """Return the hash of the context of the rollout's first turn, or of its group's."""
        known = (self._prompts[name] for name in request.affinity if name in self._prompts)
        prompt = next(known, None) or sha256(array("i", request.tokens).tobytes()).digest()
        for name in request.affinity:
            self._prompts.setdefault(name, prompt)
        while len(self._prompts) > MOST_NAMES:
            self._prompts.popitem(last=False)
        return prompt


def next_tokens(history: bytes, text: bytes, most: int) -> list[int]:
    """Return up to `most` tokens that followed the text's last tokens in a history, which may be the text. They are no
    more than the tokens that were equal, as drafts after a short match are seldom right."""
    for matched in MATCHED:
        tail, end = text[-SIZE * matched :], len(history) - SIZE  # something follows
        found = history.rfind(tail, 0, end)
        while found > 0 and found % SIZE:  # between two tokens
            found = history.rfind(tail, 0, found + len(tail) - 1)
        if found >= 0:
            begin = found + len(tail)
            return array("i", history[begin : begin + SIZE * min(most, matched)].partition(END)[0]).tolist()
    return []


class Proposer:
    """Hands vLLM the drafts of the engine that it belongs to."""

    def __init__(self, vllm_config: Any) -> None:
        self.drafts: Drafts | None = None

    def load_model(self, model: Any) -> None:
        """Load nothing: there is no draft model."""

    def propose(
        self, sampled: list[list[int]], lengths: "np.ndarray", tokens: "np.ndarray", **_: Any
    ) -> list[list[int]]:
        assert self.drafts is not None, "Drafts.begin is called before the first step"
        return self.drafts.propose(sampled, lengths, tokens)
