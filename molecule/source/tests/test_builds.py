"""Each kind of host has its own build, and only one host of each kind has built it."""

import json
import subprocess
import time

import pytest
from conftest import INVENTORY, PLAN, WORK, connect

BUILDS = [(name, build) for name, host in PLAN["hosts"].items() for build in host["builds"]]


def test_one_host_of_each_kind_built():
    kinds = {}
    for name, build in BUILDS:
        log = connect(name).file(f"{PLAN['hosts'][name]['cache']}/builds/{build['id']}.log")
        kinds.setdefault((build["backend"], build["id"]), []).append(log.exists and log.size > 0)
    assert sorted((backend, sorted(built)) for (backend, _identity), built in kinds.items()) == [
        ("cpu", [False, True]),
        ("cpu", [False, True]),
        ("vulkan", [True]),
    ]


def test_hosts_of_one_kind_have_the_same_programs():
    manifests = {}
    for name, build in BUILDS:
        text = (
            connect(name).file(f"{PLAN['hosts'][name]['prefix']}/releases/{build['id']}/manifest.json").content_string
        )
        manifest = json.loads(text)
        assert (manifest.pop("received_from") or name) == build["builder"]
        manifests.setdefault(build["id"], []).append(manifest)
    assert all(manifest == same[0] for same in manifests.values() for manifest in same)


def test_links_have_their_addresses_and_mtu():
    for name, host in PLAN["hosts"].items():
        output = connect(name).check_output("ip -oneline -4 address show dev eth1; cat /sys/class/net/eth1/mtu")
        assert host["links"][0]["address"] in output
        assert output.endswith("1400")


def command(*inventories):
    paths = {f"llama_{name}_path": str(WORK / f"tests-{name}.json") for name in ("plan", "verify")}
    site = f"{INVENTORY.parents[3]}/playbooks/site.yml"
    return [
        "ansible-playbook",
        site,
        *(f"--inventory={path}" for path in (INVENTORY, *inventories)),
        f"--extra-vars={json.dumps(paths)}",
    ]


@pytest.mark.timeout(1800)
def test_another_flag_on_one_host_rebuilds_only_there_and_the_next_run_repeats_a_killed_build():
    flags = WORK / "flags.yml"
    uncached_options = {"CMAKE_CXX_FLAGS": f"-frandom-seed={time.time_ns()}"}
    flags.write_text(
        json.dumps({"llama_cluster": {"hosts": {"worker3": {"llama_build_cmake_options": uncached_options}}}})
    )
    known_builds = {build["id"] for _name, build in BUILDS}
    cache, releases = (
        f"{PLAN['hosts']['worker3'][key]}/{folder}" for key, folder in (("cache", "builds"), ("prefix", "releases"))
    )
    compiled = f"find {cache} -name '*.o' | wc -l"
    with (WORK / "killed.log").open("w") as log:
        run = subprocess.Popen(command(flags), stdout=log, stderr=log)
    while int(connect("worker3").check_output(compiled)) < 10:
        assert run.poll() is None, (WORK / "killed.log").read_text()[-5000:]
        time.sleep(1)
    connect("worker3").check_output("pkill -KILL --uid llamacpp-build")
    assert run.wait(timeout=120) == 2
    plan = json.loads((WORK / "tests-plan.json").read_text())
    (identity,) = {build["id"] for host in plan["hosts"].values() for build in host["builds"]} - known_builds
    assert not connect("worker3").file(f"{releases}/{identity}").exists

    done = subprocess.run(command(flags), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr
    assert [name for name in PLAN["hosts"] if connect(name).file(f"{cache}/{identity}.log").exists] == ["worker3"]
    back = subprocess.run(command(), capture_output=True, text=True, check=False)
    assert back.returncode == 0, back.stdout[-5000:] + back.stderr
