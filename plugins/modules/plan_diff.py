#!/usr/bin/python
# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

DOCUMENTATION = r"""
module: plan_diff
short_description: Decides what has to change on the hosts, from a plan and the hosts' reports
description:
  - Compares the plan with the result of P(llamacpp.cluster.host_info#module) for each host's part of the plan. Changes no host.
  - Selects for a restart every service that does not run as planned. If a worker restarts, the head's server that uses it restarts too, because
    llama-server does not reconnect.
  - If several hosts of one kind lack a build, selects one of them to compile it for all.
extends_documentation_fragment: llamacpp.cluster.attributes.controller
attributes:
  check_mode:
    details: Changes nothing in either mode, apart from writing O(report).
options:
  plan:
    description: The plan that P(llamacpp.cluster.plan#module) returned.
    type: dict
    required: true
  answers:
    description:
      - Result of P(llamacpp.cluster.host_info#module) by host, for the host's part of the plan.
      - A host without a result counts as a host that did not answer.
    type: dict
    default: {}
  facts:
    description:
      - Result of P(llamacpp.cluster.host_info#module) by host, without a plan.
      - RV(missing_packages) is returned for these hosts.
    type: dict
    default: {}
  parts:
    description: Parts of the changes that the run makes, V(build), V(services) or both. The module fails if the run cannot complete
      these parts.
    type: list
    elements: str
    default: []
  page:
    description: Whether to show the whole plan, and what site.yml would change on each host.
    type: bool
    default: false
  report:
    description: File on the controller for the self-contained HTML report. Used only if O(page) is true. M(llamacpp.cluster.verify) adds its checks.
    type: path
"""

EXAMPLES = r"""
- name: Decide what to change
  llamacpp.cluster.plan_diff:
    plan: "{{ __llama_plan }}"
    answers: "{{ ansible_play_hosts | llamacpp.cluster.by_host(hostvars, '__llama_comparison') }}"
  run_once: true
  register: __llama_changes
"""

RETURN = r"""
kinds:
  description:
    - Kinds of differences, for each host that answered (V(account), V(folder), V(release), V(file), V(definition), V(boot), V(manager), V(firewall),
      V(link), V(tuning), V(service), V(unplanned), V(unneeded), V(record), V(model), V(key)).
  returned: success
  type: dict
restarts:
  description: Names of the services that must be restarted, for each host that answered.
  returned: success
  type: dict
outdated_hosts:
  description: Hosts that the run has to change.
  returned: success
  type: list
  elements: str
absence_notes:
  description: For each host, a sentence about how the cluster serves while the host is absent.
  returned: success
  type: dict
unreached_hosts:
  description: Hosts that did not answer.
  returned: success
  type: list
  elements: str
builders:
  description: Hosts that have to compile a build. The plan names the host that compiles each build.
  returned: success
  type: list
  elements: str
builder_by_build:
  description: For each build that a host lacks and receives from another host, the name of the other host.
  returned: success
  type: dict
builds_to_fetch:
  description: One build for each source or archive that hosts need, with the programs of all missing builds from it.
  returned: success
  type: list
  elements: dict
hosts_without_key:
  description: Workers' hosts that do not accept the tunnel key that the head uses, and so need a new key.
  returned: success
  type: list
  elements: str
missing_packages:
  description: Missing tools and their packages for each host in O(facts), as C(required) and, if the host has to compile, C(optional).
  returned: success
  type: dict
"""
