# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the network adds to each token, from measured round trips or, where there are none, from stated ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import devices
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.values import Host, Interface, Link, Release


class Assumed(NamedTuple):
    """Of a kind of link, where nothing was measured: one way in milliseconds through both systems' TCP, and what TCP carries; None where that
    depends on the processor."""

    one_way_ms: float
    mbit_per_s: int | None


ASSUMED = {
    "loopback": Assumed(0.02, None),
    "infiniband": Assumed(0.03, 10000),
    "thunderbolt": Assumed(0.1, 9400),
    "usb4": Assumed(0.12, 9000),
    "ethernet": Assumed(0.15, 940),
    "wireless": Assumed(2.0, 300),
}
"""Sources: about 9.4 Gbit/s over a direct cable (field notes of a pair of Strix Halo), a ceiling of about 9 Gbit/s of USB4 between two of them
(kyuz0/amd-strix-halo-vllm-toolboxes#70) and 0.12 ms for an exchange there, since that controller holds interrupts back for 0.128 ms
(anthony-chaudhary/fak#11910), Ethernet of 1 Gbit/s less its headers; the others are assumed."""
NAMES = {"thunderbolt": "thunderbolt", "ib": "infiniband", "wl": "wireless"}
"""How the name of an interface begins → kind of its link, where neither the operator nor the host says it; all others are Ethernet."""
ASYNCHRONOUS_SINCE = 6
"""Major version of the protocol from which on the head does not wait for each answer."""
LAST_KNOWN_WAITING = 10496
"""Build of protocol 5.1.0, the last before it whose build is known."""


def kind_of(endpoint: str, links: Sequence[Link], interfaces: Sequence[Interface] = ()) -> str:
    """Kind of the link over which the head reaches a worker, a key of ASSUMED.

    :param links: ``llama_links`` of the worker's host.
    :param interfaces: those that its facts name.
    """
    address = endpoint.rsplit(":", 1)[0]
    if address.startswith("127."):
        return "loopback"
    own = [link for link in links if link.address.split("/", maxsplit=1)[0] == address]
    names = {link.interface for link in own}
    known = [link.kind for link in own if link.kind]
    known += [interface.kind for interface in interfaces if address in interface.addresses or interface.name in names]
    known += [kind for link in own for start, kind in NAMES.items() if (link.interface or "").startswith(start)]
    return next(iter(known), "ethernet")


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
            kind = kind_of(device.endpoint, hosts[device.host].links, hosts[device.host].facts.interfaces)
            round_trip = None if kind == "loopback" else measured.get(device.host)
            links.append(
                {
                    "host": device.host,
                    "endpoint": device.endpoint,
                    "kind": kind,
                    "one_way_ms": round(round_trip / 2, 4) if round_trip else ASSUMED[kind].one_way_ms,
                    "mbit_per_s": ASSUMED[kind].mbit_per_s,
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
