"""Definitions of services: each manager reads back the words that were meant, and a unit lets in no more than is needed."""

import configparser
import plistlib
import shlex
import shutil
import subprocess

import pytest
from ansible.errors import AnsibleActionFail
from ansible_collections.llamacpp.cluster.plugins.plugin_utils import definitions

WORDS = ["/opt/a b/run", "50 %", "$HOME", 'say "hi"', "back\\slash", "it's", "", "a=b,c"]


def test_supervisor_splits_a_command_into_the_same_words():
    line = definitions.supervisor_command(WORDS)
    expanded = configparser.BasicInterpolation().before_get(configparser.ConfigParser(), "s", "o", line, {})
    assert shlex.split(expanded) == WORDS


def test_supervisor_reads_the_same_environment():
    line = definitions.supervisor_environment({"B": 'x "y" %z, $A', "A": "back\\slash"})
    assert line == 'A="back\\\\slash",B="x \\"y\\" %%z, $A"'
    lexer = list(shlex.shlex(line.replace("%%", "%"), posix=True))
    assert lexer == ["A", "=", "back\\slash", ",", "B", "=", 'x "y" %z, $A']


def test_systemd_quoting():
    assert (
        definitions.systemd_command(["/a", "50 %", "$HOME", 'say "hi"', "b\\s"])
        == r'"/a" "50 %%" "$$HOME" "say \"hi\"" "b\\s"'
    )
    assert definitions.systemd_environment({"A": '50 % of "$B"'}) == r'"A=50 %% of \"$B\""'


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is not installed")
def test_systemd_accepts_what_is_quoted(tmp_path):
    unit = tmp_path / "x.service"
    unit.write_text(
        f"[Service]\nExecStart={definitions.systemd_command(['/bin/echo', *WORDS[1:]])}\nEnvironment={definitions.systemd_environment({'A': WORDS[3]})}\n"
    )
    checked = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True, check=False
    )
    assert "x.service" not in checked.stderr


@pytest.mark.parametrize(
    "quote", [lambda: definitions.systemd_command(["a\nb"]), lambda: definitions.supervisor_environment({"A": "a\nb"})]
)
def test_line_breaks_are_refused(quote):
    with pytest.raises(AnsibleActionFail, match="line break"):
        quote()


@pytest.mark.parametrize(
    "facts, lines, others",
    [
        ({}, ["PrivateDevices=true", "MemoryDenyWriteExecute=true", "User=llamacpp"], ["DeviceAllow"]),
        (
            {
                "accelerators": [
                    {"backend": "hip", "name": "x", "architecture": "gfx1151", "memory_mib": 9999, "unified": False}
                ]
            },
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
    text = definitions.definition(planned, planned["services"][0])
    for line in lines:
        assert line in text.splitlines()
    for other in others:
        assert other not in text


def test_a_worker_lets_in_the_head_alone_and_reads_no_homes(pair):
    plan = pair.plan()
    worker, head = plan["hosts"]["worker1"], plan["hosts"]["head"]
    text = definitions.definition(worker, worker["services"][0])
    assert "IPAddressDeny=any\nIPAddressAllow=192.0.2.10 192.0.2.11 localhost\n" in text
    assert "ProtectHome=true\n" in text
    assert "ProtectHome=read-only\n" in definitions.definition(head, head["services"][0])


def test_api_keys_are_handed_over_as_a_credential(pair):
    pair.hosts["head"]["variables"]["llama_server_api_key_file"] = "/etc/50 %.keys"
    head = pair.plan()["hosts"]["head"]
    text = definitions.definition(head, head["services"][0])
    assert "LoadCredential=api-keys:/etc/50 %%.keys\n" in text


def test_a_property_list_holds_the_words(local):
    local.hosts["here"]["variables"]["llama_server_extra_args"] = ["--alias", "<a> & b"]
    local.hosts["here"]["facts"].update(service_manager="launchd", units="/Library/LaunchDaemons")
    planned = local.plan()["hosts"]["here"]
    service = planned["services"][-1]
    read = plistlib.loads(definitions.definition(planned, service).encode())
    assert read["ProgramArguments"] == service["argv"]
    assert read["UserName"] == "llamacpp"


@pytest.mark.parametrize(
    "quote",
    [
        lambda: definitions.supervisor_command(["--alias", "a #b"]),
        lambda: definitions.supervisor_environment({"A": "a ;b"}),
    ],
)
def test_what_supervisor_would_read_as_a_comment_is_refused(quote):
    with pytest.raises(AnsibleActionFail, match="as a comment"):
        quote()


SHELL = """
. {script}
eval set -- "$command" "$command_args"
printf '%s\\0' "$@"
printf '%s\\0' "$A" "$description"
"""
"""OpenRC reads a script so, and evaluates the command once more."""


def test_a_script_of_openrc_holds_the_words(local, tmp_path):
    local.hosts["here"]["facts"].update(service_manager="openrc", units="/etc/init.d")
    planned = local.plan()["hosts"]["here"]
    service = {**planned["services"][-1], "argv": WORDS, "environment": {"A": 'it\'s "$B" %'}}
    script = tmp_path / service["name"]
    script.write_text(definitions.definition(planned, service))
    read = subprocess.run(["sh", "-c", SHELL.format(script=script)], capture_output=True, text=True, check=True)
    assert read.stdout.split("\0")[:-1] == [*WORDS, 'it\'s "$B" %', service["description"]]
    lines = script.read_text().splitlines()
    assert lines[0] == "#!/sbin/openrc-run"
    for line in ("supervisor=supervise-daemon", "command_user=llamacpp", "\tneed net", "\tafter llamacpp-worker-one"):
        assert line in lines
    assert 'rc_ulimit="-l unlimited"' not in lines
    planned["tuning"]["parameters"] = {"ttm.pages_limit": "1"}
    assert 'rc_ulimit="-l unlimited"' in definitions.definition(planned, service).splitlines()


def test_openrc_keeps_no_temporary_service_running(local):
    local.hosts["here"]["facts"].update(service_manager="openrc", units="/etc/init.d")
    planned = local.plan(staging=True)["hosts"]["here"]
    text = definitions.definition(planned, planned["services"][0])
    assert "supervise-daemon" not in text
    assert "pidfile=/run/llamacpp-staging-worker-one.pid\n" in text


def test_openrc_takes_no_line_break():
    with pytest.raises(AnsibleActionFail, match="line break"):
        definitions.openrc_command(["a\nb"])


def test_a_worker_on_openrc_is_open(pair):
    pair.hosts["worker1"]["facts"].update(service_manager="openrc", units="/etc/init.d")
    assert "on worker1 nothing limits 192.0.2.11:50052" in pair.reason()
