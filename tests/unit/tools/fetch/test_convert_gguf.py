"""Converts GGUF files that the tests write, with the rows of q and k in the order that llama.cpp has."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from safetensors.torch import load_file
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from titan_rl.preflight.pretrained import FetchFailed
from titan_rl.tools.fetch import convert_gguf
from titan_rl.tools.fetch.models import convert

NOWHERE = Path("no wheel: the package gguf is installed")
HEADS, KV_HEADS = 4, 2
CONFIG = LlamaConfig(
    hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS,
    vocab_size=260, max_position_embeddings=128, rope_parameters={"rope_type": "default", "rope_theta": 5e4},
    rms_norm_eps=1e-5, tie_word_embeddings=True, bos_token_id=256, eos_token_id=257, pad_token_id=257,
)  # fmt: skip


def in_pairs(rows: np.ndarray, heads: int) -> np.ndarray:
    """Return rows of q or k as llama.cpp's converter writes them."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def byte_letters() -> list[str]:
    """Return the letters that byte-level tokenizers write for bytes 0 to 255."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters, others = {b: chr(b) for b in plain}, 0
    for b in range(256):
        if b not in letters:
            letters[b] = chr(256 + others)
            others += 1
    return [letters[b] for b in range(256)]


def write_gguf(path: Path, model: LlamaForCausalLM, *, architecture: str = "llama", without: str = "") -> None:
    writer = GGUFWriter(path, architecture)
    writer.add_context_length(CONFIG.max_position_embeddings)
    writer.add_embedding_length(CONFIG.hidden_size)
    writer.add_block_count(CONFIG.num_hidden_layers)
    writer.add_feed_forward_length(CONFIG.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(CONFIG.rms_norm_eps)
    writer.add_rope_freq_base(5e4)
    writer.add_vocab_size(CONFIG.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([*byte_letters(), "<s>", "</s>", "he", "ll"])
    writer.add_token_types([1] * 256 + [3, 3, 1, 1])
    writer.add_token_merges(["h e", "l l"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)
    writer.add_chat_template("{% for m in messages %}<a>{{ m['content'] }}</s>{% endfor %}")
    names = {hf: gguf for gguf, hf in convert_gguf.WHOLE.items()}
    for layer in range(CONFIG.num_hidden_layers):
        names |= {
            f"model.layers.{layer}.{hf}.weight": f"blk.{layer}.{gguf}.weight" for gguf, hf in convert_gguf.PARTS.items()
        }
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" or names[name] == without:
            continue
        values = tensor.numpy()
        heads = CONFIG.num_attention_heads if "q_proj" in name else KV_HEADS if "k_proj" in name else 0
        values = in_pairs(values, heads) if heads else values
        if "up_proj" in name:
            writer.add_tensor(
                names[name], quantize(values, GGMLQuantizationType.Q8_0), raw_dtype=GGMLQuantizationType.Q8_0
            )
        else:
            writer.add_tensor(names[name], values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(CONFIG).eval()


def test_a_gguf_file_becomes_a_folder_of_the_same_model(tmp_path: Path, model: LlamaForCausalLM) -> None:
    write_gguf(tmp_path / "tiny.gguf", model)
    convert(tmp_path / "tiny.gguf", tmp_path / "hf", gguf=NOWHERE)  # compares with transformers' reading of the file
    found, wanted = load_file(tmp_path / "hf" / "model.safetensors"), model.state_dict()
    assert found.keys() == wanted.keys() - {"lm_head.weight"}
    for name, values in found.items():
        rounding = 0.02 * wanted[name].abs().max().item() if "up_proj" in name else 0
        assert (values - wanted[name]).abs().max() <= rounding, name
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (config["rope_theta"], config["rms_norm_eps"], config["tie_word_embeddings"]) == (5e4, 1e-5, True)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert tokenizer.decode(tokenizer.encode("hell, world")) == "hell, world"
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert chat == "<a>hi</s>"


def test_what_cannot_be_converted_is_named(tmp_path: Path, model: LlamaForCausalLM) -> None:
    def refusal(**wrong: str) -> str:
        write_gguf(tmp_path / "odd.gguf", model, **wrong)
        with pytest.raises(convert_gguf.GgufRefused) as refused:
            convert_gguf.main(tmp_path / "odd.gguf", tmp_path / "hf")
        return str(refused.value)

    assert refusal(architecture="qwen2") == 'expected general.architecture = "llama", found "qwen2"'
    assert "found none of model.layers.1.mlp.up_proj.weight" in refusal(without="blk.1.ffn_up.weight")
    assert not (tmp_path / "hf").exists()


def test_a_damaged_file_is_refused_by_name(tmp_path: Path, model: LlamaForCausalLM) -> None:
    write_gguf(tmp_path / "half.gguf", model)
    whole = (tmp_path / "half.gguf").read_bytes()
    (tmp_path / "half.gguf").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(FetchFailed, match=r"half\.gguf: expected a whole GGUF file, found "):
        convert(tmp_path / "half.gguf", tmp_path / "hf", gguf=NOWHERE)


@pytest.mark.parametrize(
    ("facts", "found"),
    [
        ({"llama.expert_count": 8}, "llama.expert_count = 8"),
        ({"llama.rope.scaling.type": "yarn"}, 'found "yarn"'),
        ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count = 8"),
        ({}, "expected the fact llama.attention.head_count, found none"),
    ],
)
def test_models_of_another_shape_are_refused(facts: dict[str, object], found: str) -> None:
    shape = {"llama.attention.head_count": 4, "llama.embedding_length": 64} if facts else {}
    with pytest.raises(convert_gguf.GgufRefused, match=found):
        convert_gguf.hf_config({"general.architecture": "llama", **shape, **facts}, tied=True)
