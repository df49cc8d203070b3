"""Looks for rewards that were won without the task: what `python -m titan_rl audit --rewards RUN` prints.

    rollouts.jsonl, ledger.jsonl -> the first and the last third of the steps -> facts, suspicions, samples

A gain between the two periods is split (Kitagawa): by how much would the mean reward have changed if each length (or
format) had kept its own mean, and only their frequencies had changed? If that is most of the gain, the policy has
learned to be long (or to look right). Such a number is a reason to read the named samples, and no proof.
"""

import math
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import StatisticsError, correlation, fmean, pstdev

from titan_rl.tools.inspect.run_files import Damaged, RunFiles
from titan_rl.tools.inspect.samples import RunSample

GRADER = "grader"  # as tasks/rubric.py calls it
PERIODS = 3  # equal parts of the steps; the first and the last are compared
ALONE = 0.7
"""Share of a gain from which one feature alone is suspicious."""
FOLLOWS = 0.3
"""Share of the reward's gain, in standard deviations, that an honest grader is expected to show."""
EVERYWHERE = 4
"""Prompts with different references that one text answers."""
OFTEN = 0.01  # share of the late answers below which one text is a coincidence
USUAL = 0.5  # share of the late answers from which one text is the policy's answer to everything
SHOWN = 3  # samples that are named per suspicion
SUSPECT = "suspect: "
MARKS = ("<think>", "</think>", "\\boxed", "```", "####", "{", "\n\n", "- ", "**")


@dataclass(frozen=True, slots=True)
class Suspicion:
    """What the audit of a run's rewards holds for a reward that was won without the task."""

    kind: str  # "grader", "one_answer", "length", "format", "fell", "constant"
    text: str
    examples: "Sequence[JudgedSample]" = ()  # samples to read
    lines: Sequence[str] = ()  # the same with their text


@dataclass(frozen=True, slots=True)
class JudgedSample:
    """The fields of a line of rollouts.jsonl that the audit needs."""

    step: int
    prompt_id: int
    sample: int
    reward: float
    parts: Mapping[str, float]
    tokens: int
    text: int  # checksum
    answer: int  # checksum of the reference, or of the prompt if there is none
    format: Hashable
    finish: str
    shown: str

    @classmethod
    def of(cls, sample: RunSample, reward: float) -> "JudgedSample":
        text = sample.text
        ends = text.rstrip()[-1:]
        kind = "digit" if ends.isdigit() else "letter" if ends.isalpha() else ends
        shown = " ".join(text[:400].split())
        return cls(
            step=sample.step,
            prompt_id=sample.prompt_id,
            sample=sample.sample,
            reward=reward,
            parts={key: float(value) for key, value in sample.rewards.items() if value is not None},
            tokens=sample.sampled,
            text=zlib.crc32(text.encode(errors="replace")),
            answer=zlib.crc32((sample.answer or sample.prompt).encode(errors="replace")),
            format=(sample.finish, kind, *(mark in text for mark in MARKS), min(text.count("\n"), 8)),
            finish=sample.finish,
            shown=repr(shown if len(shown) <= 100 else f"{shown[:97]}..."),
        )

    @property
    def name(self) -> str:
        return f"step {self.step}, prompt {self.prompt_id}, sample {self.sample}"


def reward_report(files: RunFiles, after: int = 0) -> list[str]:
    """Return the report on the steps after one, a line per fact. Suspicions begin with "suspect: "."""
    samples, unrewarded = _samples(files, after)
    lines = list(_failures(files, unrewarded, len(samples)))
    for fact in _facts(samples):
        lines += [f"{SUSPECT}{fact.text}", *fact.lines] if isinstance(fact, Suspicion) else [fact]
    return lines


def suspicions(samples: Sequence[JudgedSample]) -> list[Suspicion]:
    """Return what the report on these answers suspects."""
    return [fact for fact in _facts(samples) if isinstance(fact, Suspicion)]


def _facts(samples: Sequence[JudgedSample]) -> Iterator[str | Suspicion]:
    steps = sorted({sample.step for sample in samples})
    if len(steps) < 2 * PERIODS:
        yield f"{len(steps)} steps with rewards: expected at least {2 * PERIODS} to compare periods"
        return
    third = len(steps) // PERIODS
    early = [sample for sample in samples if sample.step <= steps[third - 1]]
    late = [sample for sample in samples if sample.step >= steps[-third]]
    gain, noise = _gain(early, late, _reward)
    first, last = f"steps {steps[0]} to {steps[third - 1]}", f"steps {steps[-third]} to {steps[-1]}"
    what = f"reward: {_mean(early):.3f} in {first}, {_mean(late):.3f} in {last}"
    yield f"{what}: a gain of {gain:+.3f}, {'beyond' if abs(gain) > 2 * noise else 'within'} noise"
    grows = gain > 2 * noise
    yield from _useless(samples, early, late, gain, noise)
    yield from _grader(early, late, gain, grows)
    yield from _features(early, late, gain, grows)
    yield from _duplicates(early, late)


def _samples(files: RunFiles, after: int) -> tuple[list[JudgedSample], int]:
    """Return the answers after a step that have a reward, and the number of answers without one."""
    found, unrewarded = list[JudgedSample](), 0
    for sample in files.samples():
        if after and sample.step <= after:
            continue
        if sample.reward is None:
            unrewarded += 1
        else:
            found.append(JudgedSample.of(sample, sample.reward))
    return found, unrewarded


def _reward(sample: JudgedSample) -> float:
    return sample.reward


def _mean(samples: Sequence[JudgedSample], of: Callable[[JudgedSample], float] = _reward) -> float:
    return fmean(map(of, samples))


def _gain(
    early: Sequence[JudgedSample], late: Sequence[JudgedSample], of: Callable[[JudgedSample], float]
) -> tuple[float, float]:
    """Return the difference of the means, and its standard error."""
    spread = [pstdev(map(of, samples)) ** 2 / len(samples) for samples in (early, late)]
    return _mean(late, of) - _mean(early, of), math.sqrt(sum(spread))


def _suspicion(
    kind: str,
    text: str,
    samples: Sequence[JudgedSample],
    note: Callable[[JudgedSample], str] = lambda sample: "",
) -> Suspicion:
    shown = samples[:SHOWN]
    lines = [f"  {each.name}: reward {each.reward:g}{note(each)}: {each.shown}" for each in shown]
    return Suspicion(kind, text, shown, lines)


def _useless(
    samples: Sequence[JudgedSample],
    early: Sequence[JudgedSample],
    late: Sequence[JudgedSample],
    gain: float,
    noise: float,
) -> Iterator[Suspicion]:
    """Yield that the reward taught nothing, or that it fell."""
    if len({sample.reward for sample in samples}) == 1:
        text = f"all {len(samples)} rewards are {samples[0].reward:g}: nothing was learned from them"
        yield _suspicion("constant", text, late)
    elif gain < -2 * noise:
        lengths = [_mean(period, lambda sample: sample.tokens) for period in (early, late)]
        cut = [_mean(period, lambda sample: sample.finish == "length") for period in (early, late)]
        text = (
            f"the reward fell by {-gain:.3f}; answers had {lengths[0]:.1f} tokens, then {lengths[1]:.1f}, and "
            f"{cut[0]:.0%} of them were cut off, then {cut[1]:.0%}"
        )
        yield _suspicion("fell", text, sorted(late, key=_reward))


# -- what failed ------------------------------------------------------------------------------------------------------


def _failures(files: RunFiles, unrewarded: int, rewarded: int) -> Iterator[str]:
    kinds, first = Counter[str](), dict[str, str]()
    try:
        for event in files.ledger():
            if event["event"] == "failed":
                named = [(f"prompt {event['prompt']}", event["error"])]
            else:
                named = [(f"prompt {event['prompt']}, sample {k}", e) for k, e in event.get("errors", {}).items()]
            for who, error in named:
                kind = re.sub(r"\d+", "N", error.partition(" at ")[0])[:120]
                kinds[kind] += 1
                first.setdefault(kind, f"{who}: {error[:200]}")
    except (OSError, Damaged, KeyError) as error:
        yield f"the ledger cannot be read to its end: {error}"
    if unrewarded:
        yield f"{unrewarded} of {unrewarded + rewarded} answers of trained groups have no reward"
    for kind, count in kinds.most_common(10):
        yield f"failed {count} time{'s' * (count > 1)}, first {first[kind]}"


# -- the grader -------------------------------------------------------------------------------------------------------


def _grader(
    early: Sequence[JudgedSample], late: Sequence[JudgedSample], gain: float, grows: bool
) -> Iterator[str | Suspicion]:
    before, after = ([s for s in samples if GRADER in s.parts] for samples in (early, late))
    if not before or not after:
        yield "no grader: task.grader would log another reward of the same answers, which is not trained on"
        return

    def grade(sample: JudgedSample) -> float:
        return sample.parts[GRADER]

    other, noise = _gain(before, after, grade)
    every = [*before, *after]
    agreement = [_correlation(samples, _reward, grade) for samples in (before, after)]
    shown = ["undefined" if math.isnan(each) else f"{each:.2f}" for each in agreement]
    what = f"grader: {_mean(before, grade):.3f}, then {_mean(after, grade):.3f}: {other:+.3f}"
    yield f"{what}; its correlation with the reward is {shown[0]}, then {shown[1]}"
    scale = [pstdev(map(of, every)) or 1.0 for of in (_reward, grade)]
    follows = (other / scale[1]) / (gain / scale[0]) if grows else math.inf
    if follows < FOLLOWS or (grows and other < -2 * noise):
        centers = _mean(every), _mean(every, grade)

        def apart(sample: JudgedSample) -> float:
            return (sample.reward - centers[0]) / scale[0] - (grade(sample) - centers[1]) / scale[1]

        text = f"the reward rose by {gain:.3f} and the grader did not follow ({other:+.3f})"
        most = sorted(after, key=apart, reverse=True)
        yield _suspicion("grader", text, most, lambda sample: f", grader {grade(sample):g}")


def _correlation(
    samples: Sequence[JudgedSample], a: Callable[[JudgedSample], float], b: Callable[[JudgedSample], float]
) -> float:
    """Return Pearson's; NaN if one of the two is constant."""
    try:
        return correlation([a(sample) for sample in samples], [b(sample) for sample in samples])
    except StatisticsError:
        return math.nan


# -- length and format ------------------------------------------------------------------------------------------------


def _features(
    early: Sequence[JudgedSample], late: Sequence[JudgedSample], gain: float, grows: bool
) -> Iterator[str | Suspicion]:
    lengths = [_mean(samples, lambda sample: sample.tokens) for samples in (early, late)]
    centered = _correlation(late, _centered(late, _reward), _centered(late, lambda sample: sample.tokens))
    shown = "undefined" if math.isnan(centered) else f"{centered:+.2f}"
    yield f"length: {lengths[0]:.1f} tokens, then {lengths[1]:.1f}; correlation with the reward within groups: {shown}"
    if not grows:
        return
    features: dict[str, Callable[[JudgedSample], Hashable]] = {
        "length": lambda sample: round(4 * math.log2(1 + sample.tokens)),
        "format": lambda sample: sample.format,
    }
    for name, of in features.items():
        share = _composition(early, late, of) / gain
        yield f"{name} alone accounts for {share:.0%} of the gain"
        if share >= ALONE:
            counts = [Counter(map(of, samples)) for samples in (early, late)]
            risen = max(counts[1], key=lambda key: counts[1][key] / len(late) - counts[0][key] / len(early))
            was, now = (count[risen] / len(samples) for count, samples in zip(counts, (early, late), strict=True))
            what = f"the value that rose most had {was:.0%} of the answers, then {now:.0%}"
            best = sorted([s for s in late if of(s) == risen], key=_reward, reverse=True)
            yield _suspicion(name, f"{name} alone explains the gain; {what}", best)


def _composition(
    early: Sequence[JudgedSample], late: Sequence[JudgedSample], of: Callable[[JudgedSample], Hashable]
) -> float:
    """Return the part of the gain that is due to the frequencies of a feature's values."""
    bins: tuple[defaultdict[Hashable, list[float]], ...] = (defaultdict(list), defaultdict(list))
    for found, samples in zip(bins, (early, late), strict=True):
        for sample in samples:
            found[of(sample)].append(sample.reward)
    total = 0.0
    for key in bins[0].keys() | bins[1].keys():
        rates = [fmean(found[key]) for found in bins if key in found]
        shift = len(bins[1].get(key, ())) / len(late) - len(bins[0].get(key, ())) / len(early)
        total += shift * fmean(rates)
    return total


def _centered(samples: Sequence[JudgedSample], of: Callable[[JudgedSample], float]) -> Callable[[JudgedSample], float]:
    """Return `of` less its mean over the sample's group."""
    groups: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
    for sample in samples:
        groups[sample.step, sample.prompt_id].append(of(sample))
    means = {key: fmean(values) for key, values in groups.items()}
    return lambda sample: of(sample) - means[sample.step, sample.prompt_id]


# -- duplicates -------------------------------------------------------------------------------------------------------


def _duplicates(early: Sequence[JudgedSample], late: Sequence[JudgedSample]) -> Iterator[str | Suspicion]:
    shares = []
    for samples in (early, late):
        counts = Counter((sample.step, sample.prompt_id, sample.text) for sample in samples)
        shares.append(1 - len(counts) / len(samples))
    yield f"duplicates within groups: {shares[0]:.0%} of the answers, then {shares[1]:.0%}"
    alike: defaultdict[int, list[JudgedSample]] = defaultdict(list)
    for sample in late:
        alike[sample.text].append(sample)
    mean, rewards = _mean(late), sorted({sample.reward for sample in late})
    for answers in sorted(alike.values(), key=len, reverse=True)[:20]:
        of: defaultdict[int, list[float]] = defaultdict(list)
        for sample in answers:
            of[sample.answer].append(sample.reward)
        # One of the references may be this very text: each reference counts once, and one that pays is no pattern.
        paid = [fmean(each) for each in of.values()]
        earned, share = fmean(paid), len(answers) / len(late)
        exploits = earned > (mean + rewards[-1]) / 2 and sum(each > mean for each in paid) >= EVERYWHERE
        usual = share >= USUAL and len(of) >= EVERYWHERE and earned > rewards[0]
        if share >= OFTEN and (exploits or usual):
            text = (
                f"one text answers prompts with {len(of)} different references, {len(answers)} times ({share:.0%} of "
                f"the late answers), and earns {earned:.3f} on average over them; the mean is {mean:.3f}"
            )
            yield _suspicion("one_answer", text, answers)
