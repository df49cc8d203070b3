"""Uploads an exported folder to a repository of the Hub, by huggingface_hub and the user's own token.

All files arrive in one commit, or none does. A new repository is private; nothing changes who sees an existing one.
"""

from collections.abc import Sequence
from pathlib import Path

from titan_rl.preflight.pretrained import FetchFailed
from titan_rl.record.model_card import CARD
from titan_rl.tools.fetch.catalog import ON_THE_HUB
from titan_rl.tools.fetch.hub import INDEX, SHARD, refusals_of
from titan_rl.tools.refused_input import UsageError
from titan_rl.wire.checkpoint_sums import export_damage
from titan_rl.wire.counted import counted
from titan_rl.wire.program import FAILED

KEY = "--push"
MARK = "titan_rl"  # a tag of each card that a run or an export writes


def check_push(repo: str, yes: bool) -> None:
    """Refuse, before anything is exported, what could not be uploaded afterwards."""
    if yes and not repo:
        raise UsageError("--yes: expected --push OWNER/NAME with it, found none")
    if not repo:
        return
    if not ON_THE_HUB.fullmatch(repo) or "@" in repo:
        raise UsageError(f"{KEY}: expected OWNER/NAME of a repository, found {repo!r}")
    if yes:
        from huggingface_hub import get_token

        if not get_token():
            raise UsageError(f"{KEY}: expected a token in HF_TOKEN, or one that `hf auth login` keeps, found none")


def check_exported(folder: Path) -> None:
    """Refuse to upload a folder that neither a run nor an export has written, or whose weights have changed since."""
    card = folder / CARD
    if not card.is_file() or MARK not in card.read_text(encoding="utf-8", errors="replace"):
        raise UsageError(f"--out: expected a new folder, or an exported one with its {CARD}, found {folder}")
    reason = export_damage(folder, read=True)
    if reason:
        raise UsageError(f"{folder} is damaged: {reason}", FAILED)


def push(folder: Path, repo: str, yes: bool) -> str:
    """Upload the files of a folder, or only list them unless the user said `yes`. Return a line for the user."""
    from huggingface_hub import constants

    files = sorted(path for path in folder.rglob("*") if path.is_file())
    names = [path.relative_to(folder).as_posix() for path in files]
    sizes = [path.stat().st_size for path in files]
    for name, size in zip(names, sizes, strict=True):
        print(f"{size:>15,}  {name}")
    what, place = f"{counted(len(files), 'file')} of {sum(sizes):,} bytes", f"{constants.ENDPOINT}/{repo}"
    if not yes:
        return f"nothing was uploaded: {what} would go to {place}, which is made private if it is new; --yes uploads"
    try:
        seen, commit = _upload(folder, repo, names)
    except FetchFailed as error:
        raise UsageError(f"{error}. {folder} is whole: the same command uploads it", FAILED) from error
    return f"{what} are at {place}, which is {seen}, as commit {commit}"


def _upload(folder: Path, repo: str, names: Sequence[str]) -> tuple[str, str]:
    """Return who sees the repository, and the new commit."""
    with refusals_of(repo, KEY):
        from huggingface_hub import CommitOperationAdd, HfApi

        api = HfApi()
        api.create_repo(repo, private=True, exist_ok=True)
        found = api.model_info(repo)
        theirs = [each.rfilename for each in found.siblings or []]
        # A loader might take the weights of an earlier upload that was cut into other files.
        left = [name for name in theirs if (name == INDEX or SHARD.fullmatch(name)) and name not in names]
        if left:
            raise FetchFailed(f"{KEY}: expected no other weights in {repo}, found {left[0]}: delete it there first")
        added = [CommitOperationAdd(name, folder / name) for name in names]
        done = api.create_commit(repo, added, commit_message=f"Upload {folder.name} by titan_rl export")
    return "private" if found.private else "public", str(done.oid)
