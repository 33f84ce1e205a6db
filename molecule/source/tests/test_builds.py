"""Each kind of host has its own build, and only one host of each kind has built it."""

import json

from conftest import PLAN, on

BUILDS = [(name, build) for name, host in PLAN["hosts"].items() for build in host["builds"]]


def test_one_host_of_each_kind_built():
    kinds = {}
    for name, build in BUILDS:
        log = on(name).file(f"{PLAN['hosts'][name]['cache']}/builds/{build['id']}.log")
        kinds.setdefault((build["backend"], build["id"]), []).append(log.exists and log.size > 0)
    assert sorted((backend, sorted(built)) for (backend, _identity), built in kinds.items()) == [
        ("cpu", [False, True]),
        ("cpu", [False, True]),
        ("vulkan", [True]),
    ]


def test_hosts_of_one_kind_have_the_same_programs():
    manifests = {}
    for name, build in BUILDS:
        text = on(name).file(f"{PLAN['hosts'][name]['prefix']}/releases/{build['id']}/manifest.json").content_string
        manifest = json.loads(text)
        assert (manifest.pop("received") or name) == build["builder"]
        manifests.setdefault(build["id"], []).append(manifest)
    assert all(manifest == same[0] for same in manifests.values() for manifest in same)


def test_links_have_their_addresses_and_mtu():
    for name, host in PLAN["hosts"].items():
        told = on(name).check_output("ip -oneline -4 address show dev eth1; cat /sys/class/net/eth1/mtu")
        assert host["links"][0]["address"] in told
        assert told.endswith("1400")
