"""The feed-forward of a mixture of experts, with the arithmetic that transformers and vLLM have.

TorchTitan's own parts differ: its experts always compute in bfloat16, and its router asks for float32 by autocast,
which a CPU does not know. With tensor parallelism its experts may send no gradient back.
"""

from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import spmd_types as spmd
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torchtitan.config import derive, override
from torchtitan.distributed import ParallelDims
from torchtitan.models.common.config_utils import (
    make_ffn_config,
    make_moe_config,
    make_routed_experts_config,
    make_router_config,
)
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import GroupedExperts, MoE, TokenChoiceTopKRouter
from torchtitan.models.common.moe_sharding import set_moe_sharding_config
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts, ScaleBiasForward, swiglu

from titan_rl.actors.titan import private
from titan_rl.wire.model_shape import ModelShape


class Experts(GroupedExperts):
    """Feed-forwards of tokens that are sorted by expert, in the dtype of the weights."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        pass

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        w1_EFD, w2_EDF, w3_EFD = (_local(w) for w in (self.w1_EFD, self.w2_EDF, self.w3_EFD))
        ends_E = torch.cumsum(num_tokens_per_expert_E, dim=0, dtype=torch.int32)
        in_RD = x_RD.to(w1_EFD.dtype)
        hidden_RF = F.silu(_grouped(in_RD, w1_EFD, ends_E)) * _grouped(in_RD, w3_EFD, ends_E)
        return _grouped(hidden_RF, w2_EDF, ends_E).type_as(x_RD)


def _local(weight: torch.Tensor) -> torch.Tensor:
    return weight.to_local() if isinstance(weight, DTensor) else weight


def _grouped(x_RI: torch.Tensor, w_EOI: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    """Multiply the rows of each expert by its weight. Expert e has the rows up to ends_E[e]."""
    return F.grouped_mm(x_RI, w_EOI.transpose(-2, -1), offs=ends_E)


CLAMPED_CUTS: dict[str, Any] = {  # by tensor parallelism
    **{"mlp1_weight_EGD": spmd.S(1), "mlp1_bias_EG": spmd.S(1)},
    **{"mlp2_weight_EDF": spmd.S(2), "mlp2_bias_ED": spmd.R},
}


class ClampedExperts(GptOssGroupedExperts):
    """gpt-oss's experts, with rows of gate and up in turn, in the dtype of the weights."""

    @dataclass(kw_only=True, slots=True)
    class Config(GptOssGroupedExperts.Config):
        pass

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        into_EGD, out_EDF = _local(self.mlp1_weight_EGD), _local(self.mlp2_weight_EDF)
        ends_E = torch.cumsum(num_tokens_per_expert_E, dim=0, dtype=torch.int32)
        rows_R = torch.arange(len(x_RD), dtype=torch.int32, device=x_RD.device)
        expert_R = torch.searchsorted(ends_E, rows_R, right=True, out_int32=True).clamp(max=len(into_EGD) - 1)
        cuts = _tensor_parallel_degree(self.mlp1_weight_EGD)
        hidden_RG = _grouped(x_RD.to(into_EGD.dtype), into_EGD, ends_E) + _local(self.mlp1_bias_EG)[expert_R]
        out_RD = _grouped(swiglu(hidden_RG, limit=self.swiglu_limit), out_EDF, ends_E)
        bias_RD: Any = ScaleBiasForward.apply(_local(self.mlp2_bias_ED)[expert_R], cuts, out_RD.dtype)
        return (out_RD + bias_RD).type_as(x_RD)


def _tensor_parallel_degree(weight: torch.Tensor) -> int:
    names = weight.device_mesh.mesh_dim_names or () if isinstance(weight, DTensor) else ()
    return weight.device_mesh["tp"].size() if isinstance(weight, DTensor) and "tp" in names else 1


def shard_clamped(config: MoE.Config, parallelism: Any) -> None:
    """Set how ClampedExperts are cut, as TorchTitan cuts gpt-oss's."""
    set_moe_sharding_config(
        config,
        enable_ep=parallelism.expert_parallel_degree > 1,
        enable_sp=parallelism.enable_sequence_parallel,
        expert_param_layout=CLAMPED_CUTS,
    )


class Float32Gate(Linear):
    """Multiplies in float32, also in a forward of 16 bits."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        pass

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return F.linear(input.float(), self.weight.float())


class Router(TokenChoiceTopKRouter):
    """Chooses the experts with the largest probabilities, in float32 from logits in the dtype of the forward. With a
    bias, those whose sigmoids are the largest after it is added; their weights are without it. With groups it chooses
    among experts of a few, whose two largest add up to the most.

    Where the engine's experts are known it takes those, with its own probabilities, so that its gradient stays. They
    are an attribute, because a backward that computes a block again must find what its forward found."""

    replayed_BLK: torch.Tensor | None = None  # experts to take; -1: its own choice. [B, L] are whole rows, as below
    filled_BL: torch.Tensor | None = None  # with those: false at padding
    counted_BL: torch.Tensor | None = None  # how often the experts of each place are counted
    routed_E: torch.Tensor  # tokens counted for each expert, on this rank
    replay_3: torch.Tensor  # experts of filled places: all, replayed ones, replayed ones that it would choose

    @dataclass(kw_only=True, slots=True)
    class Config(TokenChoiceTopKRouter.Config):
        pass

    def forward(
        self, x_BLD: torch.Tensor, expert_bias_E: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the weights and the ids of each token's experts, and the probabilities of all."""
        logits_BLE = self.gate(x_BLD).float()
        probs_BLE = F.softmax(logits_BLE, dim=-1) if self.score_func == "softmax" else logits_BLE.sigmoid()
        choice_BLE = probs_BLE if expert_bias_E is None else probs_BLE + expert_bias_E
        if self.num_expert_groups is not None:
            choice_BLE = self._get_node_limited_routing_scores(choice_BLE)
        _, ids_BLK = torch.topk(choice_BLE, k=self.top_k, dim=-1)
        if self.replayed_BLK is not None and self.filled_BL is not None:
            ids_BLK = self._replayed(ids_BLK, self.replayed_BLK, self.filled_BL)
        weights_BLK = probs_BLE.gather(-1, ids_BLK)
        if self.route_norm:
            weights_BLK = weights_BLK / weights_BLK.sum(dim=-1, keepdim=True)
        if self.route_scale != 1:
            weights_BLK = weights_BLK * self.route_scale
        if self.counted_BL is not None:
            ids = _local(ids_BLK)
            times = _local(_cut_like(self.counted_BL, ids_BLK))[..., None].expand_as(ids)
            self.routed_E.index_add_(0, ids.flatten(), times.flatten())
        return weights_BLK, ids_BLK, probs_BLE

    def _replayed(self, own_BLK: torch.Tensor, replayed_BLK: torch.Tensor, filled_BL: torch.Tensor) -> torch.Tensor:
        """Return the experts to take, and count how many of them the router would have chosen."""
        replayed_BLK = _cut_like(replayed_BLK.long(), own_BLK)
        known_BL = (replayed_BLK >= 0).all(-1)
        if self.counted_BL is not None:
            filled, known = _local(_cut_like(filled_BL, own_BLK)), _local(known_BL)
            same = (_local(replayed_BLK)[..., None] == _local(own_BLK)[..., None, :]).any(-1) & known[..., None]
            self.replay_3 += torch.stack([filled.sum() * self.top_k, known.sum() * self.top_k, same.sum()])
        return torch.where(known_BL[..., None], replayed_BLK, own_BLK)


def _cut_like(x_BL: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return columns of whole rows as `like` has them: with sequence parallelism a rank routes a part of each row."""
    if not isinstance(like, DTensor):
        return x_BL
    whole = DTensor.from_local(x_BL, like.device_mesh, [Replicate()] * like.device_mesh.ndim, run_check=False)
    return whole.redistribute(placements=like.placements)


class Mixture(MoE):
    """A router and its experts, whose input has arrived before they take it.

    With tensor parallelism TorchTitan gathers the input asynchronously. If there is one row, DTensor still holds the
    unfinished gather (AsyncCollectiveTensor) when local_map hands it to the experts; local_map then waits by wait(),
    whose result has no autograd history, so that no gradient comes back from the experts (torch 2.13). With the change
    of docs/upstream/local-map-gradient torch keeps the gradient, and nothing is copied."""

    copies_input = False

    @dataclass(kw_only=True, slots=True)
    class Config(MoE.Config):
        pass

    def parallelize(self, parallel_dims: ParallelDims) -> None:
        super().parallelize(parallel_dims)
        mesh = parallel_dims.get_optional_mesh("tp")
        self.copies_input = mesh is not None and not private.keeps_gradient_of_async_input(mesh)

    def forward(self, x_BLD: torch.Tensor) -> torch.Tensor:
        return super().forward(x_BLD.clone() if self.copies_input else x_BLD)  # a copy waits, and is recorded


def route_biases(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return the biases of a model's routers. They are buffers, because FSDP2 would round parameters to the dtype of
    the forward."""
    return [(name, bias) for name, bias in model.named_buffers() if name.endswith("moe.expert_bias_E")]


def set_routes(
    model: nn.Module,
    counted_BL: torch.Tensor | None,
    replayed: tuple[torch.Tensor, torch.Tensor] | None,
) -> None:
    """Make the routers of a model count the tokens of each expert in the next forward, each place `counted_BL` times;
    None: not at all. Make them take the `replayed` experts, [B, L, layers, K], if there are any; and where there is a
    token, [B, L] bool, count the experts which they would choose."""
    routes_BLNK, filled_BL = replayed or (None, None)
    routers = [module for module in model.modules() if isinstance(module, Router)]
    if routes_BLNK is not None and routes_BLNK.shape[2:] != (len(routers), routers[0].top_k):
        expected, found = (len(routers), routers[0].top_k), tuple(routes_BLNK.shape[2:])
        raise ValueError(f"expected routes of {expected} layers and experts for each token, found {found}")
    for layer, router in enumerate(routers):
        router.counted_BL, router.filled_BL = counted_BL, filled_BL
        router.replayed_BLK = None if routes_BLNK is None else routes_BLNK[:, :, layer]
        if counted_BL is not None and not hasattr(router, "routed_E"):
            router.routed_E = torch.zeros(router.num_experts, device=counted_BL.device)
            router.replay_3 = torch.zeros(3, device=counted_BL.device)


class Routed(NamedTuple):
    """What the routers of a model counted over all ranks. What a backward computes again counts twice, in every
    layer."""

    experts_NE: torch.Tensor  # tokens of each expert of each layer
    replay_3: torch.Tensor  # as Router's, of all layers together


def take_routed(model: nn.Module, dims: ParallelDims) -> Routed | None:
    """Return the counts since the last call; None without experts."""
    counts = [(module.routed_E, module.replay_3) for module in model.modules() if isinstance(module, Router)]
    if not counts:
        return None
    routed = torch.stack([torch.cat(of_layer) for of_layer in counts])
    for count in chain.from_iterable(counts):
        count.zero_()
    dealt = dims.tp_enabled and dims.ep_enabled  # tensor-parallel ranks then route other tokens each
    for mesh in [dims.get_optional_mesh("loss"), dims.get_mesh("tp") if dealt else None]:
        if mesh is not None:
            dist.all_reduce(routed, group=mesh.get_group())
    return Routed(routed[:, :-3], routed[:, -3:].sum(0))


def moe_config(shape: ModelShape, inner: dict[str, Any], outer: dict[str, Any]) -> Mixture.Config:
    """Return the config of a layer's experts and router. `outer` initializes the two matrices that make_ffn_config
    initializes by depth.

    A family without a bias in vLLM has none here, so that trainer and generator take the same experts. With one,
    TorchTitan's coefficient makes the buffer; nothing moves it, because its optimizer's hook is left out (spec.py)."""
    init, by_depth, biased = inner["weight"], outer["weight"], shape.parts.biased_routes
    shared = make_ffn_config(
        dim=shape.dim,
        hidden_dim=shape.shared_experts * shape.hidden_dim,
        w1_param_init=inner,
        w2w3_param_init=outer,
    )
    config = make_moe_config(
        num_experts=shape.experts,
        load_balance_coeff=1.0 if biased else None,
        shared_experts=shared if shape.shared_experts else None,
        router=make_router_config(
            dim=shape.dim,
            num_experts=shape.experts,
            gate_param_init=inner,
            top_k=shape.experts_per_token,
            score_func="sigmoid" if biased else "softmax",
            route_norm=shape.norm_routes,
            route_scale=shape.route_scale,
            num_expert_groups=shape.route_groups or None,
            num_limited_groups=shape.groups_per_token or None,
        ),
        routed_experts=make_routed_experts_config(
            dim=shape.dim,
            hidden_dim=shape.hidden_dim,
            num_experts=shape.experts,
            top_k=shape.experts_per_token,
            param_init={"w1_EFD": init, "w2_EDF": by_depth, "w3_EFD": by_depth},
            comm_backend="standard",
        ),
    )
    if shape.parts.clamped_experts:
        zeros = {"mlp1_bias_EG": inner["bias"], "mlp2_bias_ED": inner["bias"]}
        begin = {"mlp1_weight_EGD": init, "mlp2_weight_EDF": by_depth, **zeros}
        config.router.gate.bias = True
        config.routed_experts.inner_experts = ClampedExperts.Config(
            dim=shape.dim, hidden_dim=shape.hidden_dim, num_experts=shape.experts, param_init=begin
        )
    if biased:
        config.router.gate = derive(config.router.gate, Float32Gate.Config)
    return derive(config, Mixture.Config)


@override(target=GroupedExperts.Config, exact=True, description="Experts in the dtype of the forward.")
def experts(config: GroupedExperts.Config) -> Experts.Config:
    return derive(config, Experts.Config)


@override(target=TokenChoiceTopKRouter.Config, exact=True, description="Softmax in float32 of the forward's logits.")
def router(config: TokenChoiceTopKRouter.Config) -> Router.Config:
    return derive(config, Router.Config)


OVERRIDES = [f"{__name__}.experts", f"{__name__}.router"]
