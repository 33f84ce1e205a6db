import configparser
import shlex
import shutil
import subprocess

import pytest
from ansible_collections.llamacpp.cluster.plugins.filter.restarts import restarts
from ansible_collections.llamacpp.cluster.plugins.filter.service_command import service_command
from ansible_collections.llamacpp.cluster.plugins.filter.service_environment import service_environment

WORDS = ["/opt/a b/run", "50 %", "$HOME", 'say "hi"', "back\\slash", "it's", "", ";", "a=b,c"]


def test_supervisor_splits_a_command_into_the_same_words():
    line = service_command(WORDS, "supervisor")
    expanded = configparser.BasicInterpolation().before_get(configparser.ConfigParser(), "s", "o", line, {})
    assert shlex.split(expanded) == WORDS


def test_supervisor_reads_the_same_environment():
    line = service_environment({"B": 'x "y" %z, $A', "A": "back\\slash"}, "supervisor")
    assert line == 'A="back\\\\slash",B="x \\"y\\" %%z, $A"'
    lexer = list(shlex.shlex(line.replace("%%", "%"), posix=True))
    assert lexer == ["A", "=", "back\\slash", ",", "B", "=", 'x "y" %z, $A']


def test_systemd_quoting():
    assert (
        service_command(["/a", "50 %", "$HOME", 'say "hi"', "b\\s"], "systemd")
        == r'"/a" "50 %%" "$$HOME" "say \"hi\"" "b\\s"'
    )
    assert service_environment({"A": '50 % of "$B"'}, "systemd") == r'"A=50 %% of \"$B\""'


@pytest.mark.skipif(
    not shutil.which("systemd-run") or not shutil.which("systemd-analyze"), reason="systemd is not installed"
)
def test_systemd_accepts_what_is_quoted(tmp_path):
    unit = tmp_path / "x.service"
    unit.write_text(
        f"[Service]\nExecStart={service_command(['/bin/echo', *WORDS[1:]], 'systemd')}\nEnvironment={service_environment({'A': WORDS[3]}, 'systemd')}\n"
    )
    checked = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True, check=False
    )
    assert "x.service" not in checked.stderr


@pytest.mark.parametrize(
    "quote", [lambda: service_command(["a\nb"], "systemd"), lambda: service_environment({"A": "a\nb"}, "supervisor")]
)
def test_line_breaks_are_refused(quote):
    with pytest.raises(ValueError, match="line break"):
        quote()


def test_restarts_leaves_out_hosts_without_a_comparison(local):
    plan = local.plan()
    services = {service["name"]: {"state": "stopped"} for service in plan["hosts"]["here"]["services"]}
    found = restarts(plan, {"here": {"llama_compared": {"drift": {"services": services, "stale": []}}}})
    assert found["here"] == ["llamacpp-worker-one", "llamacpp-worker-two", "llamacpp-server"]
    assert restarts(plan, {"here": {}}) == {"here": []}
