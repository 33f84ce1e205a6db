# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Judges what a release has proven on the staging ports before it replaces the one that serves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import service_managers
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import printable

SHOWN = 2000
"""Characters of a host's error that are shown."""


def failure(plan: dict[str, Any], errors: Mapping[str, str], report: Mapping[str, Any]) -> str | None:
    """Why a release did not prove itself, with where to look and what to do; None where it did.

    :param plan: for the staging ports.
    :param errors: host → the error of its instances, empty where there was none.
    :param report: of verification.judge on the instances; empty where they did not start.
    """
    problems = {name: printable(text, SHOWN) for name, text in errors.items() if text}
    texts = [f"on {name}: {text.rstrip('. ')}" for name, text in problems.items()]
    failed = [check for check in report.get("checks", []) if check["status"] == "failed"]
    said = [f"{check['name']} of {check['subject']}: {check['evidence']}" for check in failed]
    if not texts and not said:
        if report.get("checks"):
            return None
        said = ["its instances did not start"]
    return (
        f"Release {plan['release']['ref']} did not prove itself on the staging ports: {'; '.join([*texts, *said])}. "
        "What serves was not touched and goes on serving, and the instances are removed. "
        f"Look at {', '.join(_logs(plan, problems, ' '.join(said)))}. "
        "Fix what the log says, or set llama_release back, and run site.yml again."
    )


def _logs(plan: dict[str, Any], problems: Mapping[str, str], said: str) -> list[str]:
    """How to read the logs of the instances that failed, or of all of them where nothing says which."""
    every = [(name, host, service) for name, host in plan["hosts"].items() for service in host["services"]]
    guilty = [
        (name, host, service)
        for name, host, service in every
        if name in problems or (service["kind"] == "worker" and f"{service['listens']}:" in said)
    ]
    return [
        f"{service_managers.log_of(host['service_manager'], host['prefix'], service['name'])} on {name}"
        for name, host, service in guilty or every
    ]
