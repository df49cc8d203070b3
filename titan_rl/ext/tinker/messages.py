"""What clients send and get: checked values, and answers in the SDK's two formats, JSON and Protocol Buffers."""

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from titan_rl.batch.packing import UpTo, pack, unpack
from titan_rl.ext.tinker.protobuf import field, fields, integers
from titan_rl.ext.tinker.served import AdamStep, ServedLoss
from titan_rl.wire.types import Batch, Completion, Rows, Sample, Sampling

DTYPES = {1: np.dtype("<f4"), 2: np.dtype("<i8"), 3: np.dtype("<i4")}
FLOAT32 = 1
STOP, LENGTH = 0, 1
MOST_SAMPLES, MOST_STOPS = 4096, 64
LOSSES = {
    "cross_entropy": ServedLoss("cross_entropy"),
    "importance_sampling": ServedLoss("importance_sampling"),
    "ppo": ServedLoss("ppo", clip="ppo", low=0.2, high=0.2),
    "cispo": ServedLoss("cispo", clip="cispo", low=0.2, high=0.2),
    "gspo": ServedLoss("gspo", ratio="sequence", clip="ppo", low=3e-4, high=4e-4),
}
POLICY_INPUTS = ("target_tokens", "logprobs", "advantages")
INPUTS = {
    "cross_entropy": ("target_tokens", "weights"),
    "gspo": (*POLICY_INPUTS, "sequence_ratio_mask"),
    **dict.fromkeys(("importance_sampling", "ppo", "cispo"), POLICY_INPUTS),
}
OPTIONAL = ("weights",)
THRESHOLDS = ("clip_low_threshold", "clip_high_threshold")


class BadInput(Exception):
    """A client's request is wrong. The text names the field, the expected value and the actual one."""


@dataclass(frozen=True, slots=True)
class Datum:
    """A sequence that is read, and per token of it the target that it predicts. All arrays have one length."""

    tokens: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    behaviour: np.ndarray
    advantage: np.ndarray


@dataclass(frozen=True, slots=True)
class ForwardBackward:
    loss: ServedLoss
    backward: bool
    data: list[Datum]


def address(message: bytes) -> tuple[str, int]:
    """Return the model and the number of a forward_backward."""
    found = decoded(message, "body")
    return text(found, 1, "model_id"), integer({"seq_id": found.get(2, [0])[0]}, "", "seq_id", None, 0, 2**31)


def forward_backward(message: bytes, vocab: int, longest: int) -> ForwardBackward:
    found = decoded(message, "body")
    name = text(found, 4, "loss_fn")
    if name not in LOSSES:
        raise BadInput(f"loss_fn: expected one of {', '.join(LOSSES)}, found {name!r}")
    loss = with_config(LOSSES[name], found)
    data = [datum(each, name, f"data[{i}]", vocab, longest) for i, each in enumerate(found.get(3, []))]
    if not data:
        raise BadInput("data: expected at least one datum, found none")
    return ForwardBackward(loss, not found.get(6, [0])[0], data)


def with_config(loss: ServedLoss, found: Mapping[int, list[Any]]) -> ServedLoss:
    """Return the loss with the thresholds of loss_fn_config, which are bounds of the ratio."""
    for entry in found.get(7, []):
        pair = decoded(entry, "loss_fn_config")
        key, value = text(pair, 1, "loss_fn_config"), decoded(pair.get(2, [b""])[0], "loss_fn_config")
        known = THRESHOLDS if loss.clip != "none" else ()
        if key not in known:
            raise BadInput(f"loss_fn_config: expected {' or '.join(known) or 'no key'} for {loss.name}, found {key!r}")
        number = value.get(1, [b""])[0]
        bound = struct.unpack("<d", number)[0] if isinstance(number, bytes) and len(number) == 8 else math.nan
        low = key == THRESHOLDS[0]
        if not (0 <= bound <= 1 if low else 1 <= bound <= 1e6):
            expected = "a number from 0 to 1" if low else "a number of at least 1"
            raise BadInput(f"loss_fn_config.{key}: expected {expected}, found {bound}")
        loss = replace(loss, low=1 - bound) if low else replace(loss, high=bound - 1)
    return loss


def datum(message: bytes, loss: str, where: str, vocab: int, longest: int) -> Datum:
    found = decoded(message, where)
    chunks = [decoded(chunk, f"{where}.model_input") for chunk in found.get(1, [])]
    if not all(1 in chunk for chunk in chunks):
        raise BadInput(f"{where}.model_input: expected tokens only, found an image or sound")
    parts = [decoded(chunk[1][0], f"{where}.model_input").get(1, [b""])[0] for chunk in chunks]
    tokens = array(b"".join(parts), np.dtype("<i4"), f"{where}.model_input").astype(np.int64)
    check_tokens(tokens, f"{where}.model_input", vocab, longest)
    inputs = {}
    for entry in found.get(2, []):
        pair = decoded(entry, f"{where}.loss_fn_inputs")
        key = text(pair, 1, f"{where}.loss_fn_inputs")
        if key not in INPUTS[loss]:
            expected = f"one of {', '.join(INPUTS[loss])} for {loss}"
            raise BadInput(f"{where}.loss_fn_inputs: expected {expected}, found {key!r}")
        inputs[key] = tensor(pair.get(2, [b""])[0], f"{where}.loss_fn_inputs[{key!r}]", len(tokens))
    if missing := [key for key in INPUTS[loss] if key not in inputs and key not in OPTIONAL]:
        raise BadInput(f"{where}.loss_fn_inputs: expected {', '.join(missing)} for {loss}, found {[*inputs]}")
    targets = inputs["target_tokens"].astype(np.int64)
    check_tokens(targets, f"{where}.loss_fn_inputs['target_tokens']", vocab, longest)
    ones, zeros = np.ones(len(tokens), np.float32), np.zeros(len(tokens), np.float32)
    weights = inputs.get("weights", inputs.get("sequence_ratio_mask", ones))
    if loss == "gspo" and not np.isin(weights, (0, 1)).all():
        raise BadInput(f"{where}.loss_fn_inputs['sequence_ratio_mask']: expected zeros and ones, found other numbers")
    return Datum(tokens, targets, weights, inputs.get("logprobs", zeros), inputs.get("advantages", zeros))


def check_tokens(tokens: np.ndarray, where: str, vocab: int, longest: int) -> None:
    if not 1 <= len(tokens) <= longest:
        raise BadInput(f"{where}: expected 1 to {longest} tokens (training.seq_len), found {len(tokens)}")
    if not 0 <= tokens.min() <= tokens.max() < vocab:
        raise BadInput(f"{where}: expected token ids from 0 to {vocab - 1}, found {tokens.min()} to {tokens.max()}")


def tensor(message: bytes, where: str, length: int) -> np.ndarray:
    found = decoded(message, where)
    dtype, shape = DTYPES.get(found.get(3, [0])[0]), integers(found.get(4, []))
    if 2 in found or len(shape) > 1:
        raise BadInput(f"{where}: expected one number per token, found shape {shape}{' (sparse)' * (2 in found)}")
    if dtype is None:
        raise BadInput(f"{where}: expected float32 or int64, found dtype {found.get(3, [0])[0]}")
    values = array(found.get(1, [b""])[0], dtype, where)
    if len(values) != length:
        raise BadInput(f"{where}: expected {length} numbers, one per token of model_input, found {len(values)}")
    if dtype.kind == "f" and not np.isfinite(values).all():
        raise BadInput(f"{where}: expected finite numbers, found {values[~np.isfinite(values)][0]}")
    return values if dtype.kind == "f" or where.endswith("['target_tokens']") else values.astype(np.float32)


def decoded(message: Any, where: str) -> dict[int, list[Any]]:
    try:
        return fields(message)
    except (TypeError, ValueError) as error:
        raise BadInput(f"{where}: {error}") from error


def array(values: Any, dtype: np.dtype, where: str) -> np.ndarray:
    try:
        return np.frombuffer(values, dtype)
    except (TypeError, ValueError) as error:
        raise BadInput(f"{where}: expected numbers of {dtype.itemsize} bytes each, found others ({error})") from error


def text(found: Mapping[int, list[Any]], number: int, where: str) -> str:
    try:
        return found[number][0].decode()
    except (KeyError, AttributeError, UnicodeDecodeError) as error:
        raise BadInput(f"{where}: expected a text, found none") from error


@dataclass(frozen=True, slots=True)
class Packed:
    """Data as the batches of the dp rows."""

    samples: list[Sample]
    batches: list[Batch]

    @classmethod
    def of(cls, data: Sequence[Datum], shards: int, seq_len: int, rows: int | UpTo, pad_id: int) -> "Packed":
        # A place reads a token and predicts the next one, which is then replaced by the client's target.
        samples = [Sample(np.append(d.tokens, d.targets[-1]), np.ones(len(d.tokens) + 1)) for d in data]
        batches = pack(samples, shards=shards, seq_len=seq_len, rows_per_microbatch=rows, pad_id=pad_id)
        sizes = np.array([len(d.tokens) for d in data])
        filled = partial(with_inputs, data=data, begins=sizes.cumsum() - sizes)
        return cls(samples, [replace(b, microbatches=[*map(filled, b.microbatches)]) for b in batches])

    def logprobs(self, answers: Sequence[Sequence[np.ndarray]]) -> list[np.ndarray]:
        """Return the log-probs of each datum's targets."""
        return [values[1:] for values in unpack(self.batches, answers, self.samples)]


def with_inputs(rows: Rows, data: Sequence[Datum], begins: np.ndarray) -> Rows:
    on = rows.sequences >= 0
    at = begins[rows.samples[rows.sequences[on]]] + rows.positions.reshape(-1)[rows.places[on]]

    def of(name: str, like: np.ndarray) -> np.ndarray:
        out = np.zeros_like(like)
        out[on] = np.concatenate([getattr(d, name) for d in data])[at]
        return out

    columns = {"behaviour": of("behaviour", rows.weights), "advantage": of("advantage", rows.weights)}
    return replace(rows, targets=of("targets", rows.targets), weights=of("weights", rows.weights), columns=columns)


def forward_backward_output(
    logprobs: Sequence[np.ndarray], data: Sequence[Datum], loss: ServedLoss, total: float
) -> bytes:
    outputs = {"logprobs": logprobs}
    if loss.name == "cross_entropy":
        outputs["elementwise_loss"] = [-values * d.weights for values, d in zip(logprobs, data, strict=True)]
    record = field(3, len(data))
    for name, values in outputs.items():
        ends = np.cumsum([0, *(4 * len(each) for each in values)], dtype="<i8").tobytes()
        batched = field(1, np.concatenate(values).astype("<f4").tobytes()) + field(2, ends) + field(3, FLOAT32)
        record += field(2, field(1, name) + field(2, batched))
    return field(1, "ArrayRecord") + field(2, record) + field(3, field(1, "loss:sum") + field(2, float(total)))


def sample_response(completions: Sequence[Completion], prompt_logprobs: Sequence[float] | None) -> bytes:
    message = b""
    for each in completions:
        logprobs = np.array(each.logprobs, "<f4").tobytes()
        reason = STOP if each.finish == "stop" else LENGTH
        message += field(1, field(1, reason) + field(2, np.array(each.tokens, "<i4").tobytes()) + field(3, logprobs))
    if prompt_logprobs is not None:
        message += field(2, np.array(prompt_logprobs, "<f4").tobytes())
    return message


def adam_step(body: Mapping[str, Any]) -> AdamStep:
    params = body.get("adam_params")
    if not isinstance(params, dict):  # others come under another name
        raise BadInput("optim_params: expected AdamParams, because AdamW is the optimizer, found another kind")
    number = partial(numbered, params, "adam_params")
    return AdamStep(
        lr=number("learning_rate", 1e-4, 0, 1e3),
        beta1=number("beta1", 0.9, 0, 1 - 1e-9),
        beta2=number("beta2", 0.95, 0, 1 - 1e-9),
        eps=number("eps", 1e-12, 1e-30, 1),  # 0 would turn the zeros beyond a model's rank into NaN
        weight_decay=number("weight_decay", 0.0, 0, 1e3),
        max_norm=number("grad_clip_norm", 0.0, 0, 1e30),
    )


def numbered(values: Mapping[str, Any], where: str, name: str, default: float, low: float, high: float) -> float:
    value = values.get(name, default)
    if type(value) not in (int, float) or not low <= value <= high:
        raise BadInput(f"{where}.{name}: expected a number from {low:g} to {high:g}, found {value!r}")
    return value


def integer(values: Mapping[str, Any], where: str, name: str, default: int | None, low: int, high: int) -> int:
    value = default if values.get(name) is None else values[name]
    if type(value) is not int or not low <= value <= high:
        raise BadInput(f"{where}{name}: expected an integer from {low} to {high}, found {value!r}")
    return value


def named(values: Mapping[str, Any], name: str) -> str:
    if not isinstance(value := values.get(name), str):
        raise BadInput(f"{name}: expected a text, found {value!r}")
    return value


def mapping(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return an object that may be left out."""
    value = {} if values.get(name) is None else values[name]
    if not isinstance(value, dict):
        raise BadInput(f"{name}: expected an object, found {value!r}")
    return value


def prompt_of(body: Mapping[str, Any], vocab: int, longest: int) -> list[int]:
    prompt = body.get("prompt")
    chunks = prompt.get("chunks") if isinstance(prompt, dict) else None
    tokens = list[int]()
    for chunk in chunks if isinstance(chunks, list) else []:
        part = chunk.get("tokens") if isinstance(chunk, dict) else None
        if not isinstance(part, list) or not all(type(token) is int and abs(token) < 2**31 for token in part):
            raise BadInput("prompt.chunks: expected chunks of token ids only, found another kind")
        tokens += part
    if not 1 <= len(tokens) < longest:
        raise BadInput(f"prompt: expected 1 to {longest - 1} tokens (generator.max_model_len), found {len(tokens)}")
    if not 0 <= min(tokens) <= max(tokens) < vocab:
        raise BadInput(f"prompt: expected token ids from 0 to {vocab - 1}, found {min(tokens)} to {max(tokens)}")
    return tokens


UNSUPPORTED = ("topk_prompt_logprobs", "topk_sample_logprobs", "prompt_alt_tokens_k", "target_prompt_logprobs")


def sampling_of(
    body: Mapping[str, Any], room: int, eos: Sequence[int], encode: Callable[[str], list[int]]
) -> tuple[Sampling, int | None, list[str]]:
    """Return how to sample, the seed, and the texts that end a sample."""
    for name in UNSUPPORTED:
        if body.get(name):
            raise BadInput(f"{name}: expected none, because it is not supported, found {body[name]!r}")
    params = mapping(body, "sampling_params")
    number = partial(numbered, params, "sampling_params")
    temperature = number("temperature", 1.0, 0, 2)
    if 0 < temperature < 0.01:
        raise BadInput(f"sampling_params.temperature: expected 0, or 0.01 to 2, found {temperature}")
    stop = params.get("stop")
    stops = [stop] if isinstance(stop, str) else list(eos) if stop is None else stop
    known = isinstance(stops, list) and (
        all(type(each) is int for each in stops) or all(isinstance(each, str) and each for each in stops)
    )
    if not known or len(stops) > MOST_STOPS:
        raise BadInput(f"sampling_params.stop: expected at most {MOST_STOPS} texts or token ids, found {stop!r}")
    texts = [each for each in stops if isinstance(each, str)]
    single = [ids[0] for each in texts if len(ids := encode(each)) == 1]  # ends in the engine
    ids = [each for each in stops if isinstance(each, int)] or [*single, *(eos if texts else ())]
    seed = params.get("seed")
    if seed is not None and type(seed) is not int:
        raise BadInput(f"sampling_params.seed: expected an integer, found {seed!r}")
    sampling = Sampling(
        max_new_tokens=min(integer(params, "sampling_params.", "max_tokens", room, 1, 2**31), room),
        temperature=float(temperature),
        top_p=float(number("top_p", 1.0, 1e-6, 1)),
        top_k=max(integer(params, "sampling_params.", "top_k", -1, -1, 2**20), 0),
        stop_token_ids=tuple(dict.fromkeys(ids)),
        scores_context=bool(body.get("prompt_logprobs")),
    )
    return sampling, seed, texts


def ended_by_text(completion: Completion, stops: Sequence[str], decode: Callable[[list[int]], str]) -> Completion:
    """Cut a completion after the first token with which its text contains a stop text."""
    if not stops or not any(stop in decode(completion.tokens) for stop in stops):
        return completion
    for count in range(1, len(completion.tokens) + 1):
        if any(stop in decode(completion.tokens[:count]) for stop in stops):
            tokens, logprobs = completion.tokens[:count], completion.logprobs[:count]
            return replace(completion, tokens=tokens, logprobs=logprobs, finish="stop")
    return completion
