"""Keys of [launch]: what python -m titan_rl launch asks a cluster's scheduler for. A run itself ignores them."""

from dataclasses import dataclass, field

from titan_rl.config.choices import bounds


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSection:
    account: str = ""
    """Slurm account."""
    partition: str = ""
    """Slurm partition. Empty: the cluster's default."""
    minutes: int = bounds(0, ge=0, le=10**6)
    """Time limit of the job. A run that reaches it saves and continues in the queue. 0: the partition's own limit."""
    cpus_per_node: int = bounds(0, ge=0, le=2**14)
    """Cores of each node. 0: whole nodes, for this job alone."""
    memory_gb_per_node: int = bounds(0, ge=0, le=2**20)
    """Memory of each node in GiB. 0: all of it on Slurm, no limit on Kubernetes."""
    image: str = ""
    """Container image: a name or a squashfs file for Slurm's pyxis, a name for Kubernetes."""
    mounts: list[str] = field(default_factory=list)
    """Folders in the container, "FOLDER:PATH" or "FOLDER:PATH:ro". FOLDER is a path of the node, or on Kubernetes also
    pvc/CLAIM or secret/NAME."""
    setup: str = ""
    """Shell line that each node runs first, such as "source /shared/venv/bin/activate"."""
    python: str = ""
    """Python on the nodes. Empty: the one that launches; in a container python3."""
    extra_args: list[str] = field(default_factory=list)
    """More arguments of sbatch, such as "--constraint=h100"."""
    namespace: str = ""
    """Kubernetes namespace. Empty: the current context's."""
    pod: str = ""
    """YAML file that is merged into Kubernetes' pod template, such as "pod.yaml": tolerations, node selectors, a
    service account, labels."""
    secrets: list[str] = field(default_factory=list)
    """Kubernetes Secrets whose keys become environment variables, such as an API key. On Slurm jobs have the
    environment of the submitting shell."""
