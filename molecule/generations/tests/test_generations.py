"""One inventory, every generation of llama.cpp: each is built once for eight hosts, and serves the known answer."""

import json
import re
import subprocess
import time

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import options
from conftest import INVENTORY, PLAN, WORK, on

pytestmark = pytest.mark.timeout(1800)

PYPI = {
    "0.3.16": "sha256:34ed0f9bd9431af045bb63d9324ae620ad0536653740e9bb163a2e1fcb973be6",
    "0.3.20": "sha256:70f01b7d915d31c617dc66610a332cb2d51cde84c8b152d09a352206323616f5",
}
RELEASES = {
    "0.3.36": {},
    "package": {"llama_release": {"source": "package"}},
    **{
        version: {"llama_release": {"source": "pypi", "version": version, "checksum": checksum}}
        for version, checksum in PYPI.items()
    },
}
"""Name of a generation → what differs in the inventory."""
SPELLINGS = {
    "0.3.16": ("2.0.0", "rpc-server", "--no-mmap"),
    "0.3.20": ("3.6.1", "rpc-server", "--no-mmap"),
    "0.3.36": ("7.0.0", "ggml-rpc-server", "--load-mode none"),
    "package": ("8.0.0", "ggml-rpc-server", "--load-mode none"),
}
BUILDER = "host1"


def command(*arguments, **variables):
    paths = {f"llama_{name}_path": str(WORK / f"tests-{name}.json") for name in ("plan", "verify")}
    return [
        *("ansible-playbook", f"{INVENTORY.parents[3]}/playbooks/site.yml", f"--inventory={INVENTORY}", *arguments),
        f"--extra-vars={json.dumps({**paths, **variables})}",
    ]


def site(*arguments, **variables):
    """Runs site.yml to its end; returns what it printed, its plan, and the checks that verified it."""
    run = subprocess.run(command(*arguments, **variables), capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr
    plan, verified = (json.loads((WORK / f"tests-{name}.json").read_text()) for name in ("plan", "verify"))
    return run.stdout, plan, verified["checks"]


def build_of(plan, name):
    (build,) = plan["hosts"][name]["builds"]
    return build["id"]


def log_of(identity, name):
    return on(name).file(f"{PLAN['hosts'][name]['cache']}/builds/{identity}.log")


def steps_of(identity, name):
    """How many steps the last attempt had before it."""
    return int(on(name).check_output(r"grep -oP '^\[\d+/\K\d+' %s | tail -n 1", log_of(identity, name).path))


def manifest(plan, name):
    path = f"{plan['hosts'][name]['prefix']}/releases/{build_of(plan, name)}/manifest.json"
    return json.loads(on(name).file(path).content_string)


def test_one_host_has_built_for_all():
    (identity,) = {build_of(PLAN, name) for name in PLAN["hosts"]}
    assert [name for name in PLAN["hosts"] if log_of(identity, name).exists] == [BUILDER]
    for name in PLAN["hosts"]:
        given_by = {} if name == BUILDER else {"received": BUILDER}
        assert manifest(PLAN, name) == {**manifest(PLAN, BUILDER), **given_by}


def test_another_flag_on_one_host_rebuilds_that_one():
    flag = WORK / "flag.yml"
    flag.write_text("llama_cluster: {hosts: {host8: {llama_build_cmake_options: {GGML_CPU_REPACK: 'OFF'}}}}\n")
    before = log_of(build_of(PLAN, BUILDER), BUILDER).mtime
    _said, plan, _checks = site(f"--inventory={flag}")
    assert [name for name in PLAN["hosts"] if build_of(plan, name) != build_of(PLAN, name)] == ["host8"]
    assert [name for name in PLAN["hosts"] if log_of(build_of(plan, "host8"), name).exists] == ["host8"]
    assert log_of(build_of(PLAN, BUILDER), BUILDER).mtime == before
    assert plan["hosts"]["host8"]["builds"][0]["targets"] == ["ggml-rpc-server"]


def test_a_build_that_was_killed_goes_on():
    serving = "pgrep --full --list-full 'bin/(llama-server|ggml-rpc-server)'"
    compiled = "find /var/cache/llamacpp/builds -path '*/pypi-0.3.20-*' -name '*.o' | wc -l"
    before = on(BUILDER).check_output(serving)
    with (WORK / "killed.log").open("w") as log:
        run = subprocess.Popen(command(**RELEASES["0.3.20"]), stdout=log, stderr=log)
    while int(on(BUILDER).check_output(compiled)) < 50:
        assert run.poll() is None, (WORK / "killed.log").read_text()[-5000:]
        time.sleep(1)
    identity = build_of(json.loads((WORK / "tests-plan.json").read_text()), BUILDER)
    on(BUILDER).check_output("pkill -KILL --uid llamacpp-build")
    assert run.wait(timeout=120) == 2
    whole = steps_of(identity, BUILDER)
    assert on(BUILDER).check_output(serving) == before
    assert not on(BUILDER).file(f"{PLAN['hosts'][BUILDER]['prefix']}/releases/{identity}").exists

    site(**RELEASES["0.3.20"])
    assert steps_of(identity, BUILDER) <= whole - 50


@pytest.mark.parametrize("generation", SPELLINGS)
def test_a_generation_serves_the_known_answer(generation):
    protocol, worker, load_mode = SPELLINGS[generation]
    _said, plan, checks = site(**RELEASES[generation])
    passed = {check["name"] for check in checks if check["status"] == "passed"}
    assert passed >= {"release", "handshake", "buffers", "known answer"}
    told = [check["evidence"] for check in checks if check["name"] == "handshake"]
    assert all(f"protocol {protocol}" in evidence for evidence in told)
    assert len(told) == 8

    running = on(BUILDER).check_output("cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
    assert f"/bin/{worker} " in running
    assert f" {load_mode} " in running

    said, _plan, _checks = site(**RELEASES[generation])
    assert re.findall(r"changed=(\d+)", said) == ["0"] * len(re.findall(r"changed=", said))

    found = manifest(plan, BUILDER)
    for program, name in ((options.SERVER, "llama-server"), (options.WORKER, worker)):
        assumed = options.listed(program, plan["release"]["generation"], options.MAINLINE)
        assert set(assumed) <= set(found["options"][name]["known"])
    assert found["options_ignored"] == []
