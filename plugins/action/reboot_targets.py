# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which hosts of the cluster playbooks/reboot.yml may reboot."""

from __future__ import annotations

from collections.abc import Sequence

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.launcher import serving
from ansible_collections.llamacpp.cluster.plugins.plugin_utils import inventory
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.action import Action

WAIT_SECONDS = 600 + serving.LONGEST_STEADY_SECONDS
"""For the whole plan after a reboot: so long a worker may have to answer before the head returns to it, and then the model is loaded."""


def chosen(named: Sequence[str] | None, every: Sequence[str], of_play: Sequence[str]) -> list[str]:
    """The hosts to reboot.

    :param named: by the operator; None where all are meant.
    :param every: host of the cluster.
    :param of_play: hosts that --limit leaves.
    :raises Refusal: nobody is named, or a host that is not there; or a host is left out, without which the cluster cannot be verified.
    """
    hosts = None if named is None else [name.strip() for name in named if name.strip()]
    unknown, left_out = sorted(set(hosts or ()) - set(every)), sorted(set(every) - set(of_play))
    if hosts == []:
        problem = "llama_reboot_hosts names no host"
    elif unknown:
        problem = (
            f"llama_reboot_hosts names {', '.join(map(validation.printable, unknown))}, which the cluster does not have"
        )
    elif left_out:
        problem = f"--limit leaves out {', '.join(left_out)}, and the cluster is verified as a whole after each reboot"
    else:
        return list(every) if hosts is None else hosts
    raise Refusal(
        f"{problem}. Run this playbook without --limit, and name the hosts to reboot, like -e llama_reboot_hosts={','.join(every[:2])}"
    )


class ActionModule(Action):
    SPEC = {"hosts": {"type": "list", "elements": "str"}}

    def perform(self, arguments: dict) -> dict:
        # An empty value is given all the same: it must not reboot everything.
        named = (arguments["hosts"] or []) if "hosts" in self.arguments else None
        hosts = chosen(named, inventory.members(self.variables), self.variables["ansible_play_hosts_all"])
        return {"changed": False, "hosts": hosts, "wait_s": WAIT_SECONDS}
