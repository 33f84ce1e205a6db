# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Errors that stop a run. Each message names the subject, the fact and the remedy."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class Refusal(ValueError):
    """Refusal of a request that cannot be planned or executed; the message names the subject, the fact and the remedy."""


REMEDIES = {
    errno.ENOSPC: "Free space on {mount} and run the playbook again",
    errno.EDQUOT: "Raise the quota on {mount}, or remove files there, and run the playbook again",
    errno.EROFS: "{mount} is read-only (see dmesg): remount it read-write and run the playbook again",
    errno.EIO: "The disk behind {mount} is failing (see dmesg): repair or replace the disk and run the playbook again",
    errno.EACCES: "Use an account that has permission (become), or check the owner and mode of the path",
    errno.EPERM: "Use an account that has permission (become), or check the owner and attributes of the path",
}


def mount_point(path: str) -> Path:
    """Return the mount point of the file system that contains a path, or would contain it."""
    mount = Path(os.path.realpath(path))
    while not os.path.ismount(mount) and mount != mount.parent:
        mount = mount.parent
    return mount


def message_of(error: OSError, *folders: str) -> str:
    """Return a message with the paths of an error, its reason and a remedy.

    :param folders: folders to name if the error names no absolute path.
    """
    paths = [os.fsdecode(name) for name in (error.filename, error.filename2) if isinstance(name, (str, bytes))]
    absolute_paths = [path for path in paths if os.path.isabs(path)] or folders or ["/"]
    mounts = list(dict.fromkeys(mount_point(path) for path in absolute_paths))
    remedy = REMEDIES.get(error.errno or 0, "Fix this on the host and run the playbook again")
    remedy = remedy.format(mount=" or ".join(map(str, mounts)))
    return f"{' → '.join(paths)}{': ' * bool(paths)}{error.strerror or error}. {remedy}."


@contextmanager
def report_errors(module: Any) -> Iterator[None]:
    """Call ``fail_json`` of a module with a message if the block fails."""
    try:
        yield
    except Refusal as error:
        module.fail_json(msg=str(error))
    except OSError as error:
        module.fail_json(msg=message_of(error))
