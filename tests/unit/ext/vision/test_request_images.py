"""Images that clients of `titan_rl serve` send: read for their own answer, refused by name, and deleted afterwards."""

import asyncio
import random
import socket
from base64 import b64encode
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from io import BytesIO
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from PIL import Image

from support.agent_rollouts import Client
from titan_rl.ext.agents.conversation import ChatText, PlainText, Renderer
from titan_rl.ext.agents.message_tree import readable
from titan_rl.ext.agents.policy_endpoint import MOST_CHARACTERS, PolicyEndpoint
from titan_rl.ext.vision import tiny_folder, turn_images
from titan_rl.ext.vision.kept_images import name_of
from titan_rl.ext.vision.request_images import ServedImages
from titan_rl.tasks.examples import RowImage
from titan_rl.text.template import ChatSettings
from titan_rl.text.tokenizer import TextTokenizer
from titan_rl.wire.errors import RequestRefused
from titan_rl.wire.types import Completion, Request, Sampling

TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' }}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}<image>{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}"
    "</s>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
KEY = "sk-test"
CONTEXT = 128
RUN = 4  # placeholders of an image


class Processor:
    """Writes each image as its placeholders, without importing transformers."""

    token = "<image>"

    def __init__(self, folder: str) -> None:
        (self.id,) = TextTokenizer.load(Path(folder)).encode(self.token)

    def tokens(self, size: tuple[int, int]) -> list[int]:
        return [self.id] * RUN


class Engines:
    """Reads the images of a request before and after it waits, as an engine whose batch is full."""

    def __init__(self, renderer: Renderer, directory: Path) -> None:
        self.end, self.directory = renderer.tokenizer.eos, directory
        self.asked: list[Request] = []
        self.refuses: set[int] = set()  # requests by their seed
        self.missed: list[str] = []  # images that were not there

    async def generate(self, request: Request) -> list[Completion]:
        self.asked.append(request)
        for _ in range(3):
            await asyncio.sleep(0.002)
            names = [name for name, _ in request.images]
            self.missed += [name for name in names if not (self.directory / name).is_file()]
            if request.seeds[0] in self.refuses:
                raise RequestRefused("request: refused on order")
        for name, begin in request.images:
            assert name_of((self.directory / name).read_bytes()) == name
            assert len(set(request.tokens[begin : begin + RUN])) == 1
        return [Completion([self.end], [-0.5], [0], "stop")]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(turn_images, "ImageProcessor", Processor)
    tiny_folder.write_tokenizer(tmp_path / "model")
    return tmp_path / "model"


@asynccontextmanager
async def serving(folder: Path, *, sees: bool = True, chat: bool = True) -> AsyncIterator[tuple[Client, Engines]]:
    directory = folder.parent / "images"
    images = ServedImages(folder, directory) if sees else None
    renderer = (
        ChatText(TextTokenizer.load(folder, ChatSettings(TEMPLATE))) if chat else PlainText(TextTokenizer.load(folder))
    )
    engines, sampling = Engines(renderer, directory), Sampling(8, stop_token_ids=(renderer.tokenizer.eos,))
    options: dict[str, Any] = {"key": KEY, "sampling": sampling, "context": CONTEXT, "model": "mine"}
    endpoint = PolicyEndpoint(engines, renderer, images=images, **options)
    bound = socket.create_server(("127.0.0.1", 0))
    await endpoint.listen(bound)
    async with aiohttp.ClientSession() as http:
        yield Client(http, f"http://127.0.0.1:{bound.getsockname()[1]}/v1", KEY), engines
    await endpoint.close()
    assert not engines.missed
    assert not directory.exists() or not [*directory.iterdir()], "a request ended, and its images stayed"


def picture(color: int, sides: tuple[int, int] = (56, 56)) -> bytes:
    file = BytesIO()
    Image.new("L", sides, color).save(file, "PNG")
    return file.getvalue()


def url_of(data: bytes) -> str:
    return f"data:image/png;base64,{b64encode(data).decode()}"


def asking(*urls: str, text: str = "which?") -> dict[str, Any]:
    parts: list[Any] = [{"type": "image_url", "image_url": {"url": url, "detail": "high"}} for url in urls]
    return {"model": "x", "messages": [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]}


@pytest.mark.parametrize("seed", range(4))
async def test_requests_at_the_same_time_read_their_own_images(folder: Path, seed: int) -> None:
    """Equal texts, shared images, several answers; some are refused by an engine, and some clients leave."""
    chance, pool = random.Random(seed), [picture(color) for color in range(4)]

    async with serving(folder) as (client, engines):
        sent = dict[int, list[str]]()  # by seed

        async def one(number: int) -> None:
            shown, n = chance.choices(pool, k=chance.randrange(4)), chance.randint(1, 3)
            seeds = range(10 * number, 10 * number + n)
            sent.update({each: [name_of(data) for data in shown] for each in seeds})
            if refused := chance.random() < 0.3:
                engines.refuses.add(chance.choice(seeds))
            asked = client.post("/chat/completions", asking(*map(url_of, shown)) | {"seed": seeds[0], "n": n})
            if leaves := chance.random() < 0.3:
                asked = asyncio.wait_for(asked, chance.random() * 0.02)
            with suppress(TimeoutError):
                status, answer = await asked
                assert status == (400 if refused else 200), answer
                assert refused or len(answer["choices"]) == n
                return
            assert leaves

        await asyncio.gather(*map(one, range(24)))
        await client.post("/chat/completions", asking())
        await asyncio.sleep(0.05)  # for requests whose clients have left
    assert all([name for name, _ in request.images] == sent.get(request.seeds[0], []) for request in engines.asked)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (asking("https://h/a.png"), "messages[0].content: expected an image as a data URL, found {"),
        (asking("0" * 64), "messages[0].content: expected an image as a data URL, found {"),
        (asking("/etc/passwd"), "messages[0].content: expected an image as a data URL, found {"),
        (asking(""), "messages[0].content: expected an image as a data URL, found {"),
        (asking("data:image/png,0"), "part 1 of message 1: expected a data URL in base64, found 'data:image/png'"),
        (asking("data:image/png;base64,?"), "part 1 of message 1: expected a data URL in base64, found "),
        (asking(url_of(picture(0)), url_of(picture(1)[:60])), "part 2 of message 1: expected a whole PNG, JPEG"),
        (asking(url_of(picture(0, (8000, 8000)))), "expected at most 33,554,432 pixels, found 8000 x 8000"),
        (
            asking(*[url_of(picture(0))] * 40),
            f"expected a prompt of at most {CONTEXT - 1} tokens, found 169, with the placeholders of 40 images",
        ),
        (asking(url_of(picture(0)), text="1" * MOST_CHARACTERS), "characters has more than 128 tokens"),
        (asking(url_of(picture(0))) | {"n": 4096, "seed": 0.5}, "seed: expected an integer"),
    ],
)
async def test_what_cannot_be_read_is_refused(folder: Path, body: dict[str, Any], message: str) -> None:
    async with serving(folder) as (client, engines):
        status, answer = await client.post("/chat/completions", body)
        assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
        assert message in answer["error"]["message"]
    assert not engines.asked


async def test_an_image_may_have_more_bytes_than_a_text(folder: Path) -> None:
    noise = BytesIO()
    Image.effect_noise((512, 512), 99).save(noise, "PNG")
    assert len(noise.getvalue()) > MOST_CHARACTERS
    async with serving(folder) as (client, _):
        assert (await client.post("/chat/completions", asking(url_of(noise.getvalue()))))[0] == 200


async def test_other_forms_of_messages_and_prompts_stay(folder: Path) -> None:
    async with serving(folder) as (client, engines):
        part = {"type": "text", "text": "which?"}
        for content in ("which?", ["which?"], [part], part):
            body = {"messages": [{"role": "user", "content": content}]}
            assert (await client.post("/chat/completions", body))[0] == 200
        assert len({tuple(request.tokens) for request in engines.asked}) == 1
        assert not any(request.images for request in engines.asked)
        (id,) = TextTokenizer.load(folder).encode("<image>")
        for prompt, echo in (([id], False), ([id], True)):
            status, answer = await client.post("/completions", {"prompt": prompt, "echo": echo})
            assert (status, answer["error"]["code"]) == (400, "invalid_tokens")
        status, answer = await client.post("/completions", {"prompt": asking(url_of(picture(0)))["messages"]})
        assert status == 400
        assert "prompt: expected one text or one list of token ids, found [{" in answer["error"]["message"]
        assert (await client.post("/completions", {"prompt": "<image>"}))[0] == 200
        assert id not in engines.asked[-1].tokens


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sees": False}, 'model.vision: expected "frozen" for an observation with an image, found "none"'),
        ({"chat": False}, 'this run has no chat template: set task.template = "chat"'),
    ],
)
async def test_a_server_without_sight_refuses_images(folder: Path, settings: dict[str, bool], message: str) -> None:
    async with serving(folder, **settings) as (client, engines):
        status, answer = await client.post("/chat/completions", asking(url_of(picture(0))))
        assert status == 400
        assert message in answer["error"]["message"]
    assert not engines.asked


def test_an_ending_request_leaves_the_images_of_the_next(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, shown = folder.parent / "images", readable(asking(url_of(picture(0)))["messages"])
    served, first = ServedImages(folder, directory), ExitStack()
    first.enter_context(served.request()).named(shown)
    keep = served.turns.keep

    def late(images: Sequence[RowImage]) -> None:
        keep(images)
        first.close()

    monkeypatch.setattr(served.turns, "keep", late)
    with served.request() as second:
        second.named(shown)
        assert [path.name for path in directory.iterdir()] == [name_of(picture(0))]
    assert not [*directory.iterdir()]


async def test_a_client_that_leaves_while_its_image_is_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began, goes_on = asyncio.Event(), asyncio.Event()
    loop, keep = asyncio.get_running_loop(), ServedImages.hold

    def slow(images: ServedImages, names: Any) -> None:
        loop.call_soon_threadsafe(began.set)
        asyncio.run_coroutine_threadsafe(goes_on.wait(), loop).result(10)
        keep(images, names)

    monkeypatch.setattr(ServedImages, "hold", slow)
    async with serving(folder) as (client, engines):
        asked = asyncio.ensure_future(client.post("/chat/completions", asking(url_of(picture(0)))))
        await began.wait()
        asked.cancel()
        await asyncio.sleep(0.05)  # for the server to notice
        goes_on.set()
        await asyncio.sleep(0.05)
    assert not engines.asked
