import re

import pytest
from ansible_collections.llamacpp.cluster.plugins.filter.replicas import replicas
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.plugin_utils import inventory
from conftest import FACTS, ROOT


def task_vars(groups, **variables):
    names = {name for members in groups.values() for name in members}
    return {"groups": groups, "hostvars": {name: {"inventory_hostname": name, **variables} for name in names}}


GROUPS = {"llama_cluster": ["a", "b", "c"], "llama_head": ["a", "other"], "llama_workers": ["a", "b", "other"]}


def test_hosts_of_one_cluster_with_defaults():
    cluster, hosts = inventory.cluster_hosts(task_vars(GROUPS))
    assert cluster == "llama_cluster"
    assert {name: host["groups"] for name, host in hosts.items()} == {"a": ["head", "worker"], "b": ["worker"]}
    assert hosts["a"]["variables"]["llama_server_port"] == 8080
    assert hosts["a"]["variables"]["llama_release"]["version"] == "0.3.36"
    assert hosts["a"]["ansible_host"] == "a"
    assert hosts["a"]["facts"] is None


def test_another_cluster_of_the_same_inventory():
    variables = task_vars({**GROUPS, "second": ["other"]})
    variables["llama_cluster_group"] = "second"
    cluster, hosts = inventory.cluster_hosts(variables)
    assert (cluster, list(hosts)) == ("second", ["other"])


def test_the_known_answer_model_has_a_default_size():
    _cluster, hosts = inventory.cluster_hosts(task_vars(GROUPS, llama_model_known_answer={}))
    assert hosts["a"]["variables"]["llama_model_known_answer"] == {"layers": 16, "width": 128, "type": "f32"}


@pytest.mark.parametrize(
    "variables, said",
    [
        ({"llama_server_port": "eighty"}, "llama_server_port"),
        ({"llama_placement": "some"}, "fastest, all"),
        (
            {"llama_worker_endpoints": [{"prot": 50052}]},
            r"llama_worker_endpoints\.prot is unknown: use one of backend, .*, tunnel\. See docs/variables",
        ),
        ({"llama_model_known_answer": {"layers": "many"}}, "layers"),
        ({"llama_server_context": "128k"}, "llama_server_context is '128k': use a number, such as 131072"),
        ({"llama_server_context": "much"}, "llama_server_context is 'much': use a number"),
        ({"llama_server_fallback": "maybe"}, "llama_server_fallback is 'maybe': use true or false"),
        ({"llama_model_huggingface": "unsloth"}, "llama_model_huggingface is 'unsloth': use a mapping"),
        ({"llama_server_port": True}, "llama_server_port is true or false, but must be a number"),
        ({"llama_worker_endpoints": [{"name": "one"}, {"threads": False}]}, "endpoints.threads is true or false, but"),
        ({"llama_model_known_answer": {"layers": True}}, "llama_model_known_answer.layers is true or false, but must"),
        ({"llama_model_known_answer": True}, "llama_model_known_answer is True: use a mapping"),
        (
            {"llama_models": [{"name": "m", "huggingface": [{}, 1]}]},
            r"llama_models\.huggingface is \[\{\}, 1\]: use a mapping",
        ),
    ],
)
def test_values_of_the_wrong_kind_name_the_host_and_the_variable(variables, said):
    with pytest.raises(Refusal, match=said) as raised:
        inventory.cluster_hosts(task_vars(GROUPS, **variables))
    assert "host a" in str(raised.value)


def test_a_repository_as_people_copy_it_from_llama_cpp():
    text = "unsloth/gpt-oss-20b-GGUF:Q4_K_M"
    models = [{"name": "a", "huggingface": text}]
    _cluster, hosts = inventory.cluster_hosts(task_vars(GROUPS, llama_model_huggingface=text, llama_models=models))
    one, (two,) = (hosts["a"]["variables"][name] for name in ("llama_model_huggingface", "llama_models"))
    expected = {"repo": "unsloth/gpt-oss-20b-GGUF", "quantisation": "Q4_K_M", "files": None, "revision": "main"}
    assert (one, two["huggingface"]) == (expected, expected)


@pytest.mark.parametrize(
    "variable, meant",
    [
        ("llama_server_contxt", "llama_server_context"),
        ("llama_cmake_options", "llama_build_cmake_options"),
        ("llama_accepted_advisories", "llama_accept_advisories"),
        ("llama_server_hots", "llama_server_host"),
        ("llama_ngl", "llama_server_gpu_layers"),
        ("llama_ctx_size", "llama_server_context"),
        ("llama_context", "llama_server_context"),
        ("llama_flash_attn", "llama_server_flash_attention"),
        ("llama_ubatch_size", "llama_server_micro_batch"),
        ("llama_n_cpu_moe", "llama_server_override_tensor"),
        ("llama_rpc_servers", "llama_worker_endpoints"),
        ("llama_port", "llama_server_port"),
        ("llama_server_np", "llama_server_parallel"),
        ("llama_mmap", "llama_server_load_mode"),
        ("llama_hf_repo", "llama_model_huggingface"),
        ("llama_model", "llama_model_path"),
        ("llama_server_mmproj", "llama_model_mmproj"),
        ("llama_md", "llama_model_draft"),
        ("llama_temp", "llama_server_extra_args"),
        ("llama_split_mode", ""),
        ("llama_my_note", ""),
    ],
)
def test_a_variable_that_is_unknown(variable, meant):
    _cluster, hosts = inventory.cluster_hosts(task_vars(GROUPS, **{variable: 1}))
    assert hosts["a"]["unknown_variables"] == {variable: meant}


def test_an_unknown_variable_of_one_host_or_of_the_play():
    variables = {**task_vars(GROUPS), "llama_ngl": 99, "other": 1, "inventory_hostname": "b"}
    variables["hostvars"]["b"]["llama_servers"] = 1
    variables.update(variables["hostvars"]["b"])
    _cluster, hosts = inventory.cluster_hosts(variables, None, inventory.play_variables(variables))
    assert {name: set(host["unknown_variables"]) for name, host in hosts.items()} == {
        "a": {"llama_ngl"},
        "b": {"llama_ngl", "llama_servers"},
    }


def test_a_variable_that_only_a_play_sets_is_refused_as_it_has_no_effect():
    variables = {**task_vars(GROUPS), "llama_server_port": 9000, "inventory_hostname": "a"}
    with pytest.raises(Refusal, match="Variables in the vars of a play have no effect: llama_server_port"):
        inventory.play_variables(variables)
    variables["hostvars"]["a"]["llama_server_port"] = 9000
    assert inventory.play_variables(variables) == set()


def test_what_playbooks_and_roles_set_is_no_variable_of_operators():
    """A result with an operator's prefix would be named as an unknown variable of that host."""
    files = [path for part in ("playbooks", "roles") for path in (ROOT / part).rglob("*.yml")]
    registered = {name for path in files for name in re.findall(r"register: (\w+)", path.read_text())}
    assert registered
    assert all(name.startswith("__llama_") for name in registered)


def test_no_variable_of_a_run_is_unknown():
    spec = inventory.specification()
    assert inventory.unknown_variables({*spec, *inventory.run_variables(), "__llama_facts", "ansible_host"}) == {}


def test_a_cluster_without_head_and_workers():
    with pytest.raises(Refusal, match="llama_workers"):
        inventory.cluster_hosts(task_vars({"llama_cluster": ["a"]}))


def test_hosts_in_a_group_that_is_misspelt_are_told(capsys):
    groups = {"llama_cluster": ["a", "b"], "llama_head": ["a"], "llama_worker": ["b"]}
    with pytest.raises(Refusal, match=r"The group llama_worker \(with b\) is .* rename it to llama_workers"):
        inventory.cluster_hosts(task_vars(groups))
    groups["llama_workers_off"] = groups.pop("llama_worker")
    _cluster, hosts = inventory.cluster_hosts(task_vars(groups))
    assert list(hosts) == ["a"]
    assert "these hosts of llama_cluster, which are in neither llama_head nor llama_workers: b." in " ".join(
        capsys.readouterr().err.split()
    )


@pytest.mark.parametrize(
    "retired, kept, refused",
    [
        ([], {"a": {}, "gone": {}}, "Hosts of the last plan are missing from the inventory: gone"),
        (["gone"], {"a": {}, "gone": {}}, ""),
        ([], {"a": {}}, ""),
        ([], ["gone"], ""),
        ([], {"a\x1b[2J": {}}, r"a\x1b[2J. Check"),
    ],
)
@pytest.mark.parametrize("cluster, group", [("llama_cluster", "llama_retired"), ("night", "llama_retired_night")])
def test_a_host_that_left_without_llama_retired_is_refused(cluster, group, retired, kept, refused):
    groups = {cluster: ["a", *retired], "llama_head": ["a"], group: retired}
    task_vars = {"groups": groups, "hostvars": {name: {} for name in ("a", *retired)}, "llama_cluster_group": cluster}
    answers = {"a": {"facts": {**FACTS, "cached": kept}}}
    if not refused:
        assert inventory.cluster_hosts(task_vars, answers)
    else:
        with pytest.raises(Refusal, match=f"{re.escape(refused)}.* the group {group}: "):
            inventory.cluster_hosts(task_vars, answers)


REPLICAS = {
    "llama_cluster": ["a", "b", "c", "d", "e"],
    "llama_head": ["a", "c"],
    "llama_workers": ["b", "c", "d"],
    "llama_balancer": ["e"],
    "first": ["a", "b"],
    "cards": ["c", "d"],
    "rack": ["b"],
}


@pytest.mark.parametrize(
    "groups, parts",
    [
        ({}, [["a", "b"], ["c", "d"]]),
        ({"cards": ["d"]}, [["a", "b"], ["c"]]),
        ({"cards": ["c", "d", "b"]}, [["a"], ["c", "d"]]),
        ({"first": ["a", "elsewhere"]}, [["a"], ["c", "d"]]),
        ({"llama_balancer": ["elsewhere"]}, [["a", "c", "b", "d"]]),
        ({"llama_head": ["a"]}, [["a", "b", "c", "d"]]),
        ({"llama_cluster": []}, [[]]),
    ],
)
def test_replicas_of_a_cluster(groups, parts):
    assert replicas({**REPLICAS, **groups}, "llama_cluster") == parts


def test_replicas_of_a_run_with_limit():
    assert replicas(REPLICAS, "llama_cluster", ["d", "e"]) == [["d"]]


def test_planning_sees_the_hosts_of_one_replica(capsys):
    variables = {**task_vars(REPLICAS), "inventory_hostname": "d"}
    _cluster, hosts = inventory.cluster_hosts(variables)
    assert {name: host["groups"] for name, host in hosts.items()} == {"c": ["head", "worker"], "d": ["worker"]}
    assert "neither" not in capsys.readouterr().err
    cached = {"facts": {"cached": {"b": {}, "gone": {}}}}
    with pytest.raises(Refusal, match=re.escape("missing from the inventory: gone.")):
        inventory.cluster_hosts(variables, {"c": cached})
