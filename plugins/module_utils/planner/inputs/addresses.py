# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""At which addresses hosts reach each other: those of the inventory, and those that ``llama_transport: wireguard`` puts above them."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names, service_managers
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.names import WIREGUARD
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import LinkPeer, LinkPlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import Cluster, Host

FIRST_PORT, PORTS = 51852, 1000
"""UDP port of the default cluster's interface, not WireGuard's usual one, and among how many that follow others have theirs."""
NETWORKS = range(100, 228)
"""Second number of a cluster's network 10.N.0.0/16. The default cluster has the last one."""
OVERHEAD, COMMON_MTU = 80, 1500
"""Bytes that WireGuard adds to a packet at most, with IPv6 outside, and what an interface carries where nobody says it."""


def _bits_in_common(address: str, other: str) -> int:
    """With how many bits both addresses begin; -1 where one is the name of a host."""
    try:
        first, second = (ipaddress.IPv4Address(text.split("/", maxsplit=1)[0]) for text in (address, other))
    except ValueError:
        return -1
    return 32 - (int(first) ^ int(second)).bit_length()


def address_of(host: Host, peer: str, towards: str | None = None) -> str:
    """The numeric address of the host on the network that joins it with its peer: that of WireGuard, or of the link whose ``peer`` that is, or of
    the first link without a peer, or where the host is reached.

    :param towards: address of the peer, where it is known: of the links without a peer and where the host is reached, the address that begins most like it.
    """
    joining = [index for index, link in enumerate(host.links) if link.peer == peer]
    others = [index for index, link in enumerate(host.links) if not link.peer]
    places = [(f"llama_links[{index}].address", host.links[index].address) for index in [*joining, *others]]
    places += [("ansible_host", host.address)]
    variable, address = places[0]
    secret = wireguard_of(host)
    if secret and (not towards or ipaddress.IPv4Address(towards) in ipaddress.IPv4Interface(secret.address).network):
        variable, address = "llama_links", secret.address
    elif towards and not joining:
        variable, address = max(places, key=lambda place: _bits_in_common(place[1], towards))
    try:
        parsed = ipaddress.IPv4Address(address.split("/", maxsplit=1)[0])
    except ValueError:
        raise Refusal(
            f"{variable} of {host.name} is {address!r}: workers and the head need a numeric IPv4 address; "
            "set it in ansible_host, or in llama_links the address in the network that joins them; a host that answers by SSH says it itself"
        ) from None
    if parsed.is_loopback:
        raise Refusal(
            f"{variable} of {host.name} is {address!r}, which only {host.name} itself can reach: use its address in the network that joins it "
            f"with {peer}, in ansible_host or llama_links"
        )
    if parsed.is_multicast or parsed.is_reserved:
        raise Refusal(
            f"{variable} of {host.name} is {address!r}, an address of many hosts: use that of {host.name} itself"
        )
    if parsed.is_unspecified:
        raise Refusal(
            f"{variable} of {host.name} is {address!r}, which opens the worker to every network: use the address of one interface"
        )
    return str(parsed)


# ------------------------------------------------------------------------------------------------------------- wireguard


def wireguard_of(host: Host) -> LinkPlan | None:
    """The host's end of the WireGuard that the run sets up."""
    return next(_ends(host), None)


def _ends(host: Host) -> Iterator[LinkPlan]:
    return (link for link in host.links if link.manage and link.kind == WIREGUARD)


def with_wireguard(cluster: Cluster) -> Cluster:
    """The cluster whose head and workers have an interface of WireGuard where ``llama_transport`` or ``llama_links`` say so. The head's peers are
    those workers, the only peer of each of them is the head.

    :raises Refusal: a host cannot have such an interface.
    """
    hosts = dict(cluster.hosts)
    workers = [host for host in hosts.values() if host.is_worker and not host.is_head]
    secret = [host.name for host in workers if host.transport == WIREGUARD or wireguard_of(host)]
    if not secret:
        return cluster
    for name, peer in [(cluster.head, secret[0]), *((name, cluster.head) for name in secret)]:
        _check_wireguard(hosts[name])
        if not wireguard_of(hosts[name]):
            hosts[name] = hosts[name]._replace(links=(*hosts[name].links, _made(hosts[name], peer)))
    head = hosts[cluster.head]
    _check_networks(head, [hosts[name] for name in secret])
    _check_distinct([hosts[name] for name in [cluster.head, *secret]])
    port = FIRST_PORT
    pairs = [(hosts[name], _pair(head, hosts[name], port)) for name in secret]
    hosts[head.name] = _with_peers(head, port, [peer for _worker, (peer, _own) in pairs])
    hosts.update({worker.name: _with_peers(worker, port, [own]) for worker, (_peer, own) in pairs})
    return cluster._replace(hosts=hosts)


def _check_wireguard(host: Host) -> None:
    facts, instead = host.facts, f"or set llama_transport of {host.name} to {names.STUNNEL}"
    if not service_managers.MANAGERS[facts.service_manager].host_settings:
        raise Refusal(
            f"llama_transport: {WIREGUARD} gives {host.name} an interface, which needs Linux with systemd, and root: let Ansible become root there, "
            + instead
        )
    if facts.wireguard and not facts.wireguard.in_kernel:
        raise Refusal(
            f"llama_transport: {WIREGUARD} needs the kernel's module wireguard, which {facts.kernel} of {host.name} does not have: install its "
            f"distribution's package with it, restart {host.name} where its kernel was upgraded since, {instead}"
        )
    if any(entry.tunnel for entry in host.endpoints):
        raise Refusal(
            f"llama_transport: {WIREGUARD}: llama_worker_endpoints of {host.name} has a tunnel, through which the head would go instead: remove one of them"
        )


def _beneath(host: Host) -> Host:
    """The host without WireGuard."""
    return host._replace(links=tuple(link for link in host.links if link != wireguard_of(host)))


def _made(host: Host, peer: str) -> LinkPlan:
    """The end of a host for which nothing else is said: its address ends as that where the host is reached, or as that of its link where this one is
    a name or loopback."""
    network = NETWORKS[-1]
    try:
        reached = address_of(host._replace(links=()), peer)
    except Refusal:
        reached = address_of(host, peer)
    _first, _second, *ending = reached.split(".")
    address = f"10.{network}.{'.'.join(ending)}/16"
    mtu = min((link.mtu for link in host.links if link.mtu), default=COMMON_MTU) - OVERHEAD
    interface = "wg-llama"
    return LinkPlan(interface, address, max(mtu, names.MTU[0]), peer=None, manage=True, kind=WIREGUARD)


ENTRY = f"by an entry of llama_links with interface, address, manage: true and kind: {WIREGUARD}"


def _check_networks(head: Host, workers: list[Host]) -> None:
    """The kernel sends to WireGuard only what is for its network."""
    near = _interface(head)
    for worker in workers:
        far = _interface(worker)
        if near.ip not in far.network or far.ip not in near.network:
            wider = min(near.network, far.network, key=lambda network: network.prefixlen)
            raise Refusal(
                f"{worker.name} has {far} in WireGuard, and {head.name} {near}, which are not in one network: give both an address in {wider} {ENTRY}"
            )


def _check_distinct(hosts: list[Host]) -> None:
    addresses: dict[str, str] = {}
    keys: dict[str, str] = {}
    for host in hosts:
        address = _address(host)
        other = addresses.setdefault(address, host.name)
        if other != host.name:
            network = _interface(host).network
            raise Refusal(
                f"{host.name} and {other} both have the address {address} in WireGuard: give one of them another one in {network} {ENTRY}"
            )
        key = host.facts.wireguard.public_key if host.facts.wireguard else None
        other = keys.setdefault(key, host.name) if key else host.name
        if other != host.name:
            raise Refusal(
                f"{host.name} and {other} have the same key of WireGuard, as copies of one machine do: remove /etc/wireguard-{names.ROOT}.key on one of "
                "them and run site.yml, which makes another"
            )


def _interface(host: Host) -> ipaddress.IPv4Interface:
    return ipaddress.IPv4Interface(next(_ends(host)).address)


def _address(host: Host) -> str:
    return str(_interface(host).ip)


def _pair(head: Host, worker: Host, port: int) -> tuple[LinkPeer, LinkPeer]:
    """A worker's host as the head's peer, and the head as its."""
    far = address_of(_beneath(worker), head.name)
    near = address_of(_beneath(head), worker.name, far)
    return _peer(worker, f"{far}:{port}", near), _peer(head, f"{near}:{port}", far)


def _peer(host: Host, endpoint: str, local: str) -> LinkPeer:
    known = host.facts.wireguard
    return LinkPeer(host.name, _address(host), endpoint, local, known.public_key if known else None)


def _with_peers(host: Host, port: int, peers: list[LinkPeer]) -> Host:
    own = wireguard_of(host)
    links = [link._replace(port=port, peers=tuple(peers)) if link == own else link for link in host.links]
    return host._replace(links=tuple(links))
