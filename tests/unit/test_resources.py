"""Free memory and disk space of a host, from files as kernels write them and from what nvidia-smi prints."""

import os
import time

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import reading
from ansible_collections.llamacpp.cluster.plugins.module_utils.facts import resources
from support.hosts import write

DRM = "sys/class/drm/renderD{number}/device"


def graphics(number, **sizes):
    """Files of a graphics device, with its sizes in bytes."""
    return {f"{DRM.format(number=number)}/mem_info_{name}": size for name, size in sizes.items()}


def test_graphics_inside_an_amd_processor(tmp_path):
    """As docs/hardware.md's Strix Halo has it: little memory of its own, and most of the host's by GTT."""
    files = graphics(128, vram_total=512 << 20, vram_used=200 << 20, gtt_total=110 << 30, gtt_used=60 << 30)
    files[f"{DRM.format(number=128)}/uevent"] = "DRIVER=amdgpu\nPCI_SLOT_NAME=0000:c5:00.0"
    files[f"{DRM.format(number=129)}/uevent"] = "DRIVER=virtio-pci"
    (device,) = resources.amd_memory(write(tmp_path, files))
    assert device == resources.DeviceMemory("amdgpu 0000:c5:00.0", 512, 312, 110 * 1024, 50 * 1024)


def test_nvidia():
    listing = "143771, 140000\n[N/A], [N/A]\nNo devices were found\n"
    first, second = resources.nvidia_memory(listing)
    assert first == resources.DeviceMemory("CUDA0", 143771, 140000)
    assert second == resources.DeviceMemory("CUDA1", None, None)


def test_the_host(tmp_path):
    write(tmp_path, {"proc/uptime": "3601.45 9.99", "proc/meminfo": "MemTotal: 9 kB\nMemAvailable:   2097152 kB"})
    found = resources.read_resources(["/"], tmp_path, lambda argv: "")
    assert (found.uptime_s, found.memory_free_mib, found.devices) == (3601, 2048, ())
    assert found.memory_total_mib > 0
    bare = resources.read_resources([], tmp_path / "none", lambda argv: "")
    assert (bare.uptime_s, bare.memory_free_mib, bare.disks) == (None, None, ())


def test_a_disk_is_shown_once(tmp_path):
    (disk,) = resources.disks_of([str(tmp_path / "not" / "there"), str(tmp_path)])
    assert disk.path == str(tmp_path / "not" / "there")
    assert 0 <= disk.free_mib <= disk.total_mib


def test_a_disk_that_does_not_answer_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(resources, "DISK_TIMEOUT_SECONDS", 0.05)
    monkeypatch.setattr(os, "statvfs", lambda _path: time.sleep(2))
    assert resources.disks_of(["/"]) == (resources.Disk("/", None, None),)

    def fail(_seconds, _work):
        raise PermissionError

    monkeypatch.setattr(reading, "run_within", fail)
    assert resources.disks_of(["/x"]) == (resources.Disk("/x", None, None),)
