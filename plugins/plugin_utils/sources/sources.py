# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What only the controller can look up and fetch, and its cache: sources with their sha256."""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ansible.errors import AnsibleError
from ansible.utils.display import Display
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.files import sha256
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.builds import archives
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import prebuilt
from ansible_collections.llamacpp.cluster.plugins.module_utils.models import web
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import PatchPlan, ReleasePlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.builds import releases
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import release_request
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.stages import programs
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import Catalogue, Cluster, ReleaseRequest
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.sources import cache, git


class Fetched(NamedTuple):
    """An archive in the cache: whether it had to be brought there, and what identifies it."""

    path: Path
    changed: bool
    sha256: str
    commit: str


RELEASE = "llama_release"
PIP_SECONDS = 3600
PACKING_SECONDS = 60.0
"""For which a server may be silent: some make an archive when they are asked for it."""
PAUSES = (1.0, 3.0, 9.0)
"""Seconds before a server that gives nothing for now (HTTP 429, 503), or whose connection was cut, is asked again."""
PROGRESS_SECONDS = 10
WITHOUT_GITHUB = "source: pypi, which is compiled, or source: package where the distribution has llama.cpp"


def look_up(find_file: Callable[[str], str], cluster: Cluster, catalogue: Catalogue) -> Cluster:
    """The cluster with what only the controller can look up in those releases of which some host has a build.

    :param find_file: returns the path of a file of the controller that an operator names.
    :raises Refusal: names the variable.
    """

    resolved = {}
    for variable in programs.release_variables(cluster, catalogue):
        try:
            resolved[variable] = resolve(releases.requested(variable, cluster.releases), find_file)
        except Refusal as refusal:
            raise release_request.name_variable(refusal, variable) from None
    return cluster._replace(releases={**cluster.releases, **resolved})


def resolve(request: ReleaseRequest, find: Callable[[str], str]) -> ReleaseRequest:
    """``llama_release`` with what has to be looked up: where its archive is, the commit of a branch or tag, its build number, and of
    patches the sha256 and the files that they change.

    :param find: from a path on the controller as the operator gives it to where it is.
    :raises Refusal: a file, branch, tag or commit does not exist.
    :raises AnsibleError: the cache cannot be used.
    """
    request = request._replace(patches=tuple(_read(patch, find) for patch in request.patches))
    if request.path and not _is_kept(request.checksum):
        request = request._replace(path=_readable("path", request.path, find))
    if request.source == "git":
        if not request.commit and not re.fullmatch(release_request.BUILD_TAG, request.ref):
            request = request._replace(commit=_commit_of(request.repository, request.ref))
        if request.build is None:
            request = request._replace(build=_build_of(request.repository, request.ref, str(request.commit)))
    return request


def _read(patch: PatchPlan, find: Callable[[str], str]) -> PatchPlan:
    path = Path(_readable("patch", patch.path, find))
    text = path.read_text(errors="replace")
    return PatchPlan(str(path), sha256(path), tuple(re.findall(r"^\+\+\+ b/(\S+)", text, re.MULTILINE)))


def _readable(key: str, given: str, find: Callable[[str], str]) -> str:
    """Path of a readable file on the controller."""
    with suppress(AnsibleError):
        path = find(given)
        if os.path.isfile(path) and os.access(path, os.R_OK):
            return path
    raise Refusal(
        f"llama_release has the {key} {given!r}, which is not a file that the controller can read: use a path that is absolute, or relative to the "
        "inventory or the playbook"
    )


def _commit_of(repository: str, ref: str) -> str:
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
        f"the network of the controller, or use {WITHOUT_GITHUB}"
    )


def _unknown(repository: str, ref: str) -> str:
    return f"llama_release has the ref {ref!r}, which is not a tag, branch or commit of {repository}: correct it; a commit needs all its digits"


def _build_of(repository: str, ref: str, commit: str) -> int:
    """The number of a commit's build, counted once."""
    record = cache.folder("sources", RELEASE) / f"{commit}.build"
    with suppress(OSError, ValueError):
        return int(record.read_text())
    with cache.exclusive_folder("sources", RELEASE) as folder, cache.work(folder) as work:
        try:
            number = git.count(repository, commit, Path(work))
        except git.NotFound:
            raise Refusal(_unknown(repository, ref)) from None
        except git.GitError as error:
            raise Refusal(
                f"llama_release has the ref {ref!r}, whose commits could not be counted in {repository} ({error}): "
                "add build, the llama.cpp build number of that commit"
            ) from None
        counted = Path(work) / "record"
        counted.write_text(f"{number}\n")
        counted.replace(record)
    return number


def fetch(release: ReleasePlan, names: Sequence[str] = ()) -> list[Fetched]:
    """The archives of a planned release in the cache. One without a checksum has to stay what it was when it was fetched first.

    :param names: of upstream's archives; other releases have one archive.
    :raises AnsibleError: one cannot be fetched, or its sha256 is another; it is not in the cache then.
    """
    return [_fetch_one(release, name) for name in names or [""]]


def _fetch_one(release: ReleasePlan, name: str) -> Fetched:
    known = _kept(release, name, cache.folder("sources", RELEASE))
    if known:
        return known
    with cache.exclusive_folder("sources", RELEASE) as folder, cache.work(folder) as work:
        known = _kept(release, name, folder)
        if known:
            return known
        part, written = Path(work) / "archive", Path(work) / "record"
        commit = _bring(release, name, part)
        checksum, (archive, record) = _checksum_of(release, name), _places(release, name, folder)
        actual = _check(release, name, part, checksum or (_recorded(record).get("sha256") if name else None))
        written.write_text(json.dumps({"commit": commit, "sha256": actual}) + "\n")
        part.replace(archive)
        written.replace(record)
    return Fetched(archive, True, actual, commit)


def _checksum_of(release: ReleasePlan, name: str) -> str | None:
    """The digits that the operator gives."""
    given = (release.checksums or {}).get(name) if name else release.checksum
    return given.partition(":")[2] if given else None


def _places(release: ReleasePlan, name: str, folder: Path) -> tuple[Path, Path]:
    """Where an archive is kept, and what it was when it was fetched."""
    checksum = _checksum_of(release, name)
    key = hashlib.sha256(f"{release.repository}\n{release.revision}".encode()).hexdigest()[:16]
    stem = checksum[:16] if checksum else name.removesuffix(".tar.gz") or f"git-{key}"
    return folder / f"{stem}.tar.gz", folder / f"{stem}.json"


def _is_kept(checksum: str) -> bool:
    return (cache.folder("sources", RELEASE) / f"{checksum.partition(':')[2][:16]}.tar.gz").exists()


def _recorded(record: Path) -> dict[str, str]:
    with suppress(OSError, ValueError):
        known = json.loads(record.read_text())
        if isinstance(known, dict):
            return known
    return {}


def _kept(release: ReleasePlan, name: str, folder: Path) -> Fetched | None:
    archive, record = _places(release, name, folder)
    known = _recorded(record)
    wanted = _checksum_of(release, name) or known.get("sha256")
    with suppress(OSError):
        if wanted and sha256(archive) == wanted:
            return Fetched(archive, False, wanted, known.get("commit", release.commit))
    return None


def _check(release: ReleasePlan, name: str, archive: Path, wanted: str | None) -> str:
    """The sha256 of an archive that was fetched.

    :raises AnsibleError: it is another than the one that is wanted, or no whole archive.
    """
    actual = sha256(archive)
    if wanted and wanted != actual:
        of_name = f" of {name}" if name else ""
        raise AnsibleError(
            f"llama_release has the checksum sha256:{wanted}{of_name}, but that archive has sha256:{actual}: correct the checksum, or get the right archive"
            if _checksum_of(release, name)
            else f"{name} of llama_release has sha256:{actual}, and had sha256:{wanted} when it was fetched first: find out why it was replaced, and do not "
            "use it before; to accept it, add it to checksums of llama_release"
        )
    try:
        for _member in archives.members(archive):
            pass
    except archives.DamagedError:
        raise AnsibleError(
            f"llama_release has an archive that cannot be read, {name or release.url or release.path}: its server may send something else; give the "
            "address or path of a whole tar archive, packed with gzip, bzip2, xz or not at all"
        ) from None
    return actual


def _bring(release: ReleasePlan, name: str, target: Path) -> str:
    """Writes an archive; its commit."""
    if release.source == "git":
        return _archive_commit(str(release.repository), str(release.revision), target)
    if release.source == "pypi":
        _download_pypi(release, target)
    elif name:
        url = f"{(release.url or prebuilt.URL).rstrip('/')}/b{release.build}/{name}"
        remedy = (
            "upstream tags a build before its archives are there, so try again in some hours, or use another build, a mirror that has it (url), or "
            f"{WITHOUT_GITHUB}"
        )
        _download(url, target, f"llama_release needs upstream's archive {url}, which", remedy)
    elif release.url:
        remedy = "correct it, or download the archive and use path"
        _download(release.url, target, f"llama_release has the url {release.url!r}, which", remedy)
    else:
        shutil.copyfile(_readable("path", str(release.path), str), target)
    return release.commit


def _archive_commit(repository: str, revision: str, target: Path) -> str:
    try:
        return git.archive(repository, revision, target)
    except git.NotFound:
        raise AnsibleError(_unknown(repository, revision.replace("refs/tags/", ""))) from None
    except git.GitError as error:
        raise AnsibleError(_unreadable(repository, error)) from None


def _download_pypi(release: ReleasePlan, target: Path) -> None:
    folder = target.parent / "pip"
    folder.mkdir()
    requirement = folder / "requirement.txt"
    requirement.write_text(f"llama-cpp-python=={release.version} --hash={release.checksum}\n")
    argv = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
    argv += ["--no-binary=llama-cpp-python", "--require-hashes", f"--dest={folder}", f"--requirement={requirement}"]
    try:
        process = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=PIP_SECONDS, check=False, errors="replace"
        )
        said = process.stderr.strip()[-500:] if process.returncode else ""
    except subprocess.TimeoutExpired:
        said = f"nothing within {PIP_SECONDS} s"
    if said:
        raise AnsibleError(
            f"pip of {sys.executable} could not fetch the source archive of llama-cpp-python {release.version} (llama_release): check its version and "
            f"checksum, and the index in the configuration of pip, or use source: archive. pip says: {validation.printable(said)}"
        )
    next(folder.glob("llama_cpp_python-*")).replace(target)


def _download(url: str, target: Path, subject: str, remedy: str) -> None:
    """Fetches a file.

    :param subject: begins the sentence of an error; ``remedy`` ends it.
    """
    for pause in (*PAUSES, None):
        try:
            return _receive(url, target)
        except web.RemoteError as error:
            if pause is None or not error.passes:
                why = f"its server does not give (HTTP {error.status}): " if error.status else f"{error}, or "
                raise AnsibleError(f"{subject} {why}{remedy}") from None
        time.sleep(pause)


def _receive(url: str, target: Path) -> None:
    size, shown = 0, time.monotonic()
    with (
        web.open_url(url, {"Accept-Encoding": "identity"}, silence=PACKING_SECONDS) as reply,
        target.open("wb") as stream,
    ):
        try:
            while part := reply.read1(1 << 20):
                size += stream.write(part)
                if time.monotonic() > shown + PROGRESS_SECONDS:
                    shown = time.monotonic()
                    Display().display(f"  [controller] {url.rpartition('/')[2]}: {size >> 20} MiB")
        except (OSError, http.client.HTTPException) as error:
            raise web.RemoteError(f"was cut off ({validation.printable(error)}): try again", passes=True) from None
    if size < int(reply.headers.get("Content-Length") or 0):
        raise web.RemoteError("was cut off: its server sent less than it announced; try again", passes=True)
