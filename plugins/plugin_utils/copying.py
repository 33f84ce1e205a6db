# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Other action plugins, Ansible's own copy and fetch among them, for action plugins."""

from __future__ import annotations

from ansible.plugins.action import ActionBase
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import validation


def run(action: ActionBase, task_vars: dict, name: str, arguments: dict) -> dict:
    """What another action plugin returns."""
    task = action._task.copy()
    task.args = arguments
    return action._shared_loader_obj.action_loader.get(
        name,
        task=task,
        connection=action._connection,
        play_context=action._play_context,
        loader=action._loader,
        templar=action._templar,
        shared_loader_obj=action._shared_loader_obj,
    ).run(task_vars=task_vars)


def why(result: dict) -> str:
    """Why one of these has failed: ansible-core 2.19 and newer hand over a chain of events in place of a message."""
    texts = [str(result["msg"])] if result.get("msg") else []
    event = getattr(result.get("exception"), "event", None)
    while event:
        texts.append(event.msg)
        event = getattr(event.chain, "event", None)
    return validation.printable(": ".join(dict.fromkeys(text.rstrip(".") for text in texts))) or "no reason was given"


def copy(action: ActionBase, task_vars: dict, source: str, target: str) -> dict:
    """Copies a file of the controller to the host as ``ansible.builtin.copy`` does and returns its result."""
    return run(action, task_vars, "ansible.legacy.copy", {"src": source, "dest": target, "mode": "0644"})


def fetch(action: ActionBase, task_vars: dict, source: str, target: str) -> dict:
    """Copies a file of the host to the controller as ``ansible.builtin.fetch`` does and returns its result."""
    return run(action, task_vars, "ansible.legacy.fetch", {"src": source, "dest": target, "flat": True})
