# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What only the controller can look up and fetch, and its cache: sources with their sha256, known-answer models."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from ansible.errors import AnsibleError
from ansible.module_utils.urls import open_url
from ansible_collections.llamacpp.cluster.plugins.module_utils.apply.stored import sha256
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.refusal import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import known_answer
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import releases
from ansible_collections.llamacpp.cluster.plugins.plugin_utils import git


class Fetched(NamedTuple):
    """A source in the cache: whether it had to be brought there, and what identifies it."""

    path: Path
    changed: bool
    sha256: str
    commit: str


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "llamacpp"


def _download_pypi(release: dict, folder: Path) -> Path:
    requirement = folder / "requirement.txt"
    requirement.write_text(f"llama-cpp-python=={release['version']} --hash={release['checksum']}\n")
    process = subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "--disable-pip-version-check",
            "download",
            "--quiet",
            "--no-deps",
            "--no-binary",
            "llama-cpp-python",
            "--require-hashes",
            "--dest",
            str(folder),
            "--requirement",
            str(requirement),
        ],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if process.returncode:
        said = process.stderr.strip()
        if "No module named pip" in said:
            raise AnsibleError(
                f"llama_release has source: pypi, but {sys.executable} on the controller has no pip: install it, or use source: archive"
            )
        got = re.search(r"Got\s+([0-9a-f]{64})", said)
        if got:
            raise AnsibleError(
                f"llama_release has the checksum {release['checksum']}, but the source archive of llama-cpp-python {release['version']} "
                f"that pip downloaded has sha256:{got[1]}: correct the checksum. If it was right before, do not use the new archive."
            )
        errors = " ".join(line for line in said.splitlines() if line.startswith("ERROR"))
        raise AnsibleError(
            f"pip could not fetch the source archive of llama-cpp-python {release['version']} (llama_release): check the version and "
            f"the index in the configuration of pip. pip says: {errors or said[-500:]}"
        )
    return next(folder.glob("llama_cpp_python-*"))


def _download_url(release: dict, folder: Path) -> Path:
    target = folder / "archive"
    try:
        with open_url(release["url"], timeout=60) as reply, target.open("wb") as stream:
            shutil.copyfileobj(reply, stream)
    except Exception as error:
        raise AnsibleError(
            f"llama_release has the url {release['url']!r}, which could not be fetched: {error}"
        ) from error
    return target


def known_answer_model(layers: int, width: int, kind: str) -> tuple[Path, Path]:
    """The known-answer model in the cache, written if it is missing, and the file with its sha256.

    :raises AnsibleError: it cannot be written here.
    """
    path = cache_folder() / "models" / f"{known_answer.FORM}-{known_answer.file_name(layers, width, kind)}"
    checksum = path.with_name(path.name + ".sha256")
    if not path.exists() or not checksum.exists():
        # The packages gguf and numpy take longer to import than a whole plan: only when they are needed.
        from ansible_collections.llamacpp.cluster.plugins.plugin_utils import known_answer_file

        if not known_answer_file.HAS_GGUF:
            raise AnsibleError(
                f"The known-answer model is written with the Python package gguf, which {sys.executable} on the controller does not have: "
                "install the collection's requirements.txt there."
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        known_answer_file.write(path, layers, width, kind)
        checksum.write_text(sha256(path) + "\n")
    return path, checksum


def _folder() -> Path:
    folder = cache_folder() / "sources"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def resolve(value: Any, find: Callable[[str], str]) -> dict:
    """``llama_release`` with what has to be looked up: where its archive is, the commit of a branch or tag, its build number, and of
    patches the sha256 and the files that they change.

    :param find: from a path on the controller as the operator gives it to where it is.
    :raises Refusal: a file, branch, tag or commit does not exist.
    """
    request = releases.request_of(value)
    if request.get("patches"):
        request["patches"] = [_read(patch, find) for patch in request["patches"]]
    if request.get("path"):
        try:
            request["path"] = _readable("path", request["path"], find)
        except Refusal:
            if not _cached_archive(request["checksum"]).exists():
                raise
    if request["source"] == "git":
        if "commit" not in request and not re.fullmatch(releases.BUILD_TAG, request["ref"]):
            request["commit"] = _commit_of(request)
        if "build" not in request:
            request["build"] = _build_of(request)
    return request


def _read(patch: Any, find: Callable[[str], str]) -> dict:
    path = Path(_readable("patch", patch, find))
    text = path.read_text(errors="replace")
    return {"path": str(path), "sha256": sha256(path), "files": re.findall(r"^\+\+\+ b/(\S+)", text, re.MULTILINE)}


def _readable(key: str, given: Any, find: Callable[[str], str]) -> str:
    """Path of a readable file on the controller."""
    if not isinstance(given, str):
        raise Refusal(f"llama_release has the {key} {given!r}: use the path of a file on the controller")
    try:
        path = find(given)
        with Path(path).open("rb"):
            return path
    except (AnsibleError, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it does not exist"
        raise Refusal(_not_readable(key, given, reason)) from None


def _not_readable(key: str, given: str, reason: str | None) -> str:
    return (
        f"llama_release has the {key} {given!r}, which cannot be read on the controller ({reason}): use a path that is absolute, or relative "
        "to the inventory or the playbook"
    )


def _commit_of(request: dict) -> str:
    ref, repository = request["ref"], request["repository"]
    try:
        commit = git.commit_of(repository, ref)
    except git.GitError as error:
        raise Refusal(_unreadable(repository, error)) from None
    if commit is None:
        raise Refusal(_unknown(repository, ref))
    return commit


def _unreadable(repository: str, error: git.GitError) -> str:
    return (
        f"llama_release has the repository {repository!r}, which could not be read from the controller: {error}. Check the address and "
        "the network of the controller"
    )


def _unknown(repository: str, ref: str) -> str:
    return f"llama_release has the ref {ref!r}, which is not a tag, branch or commit of {repository}: correct it; a commit needs all its digits"


def _build_of(request: dict) -> int:
    """The number of a commit's build, counted once."""
    record = _folder() / f"{request['commit']}.build"
    if not record.exists():
        try:
            number = git.count(request["repository"], request["commit"], _folder())
        except git.NotFound:
            raise Refusal(_unknown(request["repository"], request["ref"])) from None
        except git.GitError as error:
            raise Refusal(
                f"llama_release has the ref {request['ref']!r}, whose commits could not be counted in {request['repository']} ({error}): "
                "add build, the llama.cpp build number of that commit"
            ) from None
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise Refusal(_full(_folder())) from None
        partial = record.with_suffix(f".{os.getpid()}")
        partial.write_text(f"{number}\n")
        partial.replace(record)
    return int(record.read_text())


def fetch(release: dict) -> Fetched:
    """The source of a planned release in the cache.

    :raises AnsibleError: it cannot be fetched, or its sha256 is another; nothing is left in the cache then.
    """
    folder = _folder()
    try:
        with (folder / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return (_fetch_commit if release["source"] == "git" else _fetch_archive)(release, folder)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise AnsibleError(_full(folder)) from error


def _full(folder: Path) -> str:
    return (
        f"llama_release does not fit on the controller: the disk of {folder} is full. Free some space and run it again"
    )


def _fetch_commit(release: dict, folder: Path) -> Fetched:
    """What a tag was when it was fetched first is kept: it is the name of a build."""
    name = hashlib.sha256(f"{release['repository']}\n{release['revision']}".encode()).hexdigest()[:16]
    kept, record = folder / f"git-{name}.tar.gz", folder / f"git-{name}.json"
    try:
        known = json.loads(record.read_text())
        if sha256(kept) == known["sha256"]:
            return Fetched(kept, False, known["sha256"], known["commit"])
    except (OSError, ValueError, KeyError):
        pass
    with tempfile.TemporaryDirectory(dir=folder) as work:
        archive = Path(work) / "archive"
        try:
            commit = git.archive(release["repository"], release["revision"], archive)
        except git.NotFound:
            raise AnsibleError(_unknown(release["repository"], release["revision"].replace("refs/tags/", ""))) from None
        except git.GitError as error:
            raise AnsibleError(_unreadable(release["repository"], error)) from None
        known = {"commit": commit, "sha256": sha256(archive)}
        (Path(work) / "record").write_text(json.dumps(known) + "\n")
        archive.replace(kept)
        (Path(work) / "record").replace(record)
    return Fetched(kept, True, known["sha256"], commit)


def _cached_archive(checksum: str) -> Path:
    """Where the archive of that checksum lies in the cache once it was fetched."""
    return _folder() / f"{checksum.split(':', 1)[1][:16]}.tar.gz"


def _fetch_archive(release: dict, folder: Path) -> Fetched:
    wanted, kept = release["checksum"].split(":", 1)[1], _cached_archive(release["checksum"])
    if kept.exists() and sha256(kept) == wanted:
        return Fetched(kept, False, wanted, release["commit"])
    with tempfile.TemporaryDirectory(dir=folder) as work:
        if release["source"] == "pypi":
            archive = _download_pypi(release, Path(work))
        elif "url" in release:
            archive = _download_url(release, Path(work))
        else:
            archive = Path(work) / "archive"
            try:
                shutil.copyfile(release["path"], archive)
            except OSError as error:
                if error.errno == errno.ENOSPC:
                    raise
                raise AnsibleError(_not_readable("path", release["path"], error.strerror)) from error
        actual = sha256(archive)
        if actual != wanted:
            raise AnsibleError(
                f"llama_release has the checksum sha256:{wanted}, but the archive has sha256:{actual}: correct the checksum, or get the right archive"
            )
        archive.replace(kept)
    return Fetched(kept, True, wanted, release["commit"])
