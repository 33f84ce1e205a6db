# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Divides a cluster into its replicas."""

from collections.abc import Collection, Mapping
from typing import Any

from ansible_collections.llamacpp.cluster.plugins.plugin_utils import inventory

DOCUMENTATION = r"""
name: replicas
short_description: Divides a cluster into its replicas
description:
  - Returns for each replica a list of its hosts, the head first. A cluster with one head, or without a host in C(llama_balancer), is one replica.
  - Otherwise, a head's replica is the largest group within the cluster that contains this head and no other head, or else the head alone.
positional: cluster, hosts
options:
  _input:
    description: The groups of the inventory, V(groups).
    type: dict
    required: true
  cluster:
    description: Group of the cluster.
    type: str
    required: true
  hosts:
    description: Hosts of the run. Other hosts are left out, and so are replicas without a host of the run. Without this option, all hosts are returned.
    type: list
    elements: str
author: the llamacpp.cluster contributors
"""

EXAMPLES = r"""
- name: Name the hosts of each replica
  ansible.builtin.debug:
    msg: "{{ groups | llamacpp.cluster.replicas('llama_cluster') }}"
"""

RETURN = r"""
_value:
  description: For each replica, the names of its hosts.
  type: list
  elements: list
"""


def replicas(groups: Mapping[str, Any], cluster: str, hosts: Collection[str] | None = None) -> list[list[str]]:
    all_replicas = inventory.replicas(groups, cluster)
    if hosts is None:
        return all_replicas
    return [names for names in ([name for name in replica if name in hosts] for replica in all_replicas) if names]


class FilterModule:
    def filters(self) -> dict[str, Any]:
        return {"replicas": replicas}
