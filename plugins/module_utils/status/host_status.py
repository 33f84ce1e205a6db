# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Current state of a host and its services, read on that host. Workers are not contacted: their clients are read from the kernel's socket tables."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names, reading, typed_json, validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.facts import installation, resources
from ansible_collections.llamacpp.cluster.plugins.module_utils.host import services as managers
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.drift import processes, serving_record, state
from ansible_collections.llamacpp.cluster.plugins.module_utils.launcher import runtime
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.drift import Drift
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import HostPlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import HeadPlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.status import types
from ansible_collections.llamacpp.cluster.plugins.module_utils.verify import evidence
from ansible_collections.llamacpp.cluster.plugins.module_utils.verify.server_client import Client
from ansible_collections.llamacpp.cluster.plugins.module_utils.verify.types import (
    Health,
    ModelStatus,
    VerificationStatus,
)

ASK_TIMEOUT_SECONDS = 1.0
"""Time limit for an answer from llama-server: it answers at once while it loads a model, and after the current batch while it computes."""


def _read_verification(path: Path) -> VerificationStatus | None:
    """Return the record of the last verification on the head, with the age of its file; None if it is missing or invalid."""
    try:
        age_s = max(0, int(time.time() - path.stat().st_mtime))
        return typed_json.parse(
            VerificationStatus, {**reading.read_object(path, evidence.MAX_RECORD_BYTES), "age_s": age_s}
        )
    except (OSError, ValueError):
        return None


def _head_condition(
    paths: installation.InstallationPaths, account: str | None, head: HeadPlan | None
) -> types.HeadCondition | None:
    """Return the reports of the launcher, verify and llama-server on the head; None on other hosts."""
    folder = Path(paths.prefix, "state")
    record = serving_record.read_record(folder)
    verification = _read_verification(Path(paths.prefix, names.VERIFICATION_FILE))
    if not head and not record and not verification:
        return None
    is_current = bool(record and Path(f"/proc/{record.process}").exists())
    health: Health | None = None
    models: tuple[ModelStatus, ...] = ()
    if head:
        argv_by_pid = processes.account_processes(paths.prefix, account)
        is_current = bool(record and record.process in argv_by_pid)
        client = Client(head, lambda: argv_by_pid)
        health = client.wait_for_health(0, ASK_TIMEOUT_SECONDS)
        if health.healthy and head.models:
            with suppress(OSError):  # the file with the API key cannot be read
                models = client.models(ASK_TIMEOUT_SECONDS)
    return types.HeadCondition(
        health=health,
        serving=record,
        current=is_current,
        waits_for=evidence.wait_reasons(evidence.read_handshakes(folder / runtime.HANDSHAKES_FILE).workers),
        ends=evidence.read_exits(folder / runtime.EXITS_FILE),
        verified=verification,
        models=models,
    )


def examine_host(scope: str, host_plan: HostPlan | None, head: HeadPlan | None) -> tuple[Drift | None, types.Condition]:
    """Return the host's differences from its part of the plan (None without a plan), and its condition."""
    paths = installation.detect_paths(scope)
    if host_plan:
        _check_paths(installation.planned_paths(host_plan), paths)
    drift = state.compare_host(host_plan._replace(port_probes=())) if host_plan else None
    services = drift.services if drift else {}
    service_names = installation.defined_services(paths.service_manager, paths.units)
    manager = managers.manager_of(paths)
    now_s = time.time()
    start_times = {name: processes.start_time(service.pid) for name, service in services.items()}
    return drift, types.Condition(
        now=int(now_s),
        service_states=manager.states(service_names),
        uptimes_s={
            name: None if start_time is None else max(0, int(now_s - start_time))
            for name, start_time in start_times.items()
        },
        restarts=manager.restart_counts(service_names),
        resources=resources.read_resources([paths.prefix, paths.cache]),
        head=_head_condition(paths, host_plan.account if host_plan else None, head),
    )


def _check_paths(planned_paths: installation.InstallationPaths, actual_paths: installation.InstallationPaths) -> None:
    """Check the paths of the installation. The plan comes from facts stored on the head, and root runs programs and removes files below the
    prefix, so a compromised head must not choose the prefix.

    :raises Refusal: the installation has different paths in the plan and on this host.
    """
    for field, planned_value, actual_value in zip(installation.InstallationPaths._fields, planned_paths, actual_paths):
        if planned_value != actual_value:
            raise Refusal(
                f"{field} is {validation.quote(planned_value)} in the facts cached on the head, but {actual_value} on this host: run site.yml to gather facts "
                "again. If the paths still differ, treat the head as compromised (docs/security.md)"
            )
