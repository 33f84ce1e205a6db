"""Every advisory fires where it must and is silent on a healthy plan."""

import pytest


def ids(plan):
    return [advisory["id"] for advisory in plan["advisories"]]


def old_release(build):
    return {"source": "archive", "path": "/tmp/x.tar.gz", "checksum": "sha256:" + "b" * 64, "build": build}


def expose_server(cluster):
    cluster.hosts["head"]["variables"]["llama_server_host"] = "192.0.2.10"


def without_systemd(cluster):
    cluster.hosts["worker1"]["facts"]["service_manager"] = "supervisor"


def below_the_floor(cluster):
    for host in cluster.hosts.values():
        host["variables"]["llama_release"] = old_release(8491)


def test_none_on_a_healthy_plan(pair, local):
    assert ids(pair.plan()) == []
    assert ids(local.plan()) == []


@pytest.mark.parametrize(
    "trigger, identifier, mended",
    [
        (
            below_the_floor,
            "rpc-remote-code-execution",
            lambda c: [h["variables"].update(llama_release=old_release(8492)) for h in c.hosts.values()],
        ),
        (
            without_systemd,
            "unprotected-worker",
            lambda c: c.hosts["worker1"]["facts"].update(service_manager="systemd"),
        ),
        (
            expose_server,
            "open-server",
            lambda c: c.hosts["head"]["variables"].update(llama_server_api_key_file="/etc/llama.key"),
        ),
    ],
)
def test_an_error_stops_the_run_until_it_is_accepted_or_mended(pair, trigger, identifier, mended):
    trigger(pair)
    plan = pair.plan()
    assert ids(plan) == [identifier]
    assert plan["refused"]
    assert plan["advisories"][0]["remedy"] in plan["reasons"][0]
    assert f"add {identifier} to llama_accept_advisories" in plan["reasons"][0]

    pair.hosts["head"]["variables"]["llama_accept_advisories"] = [identifier]
    accepted = pair.plan()
    assert not accepted["refused"]
    assert accepted["advisories"][0]["accepted"]

    mended(pair)
    assert ids(pair.plan()) == []
