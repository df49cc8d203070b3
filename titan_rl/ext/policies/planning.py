"""Plans a run of several policies over one base: a setup of each, as if it ran alone, and one of their meshes."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from titan_rl.config.sections import Config
from titan_rl.preflight.load import Invocation
from titan_rl.preflight.plan import Setup, prepare, settle
from titan_rl.record.checkpoints import Checkpoints
from titan_rl.record.run_folder import Resume, aside
from titan_rl.record.run_lock import RunLock


def prepared(run: Invocation, scratch: Path) -> Setup:
    """Plan each policy of a checked run, without snapshots; and the meshes of all, which have the first policy's config
    but for the run's own folder."""
    prepared_on = partial(prepare, device=run.device, gpus=run.gpus, adapters=run.adapters)
    setups = dict[str, Setup]()
    for policy, given in run.policies.items():
        config = replace(given, fault=replace(given.fault, snapshot_interval=0))
        (own := scratch / policy).mkdir()
        name = f"{run.config_name}: {policy}"
        setups[policy] = prepared_on(name, config, scratch=own)
    return _shared(run.config_name, run.config, setups)


def settle_policies(setup: Setup, lock: RunLock, stack: ExitStack) -> Setup:
    """Begin to use the folders of a checked run: `settle` of each policy that is not finished. The stack holds their
    locks."""
    if setup.config.job.fresh:
        lock.move_old_run()
    policies = dict(setup.policies)
    if setup.config.environment.seats:
        policies = aligned(policies)
    left = {name: policy for name, policy in policies.items() if not policy.finished}
    locks = {name: stack.enter_context(RunLock(policy.folder)) for name, policy in left.items()}
    return _shared(setup.name, setup.config, {name: settle(policy, locks[name]) for name, policy in left.items()})


def aligned(policies: Mapping[str, Setup]) -> dict[str, Setup]:
    """Let policies that play together resume at the newest step that all have. Later checkpoints of one get other
    names, which nothing takes for a step. A killed run may have saved one policy's step and not another's."""
    saved = {name: Checkpoints.of(policy.folder, policy.config) for name, policy in policies.items()}
    steps = {name: {n for n in each.whole_steps() if not each.damage(n)} for name, each in saved.items()}
    common = max(set.intersection(*steps.values()), default=0)
    found = dict[str, Setup]()
    for name, policy in policies.items():
        for step in [step for step in saved[name].whole_steps() if step > common]:
            for folder in saved[name].folders:
                (folder / f"step-{step}").rename(aside(folder / f"ahead-{step}"))
        found[name] = replace(policy, resume=Resume.find(policy.folder, policy.config))
    return found


def _shared(name: str, shared: Config, policies: Mapping[str, Setup]) -> Setup:
    first = next(iter(policies.values()))

    def of_all(config: Config) -> Config:
        return replace(config, job=shared.job, debug=shared.debug)

    given, config, resolved = map(of_all, (first.given, first.config, first.resolved))
    folder = Path(shared.job.dump_folder).absolute()
    return replace(
        first, name=name, given=given, config=config, resolved=resolved, folder=folder, policies=dict(policies)
    )
