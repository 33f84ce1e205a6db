import contextlib
import os
import runpy
import socket
import subprocess
import sys
import threading
from unittest import mock

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import commands, names
from ansible_collections.llamacpp.cluster.plugins.module_utils.facts import firewall, host, installation
from ansible_collections.llamacpp.cluster.plugins.module_utils.models import local_models
from support.hosts import executable


@pytest.mark.parametrize(
    "text, expected",
    [
        ('ID=debian\nVERSION_ID="12"\n', ("debian", "12", "debian")),
        ("ID=ubuntu\nVERSION_ID=24.04\nID_LIKE=debian\n", ("ubuntu", "24.04", "debian")),
        ("ID=fedora\nVERSION_ID=43\n", ("fedora", "43", "redhat")),
        ('ID="rocky"\nVERSION_ID="9.4"\nID_LIKE="rhel centos fedora"\n', ("rocky", "9.4", "redhat")),
        ("ID=cachyos\nID_LIKE=arch\n", ("cachyos", "", "arch")),
        ('ID="opensuse-tumbleweed"\nVERSION_ID="20261101"\n', ("opensuse-tumbleweed", "", "suse")),
        ('ID="opensuse-leap"\nVERSION_ID="16.0"\nID_LIKE="suse opensuse"\n', ("opensuse-leap", "16.0", "suse")),
        ("ID=void\n", ("void", "", "unknown")),
    ],
)
def test_distributions(text, expected):
    found = names.distribution(text)
    assert (found["id"], found["version"], found["family"]) == expected


def test_programs_are_found_in_absolute_folders_alone(monkeypatch):
    for path in ("", ":/x:", "/x::.", ".:/x"):
        monkeypatch.setenv("PATH", path)
        search = runpy.run_path(commands.__file__)["SEARCH_PATH"].split(os.pathsep)
        assert all(map(os.path.isabs, search))


def test_a_program_below_a_closed_folder_is_not_for_all(public):
    program = executable(public / "closed" / "program", "")
    program.parent.chmod(0o755)
    assert host.is_executable_by_all(str(program))
    program.parent.chmod(0o700)
    assert not host.is_executable_by_all(str(program))
    assert host.is_executable_by_all("/bin/sh")


def test_what_closes_a_file_to_an_account(public):
    home = public / "home"
    home.mkdir(mode=0o755)
    model = home / "model.gguf"
    model.write_text("")
    model.chmod(0o644)
    for account in ("nobody", "no-such-account"):
        assert local_models.find_unreadable_path(account, str(model)) is None
    model.chmod(0o640)
    assert local_models.find_unreadable_path("nobody", str(model)) == str(model)
    home.chmod(0o750)
    assert local_models.find_unreadable_path("no-such-account", str(model)) == str(home)
    link = public / "link"
    link.symlink_to(model)
    assert local_models.find_unreadable_path("nobody", str(link)) == str(home)


def test_facts_are_small_and_the_same_each_time():
    facts = host.facts("user")
    assert facts == host.facts("user")
    assert facts["memory_mib"] > 0
    assert facts["cpu"]["cores"] > 0
    assert facts["scope"] == "user"
    assert set(facts["tools"]) == {tool for tool, version in facts["toolchain"].items() if version}
    assert len(str(facts)) < 4000


@pytest.mark.parametrize("status, filters", [(0, False), (firewall.REFUSED_STATUS, True), (1, None), (None, None)])
def test_a_unit_tries_whether_its_addresses_are_filtered(status, filters):
    ran = []

    def run(argv, _seconds):
        ran.append(argv)
        if status != 0:
            raise commands.CommandError(argv, "refused", status)
        return ""

    assert firewall.has_unit_filter("/usr/bin/python3", run) is filters
    assert "--property=IPAddressDeny=any" in ran[0]
    assert firewall.has_unit_filter(None, run) is None
    assert len(ran) == 1


def test_root_is_asked_for_where_the_connecting_user_is_another_one(monkeypatch):
    ran = []
    for uid in (0, 1000):
        monkeypatch.setattr("os.geteuid", lambda uid=uid: uid)
        firewall.has_unit_filter("/usr/bin/python3", lambda argv, _seconds: ran.append(argv))
    assert [argv[:2] for argv in ran] == [["systemd-run", "--quiet"], ["sudo", "-n"]]


def test_what_a_unit_tries_succeeds_where_nothing_filters_and_knows_a_refusal():
    refused = firewall.SEND_PROGRAM.replace("socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto", "refuse")
    stub = "def refuse(*_arguments): raise PermissionError\n"
    argv = [sys.executable, "-I", "-S", "-c"]
    ended = [subprocess.run([*argv, text], check=False).returncode for text in (firewall.SEND_PROGRAM, stub + refused)]
    assert ended == [0, firewall.REFUSED_STATUS]


def test_whether_accounts_can_be_created(tmp_path):
    assert host.presence_of("useradd", str(tmp_path)) is None
    executable(tmp_path / "useradd", "")
    assert host.presence_of("useradd", str(tmp_path)) == "installed"
    assert set(host.HOST_TOOLS) < set(host.facts("user")["toolchain"])


POLICY = """llama.cpp-tools:
  Installed: {installed}
  Candidate: {candidate}
  Version table:
     1:0.7.0+dfsg-2 500
        500 http://mirror.example/debian forky/main amd64 Packages
libggml0-backend-rpc:
  Installed: 0.27.0-1
  Candidate: 0.27.0-1
"""
"""Printed by apt-cache on Debian forky, with another mirror."""


@pytest.mark.parametrize(
    "installed, candidate, version, names",
    [
        ("(none)", "1:0.7.0+dfsg-2", "0.7.0", ["libggml0-backend-rpc"]),
        ("1:0.6.1-1", "1:0.7.0+dfsg-2", "0.6.1", ["libggml0-backend-rpc", "llama.cpp-tools"]),
        ("(none)", "(none)", None, ["libggml0-backend-rpc"]),
    ],
)
def test_packages_of_llama_cpp(installed, candidate, version, names):
    found = host.package_state(POLICY.format(installed=installed, candidate=candidate), "llama.cpp-tools")
    assert found["version"] == version
    assert found["installed"] == names


def test_packages_that_are_not_offered_at_all(tmp_path):
    nothing = {"version": None, "installed": []}
    assert host.package_state("", "llama.cpp-tools", tmp_path) == {**nothing, "listed": False}
    (tmp_path / "lock").touch()
    assert not host.package_state("", "llama.cpp-tools", tmp_path)["listed"]
    known = POLICY.format(installed="1:0.6.1-1", candidate="1:0.6.1-1")
    found = host.package_state(known, "llama.cpp-tools", tmp_path)
    assert found["listed"], "a list that goes does not change a plan"
    (tmp_path / "deb.example_dists_trixie_main_binary-amd64_Packages.lz4").touch()
    assert host.package_state("", "llama.cpp-tools", tmp_path) == {**nothing, "listed": True}


def test_facts_that_the_last_run_left(tmp_path):
    assert installation.read_json(str(tmp_path), names.CACHED_FACTS_FILE) == {}
    for text, kept in (('{"a": {"memory_mib": 1}}', {"a": {"memory_mib": 1}}), ("{", {}), ('{"a": NaN}', {})):
        (tmp_path / names.CACHED_FACTS_FILE).write_text(text)
        assert installation.read_json(str(tmp_path), names.CACHED_FACTS_FILE) == kept


def test_supervisor_that_stands_still(tmp_path):
    """It runs, and takes no connection. Who connects to it waits."""
    for name in ("supervisor", names.MARKER_FOLDER):
        (tmp_path / name).mkdir()
    path = str(tmp_path / "supervisor" / "control.sock")
    waiting = []
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen(0)
        with contextlib.suppress(BlockingIOError):
            for _number in range(10):
                waiting.append(socket.socket(socket.AF_UNIX))
                waiting[-1].setblocking(False)
                waiting[-1].connect(path)
        asked = []
        asking = threading.Thread(target=lambda: asked.append(installation.runs_supervisor(str(tmp_path))), daemon=True)
        asking.start()
        asking.join(20)
        assert asked == [True]
    for client in waiting:
        client.close()
    assert installation.runs_supervisor(str(tmp_path)) is False


def test_output_of_a_command_that_hangs_fails_is_missing_or_prints_no_utf_8(monkeypatch):
    assert commands.output(["no-such-command"]) == ""
    assert commands.output(["false"]) == ""
    assert commands.output(["printf", r"\377 1.2"]) == "\ufffd 1.2"
    monkeypatch.setattr(commands, "COMMAND_TIMEOUT_SECONDS", 0.1)
    assert commands.output(["sh", "-c", "sleep 5; echo late"]) == ""


def test_places_follow_the_scope():
    system = {"prefix": "/opt/llamacpp", "cache": "/var/cache/llamacpp", "units": "/etc/systemd/system"}
    assert names.installation_folders("system", "systemd", {"HOME": "/home/u"}) == system
    for manager, units in (
        ("systemd_user", ".config/systemd/user"),
        ("supervisor", ".local/share/llamacpp/supervisor/services"),
        ("launchd", "Library/LaunchAgents"),
    ):
        assert names.installation_folders("user", manager, {"HOME": "/home/u"})["units"] == f"/home/u/{units}"
        place = names.installation_folders("user", manager, {"HOME": "/home/u"})
        assert (place["prefix"], place["cache"]) == ("/home/u/.local/share/llamacpp", "/home/u/.cache/llamacpp")


def test_only_definitions_of_this_collection_are_ours(tmp_path):
    ours = "# Written by llamacpp.cluster; the next run overwrites changes to this file.\n"
    (tmp_path / "llamacpp-server.service").write_text(ours)
    (tmp_path / "llamacpp-mine.service").write_text("[Service]\n")
    (tmp_path / "llamacpp-server.service.d").mkdir()
    (tmp_path / "llamacpp-old.service").symlink_to(tmp_path / "llamacpp-server.service")
    (tmp_path / "other.service").write_text(ours)
    assert installation.defined_services("systemd", str(tmp_path)) == ["llamacpp-server"]
    assert installation.defined_services("systemd", str(tmp_path / "none")) == []


@pytest.mark.parametrize(
    "system, scope, signs, answer, manager",
    [
        ("Darwin", "system", [], "", "launchd"),
        ("Linux", "system", ["run/systemd/system"], "", "systemd"),
        ("Linux", "user", ["run/systemd/system"], "Version=257", "systemd_user"),
        ("Linux", "user", ["run/systemd/system"], "", "supervisor"),
        ("Linux", "system", [], "", "supervisor"),
        ("FreeBSD", "system", [], "", "supervisor"),
    ],
)
def test_which_service_manager_a_host_has(tmp_path, monkeypatch, system, scope, signs, answer, manager):
    monkeypatch.setattr("platform.system", lambda: system)
    for sign in signs:
        (tmp_path / sign).mkdir(parents=True)
    assert installation.detect_service_manager(scope, tmp_path, lambda argv: answer) == manager


def test_a_record_that_names_no_cluster(tmp_path):
    (tmp_path / "cluster.json").write_text("{}")
    assert host.cluster_of(str(tmp_path)) is None


def test_what_was_measured_of_links(tmp_path):
    assert host.link_measurements(str(tmp_path)) == {}
    folder = tmp_path / "links"
    folder.mkdir()
    (folder / "worker1.json").write_text('{"round_trip_ms": 0.2}')
    (folder / "worker0.json").write_text('{"mbit_per_second": 940, "requested": true}')
    odd = ["{", "[]", '{"round_trip_ms": ""}', '{"round_trip_ms": 1e999}', "[" * 9999, " " * (host.MAX_LINK_BYTES + 1)]
    for number, text in enumerate(odd, 2):
        (folder / f"worker{number}.json").write_text(text)
    os.mkfifo(folder / "worker9.json")
    assert host.link_measurements(str(tmp_path)) == {
        "worker0": {"mbit_per_second": 940.0, "round_trip_ms": None, "detail": "", "requested": True},
        "worker1": {"mbit_per_second": None, "round_trip_ms": 0.2, "detail": "", "requested": False},
    }


def test_the_size_of_a_disk_is_rounded_so_that_it_stays_the_same(tmp_path):
    def disk(size):
        with mock.patch.object(os, "statvfs", return_value=mock.Mock(f_blocks=size, f_frsize=1)):
            return host.disk_gib(str(tmp_path / "missing"))

    assert [disk(gib << 30) for gib in (0, 1, 3, 511, 512, 1000)] == [0, 1, 2, 256, 512, 512]
    with mock.patch.object(os, "statvfs", side_effect=OSError):
        assert host.disk_gib("/") is None
