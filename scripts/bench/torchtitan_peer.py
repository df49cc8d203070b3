"""TorchTitan's RL loop on the task of bench_peer.py: data, environment, reward and configs.

PYTHONPATH=CHECKOUT:scripts python -m torchtitan.experiments.rl.train --module bench.torchtitan_peer --config toy
"""

# pyright: reportMissingImports=false, reportIncompatibleVariableOverride=false, reportCallIssue=false
# The installed TorchTitan is older than the checkout that this file imports.

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from renderers import Message
from torch import nn
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.loss import ChunkedLossWrapper
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.config import (
    CompileConfig,
    Configurable,
    DebugConfig,
    OverrideConfig,
    ParallelismConfig,
    TrainingConfig,
)
from torchtitan.experiments.rl.actors.generator import (
    SamplingConfig,
    VLLMCudagraphConfig,
    VLLMGenerator,
)
from torchtitan.experiments.rl.actors.trainer import PolicyTrainer
from torchtitan.experiments.rl.components.batcher import BatchConfig, Batcher
from torchtitan.experiments.rl.components.training_sample_builder import TrainingSampleBuilder
from torchtitan.experiments.rl.controller import AsyncLoopConfig, Controller, ValidationConfig
from torchtitan.experiments.rl.environment import (
    MessageEnv,
    MessageEnvInitOutput,
    MessageEnvStepOutput,
)
from torchtitan.experiments.rl.losses import GRPOLoss
from torchtitan.experiments.rl.models.vllm_registry import InferenceParallelismConfig
from torchtitan.experiments.rl.renderer import RendererConfig
from torchtitan.experiments.rl.rollout import Rollout
from torchtitan.experiments.rl.rollout.rollouter import Rollouter
from torchtitan.experiments.rl.rubrics import RewardFn, Rubric
from torchtitan.models.common import CosSinRoPE, Embedding, Linear
from torchtitan.models.common.config_utils import get_attention_config, make_ffn_config, make_gqa_config
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.qwen3 import Qwen3Model, model_registry
from torchtitan.models.qwen3.model import Qwen3TransformerBlock

from bench.peer_shapes import LR, SHAPES, PeerShape, reward

ASSETS, DRAWS = "PEER_ASSETS", "PEER_DRAWS"
"""Environment variables: the folder of the tokenizer, and a file that gets the number of each prompt."""
ATTENTION = "torchtitan.overrides.varlen_sdpa.varlen_sdpa"


class Questions(Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        shape: str = "toy"
        seed: int = 0

    def __init__(self, config: Config) -> None:
        self._questions = enumerate(SHAPES[config.shape].questions(config.seed))

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        number, question = next(self._questions)
        if DRAWS in os.environ:
            with Path(os.environ[DRAWS]).open("a") as file:
                file.write(f"{number}\n")
        return question


class OneTurn(MessageEnv):
    @dataclass(kw_only=True, slots=True)
    class Config(MessageEnv.Config):
        pass

    def __init__(self, config: Config, *, env_input: str) -> None:
        self._question = env_input

    async def init(self) -> Any:
        return MessageEnvInitOutput(init_prompt_messages=[{"role": "user", "content": self._question}])

    async def step(self, completion_message: Message) -> Any:
        return MessageEnvStepOutput(done=True)


class Digits(RewardFn):
    @dataclass(kw_only=True, slots=True)
    class Config(RewardFn.Config):
        pass

    async def __call__(self, rollout: Rollout, env_input: object) -> float:
        message = rollout.turns[-1].completion_message if rollout.turns else None  # no turns: the generator failed
        return reward(str((message or {}).get("content") or ""))


class SumsRollouter(Rollouter):
    @dataclass(kw_only=True, slots=True)
    class Config(Rollouter.Config):
        train_dataset: Questions.Config = field(default_factory=Questions.Config)
        validation_dataset: Questions.Config = field(default_factory=Questions.Config)
        rubric: Rubric.Config = field(default_factory=lambda: Rubric.Config(reward_fns=[Digits.Config()]))
        message_env: OneTurn.Config = field(default_factory=OneTurn.Config)


NORMAL = {"weight": partial(nn.init.normal_, std=0.02)}


def norm(size: int) -> Any:
    return RMSNorm.Config(normalized_shape=size, eps=1e-6, param_init={"weight": nn.init.ones_})


def model_spec(shape: PeerShape) -> Any:
    """Return a Qwen3 of the shape, built like the ones that TorchTitan ships."""
    spec = model_registry("debugmodel", attn_backend="varlen")
    spec.flavor = "peer"
    spec.model = Qwen3Model.Config(
        vocab_size=shape.model.vocab_size,
        dim=shape.model.dim,
        norm=norm(shape.model.dim),
        enable_weight_tying=shape.tied,
        tok_embeddings=Embedding.Config(
            num_embeddings=shape.model.vocab_size, embedding_dim=shape.model.dim, param_init=NORMAL
        ),
        lm_head=Linear.Config(in_features=shape.model.dim, out_features=shape.model.vocab_size, param_init=NORMAL),
        layers=[layer(shape) for _ in range(shape.model.n_layers)],
    )
    return spec


def layer(shape: PeerShape) -> Any:
    head_dim = shape.model.dim // shape.model.n_heads
    return Qwen3TransformerBlock.Config(
        attention_norm=norm(shape.model.dim),
        ffn_norm=norm(shape.model.dim),
        attention=make_gqa_config(
            dim=shape.model.dim,
            n_heads=shape.model.n_heads,
            n_kv_heads=shape.model.n_kv_heads,
            head_dim=head_dim,
            wqkv_param_init=NORMAL,
            wo_param_init=NORMAL,
            inner_attention=get_attention_config("varlen"),
            fuse_qkv=True,
            rope=CosSinRoPE.Config(dim=head_dim, max_context_length=4096, theta=10000.0),
            qk_norm=norm(head_dim),
        ),
        feed_forward=make_ffn_config(
            dim=shape.model.dim, hidden_dim=shape.model.hidden_dim, w1_param_init=NORMAL, w2w3_param_init=NORMAL
        ),
    )


def config(name: str) -> Any:
    shape = SHAPES[name]
    loss = GRPOLoss.Config()
    if shape.model.vocab_size * shape.row > 2**25:  # logits of 128 MiB
        loss = ChunkedLossWrapper.Config(num_chunks=8, loss_fn=loss)
    return Controller.Config(
        model_spec=model_spec(shape),
        hf_assets_path=os.environ[ASSETS],
        async_loop=AsyncLoopConfig(
            num_training_steps=shape.steps,
            num_prompts_per_train_step=shape.groups,
            num_samples_per_prompt=shape.group_size,
            target_offpolicy_steps=0,
            window_fraction=None,
            validation=ValidationConfig(num_samples=0),
            batcher=Batcher.Config(batch=BatchConfig(local_batch_size=1, seq_len=shape.row)),
            training_sample_builder=TrainingSampleBuilder.Config(drop_zero_std_reward_groups=False),
        ),
        compile=CompileConfig(enable=False),
        rollouter=SumsRollouter.Config(train_dataset=Questions.Config(shape=name)),
        renderer=RendererConfig(name="default"),
        trainer=PolicyTrainer.Config(
            optimizer=default_adamw(lr=LR),
            lr_scheduler=LRSchedulersContainer.Config(warmup_steps=0),
            training=TrainingConfig(mixed_precision_param="float32"),
            parallelism=ParallelismConfig(data_parallel_shard_degree=1, spmd_backend="partial_dtensor"),
            ac_config=None,
            checkpoint=CheckpointManager.Config(enable=False, last_save_model_only=False),
            override=OverrideConfig(imports=[ATTENTION]),
            loss=loss,
        ),
        generator=VLLMGenerator.Config(
            model_dtype="float32",
            gpu_memory_limit=0.1,
            cudagraph=VLLMCudagraphConfig(enable=False),
            parallelism=InferenceParallelismConfig(data_parallel_degree=1, tensor_parallel_degree=1),
            checkpoint=CheckpointManager.Config(enable=False),
            sampling=SamplingConfig(temperature=1.0, top_p=1.0, max_tokens=shape.new_tokens),
            debug=DebugConfig(),
        ),
    )


def toy() -> Any:
    return config("toy")


def smollm2() -> Any:
    return config("smollm2")
