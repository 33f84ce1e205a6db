# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Errors that end a run with a sentence for a person: what, where, and what to do."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class Refusal(ValueError):
    """What cannot be done, or planned. The message says what, where, and what to do."""


REMEDIES = {
    errno.ENOSPC: "Free some space on {mount} and run the playbook again",
    errno.EDQUOT: "Raise the quota on {mount}, or remove some files there, and run the playbook again",
    errno.EROFS: "Find out why {mount} is mounted read-only (see dmesg), mount it writable and run the playbook again",
    errno.EIO: "See dmesg for what is wrong with the disk of {mount}, and run the playbook again when it works",
    errno.EACCES: "Run as an account that may do it (become), or check owner and mode of the path",
    errno.EPERM: "Run as an account that may do it (become), or check owner and attributes of the path",
}


def file_system(path: str) -> Path:
    """Mount point of the file system on which a path is, or would be."""
    place = Path(os.path.realpath(path))
    while not os.path.ismount(place) and place != place.parent:
        place = place.parent
    return place


def sentence(error: OSError, *places: str) -> str:
    """What failed, where, and what to do.

    :param places: folders in which it was written, for an error that names no path, or only its last part.
    """
    paths = [os.fsdecode(name) for name in (error.filename, error.filename2) if isinstance(name, (str, bytes))]
    whole = [path for path in paths if os.path.isabs(path)] or places or ["/"]
    mounts = list(dict.fromkeys(file_system(path) for path in whole))
    remedy = REMEDIES.get(error.errno or 0, "Fix that on the host and run the playbook again")
    remedy = remedy.format(mount=" or ".join(map(str, mounts)))
    return f"{' → '.join(paths)}{': ' * bool(paths)}{error.strerror or error}. {remedy}."


@contextmanager
def reported(module: Any) -> Iterator[None]:
    """Ends a module with a sentence where its work fails.

    :param module: of which ``fail_json`` is called.
    """
    try:
        yield
    except Refusal as error:
        module.fail_json(msg=str(error))
    except OSError as error:
        module.fail_json(msg=sentence(error))
