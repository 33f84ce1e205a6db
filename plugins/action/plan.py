# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Makes the plan on the controller, writes it, and shows it to a person."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from ansible.plugins.action import ActionBase
from ansible.utils.display import Display
from ansible_collections.llamacpp.cluster.plugins.module_utils.check import report
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names, service_managers
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.refusal import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.launch import runtime
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import rpc
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import changes as decisions
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import cluster as cluster_plan
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import releases, workers
from ansible_collections.llamacpp.cluster.plugins.plugin_utils import definitions, html_page, inventory, output, sources

display = Display()

RUNTIME = Path(runtime.__file__)
RUNTIME_FILES = [RUNTIME, Path(rpc.__file__)]
"""The runtime as it is installed on the head: runtime.py and what it needs beside it."""


def complete(plan: dict) -> None:
    """Adds to a plan what has to be written on each host: definitions of services, the runtime and the known-answer model."""
    for host in plan["hosts"].values():
        host["host_settings"] = service_managers.MANAGERS[host["service_manager"]].host_settings
        host["build_account"] = host["accounts"][-1]["name"] if host["accounts"] else None
        host["files"] = []
        if host["runtime"]:
            owner = "root" if host["account"] else None
            host["folders"].append({"path": host["runtime"], "owner": owner, "mode": "0755"})
            host["files"] += [
                _file(f"{host['runtime']}/{path.name}", path.read_bytes(), source=path) for path in RUNTIME_FILES
            ]
        for service in host["services"]:
            service["definition"] = definitions.definition(host, service)
    head, model = plan["head"], plan["model"]
    if model["known_answer"]:
        size = (model["known_answer"][key] for key in ("layers", "width", "type"))
        plan["hosts"][head["host"]]["files"].append({"path": model["path"], **sources.known_answer_model(*size)[1]})


def _file(path: str, data: bytes, source: Path | None = None) -> dict:
    """An entry of ``files`` that the run writes: from a file of the controller, or as text."""
    return {
        "path": path,
        "mode": "0644",
        "bytes": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
        **({"source": str(source)} if source else {"content": data.decode()}),
    }


def keep_facts(plan: dict, hosts: dict) -> None:
    """Adds to the files of the plan the facts that are left on the head, for a run in which a host does not answer."""
    facts = {name: workers.planned_from(host["facts"]) for name, host in hosts.items()}
    text = json.dumps(facts, indent=1, sort_keys=True) + "\n"
    head = plan["hosts"][plan["head"]["host"]]
    head["files"].append(_file(f"{head['prefix']}/{names.KEPT_FACTS}", text.encode()))


def show(plan: dict, changed: list[str] | None, html: str | None) -> None:
    """On the screen, and where a path is given in a file."""
    display.display(report.plan_page(plan, changed))
    if html:
        output.write("llama_plan_html_path", html, html_page.page(plan, changed))


class ActionModule(ActionBase):
    _supports_check_mode = True
    TRANSFERS_FILES = False

    def run(self, tmp=None, task_vars=None):
        super().run(tmp, task_vars)
        _checked, arguments = self.validate_argument_spec(
            argument_spec={
                "model": {"type": "dict"},
                "path": {"type": "path"},
                "staging": {"type": "bool", "default": False},
                "page": {"type": "bool", "default": False},
                "html": {"type": "path"},
                "shown": {"type": "dict"},
            }
        )
        if arguments["shown"]:
            return self._show(arguments["shown"], arguments["html"], task_vars["hostvars"])
        cluster, hosts = inventory.hosts(task_vars)
        digest = hashlib.sha256(b"".join(path.read_bytes() for path in RUNTIME_FILES)).hexdigest()[:12]
        staging = arguments["staging"]
        try:
            for name, host in hosts.items():
                variables = host["variables"]
                host["facts"] = workers.known(
                    name, host["facts"], variables["llama_hardware"], variables["llama_host_scope"]
                )
            self._look_up_release(hosts, task_vars)
            plan = cluster_plan.make(cluster, hosts, arguments["model"] or {}, inventory.packages(), digest, staging)
        except Refusal as refusal:
            plan = cluster_plan.refused(cluster, refusal)
        if not plan["refused"]:
            complete(plan)
            keep_facts(plan, hosts)
        if staging:
            return {"changed": False, "plan": plan}
        if arguments["path"]:
            output.write("llama_plan_path", arguments["path"], json.dumps(plan, indent=2) + "\n")
        if arguments["page"]:
            if plan["refused"]:
                show(plan, None, arguments["html"])
        elif not plan["refused"]:
            display.display(report.plan_table(plan))
        for advisory in [] if arguments["page"] else plan.get("advisories", []):
            display.warning(
                f"{advisory['id']} ({advisory['severity']}{', accepted' if advisory['accepted'] else ''}): {advisory['message']} {advisory['remedy']}"
            )
        if plan["refused"]:
            return {
                "failed": True,
                "msg": "The plan is refused, nothing was changed: "
                + " ".join(reason.rstrip(".") + "." for reason in plan["reasons"]),
            }
        return {"changed": False, "plan": plan}

    def _show(self, plan, html, hostvars):
        """Shows a plan that was made before, and what it would change on the hosts that were compared with it since."""
        compared = {name: hostvars[name].get("llama_compared") or {} for name in plan["hosts"]}
        drifts = {name: found["drift"] for name, found in compared.items() if "drift" in found and not found.get("msg")}
        unasked = {
            name: "its hardware is declared in llama_hardware"
            if found.get("skipped")
            else found.get("msg") or "it could not be reached"
            for name, found in compared.items()
            if name not in drifts
        }
        changes = decisions.decide(plan, {**dict.fromkeys(plan["hosts"]), **drifts})
        show(plan, report.changes_of(plan, changes, drifts, unasked), html)
        return {"changed": False, "changes": changes}

    def _look_up_release(self, hosts, task_vars):
        """Puts what only the controller can look up into those of the head's releases of which some host has a build."""

        def find(path):
            beside = os.path.join(task_vars.get("inventory_dir") or "", os.path.expanduser(path))
            return beside if os.path.isabs(beside) and os.path.exists(beside) else self._find_needle("files", path)

        used = cluster_plan.release_variables(hosts, inventory.packages())
        head = next(host for host in hosts.values() if "head" in host["groups"])
        for variable in used:
            try:
                head["variables"][variable] = sources.resolved(head["variables"][variable], find)
            except Refusal as refusal:
                raise releases.renamed(refusal, variable) from None
