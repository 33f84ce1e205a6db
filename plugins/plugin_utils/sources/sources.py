# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Release sources that only the controller looks up and fetches, and their cache with SHA-256 checksums."""

import hashlib
import http.client
import json
import math
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
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import reading, validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.files import sha256
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.builds import archives
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import prebuilt
from ansible_collections.llamacpp.cluster.plugins.module_utils.models import web
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import PatchPlan, ReleasePlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.builds import automatic, releases
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import release_request
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.stages import programs
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import Catalogue, Cluster, ReleaseRequest
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.sources import cache, git


class CachedArchive(NamedTuple):
    """An archive in the cache: whether this run fetched it, and its identity."""

    path: Path
    is_new: bool
    sha256: str
    commit: str


RELEASE_VARIABLE = "llama_release"
PIP_TIMEOUT_S = 3600
MAX_SILENCE_SECONDS = 60.0
"""Maximum silence of a server: some servers only create an archive when it is requested."""
RETRY_PAUSES_SECONDS = (1.0, 3.0, 9.0)
"""Seconds before each retry, if a server is busy (HTTP 429, 503) or has closed the connection."""
PROGRESS_INTERVAL_SECONDS = 10
OTHER_SOURCES_HINT = "source: pypi (compiled on the hosts), or source: package if the distribution has llama.cpp"


def look_up(find_file: Callable[[str], str], cluster: Cluster, catalogue: Catalogue) -> Cluster:
    """Return the cluster with the details that only the controller can look up for the needed releases, and with a release instead of ``auto``."""
    requests, resolved_requests = cluster.release_requests, {}
    for variable in programs.release_variables(cluster, catalogue):
        try:
            resolved_requests[variable] = resolve(releases.requested_release(variable, requests), find_file)
        except Refusal as refusal:
            raise release_request.with_variable(refusal, variable) from None
    return automatic.resolve_release(cluster._replace(release_requests={**requests, **resolved_requests}), catalogue)


def resolve(request: ReleaseRequest, find_file: Callable[[str], str]) -> ReleaseRequest:
    """Return ``llama_release`` with details from the controller: path of the archive, commit of a branch or tag, build number, and the SHA-256 and
    changed files of patches.

    :raises Refusal: a file, branch, tag or commit does not exist.
    """
    request = request._replace(patches=tuple(_read_patch(patch, find_file) for patch in request.patches))
    if request.path and not _is_cached(request.checksum):
        request = request._replace(path=_readable_path("sets path to", request.path, find_file))
    if request.source == "git":
        if not request.commit and not re.fullmatch(release_request.BUILD_TAG_PATTERN, request.ref):
            request = request._replace(commit=_commit_of(request.repository, request.ref))
        if request.build is None:
            request = request._replace(build=_build_number(request.repository, request.ref, str(request.commit)))
    return request


def _read_patch(patch: PatchPlan, find_file: Callable[[str], str]) -> PatchPlan:
    path = Path(_readable_path("lists the patch", patch.path, find_file))
    text = path.read_text(errors="replace")
    return PatchPlan(str(path), sha256(path), tuple(re.findall(r"^\+\+\+ b/(\S+)", text, re.MULTILINE)))


def _readable_path(verb_phrase: str, declared_path: str, find_file: Callable[[str], str]) -> str:
    with suppress(AnsibleError):
        path = find_file(declared_path)
        if os.path.isfile(path) and os.access(path, os.R_OK):
            return path
    raise Refusal(
        f"llama_release {verb_phrase} {declared_path!r}, which is not a readable file on the controller: use an absolute path, or a path relative to the "
        "inventory or the playbook"
    )


def _commit_of(repository: str, ref: str) -> str:
    try:
        commit = git.commit_of(repository, ref)
    except git.GitError as error:
        raise Refusal(_unreadable_repository_text(repository, error)) from None
    if commit is None:
        raise Refusal(_unknown_ref_text(repository, ref))
    return commit


def _unreadable_repository_text(repository: str, error: git.GitError) -> str:
    return (
        f"llama_release needs the repository {repository!r}, which the controller could not read: {error}. Check the address and the controller's "
        f"network, or use {OTHER_SOURCES_HINT}"
    )


def _unknown_ref_text(repository: str, ref: str) -> str:
    return f"llama_release asks for {ref!r}, which is not a tag, branch or commit of {repository}: correct the name (a commit needs its full hash)"


def _build_number(repository: str, ref: str, commit: str) -> int:
    """Return the build number of a commit; count the commits only once."""
    record_path = cache.make_folder("sources", RELEASE_VARIABLE) / f"{commit}.build"
    with suppress(OSError, ValueError):
        return int(record_path.read_text())
    with cache.exclusive_folder("sources", RELEASE_VARIABLE) as folder, cache.work_folder(folder) as work_path:
        try:
            build_number = git.count_commits(repository, commit, Path(work_path))
        except git.NotFound:
            raise Refusal(_unknown_ref_text(repository, ref)) from None
        except (git.GitError, ValueError) as error:
            raise Refusal(
                f"llama_release asks for {ref!r}, whose commits could not be counted in {repository} ({error}): "
                "add build, the llama.cpp build number of that commit"
            ) from None
        new_record_path = Path(work_path) / "record"
        new_record_path.write_text(f"{build_number}\n")
        new_record_path.replace(record_path)
    return build_number


def fetch(release: ReleasePlan, names: Sequence[str] = ()) -> list[CachedArchive]:
    """Return the cached archives of a planned release. An archive without a checksum must not differ from the archive that was first fetched.

    :raises AnsibleError: an archive cannot be fetched, or its SHA-256 differs; then it is not cached.
    """
    return [_fetch_to_cache(release, name) for name in names or [""]]


def _fetch_to_cache(release: ReleasePlan, name: str) -> CachedArchive:
    cached_archive = _cached_archive(release, name, cache.make_folder("sources", RELEASE_VARIABLE))
    if cached_archive:
        return cached_archive
    with cache.exclusive_folder("sources", RELEASE_VARIABLE) as folder, cache.work_folder(folder) as work_path:
        cached_archive = _cached_archive(release, name, folder)
        if cached_archive:
            return cached_archive
        fetched_path, new_record_path = Path(work_path) / "archive", Path(work_path) / "record"
        commit = _fetch_archive(release, name, fetched_path)
        checksum, (archive_path, record_path) = _checksum_of(release, name), _cache_paths(release, name, folder)
        actual_checksum = _check_archive(
            release, name, fetched_path, checksum or (_read_fetch_record(record_path).get("sha256") if name else None)
        )
        new_record_path.write_text(json.dumps({"commit": commit, "sha256": actual_checksum}) + "\n")
        fetched_path.replace(archive_path)
        new_record_path.replace(record_path)
    return CachedArchive(archive_path, True, actual_checksum, commit)


def _checksum_of(release: ReleasePlan, name: str) -> str | None:
    """Return the hexadecimal digits of the checksum that the operator has set."""
    checksum = (release.checksums or {}).get(name) if name else release.checksum
    return checksum.partition(":")[2] if checksum else None


def _cache_paths(release: ReleasePlan, name: str, folder: Path) -> tuple[Path, Path]:
    """Return the paths of an archive and of its record."""
    checksum = _checksum_of(release, name)
    revision_digest = hashlib.sha256(f"{release.repository}\n{release.revision}".encode()).hexdigest()[:16]
    stem = checksum[:16] if checksum else name.removesuffix(".tar.gz") or f"git-{revision_digest}"
    return folder / f"{stem}.tar.gz", folder / f"{stem}.json"


def _is_cached(checksum: str) -> bool:
    return (cache.make_folder("sources", RELEASE_VARIABLE) / f"{checksum.partition(':')[2][:16]}.tar.gz").exists()


def _read_fetch_record(path: Path) -> dict[str, str]:
    with suppress(OSError, ValueError):
        return reading.parse(path.read_text())
    return {}


def _cached_archive(release: ReleasePlan, name: str, folder: Path) -> CachedArchive | None:
    archive_path, record_path = _cache_paths(release, name, folder)
    fetch_record = _read_fetch_record(record_path)
    checksum = _checksum_of(release, name) or fetch_record.get("sha256")
    with suppress(OSError):
        if checksum and sha256(archive_path) == checksum:
            return CachedArchive(archive_path, False, checksum, fetch_record.get("commit", release.commit))
    return None


def _check_archive(release: ReleasePlan, name: str, archive_path: Path, checksum: str | None) -> str:
    """Return the SHA-256 of an archive that was fetched.

    :raises AnsibleError: the archive is incomplete, or has another SHA-256 than expected.
    """
    actual_checksum = sha256(archive_path)
    if checksum and checksum != actual_checksum:
        raise AnsibleError(
            f"llama_release expects sha256:{checksum} for {name or 'its archive'}, which has sha256:{actual_checksum}: correct the checksum, or use the "
            "right archive"
            if _checksum_of(release, name)
            else f"{name} of llama_release has sha256:{actual_checksum}, but had sha256:{checksum} when it was first fetched: find out why the archive was "
            "replaced before you use it; to accept the archive, add its checksum to checksums in llama_release"
        )
    try:
        for _member in archives.members(archive_path):
            pass
    except archives.DamagedError:
        raise AnsibleError(
            f"llama_release uses the archive {name or release.url or release.path}, which cannot be read: it may be incomplete, or a web page. Use a "
            "complete tar archive, uncompressed or compressed with gzip, bzip2 or xz, or a zip archive with source: binary"
        ) from None
    return actual_checksum


def _fetch_archive(release: ReleasePlan, name: str, target_path: Path) -> str:
    """Fetch an archive into a file, and return its commit."""
    if release.source == "git":
        return _write_git_archive(str(release.repository), str(release.revision), target_path)
    if release.source == "pypi":
        _download_from_pypi(release, target_path)
    elif name:
        url = f"{(release.url or prebuilt.BASE_URL).rstrip('/')}/b{release.build}/{name}"
        remedy = (
            "try again in a few hours (upstream tags a build before its archives exist), or use another build, a mirror that has the archive (url), or "
            f"{OTHER_SOURCES_HINT}"
        )
        _download_with_retries(url, target_path, f"llama_release needs upstream's archive {url}, which", remedy)
    elif release.url:
        remedy = "correct the URL, or download the archive yourself and set path instead of url"
        _download_with_retries(release.url, target_path, f"llama_release sets url to {release.url!r}, which", remedy)
    else:
        shutil.copyfile(_readable_path("sets path to", str(release.path), str), target_path)
    return release.commit


def _write_git_archive(repository: str, revision: str, target_path: Path) -> str:
    try:
        return git.write_archive(repository, revision, target_path)
    except git.NotFound:
        raise AnsibleError(_unknown_ref_text(repository, revision.replace("refs/tags/", ""))) from None
    except git.GitError as error:
        raise AnsibleError(_unreadable_repository_text(repository, error)) from None


def _download_from_pypi(release: ReleasePlan, target_path: Path) -> None:
    folder = target_path.parent / "pip"
    folder.mkdir()
    pin_path = folder / "requirement.txt"
    pin_path.write_text(f"llama-cpp-python=={release.version} --hash={release.checksum}\n")
    argv = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
    argv += ["--no-binary=llama-cpp-python", "--require-hashes", f"--dest={folder}", f"--requirement={pin_path}"]
    try:
        process = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=PIP_TIMEOUT_S, check=False, errors="replace"
        )
        message = process.stderr.strip()[-500:] if process.returncode else ""
    except subprocess.TimeoutExpired:
        message = f"no result within {PIP_TIMEOUT_S} s"
    if message:
        raise AnsibleError(
            f"{sys.executable} -m pip could not fetch the source archive of llama-cpp-python {release.version} (llama_release): check its version and "
            f"checksum and the index in pip's configuration, or use source: archive. Output of pip: {validation.printable(message)}"
        )
    next(folder.glob("llama_cpp_python-*")).replace(target_path)


def _download_with_retries(url: str, target_path: Path, subject: str, remedy: str) -> None:
    """Download a file, and retry if the server may recover."""
    for pause in (*RETRY_PAUSES_SECONDS, None):
        try:
            return download(url, target_path)
        except web.RemoteError as error:
            if pause is None or not error.is_transient:
                reason = f"cannot be downloaded (HTTP {error.status}): " if error.status else f"{error}, or "
                raise AnsibleError(f"{subject} {reason}{remedy}") from None
        time.sleep(pause)


def download(
    url: str, path: Path, silence_s: float = MAX_SILENCE_SECONDS, limit_s: float = math.inf, max_bytes: float = math.inf
) -> None:
    """Download a file; raise RemoteError if the server does not answer, refuses the request, closes the connection, or exceeds a limit."""
    received_bytes, progress_time = 0, time.monotonic()
    deadline = progress_time + limit_s
    with web.open_url(url, {"Accept-Encoding": "identity"}, silence_s=silence_s) as reply, path.open("wb") as stream:
        announced_bytes = reply.length or 0
        try:
            while chunk := reply.read1(1 << 20):
                received_bytes += stream.write(chunk)
                if received_bytes > max_bytes or time.monotonic() > deadline:
                    raise web.RemoteError("is too large, or its server is too slow: try again later")
                if time.monotonic() > progress_time + PROGRESS_INTERVAL_SECONDS:
                    progress_time = time.monotonic()
                    Display().display(f"  [controller] {url.rpartition('/')[2]}: {received_bytes >> 20} MiB")
        except (OSError, OverflowError, http.client.HTTPException) as error:  # overflow: a chunk of negative length
            reason = f"was cut off ({validation.printable(error)}): try again"
            raise web.RemoteError(reason, is_transient=True) from None
    if received_bytes < announced_bytes:
        raise web.RemoteError("was cut off: the server sent less than it announced; try again", is_transient=True)
