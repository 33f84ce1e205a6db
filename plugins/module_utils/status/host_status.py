# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How a host and what runs there is at this moment, read on that host. No worker is asked: its clients are read from the kernel's sockets."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ansible_collections.llamacpp.cluster.plugins.module_utils.benchmark import records
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names, reading, typed_json, validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import Each, Maybe, Number, Text
from ansible_collections.llamacpp.cluster.plugins.module_utils.facts import host, resources
from ansible_collections.llamacpp.cluster.plugins.module_utils.host import prune
from ansible_collections.llamacpp.cluster.plugins.module_utils.host import services as managers
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.drift import fallback, state
from ansible_collections.llamacpp.cluster.plugins.module_utils.launcher import runtime
from ansible_collections.llamacpp.cluster.plugins.module_utils.status import metrics
from ansible_collections.llamacpp.cluster.plugins.module_utils.verify import loading, verification

ASK_SECONDS = 1.0
"""So long llama-server may take for an answer: while it loads a model it answers at once, while it computes within a batch."""
LINE = Text(longest=2000)
TOLD = {
    **fallback.FORM,
    "time": Number(),
    "waiting_for": [Text()],
    "restarts": Number(),
    "last": [{"time": Number(), "text": LINE}],
    "load": loading.FORM,
}
"""The form of names.SERVING."""
VERIFIED = {"time": Number(), "passed": bool, "failed": [LINE], "release": Text()}
"""The form of what verify leaves on the head."""
CONDITION = {
    "now": Number(),
    "service_states": Each(("running", "failed", "stopped")),
    "uptimes_s": Each(Maybe(Number())),
    "restarts": Each(Number()),
    "resources": typed_json.shape(resources.Resources),
    "head": Maybe(
        {
            "health": Maybe({"healthy": bool, "said": LINE}),
            "serving": Maybe(TOLD),
            "current": bool,
            "waits_for": [LINE],
            "ends": {"number": Number(), "how": LINE, "log": [LINE]},
            "verified": Maybe(VERIFIED),
            "benchmark": Maybe(Text(records.ID)),
            "metrics": Maybe(typed_json.shape(metrics.Counters)),
        }
    ),
    "unused": Maybe(prune.FORM),
}
"""The form of what read returns: a host that was taken over returns anything."""


def _read(path: Path, shape: Mapping[str, Any]) -> dict | None:
    """What stands in a file of this form; None where it is missing or has another one. Only what the form names, as it can be shown."""
    try:
        found = reading.read_object(path, verification.RECORD_BYTES)
    except (OSError, ValueError):
        return None
    found = {name: found.get(name) for name in shape}
    wrong = validation.problem("", found) or validation.mismatch("", found, shape)
    return None if wrong else validation.complete(found, shape)


def _asked(head: dict[str, Any], running: dict[int, list[str]], account: str | None, asleep: bool) -> dict:
    """``health`` of llama-server, and its ``metrics`` where it has them, and does not sleep: older builds wake to answer."""
    try:
        certificate = verification.certificate_of(head)
        health = verification.wait_for_health(head["own_url"], 0, certificate, ASK_SECONDS)
    except ValueError as error:
        return {"health": {"healthy": False, "said": validation.printable(error)}, "metrics": None}
    counted = None
    if health["healthy"] and not asleep and metrics.OPTION in head["argv"]:
        with suppress(OSError):  # a key that cannot be read
            counted = _counted(head, running, account, certificate)
    return {"health": health, "metrics": typed_json.dump(counted)}


def _counted(
    head: dict[str, Any], running: dict[int, list[str]], account: str | None, certificate: bytes | None
) -> metrics.Counters | None:
    address, key = head["own_url"].split("//", 1)[1], verification.first_key(head["api_key_file"])
    place, port = address.rsplit(":", 1)

    def objection() -> str | None:
        return state.stranger_at(place, int(port), running, account) if key else None

    reply = reading.ask(address, "/metrics", ASK_SECONDS, None, key, objection, certificate)
    return metrics.counters(reply.text) if reply.status == 200 else None


def _head(place: Mapping[str, Any], head: dict[str, Any] | None) -> dict | None:
    """What the launcher and verify left on the head, and what llama-server says; None on hosts without any of it.

    :param head: the head's part of the plan, on its host.
    """
    folder = Path(place["prefix"], "state")
    told, verified = _read(folder / names.SERVING, TOLD), _read(Path(place["prefix"], names.VERIFIED), VERIFIED)
    if not head and not told and not verified:
        return None
    asked: dict = {"health": None, "metrics": None}
    current = bool(told and Path(f"/proc/{told['process']}").exists())
    if head:
        running = state.processes(place["prefix"], place["account"])
        current = bool(told and told["process"] in running)
        asleep = bool(told and current and told["state"] == fallback.ASLEEP)
        asked = _asked(head, running, place["account"], asleep)
    return {
        **asked,
        "serving": told,
        "current": current,
        "waits_for": verification.waits_for(verification.handshakes(folder / runtime.HANDSHAKES)["workers"]),
        "ends": verification.ends(folder / runtime.ENDS),
        "verified": verified,
        "benchmark": records.last(place["prefix"]),
    }


def _unused(planned: dict[str, Any], model: dict[str, Any]) -> list[dict] | None:
    """Of the form unused.FORM; None where a folder cannot be read, or changes meanwhile."""
    with suppress(OSError):
        return prune.as_dicts(prune.find(planned, model))
    return None


def read(
    cluster: str,
    scope: str,
    planned: dict[str, Any] | None,
    head: dict[str, Any] | None,
    model: dict[str, Any] | None = None,
) -> dict:
    """How the host differs from its part of the plan (``drift``, where there is one), and CONDITION.

    :param planned: the host's part of the plan; None where there is no plan.
    :param head: of the plan, on its host.
    :param model: of the plan; None where what nothing uses is not looked for.
    :raises Refusal: see host.check_place.
    """
    here = host.place_of(scope, cluster)
    host.check_place(planned or here, here)
    place = planned or here
    found = {"drift": state.drift({**planned, "knocks": []})} if planned else {}
    services = found["drift"]["services"] if planned else {}
    defined = host.defined_services(place["service_manager"], place["units"], names.of(cluster))
    manager = managers.manager_of(place)
    now = time.time()
    started = {name: state.started_at(service["pid"]) for name, service in services.items()}
    return {
        **found,
        "condition": {
            "now": int(now),
            "service_states": manager.state(defined),
            "uptimes_s": {name: None if at is None else max(0, int(now - at)) for name, at in started.items()},
            "restarts": manager.restarts(defined),
            "resources": typed_json.dump(resources.read([place["prefix"], place["cache"]])),
            "head": _head(place, head),
            "unused": _unused(planned, model) if planned and model else None,
        },
    }
