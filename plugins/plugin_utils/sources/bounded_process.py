# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Programs of the controller that fetch what others offer: they end in time, with all that they have started, and write no endless file
nor print without end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, cast

FILE_BYTES = 8 << 30
LIMITED = 'ulimit -f "$0" 2>/dev/null; exec "$@"'
BLOCK = 512
"""What ulimit counts in."""
TOO_LARGE = rf"File too large|died of signal {signal.SIGXFSZ.value}"


PRINTED_BYTES = 16 << 20
"""What a program may print: git passes on what a server says."""


class TooLarge(Exception):
    """A file would have had more than FILE_BYTES, or what was printed PRINTED_BYTES."""


class _Printed(threading.Thread):
    """What comes out of a pipe, which is read to its end or to the limit."""

    def __init__(self, pipe: IO[bytes], end: Callable[[], None]) -> None:
        super().__init__(daemon=True)
        self.pipe, self.end = pipe, end
        self.data = bytearray()
        self.start()

    def run(self) -> None:
        with suppress(OSError, ValueError):  # closed, where something that the program has started holds the other end
            while part := os.read(self.pipe.fileno(), 65536):
                self.data += part
                if len(self.data) > PRINTED_BYTES:
                    self.end()
                    return

    @property
    def text(self) -> str:
        return self.data.decode("utf-8", "replace")


def run(
    argv: list[str], seconds: float, folder: Path | str | None = None, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs a program without input; what it printed.

    :param folder: where it starts, this process's own folder by default.
    :raises subprocess.TimeoutExpired: it did not end in time.
    :raises TooLarge: it wrote too much.
    """
    with subprocess.Popen(
        ["/bin/sh", "-c", LIMITED, str(FILE_BYTES // BLOCK), *argv],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=folder,
        env=environment,
        start_new_session=True,
    ) as process:

        def end() -> None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

        deadline = time.monotonic() + seconds
        pipes = [_Printed(cast(IO[bytes], pipe), end) for pipe in (process.stdout, process.stderr)]
        try:
            for pipe in pipes:
                pipe.join(max(0.0, deadline - time.monotonic()))
            if any(pipe.is_alive() for pipe in pipes):
                raise subprocess.TimeoutExpired(argv, seconds)
            process.wait(max(0.0, deadline - time.monotonic()))
        except BaseException:
            end()
            for pipe in pipes:
                pipe.join(1)
            raise
    printed, said = (pipe.text for pipe in pipes)
    if any(len(pipe.data) > PRINTED_BYTES for pipe in pipes):
        raise TooLarge(f"it printed more than {PRINTED_BYTES >> 20} MiB")
    if process.returncode == -signal.SIGXFSZ or (process.returncode and re.search(TOO_LARGE, said)):
        raise TooLarge(f"it has more than {FILE_BYTES >> 30} GiB")
    return subprocess.CompletedProcess(argv, process.returncode, printed, said)
