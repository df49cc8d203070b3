"""Seats that an endpoint plays: a server of this process, in episodes of this process."""

import asyncio
import random
import sys
import time
from collections.abc import Callable, Mapping
from email.utils import formatdate
from math import ceil
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from support.chat_endpoint import answering
from support.played import LIMITS, playing, prompt_of
from titan_rl.ext.agents import endpoint_seats, shop, shop_user
from titan_rl.ext.agents.adapters import Conversation
from titan_rl.ext.agents.endpoint_seats import SeatEndpoint
from titan_rl.ext.agents.play import Policy
from titan_rl.ext.agents.players import Seats

HERE = "unit.ext.agents.test_endpoint_seats"
KEY = "sk-very-secret-8"
SLOW = LIMITS.__class__(max_turns=8, max_tokens=0, turn_seconds=1.0, rollout_seconds=60)


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_seats, "RETRIES", (0.01, 0.01))
    monkeypatch.setattr(endpoint_seats, "LEAST_WAIT", 0.01)


def seats(url: str, *by_endpoint: str, agent: str = "agent", **settings: Any) -> Seats:
    endpoints = tuple(SeatEndpoint(seat, url, "m", KEY, settings=settings) for seat in by_endpoint)
    return Seats((agent, *by_endpoint), frozenset(by_endpoint), endpoints)


async def helped(policies: Mapping[str, Policy], row: Mapping[str, Any]) -> dict[str, Any]:
    await policies["agent"].observe((await policies["user"].observe("what?")).text)
    answer = await policies["agent"].observe((await policies["user"].observe("what?")).text)
    verdict = await policies["judge"].observe(Conversation([{"role": "user", "content": f"grade {answer.text}"}]))
    return {"seats": {"agent": float(verdict.text)}}


async def careless(policies: Mapping[str, Policy], row: Mapping[str, Any]) -> dict[str, Any]:
    """Take any failure for a reward."""
    await policies["agent"].observe("go")
    try:
        for _ in range(row.get("turns", 1)):
            await policies["user"].observe(f"plan {row.get('plan', '')}")
    except Exception:
        return {"seats": {"agent": -1.0}}
    return {"seats": {"agent": 1.0}}


class Turns:
    """An agent and a user move in turn. Each step is worth its number."""

    def reset(self) -> str:
        self.moved = 0
        return "begin"

    def to_move(self) -> str:
        return ("user", "agent")[self.moved % 2]

    def step(self, reply: Any) -> tuple[str, float, bool, dict[str, Any]]:
        self.moved += 1
        return f"{reply.text}!", float(self.moved), self.moved == 4, {}


def test_an_endpoint_reads_its_own_conversation_and_takes_no_turn_of_the_policy(tmp_path: Path) -> None:
    def reply(body: dict[str, Any]) -> str:
        return "0.5" if body["messages"][0]["content"].startswith("grade") else f"wish {len(body['messages'])}"

    outcomes, requests = [], []
    for _ in range(2):
        with answering(reply) as (url, seen):
            asked = seats(url, "user", "judge", temperature=0.5, max_tokens=9)
            with playing(f"{HERE}:helped", tmp_path, seats=asked) as played:
                outcomes += played.play([prompt_of("hi")], lambda id, turn: "xy"[turn])
                assert list(played.seats[0]) == ["agent", "agent"]
        assert {request["key"] for request in seen} == {f"Bearer {KEY}"}
        requests.append([request["body"] for request in seen])
    outcome, again = outcomes
    assert outcome.seats == again.seats == {"user": None, "judge": None, "agent": 0.5}
    assert [(m["name"], m["content"]) for m in outcome.messages] == [
        ("user", "what?"),
        ("user", "wish 2"),
        ("agent", "wish 2"),
        ("agent", "x"),
        ("user", "what?"),
        ("user", "wish 4"),
        ("agent", "wish 4"),
        ("agent", "y"),
        ("judge", "grade y"),
        ("judge", "0.5"),
    ]
    assert [m["content"] for m in requests[0][1]["messages"]] == ["hi", "what?", "wish 2", "what?"]
    assert all((r["model"], r["temperature"], r["max_tokens"]) == ("m", 0.5, 9) for r in requests[0])
    seeds = [request["seed"] for request in requests[0]]
    assert (len(set(seeds)), seeds) == (3, [request["seed"] for request in requests[1]])


@pytest.mark.parametrize("python", ["", sys.executable], ids=["here", "elsewhere"])
def test_an_endpoint_moves_in_turn_and_its_steps_reward_no_turn_of_the_policy(tmp_path: Path, python: str) -> None:
    with answering(lambda body: "u") as (url, seen):
        with playing(f"{HERE}:Turns", tmp_path, seats=seats(url, "user"), python=python) as played:
            (outcome,) = played.play([prompt_of("")], lambda id, turn: "a")
        assert [request["body"]["messages"][-1]["content"] for request in seen] == ["begin", "a!"]
    assert dict(outcome.seats) == {"user": None, "agent": 2.0 + 4.0}
    assert list(outcome.turn_rewards) == [2.0, 4.0]


def test_calls_of_an_endpoint_are_answered_and_a_bad_one_is_named(tmp_path: Path) -> None:
    def reply(body: dict[str, Any]) -> dict[str, Any]:
        assert [tool["function"]["name"] for tool in body["tools"]] == ["double"]
        turn = sum(message["role"] == "assistant" for message in body["messages"])
        if turn == 2:
            return {"content": body["messages"][2]["content"]}
        call = {"name": "double", "arguments": ("[1]", '{"n": 4}')[turn]}
        return {"content": None, "tool_calls": [{"id": "c1", "type": "function", "function": call}]}

    with answering(reply) as (url, seen), playing(f"{HERE}:Doubles", tmp_path, seats=seats(url, "user")) as played:
        (outcome,) = played.play([prompt_of("")], lambda id, turn: "a")
    assert (outcome.status, outcome.seats["agent"]) == ("completed", 1.0)
    (_, bad, first_error), (*_, answered) = (request["body"]["messages"] for request in seen[1:])
    assert "tool_calls" not in bad, "a server refuses a call without a result"
    assert first_error["content"] == "error: expected an object of arguments, found [1]"
    assert (answered["tool_call_id"], answered["content"]) == ("c1", "8")


class Doubles:
    """The user calls a tool until it replies; then the agent moves, and the episode ends."""

    def __init__(self) -> None:
        self.tools, self.replied = [self.double], False

    def double(self, n: int) -> int:
        """Double a number."""
        return 2 * n

    def reset(self) -> str:
        return "double"

    def to_move(self) -> str:
        return "agent" if self.replied else "user"

    def step(self, reply: Any) -> tuple[str, float, bool, dict[str, Any]]:
        done, self.replied = self.replied, True
        return "", float(done), done, {}


def status(code: int, text: str = "") -> Callable[[dict[str, Any]], Any]:
    return lambda body: web.Response(status=code, text=text)


@pytest.mark.parametrize(
    ("reply", "attempts", "ended", "error"),
    [
        (status(503), 3, "error", "the user at http://127.0.0.1:"),
        (status(401, f"bad key {KEY}"), 1, "error", "answered 401: bad key ***"),
        (status(200, "<html>"), 1, "error", "expected a chat completion, found '<html>'"),
        (lambda body: {"content": [1]}, 1, "error", "expected a chat completion, found"),
        (
            lambda body: web.Response(status=307, headers={"Location": "http://127.0.0.1:9/"}),
            1,
            "error",
            "answered 307",
        ),
        (lambda body: None, 1, "timeout", "turn_seconds: the user at http://127.0.0.1:"),
    ],
    ids=["unavailable", "refused", "no JSON", "no text", "redirected", "silent"],
)
def test_an_endpoint_that_fails_ends_the_rollout_even_if_the_users_code_goes_ahead(
    tmp_path: Path, reply: Callable[[dict[str, Any]], Any], attempts: int, ended: str, error: str
) -> None:
    with (
        answering(reply) as (url, seen),
        playing(f"{HERE}:careless", tmp_path, SLOW, seats=seats(url, "user")) as played,
    ):
        (outcome,) = played.play([prompt_of("")], lambda id, turn: "a")
    assert (outcome.status, outcome.reward, len(seen)) == (ended, None, attempts)
    assert error in outcome.error
    assert KEY not in outcome.error


def test_only_the_rollouts_fail_whose_endpoint_does(tmp_path: Path) -> None:
    """Draw turns, and what the endpoint does in each: a failure that passes, one that does not, silence, a reply."""
    draws, left = random.Random(0), dict[tuple[int, int], list[str]]()
    rows, expected = list[dict[str, Any]](), list[str]()
    for plan in range(40):
        turns, ended = draws.randint(1, 5), "completed"
        for turn in range(turns):
            faults = draws.choices(["busy", "dropped", "refused", "silent"], [6, 6, 1, 1], k=draws.choice([0, 0, 1, 3]))
            left[plan, turn] = faults
            passing = next((i for i, fault in enumerate(faults) if fault in ("refused", "silent")), len(faults))
            if ended == "completed" and passing < min(3, len(faults)):
                ended = {"refused": "error", "silent": "timeout"}[faults[passing]]
            elif ended == "completed" and len(faults) >= 3:
                ended = "error"
        rows.append({"plan": plan, "turns": turns})
        expected.append(ended)
    assert {"completed", "error", "timeout"} == set(expected)

    def reply(body: dict[str, Any]) -> Any:
        said = [message["content"] for message in body["messages"] if message["role"] == "user"]
        faults = left[int(said[0].split()[1]), len(said) - 1]
        fault = faults.pop(0) if faults else ""
        codes = {"busy": 429, "refused": 400}
        return (
            web.Response(status=codes[fault]) if fault in codes else {"dropped": False, "silent": None}.get(fault, "ok")
        )

    limits = LIMITS.__class__(max_turns=8, max_tokens=0, turn_seconds=4.0, rollout_seconds=60)
    with (
        answering(reply) as (url, _),
        playing(f"{HERE}:careless", tmp_path, limits, concurrency=40, seats=seats(url, "user")) as played,
    ):
        outcomes = played.play([prompt_of("", row) for row in rows], lambda id, turn: "a")
    assert [outcome.status for outcome in outcomes] == expected
    assert all(outcome.seats.get("agent") == 1.0 for outcome in outcomes if outcome.status == "completed")
    assert all(not outcome.seats for outcome in outcomes if outcome.status != "completed")


MALFORMED = ["", "soon", "-1", "1.5", "inf", "Wed, 99 Oct 2099 07:28:00 GMT", "Wed, 21 Oct 2099 07:28:00 +99999999"]


def test_a_busy_endpoint_is_asked_again_when_it_asks_for_it(tmp_path: Path) -> None:
    """Draw refusals of each row: a Retry-After of seconds or a date, past, soon or beyond the deadline, or malformed;
    and statuses whose header means nothing."""
    draws, plans, expected = random.Random(0), list[list[tuple[int, str, int]]](), list[str]()
    for _ in range(48):
        forms = draws.choices(["seconds", "date", "malformed"], [3, 3, 2], k=draws.randint(0, 4))
        waits = [draws.choices([0, 1, 3600], [9, 3, 1])[0] for _ in forms]
        plan = [(draws.choice([429, 503, 503, 500]), form, wait) for form, wait in zip(forms, waits, strict=True)]
        waited, retries, ended = 0, 2, "completed"
        for n, (code, form, wait) in enumerate(plan):
            if code == 500 or form == "malformed":
                retries -= 1
            elif wait == 3600 or waited + wait > 2:
                plan[n] = (code, form, 3600)
                ended = "timeout"
            else:
                waited += wait
            if retries < 0 or ended != "completed":
                ended = "error" if retries < 0 else ended
                plan = plan[: n + 1]
                break
        plans.append(plan)
        expected.append(ended)
    assert {"completed", "error", "timeout"} == set(expected)
    came = [list[float]() for _ in plans]

    def reply(body: dict[str, Any]) -> Any:
        number = int(body["messages"][-1]["content"].split()[1])
        came[number].append(time.time())
        if len(came[number]) > len(plans[number]):
            return "ok"
        code, form, wait = plans[number][len(came[number]) - 1]
        date = formatdate(ceil(time.time() + wait), usegmt=True)
        text = {"seconds": str(wait), "date": date, "malformed": MALFORMED[number % len(MALFORMED)]}[form]
        return web.Response(status=code, headers={"Retry-After": text})

    limits = LIMITS.__class__(max_turns=8, max_tokens=0, turn_seconds=8.0, rollout_seconds=60)
    rows = [{"plan": number} for number in range(len(plans))]
    with (
        answering(reply) as (url, _),
        playing(f"{HERE}:careless", tmp_path, limits, concurrency=len(plans), seats=seats(url, "user")) as played,
    ):
        outcomes = played.play([prompt_of("", row) for row in rows], lambda id, turn: "a")
    assert [outcome.status for outcome in outcomes] == expected
    assert [len(times) for times in came] == [
        len(plan) + (end == "completed") for plan, end in zip(plans, expected, strict=True)
    ]
    for times, plan, outcome in zip(came, plans, outcomes, strict=True):
        for (code, form, wait), asked, again in zip(plan, times, times[1:], strict=False):
            assert again - asked >= wait * (code != 500 and form != "malformed") - 0.01
        assert outcome.status != "timeout" or "; it asked to wait 3" in outcome.error


@pytest.mark.parametrize("seed", range(3))
def test_an_endpoint_that_is_late_before_the_run_is_named_with_its_last_answer(seed: int) -> None:
    draws = random.Random(seed)
    code, wait, silent = draws.choice([429, 503]), draws.randint(60, 3600), draws.random() < 0.5
    busy = web.Response(status=code, text="later", headers={"Retry-After": str(wait)})
    with answering(lambda body: None if silent else busy) as (url, _):
        (found,) = asyncio.run(endpoint_seats.unreached([SeatEndpoint("user", url, "m")], 2.0))
    answered = "" if silent else f" answered {code}: later; it asked to wait {wait} s, and"
    assert found == (
        f"environment.endpoints.user: expected a model that answers, found the user at {url}{answered} had not "
        "answered within 2 s"
    )


def test_an_endpoint_has_a_limit_of_turns(tmp_path: Path) -> None:
    with (
        answering(lambda body: "ok") as (url, seen),
        playing(
            f"{HERE}:helped", tmp_path, LIMITS.__class__(1, 0, 20, 60), seats=seats(url, "user", "judge")
        ) as played,
    ):
        (outcome,) = played.play([prompt_of("")], lambda id, turn: "a")
    assert (outcome.status, dict(outcome.seats)) == ("max_turns", {"agent": 0.0, "user": None, "judge": None})
    assert len(seen) == 1


# -- the shop ---------------------------------------------------------------------------------------------------------


def test_the_shops_rows_differ_and_depend_on_the_seed_only() -> None:
    train, held_out = shop.orders(0, 16)
    assert (len(train), len(held_out)) == (shop.ROWS - 16, 16)
    assert shop.orders(0, 16) == (train, held_out) != shop.orders(1, 16)
    assert len({(row["wish"], row["order"], row["address"]) for row in train}) == 3 * shop.ORDERS * len(shop.STREETS)
    asking = [row for row in train if row["demonstration"][0]["content"].startswith("which")]
    assert len(asking) / len(train) == pytest.approx(shop.ASK_SHARE, abs=0.03)
    for row in asking:
        question, facts, act = (turn["content"] for turn in row["demonstration"][:3])
        assert facts == shop_user.answer([{"content": shop.customer(row)}, {"content": question}])
        assert act == row["answer"]


@pytest.mark.parametrize("judge", [False, True])
def test_an_agent_that_asks_and_acts_serves_every_customer(tmp_path: Path, judge: bool) -> None:
    """Of the drawn rows, some are served well, some without asking, and some without a word about it."""
    draws, rows = random.Random(0), shop.orders(0, 16)[0]
    chosen, manners = draws.sample(rows, 12), draws.choices(["well", "guess", "rude"], k=12)

    def said(id: int, turn: int) -> str:
        row, manner = chosen[id], manners[id]
        order = row["order"] if manner != "guess" else (row["order"] + 1) % shop.ORDERS
        address = f", {row['address']}" if row["wish"] == "move" else ""
        asking = f"which order{' and address' if address else ''}?"
        return [asking, f"{row['wish']} {order}{address}", "bye, all done." if manner != "rude" else "well"][
            min(turn, 2)
        ]

    players = ["user", *(["judge"] if judge else [])]
    with (
        answering(lambda body: shop_user.answer(body["messages"])) as (url, _),
        playing("titan_rl.ext.agents.shop:play", tmp_path, seats=seats(url, *players)) as played,
    ):
        outcomes = played.play([prompt_of("", row) for row in chosen], said)
    for outcome, manner in zip(outcomes, manners, strict=True):
        assert outcome.status == ("max_turns" if manner == "rude" else "completed"), outcome
        assert outcome.seats["agent"] == float(manner == "well")
