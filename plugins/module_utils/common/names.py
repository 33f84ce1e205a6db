# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Names and paths that all parts of the collection share."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import service_managers

DEFAULT_CLUSTER_GROUP = "llama_cluster"
"""Default of llama_cluster_group, the group of a cluster's hosts."""
PREFIX = "llamacpp"
"""Prefix of all names that the collection assigns."""
SERVER_SERVICE, WORKER_PREFIX = f"{PREFIX}-server", f"{PREFIX}-worker-"
"""Service of the head, and prefix of the workers' services."""
ACCOUNT, BUILD_ACCOUNT = PREFIX, f"{PREFIX}-build"
"""Account that runs services, and account that compiles."""
BUILD_HOME = f"/opt/{PREFIX}"
"""Home of BUILD_ACCOUNT."""
SERVICE_PATTERN = re.compile(rf"{SERVER_SERVICE}|{WORKER_PREFIX}.+")
SYSTEM_PREFIX = "/usr"
"""Prefix of the distribution's packages."""
DEFINITION_MARK = "Written by llamacpp.cluster"
"""Mark in the first lines of every service definition."""
MARKER_FOLDER = ".llamacpp.cluster"
"""Empty folder below the prefix. A prefix without this folder is not ours: it is neither changed nor removed."""
FOREIGN_REMEDY = ", which this collection did not create: move or rename it, then run the playbook again"
"""End of a message about a foreign file or service with one of our names."""
ACCOUNT_MARK = "llama.cpp cluster"
"""GECOS comment of every account that this collection creates."""
PACKAGES_FILE = "packages"
"""File below the prefix with the distribution's packages that runs have installed."""
CACHED_FACTS_FILE = "facts.json"
"""File below the head's prefix with the facts of the last plan."""
CLUSTER_LOCK_FILE = "cluster.lock"
"""File below the head's prefix that names the run that may change hosts."""
HOST_LOCK_FILE = "changes.lock"
"""Lock file below each host's prefix, held by the process that changes the host."""
BUILDS_LOCK_FILE = "builds.lock"
"""Lock file in each host's cache, held by the process that builds, possibly for a killed playbook."""
TAKE_OVER_VARIABLE = "llama_lease_take_over"
"""Variable with which an operator takes over the cluster lock of another run."""
FALLBACKS_FILE = "fallbacks.json"
"""File below the head's prefix with the plans for serving while a worker is unavailable."""
PRESETS_FILE = "models.ini"
"""File below the head's prefix with the command lines of several models."""
METRICS_FILE = "metrics.json"
"""File below each host's prefix with the settings of launchers that write metrics."""
SPEED_FILE = "speed.json"
"""File below the head's prefix with the measured and planned speeds of generation (plan/speed_record.py)."""
VERIFICATION_FILE = "verified.json"
"""File below the head's prefix with the result of the last verification."""
PROOFS_FILE = "proof.json"
"""File below the head's prefix with the verdicts of proofs."""
PROOF_LOCK_FILE = "proof.lock"
"""Lock file below the head's prefix, held by the process that proves devices, possibly for a killed playbook."""
READINGS_FILE = "reading.json"
"""File below the head's prefix with the readings of plain text at the last verification."""
START_DIGESTS_FILE = "read.json"
"""File below each host's prefix with a digest of each service's definition and input files at its last start."""
FIREWALLS = ("firewalld", "ufw", "nftables")
"""Supported firewall managers."""
WIREGUARD = "wireguard"
LINK_KINDS = ("ethernet", "thunderbolt", "usb4", "infiniband", "wireless", WIREGUARD)
"""Kinds of links between hosts."""
MTU_RANGE = range(1280, 65536)
"""Allowed MTU of a link in bytes."""
LOOPBACK = "127.0.0.1"
PLAIN_TRANSPORT, STUNNEL, RDMA = "plain", "stunnel", "rdma"
"""Values of ``llama_transport``."""
KEYS_FOLDER = "keys"
"""Folder below the prefix with the tunnel keys, one file for each peer."""
ANY_ADDRESS, ANY_NETWORK = "0.0.0.0", "0.0.0.0/0"
"""Address for listening on all interfaces, and network of all hosts."""
CLUSTER_FILE = "cluster.json"
"""File below every host's prefix that names its cluster."""
PLANS_FOLDER = "plans"
"""Folder below the prefix with the host's part of recent plans."""
MODELS_FOLDER = "models"
"""Folder below the head's prefix with models that the collection writes or downloads."""
KNOWN_ANSWER_MTIME = 2
"""Modification time of known-answer models in seconds, which identifies their content. Increase it when the content of the file changes."""
INSTALLED_ENTRIES = (
    *("releases", "runtime", "state", "supervisor", "venv", "links", "lingering", PACKAGES_FILE, CACHED_FACTS_FILE),
    *(SPEED_FILE, VERIFICATION_FILE, PROOFS_FILE, PROOF_LOCK_FILE, READINGS_FILE, START_DIGESTS_FILE),
    *(CLUSTER_LOCK_FILE, HOST_LOCK_FILE, CLUSTER_FILE, FALLBACKS_FILE, PRESETS_FILE, METRICS_FILE, PLANS_FOLDER),
    *(KEYS_FOLDER, MARKER_FOLDER),
)
"""Entries of an installation below its prefix, removed in this order. Models are not listed: they may belong to the operator."""
PAGE_PORT_VARIABLE = "llama_server_page_port"
PORT_SETTINGS = {False: "port in llama_worker_endpoints", True: "llama_server_port"}
"""Setting of a service's port, by whether the service is llama-server."""
IPERF_PORT = 50051
"""Port of iperf3 on a worker's host during a link measurement."""
OS_FAMILIES = {
    "debian": "debian",
    "ubuntu": "debian",
    "fedora": "redhat",
    "rhel": "redhat",
    "centos": "redhat",
    "arch": "arch",
    "suse": "suse",
    "opensuse": "suse",
}


def service_name(suffix: str) -> str:
    """Return the name of one of the collection's services.

    :param suffix: ``server``, ``benchmark``, or ``worker-`` and the worker's name.
    """
    return f"{PREFIX}-{suffix}"


def is_head_service(name: str) -> bool:
    """Return whether a service is llama-server."""
    return name == SERVER_SERVICE


ROLLING_DISTRIBUTIONS = ("opensuse-tumbleweed",)
"""Rolling distributions. Their version is a date, so builds would change with every upgrade."""


def address_of(endpoint: str) -> str:
    return endpoint.rpartition(":")[0]


def port_of(endpoint: str) -> int:
    return int(endpoint.rpartition(":")[2])


def is_loopback(address: str) -> bool:
    return address.startswith("127.")


def distribution(os_release: str) -> dict[str, Any]:
    """Return id, version and package family from the text of /etc/os-release."""
    fields = dict(re.findall(r'^(\w+)="?([^"\n]*)"?$', os_release, re.MULTILINE))
    names = [fields.get("ID", "unknown"), *fields.get("ID_LIKE", "").split()]
    family = next((OS_FAMILIES[name.split("-")[0]] for name in names if name.split("-")[0] in OS_FAMILIES), "unknown")
    version = fields.get("VERSION_ID", fields.get("VERSION_CODENAME", ""))
    return {"id": names[0], "version": "" if names[0] in ROLLING_DISTRIBUTIONS else version, "family": family}


def installation_folders(scope: str, manager: str, environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the folders of the installation, of service definitions, and of the cache, which survives an uninstallation.

    :param environment: environment of the connecting user, with ``HOME``.
    """
    home = environment["HOME"]
    if scope == "system":
        prefix, cache = f"/opt/{PREFIX}", f"/var/cache/{PREFIX}"
    else:
        prefix = os.path.join(environment.get("XDG_DATA_HOME") or home + "/.local/share", PREFIX)
        cache = os.path.join(environment.get("XDG_CACHE_HOME") or home + "/.cache", PREFIX)
    return {"prefix": prefix, "cache": cache, "units": service_managers.folder(manager, scope, prefix, environment)}
