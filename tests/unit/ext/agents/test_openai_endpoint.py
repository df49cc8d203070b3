"""The endpoint on a real socket: who may ask, what a request continues, and how it fails."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import aiohttp
import pytest

from support.agent_rollouts import USER, AgentRollout, Client, chatting, endpoint_client, writing
from support.played import EOS, LIMITS, encoded
from titan_rl.ext.agents.openai_endpoint import OpenAIEndpoint
from titan_rl.ext.agents.players import Seats
from titan_rl.rollout.session import SessionLimits
from titan_rl.tasks.user_code import Threads, threads
from titan_rl.text.template import ChatSettings

PRICE = {"type": "function", "function": {"name": "price", "description": "", "parameters": {"type": "object"}}}
CALL = '<think>\nhm\n</think>\n\n<tool_call>\n{"name": "price",  "arguments": {"b": 2, "a": 1}}\n</tool_call>'


def saying(renderer: Any, *texts: str) -> Callable[[list[int]], list[int]]:
    """Say one text after the other."""
    left = list(texts)
    return lambda context: [*renderer.tokenizer.encode(left.pop(0)), renderer.tokenizer.eos]


async def test_a_key_opens_its_own_rollout_only_and_only_while_it_runs(tmp_path: Path) -> None:
    renderer = writing(tmp_path)
    rollouts = [AgentRollout(renderer, lambda context: [*encoded("8"), EOS]) for _ in range(2)]

    async with endpoint_client(*rollouts) as (one, other):
        ask = {"prompt": "7=", "model": "policy"}
        assert (await one.post("/completions", ask))[0] == 200
        for key in (other.key, "sk-", "é", one.key + "0"):
            status, answer = await one.post("/completions", ask, key)
            assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
        async with one.http.get(f"{one.url}/models") as response:
            assert response.status == 401
        headers = {"Authorization": f"Bearer {one.key}"}
        async with one.http.get(f"{one.url}/models", headers=headers) as response:
            assert [model["id"] for model in (await response.json())["data"]] == ["policy"]
        status, answer = await one.post("/embeddings", {})
        assert (status, answer["error"]["code"]) == (404, "not_found")
        assert one.url.startswith("http://127.0.0.1:")
        assert len(one.key) >= 43
    assert (rollouts[0].asked, rollouts[1].asked) == (1, 0)

    endpoint = OpenAIEndpoint()
    await endpoint.listen()
    async with aiohttp.ClientSession() as http:
        with endpoint.opened("5", {"": rollouts[0].session}) as (url, key):
            pass
        status, answer = await Client(http, url, key).post("/completions", {"prompt": "7="})
        assert (status, answer["error"]["code"]) == (410, "session_ended")
    await endpoint.close()


async def test_the_openai_package_calls_tools_and_drops_reasoning_and_nothing_is_tokenized_again(
    tmp_path: Path,
) -> None:
    renderer = chatting(tmp_path, "qwen3")
    rollout = AgentRollout(renderer, saying(renderer, CALL, "<think>\nno\n</think>\n\n12", "13"))

    from openai import AsyncOpenAI

    async with endpoint_client(rollout) as (client,), AsyncOpenAI(base_url=client.url, api_key=client.key) as ai:
        messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
        tools: list[Any] = [PRICE]
        first = await ai.chat.completions.create(model="policy", messages=messages, tools=tools, logprobs=True)
        (choice,) = first.choices
        assert choice.finish_reason == "tool_calls"
        (call,) = choice.message.tool_calls or []
        assert call.type == "function"
        assert json.loads(call.function.arguments) == {"a": 1, "b": 2}
        assert choice.logprobs is not None
        assert [each.logprob for each in choice.logprobs.content or []] == [-0.5] * len(rollout.engine[0][1])
        assert first.usage is not None
        assert first.usage.prompt_tokens == len(rollout.engine[0][0])
        kept = {"id": call.id, "type": "function", "function": {"name": "price", "arguments": '{"a":1,"b":2}'}}
        messages.append({"role": "assistant", "content": None, "tool_calls": [kept], "refusal": None})
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "12<|im_end|>"})
        second = await ai.chat.completions.create(model="policy", messages=messages, tools=tools, temperature=0.1)
        assert second.choices[0].message.content == "12"
        messages += [{"role": "assistant", "content": "12"}, USER]
        streamed = [
            chunk
            async for chunk in await ai.chat.completions.create(
                model="policy", messages=messages, tools=tools, stream=True, stream_options={"include_usage": True}
            )
        ]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed if chunk.choices) == "13"
        assert streamed[-2].choices[0].finish_reason == "stop"
        assert streamed[-1].usage is not None
    (branch,) = rollout.recorded.branches()
    assert len(branch.turns) == 3
    rollout.check()
    assert rollout.session.metrics() == {"requests": 3.0, "requests/continued": 2.0}
    assert [message["role"] for message in rollout.session.messages][-1] == "assistant"


async def test_a_rollout_that_calls_two_models_is_refused_by_name(tmp_path: Path) -> None:
    renderer = chatting(tmp_path)
    rollout = AgentRollout(renderer, saying(renderer, "a", "b"))

    async with endpoint_client(rollout) as (client,):
        await client.chat([USER], model="white")
        await client.chat([USER], model="white")
        status, body = await client.post("/chat/completions", {"model": "black", "messages": [USER]})
    assert (status, body["error"]["code"]) == (400, "several_models")
    assert "expected 'white', as in this rollout's earlier requests, found 'black'" in body["error"]["message"]


async def test_each_seat_of_an_episode_is_a_model_with_its_own_conversation(tmp_path: Path) -> None:
    renderer = chatting(tmp_path)
    white, black = (AgentRollout(renderer, saying(renderer, *texts)) for texts in (("a", "c"), ("b", "d")))

    endpoint = OpenAIEndpoint()
    await endpoint.listen()
    async with aiohttp.ClientSession() as http:
        with endpoint.opened("0", {"white": white.session, "black": black.session}) as (url, key):
            client = Client(http, url, key)
            async with http.get(f"{url}/models", headers={"Authorization": f"Bearer {key}"}) as response:
                assert [model["id"] for model in (await response.json())["data"]] == ["white", "black"]
            for said in ("a", "c"):
                answer = await client.chat(
                    [USER, {"role": "assistant", "content": "a"}, USER][-3 if said == "c" else -1 :], model="white"
                )
                assert answer["choices"][0]["message"]["content"] == said
            assert (await client.chat([USER], model="black"))["choices"][0]["message"]["content"] == "b"
            status, body = await client.post("/chat/completions", {"model": "red", "messages": [USER]})
            assert (status, body["error"]["code"]) == (400, "no_such_seat")
            assert "expected one of environment.seats: white, black; found 'red'" in body["error"]["message"]
    await endpoint.close()
    assert [len(branch.turns) for branch in white.recorded.branches()] == [2], "the seat's own turn is continued"
    assert [len(branch.turns) for branch in black.recorded.branches()] == [1]


async def test_a_prompt_that_is_sampled_twice_finds_its_own_node_again(tmp_path: Path) -> None:
    renderer = chatting(tmp_path)
    rollout = AgentRollout(renderer, saying(renderer, "a", "a", "b", "c", "d"))

    async with endpoint_client(rollout) as (client,):
        for _ in range(3):
            await client.chat([USER])
        for said in ("a", " b"):  # white space around an answer counts for nothing
            await client.chat([USER, {"role": "assistant", "content": said}, USER])
    rollout.check()
    assert rollout.session.metrics()["requests/continued"] == 2
    assert sorted(len(branch.turns) for branch in rollout.recorded.branches()) == [1, 2, 2]


async def test_edits_other_tools_and_stripped_thinking_begin_a_branch(tmp_path: Path) -> None:
    thinking = "<think>\nhm\n</think>\n\na"
    renderer = chatting(tmp_path, "qwen3", ChatSettings(thinking="template"))
    rollout = AgentRollout(renderer, saying(renderer, thinking, "b", "c", "d"))
    answered = [USER, {"role": "assistant", "content": "a"}, USER]

    async with endpoint_client(rollout) as (client,):
        await client.chat([USER])
        await client.chat(answered)
        await client.chat([{"role": "user", "content": "Edited"}, *answered[1:]])
        await client.chat(answered, tools=[PRICE])
    rollout.check()
    assert len(rollout.recorded.branches()) == 4
    assert "hm" not in renderer.tokenizer.decode(rollout.engine[1][0])


async def test_texts_and_token_ids_continue_what_was_sampled(tmp_path: Path) -> None:
    rollout = AgentRollout(writing(tmp_path), lambda context: [*encoded("8"), EOS])

    async with endpoint_client(rollout) as (client,):
        _, first = await client.post("/completions", {"prompt": "7=", "logprobs": 0, "return_token_ids": True})
        assert first["choices"][0]["text"] == "8"
        assert first["choices"][0]["token_ids"] == [*encoded("8"), EOS]
        assert first["choices"][0]["logprobs"]["token_logprobs"] == [-0.5, -0.5]
        assert first["prompt_token_ids"] == rollout.engine[0][0] == rollout.recorded.prompt.tokens
        _, second = await client.post("/completions", {"prompt": "7=8+1="})
        assert "token_ids" not in second["choices"][0]
        assert rollout.engine[1][0] == [*first["prompt_token_ids"], *encoded("8"), EOS, *encoded("+1=")]
        tokens = [*rollout.engine[1][0], *rollout.engine[1][1], *encoded("2=")]
        generate = client.url.removesuffix("/v1") + "/inference/v1/generate"
        ids = Client(client.http, generate, client.key)
        asked = {"token_ids": tokens, "sampling_params": {"max_tokens": 1, "logprobs": 1, "temperature": 0}}
        _, third = await ids.post("", asked)
        (choice,) = third["choices"]
        assert (choice["token_ids"], choice["finish_reason"]) == (encoded("8"), "length")
        assert choice["logprobs"]["content"][0]["logprob"] == -0.5
        assert (await ids.post("", {"token_ids": [9**9]}))[1]["error"]["code"] == "invalid_tokens"
        assert (await client.post("/completions", {"prompt": tokens}))[0] == 200
        status, answer = await client.post("/chat/completions", {"messages": [USER]})
        assert (status, answer["error"]["code"]) == (400, "no_chat_template")
        assert "task.template" in answer["error"]["message"]
    rollout.check()
    assert len(rollout.recorded.branches()) == 2  # a third turn was sampled twice


async def test_limits_are_named_and_a_full_context_is_openais_error(tmp_path: Path) -> None:
    renderer = writing(tmp_path)
    cases = [
        (LIMITS, SessionLimits(context=6), "context_length_exceeded", "context_overflow"),
        (replace(LIMITS, max_turns=1), None, "max_turns", "max_turns"),
        (replace(LIMITS, max_tokens=3), None, "max_tokens", "max_tokens"),
    ]

    for limits, room, code, status in cases:
        rollout = AgentRollout(renderer, lambda context: [*encoded("8"), EOS], limits, room=room)
        async with endpoint_client(rollout) as (client,):
            assert (await client.post("/completions", {"prompt": "7="}))[0] == 200
            found, answer = await client.post("/completions", {"prompt": "7=81111="})
            assert (found, answer["error"]["code"]) == (400, code)
            assert rollout.session.refused == status
        rollout.check()


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/chat/completions", {"messages": []}, "messages: expected a list of at least one message"),
        ("/chat/completions", {"messages": [{"content": ""}]}, 'messages[0]: expected an object with a "role"'),
        (
            "/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content: expected an image as a data URL, or by its name in the row, found {'type':",
        ),
        ("/chat/completions", {"messages": [USER], "n": 2}, "n: expected 1, found 2"),
        ("/chat/completions", {"messages": [USER], "max_tokens": 0}, "max_tokens: expected a positive integer"),
        ("/chat/completions", {"messages": [USER], "tools": [3]}, "tools: expected a list of functions"),
        ("/completions", {"prompt": ["a", "b"]}, "expected token ids"),
        ("/completions", {"prompt": 3}, "prompt: expected one text or one list of token ids"),
        ("/completions", {"prompt": []}, "expected a prompt of at least 1 token"),
        ("/completions", [], "expected a JSON object as the body, found a list"),
    ],
)
async def test_bad_requests_say_what_was_expected(tmp_path: Path, path: str, body: Any, message: str) -> None:
    rollout = AgentRollout(chatting(tmp_path), lambda context: [300])

    async with endpoint_client(rollout) as (client,):
        status, answer = await client.post(path, body)
        assert status == 400
        assert message in answer["error"]["message"]
    assert rollout.asked == 0


async def test_sixty_four_rollouts_and_four_requests_of_each_at_the_same_time(tmp_path: Path) -> None:
    renderer = chatting(tmp_path)
    rollouts = [AgentRollout(renderer, lambda context: [*context[-3:], renderer.tokenizer.eos]) for _ in range(64)]

    async def talk(client: Client, name: str) -> None:
        messages: list[Any] = [{"role": "user", "content": name}]
        for _ in range(2):
            answer = await client.chat(messages)
            messages += [answer["choices"][0]["message"], USER]

    async with endpoint_client(*rollouts) as clients:
        await asyncio.gather(*(talk(client, f"{n}") for client in clients for n in range(4)))
    for rollout in rollouts:
        rollout.check()
        assert sorted(len(branch.turns) for branch in rollout.recorded.branches()) == [2] * 4


async def test_the_turn_of_a_client_that_is_gone_is_cancelled(tmp_path: Path) -> None:
    rollout = AgentRollout(writing(tmp_path), lambda context: [*encoded("8"), EOS])
    rollout.gate.clear()

    async with endpoint_client(rollout) as (client,):
        gone = asyncio.create_task(client.post("/completions", {"prompt": "7="}))
        while not rollout.asked:
            await asyncio.sleep(0.01)
        gone.cancel()
        while not rollout.cancelled:
            await asyncio.sleep(0.01)
        rollout.gate.set()
        assert (await client.post("/completions", {"prompt": "7="}))[0] == 200
    rollout.check()
    assert len(rollout.engine) == 1


async def test_an_agent_takes_the_keywords_that_it_names_and_a_limit_that_it_lets_pass_is_no_error(
    tmp_path: Path,
) -> None:
    renderer, given = writing(tmp_path), dict[str, Any]()

    async def takes_all(base_url: str, **extra: Any) -> dict[str, float]:
        given.update(extra)
        return {"reward": 0.5, "steps": 3}

    def asks_once_too_often(base_url: str, api_key: str) -> None:
        headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
        for _ in range(2):
            urlopen(Request(f"{base_url}/completions", b'{"prompt": "7="}', headers)).read()

    async def fails(row: dict[str, Any]) -> float:
        raise KeyError("mine")

    endpoint = OpenAIEndpoint()
    await endpoint.listen()
    threads.set(Threads(1))

    async def run(function: Callable[..., Any]) -> Any:
        rollout = AgentRollout(renderer, lambda context: [*encoded("8"), EOS], replace(LIMITS, max_turns=1))
        return await endpoint.run_agent(
            function, "mine", "0", {"": rollout.session}, rollout.recorded.prompt, 4, Seats()
        )

    outcome = await run(takes_all)
    assert (outcome.reward, outcome.metrics["steps"], outcome.status) == (0.5, 3.0, "completed")
    assert set(given) == {"row", "prompt", "answer", "seed", "api_key", "model", "tokenizer"}
    outcome = await run(asks_once_too_often)
    assert (outcome.status, outcome.reward, list(outcome.turn_rewards)) == ("max_turns", 0.0, [0.0])
    with pytest.raises(KeyError, match="mine"):
        await run(fails)
    await endpoint.close()
