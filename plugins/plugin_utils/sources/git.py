# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the controller asks git: the commit behind a name, the number of a build, and a commit's tree as an archive.

Repositories and names come from an inventory: git gets them as arguments of their own, after a ``--``, and no helper programs.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import validation

LOOK_UP_SECONDS = 60
FETCH_SECONDS = 3600
ENVIRONMENT = {
    "LC_ALL": "C",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_ALLOW_PROTOCOL": "file:git:http:https:ssh",
}
REMOTE = "asked"


class GitError(Exception):
    """The message is what git said, in one line."""


class NotFound(GitError):
    """The repository answered, but does not have the requested ref or commit."""


def _run(argv: list[str], seconds: int, folder: Path | None = None) -> str:
    command = ["git", *(["--git-dir", str(folder)] if folder else []), *argv]
    try:
        process = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=seconds,
            cwd=folder or "/",
            env={**os.environ, **ENVIRONMENT},
            check=False,
        )
    except FileNotFoundError:
        raise GitError("the controller has no git; install it there, or use source: pypi or archive") from None
    except subprocess.TimeoutExpired:
        raise GitError(f"it did not answer within {seconds} seconds") from None
    if process.returncode:
        said = " ".join(process.stderr.split())[:400] or f"status {process.returncode}"
        missing = "couldn't find remote ref" in said or "not our ref" in said
        raise (NotFound if missing else GitError)(validation.printable(said))
    return process.stdout


def place(repository: str) -> str:
    """A path of the controller as an absolute one; anything else as it is."""
    if "://" in repository or (":" in repository.split("/", maxsplit=1)[0]):
        return repository
    return os.path.abspath(os.path.expanduser(repository))


def commit_of(repository: str, name: str) -> str | None:
    """The commit behind a tag or a branch of a repository, or None where it has neither. A tag wins, as for git itself."""
    names = [f"refs/tags/{name}^{{}}", f"refs/tags/{name}", f"refs/heads/{name}"]
    listing = _run(["ls-remote", "--", place(repository), *names], LOOK_UP_SECONDS)
    commits = {name: commit for commit, _tab, name in (line.partition("\t") for line in listing.splitlines())}
    return next((commits[full] for full in names if full in commits), None)


@contextmanager
def _fetch(repository: str, revision: str, beside: Path, *options: str) -> Iterator[tuple[Path, str]]:
    """A bare repository with what was fetched, for as long as it is needed, and the commit."""
    with tempfile.TemporaryDirectory(dir=beside) as work:
        folder = Path(work)
        _run(["init", "--quiet", "--bare", work], LOOK_UP_SECONDS)
        remote = ["-c", f"remote.{REMOTE}.url={place(repository)}"]
        given = ["--quiet", "--no-tags", "--no-recurse-submodules", "--no-auto-gc", *options]
        _run([*remote, "fetch", *given, "--", REMOTE, revision], FETCH_SECONDS, folder)
        yield folder, _run(["rev-parse", "--verify", "FETCH_HEAD^{commit}"], LOOK_UP_SECONDS, folder).strip()


def count(repository: str, commit: str, beside: Path) -> int:
    """How many commits lead to this one, which upstream calls the number of the build."""
    local = place(repository).startswith(("/", "file:"))
    # Over a network commits come without trees. A repository on this machine is at hand, and one whose history was cut off would let
    # git before 2.44 start itself without end to look for the rest.
    options = ["--update-shallow"] if local else ["--filter=tree:0"]
    with _fetch(repository, commit, beside, *options) as (folder, head):
        if _run(["rev-parse", "--is-shallow-repository"], LOOK_UP_SECONDS, folder).strip() != "false":
            raise GitError("its history is not complete there")
        return int(_run(["rev-list", "--count", head, "--"], FETCH_SECONDS, folder))


def archive(repository: str, revision: str, target: Path) -> str:
    """Writes the tree of a commit or tag as a tar archive with one folder, the same one each time; returns the commit."""
    with _fetch(repository, revision, target.parent, "--depth=1") as (folder, commit):
        written = ["--format=tar.gz", "--prefix=llama.cpp/", f"--output={target}"]
        _run(["archive", *written, commit], FETCH_SECONDS, folder)
    return commit
