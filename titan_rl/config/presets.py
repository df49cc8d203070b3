"""Resolves [algorithm]: a file's own keys over the keys of its algorithm (algorithms.py), and over the keys that a lag,
16 bits or quantized engines need."""

from collections.abc import Collection
from typing import Any

from titan_rl.config.algorithms import PRESETS, kind_of
from titan_rl.config.sections import AlgorithmSection, Config

TRUNCATED: dict[str, Any] = {"proximal": "trainer", "correction": "token_tis"}
"""For opd with a lag: no clip limits its ratio, so a truncated weight corrects stale tokens. And for engines with
quantized weights: a clip of the ratio against their log-probs would act on rounding."""

GSPO_16_BITS: dict[str, Any] = {"clip_low": 0.015, "clip_high": 0.02}
"""The clip of gspo and luspo for a ratio against a generator, if it or the trainer computes in 16 bits. They then
round differently, which moves the ratio of an unchanged policy beyond the papers' clips. This one is 50 times as wide
as gspo's: more than the mean difference over an answer of some dozens of tokens, if the difference per token is sound
(train/engine_proof.py)."""


def resolve(
    own: dict[str, Any], *, lag: int, dtypes: Collection[str] = ("float32",), quantized: bool = False
) -> dict[str, Any]:
    """Return a file's own keys of [algorithm] over its preset's keys. `dtypes`: of the trainer's and the generator's
    computations; any but "float32" has 16 bits. `quantized`: the generator's weights have 8."""
    name, keys = own.get("name", "grpo"), dict[str, Any]()
    ratios = kind_of(name) == "rl" and (PRESETS[name] | own).get("pair_loss", "none") == "none"
    corrected = quantized and "correction" not in own and ratios
    if (corrected or (name == "opd" and lag)) and own.get("proximal") != "generator":
        keys = TRUNCATED
    elif name in ("gspo", "luspo") and set(dtypes) != {"float32"}:
        # Without a lag the sampling policy is the trainer's, so a ratio against the trainer has no difference of
        # rounding. With a lag only the generator has computed log-probs of the older policy. A weight by the product
        # over an answer ("sequence_tis") would add up the rounding of all tokens; the mean in gspo's ratio cancels it.
        proximal = own.get("proximal", "generator" if lag else "trainer")
        keys = {"proximal": proximal} | (GSPO_16_BITS if proximal == "generator" else {})
    elif ((name == "vespo" and set(dtypes) != {"float32"}) or name == "kl_cov") and not lag:
        # As above. vespo's weight is a product over an answer. kl_cov's penalty has the gradient of |log-ratio|, which
        # is 1 or -1 for the smallest rounding; of an unchanged policy it must be 0.
        keys = {"proximal": "trainer"}
    return PRESETS[name] | keys | own


def preset(name: str, *, lag: int = 0, **own: Any) -> AlgorithmSection:
    """Return the [algorithm] of a file that sets only these keys, for trainers and generators in float32."""
    return AlgorithmSection(**resolve({"name": name, **own}, lag=lag))


def algorithm_of(own: dict[str, Any], config: Config, *, gpus: bool = False) -> AlgorithmSection:
    """Return [algorithm] as resolved for a file that sets the keys `own`, and whose other sections are `config`. With
    `gpus` on this machine, dtypes that are "auto" become bfloat16 (config/auto.py)."""
    hosts, dtypes = config.hosts, (config.training.mixed_precision_param, config.generator.dtype)
    planned = gpus or hosts.device == "cuda" or hosts.gpu_memory_gb > 0
    auto = "bfloat16" if planned and hosts.device != "cpu" else "float32"
    dtypes = [auto if dtype == "auto" else dtype for dtype in dtypes]
    quantized = config.generator.quantization != "none"
    return AlgorithmSection(**resolve(own, lag=config.rollout.steps_ahead, dtypes=dtypes, quantized=quantized))
