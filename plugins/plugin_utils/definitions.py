# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Service definitions, rendered from the role llama_host's template for each service manager."""

import functools
import shlex
from collections.abc import Iterable, Mapping, Sequence

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import service_managers, validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import HostPlan, ServicePlan
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.inventory import ROLES_FOLDER
from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape

XML_SUFFIXES = ("plist.j2",)
"""Suffixes of templates that write XML."""
COMMENT_MARKERS, QUOTES = (" ;", " #"), ('"', "'")
"""Texts that start a comment in supervisor's values, and characters that supervisor cannot escape in environment variables."""


def _check_representable(words: Iterable[str], forbidden_texts: Sequence[str] = ()) -> None:
    """Refuse words that no service manager can express, or that contain a forbidden text."""
    for word in words:
        forbidden_text = next((text for text in forbidden_texts if text in word), None)
        if validation.is_plain(word) and not forbidden_text:
            continue
        problem = "contains a line break or another control character, which no service manager can express: remove this character"
        if forbidden_text:
            problem = f"contains {forbidden_text!r}, which supervisor would interpret as syntax: remove it"
        raise Refusal(
            f"{validation.quote(word)} is a path, an argument or an environment variable of a service, and {problem}"
        )


def _escape_for_systemd(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")


def systemd_command(words: Sequence[str]) -> str:
    """Return one line that systemd splits into the same words."""
    _check_representable(words)
    return " ".join('"' + _escape_for_systemd(word).replace("$", "$$") + '"' for word in words)


def systemd_line(text: str) -> str:
    """Return text that systemd reads literally up to the end of the line."""
    _check_representable([text])
    if text.strip() != text or text.endswith("\\"):
        raise Refusal(
            f"{validation.quote(text)} is a path or a description in a service, but systemd drops spaces around it and \\ at its end: remove them"
        )
    return text.replace("%", "%%")


def systemd_environment(variables: Mapping[str, str]) -> str:
    _check_representable(variables.values())
    return " ".join(f'"{name}={_escape_for_systemd(value)}"' for name, value in sorted(variables.items()))


def supervisor_command(words: Sequence[str]) -> str:
    """Return one line that supervisor splits into the same words."""
    _check_representable(words, COMMENT_MARKERS)
    return " ".join(shlex.quote(word).replace("%", "%%") for word in words)


def supervisor_environment(variables: Mapping[str, str]) -> str:
    _check_representable(variables.values(), (*COMMENT_MARKERS, *QUOTES))
    escaped_values = {name: value.replace("%", "%%") for name, value in sorted(variables.items())}
    return ",".join(f'{name}="{value}"' for name, value in escaped_values.items())


@functools.cache
def _jinja_environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(ROLES_FOLDER / "llama_host" / "templates"),
        trim_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
        autoescape=select_autoescape(XML_SUFFIXES),
    )
    environment.filters.update(
        systemd_command=systemd_command,
        systemd_environment=systemd_environment,
        systemd_line=systemd_line,
        supervisor_command=supervisor_command,
        supervisor_environment=supervisor_environment,
    )
    return environment


def definition(host: HostPlan, service: ServicePlan, limit_seconds: int = 0) -> str:
    """Return the definition of a service.

    :param limit_seconds: time limit of a temporary service.
    :raises Refusal: the service manager cannot express a word of the definition.
    """
    template = service_managers.MANAGERS[host.service_manager].template
    return _jinja_environment().get_template(template).render(host=host, service=service, seconds=limit_seconds)
