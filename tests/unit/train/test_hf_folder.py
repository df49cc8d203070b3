import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from titan_rl.config.sections import AlgorithmSection, Config, ModelSection, RolloutSection, TaskSection
from titan_rl.preflight.plan import Policy, policy_of
from titan_rl.preflight.shapes import shape_of
from titan_rl.record.lines import Unwritable
from titan_rl.tasks.task import Example, Task
from titan_rl.text import tokenizer as characters
from titan_rl.tools.export_proof import ProofFailed, compare_prompts
from titan_rl.train.hf_folder import export_policy, new_folder, write_assets
from titan_rl.wire.errors import RankFailed

TEMPLATE = "{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}<|end|>{% endfor %}<|turn|>assistant\n"
CHATS = st.lists(
    st.builds(lambda role, text: {"role": role, "content": text}, st.sampled_from(["system", "user"]), st.text()),
    min_size=1,
)


def read(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / name).read_text())


def foreign(folder: Path, *, bos: bool) -> Path:
    """A user's model folder: a byte-level tokenizer saved with truncation and padding, two tokens that end a turn, a
    sampling generation_config, and the dtype under its old name."""
    folder.mkdir()
    alphabet = ["<|begin|>", "<|end|>", "<|turn|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    raw = Tokenizer(BPE(vocab={token: id for id, token in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(alphabet[:3])
    if bos:
        raw.post_processor = TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", 0)])
    raw.enable_truncation(3)
    raw.enable_padding(length=5)
    raw.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<|begin|>", "eos_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **names}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    shape = shape_of(ModelSection(name="qwen3", vocab_size=512))
    config = shape.hf_config(bos=None, eos=[1, 2], pad=None) | {"torch_dtype": "bfloat16"}
    del config["dtype"]
    (folder / "config.json").write_text(json.dumps(config))
    sampling = {"do_sample": True, "temperature": 0.6, "top_k": 20, "eos_token_id": [1, 2], "max_new_tokens": 2048}
    (folder / "generation_config.json").write_text(json.dumps(sampling))
    return folder


def exported(folder: Path, policy: Policy, dtype: str = "float32") -> Path:
    folder.mkdir()
    write_assets(policy, folder, dtype)
    return folder


@pytest.mark.parametrize("bos", [True, False])
def test_transformers_reads_a_users_tokenizer_as_training_did(tmp_path: Path, bos: bool) -> None:
    from transformers import AutoTokenizer

    source = foreign(tmp_path / "source", bos=bos)
    policy = policy_of(Config(model=ModelSection(name="qwen3", hf_assets_path=str(source))), tmp_path / "unused")
    theirs = AutoTokenizer.from_pretrained(exported(tmp_path / "out", policy))
    assert policy.tokenizer.prompt("12+34=", "plain")[:1] == ([0] if bos else policy.tokenizer.encode("1"))

    @given(st.text(), CHATS)
    def same(text: str, chat: list[dict[str, str]]) -> None:
        ids = policy.tokenizer.prompt(text, "plain")
        assert theirs(text).input_ids == ids
        assert theirs.decode(ids, skip_special_tokens=True) == policy.tokenizer.decode(ids)
        opened = theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        assert opened == policy.tokenizer.prompt(chat, "chat")

    same()


def test_a_given_chat_template_is_exported(tmp_path: Path) -> None:
    """And the proof of an export knows the variables, and which chats transformers reads otherwise."""
    source = foreign(tmp_path / "source", bos=True)
    given_template = TEMPLATE.replace("{{ m.role }}", "{{ prefix }}{{ m.role }}")
    task = TaskSection(template="chat", chat_template=given_template, chat_template_kwargs={"prefix": "a "})
    config = Config(model=ModelSection(name="qwen3", hf_assets_path=str(source)), task=task)
    policy = policy_of(config, tmp_path / "unused")
    out = exported(tmp_path / "out", policy)
    assert (out / "chat_template.jinja").read_text() == given_template
    questions = [Example(text, "") for text in ("12+34=", "a<|end|>b")]
    compare_prompts(out, Task([], questions, "chat"), policy.tokenizer)
    (out / "chat_template.jinja").write_text(TEMPLATE)
    with pytest.raises(ProofFailed, match=r"for '12\+34=', as in training, from transformers"):
        compare_prompts(out, Task([], questions, "chat"), policy.tokenizer)


def test_generation_is_greedy_and_stops_where_the_runs_does(tmp_path: Path) -> None:
    source = foreign(tmp_path / "source", bos=True)
    model = ModelSection(name="qwen3", hf_assets_path=str(source))
    rollout = RolloutSection(max_new_tokens=9, stop_token_ids=[7])
    out = exported(tmp_path / "out", policy_of(Config(model=model, rollout=rollout), tmp_path / "unused"))
    assert read(out, "generation_config.json") == {
        "bos_token_id": 0,
        "eos_token_id": [1, 2, 7],
        "pad_token_id": 1,
        "do_sample": False,
        "max_new_tokens": 9,
    }
    config = read(out, "config.json")
    given_ids = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    assert given_ids == {"bos_token_id": 0, "eos_token_id": [1, 2], "pad_token_id": 1}
    assert "torch_dtype" not in config
    assert config["dtype"] == "float32"


def test_a_reward_model_does_not_take_eos_for_padding(tmp_path: Path) -> None:
    source = foreign(tmp_path / "source", bos=True)
    reward = AlgorithmSection(name="reward_model")
    for model, pad in ((ModelSection(), 0), (ModelSection(name="qwen3", hf_assets_path=str(source)), None)):
        config = Config(model=model, algorithm=reward)
        out = exported(tmp_path / f"out-{pad}", policy_of(config, tmp_path / "own"), "bfloat16")
        assert not (out / "generation_config.json").exists()
        written = read(out, "config.json")
        assert (written["pad_token_id"], written["dtype"], written["num_labels"]) == (pad, "bfloat16", 1)


def test_a_folder_from_before_bos_was_saved_is_mended(tmp_path: Path) -> None:
    characters.build(tmp_path / "new")
    policy = policy_of(Config(), tmp_path / "own")
    old = read(policy.folder, "tokenizer.json") | {"post_processor": None}
    (policy.folder / "tokenizer.json").write_text(json.dumps(old))
    source = ModelSection(hf_assets_path=str(policy.folder))
    out = exported(tmp_path / "out", policy_of(Config(model=source), tmp_path / "unused"))
    assert (out / "tokenizer.json").read_bytes() == (tmp_path / "new" / "tokenizer.json").read_bytes()


def test_a_folder_is_whole_or_absent_and_an_older_one_is_kept(tmp_path: Path) -> None:
    final = tmp_path / "hf"

    def fail() -> None:
        with new_folder(final) as partial:
            (partial / "half").touch()
            raise OSError("disk full")

    with pytest.raises(OSError, match="full"):
        fail()
    assert not list(tmp_path.iterdir())
    for content in ("first", "second"):
        with new_folder(final) as partial:
            (partial / "file").write_text(content)
    assert ((final / "file").read_text(), (tmp_path / "hf.1" / "file").read_text()) == ("second", "first")


FULL_DISK = "Traceback\nOSError: [Errno 28] No space left on device"


@pytest.mark.parametrize(("details", "kind"), [(FULL_DISK, Unwritable), ("Traceback\nValueError: no", RankFailed)])
def test_a_full_disk_is_no_fault_of_a_rank(tmp_path: Path, details: str, kind: type[Exception]) -> None:
    class Trainers:
        async def export(self, folder: str) -> None:
            Path(folder, "model.safetensors").write_bytes(b"half of it")
            raise RankFailed("trainer[dp=0 tp=0] failed in export", details, rank="trainer[dp=0 tp=0]", kind="OSError")

    trainers: Any = Trainers()
    with pytest.raises(kind, match=f"^{tmp_path}/hf cannot be written: No space" if kind is Unwritable else "failed"):
        asyncio.run(export_policy(trainers, trainers, tmp_path / "hf"))  # the setup is not reached
    assert list(tmp_path.iterdir()) == [], "nothing half-written stays"
