#!/usr/bin/python
# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

DOCUMENTATION = r"""
module: plan_diff
short_description: Decides what to apply from a plan and the hosts' answers
description:
  - Takes the plan and the result of P(llamacpp.cluster.host_info#module) for each host's part of the plan, and changes nothing.
  - A service that does not run as planned is restarted. llama-server does not reconnect, so the head is restarted with any worker that it uses.
  - Where several hosts of one kind lack a release, one of them builds it.
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
      - A host that is not in it did not answer.
    type: dict
    default: {}
  facts:
    description:
      - Result of P(llamacpp.cluster.host_info#module) by host, without a plan.
      - RV(lacking) is returned for these hosts.
    type: dict
    default: {}
  parts:
    description: Those of V(build) and V(services) that the run carries out. It fails if they cannot be carried out as a whole.
    type: list
    elements: str
    default: []
  page:
    description: Whether to show the plan as a page, with what an apply would change on each host.
    type: bool
    default: false
  report:
    description: File on the controller for the page as HTML, to which M(llamacpp.cluster.verify) adds its checks. It needs no other file.
    type: path
"""

EXAMPLES = r"""
- name: Compare the host with its plan
  llamacpp.cluster.host_info:
    plan: "{{ __llama_host_plan }}"
  register: __llama_compared

- name: Decide what has to be changed
  llamacpp.cluster.plan_diff:
    plan: "{{ __llama_plan }}"
    answers: "{{ ansible_play_hosts | llamacpp.cluster.by_host(hostvars, '__llama_compared') }}"
  run_once: true
  register: __llama_changes
"""

RETURN = r"""
kinds:
  description:
    - Kinds of differences by host that answered (V(account), V(folder), V(release), V(file), V(definition), V(boot), V(manager),
      V(firewall), V(link), V(tuning), V(service), V(unplanned), V(unneeded), V(record), V(model), V(key)).
  returned: success
  type: dict
restarts:
  description: Services that have to be restarted, by host that answered.
  returned: success
  type: dict
behind:
  description: Hosts on which there is something to apply.
  returned: success
  type: list
  elements: str
while_away:
  description: For each host, a sentence on what serves while it is away.
  returned: success
  type: dict
unreached:
  description: Hosts that did not answer.
  returned: success
  type: list
  elements: str
builders:
  description: Hosts that compile a build. The plan names the host that compiles each build.
  returned: success
  type: list
  elements: str
shared:
  description: Host that compiles a build, by build that another host gets from it.
  returned: success
  type: dict
fetches:
  description: A build for each archive or source that hosts lack, with the programs of all builds made from it.
  returned: success
  type: list
  elements: dict
needs_key:
  description: Hosts of workers whose tunnel needs a new key.
  returned: success
  type: list
  elements: str
lacking:
  description: Missing tools with their packages by host of O(facts). C(required), and C(optional) if it builds.
  returned: success
  type: dict
"""
