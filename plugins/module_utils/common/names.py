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

CLUSTER_GROUP = "llama_cluster"
"""Group of the hosts of a cluster, where llama_cluster_group names no other one."""
NAME = "llamacpp"
"""How names begin that the collection gives: a host belongs to one cluster."""
SERVER, WORKERS = f"{NAME}-server", f"{NAME}-worker-"
"""Service of the head, and how those of workers begin."""
ACCOUNT, BUILD_ACCOUNT = NAME, f"{NAME}-build"
"""The account as which services run, and the one that compiles."""
BUILD_HOME = f"/opt/{NAME}"
"""Home of the account that compiles."""
SERVICE = re.compile(rf"{SERVER}|{WORKERS}.+")
SYSTEM = "/usr"
"""Prefix of what the distribution brings."""
DEFINITION_MARK = "Written by llamacpp.cluster"
"""Stands in the first lines of every definition of a service."""
FOLDER_MARK = ".llamacpp.cluster"
"""Empty folder below the prefix. Without it what lies there is somebody else's, and is neither changed nor removed."""
NOT_OURS = ", which this collection did not make: move it away or rename it, and run the playbook again"
"""What is said of what somebody else has under one of our names."""
ACCOUNT_MARK = "llama.cpp cluster"
"""GECOS comment of every account that this collection creates."""
PACKAGES = "packages"
"""File below the prefix with the distribution's packages that runs have installed, a line each."""
CACHED_FACTS = "facts.json"
"""File below the prefix of the head with the facts from which the last plan was made."""
CLUSTER_LOCK = "cluster.lock"
"""Files below the prefix of the head: which run may change hosts, and the lock of those who read and write that."""
CHANGES_LOCK = "changes.lock"
"""File below the prefix of each host whose lock belongs to the process that changes services there."""
BUILDS_LOCK = "builds.lock"
"""File in the cache of each host whose lock belongs to the process that builds there, perhaps of a playbook that was killed."""
TAKE_OVER = "llama_lease_take_over"
"""Variable with which an operator takes the lock of a cluster from another run."""
FALLBACKS = "fallbacks.json"
"""File below the prefix of the head with what its launcher may serve on while a worker is away."""
PRESETS = "models.ini"
"""File below the prefix of the head with the command lines of models that take turns."""
METRICS = "metrics.json"
"""Files below the prefix of each host whose launchers write metrics: what they get to know for it, and who may write where these go."""
MEASURED_SPEED = "speed.json"
"""File below the prefix of the head with the last measured speed of generation beside the planned one (plan/speed_record.py)."""
VERIFIED = "verified.json"
"""File below the prefix of the head with the result of the last verification."""
PROOF = "proof.json"
"""File below the prefix of the head with the verdicts of proofs."""
READING = "reading.json"
"""File below the prefix of the head with how well its models read plain text when they were verified last."""
READ = "read.json"
"""File below the prefix of each host: service → digest of its definition and of the files that it read when a run started it last."""
FIREWALLS = ("firewalld", "ufw", "nftables")
"""Managers of a host's firewall that are driven."""
WIREGUARD = "wireguard"
LINK_KINDS = ("ethernet", "thunderbolt", "usb4", "infiniband", "wireless", WIREGUARD)
"""Kinds of links between hosts."""
MTU = range(1280, 65536)
"""What a link may have, in bytes."""
LOOPBACK = "127.0.0.1"
PLAIN, STUNNEL, RDMA = "plain", "stunnel", "rdma"
"""What ``llama_transport`` may be."""
KEYS = "keys"
"""Folder below the prefix with the keys of tunnels, a file for each other host."""
EVERY_ADDRESS, EVERYBODY = "0.0.0.0", "0.0.0.0/0"
"""Where a program listens on all addresses of its host, and the network of all hosts."""
CLUSTER_RECORD = "cluster.json"
"""File below the prefix of every host that says to which cluster it belongs."""
PLANS = "plans"
"""Folder below the prefix with the host's own part of the last plans."""
MODELS = "models"
"""Folder below the prefix of the head with models that the collection writes or fetches."""
KNOWN_ANSWER_TIME = 2
"""Time of change of a known-answer model in seconds, so that one that was changed since it was written is not taken for it. Counts up when the written
file changes."""
INSTALLED = (
    "releases",
    "runtime",
    "state",
    "supervisor",
    "venv",
    "links",
    "lingering",
    PACKAGES,
    CACHED_FACTS,
    MEASURED_SPEED,
    VERIFIED,
    PROOF,
    READING,
    READ,
    CLUSTER_LOCK,
    CHANGES_LOCK,
    CLUSTER_RECORD,
    FALLBACKS,
    PRESETS,
    METRICS,
    PLANS,
    KEYS,
    FOLDER_MARK,
)
"""What an installation has below its prefix, apart from models, which may be an operator's. It is removed in this order."""
PAGE_PORT = "llama_server_page_port"
PORT_VARIABLES = {False: "port in llama_worker_endpoints", True: "llama_server_port"}
"""Whether a service is the head's → where its port is given."""
MEASURING_PORT = 50051
"""At which iperf3 of a worker's host listens while a link is measured."""
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


def service(part: str) -> str:
    """Name of a service.

    :param part: ``server``, ``benchmark``, or ``worker-`` and the worker's name.
    """
    return f"{NAME}-{part}"


def is_head(name: str) -> bool:
    """Whether a name is that of a head's service; all others are workers."""
    return name == SERVER


ROLLING = ("opensuse-tumbleweed",)
"""Distributions whose version is a date: builds would be others after every upgrade."""


def address_of(endpoint: str) -> str:
    """Of ``ADDRESS:PORT``."""
    return endpoint.rpartition(":")[0]


def port_of(endpoint: str) -> int:
    """Of ``ADDRESS:PORT``."""
    return int(endpoint.rpartition(":")[2])


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
        prefix, cache = f"/opt/{NAME}", f"/var/cache/{NAME}"
    else:
        prefix = os.path.join(environment.get("XDG_DATA_HOME") or home + "/.local/share", NAME)
        cache = os.path.join(environment.get("XDG_CACHE_HOME") or home + "/.cache", NAME)
    return {
        "prefix": prefix,
        "cache": cache,
        "units": service_managers.folder(manager, scope, prefix, environment),
    }
