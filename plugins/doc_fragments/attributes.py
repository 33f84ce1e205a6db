# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Documentation that modules have in common."""

from __future__ import annotations

COMMON = r"""
author: llamacpp.cluster contributors (@llamacpp-cluster)
version_added: 0.1.0
attributes:
  action_group:
    description: Use C(group/llamacpp.cluster.cluster) in C(module_defaults) to set default options for all modules of the collection.
    support: full
    membership:
      - llamacpp.cluster.cluster
  check_mode:
    description: Can run in check mode and predict its changes without making them.
    support: full
  idempotent:
    description: Changes nothing when it runs a second time with the same arguments.
    support: full
  platform:
    description: Supported systems.
    support: full
    platforms: posix
  diff_mode:
    description: Returns the changes in diff mode, or in check mode the changes that it would make.
"""


class ModuleDocFragment:
    DOCUMENTATION = COMMON + "    support: none\n"
    CHANGES = COMMON + "    support: full\n"
    INFO = COMMON + "    support: N/A\n"
    CONTROLLER = (
        INFO
        + r"""  action:
    description: Runs on the controller and contacts no host.
    support: full
"""
    )
    SETTINGS = r"""
options:
  prefix:
    description: Installation folder, from the plan. The task waits while a task of another run changes this installation.
    type: str
"""
    INSTALLATION = r"""
options:
  scope:
    description: Owner of the installation, the system or the connecting user. V(auto) chooses as for C(llama_host_scope).
    type: str
    choices: [auto, system, user]
    default: auto
"""
