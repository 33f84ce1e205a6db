# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Compares managed links with their files for systemd-networkd or NetworkManager.

A comment in each file names its link, so that a link can be removed after its variable is deleted. Foreign files are left alone.
"""

from __future__ import annotations

import ipaddress
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.files import text_of
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.links import inspection
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.links.inspection import (
    NETWORK_MANAGER,
    NETWORKD,
    Inspection,
    interface_folder,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.system import System
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import LinkPlan

PATH_TEMPLATES = {
    NETWORKD: "etc/systemd/network/70-llamacpp-{}.network",
    NETWORK_MANAGER: "etc/NetworkManager/system-connections/llamacpp-{}.nmconnection",
}
"""Path of an interface's file for each manager."""
HEADER_PATTERN = re.compile(r"^# link (\S+) (\S+)$", re.MULTILINE)
FILE_HEADER = """# Written by llamacpp.cluster, which overwrites changes to this file.
# link {interface} {address}
"""
FILE_TEMPLATES = {
    NETWORKD: FILE_HEADER
    + """[Match]
Name={interface}

[Link]
RequiredForOnline=no
{mtu_line}
[Network]
Address={address}
DHCP=no
LinkLocalAddressing=ipv6
IPv6AcceptRA=no
ConfigureWithoutCarrier=yes
""",
    NETWORK_MANAGER: FILE_HEADER
    + """[connection]
id=llamacpp-{interface}
uuid={uuid}
type=ethernet
interface-name={interface}
autoconnect-priority=100

[ethernet]
{mtu_line}
[ipv4]
method=manual
address1={address}
never-default=true

[ipv6]
method=link-local
never-default=true
""",
}


class Comparison(NamedTuple):
    """Present and planned states of a host's managed links."""

    manager: str
    old_addresses: Mapping[str, str]
    """interface → address that its existing file sets"""
    files: Mapping[str, str]
    planned_files: Mapping[LinkPlan, tuple[str, str]]
    """link → path and text of its file"""
    actual_lines: Sequence[str]
    """actual state of each interface"""

    @property
    def goals(self) -> list[str]:
        return [_describe_interface(link) for link in self.planned_files]

    def texts(self) -> tuple[str, str]:
        """Return files and interfaces before and after, as text."""
        return _render(self.files, self.actual_lines), _render(dict(self.planned_files.values()), self.goals)


def links_to_manage(links: Sequence[LinkPlan]) -> list[LinkPlan]:
    return [link for link in links if link.manage]


def compare(links: Sequence[LinkPlan], system: System) -> Comparison:
    """:raises Refusal: the links must not be configured."""
    managed_links, state, old_files = links_to_manage(links), inspection.inspect(system), _installed_files(system)
    old_addresses = {name: address for text in old_files.values() for name, address in HEADER_PATTERN.findall(text)}
    refusals = [
        *_removal_refusals(managed_links, old_addresses, state),
        *_link_refusals(managed_links, old_addresses, state, system),
    ]
    if refusals:
        raise Refusal(" ".join(refusals))
    manager = str(state.manager)
    return Comparison(
        manager,
        old_addresses,
        old_files,
        {link: _planned_file(link, manager) for link in managed_links},
        describe_interfaces(managed_links, state, system),
    )


def has_changes(links: Sequence[LinkPlan], system: System) -> bool:
    """Return whether a file, an address or an MTU differs from the plan, or a file belongs to no planned link.

    :raises Refusal: the links must not be configured.
    """
    if not links_to_manage(links) and not _installed_files(system):
        return False
    current_text, planned_text = compare(links, system).texts()
    return current_text != planned_text


def foreign_files(system: System) -> list[str]:
    return [path for path, text in _files_with_our_names(system).items() if names.DEFINITION_MARK not in text]


def _installed_files(system: System) -> dict[str, str]:
    return {path: text for path, text in _files_with_our_names(system).items() if names.DEFINITION_MARK in text}


def _files_with_our_names(system: System) -> dict[str, str]:
    paths = [path for pattern in PATH_TEMPLATES.values() for path in sorted(system.root.glob(pattern.format("*")))]
    return {f"/{path.relative_to(system.root)}": text_of(path) for path in paths}


def _path(link: LinkPlan, manager: str) -> str:
    return "/" + PATH_TEMPLATES[manager].format(link.interface)


def _planned_file(link: LinkPlan, manager: str) -> tuple[str, str]:
    key = "MTUBytes" if manager == NETWORKD else "mtu"
    text = FILE_TEMPLATES[manager].format(
        interface=link.interface,
        address=link.address,
        mtu_line=f"{key}={link.mtu}\n" if link.mtu else "",
        uuid=uuid.uuid5(uuid.NAMESPACE_DNS, f"llamacpp-{link.interface}.llamacpp.cluster"),
    )
    return _path(link, manager), text


def _describe_interface(link: LinkPlan, actual_state: inspection.InterfaceState | None = None) -> str:
    """Describe the actual or planned state of an interface."""
    addresses, mtu = (actual_state.addresses, actual_state.mtu) if actual_state else ((link.address,), link.mtu)
    return f"{link.interface} has {', '.join(addresses) or 'no address'}" + (f", mtu {mtu}" if link.mtu else "")


def describe_interfaces(links: Sequence[LinkPlan], state: Inspection, system: System) -> list[str]:
    lines = []
    for link in links:
        actual_state = state.interfaces[str(link.interface)]
        is_configured = link.address in actual_state.addresses and link.mtu in (None, actual_state.mtu)
        # NetworkManager sets the address as soon as a cable is connected.
        awaits_cable = state.manager == NETWORK_MANAGER and is_unplugged(link, system)
        lines.append(_describe_interface(link, None if is_configured or awaits_cable else actual_state))
    return lines


def is_unplugged(link: LinkPlan, system: System) -> bool:
    return text_of(interface_folder(str(link.interface), system) / "carrier").strip() == "0"


def _render(files: Mapping[str, str], lines: Sequence[str]) -> str:
    return "".join([*(f"{line}\n" for line in lines), *(f"--- {path}\n{files[path]}" for path in sorted(files))])


def _removal_refusals(links: Sequence[LinkPlan], old_addresses: Mapping[str, str], state: Inspection) -> Iterator[str]:
    for name in sorted(set(old_addresses) - {str(link.interface) for link in links}):
        if name in state.protected_names:
            yield (
                f"llama_links: {name} carries the connection that Ansible uses, and its address {old_addresses[name]} would be removed: connect to this host "
                "through another network."
            )


def _link_refusals(
    links: Sequence[LinkPlan], old_addresses: Mapping[str, str], state: Inspection, system: System
) -> Iterator[str]:
    alternative = "or set manage: false for this link"
    if links and not state.manager:
        yield (
            f"llama_links: {', '.join(str(link.interface) for link in links)} cannot be configured, because neither NetworkManager nor systemd-networkd "
            "runs on this host: start one of them, or set manage: false."
        )
        return
    addresses_by_name = {name: interface.addresses for name, interface in state.interfaces.items()}
    for link in links:
        name = str(link.interface)
        if name in state.protected_names:
            yield (
                f"llama_links: {name} carries the connection that Ansible uses or this host's default route, and was not changed: name the direct cable's "
                f"interface, {alternative}."
            )
        elif name not in state.interfaces:
            yield (
                f"llama_links: this host has no interface {name} (available: {', '.join(state.interfaces) or 'none'}): correct the name, or plug in the "
                "cable."
            )
        elif _path(link, str(state.manager)) in foreign_files(system):
            yield f"llama_links: {name} is configured by {_path(link, str(state.manager))}{names.FOREIGN_REMEDY}."
        elif name not in old_addresses and (foreign_addresses := _foreign_addresses(link, addresses_by_name[name])):
            yield f"llama_links: {name} already has the address {foreign_addresses[0]}: remove that address, {alternative}."
        else:
            network = ipaddress.IPv4Interface(link.address).network
            for other_name, addresses in addresses_by_name.items():
                if other_name != name and any(
                    network.overlaps(ipaddress.IPv4Interface(entry).network) for entry in addresses
                ):
                    yield (
                        f"llama_links: {link.address} on {name} is in the same network as {addresses[0]} on {other_name}: give each link its own network."
                    )
            addresses_by_name[name] = (link.address,)


def _foreign_addresses(link: LinkPlan, addresses: Sequence[str]) -> list[str]:
    return [address for address in addresses if address != link.address and not address.startswith("169.254.")]
