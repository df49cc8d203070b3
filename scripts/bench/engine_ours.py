"""Our engine on the requests of bench_engine.py: scripts/bench/engine_ours.py SHAPE FOLDER SEQUENCES"""

import sys

from bench.engine_requests import Forward, Group, answer, engine_shape
from titan_rl.actors.vllm.engine import Engine, EngineSettings
from titan_rl.wire.types import Completion, Request, Sampling


def main() -> None:
    name, folder, sequences = sys.argv[1:]
    shape = engine_shape(name, int(sequences))
    engine = Engine(
        EngineSettings(
            model_dir=folder,
            max_model_len=shape.seq_len,
            max_num_seqs=512,
            kv_cache_memory_mb=256,
            load_format="auto",
        )
    )
    engine.set_version(0)
    forward = Forward(engine._llm.model_executor.driver_worker.get_model())

    def generate(groups: list[Group]) -> object:
        engine.add([Request(str(i), g.prompt, g.seeds, Sampling(g.length)) for i, g in enumerate(groups)])
        done: dict[str, list[Completion]] = {}
        while engine.busy:
            done |= {one.id: one.completions for one in engine.step()}
        return [(c.tokens, c.logprobs, c.finish) for i in range(len(groups)) for c in done[str(i)]]

    answer(shape, forward, generate)


if __name__ == "__main__":
    main()
