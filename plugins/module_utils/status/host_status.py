# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How a host and what runs there is at this moment, read on that host. No worker is asked: its clients are read from the kernel's sockets."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names, reading, typed_json, validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.facts import place as places
from ansible_collections.llamacpp.cluster.plugins.module_utils.facts import resources
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

ASK_SECONDS = 1.0
"""So long llama-server may take for an answer: while it loads a model it answers at once, while it computes within a batch."""


def _verified(path: Path) -> VerificationStatus | None:
    """What verify left on the head, whose age is that of the file; None where that is missing or has another form."""
    try:
        age = max(0, int(time.time() - path.stat().st_mtime))
        return typed_json.parse(VerificationStatus, {**reading.read_object(path, evidence.RECORD_BYTES), "age_s": age})
    except (OSError, ValueError):
        return None


def _head(place: places.InstallationPaths, account: str | None, head: HeadPlan | None) -> types.HeadCondition | None:
    """What the launcher and verify left on the head, and what llama-server says; None on hosts without any of it.

    :param head: None on other hosts.
    """
    folder = Path(place.prefix, "state")
    serving, verified = serving_record.read_record(folder), _verified(Path(place.prefix, names.VERIFIED))
    if not head and not serving and not verified:
        return None
    current = bool(serving and Path(f"/proc/{serving.process}").exists())
    health: Health | None = None
    models: tuple[ModelStatus, ...] = ()
    if head:
        running = processes.account_processes(place.prefix, account)
        current = bool(serving and serving.process in running)
        client = Client(head, running)
        health = client.health(0, ASK_SECONDS)
        if health.healthy and head.models:
            with suppress(OSError):  # a key that cannot be read
                models = client.models(ASK_SECONDS)
    return types.HeadCondition(
        health=health,
        serving=serving,
        current=current,
        waits_for=evidence.waits_for(evidence.handshakes(folder / runtime.HANDSHAKES).workers),
        ends=evidence.exits(folder / runtime.ENDS),
        verified=verified,
        models=models,
    )


def read(
    scope: str,
    planned: HostPlan | None,
    head: HeadPlan | None,
) -> tuple[Drift | None, types.Condition]:
    """How the host differs from its part of the plan (None where there is none), and how it is.

    :param planned: the host's part of the plan; None where there is no plan.
    :param head: of the plan, on its host.
    :raises Refusal: see _check_place.
    """
    place = places.place_of(scope)
    if planned:
        _check_place(places.place_in(planned), place)
    drift = state.drift(planned._replace(port_probes=())) if planned else None
    services = drift.services if drift else {}
    defined = places.defined_services(place.service_manager, place.units)
    manager = managers.manager_of(place)
    now = time.time()
    started = {name: processes.started_at(service.pid) for name, service in services.items()}
    return drift, types.Condition(
        now=int(now),
        service_states=manager.state(defined),
        uptimes_s={name: None if at is None else max(0, int(now - at)) for name, at in started.items()},
        restarts=manager.restarts(defined),
        resources=resources.read_resources([place.prefix, place.cache]),
        head=_head(place, planned.account if planned else None, head),
    )


def _check_place(planned: places.InstallationPaths, here: places.InstallationPaths) -> None:
    """The plan is made of facts that lay on the head, and programs below the prefix are run, and files
    removed, as root: a head that was taken over chooses none.

    :raises Refusal: the plan has the installation somewhere else than this host.
    """
    for key, wanted, actual in zip(places.InstallationPaths._fields, planned, here):
        if wanted != actual:
            raise Refusal(
                f"{key} is {validation.show(wanted)} in the facts that the head keeps, and {actual} on this host: run site.yml, which asks "
                "anew; if it persists, treat the head as compromised (docs/security.md)"
            )
