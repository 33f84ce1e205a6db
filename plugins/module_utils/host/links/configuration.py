# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Gives the interfaces of managed links their addresses, and takes back what no link wants any more."""

from __future__ import annotations

import base64
import ipaddress
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.files import replace_file, text_of
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.names import WIREGUARD
from ansible_collections.llamacpp.cluster.plugins.module_utils.facts import wireguard
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.links import inspection, network_files, problems
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.links.inspection import (
    NETWORK_MANAGER,
    NETWORKD,
    Inspection,
    ThunderboltDevice,
    of_interface,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.system import System
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import LinkPlan

SETTLE_SECONDS = 15
"""How long an interface may take until it has what its configuration says."""
POLL_SECONDS = 0.3
DEFAULT_MTU = 1500
STATUS_COMMANDS = {NETWORK_MANAGER: "nmcli device", NETWORKD: "networkctl status"}


class Goal(NamedTuple):
    """What an interface is to have."""

    address: str | None
    """None: none of the cluster's"""
    mtu: int | None
    """None: any"""
    known: frozenset[str]
    """addresses that are or were the cluster's"""
    made: bool = False
    """whether the cluster made the interface, which goes with its address"""


def differs(links: Sequence[LinkPlan], system: System) -> bool:
    """Whether files, addresses or MTU are not as wanted, or a file of the cluster belongs to no link any more.

    :raises Refusal: the links must not be configured.
    """
    if not problems.managed(links) and not network_files.installed(system):
        return False
    found = inspection.inspect(system)
    _refuse(problems.problems(links, found, system))
    before, after = _states(links, found, system)
    return before != after


def apply(links: Sequence[LinkPlan], check: bool, system: System) -> tuple[str, str]:
    """Gives the managed links their addresses and takes back what no link wants any more.

    :param check: change nothing.
    :returns: how the links stood and how they stand then, as text; the same twice if there was nothing to do.
    :raises Refusal: before any change when the links must not be configured, or when an interface does not get its settings.
    """
    found = inspection.inspect(system)
    _refuse(problems.problems(links, found, system))
    before, after = _states(links, found, system)
    if check or before == after:
        return before, after
    waiting = problems.unauthorised(links, found)
    if waiting:
        _authorise(waiting, problems.named_devices(links), system)
        missing = [str(link.interface) for link in problems.managed(links) if link.interface not in found.interfaces]
        _until(lambda: all(of_interface(name, system).exists() for name in missing))
        found = inspection.inspect(system)
        _refuse(problems.problems(links, found, system))
    _configure(problems.managed(links), found, system)
    return before, after


def _key_of(system: System) -> str:
    return wireguard.key_of(system.owner, system.root)


def make_key(links: Sequence[LinkPlan], check: bool, system: System) -> bool:
    """Makes this host's key of WireGuard where it needs one and has none. Returns whether there was something to make."""
    if _key_of(system) or not any(link.kind == WIREGUARD for link in problems.managed(links)):
        return False
    if not check:
        private = base64.b64encode(os.urandom(32)).decode()
        replace_file(wireguard.key_file(system.owner, system.root), private + "\n", 0o600)
    return True


def _whole_key(links: Sequence[LinkPlan], system: System) -> str:
    """:raises Refusal: a key is missing, here or of a peer."""
    peers = [peer for link in links for peer in link.peers or ()]
    lacking = [peer.host for peer in peers if not peer.public_key]
    if peers and not _key_of(system):
        lacking.append("this host")
    if lacking:
        raise Refusal(f"llama_links: {', '.join(lacking)} has no key of WireGuard: run site.yml, which makes it.")
    return _key_of(system)


def _refuse(sentences: Iterable[str]) -> None:
    if sentences:
        raise Refusal(" ".join(sentences))


# ---------------------------------------------------------------------------------------------------------------- state


def _goals(links: Iterable[LinkPlan], former: Iterable[LinkPlan]) -> dict[str, Goal]:
    """Interface → what it is to have.

    :param former: the links for which files of the cluster are.
    """
    goals: dict[str, Goal] = {}
    for link in former:
        mtu, made = DEFAULT_MTU if link.mtu else None, link.kind == WIREGUARD
        goals[str(link.interface)] = Goal(None, mtu, frozenset([link.address]), made)
    for link in links:
        old = goals.get(str(link.interface), Goal(None, None, frozenset()))
        known, made = old.known | {link.address}, link.kind == WIREGUARD
        goals[str(link.interface)] = Goal(link.address, link.mtu or old.mtu, known, made)
    return goals


def _line(interface: str, addresses: Sequence[str], mtu: int | None) -> str:
    return f"{interface}: {', '.join(addresses) or 'no address'}" + (f", mtu {mtu}" if mtu else "") + "\n"


def _is_unplugged(name: str, system: System) -> bool:
    return text_of(of_interface(name, system) / "carrier").strip() == "0"


def _live(goals: Mapping[str, Goal], found: Inspection, system: System) -> tuple[dict[str, str], dict[str, str]]:
    """Interface → a line on how it stands, and one on how it is to stand."""
    now, then = {}, {}
    for name, goal in goals.items():
        interface = found.interfaces.get(name)
        if interface is None and goal.address is None:
            continue
        gone = goal.made and not goal.address
        then[name] = "" if gone else _line(name, [goal.address] if goal.address else [], goal.mtu)
        if interface is None:
            now[name] = f"{name}: missing\n"
        elif goal.address and found.manager == NETWORK_MANAGER and _is_unplugged(name, system):
            # networkd gives the address without the other end.
            now[name] = then[name] = f"{name}: {goal.address} as soon as the other end is connected\n"
        else:
            held = [address for address in interface.addresses if address in goal.known]
            now[name] = _line(name, held, interface.mtu if goal.mtu else None)
    return now, then


def _text(
    files: Mapping[str, str],
    modes: Mapping[str, int],
    lines: Mapping[str, str],
    devices: Iterable[ThunderboltDevice],
    flag: int,
) -> str:
    return "".join(
        [
            *(f"thunderbolt {device.name}: authorized {flag}\n" for device in devices),
            *(lines[name] for name in sorted(lines)),
            *(f"--- {path} {modes[path]:04o}\n{network_files.shown(files[path])}" for path in sorted(files)),
        ]
    )


def _states(links: Sequence[LinkPlan], found: Inspection, system: System) -> tuple[str, str]:
    """How the links stand and how they are to stand, as text: interfaces, then files."""
    wanted, old = problems.managed(links), network_files.installed(system)
    new = network_files.planned(wanted, found.manager, system.owner, _key_of(system) or network_files.NO_KEY)
    now, then = _live(_goals(wanted, network_files.links_of(old)), found, system)
    waiting = problems.unauthorised(links, found)
    modes = {path: system.path(path).stat().st_mode & 0o777 for path in old}
    new_modes = {path: network_files.mode(path) for path in new}
    return _text(old, modes, now, waiting, 0), _text(new, new_modes, then, waiting, 1)


# --------------------------------------------------------------------------------------------------------------- change


def _authorise(devices: Iterable[ThunderboltDevice], named: set[str], system: System) -> None:
    """For good by UUID alone: at a route may be another device tomorrow.

    :param named: UUIDs and routes that links name.
    """
    for device in devices:
        if device.uuid in named and system.program("boltctl"):
            system.run(["boltctl", "enroll", "--policy", "auto", device.uuid])
        else:
            system.path(f"sys/bus/thunderbolt/devices/{device.name}/authorized").write_text("1")


def _configure(links: Sequence[LinkPlan], found: Inspection, system: System) -> None:
    old = network_files.installed(system)
    new = network_files.planned(links, found.manager, system.owner, _whole_key(links, system))
    former = network_files.links_of(old)
    goals = _goals(links, former)
    # Only the file knows the address of a link that is not planned any more, so the address goes first.
    _take_back({name: goal for name, goal in goals.items() if not goal.address}, found, system)
    changed = _changed(links, former, goals, found, system)
    for name in _renewed(links, old, new, found):
        system.output("ip", "link", "del", "dev", name)
        changed = [*changed, *[name] * (name not in changed)]
    network_files.replace(old, new, system)
    _reload(found.manager, changed, system)

    def settled() -> bool:
        current = inspection.inspect(system)
        _take_back(goals, current, system)
        now, then = _live(goals, current, system)
        return now == then

    if not _until(settled):
        now, then = _live(goals, inspection.inspect(system), system)
        wrong = [f"{now[name].strip()} (wanted: {then[name].strip()})" for name in then if now.get(name) != then[name]]
        raise Refusal(
            f"llama_links: after {SETTLE_SECONDS} seconds {'; '.join(wrong)}. Check `{STATUS_COMMANDS.get(found.manager or '', 'ip address')}`, and "
            "whether the interface supports that MTU."
        )


def _changed(
    links: Iterable[LinkPlan],
    former: Iterable[LinkPlan],
    goals: Mapping[str, Goal],
    found: Inspection,
    system: System,
) -> list[str]:
    """Interfaces of links that are not as wanted; all of them where only a file is edited."""
    now, then = _live(goals, found, system)
    before, after = (
        {str(link.interface): (link.address, link.mtu or None) for link in entries} for entries in (former, links)
    )
    changed = [name for name in goals if before.get(name) != after.get(name) or now.get(name) != then.get(name)]
    return [name for name in changed or goals if name in after]


def _renewed(links: Iterable[LinkPlan], old: Mapping[str, str], new: Mapping[str, str], found: Inspection) -> list[str]:
    """The interface of WireGuard where it has other keys or peers than before, which networkd gives only to a new interface."""
    if all(old.get(path) == text for path, text in new.items() if network_files.PRIVATE_KEY.search(text)):
        return []
    return [str(link.interface) for link in links if link.kind == WIREGUARD and link.interface in found.interfaces]


def _reload(manager: str | None, interfaces: Iterable[str], system: System) -> None:
    """Lets the manager read its files and bring up these interfaces, with NetworkManager as far as the other end is connected."""
    if manager == NETWORK_MANAGER:
        system.run(["nmcli", "connection", "reload"])
        for name in interfaces:
            if not _is_unplugged(name, system):
                profile = network_files.profile_name(name, system.owner)
                system.run(["nmcli", "--wait", str(SETTLE_SECONDS), "connection", "up", profile, "ifname", name])
    if manager == NETWORKD:
        system.run(["networkctl", "reload"])
        for name in interfaces:
            if of_interface(name, system).exists():
                system.run(["networkctl", "reconfigure", name])


def _take_back(goals: Mapping[str, Goal], found: Inspection, system: System) -> None:
    """Takes away addresses and MTU that are the cluster's and not wanted any more, where the manager left them, and the routes that services made."""
    for name, goal in goals.items():
        interface = found.interfaces.get(name)
        for network in _networks(goal.known) - _networks([goal.address]) if goal.made else ():
            system.output("ip", "route", "del", "unreachable", network, "metric", "4096")
        if interface is None:
            continue
        if goal.made and not goal.address:
            system.output("ip", "link", "del", "dev", name)
            continue
        for address in set(interface.addresses) & goal.known - {goal.address}:
            system.output("ip", "address", "del", str(address), "dev", name)
        if goal.mtu == DEFAULT_MTU and interface.mtu not in (DEFAULT_MTU, None):
            system.output("ip", "link", "set", "dev", name, "mtu", str(DEFAULT_MTU))


def _networks(addresses: Iterable[str | None]) -> set[str]:
    return {str(ipaddress.IPv4Interface(address).network) for address in addresses if address}


def _until(done: Callable[[], bool]) -> bool:
    """Whether it came true within the time that an interface may take."""
    end = time.monotonic() + SETTLE_SECONDS
    while not done():
        if time.monotonic() > end:
            return False
        time.sleep(POLL_SECONDS)
    return True
