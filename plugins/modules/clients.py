#!/usr/bin/python
# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: clients
short_description: Writes configuration of clients of the server, and a page that says how to use it
description:
  - Takes a plan, and writes what Open WebUI, OpenCode, Continue, Aider, Claude Code and curl need to talk to its llama-server.
  - No file has a key. Clients read it from their environment.
extends_documentation_fragment: llamacpp.cluster.attributes.controller
attributes:
  check_mode:
    details: Writes O(path) in either mode.
options:
  plan:
    description: The plan that P(llamacpp.cluster.plan#module) returned. The module fails where it is refused.
    type: dict
    required: true
  path:
    description: Folder on the controller that gets the files. It is made where it is missing.
    type: path
    required: true
  url:
    description: At which clients reach the server. Without it, it is that of the plan.
    type: str
    default: ''
seealso:
  - module: llamacpp.cluster.plan
  - module: llamacpp.cluster.report
"""

EXAMPLES = r"""
- name: Write what clients need
  llamacpp.cluster.clients:
    plan: "{{ __llama_plan }}"
    path: clients
  run_once: true
"""

RETURN = r"""
"""
