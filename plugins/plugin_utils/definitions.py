# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Definitions of services, written from the templates of the role llama_host as each service manager reads them."""

from __future__ import annotations

import shlex
from collections.abc import Iterable

from ansible.errors import AnsibleActionFail
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import service_managers
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.inventory import ROLES
from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape

LINE_BREAK = (
    " and has a line break, which no service manager can express: remove it from llama_server_extra_args, "
    "llama_server_environment or llama_worker_endpoints"
)
COMMENT = ", and supervisor reads a part of it as a comment: remove the space before ; or #"
FORBIDDEN = {"\n": LINE_BREAK, "\0": LINE_BREAK}
MARKUP = ("plist.j2",)
"""Endings of templates that write XML."""
FORBIDDEN_FOR_SUPERVISOR = {**FORBIDDEN, " ;": COMMENT, " #": COMMENT}


def _check(values: Iterable[str], forbidden: dict[str, str]) -> None:
    """:param forbidden: text that no value may hold → what is wrong with such a value, and what to do."""
    for text, wrong in forbidden.items():
        for value in values:
            if text in value:
                raise AnsibleActionFail(f"{value!r} is an argument or an environment variable of a service{wrong}")


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")


def systemd_command(words: list[str]) -> str:
    """One line that systemd splits again into the same words."""
    _check(words, FORBIDDEN)
    return " ".join('"' + _escaped(word).replace("$", "$$") + '"' for word in words)


def systemd_environment(variables: dict[str, str]) -> str:
    _check(variables.values(), FORBIDDEN)
    return " ".join(f'"{name}={_escaped(value)}"' for name, value in sorted(variables.items()))


def supervisor_command(words: list[str]) -> str:
    """One line that supervisor splits again into the same words."""
    _check(words, FORBIDDEN_FOR_SUPERVISOR)
    return " ".join(shlex.quote(word).replace("%", "%%") for word in words)


def supervisor_environment(variables: dict[str, str]) -> str:
    _check(variables.values(), FORBIDDEN_FOR_SUPERVISOR)
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in sorted(variables.items()))


def shell_word(text: str) -> str:
    """One word of a script."""
    _check([text], FORBIDDEN)
    return shlex.quote(text)


def openrc_command(words: list[str]) -> str:
    """One word of a script, which OpenRC evaluates and so splits again into the same words."""
    return shell_word(" ".join(shell_word(word) for word in words))


def definition(host: dict, service: dict) -> str:
    """The definition of a service.

    :param host: ``plan["hosts"][name]``.
    :param service: one of its services.
    """
    environment = Environment(
        loader=FileSystemLoader(ROLES / "llama_host" / "templates"),
        trim_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
        autoescape=select_autoescape(MARKUP),
    )
    environment.filters.update(
        systemd_command=systemd_command,
        systemd_environment=systemd_environment,
        supervisor_command=supervisor_command,
        supervisor_environment=supervisor_environment,
        openrc_command=openrc_command,
        shell_word=shell_word,
    )
    template = service_managers.MANAGERS[host["service_manager"]].template
    return environment.get_template(template).render(host=host, service=service)
