# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Files and commands by which a host's settings are read and changed: links, firewall and kernel parameters."""

from __future__ import annotations

from pathlib import Path

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import commands, files

COMMAND_SECONDS = 60


class System:
    """The host's files and commands."""

    def __init__(self, root: Path = Path("/")):
        self.root = root

    def path(self, name: str) -> Path:
        return self.root / name.lstrip("/")

    def text(self, name: str) -> str:
        """Content of a file, nothing if there is none."""
        return files.text_of(self.path(name))

    def program(self, name: str) -> str | None:
        """Path of a program that is installed."""
        return commands.find(name)

    def run(self, argv: list[str], text: str = "", may_fail: bool = False, seconds: float = COMMAND_SECONDS) -> str:
        """What a command prints, given ``text``.

        :raises CommandError: it fails.
        """
        return commands.run(argv, seconds, text, may_fail)

    def output(self, *argv: str) -> str:
        """What a command prints; nothing where it fails."""
        try:
            return self.run(list(argv))
        except commands.CommandError:
            return ""
