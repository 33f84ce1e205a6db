#!/usr/bin/python
# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: release_source
short_description: Fetches the source of a release to the controller
description:
  - Brings the source archive of a release, or its archives of compiled programs, to the cache of the controller and checks them. A
    distribution's package has none.
  - It runs as an action plugin on the controller, once for all hosts.
extends_documentation_fragment: llamacpp.cluster.attributes.controller
attributes:
  check_mode:
    support: none
options:
  release:
    description: The release as the plan holds it.
    type: dict
    required: true
  archives:
    description: Names of upstream's archives that hosts install, of a release with C(source) V(prebuilt).
    type: list
    elements: str
    default: []
seealso:
  - module: llamacpp.cluster.release
"""

EXAMPLES = r"""
- name: Fetch the source
  llamacpp.cluster.release_source:
    release: "{{ __llama_plan.release }}"
  run_once: true
"""

RETURN = r"""
path:
  description: The archive in the controller's cache, or the first of them.
  returned: unless the release is a distribution's package
  type: str
"""
