# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Names and places that every part of the collection has to agree on."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import service_managers, validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal

DEFAULT_CLUSTER = "llama_cluster"
"""The cluster whose names have no name of a cluster in them."""
ROOT = "llamacpp"
BUILD_ACCOUNT = "llamacpp-build"
"""Compiles for every cluster of a host: they share sources and ccache."""
BUILD_HOME = f"/opt/{ROOT}"
"""Home of that account."""
CLUSTER = "[a-z_][a-z0-9_]*"
"""Of a cluster: without a hyphen, so that no name of one cluster begins like those of another."""
RESERVED = ("build", "server", "worker")
"""Parts of names, which no cluster may have as its name."""
LONGEST_POLICY = 17
"""Of firewalld, which makes names of chains from it (max_policy_name_len in its functions.py)."""
PRIORITIES = range(-20050, -10050, 2)
"""Of a cluster's rich rules in firewalld: one to accept, and the next one to drop."""
LONGEST_ACCOUNT = 32
"""Of useradd (shadow) and of what login records hold."""
LONGEST_CLUSTER = LONGEST_ACCOUNT - len(ROOT) - 1
SERVICE = re.compile(rf"{ROOT}-(?:(?!(?:{'|'.join(RESERVED)})-)(?P<cluster>{CLUSTER})-)?(?:(?P<head>server)|worker-.+)")
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
KEPT_FACTS = "facts.json"
"""File below the prefix of the head with the facts from which the last plan was made."""
CLUSTER_LOCK = "cluster.lock"
"""Files below the prefix of the head: which run may change hosts, and the lock of those who read and write that."""
CHANGES_LOCK = "changes.lock"
"""File below the prefix of each host whose lock belongs to the process that changes services there."""
TAKE_OVER = "llama_lease_take_over"
"""Variable with which an operator takes the lock of a cluster from another run."""
FALLBACKS = "fallbacks.json"
"""File below the prefix of the head with what its launcher may serve on while a worker is away."""
PRESETS = "models.ini"
"""File below the prefix of the head with the command lines of models that take turns."""
METRICS = "metrics.json"
"""Files below the prefix of each host whose launchers write metrics: what they get to know for it, and who may write where these go."""
SERVING = "serving.json"
"""File in the folder of the head's launcher that says what it serves on."""
MEASURED_SPEED = "speed.json"
"""File below the prefix of the head with the last measured speed of generation beside the planned one (plan/speed_record.py)."""
VERIFIED = "verified.json"
"""File below the prefix of the head with the result of the last verification."""
READ = "read.json"
"""File below the prefix of each host: service → digest of the files that it read when a run started it last."""
FIREWALLS = ("firewalld", "ufw", "nftables")
"""Managers of a host's firewall that are driven."""
LINK_KINDS = ("ethernet", "thunderbolt", "usb4", "infiniband", "wireless", "wireguard")
"""Kinds of links between hosts."""
MTU = range(1280, 65536)
"""What a link may have, in bytes."""
LOOPBACK = "127.0.0.1"
PLAIN, STUNNEL, WIREGUARD, RDMA = "plain", "stunnel", "wireguard", "rdma"
"""What ``llama_transport`` may be."""
KEYS = "keys"
"""Folder below the prefix with the keys of tunnels, a file for each other host."""
EVERY_ADDRESS, EVERYBODY = "0.0.0.0", "0.0.0.0/0"
"""Where a program listens on all addresses of its host, and the network of all hosts."""
CLUSTER_RECORD = "cluster.json"
"""File below the prefix of every host that says which ports and how much memory the cluster has there by plan."""
PLANS = "plans"
"""Folder below the prefix with the host's own part of the last plans."""
MODELS = "models"
"""Folder below the prefix of the head with models that the collection writes or fetches."""
BENCHMARKS = "benchmarks"
"""Folder below the prefix of the head with what benchmarks measured."""
INSTALLED = (
    "releases",
    "runtime",
    "state",
    "supervisor",
    "venv",
    "links",
    "lingering",
    KEPT_FACTS,
    MEASURED_SPEED,
    VERIFIED,
    READ,
    CLUSTER_LOCK,
    CHANGES_LOCK,
    CLUSTER_RECORD,
    FALLBACKS,
    PRESETS,
    METRICS,
    PLANS,
    KEYS,
    BENCHMARKS,
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


class Names(NamedTuple):
    """Every name that belongs to one cluster, so that clusters on the same host share none. Made by ``of``."""

    cluster: str

    @property
    def root(self) -> str:
        """How its names begin; also that of its folder and of its account."""
        return ROOT + self._suffix("-")

    @property
    def account(self) -> str:
        """As which its services run."""
        return self.root

    @property
    def server(self) -> str:
        """Service of the head."""
        return self.service("server")

    @property
    def workers(self) -> str:
        """How the names of workers that serve begin."""
        return self.service("worker-")

    def service(self, part: str) -> str:
        """Name of a service.

        :param part: ``server``, or ``worker-`` and the worker's name.
        """
        return f"{self.root}-{part}"

    def owns(self, service: str) -> bool:
        """Whether a name is that of one of its services."""
        found = SERVICE.fullmatch(service)
        return found is not None and (found["cluster"] or DEFAULT_CLUSTER) == self.cluster

    @property
    def mark(self) -> str:
        """What says in a firewall that a rule is its own."""
        return f"llamacpp.cluster{self._suffix('-')}"

    @property
    def files(self) -> str:
        """How its files in folders of others begin, where a name of an interface may follow after a hyphen."""
        return ROOT + self._suffix(".")

    @property
    def policy(self) -> str:
        """Of firewalld."""
        return self.root if len(self.root) <= LONGEST_POLICY else f"{ROOT}-{zlib.crc32(self.cluster.encode()):08x}"

    @property
    def priorities(self) -> tuple[int, int]:
        """Of its rich rules in firewalld that accept, and that drop: the only thing by which such rules are known."""
        if self.cluster == DEFAULT_CLUSTER:
            return -20052, -20051
        first = PRIORITIES[zlib.crc32(self.cluster.encode()) % len(PRIORITIES)]
        return first, first + 1

    def collides(self, other: Names) -> bool:
        """Whether rules of the two would be taken for each other; all other names differ."""
        return self.policy == other.policy or self.priorities == other.priorities

    def _suffix(self, separator: str) -> str:
        return "" if self.cluster == DEFAULT_CLUSTER else separator + self.cluster

    def as_dict(self) -> dict[str, str]:
        """What playbooks and roles need of it."""
        return {"cluster": self.cluster, "account": self.account, "server": self.server, "workers": self.workers}


DEFAULT = Names(DEFAULT_CLUSTER)


def of(cluster: str) -> Names:
    """The names of a cluster.

    :param cluster: name of the group with its hosts.
    :raises Refusal: names of services, folders and accounts cannot be made from it.
    """
    if cluster == DEFAULT_CLUSTER or (
        re.fullmatch(CLUSTER, cluster, re.ASCII) and len(cluster) <= LONGEST_CLUSTER and cluster not in RESERVED
    ):
        return Names(cluster)
    raise Refusal(
        f"llama_cluster_group is {validation.show(cluster)}, and its services, folders and accounts are named after it: give the group a name of "
        f"lower-case letters, digits and _ that does not begin with a digit, of at most {LONGEST_CLUSTER} characters, and none of {', '.join(RESERVED)}"
    )


def cluster_of_folder(name: str) -> str | None:
    """The cluster whose installation has such a name; None for others."""
    found = re.fullmatch(rf"{ROOT}(?:-({CLUSTER}))?", name)
    return (found[1] or DEFAULT_CLUSTER) if found else None


def is_head(service: str) -> bool:
    """Whether a name is that of a head's service, of any cluster; all others are workers."""
    found = SERVICE.fullmatch(service)
    return bool(found and found["head"])


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


def places(scope: str, manager: str, environment: Mapping[str, str], cluster: str = DEFAULT_CLUSTER) -> dict[str, Any]:
    """Where things are installed: the installation, the cache that outlives it and that all clusters share, and the service definitions.

    :param environment: of the connecting user, with ``HOME``.
    """
    home, root = environment["HOME"], of(cluster).root
    if scope == "system":
        prefix, cache = f"/opt/{root}", f"/var/cache/{ROOT}"
    else:
        prefix = os.path.join(environment.get("XDG_DATA_HOME") or home + "/.local/share", root)
        cache = os.path.join(environment.get("XDG_CACHE_HOME") or home + "/.cache", ROOT)
    return {
        "prefix": prefix,
        "cache": cache,
        "units": service_managers.folder(manager, scope, prefix, environment),
    }
