"""What a trainer asks of torch and TorchTitan on CUDA, seen at the seam: the device is faked, nothing runs on it."""

import asyncio
import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from titan_rl.actors.model_rank import ModelRank
from titan_rl.actors.titan import document_attention
from titan_rl.actors.titan import model as titan_model
from titan_rl.actors.titan.role_model import Policy, RoleModel
from titan_rl.config.auto import resolved
from titan_rl.config.sections import Config, ParallelismSection, PlacementSection
from titan_rl.preflight.shapes import shape_of

CUDA = torch.device("cuda", 0)
USUAL = resolved(Config(), "cuda", gather_fits=False)  # with FSDP2 on one rank too
OFFLOADED = replace(USUAL, training=replace(USUAL.training, enable_cpu_offload=True))


def on_cuda(config: Config) -> RoleModel:
    """Return a model of which nothing is built."""
    model: Any = object.__new__(RoleModel)
    model.config, model.device, model.model = config, CUDA, torch.nn.Module()
    return model


class Materialized(torch.nn.Module):
    """Records where a model is asked to put its tensors."""

    def to_empty(self, *, device: Any, recurse: bool = True) -> "Materialized":
        self.parameters_on = str(device)
        return self

    def init_weights(self, *, buffer_device: torch.device) -> None:
        self.buffers_on = str(buffer_device)


@pytest.mark.parametrize(("config", "place"), [(OFFLOADED, "cpu"), (USUAL, "cuda")])
def test_offloaded_parameters_are_materialized_on_the_host_and_buffers_on_the_gpu(
    config: Config, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(titan_model.titan_utils, "device_type", "cuda")
    asked: dict[str, Any] = {}
    made = Materialized()
    model: Any = on_cuda(config)
    model.row_parts = None
    model.dims, model.titan = SimpleNamespace(world_size=1), titan_model.titan_config(config, ParallelismSection())
    model.spec = SimpleNamespace(
        model=SimpleNamespace(build=lambda: None), parallelize_fn=lambda _, **given: asked.update(given) or made
    )
    assert model._build() is made
    assert (made.parameters_on, made.buffers_on) == (place, "cuda:0")
    assert asked["training"].enable_cpu_offload == (place == "cpu"), "FSDP2's policy"


@pytest.mark.parametrize(("config", "both"), [(OFFLOADED, True), (USUAL, False)])
def test_offloaded_gradients_have_a_backend_on_the_host(
    config: Config, both: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Asked(Exception):
        pass

    def refuse(comm: Any, *, enable_cpu_backend: bool, base_folder: str) -> None:
        raise Asked(enable_cpu_backend)

    monkeypatch.setattr(titan_model.titan_utils, "get_local_device", lambda: CUDA)
    monkeypatch.setattr(titan_model.titan_utils, "device_module", SimpleNamespace(set_device=lambda device: None))
    monkeypatch.setattr(titan_model.titan_cpu, "use_cpu", lambda: None)
    monkeypatch.setattr(titan_model.dist_utils, "init_distributed", refuse)
    monkeypatch.setattr(titan_model.flash_attention, "use_installed", lambda: None)
    with pytest.raises(Asked) as asked:
        RoleModel("trainer", config, shape_of(config.model), ParallelismSection())
    assert asked.value.args == (both,)


def test_float32_products_are_not_tf32() -> None:
    products: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [each.allow_tf32 for each in products]
    try:
        for each in products:
            each.allow_tf32 = True
        document_attention.forbid_tf32()
        assert [each.allow_tf32 for each in products] == [False, False]
    finally:
        for each, value in zip(products, before, strict=True):
            each.allow_tf32 = value


DETERMINISTIC = """
import os, torch
from dataclasses import replace
from titan_rl.actors.titan.model import TitanModel
from titan_rl.config.sections import Config, DebugSection, JobSection, ModelSection
from titan_rl.preflight.shapes import shape_of
tiny = ModelSection(dim=16, n_layers=1, n_heads=1, n_kv_heads=1, hidden_dim=16)
config = Config(model=tiny, debug=DebugSection(deterministic=True))
TitanModel(config, shape_of(tiny), config.parallelism)
print(
    torch.are_deterministic_algorithms_enabled(),
    torch.is_deterministic_algorithms_warn_only_enabled(),
    torch.backends.cudnn.deterministic,
    torch.backends.cudnn.benchmark,
    os.environ["CUBLAS_WORKSPACE_CONFIG"],
)
"""


def test_deterministic_algorithms_are_required_not_only_warned_about() -> None:
    """FlashAttention's backward (2, 3 and 4) reads the first two: with warn_only it stays non-deterministic."""
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = subprocess.run(
        [sys.executable, "-c", DETERMINISTIC], env=os.environ | alone, capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines()[-1:] == ["True False True False :4096:8"], done.stderr


@pytest.mark.parametrize(("kind", "order"), [("colocated", ["pack", "empty_cache"]), ("disaggregated", ["pack"])])
def test_a_colocated_trainer_gives_its_cache_back_before_engines_take_the_weights(
    kind: Any, order: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engines wake when they switch to what this call returns."""
    calls = list[str]()
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty_cache"))
    rank: Any = object.__new__(ModelRank)
    model: Any = on_cuda(replace(USUAL, placement=PlacementSection(kind=kind)))
    phase: Any = SimpleNamespace(state=SimpleNamespace(step=3))
    model._policies, model._bank = {"": Policy(model.config, phase)}, None
    rank._model, rank._packed = model, {}
    rank._stagings = {"": SimpleNamespace(pack=lambda *_: calls.append("pack") or {0: "manifest"})}
    publish: Any = vars(ModelRank)["publish"]
    manifests, _ = asyncio.run(publish._method(rank, 1, 0, 1))
    assert (manifests, calls) == ({0: "manifest"}, order)
