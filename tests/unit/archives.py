"""Archives that no tar writes: Python's tarfile takes them for whole ones, reads headers without an end, or raises anything."""

import gzip
import tarfile


def _header(kind, size):
    member = tarfile.TarInfo("name")
    member.type, member.size = kind, size
    return member.tobuf(tarfile.GNU_FORMAT)


def _extended(kind, body):
    return _header(kind, len(body)) + body + bytes(-len(body) % 512)


def _comment(size, kind=tarfile.XHDTYPE):
    return _extended(kind, (b"%d comment=" % size).ljust(size - 1, b"a") + b"\n") + FILE


FILE = _header(tarfile.REGTYPE, 0)
HOLES = _extended(tarfile.XHDTYPE, b"22 GNU.sparse.major=1\n22 GNU.sparse.minor=0\n")
LONG_NAME = _header(tarfile.GNUTYPE_LONGNAME, 2) + b"a".ljust(512, b"\0")
ODD = {
    "a name of a name of a name": gzip.compress(LONG_NAME * 3000 + _header(tarfile.REGTYPE, 0) + bytes(1024)),
    "a name of 4 EiB": gzip.compress(_header(tarfile.GNUTYPE_LONGNAME, 1 << 62) + bytes(2048)),
    "a name of 1 YiB": gzip.compress(_header(tarfile.GNUTYPE_LONGNAME, 1 << 80) + bytes(2048)),
    "a comment of 17 MiB": gzip.compress(_comment(17 << 20)),
    "a name of 17 MiB": gzip.compress(_extended(tarfile.GNUTYPE_LONGNAME, b"a" * (17 << 20)) + FILE),
    "comments of 17 MiB together": gzip.compress(_comment(1 << 16) * 272),
    "a comment on all files": gzip.compress(_comment(2000, tarfile.XGLTYPE)),
    "headers of 17 MiB": gzip.compress(FILE * (17 << 11)),
    "a file with holes": gzip.compress(_header(tarfile.GNUTYPE_SPARSE, 0) + bytes(1024)),
    "a file with a list of holes": gzip.compress(
        HOLES + _header(tarfile.REGTYPE, 512) + b"1\n0\n0\n".ljust(512, b"\0")
    ),
    "a file before the archive": gzip.compress(_header(tarfile.GNUTYPE_LONGNAME, -512) + bytes(2048)),
}
