"""Bare torch on the tokens of a step: forward, log-probs of the answers, backward and fused AdamW.

.venv/bin/python scripts/bench/step_torch.py SHAPE MODEL_FOLDER
"""

import json
import os
import sys
import time
from collections.abc import Iterator

import torch
from transformers import LlamaForCausalLM

from bench.step_shapes import SHAPES, Shape


def main() -> None:
    shape, folder = SHAPES[sys.argv[1]], sys.argv[2]
    torch.manual_seed(0)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=shape.lr, betas=(0.9, 0.999), weight_decay=0.0, fused=True)
    for step in range(shape.warm_up + shape.steps):
        chunks = list(padded(shape, step))
        advantages = torch.randn(shape.samples).split(shape.samples // shape.chunks)
        began, cpu = time.perf_counter(), time.process_time()
        for (tokens, filled, mask), advantage in zip(chunks, advantages, strict=True):
            answers = mask.shape[1]
            padding = torch.cat([torch.ones(len(filled), shape.prompt), filled], dim=1)
            # A batch without padding needs no mask, and SDPA is faster without one.
            attended = None if bool(filled.all()) else padding
            logits = model(tokens, attention_mask=attended, logits_to_keep=answers + 1, use_cache=False).logits[:, :-1]
            targets = tokens[:, -answers:, None]
            logprobs = torch.log_softmax(logits, dim=-1).gather(2, targets)[..., 0]  # [B, answers]
            ratio = torch.exp(logprobs - logprobs.detach())
            clipped = ratio.clamp(0.8, 1.28)
            objective = torch.minimum(ratio * advantage[:, None], clipped * advantage[:, None])
            (-(objective * mask).sum() / shape.sampled).backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds = time.perf_counter() - began
        if step >= shape.warm_up:
            print(json.dumps({"step": seconds, "training": seconds, "cpu": time.process_time() - cpu}), flush=True)


def padded(shape: Shape, step: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yield tokens [B, prompt + longest], and of what follows the prompt [B, longest] the places that are filled and
    the sampled ones; sorted by length."""
    lengths = torch.tensor(sorted(shape.lengths(step)))
    for chunk in lengths.split(shape.samples // shape.chunks):
        longest = int(chunk.max()) + shape.read + shape.second
        tokens = torch.randint(shape.vocab_size, (len(chunk), shape.prompt + longest))
        place, first = torch.arange(longest), chunk[:, None]
        filled = place < first + shape.read + shape.second
        yield tokens, filled.float(), (filled & ((place < first) | (place >= first + shape.read))).float()


if __name__ == "__main__":
    main()
