"""Memory, temperature and power of a host, from files as kernels write them and from what nvidia-smi prints."""

import os
import time

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import reading
from ansible_collections.llamacpp.cluster.plugins.module_utils.facts import sensors


def write(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


AMD = "sys/class/drm/renderD128/device"


def test_graphics_inside_an_amd_processor(tmp_path):
    """As docs/hardware.md's Strix Halo has it: little memory of its own, and most of the host's by GTT."""
    files = {
        f"{AMD}/uevent": "DRIVER=amdgpu\nPCI_SLOT_NAME=0000:c5:00.0",
        f"{AMD}/mem_info_vram_total": 512 << 20,
        f"{AMD}/mem_info_vram_used": 200 << 20,
        f"{AMD}/mem_info_gtt_total": 110 << 30,
        f"{AMD}/mem_info_gtt_used": 60 << 30,
        f"{AMD}/hwmon/hwmon3/temp1_input": 45000,
        f"{AMD}/hwmon/hwmon3/power1_average": 31_012_000,
        "sys/class/hwmon/hwmon1/name": "k10temp",
        "sys/class/hwmon/hwmon1/temp1_input": 51500,
        "sys/class/hwmon/hwmon1/temp3_input": 47000,
        "sys/class/hwmon/hwmon2/name": "nvme",
        "sys/class/hwmon/hwmon2/temp1_input": 66000,
        "sys/class/hwmon/hwmon3/name": "amdgpu",
        "sys/class/hwmon/hwmon4/name": "power_meter",
        "sys/class/hwmon/hwmon4/power1_average": 120_000_000,
    }
    write(tmp_path, files)
    (device,) = sensors.drm(tmp_path)
    assert device == {
        "name": "amdgpu 0000:c5:00.0",
        "total_mib": 512,
        "free_mib": 312,
        "shared_total_mib": 110 * 1024,
        "shared_free_mib": 50 * 1024,
        "celsius": 45.0,
        "watts": 31.0,
    }
    assert sensors.of_host(tmp_path) == {"celsius": 51.5, "watts": 120.0}


def test_a_device_that_shows_nothing_is_left_out(tmp_path):
    write(tmp_path, {f"{AMD}/uevent": "DRIVER=virtio-pci", "sys/class/drm/renderD129/device/uevent": ""})
    assert list(sensors.drm(tmp_path)) == []
    write(tmp_path, {"sys/class/drm/renderD129/device/hwmon/hwmon0/power1_input": 9_000_000})
    assert [(found["name"], found["watts"]) for found in sensors.drm(tmp_path)] == [("graphics", 9.0)]


@pytest.mark.parametrize("shown", ["", "x", "65535000", "-99000", "nan", "inf"])
def test_a_sensor_that_shows_nonsense_shows_nothing(tmp_path, shown):
    write(tmp_path, {"sys/class/hwmon/hwmon0/name": "coretemp", "sys/class/hwmon/hwmon0/temp1_input": shown})
    assert sensors.of_host(tmp_path) == {"celsius": None, "watts": None}


def test_nvidia():
    listing = "143771, 140000, 33, 76.51\n[N/A], [N/A], 41, [N/A]\nNo devices were found\n"
    first, second = sensors.nvidia(listing)
    assert (first["name"], first["total_mib"], first["free_mib"]) == ("CUDA0", 143771, 140000)
    assert (first["celsius"], first["watts"]) == (33.0, 76.5)
    assert (second["name"], second["total_mib"], second["celsius"], second["watts"]) == ("CUDA1", None, 41.0, None)


def test_the_host(tmp_path):
    write(tmp_path, {"proc/uptime": "3601.45 9.99", "proc/meminfo": "MemAvailable:   2097152 kB"})
    found = sensors.read(["/"], tmp_path, lambda argv: "")
    assert (found["uptime_s"], found["memory_free_mib"], found["devices"]) == (3601, 2048, [])
    assert found["memory_total_mib"] > 0
    bare = sensors.read([], tmp_path / "none", lambda argv: "")
    assert (bare["uptime_s"], bare["memory_free_mib"], bare["disks"]) == (None, None, [])


def test_a_disk_is_shown_once(tmp_path):
    (disk,) = sensors.disks([str(tmp_path / "not" / "there"), str(tmp_path)])
    assert disk["path"] == str(tmp_path / "not" / "there")
    assert 0 <= disk["free_mib"] <= disk["total_mib"]


def test_a_disk_that_does_not_answer_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(sensors, "DISK_SECONDS", 0.05)
    monkeypatch.setattr(os, "statvfs", lambda _path: time.sleep(2))
    assert sensors.disks(["/"]) == [{"path": "/", "total_mib": None, "free_mib": None}]

    def fail(_seconds, _work):
        raise PermissionError

    monkeypatch.setattr(reading, "within", fail)
    assert sensors.disks(["/x"]) == [{"path": "/x", "total_mib": None, "free_mib": None}]
