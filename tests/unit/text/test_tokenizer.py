import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from titan_rl.text import tokenizer
from titan_rl.text.tokenizer import TextTokenizer

CHAT = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}, {"role": "user", "content": "ok?"}]
ROLES = st.sampled_from(["system", "user", "assistant"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer.build(path)
    return path


@pytest.fixture(scope="module")
def text(folder: Path) -> TextTokenizer:
    return TextTokenizer.load(folder)


def rewrite(folder: Path, name: str, **changes: object) -> None:
    path = folder / name
    path.write_text(json.dumps({**(json.loads(path.read_text()) if path.exists() else {}), **changes}))


def test_ids_are_fixed(text: TextTokenizer) -> None:
    assert (text.pad, text.bos, text.eos, text.eos_ids) == (0, 1, 2, (2,))
    assert text.size == tokenizer.SIZE <= 64
    assert text.encode("<unk><|user|><|assistant|><|system|>09+z") == [3, 4, 5, 6, 7, 16, 17, 51]
    assert text.encode("A") == [3]


def test_building_twice_writes_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    tokenizer.build(tmp_path)
    assert {f.name: f.read_bytes() for f in tmp_path.iterdir()} == {f.name: f.read_bytes() for f in folder.iterdir()}


def test_every_text_of_its_characters_survives(text: TextTokenizer) -> None:
    @given(st.text(tokenizer.CHARACTERS))
    def survives(content: str) -> None:
        ids = text.encode(content)
        assert len(ids) == len(content)
        assert text.decode(ids) == content

    survives()


def test_decode_drops_control_tokens_but_not_ids_without_a_token(text: TextTokenizer) -> None:
    assert text.decode([12, 2]) == "5"
    assert text.decode([12, 2], skip_special=False) == "5</s>"
    assert text.decode([12, 60, 63, 13, 2]) == "5\ufffd\ufffd6"
    assert text.decode([]) == ""


def test_plain_prompt_is_bos_and_text(text: TextTokenizer) -> None:
    assert text.prompt("1+2=", "plain") == [1, 8, 17, 9, 20]
    with pytest.raises(ValueError, match=r"task\.template"):
        text.prompt(CHAT, "plain")


def test_chat_prompt_is_the_template_opened_for_the_answer(text: TextTokenizer) -> None:
    def rendered(*args: object, **kwargs: object) -> str:
        return text.decode(text.prompt(*args, "chat", **kwargs), skip_special=False)  # type: ignore[arg-type]

    assert rendered("1+1=") == "<s><|user|>1+1=</s><|assistant|>"
    assert rendered(CHAT, system="add") == (
        "<s><|system|>add</s><|user|>1+1=</s><|assistant|>2</s><|user|>ok?</s><|assistant|>"
    )
    own = [{"role": "system", "content": "own"}, *CHAT]
    assert text.prompt(own, "chat", "add") == text.prompt(own, "chat")


@pytest.mark.parametrize("model_type", ["llama", "qwen3", None])
def test_transformers_reads_the_folder_the_same(tmp_path: Path, model_type: str | None) -> None:
    from transformers import AutoTokenizer

    tokenizer.build(tmp_path)
    if model_type:
        rewrite(tmp_path, "config.json", model_type=model_type)
    theirs, ours, content = AutoTokenizer.from_pretrained(tmp_path), TextTokenizer.load(tmp_path), "47+38=\n a,b.</s>"
    assert theirs(content, add_special_tokens=False).input_ids == ours.encode(content)
    assert theirs.decode(ours.encode(content), skip_special_tokens=True) == ours.decode(ours.encode(content))
    assert (theirs.pad_token_id, theirs.bos_token_id, theirs.eos_token_id, len(theirs)) == (0, 1, 2, tokenizer.SIZE)


def test_special_ids_come_from_wherever_a_folder_lists_them(tmp_path: Path) -> None:
    tokenizer.build(tmp_path)
    rewrite(tmp_path, "generation_config.json", eos_token_id=[4, 2])
    rewrite(tmp_path, "config.json", eos_token_id=5)
    rewrite(tmp_path, "tokenizer_config.json", eos_token={"content": "</s>"}, pad_token=None, bos_token=None)
    text = TextTokenizer.load(tmp_path)
    assert (text.eos, text.eos_ids, text.pad, text.bos) == (2, (2, 4, 5), 2, None)


CLASSES = ("PreTrainedTokenizerFast", "LlamaTokenizerFast", "Qwen2Tokenizer", "GPT2Tokenizer")


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
@pytest.mark.parametrize("added", ["bos", "bos and eos", "nothing"])
def test_a_plain_prompt_is_what_transformers_tokenizer_returns(tmp_path: Path, model_type: str, added: str) -> None:
    """Only the post-processor of tokenizer.json decides, and not the class or add_bos_token: a GPT-2 tokenizer
    names a BOS that it never adds."""
    from transformers import AutoTokenizer

    vocabulary = {token: id for id, token in enumerate(["<s>", "</s>", *"0123456789+="])}
    raw = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    raw.add_special_tokens(["<s>", "</s>"])
    single = {"bos": "<s> $A", "bos and eos": "<s> $A </s>", "nothing": "$A"}[added]
    if added != "nothing":
        raw.post_processor = TemplateProcessing(single=single, special_tokens=[("<s>", 0), ("</s>", 1)])
    raw.save(str(tmp_path / "tokenizer.json"))
    rewrite(tmp_path, "config.json", model_type=model_type)
    expected = {"bos": [0, 3, 12], "bos and eos": [0, 3, 12, 1], "nothing": [3, 12]}[added]
    for tokenizer_class, add_bos_token in itertools.product(CLASSES, (True, False)):
        keys = {"tokenizer_class": tokenizer_class, "add_bos_token": add_bos_token}
        rewrite(tmp_path, "tokenizer_config.json", bos_token="<s>", eos_token="</s>", **keys)
        text = TextTokenizer.load(tmp_path)
        assert AutoTokenizer.from_pretrained(tmp_path)("1+").input_ids == expected
        assert text.prompt("1+", "plain") == expected
        assert (text.encode("1+"), text.bos, text.eos) == ([3, 12], 0, 1)


@pytest.mark.parametrize("model_type", ["llama", "qwen3", None])
def test_every_prompt_is_what_transformers_tokenizer_returns(tmp_path: Path, model_type: str | None) -> None:
    from transformers import AutoTokenizer

    tokenizer.build(tmp_path)
    if model_type:
        rewrite(tmp_path, "config.json", model_type=model_type)
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), TextTokenizer.load(tmp_path)
    contents = st.text(tokenizer.CHARACTERS) | st.text()
    messages = st.lists(
        st.builds(lambda role, content: {"role": role, "content": content}, ROLES, contents), min_size=1
    )

    @given(contents, messages)
    @example("", [{"role": "user", "content": "1</s><s>2"}])
    def same(content: str, chat: list[dict[str, str]]) -> None:
        assert theirs(content).input_ids == ours.prompt(content, "plain")
        opened = ours.prompt(chat, "chat")
        assert [id for id in opened if id in (1, 2)] == [1, *[2] * len(chat)]
        if not any(token in message["content"] for message in chat for token in tokenizer.SPECIAL):
            assert opened == theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)

    same()


def test_a_folder_built_before_it_said_so_begins_prompts_with_bos(tmp_path: Path) -> None:
    tokenizer.build(tmp_path)
    saved = json.loads((tmp_path / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(saved | {"post_processor": None}))
    text = TextTokenizer.load(tmp_path)
    assert text.prompt("1+2=", "plain") == [1, 8, 17, 9, 20]
    assert json.loads(text.tokenizer.to_str()) == saved


def test_saved_truncation_and_padding_do_not_apply(tmp_path: Path) -> None:
    tokenizer.build(tmp_path)
    raw = TextTokenizer.load(tmp_path).tokenizer
    raw.enable_truncation(2)
    raw.enable_padding(length=9)
    raw.save(str(tmp_path / "tokenizer.json"))
    assert TextTokenizer.load(tmp_path).encode("12345") == [8, 9, 10, 11, 12]


def test_what_a_folder_lacks_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"^no tokenizer\.json in "):
        TextTokenizer.load(tmp_path)
    tokenizer.build(tmp_path)
    rewrite(tmp_path, "tokenizer_config.json", chat_template=None)
    with pytest.raises(ValueError, match="chat template"):
        TextTokenizer.load(tmp_path).prompt("1", "chat")
    rewrite(tmp_path, "tokenizer_config.json", eos_token=None)
    with pytest.raises(ValueError, match="eos_token"):
        TextTokenizer.load(tmp_path)


def test_the_data_side_imports_neither_torch_nor_transformers() -> None:
    program = (
        "import sys; from titan_rl.batch import advantages, packing; "
        "from titan_rl.tasks import prompts, rewards, task; from titan_rl.text import tokenizer; "
        "sys.exit(bool({'torch', 'transformers'} & sys.modules.keys()))"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
