# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Writes the files of managed links, sets their addresses, and removes files and addresses that no link needs any more."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.files import replace_file
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.links import configuration, inspection
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.links.inspection import NETWORK_MANAGER, NETWORKD
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.system import System
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import LinkPlan

CONFIGURE_TIMEOUT_SECONDS = 15
"""Time limit for an interface to take its settings."""
POLL_SECONDS = 0.3
FILE_MODES = {NETWORKD: 0o644, NETWORK_MANAGER: 0o600}
STATUS_COMMANDS = {NETWORK_MANAGER: "nmcli device", NETWORKD: "networkctl status"}


def apply_links(links: Sequence[LinkPlan], check_mode: bool, system: System) -> tuple[str, str]:
    """Apply the planned links.

    :returns: files and interfaces before and after, as text.
    :raises Refusal: the links must not be configured (then nothing has changed), or an interface does not take its settings.
    """
    state = configuration.compare(links, system)
    text_before, text_after = state.texts()
    if check_mode or text_before == text_after:
        return text_before, text_after
    managed_links, files, goals = [*state.planned_files], dict(state.planned_files.values()), state.goals
    for path in set(state.files) - set(files):
        system.path(path).unlink()
    for path, text in files.items():
        system.path(path).parent.mkdir(parents=True, exist_ok=True)
        replace_file(system.path(path), text, FILE_MODES[state.manager])
    changed_links = [
        link
        for (link, (path, text)), line, goal in zip(state.planned_files.items(), state.actual_lines, goals)
        if line != goal or state.files.get(path) != text
    ]
    _reload(state.manager, changed_links, system)
    new_addresses = {(str(link.interface), link.address) for link in managed_links}
    _remove_addresses(
        {name: address for name, address in state.old_addresses.items() if (name, address) not in new_addresses}, system
    )
    deadline = time.monotonic() + CONFIGURE_TIMEOUT_SECONDS
    while (lines := configuration.describe_interfaces(managed_links, inspection.inspect(system), system)) != goals:
        if time.monotonic() > deadline:
            raise Refusal(
                f"llama_links: {CONFIGURE_TIMEOUT_SECONDS} seconds after the change, {'; '.join(lines)}. Run `{STATUS_COMMANDS[state.manager]}`, and check "
                "whether another file configures the interface and whether the interface supports its MTU."
            )
        time.sleep(POLL_SECONDS)
    return text_before, text_after


def _reload(manager: str, links: Sequence[LinkPlan], system: System) -> None:
    """Make the manager read its files and activate these interfaces; NetworkManager needs a connected cable."""
    if manager == NETWORK_MANAGER:
        system.run(["nmcli", "connection", "reload"])
        for link in links:
            if not configuration.is_unplugged(link, system):
                up_command = ["connection", "up", f"llamacpp-{link.interface}", "ifname", str(link.interface)]
                system.run(["nmcli", "--wait", str(CONFIGURE_TIMEOUT_SECONDS), *up_command])
    if manager == NETWORKD:
        system.run(["networkctl", "reload"])
        for link in links:
            system.run(["networkctl", "reconfigure", str(link.interface)])


def _remove_addresses(old_addresses: Mapping[str, str], system: System) -> None:
    """Remove former addresses that the manager has not removed. A former MTU stays until the next boot."""
    for name, interface in inspection.inspect(system).interfaces.items():
        if old_addresses.get(name) in interface.addresses:
            system.output("ip", "address", "del", old_addresses[name], "dev", name)
