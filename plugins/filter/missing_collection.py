# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Names a missing collection that a firewall needs."""

from typing import Any

from ansible.plugins.loader import module_loader

DOCUMENTATION = r"""
name: missing_collection
short_description: Names the missing Ansible collection that a firewall needs
description:
  - Returns the name of the Ansible collection with the module for a firewall manager, if the controller lacks this collection.
options:
  _input:
    description: Firewall manager, V(firewalld), V(ufw), V(nftables) or nothing.
    type: str
author: the llamacpp.cluster contributors
"""

EXAMPLES = r"""
- name: Name the missing collection
  ansible.builtin.debug:
    msg: "{{ 'ufw' | llamacpp.cluster.missing_collection }}"
"""

RETURN = r"""
_value:
  description: Name of the collection; empty if none is missing.
  type: str
"""

FIREWALL_COLLECTIONS = {"firewalld": "ansible.posix", "ufw": "community.general"}


def missing_collection(manager: str | None) -> str:
    collection = FIREWALL_COLLECTIONS.get(manager or "")
    if not collection or module_loader.find_plugin_with_context(f"{collection}.{manager}").resolved:
        return ""
    return collection


class FilterModule:
    def filters(self) -> dict[str, Any]:
        return {"missing_collection": missing_collection}
