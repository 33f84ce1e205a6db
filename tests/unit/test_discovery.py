"""From hosts that somebody names to an inventory: who is asked, who sees whom, what lies there, and what is proposed."""

import json
import types
from unittest import mock

import pytest
import test_inventories
import yaml
from ansible_collections.llamacpp.cluster.plugins.action import discover
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.host import discovery as on_host
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.discovery import LinkInterface
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.system import System
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import known_answer_file
from ansible_collections.llamacpp.cluster.plugins.plugin_utils import inventory
from conftest import FACTS, ROOT
from support import playbook_runs
from support.hosts import write

NEIGHBOURS = [
    {"dst": "10.99.0.2", "dev": "eth1", "lladdr": "02:00:00:00:01:02", "state": ["REACHABLE"]},
    {"dst": "fe80::3", "dev": "eth1", "lladdr": "02:00:00:00:01:03", "state": ["STALE"]},
    {"dst": "10.99.0.4", "dev": "eth1", "lladdr": "02:00:00:00:01:04", "state": ["FAILED"]},
    {"dst": "10.99.0.5", "dev": "eth1", "state": ["INCOMPLETE"]},
]
"""As ``ip -json neigh`` of iproute2 prints them."""
HELD = {"lo": "127.0.0.1/8", "eth0": "192.0.2.1/24", "eth1": "10.99.0.1/24", "wg0": "10.7.0.1/24"}
FILES = {
    "proc/net/route": "Iface Destination Gateway Flags RefCnt Use Metric Mask\neth0 00000000 0101 3 0 0 0 00000000",
    "sys/class/net/wg0/type": "65534",
    **{f"sys/class/net/eth{number}/address": f"02:00:00:00:0{number}:01" for number in (0, 1, 2)},
    **{f"sys/class/net/eth{number}/type": "1" for number in (0, 1, 2)},
    **{f"sys/class/net/eth{number}/speed": speed for number, speed in enumerate((-1, 10000, ""))},
}


def test_interfaces_and_whom_they_see(tmp_path, monkeypatch):
    own = [
        {"ifname": name, "addr_info": [dict(zip(("local", "prefixlen"), held.split("/")))]}
        for name, held in HELD.items()
    ]
    system = System(root=write(tmp_path, FILES))
    system.output = lambda *argv: json.dumps({"address": own, "neigh": NEIGHBOURS}.get(argv[-1], []))
    sender = mock.MagicMock()
    monkeypatch.setattr(on_host.socket, "socket", sender)
    monkeypatch.setattr(on_host, "ANSWER_WAIT_SECONDS", 0)
    seen = ("02:00:00:00:01:02", "02:00:00:00:01:03")
    assert on_host.interfaces_of(system, ["10.99.0.2", "198.51.100.7", "x"]) == (
        LinkInterface("eth0", "ethernet", "02:00:00:00:00:01", None, ("192.0.2.1/24",), True, ()),
        LinkInterface("eth1", "ethernet", "02:00:00:00:01:01", 10000, ("10.99.0.1/24",), False, seen),
        LinkInterface("eth2", "ethernet", "02:00:00:00:02:01", None, (), False, ()),
    )
    # Nobody beyond its own networks.
    assert sender().__enter__().sendto.call_args_list == [mock.call(b"", ("10.99.0.2", 9))]
    assert on_host.neighbour_macs("no JSON") == {}


@pytest.mark.parametrize(
    "text", ["", "5", "[5]", '[{"ifname": "eth1", "addr_info": 5}]', '[{"lladdr": []}]', "[" * 9999]
)
def test_unexpected_output_of_ip_is_left_out(tmp_path, monkeypatch, text):
    system = System(root=write(tmp_path, FILES))
    system.output = lambda *argv: text
    monkeypatch.setenv("SSH_CONNECTION", "192.0.2.9 50000 192.0.2.1 22")
    monkeypatch.setattr(on_host, "ANSWER_WAIT_SECONDS", 0)
    links = on_host.interfaces_of(system, ["10.99.0.2"])
    assert [(link.name, link.addresses, link.sees) for link in links] == [(f"eth{n}", (), ()) for n in range(3)]
    system.output = lambda *argv: '[{}, {"ifname": "eth1", "addr_info": [{"local": "10.0.0.1", "prefixlen": 24}]}]'
    assert on_host.interfaces_of(system, [])[1].addresses == ("10.0.0.1/24",)


def test_models_that_lie_there(tmp_path, monkeypatch):
    hub, ollama, digest = tmp_path / "hub", tmp_path / "ollama", "5" * 64
    blob, manifest = ollama / f"blobs/sha256-{digest}", ollama / "manifests/registry.ollama.ai/library/known/1b"
    for path, layers in ((hub / "one.gguf", 16), (hub / "b/two.gguf", 24), (blob, 16)):
        path.parent.mkdir(parents=True, exist_ok=True)
        known_answer_file.write_model(path, layers, 128, "f32")
    (hub / "same.gguf").symlink_to(hub / "one.gguf")
    for name in ("half-00001-of-00002.gguf", "{{ x }}.gguf"):
        (hub / name).write_bytes(blob.read_bytes())
    (hub / "wrong.gguf").write_text("GGUF")
    manifest.parent.mkdir(parents=True)
    layer = {
        "mediaType": "application/vnd.ollama.image.model",
        "digest": f"sha256:{digest}",
        "size": blob.stat().st_size,
    }
    manifest.write_text(json.dumps({"schemaVersion": 2, "layers": [layer]}))
    monkeypatch.setenv("OLLAMA_MODELS", str(ollama))
    found = list(on_host.find_models([str(hub)], None))
    assert [(one.kind, one.name, one.file) for one in found] == [
        ("path", str(hub / "b/two.gguf"), str(hub / "b/two.gguf")),
        ("path", str(hub / "one.gguf"), str(hub / "one.gguf")),
        ("ollama", "registry.ollama.ai/library/known:1b", str(blob)),
    ]
    assert not on_host.can_generate({**found[0].summary, "architecture": "nomic-bert"})


def network(*names, **cables):
    """What discovery_info says of hosts that see each other at eth0, and at interfaces with cables: name → its number on the cable.

    :param cables: interface → kind, Mbit/s, beginning of the addresses, and the hosts.
    """
    said = {}
    for name in names:
        ends = []
        for number, (interface, (kind, mbit, start, hosts)) in enumerate(
            {"eth0": ("ethernet", 2500, "10.0.0", names), **cables}.items()
        ):
            macs = {host: f"02:00:00:00:{number:02x}:{place:02x}" for place, host in enumerate(hosts, 1)}
            if name in hosts:
                held = [f"{start}.{hosts.index(name) + 1}/24"]
                sees = [mac for host, mac in macs.items() if host != name]
                ends.append(LinkInterface(interface, kind, macs[name], mbit, held, interface == "eth0", sees)._asdict())
        said[name] = {"discovered": {"hostname": name, "interfaces": ends, "models": []}}
    return said


def a_model(name, model="gpt_oss_20b", **changes):
    summary = test_inventories.of_file(f"models/{model}.yml")["llama_model_gguf_summary"]
    return {"kind": "path", "name": name, "file": name, "unreadable_path": None, "summary": summary, **changes}


def discovered(tmp_path, found, hosts=None, facts=None, check=False):
    """The inventory that is written: its path, its text without line breaks in comments, what was shown, and the result of the task."""
    path = tmp_path / "new" / "hosts.yml"
    own = {name: {"ansible_host": f"10.0.0.{number}"} for number, name in enumerate(found, 1)}
    action = discover.ActionModule(mock.MagicMock(check_mode=check), *(mock.Mock() for _number in range(5)))
    action.variables = {"hostvars": {**own, **(hosts or {})}, "groups": {}}
    facts = {name: {"facts": FACTS} for name in found} if facts is None else facts
    with mock.patch.object(discover.output, "show_plan"):
        result = action.perform(discover.DiscoverArguments(str(path), facts=facts, found=found))
    text = "" if check else path.read_text().replace("\n#  ", "")
    return types.SimpleNamespace(path=path, text=text, result=result)


def planned(path, **extra):
    """Groups of an inventory, and its plan."""
    groups = test_inventories.parsed(str(path))[1].get_groups_dict()
    answers = {name: {"facts": FACTS} for name in groups["llama_cluster"]}
    return groups, test_inventories.planned_of(test_inventories.variables_of(str(path), extra), answers)


def test_a_direct_link_and_a_head_with_most_links(tmp_path):
    cables = {"eth1": ("ethernet", 10000, "10.99.0", "bc"), "eth3": ("ethernet", 100, "10.98.0", "ac")}
    done = discovered(tmp_path, network(*"abc", **cables))
    groups, plan = planned(done.path)
    assert (groups["llama_head"], groups["llama_workers"]) == (["b"], ["b", "a", "c"])
    links = {name: [(one["address"], one["peer"]) for one in host["links"]] for name, host in plan["hosts"].items()}
    assert links == {"b": [("10.99.0.1/24", "c")], "a": [], "c": [("10.99.0.2/24", "b")]}
    endpoints = [worker["endpoint"] for host in plan["hosts"].values() for worker in host["workers"]]
    assert endpoints == ["127.0.0.1:50052", "10.0.0.1:50052", "10.99.0.2:50052"]
    assert "b is the head: no other host has significantly more memory." in done.text
    assert "eth1 of b and eth1 of c are connected directly (ethernet, 10 Gbit/s): the head uses this link." in done.text
    assert "eth3" not in done.text, "the network that reaches both is faster"
    assert (plan["refused"], done.result["plan"]["head"]) == (False, {**done.result["plan"]["head"], "host": "b"})


def test_a_second_network_has_no_peer_on_the_head(tmp_path):
    _groups, plan = planned(discovered(tmp_path, network(*"abc", ib0=("infiniband", None, "10.99.0", "abc"))).path)
    assert {name: host["links"][0]["peer"] for name, host in plan["hosts"].items()} == {"a": None, "b": "a", "c": "a"}


def test_the_largest_model_that_fits_and_where_it_lies(tmp_path):
    found = network(*"abc")
    right = a_model("/models/right.gguf")
    small, huge = a_model("/models/small.gguf"), a_model("/models/huge.gguf", "tulu3_405b")
    found["b"]["discovered"]["models"] = [right, small, huge]
    found["c"]["discovered"]["models"] = [a_model("/home/me/closed.gguf", unreadable_path="/home/me"), right]
    done = discovered(tmp_path, found)
    groups, plan = planned(done.path, llama_model_gguf_summary=right["summary"])
    assert (groups["llama_head"], plan["model"]["path"]) == (["b"], "/models/right.gguf")
    assert "it has /models/right.gguf, the largest discovered model that fits into the cluster's memory." in done.text
    assert "predicted: " in done.text
    assert "Other models: /models/huge.gguf, /models/small.gguf" in done.text
    assert "huge.gguf" not in str(done.result["plan"]["model"])
    assert "closed.gguf" not in done.text
    assert "source: package" not in done.text


@pytest.mark.parametrize(
    "versions, offered", [(["0.7.0"] * 3, True), (["0.7.0", "0.7.0", None], False), (["0.1"] * 3, False)]
)
def test_the_package_of_a_distribution_is_proposed_in_a_comment_where_all_hosts_have_it(tmp_path, versions, offered):
    packages = [{"version": version, "installed": [], "listed": True} for version in versions]
    facts = {host: {"facts": {**FACTS, "packaged": package}} for host, package in zip("abc", packages)}
    done = discovered(tmp_path, network(*"abc"), facts=facts)
    assert ("\n# llama_release: {source: package}\n" in done.text) == offered


def test_hosts_that_the_plan_would_not_use_are_spare(tmp_path):
    """On processors, a small model is slower over the network than on the host that has it."""
    found = network(*"abc", eth1=("ethernet", 10000, "10.99.0", "ab"))
    found["b"]["discovered"]["models"] = [a_model("/models/small.gguf")]
    done = discovered(tmp_path, found)
    groups, plan = planned(done.path)[0], done.result["plan"]
    assert [groups[name] for name in ("llama_cluster", "llama_workers", "spare")] == [["b"], [], ["a", "c"]]
    assert [advisory["id"] for advisory in plan["advisories"]] == []
    assert plan["hosts"]["b"]["links"] == []
    assert (
        "Spare hosts: a, c. The cluster would not be faster with them. To use them for larger models, add them"
        in done.text
    )
    assert yaml.safe_load(done.path.read_text())["spare"]["hosts"]["c"] == {"ansible_host": "10.0.0.3"}


def test_a_model_of_ollama(tmp_path):
    found = network("a", "b")
    name, file = "registry.ollama.ai/library/known:1b", f"/var/lib/ollama/blobs/sha256-{'5' * 64}"
    found["a"]["discovered"]["models"] = [a_model(name, kind="ollama", file=file)]
    done = discovered(tmp_path, found)
    assert f"    llama_model_ollama: {name}\n" in done.text
    assert done.result["plan"]["model"]["path"] == file


@pytest.mark.parametrize(
    "itself", ["b:22", "b", "away", "null", "on", "1234", "2024-01-01", "all", "llama_head", "c[0:9]", "{{ x }}", "b,c"]
)
def test_a_host_takes_no_place_of_another_by_its_name(tmp_path, itself):
    found = network("b", "10.0.0.2", "10.0.0.3", "10.0.0.4", "away")
    found["10.0.0.2"]["discovered"]["hostname"] = itself
    for name in ("10.0.0.3", "10.0.0.4"):
        found[name]["discovered"]["hostname"] = "both"
    facts = {name: {"facts": FACTS} if name != "away" else {} for name in found}
    groups = planned(discovered(tmp_path, found, facts=facts).path)[0]
    assert (groups["llama_head"], groups["llama_cluster"]) == (["b"], ["b", "10.0.0.2", "10.0.0.3", "10.0.0.4"])


def test_neither_a_size_nor_a_hardware_address_that_a_host_makes_up_moves_another(tmp_path):
    found = network(*"abc", eth1=("ethernet", 10000, "10.99.0", "ab"))
    right = a_model("/models/right.gguf")
    right["summary"]["layer_bytes"] = [12 * size for size in right["summary"]["layer_bytes"]]
    small = {**right["summary"], "bytes": 1 << 50, "input_bytes": 1 << 50}
    small["layer_bytes"] = [size - 1 for size in small["layer_bytes"]]
    huge = {**small, "layer_bytes": [1 << 50] * small["layers"]}
    found["a"]["discovered"]["models"] = [right]
    liar = found["c"]["discovered"]
    liar["models"] = [a_model("/models/small.gguf", summary=small), a_model("/models/huge.gguf", summary=huge)]
    liar["interfaces"] = [*liar["interfaces"], {**found["b"]["discovered"]["interfaces"][1], "name": "eth9"}]
    plan = discovered(tmp_path, found).result["plan"]
    assert (plan["head"]["host"], [*plan["hosts"]]) == ("a", [*"abc"]), plan
    assert not plan["hosts"]["b"]["links"], "it is reached as before"


def test_hosts_that_do_not_answer_are_the_same_or_have_another_name(tmp_path, monkeypatch, capsys):
    found = network("10.0.0.1", "b", "localhost", "d")
    found["10.0.0.1"]["discovered"]["hostname"], found["localhost"]["discovered"]["hostname"] = "strix0.lan", "desk"
    facts = {name: {"facts": FACTS} for name in found}
    facts["d"] = {"unreachable": True, "msg": "No\nroute {{ to }} host"}
    hosts = {
        "localhost": {"ansible_connection": "local", "llama_worker_endpoints": [{"port": 1}]},
        "10.0.0.1": {"ansible_user": "root", "ansible_password": "x", "ansible_port": 2222},
    }
    hosts["b"] = {"ansible_host": "10.0.0.2", "ansible_ssh_port": 2200}
    given = {"remote_user": "me", "private_key_file": "/k"}
    monkeypatch.setattr(discover.context, "CLIARGS", given)
    done = discovered(tmp_path, found, hosts, facts)
    assert planned(done.path)[0]["llama_cluster"] == ["strix0", "b", "desk"]
    assert "Comments in the inventory explain why it leaves out d." in " ".join(capsys.readouterr().out.split())
    written = yaml.safe_load(done.path.read_text())["llama_cluster"]["children"]
    key = {"ansible_ssh_private_key_file": "/k"}
    reached = {"ansible_host": "10.0.0.1", "ansible_port": 2222, "ansible_user": "root", **key}
    assert written["llama_head"]["hosts"]["strix0"] == reached
    assert written["llama_workers"]["hosts"]["desk"] == {"ansible_host": "10.0.0.3", "ansible_connection": "local"}
    assert written["llama_workers"]["hosts"]["b"] == {
        **reached,
        "ansible_host": "10.0.0.2",
        "ansible_port": 2200,
        "ansible_user": "me",
    }
    assert "d is left out: No\\nroute {{ to }} host" in done.text


def test_nothing_is_overwritten_and_check_mode_writes_nothing(tmp_path):
    assert not discovered(tmp_path, network("a"), check=True).path.exists()
    done = discovered(tmp_path, network("a"))
    path = done.path
    with pytest.raises(Refusal, match="which already exists: move that file, or choose another path"):
        discovered(tmp_path, network("a"))
    path.unlink()
    with pytest.raises(Refusal, match=r"no host could be examined, so no inventory was written: a: no answer"):
        discovered(tmp_path, network("a"), facts={"a": {}})


END = LinkInterface("{{ x }}", "ethernet", "02:00:00:00:00:01", None, (), False, ())._asdict()


@pytest.mark.parametrize(
    "said",
    [
        {"models": [a_model("/models/{{ lookup('pipe', 'id') }}.gguf")]},
        {"models": [a_model("/models/x.gguf\nllama_head: {}")]},
        {"interfaces": [END]},
        {"interfaces": [{**END, "name": "x", "addresses": ["1.2.3.4/99"]}]},
    ],
)
def test_what_a_host_says_is_no_template_and_no_line_of_the_inventory(said):
    discover._read_findings(
        "a", {"discovered": {"models": [a_model("/models/x.gguf")], "interfaces": [{**END, "name": "x"}]}}
    )
    with pytest.raises(Refusal, match="report from a about links and models does not match"):
        discover._read_findings("a", {"discovered": said})


SAID = ("llama_hardware", "llama_host_scope")
STRUCTURE = ("llama_links", "llama_worker_endpoints", "llama_backend", *SAID)
"""What a proposal decides, or hosts say; all else is given to both plans."""


@pytest.mark.parametrize("name", ["strix_halo_pair", "cuda_triple"])
def test_what_is_proposed_for_a_system_plans_like_the_inventory_that_somebody_wrote(name, tmp_path):
    task_vars = test_inventories.variables_of(name, {})
    groups, hostvars = task_vars["groups"], task_vars["hostvars"]
    keys = ("ansible_host", "ansible_connection", *SAID)
    own = {host: hostvars[host] for host in groups["llama_cluster"]}
    hosts = {host: {key: known[key] for key in keys if key in known} for host, known in own.items()}
    cables = {"thunderbolt0": ("usb4", None, "10.99.0", [*hosts])} if name == "strix_halo_pair" else {}
    done = discovered(tmp_path, network(*hosts, **cables), hosts, {host: {} for host in hosts})
    head = hostvars[groups["llama_head"][0]]
    extra = {key: head[key] for key in inventory.specification() if key in head and key not in STRUCTURE}
    ours, theirs = (
        test_inventories.plan_of(source, **{**extra, "llama_model_known_answer": None})
        for source in (str(done.path), name)
    )
    assert ours["head"]["host"] == theirs["head"]["host"]
    places, links = (
        [[pick(row) for row in rows(plan)] for plan in (ours, theirs)]
        for rows, pick in (
            (lambda plan: plan["placement"], lambda row: (row["host"], row["device"].partition(":")[0], row["layers"])),
            (
                lambda plan: [link for host in plan["hosts"].values() for link in host["links"]],
                lambda link: (link["interface"], link["address"].split("/")[0], link["peer"]),
            ),
        )
    )
    assert places[0] == places[1]
    assert links[0] == links[1]
    assert bool(links[0]) == bool(cables)


@pytest.mark.programs
@pytest.mark.timeout(300)
def test_a_run_on_this_machine_and_on_one_that_does_not_answer(tmp_path):
    hosts = {"here": {**playbook_runs.LOCAL, "llama_host_scope": "user"}, "away": playbook_runs.LOST}
    arguments = (
        "llama_discover_hosts=here,away",
        "llama_discover_inventory=own/hosts.yml",
        f"llama_report_path={tmp_path}/page.html",
    )
    arguments = [word for argument in arguments for word in ("-e", argument)]
    playbook = ROOT / "playbooks/discover.yml"
    status, printed = playbook_runs.run(tmp_path, playbook, {"all": {"hosts": hosts}}, *arguments)
    assert status == 0, printed
    written = (tmp_path / "own/hosts.yml").read_text()
    assert set(yaml.safe_load(written)["llama_cluster"]["children"]["llama_head"]["hosts"]) == {"here"}
    assert "# away is left out: Failed to connect to the host via ssh" in written
    assert "here" in (tmp_path / "page.html").read_text()


@pytest.mark.programs
@pytest.mark.parametrize("named", [None, "a,10.0.0.0/24", "-oProxyCommand=x", "-l@host"])
def test_what_names_nobody_is_refused(tmp_path, named):
    given = ("-e", f"llama_discover_hosts={named}") if named else ()
    status, printed = playbook_runs.run(tmp_path, ROOT / "playbooks/discover.yml", "", *given)
    assert status != 0
    assert f"llama_discover_hosts is {named or 'not set'}: set it to" in " ".join(printed.split())
    assert not (tmp_path / "cluster").exists()
