from pathlib import Path

import pytest
import yaml
from ansible.errors import AnsibleActionFail
from ansible_collections.llamacpp.cluster.plugins.plugin_utils import inventory

ROOT = Path(__file__).resolve().parents[2]


def task_vars(groups, **variables):
    names = {name for members in groups.values() for name in members}
    return {"groups": groups, "hostvars": {name: {"inventory_hostname": name, **variables} for name in names}}


GROUPS = {"llama_cluster": ["a", "b", "c"], "llama_head": ["a", "other"], "llama_workers": ["a", "b", "other"]}


def test_hosts_of_one_cluster_with_defaults():
    cluster, hosts = inventory.hosts(task_vars(GROUPS))
    assert cluster == "llama_cluster"
    assert {name: host["groups"] for name, host in hosts.items()} == {"a": ["head", "worker"], "b": ["worker"]}
    assert hosts["a"]["variables"]["llama_server_port"] == 8080
    assert hosts["a"]["variables"]["llama_release"]["version"] == "0.3.36"
    assert hosts["a"]["ansible_host"] == "a"
    assert hosts["a"]["facts"] is None


def test_another_cluster_of_the_same_inventory():
    variables = task_vars({**GROUPS, "second": ["other"]})
    variables["llama_cluster_group"] = "second"
    cluster, hosts = inventory.hosts(variables)
    assert (cluster, list(hosts)) == ("second", ["other"])


def test_the_known_answer_model_has_a_default_size():
    _cluster, hosts = inventory.hosts(task_vars(GROUPS, llama_model_known_answer={}))
    assert hosts["a"]["variables"]["llama_model_known_answer"] == {"layers": 16, "width": 128, "type": "f32"}


@pytest.mark.parametrize(
    "variables, said",
    [
        ({"llama_server_port": "eighty"}, "llama_server_port"),
        ({"llama_placement": "some"}, "fewest, all"),
        (
            {"llama_worker_endpoints": [{"prot": 50052}]},
            r"llama_worker_endpoints\.prot is not known, use one of backend, .*, threads\. They",
        ),
        ({"llama_model_known_answer": {"layers": "many"}}, "layers"),
        ({"llama_model_known_answer": True}, "llama_model_known_answer is True, and a mapping is wanted"),
    ],
)
def test_values_of_the_wrong_kind_name_the_host_and_the_variable(variables, said):
    with pytest.raises(AnsibleActionFail, match=said) as raised:
        inventory.hosts(task_vars(GROUPS, **variables))
    assert "host a" in str(raised.value)


@pytest.mark.parametrize(
    "variable, meant", [("llama_server_contxt", "llama_server_context"), ("llama_link", "llama_links")]
)
def test_a_variable_that_is_mistyped(variable, meant):
    _cluster, hosts = inventory.hosts(task_vars(GROUPS, **{variable: 1}))
    assert hosts["a"]["mistyped"] == {variable: meant}


def set_by_tasks(tasks):
    """Names that stay in hostvars."""
    if isinstance(tasks, list):
        return {name for task in tasks for name in set_by_tasks(task)}
    if not isinstance(tasks, dict):
        return set()
    own = {tasks["register"]} if "register" in tasks else set()
    return own.union(tasks.get("ansible.builtin.set_fact", {}), *map(set_by_tasks, tasks.values()))


def test_no_variable_of_a_run_or_of_an_operators_own_is_taken_for_a_mistyped_one():
    paths = [path for folder in ("roles", "playbooks") for path in (ROOT / folder).rglob("*.yml")]
    registered = {name for path in paths for name in set_by_tasks(yaml.safe_load(path.read_text()))}
    assert registered >= {"llama_changes", *inventory.REGISTERED}
    spec = inventory.specification()
    assert inventory.mistyped({*registered, *spec, "llama_models_folder", "llama_version"}, spec) == {}


def test_a_cluster_group_that_is_not_there():
    with pytest.raises(AnsibleActionFail, match="llama_cluster_group"):
        inventory.hosts(task_vars({"llama_head": ["a"]}))


def test_a_cluster_without_head_and_workers():
    with pytest.raises(AnsibleActionFail, match="llama_workers"):
        inventory.hosts(task_vars({"llama_cluster": ["a"]}))


def test_hosts_in_a_group_that_is_misspelt_are_told(capsys):
    groups = {"llama_cluster": ["a", "b"], "llama_head": ["a"], "llama_worker": ["b"]}
    _cluster, hosts = inventory.hosts(task_vars(groups))
    assert list(hosts) == ["a"]
    assert "b of group llama_cluster are in neither llama_head nor llama_workers" in " ".join(
        capsys.readouterr().err.split()
    )


def test_every_variable_is_described_and_typed():
    for name, option in inventory.specification().items():
        assert name.startswith("llama_")
        assert option["description"]
        assert option["type"]
