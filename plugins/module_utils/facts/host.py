# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Facts of this host: hardware, tools, accounts, installation."""

from __future__ import annotations

import grp
import os
import platform
import pwd
import re
import shutil
import stat
import sys
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
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.files import text_of
from ansible_collections.llamacpp.cluster.plugins.module_utils.facts import (
    connection,
    firewall,
    hardware,
    installation,
    interfaces,
    toolchains,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import toolkits

MIN_PYTHON = (3, 9)
ROOT_SEARCH_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
"""Folders of root's programs, which the search path of other accounts may lack."""
HOST_TOOLS = ("useradd", "setfacl", "curl")
DEVICE_GROUPS = ("render", "video")
"""Groups whose members may use the graphics devices of Linux."""

MAX_LINK_BYTES, MAX_RECORD_BYTES = 64 * 1024, 256 * 1024
"""Maximum sizes of a link's measurement and a cluster record."""
APT_LISTS_FOLDER = Path("/var/lib/apt/lists")

VERSION_ARGUMENTS = {
    "cmake": ["--version"],
    "ninja": ["--version"],
    "c++": ["-dumpfullversion", "-dumpversion"],
    "ccache": ["--version"],
    **{tool: ["--version"] for tool in toolkits.DECLARED_VERSIONS},
    "patch": ["--version"],
}


def version_of(argv: list[str], ask: Ask = output) -> str | None:
    """Return the first version number that a command prints; None if it is missing or fails."""
    return versions.first_version(ask(argv))


def tool_versions(installed_toolchains: list[dict], root: Path = ROOT, ask: Ask = output) -> dict:
    """Return the version of each tool and library, or None. Toolkits outside the search path count, too."""
    installed_versions = {tool: version_of([tool, *arguments], ask) for tool, arguments in VERSION_ARGUMENTS.items()}
    for entry in installed_toolchains:
        if entry["backend"] in toolkits.SIDE_BY_SIDE and not installed_versions[toolkits.command_of(entry["backend"])]:
            installed_versions[toolkits.command_of(entry["backend"])] = entry["version"]
    return {**installed_versions, **toolchains.library_versions(installed_toolchains, root)}


def is_executable_by_all(path: str) -> bool:
    """Return whether every account may run the program, and may enter its folders and those of its link's target."""
    for program in (Path(path), Path(os.path.realpath(path))):
        for entry in [program, *program.parents]:
            if not entry.exists() or not entry.stat().st_mode & stat.S_IXOTH:
                return False
    return True


def find_python(scope: str) -> str | None:
    """Return a Python that services can use."""
    for path in ("/usr/bin/python3", "/usr/local/bin/python3", "/opt/homebrew/bin/python3", sys.executable):
        if not os.access(path, os.X_OK) or (scope == "system" and not is_executable_by_all(path)):
            continue
        version_match = re.match(r"Python (\d{1,9})\.(\d{1,9})", output([path, "--version"]))
        if version_match and tuple(map(int, version_match.groups())) >= MIN_PYTHON:
            return path
    return None


def package_state(policy_listing: str, package: str, apt_lists_folder: Path = APT_LISTS_FOLDER) -> dict:
    """Return the state of llama.cpp's packages: ``installed`` names them, and ``version`` is upstream's version of the main package, installed or
    offered, or None. ``listed`` is false if the host has no package list.

    :param policy_listing: output of ``apt-cache policy`` for these packages.
    """
    entries = re.findall(r"^(\S+):\n  Installed: (\S+)\n  Candidate: (\S+)$", policy_listing, re.MULTILINE)
    installed_versions = {name: version for name, version, _candidate in entries if version != "(none)"}
    offered_versions = {name: candidate for name, _version, candidate in entries}
    version_match = re.match(
        r"(?:\d+:)?(\d[0-9.]*\d)", installed_versions.get(package) or offered_versions.get(package, "")
    )
    return {
        "version": version_match.group(1) if version_match else None,
        "installed": sorted(installed_versions),
        "listed": bool(version_match) or any(apt_lists_folder.glob("*_Packages*")),
    }


def _query_packages(catalogue: dict, family: str) -> dict | None:
    if family not in catalogue:
        return None
    spec = catalogue[family]
    package_names = sorted(
        {
            *(program["package"] for program in spec["programs"].values()),
            *(name for libraries in spec["libraries"].values() for name in libraries),
        }
    )
    return package_state(output(["apt-cache", "policy", *package_names]), spec["version"])


def presence_of(name: str, search_path: str = ROOT_SEARCH_PATH) -> str | None:
    """Return ``installed`` for a tool that is present, without asking for its version."""
    return "installed" if shutil.which(name, path=search_path) else None


def link_measurements(prefix: str) -> dict:
    """Return the last measurement of each host's link to this head; empty on a worker."""
    measurements = {}
    for path in sorted(Path(prefix, "links").glob("*.json")):
        with suppress(OSError, ValueError, TypeError):
            result = reading.read_object(path, MAX_LINK_BYTES)
            figures = {key: result.get(key) for key in ("mbit_per_second", "round_trip_ms")}
            figures = {key: None if figure is None else 1.0 * figure for key, figure in figures.items()}
            detail = validation.printable(result.get("detail", ""))
            measurements[path.stem] = {**figures, "detail": detail, "requested": result.get("requested") is True}
    return measurements


def cluster_of(prefix: str) -> str | None:
    """Return the cluster to which this host belongs; None if unknown."""
    with suppress(OSError, ValueError, KeyError):
        return str(reading.read_object(Path(prefix, names.CLUSTER_FILE), MAX_RECORD_BYTES)["cluster"])
    return None


def _distribution() -> dict:
    if os_release := text_of(Path("/etc/os-release")):
        return names.distribution(os_release)
    system = platform.system().lower()
    return {"id": system, "version": platform.release().split(".", maxsplit=1)[0], "family": system}


def disk_gib(path: str) -> int | None:
    """Return the size of a path's file system in GiB, rounded down to a power of 2: facts are stable, but some file systems shrink as they fill up."""
    try:
        status = os.statvfs(errors.mount_point(path))
    except OSError:
        return None
    size_gib = status.f_blocks * status.f_frsize >> 30
    return 1 << size_gib.bit_length() - 1 if size_gib else 0


def facts(requested_scope: str, catalogue: dict | None = None) -> dict:
    """Return all facts that planning needs. None of them changes with the load.

    :param catalogue: distribution family → its packages of llama.cpp.
    """
    paths = installation.detect_paths(requested_scope)
    manager = paths.service_manager
    manager_spec = service_managers.MANAGERS[manager]
    user = pwd.getpwuid(os.geteuid()).pw_name
    interpreter = find_python(paths.scope)
    found_toolchains = toolchains.find_toolchains()
    memory_mib = hardware.read_total_memory_mib()
    search_path = os.pathsep.join([*os.get_exec_path(), ROOT_SEARCH_PATH, "/usr/local/bin", "/opt/homebrew/bin"])
    tools = {
        **tool_versions(found_toolchains),
        "venv": version_of([interpreter, "-c", "import ensurepip, venv; print('1.0')"]) if interpreter else None,
        **{name: presence_of(name) for name in HOST_TOOLS},
        names.STUNNEL: presence_of(names.STUNNEL, search_path),
    }
    distribution = _distribution()
    packages = _query_packages(catalogue or {}, distribution["family"])
    devices = hardware.find_accelerators(memory_mib)
    return {
        "system": platform.system(),
        "architecture": platform.machine(),
        "distribution": distribution,
        "packaged": packages,
        "cpu": hardware.read_processor(),
        "memory_mib": memory_mib,
        "accelerators": devices,
        "toolchain": tools,
        "toolchains": found_toolchains,
        "tools": sorted(
            [*(tool for tool, version in tools.items() if version), *(packages["installed"] if packages else [])]
        ),
        "user": user,
        "accounts": {entry.pw_name: entry.pw_dir for entry in pwd.getpwall() if entry.pw_name.startswith(names.PREFIX)},
        "created_accounts": sorted(entry.pw_name for entry in pwd.getpwall() if entry.pw_gecos == names.ACCOUNT_MARK),
        "rdma": interfaces.rdma_addresses(),
        "device_groups": [group.gr_name for group in grp.getgrall() if group.gr_name in DEVICE_GROUPS],
        "python": interpreter,
        "lingering": {"enabled": installation.is_lingering(user), "by_us": os.path.exists(paths.prefix + "/lingering")},
        "firewall": firewall.active_manager() if manager_spec.host_settings else None,
        "has_unit_filter": firewall.has_unit_filter(interpreter) if manager_spec.port_filter else None,
        "host_settings": manager_spec.host_settings,
        "kernel": platform.release(),
        "glibc": hardware.glibc_version(),
        "newest_cuda": hardware.newest_cuda(),
        "nvidia_smi": hardware.nvidia_failure(devices),
        "interfaces": interfaces.interfaces(),
        "addresses": interfaces.addresses(),
        "disk_gib": disk_gib(paths.prefix),
        "reached_at": connection.reached_address(os.environ),
        **_installation_facts(paths),
        **paths._asdict(),
    }


def _installation_facts(paths: installation.InstallationPaths) -> dict:
    return {
        "installed": files.is_marked(Path(paths.prefix)),
        "cluster": cluster_of(paths.prefix),
        "supervisor": supervisor_state(paths.prefix),
        "measured": link_measurements(paths.prefix),
        "cached": installation.read_json(paths.prefix, names.CACHED_FACTS_FILE),
        "measured_speed": installation.read_json(paths.prefix, names.SPEED_FILE),
        "defined": installation.defined_services(paths.service_manager, paths.units),
    }


def supervisor_state(prefix: str) -> dict:
    """Return supervisor's version, and whether it runs. This function runs no program from a folder without our mark."""
    if not files.is_marked(Path(prefix)):
        return {"version": None, "running": False}
    return {
        "version": version_of([prefix + "/venv/bin/supervisord", "--version"]),
        "running": installation.runs_supervisor(prefix),
    }
