"""Images that environments show: in the tokens of a turn, in the messages, and in the run's folder."""

import asyncio
import json
import random
from base64 import b64encode
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from support.agent_rollouts import AgentRollout
from support.picture_turns import Camera
from support.played import Played, encoded, playing, prompt_of
from titan_rl.ext.agents.adapters import Conversation, plain
from titan_rl.ext.agents.agent_session import Refused, Wish
from titan_rl.ext.agents.conversation import ChatText, PlainText
from titan_rl.ext.agents.episode_news import Contexts
from titan_rl.ext.agents.episodes import Reply
from titan_rl.ext.agents.message_tree import BadMessage, readable
from titan_rl.ext.agents.play import answer_to
from titan_rl.ext.agents.tools import Toolbox, ToolCall
from titan_rl.ext.vision import tiny_folder
from titan_rl.ext.vision.find_square import drawn
from titan_rl.ext.vision.kept_images import name_of
from titan_rl.ext.vision.pixels import placeholders_of
from titan_rl.ext.vision.turn_images import TurnImages
from titan_rl.text.template import ChatSettings
from titan_rl.text.tokenizer import TextTokenizer
from titan_rl.wire.types import ImagePlace

TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' }}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}<image>{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}"
    "</s>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
HERE = f"{__name__}:Scripted"
SIZES = ((56, 56), (112, 56), (30, 100))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder whose processor cuts large images into tiles."""
    made = tmp_path_factory.mktemp("folder")
    tiny_folder.write_tokenizer(made)
    tiny_folder.write_processor(made, 56, 4)
    file = made / "preprocessor_config.json"
    settings = json.loads(file.read_text()) | {"do_image_splitting": True, "size": {"longest_edge": 112}}
    file.write_text(json.dumps(settings))
    vision = {"image_size": 56, "patch_size": 14}
    token = TextTokenizer.load(made).encode("<image>")[0]
    (made / "config.json").write_text(json.dumps({"vision_config": vision, "scale_factor": 2, "image_token_id": token}))
    return made


@pytest.fixture(scope="module")
def shared(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[TurnImages, Path]:
    directory = tmp_path_factory.mktemp("run") / "images"
    return TurnImages(folder, directory), directory


def picture(chance: random.Random) -> bytes:
    file = BytesIO()
    color = tuple(chance.randrange(256) for _ in range(3))
    Image.new("RGB", chance.choice(SIZES), color).save(file, "PNG")
    return file.getvalue()


def given(data: bytes, chance: random.Random, folder: Path) -> Any:
    """Return an image in one of the forms that an environment may use."""
    (folder / name_of(data)[:8]).write_bytes(data)
    url = f"data:image/png;base64,{b64encode(data).decode()}"
    return chance.choice([data, url, str(folder / name_of(data)[:8]), {"bytes": data}])


class Scripted:
    """Shows the observations of a script, one after the other."""

    def __init__(self, row: dict[str, Any]) -> None:
        self._left = list(row["script"])

    def reset(self) -> Any:
        return self._left.pop(0)

    def step(self, reply: Any) -> tuple[Any, float, bool, dict[str, Any]]:
        return (self._left.pop(0), 0.0, False, {}) if self._left else (None, 1.0, True, {})


@pytest.mark.parametrize("chat", [False, True])
def test_drawn_conversations_have_their_images_in_the_turns_in_which_they_came(
    folder: Path, shared: tuple[TurnImages, Path], tmp_path: Path, chat: bool
) -> None:
    images, directory = shared
    settings = ChatSettings(TEMPLATE) if chat else None
    with playing(HERE, folder, chat=settings, images=images) as played:
        for seed in range(12):
            chance = random.Random(seed)
            names, script = list[list[str]](), list[Any]()
            for _ in range(chance.randint(1, 4)):
                data = [picture(chance) for _ in range(chance.randrange(3))]
                parts = [
                    {"type": chance.choice(["image", "input_image"]), "image": given(each, chance, tmp_path)}
                    for each in data
                ]
                parts.insert(chance.randint(0, len(parts)), {"type": "text", "text": "see <image>"})
                names.append([name_of(each) for each in data])
                script.append(parts if chance.random() < 0.5 else {"role": "user", "content": parts})
            check(played, script, names, chance, images)
            assert {name for each in names for name in each} <= {path.name for path in directory.iterdir()}


def check(played: Played, script: list[Any], names: list[list[str]], chance: random.Random, images: TurnImages) -> None:
    """Play a script with a policy that samples placeholders too."""
    placeholders = placeholders_of(str(played.tokenizer.folder))
    tokenizer, prompt = played.tokenizer, prompt_of("hello", {"script": script})
    said = [[*[images.id] * chance.choice([0, 1, 4]), *encoded("ok"), tokenizer.eos] for _ in script]
    (outcome,) = played.play([prompt], lambda _, turn: said[turn])
    assert outcome.status == "completed", outcome.error
    assert len(played.lines[0]) == len(script)
    seen = [name for each in names for name in each]
    for turn, (tokens, places) in enumerate(played.lines[0]):
        upto = sum(map(len, names[: turn + 1]))
        assert [name for name, _ in places] == seen[:upto]
        written = [images._tokens_of(images._size(name)) for name, _ in places]
        tiles = [each.count(images.id) // placeholders.run for each in written]
        found = placeholders.of_images(tokens, places, tiles)
        others = sum(each.count(images.id) for each in said[:turn])
        assert sum(map(len, found)) + others == tokens.count(images.id), "all others were sampled"
    read = [message for message in outcome.messages if message["role"] == "user"]
    shown = [[p["image"] for p in m["content"] if p["type"] == "image"] for m in read if isinstance(m["content"], list)]
    assert [each for each in shown if each] == [each for each in names if each]
    assert all(p["type"] in ("image", "text") for m in read if isinstance(m["content"], list) for p in m["content"])


def test_a_context_that_begins_anew_has_the_images_of_its_messages(
    folder: Path, shared: tuple[TurnImages, Path]
) -> None:
    """A template that cannot extend its own text renders all messages again, with the prompt's images."""
    images, directory = shared
    chance = random.Random(0)
    first, second = picture(chance), picture(chance)
    (directory / name_of(first)).write_bytes(first)
    renderer = ChatText(TextTokenizer.load(folder, ChatSettings(TEMPLATE)), images)
    own = {"role": "user", "content": [{"type": "image", "image": name_of(first)}]}
    shown = images.named([{"role": "user", "content": [{"type": "image", "image": second}]}])
    whole = renderer.extend([], [own, {"role": "assistant", "content": "<image>"}], shown, ())
    assert whole.kept == 0
    assert [name for name, _ in whole.images] == [name_of(first), name_of(second)]
    again = images.named([own])
    assert again == [own], "an image that the run has keeps its name"


@pytest.mark.parametrize(
    ("image", "problem"),
    [
        (b"no image", "ValueError: part 1 of message 1: expected a whole PNG"),
        (drawn(1, random.Random(0))[:60], "ValueError: part 1 of message 1: expected a whole PNG"),
        ("http://example.com/a.png", "nothing is downloaded"),
        ("absent.png", "expected an image that can be read"),
        (None, "expected an image"),
    ],
)
def test_a_bad_image_ends_its_episode_by_name(
    folder: Path, shared: tuple[TurnImages, Path], image: Any, problem: str
) -> None:
    script = ["a", [{"type": "image", "image": image}]]
    with playing(HERE, folder, images=shared[0]) as played:
        (outcome,) = played.play([prompt_of("hello", {"script": script})], lambda _, turn: "ok")
    assert outcome.status == "error"
    assert problem in outcome.error
    assert outcome.reward is None


def test_a_model_that_reads_no_images_refuses_them(folder: Path) -> None:
    script = [[{"type": "image", "image": drawn(1, random.Random(0))}]]
    with playing(HERE, folder, images=None) as played:
        (outcome,) = played.play([prompt_of("hello", {"script": script})], lambda _, turn: "ok")
    assert 'model.vision: expected "frozen" for an observation with an image, found "none"' in outcome.error


def test_a_template_that_drops_images_is_refused(folder: Path, shared: tuple[TurnImages, Path]) -> None:
    template = "{% for m in messages %}{{ m.content if m.content is string else 'x' }}</s>{% endfor %}"
    renderer = ChatText(TextTokenizer.load(folder, ChatSettings(template)), shared[0])
    shown = shared[0].named([{"role": "user", "content": [{"type": "image", "image": drawn(1, random.Random(0))}]}])
    with pytest.raises(ValueError, match="expected 1 <image>, one for each image, found 0"):
        renderer.open(prompt_of("hello"), Conversation(shown), ())


def test_contexts_keep_the_images_of_the_tokens_that_stay() -> None:
    one, two, three = (ImagePlace(name * 64, begin) for name, begin in (("a", 1), ("b", 4), ("c", 3)))
    contexts = Contexts([0, 9, 9], [one])
    line = contexts.open(-1, 3, [7, 9, 9], [two])
    contexts.close(line, 0, [5])
    assert line.images == [one, two]
    other = contexts.open(0, 3, [9, 9], [three])
    assert (other.tokens, other.images) == ([0, 9, 9, 9, 9], [one, three])
    assert line.images == [one, two]


def test_images_of_another_python_are_data_urls() -> None:
    data = drawn(1, random.Random(0))
    assert plain(data) == f"data:;base64,{b64encode(data).decode()}"
    assert plain(Image.open(BytesIO(data))).startswith("data:;base64,")


def test_plain_text_has_the_processors_tokens(folder: Path, shared: tuple[TurnImages, Path]) -> None:
    renderer = PlainText(TextTokenizer.load(folder), (), shared[0])
    shown = shared[0].named(
        [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "ab"},
                    {"type": "image", "image": drawn(1, random.Random(0))},
                    {"type": "text", "text": "c"},
                ],
            }
        ]
    )
    delta = renderer.open(prompt_of("hello"), shown, ())
    ((_, begin),) = delta.images
    prompt = prompt_of("hello").tokens
    assert (delta.kept, begin) == (len(prompt), len(prompt) + 2)
    assert delta.new[:2] == encoded("ab")
    assert delta.new[-1:] == encoded("c")
    assert delta.new[2:-1] == shared[0]._tokens_of((56, 56))


def test_a_tool_may_return_an_image(folder: Path, shared: tuple[TurnImages, Path]) -> None:
    tools = Toolbox([Camera({"seed": 3}).picture])
    call = ToolCall("picture", {}, "call_1")
    reply = Reply("", (), "stop", [call], message={"role": "assistant", "content": "", "tool_calls": []})
    step = asyncio.run(answer_to(Camera, tools, reply, "camera"))
    renderer = ChatText(TextTokenizer.load(folder, ChatSettings(TEMPLATE)), shared[0])
    observation = asyncio.run(renderer.named(step.observation))
    context = [*prompt_of("hello").tokens, renderer.tokenizer.eos]
    delta = renderer.extend(context, [], observation, tools.schemas)
    ((name, _),) = delta.images
    assert delta.kept == len(context)
    assert (shared[1] / name).is_file()
    assert tools.metrics()["tools/picture/calls"] == 1


def url_of(data: bytes) -> str:
    return f"data:image/png;base64,{b64encode(data).decode()}"


def as_clients_send(data: bytes, kept: bool, chance: random.Random) -> dict[str, Any]:
    """Return an image as a part of a request. `kept`: the run has it already."""
    sent = name_of(data) if kept and chance.random() < 0.5 else url_of(data)
    return chance.choice(
        [{"type": "image_url", "image_url": {"url": sent}}, {"type": "input_image", "image_url": sent}],
    )


@pytest.mark.parametrize("seed", range(8))
async def test_agents_continue_edit_and_exchange_images_at_random(
    folder: Path, shared: tuple[TurnImages, Path], seed: int
) -> None:
    images, _ = shared
    chance = random.Random(seed)
    renderer = ChatText(TextTokenizer.load(folder, ChatSettings(TEMPLATE)), images)
    tokenizer = renderer.tokenizer
    said = [*encoded("ok"), images.id, tokenizer.eos]
    rollout = AgentRollout(renderer, lambda context: said)
    talk, names = list[dict[str, Any]](), list[list[str]]()
    used = list[bytes]()
    for turn in range(6):
        if len(talk) > 1 and chance.random() < 0.3:
            del talk[-2:], names[-1:]  # asks again, with other images
        data = [chance.choice(used) if used and chance.random() < 0.3 else picture(chance) for _ in range(turn % 3)]
        parts: list[Any] = [as_clients_send(each, each in used, chance) for each in data]
        used += data
        talk.append({"role": "user", "content": [*parts, {"type": "text", "text": "see <image>"}]})
        names.append([name_of(each) for each in data])
        answered = await rollout.session.chat(readable(json.loads(json.dumps(talk))), [], Wish())
        talk.append(answered.message)
        places = rollout.shown[-1]
        assert [name for name, _ in places] == [name for each in names for name in each]
        tokens, _ = rollout.engine[-1]
        placeholders = placeholders_of(str(folder))
        tiles = [images._tokens_of(images._size(name)).count(images.id) // placeholders.run for name, _ in places]
        found = placeholders.of_images(tokens, places, tiles)
        assert sum(map(len, found)) + len(names) - 1 == tokens.count(images.id), "all others were sampled"
    rollout.check()
    assert {image for branch in rollout.recorded.branches() for image in branch.images} >= {*rollout.shown[-1]}


async def test_what_an_agent_may_not_send(folder: Path, shared: tuple[TurnImages, Path]) -> None:
    images, directory = shared
    renderer = ChatText(TextTokenizer.load(folder, ChatSettings(TEMPLATE)), images)
    rollout = AgentRollout(renderer, lambda context: [renderer.tokenizer.eos])
    for path in (str(directory), "https://h/a.png", "", "0" * 63, None):
        sent = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": path}}]}]
        with pytest.raises(BadMessage, match="expected an image as a data URL, or by its name in the row"):
            readable(sent)
    cut = url_of(picture(random.Random(0))[:60])
    for value, problem in ((cut, "expected a whole"), ("0" * 64, "expected an image that can be read")):
        sent = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": value}}]}]
        with pytest.raises(Refused, match=problem):
            await rollout.session.chat(readable(sent), [], Wish())
    with pytest.raises(Refused, match="send images to /v1/chat/completions"):
        await rollout.session.generate([images.id], Wish())
    blind = AgentRollout(ChatText(renderer.tokenizer), lambda context: [renderer.tokenizer.eos])
    sent = [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url_of(picture(random.Random(1)))}}]}
    ]
    with pytest.raises(Refused, match='expected "frozen" for an observation with an image'):
        await blind.session.chat(readable(sent), [], Wish())
    assert rollout.asked == blind.asked == 0
