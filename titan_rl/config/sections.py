"""Every key of a run's TOML: one frozen dataclass per section, one docstring per key.

`from titan_rl.config.sections import X` finds every section and choice; the *_sections.py files declare them.

Section and key names are TorchTitan's where it has them ([job] [model] [optimizer] [lr_scheduler] [training]
[parallelism] [activation_checkpoint] [compile] [checkpoint] [metrics] [comm] [debug]). This file holds data only and
imports no torch: toml.py reads files, preflight/checks checks keys against each other. `--help` prints these docs;
`bounds(...)` gives a key's range, which toml.py checks on reading.
"""

from dataclasses import dataclass, field

from titan_rl.config.algorithm_sections import (
    AlgorithmSection,
    CriticSection,
    CurriculumSection,
    EvalSection,
    ReferenceSection,
    RewardModelSection,
    RoleSection,
    RolloutSection,
    TaskSection,
    TeacherSection,
)
from titan_rl.config.choices import (  # noqa: F401 (declared for all rooms)
    BYTES,
    Aggregation,
    Dtype,
    Estimator,
    Family,
    Level,
    Rejection,
    Switch,
    Weight,
    bounds,
)
from titan_rl.config.launch_section import LaunchSection
from titan_rl.config.model_sections import (
    ActivationCheckpointSection,
    CheckpointSection,
    ColdStartSection,
    CompileSection,
    LoraSection,
    LRSchedulerSection,
    ModelSection,
    OptimizerSection,
    OverrideSection,
    ParallelismSection,
    TrainingSection,
)
from titan_rl.config.system_sections import (
    CommSection,
    DebugSection,
    EnvironmentSection,
    FaultSection,
    GeneratorSection,
    HostsSection,
    JobSection,
    MemorySection,
    MetricsSection,
    OpponentsSection,
    PlacementSection,
    ProfilingSection,
    RecordSection,
    SandboxSection,
    WeightSyncSection,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """A whole run. --help prints the sections in this order."""

    job: JobSection = field(default_factory=JobSection)
    task: TaskSection = field(default_factory=TaskSection)
    model: ModelSection = field(default_factory=ModelSection)
    lora: LoraSection = field(default_factory=LoraSection)
    cold_start: ColdStartSection = field(default_factory=ColdStartSection)
    curriculum: CurriculumSection = field(default_factory=CurriculumSection)
    rollout: RolloutSection = field(default_factory=RolloutSection)
    environment: EnvironmentSection = field(default_factory=EnvironmentSection)
    opponents: OpponentsSection = field(default_factory=OpponentsSection)
    sandbox: SandboxSection = field(default_factory=SandboxSection)
    algorithm: AlgorithmSection = field(default_factory=AlgorithmSection)
    reference: ReferenceSection = field(default_factory=ReferenceSection)
    critic: CriticSection = field(default_factory=CriticSection)
    reward_model: RewardModelSection = field(default_factory=RewardModelSection)
    teacher: TeacherSection = field(default_factory=TeacherSection)
    eval: EvalSection = field(default_factory=EvalSection)
    training: TrainingSection = field(default_factory=TrainingSection)
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    lr_scheduler: LRSchedulerSection = field(default_factory=LRSchedulerSection)
    parallelism: ParallelismSection = field(default_factory=ParallelismSection)
    activation_checkpoint: ActivationCheckpointSection = field(default_factory=ActivationCheckpointSection)
    compile: CompileSection = field(default_factory=CompileSection)
    override: OverrideSection = field(default_factory=OverrideSection)
    generator: GeneratorSection = field(default_factory=GeneratorSection)
    weight_sync: WeightSyncSection = field(default_factory=WeightSyncSection)
    placement: PlacementSection = field(default_factory=PlacementSection)
    hosts: HostsSection = field(default_factory=HostsSection)
    memory: MemorySection = field(default_factory=MemorySection)
    launch: LaunchSection = field(default_factory=LaunchSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    metrics: MetricsSection = field(default_factory=MetricsSection)
    record: RecordSection = field(default_factory=RecordSection)
    profiling: ProfilingSection = field(default_factory=ProfilingSection)
    comm: CommSection = field(default_factory=CommSection)
    fault: FaultSection = field(default_factory=FaultSection)
    debug: DebugSection = field(default_factory=DebugSection)

    @property
    def samples_rollouts(self) -> bool:
        """Return True if the run has generators, to sample training data or to evaluate the policy."""
        return self.algorithm.kind == "rl" or (self.algorithm.kind != "reward" and self.evaluates)

    @property
    def evaluates(self) -> bool:
        return self.eval.size > 0 or bool(self.eval.sets)

    @property
    def recorded_columns(self) -> tuple[str, ...]:
        """Return the names of the side columns (wire/side_columns.py) that the engines record."""
        wanted = {"kept": self.rollout.truncates, "routes": self.algorithm.routing_replay}
        return tuple(name for name, on in wanted.items() if on)

    @property
    def rollout_code(self) -> str:
        """Return what drives rollouts in environment processes. Empty: the policy answers the prompt once."""
        return self.environment.name or self.task.agent

    @property
    def polled_meshes(self) -> int:
        """Return how many meshes Monarch polls: one for each replica, each environment process, and each model that
        plays seats."""
        e = self.environment
        return self.generator.replicas + (e.processes + len(e.folders) if self.rollout_code else 0)

    @property
    def opponent_slots(self) -> int:
        """The most adapters of opponents that engines need at the same time."""
        return self.opponents.most_at_once(self.rollout.max_staleness_steps + 1)

    @property
    def longest_rollout(self) -> int:
        """Return the most tokens of a rollout. A packed row has a place for each token but the last, and holds both
        rollouts of a pair."""
        seq_len = self.training.seq_len
        fits = seq_len // 2 + 1 if self.algorithm.online_pairs else seq_len + 1
        return min(self.generator.max_model_len or seq_len, fits)

    @property
    def roles(self) -> dict[str, RoleSection]:
        """Return the models besides the policy that have their own mesh."""
        a = self.algorithm
        needed = {
            "reference": a.needs_reference and self.reference.mesh == "own",
            "teacher": a.loads_teacher and self.teacher.mesh == "own",
            "reward_model": a.kind == "rl" and self.task.reward == "model",
            "critic": a.needs_critic,
        }
        return {name: getattr(self, name) for name, own in needed.items() if own}
