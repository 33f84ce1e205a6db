# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What only the controller can look up and fetch, and its cache: sources with their sha256, known-answer models."""

from __future__ import annotations

import errno
import hashlib
import http.client
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, cast

from ansible.errors import AnsibleError
from ansible.utils.display import Display
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.files import sha256
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.builds import archives
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import capabilities, prebuilt
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import known_answer, known_answer_file
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.words import MAINLINE
from ansible_collections.llamacpp.cluster.plugins.module_utils.models import web
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import ReleasePlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.builds import releases
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import release_request
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.stages import programs
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import (
    Catalogue,
    Cluster,
    PatchRequest,
    ReleaseRequest,
)
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.sources import (
    bounded_process,
    cache,
    git,
    source_metadata,
)


class Fetched(NamedTuple):
    """A source in the cache: whether it had to be brought there, and what identifies it."""

    path: Path
    changed: bool
    sha256: str
    commit: str


KNOWN_ANSWER = "llama_model_known_answer"
SHA256 = r"[0-9a-f]{64}"
PIP_SECONDS = 3600
PACKING_SECONDS = 60.0
"""For which a server may be silent: some make an archive when they are asked for it."""
PAUSES = (1.0, 3.0, 9.0)
"""Seconds before a server that gives nothing for now (HTTP 429, 503), or whose connection was cut, is asked again."""
PROGRESS_SECONDS = 10


def _download_pypi(release: ReleasePlan, folder: Path) -> Path:
    requirement = folder / "requirement.txt"
    requirement.write_text(f"llama-cpp-python=={release.version} --hash={release.checksum}\n")
    argv = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
    argv += [
        "--no-binary",
        "llama-cpp-python",
        "--require-hashes",
        "--dest",
        str(folder),
        "--requirement",
        str(requirement),
    ]
    try:
        process = bounded_process.run(argv, PIP_SECONDS)
    except subprocess.TimeoutExpired:
        raise AnsibleError(
            f"pip could not fetch the source archive of llama-cpp-python {release.version} (llama_release) within {PIP_SECONDS} s: "
            "check the network and the index in the configuration of pip"
        ) from None
    if process.returncode:
        raise _pip_error(release, process.stderr.strip())
    return next(folder.glob("llama_cpp_python-*"))


def _pip_error(release: ReleasePlan, said: str) -> Exception:
    if "No space left on device" in said:
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if "No module named pip" in said:
        return AnsibleError(
            f"llama_release has source: pypi, but {sys.executable} on the controller has no pip: install it, or use source: archive"
        )
    got = re.search(r"Got\s+([0-9a-f]{64})", said)
    if got:
        return AnsibleError(
            f"llama_release has the checksum {release.checksum}, but the source archive of llama-cpp-python {release.version} "
            f"that pip downloaded has sha256:{got[1]}: correct the checksum. If it was right before, do not use the new archive."
        )
    errors = " ".join(line for line in said.splitlines() if line.startswith("ERROR"))
    return AnsibleError(
        f"pip could not fetch the source archive of llama-cpp-python {release.version} (llama_release): check the version and "
        f"the index in the configuration of pip. pip says: {validation.printable(errors or said[-500:])}"
    )


def _download_url(release: ReleasePlan, folder: Path) -> Path:
    target, url = folder / "archive", str(release.url)
    subject = f"llama_release has the url {url!r}, which"
    _download(url, target, subject, "download the archive and use path", "correct it, or ")
    return target


def _download(url: str, target: Path, subject: str, remedy: str, first: str = "") -> None:
    """Fetches a file.

    :param subject: begins the sentence of an error; ``remedy`` ends it, after ``first`` where the server does not have the file.
    """
    try:
        _receive_patiently(url, target)
    except web.RemoteError as error:
        if not error.status:
            raise AnsibleError(f"{subject} {error}, or {remedy}") from None
        first = "run the playbook again later, or " if error.passes else first
        raise AnsibleError(f"{subject} its server does not give (HTTP {error.status}): {first}{remedy}") from None
    except OSError as error:
        if error.errno in cache.FULL:
            raise
        raise AnsibleError(f"{subject} could not be fetched: {validation.printable(error)}") from None


def _receive_patiently(url: str, target: Path) -> None:
    for pause in PAUSES:
        try:
            return _receive(url, target)
        except web.RemoteError as error:
            if not error.passes:
                raise
        time.sleep(pause)
    _receive(url, target)


def _receive(url: str, target: Path) -> None:
    size, shown = 0, time.monotonic()
    with (
        web.answer(url, {"Accept-Encoding": "identity"}, silence=PACKING_SECONDS) as reply,
        target.open("wb") as stream,
    ):
        while part := _piece(reply):
            size += stream.write(part)
            if time.monotonic() > shown + PROGRESS_SECONDS:
                shown = time.monotonic()
                Display().display(f"  [controller] {url.rpartition('/')[2]}: {size >> 20} MiB")
    if size < int(reply.headers.get("Content-Length") or 0):
        raise web.RemoteError("was cut off: its server sent less than it announced; try again", passes=True)


def _piece(reply: Any) -> bytes:
    try:
        return cast(bytes, reply.read1(1 << 20))
    except (OSError, http.client.HTTPException) as error:
        raise web.RemoteError(f"was cut off ({validation.printable(error)}): try again", passes=True) from None


def known_answer_model(layers: int, width: int, kind: str) -> tuple[Path, Path]:
    """The known-answer model in the cache, written if it is missing, and the file with its sha256.

    :raises AnsibleError: it cannot be written here.
    """
    size = known_answer_file.file_bytes(layers, width, kind)
    path = cache.folder("models", KNOWN_ANSWER) / f"{known_answer.FORM}-{known_answer.file_name(layers, width, kind)}"
    checksum = path.with_name(path.name + ".sha256")
    if not _is_as_recorded(path, checksum, size):
        with cache.exclusive_folder("models", KNOWN_ANSWER, f"writes {path.name}"):
            if not _is_as_recorded(path, checksum, size):
                _write_known_answer_model(path, checksum, layers, width, kind)
    return path, checksum


def _is_as_recorded(path: Path, checksum: Path, size: int) -> bool:
    """Whether a file has that size and the sha256 that is written down for it."""
    try:
        recorded = checksum.read_text().strip()
        return bool(re.fullmatch(SHA256, recorded)) and path.stat().st_size == size and sha256(path) == recorded
    except (OSError, UnicodeDecodeError):
        return False


def _write_known_answer_model(path: Path, checksum: Path, layers: int, width: int, kind: str) -> None:
    with cache.work(path.parent) as work:
        model, record = Path(work) / "model", Path(work) / "record"
        known_answer_file.write(model, layers, width, kind)
        record.write_text(sha256(model) + "\n")
        model.replace(path)
        record.replace(checksum)


def _folder() -> Path:
    return cache.folder("sources", "llama_release")


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
    :raises Refusal: a file, branch, tag or commit does not exist, or the cache cannot be used.
    """
    try:
        return _look_up(request, find)
    except cache.CacheError as error:
        raise Refusal(str(error)) from None


def _look_up(request: ReleaseRequest, find: Callable[[str], str]) -> ReleaseRequest:
    request = request._replace(patches=tuple(_read(patch, find) for patch in request.patches))
    if request.path:
        try:
            request = request._replace(path=_readable("path", request.path, find))
        except Refusal:
            if not _cached_archive(request.checksum).exists():
                raise
    if request.source == "git":
        if not request.commit and not re.fullmatch(release_request.BUILD_TAG, request.ref):
            request = request._replace(commit=_commit_of(request.repository, request.ref))
        if request.build is None:
            request = request._replace(build=_build_of(request.repository, request.ref, str(request.commit)))
    return request._replace(protocol=_protocol_of(request))


def _protocol_of(request: ReleaseRequest) -> str | None:
    """What the tree of a release says of its RPC protocol, where its build does not; None where nothing has to be asked, or where an archive or repository
    cannot be read now."""
    build = request.build or 0
    if request.source not in release_request.COMPILED or request.fork != MAINLINE:
        return None
    if build < capabilities.OLDEST[request.fork] or capabilities.protocol_of(build):
        return None
    release = releases.release_of(request, {}).as_plan()
    with suppress(AnsibleError, git.GitError, OSError, archives.DamagedError):
        if request.source == "git" and not _kept_commit(release, _folder()):
            git.commit_of(request.repository, request.ref)
        return source_metadata.protocol_of(fetch(release).path)
    return None


def _read(patch: PatchRequest, find: Callable[[str], str]) -> PatchRequest:
    path = Path(_readable("patch", patch.path, find))
    text = path.read_text(errors="replace")
    return PatchRequest(str(path), sha256(path), tuple(re.findall(r"^\+\+\+ b/(\S+)", text, re.MULTILINE)))


def _readable(key: str, given: str, find: Callable[[str], str]) -> str:
    """Path of a readable file on the controller."""
    try:
        path = find(given)
        reason = "it is not a file"
        if stat.S_ISREG(os.stat(path).st_mode):
            with Path(path).open("rb"):
                return path
    except (AnsibleError, OSError) as error:
        reason = (error.strerror or str(error)) if isinstance(error, OSError) else "it does not exist"
    raise Refusal(_not_readable(key, given, reason))


def _not_readable(key: str, given: str, reason: str | None) -> str:
    return (
        f"llama_release has the {key} {given!r}, which cannot be read on the controller ({reason}): use a path that is absolute, or relative "
        "to the inventory or the playbook"
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
        "the network of the controller"
    )


def _unknown(repository: str, ref: str) -> str:
    return f"llama_release has the ref {ref!r}, which is not a tag, branch or commit of {repository}: correct it; a commit needs all its digits"


def _build_of(repository: str, ref: str, commit: str) -> int:
    """The number of a commit's build, counted once."""
    record = _folder() / f"{commit}.build"
    number = _recorded_number(record)
    if number is not None:
        return number
    with cache.exclusive_folder("sources", "llama_release", f"counts the commits of {ref}") as folder:
        number = _recorded_number(record)
        if number is None:
            with cache.work(folder) as work:
                number = _count(repository, ref, commit, Path(work))
                (Path(work) / "record").write_text(f"{number}\n")
                (Path(work) / "record").replace(record)
    return number


def _recorded_number(record: Path) -> int | None:
    with suppress(OSError, UnicodeDecodeError):
        counted = re.fullmatch(r"([1-9][0-9]{0,8})\n", record.read_text())
        return int(counted[1]) if counted else None
    return None


def _count(repository: str, ref: str, commit: str, work: Path) -> int:
    try:
        return git.count(repository, commit, work)
    except git.NotFound:
        raise Refusal(_unknown(repository, ref)) from None
    except git.GitError as error:
        raise Refusal(
            f"llama_release has the ref {ref!r}, whose commits could not be counted in {repository} ({error}): "
            "add build, the llama.cpp build number of that commit"
        ) from None


def fetch(release: ReleasePlan) -> Fetched:
    """The source of a planned release in the cache.

    :raises AnsibleError: it cannot be fetched, or its sha256 is another; nothing is left in the cache then.
    """
    kept, bring = (_kept_commit, _fetch_commit) if release.source == "git" else (_kept_archive, _fetch_archive)
    known = kept(release, _folder())
    if known:
        return known
    with cache.exclusive_folder("sources", "llama_release", f"fetches {release.ref}") as folder:
        known = kept(release, folder)
        if known:
            return known
        with cache.work(folder) as work:
            bring(release, folder, Path(work))
        return cast(Fetched, kept(release, folder))._replace(changed=True)


def _names_of_commit(release: ReleasePlan, folder: Path) -> tuple[Path, Path]:
    """Where the tree of a commit or tag is kept, and what it was when it was fetched."""
    name = hashlib.sha256(f"{release.repository}\n{release.revision}".encode()).hexdigest()[:16]
    return folder / f"git-{name}.tar.gz", folder / f"git-{name}.json"


def _kept_commit(release: ReleasePlan, folder: Path) -> Fetched | None:
    """What a tag was when it was fetched first is kept: it is the name of a build."""
    archive, record = _names_of_commit(release, folder)
    try:
        known = json.loads(record.read_text())
        commit = known["commit"]
        if re.fullmatch(release_request.WHOLE_COMMIT, commit) and sha256(archive) == known["sha256"]:
            return Fetched(archive, False, known["sha256"], commit)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass
    return None


def _fetch_commit(release: ReleasePlan, folder: Path, work: Path) -> None:
    repository, revision = str(release.repository), str(release.revision)
    archive, record = work / "archive", work / "record"
    try:
        commit = git.archive(repository, revision, archive)
    except git.NotFound:
        raise AnsibleError(_unknown(repository, revision.replace("refs/tags/", ""))) from None
    except git.GitError as error:
        raise AnsibleError(_unreadable(repository, error)) from None
    record.write_text(json.dumps({"commit": commit, "sha256": sha256(archive)}) + "\n")
    for made, name in zip((archive, record), _names_of_commit(release, folder)):
        made.replace(name)


def _cached_archive(checksum: str) -> Path:
    """Where the archive of that checksum lies in the cache once it was fetched."""
    return _folder() / f"{checksum.split(':', 1)[1][:16]}.tar.gz"


def _kept_archive(release: ReleasePlan, folder: Path) -> Fetched | None:
    checksum = str(release.checksum)
    wanted, kept = checksum.split(":", 1)[1], _cached_archive(checksum)
    with suppress(OSError):
        if sha256(kept) == wanted:
            return Fetched(kept, False, wanted, release.commit)
    return None


def _fetch_archive(release: ReleasePlan, folder: Path, work: Path) -> None:
    if release.source == "pypi":
        archive = _download_pypi(release, work)
    elif release.url:
        archive = _download_url(release, work)
    else:
        archive = work / "archive"
        try:
            shutil.copyfile(str(release.path), archive)
        except OSError as error:
            if error.errno in cache.FULL:
                raise
            raise AnsibleError(_not_readable("path", str(release.path), error.strerror)) from error
    checksum = str(release.checksum)
    wanted, actual = checksum.split(":", 1)[1], sha256(archive)
    if actual != wanted:
        raise AnsibleError(
            f"llama_release has the checksum sha256:{wanted}, but the archive has sha256:{actual}: correct the checksum, or get the right archive"
        )
    remedy = (
        "give a whole tar archive, packed with gzip, bzip2, xz or not at all, or of compiled programs a zip archive"
    )
    _check_content(archive, "llama_release has an archive that", remedy)
    archive.replace(_cached_archive(checksum))


def _check_content(archive: Path, subject: str, remedy: str) -> None:
    """:raises AnsibleError: it is no whole archive. ``subject`` and ``remedy`` begin and end the sentence."""
    try:
        for _member in archives.members(archive):
            pass
    except archives.DamagedError:
        raise AnsibleError(f"{subject} cannot be read: {remedy}") from None


def fetch_prebuilt(release: ReleasePlan, names: Sequence[str]) -> list[Fetched]:
    """Upstream's archives of a planned release in the cache. An archive has to keep the checksum that it had when it was first fetched.

    :raises AnsibleError: one cannot be fetched, or is another than it was or has to be; it is not in the cache then.
    """
    return [_kept_prebuilt(release, name, _folder()) or _fetch_prebuilt(release, name) for name in names]


def _wanted(release: ReleasePlan, name: str, folder: Path) -> str | None:
    """The sha256 of an archive, from the operator or from when it was fetched first."""
    given = (release.checksums or {}).get(name)
    if given:
        return given.partition(":")[2]
    with suppress(OSError, UnicodeDecodeError):
        recorded = (folder / f"{name}.sha256").read_text().strip()
        return recorded if re.fullmatch(SHA256, recorded) else None
    return None


def _kept_prebuilt(release: ReleasePlan, name: str, folder: Path) -> Fetched | None:
    wanted = _wanted(release, name, folder)
    with suppress(OSError):
        if wanted and sha256(_cached_archive(f"sha256:{wanted}")) == wanted:
            return Fetched(_cached_archive(f"sha256:{wanted}"), False, wanted, release.commit)
    return None


def _fetch_prebuilt(release: ReleasePlan, name: str) -> Fetched:
    with cache.exclusive_folder("sources", "llama_release", f"fetches {name}") as folder:
        known = _kept_prebuilt(release, name, folder)
        if known:
            return known
        url = f"{(release.url or prebuilt.URL).rstrip('/')}/b{release.build}/{name}"
        subject, remedy = f"llama_release has source: prebuilt, whose archive {url}", "use another build"
        if release.why:
            subject = f"llama_release is auto, which takes upstream's build {release.build}, whose archive {url}"
            remedy = "remove llama_release to compile"
        with cache.work(folder) as work:
            part = Path(work) / name
            _download(url, part, subject, f"{remedy}, or use a mirror that has it (url)")
            return _accept(release, name, part, folder, subject)


def _accept(release: ReleasePlan, name: str, part: Path, folder: Path, subject: str) -> Fetched:
    """An archive that was fetched, in its place in the folder.

    :param subject: begins the sentence of an error.
    """
    wanted, actual = _wanted(release, name, folder), sha256(part)
    if wanted and actual != wanted:
        raise AnsibleError(
            f"llama_release has the checksum sha256:{wanted} of {name}, but that archive has sha256:{actual}: correct the checksum, or get the right archive"
            if name in (release.checksums or {})
            else f"{name} of llama_release has sha256:{actual}, and had sha256:{wanted} when it was fetched first: find out why it was replaced, and do not "
            "use it before; to accept it, add it to checksums of llama_release"
        )
    _check_content(
        part, subject, "its server sends something else; open the address in a browser, or use a mirror (url)"
    )
    if not wanted:
        record = part.with_name("record")
        record.write_text(actual + "\n")
        record.replace(folder / f"{name}.sha256")
    archive = _cached_archive(f"sha256:{actual}")
    part.replace(archive)
    return Fetched(archive, True, actual, release.commit)
