# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Git on the controller: the commit of a tag or branch, a commit's build number, and a commit's tree as an archive.

Repositories and names come from an inventory, so git gets them as separate arguments after ``--``, and only uses the protocols in GIT_ENVIRONMENT.
"""

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import validation

LOOK_UP_TIMEOUT_SECONDS = 60
FETCH_TIMEOUT_SECONDS = 3600
GIT_ENVIRONMENT = {
    "LC_ALL": "C",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_ALLOW_PROTOCOL": "file:git:http:https:ssh",
}
REMOTE_NAME = "asked"


class GitError(Exception):
    """Failure of git; the message is git's own, on a single line."""


class NotFound(GitError):
    """The repository answered, but does not have the requested ref or commit."""


def _run(argv: list[str], timeout_seconds: int, folder: Path | None = None) -> str:
    command = ["git", *(["--git-dir", str(folder)] if folder else []), *argv]
    try:
        process = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=timeout_seconds,
            cwd=folder or "/",
            env={**os.environ, **GIT_ENVIRONMENT},
            check=False,
        )
    except FileNotFoundError:
        raise GitError("the controller has no git; install git there, or use source: pypi or archive") from None
    except subprocess.TimeoutExpired:
        raise GitError(f"git did not finish within {timeout_seconds} seconds") from None
    if process.returncode:
        message = " ".join(process.stderr.split())[:400] or f"status {process.returncode}"
        is_missing = "couldn't find remote ref" in message or "not our ref" in message
        raise (NotFound if is_missing else GitError)(validation.printable(message))
    return process.stdout


def absolute_path(repository: str) -> str:
    """Return a controller path as an absolute path, and anything else unchanged."""
    if "://" in repository or (":" in repository.split("/", maxsplit=1)[0]):
        return repository
    return os.path.abspath(os.path.expanduser(repository))


def commit_of(repository: str, ref: str) -> str | None:
    """Return the commit of a tag or a branch, or None if the repository has neither. A tag takes precedence, as in git itself."""
    ref_names = [f"refs/tags/{ref}^{{}}", f"refs/tags/{ref}", f"refs/heads/{ref}"]
    listing = _run(["ls-remote", "--", absolute_path(repository), *ref_names], LOOK_UP_TIMEOUT_SECONDS)
    commits = {name: commit for commit, name in re.findall(r"^([0-9a-f]{40,64})\t(\S+)$", listing, re.MULTILINE)}
    return next((commits[ref_name] for ref_name in ref_names if ref_name in commits), None)


@contextmanager
def _fetch(repository: str, revision: str, parent_folder: Path, *options: str) -> Iterator[tuple[Path, str]]:
    """Yield a temporary bare repository with the fetched objects, and the commit."""
    with tempfile.TemporaryDirectory(dir=parent_folder) as work_path:
        folder = Path(work_path)
        _run(["init", "--quiet", "--bare", work_path], LOOK_UP_TIMEOUT_SECONDS)
        remote_options = ["-c", f"remote.{REMOTE_NAME}.url={absolute_path(repository)}"]
        fetch_options = ["--quiet", "--no-tags", "--no-recurse-submodules", "--no-auto-gc", *options]
        _run([*remote_options, "fetch", *fetch_options, "--", REMOTE_NAME, revision], FETCH_TIMEOUT_SECONDS, folder)
        yield folder, _run(["rev-parse", "--verify", "FETCH_HEAD^{commit}"], LOOK_UP_TIMEOUT_SECONDS, folder).strip()


def count_commits(repository: str, commit: str, parent_folder: Path) -> int:
    """Return the number of commits up to this commit, which upstream uses as build number."""
    is_local = absolute_path(repository).startswith(("/", "file:"))
    # Over a network, commits come without trees. A local repository needs no such filter, and git before 2.44 would start itself endlessly
    # to look for missing history in a shallow clone.
    options = ["--update-shallow"] if is_local else ["--filter=tree:0"]
    with _fetch(repository, commit, parent_folder, *options) as (folder, fetched_commit):
        if _run(["rev-parse", "--is-shallow-repository"], LOOK_UP_TIMEOUT_SECONDS, folder).strip() != "false":
            raise GitError("the repository's history is incomplete")
        return int(_run(["rev-list", "--count", fetched_commit, "--"], FETCH_TIMEOUT_SECONDS, folder))


def write_archive(repository: str, revision: str, target_path: Path) -> str:
    """Write the tree of a commit or tag as a reproducible tar archive with a single folder; return the commit."""
    with _fetch(repository, revision, target_path.parent, "--depth=1") as (folder, commit):
        output_options = ["--format=tar.gz", "--prefix=llama.cpp/", f"--output={target_path}"]
        _run(["archive", *output_options, commit], FETCH_TIMEOUT_SECONDS, folder)
    return commit
