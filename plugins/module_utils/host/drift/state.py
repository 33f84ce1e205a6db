# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How a host differs from its part of the plan, read on that host: from files, accounts and running processes."""

from __future__ import annotations

import errno
import grp
import os
import pwd
import re
import socket
import stat
import sys
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import (
    names,
    reading,
    service_managers,
    typed_json,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.commands import CommandError, output
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.differences import Difference, Kind
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.files import sha256, text_of
from ansible_collections.llamacpp.cluster.plugins.module_utils.facts import host, interfaces
from ansible_collections.llamacpp.cluster.plugins.module_utils.host import (
    kernel_parameters,
    plan_history,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.host import services as managers
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.builds import store
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.drift import fallback, port_probes
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.firewall import managers as firewalls
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.firewall.system import FirewallError, System
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.links import configuration, inspection
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import backends
from ansible_collections.llamacpp.cluster.plugins.module_utils.models import model_files
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import history
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import (
    FetchedModelPlan,
    FirewallRule,
    KernelTuning,
    LinkPlan,
)

ERRORS = (
    CommandError,
    FirewallError,
    inspection.LinkError,
    managers.ServiceError,
    kernel_parameters.KernelParameterError,
)
"""What drift raises with a sentence, for failures.reported."""
CLOCK_SECONDS = 3
"""Start of a process and time of a file that a run writes are compared with so much tolerance."""
HASHED_BYTES = 256 * 1024 * 1024
"""Files that are larger are compared by size alone."""

FIRST_PROCESS = "/proc/1/stat"
"""Readable for everybody, unless /proc is mounted with hidepid."""


def hides_processes() -> bool:
    """Whether /proc shows this account no processes but its own (Linux)."""
    return sys.platform != "darwin" and not os.path.exists(FIRST_PROCESS)


def _in_container(process: Path) -> bool:
    """Whether a process belongs to a container of this host, whose programs may have the same path as ours."""
    try:
        return os.readlink(process / "ns" / "pid") != os.readlink("/proc/self/ns/pid")
    except OSError:
        return False


def _uid(account: str | None) -> int | None:
    """Of the account of services, or of this process where they have none of their own; None where it does not exist."""
    if account is None:
        return os.geteuid()
    with suppress(KeyError):
        return pwd.getpwnam(account).pw_uid
    return None


def _has_account(process: Path, uid: int) -> bool:
    """Asked before anything else is read: a process lies about its command line, and where its memory is a file of its own file system
    (FUSE), whoever reads the command line waits for as long as it likes."""
    uids = re.search(r"^Uid:\t(\d+)\t(\d+)", text_of(process / "status"), re.MULTILINE)
    return bool(uids and uids.groups() == (str(uid), str(uid)))


def _runs_as_it_says(process: Path, argv: list[str]) -> bool:
    """Whether a process runs the program of its command line. Where its program may not be read, its account has to do."""
    try:
        program = os.readlink(process / "exe")
    except PermissionError:
        return True
    except OSError:
        return False
    return program.removesuffix(" (deleted)") == os.path.realpath(argv[0])


def processes(prefix: str, account: str | None) -> dict[int, list[str]]:
    """Process → argv, of all of the account whose program or script is below the prefix.

    macOS reports a command only as one line, so an argument with a space comes as two, and says nothing of the program.

    :param account: None is that of this process.
    """
    running: dict[int, list[str]] = {}
    uid = _uid(account)
    if uid is None:
        return running
    if sys.platform == "darwin":
        for line in output(["ps", "-axww", "-o", "pid=,uid=,command="]).splitlines():
            number, owner, command = line.split(None, 2)
            if int(owner) == uid and any(word.startswith(prefix + "/") for word in command.split(" ")[:2]):
                running[int(number)] = command.split(" ")
        return running
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and _has_account(entry, uid):
            try:
                argv = (entry / "cmdline").read_bytes().decode("utf-8", "replace").split("\0")[:-1]
            except OSError:
                continue
            below = any(word.startswith(prefix + "/") for word in argv[:2])
            if below and not _in_container(entry) and _runs_as_it_says(entry, argv):
                running[int(entry.name)] = argv
    return running


def environment_of(process: int) -> dict[str, str] | None:
    """Environment of a process, or None where it cannot be read."""
    try:
        text = Path(f"/proc/{process}/environ").read_bytes().decode("utf-8", "replace")
    except OSError:
        return None
    return dict(entry.split("=", 1) for entry in text.split("\0") if "=" in entry)


def is_occupied(address: str, port: int) -> bool:
    """Whether something listens on the port already."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as candidate:
        candidate.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            candidate.bind((address, port))
        except PermissionError:
            return False
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False


class Socket(NamedTuple):
    """One line of the kernel's tables of TCP sockets; a remote port is left out, nobody asks for it."""

    address: str
    port: int
    remote: str
    state: str
    uid: int
    inode: str


LISTENING, ESTABLISHED = "0A", "01"
EVERY_ADDRESS = ("0.0.0.0", "::")


class Sockets(NamedTuple):
    """TCP sockets of this host that listen or are connected (Linux; none elsewhere). The kernel takes milliseconds to list them."""

    ipv4: list[Socket]
    ipv6: list[Socket]

    def listening(self, port: int) -> list[Socket]:
        return [entry for entry in (*self.ipv4, *self.ipv6) if entry.state == LISTENING and entry.port == port]


def _address(text: str, family: socket.AddressFamily) -> str:
    words = [int(text[start : start + 8], 16).to_bytes(4, sys.byteorder) for start in range(0, len(text), 8)]
    return socket.inet_ntop(family, b"".join(words))


def _sockets(table: str, family: socket.AddressFamily) -> Iterator[Socket]:
    if not os.path.exists(table):
        return
    for line in Path(table).read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] in (LISTENING, ESTABLISHED):
            address, port = fields[1].split(":")
            local, other = _address(address, family), _address(fields[2].split(":")[0], family)
            yield Socket(local, int(port, 16), other, fields[3], int(fields[7]), fields[9])


def sockets() -> Sockets:
    return Sockets(list(_sockets("/proc/net/tcp", socket.AF_INET)), list(_sockets("/proc/net/tcp6", socket.AF_INET6)))


def _listeners(pids: list[int], tables: Sockets) -> dict[int, set[int]]:
    """Process → TCP ports on which it listens (Linux), as far as its file descriptors may be read."""
    ports = {entry.inode: entry.port for entry in tables.ipv4 if entry.state == LISTENING}
    return {pid: {ports[inode] for inode in inodes if inode in ports} for pid, inodes in _socket_inodes(pids).items()}


def _socket_inodes(pids: Iterable[int]) -> dict[int, set[str]]:
    """Process → inodes of its sockets (Linux), of those whose file descriptors may be read."""
    inodes = {}
    for pid in pids:
        with suppress(OSError):
            links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()]
            inodes[pid] = {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}
    return inodes


class Listener(NamedTuple):
    """Who listens on a port; ``holder`` is the inode of the socket, or the process on macOS."""

    address: str
    uid: int
    holder: str


def _listening(port: int) -> list[Listener]:
    if sys.platform != "darwin":
        return [Listener(entry.address, entry.uid, entry.inode) for entry in sockets().listening(port)]
    found, current = [], {"p": "", "u": ""}
    for line in output(["lsof", "-nP", f"-iTCP:{port}", "-sTCP:LISTEN", "-Fpun"]).splitlines():
        if line[:1] in current:
            current[line[0]] = line[1:]
        elif line.startswith("n"):
            address = line[1:].rsplit(":", 1)[0]
            found.append(Listener("0.0.0.0" if address == "*" else address, int(current["u"]), current["p"]))
    return found


def stranger_at(address: str, port: int, running: Collection[int], account: str | None) -> str | None:
    """Why whoever listens at an address of this host is not one of our processes, or None.

    :param running: processes of ours, as of ``processes``.
    """
    everybody = _listening(port)
    exact = [listener for listener in everybody if listener.address in (address, f"::ffff:{address}")]
    heard = exact or [listener for listener in everybody if listener.address in EVERY_ADDRESS]
    held = _socket_inodes(running) if sys.platform != "darwin" else {pid: {str(pid)} for pid in running}
    for listener in heard:
        ours = listener.uid == _uid(account) and bool(running)
        if not ours or (len(held) == len(running) and not any(listener.holder in holders for holders in held.values())):
            owner = f"by another program of account {owner_of(listener.uid)}"
            return f"{address}:{port} is held {owner}, not by what is planned there"
    return None if heard else f"nothing on this host listens on {address}:{port}"


def listening_addresses(port: int, tables: Sockets) -> list[str]:
    """Addresses on which this host listens on the port (Linux; empty elsewhere)."""
    return sorted({entry.address for entry in tables.listening(port)})


def clients(port: int, tables: Sockets) -> list[str]:
    """Addresses that hold a connection to the port of this host, or wait for it to be served (Linux; empty elsewhere)."""
    return sorted({entry.remote for entry in tables.ipv4 if entry.state == ESTABLISHED and entry.port == port})


def service_state(service: dict, running: dict[int, list[str]], folder: Path, tables: Sockets) -> dict:
    """How a planned service stands: ``running`` as planned, ``waiting`` when its launcher runs as planned and waits for workers,
    ``stopped``, ``foreign`` when something else has its port, or ``different``, with another command line or environment. One that runs as a
    planned fallback, as its launcher says, runs as planned, and ``fallback`` is its name.

    :param folder: in which the launcher of the head writes down what it does.
    """
    address, port = service["listens"].rsplit(":", 1)
    served = fallback.served(service, running, folder)
    programs = [pid for pid, argv in running.items() if argv == service["process"]]
    programs += [served.process] if served else []
    services = [pid for pid, argv in running.items() if argv == service["argv"]]
    own = (
        programs or services or [pid for pid, ports in _listeners(list(running), tables).items() if int(port) in ports]
    )
    if services:
        actual = environment_of((programs or services)[0])
        same = actual is None or all(actual.get(name) == value for name, value in service["environment"].items())
        strange = fallback.stranger(service, running, served)
        state = ("running" if programs else "waiting") if same and not strange else "different"
    else:
        state = "different" if own else "foreign" if is_occupied(address, int(port)) else "stopped"
    return {
        "state": state,
        "pid": own[0] if own else None,
        "addresses": listening_addresses(int(port), tables),
        "clients": clients(int(port), tables),
        **({"fallback": served.name} if served else {}),
    }


def taken_ports(planned: dict, services: dict) -> str | None:
    """A sentence where something else has the port of a planned service, or None.

    :param services: name → state, of service_state.
    """
    blocked = [service for service in planned["services"] if services[service["name"]]["state"] == "foreign"]
    if not blocked:
        return None
    where = dict.fromkeys(names.PORT_VARIABLES[service["kind"] == "head", service["temporary"]] for service in blocked)
    taken = " and ".join(f"{service['listens']}, on which {service['name']} is to listen" for service in blocked)
    if hides_processes():
        return (
            f"A process already uses {taken}, and /proc (hidepid) hides from this account whether it is that service: run with become, or mount "
            f"/proc without hidepid. If it is another one, stop it, or change {' and '.join(where)}."
        )
    return f"Something else already uses {taken}: stop it, or change {' and '.join(where)}."


def _accounts(planned: list[dict]) -> Iterator[Difference]:
    for account in planned:
        name = account["name"]
        try:
            pwd.getpwnam(name)
        except KeyError:
            yield Difference("account", name, f"account {name} is missing")
            continue
        missing = [group for group in account["groups"] if name not in _members(group)]
        if missing:
            yield Difference("account", name, f"account {name} is not in {', '.join(missing)}")


def _members(group: str) -> list[str]:
    """Nobody where there is no such group (any more)."""
    with suppress(KeyError):
        return grp.getgrnam(group).gr_mem
    return []


def _folders(planned: list[dict]) -> Iterator[Difference]:
    for folder in planned:
        path, owner = folder["path"], folder["owner"]
        try:
            actual = os.stat(path)
        except OSError:
            yield Difference("folder", path, f"folder {path} is missing")
            continue
        mode = f"{stat.S_IMODE(actual.st_mode):04o}"
        if folder["mode"] and mode != folder["mode"]:
            yield Difference("folder", path, f"folder {path} has mode {mode}, planned {folder['mode']}")
        if owner and owner_of(actual.st_uid) != owner:
            yield Difference("folder", path, f"folder {path} belongs to {owner_of(actual.st_uid)}, planned {owner}")


def owner_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _changed_files(planned: list[dict]) -> list[str]:
    """Paths of files that are missing or have different content. Of a very large one only the size is compared."""
    paths = []
    for file in planned:
        path, digest = Path(file["path"]), _digest(file)
        if (
            not digest
            or not path.is_file()
            or path.stat().st_size != file["bytes"]
            or (file["bytes"] <= HASHED_BYTES and sha256(path) != digest)
        ):
            paths.append(file["path"])
    return paths


def _digest(file: dict) -> str | None:
    """sha256 of what a planned file holds; of one that is made when it is applied what was recorded then, or None."""
    if "record" not in file:
        return file["sha256"]
    with suppress(OSError):
        return Path(file["record"]).read_text(errors="replace").strip()
    return None


def _redefined(planned: dict, services: dict) -> list[str]:
    """Names of services whose definition is missing or different, or newer than the process that runs by it, or that run, and for which no run
    noted that they read the files which are there now.

    :param services: name → state and pid, of service_state.
    """
    names = []
    manager = managers.manager_of(planned)
    unread = manager.unread([service["name"] for service in planned["services"]])
    for service in planned["services"]:
        path = manager.path(service["name"])
        try:
            same = path.read_text(errors="replace") == service["definition"]
        except OSError:
            same = False
        pid = services[service["name"]]["pid"]
        started = started_at(pid)
        newer = started is not None and started + CLOCK_SECONDS < _modified(path)
        other = pid and service["reads"] and not managers.has_read(planned["prefix"], service, started)
        if not same or newer or other or service["name"] in unread:
            names.append(service["name"])
    return names


def _modified(path: str | Path) -> float:
    """When a file was changed, in seconds since 1970; 0 where it is missing. Its own time may be of another host's clock, or set by hand: it
    never counts as later than the kernel's. One that is still ahead of the clock, which was set back since, says nothing and is 0."""
    try:
        status = os.stat(path)
    except OSError:
        return 0.0
    modified = min(status.st_mtime, status.st_ctime)
    return modified if modified <= time.time() + CLOCK_SECONDS else 0.0


def started_at(pid: int | None) -> float | None:
    """When a process started, in seconds since 1970 (Linux), or None where that is not known."""
    try:
        ticks = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19])
    except OSError:
        return None
    booted = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)  # btime of /proc/stat has whole seconds alone
    return booted + ticks / os.sysconf("SC_CLK_TCK")


def _system(planned: dict) -> Iterator[Difference]:
    if not service_managers.MANAGERS[planned["service_manager"]].host_settings:
        return
    own = names.of(planned["names"]["cluster"])
    manager = planned["firewall_manager"] or "a firewall that is not active"
    rules = [typed_json.parse(FirewallRule, rule) for rule in planned["firewall"]]
    if firewalls.differs(planned["firewall_manager"], rules, System(owner=own)):
        yield Difference("firewall", manager, f"rules of {manager} are not as planned")
    links = [typed_json.parse(LinkPlan, link) for link in planned["links"]]
    if configuration.differs(links, inspection.System(own)):
        yield Difference("link", "links", "links are not as planned")
    tuned = kernel_parameters.apply(typed_json.parse(KernelTuning, planned["tuning"]), own, check=True)
    if tuned.before != tuned.after:
        yield Difference("tuning", "tuning", "kernel parameters or the tuned profile are not as planned")


def _named_releases(planned: dict, identities: set[str], applied: bool) -> set[str]:
    """Those releases that a process runs or the definition of a service names, ours or not.

    :param applied: leave out our own definitions, which an apply replaces or removes, and the processes that run by them.
    """
    folders = {planned["prefix"], os.path.realpath(planned["prefix"])}
    record = service_managers.MANAGERS[planned["service_manager"]]
    defined = host.defined_services(planned["service_manager"], planned["units"], names.of(planned["names"]["cluster"]))
    ours = {record.definition(planned["units"], name) for name in defined} if applied else set()
    replaced: list[str] = []
    texts: list[str] = []
    for path in Path(planned["units"]).glob("*"):
        if record.service(path):
            (replaced if path in ours else texts).append(path.read_text(errors="replace"))
    running = processes(planned["prefix"], planned["account"])
    ending = {pid for pid, argv in running.items() if any(all(word in text for word in argv) for text in replaced)}
    texts += [" ".join(argv) for pid, argv in running.items() if pid not in ending]
    for process in Path("/proc").glob("[0-9]*") if sys.platform != "darwin" else []:
        with suppress(OSError):
            texts.append(os.readlink(process / "exe") if int(process.name) not in ending else "")
    return {
        name for name in identities for folder in folders if any(f"{folder}/releases/{name}/" in text for text in texts)
    }


def running_releases(prefix: str, running: dict[int, list[str]]) -> list[str]:
    """Ids of the releases whose programs run."""
    folder = f"{prefix}/releases/"
    programs = (argv[0] for argv in running.values() if argv[0].startswith(folder))
    return sorted({program[len(folder) :].split("/")[0] for program in programs})


def unneeded_releases(planned: dict, applied: bool = False) -> list[str]:
    """Installed releases beyond the last ones of their backend that are kept, oldest first: none that is planned, built or run now, or
    named by a service.

    What is planned counts as one of the last, even before it is installed, and so does the place of a backend that is not planned any
    more. The last ones are those that were put to use last.

    :param applied: as it will be once the planned services run in place of those that run now.
    """
    folder = Path(planned["prefix"]) / "releases"
    times = (
        {entry.name: entry.stat().st_mtime for entry in folder.iterdir() if entry.is_dir()} if folder.is_dir() else {}
    )
    wanted = {build["id"] for build in planned["builds"]}
    partial = {
        name
        for name in times
        if name.startswith(".") and name[1:] not in wanted and not store.under_way(planned["cache"], name[1:])
    }
    others = {name for name in times if not name.startswith(".")} - wanted
    room = {
        backend: planned["keep_releases"] - max(1, sum(backends.backend_of(name) == backend for name in wanted))
        for backend in {backends.backend_of(name) for name in others}
    }
    if all(sum(backends.backend_of(name) == backend for name in others) <= left for backend, left in room.items()):
        return sorted(partial)
    held = _named_releases(planned, others, applied)
    held |= {name for name in others if store.under_way(planned["cache"], name)}
    held |= others & plan_history.builds(planned["prefix"])
    unneeded = []
    for backend, left in room.items():
        own = {name for name in others if backends.backend_of(name) == backend}
        rest = sorted(own - held, key=lambda name: times[name], reverse=True)
        unneeded += rest[max(0, left - len(own & held)) :]
    return sorted(partial) + sorted(unneeded, key=lambda name: times[name])


def _services(states: dict[str, dict]) -> Iterator[Difference]:
    """:param states: name → state, of service_state."""
    for name, service in states.items():
        if service["state"] not in ("running", "waiting"):
            yield Difference("service", name, f"{name} is {service['state']}")


def _all(kind: Kind, subjects: list[str], text: str) -> Iterator[Difference]:
    """One difference for each subject, whose place in the text is {}."""
    return (Difference(kind, subject, text.format(subject)) for subject in subjects)


def _manifests(planned: dict) -> dict[str, dict | None]:
    """Id of each planned build → its manifest, None where it is not installed or not intact."""
    releases = Path(planned["prefix"]) / "releases"
    return {build["id"]: store.installed(releases / build["id"], build["targets"]) for build in planned["builds"]}


def _model(planned: dict) -> model_files.Differences:
    plan = typed_json.parse(FetchedModelPlan, planned)
    files = model_files.of_plan(plan.files, plan.records)
    named = ", ".join(str(file.path) for file in files[:1])
    return reading.from_disk(named, lambda: model_files.differences(files, plan.records))


def _models(differs: model_files.Differences) -> Iterator[Difference]:
    yield from _all("model", differs.missing, "{} of the model is missing or has other content")
    yield from _all("model", differs.unchecked, "{} of the model has not been checked, or was changed since")
    yield from _all("model", differs.records, "{} does not say where the model comes from")


def _record(identity: str | None, summaries: list[history.PlanSummary]) -> Iterator[Difference]:
    """:param identity: of the plan; None of one that is not recorded."""
    newest = [(plan.id, plan.state) for plan in history.newest_first(summaries)[:1]]
    if identity and newest != [(identity, history.SERVED)]:
        yield Difference("record", identity, f"plan {identity} is not recorded as the last one that served")


def drift(planned: dict) -> dict:
    """What differs on this host from its part of the plan.

    :param planned: ``plan["hosts"][name]``.
    :returns: ``services`` (name → state, pid, addresses, clients), ``defined`` (names of services that have a definition), ``stale``
        (those of them that are not planned), ``missing_builds`` (ids of planned builds that are not installed or not intact),
        ``installed`` (id of each other planned build → file → sha256), ``received`` (id of those that another host has compiled → that host),
        ``running_releases`` (ids of the releases whose programs run), ``changed_files`` (paths), ``changed_models`` (of fetched.differences),
        ``redefined`` (names of services), ``knocks`` (of knocks.results), ``plans`` (of plans.summaries),
        ``differences`` (all that an apply would change, each ``{"kind", "subject", "text"}``, as common.differences defines it).
    """
    knocking = port_probes.begin(planned["knocks"], interfaces.addresses() if planned["knocks"] else [])
    running = processes(planned["prefix"], planned["account"])
    folder = Path(planned["state"])
    tables = sockets()
    services = {service["name"]: service_state(service, running, folder, tables) for service in planned["services"]}
    defined = host.defined_services(planned["service_manager"], planned["units"], names.of(planned["names"]["cluster"]))
    manager = managers.manager_of(planned)
    manifests = _manifests(planned)
    missing = [identity for identity, manifest in manifests.items() if not manifest]
    stale = sorted(set(defined) - set(services))
    changed_files, redefined = _changed_files(planned["files"]), _redefined(planned, services)
    models = _model(planned.get("model") or {"files": [], "records": []})
    summaries = plan_history.summaries(planned["prefix"])
    return {
        "services": services,
        "defined": defined,
        "stale": stale,
        "missing_builds": missing,
        "installed": {identity: manifest["files"] for identity, manifest in manifests.items() if manifest},
        "received": {
            identity: str(manifest["received"])
            for identity, manifest in manifests.items()
            if manifest and manifest.get("received")
        },
        "running_releases": running_releases(planned["prefix"], running),
        "changed_files": changed_files,
        "changed_models": models.missing,
        "redefined": redefined,
        "knocks": port_probes.results(knocking),
        "plans": typed_json.dump(summaries),
        "differences": [
            difference.as_dict()
            for difference in (
                *_accounts(planned["accounts"]),
                *_folders(planned["folders"]),
                *_all("release", missing, "release {} is not installed"),
                *_all("file", changed_files, "{} is missing or has different content"),
                *_models(models),
                *_all("definition", redefined, "{} is not defined as planned"),
                *_all("boot", sorted(manager.not_at_boot(services)), "{} is not started at boot"),
                *(Difference("manager", planned["service_manager"], text) for text in manager.problems()),
                *_system(planned),
                *_services(services),
                *_all("stale", stale, "{} is not planned any more"),
                *_all("unneeded", unneeded_releases(planned), "release {} is no longer needed"),
                *_record(planned.get("id"), summaries),
            )
        ],
    }
