#!/usr/bin/python
# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

DOCUMENTATION = r"""
module: reboot
short_description: Reboots a host, and shows progress while the run waits for the host
description:
  - Reboots the host with M(ansible.builtin.reboot), and shows the waiting time every 10 seconds.
extends_documentation_fragment: llamacpp.cluster.attributes
options:
  boot_time_command:
    description: Command whose output differs after each boot.
    type: str
"""

EXAMPLES = r"""
- name: Reboot
  llamacpp.cluster.reboot:
"""

RETURN = r""" # """
