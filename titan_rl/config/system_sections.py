"""Keys of a run's processes, faults and records: [job] [debug] [metrics] [record] [comm] [fault] [generator]
[weight_sync] [hosts] [memory] [placement] [environment] [sandbox]."""

from dataclasses import dataclass, field
from typing import Literal

from titan_rl.config.choices import MOST_RANKS, MOST_SECONDS, DtypeChoice, Quantization, Switch, Table, Tables, bounds


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSection:
    dump_folder: str = "./outputs/run"
    """Output folder of the run, which resumes from the newest checkpoint in it. Without this key, NAME.toml writes to
    outputs/NAME."""
    description: str = ""
    """One line about the experiment, printed with the plan."""
    fresh: bool = False
    """Rename an existing dump folder (it is never deleted) and start from scratch."""
    resume_changed: bool = False
    """Resume the run in job.dump_folder although its reward, algorithm, model or data have changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DebugSection:
    seed: int = bounds(0, ge=0, lt=2**63)
    """The only seed: data order, sampling and initialization all derive from it. With generators
    it is below 2^32."""
    deterministic: bool = False
    """Use deterministic torch algorithms, and vLLM's batch-invariant kernels. Slower on GPU; on CPU runs are
    deterministic anyway."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsSection:
    trackers: list[str] = field(default_factory=lambda: ["tensorboard"])
    """Where metrics go besides metrics.jsonl: "tensorboard", "wandb", "trackio", "mlflow". Packages of the last three
    are extras: pip install 'titan-rl[wandb]'."""
    project: str = "titan_rl"
    """The project, or MLflow experiment, that groups this run with others."""
    run_name: str = ""
    """Name of the run in the trackers. Empty: the name of job.dump_folder."""
    tags: list[str] = field(default_factory=list)
    """Tags of the run in the trackers."""
    sample_interval: int = bounds(10, ge=0, le=10**9)
    """Steps between two tables of samples (prompt, answer, text, reward) in the trackers. 0: texts stay on this
    machine."""
    prometheus: str = ""
    """Address at which Prometheus reads the last metrics, such as "127.0.0.1:9400". A port alone is on loopback. Empty:
    none (docs/operations.md)."""
    alert: str = ""
    """Command that gets a JSON object on its standard input, or http(s) address that gets one by POST, when an event
    of alert_on happens. "TITAN_RL_ALERT": the environment variable of that name holds it (docs/operations.md)."""
    alert_on: list[str] = field(default_factory=lambda: ["fault", "warning", "finished", "failed"])
    """Events of alert: "fault" (a process, a mesh or steps are lost), "warning" (a collapse, and others that `titan_rl
    why` explains), and the ends "finished", "stopped" and "failed"."""
    alert_seconds: float = bounds(10.0, gt=0, le=600)
    """Deadline of an alert. It is killed then, and the run continues."""

    @property
    def services(self) -> list[str]:
        """Return the trackers other than TensorBoard, whose files the run writes itself."""
        return [name for name in self.trackers if name != "tensorboard"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordSection:
    batches: int = bounds(0, ge=0, le=10**6)
    """Steps whose samples are kept in RUN/batches, the newest: `python -m titan_rl replay` makes them again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilingSection:
    enable_profiling: bool = False
    """Write a torch.profiler trace of the trainers every profile_freq steps."""
    profile_freq: int = bounds(10, ge=4, le=10**9)
    """Steps from one trace to the next. The 3 before a traced one warm the profiler up."""
    enable_memory_snapshot: bool = False
    """Write a snapshot of the allocator's history every profile_freq steps (GPU), for pytorch.org/memory_viz."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommSection:
    init_timeout_seconds: int = bounds(300, ge=30, le=MOST_SECONDS)
    """Timeout for spawning processes, loading engines and building process groups, and for the first calls of a new
    process, if their own timeout is shorter. On a GPU, vLLM compiles and captures CUDA graphs in this time."""
    train_timeout_seconds: int = bounds(600, ge=5, le=MOST_SECONDS)
    """Timeout for one trainer step, weight sync or checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultSection:
    detect_seconds: float = bounds(2.0, ge=0.01, le=MOST_SECONDS)
    """Maximum time until a lost host is noticed: its agent is silent and its kernel takes no connection. Dead processes
    of a live host are noticed at once."""
    hang_seconds: float = bounds(60.0, ge=1, le=MOST_SECONDS)
    """Replace a generator rank that shows no progress, or an environment process that is silent, for this long. Keep it
    above the longest engine step. Until an engine has its first weights, comm.init_timeout_seconds applies instead."""
    max_restarts: int = bounds(3, ge=0, le=10**6)
    """Maximum respawns of one role within 10 minutes. The next failure ends the run, which can be resumed.
    0 disables respawning."""
    min_replicas: int = bounds(1, ge=1, le=MOST_RANKS)
    """Minimum generator replicas. The run continues with fewer replicas when some cannot be replaced, down to this
    number."""
    min_trainers: int = bounds(0, ge=0, le=MOST_RANKS)
    """Minimum dp rows of the trainer. When lost hosts leave no room for all rows, the run continues from its last
    checkpoint with fewer, and after a later one with those for which there is room again. 0: all rows are needed."""
    snapshot_interval: int = bounds(5, ge=0, le=10**9)
    """Steps between in-memory snapshots of the trainers. A lost trainer costs at most this many steps. 0: only
    checkpoints."""
    snapshot_gbps: float = bounds(0.0, ge=0, le=10**6)
    """Limit in gigabits per second of a host's reads of other hosts' snapshots. 0: none."""
    max_failed_saves: int = bounds(3, ge=0, le=10**9)
    """Consecutive failed checkpoints before the run stops. A failed one is retried after the next step."""
    stop_grace_seconds: float = bounds(25.0, ge=0, le=MOST_SECONDS)
    """Time to stop in after SIGINT, SIGTERM or SIGHUP. The current step is finished and saved if there is time for
    both; otherwise the step before it is saved. Keep it a few seconds below what a scheduler waits before it kills."""
    max_bad_steps: int = bounds(3, ge=0, le=10**9)
    """Consecutive steps with a non-finite gradient, whose updates are skipped, before on_bad_steps applies. 0:
    never."""
    on_bad_steps: Literal["stop", "rollback"] = "stop"
    """"stop" ends the run; "rollback" returns to the newest snapshot or checkpoint from before those steps, at most
    max_restarts times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorSection:
    replicas: int = bounds(1, ge=1, le=MOST_RANKS)
    """Number of independent vLLM engines."""
    tensor_parallel_degree: int = bounds(1, ge=1, le=MOST_RANKS)
    """Tensor-parallel degree of one engine, which is its number of processes."""
    dtype: DtypeChoice = "auto"
    """Dtype of the rollout weights. "auto": float32 on a CPU; on a GPU training.mixed_precision_param, or bfloat16 if
    that is "auto" too. With quantization = "fp8": bfloat16."""
    quantization: Quantization = "none"
    """Sample with the blocks' linear weights in 8 bits and a scale per row, rounded when they land: "fp8" computes with
    vLLM's fp8 kernels; "int8", on a CPU, only rounds. Turns algorithm.correction on (docs/clusters.md)."""
    max_num_seqs: int = bounds(256, ge=1, le=2**20)
    """Maximum number of sequences in one engine's batch."""
    max_model_len: int = bounds(0, ge=0, le=2**20)
    """Maximum length of a sequence. 0: training.seq_len."""
    max_num_batched_tokens: int = bounds(0, ge=0, le=2**24)
    """Maximum number of tokens that one step of an engine computes: prompts, and one of each sequence. 0: 8192 on a
    GPU, or max_model_len or max_num_seqs if they are larger; vLLM's default on a CPU."""
    kv_cache_memory_mb: int = bounds(0, ge=0, le=2**24)
    """Size of the KV cache of one process in MiB. 0: 256 on a CPU; what gpu_memory_utilization leaves on a GPU, by
    vLLM's measurement, or with placement.kind = "colocated" by estimate and at most what the sequences can fill."""
    gpu_memory_utilization: float = bounds(0.9, ge=0.01, le=1)
    """Fraction of a GPU's memory that the engine may use, together with a trainer that waits on the same GPU. With
    kv_cache_memory_mb, it need not be free when the engine starts."""
    enforce_eager: Switch = "auto"
    """Run vLLM without CUDA graphs. "auto": false on a GPU, true on a CPU."""
    async_scheduling: Switch = "auto"
    """Let vLLM prepare a decode step while the device computes the one before. A new version waits for steps in flight,
    so each token has the version that sampled it. "auto": true on a GPU, unless engines record kept sets or experts
    (rollout.top_p, top_k, min_p, algorithm.routing_replay); false on a CPU."""
    drafts: Literal["none", "siblings", "ngram"] = "none"
    """On a CPU: guess the next tokens of a sample and verify them in one step, without changing any token. "ngram":
    by the sample's own text; "siblings": by earlier answers to its prompt, too (docs/clusters.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentSection:
    name: str = ""
    """What drives rollouts of several turns: "calc", "hunt", your own "package.module:name", or one of a
    package, as "gymnasium:FrozenLake-v1" (docs/environments.md). Empty: the policy answers the prompt once."""
    args: Table = field(default_factory=dict, hash=False)
    """Arguments of the environment's constructor, as {is_slippery = false}."""
    python: str = ""
    """Python that imports the environment or the agent: a virtual environment's folder, if its packages conflict with
    this project's. Empty: this one."""
    processes: int = bounds(2, ge=1, le=MOST_RANKS)
    """Number of processes that run environments. One that dies or hangs is replaced."""
    concurrency: int = bounds(64, ge=1, le=2**16)
    """Maximum number of rollouts that one process runs at the same time. More of them wait."""
    seats: list[str] = field(default_factory=list)
    """Players of an episode, such as ["white", "black"]: each has its own conversation and reward
    (docs/environments.md). An agent's requests name one as their model. Empty: one player."""
    frozen_seats: list[str] = field(default_factory=list)
    """Those of the seats whose tokens are never trained on."""
    endpoints: Tables = field(default_factory=dict, hash=False)
    """Seats that a frozen model plays, such as a simulated user or a judge: by seat a table with url, model and
    api_key_env, or with the folder of a model that the run starts, and with temperature, max_tokens and seed
    (docs/environments.md)."""
    max_turns: int = bounds(8, ge=1, le=10**6)
    """Maximum turns of a rollout, or of each of its players. One that reaches it ends with the reward that it has
    earned so far."""
    max_tokens: int = bounds(0, ge=0, le=2**20)
    """Maximum tokens of a rollout after its prompt, or of each of its players, sampled and read. 0: what
    training.seq_len and generator.max_model_len leave."""
    turn_seconds: float = bounds(60.0, gt=0, le=MOST_SECONDS)
    """Deadline of one call into the environment. A rollout that misses it has no reward, and its process is replaced if
    its code still runs."""
    rollout_seconds: float = bounds(600.0, gt=0, le=MOST_SECONDS)
    """Deadline of a whole rollout, including the time in which its turns are sampled."""
    lockstep: bool = False
    """Sample each turn of all running rollouts together. Only then does the same seed give the same rollouts to the
    last bit: what an engine computes depends a little on what else is in its batch."""

    @property
    def folders(self) -> dict[str, list[str]]:
        """Return the folders of models that the run starts to play seats, each with its seats."""
        found = dict[str, list[str]]()
        for seat, table in self.endpoints.items() if self.name else ():
            if folder := str(table.get("folder", "")):
                found.setdefault(folder, []).append(seat)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class OpponentsSection:
    pool: list[str] = field(default_factory=list)
    """Who plays against the policy, in place of itself, in episodes of environment.seats (docs/environments.md):
    "start", "best" and "steps-ago N" are its own earlier adapters, "history" all that are kept, and any other entry is
    an adapter's folder in PEFT's layout. Empty: the policy plays all seats."""
    seats: list[str] = field(default_factory=list)
    """The seats that opponents take, one of them in each group. Empty: all that are trained."""
    share: float = bounds(1.0, ge=0, le=1)
    """Share of the groups that have an opponent. In the others the policy plays against itself."""
    weighting: Literal["even", "hard"] = "even"
    """How often each of the pool is met. "hard": by (1 - the share of games that the policy wins) squared, as
    prioritized fictitious self-play."""
    interval: int = bounds(10, ge=1, le=10**9)
    """Steps between the policy's adapters that are kept, in opponents/ in the dump folder."""
    history: int = bounds(8, ge=1, le=1000)
    """Number of kept adapters, the newest ones, that "history" stands for."""
    held_out: str = ""
    """The entry of the pool that takes a seat in the held-out episodes. Empty: the policy plays all seats."""

    def most_at_once(self, steps: int) -> int:
        """Return the most opponents of groups that began within `steps` steps: all for whom the pool stands, and all
        for whom its entries stood before, which change with the kept adapters."""
        now = len(self.pool) + ("history" in self.pool) * (self.history - 1)
        return now + (len(self.pool) * (1 + -(-steps // self.interval)) if steps > 1 else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSection:
    require: list[str] = field(default_factory=lambda: ["namespaces", "landlock", "seccomp"])
    """Layers that the sandbox has; nothing runs without one of them. Leave out "namespaces" where containers forbid
    them, or "landlock" on old kernels; docs/security.md lists the gaps then."""
    wall_seconds: float = bounds(10.0, ge=0.1, le=10**6)
    """Time of an execution. All its processes are killed then."""
    memory_mb: int = bounds(512, ge=32, le=2**22)
    """Memory of an execution in MiB. A process never gets more; several of them are killed a moment after they have
    it."""
    packages: bool = False
    """Let Python programs import the packages that are installed for the run, such as numpy."""
    cgroup: str = ""
    """Folder of a cgroup v2 that is yours and empty, with memory and pids enabled for its children: the kernel then
    bounds the memory of all processes of an execution. Empty: a watcher does, a moment later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSyncSection:
    transport: Literal["auto", "shm", "rdma", "broadcast"] = "auto"
    """"shm": generators map the trainers' memory; "rdma": one-sided RDMABuffer reads, over TCP where there is no RDMA;
    "broadcast": by NCCL, or gloo on CPUs, to one replica of each host; "auto": "shm" within a host, else "rdma", or
    "broadcast" between GPUs without RDMA."""
    block_kb: int = bounds(1024, ge=1, le=65536)
    """Size of a block, the unit of checksums. They are computed right after packing, so a block should fit in a core's
    cache."""
    verify: Literal["off", "transfer", "live"] = "live"
    """Compare with the trainer's checksums before serving new weights: nothing, the bytes received, or the live
    parameters."""
    in_flight: Literal["auto", "swap", "keep", "drain"] = "auto"
    """Unfinished requests at a weight update: "swap" recomputes their keys and values with the new weights, "keep"
    leaves the old ones, "drain" finishes them first. "auto": "keep" on GPUs with a lag if allowed, else "swap"."""
    delta: bool = False
    """Transfer and write only the blocks that changed, unless most of them did."""
    relay: Switch = "auto"
    """Hosts that have a version pass it on in chains, one for each host of the trainers, instead of all reading from
    the trainers. "auto": with verify = "live", if at least three hosts read per host of the trainers. Broadcasts
    need none."""
    gap_tolerance: float = bounds(0.0, ge=0, le=1e6)
    """Largest mean difference between the log-probs of generators and trainers, on one prompt after the first sync. A
    larger one ends the run before it trains. 0: 0.001 if all is float32, else 0.1; with generator.quantization 0.2
    ("int8") or 0.5 ("fp8")."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostsSection:
    kind: Literal["local", "processes", "attach", "ssh"] = "local"
    """Where ranks run. "local": on this host; "processes": here, under `count` workers that stand for hosts; "attach":
    where workers (python -m titan_rl worker) wait at `addresses`; "ssh": there too, the run starts them."""
    count: int = bounds(0, ge=0, le=2**12)
    """Number of hosts. 0: one, or one per address."""
    addresses: list[str] = field(default_factory=list)
    """Addresses of the running workers, such as "tls://node1:26600", in the order in which hosts are filled."""
    ssh: str = "ssh -o BatchMode=yes"
    """With kind "ssh": the command, with options, to which a host's name and the host's command are appended."""
    own_address: str = ""
    """Name or IP of this host that the workers reach the run by. Empty: the host's name."""
    ports: str = ""
    """Ports of this host at which the workers reach the run, such as "26700-26799"; with kind "ssh" the workers use
    the same of theirs. Empty: any free ones. A running worker has --ports."""
    tls: str = ""
    """Folder with ca.pem, cert.pem and key.pem, as python -m titan_rl worker --init-tls makes them. Runs across hosts
    need it."""
    insecure: bool = False
    """Allow addresses that begin with tcp://: no encryption, and anyone who reaches a port executes code as you."""
    join_seconds: float = bounds(60.0, ge=1, le=MOST_SECONDS)
    """Deadline for all workers to answer at the start."""
    orphan_seconds: float = bounds(30.0, ge=2, le=MOST_SECONDS)
    """Ranks on other hosts end when the run has not answered for this long. After the loss of a host that may be only
    cut off, trainers resume when this has passed."""
    slots: int = bounds(0, ge=0, le=10**5)
    """Maximum number of ranks on a host. 0: its GPUs. On CPU: 16 on one host, or if placement.hosts is set; else an
    even share of the ranks."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """"auto" uses CUDA if the host has a GPU."""
    gpu_memory_gb: float = bounds(0.0, ge=0, le=10**4)
    """Memory of one GPU in GiB: --dry-run on a machine without GPUs then plans for `slots` of them and checks that the
    run fits. Also the memory of GPUs here if neither nvidia-smi nor the driver has it. 0: check only where there are
    GPUs."""
    gpu: str = ""
    """Card, such as "H100" or as nvidia-smi prints it, by whose rates "auto" chooses how updates are computed. Empty:
    the card of this host, or of those with this memory the first that titan_rl/tools/plan/facts.toml names."""
    memory_gb: float = bounds(0.0, ge=0, le=10**6)
    """Memory of one host in GiB, against which --dry-run checks snapshots and staged weights. 0: unknown."""
    link_gbps: float = bounds(0.0, ge=0, le=10**6)
    """Bandwidth of one host's network in Gbit/s, each way, for the lower bounds that --dry-run prints. 0: unknown."""
    isolation: Literal["auto", "require", "off"] = "auto"
    """Put the run's sockets into a private network namespace, where no other user reaches them. "auto" warns where
    the kernel does not allow it, "require" refuses to start there. Reward functions keep the host's network."""
    threads: int = bounds(0, ge=0, le=1024)
    """OpenMP threads per process. 0: the cores, divided by the processes that compute at the same time, at most 8;
    1 where GPUs compute. Another number adds up floats in another order: losses of the same seed differ slightly."""

    @property
    def at_addresses(self) -> bool:
        """Return True if the hosts are joined at their addresses."""
        return self.kind in ("attach", "ssh")

    @property
    def number(self) -> int:
        """Return how many hosts there are."""
        return self.count or len(self.addresses) or 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySection:
    """Allowances of a GPU's memory estimate, which no shape gives. A run prints its measurements next to them."""

    cuda_context_mb: int = bounds(1280, ge=0, le=2**20)
    """MiB that CUDA's context, loaded kernels and libraries take in every process. Measured on an H200:
    docs/benchmarks/gpu."""
    nccl_buffers_mb: int = bounds(1024, ge=0, le=2**20)
    """MiB that NCCL takes in every process that communicates. Not measured: an allowance."""
    cuda_graphs_mb: int = bounds(1024, ge=0, le=2**20)
    """MiB that the CUDA graphs of one engine take. Not measured: an allowance."""
    sleeping_engine_mb: int = bounds(0, ge=0, le=2**20)
    """MiB that an engine keeps while it sleeps, with placement.sleep. Not measured: 0 allows for
    cuda_context_mb, and for cuda_graphs_mb unless generator.enforce_eager is set."""
    fragmentation: float = bounds(0.08, ge=0, le=1)
    """Share of its allocations that a process's caching allocator holds in addition. Measured on an H200:
    docs/benchmarks/gpu."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementSection:
    kind: Literal["disaggregated", "colocated"] = "disaggregated"
    """"disaggregated" gives generators and trainers separate devices; "colocated" makes them take turns on the same
    devices."""
    sleep: Switch = "auto"
    """With kind "colocated" on GPUs: engines free their memory while the trainers compute. "auto": unless trainers and
    awake engines fit the GPUs together, by estimate, in a way that costs updates no time."""
    hosts: Table = field(default_factory=dict, hash=False)
    """Hosts of a role by number, such as {trainer = "0-1", generator = "2"}: its dp rows, or replicas, are dealt evenly
    to them. A role without an entry fills the hosts in order."""
