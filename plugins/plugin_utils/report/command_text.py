# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Commands of a plan as a shell takes them."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import replies
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import tables
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import (
    Plan,
)


def request_lines(plan: Plan) -> list[str]:
    """Return a request to the server as a shell command."""
    question: dict[str, Any] = {"model": plan.head.models[0].name} if plan.head.models else {}
    path = replies.instead_of_text((plan.head.models[0] if plan.head.models else plan.head).argv)
    question |= (
        replies.question_without_text("Once upon a time")
        if path
        else {"prompt": "", "temperature": 0}
        if plan.per_model()[0].model.known_answer
        else {"prompt": "Once upon a time", "max_tokens": 32}
    )
    key = ["-H", "Authorization: Bearer KEY"] if plan.head.api_key_file else []
    return command_lines(
        ["curl", "-sS", *key, f"{plan.head.url}{path or '/v1/completions'}", "-d", json.dumps(question)], {}, "    "
    )


def command_lines(argv: Iterable[str], environment: Mapping[str, str], start: str = "      ") -> list[str]:
    """Return a shell command with an option and its value on each line, no line longer than the page if possible."""
    words = [f"{name}={shlex.quote(value)}" for name, value in sorted(environment.items())]
    for word in map(shlex.quote, argv):
        if words and words[-1].startswith("-") and " " not in words[-1] and not word.startswith("-"):
            words[-1] += f" {word}"
        else:
            words.append(word)
    lines = [start]
    for word in words:
        if len(lines[-1]) + len(word) + 3 > tables.WIDTH and lines[-1].strip():
            lines[-1] += "\\"
            lines.append(start + "  ")
        lines[-1] += word + " "
    return [line.rstrip() for line in lines]


class Command(NamedTuple):
    """A program that a service, or llama-server itself, runs on a host."""

    host: str
    name: str
    """Name of the service or of the model."""
    argv: tuple[str, ...]
    environment: Mapping[str, str]


def commands(plan: Plan) -> list[Command]:
    started = [
        Command(name, service.name, service.process, service.environment)
        for name, host in plan.hosts.items()
        for service in host.services
    ]
    return [*started, *(Command(plan.head.host, model.name, model.argv, {}) for model in plan.head.models or ())]


def commands_page(plan: Plan) -> list[str]:
    return [
        line
        for command in commands(plan)
        for line in (f"  {command.host}  {command.name}", *command_lines(command.argv, command.environment))
    ]
