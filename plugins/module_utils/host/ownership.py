# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Checks whether the collection created the folders, files and services that have its names.

A run reports foreign ones, and neither overwrites nor removes them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import files, names, service_managers
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.facts.installation import is_own_definition
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.drift import processes
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import HostPlan


def check_ownership(host_plan: HostPlan) -> None:
    """:raises Refusal: applying the plan would overwrite or run foreign files."""
    manager = service_managers.MANAGERS[host_plan.service_manager]
    paths = (manager.definition_path(host_plan.units, service.name) for service in host_plan.services)
    foreign_definitions = [str(path) for path in paths if os.path.lexists(path) and not is_own_definition(path)]
    conflicts = [*_foreign_contents(host_plan), *foreign_definitions]
    if conflicts:
        raise Refusal(f"This host has {', '.join(conflicts)}{names.FOREIGN_REMEDY}")


def _foreign_contents(host_plan: HostPlan) -> Iterator[str]:
    """Yield foreign contents of an unmarked prefix, except empty folders, and folders that do not have their planned owner."""
    prefix = Path(host_plan.prefix)
    if files.is_marked(prefix):
        return
    owners: dict[str, str | None] = {folder.path: folder.owner for folder in host_plan.folders if folder.owner}
    owners.update({str(prefix / name): None for name in names.INSTALLED_ENTRIES if not _is_vacant(prefix / name)})
    for path, owner in owners.items():
        with suppress(FileNotFoundError):
            actual_owner = processes.account_of(os.stat(path).st_uid)
            if actual_owner != owner:
                yield f"{path} (owned by {actual_owner}{f', not by {owner}' if owner else ''})"


def _is_vacant(path: Path) -> bool:
    return not os.path.lexists(path) or (path.is_dir() and not path.is_symlink() and not os.listdir(path))
