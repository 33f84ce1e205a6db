# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The controller's cache: source archives checked against their sha256, packed releases, known-answer models."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from ansible.errors import AnsibleError
from ansible.module_utils.urls import open_url
from ansible_collections.llamacpp.cluster.plugins.module_utils import known_answer
from ansible_collections.llamacpp.cluster.plugins.module_utils.building import sha256


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "llamacpp"


def _download_pypi(release: dict, folder: Path) -> Path:
    requirement = folder / "requirement.txt"
    requirement.write_text(f"llama-cpp-python=={release['version']} --hash={release['checksum']}\n")
    process = subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "--disable-pip-version-check",
            "download",
            "--quiet",
            "--no-deps",
            "--no-binary",
            "llama-cpp-python",
            "--require-hashes",
            "--dest",
            str(folder),
            "--requirement",
            str(requirement),
        ],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if process.returncode:
        said = process.stderr.strip()
        if "No module named pip" in said:
            raise AnsibleError(
                f"llama_release has source: pypi, and {sys.executable} on the controller has no pip: install it, or use source: archive"
            )
        got = re.search(r"Got\s+([0-9a-f]{64})", said)
        if got:
            raise AnsibleError(
                f"llama_release has the checksum {release['checksum']}, but the source archive of llama-cpp-python {release['version']} "
                f"that pip was offered has sha256:{got[1]}: correct the checksum. If it was right before, do not use what is offered now."
            )
        errors = " ".join(line for line in said.splitlines() if line.startswith("ERROR"))
        raise AnsibleError(
            f"pip could not fetch the source archive of llama-cpp-python {release['version']} (llama_release): check the version and "
            f"the index that pip is configured for. pip says: {errors or said[-500:]}"
        )
    return next(folder.glob("llama_cpp_python-*"))


def _download_url(release: dict, folder: Path) -> Path:
    target = folder / "archive"
    try:
        with open_url(release["url"], timeout=60) as reply, target.open("wb") as stream:
            shutil.copyfileobj(reply, stream)
    except Exception as error:
        raise AnsibleError(
            f"llama_release has the url {release['url']!r}, which could not be fetched: {error}"
        ) from error
    return target


def known_answer_model(layers: int, width: int, kind: str) -> tuple[Path, dict]:
    """The known-answer model in the cache, written if it is not there yet, with its size in ``bytes`` and its ``sha256``.

    :raises AnsibleError: it cannot be written here.
    """
    path = cache_folder() / "models" / f"{known_answer.FORM}-{known_answer.file_name(layers, width, kind)}"
    told = path.with_name(path.name + ".sha256")
    if not path.exists() or not told.exists():
        # The packages gguf and numpy take longer to import than a whole plan: only when they are needed.
        from ansible_collections.llamacpp.cluster.plugins.plugin_utils import known_answer_file

        if not known_answer_file.HAS_GGUF:
            raise AnsibleError(
                f"The known-answer model is written with the Python package gguf, which {sys.executable} on the controller lacks: "
                "install the collection's requirements.txt there."
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        known_answer_file.write(path, layers, width, kind)
        told.write_text(sha256(path) + "\n")
    return path, {"bytes": path.stat().st_size, "sha256": told.read_text().strip()}


def packed_release(identity: str) -> Path:
    """Where a release that one host has built is kept for others of its kind."""
    return cache_folder() / "releases" / f"{identity}.tar.gz"


def fetch(release: dict) -> tuple[Path, bool]:
    """The archive of a planned release in the cache, and whether it had to be brought there.

    :raises AnsibleError: it cannot be fetched, or its sha256 is another; nothing is left in the cache then.
    """
    wanted = release["checksum"].split(":", 1)[1]
    folder = cache_folder() / "sources"
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / f"{wanted[:16]}.tar.gz"
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if kept.exists() and sha256(kept) == wanted:
            return kept, False
        with tempfile.TemporaryDirectory(dir=folder) as work:
            if release["source"] == "pypi":
                archive = _download_pypi(release, Path(work))
            elif "url" in release:
                archive = _download_url(release, Path(work))
            else:
                archive = Path(work) / "archive"
                try:
                    shutil.copyfile(os.path.expanduser(release["path"]), archive)
                except OSError as error:
                    raise AnsibleError(
                        f"llama_release has the path {release['path']!r}, which cannot be read on the controller: {error.strerror}"
                    ) from error
            found = sha256(archive)
            if found != wanted:
                raise AnsibleError(
                    f"llama_release has the checksum sha256:{wanted}, but the archive has sha256:{found}: correct the checksum, or get the right archive"
                )
            archive.replace(kept)
    return kept, True
