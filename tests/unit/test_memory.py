"""What is free now, from what Linux and the drivers say."""

from ansible_collections.llamacpp.cluster.plugins.module_utils.facts import free_memory


def test_memory_of_the_host():
    assert free_memory.available("MemTotal:  2000000 kB\nMemAvailable:   1048576 kB\n") == 1024
    assert free_memory.available("") is None
    assert free_memory.free_mib()["CPU"] > 0


def test_memory_of_devices(tmp_path):
    assert free_memory.nvidia("80123\n[N/A]\n1\n") == {0: 80123, 2: 1}
    for number, (total, used) in {"128": (16 << 30, 4 << 30), "129": (8 << 30, 0)}.items():
        device = tmp_path / f"renderD{number}" / "device"
        device.mkdir(parents=True)
        (device / "mem_info_vram_total").write_text(f"{total}\n")
        (device / "mem_info_vram_used").write_text(f"{used}\n")
    assert free_memory.amd(tmp_path) == {0: 12288, 1: 8192}
    assert free_memory.amd(tmp_path / "none") == {}
