# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Names and places that every part of the collection has to agree on."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import service_managers

ACCOUNT = "llamacpp"
BUILD_ACCOUNT = "llamacpp-build"
SERVICES = "llamacpp-"
STAGING_SERVICES = "llamacpp-staging-"
"""How the names of services begin: of those that serve, and of those that prove a release on the staging ports meanwhile."""
SYSTEM = "/usr"
"""Prefix of what the distribution brings."""
HEADS = (SERVICES + "server", STAGING_SERVICES + "server")
"""Services of the head; all others are workers."""
DEFINITION_MARK = "Written by llamacpp.cluster"
"""Stands in the first lines of every definition of a service."""
KEPT_FACTS = "facts.json"
"""File below the prefix of the head with the facts from which the last plan was made."""
LEASE, LEASE_LOCK = "lease.json", "lease.lock"
"""Files below the prefix of the head: which run may change hosts, and the lock of those who read and write that."""
CHANGES_LOCK = "changes.lock"
"""File below the prefix of each host whose lock belongs to the process that changes services there."""
TAKE_OVER = "llama_lease_take_over"
"""Variable with which an operator takes the lease from another run."""
FIREWALLS = ("firewalld", "ufw", "nftables")
"""Managers of a host's firewall that are driven."""
LINK_KINDS = ("ethernet", "thunderbolt", "usb4", "infiniband", "wireless")
"""Kinds of links between hosts."""
MTU = range(1280, 65536)
"""What a link may have, in bytes."""
LOOPBACK = "127.0.0.1"
EVERY_ADDRESS, EVERYBODY = "0.0.0.0", "0.0.0.0/0"
"""Where a program listens on all addresses of its host, and the network of all hosts."""
INSTALLED = (
    "releases",
    "runtime",
    "state",
    "supervisor",
    "venv",
    "links",
    "lingering",
    KEPT_FACTS,
    LEASE,
    LEASE_LOCK,
    CHANGES_LOCK,
)
"""What an installation has below its prefix, apart from models, which may be an operator's."""
FAMILIES = {
    "debian": "debian",
    "ubuntu": "debian",
    "fedora": "redhat",
    "rhel": "redhat",
    "centos": "redhat",
    "arch": "arch",
    "suse": "suse",
    "opensuse": "suse",
}


ROLLING = ("opensuse-tumbleweed",)
"""Distributions whose version is a date: builds would be others after every upgrade."""


def is_loopback(place: str) -> bool:
    """Whether an IPv4 address, or an endpoint with one, is its own host's alone."""
    return place.startswith("127.")


def distribution(os_release: str) -> dict[str, Any]:
    """From the text of /etc/os-release: id, version and the family whose packages it uses."""
    values = dict(re.findall(r'^(\w+)="?([^"\n]*)"?$', os_release, re.MULTILINE))
    names = [values.get("ID", "unknown"), *values.get("ID_LIKE", "").split()]
    family = next((FAMILIES[name.split("-")[0]] for name in names if name.split("-")[0] in FAMILIES), "unknown")
    version = values.get("VERSION_ID", values.get("VERSION_CODENAME", ""))
    return {"id": names[0], "version": "" if names[0] in ROLLING else version, "family": family}


def places(scope: str, manager: str, environment: Mapping[str, str]) -> dict[str, Any]:
    """Where things are installed: the installation, the cache that outlives it, and the service definitions.

    :param environment: of the connecting user, with ``HOME``.
    """
    home = environment["HOME"]
    if scope == "system":
        prefix, cache = "/opt/llamacpp", "/var/cache/llamacpp"
    else:
        prefix = os.path.join(environment.get("XDG_DATA_HOME") or home + "/.local/share", "llamacpp")
        cache = os.path.join(environment.get("XDG_CACHE_HOME") or home + "/.cache", "llamacpp")
    return {
        "prefix": prefix,
        "cache": cache,
        "units": service_managers.folder(manager, scope, prefix, environment),
    }
