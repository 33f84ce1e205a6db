# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Facts for writing an inventory: the interfaces, neighbours and models of a host."""

import ipaddress
import json
import os
import platform
import re
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, NamedTuple, Optional

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names, reading, typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.files import text_of
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.units import parse_count
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import HOST_CIDR_PATTERN, Text
from ansible_collections.llamacpp.cluster.plugins.module_utils.facts import interfaces
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.links import inspection
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.system import System
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import header_summary, split_files
from ansible_collections.llamacpp.cluster.plugins.module_utils.models import download_record, local_models, ollama
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import host_types

MODEL_FOLDERS = (
    *("/models", "/srv/models", "/opt/models", "/data/models", "~/models", "~/.cache/llama.cpp"),
    *("~/.cache/huggingface/hub", "~/.lmstudio/models", "~/.cache/lm-studio/models"),
)
"""Folders in which people and other programs store models."""
MAX_FOLDER_DEPTH, MAX_MODELS = 6, 20
"""Maximum depth of the search in these folders, and maximum number of models whose headers are read, the largest first."""
MAX_MODEL_SECONDS = 120
"""Time limit for all models of a host."""
LINK_TYPES = ("1", str(interfaces.INFINIBAND_TYPE))
"""Values of ``type`` for interfaces with hardware addresses, which tunnels lack."""
DISCARD_PORT, ANSWER_WAIT_SECONDS = 9, 1.0

MacAddress = Annotated[str, Text(r"[0-9a-f]{2}(:[0-9a-f]{2}){5,19}", 64)]


class LinkInterface(NamedTuple):
    """An interface that may be an end of a link."""

    name: Annotated[str, Text(r"[\w.:@-]+", 64)]
    kind: Annotated[str, names.LINK_KINDS]
    mac: MacAddress
    mbit: Optional[int]
    """Mbit per second, according to its driver"""
    addresses: tuple[Annotated[str, Text(HOST_CIDR_PATTERN)], ...]
    main: bool
    """Whether the controller's connection or the default route uses it."""
    sees: tuple[MacAddress, ...]
    """Hardware addresses of its neighbours."""


class FoundModel(NamedTuple):
    kind: Annotated[str, ("path", "ollama")]
    name: Annotated[str, Text(r"[\w./@+=,() :-]+", 4096)]
    """Path of its first file, or its name in Ollama."""
    file: Annotated[str, Text(r"/[^\n]*", 4096)]
    unreadable_path: Optional[Annotated[str, Text(max_length=4096)]]
    """Folder or file that the services' account cannot read."""
    summary: Mapping[str, Any]

    @property
    def layer_bytes(self) -> int:
        """Return the bytes that need space on devices; the plan uses no other size of the model."""
        return sum(self.summary["layer_bytes"])


class Discovery(NamedTuple):
    """Result of discovery_info."""

    hostname: Annotated[str, Text()] = ""
    interfaces: tuple[LinkInterface, ...] = ()
    models: tuple[FoundModel, ...] = ()


def discover(addresses: Sequence[str], folders: Sequence[str], account: Optional[str]) -> Discovery:
    """Return the facts of this host.

    :param addresses: IPv4 addresses of other hosts.
    :param account: account that reads the models; None for the account of this process.
    """
    models = reading.run_disk_work(", ".join(folders), lambda: tuple(find_models(folders, account)), MAX_MODEL_SECONDS)
    return Discovery(platform.node(), interfaces_of(System(), addresses), models)


def interfaces_of(system: System, addresses: Iterable[str]) -> tuple[LinkInterface, ...]:
    state = inspection.inspect(system)
    folders = {name: inspection.interface_folder(name, system) for name in state.interfaces}
    states = {name: state.interfaces[name] for name in folders if text_of(folders[name] / "type").strip() in LINK_TYPES}
    _contact_hosts(addresses, states)
    macs = neighbour_macs(system.output("ip", "-json", "neigh"))
    link_interfaces = []
    for name, interface in states.items():
        mbit, kind = parse_count(text_of(folders[name] / "speed")), interfaces.kind_of(folders[name], system.root)
        is_main, seen_macs = name in state.protected_names, tuple(sorted(macs.get(name, ())))
        if interface.mac:
            ipv4 = tuple(address for address in interface.addresses if re.fullmatch(HOST_CIDR_PATTERN, address))
            link_interfaces.append(LinkInterface(name, kind, interface.mac, mbit, ipv4, is_main, seen_macs))
    return tuple(link_interfaces)


def _contact_hosts(addresses: Iterable[str], states: Mapping[str, inspection.InterfaceState]) -> None:
    """Send an empty datagram to other hosts in this host's networks, which makes the kernel look up their hardware addresses."""
    networks = [ipaddress.ip_interface(text).network for state in states.values() for text in state.addresses]
    host_addresses = map(ipaddress.ip_address, filter(inspection.is_address, addresses))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        for address in host_addresses:
            if any(address in network for network in networks):
                with suppress(OSError):
                    sender.sendto(b"", (str(address), DISCARD_PORT))
    time.sleep(ANSWER_WAIT_SECONDS)


def neighbour_macs(listing: str) -> dict[str, set[str]]:
    """Return the hardware addresses of neighbours that answered, by interface.

    :param listing: output of ``ip -json neigh``.
    """
    macs: dict[str, set[str]] = {}
    with suppress(*reading.PARSE_ERRORS):
        for entry in json.loads(listing):
            if "lladdr" in entry and "FAILED" not in entry.get("state", ()):
                macs.setdefault(str(entry["dev"]), set()).add(str(entry["lladdr"]))
    return macs


def find_models(folders: Iterable[str], account: Optional[str]) -> Iterator[FoundModel]:
    """Yield models that generate text, the largest first."""
    largest_models = sorted(_complete_models(folders), key=lambda model: -model[1])[:MAX_MODELS]
    report = local_models.report([], [path for path, _bytes in largest_models], list(ollama.model_names()), account)
    for path, entry in report["paths"].items():
        if can_generate(entry.get("summary")):
            yield FoundModel("path", path, path, entry["unreadable_path"], entry["summary"])
    for name, files in report["ollama"].items():
        entry = files.get(host_types.MODEL) or {}
        if can_generate(entry.get("summary")):
            yield FoundModel("ollama", name, entry["path"], entry["unreadable_path"], entry["summary"])


def can_generate(summary: Optional[Mapping[str, Any]]) -> bool:
    """Return whether a header describes a model that generates text, rather than a projector, a vocabulary or an encoder."""
    with suppress(typed_json.Mismatch):
        return "bert" not in header_summary.parse(summary).architecture
    return False


def _complete_models(folders: Iterable[str]) -> Iterator[tuple[str, int]]:
    """Yield the first path and the size of each complete model below the folders; skip other paths of the same model."""
    real_paths = set()
    for root_folder in map(os.path.expanduser, folders):
        for folder, subfolders, file_names in os.walk(root_folder):
            if folder[len(root_folder) :].count("/") >= MAX_FOLDER_DEPTH:
                subfolders.clear()
            for model in split_files.group_files(sorted(name for name in file_names if name.endswith(".gguf"))):
                paths = [os.path.join(folder, name) for name in model.names]
                path = os.path.realpath(paths[0])
                if model.is_complete and path not in real_paths and not download_record.problem_of_name(model.names[0]):
                    real_paths.add(path)
                    with suppress(OSError):
                        yield paths[0], sum(os.stat(path).st_size for path in paths)
