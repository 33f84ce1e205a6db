# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Parameters on the kernel's command line, by which a host lends more of its memory to its graphics, and the profile of tuned.

Each distribution has its own mechanism that makes the command line. Our parameters are recorded on the host, and only those are
removed again. A *pair* is ``name=value``. The record marks a change that is under way, so that an interrupted one is repeated.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import commands, names
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.files import replace_file

COMMAND_SECONDS = 900
"""Making the boot images of all kernels takes minutes."""

INCOMPLETE = "# This change was interrupted."

GRUB_FILES = ("etc/default/grub", "etc/default/grub.d/*.cfg")
COMMAND_LINE_FILES = (*GRUB_FILES, "etc/kernel/cmdline", "etc/cmdline.d/*.conf")
MODULE_FILES = tuple(f"{top}/modprobe.d/*.conf" for top in ("etc", "run", "usr/lib"))
OTHER_TOOLS = ("proxmox-boot-tool", "kernelstub", "transactional-update", "sdbootutil")
"""Where one of them is installed, it owns the command line."""


class TuningError(ValueError):
    """One sentence that says why the command line stays as it is, and what to do."""


class System:
    """The host's files, by paths without a leading slash, its programs, and where a cluster notes what is its own."""

    def __init__(self, root: Path = Path("/"), own: names.Names = names.DEFAULT):
        self.root = root
        self.record = f"var/lib/{own.root}-kernel-parameters"
        self.drop_in = f"etc/default/grub.d/90-{own.root}.cfg"
        self.taken_back = f"run/{own.root}-kernel-parameters"
        """What was removed since the host was started; the folder is empty after a restart."""

    def glob(self, *patterns: str) -> list[str]:
        return [str(path.relative_to(self.root)) for pattern in patterns for path in sorted(self.root.glob(pattern))]

    def read(self, name: str) -> str:
        """Content of a file, nothing if there is none."""
        path = self.root / name
        return path.read_text(errors="surrogateescape") if path.exists() else ""

    def write(self, name: str, text: str) -> None:
        """Replaces a file, or what a link leads to, in one step; without a text there is none any more."""
        target = Path(os.path.realpath(self.root / name))
        if not text:
            target.unlink()
            return
        mode = target.stat().st_mode & 0o777 if target.exists() else 0o644
        target.parent.mkdir(exist_ok=True)
        replace_file(target, text, mode)

    def has(self, program: str) -> bool:
        return commands.find(program) is not None

    def run(self, argv: list[str]) -> str:
        """What a command prints; TuningError where it fails."""
        try:
            return commands.run(argv, COMMAND_SECONDS)
        except commands.CommandError as error:
            advice = "Run it on the host as root" if error.status is None else "Fix that on the host"
            raise TuningError(f"{error}. {advice}.") from error


# ------------------------------------------------------------------------------------------------------------ mechanisms


class Mechanism:
    """One way to make the command line; ``record`` is the file that says what of it is ours."""

    name = ""

    def __init__(self, system: System):
        self.system = system

    @property
    def record(self) -> str:
        return self.system.record

    def usable(self) -> bool:
        raise NotImplementedError

    def lines(self) -> dict[str, str]:
        """Where command lines stand → each of them. They are edited apart from the record."""
        return {}

    def holds(self, pair: str) -> bool:
        """Whether the pair is set already."""
        lines = self.lines()
        return bool(lines) and all(pair in line.split() for line in lines.values())

    def recorded(self, old: list[str], new: list[str]) -> str:
        """Text of the record while ``old`` becomes ``new``."""
        return "# Kernel parameters that llamacpp.cluster has set.\n" + " ".join(dict.fromkeys(old + new)) + "\n"

    def apply(self, lines: dict[str, str], gone: list[str], new: list[str]) -> None:
        """Applies the edited ``lines``: ``gone`` was removed, ``new`` added."""
        raise NotImplementedError


class Grubby(Mechanism):
    """Fedora and RHEL. grubby also sees to the kernels that are installed later."""

    name = "grubby"

    def usable(self) -> bool:
        return self.system.has("grubby")

    def lines(self) -> dict[str, str]:
        text = self.system.run(["grubby", "--info=ALL"])
        entries = re.findall(r'^index=(\d+)\nkernel="?([^"\n]*)"?\nargs="(.*)"$', text, re.MULTILINE)
        if not entries:
            raise TuningError("«grubby --info=ALL» reports no kernel: check the entries of the boot loader.")
        return {f"{kernel} (entry {index})": line for index, kernel, line in entries}

    def apply(self, lines: dict[str, str], gone: list[str], new: list[str]) -> None:
        options = [f"--remove-args={' '.join(gone)}"] * bool(gone) + [f"--args={' '.join(new)}"] * bool(new)
        self.system.run(["grubby", "--update-kernel=ALL", *options])
        if not all(map(self.holds, new)):
            raise TuningError(f"grubby did not set «{' '.join(new)}» for every kernel: see «grubby --info=ALL».")


class KernelInstall(Mechanism):
    """systemd-boot and unified kernel images, made from /etc/kernel/cmdline."""

    name = "kernel-install"
    path = "etc/kernel/cmdline"

    def usable(self) -> bool:
        if not self.system.read(self.path).strip() or not self.system.has("bootctl") or not self._commands():
            return False
        with contextlib.suppress(TuningError):
            return not self.system.has("update-grub") or self.system.run(["bootctl", "is-installed"]).strip() == "yes"
        return False

    def lines(self) -> dict[str, str]:
        return {"/" + self.path: self.system.read(self.path)}

    def _commands(self) -> list[list[str]]:
        """Commands that rewrite the boot entries. kernel-install is used only for kernels of which it has made an entry before."""
        if self.system.has("reinstall-kernels"):
            return [["reinstall-kernels"]]
        presets = "\n".join(map(self.system.read, self.system.glob("etc/mkinitcpio.d/*.preset")))
        if self.system.has("mkinitcpio") and re.search(r"^\s*\w+_uki=", presets, re.MULTILINE):
            return [["mkinitcpio", "-P"]]
        if not self.system.has("kernel-install"):
            return []
        kinds = ("loader/entries/*.conf", "EFI/Linux/*.efi")
        made = self.system.glob(*(f"{top}/{kind}" for top in ("boot", "efi", "boot/efi") for kind in kinds))
        images = {image.split("/")[-2]: image for image in self.system.glob("usr/lib/modules/*/vmlinuz")}
        images.update({image.split("vmlinuz-")[1]: image for image in self.system.glob("boot/vmlinuz-*")})
        return [
            ["kernel-install", "add", version, "/" + image]
            for version, image in images.items()
            if any(re.search(rf"-{re.escape(version)}(\+\d+(-\d+)?)?\.(conf|efi)$", entry) for entry in made)
        ]

    def apply(self, lines: dict[str, str], gone: list[str], new: list[str]) -> None:
        self.system.write(self.path, lines["/" + self.path])
        for argv in self._commands():
            self.system.run(argv)


class Grub(Mechanism):
    """Debian and Ubuntu. The drop-in is the record."""

    name = "grub"

    @property
    def record(self) -> str:
        return self.system.drop_in

    def usable(self) -> bool:
        return self.system.has("update-grub") and bool(self.system.read("etc/default/grub"))

    def holds(self, pair: str) -> bool:
        name, value = pair.split("=", 1)
        files = [file for file in self.system.glob(*GRUB_FILES) if file != self.record]
        return any(value in _values(self.system.read(file), name) for file in files)

    def recorded(self, old: list[str], new: list[str]) -> str:
        return f'# Set by llamacpp.cluster.\nGRUB_CMDLINE_LINUX="$GRUB_CMDLINE_LINUX {" ".join(new)}"\n'

    def apply(self, lines: dict[str, str], gone: list[str], new: list[str]) -> None:
        self.system.run(["update-grub"])
        made = re.findall(r"^\s*linux\s.*$", self.system.read("boot/grub/grub.cfg"), re.MULTILINE)
        if made and not any(set(new) <= set(line.split()) for line in made):
            raise TuningError(
                "A later file in /etc/default/grub.d overwrites GRUB_CMDLINE_LINUX: make it append instead."
            )


def mechanism(system: System) -> Mechanism | None:
    """How this host's command line is made, or None if that is not known."""
    if (system.root / "run/ostree-booted").exists() or any(map(system.has, OTHER_TOOLS)):
        return None
    return next((kind for kind in (Grubby(system), KernelInstall(system), Grub(system)) if kind.usable()), None)


# --------------------------------------------------------------------------------------------------------------- changes


def _values(text: str, name: str) -> list[str]:
    """Values that a file for the command line gives to a parameter. To the kernel, dashes and underscores are the same."""
    pattern = re.escape(name).replace("_", "[-_]")
    text = re.sub(r"^\s*#.*$", "", text, flags=re.MULTILINE)
    return re.findall(rf"(?<![\w.-]){pattern}=([^\s\"']*)", text)


def _module_options(text: str) -> str:
    """The options in a file for modprobe, as they would stand on the command line."""
    lines = re.findall(r"^\s*options\s+(\S+)[ \t]+(.*)$", text, re.MULTILINE)
    return " ".join(f"{module}.{option}" for module, options in lines for option in options.split())


def conflicts(system: System, wanted: dict[str, str], ours: list[str], lines: dict[str, str]) -> list[str]:
    """Other values that somebody else gives, as «name=value in place»."""
    sources = {"/" + file: system.read(file) for file in system.glob(*COMMAND_LINE_FILES) if file != system.drop_in}
    sources.update({"/" + file: _module_options(system.read(file)) for file in system.glob(*MODULE_FILES)})
    others = [
        f"{name}={value} in {place}"
        for place, text in {**sources, **lines}.items()
        for name in wanted
        for value in _values(text, name)
        if value != wanted[name] and f"{name}={value}" not in ours
    ]
    return list(dict.fromkeys(others))


def edit(text: str, gone: list[str], new: list[str]) -> str:
    """Removes the pairs in ``gone`` from a command line and adds those in ``new``; the rest stays as it is."""
    for pair in gone:
        text = re.sub(rf"(^|[ \t]+){re.escape(pair)}(?!\S)", "", text, flags=re.MULTILINE)
    missing = [pair for pair in new if pair not in text.split()]
    body = text.rstrip()
    return " ".join([*([body] if body else []), *missing]) + text[len(body) :]


def active_profile(system: System) -> str | None:
    """The profile of tuned, nothing if it has none, or None where it does not run."""
    try:
        printed = system.run(["tuned-adm", "active"]) if system.has("tuned-adm") else ""
    except TuningError as error:
        return "" if "No current active profile" in str(error) else None
    match = re.match(r"Current active profile: (.*)$", printed, re.MULTILINE)
    return match.group(1).strip() if match else None


def apply(wanted: dict[str, str], profile: str, check: bool, system: System | None = None) -> dict:
    """Makes the command line of the next start hold these parameters; no parameters take back what is ours.

    :param wanted: name → value.
    :param profile: profile that tuned is to have where it runs, or nothing to leave it as it is.
    :param check: change nothing.
    :returns: ``before`` and ``after`` as text, ``mechanism`` (its name or None), ``waiting`` (pairs that a restart sets or takes away).
    """
    system = system or System()
    if profile and not re.fullmatch(r"\w[\w.-]*", profile, re.ASCII):
        raise TuningError(f"«{profile}» is not the name of a tuned profile: see «tuned-adm list».")
    done = _set(wanted, check, system)
    active = active_profile(system) if profile else None
    if active is not None and active != profile:
        done["before"] += f"tuned: {active or 'off'}\n"
        done["after"] += f"tuned: {profile}\n"
        if not check:
            system.run(["tuned-adm", "profile", profile])
    return done


def _set(wanted: dict[str, str], check: bool, system: System) -> dict:
    for name, value in wanted.items():
        if not re.fullmatch(r"\w+(\.\w+)?", name, re.ASCII) or not re.fullmatch(r"[\w.:,/-]+", value, re.ASCII):
            raise TuningError(f"«{name}={value}» is not a valid kernel parameter: use letters, digits and _ . : , / -")
    pairs = [f"{name}={value}" for name, value in wanted.items()]
    running = set(system.read("proc/cmdline").split())
    taken_back = system.read(system.taken_back).split()
    left = [name for name in (system.record, system.drop_in) if system.read(name)]
    way = mechanism(system) if wanted or left else None
    if way is None:
        if left or not running.issuperset(pairs):
            remedy = (
                f"set «{' '.join(pairs)}»" if wanted else f"remove the parameters that /{left[0]} names, and the file,"
            )
            raise TuningError(
                f"How this host makes its kernel command line is not known: {remedy} by hand, then reboot it."
            )
        return _result("", "", None, [pair for pair in taken_back if pair in running])
    record, lines = system.read(way.record), way.lines()
    ours = re.findall(r"(?<![^\s\"])[\w.]+=[\w.:,/-]+(?![^\s\"])", record)
    others = conflicts(system, wanted, ours, lines)
    if others:
        raise TuningError(f"Other values are set already: {', '.join(others)}. Remove them there, or tune by hand.")
    mine = [pair for pair in pairs if pair in ours or not way.holds(pair)]
    gone = [pair for pair in ours if pair not in pairs]
    planned = {place: edit(line, gone, mine) for place, line in lines.items()}
    interrupted = ["interrupted"] if INCOMPLETE in record else []
    before = _shown({"/" + way.record: " ".join(ours + interrupted), **lines})
    after = _shown({"/" + way.record: " ".join(mine), **planned})
    taken_back = [pair for pair in dict.fromkeys(taken_back + gone) if pair not in pairs and pair in running]
    if before != after and not check:
        if taken_back:
            system.write(system.taken_back, " ".join(taken_back) + "\n")
        system.write(way.record, INCOMPLETE + "\n" + way.recorded(ours, mine))
        way.apply(planned, gone, mine)
        system.write(way.record, way.recorded([], mine) if mine else "")
    return _result(before, after, way.name, [pair for pair in pairs if pair not in running] + taken_back)


def _result(before: str, after: str, name: str | None, waiting: list[str]) -> dict:
    return {"before": before, "after": after, "mechanism": name, "waiting": waiting}


def _shown(lines: dict[str, str]) -> str:
    return "".join(f"{place}: {line.strip()}\n" for place, line in lines.items() if line.strip())
