# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Sends files of the controller, or files that it downloads, to a host in pieces. No whole file is kept here meanwhile."""

from __future__ import annotations

import hashlib
import shlex
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import ansible.constants as C
from ansible.errors import AnsibleActionFail, AnsibleError
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import errors, reading, validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.models import download, partial_file
from ansible_collections.llamacpp.cluster.plugins.module_utils.models.model_files import ModelFile
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.action import Action, why

PIECE = 256 << 20
"""Bytes that are sent at once: they lie twice on the host until they are added to the file."""


@contextmanager
def _sentences() -> Iterator[None]:
    """:raises AnsibleActionFail: in place of errors of the controller."""
    try:
        yield
    except Refusal as error:
        raise AnsibleActionFail(f"{str(error).rstrip('.')}. Run the playbook again, which continues there") from None
    except OSError as error:
        raise AnsibleActionFail(f"On the controller: {errors.sentence(error, tempfile.gettempdir())}") from None


def checksum(file: ModelFile) -> str:
    """The sha256 of a file of the controller.

    :raises AnsibleActionFail: it cannot be read, or has changed.
    """
    digest = hashlib.sha256()
    with _sentences():
        _read(file, 0, digest.update)
    return digest.hexdigest()


def _read(file: ModelFile, offset: int, take: Callable[[bytes], object]) -> None:
    """Hands on a file of the controller from there.

    :raises Refusal: it has another size than planned.
    """
    path = Path(str(file.local_path))
    size = reading.from_disk(path, path.stat).st_size
    if size != file.bytes:
        raise Refusal(f"{path} has {size} bytes, and had {file.bytes} when it was planned")
    with reading.from_disk(path, partial(path.open, "rb")) as stream:
        stream.seek(offset)
        left = size - offset
        while left and (data := reading.from_disk(path, partial(stream.read, min(partial_file.PIECE, left)))):
            take(data)
            left -= len(data)


class Sender:
    """Sends files to one host, where each grows as NAME.part beside its place."""

    def __init__(self, action: Action, prefix: str, show: Callable[[download.ProgressReport], None]) -> None:
        """:param prefix: of the installation on the host."""
        self._action, self._show = action, show

    def send(self, file: ModelFile, offset: int, token: str | None) -> str:
        """Sends a file from there to its end; returns its sha256.

        :raises AnsibleActionFail: it cannot be read or sent.
        """
        digest = hashlib.sha256()
        with _sentences(), tempfile.NamedTemporaryFile(dir=C.DEFAULT_LOCAL_TMP) as piece:

            def take(data: bytes) -> None:
                nonlocal offset
                digest.update(data)
                piece.write(data)
                end = offset + piece.tell()
                if end - offset >= PIECE or end == file.bytes:
                    piece.flush()
                    self._add(file, piece.name, offset, end)
                    piece.seek(0)
                    piece.truncate()
                    offset = end

            if file.local_path:
                _read(file, offset, take)
            else:
                download.receive(file, token, offset, take)
        return file.sha256 or digest.hexdigest()

    def _add(self, file: ModelFile, path: str, offset: int, end: int) -> None:
        """Adds a file of the controller to the part on the host, which has ``offset`` bytes; a damaged one is noticed when the whole is checked."""
        folder, part = shlex.quote(str(file.path.parent)), shlex.quote(str(file.part))
        try:
            sent = shlex.quote(self._action.transfer(path, "piece"))
        except AnsibleError as error:
            raise AnsibleActionFail(
                f"A piece of {file.name} could not be sent ({why({'msg': str(error)})}): it needs {PIECE >> 20} MiB in the temporary folder of the "
                "host (remote_tmp of Ansible). Run the playbook again, which continues there"
            ) from error
        redirection = ">>" if offset else ">"
        result = self._action.command(
            f"umask 022 && mkdir -p {folder} && [ ! -L {part} ] && [ ! -p {part} ] && cat {sent} {redirection} {part} && wc -c < {part}"
        )
        if result["rc"] or result["stdout"].strip() != str(end):
            reason = validation.printable(
                result["stderr"].strip() or f"it has {result['stdout'].strip()} bytes, not {end}"
            )
            raise Refusal(f"{self._action.host} could not add a piece to {file.part} ({reason})")
        self._show(download.ProgressReport(file.name, download.DOWNLOAD, 1, end, file.bytes))
