# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""llama-server's chat page for releases that hosts compile: downloaded from upstream for the build number, or built with npm from the sources.

The files are cached next to the sources. Hosts unpack them into tools/ui/dist of the tree, from which the build embeds them (scripts/ui-assets.cmake).
"""

import os
import re
import subprocess
import tarfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from ansible.errors import AnsibleError
from ansible.utils.display import Display
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.files import sha256
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import printable
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.builds import archives
from ansible_collections.llamacpp.cluster.plugins.module_utils.models import web
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import ReleasePlan
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.models import hub
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.sources import cache
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.sources.sources import CachedArchive, download

PAGE_VARIABLE = "llama_server_ui"
BUCKET_PATH = "buckets/ggml-org/llama-ui/resolve"
"""Path of the files on Hugging Face (tools/ui/CMakeLists.txt of 0.3.36)."""
DOWNLOAD_LIMITS = {"silence_s": 10.0, "limit_s": 120.0, "max_bytes": 64 << 20}
"""Limits of the download, which must not delay a run for long. The files take 3 MB."""
MIN_NODE_VERSION = 20
BUILD_COMMANDS = ("npm ci --ignore-scripts --no-audit --no-fund", "npm run build")
COMMAND_TIMEOUT_SECONDS = 1800


class NoPageError(Exception):
    """Failure to get the page in one way; the message is the reason."""


def _archive_path(source: CachedArchive) -> Path:
    return cache.make_folder("sources", PAGE_VARIABLE) / f"page-{source.sha256[:16]}.tar.gz"


def cached_pages(source: CachedArchive) -> list[CachedArchive]:
    """Return the archive of the page for these sources, if it is in the cache."""
    path = _archive_path(source)
    return [CachedArchive(path, False, sha256(path), source.commit)] if path.exists() else []


def fetch(release: ReleasePlan, source: CachedArchive, requested_ui: str | None) -> list[CachedArchive]:
    """Return the cached archive of the page for a release's sources; none, after a warning, if it is unavailable.

    :param source: archive of the sources.
    :param requested_ui: ``auto``, or ``true`` to build it with npm if it cannot be downloaded.
    :raises AnsibleError: the page is required, but unavailable.
    """
    reasons: list[str] = []
    with cache.exclusive_folder("sources", PAGE_VARIABLE) as folder, cache.work_folder(folder) as work_path:
        for get_files in () if cached_pages(source) else (_download, _build)[: 1 + (requested_ui == "true")]:
            work_folder = Path(work_path, get_files.__name__)
            work_folder.mkdir()
            try:
                _pack(get_files(release, source.path, work_folder), work_folder / "page")
            except (NoPageError, Refusal) as error:
                reasons.append(str(error))
            else:
                (work_folder / "page").replace(_archive_path(source))
                return [archive._replace(is_new=True) for archive in cached_pages(source)]
    reasons_text = "; ".join(reasons)
    if reasons_text and requested_ui == "true":
        raise AnsibleError(
            f"{PAGE_VARIABLE} is true, but {release.ref} has no chat page: {reasons_text}. Fix one of these problems, or set {PAGE_VARIABLE} to auto"
        )
    if reasons_text:
        remedy = f"install Node.js {MIN_NODE_VERSION} or newer on the controller and set {PAGE_VARIABLE} to true"
        Display().warning(f"llama-server of {release.ref} has no chat page: {reasons_text}. To get the page, {remedy}")
    return cached_pages(source)


def _download(release: ReleasePlan, _source_path: Path, work_folder: Path) -> Mapping[str, Path]:
    """Return upstream's files for a build, verified against upstream's checksum."""
    archive_path, checksum_path = work_folder / "archive", work_folder / "sum"
    url = f"{hub.endpoint()}/{BUCKET_PATH}/b{release.build}/dist.tar.gz"
    printable_url = web.printable_url(url)
    try:
        download(f"{url}.sha256", checksum_path, **DOWNLOAD_LIMITS)
        download(url, archive_path, **DOWNLOAD_LIMITS)
        if checksum_path.read_bytes()[:64].lower() != sha256(archive_path).encode():
            raise NoPageError(f"{printable_url} does not match its checksum file")
        return _extract(archive_path, "(.+)", work_folder)
    except web.RemoteError as error:
        raise NoPageError(f"{printable_url} {error}") from None
    except (OSError, archives.DamagedError) as error:
        raise NoPageError(f"{printable_url} cannot be unpacked ({printable(error)})") from None


def _build(release: ReleasePlan, source_path: Path, work_folder: Path) -> Mapping[str, Path]:
    """Return the files that npm builds from the sources."""
    node_version = _run("node --version", work_folder)
    if int((re.findall(r"\d{1,9}", node_version) or ["0"])[0]) < MIN_NODE_VERSION:
        raise NoPageError(f"the controller has Node.js {node_version}, but the page needs {MIN_NODE_VERSION} or newer")
    _extract(source_path, rf"{re.escape(release.member or '') or '[^/]+'}/tools/ui/(.+)", work_folder)
    dist, build = work_folder / "dist", str(release.build)
    environment = {"LLAMA_UI_OUT_DIR": str(dist), "LLAMA_UI_VERSION": f"b{build}", "LLAMA_BUILD_NUMBER": build}
    for command in BUILD_COMMANDS:
        Display().display(f"  [controller] llama-server's chat page: {command} (takes a minute or more)")
        _run(command, work_folder / "files", npm_config_cache=str(work_folder / "npm"), **environment)
    return {str(path.relative_to(dist)): path for path in dist.rglob("*") if path.is_file() and not path.is_symlink()}


def _run(command: str, folder: Path, **environment: str) -> str:
    """Run a Node.js program on the controller; return its output."""
    options: dict[str, Any] = {"cwd": folder, "env": {**os.environ, **environment}, "timeout": COMMAND_TIMEOUT_SECONDS}
    try:
        process = subprocess.run(
            command.split(), stdin=subprocess.DEVNULL, capture_output=True, errors="replace", check=True, **options
        )
    except subprocess.CalledProcessError as error:
        error_text = printable((error.stderr or error.stdout).strip()[-300:])
        raise NoPageError(f"{command} failed on the controller: {error_text}") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoPageError(f"{command} failed on the controller ({printable(error)})") from None
    return process.stdout.strip()


def _extract(archive_path: Path, pattern: str, work_folder: Path) -> Mapping[str, Path]:
    """Extract an archive's regular files whose names match a pattern. Return their paths by the part of the name that the group matches."""
    files: dict[str, Path] = {}

    def target_of(name: PurePosixPath) -> Path | None:
        match = re.fullmatch(pattern, str(name))
        if not match or name.is_absolute() or ".." in name.parts:
            return None
        path = files[match[1]] = work_folder / "files" / match[1]
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    archives.extract_members(archive_path, target_of)
    return {name: path for name, path in files.items() if path.is_file()}


def _pack(files: Mapping[str, Path], target: Path) -> None:
    """Pack the files of a page.

    :raises NoPageError: index.html is missing, or a file is empty, which the build would refuse.
    """
    if "index.html" not in files or not all(path.stat().st_size for path in files.values()):
        raise NoPageError("the page's files are incomplete")
    with tarfile.open(target, "w:gz") as archive:
        for name, path in sorted(files.items()):
            member = tarfile.TarInfo(name)
            member.size = path.stat().st_size
            with path.open("rb") as content:
                archive.addfile(member, content)
