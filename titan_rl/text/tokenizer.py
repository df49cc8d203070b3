"""Converts text to token ids and back, with the built-in character tokenizer or the one of a Hugging Face folder.

The Rust `tokenizers` library does all of it and imports in 0.04 s. Chats are rendered by chat.py.
"""

import json
import string
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from titan_rl.config.plain_files import refuse_other, text_of
from titan_rl.text.chat import ChatRenderer
from titan_rl.text.outside import OutsideText
from titan_rl.text.template import ChatSettings, ChatTemplate, Message, named_tokens, own_template

SPECIAL = ("<pad>", "<s>", "</s>", "<unk>", "<|user|>", "<|assistant|>", "<|system|>")
CHARACTERS = string.digits + "+-*=?., \n" + string.ascii_lowercase
VOCABULARY = {token: id for id, token in enumerate((*SPECIAL, *CHARACTERS))}
SIZE = len(VOCABULARY)
"""Number of tokens of the built-in tokenizer."""
BOS_FIRST = TemplateProcessing(single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", VOCABULARY["<s>"])])

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}{{ '<|' + message.role + '|>' + message.content + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def build(folder: Path) -> None:
    """Write the built-in tokenizer: one token per character, ids in the order of SPECIAL, then CHARACTERS."""
    tokenizer = Tokenizer(BPE(vocab=VOCABULARY, merges=[], unk_token="<unk>"))
    tokenizer.decoder = Fuse()  # without a decoder, decode puts a space between tokens
    tokenizer.post_processor = BOS_FIRST
    tokenizer.add_special_tokens(list(SPECIAL))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "clean_up_tokenization_spaces": False,
        "padding_side": "left",  # a batch of prompts is padded where no answer will follow
        "chat_template": CHAT_TEMPLATE,
    }
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


OWN_CHAT = ChatSettings()


@dataclass(frozen=True)
class TextTokenizer:
    folder: Path
    tokenizer: Tokenizer
    size: int  # rows that an embedding needs: the highest id + 1
    bos: int | None  # whether a prompt begins with it is up to the post-processor of tokenizer.json
    eos_ids: tuple[int, ...]  # every id that ends a turn; the tokenizer's own first
    pad: int
    settings: Mapping[str, Any] = field(hash=False)  # tokenizer_config.json, over special_tokens_map.json
    chat_settings: ChatSettings

    @classmethod
    def load(cls, folder: Path, chat: ChatSettings = OWN_CHAT) -> "TextTokenizer":
        file = folder / "tokenizer.json"
        if not file.exists():
            raise FileNotFoundError(
                f"no {file.name} in {folder}; a folder with only a slow tokenizer needs it: "
                "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER) writes one"
            )
        refuse_other(file)
        state = file.stat()
        tokenizer = _parsed(str(file), state.st_mtime_ns, state.st_size, state.st_ino)
        tokenizer.no_truncation()  # tokenizer.json may contain truncation and padding settings
        tokenizer.no_padding()
        if tokenizer.post_processor is None and tokenizer.get_vocab() == VOCABULARY:
            tokenizer.post_processor = BOS_FIRST  # the folder is from before the built-in tokenizer had one
        settings = {**_json(folder / "special_tokens_map.json"), **_json(folder / "tokenizer_config.json")}

        def named(key: str) -> int | None:
            token = settings.get(key)
            token = token.get("content") if isinstance(token, dict) else token
            if not isinstance(token, str | None):
                raise ValueError(f"{key} = {token!r} in {folder}, where a token was expected")
            return None if token is None else tokenizer.token_to_id(token)

        # Chat models end turns with more tokens than the tokenizer's EOS; generation_config.json lists all of them.
        listed = (_json(folder / name).get("eos_token_id") for name in ("generation_config.json", "config.json"))
        eos = [id for ids in (named("eos_token"), *listed) for id in (ids if isinstance(ids, list) else [ids])]
        eos_ids = tuple(dict.fromkeys(id for id in eos if id is not None))
        if odd := [id for id in eos_ids if type(id) is not int]:
            raise ValueError(f"eos_token_id = {odd[0]!r} in {folder}, where an integer was expected")
        if not tokenizer.get_vocab_size():
            raise ValueError(f"{file}: expected a vocabulary, found none")
        if not eos_ids:
            raise ValueError(f"{folder}: expected an eos_token in tokenizer_config.json or an eos_token_id, found none")
        pad = named("pad_token")
        own_template(folder, settings)  # raises ValueError if it cannot be read
        return cls(
            folder=folder,
            tokenizer=tokenizer,
            size=max(tokenizer.get_vocab().values()) + 1,
            bos=named("bos_token"),
            eos_ids=eos_ids,
            pad=eos_ids[0] if pad is None else pad,
            settings=settings,
            chat_settings=chat,
        )

    @property
    def eos(self) -> int:
        return self.eos_ids[0]

    @cached_property
    def opening(self) -> list[int]:
        """The tokens that the post-processor puts before a text: BOS, or none."""
        return [token for token in self.tokenizer.encode("").ids if token == self.bos][:1]

    @cached_property
    def _ids(self) -> frozenset[int]:
        """The ids that have a token: nearly always all below `size`."""
        return frozenset(self.tokenizer.get_vocab().values())

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token."""
        return max(map(len, self.tokenizer.get_vocab()))

    def encode(self, text: str) -> list[int]:
        """Return the tokens of the text, without BOS and EOS."""
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Return the text of the ids. An id without a token (a padded row of the embedding) becomes U+FFFD. The library
        drops it, and a reward would see a clean answer where the policy sampled garbage."""
        known, ids = self._ids, list(ids)
        if known.issuperset(ids):
            return self.tokenizer.decode(ids, skip_special_tokens=skip_special)
        runs = groupby(ids, key=known.__contains__)
        return "".join(
            self.tokenizer.decode(list(run), skip_special_tokens=skip_special)
            if has_token
            else "\ufffd" * len(list(run))
            for has_token, run in runs
        )

    def prompt(self, prompt: str | list[Message], template: Literal["plain", "chat"], system: str = "") -> list[int]:
        """Return the tokens that the policy reads, as transformers' AutoTokenizer returns them. "plain" is
        `tokenizer(prompt)`: the text, and BOS if the post-processor of tokenizer.json adds it. (transformers 5 ignores
        add_bos_token.) "chat" is the chat template up to the start of the assistant's answer; unlike transformers, it
        takes control tokens in messages for text. `system` comes first unless the messages have a system message."""
        if template == "plain":
            if not isinstance(prompt, str):
                raise ValueError(
                    f'task.template: expected "chat" for a prompt of {len(prompt)} messages, found "plain"'
                )
            return self.tokenizer.encode(prompt).ids
        return self.chat.prompt(messages_of(prompt, system))

    def encode_outside(self, text: str) -> list[int]:
        """Return the tokens of a text from outside, such as a tool's output: none of them is a control token."""
        return self._outside.encode(self._outside.masked(text))

    @property
    def control_ids(self) -> frozenset[int]:
        """The ids of control tokens, which no text from outside becomes."""
        return frozenset(self._outside.control.values())

    @cached_property
    def _outside(self) -> OutsideText:
        return OutsideText(self.tokenizer)

    @cached_property
    def chat(self) -> ChatRenderer:
        """The renderer of the settings' chat template, or of the folder's."""
        default, with_tools = own_template(self.folder, self.settings)
        given = self.chat_settings.template
        if not (given or default or with_tools):
            raise ValueError(
                f'task.template: expected "plain", or a task.chat_template, because {self.folder} has no chat '
                'template, found "chat"'
            )
        sources = (given, given) if given else (default or with_tools, with_tools)
        control = self._outside.control.values()
        stops = [id for id in self.chat_settings.stop_token_ids if id in control]
        template = ChatTemplate(sources[0], named_tokens(self.settings), self.chat_settings.kwargs, sources[1])
        return ChatRenderer(
            self.tokenizer,
            template,
            decode=partial(self.decode, skip_special=False),
            eos_ids=tuple(dict.fromkeys((*self.eos_ids, *stops))),
            thinking=self.chat_settings.thinking,
        )


def messages_of(prompt: str | list[Message], system: str) -> list[Message]:
    """Return a prompt as messages; `system` comes first unless they have a system message."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if system and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
    return messages


@lru_cache(maxsize=2)
def _parsed(file: str, *state: int) -> Tokenizer:
    """Read a tokenizer.json once: the checks of a run load it several times, and 128,000 tokens take 0.6 s."""
    return Tokenizer.from_file(file)


def _json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        found = json.loads(text_of(path))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{error} in {path}, where a JSON object was expected") from error
    if not isinstance(found, dict):
        raise ValueError(f"a {type(found).__name__} in {path}, where a JSON object was expected")
    return found
