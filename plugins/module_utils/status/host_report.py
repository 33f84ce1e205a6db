# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""A host's part of a bug bundle: logs, kernel and drivers, without secrets."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from contextlib import suppress

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import commands, redaction
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.commands import Ask
from ansible_collections.llamacpp.cluster.plugins.module_utils.facts import installation
from ansible_collections.llamacpp.cluster.plugins.module_utils.host import services
from ansible_collections.llamacpp.cluster.plugins.module_utils.verify import server_client

MAX_LOG_LINES, MAX_TEXT_LENGTH = 2000, 400_000
"""Maximum number of lines of a service's log, and maximum length of each text; the beginning is cut off."""
VERSION_FILES = "/etc/os-release /proc/version /proc/driver/nvidia/version"
DRIVER_NAMES = "amdgpu nvidia i915 xe asahi mlx5_core thunderbolt_net"
COMMANDS = (
    "uname -a",
    f"sh -c 'grep -s . {VERSION_FILES}; cd /sys/module && for name in {DRIVER_NAMES}; do grep -s . $name/version /dev/null; done; true'",
    "nvidia-smi",
    "rocminfo",
    "vulkaninfo --summary",
    "lspci -nn",
    "journalctl --dmesg --no-pager --since=-1h --lines=500",
)


def system_report(ask: Ask = commands.output) -> str:
    """Return the outputs of commands about the kernel, its drivers and its messages of the last hour, each output below its command."""
    outputs = [(command, ask(shlex.split(command))) for command in COMMANDS]
    return "\n".join(f"--- {command}\n{output.rstrip()}\n" for command, output in outputs if output.strip())


def _service_logs(paths: installation.InstallationPaths) -> Iterable[tuple[str, str]]:
    service_names = installation.defined_services(paths.service_manager, paths.units)
    manager = services.manager_of(paths)
    for service in service_names:
        yield f"{service}.log", manager.log(service, MAX_LOG_LINES, "short-iso")


def read_report(scope: str, key_file: str | None) -> dict[str, str]:
    """Return the texts of the report by name."""
    secrets: dict[str, str] = {}
    with suppress(OSError):
        secrets = dict.fromkeys(server_client.read_api_keys(key_file or ""), "API key")
    texts = {"system.txt": system_report(), **dict(_service_logs(installation.detect_paths(scope)))}
    return {name: redaction.redact(text[-MAX_TEXT_LENGTH:], secrets) for name, text in texts.items() if text}
