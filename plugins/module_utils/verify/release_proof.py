# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Judges what a release has proven on the staging ports before it replaces the one that serves."""

from __future__ import annotations

from collections.abc import Mapping

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import service_managers
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import printable
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import Plan
from ansible_collections.llamacpp.cluster.plugins.module_utils.verify.types import Report

SHOWN = 2000
"""Characters of a host's error that are shown."""


def failure(plan: Plan, errors: Mapping[str, str], report: Report | None) -> str | None:
    """Why a release did not prove itself, with where to look and what to do; None where it did.

    :param plan: for the staging ports.
    :param errors: host → the error of its instances, empty where there was none.
    :param report: on the instances; None where they did not start.
    """
    problems = {name: printable(text, SHOWN) for name, text in errors.items() if text}
    failed = "; ".join(check.sentence() for check in report.failed) if report else ""
    if not problems and not failed:
        if report and report.checks:
            return None
        failed = "its instances did not start"
    reasons = [f"on {name}: {text.rstrip('. ')}" for name, text in problems.items()] + [failed] * bool(failed)
    return (
        f"Release {plan.release.ref} did not prove itself on the staging ports: {'; '.join(reasons)}. "
        "What serves was not touched and goes on serving, and the instances are removed. "
        f"Look at {', '.join(_logs(plan, problems, failed))}. "
        "Fix what the log says, or set llama_release back, and run site.yml again."
    )


def _logs(plan: Plan, problems: Mapping[str, str], failed: str) -> list[str]:
    """How to read the logs of the instances that failed, or of all of them where nothing says which."""
    every = [(name, host, service) for name, host in plan.hosts.items() for service in host.services]
    failing = [
        (name, host, service)
        for name, host, service in every
        if name in problems or (service.kind == "worker" and f"{service.listens}:" in failed)
    ]
    return [
        f"{service_managers.log_of(host.service_manager, host.prefix, service.name)} on {name}"
        for name, host, service in failing or every
    ]
