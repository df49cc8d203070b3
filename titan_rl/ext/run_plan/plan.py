"""Plans for people: the meshes, memory and settings that a run prints before it starts."""

from collections.abc import Sequence
from dataclasses import replace

from titan_rl.config.sections import BYTES
from titan_rl.ext.run_plan.describe import describe
from titan_rl.ext.run_plan.sharding import checked_sharding
from titan_rl.preflight.added_parameters import added_parameters
from titan_rl.preflight.memory import UNKNOWN, Cut, count, moment_bytes, size
from titan_rl.preflight.plan import Setup
from titan_rl.record.plan_view import RunPlan

SHARED = ("model", "lora", "weights", "microbatch", "on a GPU")
"""Labels of a plan's facts that are the same for all policies."""


def run_plan(setup: Setup, warnings: Sequence[str], *, dry: bool = False) -> RunPlan:
    """Return the plan of a run, of one policy or several. In a dry run on GPUs TorchTitan is asked how it cuts the
    models, and a run that would not fit is refused."""
    return described(setup, warnings, checked_sharding(setup) if dry else UNKNOWN)


def described(setup: Setup, warnings: Sequence[str], sharded: Cut = UNKNOWN) -> RunPlan:
    plan = describe(setup, warnings, sharded)
    if not setup.policies:
        return plan
    facts = [(label, text) for label, text in plan.facts if label in SHARED]
    facts.append(("policies", policies_fact(setup)))
    remarks = list(plan.warnings)
    for name, policy in setup.policies.items():
        own = describe(policy, ())
        lines = [f"{label}: {text}" for label, text in own.facts if label not in (*SHARED, "auto")]
        facts.append((name, "\n".join(lines)))
        remarks += [f"{name}: {line}" for line in own.warnings if line not in plan.warnings]
    return replace(plan, facts=[*facts, ("run", str(setup.folder))], warnings=remarks)


def policies_fact(setup: Setup) -> str:
    """Describe what further policies cost: memory of the trainers and engines, and bytes of a sync."""
    config, several = setup.config, len(setup.policies)
    adapters = added_parameters(config.lora, setup.shape).number()
    each, shards = adapters * BYTES[config.training.dtype], config.parallelism.shards
    bank, states = (several - 1) * 2 * each, several * 2 * adapters * moment_bytes(config)
    moved = adapters * BYTES[config.generator.dtype]
    return (
        f"{several} over one base, {count(adapters)} parameters each. Trainers keep values and gradients of those not "
        f"in use, {size(bank)}, and Adam's moments of all, {size(states)}, over {shards} shard(s). Engines have a slot "
        f"of {size(moved)} for each; a sync of one policy moves as much. There are no snapshots in memory: a lost "
        "trainer ends the run, which resumes from each policy's last checkpoint"
    )
