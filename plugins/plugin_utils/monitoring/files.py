# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What monitoring writes on hosts: node exporter where a cluster runs, Prometheus and Alertmanager where it is looked at. Packages keep their units and their
own configuration: drop-ins start them with ours, one for each cluster of the host, so that the last one to go takes them with it."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import FirewallRule
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import Plan
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import cluster_inputs
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.monitoring import dashboards

PORT = 9100
"""Of node exporter."""
FOLDER = "/etc/prometheus/llamacpp"
JOB = "llamacpp"
"""The rules name it."""
RULES = Path(__file__).resolve().parents[3] / "roles/llama_monitoring/files/llamacpp.rules.yml"


class Packages(NamedTuple):
    """Packages, each named as its unit and its program are."""

    exporter: str
    prometheus: str
    alertmanager: str


class File(NamedTuple):
    """On a host."""

    path: str
    content: str


class Part(NamedTuple):
    """What a host gets."""

    packages: tuple[str, ...]
    files: tuple[File, ...]
    watched: bool
    """whether node exporter is what it gets"""
    rules: tuple[FirewallRule, ...] = ()
    """of its firewall, for node exporter"""


def _texts(cluster: str, hosts: Mapping[str, str]) -> dict[str, str]:
    """:param hosts: name → address."""
    targets = [{"targets": [f"{address}:{PORT}"], "labels": {"host": name}} for name, address in hosts.items()]
    scrape = {"job_name": JOB, "honor_labels": True, "file_sd_configs": [{"files": ["targets-*.json"]}]}
    alertmanagers = [{"static_configs": [{"targets": [f"{names.LOOPBACK}:9093"]}]}]
    whole = {
        "global": {"scrape_interval": "15s", "evaluation_interval": "15s"},
        "alerting": {"alertmanagers": alertmanagers},
        "rule_files": [RULES.name],
        "scrape_configs": [scrape],
    }
    source = {**dashboards.OURS, "type": "prometheus", "access": "proxy", "url": f"http://{names.LOOPBACK}:9090"}
    provider = {"name": "llama.cpp", "folder": "llama.cpp", "type": "file", "options": {"path": f"{FOLDER}/dashboards"}}
    return {
        f"targets-{cluster}.json": json.dumps(targets, indent=1) + "\n",
        "scrape.yml": _yaml({"scrape_configs": [scrape]}),
        "prometheus.yml": _yaml(whole),
        RULES.name: RULES.read_text(),
        "grafana-datasources.yml": _yaml({"apiVersion": 1, "prune": True, "datasources": [source]}),
        "grafana-dashboards.yml": _yaml({"apiVersion": 1, "providers": [provider]}),
        **{f"dashboards/{name}": text for name, text in dashboards.files().items()},
    }


class Watched(NamedTuple):
    """A cluster as it is watched."""

    texts: Mapping[str, str]
    """name of a file → its text, for whoever has Prometheus and Grafana already"""
    hosts: Mapping[str, Part]
    """of the cluster"""
    monitors: Mapping[str, Part]
    """those with Prometheus"""
    left: tuple[str, ...]
    """hosts of the cluster on which nothing can be installed"""


def watch(
    plan: Plan,
    monitors: Mapping[str, int],
    addresses: Mapping[str, str],
    packages: Mapping[str, Packages | None],
    sources: Collection[str] = (),
) -> Watched:
    """What is written to watch the cluster of a plan.

    :param monitors: host with Prometheus → days that it remembers.
    :param addresses: of these and of the cluster's hosts.
    :param packages: of the same; None where none are known.
    :param sources: IPv4 addresses of those with Prometheus, from any of which they may ask.
    :raises Refusal: nothing would be seen.
    """
    _check(plan, monitors, addresses, packages)
    listens = {name: names.LOOPBACK if [*monitors] == [name] else addresses[name] for name in plan.hosts}
    texts = _texts(plan.cluster, listens)
    looking = sorted({*sources, *(addresses[name] for name in monitors)})
    owner = names.of(plan.cluster)
    parts = {
        name: _of_cluster_host(owner, installed, listens[name], looking, plan.hosts[name].metrics or "")
        for name, installed in packages.items()
        if name in plan.hosts and installed and plan.hosts[name].host_settings
    }
    seeing = {
        name: _of_monitor(owner, installed, texts, monitors[name])
        for name, installed in packages.items()
        if name in monitors and installed
    }
    return Watched(texts, parts, seeing, tuple(name for name in plan.hosts if name not in parts))


def address_of(name: str, variables: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    """At which others reach a host; its own where Ansible runs on it.

    :param variables: of the host.
    :raises Refusal: it is not known.
    """
    given = str(variables.get("ansible_host") or name)
    if cluster_inputs.is_numeric(given):
        return given
    if variables.get("ansible_connection") == "local":
        return names.LOOPBACK
    if not facts.get("reached_at"):
        raise Refusal(f"The address of {name} is not known: set its ansible_host to a numeric IPv4 address.")
    return str(facts["reached_at"])


def _check(
    plan: Plan, monitors: Collection[str], addresses: Mapping[str, str], packages: Mapping[str, Packages | None]
) -> None:
    silent = [name for name, host in plan.hosts.items() if not host.metrics]
    if silent:
        raise Refusal(
            f"{', '.join(silent)} writes no metrics: set llama_metrics to textfile for all hosts of {plan.cluster}, run this playbook again, then site.yml."
        )
    others = {*plan.hosts, *monitors}
    local = [name for name in others if names.is_loopback(addresses[name])]
    if 0 < len(local) < len(others):
        raise Refusal(
            f"Other hosts do not reach {local[0]} at {addresses[local[0]]}: set its ansible_host to a numeric IPv4 address of their network."
        )
    strange = [name for name in monitors if not packages[name]]
    if strange:
        raise Refusal(
            f"{', '.join(strange)} is in the group llama_monitoring and is neither Debian nor Ubuntu: take another host, or a Prometheus of your own "
            "and the files of llama_monitoring_path."
        )


def _of_cluster_host(
    owner: names.Names, packages: Packages, address: str, monitors: Sequence[str], folder: str
) -> Part:
    """Node exporter, for those alone who look.

    :param address: at which it listens.
    :param monitors: addresses.
    :param folder: in which launchers write metrics.
    """
    rule = FirewallRule(PORT, "tcp", tuple(monitors), address)
    arguments = [f"--web.listen-address={address}:{PORT}", f"--collector.textfile.directory={folder}"]
    lines = ["IPAddressDeny=any", f"IPAddressAllow={' '.join(['localhost', *monitors])}"]
    file = _drop_in(owner, packages.exporter, arguments, lines)
    return Part((packages.exporter,), (file,), True, () if names.is_loopback(address) else (rule,))


def _of_monitor(owner: names.Names, packages: Packages, written: Mapping[str, str], retention_days: int) -> Part:
    """Prometheus and Alertmanager, which only their own host reaches."""
    arguments = [
        f"--config.file={FOLDER}/prometheus.yml",
        f"--storage.tsdb.retention.time={retention_days}d",
        f"--web.listen-address={names.LOOPBACK}:9090",
    ]
    alerting = [
        f"--config.file={FOLDER}/alertmanager.yml",
        f"--web.listen-address={names.LOOPBACK}:9093",
        "--cluster.listen-address=",
    ]
    drop_ins = (_drop_in(owner, packages.prometheus, arguments), _drop_in(owner, packages.alertmanager, alerting))
    files = tuple(File(f"{FOLDER}/{name}", text) for name, text in written.items())
    return Part((packages.prometheus, packages.alertmanager), (*files, *drop_ins), False)


def _drop_in(owner: names.Names, package: str, arguments: Sequence[str], lines: Sequence[str] = ()) -> File:
    """Starts a package's program with these arguments, again and again until its address is there."""
    command = " ".join([f"/usr/bin/{package}", *arguments])
    text = ["[Unit]", "StartLimitIntervalSec=0", "", "[Service]", "ExecStart=", f"ExecStart={command}", "RestartSec=5"]
    content = "\n".join([f"# {names.DEFINITION_MARK}", *text, *lines]) + "\n"
    return File(f"/etc/systemd/system/{package}.service.d/{owner.root}.conf", content)


def _yaml(value: Any) -> str:
    return yaml.safe_dump(value, sort_keys=False)
