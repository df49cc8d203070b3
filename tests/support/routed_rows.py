"""Routes for packed rows: drawn for each token of a sample, or what a model's routers choose themselves."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from support.rank_programs import LENGTH, STEPS, Case, built, config_of, groups
from titan_rl.wire.types import Batch, Rows

Routes = Callable[[int, int], np.ndarray]  # (sample, tokens it reads) -> [tokens, layers, K]


def drawn(seed: int, layers: int, experts: int, k: int, unknown: float = 0.2) -> Routes:
    """Return routes that depend on nothing but the sample. A share of the tokens has unknown ones."""

    def of_sample(sample: int, tokens: int) -> np.ndarray:
        random = np.random.default_rng([seed, sample])
        ids = random.random((tokens, layers, experts)).argsort(-1)[..., :k].astype(np.int16)
        ids[random.random(tokens) < unknown] = -1
        return ids

    return of_sample


def with_routes(batch: Batch, routes: Routes) -> Batch:
    rows = [replace(rows, extras={"routes": _placed(rows, routes)}) for rows in batch.microbatches]
    return replace(batch, microbatches=rows)


def _placed(rows: Rows, routes: Routes) -> np.ndarray:
    """Return the column of a microbatch whose samples share no places."""
    column = np.full((rows.tokens.size, *routes(0, 1).shape[1:]), -1, np.int16)
    for number, sample in enumerate(rows.samples.tolist()):
        places = rows.places[rows.sequences == number]
        column[places] = routes(sample, len(places))[rows.positions.ravel()[places]]
    return column.reshape(*rows.tokens.shape, *column.shape[1:])


@contextmanager
def recorded(model: Any) -> Iterator[Callable[[], np.ndarray]]:
    """Within, a call returns the experts of the model's last forward, [B, L, layers, K]."""
    from titan_rl.actors.titan.experts import Router

    chosen: dict[Any, np.ndarray] = {}
    routers = [module for module in model.modules() if isinstance(module, Router)]
    hooks = [
        router.register_forward_hook(lambda router, _, out: chosen.__setitem__(router, out[1].numpy()))
        for router in routers
    ]
    yield lambda: np.stack([chosen[router] for router in routers], 2).astype(np.int16)
    for hook in hooks:
        hook.remove()


def replay(folder: Path, cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Return, for each case: loss and gradient norm of each step, its metrics of routes, the gradients of the routers
    in the first step, and the scores of the last step's samples with its routes and without."""
    return [replayed(folder / str(number), case) for number, case in enumerate(cases)]


def replayed(folder: Path, case: Case) -> dict[str, Any]:
    import torch.distributed as dist

    from titan_rl.batch.packing import pack, unpack

    config = config_of(case, folder)
    steps, metrics, gates, scores = [], [], list[Any](), dict[str, Any]()
    with built(config, case) as model:
        p, shape = config.parallelism, model.shape
        for step in range(STEPS):
            samples = groups(step)
            batches = pack(samples, shards=p.dp, seq_len=LENGTH, rows_per_microbatch=1, pad_id=0)
            plain = batches[dist.get_rank() // p.row_ranks]
            batch = with_routes(plain, drawn(step, shape.routed_layers, shape.experts, shape.experts_per_token))
            for name, asked in (("replayed", batch), ("own", plain)):
                every: list[Any] = [None] * dist.get_world_size()
                dist.all_gather_object(every, model.scores(asked, 1.0)[0])
                scores[name] = np.concatenate(unpack(batches, every[:: p.row_ranks], samples)).tolist()
            size = -(-len(batch.microbatches) // case.parts)
            for start in range(0, len(batch.microbatches), size):
                model.accumulate(replace(batch, microbatches=batch.microbatches[start : start + size]))
            if step == 0:
                model.reshard()  # the parameters have the gradients then
                gates = [_whole(q.grad) for name, q in model.model.named_parameters() if ".gate." in name]
            stats = model.phase.update(batch, 1.0)
            steps.append([stats.loss, stats.grad_norm])
            metrics.append({name: value for name, value in stats.metrics.items() if name.startswith("rout")})
    return {"steps": steps, "metrics": metrics, "gates": gates, "scores": scores}


def _whole(gradient: Any) -> list[list[float]]:
    whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return whole.float().tolist()
