# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Direct links between hosts: how they are, how they should be, and how an interface gets its address.

A link is ``{"interface": "eth1", "address": "10.99.0.12/24", "mtu": 9000, "peer": "head", "manage": True}``; ``mtu`` (bytes),
``peer``, ``manage`` and ``thunderbolt`` may be absent. Only interfaces of links with ``manage`` are configured. Files of ours are known by their names.
"""

from __future__ import annotations

import configparser
import contextlib
import ipaddress
import json
import os
import re
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import commands, reading
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.files import replace_file
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.names import DEFAULT, MTU, Names
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.names import ROOT as ANY

ROOT = Path("/")
COMMAND_SECONDS = 30
SETTLE_SECONDS = 15
"""How long an interface may take until it has what its configuration says."""

CONNECT_SECONDS = 5
"""How long iperf3 on the other host may take until it listens."""

DEFAULT_MTU = 1500
PREFIX_RANGE = range(8, 32)
ETHERNET = "1"
"""What the file ``type`` of an Ethernet interface holds in sysfs (ARPHRD_ETHER)."""

OURS = {
    "networkd": "etc/systemd/network/70-{}-*.network",
    "NetworkManager": "etc/NetworkManager/system-connections/{}-*.nmconnection",
}
"""Files of a cluster, with the beginning of its names in place of {}."""
KEYFILE_FOLDERS = tuple(f"{top}/NetworkManager/system-connections" for top in ("etc", "run", "usr/lib"))
MARK = re.compile(r"^# link (\S+) (\S+) (\d+|-)$", re.MULTILINE)
"""A line in each of our files, so that a link can be removed that is in no variable any more."""

THUNDERBOLT = r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|\d+-[0-9a-f]+"
"""UUID of a device, or its route as sysfs names it."""

Run = Callable[[list[str]], str]


class LinkError(ValueError):
    """One sentence for each reason why the links cannot be configured."""


def run(argv: list[str], seconds: float = COMMAND_SECONDS, account: str | None = None) -> str:
    """What a command prints; LinkError where it is not installed or fails.

    :param account: as which root runs it.
    """
    if not installed(argv[0]):
        raise LinkError(f"The program {argv[0]} is not installed on this host.")
    try:
        return commands.run(argv, seconds, account=account)
    except commands.CommandError as error:
        raise LinkError(f"{' '.join(argv)} failed: {error.reason}") from error


def installed(program: str) -> bool:
    return commands.find(program) is not None


def _output(runner: Run, argv: list[str]) -> str:
    try:
        return runner(argv)
    except LinkError:
        return ""


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _read(path)
    return int(text) if re.fullmatch(r"\d+", text) else None


# -------------------------------------------------------------------------------------------------------------- facts


def manager(runner: Run = run) -> str | None:
    """What configures this host's interfaces: ``NetworkManager``, ``networkd``, or None. netplan writes files for these two and configures nothing."""
    for service, name in (("NetworkManager", "NetworkManager"), ("systemd-networkd", "networkd")):
        if _output(runner, ["systemctl", "is-active", service]).strip() == "active":
            return name
    return None


def _addresses(runner: Run) -> dict[str, list[str]]:
    """Interface → its IPv4 and IPv6 addresses with prefix length; empty where ``ip`` fails."""
    try:
        entries = json.loads(runner(["ip", "-json", "address"]))
    except (LinkError, ValueError):
        return {}
    return {
        entry["ifname"]: [f"{address['local']}/{address['prefixlen']}" for address in entry.get("addr_info", [])]
        for entry in entries
        if "ifname" in entry
    }


def interfaces(addresses: dict[str, list[str]], root: Path = ROOT) -> dict[str, dict]:
    """Interfaces that could be a link. Ports of containers come and go and are left out, as is loopback."""
    result = {}
    for folder in sorted((root / "sys/class/net").glob("*")):
        name, device = folder.name, folder / "device"
        if name == "lo" or not folder.is_dir() or ((folder / "master").exists() and not device.exists()):
            continue
        driver = device / "driver"
        result[name] = {
            "addresses": sorted(address for address in addresses.get(name, []) if ":" not in address),
            "mtu": _number(folder / "mtu"),
            "speed_mbit": _number(folder / "speed"),
            "driver": os.path.basename(os.path.realpath(driver)) if driver.exists() else None,
            "mac": _read(folder / "address"),
        }
    return result


def ssh_connection(root: Path = ROOT, environment: dict[str, str] | None = None) -> list[str]:
    """Client and server address of the SSH session to which this process belongs, or nothing. sudo takes the variable away, so the
    environments of the processes above this one are searched too."""
    own = os.environ if environment is None else environment
    process, variable = os.getpid(), own.get("SSH_CONNECTION", "")
    while not variable and process > 1:
        folder = root / "proc" / str(process)
        for entry in _read(folder / "environ").split("\0"):
            if entry.startswith("SSH_CONNECTION="):
                variable = entry.split("=", 1)[1]
        parent = re.match(r"\d+ \(.*\) \S (\d+)", _read(folder / "stat"), re.DOTALL)
        process = int(parent.group(1)) if parent else 0
    fields = variable.split()
    return [fields[0], fields[2]] if len(fields) == 4 else []


def management(addresses: dict[str, list[str]], ssh: list[str], root: Path = ROOT, runner: Run = run) -> list[str]:
    """Interfaces that must not be touched: those of the SSH session and of the default routes, and those below them (the ports of a
    bridge or bond)."""
    names = set()
    for line in _read(root / "proc/net/route").splitlines()[1:]:
        fields = line.split()
        if len(fields) > 7 and fields[1] == fields[7] == "00000000":
            names.add(fields[0])
    for line in _read(root / "proc/net/ipv6_route").splitlines():
        fields = line.split()
        if len(fields) > 9 and fields[0] == "0" * 32 and fields[1] == "00" and fields[9] != "lo":
            names.add(fields[9])
    for text in ssh:
        address, _separator, zone = text.partition("%")
        names.add(zone)
        names.update(name for name, held in addresses.items() if address in [entry.split("/")[0] for entry in held])
    client = ssh[0].partition("%")[0] if ssh else ""
    if _is_address(client):
        with contextlib.suppress(LinkError, ValueError, KeyError):
            names.update(route["dev"] for route in json.loads(runner(["ip", "-json", "route", "get", client])))
    queue = list(names)
    while queue:
        for lower in (root / "sys/class/net" / queue.pop()).glob("lower_*"):
            if lower.name[len("lower_") :] not in names:
                names.add(lower.name[len("lower_") :])
                queue.append(lower.name[len("lower_") :])
    return sorted(names - {"", "lo"})


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def thunderbolt(root: Path = ROOT) -> list[dict]:
    """Devices and hosts that are connected by Thunderbolt or USB4. ``authorized`` is None for another host: the kernel asks for none."""
    devices = []
    for folder in sorted((root / "sys/bus/thunderbolt/devices").glob("*-*")):
        if (folder / "unique_id").exists():
            devices.append(
                {
                    "name": folder.name,
                    "device": _read(folder / "device_name"),
                    "uuid": _read(folder / "unique_id"),
                    "authorized": _number(folder / "authorized"),
                    **{file: _read(folder / file) or None for file in ("tx_speed", "rx_speed")},
                    **{file: _number(folder / file) for file in ("tx_lanes", "rx_lanes")},
                }
            )
    return devices


def facts(root: Path = ROOT, runner: Run = run) -> dict:
    """What this host has for links. Stable: no counters.

    :returns: ``manager`` (``NetworkManager``, ``networkd`` or None), ``interfaces`` (name → ``addresses`` with prefix
        length, ``mtu`` in bytes, ``speed_mbit`` and ``driver`` or None, ``mac``), ``management`` (names of interfaces that must
        not be touched), ``thunderbolt`` (connected devices).
    """
    addresses = _addresses(runner)
    return {
        "manager": manager(runner),
        "interfaces": interfaces(addresses, root),
        "management": management(addresses, ssh_connection(root), root, runner),
        "thunderbolt": thunderbolt(root),
    }


# ------------------------------------------------------------------------------------------------------------- wanted


def managed(links: list[dict]) -> list[dict]:
    return [link for link in links if link.get("manage")]


def _mark(link: dict) -> str:
    return f"# link {link['interface']} {link['address']} {link.get('mtu') or '-'}"


def _networkd(link: dict) -> str:
    mtu = f"MTUBytes={link['mtu']}\n" if link.get("mtu") else ""
    return (
        f"# Written by llamacpp.cluster, which overwrites what is changed here.\n{_mark(link)}\n"
        f"[Match]\nName={link['interface']}\n\n[Link]\nRequiredForOnline=no\n{mtu}\n"
        f"[Network]\nAddress={link['address']}\nDHCP=no\nLinkLocalAddressing=ipv6\nIPv6AcceptRA=no\nConfigureWithoutCarrier=yes\n"
    )


def _network_manager(link: dict, owner: Names) -> str:
    name = connection(link["interface"], owner)
    mtu = f"mtu={link['mtu']}\n" if link.get("mtu") else ""
    return (
        f"# Written by llamacpp.cluster, which overwrites what is changed here.\n{_mark(link)}\n"
        f"[connection]\nid={name}\nuuid={uuid.uuid5(uuid.NAMESPACE_DNS, name + '.llamacpp.cluster')}\n"
        f"type=ethernet\ninterface-name={link['interface']}\nautoconnect-priority=100\n\n[ethernet]\n{mtu}\n"
        f"[ipv4]\nmethod=manual\naddress1={link['address']}\nnever-default=true\n\n[ipv6]\nmethod=link-local\nnever-default=true\n"
    )


def connection(interface: str, owner: Names) -> str:
    """Name of our profile in NetworkManager."""
    return f"{owner.files}-{interface}"


def wanted(links: list[dict], manager: str | None, owner: Names = DEFAULT) -> dict[str, str]:
    """Path → text of the files that configure the managed links."""
    own = managed(links)
    if not own or manager is None:
        return {}
    place = "/" + OURS[manager].format(owner.files)
    return {
        place.replace("*", link["interface"]): _networkd(link)
        if manager == "networkd"
        else _network_manager(link, owner)
        for link in own
    }


def ours(root: Path = ROOT, owner: Names = DEFAULT) -> dict[str, str]:
    """Path → text of our files on this host, whichever manager they are for."""
    return {
        "/" + str(path.relative_to(root)): path.read_text(errors="replace")
        for pattern in OURS.values()
        for path in sorted(root.glob(pattern.format(owner.files)))
    }


def _of_other_cluster(link: dict, root: Path, owner: Names) -> str | None:
    """The file by which another cluster configures the interface."""
    mine = ours(root, owner)
    for pattern in OURS.values():
        for path in sorted(root.glob(pattern.format(ANY + "*"))):
            file = "/" + str(path.relative_to(root))
            if file not in mine and link["interface"] in [entry["interface"] for entry in _marked({file: _read(path)})]:
                return file
    return None


def _marked(files: dict[str, str]) -> list[dict]:
    """The links that files of ours stand for."""
    return [
        {"interface": interface, "address": address, "mtu": int(mtu) if mtu != "-" else None}
        for text in files.values()
        for interface, address, mtu in MARK.findall(text)
    ]


def _file_mode(path: str) -> int:
    return 0o644 if path.endswith(".network") else 0o600


# ----------------------------------------------------------------------------------------------------------- problems


def _syntax(links: list[dict]) -> list[str]:
    """Values that are not what they should be."""
    sentences = []
    for link in links:
        name, address, mtu = link.get("interface"), link.get("address"), link.get("mtu")
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,14}", name):
            sentences.append(f"llama_links: {name!r} is not an interface name: give it as `ip link` shows it.")
            continue
        try:
            parsed = ipaddress.IPv4Interface(address) if re.fullmatch(r"[0-9.]+/\d+", str(address)) else None
        except ValueError:
            parsed = None
        if parsed is None or str(parsed) != address or parsed.network.prefixlen not in PREFIX_RANGE:
            sentences.append(
                f"llama_links: {address!r} of {name} is not an IPv4 address with a prefix length from 8 to 31: give it like 10.99.0.12/24."
            )
        elif parsed.ip.is_multicast or parsed.ip.is_loopback or parsed.ip.is_unspecified or parsed.ip.is_reserved:
            sentences.append(
                f"llama_links: {address} of {name} is not the address of a host: give it like 10.99.0.12/24."
            )
        elif parsed.network.prefixlen < 31 and parsed.ip in (parsed.network[0], parsed.network.broadcast_address):
            sentences.append(
                f"llama_links: {address} of {name} is the address of the network or its broadcast address: give the address of a host."
            )
        if mtu is not None and (isinstance(mtu, bool) or not isinstance(mtu, int) or mtu not in MTU):
            sentences.append(
                f"llama_links: mtu {mtu!r} of {name} is not a number from 1280 to 65535: correct it or leave it out."
            )
        device = link.get("thunderbolt")
        if device is not None and not re.fullmatch(THUNDERBOLT, str(device)):
            sentences.append(
                f"llama_links: thunderbolt {device!r} of {name} is neither the UUID nor the route of a device: give it as `boltctl list` or "
                "/sys/bus/thunderbolt/devices shows it."
            )
    return sentences


def _overlaps(links: list[dict], host: dict, ssh: list[str]) -> list[str]:
    """Networks of links that would draw traffic away from other interfaces."""
    problems: list[str] = []
    seen: list[tuple[str, str]] = []
    for link in links:
        network = ipaddress.IPv4Interface(link["address"]).network
        others = [
            (name, address)
            for name, interface in host["interfaces"].items()
            for address in interface["addresses"]
            if name != link["interface"] and name not in [other["interface"] for other in links]
        ]
        for name, address in [*others, *seen]:
            if network.overlaps(ipaddress.IPv4Interface(address).network):
                problems.append(
                    f"llama_links: {link['address']} of {link['interface']} is in the same network as {address} of {name}: "
                    "give each link a network of its own."
                )
        for client in ssh[:1]:
            if _is_address(client) and ipaddress.ip_address(client) in network:
                problems.append(
                    f"llama_links: the network of {link['address']} of {link['interface']} contains {client}, from which Ansible is "
                    "connected: give the link another network."
                )
        seen.append((link["interface"], link["address"]))
    return problems


def _keyfile(path: Path) -> dict[str, dict[str, str]]:
    parser = configparser.RawConfigParser(delimiters=("=",), strict=False)
    try:
        parser.read_string(path.read_text(errors="replace"))
    except (OSError, configparser.Error):
        return {}
    return {section: dict(parser[section]) for section in parser.sections()}


def _foreign_networkd(link: dict, root: Path, owner: Names) -> str | None:
    """The file by which networkd configures the interface now, if it would win over ours or gives another static address."""
    name = link["interface"]
    index = _read(root / "sys/class/net" / name / "ifindex")
    current = re.search(r"^NETWORK_FILE=(.+)$", _read(root / "run/systemd/netif/links" / (index or "-")), re.MULTILINE)
    if not current:
        return None
    file = current.group(1)
    if file in ours(root, owner):
        return None
    own = f"70-{owner.files}-{name}.network"
    statics = re.findall(r"^\s*Address\s*=\s*(\S+)", _read(root / file.lstrip("/")), re.MULTILINE)
    wins = os.path.basename(file) <= own
    return file if wins or any(address != link["address"] for address in statics if ":" not in address) else None


def _foreign_keyfile(link: dict, mac: str, root: Path, owner: Names) -> str | None:
    """A profile of NetworkManager that gives the interface another static address."""
    for folder in KEYFILE_FOLDERS:
        for path in sorted((root / folder).glob("*.nmconnection")):
            if path.name == f"{connection(link['interface'], owner)}.nmconnection":
                continue
            profile = _keyfile(path)
            named = profile.get("connection", {}).get("interface-name") == link["interface"]
            held = profile.get("ethernet", profile.get("802-3-ethernet", {})).get("mac-address", "").lower()
            addresses = [
                value.split(",")[0]
                for key, value in profile.get("ipv4", {}).items()
                if re.fullmatch(r"address(es)?\d*", key)
            ]
            if (named or (held and held == mac.lower())) and any(address != link["address"] for address in addresses):
                return "/" + str(path.relative_to(root))
    return None


def _foreign_ifupdown(link: dict, root: Path) -> str | None:
    paths = [root / "etc/network/interfaces", *sorted((root / "etc/network/interfaces.d").glob("*"))]
    pattern = re.compile(rf"^\s*iface\s+{re.escape(link['interface'])}(:\S*)?\s", re.MULTILINE)
    return next(("/" + str(path.relative_to(root)) for path in paths if pattern.search(_read(path) + "\n")), None)


def _foreign(link: dict, host: dict, root: Path, owner: Names) -> str | None:
    """The file of somebody else that already configures the interface, or None."""
    name, kind = link["interface"], host["manager"]
    file = _of_other_cluster(link, root, owner) or _foreign_ifupdown(link, root)
    if not file and kind == "networkd":
        file = _foreign_networkd(link, root, owner)
    if not file and kind == "NetworkManager":
        file = _foreign_keyfile(link, host["interfaces"][name]["mac"], root, owner)
    return file


def _problem(link: dict, host: dict, root: Path, runner: Run, owner: Names) -> str | None:
    """Why the interface of a link must not be configured, in one sentence."""
    name, instead = link["interface"], "or set manage: false for this link"
    folder = root / "sys/class/net" / name
    if name in host["management"]:
        return (
            f"llama_links: {name} carries the connection that Ansible uses or this host's default route, and is not changed: "
            f"name the interface of the direct cable, {instead}."
        )
    if name not in host["interfaces"]:
        if _unauthorised([link], host):
            return None
        present = ", ".join(host["interfaces"]) or "none"
        waiting = " ".join(_unnamed([link], host["thunderbolt"]))
        return f"llama_links: this host has no interface {name} (it has {present}): correct the name, or plug in its cable. {waiting}".strip()
    if _read(folder / "type") != ETHERNET or any(
        (folder / kind).exists() for kind in ("bridge", "bonding", "wireless")
    ):
        return f"llama_links: {name} is not an Ethernet or Thunderbolt interface: name the one of the direct cable, {instead}."
    if (folder / "master").exists():
        return f"llama_links: {name} is part of {(folder / 'master').resolve().name}: remove it from there, {instead}."
    foreign = _foreign(link, host, root, owner)
    if foreign:
        return f"llama_links: {name} is already configured by {foreign}: remove {name} from that file, {instead}."
    before = [entry["address"] for entry in _marked(ours(root, owner)) if entry["interface"] == name]
    strangers = [
        address
        for address in host["interfaces"][name]["addresses"]
        if address != link["address"] and not address.startswith("169.254.")
    ]
    if strangers and not before:
        return f"llama_links: {name} is already in use with address {strangers[0]}: remove that address, {instead}."
    if host["manager"] == "NetworkManager" and "unmanaged" in _output(
        runner, ["nmcli", "-g", "GENERAL.STATE", "device", "show", name]
    ):
        return f"llama_links: NetworkManager does not manage {name}: remove it from unmanaged-devices in its configuration, {instead}."
    return None


def problems(links: list[dict], facts: dict, root: Path = ROOT, runner: Run = run, owner: Names = DEFAULT) -> list[str]:
    """Why the links must not be configured, one sentence each; empty when nothing speaks against it."""
    sentences = _syntax(links)
    own = managed(links)
    names = [link.get("interface") for link in own]
    sentences += [
        f"llama_links: {name} is named by two links, but an interface has one address: remove one of them."
        for name in sorted({name for name in names if names.count(name) > 1}, key=str)
    ]
    if sentences:
        return sentences
    if (own or ours(root, owner)) and os.geteuid() != 0:
        return ["llama_links: configuring interfaces needs root: run with become, or set manage: false."]
    sentences = [
        f"llama_links: {link['interface']} carries the connection that Ansible uses, and its address {link['address']} would be "
        "removed: connect through another network."
        for link in _marked(ours(root, owner))
        if link["interface"] not in names and link["interface"] in facts["management"]
    ]
    if sentences or not own:
        return sentences
    if facts["manager"] is None:
        return [
            f"llama_links: {', '.join(map(str, names))} cannot be configured, since neither NetworkManager nor systemd-networkd runs on this "
            "host: start one of them, or set manage: false."
        ]
    if not _addresses(runner):
        return ["llama_links: `ip -json address` prints nothing on this host: install iproute2, or set manage: false."]
    sentences = [sentence for link in own for sentence in [_problem(link, facts, root, runner, owner)] if sentence]
    return sentences or _overlaps(own, facts, ssh_connection(root))


# -------------------------------------------------------------------------------------------------------------- state


def _named(links: list[dict]) -> set[str]:
    return {link["thunderbolt"] for link in managed(links) if link.get("thunderbolt")}


def _unauthorised(links: list[dict], host: dict) -> list[dict]:
    """Thunderbolt devices that wait to be authorised, and that a managed link names by UUID or route."""
    named = _named(links)
    return [
        device
        for device in host["thunderbolt"]
        if device["authorized"] == 0 and named & {device["uuid"], device["name"]}
    ]


def _unnamed(links: list[dict], devices: list[dict]) -> list[str]:
    """A sentence for each Thunderbolt device that waits to be authorised and that no link names, where a managed link goes through Thunderbolt."""
    if not any(re.fullmatch(r"thunderbolt\d+", str(link["interface"])) for link in managed(links)):
        return []
    named = _named(links)
    return [
        f"The Thunderbolt device {device['name']} ({device['device']!r}) waits to be authorised, and no link names it: if a link goes through it, add "
        f"«thunderbolt: {device['uuid']}» to that link in llama_links."
        for device in devices
        if device["authorized"] == 0 and not named & {device["uuid"], device["name"]}
    ]


def notes(links: list[dict], root: Path = ROOT) -> list[str]:
    """What an operator may want to change, a sentence each."""
    return _unnamed(links, thunderbolt(root)) if managed(links) else []


def _waits(interface: str, host: dict, root: Path) -> bool:
    """Whether NetworkManager has to wait for the other end; networkd gives the address without it."""
    return host["manager"] == "NetworkManager" and _read(root / "sys/class/net" / interface / "carrier") == "0"


def _line(interface: str, addresses: list[str], mtu: int | None) -> str:
    return f"{interface}: {', '.join(addresses) or 'no address'}" + (f", mtu {mtu}" if mtu else "") + "\n"


def _goals(links: list[dict], old: dict[str, str]) -> dict[str, dict]:
    """Interface → ``address`` (None: none of ours), ``mtu`` (None: any) and ``known``, the addresses that are or were ours."""
    goals: dict[str, dict] = {}
    for link in _marked(old):
        goal = goals.setdefault(link["interface"], {"address": None, "mtu": None, "known": set()})
        goal["known"].add(link["address"])
        if link["mtu"]:
            goal["mtu"] = DEFAULT_MTU
    for link in managed(links):
        goal = goals.setdefault(link["interface"], {"mtu": None, "known": set()})
        goal["known"].add(link["address"])
        goal.update(address=link["address"], mtu=link.get("mtu") or goal["mtu"])
    return goals


def _live(goals: dict[str, dict], host: dict, root: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Interface → a line on how it stands, and one on how it is to stand."""
    now, then = {}, {}
    for name, goal in goals.items():
        interface = host["interfaces"].get(name)
        if interface is None and goal["address"] is None:
            continue
        then[name] = _line(name, [goal["address"]] if goal["address"] else [], goal["mtu"])
        if interface is None:
            now[name] = f"{name}: missing\n"
        elif goal["address"] and _waits(name, host, root):
            now[name] = then[name] = f"{name}: {goal['address']} as soon as the other end is connected\n"
        else:
            held = [address for address in interface["addresses"] if address in goal["known"]]
            now[name] = _line(name, held, interface["mtu"] if goal["mtu"] else None)
    return now, then


def _text(files: dict[str, str], modes: dict[str, int], live: dict[str, str], devices: list[dict], flag: int) -> str:
    return "".join(
        [
            *(f"thunderbolt {device['name']}: authorized {flag}\n" for device in devices),
            *(live[name] for name in sorted(live)),
            *(f"--- {path} {modes[path]:04o}\n{files[path]}" for path in sorted(files)),
        ]
    )


def states(links: list[dict], facts: dict, root: Path = ROOT, owner: Names = DEFAULT) -> tuple[str, str]:
    """How the links stand and how they are to stand, as text: interfaces, then our files."""
    old, new = ours(root, owner), wanted(links, facts["manager"], owner)
    now, then = _live(_goals(links, old), facts, root)
    waiting = _unauthorised(links, facts)
    modes = {path: (root / path.lstrip("/")).stat().st_mode & 0o777 for path in old}
    return _text(old, modes, now, waiting, 0), _text(new, {path: _file_mode(path) for path in new}, then, waiting, 1)


def differs(links: list[dict], facts: dict, root: Path = ROOT, owner: Names = DEFAULT) -> bool:
    """Whether files, addresses or MTU are not as wanted, or one of our files belongs to no link any more."""
    before, after = states(links, facts, root, owner)
    return before != after


# -------------------------------------------------------------------------------------------------------------- apply


def _authorise(devices: list[dict], named: set[str], root: Path, runner: Run) -> None:
    """For good by UUID alone: at a route may be another device tomorrow.

    :param named: UUIDs and routes that links name.
    """
    for device in devices:
        if device["uuid"] in named and installed("boltctl"):
            runner(["boltctl", "enroll", "--policy", "auto", device["uuid"]])
        else:
            (root / "sys/bus/thunderbolt/devices" / device["name"] / "authorized").write_text("1")


def _write_files(present: dict[str, str], planned: dict[str, str], root: Path) -> None:
    for path in set(present) - set(planned):
        (root / path.lstrip("/")).unlink(missing_ok=True)
    for path, text in planned.items():
        target = root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        replace_file(target, text, _file_mode(path))


def _reload_network_manager(interfaces: list[str], root: Path, runner: Run, owner: Names) -> None:
    """Lets NetworkManager read its files and bring up these interfaces, as far as the other end is connected."""
    runner(["nmcli", "connection", "reload"])
    for name in interfaces:
        if _read(root / "sys/class/net" / name / "carrier") != "0":
            runner(
                ["nmcli", "--wait", str(SETTLE_SECONDS), "connection", "up", connection(name, owner), "ifname", name]
            )


def _take_back(goals: dict[str, dict], host: dict, runner: Run) -> None:
    """Takes away addresses and MTU that are ours and not wanted any more, where the manager left them."""
    for name, goal in goals.items():
        interface = host["interfaces"].get(name, {"addresses": [], "mtu": None})
        for address in set(interface["addresses"]) & goal["known"] - {goal["address"]}:
            _output(runner, ["ip", "address", "del", address, "dev", name])
        if goal["mtu"] == DEFAULT_MTU and interface["mtu"] not in (DEFAULT_MTU, None):
            _output(runner, ["ip", "link", "set", "dev", name, "mtu", str(DEFAULT_MTU)])


def _until(done: Callable[[], bool]) -> bool:
    """Whether it came true within the time that an interface may take."""
    end = time.monotonic() + SETTLE_SECONDS
    while not done():
        if time.monotonic() > end:
            return False
        time.sleep(0.3)
    return True


def _configure(links: list[dict], host: dict, root: Path, runner: Run, owner: Names) -> None:
    kind, old = host["manager"], ours(root, owner)
    new, goals = wanted(links, kind, owner), _goals(links, old)
    now, then = _live(goals, host, root)
    before = {link["interface"]: link for link in _marked(old)}
    after = {link["interface"]: link for link in _marked(new)}
    changed = [name for name in goals if before.get(name) != after.get(name) or now.get(name) != then.get(name)]
    changed = changed or list(goals)
    # Only the file knows the address of a link that is not planned any more, so the address goes first.
    _take_back({name: goal for name, goal in goals.items() if not goal["address"]}, host, runner)
    _write_files(old, new, root)
    if kind == "NetworkManager":
        _reload_network_manager([name for name in changed if name in after], root, runner, owner)
    if kind == "networkd":
        runner(["networkctl", "reload"])
        for name in changed:
            if name in after:
                runner(["networkctl", "reconfigure", name])

    def settled() -> bool:
        current = facts(root, runner)
        _take_back(goals, current, runner)
        now, then = _live(goals, current, root)
        return now == then

    if not _until(settled):
        now, then = _live(goals, facts(root, runner), root)
        wrong = [f"{now[name].strip()} (wanted: {then[name].strip()})" for name in then if now.get(name) != then[name]]
        raise LinkError(
            f"llama_links: after {SETTLE_SECONDS} seconds {'; '.join(wrong)}. Check `{_look(kind)}`, and whether the interface "
            "supports that MTU."
        )


def _look(kind: str | None) -> str:
    return "nmcli device" if kind == "NetworkManager" else "networkctl status"


def apply(
    links: list[dict], check: bool, root: Path = ROOT, runner: Run = run, owner: Names = DEFAULT
) -> tuple[str, str]:
    """Gives the managed links their addresses and takes back what no link wants any more.

    :param check: change nothing.
    :returns: how the links stood and how they stand then, as text; the same twice if there was nothing to do.
    :raises LinkError: before any change when the links must not be configured, or when an interface does not get its settings.
    """
    host = facts(root, runner)
    _refuse(problems(links, host, root, runner, owner))
    before, after = states(links, host, root, owner)
    if check or before == after:
        return before, after
    waiting = _unauthorised(links, host)
    if waiting:
        _authorise(waiting, _named(links), root, runner)
        missing = [link["interface"] for link in managed(links) if link["interface"] not in host["interfaces"]]
        _until(lambda: all((root / "sys/class/net" / name).exists() for name in missing))
        host = facts(root, runner)
        _refuse(problems(links, host, root, runner, owner))
    _configure(links, host, root, runner, owner)
    return before, after


def _refuse(sentences: list[str]) -> None:
    if sentences:
        raise LinkError(" ".join(sentences))


# -------------------------------------------------------------------------------------------------------- measurement


def parse_measurement(iperf_json: str, ping_text: str) -> dict:
    """From ``iperf3 --client … --json`` and the text of ``ping``: ``mbit_per_second`` as received by the other end, and the mean
    ``round_trip_ms``; each None where it is missing."""
    try:
        bits = float(reading.parse(iperf_json)["end"]["sum_received"]["bits_per_second"])
    except (ValueError, KeyError, TypeError):
        bits = None
    mean = re.search(r"^(?:rtt|round-trip) [\w/]+ = [\d.]+/([\d.]+)/", ping_text, re.MULTILINE)
    return {
        "mbit_per_second": round(bits / 1e6) if bits else None,
        "round_trip_ms": float(mean.group(1)) if mean else None,
    }


LISTENING = {
    "IPAddressDeny": "any",
    "CapabilityBoundingSet": "",
    "NoNewPrivileges": "true",
    "PrivateDevices": "true",
    "PrivateTmp": "true",
    "ProtectHome": "true",
    "ProtectSystem": "strict",
}
"""Properties of the unit in which iperf3 listens."""


def listen(
    address: str,
    port: int,
    client: str,
    seconds: int,
    account: str | None,
    unit: bool,
    runner: Callable[..., str] = run,
) -> None:
    """Lets iperf3 listen until one measurement is made, on this address alone and not as root.

    :param client: numeric IPv4 address of the host that measures.
    :param seconds: after which iperf3 ends, whatever happens to this process.
    :param unit: whether systemd runs it, which lets in the client alone.
    """
    server = ["iperf3", "--server", "--one-off", "--bind", address, "--port", str(port)]
    if not unit:
        runner(server, seconds, account)
        return
    properties = {**LISTENING, "IPAddressAllow": client, "RuntimeMaxSec": seconds}
    words = [f"--property={name}={value}" for name, value in sorted(properties.items())]
    server[0] = commands.find("iperf3") or server[0]
    runner(["systemd-run", "--quiet", "--wait", "--collect", f"--uid={account}", *words, *server], seconds)


def measure(
    address: str, port: int | None, seconds: int, lacking: list[str], runner: Run = run, sender: Run | None = None
) -> dict:
    """Throughput and round trip from this host to another one.

    :param address: numeric IPv4 address of the other host.
    :param port: where iperf3 listens there, or None to measure the round trip only.
    :param lacking: hosts without iperf3, which is why there is no port.
    :param sender: runs iperf3, where that is not the runner.
    :returns: what ``parse_measurement`` returns, and ``detail``: what was not measured and why, or nothing.
    """
    ipaddress.IPv4Address(address)
    if port is not None and port not in range(1, 65536):
        raise LinkError(f"{port} is not a TCP port: give one from 1 to 65535.")
    if seconds not in range(1, 21):
        raise LinkError(f"{seconds} seconds is not a valid duration: give 1 to 20.")
    sent = pinged = ""
    missing = [program for program in ("iperf3", "ping") if not installed(program) and (port or program == "ping")]
    details = [f"{program} is not installed on {os.uname().nodename}" for program in missing]
    if port and "iperf3" not in missing:
        try:
            sent = _send(address, port, seconds, sender or runner)
        except LinkError as error:
            details.append(str(error))
    if "ping" not in missing:
        try:
            pinged = runner(["ping", "-n", "-c", "10", "-i", "0.2", "-W", "1", address])
        except LinkError:
            details.append(f"{address} does not answer ping")
    detail = f"iperf3 is not installed on {' and '.join(lacking)}" if lacking else ""
    if details:
        detail = "not measured: " + ", ".join(details)
    return {**parse_measurement(sent, pinged), "detail": detail}


def _send(address: str, port: int, seconds: int, runner: Run) -> str:
    """What iperf3 says; the other end may need a moment until it listens."""
    argv = ["iperf3", "--client", address, "--port", str(port), "--time", str(seconds), "--json"]
    end = time.monotonic() + CONNECT_SECONDS
    while True:
        try:
            return runner([*argv, "--connect-timeout", "3000"])
        except LinkError as error:
            reason = re.search(r'"error":\s*"([^"]*)"', str(error))
            if "refused" not in str(error) or time.monotonic() > end:
                said = reason.group(1) if reason else str(error)
                raise LinkError(f"iperf3 to {address}:{port} says: {said}") from error
        time.sleep(0.5)
