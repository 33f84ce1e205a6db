"""Definitions of services: each manager reads back the words that were meant, and a unit lets in no more than is needed."""

import configparser
import plistlib
import re
import shlex
import shutil
import subprocess

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import service_managers
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.facts import DEFAULT_FACTS
from ansible_collections.llamacpp.cluster.plugins.plugin_utils import definitions
from conftest import ROOT, definition
from support.clusters import accelerator


def environment_of_supervisor(line):
    """As dict_of_key_value_pairs of supervisor 4.3.0 reads it: quotes end at the next one, and \\ is a character like others."""
    lexer = shlex.shlex(line % {})
    lexer.wordchars += "/.+-():"
    tokens = list(lexer)
    return {tokens[index]: tokens[index + 2].strip("'\"") for index in range(0, len(tokens), 4)}


EVERY = "".join(map(chr, range(32, 127)))
"""Every printable character of ASCII."""


def unquote_systemd(line):
    """Words of a line as systemd.syntax(7) says: quotes, escapes, then specifiers."""
    words = re.findall(r'"((?:[^"\\]|\\.)*)"(?: |$)', line)
    assert " ".join(f'"{word}"' for word in words) == line
    return [re.sub(r"\\(.)", r"\1", word).replace("%%", "%") for word in words]


def read_systemd(text, tmp_path):
    lines = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
    words = [word.replace("$$", "$") for word in unquote_systemd(lines["ExecStart"])]
    return words, dict(word.split("=", 1) for word in unquote_systemd(lines["Environment"]))


def read_supervisor(text, tmp_path):
    parser = configparser.RawConfigParser(inline_comment_prefixes=(";", "#"), strict=False)
    parser.read_string(text)
    section = dict(parser.items(parser.sections()[0]))
    return shlex.split(section["command"] % {}), environment_of_supervisor(section["environment"])


def read_launchd(text, tmp_path):
    read = plistlib.loads(text.encode())
    assert read["UserName"] == "llamacpp"
    return read["ProgramArguments"], read["EnvironmentVariables"]


READERS = dict.fromkeys(("systemd", "systemd_user"), read_systemd)
READERS.update(supervisor=read_supervisor, launchd=read_launchd)


@pytest.mark.parametrize("manager", service_managers.MANAGERS)
def test_every_character_arrives_as_it_was_given(local, manager, tmp_path):
    local.hosts["here"]["facts"].update(
        service_manager=manager, scope=next(iter(service_managers.MANAGERS[manager].folders))
    )
    planned = local.plan()["hosts"]["here"]
    words, environment = ["/x/run", EVERY, ";", "", "-", "a=b"], {"A": EVERY, "B": "x y,%z$(id)\\"}
    if manager == "supervisor":
        environment["A"] = re.sub("[\"']", "", EVERY)
    service = {**planned["services"][-1], "argv": words, "environment": environment}
    text = definition(planned, service)
    read, set_by_it = READERS[manager](text, tmp_path)
    assert read == words
    assert {name: set_by_it[name] for name in environment} == environment


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is not installed")
def test_systemd_itself_reads_every_character_of_a_path(tmp_path):
    """It looks for the program. Facts whose paths hold quotes, backslashes or $ are refused."""
    program = tmp_path / re.sub(r"""["'\\$/]""", "", EVERY)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    unit = tmp_path / "x.service"
    for path, found in ((program, True), (tmp_path / "other", False)):
        unit.write_text(f"[Service]\nExecStart={definitions.systemd_command([str(path), EVERY])}\n")
        checked = subprocess.run(
            ["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True, check=False
        )
        assert ("x.service" not in checked.stderr) is found, checked.stderr


DEVICES = {
    "cpu": [],
    "hip": [accelerator("hip", "x", "gfx1151", 9999)],
    "cuda": [accelerator("cuda", "x", "8.6", 9999)],
}
DEVICES.update({backend: [accelerator(backend, "x", "", 9999)] for backend in ("vulkan", "sycl")})


@pytest.mark.parametrize(
    "facts, lines, others",
    [
        ({}, ["PrivateDevices=true", "MemoryDenyWriteExecute=true", "User=llamacpp"], ["DeviceAllow"]),
        (
            {"accelerators": DEVICES["hip"]},
            ["DevicePolicy=closed", "DeviceAllow=/dev/kfd rw", "DeviceAllow=char-drm rw"],
            ["PrivateDevices", "MemoryDenyWriteExecute"],
        ),
        ({"scope": "user", "service_manager": "systemd_user"}, ["WantedBy=default.target"], ["User=", "IPAddressDeny"]),
    ],
)
def test_a_unit_lets_in_what_its_device_needs(pair, facts, lines, others):
    host = pair.hosts["worker1"]
    host["facts"].update(facts)
    host["facts"]["toolchain"]["hipconfig"] = "7.2"
    host["variables"]["llama_accept_advisories"] = ["unprotected-worker"]
    planned = pair.plan()["hosts"]["worker1"]
    text = definition(planned, planned["services"][0])
    for line in lines:
        assert line in text.splitlines()
    for other in others:
        assert other not in text


def test_a_worker_lets_in_the_head_alone_and_reads_no_homes(pair):
    plan = pair.plan()
    worker, head = plan["hosts"]["worker1"], plan["hosts"]["head"]
    text = definition(worker, worker["services"][0])
    assert "IPAddressDeny=any\nIPAddressAllow=192.0.2.10 192.0.2.11 localhost\n" in text
    assert "ProtectHome=true\n" in text
    assert (
        "ProtectHome=tmpfs\nBindReadOnlyPaths=-/opt/llamacpp -/opt/llamacpp/models -/opt/llamacpp/models/known"
        in definition(head, head["services"][0])
    )


@pytest.mark.parametrize(
    "path, variables, homes",
    [
        ("/srv/m.gguf", {}, ["/opt/llamacpp", "/opt/llamacpp/models", "/srv/m.gguf"]),
        ("/home/me/m/x.gguf", {}, ["/home/me/m", "/home/me/m/x.gguf", "/opt/llamacpp", "/opt/llamacpp/models"]),
        (
            "/srv/m.gguf",
            {"llama_server_extra_args": ["--lora", "/srv/l.gguf", "--chat-template", "a/b"]},
            ["/opt/llamacpp", "/opt/llamacpp/models", "/srv/l.gguf", "/srv/m.gguf"],
        ),
        (
            "/srv/m.gguf",
            {"llama_server_extra_args": ["--lora-scaled", "/srv/l.gguf:0.5,/srv/k.gguf:2"]},
            ["/opt/llamacpp", "/opt/llamacpp/models", "/srv/k.gguf", "/srv/l.gguf", "/srv/m.gguf"],
        ),
        ("/home/me/m x.gguf", {}, None),
        ("/srv/m.gguf", {"llama_server_extra_args": ["--lora", "/srv/l x.gguf"]}, None),
        ("/srv/m.gguf", {"llama_server_extra_args": ["--lora", "/home/me/l.gguf"]}, None),
        ("/srv/m.gguf", {"llama_server_extra_args": ["--lora", "/srv/a,/root/l.gguf"]}, None),
        ("/srv/m.gguf", {"llama_server_environment": {"A": "x:/run/user/7/y"}}, None),
    ],
)
def test_the_head_sees_of_homes_what_it_reads(pair, big_model, path, variables, homes):
    """Tried with systemd 252, 257 and 262, with links into homes (the prefix may be one) and out of folders of a cache of Hugging Face."""
    own = pair.hosts["head"]["variables"]
    own.update(llama_model_known_answer=None, llama_model_path=path, llama_model_gguf_summary=big_model, **variables)
    head = pair.plan()["hosts"]["head"]
    service = head["services"][-1]
    assert service["homes"] == homes
    text = definition(head, service)
    shown = f"ProtectHome=tmpfs\nBindReadOnlyPaths=-{' -'.join(homes)}\n" if homes else "ProtectHome=read-only\n"
    assert shown in text


def serving(pair, **variables):
    """A head that serves a network."""
    given = {"llama_server_host": "192.0.2.10", "llama_server_api_key_file": "/etc/keys", **variables}
    pair.hosts["head"]["variables"].update(given)
    return pair


def test_a_head_that_serves_declared_networks_talks_to_nobody_else(pair):
    head = serving(pair, llama_server_allowed=["198.51.100.0/24", "203.0.113.7"], llama_placement="all").plan()[
        "hosts"
    ]["head"]
    text = definition(head, head["services"][0])
    allowed = "192.0.2.10 192.0.2.11 192.0.2.12 198.51.100.0/24 203.0.113.7/32 localhost"
    assert f"IPAddressDeny=any\nIPAddressAllow={allowed}\n" in text
    pair.hosts["head"]["variables"]["llama_server_host"] = "0.0.0.0"
    assert "0.0.0.0" not in pair.plan()["hosts"]["head"]["services"][0]["allow"]
    pair.hosts["head"]["variables"]["llama_server_allowed"] = []
    head = pair.plan()["hosts"]["head"]
    assert "IPAddressDeny" not in definition(head, head["services"][0])


def test_a_head_on_loopback_talks_to_its_workers_alone(pair):
    """An address in a prompt (image_url) leads to nobody else."""
    pair.hosts["head"]["variables"]["llama_placement"] = "all"
    service = pair.plan()["hosts"]["head"]["services"][-1]
    assert service["allow"] == ["127.0.0.1", "192.0.2.11", "192.0.2.12", "localhost"]


@pytest.mark.parametrize(
    "value", ["lan", "198.51.100.7/24", "2001:db8::/32", "any", "", "10.0.0.0/8 any", "224.0.0.0/4", "0.0.0.0"]
)
def test_who_may_reach_the_head_is_a_network(pair, value):
    assert "llama_server_allowed has an invalid network" in serving(pair, llama_server_allowed=[value]).reason()


WORST_EXPOSURE = 16
"""As systemd-analyze security --threshold takes it: 1.6. 0.2 of it is pidfd_getfd, see docs/security.md."""


def exposed(text, name, folder, worst=WORST_EXPOSURE):
    """What systemd-analyze finds wrong with a unit that is more exposed than it may be, or nothing."""
    unit = folder / name
    unit.write_text(text)
    argv = ["systemd-analyze", "security", "--no-pager", "--offline=true", f"--threshold={worst}", str(unit)]
    judged = subprocess.run(argv, capture_output=True, text=True, check=False)
    return "" if judged.returncode == 0 else judged.stdout + judged.stderr


judging = pytest.mark.skipif(  # systemd may be older on the reader's machine; in CI a skip fails
    "--offline"
    not in subprocess.run(["sh", "-c", "systemd-analyze --help"], capture_output=True, text=True, check=False).stdout,
    reason="systemd-analyze, of systemd 250 or newer, is not installed",
)


@pytest.mark.programs
@judging
@pytest.mark.parametrize("backend", DEVICES)
@pytest.mark.parametrize(
    "variables, worst",
    [
        ({"llama_server_host": "127.0.0.1"}, WORST_EXPOSURE),
        ({"llama_server_allowed": ["198.51.100.0/24"]}, WORST_EXPOSURE),
        ({"llama_server_allowed": []}, WORST_EXPOSURE + 1),
    ],
    ids=["loopback", "networks", "everybody"],
)
def test_units_of_all_hosts_are_locked_in(pair, tmp_path, backend, variables, worst):
    """A head that everybody may reach talks to everybody, which is 0.1, and which the plan warns of (server-for-everybody)."""
    for host in serving(pair, **variables).hosts.values():
        host["facts"]["accelerators"] = DEVICES[backend]
        host["facts"]["toolchain"] = DEFAULT_FACTS["toolchain"]
        host["variables"]["llama_backend"] = backend
    units = [
        (service["name"], definition(host, service))
        for host in pair.plan()["hosts"].values()
        for service in host["services"]
    ]
    assert len(units) >= 3
    assert "".join(exposed(text, f"{name}.service", tmp_path, worst) for name, text in units) == ""


@judging
def test_the_unit_of_the_firewall_is_locked_in(tmp_path):
    text = (ROOT / "roles/llama_firewall/templates/firewall.service.j2").read_text()
    text = text.replace("{{ __llama_firewall_file }}", "/etc/firewall-llamacpp.nft").replace("=nft", "=/usr/sbin/nft")
    assert exposed(text, "firewall-llamacpp.service", tmp_path) == ""


@pytest.mark.parametrize(
    "quote, given, why",
    [
        (definitions.systemd_command, ["a\nb"], "line break"),
        (definitions.supervisor_environment, {"A": "a\rb"}, "line break"),
        (definitions.systemd_line, "/etc/keys ", "systemd drops spaces"),
        (definitions.systemd_line, "/etc/keys\\", "systemd drops spaces"),
        (definitions.supervisor_command, ["--alias", "a #b"], "contains ' #', which supervisor"),
        (definitions.supervisor_environment, {"A": "a ;b"}, "contains ' ;'"),
        (definitions.supervisor_environment, {"A": "it's"}, 'contains "\'"'),
    ],
)
def test_what_a_manager_would_read_otherwise_is_refused(quote, given, why):
    with pytest.raises(Refusal, match=why):
        quote(given)


def test_systemd_watches_what_has_a_launcher_and_nothing_else(pair):
    """A program without one never says that it is alive, and would be ended every minute."""
    for host in pair.plan()["hosts"].values():
        for service in host["services"]:
            assert ("WatchdogSec=" in definition(host, service)) == (service["argv"] != service["process"])
