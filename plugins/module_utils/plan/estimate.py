# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the network adds to each token, from measured round trips or, where there are none, from stated ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import devices
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.values import Host, Link, Release

ASSUMED_MS = {
    "loopback": 0.02,
    "infiniband": 0.03,
    "thunderbolt": 0.1,
    "ethernet": 0.15,
    "wireless": 2.0,
    "tunnel": 0.15,
}
"""Kind of a link → one way in milliseconds through both systems' TCP, where nothing was measured. A tunnel takes what is beneath it, Ethernet as
far as anybody knows."""
KINDS = {"thunderbolt": "thunderbolt", "ib": "infiniband", "wl": "wireless"}
"""How the name of an interface begins → kind of its link; all others are Ethernet."""
ASYNCHRONOUS_SINCE = 6
"""Major version of the protocol from which on the head does not wait for each answer."""
LAST_KNOWN_WAITING = 10496
"""Build of protocol 5.1.0, the last before it whose build is known."""


def kind_of(endpoint: str, links: Sequence[Link]) -> str:
    """Kind of the link over which the head reaches a worker.

    :param links: ``llama_links`` of the worker's host.
    """
    address = endpoint.rsplit(":", 1)[0]
    if address.startswith("127."):
        return "loopback"
    interfaces = [link.interface or "" for link in links if link.address.split("/", maxsplit=1)[0] == address]
    return next((kind for name in interfaces for start, kind in KINDS.items() if name.startswith(start)), "ethernet")


def _waits(release: Release) -> bool:
    if release.protocol:
        return int(release.protocol.split(".")[0]) < ASYNCHRONOUS_SINCE
    return release.generation <= LAST_KNOWN_WAITING


def network(release: Release, used: Sequence[devices.Holder], hosts: Mapping[str, Host], moved: bool) -> dict[str, Any]:
    """``network_ms_per_token``, how it was made, and each worker's ``links``.

    A token goes through W workers in 2W - 1 crossings of the network, which fits what was measured with injected delays before the
    asynchronous dispatcher; with that it is at most so much. What drivers and workers themselves take is not in it.

    :param used: the devices that get layers, in the plan's order.
    :param moved: whether tensors are on other devices than their layers, which a token then visits more often than is counted.
    """
    measured = next((host.facts.round_trips for host in hosts.values() if host.is_head), {})
    links: list[dict[str, Any]] = []
    for device in used:
        if device.endpoint:
            kind = kind_of(device.endpoint, hosts[device.host].links)
            if kind == "loopback" and not hosts[device.host].is_head:
                kind = "tunnel"
            round_trip = None if kind == "loopback" else measured.get(device.host)
            links.append(
                {
                    "host": device.host,
                    "endpoint": device.endpoint,
                    "kind": kind,
                    "one_way_ms": round(round_trip / 2, 4) if round_trip else ASSUMED_MS[kind],
                    "measured": bool(round_trip),
                }
            )
    delays = [link["one_way_ms"] for link in links]
    bound = "about" if _waits(release) or not delays else "at most"
    return {
        "network_ms_per_token": round(2 * sum(delays) - delays[-1], 3) if delays else 0,
        "bound": "at least" if moved and delays else bound,
        "crossings": max(0, 2 * len(delays) - 1),
        "links": links,
    }
