"""A shop's service: an agent with tools over a small database, a simulated customer, and a judge if there is one.

    user "i want to cancel an order."   agent "which order?"   user "order 2."   agent cancel(2)   user "bye."

The customer and the judge are seats of environment.endpoints, as titan_rl/ext/agents/shop_user.py plays them by rules.
The customer tells a fact only if it is asked. The reward is 1 if the database ends as it should; a judge that does not
answer "yes" makes it 0. Without a chat template's calls, the agent writes a command: "cancel 2", "move 2, mill road".
"""

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
WISHES = {"cancel": "cancel an order", "refund": "have an order refunded", "move": "change an order's address"}
BYE = "bye."
CUSTOMER = (
    "you are a customer of a shop. you want to {wish}. facts, which you tell only if you are asked: order {order}. "
    f'address {{address}}. answer in one sentence. when it is done, say "{BYE}"'
)
JUDGE = "was the customer served politely, and did the agent name its action? answer yes or no.\n"
COMMAND = re.compile(r"(look_up|cancel|refund|move) (\d+)(?:, ?(.+))?")


def orders(seed: int, eval_size: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return rows to train on, and to evaluate on."""
    rows = []
    for n in range(ROWS):
        draw = np.random.default_rng(derive(seed, "shop", n))
        order, street = int(draw.integers(ORDERS)), str(draw.choice(STREETS))
        rows.append({"question": "", "answer": "", "wish": [*WISHES][n % 3], "order": order, "address": street})
    return rows[eval_size:], rows[:eval_size]


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
    system = CUSTOMER.format(wish=WISHES[row["wish"]], order=order, address=row["address"])
    greeting = [{"role": "system", "content": system}, {"role": "user", "content": "how can i help you?"}]
    said = (await policies["user"].observe(Conversation(greeting))).text
    spoken = [f"customer: {said}"]
    while said.lower() != BYE:
        reply = await policies["agent"].observe(said, tools.schemas)
        while found := calls_of(reply):
            results = [(call, await tools.call(call)) for call in found]
            named = [{"role": "tool", "name": c.name, "tool_call_id": c.id, "content": text} for c, text in results]
            reply = await policies["agent"].observe(named if reply.calls else results[0][1])
        said = (await policies["user"].observe(reply.text)).text
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
