# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Writes an HTML report from files that other playbooks have written on the controller, or writes a bug bundle."""

import json
import os
import platform
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from ansible import constants, release
from ansible.errors import AnsibleError
from ansible.module_utils.common.yaml import yaml_load
from ansible.utils.display import Display
from ansible_collections.llamacpp.cluster.plugins.module_utils.benchmark.types import Benchmark
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import reading, typed_json, validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import Plan, Refused
from ansible_collections.llamacpp.cluster.plugins.module_utils.verify.types import Report
from ansible_collections.llamacpp.cluster.plugins.plugin_utils import inventory, output
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.action import Action, ControllerPath
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.report import bundle

COLLECTION_ROOT = Path(__file__).resolve().parents[2]
"""Folder of the collection."""
MAX_LOG_BYTES = 1 << 18
MAX_FILE_BYTES = 64 << 20
"""Maximum size of a file; a cell of a benchmark takes 3 kB."""

display = Display()


class ReportArguments(NamedTuple):
    path: ControllerPath
    plan: ControllerPath | None = None
    verified: ControllerPath | None = None
    benchmark: ControllerPath | None = None
    bundle: Mapping[str, Any] | None = None
    """Argument of bundle.make_bundle."""


def _read_record(variable: str, path: str | None, record_type: type, refused_type: type | None = None) -> Any:
    """Return the content of the file to which a variable is set; None without a path.

    :param refused_type: type of a file without ``hosts``, if it differs.
    """
    if not path:
        return None
    sentence_start = f"{variable} is {validation.quote(path)}"
    try:
        text = reading.read_start(Path(os.path.expanduser(path)), MAX_FILE_BYTES + 1, follows_links=True)
        if len(text) > MAX_FILE_BYTES:
            raise ValueError(f"it has more than {MAX_FILE_BYTES} bytes")
        data = reading.parse(text)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else validation.printable(error)
        raise Refusal(
            f"{sentence_start}, which cannot be read on the controller: {reason}. Use a file written by one of the playbooks."
        ) from None
    record_type = refused_type if refused_type and "hosts" not in data else record_type
    try:
        return typed_json.parse(record_type, data)
    except typed_json.Mismatch as error:
        raise Refusal(
            f"{sentence_start}, which does not have this version's format: {error}. Use a file written by a playbook of this version."
        ) from None


def _read_versions() -> dict[str, str]:
    """Return the version of the collection, and the commit of a clone, with ``-dirty`` if files differ from it."""
    versions, is_clone = {"collection": "unknown", "commit": ""}, (COLLECTION_ROOT / "galaxy.yml").exists()
    with suppress(OSError, ValueError, KeyError):
        manifest = yaml_load((COLLECTION_ROOT / ("galaxy.yml" if is_clone else "MANIFEST.json")).read_text())
        versions["collection"] = str(manifest.get("collection_info", manifest)["version"])
        argv = ["git", "-C", str(COLLECTION_ROOT), "describe", "--always", "--dirty"]
        if is_clone:
            versions["commit"] = subprocess.run(argv, capture_output=True, text=True, check=False).stdout.strip()
    return versions


class ActionModule(Action):
    ARGUMENTS = ReportArguments

    def perform(self, arguments: ReportArguments) -> dict:
        if arguments.bundle is not None:
            return self._write_bundle(arguments.path, arguments.bundle)
        benchmark_path = arguments.benchmark
        if benchmark_path and Path(os.path.expanduser(benchmark_path)).is_dir():
            benchmark_path += "/benchmark.json"
        records = (
            _read_record("llama_plan_path", arguments.plan, Plan, Refused),
            _read_record("llama_verify_path", arguments.verified, Report),
            _read_record("llama_benchmark_path", benchmark_path, Benchmark),
        )
        if not any(records):
            raise Refusal(
                "No input file is set: set llama_plan_path, llama_verify_path or llama_benchmark_path to a file written by a playbook."
            )
        output.write_report(arguments.path, *records)
        return {"changed": False}

    def _write_bundle(self, path: str, records: Mapping[str, Any]) -> dict:
        log_path = Path(constants.DEFAULT_LOG_PATH) if constants.DEFAULT_LOG_PATH else None
        log_text = reading.read_tail(log_path, MAX_LOG_BYTES) if log_path and log_path.is_file() else ""
        records = {**records, "controller": self._describe_controller([*records["reports"]]), "log": log_text}
        visible_text = json.dumps([records["plan"], records["facts"]], ensure_ascii=False)
        text = bundle.make_bundle(records, self._find_secrets([*records["reports"]], visible_text))
        if not self.check_mode:
            output.write("llama_report_bundle", path, text, 0o600)
            display.display(f"  The bundle was written to {validation.printable(path)}. {bundle.README}")
        return {"changed": False}

    def _describe_controller(self, hosts: list[str]) -> dict[str, Any]:
        """Return the versions of the collection, ansible-core and Python, and the collection's variables in the inventory."""
        variable_names = {*inventory.specification(), *inventory.run_variables()}
        variables: dict[str, dict[str, Any]] = {}
        for host in hosts:
            host_variables = self.variables["hostvars"][host]
            variables[host] = {}
            for name in sorted(variable_names.intersection(host_variables)):
                with suppress(AnsibleError):
                    variables[host][name] = inventory.strip_origin(host_variables[name])
        return {
            **_read_versions(),
            "ansible_core": release.__version__,
            "python": platform.python_version(),
            "inventory": variables,
        }

    def _find_secrets(self, hosts: list[str], visible_text: str) -> dict[str, str]:
        """Return the kind of each secret: values of variables, and passwords that the operator typed."""
        harmless_names = {*inventory.specification(), *inventory.run_variables(), *constants.INTERNAL_STATIC_VARS}
        passwords = (self._play_context.password, self._play_context.become_pass)
        secrets = {str(password): "Ansible password" for password in passwords if password}
        for name in hosts:
            host_variables, variables = self.variables["hostvars"][name], {}
            for variable in host_variables:
                if variable not in harmless_names:
                    with suppress(AnsibleError):
                        variables[variable] = host_variables[variable]
            secrets.update(bundle.find_secrets(variables, harmless_names, visible_text))
        return secrets
