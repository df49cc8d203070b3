"""The endpoint of `titan_rl serve` on a real socket: any client, its own sampling, nothing ignored."""

import asyncio
import random
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from support.agent_rollouts import USER, Client, chatting, writing
from titan_rl.ext.agents.conversation import Renderer
from titan_rl.ext.agents.policy_endpoint import PolicyEndpoint, first_part
from titan_rl.wire.errors import RequestRefused
from titan_rl.wire.types import Completion, ContextScore, Request, Sampling

KEY = "sk-test"


class Engines:
    """Answers each prompt with one text and an end token; records the requests."""

    def __init__(self, renderer: Renderer, text: str) -> None:
        self.tokens = [*renderer.tokenizer.encode(text), renderer.tokenizer.eos]
        self.asked: list[Request] = []

    async def generate(self, request: Request) -> list[Completion]:
        await asyncio.sleep(0)
        self.asked.append(request)
        if len(request.tokens) > 40:
            raise RequestRefused("request: too long")
        tokens = self.tokens[: request.sampling.max_new_tokens]
        finish = "stop" if tokens == self.tokens else "length"
        scores = [ContextScore(-0.25 * i, 7, -0.25) for i in range(1, len(request.tokens))]
        context = scores if request.sampling.scores_context else []
        return [Completion(tokens, [-0.5] * len(tokens), [0] * len(tokens), finish, context=context)]


@asynccontextmanager
async def serving(renderer: Renderer, engines: Engines, context: int = 64) -> AsyncIterator[Client]:
    sampling = Sampling(8, 0.9, 1.0, (renderer.tokenizer.eos,))
    endpoint = PolicyEndpoint(engines, renderer, key=KEY, sampling=sampling, context=context, model="mine")
    bound = socket.create_server(("127.0.0.1", 0))
    await endpoint.listen(bound)
    async with aiohttp.ClientSession() as http:
        yield Client(http, f"http://127.0.0.1:{bound.getsockname()[1]}/v1", KEY)
    await endpoint.close()


async def test_a_batch_of_prompts_has_numbered_choices_and_seeds_of_their_own(tmp_path: Path) -> None:
    renderer = writing(tmp_path)
    engines = Engines(renderer, "12")

    async with serving(renderer, engines) as client:
        ask = {"model": "any", "prompt": ["1+1=", "2+2="], "n": 2, "seed": 5, "temperature": 0.5, "max_tokens": 3}
        status, answer = await client.post("/completions", ask)
        assert status == 200
        assert [(c["index"], c["text"], c["finish_reason"]) for c in answer["choices"]] == [
            (i, "12", "stop") for i in range(4)
        ]
        assert answer["usage"] == {"prompt_tokens": 20, "completion_tokens": 12, "total_tokens": 32}
        assert answer["model"] == "mine"
    contexts = [renderer.tokenizer.prompt(text, "plain") for text in ("1+1=", "1+1=", "2+2=", "2+2=")]
    asked = sorted(engines.asked, key=lambda request: request.seeds)
    assert [request.tokens for request in asked] == contexts
    assert [request.seeds for request in asked] == [[5], [6], [7], [8]]
    assert {(r.sampling.temperature, r.sampling.max_new_tokens) for r in asked} == {(0.5, 3)}
    assert len({request.id for request in asked}) == 4


async def test_token_ids_are_read_as_they_are(tmp_path: Path) -> None:
    renderer = writing(tmp_path)
    engines = Engines(renderer, "12")
    tokens = renderer.tokenizer.encode("3+3=")

    async with serving(renderer, engines) as client:
        assert (await client.post("/completions", {"prompt": [tokens, tokens[:2]], "logprobs": 0}))[0] == 200
        status, answer = await client.post("/completions", {"prompt": tokens, "logprobs": 0})
        assert answer["choices"][0]["logprobs"]["token_logprobs"] == [-0.5] * 3
        root = Client(client.http, client.url.removesuffix("/v1"), KEY)
        wish = {"token_ids": tokens, "sampling_params": {"max_tokens": 2, "temperature": 0}}
        status, answer = await root.post("/inference/v1/generate", wish)
        assert (status, len(answer["choices"][0]["token_ids"])) == (200, 2)
    assert [request.tokens for request in engines.asked] == [tokens, tokens[:2], tokens, tokens]
    assert engines.asked[-1].sampling.temperature == 0


async def test_a_client_chooses_how_to_truncate(tmp_path: Path) -> None:
    renderer = writing(tmp_path)
    engines = Engines(renderer, "12")

    async with serving(renderer, engines) as client:
        for wish in ({"top_p": 0.5, "top_k": 3, "min_p": 0.1}, {"top_k": -1}, {}):
            assert (await client.post("/completions", {"prompt": "1=", **wish}))[0] == 200
    found = [(r.sampling.top_p, r.sampling.top_k, r.sampling.min_p) for r in engines.asked]
    assert found == [(0.5, 3, 0.1), (1.0, 0, 0.0), (1.0, 0, 0.0)]


async def test_a_prompt_is_scored_as_lm_evals_loglikelihood_reads_it(tmp_path: Path) -> None:
    """Its request, and what its parse_logprobs does with the reply."""
    renderer = writing(tmp_path)
    engines = Engines(renderer, "12")
    tokens = [renderer.tokenizer.encode(text) for text in ("1+1=2", "3+3=6")]

    async with serving(renderer, engines) as client:
        asked = {"model": "policy", "prompt": tokens, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
        status, answer = await client.post("/completions", {**asked, "temperature": 0})
        assert status == 200
        for choice, prompt in zip(sorted(answer["choices"], key=lambda c: c["index"]), tokens, strict=True):
            own, top = (choice["logprobs"][name] for name in ("token_logprobs", "top_logprobs"))
            assert own == [None, *(-0.25 * i for i in range(1, len(prompt))), -0.5]
            assert [p == max(each.values()) for p, each in zip(own[1:-1], top[1:-1], strict=True)] == [True] + [
                False
            ] * (len(prompt) - 2)
            assert choice["text"] == renderer.tokenizer.decode(prompt) + "1"
            assert choice["logprobs"]["tokens"] == [*renderer.tokenizer.decode(prompt), "1"]
        _, none = await client.post("/completions", {**asked, "prompt": "4+4=", "max_tokens": 0})
        (choice,) = none["choices"]
        assert len(choice["logprobs"]["token_logprobs"]) == 1 + len("4+4=")  # BOS has no log-prob
        assert (none["usage"]["completion_tokens"], choice["finish_reason"]) == (0, "length")
        _, bare = await client.post("/completions", {"prompt": "4+4=", "echo": True, "stop": "2"})
        assert bare["choices"][0]["text"] == "4+4=1"
        assert bare["choices"][0]["logprobs"] is None
    assert [request.sampling.max_new_tokens for request in engines.asked] == [1, 1, 1, 8]


async def test_a_stop_text_ends_an_answer_before_it(tmp_path: Path) -> None:
    renderer = writing(tmp_path)

    async with serving(renderer, Engines(renderer, "123456")) as client:
        for stop in ("4", ["6", "4", "9"]):
            _, answer = await client.post("/completions", {"prompt": "1=", "stop": stop})
            assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("123", "stop")
        _, answer = await client.post("/completions", {"prompt": "1=", "max_tokens": 2, "stop": "4"})
        assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("12", "length")
    assert first_part("a b a", ("c",)) == "a b a"


async def test_the_openai_package_chats_and_each_request_is_its_own(tmp_path: Path) -> None:
    renderer = chatting(tmp_path)
    engines = Engines(renderer, "Hi")

    from openai import AsyncOpenAI

    async with serving(renderer, engines) as client, AsyncOpenAI(base_url=client.url, api_key=KEY) as ai:
        assert [model.id for model in (await ai.models.list()).data] == ["mine"]
        messages: list[Any] = [USER]
        found = await ai.chat.completions.create(model="x", messages=messages, n=2, temperature=0, stop="i")
        assert [choice.message.content for choice in found.choices] == ["H", "H"]
        parts = await ai.chat.completions.create(model="x", messages=messages, stream=True)
        assert "".join([part.choices[0].delta.content or "" async for part in parts]) == "Hi"
    assert len({tuple(request.tokens) for request in engines.asked}) == 1


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"temperature": 3}, "temperature: expected a number from 0 to 2, found 3"),
        ({"temperature": 0.001}, "temperature: expected 0 or a number of at least 0.01"),
        ({"temperature": True}, "temperature: expected a number"),
        ({"top_p": 0}, "top_p: expected a number"),
        ({"top_k": -2}, "top_k: expected an integer from -1 to 1048576, found -2"),
        ({"top_k": 2.5}, "top_k: expected an integer"),
        ({"min_p": 1.5}, "min_p: expected a number from 0 to 1, found 1.5"),
        ({"seed": 1.5}, "seed: expected an integer"),
        ({"n": 0}, "n: expected an integer from 1 to 4096"),
        ({"n": 4096, "prompt": ["1", "2"]}, "expected at most 4096 answers, found 8192"),
        ({"stop": [3]}, "stop: expected at most 16 texts"),
        ({"presence_penalty": 0.5}, "presence_penalty: expected none, because it is not supported"),
        ({"logit_bias": {"3": 1}}, "logit_bias: expected none"),
        ({"suffix": "1"}, "echo, suffix: expected neither"),
        ({"echo": True, "suffix": "1"}, "echo: expected neither stream nor suffix with it"),
        ({"echo": True, "stream": True}, "echo: expected neither stream nor suffix with it"),
        ({"echo": True, "logprobs": 5}, "logprobs: expected 0 or 1 with echo, found 5"),
        ({"echo": True, "max_tokens": -1}, "max_tokens: expected an integer of at least 0 with echo, found -1"),
        ({"echo": True, "prompt": [10**6]}, "prompt: expected one text, or a list of token ids from 0 to"),
        ({"echo": True, "prompt": "1" * 70}, "expected a prompt of at most 63 tokens, found 71 (context_overflow)"),
        ({"prompt": "1" * 70}, "expected a prompt of at most 63 tokens, found 71 (context_overflow)"),
        ({"prompt": "1" * 50}, "request: too long"),
        ({"prompt": 3}, "prompt: expected one text or one list of token ids"),
    ],
)
async def test_what_is_not_supported_is_refused(tmp_path: Path, body: dict[str, Any], message: str) -> None:
    renderer = writing(tmp_path)

    async with serving(renderer, Engines(renderer, "1")) as client:
        status, answer = await client.post("/completions", {"prompt": "1=", **body})
        assert status == 400
        assert message in answer["error"]["message"]
        neutral = {"presence_penalty": 0, "top_k": -1, "logit_bias": {}, "best_of": 1, "echo": False}
        assert (await client.post("/completions", {"prompt": "1=", **neutral}))[0] == 200


async def test_an_answer_is_at_most_as_long_as_the_context_has_room(tmp_path: Path) -> None:
    renderer = writing(tmp_path)
    engines = Engines(renderer, "123456")

    async with serving(renderer, engines, context=6) as client:
        _, answer = await client.post("/completions", {"prompt": "1+1=", "max_tokens": 100})
        assert answer["choices"][0]["finish_reason"] == "length"
    assert engines.asked[0].sampling.max_new_tokens == 1


@pytest.mark.parametrize("seed", range(3))
async def test_a_prompt_that_no_context_holds_is_refused_unread(tmp_path: Path, seed: int) -> None:
    draw, renderer = random.Random(seed), writing(tmp_path)
    text = "".join(draw.choices("19+= a", k=100)) * draw.randrange(10_000, 400_000)
    body = draw.choice([{"prompt": text}, {"prompt": ["1=", text], "n": 2}, {"prompt": text, "echo": True}])

    async with serving(renderer, Engines(renderer, "1")) as client:
        status, answer = await client.post("/completions", body)
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        assert f"a prompt of {len(text):,} characters has more than 64 tokens" in answer["error"]["message"]


async def test_words_that_are_no_http_are_not_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A traceback for each would let anybody fill the log."""
    renderer = writing(tmp_path)

    async with serving(renderer, Engines(renderer, "1")) as client:
        for words in (b"GET /\r\n\r\n", b"\x16\x03\x01\r\n\r\n", b"GET / HTTP/9.9\r\nA\0: b\r\n\r\n"):
            host, port = client.url.removeprefix("http://").removesuffix("/v1").split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(words)
            assert await reader.read()
            writer.close()
    assert not caplog.records


async def test_only_the_key_opens_it(tmp_path: Path) -> None:
    renderer = writing(tmp_path)
    engines = Engines(renderer, "1")

    async with serving(renderer, engines) as client:
        for key in ("sk-", "é", "Bearer"):
            assert (await client.post("/completions", {"prompt": "1="}, key))[0] == 401
        async with client.http.get(f"{client.url}/models") as response:
            assert response.status == 401
        async with client.http.get(
            f"{client.url}/models", headers={"Authorization": f"Bearer {client.key}"}
        ) as response:
            (model,) = (await response.json())["data"]
        assert model["max_model_len"] == 64, "clients refuse longer prompts themselves"
        assert (await client.post("/embeddings", {}))[0] == 404
    assert not engines.asked
