# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Fetches the source of a release to the controller's cache."""

from __future__ import annotations

from typing import NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import ReleasePlan
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.action import Action
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.sources import sources


class Arguments(NamedTuple):
    release: ReleasePlan
    archives: tuple[str, ...] = ()


class ActionModule(Action):
    ARGUMENTS = Arguments

    def perform(self, arguments: Arguments) -> dict:
        if arguments.release.source == "package":
            return {"changed": False}
        if arguments.archives:
            brought = sources.fetch_prebuilt(arguments.release, arguments.archives)
            fetched = brought[0]._replace(changed=any(archive.changed for archive in brought))
        else:
            fetched = sources.fetch(arguments.release)
        return {"changed": fetched.changed, "path": str(fetched.path)}
