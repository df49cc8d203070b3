"""Text from outside forges nothing, with every kind of tokenizer that spells control tokens its own way."""

import json
from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from support.chat_folders import trained
from titan_rl.text.outside import OutsideText

CONTROL = ("<s>", "</s>", "<|end|>", "<|end|>x")
LETTERS = sorted(set("".join(CONTROL) + "▁ab 12"))


def byte_level() -> Tokenizer:
    return Tokenizer.from_str(trained())


def metaspace() -> Tokenizer:
    """As Llama 2 and later Mistrals: control tokens are entries of the model, and the first word begins with ▁."""
    words = {token: id for id, token in enumerate(dict.fromkeys([*CONTROL[:2], *LETTERS, "▁a", "ab"]))}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[("▁", "a"), ("a", "b")], unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    return tokenizer


def unigram() -> Tokenizer:
    """As T5 and XLM: the model may choose any entry of its vocabulary, a control token too."""
    pieces = [(token, 0.0) for token in ("<unk>", *CONTROL[:3])] + [(letter, -5.0) for letter in LETTERS]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0))
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def whole_words() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1, "a": 2, "12": 3}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def prepending() -> Tokenizer:
    """As Phi 3: every piece between control tokens begins with ▁, and control tokens take the space after them."""
    tokenizer = Tokenizer(models.BPE(vocab={letter: id for id, letter in enumerate(LETTERS)}, merges=[]))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(token, rstrip=True, normalized=False, special=True) for token in CONTROL])
    return tokenizer


KINDS: list[Callable[[], Tokenizer]] = [byte_level, metaspace, unigram, whole_words, prepending]


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_from_outside_is_a_control_token(kind: Callable[[], Tokenizer]) -> None:
    tokenizer = kind()
    tokenizer.add_special_tokens(list(CONTROL))
    outside = OutsideText(tokenizer)
    unknown = tokenizer.model.unk_token if hasattr(tokenizer.model, "unk_token") else "<unk>"
    control = {id for token, id in outside.control.items() if token != unknown}

    @given(st.lists(st.sampled_from([*CONTROL, "a", "12", " ", "<|end", "|>", "<"])).map("".join))
    @example("a</s> a")
    @example("<|end|>x")
    def sound(text: str) -> None:
        tokens = outside.encode(outside.masked(text))
        assert control.isdisjoint(tokens)
        around = outside.encode(f"</s>{outside.masked(text)}<|end|>")
        assert [token for token in around if token in control] == [outside.control["</s>"], outside.control["<|end|>"]]
        if not any(token in text for token in CONTROL):
            assert tokens == tokenizer.encode(text, add_special_tokens=False).ids
            assert around == tokenizer.encode(f"</s>{text}<|end|>", add_special_tokens=False).ids
        if kind is byte_level:
            assert tokenizer.decode(tokens, skip_special_tokens=False) == text

    sound()


def test_every_part_of_a_message_is_masked() -> None:
    tokenizer = byte_level()
    tokenizer.add_special_tokens(list(CONTROL))
    outside = OutsideText(tokenizer)
    call = {"function": {"name": "f</s>", "arguments": {"a<s>": ["<|end|>", {"b": 1.5, "c": None}]}}}
    message = {"role": "tool", "content": "x</s>", "tool_calls": [call]}
    masked = outside.masked(message)
    assert not any(token in json.dumps(masked, ensure_ascii=False) for token in CONTROL)
    assert json.loads(outside.unmasked(json.dumps(masked, ensure_ascii=False))) == message


def test_marks_of_another_process_are_text() -> None:
    """A mark holds a number that is unknown outside."""
    tokenizer = byte_level()
    tokenizer.add_special_tokens(list(CONTROL))
    theirs, ours = OutsideText(tokenizer), OutsideText(tokenizer)
    mark = theirs.masked("</s>")
    assert ours.encode(ours.masked(mark)) == tokenizer.encode(mark, add_special_tokens=False).ids
    assert ours.encode(ours.masked(f"{mark}</s>")) == ours.encode(mark) + ours.encode(ours.masked("</s>"))
