"""Each kind of host has its own build, and only one host of each kind has built it."""

import json

import pytest
from test_cluster import PLAN, on

pytestmark = pytest.mark.skipif(PLAN["release"]["source"] == "package", reason="nothing is built in this scenario")

BUILDS = {name: host["builds"][0] for name, host in PLAN["hosts"].items()}


def test_one_host_of_each_kind_built():
    kinds = {}
    for name, build in BUILDS.items():
        log = on(name).file(f"{PLAN['hosts'][name]['cache']}/builds/{build['id']}.log")
        kinds.setdefault(build["id"], []).append(log.exists and log.size > 0)
    assert len(kinds) == 2
    assert [sorted(built) for built in kinds.values()] == [[False, True]] * 2


def test_hosts_of_one_kind_have_the_same_programs():
    manifests = {}
    for name, build in BUILDS.items():
        text = on(name).file(f"{PLAN['hosts'][name]['prefix']}/releases/{build['id']}/manifest.json").content_string
        manifests.setdefault(build["id"], []).append(json.loads(text))
    assert all(one == other for one, other in manifests.values())


def test_links_have_their_addresses_and_mtu():
    for name, host in PLAN["hosts"].items():
        told = on(name).check_output("ip -oneline -4 address show dev eth1; cat /sys/class/net/eth1/mtu")
        assert host["links"][0]["address"] in told
        assert told.endswith("1400")
