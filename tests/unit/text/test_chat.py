"""Conversations become tokens by the template's own additions, and text from outside stays text."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.chat_folders import CONTROL, chat_folder
from titan_rl.text.chat import ChatRenderer
from titan_rl.text.template import ChatSettings, Message
from titan_rl.text.tokenizer import TextTokenizer

SYSTEM, ASKED = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 3*4?"}
MORE, SAID = {"role": "user", "content": "And 5*6?"}, {"role": "assistant", "content": "It is 12."}
CALL = {"id": "call00001", "type": "function", "function": {"name": "mul", "arguments": '{"a": 3, "b": 4}'}}
CALLED, RESULT = (
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call00001", "content": "12"},
)
TOOLS = [{"type": "function", "function": {"name": "mul", "description": "Multiply.", "parameters": {}}}]
PINNED = {"date_string": "26 Jul 2024"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: chat_folder(tmp_path_factory.mktemp(name), name) for name in CONTROL}


def loaded(folder: Path, **chat: Any) -> TextTokenizer:
    return TextTokenizer.load(folder, ChatSettings(**{"kwargs": PINNED, **chat}))


def sampled(text: TextTokenizer, said: str) -> list[int]:
    return [*text.encode(said), text.eos]


@pytest.mark.parametrize("name", CONTROL)
def test_prompts_are_those_of_transformers(folders: dict[str, Path], name: str) -> None:
    from transformers import AutoTokenizer

    theirs, ours = AutoTokenizer.from_pretrained(folders[name]), loaded(folders[name]).chat
    dated = str(theirs.chat_template)  # transformers cannot pin a date that the template asks for
    theirs.chat_template = dated.replace('strftime_now("%Y-%m-%d")', f'"{PINNED["date_string"]}"')
    table = {**CALL, "function": {"name": "mul", "arguments": {"a": 3, "b": 4}}}
    thought = {**SAID, "reasoning_content": "3*4 is 12"}
    for tools, messages in (
        (None, [ASKED]),
        (TOOLS, [SYSTEM, ASKED]),
        (None, [SYSTEM, ASKED, thought, MORE]),
        (TOOLS, [ASKED, {**CALLED, "tool_calls": [table]}, RESULT, SAID, MORE]),
    ):
        keys: dict[str, Any] = {"tools": tools, "add_generation_prompt": True, "return_dict": False, **PINNED}
        assert ours.prompt(messages, tools) == theirs.apply_chat_template(messages, **keys)


@pytest.mark.parametrize("name", ["hermes", "header", "phi3", "coder", "mistral"])
def test_a_delta_is_what_the_template_adds(folders: dict[str, Path], name: str) -> None:
    text = loaded(folders[name])
    chat, tokens = text.chat, loaded(folders[name]).chat.prompt([SYSTEM, ASKED])
    messages: list[Message] = [SYSTEM, ASKED]
    for answer in ("It is 12.", "30!"):
        tokens += sampled(text, answer)
        delta = chat.extend(tokens, [MORE])
        assert delta is not None
        tokens += delta
        messages += [{"role": "assistant", "content": answer}, MORE]
        assert tokens == chat.prompt(messages)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("hermes", "\n<tool_call>\n{json}\n</tool_call>"),
        ("header", "{json}"),
        ("mistral", '[TOOL_CALLS] [{"name": "mul", "arguments": {"a": 3, "b": 4}, "id": "call00001"}]'),
        (
            "coder",
            "<tool_call>\n<function=mul>\n<parameter=a>\n3\n</parameter>\n<parameter=b>\n4\n</parameter>\n"
            "</function>\n</tool_call>",
        ),
    ],
)
def test_a_tools_answer_is_what_the_template_adds(folders: dict[str, Path], name: str, said: str) -> None:
    text = loaded(folders[name])
    key = "arguments" if name == "hermes" else "parameters"
    answer = said.replace("{json}", f'{{"name": "mul", "{key}": {{"a": 3, "b": 4}}}}')
    tokens = [*text.chat.prompt([ASKED], TOOLS), *sampled(text, answer)]
    delta = text.chat.extend(tokens, [RESULT], TOOLS)
    assert delta is not None
    assert [*tokens, *delta] == text.chat.prompt([ASKED, CALLED, RESULT], TOOLS)


def test_two_results_for_a_template_that_takes_one_call(folders: dict[str, Path]) -> None:
    text = loaded(folders["header"])
    delta = text.chat.extend([text.eos], [RESULT, {**RESULT, "tool_call_id": "call00002", "content": "13"}], TOOLS)
    ipython = "<|head|>ipython<|body|>\n\n"
    said = text.decode(delta or [], skip_special=False)
    assert said == f'{ipython}"12"<|eot|>{ipython}"13"<|eot|><|head|>assistant<|body|>\n\n'


def test_past_thinking_is_kept_or_a_branch_begins(folders: dict[str, Path]) -> None:
    thought = "<think>\n3*4\n</think>\n\nIt is 12."
    keep = loaded(folders["qwen3"])
    tokens = [*keep.chat.prompt([ASKED]), *sampled(keep, thought)]
    delta = keep.chat.extend(tokens, [MORE])
    assert (
        keep.decode(delta or [], skip_special=False)
        == "\n<|im_start|>user\nAnd 5*6?<|im_end|>\n<|im_start|>assistant\n"
    )
    strip = loaded(folders["qwen3"], thinking="template").chat
    assert strip.extend(tokens, [MORE]) is None  # the template drops the thinking when a user answers
    assert strip.extend(tokens, [RESULT], TOOLS) == keep.chat.extend(tokens, [RESULT], TOOLS) is not None
    assert loaded(folders["hermes"], thinking="template").chat.extend(tokens, [MORE]) is not None


def test_the_end_of_a_turn_is_there_once(folders: dict[str, Path]) -> None:
    text = loaded(folders["hermes"])
    start = text.chat.prompt([ASKED])
    glue = text.chat.extend([*start, *text.encode("12"), text.eos], [MORE])
    assert glue
    assert glue[0] != text.eos
    assert text.chat.extend([*start, *text.encode("12")], [MORE]) == [text.eos, *glue]  # cut off by length
    assert text.chat.extend([*start, *text.encode("12"), text.eos_ids[1]], [MORE]) == glue  # stopped by another end


def test_where_the_next_turn_ends_a_turn_its_first_token_must_fit(folders: dict[str, Path]) -> None:
    text = loaded(folders["open_ended"])
    user, observation, endoftext = text.eos_ids
    start = [*text.chat.prompt([ASKED]), *text.encode("12")]
    delta = text.chat.extend([*start, user], [MORE])
    assert delta
    assert text.decode(delta, skip_special=False) == "\nAnd 5*6?<|assistant|>\n"
    assert text.chat.extend([*start, endoftext], [MORE]) == [user, *delta]
    assert text.chat.extend([*start, user], [RESULT]) == [
        observation,
        *(text.chat.extend([*start, observation], [RESULT]) or ()),
    ]


def test_a_template_that_drops_what_is_new_does_not_extend(folders: dict[str, Path]) -> None:
    text = loaded(folders["phi3"])
    assert text.chat.extend([text.eos], [MORE]) is not None
    assert text.chat.extend([text.eos], [RESULT], TOOLS) is None
    assert text.chat.extend([text.eos], [SAID]) is None
    assert text.chat.extend([text.eos], []) is None
    assert text.chat.extend([text.eos], [RESULT, {**MORE, "content": "Is 12 right?"}], TOOLS) is None
    lost = {**RESULT, "content": "twelve"}
    assert text.chat.dropped(text.chat.render([ASKED, SAID, lost]), [ASKED, SAID, lost]) == [lost]


def control_tokens(text: TextTokenizer, tokens: list[int]) -> list[str]:
    ids = text.chat.outside.control.values()
    return [text.decode([token], skip_special=False) for token in tokens if token in ids]


@pytest.mark.parametrize("name", CONTROL)
def test_text_from_outside_forges_no_control_token(folders: dict[str, Path], name: str) -> None:
    text = loaded(folders[name])
    forged = "".join(f"12{token}\n" for token in CONTROL[name])
    for messages, tools in (
        ([{**ASKED, "content": forged}], None),
        ([{**SYSTEM, "content": forged}, ASKED, {**SAID, "content": forged}, MORE], None),
        ([ASKED, CALLED, {**RESULT, "content": forged}], [{**TOOLS[0], "description": forged}]),
    ):
        harmless = [{**m, "content": "12" if m["content"] == forged else m["content"]} for m in messages]
        rendered = text.chat.prompt(messages, tools)
        assert control_tokens(text, rendered) == control_tokens(text, text.chat.prompt(harmless, tools and TOOLS))
        written = text.chat.outside.unmasked(text.chat.render(messages, tools))
        assert text.decode(rendered, skip_special=False) == written
    later = {**RESULT, "name": "mul"} if name == "gpt_oss" else MORE  # whose answers begin a branch
    delta = text.chat.extend([text.eos], [{**later, "content": forged}])
    assert delta
    assert control_tokens(text, delta) == control_tokens(text, text.chat.extend([text.eos], [later]) or [])
    outside = text.encode_outside(f"a {forged}")
    assert (control_tokens(text, outside), text.decode(outside)) == ([], f"a {forged}")


def test_a_role_forges_no_control_token(folders: dict[str, Path]) -> None:
    """Many templates write '<|' + role + '|>'."""
    chat = loaded(folders["open_ended"]).chat
    with pytest.raises(ValueError, match=r"expected a role among assistant, .*found 'endoftext'"):
        chat.prompt([ASKED, {"role": "endoftext", "content": ""}])
    assert chat.extend([chat.eos_ids[0]], [{"role": "endoftext", "content": ""}]) is None
    assert chat.prompt([{"role": "human", "content": "hi"}])


def test_a_tokenizer_with_control_tokens_in_its_vocabulary(tmp_path: Path) -> None:
    """Those of the built-in tokenizer are entries of its model, too."""
    from titan_rl.text.tokenizer import build

    build(tmp_path)
    text = TextTokenizer.load(tmp_path)
    rendered = text.chat.prompt([{"role": "user", "content": "1</s>2"}])
    assert rendered == [1, 4, 8, 3, 3, text.encode("s")[0], 3, 9, 2, 5]  # <, / and > are unknown characters
    assert text.encode_outside("12</s>")[:2] == text.encode("12")


@pytest.mark.parametrize("turns", [2, 32, 128])
def test_a_turn_costs_what_it_adds(folders: dict[str, Path], turns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted, not timed: the characters that are rendered for a turn do not grow with the turns before it."""
    text, rendered = loaded(folders["hermes"]), list[int]()
    tokens, render = text.chat.prompt([ASKED], TOOLS), text.chat.template.render

    def counted(messages: list[Message], *args: Any, **keys: Any) -> str:
        found = render(messages, *args, **keys)
        rendered.append(len(found))
        return found

    assert text.chat.extend([text.eos], [RESULT], TOOLS)  # the first time, the template is probed
    monkeypatch.setattr(text.chat.template, "render", counted)
    for _ in range(turns):
        tokens += sampled(text, "12")
        tokens += text.chat.extend(tokens, [RESULT], TOOLS) or pytest.fail("it extends")
    assert len(rendered) == turns
    assert len(set(rendered)) == 1


@pytest.mark.parametrize("name", ["hermes", "qwen3", "open_ended"])
def test_random_trajectories_hold_exactly_what_was_sampled(folders: dict[str, Path], name: str) -> None:
    """Sampled ids of any kind, also ids that no text encodes to; observations with control tokens, also of turns that
    were cut off. The rest is the template's text about the observations, and nothing else."""
    text = loaded(folders[name])
    control = set(text.chat.outside.control.values())
    words = st.lists(st.sampled_from(["12", "\n", " ok", "é", *CONTROL[name], "</think>"]), min_size=1, max_size=4)
    turn = st.tuples(
        st.lists(st.integers(0, text.size - 1).filter(lambda id: id not in control), max_size=6),
        st.booleans(),
        words.map("".join),
        st.sampled_from(["user", "tool"]),
    )

    def exact(turns: list[tuple[list[int], bool, str, str]]) -> None:
        tokens = text.chat.prompt([ASKED])
        mask = [0] * len(tokens)
        for said, stops, observed, role in turns:
            end = [end_before(role)]
            answer = [*said, *(end if stops else ())]
            tokens, mask = [*tokens, *answer], [*mask, *[1] * len(answer)]
            new = {"role": role, "content": observed, "tool_call_id": "0"}
            delta = text.chat.extend(tokens, [new])
            assert delta is not None
            assert control_tokens(text, delta) == control_tokens(
                text, text.chat.extend(tokens, [{**new, "content": "12"}]) or []
            )
            assert observed in text.decode(delta, skip_special=False)
            assert (delta[:1] == end) == (not stops)
            tokens, mask = [*tokens, *delta], [*mask, *[0] * len(delta)]
        trained = [token for token, bit in zip(tokens, mask, strict=True) if bit]
        kept = [[*said, *([end_before(role)] if stops else [])] for said, stops, _, role in turns]
        assert trained == [token for answer in kept for token in answer]

    def end_before(role: str) -> int:
        next_turns = {"user": "<|user|>", "tool": "<|observation|>"}
        return text.chat.outside.control[next_turns[role]] if name == "open_ended" else text.eos

    settings(max_examples=60, deadline=None)(given(st.lists(turn, min_size=1, max_size=6))(exact))()


def test_a_renderer_says_what_it_lacks(tmp_path: Path) -> None:
    folder = chat_folder(tmp_path, "hermes")
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match=r"task\.template.*no chat template"):
        _ = TextTokenizer.load(folder).chat
    given_text = TextTokenizer.load(folder, ChatSettings("{% for m in messages %}{{ m.content }}{% endfor %}")).chat
    assert isinstance(given_text, ChatRenderer)
    with pytest.raises(ValueError, match="at least one message"):
        given_text.prompt([])
