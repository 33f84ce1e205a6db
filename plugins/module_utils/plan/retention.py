# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Decides which releases stay installed on a host, and which the host no longer needs."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import words

RETAINED_RELEASES = 2
"""Number of releases of each backend that stay installed, including the planned release."""


def unneeded_releases(
    planned_ids: Collection[str], mtimes: Mapping[str, float], unused_ids: Collection[str]
) -> list[str]:
    """Return unfinished builds, and unused releases beyond the newest of their backend, oldest first. A backend that is no longer planned keeps one
    release fewer.

    :param mtimes: id of an installed release → modification time of its folder.
    """
    complete_ids = sorted(
        (name for name in {*mtimes, *planned_ids} if not name.startswith(".")),
        key=lambda name: (name not in planned_ids, name in unused_ids, -mtimes.get(name, 0)),
    )
    old_ids: list[str] = []
    for backend in dict.fromkeys(map(words.backend_of, complete_ids)):
        release_ids = [name for name in complete_ids if words.backend_of(name) == backend]
        retained_count = RETAINED_RELEASES - (not any(name in planned_ids for name in release_ids))
        old_ids += [name for name in release_ids[retained_count:] if name in unused_ids]
    return sorted(name for name in unused_ids if name.startswith(".")) + sorted(old_ids, key=lambda name: mtimes[name])
