# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Sends files of the controller, or files that it downloads, to a host in pieces. No whole file is kept here meanwhile."""

from __future__ import annotations

import hashlib
import os
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
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.action import Action, Lease, why

MODULE = "llamacpp.cluster.model_upload"
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
    """Sends to one host."""

    def __init__(self, action: Action, folder: str, show: Callable[[download.ProgressReport], None]) -> None:
        """:param folder: of all models on the host."""
        self._action, self._folder, self._show = action, folder, show
        self._lease = Lease(action, os.path.dirname(folder))

    def send(self, file: ModelFile, offset: int, token: str | None) -> str:
        """Sends a file from there to its end; returns its sha256.

        :raises AnsibleActionFail: it cannot be read or sent.
        """
        with _sentences(), tempfile.TemporaryDirectory(dir=C.DEFAULT_LOCAL_TMP) as folder:
            digest, piece = hashlib.sha256(), _Piece(Path(folder, "piece"), offset)

            def take(data: bytes) -> None:
                digest.update(data)
                piece.write(data)
                if piece.count >= PIECE or piece.end == file.bytes:
                    self._send(file, piece)

            if file.local_path:
                _read(file, offset, take)
            else:
                download.receive(file, token, offset, take)
            return file.sha256 or digest.hexdigest()

    def _send(self, file: ModelFile, piece: _Piece) -> None:
        self._lease.renew_in_time()
        sha256 = piece.close()
        try:
            path = self._action.transfer(str(piece.path), "piece")
        except AnsibleError as error:
            raise AnsibleActionFail(
                f"A piece of {file.name} could not be sent ({why({'msg': str(error)})}): it needs {PIECE >> 20} MiB in the temporary folder of the "
                "host (remote_tmp of Ansible). Run the playbook again, which continues there"
            ) from error
        arguments = {"path": str(file.path), "bytes": file.bytes, "folder": self._folder}
        arguments["piece"] = {"path": path, "offset": piece.offset, "sha256": sha256}
        result = self._action.module(arguments, MODULE)
        host = self._action.host
        if result.get("failed"):
            raise AnsibleActionFail(validation.printable(str(result.get("msg") or f"{host} gave no reason")))
        if result.get("bytes") != piece.end:
            raise Refusal(f"{host} has {result.get('bytes')!r} bytes of {file.name}, and {piece.end} were sent")
        piece.start(piece.end)
        self._show(download.ProgressReport(file.name, download.DOWNLOAD, 1, piece.offset, file.bytes))


class _Piece:
    """A file of this controller that is sent next."""

    def __init__(self, path: Path, offset: int) -> None:
        self.path = path
        self.start(offset)

    def start(self, offset: int) -> None:
        """:param offset: its place in the whole file."""
        self.offset, self.count = offset, 0
        self._digest, self._stream = hashlib.sha256(), self.path.open("wb")

    @property
    def end(self) -> int:
        return self.offset + self.count

    def write(self, data: bytes) -> None:
        self._stream.write(data)
        self._digest.update(data)
        self.count += len(data)

    def close(self) -> str:
        """Its sha256."""
        self._stream.close()
        return self._digest.hexdigest()
