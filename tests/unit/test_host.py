import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils import host


@pytest.mark.parametrize(
    "text, expected",
    [
        ('ID=debian\nVERSION_ID="12"\n', ("debian", "12", "debian")),
        ("ID=ubuntu\nVERSION_ID=24.04\nID_LIKE=debian\n", ("ubuntu", "24.04", "debian")),
        ("ID=fedora\nVERSION_ID=43\n", ("fedora", "43", "redhat")),
        ('ID="rocky"\nVERSION_ID="9.4"\nID_LIKE="rhel centos fedora"\n', ("rocky", "9.4", "redhat")),
        ("ID=cachyos\nID_LIKE=arch\n", ("cachyos", "", "arch")),
        ('ID="opensuse-tumbleweed"\nVERSION_ID="20261101"\n', ("opensuse-tumbleweed", "20261101", "suse")),
        ("ID=void\n", ("void", "", "unknown")),
    ],
)
def test_distributions(text, expected):
    found = host.distribution(text)
    assert (found["id"], found["version"], found["family"]) == expected


def test_nvidia_devices():
    listing = "NVIDIA RTX A5000, 8.6, 24564\nNVIDIA GB10, 12.1, [N/A]\nNVIDIA H200, 9.0, 143771\n"
    found = host.nvidia(listing)
    assert [(gpu["name"], gpu["architecture"], gpu["memory_mib"]) for gpu in found] == [
        ("NVIDIA RTX A5000", "8.6", 24564),
        ("NVIDIA H200", "9.0", 143771),
    ]
    assert host.nvidia("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.") == []


@pytest.mark.parametrize(
    "version, architecture, file, unified", [(110501, "gfx1151", "gtt", True), (90010, "gfx90a", "vram", False)]
)
def test_amd_devices(tmp_path, version, architecture, file, unified):
    """Constructed from the documented form of the KFD topology: a processor without graphics, and one device."""
    for node, properties in (
        (0, "cpu_cores_count 16\ngfx_target_version 0\n"),
        (1, f"simd_count 80\ngfx_target_version {version}\ndrm_render_minor 128\n"),
    ):
        folder = tmp_path / "nodes" / str(node)
        folder.mkdir(parents=True)
        (folder / "properties").write_text(properties)
    device = tmp_path / "drm" / "renderD128" / "device"
    device.mkdir(parents=True)
    (device / f"mem_info_{file}_total").write_text(str(124 << 30))
    assert host.amd(tmp_path / "nodes", tmp_path / "drm") == [
        {
            "backend": "hip",
            "name": f"AMD {architecture}",
            "architecture": architecture,
            "memory_mib": 124 * 1024,
            "unified": unified,
        }
    ]


def test_a_program_below_a_closed_folder_is_not_for_all(tmp_path):
    program = tmp_path / "closed" / "program"
    program.parent.mkdir()
    program.write_text("")
    program.chmod(0o755)
    for folder in program.parents:
        if str(folder).startswith(str(tmp_path.parent)):
            folder.chmod(0o755)
    program.parent.chmod(0o700)
    assert not host.readable_by_all(str(program))
    assert host.readable_by_all("/bin/sh")


def test_facts_are_small_and_the_same_each_time():
    facts = host.facts("user")
    assert facts == host.facts("user")
    assert facts["memory_mib"] > 0
    assert facts["cpu"]["cores"] > 0
    assert facts["scope"] == "user"
    assert set(facts["tools"]) == {tool for tool, version in facts["toolchain"].items() if version}
    assert len(str(facts)) < 4000


@pytest.fixture
def installation(tmp_path):
    """A prefix with a program that listens on the port that it is given."""
    program = tmp_path / "bin" / "listener"
    program.parent.mkdir()
    program.write_text(
        f"#!{sys.executable}\nimport socket, sys, time\ns = socket.create_server(('127.0.0.1', int(sys.argv[1])))\nprint(1, flush=True)\ntime.sleep(60)\n"
    )
    program.chmod(0o755)
    started = []

    def start(port, **environment):
        process = subprocess.Popen(
            [sys.executable, str(program), str(port)], stdout=subprocess.PIPE, env={**os.environ, **environment}
        )
        process.stdout.readline()
        started.append(process)
        return process

    yield tmp_path, program, start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def service(program, port, **environment):
    argv = [sys.executable, str(program), str(port)]
    return {
        "name": "llamacpp-x",
        "argv": argv,
        "process": argv,
        "environment": environment,
        "listens": f"127.0.0.1:{port}",
    }


def state(prefix, planned):
    return host.service_state(planned, host.processes(str(prefix)))


def test_a_service_that_runs_as_planned(installation):
    prefix, program, start = installation
    port = free_port()
    process = start(port, LLAMA_X="1")
    assert state(prefix, service(program, port, LLAMA_X="1")) == {
        "state": "running",
        "pid": process.pid,
        "addresses": ["127.0.0.1"],
    }


def test_a_service_with_another_environment_is_different(installation):
    prefix, program, start = installation
    port = free_port()
    start(port, LLAMA_X="1")
    assert state(prefix, service(program, port, LLAMA_X="2"))["state"] == "different"


def test_a_service_with_another_command_line_on_the_port_is_different(installation):
    prefix, program, start = installation
    port = free_port()
    start(port)
    planned = service(program, port)
    planned["argv"] = planned["process"] = [*planned["argv"], "-c"]
    assert state(prefix, planned)["state"] == "different"


def test_a_head_without_its_launcher_is_different(installation):
    prefix, program, start = installation
    port = free_port()
    start(port)
    planned = service(program, port)
    planned["argv"] = ["/usr/bin/python3", f"{prefix}/runtime.py", "--", *planned["process"]]
    assert state(prefix, planned)["state"] == "different"


def test_a_launcher_that_waits_for_its_workers_is_different(installation):
    prefix, program, start = installation
    launcher = start(free_port())
    planned = service(program, free_port())
    planned["argv"] = list(launcher.args)
    assert state(prefix, planned) == {"state": "different", "pid": launcher.pid, "addresses": []}


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="only root can make a process namespace")
def test_a_process_of_a_container_is_not_ours(installation):
    prefix, program, start = installation
    port = free_port()
    process = subprocess.Popen(
        ["unshare", "--pid", "--fork", "--kill-child", sys.executable, str(program), str(port)], stdout=subprocess.PIPE
    )
    try:
        process.stdout.readline()
        assert state(prefix, service(program, port))["state"] == "foreign"
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    start(port)
    assert state(prefix, service(program, port))["state"] == "running"


def test_a_stopped_service(installation):
    prefix, program, _start = installation
    assert state(prefix, service(program, free_port()))["state"] == "stopped"


def test_a_port_that_something_else_has(installation):
    prefix, program, _start = installation
    with socket.create_server(("127.0.0.1", 0)) as other:
        assert state(prefix, service(program, other.getsockname()[1]))["state"] == "foreign"


def test_addresses_of_a_listener():
    with socket.create_server(("0.0.0.0", 0)) as everywhere:
        assert host.listening_addresses(everywhere.getsockname()[1]) == ["0.0.0.0"]


def test_drift_names_missing_builds_and_stale_services(tmp_path):
    units = tmp_path / "services"
    units.mkdir()
    (units / "llamacpp-worker-old.conf").write_text("")
    (units / "other.conf").write_text("")
    release = tmp_path / "releases" / "here"
    release.mkdir(parents=True)
    (release / "manifest.json").write_text("{}")
    found = host.drift(
        {"prefix": str(tmp_path), "units": str(units), "services": [], "builds": [{"id": "here"}, {"id": "gone"}]}
    )
    assert found == {
        "services": {},
        "defined": ["llamacpp-worker-old"],
        "stale": ["llamacpp-worker-old"],
        "missing_builds": ["gone"],
    }


def test_supervisor_that_is_not_there(tmp_path):
    assert host.supervisor(str(tmp_path)) == {"version": None, "running": False}


def test_output_of_a_command_that_hangs_fails_or_is_missing(monkeypatch):
    assert host.output(["no-such-command"]) == ""
    assert host.output(["false"]) == ""
    monkeypatch.setattr(host, "COMMAND_SECONDS", 0.1)
    started = time.monotonic()
    assert host.output(["sleep", "5"]) == ""
    assert time.monotonic() - started < 4


def test_places_follow_the_scope(monkeypatch):
    monkeypatch.setenv("HOME", "/home/u")
    for name in ("XDG_DATA_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert host.places("system", "systemd") == {
        "prefix": "/opt/llamacpp",
        "cache": "/var/cache/llamacpp",
        "units": "/etc/systemd/system",
    }
    assert host.places("user", "systemd_user")["units"] == "/home/u/.config/systemd/user"
    assert host.places("user", "supervisor")["units"] == "/home/u/.local/share/llamacpp/supervisor/services"
    assert host.places("user", "launchd")["units"] == "/home/u/Library/LaunchAgents"
    assert Path(host.places("user", "launchd")["cache"]).parent == Path("/home/u/.cache")
