# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Files that configure interfaces: those that links need, those of this cluster on a host, and those of others.

A file says in a line of its own for which link it is, so that a link can be removed that is in no variable any more.
"""

from __future__ import annotations

import configparser
import hashlib
import os
import pwd
import re
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.files import replace_file, text_of
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.names import ROOT as NAME_ROOT
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.names import WIREGUARD, Names
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.links.inspection import (
    NETWORK_MANAGER,
    NETWORKD,
    Inspection,
    of_interface,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.system import System
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import LinkPlan

PATTERNS = {
    NETWORKD: "etc/systemd/network/70-{}-*.net*",
    NETWORK_MANAGER: "etc/NetworkManager/system-connections/{}-*.nmconnection",
}
"""Manager → files of a cluster, with the beginning of its names in place of {}."""
KEYFILE_FOLDERS = tuple(f"{top}/NetworkManager/system-connections" for top in ("etc", "run", "usr/lib"))
DEVICE, NETWORK = ".netdev", ".network"
"""Ending of networkd's file that makes an interface, and of the one that configures it."""
READER = "systemd-network"
"""Account of networkd, which has none of root's rights to read files."""
PRIVATE_KEY = re.compile(r"^(private-?key)=(.*)$", re.MULTILINE | re.IGNORECASE)
NO_KEY = "made-by-the-run"
"""In place of a key that a host does not have yet, which no manager accepts."""
MARK = re.compile(r"^# link (\S+) (\S+) (\d+|-)$", re.MULTILINE)
HEADER = "# Written by llamacpp.cluster, which overwrites what is changed here."


def planned(links: Iterable[LinkPlan], manager: str | None, owner: Names, key: str = NO_KEY) -> dict[str, str]:
    """Path → text of the files that configure these links.

    :param key: private one of WireGuard.
    """
    found: dict[str, str] = {}
    for link in links if manager else ():
        start = "/" + PATTERNS[str(manager)].format(owner.files).replace("*", str(link.interface), 1)
        if manager == NETWORK_MANAGER:
            found[start] = _network_manager(link, owner, key)
        else:
            start = start.removesuffix(".net*")
            found[start + NETWORK] = _networkd(link)
            found.update({start + DEVICE: _device(link, key)} if link.kind == WIREGUARD else {})
    return found


def shown(text: str) -> str:
    """A file without the private key in it: what stands in its place differs from key to key."""
    return PRIVATE_KEY.sub(
        lambda found: f"{found[1]}=(sha256 {hashlib.sha256(found[2].encode()).hexdigest()[:12]})", text
    )


def _start(link: LinkPlan) -> str:
    return f"{HEADER}\n# link {link.interface} {link.address} {link.mtu or '-'}\n"


def _networkd(link: LinkPlan) -> str:
    mtu = f"MTUBytes={link.mtu}\n" if link.mtu else ""
    return (
        f"{_start(link)}[Match]\nName={link.interface}\n\n[Link]\nRequiredForOnline=no\n{mtu}\n"
        f"[Network]\nAddress={link.address}\nDHCP=no\nLinkLocalAddressing=ipv6\nIPv6AcceptRA=no\nConfigureWithoutCarrier=yes\n"
    )


def _device(link: LinkPlan, key: str) -> str:
    peers = (
        f"\n[WireGuardPeer]\n# {peer.host}\nPublicKey={peer.public_key or NO_KEY}\nAllowedIPs={peer.address}/32\nEndpoint={peer.endpoint}\n"
        for peer in link.peers or ()
    )
    return f"{_start(link)}[NetDev]\nName={link.interface}\nKind=wireguard\n\n[WireGuard]\nPrivateKey={key}\nListenPort={link.port}\n{''.join(peers)}"


def _network_manager(link: LinkPlan, owner: Names, key: str) -> str:
    name = profile_name(str(link.interface), owner)
    kind = "wireguard" if link.kind == WIREGUARD else "ethernet"
    mtu = f"mtu={link.mtu}\n" if link.mtu else ""
    device = f"private-key={key}\nlisten-port={link.port}\n" if link.kind == WIREGUARD else ""
    peers = (
        f"\n[wireguard-peer.{peer.public_key or NO_KEY}]\nendpoint={peer.endpoint}\nallowed-ips={peer.address}/32;\n"
        for peer in link.peers or ()
    )
    return (
        f"{_start(link)}[connection]\nid={name}\nuuid={uuid.uuid5(uuid.NAMESPACE_DNS, name + '.llamacpp.cluster')}\n"
        f"type={kind}\ninterface-name={link.interface}\nautoconnect-priority=100\n\n[{kind}]\n{device}{mtu}{''.join(peers)}\n"
        f"[ipv4]\nmethod=manual\naddress1={link.address}\nnever-default=true\n\n[ipv6]\nmethod=link-local\nnever-default=true\n"
    )


def profile_name(interface: str, owner: Names) -> str:
    """Name of the cluster's profile in NetworkManager."""
    return f"{owner.files}-{interface}"


def mode(path: str) -> int:
    return 0o644 if path.endswith(NETWORK) else 0o600


def installed(system: System) -> dict[str, str]:
    """Path → text of the cluster's files on this host, whichever manager they are for."""
    found = _matching(system.root, system.owner.files)
    return {path: text for path, text in found.items() if text.startswith(HEADER)}


def foreign_files(system: System) -> list[str]:
    """Files that others have under the cluster's names."""
    return [path for path in _matching(system.root, system.owner.files) if path not in installed(system)]


def _matching(root: Path, names: str) -> dict[str, str]:
    patterns = [pattern.format(names) for pattern in PATTERNS.values()]
    paths = [path for pattern in patterns for path in sorted(root.glob(pattern))]
    return {f"/{path.relative_to(root)}": text_of(path) for path in paths}


def links_of(files: Mapping[str, str]) -> list[LinkPlan]:
    """The links for which files of clusters are; of two files of one link the one that makes the interface comes last."""
    return [
        LinkPlan(interface, address, int(mtu) if mtu != "-" else None, peer=None, manage=True, kind=kind)
        for _path, text in sorted(files.items(), reverse=True)
        for kind in [WIREGUARD if PRIVATE_KEY.search(text) else None]
        for interface, address, mtu in MARK.findall(text)
    ]


def replace(present: Iterable[str], wanted: Mapping[str, str], system: System) -> None:
    """Removes the files that are not wanted and writes the others."""
    for path in set(present) - set(wanted):
        system.path(path).unlink(missing_ok=True)
    for path, text in wanted.items():
        target = system.path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        replace_file(target, text, mode(path), pwd.getpwnam(READER).pw_uid if path.endswith(DEVICE) else None)


# --------------------------------------------------------------------------------------------------------------- others


def foreign(link: LinkPlan, inspection: Inspection, system: System) -> str | None:
    """A file of somebody else that configures the interface of a link in another way."""
    taken = set(foreign_files(system)).intersection(planned([link], inspection.manager, system.owner))
    found = next(iter(taken), None) or _of_other_cluster(link, system) or _of_ifupdown(link, system.root)
    if not found and inspection.manager == NETWORKD:
        found = _of_networkd(link, system)
    if not found and inspection.manager == NETWORK_MANAGER:
        found = _of_network_manager(link, inspection.interfaces[str(link.interface)].mac, system)
    return found


def _of_other_cluster(link: LinkPlan, system: System) -> str | None:
    others = {
        path: text for path, text in _matching(system.root, NAME_ROOT + "*").items() if path not in installed(system)
    }
    matches = (
        path for path, text in others.items() if link.interface in [each.interface for each in links_of({path: text})]
    )
    return next(matches, None)


def _of_ifupdown(link: LinkPlan, root: Path) -> str | None:
    paths = [root / "etc/network/interfaces", *sorted((root / "etc/network/interfaces.d").glob("*"))]
    pattern = re.compile(rf"^\s*iface\s+{re.escape(str(link.interface))}(:\S*)?\s", re.MULTILINE)
    return next((f"/{path.relative_to(root)}" for path in paths if pattern.search(text_of(path))), None)


def _of_networkd(link: LinkPlan, system: System) -> str | None:
    """The file by which networkd configures the interface now, if it would win over the cluster's or gives another static address."""
    index = text_of(of_interface(str(link.interface), system) / "ifindex").strip()
    current = re.search(r"^NETWORK_FILE=(.+)$", system.text(f"run/systemd/netif/links/{index or '-'}"), re.MULTILINE)
    if not current or current.group(1) in installed(system):
        return None
    file = current.group(1)
    statics = re.findall(r"^\s*Address\s*=\s*(\S+)", system.text(file), re.MULTILINE)
    wins = os.path.basename(file) <= f"70-{system.owner.files}-{link.interface}.network"
    return file if wins or _gives_another(statics, link) else None


def _gives_another(addresses: Sequence[str], link: LinkPlan) -> bool:
    return any(address != link.address for address in addresses if ":" not in address)


def _of_network_manager(link: LinkPlan, mac: str, system: System) -> str | None:
    """A profile of NetworkManager that gives the interface another static address."""
    for folder in KEYFILE_FOLDERS:
        for path in sorted((system.root / folder).glob("*.nmconnection")):
            profile = _keyfile(path)
            named = profile.get("connection", {}).get("interface-name") == link.interface
            held = profile.get("ethernet", profile.get("802-3-ethernet", {})).get("mac-address", "").lower()
            ipv4 = profile.get("ipv4", {}).items()
            addresses = [value.split(",")[0] for key, value in ipv4 if re.fullmatch(r"address(es)?\d*", key)]
            is_own = path.stem == profile_name(str(link.interface), system.owner)
            if not is_own and (named or (held and held == mac.lower())) and _gives_another(addresses, link):
                return f"/{path.relative_to(system.root)}"
    return None


def _keyfile(path: Path) -> dict[str, dict[str, str]]:
    parser = configparser.RawConfigParser(delimiters=("=",), strict=False)
    try:
        parser.read_string(text_of(path))
    except configparser.Error:
        return {}
    return {section: dict(parser[section]) for section in parser.sections()}
