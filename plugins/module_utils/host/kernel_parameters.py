# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Options of kernel modules by which a host lends more of its memory to its graphics, and the profile of tuned.

The options are in one file for modprobe, which the initramfs holds a copy of. A mark in the file says that the initramfs is not made yet, so that an
interrupted change is repeated.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import commands, names
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.files import replace_file, text_of
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.system import System
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import KernelTuning

COMMAND_SECONDS = 900
"""Making the initramfs of all kernels takes minutes."""
INITRAMFS_COMMANDS = (
    ["update-initramfs", "-u", "-k", "all"],
    ["dracut", "--force", "--regenerate-all"],
    ["mkinitcpio", "-P"],
)
"""Of Debian and Ubuntu, Fedora, RHEL and openSUSE, Arch. The first one that is installed is used."""
HEADER = "# Written by llamacpp.cluster, which overwrites what is changed here.\n"
INCOMPLETE = "# The initramfs has not been made since this file was changed.\n"
MODPROBE_FILES = tuple(f"{top}/modprobe.d/*.conf" for top in ("etc", "run", "usr/lib"))


class Change(NamedTuple):
    """What was changed, or would be."""

    before: str
    after: str
    """of the file and of tuned's profile, the same where nothing changes"""
    missing: tuple[str, ...]
    """``name=value`` that a reboot sets"""
    removed: tuple[str, ...]
    """``name=value`` that a reboot removes"""


def apply(tuning: KernelTuning, check: bool, system: System) -> Change:
    """Makes the next start of the host set these parameters and no others of this cluster, and selects the profile of tuned, where tuned runs.

    :param check: change nothing.
    :raises Refusal: other values are set, or a command fails.
    """
    if tuning.profile and not re.fullmatch(r"\w[\w.-]*", tuning.profile, re.ASCII):
        raise Refusal(f"«{tuning.profile}» is not the name of a tuned profile: see «tuned-adm list».")
    change = _apply_parameters(tuning.parameters, check, system)
    active = active_profile(system) if tuning.profile else None
    if active is None or active == tuning.profile:
        return change
    if not check:
        system.run(["tuned-adm", "profile", tuning.profile])
    before, after = change.before + f"tuned: {active or 'off'}\n", change.after + f"tuned: {tuning.profile}\n"
    return change._replace(before=before, after=after)


def active_profile(system: System) -> str | None:
    """The profile of tuned, nothing if it has none, or None where it does not run."""
    try:
        printed = system.run(["tuned-adm", "active"]) if system.program("tuned-adm") else ""
    except commands.CommandError as error:
        return "" if "No current active profile" in str(error) else None
    match = re.match(r"Current active profile: (.*)$", printed, re.MULTILINE)
    return match.group(1).strip() if match else None


def _file(system: System) -> str:
    return f"/etc/modprobe.d/{system.owner.root}.conf"


def foreign_files(system: System) -> list[str]:
    """The file for modprobe where others have made it."""
    name = _file(system)
    is_own = system.text(name).startswith((HEADER, INCOMPLETE))
    return [name] if os.path.lexists(system.path(name)) and not is_own else []


def _apply_parameters(parameters: Mapping[str, str], check: bool, system: System) -> Change:
    root = system.root
    wanted = [f"{name}={value}" for name, value in parameters.items()]
    for pair in wanted:
        if not re.fullmatch(r"\w+\.\w+=[\w:,/-]+", pair, re.ASCII):
            raise Refusal(f"«{pair}» is not a parameter of a kernel module: use module.option=value.")
    path, foreign = system.path(_file(system)), foreign_files(system)
    if foreign and parameters:
        raise Refusal(f"This host has {foreign[0]}{names.NOT_OURS}.")
    if foreign:
        return Change("", "", (), ())
    record = root / f"run/{system.owner.root}-kernel-parameters"
    before = text_of(path)
    missing = tuple(pair for pair in wanted if not _is_running(pair, root))
    former = [*text_of(record).split(), *(f"{name}={value}" for name, value in _module_options(before))]
    removed = tuple(pair for pair in dict.fromkeys(former) if pair not in wanted and _is_running(pair, root))
    if (root / "run/ostree-booted").exists():
        if missing or before:
            raise Refusal(
                f"The initramfs of this host comes with its image: set «{' '.join(wanted)}» with «rpm-ostree kargs», and reboot."
            )
        return Change("", "", (), ())
    others = _conflicts(parameters, path, root)
    if others:
        raise Refusal(f"Other values are set already: {', '.join(others)}. Remove them there.")
    after = _modprobe_file(parameters)
    if before != after and not check:
        path.parent.mkdir(exist_ok=True)
        if removed:  # the folder is empty after a restart
            replace_file(record, " ".join(removed) + "\n", 0o644)
        replace_file(path, INCOMPLETE + after, 0o644)
        command = next((argv for argv in INITRAMFS_COMMANDS if system.program(argv[0])), None)
        if command:
            system.run(command, seconds=COMMAND_SECONDS)
        if after:
            replace_file(path, after, 0o644)
        else:
            path.unlink()
    return Change(before, after, missing, removed)


def _modprobe_file(parameters: Mapping[str, str]) -> str:
    options = [(*name.split("."), value) for name, value in parameters.items()]
    lines = [f"options {module} {option}={value}\n" for module, option, value in options]
    return HEADER + "".join(lines) if lines else ""


def _module_options(text: str) -> Iterator[tuple[str, str]]:
    """``module.option`` and value of each option in a file for modprobe. To the kernel, dashes and underscores are the same."""
    for module, options in re.findall(r"^\s*options\s+(\S+)[ \t]+(.*)$", text, re.MULTILINE):
        for option in options.split():
            name, _separator, value = option.partition("=")
            yield f"{module}.{name}".replace("-", "_"), value


def _is_running(pair: str, root: Path) -> bool:
    """Whether the module runs with this value."""
    name, value = pair.split("=", 1)
    module, option = name.split(".")
    return text_of(root / "sys/module" / module / "parameters" / option).strip() == value


def _conflicts(parameters: Mapping[str, str], own_file: Path, root: Path) -> list[str]:
    """Other values that somebody else sets, as «name=value in place»."""
    words = [word.partition("=") for word in text_of(root / "proc/cmdline").split()]
    found = [("/proc/cmdline", name.replace("-", "_"), value) for name, _separator, value in words]
    for path in (path for pattern in MODPROBE_FILES for path in sorted(root.glob(pattern)) if path != own_file):
        found += [(f"/{path.relative_to(root)}", name, value) for name, value in _module_options(text_of(path))]
    return list(
        dict.fromkeys(
            f"{name}={value} in {place}"
            for place, name, value in found
            if name in parameters and value != parameters[name]
        )
    )
