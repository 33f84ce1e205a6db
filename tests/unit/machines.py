"""Hosts on paper: files, links and the output of commands, from one text file each in fixtures/hardware.

A file has lines ``name: value`` first (system, machine, memory_mib, cores), then sections: ``== path`` and what is in that file,
``== path -> target`` a link, ``$ command`` and what it prints, ``+ part name=value …`` the sections of one of PARTS. Lines that begin
with ``#`` tell where it comes from.
"""

from collections.abc import Iterator
from pathlib import Path

from ansible_collections.llamacpp.cluster.plugins.module_utils.facts import amx, hardware, host, toolchains

FOLDER = Path(__file__).parent / "fixtures" / "hardware"
NAMES = sorted(str(path.relative_to(FOLDER).with_suffix("")) for path in FOLDER.glob("*/*.txt"))

PARTS = {
    "node": """\
== sys/class/kfd/kfd/topology/nodes/{node}/properties
cpu_cores_count {cores}
simd_count 80
mem_banks_count 1
gfx_target_version {gfx}
vendor_id 4098
drm_render_minor {minor}
""",
    "bank": """\
== sys/class/kfd/kfd/topology/nodes/{node}/mem_banks/{bank}/properties
heap_type {heap}
size_in_bytes {bytes}
flags 0
""",
    "graphics": """\
== sys/class/drm/renderD{minor}/device/uevent
DRIVER={driver}
PCI_CLASS=30000
PCI_ID={id}
PCI_SLOT_NAME=0000:{slot}
""",
    "memory": """\
== sys/class/drm/renderD{minor}/device/mem_info_vram_total
{vram}
== sys/class/drm/renderD{minor}/device/mem_info_gtt_total
{gtt}
""",
    "cuda": """\
== usr/local/cuda-{version}/bin/nvcc
== usr/local/cuda-{version}/targets/{target}-linux/include/cublas_v2.h
$ /usr/local/cuda-{version}/bin/nvcc --version
nvcc: NVIDIA (R) Cuda compiler driver
Copyright (c) 2005-2025 NVIDIA Corporation
Cuda compilation tools, release {version}, V{version}.86
""",
    "rocm": """\
== opt/rocm-{version}/bin/hipconfig
== opt/rocm-{version}/.info/version
{version}-1
== opt/rocm-{version}/llvm/bin/clang
""",
    "rocm-headers": """\
== opt/rocm-{version}/include/hip/hip_runtime.h
== opt/rocm-{version}/include/hipblas/hipblas.h
== opt/rocm-{version}/include/rocblas/rocblas.h
""",
}


def lines_of(name: str) -> Iterator[str]:
    """The lines of a file, with its parts in full."""
    for line in (FOLDER / f"{name}.txt").read_text().splitlines():
        if line.startswith("+ "):
            _plus, part, *given = line.split()
            yield from PARTS[part].format(**dict(word.split("=") for word in given)).splitlines()
        else:
            yield line


class Machine:
    def __init__(self, name: str, root: Path) -> None:
        self.root = root
        self.told = {"system": "Linux", "machine": "x86_64"}
        self.prints: dict[str, str] = {}
        path, command, lines = "", "", []
        for line in [*lines_of(name), "== "]:
            if line.startswith(("== ", "$ ")):
                self._add(path, command, lines)
                path, command, lines = line[3:] * line.startswith("="), line[2:] * line.startswith("$"), []
            elif path or command:
                lines.append(line)
            elif line and not line.startswith("#"):
                key, value = line.split(": ", 1)
                self.told[key] = value

    def _add(self, path: str, command: str, lines: list[str]) -> None:
        text = "\n".join([*lines, ""])
        if command:
            self.prints[command] = text
        elif path:
            name, _arrow, target = path.partition(" -> ")
            place = self.root / name
            place.parent.mkdir(parents=True, exist_ok=True)
            if target:
                place.symlink_to(target)
            else:
                place.write_text(text)

    def ask(self, argv: list[str]) -> str:
        return self.prints.get(" ".join(argv), "")

    def stand_in(self, monkeypatch) -> "Machine":
        """Has Python tell of this machine what it tells of its own."""
        monkeypatch.setattr("platform.system", lambda: self.told["system"])
        monkeypatch.setattr("platform.machine", lambda: self.told["machine"])
        monkeypatch.setattr("sys.platform", self.told["system"].lower())
        monkeypatch.setattr(amx, "has_working_tiles", lambda: True)
        return self

    @property
    def memory_mib(self) -> int:
        return int(self.told["memory_mib"])

    def accelerators(self) -> list[dict]:
        return hardware.find_accelerators(self.memory_mib, self.root, self.ask)

    def facts(self) -> dict:
        """What planning needs of the devices and of what builds for them; cmake and the like are always there."""
        installed = toolchains.find_toolchains(self.root, self.ask)
        common = {"cmake": "3.31", "ninja": "1.12", "c++": "14.2", "venv": "1.0"}
        found = host.tool_versions(installed, self.root, self.ask)
        return {
            "system": self.told["system"],
            "architecture": self.told["machine"],
            "memory_mib": self.memory_mib,
            "accelerators": self.accelerators(),
            "toolchain": {
                **found,
                **{tool: found[tool] or version for tool, version in common.items() if tool in found},
            },
            "toolchains": installed,
        }
