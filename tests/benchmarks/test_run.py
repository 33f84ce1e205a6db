"""What the tests cost: the parts of `make test` one after the other, in a fresh clone with an empty HOME and cold caches.

    python tests/benchmarks/test_run.py                   # all of them
    python tests/benchmarks/test_run.py lint sanity unit  # what make check runs beside each other

Prints a table with the machine. As root, the cache of an earlier demo is out of the way meanwhile.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from first_run import ROOT, machine, seconds

PARTS = ["dev", "check", "integration", "molecule"]
CACHE = Path("/var/cache/llamacpp")


@contextmanager
def cold_cache() -> Iterator[None]:
    """For a demo that runs as root, with nothing that an earlier one has compiled."""
    aside = CACHE.with_name("llamacpp.aside")
    warm = os.geteuid() == 0 and CACHE.exists()
    if warm:
        CACHE.rename(aside)
    try:
        yield
    finally:
        if warm:
            shutil.rmtree(CACHE, ignore_errors=True)
            aside.rename(CACHE)


def main() -> None:
    parts = sys.argv[1:] or PARTS
    work = Path(tempfile.mkdtemp(prefix="llamacpp-benchmark-"))
    clone, home, log = work / "clone", work / "home", work / "log"
    home.mkdir()
    index = Path.home() / ".config" / "pip" / "pip.conf"
    environment = {**os.environ, "HOME": str(home)}
    if index.exists():
        environment.setdefault("PIP_CONFIG_FILE", str(index))
    for name in ("XDG_CACHE_HOME", "XDG_DATA_HOME"):
        environment.pop(name, None)
    busy = os.getloadavg()[0]
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    with cold_cache() if "integration" in parts else nullcontext():
        try:
            took = {part: seconds(["make", part], clone, environment, log) for part in dict.fromkeys(["dev", *parts])}
        except subprocess.CalledProcessError as error:
            sys.exit(f"{error} Its output: {log}")
    ccache = "with ccache" if shutil.which("ccache") else "without ccache"
    print(f"{machine()}, {ccache}, load before {busy:.1f}\n\n| part | s |\n|---|---|")
    for part, time in took.items():
        print(f"| `make {part}` | {time:.0f} |")
    print(f"| together | {sum(took.values()):.0f} |")
    shutil.rmtree(work)


if __name__ == "__main__":
    main()
