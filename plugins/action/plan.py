# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Makes the plan on the controller, writes it, and shows it to a person."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display
from ansible_collections.llamacpp.cluster.plugins.module_utils.benchmark import matrix
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.launcher import (
    journal,
    progress,
    runtime,
    server,
    serving,
    tokens,
    worker,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.lifecycle import rollback, teardown
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import rpc
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import known_answer
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import report
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner import neighbours
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner import planner as cluster_plan
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.builds import releases
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import cluster_inputs
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import Catalogue, Cluster
from ansible_collections.llamacpp.cluster.plugins.plugin_utils import definitions, inventory, output
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.sources import sources

display = Display()

RUNTIME = Path(runtime.__file__)
RUNTIME_FILES = [
    RUNTIME,
    *(Path(module.__file__) for module in (server, worker, progress, serving, tokens, journal, rpc)),
]
"""The runtime as it is installed on hosts: runtime.py and what it needs beside it."""


def complete(plan: dict) -> None:
    """Adds to a plan what has to be written on each host: definitions of services, the runtime and the known-answer model.

    :raises Refusal: a service manager cannot express a word of a service.
    """
    for name, host in plan["hosts"].items():
        record = neighbours.record(plan, name)
        host["files"] = [_file(f"{host['prefix']}/{names.CLUSTER_RECORD}", record.encode())]
        if host["runtime"]:
            owner = "root" if host["account"] else None
            host["folders"].append({"path": host["runtime"], "owner": owner, "mode": "0755"})
            host["files"] += [
                _file(f"{host['runtime']}/{path.name}", path.read_bytes(), source=path) for path in RUNTIME_FILES
            ]
        for service in host["services"]:
            try:
                service["definition"] = definitions.definition(host, service)
            except Refusal as refusal:
                raise Refusal(f"{service['name']} on {name}: {refusal}") from None
    head, model = plan["head"], plan["model"]
    if head["fallback_after"] is not None:
        own = plan["hosts"][head["host"]]
        own["files"].append(_file(f"{own['prefix']}/{names.FALLBACKS}", _fallbacks(plan).encode()))
    fetched = [file for file in model["files"] if file["url"]]
    if fetched and all(file["bytes"] is not None for file in fetched):
        plan["hosts"][head["host"]]["model"] = {"files": fetched, "records": model["records"]}
    if model["known_answer"]:
        size = known_answer.file_bytes(*(model["known_answer"][key] for key in ("layers", "width", "type")))
        written = {"path": model["path"], "bytes": size, "record": known_answer.record_of(model["path"])}
        plan["hosts"][head["host"]]["files"].append(written)


def _fallbacks(plan: dict) -> str:
    """What the launcher of the head reads of the fallbacks, as JSON."""
    entries = [
        {
            "name": fallback["without"],
            "without": fallback["endpoint"],
            "workers": fallback["workers"],
            "argv": fallback["head"]["argv"],
        }
        for fallback in plan["fallbacks"]
    ]
    return json.dumps(entries, indent=1) + "\n"


def _file(path: str, data: bytes, source: Path | None = None) -> dict:
    """An entry of ``files`` that the run writes: from a file of the controller, or as text."""
    return {
        "path": path,
        "mode": "0644",
        "bytes": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
        **({"source": str(source)} if source else {"content": data.decode()}),
    }


def keep_facts(plan: dict, cluster: Cluster) -> None:
    """Adds to the files of the plan the facts that are left on the head, for a run in which a host does not answer."""
    facts = {name: host.kept_facts for name, host in cluster.hosts.items()}
    text = json.dumps(facts, indent=1, sort_keys=True) + "\n"
    head = plan["hosts"][plan["head"]["host"]]
    head["files"].append(_file(f"{head['prefix']}/{names.KEPT_FACTS}", text.encode()))


def identify(plan: dict) -> None:
    """Gives the completed plan and each host's part the id under which hosts keep it."""
    plan["id"] = rollback.identity(plan)
    for host in plan["hosts"].values():
        host["id"] = plan["id"]


def _empty(answers: dict, cluster: str) -> dict:
    try:
        return teardown.plan(answers, cluster)
    except Refusal as refusal:
        raise AnsibleActionFail(str(refusal)) from None


class ActionModule(ActionBase):
    _supports_check_mode = True
    TRANSFERS_FILES = False

    def run(self, tmp=None, task_vars=None):
        super().run(tmp, task_vars)
        _checked, arguments = self.validate_argument_spec(
            argument_spec={
                "facts": {"type": "dict", "default": {}},
                "model": {"type": "dict"},
                "path": {"type": "path"},
                "staging": {"type": "bool", "default": False},
                "empty": {"type": "bool", "default": False},
                "page": {"type": "bool", "default": False},
                "show": {"type": "bool", "default": True},
                "html": {"type": "path"},
                "report": {"type": "path"},
            }
        )
        if arguments["empty"]:
            return {"changed": False, "plan": _empty(arguments["facts"], inventory.cluster_of(task_vars))}
        digest = hashlib.sha256(b"".join(path.read_bytes() for path in RUNTIME_FILES)).hexdigest()[:12]
        staging = arguments["staging"]
        try:
            name, hosts = inventory.hosts(task_vars, arguments["facts"], inventory.of_play(task_vars))
            catalogue = cluster_inputs.catalogue(inventory.packages())
            cluster = cluster_inputs.read(name, hosts)
            # What a benchmark cannot measure is refused now, not when it begins.
            matrix.request_of(hosts[cluster.head]["variables"])
            cluster = self._look_up_releases(cluster, catalogue, task_vars)
            plan = cluster_plan.make(cluster, arguments["model"] or {}, catalogue, digest, staging)
            if not plan["refused"]:
                complete(plan)
                keep_facts(plan, cluster)
        except Refusal as refusal:
            plan = cluster_plan.refused(inventory.cluster_of(task_vars), refusal)
        if not plan["refused"] and not staging:
            identify(plan)
        if staging or not arguments["show"]:
            return {"changed": False, "plan": plan}
        if arguments["path"]:
            output.write("llama_plan_path", arguments["path"], json.dumps(plan, indent=2) + "\n")
        if arguments["page"]:
            if plan["refused"]:
                output.show_plan(plan, None, arguments["html"], arguments["report"])
        elif not plan["refused"]:
            display.display(report.plan_table(plan))
        for advisory in [] if arguments["page"] else plan.get("advisories", []):
            display.warning(
                f"{advisory['id']} ({advisory['severity']}{', accepted' if advisory['accepted'] else ''}): {advisory['message']} {advisory['remedy']}"
            )
        if plan["refused"]:
            why = " ".join(reason.rstrip(".") + "." for reason in plan["reasons"])
            if arguments["page"]:
                why = "the page above says why."
            return {"failed": True, "msg": f"The plan is refused, nothing was changed: {why}"}
        return {"changed": False, "plan": plan}

    def _look_up_releases(self, cluster: Cluster, catalogue: Catalogue, task_vars: dict) -> Cluster:
        """The cluster with what only the controller can look up in those releases of which some host has a build."""

        def find(path):
            beside = os.path.join(task_vars.get("inventory_dir") or "", os.path.expanduser(path))
            return beside if os.path.isabs(beside) and os.path.exists(beside) else self._find_needle("files", path)

        resolved = {}
        for variable in cluster_plan.release_variables(cluster, catalogue):
            try:
                resolved[variable] = sources.resolve(cluster.releases[variable], find)
            except Refusal as refusal:
                raise releases.name_variable(refusal, variable) from None
        return cluster._replace(releases={**cluster.releases, **resolved})
