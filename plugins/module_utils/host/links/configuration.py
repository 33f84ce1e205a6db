# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Gives the interfaces of managed links their addresses by a file for systemd-networkd or NetworkManager, and takes back what no link wants any more.

A line of each file says for which link it is, so that one can be taken back that no variable has any more. Files of others are left alone.
"""

from __future__ import annotations

import ipaddress
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.files import replace_file, text_of
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.links import inspection
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.links.inspection import (
    NETWORK_MANAGER,
    NETWORKD,
    Inspection,
    of_interface,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.system import System
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import LinkPlan

SETTLE_SECONDS = 15
"""How long an interface may take until it has what its file says."""
POLL_SECONDS = 0.3
DEFAULT_MTU = 1500
FILES = {
    NETWORKD: "etc/systemd/network/70-llamacpp-{}.network",
    NETWORK_MANAGER: "etc/NetworkManager/system-connections/llamacpp-{}.nmconnection",
}
"""Manager → its file for an interface."""
MODES = {NETWORKD: 0o644, NETWORK_MANAGER: 0o600}
STATUS_COMMANDS = {NETWORK_MANAGER: "nmcli device", NETWORKD: "networkctl status"}
MARK = re.compile(r"^# link (\S+) (\S+) (\d+|-)$", re.MULTILINE)
START = """# Written by llamacpp.cluster, which overwrites what is changed here.
# link {interface} {address} {mtu}
"""
TEMPLATES = {
    NETWORKD: START
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
    NETWORK_MANAGER: START
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


class Former(NamedTuple):
    """A link for which a file is."""

    address: str
    has_mtu: bool


def managed(links: Sequence[LinkPlan]) -> list[LinkPlan]:
    return [link for link in links if link.manage]


def differs(links: Sequence[LinkPlan], system: System) -> bool:
    """Whether a file, an address or an MTU is not as wanted, or a file belongs to no link any more.

    :raises Refusal: the links must not be configured.
    """
    if not managed(links) and not _installed(system):
        return False
    before, after = apply(links, True, system)
    return before != after


def apply(links: Sequence[LinkPlan], check: bool, system: System) -> tuple[str, str]:
    """Gives the managed links their addresses and takes back what no link wants any more.

    :param check: change nothing.
    :returns: files and interfaces before and after, as text.
    :raises Refusal: before any change where the links must not be configured, or where an interface does not get its settings.
    """
    wanted, found, old = managed(links), inspection.inspect(system), _installed(system)
    former = {name: Former(address, mtu != "-") for text in old.values() for name, address, mtu in MARK.findall(text)}
    refusals = [*_of_leaving(wanted, former, found), *_of_links(wanted, former, found, system)]
    if refusals:
        raise Refusal(" ".join(refusals))
    new = dict(_planned(link, str(found.manager)) for link in wanted)
    before, after = _text(old, _live(wanted, found, system)), _text(new, _goals(wanted))
    if check or before == after:
        return before, after
    for path in set(old) - set(new):
        system.path(path).unlink()
    for path, text in new.items():
        system.path(path).parent.mkdir(parents=True, exist_ok=True)
        replace_file(system.path(path), text, MODES[str(found.manager)])
    changed = [
        link
        for link in wanted
        if not dict([_planned(link, str(found.manager))]).items() <= old.items()
        or _live([link], found, system) != _goals([link])
    ]
    _reload(found.manager, changed, system)
    _take_back(wanted, former, system)

    def settled() -> bool:
        return _live(wanted, inspection.inspect(system), system) == _goals(wanted)

    if not _until(settled):
        lacking = _live(wanted, inspection.inspect(system), system)
        raise Refusal(
            f"llama_links: after {SETTLE_SECONDS} seconds {'; '.join(lacking)}. Check `{STATUS_COMMANDS[str(found.manager)]}`, whether another file "
            "configures the interface, and whether it supports that MTU."
        )
    return before, after


def foreign_files(system: System) -> list[str]:
    """Files that others have under our names."""
    return [path for path, text in _matching(system).items() if names.DEFINITION_MARK not in text]


def _installed(system: System) -> dict[str, str]:
    return {path: text for path, text in _matching(system).items() if names.DEFINITION_MARK in text}


def _matching(system: System) -> dict[str, str]:
    paths = [path for pattern in FILES.values() for path in sorted(system.root.glob(pattern.format("*")))]
    return {f"/{path.relative_to(system.root)}": text_of(path) for path in paths}


def _path(link: LinkPlan, manager: str) -> str:
    return "/" + FILES[manager].format(link.interface)


def _planned(link: LinkPlan, manager: str) -> tuple[str, str]:
    """Path and text of the file of a link."""
    key = "MTUBytes" if manager == NETWORKD else "mtu"
    text = TEMPLATES[manager].format(
        interface=link.interface,
        address=link.address,
        mtu=link.mtu or "-",
        mtu_line=f"{key}={link.mtu}\n" if link.mtu else "",
        uuid=uuid.uuid5(uuid.NAMESPACE_DNS, f"llamacpp-{link.interface}.llamacpp.cluster"),
    )
    return _path(link, manager), text


def _line(link: LinkPlan, addresses: str, mtu: int | None) -> str:
    return f"{link.interface} has {addresses}" + (f", mtu {mtu}" if link.mtu else "")


def _goals(links: Sequence[LinkPlan]) -> list[str]:
    return [_line(link, link.address, link.mtu) for link in links]


def _live(links: Sequence[LinkPlan], found: Inspection, system: System) -> list[str]:
    """The same of what interfaces have now."""
    lines = []
    for link in links:
        interface = found.interfaces[str(link.interface)]
        has = link.address in interface.addresses and link.mtu in (None, interface.mtu)
        # NetworkManager gives the address as soon as the other end is connected.
        if has or (found.manager == NETWORK_MANAGER and _is_unplugged(link, system)):
            lines.append(_line(link, link.address, link.mtu))
        else:
            lines.append(_line(link, ", ".join(interface.addresses) or "no address", interface.mtu))
    return lines


def _is_unplugged(link: LinkPlan, system: System) -> bool:
    return text_of(of_interface(str(link.interface), system) / "carrier").strip() == "0"


def _text(files: Mapping[str, str], lines: Sequence[str]) -> str:
    return "".join([*(f"{line}\n" for line in lines), *(f"--- {path}\n{files[path]}" for path in sorted(files))])


def _reload(manager: str | None, links: Sequence[LinkPlan], system: System) -> None:
    """Lets the manager read its files and bring up these interfaces, with NetworkManager where the other end is connected."""
    if manager == NETWORK_MANAGER:
        system.run(["nmcli", "connection", "reload"])
        for link in links:
            if not _is_unplugged(link, system):
                up = ["connection", "up", f"llamacpp-{link.interface}", "ifname", str(link.interface)]
                system.run(["nmcli", "--wait", str(SETTLE_SECONDS), *up])
    if manager == NETWORKD:
        system.run(["networkctl", "reload"])
        for link in links:
            system.run(["networkctl", "reconfigure", str(link.interface)])


def _take_back(links: Sequence[LinkPlan], former: Mapping[str, Former], system: System) -> None:
    """Takes away former addresses and MTU where the manager left them."""
    planned = {str(link.interface): link for link in links}
    for name, interface in inspection.inspect(system).interfaces.items():
        if name not in former:
            continue
        link = planned.get(name)
        if former[name].address in interface.addresses and (not link or link.address != former[name].address):
            system.output("ip", "address", "del", former[name].address, "dev", name)
        if former[name].has_mtu and not (link and link.mtu) and interface.mtu != DEFAULT_MTU:
            system.output("ip", "link", "set", "dev", name, "mtu", str(DEFAULT_MTU))


def _until(done: Callable[[], bool]) -> bool:
    """Whether it came true within the time that an interface may take."""
    end = time.monotonic() + SETTLE_SECONDS
    while not done():
        if time.monotonic() > end:
            return False
        time.sleep(POLL_SECONDS)
    return True


# ------------------------------------------------------------------------------------------------------------- refusals


def _of_leaving(links: Sequence[LinkPlan], former: Mapping[str, Former], found: Inspection) -> Iterator[str]:
    for name in sorted(set(former) - {str(link.interface) for link in links}):
        if name in found.protected:
            yield (
                f"llama_links: {name} carries the connection that Ansible uses, and its address {former[name].address} would be removed: connect "
                "through another network."
            )


def _of_links(
    links: Sequence[LinkPlan], former: Mapping[str, Former], found: Inspection, system: System
) -> Iterator[str]:
    """Why the links must not be configured, a sentence for each."""
    instead = "or set manage: false for this link"
    if links and not found.manager:
        yield (
            f"llama_links: {', '.join(str(link.interface) for link in links)} cannot be configured, since neither NetworkManager nor systemd-networkd "
            "runs on this host: start one of them, or set manage: false."
        )
        return
    taken = {name: interface.addresses for name, interface in found.interfaces.items()}
    for link in links:
        name, network = str(link.interface), _network(link)
        if not network:
            yield f"llama_links: {link.address!r} of {name} is not an address with a prefix length: give it like 10.99.0.12/24."
        elif [str(each.interface) for each in links].count(name) > 1:
            yield f"llama_links: {name} is named by two links, but an interface has one address: remove one of them."
        elif name in found.protected:
            yield (
                f"llama_links: {name} carries the connection that Ansible uses or this host's default route, and is not changed: name the interface of "
                f"the direct cable, {instead}."
            )
        elif name not in found.interfaces:
            yield (
                f"llama_links: this host has no interface {name} (it has {', '.join(found.interfaces) or 'none'}): correct the name, or plug in its "
                "cable."
            )
        elif _path(link, str(found.manager)) in foreign_files(system):
            yield f"llama_links: {name} is configured by {_path(link, str(found.manager))}{names.NOT_OURS}."
        elif name not in former and (others := _others(link, taken[name])):
            yield f"llama_links: {name} is already in use with address {others[0]}: remove that address, {instead}."
        else:
            for other, addresses in taken.items():
                if other != name and any(network.overlaps(ipaddress.IPv4Interface(held).network) for held in addresses):
                    yield (
                        f"llama_links: {link.address} of {name} is in the same network as {addresses[0]} of {other}: give each link a network of its "
                        "own."
                    )
            taken[name] = (link.address,)


def _others(link: LinkPlan, addresses: Sequence[str]) -> list[str]:
    return [address for address in addresses if address != link.address and not address.startswith("169.254.")]


def _network(link: LinkPlan) -> ipaddress.IPv4Network | None:
    try:
        return ipaddress.IPv4Interface(link.address).network if "/" in link.address else None
    except ValueError:
        return None
