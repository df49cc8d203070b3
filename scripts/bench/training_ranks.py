"""The ranks of bench_training.py: one model, one batch of samples, a step whenever a line arrives on stdin.

python -m bench.training_ranks bare|titan SETTINGS.json    # answers each line with one of JSON
"""

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Step = Callable[[], tuple[float, float]]  # returns loss and gradient norm


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    folder: str  # Hugging Face folder of the model
    dump_folder: str
    groups: int
    samples: int  # per group
    prompt: int  # tokens
    shortest: int  # answer, in tokens
    longest: int
    rows: int  # training.local_batch_size; 0: by tokens
    share: bool = True  # prompts
    seq_len: int = 0
    lr: float = 1e-4

    def draw(self, vocabulary: int) -> list[tuple[list[int], list[int], list[float], list[float]]]:
        """Return each sample's tokens, mask, log-probs and advantages: the same in every process."""
        random, made = np.random.default_rng(0), []
        for _ in range(self.groups):
            prompt = random.integers(3, vocabulary, self.prompt).tolist()
            for _ in range(self.samples):
                n = int(random.integers(self.shortest, self.longest + 1))
                tokens = prompt + random.integers(3, vocabulary, n).tolist()
                logprobs = -np.log(vocabulary) + 0.1 * random.standard_normal(len(tokens))
                advantage = [float(random.standard_normal())] * len(tokens)
                made.append((tokens, [0] * self.prompt + [1] * n, logprobs.tolist(), advantage))
        return made


def bare(settings: Settings) -> Step:
    """Plain transformers and torch: one padded batch, log-probs of the targets, GRPO's loss, fused AdamW."""
    import torch
    from torch.nn.functional import pad
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(settings.folder, dtype=torch.float32, attn_implementation="sdpa").train()
    made = settings.draw(model.config.vocab_size)
    width = max(len(sample[0]) for sample in made)

    def padded(column: int, dtype: torch.dtype) -> torch.Tensor:
        values = [torch.tensor(sample[column], dtype=dtype) for sample in made]
        return torch.stack([pad(value, (0, width - len(value))) for value in values])

    tokens_BL, mask_BL = padded(0, torch.int64), padded(1, torch.float32)[:, 1:]
    old_BL, advantage_BL = padded(2, torch.float32)[:, 1:], padded(3, torch.float32)[:, 1:]
    optimizer = torch.optim.AdamW(model.parameters(), settings.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)

    def step() -> tuple[float, float]:
        logits_BLV = model(input_ids=tokens_BL, use_cache=False).logits[:, :-1]
        logprob_BL = logits_BLV.log_softmax(-1).gather(-1, tokens_BL[:, 1:, None]).squeeze(-1)
        ratio_BL = torch.where(mask_BL > 0, logprob_BL - old_BL, 0.0).exp()
        gain_BL = torch.minimum(ratio_BL * advantage_BL, ratio_BL.clamp(0.8, 1.2) * advantage_BL)
        loss = -(gain_BL * mask_BL).sum() / mask_BL.sum()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item(), norm.item()

    return step


def titan(settings: Settings) -> Step:
    """This rank's share of a step of ours, from samples to statistics."""
    from titan_rl.actors.titan.role_model import RoleModel
    from titan_rl.batch.packing import UpTo, pack
    from titan_rl.config import sections as c
    from titan_rl.preflight.memory import on_cpu
    from titan_rl.preflight.shapes import shape_of
    from titan_rl.wire.cores import host_memory
    from titan_rl.wire.types import Sample

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    config = c.Config(
        job=c.JobSection(dump_folder=settings.dump_folder),
        model=c.ModelSection(hf_assets_path=settings.folder),
        rollout=c.RolloutSection(max_new_tokens=settings.longest),
        training=c.TrainingSection(seq_len=settings.seq_len, local_batch_size=settings.rows),
        optimizer=c.OptimizerSection(lr=settings.lr),
        parallelism=c.ParallelismSection(data_parallel_shard_degree=ranks),
    )
    shape = shape_of(config.model)
    config = on_cpu(config, shape, host_memory())
    model = RoleModel("trainer", config, shape, config.parallelism)
    model.begin_phase("rl", 0)
    samples = [
        Sample(tokens, mask, {"behaviour": np.array(old), "advantage": np.array(advantage)}, settings.prompt)
        for tokens, mask, old, advantage in settings.draw(shape.vocab_size)
    ]

    def step() -> tuple[float, float]:
        packed = pack(
            samples,
            shards=ranks,
            seq_len=settings.seq_len,
            rows_per_microbatch=settings.rows or UpTo(config.training.local_batch_size),
            pad_id=0,
            share=settings.share,
        )
        stats = model.step([packed[rank]])
        return stats.loss, stats.grad_norm

    return step


def main(kind: str, settings: str) -> None:
    step = {"bare": bare, "titan": titan}[kind](Settings(**json.loads(settings)))

    def answer(**found: Any) -> None:
        print("FOUND", json.dumps(found), flush=True)

    answer(ready=True)
    for _ in sys.stdin:
        before, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        loss, norm = step()
        wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        answer(loss=loss, norm=norm, wall=wall, cpu=cpu)


if __name__ == "__main__":
    main(*sys.argv[1:])
