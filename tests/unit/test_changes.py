"""What a run restarts and who builds, decided from a plan and from what hosts report."""

import pytest
from support.clusters import GPU
from support.drift import drifts
from support.lifecycle import decide, missing_tools


def test_nothing_is_done_while_all_is_as_planned(local):
    plan = local.plan()
    assert decide(plan, drifts(plan))._asdict() == {
        "kinds": {"here": []},
        "restarts": {"here": []},
        "outdated_hosts": [],
        "unreached_hosts": [],
        "absence_notes": {"here": "The cluster does not answer until this head is back."},
        "builders": [],
        "builder_by_build": {},
        "builds_to_fetch": [],
        "hosts_without_key": [],
    }


@pytest.mark.parametrize(
    "changed, restarts",
    [
        ({}, []),
        ({"services": {"llamacpp-worker-two": "stopped"}}, ["llamacpp-worker-two", "llamacpp-server"]),
        ({"services": {"llamacpp-worker-two": "different"}}, ["llamacpp-worker-two", "llamacpp-server"]),
        ({"services": {"llamacpp-server": "waiting"}}, []),
        ({"changed_files": ["/opt/llamacpp/models/known-answer-16x128-f32.gguf"]}, ["llamacpp-server"]),
        ({"model_files": ["/opt/llamacpp/models/some/model-00002-of-00003.gguf"]}, ["llamacpp-server"]),
        ({"redefined": ["llamacpp-server"]}, ["llamacpp-server"]),
        ({"unplanned": ["llamacpp-worker-old"]}, []),
        ({"missing_builds": ["BUILD"]}, ["llamacpp-worker-one", "llamacpp-worker-two", "llamacpp-server"]),
    ],
    ids=str,
)
def test_what_is_restarted(local, changed, restarts):
    """A head that uses a worker names it in its command line: with another worker it is another head."""
    plan = local.plan()
    found = drifts(plan, **changed.get("services", {}))
    build = plan["hosts"]["here"]["builds"][0]["id"]
    for key in {*changed} - {"services"}:
        found["here"][key] = [build if name == "BUILD" else name for name in changed[key]]
    changes = decide(plan, found)
    assert changes.restarts == {"here": restarts}
    assert changes.outdated_hosts == (["here"] if restarts else [])


def test_a_host_that_did_not_answer_is_named_and_changes_nothing(pair):
    plan = pair.plan()
    found = drifts(plan)
    changes = decide(plan, {name: found[name] for name in ("head", "worker1")})
    assert changes.unreached_hosts == ["worker2"]
    assert changes.outdated_hosts == []
    assert decide(plan, {name: found[name] for name in ("worker1", "worker2")}).unreached_hosts == ["head"]


@pytest.mark.parametrize(
    "lacking, builder, shared",
    [
        (["head", "worker1", "worker2"], "head", True),
        (["worker1", "worker2"], "head", True),
        (["head"], "head", False),
        ([], None, False),
    ],
)
def test_one_host_of_a_kind_builds_for_all(pair, lacking, builder, shared):
    """The head builds, whatever other hosts say that they have."""
    plan = pair.plan()
    found = drifts(plan)
    identity = plan["hosts"]["head"]["builds"][0]["id"]
    for name in lacking:
        found[name]["missing_builds"] = [identity]
    changes = decide(plan, found)
    assert changes.builders == (["head"] if "head" in lacking else [])
    assert changes.builder_by_build == ({identity: builder} if shared else {})
    assert builder is None or builder in changes.outdated_hosts


def builders(plan, key="builder"):
    return {name: [build[key] for build in host["builds"]] for name, host in plan["hosts"].items()}


def test_a_host_that_is_named_builds_for_its_kind_alone(pair):
    assert builders(pair.plan()) == {"head": ["head"], "worker1": ["head"], "worker2": ["head"]}
    for host in pair.hosts.values():
        host["variables"]["llama_build_host"] = "worker2"
    assert builders(pair.plan()) == {"head": ["worker2"], "worker1": ["worker2"], "worker2": ["worker2"]}
    assert all(trusted == [["worker2"]] for trusted in builders(pair.plan(), "trusted_builders").values())
    pair.hosts["worker2"]["facts"]["cpu"]["features_id"] = "other"
    assert builders(pair.plan()) == {"head": ["head"], "worker1": ["head"], "worker2": ["worker2"]}
    assert builders(pair.plan(), "trusted_builders")["worker1"] == [["head"]], "the operator trusts some hosts less"


def test_where_the_head_is_of_another_kind_the_first_host_builds(pair):
    pair.hosts["head"]["facts"]["cpu"]["features_id"] = "other"
    assert builders(pair.plan()) == {"head": ["head"], "worker1": ["worker1"], "worker2": ["worker1"]}
    pair.hosts["worker1"]["variables"]["llama_build_host"] = "worker2"
    assert builders(pair.plan()) == {"head": ["head"], "worker1": ["worker2"], "worker2": ["worker2"]}


def test_a_head_that_moves_to_a_card_compiles_nothing_for_it(pair):
    card = {"accelerators": [GPU], "toolchain": {"nvcc": "12.9", "cmake": "3.30", "c++": "14.2"}}
    pair.hosts["worker1"]["facts"].update(card)
    built = {build["backend"]: build for build in pair.plan()["hosts"]["worker1"]["builds"]}["cuda"]
    assert built["targets"] == ["ggml-rpc-server", "llama-server"]
    pair.hosts["head"]["facts"].update(card)
    assert built["id"] in [build["id"] for build in pair.plan()["hosts"]["head"]["builds"]]


def test_a_host_that_shares_nothing_builds_for_itself(pair):
    pair.hosts["worker1"]["variables"]["llama_build_share"] = False
    plan = pair.plan()
    assert builders(plan) == {"head": ["head"], "worker1": ["worker1"], "worker2": ["head"]}
    shared = ["head", "worker2"]
    assert builders(plan, "trusted_builders") == {"head": [shared], "worker1": [["worker1"]], "worker2": [shared]}
    found = drifts(plan)
    identity = plan["hosts"]["head"]["builds"][0]["id"]
    for drift in found.values():
        drift["missing_builds"] = [identity]
    changes = decide(plan, found)
    assert (changes.builders, changes.builder_by_build) == (["head", "worker1"], {identity: "head"})
    pair.hosts["head"]["variables"]["llama_build_share"] = False
    assert builders(pair.plan()) == {"head": ["head"], "worker1": ["worker1"], "worker2": ["worker2"]}


def test_builders_that_cannot_be(pair):
    pair.hosts["worker1"]["variables"]["llama_build_host"] = "nobody"
    assert "llama_build_host for worker1 is 'nobody'" in pair.reason()
    for builder in ("worker1", "worker2"):
        pair.hosts[builder]["variables"]["llama_build_host"] = builder
    assert "llama_build_host is worker1 and worker2 for hosts that share" in pair.reason()


def test_what_only_makes_builds_faster_is_installed_where_something_is_built(pair):
    plan = pair.plan()
    tools = {"head": ["cmake", "ninja", "c++"], "worker1": ["cmake", "ccache", "c++"]}
    assert missing_tools(plan, tools, []) == {"worker1": {"required": {"ninja": "ninja-build"}, "optional": {}}}
    found = missing_tools(plan, tools, ["head", "worker1"])
    assert {name: host["optional"] for name, host in found.items()} == {"head": {"ccache": "ccache"}, "worker1": {}}


def test_what_is_compiled_already_is_installed_by_each_host_itself(pair):
    for host in pair.hosts.values():
        host["variables"]["llama_release"] = {
            **{"source": "binary", "path": "/tmp/x.tar.gz", "checksum": "sha256:" + "b" * 64, "build": 11434}
        }
    plan = pair.plan()
    found = drifts(plan)
    for name, host in plan["hosts"].items():
        found[name]["missing_builds"] = [build["id"] for build in host["builds"]]
    changes = decide(plan, found)
    assert (changes.builders, changes.builder_by_build) == ([], {})
    (fetched,) = changes.builds_to_fetch  # once, and not for each host
    assert {*fetched.targets} == {target for host in plan["hosts"].values() for target in host["builds"][0]["targets"]}
    assert len(fetched.targets) == len({*fetched.targets}) > len(plan["hosts"]["worker1"]["builds"][0]["targets"])
    assert decide(plan, drifts(plan)).builds_to_fetch == []
    assert builders(plan) == {name: [name] * len(host["builds"]) for name, host in plan["hosts"].items()}


KEYS = "/opt/llamacpp/keys/192.0.2.11"


@pytest.mark.parametrize(
    "head, worker, needs_key",
    [
        (["new"], ["new"], []),
        (["old"], ["new", "old"], []),
        (["old", "new"], ["new"], ["worker1"]),
        ([], ["new"], ["worker1"]),
        (["new"], [], ["worker1"]),
    ],
    ids=str,
)
def test_a_tunnel_gets_a_key_where_its_ends_share_none(pair, head, worker, needs_key):
    pair.hosts["worker1"]["variables"]["llama_transport"] = "stunnel"
    plan = pair.plan()
    found = drifts(plan)
    found["head"]["tunnel_keys"], found["worker1"]["tunnel_keys"] = {KEYS: head}, {KEYS: worker}
    changes = decide(plan, found)
    assert changes.hosts_without_key == needs_key
    assert changes.outdated_hosts == (["head", "worker1"] if needs_key else [])
    assert not any(changes.restarts.values())
