"""Archives that no tar writes: Python's tarfile takes them for whole ones, reads headers without an end, or raises anything."""

import gzip
import tarfile

from ansible_collections.llamacpp.cluster.plugins.module_utils.host.builds import archives

LIMIT = 1 << 16


def _header(kind, size):
    member = tarfile.TarInfo("name")
    member.type, member.size = kind, size
    return member.tobuf(tarfile.GNU_FORMAT)


def _extended(kind, body):
    return _header(kind, len(body)) + body + bytes(-len(body) % 512)


def _comments(kind, size, count=1):
    lines = (b"%d comment%d=" % (size, number) for number in range(10, 10 + count))
    return _extended(kind, b"".join(line.ljust(size - 1, b"a") + b"\n" for line in lines)) + FILE


FILE = _header(tarfile.REGTYPE, 0)
HOLES = _extended(tarfile.XHDTYPE, b"22 GNU.sparse.major=1\n22 GNU.sparse.minor=0\n")
LONG_NAME = _header(tarfile.GNUTYPE_LONGNAME, 2) + b"a".ljust(512, b"\0")
ODD = {
    "a name of a name of a name": LONG_NAME * 3000 + FILE + bytes(1024),
    "a name of 4 EiB": _header(tarfile.GNUTYPE_LONGNAME, 1 << 62) + bytes(2048),
    "a name of 1 YiB": _header(tarfile.GNUTYPE_LONGNAME, 1 << 80) + bytes(2048),
    "a long comment": _comments(tarfile.XHDTYPE, 2 * LIMIT),
    "a long name": _extended(tarfile.GNUTYPE_LONGNAME, b"a" * 2 * LIMIT) + FILE,
    "many comments": _comments(tarfile.XHDTYPE, 1 << 12) * 32,
    "many comments on all files": _comments(tarfile.XGLTYPE, 100, 99),
    "many headers": FILE * (LIMIT >> 8),
    "holes without an end": HOLES + _header(tarfile.REGTYPE, 512) + b"9\n0\n".ljust(512, b"0"),
    "a file before the archive": _header(tarfile.GNUTYPE_LONGNAME, -512) + bytes(2048),
}


def write_odd(path, name, monkeypatch):
    """Writes such an archive; its headers are as long as those that are refused."""
    monkeypatch.setattr(archives, "HEADER_BYTES", LIMIT)
    path.write_bytes(gzip.compress(ODD[name]))
