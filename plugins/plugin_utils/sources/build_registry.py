# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Releases that a host has built, in the controller's cache: archives for other hosts, and what the controller saw of them.

The record is made once, from the build that the controller watched or from the first archive that the planned builder packs. Every later
archive and every installed release of that build is held against it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from ansible.errors import AnsibleError
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.files import sha256
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.builds import store
from ansible_collections.llamacpp.cluster.plugins.module_utils.lifecycle import changes
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import Plan
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.sources import cache

INVESTIGATE = "investigate that host: it may be compromised"


class Record(NamedTuple):
    """What the controller has recorded of a build."""

    files: Mapping[str, str]
    """File → sha256."""
    prefix: str
    """Of the installation on the builder."""
    sha256: str | None
    """Of the packed archive, once the controller has one."""


class CachedBuild:
    """A build of a host in the cache of one cluster and of one account of the controller.

    :param prefix: of the installation on the builder, where it is known: what was recorded of another one there does not count, unless other
        hosts may have it. The builder says itself where its installation is.
    """

    def __init__(self, cluster: str, builder: str, identity: str, prefix: str | None = None) -> None:
        self.builder = builder
        self.prefix = prefix
        self.identity = identity
        names = ["releases", *(re.sub(r"^\.", "%2E", quote(name, safe=" ")) for name in (cluster, builder))]
        self._name = "/".join(names)
        self.folders = [cache.root().joinpath(*names[:count]) for count in range(len(names) + 1)]
        self._archive = self.folders[-1] / f"{identity}{store.PACKED}"
        self._record = self.folders[-1] / f"{identity}.json"

    def record(self) -> Record | None:
        """What was recorded; None where nothing was, or where it cannot be read as such."""
        self._check_owner()
        record = _read(self._record)
        return record if record and (self.prefix in (None, record.prefix) or record.sha256) else None

    def archive(self) -> Path | None:
        """The packed release, if it is still what was recorded."""
        known = self.record()
        try:
            return self._archive if known and known.sha256 == sha256(self._archive) else None
        except OSError:
            return None

    def has_archive(self) -> bool:
        return self._archive.exists()

    def record_files(self, manifest: Any) -> None:
        """Records the files of a build that this run has made, or that its builder shares for the first time.

        :param manifest: what the builder returned, which may be anything.
        """
        files = store.hashes(manifest.get("files")) if isinstance(manifest, dict) else {}
        if not files:
            raise AnsibleError(f"{self.builder} does not say which files its build {self.identity} has: {INVESTIGATE}")
        with self._locked():
            known = self.record()
            if not known or known.files != files:  # another controller may have recorded it, with its archive
                self._write(Record(files, str(self.prefix), None))

    @contextmanager
    def receive(self) -> Iterator[Path]:
        """A path to which the caller brings the packed release. It stays when it holds what was recorded.

        :raises AnsibleError: it holds something else.
        """
        with self._locked():
            known = self.record()
            with cache.work(self.folders[-1]) as work:
                packed = Path(work) / self._archive.name
                yield packed
                if not known or store.packed_files(packed, known.files) != known.files:
                    raise AnsibleError(
                        f"The release {self.identity} that {self.builder} has packed is not what the controller recorded of it: {INVESTIGATE}. If "
                        f"the change is yours, remove {self._record} on the controller and run the playbook again."
                    )
                if not self.archive():  # another controller may have brought one, which is on its way to hosts
                    self._write(known._replace(sha256=sha256(packed)))
                    packed.replace(self._archive)

    def _write(self, record: Record) -> None:
        with cache.work(self.folders[-1]) as work:
            (Path(work) / "record").write_text(json.dumps(record._asdict()) + "\n")
            (Path(work) / "record").replace(self._record)

    def _check_owner(self) -> None:
        for folder in self.folders:
            if folder.exists():
                cache.check_owner(folder)

    def _locked(self) -> AbstractContextManager[Path]:
        return cache.exclusive_folder(self._name, "llama_build_share", f"keeps {self.identity} of {self.builder}")


def _read(path: Path) -> Record | None:
    try:
        known = json.loads(path.read_text())
        record = Record(store.hashes(known["files"]), known["prefix"], known["sha256"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return record if record.files else None


def recorded(plan: Plan) -> dict[tuple[str, str], changes.Recorded]:
    """Builder and id of each build of a plan that was recorded → what the controller has of it."""
    found = {}
    for host in plan.hosts.values():
        for build in host.builds:
            cached = CachedBuild(plan.cluster, build.builder, build.id, plan.hosts[build.builder].prefix)
            record = cached.record()
            if record:
                found[build.builder, build.id] = changes.Recorded(record.files, cached.has_archive())
    return found
