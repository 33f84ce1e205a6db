# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Definitions of services, written from the templates of the role llama_host as each service manager reads them."""

from __future__ import annotations

import functools
import shlex
from collections.abc import Iterable

from ansible.errors import AnsibleActionFail
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import service_managers, untrusted
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.inventory import ROLES
from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape

MARKUP = ("plist.j2",)
"""Endings of templates that write XML."""
COMMENTS = (" ;", " #")
"""Where supervisor reads the rest of a value as a comment."""


def _check(values: Iterable[str], comments: Iterable[str] = ()) -> None:
    """:param comments: texts that no value may hold."""
    for value in values:
        if not untrusted.is_plain(value):
            wrong = "has a line break or another control character, which no service manager can express: remove it"
        elif any(text in value for text in comments):
            wrong = "supervisor reads a part of it as a comment: remove the space before ; or #"
        else:
            continue
        raise AnsibleActionFail(
            f"{untrusted.show(value)} is a path, an argument or an environment variable of a service, and {wrong}"
        )


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")


def systemd_command(words: list[str]) -> str:
    """One line that systemd splits again into the same words."""
    _check(words)
    return " ".join('"' + _escaped(word).replace("$", "$$") + '"' for word in words)


def systemd_environment(variables: dict[str, str]) -> str:
    _check(variables.values())
    return " ".join(f'"{name}={_escaped(value)}"' for name, value in sorted(variables.items()))


def supervisor_command(words: list[str]) -> str:
    """One line that supervisor splits again into the same words."""
    _check(words, COMMENTS)
    return " ".join(shlex.quote(word).replace("%", "%%") for word in words)


def supervisor_environment(variables: dict[str, str]) -> str:
    _check(variables.values(), COMMENTS)
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in sorted(variables.items()))


def shell_word(text: str) -> str:
    """One word of a script."""
    _check([text])
    return shlex.quote(text)


def openrc_command(words: list[str]) -> str:
    """One word of a script, which OpenRC evaluates and so splits again into the same words."""
    return shell_word(" ".join(shell_word(word) for word in words))


@functools.cache
def _templates() -> Environment:
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
    return environment


def definition(host: dict, service: dict) -> str:
    """The definition of a service.

    :param host: ``plan["hosts"][name]``.
    :param service: one of its services.
    """
    template = service_managers.MANAGERS[host["service_manager"]].template
    return _templates().get_template(template).render(host=host, service=service)
