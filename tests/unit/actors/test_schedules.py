"""The learning rates that a phase's steps are made with, by the keys of the config, and the critic's clip."""

import math
from types import SimpleNamespace
from typing import Any, Literal, get_args

import pytest
import torch
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig

from titan_rl.actors.titan.objectives import Objectives
from titan_rl.actors.titan.phase import Schedule
from titan_rl.actors.titan.role_model import schedule_of
from titan_rl.config.sections import (
    ColdStartSection,
    Config,
    CriticSection,
    LRSchedulerSection,
    OptimizerSection,
    TrainingSection,
)

Decay = Literal["linear", "sqrt", "cosine"]
SHAPES = {
    "linear": lambda progress: 1 - progress,
    "sqrt": lambda progress: 1 - math.sqrt(progress),
    "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
}


def optimizers_at(lr: float) -> OptimizersContainer:
    group = ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": lr})
    config = OptimizersContainer.Config(param_groups=[group], implementation="for-loop")
    return config.build(model_parts=[torch.nn.Linear(1, 1)])


def rates(schedule: Schedule) -> list[float]:
    """Return the rate of every step."""
    optimizers, found = optimizers_at(schedule.lr), []
    schedulers = schedule.schedulers(optimizers)
    for _ in range(schedule.steps):
        (optimizer,) = optimizers
        found.append(optimizer.param_groups[0]["lr"])
        optimizers.step()
        schedulers.step()
    return found


@pytest.mark.parametrize("least", [0.0, 0.1])
@pytest.mark.parametrize("decay", get_args(Decay))
def test_a_rate_warms_up_stays_and_decays(decay: Decay, least: float) -> None:
    config = Config(
        optimizer=OptimizerSection(lr=2.0),
        training=TrainingSection(steps=10),
        lr_scheduler=LRSchedulerSection(warmup_steps=4, decay_ratio=0.4, decay_type=decay, min_lr_factor=least),
    )
    found = rates(schedule_of("trainer", config, "rl"))
    assert found[:7] == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0, 2.0]
    decayed = [2.0 * (least + (1 - least) * SHAPES[decay](k / 4)) for k in (1, 2, 3)]
    assert found[7:] == pytest.approx(decayed, abs=1e-12)
    assert min(found) > 2.0 * least, "no step has a rate of 0"


def test_every_role_and_phase_has_its_own_keys() -> None:
    config = Config(
        optimizer=OptimizerSection(lr=1.0),
        training=TrainingSection(steps=4),
        lr_scheduler=LRSchedulerSection(decay_ratio=1.0),
        critic=CriticSection(lr=3.0, warmup_steps=3),
        cold_start=ColdStartSection(steps=30, lr=5.0),
    )
    assert rates(schedule_of("critic", config, "rl")) == [1.0, 2.0, 3.0, 3.0]
    cold = rates(schedule_of("trainer", config, "cold_start"))
    assert cold[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert cold[19:] == [5.0] * 11
    assert rates(schedule_of("trainer", config, "rl"))[0] == 1.0


def test_a_phase_may_resume_beyond_its_last_step() -> None:
    """Its steps were fewer before. It makes no more, and has no rate."""
    schedule = Schedule(lr=1.0, steps=4, warmup_steps=0, decay_ratio=0.0)
    schedule.schedulers(optimizers_at(1.0), 9).load_state_dict({"last_epoch": 9})


def test_the_critics_values_are_clipped() -> None:
    """The value moved from 0 to 0.5, and its return is 1; clipped, it counts as 0.2."""
    config = Config(critic=CriticSection(lr=1.0))
    one = torch.ones(1, 1)
    model: Any = SimpleNamespace(values=lambda rows: 0.5 * one)
    rows: Any = SimpleNamespace(columns={"value": 0 * one, "return": one}, mask=one, weights=one)
    found, _ = Objectives(model, config).value(rows, SimpleNamespace())  # type: ignore[arg-type]
    assert found.item() == pytest.approx(0.5 * 0.8**2)
