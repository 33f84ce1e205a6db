"""What the network adds to a token, by the formula and by what is known of the links."""

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import estimate
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.values import Interface, Link


def links_of(pair, **measured):
    pair.hosts["head"]["facts"]["measured"] = measured
    return pair.plan()["estimate"]


def test_without_a_worker_the_network_adds_nothing(pair):
    for name in ("worker1", "worker2"):
        del pair.hosts[name]
    assert pair.plan()["estimate"] == {"network_ms_per_token": 0, "bound": "about", "crossings": 0, "links": []}


def test_where_nothing_was_measured_the_assumption_is_told(pair):
    told = links_of(pair)
    one_way = estimate.ASSUMED["ethernet"].one_way_ms
    assert told["network_ms_per_token"] == pytest.approx(3 * one_way)
    assert told["crossings"] == 3
    assert told["links"][1] == {
        "host": "worker2",
        "endpoint": "192.0.2.12:50052",
        "kind": "ethernet",
        "one_way_ms": one_way,
        "mbit_per_s": 940,
        "measured": False,
    }


def test_what_was_measured_is_used(pair):
    told = links_of(pair, worker1={"round_trip_ms": 0.5}, worker2={"round_trip_ms": None}, elsewhere={})
    assert [(link["one_way_ms"], link["measured"]) for link in told["links"]] == [(0.25, True), (0.15, False)]
    assert told["network_ms_per_token"] == pytest.approx(2 * 0.25 + 0.15)


@pytest.mark.parametrize(
    "release, bound",
    [
        ({"source": "archive", "build": 8600}, "about"),
        ({"source": "archive", "build": 10496}, "about"),
        ({"source": "archive", "build": 10500}, "at most"),
        ({"source": "pypi"}, "at most"),
    ],
)
def test_a_release_that_does_not_wait_takes_at_most_so_long(pair, release, bound):
    given = {**pair.hosts["head"]["variables"]["llama_release"], "path": "/tmp/x.tar.gz", **release}
    if release["source"] == "pypi":
        del given["path"]
    else:
        del given["version"]
    pair.hosts["head"]["variables"]["llama_release"] = given
    assert pair.plan()["estimate"]["bound"] == bound


@pytest.mark.parametrize(
    "endpoint, interface, kind",
    [
        ("127.0.0.1:50052", "", "loopback"),
        ("198.51.100.2:50052", "thunderbolt0", "thunderbolt"),
        ("198.51.100.2:50052", "ibp1s0", "infiniband"),
        ("198.51.100.2:50052", "wlp2s0", "wireless"),
        ("198.51.100.2:50052", "enp1s0", "ethernet"),
        ("198.51.100.2:50052", None, "ethernet"),
        ("192.0.2.11:50052", "thunderbolt0", "ethernet"),
    ],
)
def test_the_kind_of_a_link(endpoint, interface, kind):
    links = [Link(interface, "198.51.100.2/30", None, None, False)]
    assert estimate.kind_of(endpoint, links) == kind


@pytest.mark.parametrize(
    "declared, interface, known, kind",
    [
        ("usb4", "thunderbolt0", "thunderbolt", "usb4"),
        (None, "thunderbolt0", "usb4", "usb4"),
        (None, None, "usb4", "usb4"),
        (None, "en5", "thunderbolt", "thunderbolt"),
        ("ethernet", "thunderbolt0", "thunderbolt", "ethernet"),
    ],
)
def test_the_kind_that_is_declared_or_that_the_host_tells(declared, interface, known, kind):
    links = [Link(interface, "198.51.100.2/30", None, None, False, kind=declared)]
    interfaces = [Interface("eth0", "ethernet", ("192.0.2.11",)), Interface("thunderbolt0", known, ("198.51.100.2",))]
    interfaces.append(Interface("en5", known, ()))
    assert estimate.kind_of("198.51.100.2:50052", links, interfaces) == kind


def test_a_worker_without_llama_links_has_the_kind_of_the_interface_with_its_address(pair):
    interface = {"name": "thunderbolt0", "kind": "usb4", "addresses": ["192.0.2.12"]}
    pair.hosts["worker2"]["facts"]["interfaces"] = [interface]
    kinds = {link["host"]: (link["kind"], link["one_way_ms"]) for link in pair.plan()["estimate"]["links"]}
    assert kinds == {"worker1": ("ethernet", 0.15), "worker2": ("usb4", 0.12)}


def test_each_kind_that_can_be_declared_has_a_time_and_a_rate_of_its_own():
    assert set(names.LINK_KINDS) == set(estimate.ASSUMED) - {"loopback"}
    for field in (0, 1):
        assert len({estimate.ASSUMED[kind][field] for kind in ("ethernet", "thunderbolt", "usb4")}) == 3


def test_loopback_is_never_measured(local):
    local.hosts["here"]["facts"]["measured"] = {"here": {"round_trip_ms": 9.0}}
    assert [link["kind"] for link in local.plan()["estimate"]["links"]] == ["loopback", "loopback"]
    assert local.plan()["estimate"]["network_ms_per_token"] == pytest.approx(0.06)
