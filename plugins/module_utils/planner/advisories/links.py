# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Conditions of advisories about connections to workers: who can reach them, and over which networks."""

from __future__ import annotations

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names, service_managers
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.advisories import remedies
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.advisories.context import AdvisoryContext, Cases

SHARED_LINK_KINDS = ("ethernet", "infiniband", "wireless")
"""Kinds of links that other hosts may share, unless llama_links declares a peer."""


def unfiltered_reason(context: AdvisoryContext, name: str) -> str:
    facts = context.cluster.hosts[name].facts
    if not service_managers.MANAGERS[facts.service_manager].port_filter:
        return f"The service manager ({facts.service_manager}) does not filter addresses"
    if facts.has_unit_filter is None:
        return (
            "It is unknown whether systemd filters addresses there. If systemd-run needs root there, run the playbook with become. If the host is "
            "down, its cached facts are from an older version of the collection: start or retire the host"
        )
    return "Systemd does not filter addresses there, because the kernel or the container lacks BPF for control groups"


def unprotected_workers(context: AdvisoryContext) -> Cases:
    cases: Cases = []
    for name, host in context.plan.hosts.items():
        exposed_endpoints = [worker.listens for worker in host.workers if not names.is_loopback(worker.listens)]
        if exposed_endpoints and not host.unit_closes and not host.firewall_manager:
            values = {
                "where": f"{remedies.join_names(exposed_endpoints)} on {name}",
                "reason": unfiltered_reason(context, name),
                "managers": remedies.join_names(names.FIREWALLS, "or") if host.host_settings else None,
                "scope": "system" if host.service_manager == "systemd_user" else None,
            }
            cases.append((name, values))
    return cases


def idle_workers(context: AdvisoryContext) -> Cases:
    """Return the workers that stages.hosts.without_exposed_workers leaves out."""
    workers = context.candidate.idle_workers
    return [(worker.host, {"where": f"{worker.listens} on {worker.host}"}) for worker in workers]


def external_workers(context: AdvisoryContext) -> Cases:
    """Return external workers that the head reaches over a network, not through a tunnel."""
    endpoints_by_host: dict[str, list[str]] = {}
    for worker in context.plan.external_workers:
        if not names.is_loopback(worker.endpoint):
            endpoints_by_host.setdefault(worker.host, []).append(worker.endpoint)
    return [
        (name, {"where": f"{remedies.join_names(endpoints)} on {name}", "head": context.cluster.head})
        for name, endpoints in endpoints_by_host.items()
    ]


def unencrypted_rpc(context: AdvisoryContext) -> Cases:
    """Return hosts whose workers the head reaches without encryption over a shared network, not over a cable."""
    can_encrypt = context.head.facts.system == service_managers.LINUX
    cases: Cases = []
    for planned_link in {link.host: link for link in context.plan.estimate.links}.values():
        host = context.cluster.hosts.get(planned_link.host)
        if not host or host.is_head or host.transport == names.STUNNEL or planned_link.kind not in SHARED_LINK_KINDS:
            continue
        address = planned_link.endpoint.split(":")[0]
        if not any(link.address.split("/")[0] == address and (link.peer or link.manage) for link in host.links):
            place = f"{host.name} over {planned_link.kind}"
            transport = names.STUNNEL if can_encrypt else None
            cases.append((host.name, {"where": place, "head": context.cluster.head, "transport": transport}))
    return cases
