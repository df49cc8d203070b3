"""Finds the folder of a model of the Hub at a commit, which it downloads the first time.

OWNER/NAME@REVISION -> commit -> config.json, checked -> tokenizer, safetensors -> ~/.cache/titan_rl/OWNER--NAME--COMMIT

huggingface_hub downloads, with the usual meaning of HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE.
"""

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from titan_rl.config.plain_files import text_of
from titan_rl.environment import cache_folder
from titan_rl.preflight.pretrained import FetchFailed
from titan_rl.text.template import MORE_TEMPLATES
from titan_rl.tools.fetch.models import COMPLETE, announce, is_complete, locked
from titan_rl.train.hf_folder import COPIED
from titan_rl.wire.counted import counted
from titan_rl.wire.model_shape import shape_of_folder

COMMIT = re.compile(r"[0-9a-f]{40}")
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD = re.compile(r"\w[\w.-]*\.safetensors")
SETTINGS = {*COPIED, "tokenizer.json", "generation_config.json"}
TEMPLATE = re.compile(rf"{MORE_TEMPLATES}/\w[\w.-]*\.jinja")
PICKLED = (".bin", ".pt", ".pth", ".ckpt")
SECONDS = 20.0
"""Longest wait for the answer that names the commit."""


def hub_folder(name: str, key: str) -> Path:
    """Return the folder of "OWNER/NAME" or "OWNER/NAME@REVISION". `key`: where it was given, for the message. A commit
    that is there already needs no network."""
    repo, _, revision = name.partition("@")
    cache = cache_folder()
    if COMMIT.fullmatch(revision) and is_complete(_place(cache, repo, revision), f"{repo}@{revision}\n"):
        return _place(cache, repo, revision)
    with refusals_of(repo, key, revision):
        from huggingface_hub import HfApi

        found = HfApi().model_info(repo, revision=revision or None, timeout=SECONDS, files_metadata=True)
        commit = str(found.sha)
        files = {each.rfilename: each.size or 0 for each in found.siblings or []}
        if not COMMIT.fullmatch(commit):
            raise FetchFailed(f"{key}: expected the hash of a commit of {repo}, found {commit!r}")
        folder, source = _place(cache, repo, commit), f"{repo}@{commit}"
        cache.mkdir(parents=True, exist_ok=True, mode=0o700)
        with locked(cache / f"{folder.name}.lock", f"{source} into {cache}"):
            if not is_complete(folder, f"{source}\n"):
                _download(repo, commit, files, folder, key)
    return folder


def _place(cache: Path, repo: str, commit: str) -> Path:
    """Return the folder of a commit. No name on the Hub contains "--"."""
    return cache / f"{repo.replace('/', '--')}--{commit}"


def _download(repo: str, commit: str, files: Mapping[str, int], folder: Path, key: str) -> None:
    """Download what a run needs of `files`. The folder appears whole, or not at all; files that are complete stay in
    the unfinished one for the next call."""
    from huggingface_hub import hf_hub_download, snapshot_download

    scratch = folder.with_name(f"{folder.name}.unfinished")
    if "config.json" not in files:
        raise FetchFailed(f"{key}: expected a config.json in {repo}, found none")
    try:
        for name in ("config.json", INDEX):
            if name in files:
                hf_hub_download(repo, name, revision=commit, local_dir=scratch)
        _check_config(scratch, repo, key)
        wanted = _weights(scratch, repo, files, key)
    except FetchFailed:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    wanted |= {name for name in files if name in SETTINGS or TEMPLATE.fullmatch(name)}
    megabytes = sum(files[name] for name in wanted) / 1e6
    announce(f"fetching {repo} at commit {commit}: {counted(len(wanted), 'file')}, {megabytes:.0f} MB into {folder}")
    snapshot_download(repo, revision=commit, local_dir=scratch, allow_patterns=sorted(wanted))
    shutil.rmtree(scratch / ".cache", ignore_errors=True)  # the client's notes on this download
    (scratch / COMPLETE).write_text(f"{repo}@{commit}\n")
    shutil.rmtree(folder, ignore_errors=True)
    scratch.rename(folder)


def _check_config(scratch: Path, repo: str, key: str) -> None:
    """Refuse a model that no run could train, before its weights are downloaded."""
    try:
        shape_of_folder(str(scratch), key)
    except ValueError as error:
        raise FetchFailed(str(error).replace(str(scratch / "config.json"), f"config.json in {repo}")) from error


def _weights(scratch: Path, repo: str, files: Mapping[str, int], key: str) -> set[str]:
    """Return the names of the files with the weights that transformers would load."""
    if INDEX in files:
        try:
            named = {INDEX, *json.loads(text_of(scratch / INDEX))["weight_map"].values()}
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise FetchFailed(f"{key}: expected a weight_map in {INDEX} of {repo}, found {error!r}") from error
        odd = sorted(str(each) for each in named - {INDEX} if not SHARD.fullmatch(str(each)) or each not in files)
        if odd:
            raise FetchFailed(f"{key}: expected safetensors files of {repo} in its {INDEX}, found {odd[0]}")
        return named
    if WEIGHTS in files:
        return {WEIGHTS}
    pickled = [name for name in files if name.endswith(PICKLED)]
    found = f"{pickled[0]}, whose format can run code as it is read" if pickled else "neither"
    raise FetchFailed(f"{key}: expected {WEIGHTS} or {INDEX} in {repo}, found {found}")


@contextmanager
def refusals_of(repo: str, key: str, revision: str = "") -> Iterator[None]:
    """Turn what the client raises into one line about the repository, the network, or the token, which no line has."""
    from httpx import HTTPError
    from huggingface_hub import constants, errors

    at = constants.ENDPOINT
    try:
        yield
    except errors.HFValidationError as error:
        raise FetchFailed(f"{key}: expected OWNER/NAME of a repository, found {repo!r}") from error
    except errors.GatedRepoError as error:
        how = f"accept its terms at {at}/{repo}, and set HF_TOKEN to a token of that account"
        raise FetchFailed(f"{key}: expected a repository that you may read, found {repo} gated: {how}") from error
    except errors.RevisionNotFoundError as error:
        raise FetchFailed(f"{key}: expected a revision of {repo}, found none named {revision!r}") from error
    except errors.RepositoryNotFoundError as error:
        hint = "a private one needs the HF_TOKEN of a member"
        raise FetchFailed(f"{key}: expected a repository at {at}, found no {repo} ({hint})") from error
    except errors.OfflineModeIsEnabled as error:
        name, why = f"{repo}@{revision}".rstrip("@"), "because HF_HUB_OFFLINE is set"
        raise FetchFailed(f"{key}: expected OWNER/NAME@COMMIT of a fetched model, {why}, found {name}") from error
    except (HTTPError, errors.LocalEntryNotFoundError, errors.XetDownloadError, RuntimeError) as error:
        cause = error.__cause__ or error
        status = getattr(getattr(cause, "response", None), "status_code", 0)
        if status in (401, 403):
            allowed = f"an HF_TOKEN that {at} allows to do this to {repo}"
            raise FetchFailed(f"{key}: expected {allowed}, found one refused with status {status}") from error
        reason = " ".join(f"{type(cause).__name__} {cause}".split())[:200]
        raise FetchFailed(f"{key}: expected answers of {at} about {repo}, found {reason}") from error
    except OSError as error:
        raise FetchFailed(f"{key}: expected a folder that can be written, found {error}") from error
