# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Packed releases in the controller's cache: all hosts of a kind receive the first release that their builder packed."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

from ansible_collections.llamacpp.cluster.plugins.module_utils.host.builds import store
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.sources import cache


class CachedBuild:
    """A cached build from a builder, for one cluster."""

    def __init__(self, cluster: str, builder: str, build_id: str) -> None:
        parts = (re.sub(r"^\.", "%2E", quote(name, safe=" ")) for name in (cluster, builder))
        self._name = "/".join(["releases", *parts])
        self._archive_path = cache.root_folder() / self._name / f"{build_id}{store.PACKED_SUFFIX}"

    def archive(self) -> Path | None:
        """Return the path of the packed release if it exists."""
        return self._archive_path if self._archive_path.exists() else None

    @contextmanager
    def receive(self) -> Iterator[Path]:
        """Yield a path for the packed release, and move the file into the cache afterwards."""
        with cache.exclusive_folder(self._name, "llama_build_share") as folder, cache.work_folder(folder) as work:
            packed_path = Path(work) / self._archive_path.name
            yield packed_path
            if not self.archive():  # another controller may have added a release, which hosts may be receiving
                packed_path.replace(self._archive_path)
