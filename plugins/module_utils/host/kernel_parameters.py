# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Kernel module options that give integrated graphics more memory. The role llama_host writes them to a file for modprobe."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.system import System

MODPROBE_FILE = f"/etc/modprobe.d/{names.PREFIX}.conf"


def has_changes(parameters: Mapping[str, str], system: System) -> bool:
    """Return whether the file differs from these parameters. Foreign files do not count."""
    text = "" if foreign_files(system) else system.text(MODPROBE_FILE)
    options = re.findall(r"^options (\w+) (\w+)=(\S+)$", text, re.MULTILINE)
    return {f"{module}.{option}": value for module, option, value in options} != parameters


def foreign_files(system: System) -> list[str]:
    """Return the path of the file for modprobe if the file is foreign."""
    is_own = names.DEFINITION_MARK in system.text(MODPROBE_FILE)
    return [MODPROBE_FILE] if os.path.lexists(system.path(MODPROBE_FILE)) and not is_own else []
