"""Archives that no tar writes, and that Python's tarfile does not read as damaged ones."""

import gzip
import tarfile


def _header(kind, size):
    member = tarfile.TarInfo("name")
    member.type, member.size = kind, size
    return member.tobuf(tarfile.GNU_FORMAT)


LONG_NAME = _header(tarfile.GNUTYPE_LONGNAME, 2) + b"a".ljust(512, b"\0")
ODD = {
    "a name of a name of a name": gzip.compress(LONG_NAME * 3000 + _header(tarfile.REGTYPE, 0) + bytes(1024)),
    "a name of 4 EiB": gzip.compress(_header(tarfile.GNUTYPE_LONGNAME, 1 << 62) + bytes(2048)),
    "a name of 1 YiB": gzip.compress(_header(tarfile.GNUTYPE_LONGNAME, 1 << 80) + bytes(2048)),
    "a file before the archive": gzip.compress(_header(tarfile.GNUTYPE_LONGNAME, -512) + bytes(2048)),
}
