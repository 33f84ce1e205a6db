# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Files and commands that read and change a host's settings: links, firewall and kernel parameters."""

from __future__ import annotations

from pathlib import Path

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import commands, files

RUN_TIMEOUT_SECONDS = 60


class System:
    """Files and commands of the host."""

    def __init__(self, root: Path = Path("/")):
        self.root = root

    def path(self, name: str) -> Path:
        return self.root / name.lstrip("/")

    def text(self, name: str) -> str:
        return files.text_of(self.path(name))

    def program(self, name: str) -> str | None:
        return commands.find(name)

    def run(self, argv: list[str], text: str = "", may_fail: bool = False, seconds: float = RUN_TIMEOUT_SECONDS) -> str:
        """Run a command with ``text`` as input, and return its output.

        :raises CommandError: the command fails.
        """
        return commands.run(argv, seconds, text, may_fail)

    def output(self, *argv: str) -> str:
        try:
            return self.run(list(argv))
        except commands.CommandError:
            return ""
