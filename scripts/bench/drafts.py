"""Decode steps and seconds of an engine on this CPU that drafts, or that does not, and the hash of its tokens.

.venv/bin/python scripts/bench/drafts.py MODEL_FOLDER none|ngram|siblings NEW_TOKENS TEMPERATURE [SEQUENCES]

Groups of 8 answer sums as grpo_smollm2 asks them (NEW_TOKENS 16), or explain them (more), twice, as in two epochs. At
most SEQUENCES (32) are sampled at a time.
"""

import hashlib
import json
import os
import random
import sys
import time
from typing import Any

from titan_rl.actors.vllm import vllm_cpu
from titan_rl.actors.vllm.engine import Engine, EngineSettings
from titan_rl.actors.vllm.launch_env import ENV
from titan_rl.wire.types import Request, Sampling

EPOCHS, PROMPTS, GROUP = 2, 4, 8


def main() -> None:
    os.environ.update(ENV | vllm_cpu.ENV)
    folder, drafts, count, temperature, *rest = sys.argv[1:]
    sequences = int(rest[0]) if rest else 32
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    draw, system = random.Random(1), "Answer with just the number." if int(count) <= 16 else "Explain your answer."
    texts = [f"Calculate {draw.randint(10, 99)} + {draw.randint(10, 99)}." for _ in range(PROMPTS)]
    chats = [[{"role": "system", "content": system}, {"role": "user", "content": text}] for text in texts]
    contexts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in chats]
    wish = Sampling(int(count), float(temperature), stop_token_ids=(tokenizer.eos_token_id,))
    room: dict[str, Any] = {"max_model_len": 512, "kv_cache_memory_mb": 1024, "max_num_seqs": sequences}
    engine = Engine(EngineSettings(model_dir=folder, load_format="auto", **{**room, "drafts": drafts}))
    engine.set_version(0)
    tokens = hashlib.sha256()
    for epoch in range(EPOCHS):
        before, began, used, done = engine.stats(), time.perf_counter(), time.process_time(), {}
        for i in range(PROMPTS * GROUP):
            names = (f"{epoch}.{i}", f"{epoch}.group{i // GROUP}")
            engine.add([Request(f"{i}", contexts[i // GROUP], [1000 * epoch + i], wish, affinity=names)])
        while engine.busy:
            done |= {each.id: each.completions[0].tokens for each in engine.step()}
        stats, seconds = engine.stats().since(before), time.perf_counter() - began
        used = time.process_time() - used
        tokens.update(json.dumps(done, sort_keys=True).encode())
        taken = (stats.tokens - stats.accepted) / stats.tokens
        share = stats.accepted / max(1, stats.drafted)
        print(
            f"{drafts} epoch {epoch}: {stats.tokens} tokens, {taken:.2f} decode steps per token, {seconds:.1f} s, "
            f"{used:.1f} CPU seconds, {stats.steps} steps of the engine, {stats.drafted} drafted, {share:.2f} accepted",
            flush=True,
        )
    print(f"{drafts}: tokens {tokens.hexdigest()[:12]}")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
