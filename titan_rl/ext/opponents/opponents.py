"""The policy's opponents: its own earlier adapters, which are kept in the run's folder, and adapters from elsewhere.

    cast(prompt) ── seat -> opponent, drawn by the seed ── requests name the opponent's folder
    learned_from(groups) ── who won ── weights of the next draws, Elo ratings
    keep(step) ── opponents/step-20.1a2b3c4d5e6f ── the digest of its file, which engines check

One opponent takes one seat in all episodes of a group, so that the policy's rewards are compared against the same one.
What is kept, who won and the ratings are part of a saved state: a resumed run draws the same opponents.
"""

import hashlib
import random
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

from titan_rl.batch.seats import mean_reward
from titan_rl.config.sections import Config
from titan_rl.ext.adapters.layers import PEFT_FOLDER, PEFT_WEIGHTS
from titan_rl.meshes.model_mesh import ModelMesh
from titan_rl.record.lines import must_write
from titan_rl.wire.seeds import derive
from titan_rl.wire.types import Cast, Group, Opponent, Prompt, Rollout

FOLDER = "opponents"
START, BEST, HISTORY, AGO = "start", "best", "history", "steps-ago"
OWN = (START, BEST, HISTORY)
DIGITS = 12  # of the digest in a folder's name
EVEN = 0.5  # the share of games that the policy is taken to win against an opponent that it has not met
LEAST = 0.02  # the weight of an opponent that always loses, beside 1 of one that always wins
MEMORY = 0.1  # weight of the newest group in the share of won games
FIRST_RATING = 1000.0
RATING_STEP = 16.0  # Elo's K, of a group's mean result
RATING_SCALE = 400.0  # a difference for which the stronger one is expected to score 10 times as much


def steps_ago(entry: str) -> int | None:
    """Return N of "steps-ago N", or None if an entry of the pool is another."""
    word, _, number = entry.partition(" ")
    return int(number) if word == AGO and number.isdecimal() and int(number) else None


class Opponents:
    def __init__(self, config: Config, folder: Path, trainers: ModelMesh) -> None:
        self._config, self._seed = config.opponents, config.debug.seed
        e = config.environment
        self._seats = config.opponents.seats or [s for s in e.seats if s not in {*e.frozen_seats, *e.endpoints}]
        self._folder, self._trainers = folder / FOLDER, trainers
        self._step = 0  # the newest that could be kept
        self._kept: dict[int, str] = {}  # names of folders, by step
        self._others: dict[str, Opponent] = {}  # by their entry in the pool
        self._won: dict[str, float] = {}  # share of games, by opponent
        self._rating = FIRST_RATING
        self._ratings: dict[str, float] = {}  # by opponent

    async def begin(self, step: int, state: Mapping[str, Any]) -> None:
        """Continue after a step with the state that was saved with it, and keep the adapters of that step if they are
        due. Adapters from elsewhere are copied, so that later changes of their folders are no changes of the run."""
        self._kept = {int(step): name for step, name in state.get("kept", {}).items()}
        self._won, self._ratings = dict(state.get("won", {})), dict(state.get("ratings", {}))
        self._rating = state.get("rating", FIRST_RATING)
        for entry in self._config.pool:
            if entry not in OWN and steps_ago(entry) is None:
                name = Path(entry).name.replace(".", "-")
                with self._scratch(name) as scratch:
                    shutil.copytree(entry, scratch / PEFT_FOLDER)
                    placed = self._placed(name, scratch / PEFT_FOLDER)
                self._others[entry] = Opponent(name, str(self._folder / placed), 0)
        await self.keep(step)

    @property
    def state(self) -> dict[str, Any]:
        kept = {str(step): name for step, name in self._kept.items()}
        return {"kept": kept, "won": self._won, "ratings": self._ratings, "rating": self._rating}

    async def keep(self, step: int) -> None:
        """Write the trainers' adapters, made by `step`, if they are due."""
        self._step = step
        if step in self._kept or (step % self._config.interval and self._kept):
            return
        name = f"step-{step}"
        with must_write(self._folder / name), self._scratch(name) as scratch:
            await self._trainers.export_added(str(scratch))
            self._kept[step] = self._placed(name, scratch / PEFT_FOLDER)
        self._ratings[name] = self._rating

    def cast(self, prompt: Prompt) -> Cast:
        """Return who plays in the episodes of a prompt: one opponent, or none."""
        draws = random.Random(derive(self._seed, "opponents", prompt.id))
        if draws.random() >= self._config.share:
            return {}
        pool = {opponent.name: opponent for entry in self._config.pool for opponent in self._entry(entry)}
        (name,) = draws.choices([*pool], [self._weight(name) for name in pool])
        return {draws.choice(self._seats): pool[name]}

    def cast_held_out(self, prompt: Prompt) -> Cast:
        """Return who plays in a held-out episode. Seats take turns."""
        if not (entry := self._config.held_out):
            return {}
        return {self._seats[prompt.id % len(self._seats)]: self._entry(entry)[0]}

    def learned_from(self, groups: Sequence[Group]) -> None:
        """Take note of who won. The ratings of kept adapters stay as they were when they were kept: they are what the
        policy's is measured by."""
        for group in sorted(groups, key=lambda group: group.prompt.id):
            games = [rollout for rollout in group.rollouts if rollout.opponents and rollout.valid]
            if not games:
                continue
            (name,), score = games[0].opponents.values(), fmean(map(result, games))
            rating = self._ratings.setdefault(name, FIRST_RATING)
            change = RATING_STEP * (score - 1 / (1 + 10 ** ((rating - self._rating) / RATING_SCALE)))
            self._rating += change
            if name not in {kept.partition(".")[0] for kept in self._kept.values()}:
                self._ratings[name] -= change
            self._won[name] = (1 - MEMORY) * self._won.get(name, EVEN) + MEMORY * score

    @property
    def metrics(self) -> dict[str, float]:
        """Return the policy's rating, and of each entry of the pool the rating and the share of games won against it,
        as means over those for whom it stands."""
        found = {"elo/policy": self._rating}
        for entry in self._config.pool:
            names, label = [opponent.name for opponent in self._entry(entry)], Path(entry).name.replace(" ", "-")
            found[f"elo/{label}"] = fmean(self._ratings.get(name, FIRST_RATING) for name in names)
            if met := [self._won[name] for name in names if name in self._won]:
                found[f"won_against/{label}"] = fmean(met)
        return found

    def _weight(self, name: str) -> float:
        """Return how often an opponent is met, relative to others."""
        if self._config.weighting == "even":
            return 1.0
        return max((1 - self._won.get(name, EVEN)) ** 2, LEAST)

    def _entry(self, entry: str) -> list[Opponent]:
        """Return those for whom an entry of the pool stands now."""
        if entry in self._others:
            return [self._others[entry]]
        steps = sorted(self._kept)
        if entry == HISTORY:
            return [self._own(step) for step in steps[-self._config.history :]]
        if entry == BEST:
            return [self._own(max(steps, key=lambda step: self._ratings[f"step-{step}"]))]
        ago = steps_ago(entry)
        early = [step for step in steps if ago and step <= self._step - ago]
        return [self._own(early[-1] if early else steps[0])]

    def _own(self, step: int) -> Opponent:
        return Opponent(f"step-{step}", str(self._folder / self._kept[step]), step)

    @contextmanager
    def _scratch(self, name: str) -> Iterator[Path]:
        """Yield a folder that nothing reads, beside the kept ones. A killed run leaves it to the next one."""
        scratch = self._folder / f".{name}.new"
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        try:
            yield scratch
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def _placed(self, name: str, whole: Path) -> str:
        """Rename a whole folder of adapters, once, and return its new name, which ends with the digest of its file. One
        that is there already, as after a resume, stays."""
        digest = hashlib.sha256((whole / PEFT_WEIGHTS).read_bytes()).hexdigest()[:DIGITS]
        final = self._folder / f"{name}.{digest}"
        if not final.exists():
            whole.rename(final)
        return final.name


def result(rollout: Rollout) -> float:
    """Return 1 if the policy won against the rollout's opponent, 0 if it lost, else 0.5: by the rewards of both, or by
    the sign of the policy's if the opponent has none."""
    own = mean_reward(reward for seat, reward in rollout.seats.items() if seat not in rollout.opponents)
    (seat,) = rollout.opponents
    other = rollout.seats.get(seat) or 0.0
    return 0.5 + 0.5 * (own > other) - 0.5 * (own < other)
