"""Optional parts of titan_rl: what the core uses if this installation has it, and imports by name only.

Each is an attribute of a module in titan_rl/ext or titan_rl/tools. The core runs without them (scripts/without).
"""

from collections.abc import Iterable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

PARTS = {
    "alerts": "ext.alerts.alerting:alerting",
    "adapters of engines": "ext.adapters.ranks.vllm_adapter:SlotAdapters",
    "adapters of policies": "ext.policies.ranks.adapter_bank:AdapterBank",
    "broadcasts of readers": "ext.broadcast.ranks.broadcast:Receiver",
    "broadcasts of trainers": "ext.broadcast.ranks.broadcast:Sender",
    "adapters of trainers": "ext.adapters.ranks.lora:Adapters",
    "checks of policies": "ext.policies.checks:judged_policies",
    "checks of quantization": "ext.quantization.checks:quantization_problems",
    "checks of reasoning_gym": "ext.reasoning_gym.checks:gym_problems",
    "context parallelism": "ext.context_parallel.ranks.context_parallel:ContextParallel",
    "column kept": "ext.kept_sets.kept_sets:KEPT",
    "column routes": "ext.routing_replay.routes:ROUTES",
    "column top": "ext.teachers.top_tokens:TOP",
    "control": "ext.control.steering:steered",
    "checks of images": "ext.vision.row_checks:image_problems",
    "copies of states": "ext.snapshots.ranks.state_copy:StateCopy",
    "curriculum": "ext.curriculum.curriculum:Curriculum",
    "drafts": "ext.drafts.ranks.drafts:Drafts",
    "environments": "ext.agents.bring_up:environments_of",
    "files of images": "ext.vision.pixels:ImageFiles",
    "folder adapters": "ext.tinker.ranks.folder_adapters:FolderAdapters",
    "folders of policies": "ext.policies.planning:settle_policies",
    "fork servers": "ext.fork_servers.fork_servers:ForkStarter",
    "games": "ext.agents.games:GAMES",
    "image tokens": "ext.vision.image_tokens:read_prompt",
    "images kept": "ext.vision.kept_images:keep",
    "images of engines": "ext.vision.ranks.engine_images:EngineImages",
    "images of requests": "ext.vision.request_images:ServedImages",
    "images of rows": "ext.vision.row_images:read_images",
    "images of trainers": "ext.vision.ranks.tower:Tower",
    "images of turns": "ext.vision.turn_images:TurnImages",
    "kept batches": "ext.replay.kept_batches:KeptBatches",
    "links of readers": "ext.remote_weights.ranks.remote_links:RemoteReads",
    "links of trainers": "ext.remote_weights.ranks.remote_links:RegisteredRuns",
    "lengths of endless rows": "ext.row_lengths.row_lengths:fits",
    "losses of pairs": "ext.preference.ranks.objectives:preference",
    "losses of reward models": "ext.preference.ranks.objectives:reward",
    "openings of environments": "ext.agents.openings:openings",
    "models of seats": "ext.agents.seat_folders:setups_of_seats",
    "memory of towers": "ext.vision.sizes:seeing",
    "notes of publications": "ext.broadcast.rosters:Rosters",
    "Parquet files": "ext.parquet.parquet_rows:parquet_rows",
    "opponents": "ext.opponents.opponents:Opponents",
    "parameters of adapters": "ext.adapters.live_adapters:live_adapters",
    "pictures of proofs": "ext.vision.sight:with_picture",
    "plan of a run": "ext.run_plan.plan:run_plan",
    "pretrained models": "tools.fetch.models:model_folder",
    "prometheus": "ext.prometheus.scrape:scraped",
    "proof of sight": "ext.vision.sight:Sight",
    "prompts after an opening": "ext.agents.conversation:read_after",
    "quantized rows": "ext.quantization.ranks.row_groups:RowGroups",
    "readers of trainers": "ext.relay.first_readers:first_readers",
    "recorder kept": "ext.kept_sets.ranks.kept_tokens:KeptTokens",
    "recorder routes": "ext.routing_replay.ranks.routed_tokens:RouteRecorder",
    "rehearsal of environments": "ext.agents.rehearsal:rehearse",
    "reward code_tests": "ext.sandbox.rewards:passes_tests",
    "reward judge": "ext.llm_judge.llm_judge:LlmJudge",
    "reward judge_group": "ext.llm_judge.llm_judge:GroupJudge",
    "reward processes": "ext.reward_processes.reward_pool:reward_pool",
    "reward reasoning_gym": "ext.reasoning_gym.rewards:scored_by_gym",
    "relays of hosts": "ext.relay.chains:Relays",
    "relays of readers": "ext.relay.ranks.relay:Relay",
    "row lengths": "ext.row_lengths.row_lengths:unfit_rows",
    "reachable hosts": "ext.hosts.checks:unready",
    "samples at the end": "tools.inspect.last_samples:last_samples",
    "sandbox settings": "ext.sandbox.local:configure",
    "served models": "ext.tinker.ranks.served_models:ServedModels",
    "session of policies": "ext.policies.session:session_of_policies",
    "several hosts": "ext.hosts.host_places:joined_hosts",
    "setups of policies": "ext.policies.planning:prepared",
    "sizes of snapshots": "ext.snapshots.sizes:MemoryOfSnapshots",
    "snapshots": "ext.snapshots.placed:placed_snapshots",
    "sizes of adapters": "ext.adapters.sizes:AdapterSizes",
    "sync of adapters": "ext.adapters.adapter_sync:fits",
    "task reasoning_gym": "ext.reasoning_gym.problems:procedural",
    "teacher": "ext.teachers.teacher:Teacher",
    "tests of a row": "ext.sandbox.code_tests:row_tests",
    "tests of code": "ext.sandbox.checks:untested",
    "times of updates": "tools.plan.updates:UpdateTimes",
    "timeline": "ext.timeline.timeline:timeline",
    "tiny runs": "ext.tiny.shrink:shrunk",
    "trackers": "ext.trackers.tracking:tracking",
    "warnings of rules": "tools.diagnosis.watch:MetricsWatch",
    "worker": "ext.hosts.host_worker:main",
}
"""Where each part is."""


MOVED = {"titan_rl.agents": "titan_rl.ext.agents", "titan_rl.sandbox": "titan_rl.ext.sandbox"}
"""Modules that configs may name by their earlier names."""


class PartMissing(ValueError):
    """A key needs a part that this installation lacks."""


def part(name: str) -> Any:
    """Return an optional part, or None if this installation lacks it."""
    module, _, attribute = PARTS[name].partition(":")
    return getattr(import_module(f"titan_rl.{module}"), attribute) if has_part(name) else None


def needed_part(name: str, key: str) -> Any:
    """Return the part that a key needs."""
    if not has_part(name):
        raise PartMissing(missing_part(name, key))
    return part(name)


def missing_part(name: str, key: str) -> str:
    """Return the message that refuses a key whose part is missing."""
    folder = "/".join(PARTS[name].partition(":")[0].split(".")[:2])
    return f"{key}: expected an installation with titan_rl/{folder} ({name}), found one without"


def module_named(name: str) -> Any:
    """Import the module that a config names."""
    for old, new in MOVED.items():
        if f"{name}.".startswith(f"{old}."):
            name = new + name.removeprefix(old)
    return import_module(name)


def has_part(name: str) -> bool:
    """Return True if this installation has a part. Nothing but its package is imported."""
    return _exists(PARTS[name].partition(":")[0])


def modules_of(names: Iterable[str]) -> list[Any]:
    """Return the modules of these names that this installation has."""
    return [import_module(f"titan_rl.{name}") for name in names if _exists(name)]


@cache  # a request of an engine asks
def _exists(module: str) -> bool:
    try:
        return find_spec(f"titan_rl.{module}") is not None
    except ModuleNotFoundError:  # the package has no folder
        return False
