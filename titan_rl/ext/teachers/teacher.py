"""The teacher of a run: its log-probs of the policy's samples, and the step's metrics about them."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from titan_rl.config.sections import Config
from titan_rl.ext.teachers.privileged import PrivilegedPrompts, aligned
from titan_rl.ext.teachers.top_tokens import of_trained, without_teacher
from titan_rl.text.tokenizer import TextTokenizer
from titan_rl.train.learner import TeacherScores
from titan_rl.wire.types import Group, Prompt, Sample


class Teacher:
    def __init__(self, config: Config, tokenizer: TextTokenizer) -> None:
        self._longest, self._top = config.training.seq_len + 1, config.algorithm.distill_top_k
        self._prompts = PrivilegedPrompts(config, tokenizer) if config.algorithm.teacher_context else None
        self._sums = Counter[str]()  # in the step so far: answers, tokens and log-probs that the teacher scored

    async def answers(
        self, samples: Sequence[Sample], groups: Sequence[Group], scores: TeacherScores
    ) -> tuple[list[np.ndarray], list[dict[str, np.ndarray]]]:
        """Return the teacher's log-probs of the samples' tokens, and side columns: its top tokens, if asked for."""
        if self._prompts is None:
            found = await scores(samples, self._top)
        else:
            found = await self._after_contexts(samples, self._prompts.samples(groups, samples), scores)
        if not self._top:
            return found, [{} for _ in samples]
        for top in (e[e["id"][:, -1] >= 0, 1:]["logprob"] for e in found):
            self._sums.update(known=len(top), mass=np.exp(top, dtype=np.float64).sum())
        logprobs = [of_trained(e[:, 0], s.mask) for e, s in zip(found, samples, strict=True)]
        return logprobs, [{"top": e[:, 1:]} for e in found]

    async def _after_contexts(
        self, samples: Sequence[Sample], privileged: Sequence[Sample | None], scores: TeacherScores
    ) -> list[np.ndarray]:
        """Return what the teacher finds after privileged contexts. A sample without one has its sampling log-probs: the
        teacher's signal is their difference, which is 0 there. Its top tokens are unknown."""
        top, sums = self._top, self._sums
        read = {i: other for i, other in enumerate(privileged) if other is not None and self.fits(other)}
        scored = await scores(list(read.values()), top) if read else []
        columns = [np.asarray(sample.columns["behaviour"], np.float64) for sample in samples]
        masks = [np.asarray(sample.mask) > 0 for sample in samples]
        found = [without_teacher(c[on], top) for c, on in zip(columns, masks, strict=True)] if top else [*columns]
        for (i, other), answer in zip(read.items(), scored, strict=True):
            teacher = of_trained(answer[:, 0], masks[i]) if top else aligned(answer, samples[i], other)
            sums.update(tokens=masks[i].sum(), gain=(teacher - columns[i])[masks[i]].sum())
            found[i] = answer if top else teacher
        too_long = sum(other is not None for other in privileged) - len(read)
        sums.update(answers=len(samples), covered=len(read), too_long=too_long)
        return found

    def supervised(self, made: Sequence[tuple[Prompt, Sample]]) -> list[Sample]:
        """Return the samples of a cold start after the teacher's prompts, where there is one that fits a row."""
        if self._prompts is None:
            return []
        more = [self._prompts.supervised(prompt, sample) for prompt, sample in made]
        return [each for each in more if each is not None and self.fits(each)]

    def fits(self, sample: Sample) -> bool:
        return len(sample.tokens) <= self._longest

    def take_metrics(self) -> dict[str, float]:
        """Return the metrics since the last call."""
        sums, self._sums, metrics = self._sums, Counter[str](), dict[str, float]()
        if answers := sums["answers"]:
            metrics = {f"distill/{name}": sums[name] / answers for name in ("covered", "too_long")}
            metrics["distill/gain"] = sums["gain"] / max(sums["tokens"], 1)
        if sums["known"]:
            metrics["distill/teacher_mass"] = sums["mass"] / sums["known"]
        return metrics
