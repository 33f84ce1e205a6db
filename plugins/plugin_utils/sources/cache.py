# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The controller's cache: folders that only the account running Ansible can use, one run at a time. They contain only complete files."""

import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

from ansible.errors import AnsibleError
from ansible.utils.display import Display
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import files, locks
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.builds import store

LOCK_FILE = ".lock"
WORK_PREFIX = ".work-"
"""Prefix of folders with incomplete files."""


def root_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "llamacpp"


def make_folder(name: str, variable: str) -> Path:
    """Return a folder of the cache, and create it if it is missing.

    :param name: name, possibly with several parts, like ``releases/one``.
    :raises AnsibleError: the cache belongs to another account, or the folder cannot be created.
    """
    path = root_folder()
    with _explain_error(variable, path / name):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner, user = path.stat().st_uid, os.geteuid()
        if owner != user:
            raise AnsibleError(
                f"The controller's cache {path} belongs to uid {owner}, but this run has uid {user}: its content is installed on hosts, so only one account "
                f"may change it. Run as uid {owner}, or set XDG_CACHE_HOME to a folder of uid {user}"
            )
        (path / name).mkdir(parents=True, exist_ok=True)
    return path / name


@contextmanager
def exclusive_folder(name: str, variable: str) -> Iterator[Path]:
    """Lock a folder of the cache for this run, remove leftovers of killed runs, and yield the folder.

    :raises AnsibleError: as in make_folder, and in place of every OSError in the block.
    """
    path = make_folder(name, variable)
    with _explain_error(variable, path):
        lock_descriptor = files.open_lock(path / LOCK_FILE)
        try:
            if not files.take_lock(lock_descriptor):
                Display().display(
                    f"  [controller] {path} is in use: waiting for {locks.holders_text(path / LOCK_FILE)}"
                )
                files.take_lock(lock_descriptor, math.inf)
            for work_path in path.glob(WORK_PREFIX + "*"):
                shutil.rmtree(work_path, ignore_errors=True)
            yield path
        finally:
            os.close(lock_descriptor)


def work_folder(path: Path) -> tempfile.TemporaryDirectory[str]:
    """Return a folder for incomplete files of this process, inside another folder."""
    return tempfile.TemporaryDirectory(dir=path, prefix=WORK_PREFIX)


@contextmanager
def _explain_error(variable: str, path: Path) -> Iterator[None]:
    """Replace an OSError in the block by an error with a remedy."""
    try:
        yield
    except OSError as error:
        raise AnsibleError(
            f"{variable} needs {path} on the controller, which cannot be used ({error.strerror or error}): free space on that disk, make the folder "
            f"writable for uid {os.geteuid()}, or set XDG_CACHE_HOME to a writable folder"
        ) from None


class CachedBuild:
    """Release that a builder packed for all hosts of its kind, for one cluster."""

    def __init__(self, cluster: str, builder: str, build_id: str) -> None:
        quoted_names = (re.sub(r"^\.", "%2E", quote(name, safe=" ")) for name in (cluster, builder))
        self._folder_name = "/".join(["releases", *quoted_names])
        self._archive_path = root_folder() / self._folder_name / f"{build_id}{store.PACKED_SUFFIX}"

    def find_archive(self) -> Path | None:
        return self._archive_path if self._archive_path.exists() else None

    @contextmanager
    def receive(self) -> Iterator[Path]:
        """Yield a path for the packed release, and move the file into the cache afterwards."""
        with exclusive_folder(self._folder_name, "llama_build_share") as folder, work_folder(folder) as work_path:
            packed_path = Path(work_path) / self._archive_path.name
            yield packed_path
            if not self.find_archive():  # another controller may have added a release, which hosts may be receiving
                packed_path.replace(self._archive_path)
