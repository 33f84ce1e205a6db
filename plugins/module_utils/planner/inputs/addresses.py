# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The addresses at which hosts reach each other."""

from __future__ import annotations

import ipaddress

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import Host

UNUSABLE_NETWORK = ipaddress.IPv4Network("0.0.0.0/8")
"""Addresses that no host has."""


def _common_prefix_length(first_address: str, second_address: str) -> int:
    """Return the number of leading bits that both addresses share; -1 if one is a host name."""
    try:
        first_ip, second_ip = (ipaddress.IPv4Interface(text).ip for text in (first_address, second_address))
    except ValueError:
        return -1
    return 32 - (int(first_ip) ^ int(second_ip)).bit_length()


def address_for_peer(host: Host, peer: str, peer_address: str | None = None) -> str:
    """Return the numeric address at which a peer reaches the host: of the link to this peer, else of the first link without a peer, else ``ansible_host``.

    :param peer_address: address of the peer, if known. Without a link to the peer, the address that shares the longest prefix with it wins.
    """
    peer_links = [index for index, link in enumerate(host.links) if link.peer == peer]
    other_links = [index for index, link in enumerate(host.links) if not link.peer]
    candidates = [(f"llama_links[{index}].address", host.links[index].address) for index in [*peer_links, *other_links]]
    candidates += [("ansible_host", host.address)]
    variable, address = candidates[0]
    if peer_address and not peer_links:
        variable, address = max(candidates, key=lambda candidate: _common_prefix_length(candidate[1], peer_address))
    try:
        parsed_address = ipaddress.IPv4Interface(address).ip
    except ValueError:
        raise Refusal(
            f"{variable} for {host.name} is {address!r}: in ansible_host or llama_links, set the numeric IPv4 address at which {peer} reaches {host.name} "
            "(not needed for hosts reached over SSH)"
        ) from None
    if parsed_address.is_loopback:
        raise Refusal(
            f"{variable} for {host.name} is {address!r}, which only {host.name} can reach: set an address that "
            f"{peer} can reach, in ansible_host or llama_links"
        )
    if parsed_address.is_multicast or parsed_address.is_reserved:
        raise Refusal(
            f"{variable} for {host.name} is {address!r}, a multicast or reserved address: use {host.name}'s own address"
        )
    if parsed_address in UNUSABLE_NETWORK:
        raise Refusal(
            f"{variable} for {host.name} is {address!r}, which would open the worker to every network: use the address of one of the host's interfaces"
        )
    return str(parsed_address)
