"""What [sandbox] require may say, and what to change on a machine that lacks a layer."""

from collections.abc import Iterator
from pathlib import Path

from titan_rl.config.system_sections import SandboxSection

LAYERS = ("namespaces", "landlock", "seccomp")
ALWAYS = ("rlimits",)
FORBIDDEN_BY = {
    "/proc/sys/user/max_user_namespaces": ("0", "sysctl -w user.max_user_namespaces=15000"),
    "/proc/sys/kernel/unprivileged_userns_clone": ("0", "sysctl -w kernel.unprivileged_userns_clone=1"),
    "/proc/sys/kernel/apparmor_restrict_unprivileged_userns": (
        "1",
        "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0",
    ),
}
CONTAINER = (
    "a container's profile may forbid them: docker run --security-opt seccomp=unconfined --security-opt "
    "apparmor=unconfined"
)


def too_weak(section: SandboxSection) -> Iterator[str]:
    """Yield why a sandbox with these layers would not hold, on any machine."""
    found = section.require
    if unknown := [name for name in found if name not in LAYERS]:
        yield f"sandbox.require: expected some of {', '.join(LAYERS)}, found {', '.join(unknown)}"
    elif "seccomp" not in found or not {"namespaces", "landlock"} & set(found):
        least = 'expected "seccomp", and "namespaces" or "landlock" or both'
        yield f"sandbox.require: {least}, found {', '.join(found) or 'none'}"


def advised(problem: str) -> str:
    """Return a missing layer with what allows it on this machine."""
    if not problem.startswith("namespaces"):
        return f'{problem}; to run without, leave it out of sandbox.require (docs/security.md, "Weaker")'
    for name, (value, command) in FORBIDDEN_BY.items():
        path = Path(name)
        if path.exists() and path.read_text().strip() == value:
            return f"{problem}; {name} is {value}: {command}"
    return f'{problem}; {CONTAINER}; or leave "namespaces" out of sandbox.require (docs/security.md, "Weaker")'
