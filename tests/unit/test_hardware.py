"""What is found of the devices and the processor of hosts on paper."""

import ctypes
import platform
import re
import shutil
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import commands
from ansible_collections.llamacpp.cluster.plugins.module_utils.facts import amx, hardware
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import words
from machines import NAMES, Machine
from support.clusters import accelerator as device


def doubled(*own):
    """Devices that a backend of their vendor and Vulkan drive."""
    return [*own, *({**one, "backend": "vulkan", "architecture": ""} for one in own)]


def twice(backend, name, architecture, memory_mib, unified=False, count=1):
    return doubled(*[device(backend, name, architecture, memory_mib, unified)] * count)


def write_cpuinfo(root, text):
    (root / "proc").mkdir(exist_ok=True)
    (root / "proc/cpuinfo").write_text(text)


def test_a_processor_of_arm_is_named_by_its_board_and_cores(tmp_path):
    (tmp_path / "proc/device-tree").mkdir(parents=True)
    core = "processor\t: 0\nCPU implementer\t: 0x41\nCPU architecture: 8\nCPU variant\t: 0x1\nCPU part\t: {}\n\n"
    (tmp_path / "proc/cpuinfo").write_text(core.format("0xd05") + core.format("0xd0b") * 2)
    bare = hardware.read_processor(tmp_path)
    assert bare["model"] == "Cortex-A55, Cortex-A76"
    (tmp_path / "proc/device-tree/model").write_text("Raspberry Pi 5 Model B Rev 1.0\0")
    found = hardware.read_processor(tmp_path)
    assert found["model"] == "Raspberry Pi 5 Model B Rev 1.0, Cortex-A55, Cortex-A76"
    assert found["features_id"] == bare["features_id"], "programs of one board run on another"
    (tmp_path / "proc/cpuinfo").write_text(core.format("0xfff"))
    (tmp_path / "proc/device-tree/model").unlink()
    assert hardware.read_processor(tmp_path)["model"] == platform.machine()


EXPECTED = {
    "constructed/strix_halo": twice("hip", "AMD gfx1151", "gfx1151", 124 * 1024, True),
    "constructed/strix_halo_old_kernel": twice("hip", "AMD gfx1151", "gfx1151", 124 * 1024, True),
    "constructed/strix_halo_set_aside": twice("hip", "AMD gfx1151", "gfx1151", 96 * 1024),
    "constructed/raven": twice("hip", "AMD gfx902", "gfx902", 7450, True),
    "constructed/rdna3": [
        device("hip", "AMD gfx1100", "gfx1100", 24560),
        device("hip", "AMD gfx1036", "gfx1036", 32000, True),
        device("vulkan", "AMD gfx1100", "", 24560),
    ],
    "constructed/rdna4": twice("hip", "AMD gfx1201", "gfx1201", 16304),
    "constructed/mi300x": twice("hip", "AMD gfx942", "gfx942", 196592, count=2),
    "constructed/mi300a": twice("hip", "AMD gfx942", "gfx942", 128000, True),
    "constructed/a5000x4": twice("cuda", "NVIDIA RTX A5000", "8.6", 24564, count=4),
    "constructed/rtx_3060_3090": doubled(
        device("cuda", "NVIDIA GeForce RTX 3060", "8.6", 12288), device("cuda", "NVIDIA GeForce RTX 3090", "8.6", 24576)
    ),
    "constructed/rtx_5090": doubled(
        device("cuda", "NVIDIA GeForce RTX 5090", "12.0", 32607),
        device("cuda", "NVIDIA GeForce GTX 1080 Ti", "6.1", 11264),
    ),
    "constructed/gb10": twice("cuda", "NVIDIA GB10", "12.1", 122570, True),
    "constructed/nvidia_without_tools": twice("cuda", "NVIDIA GeForce RTX 3090", "", 0, count=2),
    "constructed/intel_integrated": twice("sycl", "Intel graphics 8086:7d55", "", 15900, True),
    "constructed/arc_a770": [
        device("sycl", "Intel graphics 8086:56a0", "", 0),
        device("sycl", "Intel graphics 8086:4680", "", 32000, True),
        device("vulkan", "Intel graphics 8086:56a0", "", 0),
    ],
    "constructed/intel_arc": [
        device("sycl", "Intel graphics 8086:e20b", "", 0),
        device("sycl", "Intel graphics 8086:4680", "", 15900, True),
        device("vulkan", "Intel graphics 8086:e20b", "", 0),
        device("vulkan", "AMD graphics 1002:67df", "", 8192),
    ],
    "constructed/m4_max": [device("metal", "Apple M4 Max", "apple", 98304, True)],
    "constructed/bare_cpu": [],
    "recorded/vm_without_devices": [],
    "recorded/h200": twice("cuda", "NVIDIA H200", "9.0", 143771),
}


def test_a_host_on_paper_has_a_device_of_each_backend():
    found = {device["backend"] for name in NAMES for device in EXPECTED[name]}
    assert found == {*words.BACKENDS} - {"cpu"}


@pytest.mark.parametrize("name", NAMES)
def test_devices(name, tmp_path, monkeypatch):
    assert Machine(name, tmp_path).stand_in(monkeypatch).accelerators() == EXPECTED[name]


def test_a_mac_lends_what_its_system_allows_and_one_of_before_has_no_device(tmp_path, monkeypatch):
    machine = Machine("constructed/m4_max", tmp_path)
    machine.prints["sysctl -n iogpu.wired_limit_mb"] = "122880\n"
    assert [found["memory_mib"] for found in machine.stand_in(monkeypatch).accelerators()] == [122880]
    machine.told["machine"] = "x86_64"
    assert machine.stand_in(monkeypatch).accelerators() == []


@pytest.mark.parametrize(
    "listing",
    [
        "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure, that it, runs.",
        'Field "compute_cap" is not a valid field to query.',
        "",
        "NVIDIA H200, 9.0, ²\n",
    ],
)
def test_nvidia_smi_that_tells_nothing(listing):
    assert hardware.find_nvidia(listing, 1000) == []


def test_a_device_whose_capability_is_not_told():
    orin = device("cuda", "Orin (nvgpu)", "", 62000, True)
    assert hardware.find_nvidia("Orin (nvgpu), [N/A], Not Supported\n", 62000) == [orin]


def test_a_topology_that_may_not_be_read(tmp_path):
    """As in a container that was not given the device: the files are there, and reading them is refused."""
    (tmp_path / "sys/class/kfd/kfd/topology/nodes/1/properties").mkdir(parents=True)
    assert hardware.find_amd(tmp_path) == {}


def test_a_part_of_a_device_has_the_memory_of_its_banks(tmp_path):
    """Partitions of an MI300X have render nodes without memory files."""
    Machine("constructed/mi300x", tmp_path)
    for path in tmp_path.glob("sys/class/drm/*/device/mem_info_*"):
        path.unlink()
    assert [found["memory_mib"] for found in hardware.find_amd(tmp_path).values()] == [196592, 196592]


@pytest.mark.parametrize(
    "name, model",
    [
        ("constructed/bare_cpu", "Test Processor"),
        ("constructed/m4_max", "Apple M4 Max"),
        ("constructed/gb10", "aarch64"),
        ("recorded/vm_without_devices", "AMD EPYC"),
        ("recorded/h200", "Intel(R) Xeon(R) Processor"),
    ],
)
def test_processors(name, model, tmp_path, monkeypatch):
    machine = Machine(name, tmp_path).stand_in(monkeypatch)
    found = hardware.read_processor(tmp_path, machine.ask)
    assert found["model"] == model
    assert len(found["features_id"]) == 12


@pytest.mark.parametrize(
    "flags, same",
    [
        ("fpu sse4_2 avx2 user_shstk md_clear ibpb", True),
        ("avx2 sse4_2 fpu", True),
        ("fpu sse4_2 avx2 avx512f", False),
        ("fpu sse4_2", False),
    ],
)
def test_what_kernels_and_microcode_tell_of_a_processor_makes_no_other_kind(tmp_path, flags, same):
    def told(text):
        write_cpuinfo(tmp_path, f"model name\t: One\nflags\t\t: {text}\n")
        return hardware.read_processor(tmp_path)["features_id"]

    assert (told("fpu sse4_2 avx2") == told(flags)) is same


@pytest.mark.parametrize(
    "line, has", [("flags: fpu sse2 avx2 avx512f", True), ("flags: fpu sse2 avx2", False), ("Features: fp asimd", None)]
)
def test_which_processors_of_x86_have_avx512(tmp_path, line, has):
    write_cpuinfo(tmp_path, f"{line}\n")
    assert hardware.read_processor(tmp_path).get("avx512") is has


AMX = "fpu avx512_vnni amx_bf16 amx_tile amx_int8"


@pytest.mark.parametrize(
    "flags, work, unusable",
    [
        ("fpu avx512_vnni", False, False),
        ("fpu avx512_vnni amx_tile", False, False),
        (AMX, True, False),
        (AMX, False, True),
    ],
    ids=["not announced", "without a type that is used", "usable", "not usable"],
)
def test_tiles_that_programs_cannot_use(tmp_path, monkeypatch, flags, work, unusable):
    write_cpuinfo(tmp_path, f"model name\t: One\nflags\t\t: {flags}\n")
    monkeypatch.setattr(amx, "has_working_tiles", lambda: True)
    whole = hardware.read_processor(tmp_path)
    assert "unusable" not in whole
    monkeypatch.setattr(amx, "has_working_tiles", lambda: work)
    found = hardware.read_processor(tmp_path)
    assert found.get("unusable") == (["amx"] if unusable else None)
    assert found.get("amx") == (True if flags == AMX and work else None)
    assert (found["features_id"] == whole["features_id"]) is not unusable


@pytest.mark.parametrize(
    "operand, unusable",
    [
        ('__asm__ volatile ("ldtilecfg\\t%X0" :: "m" (*((const void **)__config)));', True),
        ("__builtin_ia32_ldtilecfg (__config);", False),
    ],
    ids=["GCC 12.2", "GCC 13.3"],
)
def test_tiles_that_the_compiler_configures_wrongly(tmp_path, monkeypatch, operand, unusable):
    write_cpuinfo(tmp_path, f"model name\t: One\nflags\t\t: {AMX}\n")
    (tmp_path / "usr/lib").mkdir(parents=True)
    (tmp_path / "usr/lib/amxtileintrin.h").write_text(operand)
    monkeypatch.setattr(amx, "has_working_tiles", lambda: True)
    answers = {"c++": "/usr/lib/amxtileintrin.h\n"}
    assert ("unusable" in hardware.read_processor(tmp_path, lambda argv: answers.get(argv[0], ""))) is unusable


@pytest.mark.parametrize("name", ["constructed/m4_max", "constructed/gb10"])
def test_tiles_are_not_tried_on_other_processors(tmp_path, monkeypatch, name):
    machine = Machine(name, tmp_path).stand_in(monkeypatch)
    monkeypatch.setattr(amx, "has_working_tiles", lambda: pytest.fail("tried"))
    assert "unusable" not in hardware.read_processor(tmp_path, machine.ask)


@pytest.mark.programs
@pytest.mark.parametrize(
    "program, works",
    [
        ("", True),
        ("import sys; sys.exit('the kernel refuses tile data')", False),
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", False),
        ("import time; time.sleep(60)", False),
        ("import no_such_module", False),
    ],
    ids=["all well", "permission refused", "SIGILL", "hangs", "cannot be tried"],
)
def test_tiles_work_where_a_program_that_uses_them_comes_to_its_end(monkeypatch, program, works):
    monkeypatch.setattr(amx, "MAX_PROGRAM_SECONDS", 1)
    assert amx.has_working_tiles(program) is works


@pytest.mark.skipif(sys.platform != "linux" or platform.machine() != "x86_64", reason="tiles are Intel's")
def test_tiles_are_tried_without_harm():
    """Wherever the tests run: this process goes on, and where none are announced, none work."""
    flags = set(re.findall(r"amx_\w+", Path("/proc/cpuinfo").read_text()))
    assert amx.has_working_tiles() in ([True, False] if flags >= amx.AMX_FLAGS else [False])


@pytest.mark.skipif(sys.platform != "linux" or platform.machine() != "x86_64", reason="tiles are Intel's")
def test_a_tile_instruction_that_the_processor_refuses_ends_the_trial():
    """The permission is left out: what the machine code then says is the processor's own word."""
    asking, doing = "if ctypes.CDLL", "if False and ctypes.CDLL"
    assert amx.TILE_PROGRAM.count(asking) == 1
    program = amx.TILE_PROGRAM.replace(asking, doing)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert done.returncode == -signal.SIGILL


@pytest.mark.parametrize(
    "platform_, said, expected", [("linux", "glibc 2.41", "2.41"), ("linux", None, ""), ("darwin", None, None)]
)
def test_the_version_of_glibc(monkeypatch, platform_, said, expected):
    monkeypatch.setattr(sys, "platform", platform_)
    monkeypatch.setattr("os.confstr", lambda name: {"CS_GNU_LIBC_VERSION": said}[name])
    assert hardware.glibc_version() == expected
    monkeypatch.setattr("os.confstr", lambda name: int(name))  # as it ends for a name that it does not know
    assert hardware.glibc_version() == (None if platform_ == "darwin" else "")


@pytest.mark.parametrize(
    "number, status, expected", [(13040, 0, "13.4"), (12080, 0, "12.8"), (0, 0, None), (12080, 34, None)]
)
def test_the_newest_cuda_that_a_driver_runs(number, status, expected):
    def version(place):
        ctypes.cast(place, ctypes.POINTER(ctypes.c_int))[0] = number
        return status

    driver = types.SimpleNamespace(cuDriverGetVersion=version)
    assert hardware.newest_cuda(lambda _name: driver) == expected
    assert hardware.newest_cuda(lambda name: ctypes.CDLL(f"{name}.none")) is None


def test_what_nvidia_smi_says_if_it_fails(monkeypatch, tmp_path):
    program = tmp_path / "nvidia-smi"
    monkeypatch.setattr(hardware.commands, "find", lambda name: shutil.which(name, path=str(tmp_path)))
    monkeypatch.setattr(commands, "SEARCH_PATH", str(tmp_path))
    assert hardware.nvidia_failure([]) is None
    program.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed\n  to communicate'\nexit 9\n")
    program.chmod(0o755)
    assert hardware.nvidia_failure([]) == "NVIDIA-SMI has failed to communicate"
    assert hardware.nvidia_failure([{"backend": "cuda", "architecture": "8.6"}]) is None
