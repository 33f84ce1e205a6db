# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a host has and what runs on it, read on that host."""

from __future__ import annotations

import errno
import grp
import hashlib
import os
import platform
import pwd
import re
import shutil
import socket
import stat
import subprocess
import sys
from pathlib import Path

MIB = 1024 * 1024
SEARCH = os.pathsep.join(
    [
        os.environ.get("PATH", ""),
        "/usr/local/bin",
        "/opt/homebrew/bin",
        "/usr/local/cuda/bin",
        "/opt/rocm/bin",
        "/usr/sbin",
        "/sbin",
    ]
)
MINIMUM_PYTHON = (3, 9)
COMMAND_SECONDS = 20
DEVICE_GROUPS = ("render", "video")
"""Groups whose members may use the graphics devices of Linux."""

VERSION_ARGUMENTS = {
    "cmake": ["--version"],
    "ninja": ["--version"],
    "c++": ["-dumpfullversion", "-dumpversion"],
    "ccache": ["--version"],
    "nvcc": ["--version"],
    "hipconfig": ["--version"],
    "glslc": ["--version"],
}
FAMILIES = {
    "debian": "debian",
    "ubuntu": "debian",
    "fedora": "redhat",
    "rhel": "redhat",
    "centos": "redhat",
    "arch": "arch",
    "suse": "suse",
    "opensuse": "suse",
}
UNIFIED_GFX = {
    "gfx902",
    "gfx909",
    "gfx90c",
    "gfx1013",
    "gfx1033",
    "gfx1035",
    "gfx1036",
    "gfx1103",
    "gfx1150",
    "gfx1151",
    "gfx1152",
    "gfx1153",
}
"""AMD processors whose graphics use the host's memory."""


def output(argv: list[str]) -> str:
    """What a command prints, or nothing if it is not there or fails."""
    program = shutil.which(argv[0], path=SEARCH)
    if not program:
        return ""
    try:
        return subprocess.run(
            [program, *argv[1:]], capture_output=True, text=True, timeout=COMMAND_SECONDS, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def distribution(os_release: str) -> dict:
    """From the text of /etc/os-release: id, version and the family whose packages it uses."""
    values = dict(re.findall(r'^(\w+)="?([^"\n]*)"?$', os_release, re.MULTILINE))
    names = [values.get("ID", "unknown"), *values.get("ID_LIKE", "").split()]
    family = next((FAMILIES[name.split("-")[0]] for name in names if name.split("-")[0] in FAMILIES), "unknown")
    return {"id": names[0], "version": values.get("VERSION_ID", values.get("VERSION_CODENAME", "")), "family": family}


def nvidia(listing: str) -> list[dict]:
    """From ``nvidia-smi --query-gpu=name,compute_cap,memory.total --format=csv,noheader,nounits``."""
    found = []
    for line in listing.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 3 and re.fullmatch(r"\d+\.\d+", fields[1]) and fields[2].isdigit():
            found.append(
                {
                    "backend": "cuda",
                    "name": fields[0],
                    "architecture": fields[1],
                    "memory_mib": int(fields[2]),
                    "unified": False,
                }
            )
    return found


def amd(topology: Path, drm: Path) -> list[dict]:
    """From the KFD topology in sysfs; the memory of a processor's graphics is what the host may lend it (GTT)."""
    found = []
    for properties in sorted(topology.glob("*/properties"), key=lambda path: int(path.parent.name)):
        values = dict(line.split(None, 1) for line in properties.read_text().splitlines() if " " in line)
        version = int(values.get("gfx_target_version", 0))
        if not version:
            continue
        architecture = f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"
        device = drm / f"renderD{values.get('drm_render_minor', '')}".strip() / "device"
        unified = architecture in UNIFIED_GFX
        memory = device / ("mem_info_gtt_total" if unified else "mem_info_vram_total")
        size = int(memory.read_text()) // MIB if memory.exists() else 0
        found.append(
            {
                "backend": "hip",
                "name": f"AMD {architecture}",
                "architecture": architecture,
                "memory_mib": size,
                "unified": unified,
            }
        )
    return found


def accelerators() -> list[dict]:
    """Every device once for each backend that could drive it."""
    if sys.platform == "darwin":
        if platform.machine() != "arm64":
            return []
        return [
            {
                "backend": "metal",
                "name": output(["sysctl", "-n", "machdep.cpu.brand_string"]).strip(),
                "architecture": "apple",
                "memory_mib": memory_mib() * 3 // 4,
                "unified": True,
            }
        ]
    own = nvidia(output(["nvidia-smi", "--query-gpu=name,compute_cap,memory.total", "--format=csv,noheader,nounits"]))
    own += amd(Path("/sys/class/kfd/kfd/topology/nodes"), Path("/sys/class/drm"))
    return own + [{**device, "backend": "vulkan", "architecture": ""} for device in own]


def memory_mib() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // MIB


def cpu() -> dict:
    if sys.platform == "darwin":
        model, features = output(["sysctl", "-n", "machdep.cpu.brand_string"]).strip(), ""
    else:
        text = Path("/proc/cpuinfo").read_text()
        named = re.search(r"^model name\s*:\s*(.*)$", text, re.MULTILINE)
        flags = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", text, re.MULTILINE)
        model, features = named.group(1) if named else platform.machine(), flags.group(1) if flags else ""
    identity = hashlib.sha256(" ".join([model, *sorted(features.split())]).encode()).hexdigest()[:12]
    return {"model": model, "cores": os.cpu_count() or 1, "features_id": identity}


def version_of(argv: list[str]) -> str | None:
    """The first version number that a command prints, or None if it is not there or fails."""
    version = re.search(r"\d+(\.\d+)+|^\d+$", output(argv), re.MULTILINE)
    return version.group(0) if version else None


def toolchain() -> dict:
    return {tool: version_of([tool, *arguments]) for tool, arguments in VERSION_ARGUMENTS.items()}


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


def service_manager(scope: str) -> str:
    if sys.platform == "darwin":
        return "launchd"
    if os.path.isdir("/run/systemd/system"):
        if scope == "system":
            return "systemd"
        runtime = f"/run/user/{os.geteuid()}"
        if os.path.exists(runtime + "/bus"):
            os.environ.setdefault("XDG_RUNTIME_DIR", runtime)
        if output(["systemctl", "--user", "show", "--property=Version"]):
            return "systemd_user"
    return "supervisor"


def places(scope: str, manager: str) -> dict:
    """Where things are installed: the installation, the cache that outlives it, and the service definitions."""
    home = pwd.getpwuid(os.getuid()).pw_dir
    home = os.environ.get("HOME", home)
    if scope == "system":
        prefix, cache = "/opt/llamacpp", "/var/cache/llamacpp"
    else:
        prefix = os.path.join(os.environ.get("XDG_DATA_HOME") or home + "/.local/share", "llamacpp")
        cache = os.path.join(os.environ.get("XDG_CACHE_HOME") or home + "/.cache", "llamacpp")
    units = {
        "systemd": "/etc/systemd/system",
        "systemd_user": os.path.join(os.environ.get("XDG_CONFIG_HOME") or home + "/.config", "systemd/user"),
        "launchd": "/Library/LaunchDaemons" if scope == "system" else home + "/Library/LaunchAgents",
        "supervisor": prefix + "/supervisor/services",
    }[manager]
    return {"prefix": prefix, "cache": cache, "units": units}


def facts(wanted_scope: str) -> dict:
    """Everything that planning needs to know of this host. Stable: nothing here changes with the load."""
    if wanted_scope == "auto":
        may_become_root = os.geteuid() == 0 or (
            bool(shutil.which("sudo"))
            and subprocess.run(["sudo", "-n", "true"], capture_output=True, check=False).returncode == 0
        )
        wanted_scope = "system" if may_become_root else "user"
    manager = service_manager(wanted_scope)
    user = pwd.getpwuid(os.geteuid()).pw_name
    os_release = Path("/etc/os-release")
    place = places(wanted_scope, manager)
    interpreter = python(wanted_scope)
    tools = {
        **toolchain(),
        "venv": version_of([interpreter, "-c", "import ensurepip, venv; print('1.0')"]) if interpreter else None,
    }
    return {
        "system": platform.system(),
        "architecture": platform.machine(),
        "distribution": distribution(os_release.read_text())
        if os_release.exists()
        else {"id": platform.system().lower(), "version": platform.release(), "family": platform.system().lower()},
        "cpu": cpu(),
        "memory_mib": memory_mib(),
        "accelerators": accelerators(),
        "toolchain": tools,
        "tools": sorted(tool for tool, version in tools.items() if version),
        "scope": wanted_scope,
        "user": user,
        "uid": os.geteuid(),
        "device_groups": [group.gr_name for group in grp.getgrall() if group.gr_name in DEVICE_GROUPS],
        "python": interpreter,
        "service_manager": manager,
        "supervisor": supervisor(place["prefix"]),
        "lingering": {
            "enabled": os.path.exists("/var/lib/systemd/linger/" + user),
            "by_us": os.path.exists(place["prefix"] + "/lingering"),
        },
        **place,
    }


def supervisor(prefix: str) -> dict:
    """Version of the installation's own supervisor, and whether it runs."""
    running = False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as control:
        try:
            control.connect(prefix + "/supervisor/control.sock")
            running = True
        except OSError:
            pass
    return {"version": version_of([prefix + "/venv/bin/supervisord", "--version"]), "running": running}


# ---------------------------------------------------------------------------------------------------------- processes


def _in_container(process: Path) -> bool:
    """Whether a process belongs to a container of this host, whose programs may lie at the same path as ours."""
    try:
        return os.readlink(process / "ns" / "pid") != os.readlink("/proc/self/ns/pid")
    except OSError:
        return False


def processes(prefix: str) -> dict[int, list[str]]:
    """Process → argv, of all whose program or script lies below the prefix.

    macOS tells a command only as one line: there an argument that holds a space comes as two.
    """
    found = {}
    if sys.platform == "darwin":
        for line in output(["ps", "-axww", "-o", "pid=,command="]).splitlines():
            number, command = line.split(None, 1)
            if any(word.startswith(prefix + "/") for word in command.split(" ")[:2]):
                found[int(number)] = command.split(" ")
        return found
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                argv = (entry / "cmdline").read_bytes().decode("utf-8", "replace").split("\0")[:-1]
            except OSError:
                continue
            if any(word.startswith(prefix + "/") for word in argv[:2]) and not _in_container(entry):
                found[int(entry.name)] = argv
    return found


def environment_of(process: int) -> dict[str, str] | None:
    """Environment of a process, or None where it cannot be read."""
    try:
        text = Path(f"/proc/{process}/environ").read_bytes().decode("utf-8", "replace")
    except OSError:
        return None
    return dict(entry.split("=", 1) for entry in text.split("\0") if "=" in entry)


def occupied(address: str, port: int) -> bool:
    """Whether something listens there already."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as candidate:
        candidate.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            candidate.bind((address, port))
        except PermissionError:
            return False
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False


def listeners(pids: list[int]) -> dict[int, set[int]]:
    """Process → TCP ports on which it listens (Linux), as far as its file descriptors may be read."""
    inodes: dict[str, int] = {}
    if not os.path.exists("/proc/net/tcp"):
        return {pid: set() for pid in pids}
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A":
            inodes[f"socket:[{fields[9]}]"] = int(fields[1].split(":")[1], 16)
    found: dict[int, set[int]] = {}
    for pid in pids:
        try:
            links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()]
        except OSError:
            continue
        found[pid] = {inodes[link] for link in links if link in inodes}
    return found


def listening_addresses(port: int) -> list[str]:
    """Addresses on which this host listens on the port (Linux; empty elsewhere)."""
    found = set()
    for table, family in (("/proc/net/tcp", socket.AF_INET), ("/proc/net/tcp6", socket.AF_INET6)):
        if os.path.exists(table):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                address, number = fields[1].split(":")
                if fields[3] == "0A" and int(number, 16) == port:
                    words = [
                        int(address[start : start + 8], 16).to_bytes(4, sys.byteorder)
                        for start in range(0, len(address), 8)
                    ]
                    found.add(socket.inet_ntop(family, b"".join(words)))
    return sorted(found)


def service_state(service: dict, running: dict[int, list[str]]) -> dict:
    """How a planned service stands: ``running`` as planned, ``stopped``, ``foreign`` when something else has its port, or
    ``different``: another command line or environment, or a head whose launcher waits for its workers."""
    address, port = service["listens"].rsplit(":", 1)
    programs = [pid for pid, argv in running.items() if argv == service["process"]]
    services = [pid for pid, argv in running.items() if argv == service["argv"]]
    own = programs or services or [pid for pid, ports in listeners(list(running)).items() if int(port) in ports]
    if programs and services:
        actual = environment_of(programs[0])
        same = actual is None or all(actual.get(name) == value for name, value in service["environment"].items())
        state = "running" if same else "different"
    else:
        state = "different" if own else "foreign" if occupied(address, int(port)) else "stopped"
    return {"state": state, "pid": own[0] if own else None, "addresses": listening_addresses(int(port))}


def drift(host: dict) -> dict:
    """What differs on this host from its part of the plan.

    :param host: ``plan["hosts"][name]``.
    :returns: ``services`` (name → state, pid, addresses), ``defined`` (names of services that have a definition), ``stale``
        (those of them that are not planned),
        ``missing_builds`` (ids of planned builds that are not installed).
    """
    running = processes(host["prefix"])
    planned = {service["name"]: service_state(service, running) for service in host["services"]}
    installed = (
        {path.stem for path in Path(host["units"]).glob("llamacpp-*")} if os.path.isdir(host["units"]) else set()
    )
    missing = [
        build["id"]
        for build in host["builds"]
        if not os.path.exists(f"{host['prefix']}/releases/{build['id']}/manifest.json")
    ]
    return {
        "services": planned,
        "defined": sorted(installed),
        "stale": sorted(installed - set(planned)),
        "missing_builds": missing,
    }
