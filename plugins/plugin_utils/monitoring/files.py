# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Files with which Prometheus and Grafana monitor a cluster."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import Plan
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import cluster_inputs
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.monitoring import dashboards

EXPORTER_PORT = 9100
"""Port of node exporter."""
JOB_NAME = "llamacpp"
"""Prometheus job to which the rules refer."""
RULES_FILE = Path(__file__).with_name("llamacpp.rules.yml")


def monitoring_files(plan: Plan, addresses: Mapping[str, str]) -> dict[str, str]:
    """Return the text of each monitoring file, by name.

    :raises Refusal: Prometheus could not collect the metrics of all hosts.
    """
    hosts_without_metrics = [name for name, host in plan.hosts.items() if not host.metrics]
    if hosts_without_metrics:
        raise Refusal(
            f"These hosts export no metrics: {', '.join(hosts_without_metrics)}. Set llama_metrics to textfile for all hosts of {plan.cluster}, run site.yml, "
            "then run this playbook again."
        )
    local_hosts = [name for name in plan.hosts if names.is_loopback(addresses[name])]
    if 0 < len(local_hosts) < len(plan.hosts):
        raise Refusal(
            f"Other hosts cannot reach {local_hosts[0]} at {addresses[local_hosts[0]]}: set its ansible_host to a numeric IPv4 address in their network."
        )
    target_groups = [
        {
            "targets": [f"{addresses[name]}:{EXPORTER_PORT}"],
            "labels": {"cluster": plan.cluster, "host": name, "role": "head" if name == plan.head.host else "worker"},
        }
        for name in plan.hosts
    ]
    scrape_job = {"job_name": JOB_NAME, "file_sd_configs": [{"files": ["targets-*.json"]}]}
    configuration = {
        "global": {"scrape_interval": "15s", "evaluation_interval": "15s"},
        "alerting": {"alertmanagers": [{"static_configs": [{"targets": [f"{names.LOOPBACK}:9093"]}]}]},
        "rule_files": [RULES_FILE.name],
        "scrape_configs": [scrape_job],
    }
    return {
        f"targets-{plan.cluster}.json": json.dumps(target_groups, indent=1) + "\n",
        "scrape.yml": yaml.safe_dump({"scrape_configs": [scrape_job]}, sort_keys=False),
        "prometheus.yml": yaml.safe_dump(configuration, sort_keys=False),
        RULES_FILE.name: RULES_FILE.read_text(),
        **{f"dashboards/{name}": text for name, text in dashboards.dashboard_files().items()},
    }


def balancer_files(cluster: str, balancers: Mapping[str, str]) -> dict[str, str]:
    """Return the text of each file for the metrics of HAProxy, by name; none without a balancer.

    :param balancers: host → address and port of its metrics.
    """
    target_groups = [
        {"targets": [endpoint], "labels": {"cluster": cluster, "host": name, "role": "balancer"}}
        for name, endpoint in balancers.items()
    ]
    return {f"targets-{cluster}-balancer.json": json.dumps(target_groups, indent=1) + "\n"} if target_groups else {}


def address_of(name: str, variables: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    """Return the address at which others reach a host; the loopback address if Ansible runs on it."""
    address = str(variables.get("ansible_host") or name)
    if cluster_inputs.is_ipv4_address(address):
        return address
    if variables.get("ansible_connection") == "local":
        return names.LOOPBACK
    if not facts.get("reached_at"):
        raise Refusal(f"The address of {name} is unknown: set its ansible_host to a numeric IPv4 address.")
    return str(facts["reached_at"])
