"""The port of the head: for whom it is open, and where clients find it."""

import pytest
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.report import plan_text
from conftest import RELEASE, definition, typed
from support.clusters import FORK


def opened(pair, *networks, host="192.0.2.10", **variables):
    """A head that serves networks, on a host with a firewall."""
    pair.hosts["head"]["facts"]["firewall"] = "nftables"
    pair.set(
        "head",
        llama_server_host=host,
        llama_server_allowed=list(networks),
        llama_server_api_key_file="/etc/keys",
        **variables,
    )
    return pair


def test_the_server_s_port_is_opened_for_its_networks(pair):
    plan = opened(pair, "198.51.100.0/24", "203.0.113.7").accepted()
    sources = ["198.51.100.0/24", "203.0.113.7"]
    assert plan["hosts"]["head"]["firewall"] == [{"port": 8080, "sources": sources, "address": "192.0.2.10"}]
    assert "8080 for 198.51.100.0/24, 203.0.113.7; blocked for everyone else by" in plan_text.plan_page(typed(plan))
    page = plan_text.plan_page(typed(opened(pair, "0.0.0.0/0").plan()))
    assert "  head  192.0.2.10: 8080 for everyone" in page.splitlines()
    assert opened(pair, *sources, host="127.0.0.1").plan()["hosts"]["head"]["firewall"] == []
    assert opened(pair).plan()["hosts"]["head"]["firewall"] == []


def test_clients_of_the_server_do_not_reach_a_worker_beside_it(pair):
    pair.hosts["head"]["groups"].append("worker")
    hosts = opened(pair, "198.51.100.0/24").plan()["hosts"]
    beside, server = hosts["head"]["services"]
    assert beside["allow"] == ["127.0.0.1", "localhost"]
    assert "198.51.100.0/24" in server["allow"]


def test_a_head_of_which_no_firewall_is_set_up_is_limited_by_its_operator(pair):
    opened(pair, "198.51.100.0/24").hosts["head"]["facts"].update(
        service_manager="launchd", system="Darwin", firewall=None
    )
    reason = pair.reason()
    assert "(launchd) does not filter addresses. Restrict the port" in reason
    assert "nftables" not in reason


@pytest.mark.parametrize(
    "address, own, networks, shown",
    [
        ("192.0.2.10", ["10.0.0.5", "192.0.2.10"], ["10.0.0.0/8"], "10.0.0.5"),
        ("192.0.2.10", ["10.0.0.5"], ["198.51.100.0/24"], "192.0.2.10"),
        ("strix0.lan", ["10.0.0.5"], ["10.0.0.0/8"], "10.0.0.5"),
        ("localhost", ["172.17.0.1", "192.0.2.77"], ["192.0.2.0/24"], "192.0.2.77"),
        ("127.0.0.1", ["192.0.2.77"], ["0.0.0.0/0"], "192.0.2.77"),
        ("localhost", [], ["192.0.2.0/24"], "here"),
    ],
)
def test_clients_are_shown_an_address_that_they_reach(local, address, own, networks, shown):
    here = local.hosts["here"]
    here["ansible_host"] = address
    here["facts"]["addresses"] = own
    here["variables"].update(
        llama_server_host="0.0.0.0", llama_server_allowed=networks, llama_server_api_key_file="/etc/keys"
    )
    plan = local.accepted()
    head = plan["head"]
    assert head["url"] == f"http://{shown}:8080"
    assert head["own_url"] == "http://127.0.0.1:8080"
    assert head["launcher"][head["launcher"].index("--url") + 1] == head["own_url"]
    assert (
        "http://127.0.0.1"
        not in plan_text.plan_summary(typed(plan)) + plan_text.plan_page(typed(plan)).partition("Commands")[0]
    )


CERTIFICATE, KEY = "llama_server_tls_certificate_file", "llama_server_tls_key_file"
FILES = {CERTIFICATE: "/etc/tls/50 %.pem", KEY: "/etc/tls/key.pem"}


def secured(cluster, **more):
    for host in cluster.hosts.values():
        host["variables"].update(FILES, **more)
    return cluster


def test_a_file_without_a_name_is_none(pair):
    empty = {CERTIFICATE: "", KEY: "", "llama_server_api_key_file": ""}
    pair.hosts["head"]["variables"].update(empty)
    head = pair.plan()["head"]
    assert [head[name.removeprefix("llama_server_")] for name in empty] == [None] * 3


@pytest.mark.parametrize(
    "release, on, off",
    [(RELEASE, {"LLAMA_OPENSSL"}, set()), (FORK, {"LLAMA_SERVER_SSL", "LLAMA_OPENSSL"}, {"LLAMA_CURL"})],
    ids=["0.3.36", "ik_llama.cpp"],
)
def test_a_release_is_built_with_tls_where_it_is_asked_for(pair, release, on, off):
    accepted = {"llama_release": release, "llama_accept_advisories": ["rpc-remote-code-execution"]}
    plain = secured(pair, **accepted, **dict.fromkeys(FILES)).plan()
    plan = secured(pair, **accepted).accepted()
    assert plan["advisories"] == plain["advisories"]
    for name in plan["hosts"]:
        (build,), (before,) = plan["hosts"][name]["builds"], plain["hosts"][name]["builds"]
        options = build["cmake_options"]
        assert {option for option in ("LLAMA_OPENSSL", "LLAMA_SERVER_SSL") if options.get(option) == "ON"} == on
        assert {option for option in off if options[option] == "OFF"} == off
        assert build["id"] != before["id"]
        assert plan["hosts"][name]["tools"]["openssl"] == "libssl-dev"
        assert "openssl" not in plain["hosts"][name]["tools"]


def test_only_the_backend_that_serves_is_built_with_tls(pair):
    device = {"backend": "vulkan", "name": "x", "architecture": "", "memory_mib": 9999, "unified": False}
    for name in ("worker1", "worker2"):
        pair.hosts[name]["facts"]["accelerators"] = [device]
        pair.hosts[name]["facts"]["toolchain"]["glslc"] = "2025"
        pair.hosts[name]["variables"]["llama_backend"] = "vulkan"
    hosts = secured(pair).plan()["hosts"]
    assert hosts["head"]["builds"][0]["cmake_options"]["LLAMA_OPENSSL"] == "ON"
    assert hosts["worker1"]["builds"][0]["cmake_options"]["LLAMA_OPENSSL"] == "OFF"
    assert "openssl" not in hosts["worker1"]["tools"]


def test_openssl_that_cannot_be_installed(local):
    here = secured(local).hosts["here"]["facts"]
    here.update(scope="user", service_manager="supervisor")
    assert not local.plan()["refused"], "facts of an older version do not tell"
    here["toolchain"]["openssl"] = None
    assert "here lacks openssl, and this run has no root access on that host" in local.reason()
    here["toolchain"]["openssl"] = "present"
    assert not local.plan()["refused"]


def test_certificate_and_key_are_handed_over_and_clients_are_shown_https(pair):
    opened(secured(pair), "192.0.2.0/24")
    plan = pair.accepted()
    head, host = plan["head"], plan["hosts"]["head"]
    line = " ".join(head["argv"])
    assert "--ssl-cert-file /run/credentials/llamacpp-server.service/tls-certificate" in line
    assert "--ssl-key-file /run/credentials/llamacpp-server.service/tls-key" in line
    assert head["own_url"] == head["url"] == "https://192.0.2.10:8080"
    (planned,) = [own for own in host["services"] if own["kind"] == "head"]
    assert set(planned["reads"]) >= set(FILES.values())
    assert "LoadCredential=tls-certificate:/etc/tls/50 %%.pem\n" in definition(host, planned)
    assert "LoadCredential=tls-key:/etc/tls/key.pem\n" in definition(host, planned)


def test_the_last_lines_of_a_run_say_how_to_ask(pair, local):
    curl = """curl -sS {}/v1/completions -d '{{"prompt": "", "temperature": 0}}'"""
    assert plan_text.request_lines(typed(local.plan())) == ["    " + curl.format("http://127.0.0.1:8080")]
    plan = opened(secured(pair), "198.51.100.0/24", host="0.0.0.0").plan()
    asked = " ".join("".join(plan_text.request_lines(typed(plan))).replace("\\", " ").split())
    assert "sed -n '/./{s/^/Authorization: Bearer /p;q}' /etc/keys | curl -sS -H @- --cacert" in asked
    for names, name in ((["192.0.2.10"], ""), (["*.home.lan"], "head.home.lan"), (["*.home.lan", "nas"], "nas")):
        lines = plan_text.request_lines(typed(plan), names)
        place = f"--connect-to {name}:8080:192.0.2.10:8080 " if name else ""
        said = f"-H @- --cacert '/etc/tls/50 %.pem' {place}https://{name or '192.0.2.10'}:8080/v1/completions -d"
        assert said in " ".join("".join(lines).replace("\\", " ").split())
    assert plan_text.chat_page_lines(typed(plan), True) == [
        "  Chat with the model in a browser: https://192.0.2.10:8080/"
    ]
    assert plan_text.chat_page_lines(typed(plan), False) == [
        "  The server has no chat page; docs/clients.md describes how to get one."
    ]
    plan["model"]["known_answer"] = None
    assert "Once upon a time" in "".join(plan_text.request_lines(typed(plan)))


def test_the_chat_page_is_planned_for_llama_server_alone(pair):
    """A worker of another kind than the head keeps its build."""
    pair.hosts["worker2"]["facts"]["cpu"]["features_id"] = "another"
    plans = {}
    for ui in ("auto", "true", "false"):
        pair.set("head", llama_server_ui=ui)
        plans[ui] = pair.plan()
        assert ("--no-ui" in plans[ui]["head"]["argv"]) == (ui == "false")
    builds = {ui: {name: host["builds"][0] for name, host in plan["hosts"].items()} for ui, plan in plans.items()}
    assert builds["auto"]["head"]["id"] == builds["false"]["head"]["id"] != builds["true"]["head"]["id"]
    assert builds["auto"]["worker2"] == builds["true"]["worker2"]
    assert (builds["true"]["head"]["ui"], "ui" in builds["true"]["worker2"]) == ("true", False)
    assert plan_text.chat_page_lines(typed(plans["false"]), False) == []


def test_where_nobody_hands_over_files_the_server_reads_them_itself(local):
    secured(local).hosts["here"]["facts"].update(service_manager="supervisor")
    argv = local.plan()["head"]["argv"]
    assert argv[argv.index("--ssl-key-file") + 1] == "/etc/tls/key.pem"


@pytest.mark.parametrize(
    "variables, said",
    [
        ({KEY: None}, f"{CERTIFICATE} is set, but {KEY} is not"),
        ({CERTIFICATE: None}, f"{KEY} is set, but {CERTIFICATE}"),
        ({KEY: "key.pem"}, f"{KEY} is 'key.pem': use an absolute path on the head"),
        ({"llama_server_extra_args": ["--ssl-key-file", "/k"]}, f"which cannot be set there: set {KEY}"),
        ({"llama_server_extra_args": ["--ssl-cert-file=/c"]}, f"set {CERTIFICATE} instead"),
        ({"llama_build_cmake_options": {"LLAMA_OPENSSL": False}}, "for here turns LLAMA_OPENSSL off, but llama_server"),
    ],
)
def test_tls_that_cannot_be(local, variables, said):
    secured(local).hosts["here"]["variables"].update(variables)
    assert said in local.reason()
