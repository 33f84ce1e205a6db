# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a host has and what runs on it, read on that host."""

from __future__ import annotations

import grp
import os
import platform
import pwd
import re
import shutil
import stat
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import (
    errors,
    files,
    names,
    reading,
    service_managers,
    validation,
    versions,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.commands import ROOT, Ask, output
from ansible_collections.llamacpp.cluster.plugins.module_utils.facts import (
    connection,
    firewall,
    hardware,
    interfaces,
    toolchains,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.facts.place import (
    Place,
    defined_services,
    lingers,
    place_of,
    read_left,
    supervisor_runs,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import toolkits

MINIMUM_PYTHON = (3, 9)
ROOT_FOLDERS = "/usr/sbin:/usr/bin:/sbin:/bin"
TOOLS_OF_ROOT = ("useradd", "setfacl", "curl")
"""Where root's programs are; not all accounts have these in their search path."""
DEVICE_GROUPS = ("render", "video")
"""Groups whose members may use the graphics devices of Linux."""

LINK_BYTES, RECORD_BYTES = 64 * 1024, 256 * 1024
"""What is read at most of one link's measurement, and of the cluster to which it belongs."""
APT_LISTS = Path("/var/lib/apt/lists")

VERSION_ARGUMENTS = {
    "cmake": ["--version"],
    "ninja": ["--version"],
    "c++": ["-dumpfullversion", "-dumpversion"],
    "ccache": ["--version"],
    **{tool: ["--version"] for tool in toolkits.DECLARED_TOOLS},
    "patch": ["--version"],
}


def version_of(argv: list[str], ask: Ask = output) -> str | None:
    """The first version number that a command prints, or None if it is missing or fails."""
    return versions.first(ask(argv))


def toolchain(installed: list[dict], root: Path = ROOT, ask: Ask = output) -> dict:
    """Tool or library → its version, or None. A toolkit counts also where its commands are not in the search path."""
    found = {tool: version_of([tool, *arguments], ask) for tool, arguments in VERSION_ARGUMENTS.items()}
    for toolkit in installed:
        if toolkit["backend"] in toolkits.SIDE_BY_SIDE and not found[toolkits.command(toolkit["backend"])]:
            found[toolkits.command(toolkit["backend"])] = toolkit["version"]
    return {**found, **toolchains.libraries(installed, root)}


def readable_by_all(path: str) -> bool:
    """Whether every account may run the program: each folder above it is open, and so is what links lead to."""
    for name in (path, os.path.realpath(path)):
        for part in [Path(name), *Path(name).parents]:
            if not part.exists() or not part.stat().st_mode & stat.S_IXOTH:
                return False
    return True


def python(scope: str) -> str | None:
    """An interpreter that the services can use."""
    for candidate in ("/usr/bin/python3", "/usr/local/bin/python3", "/opt/homebrew/bin/python3", sys.executable):
        if not os.access(candidate, os.X_OK) or (scope == "system" and not readable_by_all(candidate)):
            continue
        version = re.match(r"Python (\d+)\.(\d+)", output([candidate, "--version"]))
        if version and tuple(map(int, version.groups())) >= MINIMUM_PYTHON:
            return candidate
    return None


def packaged(policy: str, main: str, lists: Path = APT_LISTS) -> dict:
    """From what ``apt-cache policy`` says of the packages of llama.cpp: names of those that are installed, and upstream's version
    of the main one that is installed, or else offered, or None; ``listed`` is false where the host has no list of packages.

    :param lists: folder of apt's lists of packages.
    """
    entries = re.findall(r"^(\S+):\n  Installed: (\S+)\n  Candidate: (\S+)$", policy, re.MULTILINE)
    installed = {name: version for name, version, _candidate in entries if version != "(none)"}
    offered = {name: candidate for name, _version, candidate in entries}
    version = re.match(r"(?:\d+:)?(\d[0-9.]*\d)", installed.get(main) or offered.get(main, ""))
    return {
        "version": version.group(1) if version else None,
        "installed": sorted(installed),
        "listed": bool(version) or any(lists.glob("*_Packages*")),
    }


def _packaged(catalogue: dict, family: str) -> dict | None:
    if family not in catalogue:
        return None
    spec = catalogue[family]
    names = sorted(
        {
            *(program["package"] for program in spec["programs"].values()),
            *(name for libraries in spec["libraries"].values() for name in libraries),
        }
    )
    return packaged(output(["apt-cache", "policy", *names]), spec["version"])


def tool_of_root(name: str, folders: str = ROOT_FOLDERS) -> str | None:
    """Whether a tool that has no version is there."""
    return "installed" if shutil.which(name, path=folders) else None


def measured_links(prefix: str) -> dict:
    """Host → what was last measured of its link to this head; empty elsewhere."""
    links = {}
    for path in sorted(Path(prefix, "links").glob("*.json")):
        with suppress(OSError, ValueError, TypeError):
            found = reading.read_object(path, LINK_BYTES)
            numbers = {key: found.get(key) for key in ("mbit_per_second", "round_trip_ms")}
            numbers = {key: None if number is None else float(number) for key, number in numbers.items()}
            detail = validation.printable(found.get("detail", ""))
            links[path.stem] = {**numbers, "detail": detail, "requested": found.get("requested") is True}
    return links


def cluster_of(prefix: str) -> str | None:
    """The cluster to which this host belongs; None where that is not known."""
    with suppress(OSError, ValueError):
        return str(reading.read_object(Path(prefix, names.CLUSTER_RECORD), RECORD_BYTES)["cluster"])
    return None


def _distribution() -> dict:
    os_release = Path("/etc/os-release")
    if os_release.exists():
        return names.distribution(os_release.read_text())
    system = platform.system().lower()
    return {"id": system, "version": platform.release().split(".", maxsplit=1)[0], "family": system}


def _installed(tools: Mapping[str, str | None], packages: dict | None) -> list[str]:
    """Names of tools, and of the distribution's packages of llama.cpp."""
    return sorted([*(tool for tool, version in tools.items() if version), *(packages["installed"] if packages else [])])


def disk_gib(path: str) -> int | None:
    """The largest power of 2 that is not more than the GiB of the file system on which a path is, or would be. Some file systems are
    smaller when they are fuller; so it says the same for long."""
    try:
        known = os.statvfs(errors.file_system(path))
    except OSError:
        return None
    size = known.f_blocks * known.f_frsize >> 30
    return 1 << size.bit_length() - 1 if size else 0


def facts(
    wanted_scope: str,
    catalogue: dict | None = None,
) -> dict:
    """Everything that planning needs to know of this host. Stable: nothing here changes with the load.

    :param catalogue: distribution family → its packages of llama.cpp, to look for them.
    """
    place = place_of(wanted_scope)
    wanted_scope, manager = place.scope, place.service_manager
    record = service_managers.MANAGERS[manager]
    user = pwd.getpwuid(os.geteuid()).pw_name
    interpreter = python(wanted_scope)
    installed = toolchains.find()
    memory = hardware.memory_mib()
    everywhere = os.pathsep.join([*os.get_exec_path(), ROOT_FOLDERS, "/usr/local/bin", "/opt/homebrew/bin"])
    tools = {
        **toolchain(installed),
        "venv": version_of([interpreter, "-c", "import ensurepip, venv; print('1.0')"]) if interpreter else None,
        **{name: tool_of_root(name) for name in TOOLS_OF_ROOT},
        names.STUNNEL: tool_of_root(names.STUNNEL, everywhere),
    }
    distributed = _distribution()
    packages = _packaged(catalogue or {}, distributed["family"])
    devices = hardware.accelerators(memory)
    return {
        "system": platform.system(),
        "architecture": platform.machine(),
        "distribution": distributed,
        "packaged": packages,
        "cpu": hardware.cpu(),
        "memory_mib": memory,
        "accelerators": devices,
        "toolchain": tools,
        "toolchains": installed,
        "tools": _installed(tools, packages),
        "user": user,
        "uid": os.geteuid(),
        "accounts": {entry.pw_name: entry.pw_dir for entry in pwd.getpwall() if entry.pw_name.startswith(names.NAME)},
        "made_accounts": sorted(entry.pw_name for entry in pwd.getpwall() if entry.pw_gecos == names.ACCOUNT_MARK),
        "rdma": interfaces.rdma_addresses(),
        "device_groups": [group.gr_name for group in grp.getgrall() if group.gr_name in DEVICE_GROUPS],
        "python": interpreter,
        "lingering": {"enabled": lingers(user), "by_us": os.path.exists(place.prefix + "/lingering")},
        "firewall": firewall.of_host() if record.host_settings else None,
        "units_filter": firewall.of_units(interpreter) if record.closes_ports_by else None,
        "host_settings": record.host_settings,
        "kernel": platform.release(),
        "glibc": hardware.glibc(),
        "newest_cuda": hardware.newest_cuda(),
        "interfaces": interfaces.interfaces(),
        "addresses": interfaces.addresses(),
        "disk_gib": disk_gib(place.prefix),
        "reached_at": connection.address(os.environ),
        **_installation(place),
        **place._asdict(),
    }


def _installation(place: Place) -> dict:
    """What is known of the installation on this host."""
    return {
        "installed": files.is_marked(Path(place.prefix)),
        "cluster": cluster_of(place.prefix),
        "supervisor": supervisor(place.prefix),
        "measured": measured_links(place.prefix),
        "cached": read_left(place.prefix, names.CACHED_FACTS),
        "measured_speed": read_left(place.prefix, names.MEASURED_SPEED),
        "defined": defined_services(place.service_manager, place.units),
    }


def supervisor(prefix: str) -> dict:
    """Version of the installation's own supervisor, and whether it runs. In somebody else's folder no program is run."""
    if not files.is_marked(Path(prefix)):
        return {"version": None, "running": False}
    return {
        "version": version_of([prefix + "/venv/bin/supervisord", "--version"]),
        "running": supervisor_runs(prefix),
    }
