"""Models that play seats from a folder: refusals before a run, and how their engines are set up."""

import asyncio
import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.checked_configs import KUHN, SEATS, config, edit
from support.folders import write_hf
from titan_rl.config.sections import Config, ModelSection
from titan_rl.ext.agents.seat_folders import digest_of, record_models, setups_of_seats
from titan_rl.ext.agents.seat_models import SeatModel
from titan_rl.ext.run_plan.describe import describe
from titan_rl.preflight.checks import problems
from titan_rl.preflight.placement import gpus_needed, place, slots_per_host
from titan_rl.preflight.plan import prepare
from titan_rl.preflight.shapes import shape_of
from titan_rl.record.run_names import SEAT_MODELS
from titan_rl.wire.errors import RankDied, RequestRefused, RunError
from titan_rl.wire.types import Request, Sampling

SEATED = f"""{KUHN}{SEATS}endpoints = {{second = TABLE}}
[training]
seq_len = 64
[rollout]
max_new_tokens = 8
"""
SHAPE = shape_of(ModelSection(name="qwen3"))


def played_by(tmp_path: Path, folder: Path, more: str = "", toml: str = "") -> Config:
    """Return the config of a run whose second player is the model in a folder."""
    return config(tmp_path, SEATED.replace("TABLE", f'{{folder = "{folder}"{more}}}') + toml)


def without_template(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", chat_template=None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: folder.rename(folder.parent / "other"), "expected a Hugging Face folder, found none at"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "expected a tokenizer, found no tokenizer.json in"),
        (lambda folder: (folder / "model.safetensors").unlink(), "expected"),
        (lambda folder: write_hf(folder, SHAPE.with_value_head()), "expected a language model (*ForCausalLM), found"),
        (without_template, "expected a model with a chat template, found none in"),
        (
            lambda folder: edit(folder / "config.json", max_position_embeddings=32),
            "expected a model of at least 64 tokens (generator.max_model_len, or training.seq_len), found one of 32",
        ),
    ],
)
def test_a_folder_that_no_engine_can_play_by(tmp_path: Path, change: Callable[[Path], object], message: str) -> None:
    folder = write_hf(tmp_path / "model", SHAPE)
    run = played_by(tmp_path, folder)
    assert problems(run) == [], "in the run's own network, too"
    change(folder)
    problem, *_ = problems(run)
    assert problem.startswith(f"environment.endpoints.second.folder: {message}")


def test_a_table_has_a_folder_or_a_server_on_the_runs_machine(tmp_path: Path) -> None:
    folder = write_hf(tmp_path / "model", SHAPE)
    (problem,) = problems(played_by(tmp_path, folder, ', url = "http://host/v1"'))
    both = "expected a folder or the url and model of a server, found folder and url"
    assert problem == f"environment.endpoints.second: {both}"
    hosts = "[hosts]\nkind = 'processes'\ncount = 2\n"
    (problem,) = [p for p in problems(played_by(tmp_path, folder, toml=hosts)) if "hosts.kind" in p]
    assert problem.startswith('hosts.kind: expected "local", because models of environment.endpoints are on this')


def test_its_engine_is_of_the_models_own_shape_and_samples_by_its_table_alone(tmp_path: Path) -> None:
    folder = write_hf(tmp_path / "model", replace(SHAPE, vocab_size=640))
    toml = "top_k = 5\ntemperature = 0.7\nstop_token_ids = [7]\n[lora]\nrank = 4\n[generator]\nreplicas = 2\n"
    run = played_by(tmp_path, folder, toml=toml)
    setup = prepare("run", run, device="cpu", scratch=tmp_path / "scratch")
    ((name, own),) = setups_of_seats(setup).items()
    assert (name, own.shape.vocab_size, own.model_folder) == ("generator_second", 640, folder)
    assert own.sampling == Sampling(run.rollout.max_new_tokens, 1.0, stop_token_ids=own.tokenizer.eos_ids)
    assert (own.resolved.generator.replicas, own.resolved.lora.on) == (1, False)
    (row,) = [mesh for mesh in describe(setup, ()).meshes if mesh.name == name]
    assert row.procs == 1
    assert "weights" in row.holds
    assert "KV cache 256 MiB" in row.holds


def test_two_seats_of_one_folder_share_an_engine_whose_gpu_no_other_rank_gets(tmp_path: Path) -> None:
    drawn = random.Random(0)
    for _ in range(20):
        names = [f"seat{n}" for n in range(drawn.randint(2, 6))]
        folders = {name: f"/models/{drawn.randint(0, 2)}" for name in names}
        tables = ", ".join(f'{name} = {{folder = "{folder}"}}' for name, folder in folders.items())
        text = SEATED.replace('["first", "second"]', json.dumps(["first", *names])).replace("second = TABLE", tables)
        run = config(tmp_path, text + f"[generator]\nreplicas = {drawn.randint(1, 3)}\n")
        assert run.environment.folders.keys() == {*folders.values()}
        gpus = gpus_needed(run) + drawn.randint(0, 2)
        taken = [slot for shares in place(run, slots_per_host(run, gpus)).values() for s in shares for slot in s.slots]
        assert max(taken) < gpus - len(run.environment.folders)
        assert gpus_needed(run) == len(taken) + len(run.environment.folders)


def test_a_run_continues_by_the_files_that_it_began_with(tmp_path: Path) -> None:
    folder = write_hf(tmp_path / "model", SHAPE)
    run = played_by(tmp_path, folder).environment
    (tmp_path / "run").mkdir()
    first = record_models(run, tmp_path / "run")
    assert first == record_models(run, tmp_path / "run") == {"second": digest_of(folder)}
    assert json.loads((tmp_path / "run" / SEAT_MODELS).read_text()) == first
    edit(folder / "tokenizer_config.json", chat_template="{{ other }}")
    with pytest.raises(
        RunError, match=f"second.folder: expected the files .* whose digest is {first['second']}, found"
    ):
        record_models(run, tmp_path / "run")


@pytest.mark.parametrize(
    ("error", "reported"), [(RankDied("generator_second0[tp=0]", "ended"), 1), (RequestRefused("long"), 0)]
)
def test_an_engine_that_is_lost_for_good_is_reported(tmp_path: Path, error: RunError, reported: int) -> None:
    class Lost:
        async def generate(self, request: Request) -> Any:
            raise error

    setup = prepare(
        "run", played_by(tmp_path, write_hf(tmp_path / "model", SHAPE)), device="cpu", scratch=tmp_path / "s"
    )
    model, found = SeatModel("generator_second", setup, ["second"]), list[RunError]()
    model.failed, model._mesh = found.append, Lost()  # type: ignore[assignment]
    with pytest.raises(type(error)):
        asyncio.run(model.generate(Request("1", [1], [0], Sampling(1, 1.0))))
    assert len(found) == reported
