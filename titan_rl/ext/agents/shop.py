"""A shop's service: an agent with tools over a small database, a simulated customer, and a judge if there is one.

    user "i want to cancel an order."   agent "which order?"   user "order 2."   agent cancel(2), "done."   user "bye."

The customer and the judge are seats of environment.endpoints; titan_rl/ext/agents/shop_user.py plays them by rules. The
customer tells a fact only if it is asked. The reward is 1 if the database ends as it should; a judge that does not
answer "yes" makes it 0. Without a chat template's calls, the agent writes a command: "cancel 2", "move 2, mill road".

    .venv/bin/python -m titan_rl.ext.agents.shop > shop.jsonl      # rows, with demonstrations of which 30% ask
"""

import json
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from titan_rl.ext.agents.adapters import Conversation
from titan_rl.ext.agents.episodes import Reply
from titan_rl.ext.agents.tools import Toolbox, ToolCall
from titan_rl.wire.seeds import derive

ROWS, ORDERS = 2000, 5
STREETS = ("mill road", "high street", "park lane", "king street")
WISHES = {"cancel": "cancel an order", "refund": "have an order refunded", "move": "change the address of an order"}
BYE = "bye."
OPENING = "i want to {}."
CUSTOMER = (
    "you are a customer of a shop. you want to {wish}. facts, which you tell only if you are asked: order {order}. "
    f'address {{address}}. answer in one sentence. when it is done, say "{BYE}"'
)
JUDGE = "was the customer served politely, and did the agent name its action? answer yes or no.\n"
COMMAND = re.compile(r"(look_up|cancel|refund|move) (\d+)(?:, ?(.+))?")
ASK_SHARE = 0.3
"""Share of the demonstrations that ask. The others guess."""
ASKED = (("which order?", "order {order}."), ("which order, which address?", "order {order}, {address}."))


def orders(seed: int, eval_size: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return rows to train on, and to evaluate on."""
    rows = []
    for n in range(ROWS):
        draw = np.random.default_rng(derive(seed, "shop", n))
        wish, order, street = [*WISHES][n % 3], int(draw.integers(ORDERS)), str(draw.choice(STREETS))
        row = {"question": OPENING.format(WISHES[wish]), "wish": wish, "order": order, "address": street}
        asks = draw.random() < ASK_SHARE
        guessed = {**row, "order": int(draw.integers(ORDERS)), "address": str(draw.choice(STREETS))}
        shown = demonstration(row if asks else guessed, asks=asks)
        rows.append({**row, "answer": command(row), "demonstration": shown})
    return rows[eval_size:], rows[:eval_size]


def demonstration(row: Mapping[str, Any], *, asks: bool) -> list[dict[str, str]]:
    """Return a conversation after the customer's first words, in which the agent asks before it acts, or guesses."""
    question, facts = ASKED[row["wish"] == "move"]
    texts = [*([question, facts.format(**row)] if asks else []), command(row), "done", "done."]
    return [{"role": ("assistant", "user")[i % 2], "content": text} for i, text in enumerate(texts)]


def command(row: Mapping[str, Any]) -> str:
    """Return the command that does a row's wish."""
    return ("move {order}, {address}" if row["wish"] == "move" else "{wish} {order}").format(**row)


def customer(row: Mapping[str, Any]) -> str:
    """Return the instructions of a row's customer."""
    return CUSTOMER.format(wish=WISHES[row["wish"]], order=row["order"], address=row["address"])


class Shop:
    """The database. Its public methods are the agent's tools."""

    def __init__(self) -> None:
        self.orders = [{"status": "open", "address": "none"} for _ in range(ORDERS)]

    def look_up(self, order: int) -> str:
        """Return the status and the address of an order."""
        return "status {status}, address {address}".format(**self._found(order))

    def cancel(self, order: int) -> str:
        """Cancel an open order."""
        return self._change(order, status="cancelled")

    def refund(self, order: int) -> str:
        """Refund an open order."""
        return self._change(order, status="refunded")

    def move(self, order: int, address: str) -> str:
        """Change the address of an open order."""
        return self._change(order, address=address)

    def _found(self, order: int) -> dict[str, str]:
        if not 0 <= order < ORDERS:
            raise ValueError(f"there is no order {order}")
        return self.orders[order]

    def _change(self, order: int, **new: str) -> str:
        if self._found(order)["status"] != "open":
            raise ValueError(f"order {order} is not open")
        self.orders[order] |= new
        return "done"


async def play(policies: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """Serve a customer, as a rollout function of environment.seats = ["agent", "user"] or with "judge"."""
    shop, goal, order = Shop(), Shop(), row["order"]
    goal.move(order, row["address"]) if row["wish"] == "move" else getattr(goal, row["wish"])(order)
    tools = Toolbox([shop.look_up, shop.cancel, shop.refund, shop.move])
    begun = [{"role": "system", "content": customer(row)}, {"role": "assistant", "content": row["question"]}]
    spoken, said = [f"customer: {row['question']}"], ""  # the agent's prompt is the question
    while said.lower() != BYE:
        reply = await policies["agent"].observe(said, tools.schemas)
        while found := calls_of(reply):
            results = [(call, await tools.call(call)) for call in found]
            named = [{"role": "tool", "name": c.name, "tool_call_id": c.id, "content": text} for c, text in results]
            reply = await policies["agent"].observe(named if reply.calls else results[0][1])
        answered = {"role": "user", "content": reply.text}
        said = (await policies["user"].observe(answered if said else Conversation([*begun, answered]))).text
        spoken += [f"agent: {reply.text}", f"customer: {said}"]
    reward = float(shop.orders == goal.orders)
    if "judge" in policies:
        asked = [{"role": "user", "content": JUDGE + "\n".join(spoken)}]
        verdict = await policies["judge"].observe(Conversation(asked))
        reward *= verdict.text.lower().startswith("yes")
    return {"seats": {"agent": reward}, **tools.metrics()}


def calls_of(reply: Reply) -> list[ToolCall]:
    """Return the calls of a reply, or the command that is its text."""
    if reply.calls or not (found := COMMAND.fullmatch(reply.text)):
        return list(reply.calls)
    address = {"address": found[3]} if found[3] else {}
    return [ToolCall(found[1], {"order": int(found[2]), **address})]


if __name__ == "__main__":
    print("\n".join(map(json.dumps, orders(0, 0)[0])))
