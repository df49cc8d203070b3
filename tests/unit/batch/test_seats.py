"""Episodes of several players: each player learns the same as alone."""

import json
import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.judged_groups import algorithm
from titan_rl.batch.experience import minibatches, samples_of, teaches, with_advantages
from titan_rl.batch.role_means import RoleMeans
from titan_rl.batch.seats import seat_groups, tokens_digest, with_seats
from titan_rl.config.sections import AlgorithmSection
from titan_rl.wire.types import Branch, Completion, Group, Prompt, Rollout, Sample, Turn

GOLDEN = Path(__file__).parents[2] / "golden" / "prime_rae.json"
SEATS = ("black", "judge", "white")


def turn(draws: random.Random, index: int, seat: str) -> Turn:
    tokens = [draws.randrange(3, 60) for _ in range(draws.randint(1, 4))]
    logprobs = [-draws.random() for _ in tokens]
    return Turn([draws.randrange(3, 60)], Completion(tokens, logprobs, [0] * len(tokens), "stop"), 0.0, index, seat)


def episode(draws: random.Random, rewards: Mapping[str, float | None]) -> Rollout:
    """Return an episode in which the players move in any order, some of them never, one in two branches perhaps."""
    branches: list[list[Turn]] = []
    for index in range(draws.randint(2, 9)):
        seat = draws.choice([*rewards])
        own = [branch for branch in branches if branch[0].seat == seat]
        if not own or draws.random() < 0.2:
            branches.append(own_branch := [])
        else:
            own_branch = draws.choice(own)
        own_branch.append(turn(draws, index, seat))
    return Rollout([Branch(turns) for turns in branches], "", 0.0, seats=rewards)


def games(seed: int, prompts: int = 3, size: int = 4) -> list[Group]:
    """Return groups of episodes with drawn rewards; the judge is frozen."""
    draws = random.Random(seed)
    return [
        Group(
            Prompt(id, "", [1, 2], ""),
            [
                episode(draws, {"white": draws.randint(-2, 2), "black": draws.randint(-2, 2), "judge": None})
                for _ in range(size)
            ],
        )
        for id in range(prompts)
    ]


def learnt(groups: list[Group], a: AlgorithmSection) -> tuple[list[Group], list[Sample]]:
    trained = seat_groups(groups)
    return with_advantages(trained, samples_of(trained, a), a)


def numbers(sample: Sample) -> tuple[list[Any], ...]:
    columns = (np.asarray(sample.columns[name]).tolist() for name in ("behaviour", "advantage"))
    return (np.asarray(sample.tokens).tolist(), np.asarray(sample.mask).tolist(), *columns)


@pytest.mark.parametrize("credit", ["outcome", "turn"])
@pytest.mark.parametrize("advantage", ["group", "leave_one_out", "return"])
@pytest.mark.parametrize("seed", range(8))
def test_a_players_samples_are_those_of_a_run_in_which_it_is_alone(seed: int, advantage: str, credit: str) -> None:
    a = algorithm(advantage=advantage, normalize="none", credit=credit)
    groups = games(seed)
    _, together = learnt(groups, a)
    alone = list[Sample]()
    for seat in ("black", "white"):
        own = [
            replace(
                group,
                rollouts=[
                    replace(r, branches=branches, reward=r.seats[seat], seats={})
                    for r in group.rollouts
                    if (branches := [branch for branch in r.branches if branch.seat == seat])
                ],
            )
            for group in groups
        ]
        kept = [group for group in own if group.rollouts]
        alone += with_advantages(kept, samples_of(kept, a), a)[1]
    assert sorted(map(numbers, together)) == sorted(map(numbers, alone))


@pytest.mark.parametrize("seed", range(8))
def test_no_token_of_a_frozen_player_is_packed(seed: int) -> None:
    groups, a = games(seed), algorithm()
    trained, samples = learnt(groups, a)
    frozen = [b.tokens for g in groups for r in g.rollouts for b in r.branches if b.seat == "judge"]
    packed = [np.asarray(s.tokens).tolist() for s in samples]
    assert not [tokens for tokens in frozen if tokens in packed]
    assert {group.seat for group in trained} <= {"black", "white"}
    for group in with_seats(groups, trained, samples):
        for rollout in group.rollouts:
            for seat, digest in rollout.trained.items():
                own = [t.completion.tokens for b in rollout.branches if b.seat == seat for t in b.turns]
                assert digest == tokens_digest(own)
            assert "judge" not in rollout.trained


def test_a_zero_sum_game_teaches_both_players() -> None:
    def game(white: float) -> Rollout:
        turns = [Turn([3], Completion([4], [-1.0], [0], "stop"), 0.0, i, s) for i, s in enumerate(("white", "black"))]
        return Rollout([Branch([each]) for each in turns], "", 0.0, seats={"white": white, "black": -white})

    group, a = Group(Prompt(0, "", [1], ""), [game(1.0), game(-1.0)]), algorithm(normalize="none")
    trained, samples = learnt([group], a)
    assert [s.columns["advantage"][-1] for s in samples] == [-1.0, 1.0, 1.0, -1.0]
    assert len({s.sequence for s in samples}) == 4
    assert any(teaches(each, a) for each in seat_groups([group]))
    assert not group.flat
    (merged,) = with_seats([group], trained, samples)
    assert [rollout.advantage for rollout in merged.rollouts] == [0.0, 0.0]
    assert [len(part) for part in minibatches(samples, algorithm(minibatches=2), 2)] == [2, 2]


def test_groups_without_players_stay_as_they_are() -> None:
    group = Group(
        Prompt(5, "", [1], ""), [Rollout([Branch([Turn([3], Completion([4], [-1.0], [0], "stop"))])], "", 1.0)]
    )
    assert seat_groups([group]) == [group]
    assert with_seats([group], [group], []) == [group]


def test_seated_and_other_groups_of_a_step_have_different_sequences() -> None:
    mixed = [*games(0), *(replace(g, rollouts=[replace(r, seats={}) for r in g.rollouts]) for g in games(1))]
    mixed = [replace(group, prompt=replace(group.prompt, id=id)) for id, group in enumerate(mixed)]
    groups = seat_groups(mixed)
    numbered = [group.sequence(k) for group in groups for k in range(len(group.rollouts))]
    assert len(set(numbered)) == len(numbered)


@pytest.mark.parametrize("case", json.loads(GOLDEN.read_text())["cases"], ids=lambda case: case["name"])
def test_running_means_are_prime_rls(case: dict[str, Any]) -> None:
    a = algorithm(advantage="role_mean", normalize="none", role_decay=case["settings"]["decay"])
    means = RoleMeans(a.role_decay)
    for id, (rewards, expected) in enumerate(zip(case["inputs"]["reward"], case["outputs"]["advantage"], strict=True)):
        agents = case["settings"]["agents"]
        rollouts = [
            Rollout(
                [Branch([Turn([3], Completion([4], [-1.0], [0], "stop"), 0.0, i, s)]) for i, s in enumerate(agents)],
                "",
                0.0,
                seats=dict(zip(agents, of_each, strict=True)),
            )
            for of_each in zip(*rewards, strict=True)
        ]
        groups = seat_groups([Group(Prompt(id, "", [1], ""), rollouts)])
        found, _ = with_advantages(groups, samples_of(groups, a), a, role_means=means)
        by_seat = {group.seat: [rollout.advantage for rollout in group.rollouts] for group in found}
        assert [by_seat[agent] for agent in agents] == [pytest.approx(row, abs=1e-12) for row in expected]
        means.state = json.loads(json.dumps(dict(means.state)))  # a resume in the middle changes nothing
