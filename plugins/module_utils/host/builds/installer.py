# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Installs releases: compiled programs from an archive or a distribution's package, or a release packed by another host.

A release gets its final name only when it is complete.
"""

import os
import shutil
import subprocess
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Optional

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import commands
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.files import sha256, sync
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import Text
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.builds import archives, manifest, smoke_test, store
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.builds.manifest import Manifest
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import capabilities
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import BuildPlan, ServicePlan, Sha256
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import ReleasePlan

NEVER_USED_TIMES = (0, 0)
"""File times of a release's folder before its first use."""
HELP_LIMIT_SECONDS = 60
CACHE_REMEDY = "remove that release from the controller's cache (see docs/security.md), then run the playbook again"


class Patch(NamedTuple):
    """A patch that the controller has copied to this host."""

    name: str
    path: str
    sha256: Sha256


class PackedArchive(NamedTuple):
    """Archive on this host with a release that another host has built, or with libraries."""

    path: Annotated[str, Text(max_length=4096)]
    sha256: Sha256


class Source(NamedTuple):
    """Source of a release that the controller has copied to this host."""

    archive: str
    sha256: Sha256
    commit: str
    patches: tuple[Patch, ...] = ()
    library_archives: tuple[PackedArchive, ...] = ()
    """Archives of libraries for compiled programs."""
    page: Optional[PackedArchive] = None
    """Archive of llama-server's chat page, for its sources."""


class ReleaseArguments(NamedTuple):
    release: ReleasePlan
    build: BuildPlan
    prefix: str
    cache: str
    host_name: str = "this host"
    services: tuple[ServicePlan, ...] = ()
    fetched_source: Optional[Source] = None
    received: Optional[PackedArchive] = None
    account: Optional[str] = None
    pack: bool = False
    cluster: Optional[str] = None
    share: bool = False
    """Whether other hosts receive the build from this host."""
    state: Annotated[str, ("installed", "fetched")] = "installed"
    """fetched: the release's source is in the controller's cache."""


def pack(prefix: str, cache: str, build: BuildPlan) -> str:
    """Pack an installed release, and return the path of its archive."""
    release_folder = Path(prefix) / "releases" / build.id
    archive_path = store.packed_path(cache, build.id)
    Path(archive_path).parent.mkdir(parents=True, exist_ok=True)
    partial_file = Path(archive_path + store.PARTIAL_SUFFIX)
    try:
        with tarfile.open(partial_file, "w:gz", compresslevel=1) as archive:
            for name in [manifest.MANIFEST_FILE, *(f"bin/{target}" for target in build.targets)]:
                archive.add(release_folder / name, name)
        partial_file.replace(archive_path)
    finally:
        partial_file.unlink(missing_ok=True)
    return archive_path


def check_sha256(path: Path, digest: str) -> None:
    """:raises Refusal: a file has different content."""
    if sha256(path) != digest:
        raise Refusal(f"{path} does not match the controller's file (sha256 {digest}): run the playbook again")


class Installer:
    """Installs programs of a build under the final name of its release.

    :param account: account for untrusted programs, if this process runs as root; None for the current account.
    """

    def __init__(self, prefix: str, build: BuildPlan, account: Optional[str]) -> None:
        self.release_folder = Path(prefix) / "releases" / build.id
        self.build = build
        self.account = account

    def link_programs(self, release: ReleasePlan) -> Manifest:
        for path in self.build.packaged.values():
            if not os.access(path, os.X_OK):
                raise Refusal(
                    f"the distribution's packages were installed, but {path} is missing: use source: pypi or archive"
                )
        with self._new_release() as partial_folder:
            for name, path in self.build.packaged.items():
                (partial_folder / "bin" / name).symlink_to(path)
            return self._publish(partial_folder, {"source": release.source, "version": release.version})

    def unpack(self, source: Source, build_number: Optional[int]) -> Manifest:
        """Install programs that were compiled elsewhere, from an archive with their libraries."""
        archive_path = Path(source.archive)
        library_archives = [Path(archive.path) for archive in source.library_archives]
        for path, digest in ((source.archive, source.sha256), *source.library_archives):
            check_sha256(Path(path), digest)
        with self._new_release() as folder:
            archives.extract_programs(archive_path, self.build.targets, folder / "bin", library_archives)
            return self._publish(folder, {"sha256": source.sha256, "commit": source.commit, "number": build_number})

    def receive(self, packed_archive: PackedArchive) -> Manifest:
        """Install a release that the build's builder has packed."""
        archive_path = Path(packed_archive.path)
        check_sha256(archive_path, packed_archive.sha256)
        with self._new_release() as partial_folder:
            files = {
                name: partial_folder / name
                for name in (manifest.MANIFEST_FILE, *(f"bin/{target}" for target in self.build.targets))
            }
            try:
                archives.extract_members(archive_path, lambda member: files.get(str(member)))
            except archives.DamagedError as error:
                raise Refusal(f"{archive_path} cannot be unpacked ({error}): {CACHE_REMEDY}") from error
            packed_manifest = manifest.installed_manifest(partial_folder, self.build.targets)
            if not packed_manifest or packed_manifest.id != self.build.id:
                raise Refusal(f"{archive_path} does not match {self.build.id} on its builder: {CACHE_REMEDY}")
            for target in self.build.targets:
                (partial_folder / "bin" / target).chmod(0o755)
            (partial_folder / manifest.MANIFEST_FILE).unlink()
            return self._publish(partial_folder, packed_manifest.source, packed_manifest.seconds, self.build.builder)

    @contextmanager
    def _new_release(self) -> Iterator[Path]:
        """Yield a folder for an incomplete release, and remove it afterwards. Otherwise a failed installation would leave a full disk full."""
        partial_folder = self.release_folder.with_name("." + self.release_folder.name)
        shutil.rmtree(partial_folder, ignore_errors=True)
        try:
            (partial_folder / "bin").mkdir(parents=True)
            yield partial_folder
        finally:
            shutil.rmtree(partial_folder, ignore_errors=True)

    def _publish(
        self, partial_folder: Path, source: Mapping[str, Any], seconds: float = 0, builder: Optional[str] = None
    ) -> Manifest:
        has_page = self._test_programs(partial_folder)
        if self.build.ui == "true" and not has_page:
            raise Refusal(
                "llama_server_ui is true, but this release's llama-server has no chat page: set llama_server_ui to auto, or use a release that the hosts "
                "compile (source: pypi or git). No running service was touched"
            )
        release_manifest = Manifest(
            id=self.build.id,
            cmake_options=self.build.cmake_options,
            files={f"bin/{path.name}": sha256(path) for path in sorted((partial_folder / "bin").iterdir())},
            source=source,
            seconds=seconds,
            received_from=builder,
            page=has_page,
        )
        manifest.write_manifest(partial_folder, release_manifest)
        os.utime(partial_folder, NEVER_USED_TIMES)
        self._remove_build_files()
        self._move_into_place(partial_folder)
        return release_manifest

    def _move_into_place(self, partial_folder: Path) -> None:
        """Give a complete release its final name, safely even in case of a power failure."""
        sync(partial_folder, *partial_folder.rglob("*"))
        damaged_folder = self.release_folder.with_name(f".{self.release_folder.name}.damaged")
        if self.release_folder.exists():
            shutil.rmtree(damaged_folder, ignore_errors=True)
            self.release_folder.rename(damaged_folder)
        partial_folder.rename(self.release_folder)
        sync(self.release_folder.parent)
        shutil.rmtree(damaged_folder, ignore_errors=True)

    def _remove_build_files(self) -> None:
        """Remove files that only a build needs before moving its release into place: nothing removes them later."""

    def _test_programs(self, partial_folder: Path) -> Optional[bool]:
        """Test the programs on this host before any running service stops. Return whether llama-server has its chat page."""
        folder = partial_folder / "trial"
        folder.mkdir()
        trial = smoke_test.TrialSettings(folder, self.build.environment, self.account)
        has_page = smoke_test.test_programs(partial_folder / "bin", self.read_help(partial_folder / "bin"), trial)
        shutil.rmtree(folder)
        return has_page

    def read_help(self, folder: Path) -> dict[str, dict[str, bool]]:
        """Return the help options of each program; fail if a program does not start."""
        return {target: capabilities.parse_help(self._help_text(folder / target)) for target in self.build.targets}

    def _help_text(self, program: Path) -> str:
        """Return the help of a program, which runs in the root folder: an old program searches the current folder for libraries, and exits if its account
        may not read that folder."""
        try:
            result = subprocess.run(
                [str(program), "--help"],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=HELP_LIMIT_SECONDS,
                check=False,
                cwd="/",
                env={**os.environ, **self.build.environment},
                **commands.run_as_options(self.account),
            )
        except OSError as error:
            raise Refusal(f"{program.name} does not run on this host: {error.strerror}") from error
        except subprocess.TimeoutExpired:
            raise Refusal(f"{program.name} did not print its help within {HELP_LIMIT_SECONDS} s on this host") from None
        text = result.stdout + result.stderr
        if "usage" not in text.lower():
            raise Refusal(f"{program.name} does not run on this host: {text.strip()[-300:] or 'it printed nothing'}")
        return text
