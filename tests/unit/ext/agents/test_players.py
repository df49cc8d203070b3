"""Episodes of several players in this process: their conversations, moves and rewards."""

import asyncio
import random
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from bench import kuhn_value
from support.played import BOS, EOS, LIMITS, Played, encoded, playing, prompt_of
from titan_rl.ext.agents import kuhn, tic_tac_toe
from titan_rl.ext.agents.play import Policy
from titan_rl.ext.agents.players import Seats

HERE = "unit.ext.agents.test_players"
WHITE_BLACK = Seats(("white", "black"))
USER_AND_JUDGE = Seats(("solver", "user", "judge"), frozenset({"user", "judge"}))


async def duel(policies: Mapping[str, Policy], row: Mapping[str, Any]) -> dict[str, Any]:
    white = await policies["white"].observe("w")
    black = await policies["black"].observe(f"b{white.text}")
    again = await policies["white"].observe(black.text)
    return {"seats": {"white": 1.0, "black": -1.0}, "moves": 3, "reward": float(len(again.text))}


async def together(policies: Mapping[str, Policy], row: Mapping[str, Any]) -> dict[str, Any]:
    for _ in range(2):
        await asyncio.gather(*(policy.observe(seat[0]) for seat, policy in policies.items()))
    return {"seats": {"white": 0.5, "black": None}}


async def helped(policies: Mapping[str, Policy], row: Mapping[str, Any]) -> dict[str, Any]:
    wish = await policies["user"].observe("?")
    answer = await policies["solver"].observe(wish.text)
    mark = await policies["judge"].observe(answer.text)
    return {"seats": {"solver": float(mark.text)}}


async def forgets(policies: Mapping[str, Policy], row: Mapping[str, Any]) -> Any:
    await policies["black"].observe("b")
    return row["result"]


class Turns:
    """Players move in turn; each earns the number that it writes."""

    def __init__(self, seats: list[str]) -> None:
        self._seats, self._moved = seats, 0

    def reset(self) -> str:
        return "0"

    def to_move(self) -> object:
        return self._moved % 2 if self._moved < 2 else self._seats[self._moved % 2]

    def step(self, reply: Any) -> tuple[str, float, bool, dict[str, Any]]:
        self._moved += 1
        done = self._moved == 4
        return str(self._moved), float(reply.text), done, {"steps": 1, **({"seats": {"1": -10}} if done else {})}


def said(played: Played) -> list[tuple[str, str]]:
    """Return what each player read before its turns, without the prompt."""
    decoded = (played.tokenizer.decode(context[1:]) for context in played.contexts[0])
    return list(zip(played.seats[0], decoded, strict=True))


def test_each_player_reads_its_own_conversation_and_earns_its_own_reward(tmp_path: Path) -> None:
    with playing(f"{HERE}:duel", tmp_path, seats=WHITE_BLACK) as played:
        (outcome,) = played.play([prompt_of("")], lambda id, turn: "xyz"[turn])
        assert said(played) == [("white", "w"), ("black", "bx"), ("white", "wxy")]
    assert dict(outcome.seats) == {"white": 1.0, "black": -1.0}
    assert (outcome.reward, outcome.metrics, outcome.turn_rewards) == (1.0, {"moves": 3.0}, ())
    assert [(m["name"], m["role"], m["content"]) for m in outcome.messages] == [
        ("white", "user", "w"),
        ("white", "assistant", "x"),
        ("black", "user", "bx"),
        ("black", "assistant", "y"),
        ("white", "user", "y"),
        ("white", "assistant", "z"),
    ]


def test_players_may_move_at_the_same_time_and_a_reward_of_none_freezes_one(tmp_path: Path) -> None:
    with playing(f"{HERE}:together", tmp_path, seats=WHITE_BLACK) as played:
        (outcome,) = played.play([prompt_of("")], lambda id, turn: "a")
        assert played.seats[0] == ["white", "black"] * 2
        assert [context for _, context in said(played)] == ["w", "b", "waw", "bab"]
    assert (dict(outcome.seats), outcome.reward) == ({"white": 0.5, "black": None}, 0.5)


def test_players_that_move_together_ask_in_one_message(tmp_path: Path) -> None:
    with playing(f"{HERE}:together", tmp_path, seats=WHITE_BLACK) as played:
        from titan_rl.ext.agents.episode_news import Begin

        played.loop.begin([Begin(0, prompt_of(""), seed=0)])
        assert len(played.news()) == 2, "lockstep would otherwise sample one of them alone"


def test_a_user_and_a_judge_are_frozen(tmp_path: Path) -> None:
    with playing(f"{HERE}:helped", tmp_path, seats=USER_AND_JUDGE) as played:
        (outcome,) = played.play([prompt_of("")], lambda id, turn: ("hi", "ok", "0.5")[turn])
    assert dict(outcome.seats) == {"judge": None, "user": None, "solver": 0.5}


def test_players_in_turn_earn_the_rewards_of_their_own_steps(tmp_path: Path) -> None:
    with playing(f"{HERE}:Turns", tmp_path, seats=WHITE_BLACK) as played:
        (outcome,) = played.play([prompt_of("")], lambda id, turn: str(turn + 1))
        assert played.seats[0] == ["white", "black"] * 2
        assert [context for _, context in said(played)] == ["0", "1", "012", "123"]
    assert dict(outcome.seats) == {"white": 1.0 + 3.0, "black": 2.0 + 4.0 - 10}
    assert outcome.metrics == {"steps": 4.0}
    assert list(outcome.turn_rewards) == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize(
    ("result", "problem"),
    [
        (1.0, 'expected {"seats": {"white": reward, ...}}, a reward for each of environment.seats, found 1.0'),
        ({"seats": {"white": 1.0}}, "expected a reward of black, which had a turn, found none"),
        ({"seats": {"black": 1.0, "red": 0.0}}, "expected rewards of white, black, found one of 'red'"),
        ({"seats": {"black": float("nan")}}, "the reward of black: expected a finite number, found nan"),
        ({"seats": {"black": None}}, "expected a reward of at least one player, found none"),
    ],
)
def test_rewards_that_do_not_fit_the_players_are_named(tmp_path: Path, result: Any, problem: str) -> None:
    with playing(f"{HERE}:forgets", tmp_path, seats=WHITE_BLACK) as played:
        (outcome,) = played.play([prompt_of("", {"result": result})], lambda id, turn: "a")
    assert outcome.status == "error"
    assert problem in outcome.error


def test_a_limit_ends_the_episode_without_a_reward_for_anybody(tmp_path: Path) -> None:
    limits = LIMITS.__class__(max_turns=1, max_tokens=0, turn_seconds=20, rollout_seconds=60)
    with playing(f"{HERE}:duel", tmp_path, limits, seats=WHITE_BLACK) as played:
        (outcome,) = played.play([prompt_of("")], lambda id, turn: "a")
    assert (outcome.status, dict(outcome.seats)) == ("max_turns", {"white": 0.0, "black": 0.0})


# -- the games --------------------------------------------------------------------------------------------------------


def test_a_hand_of_kuhn_poker_is_played_by_two(tmp_path: Path) -> None:
    with playing("titan_rl.ext.agents.kuhn:play", tmp_path, seats=Seats(kuhn.SEATS)) as played:
        (outcome,) = played.play([prompt_of("", {"cards": "kq"})], lambda id, turn: [encoded("azz"[turn])[0]])
        assert said(played) == [("first", "1k"), ("second", "2qp"), ("first", "1kab")]
        assert played.contexts[0][2] == [BOS, *encoded("1ka"), EOS, *encoded("b")]
    assert dict(outcome.seats) == {"first": 2.0, "second": -2.0}


def test_kuhn_pokers_equilibrium_is_not_exploitable() -> None:
    for bluff in (0.0, 0.1, 1 / 3):
        first = {"j": bluff, "q": 0.0, "k": 3 * bluff, "jpb": 0.0, "qpb": bluff + 1 / 3, "kpb": 1.0}
        second = {"jp": 1 / 3, "qp": 0.0, "kp": 1.0, "jb": 0.0, "qb": 1 / 3, "kb": 1.0}
        strategy = {**first, **second}
        assert kuhn_value.value(strategy, strategy) == pytest.approx(-1 / 18)
        assert kuhn_value.exploitability(strategy) == pytest.approx(0.0, abs=1e-12)
        for known in ("jp", "qp", "kp", "jb", "kb"):  # where an equilibrium has no choice
            assert kuhn_value.exploitability({**strategy, known: 1 - strategy[known]}) > 0.01
    assert kuhn_value.exploitability(kuhn_value.played([])) == 1.0, "who always passes loses a chip in every hand"


def test_the_strategy_of_played_hands_is_counted() -> None:
    draws = random.Random(0)
    bets = {known: draws.random() for seat in kuhn.SEATS for known in kuhn_value.pure_strategies(seat)[0]}
    hands = list[tuple[str, str]]()
    for n in range(60_000):
        cards, moves = "".join(kuhn.DEALS[n % 6]), ""
        while moves not in kuhn.ENDS:
            moves += "b" if draws.random() < bets[cards[len(moves) % 2] + moves] else "p"
        hands.append((cards, moves))
    assert kuhn_value.played(hands) == pytest.approx(bets, abs=0.03)


def test_a_perfect_player_never_loses_tic_tac_toe() -> None:
    draws, results = random.Random(0), set[str]()
    for n in range(200):
        board, perfect = tic_tac_toe.EMPTY, tic_tac_toe.SEATS[n % 2]
        while not tic_tac_toe.over(board):
            seat = tic_tac_toe.mover(board)
            moves = tic_tac_toe.best_moves(board) if seat == perfect else tic_tac_toe.free(board)
            move = draws.choice(moves)
            board = board[:move] + seat + board[move + 1 :]
        results.add({"": "drawn", perfect: "won"}.get(tic_tac_toe.winner(board), "lost"))
    assert results == {"won", "drawn"}


def test_tic_tac_toe_is_played_by_two_and_against_a_perfect_player(tmp_path: Path) -> None:
    rows = [{"board": "x........", "opponent": "", "opponent_seat": ""}]
    rows += [{"board": tic_tac_toe.EMPTY, "opponent": "perfect", "opponent_seat": "o"}]
    prompts = [prompt_of(tic_tac_toe.shown(row["board"]), row) for row in rows]
    with playing("titan_rl.ext.agents.tic_tac_toe:TicTacToe", tmp_path, seats=Seats(tic_tac_toe.SEATS)) as played:
        own, lost = played.play(prompts, lambda id, turn: ("4253", "11111")[id][turn])
        boards = ["r23456789?", "a23u56789?", "rs3d56789?", "ab3uv6789?"]
        assert said(played) == list(zip("oxox", boards, strict=True)), "a board replaces the last"
    assert (dict(own.seats), own.metrics) == ({"x": 1.0, "o": -1.0}, {"illegal": 0.0})
    assert list(own.turn_rewards) == [0.0] * 4
    assert lost.metrics["illegal"] > 0, "the square is taken in the second turn"
    assert (lost.metrics["perfect_won"], sum(lost.metrics.values())) == (0.0, lost.metrics["illegal"] + 1)
    assert dict(lost.seats) == {"x": -lost.metrics["perfect_lost"]}


def test_games_of_tic_tac_toe_begin_on_any_board_and_are_taught_by_random_moves() -> None:
    rows, heldout = tic_tac_toe.games(seed=3, eval_size=8)
    answers = defaultdict[str, set[int]](set)
    for row in rows:
        assert not tic_tac_toe.over(row["board"])
        answers[row["board"]].add(int(row["answer"]) - 1)
    assert all(moves <= {*tic_tac_toe.free(board)} for board, moves in answers.items())
    assert answers[tic_tac_toe.EMPTY] == {*range(9)}
    assert {len(tic_tac_toe.free(board)) for board in answers} == {*range(9 - tic_tac_toe.MOVED, 10)}
    assert {(row["board"], row["opponent"]) for row in heldout} == {
        (tic_tac_toe.EMPTY, opponent) for opponent in tic_tac_toe.OPPONENTS
    }
