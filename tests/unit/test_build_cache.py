"""Builds that go from host to host by the controller's cache: who builds, and what others get."""

import os
import shutil

import pytest
from ansible.errors import AnsibleActionFail
from ansible_collections.llamacpp.cluster.plugins.action import release as action
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import typed_json
from ansible_collections.llamacpp.cluster.plugins.modules import release as module
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.action import Action
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.sources import cache
from support import actions, builds

pytestmark = [pytest.mark.programs, pytest.mark.usefixtures("untried")]
BUILD = builds.BUILD._replace(targets=("llama-server",))
MOVED = BUILD._replace(builder="worker1", trusted_builders=("worker1", "head"))
"""The head moved to worker1."""
BY_WORKER = BUILD._replace(builder="worker1", trusted_builders=("worker1",))


@pytest.fixture(autouse=True)
def controller(tmp_path, monkeypatch):
    """Its cache. What Ansible copies between hosts is copied here."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "controller"))

    def copy(_action, source, target):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        shutil.copy(source, target)
        return {}

    def transfer(_action, source, name):
        copy(_action, source, tmp_path / "task" / name)
        return str(tmp_path / "task" / name)

    monkeypatch.setattr(Action, "copy_to_tmp", transfer)
    monkeypatch.setattr(Action, "fetch", copy)
    return tmp_path / "controller" / "llamacpp"


@pytest.fixture
def install(tmp_path, call, monkeypatch):
    """Runs the action for a host, with the module itself on that host; ``compiled`` are the hosts that compiled."""
    compiled = []

    def run(name, cluster="one", build=BUILD, check=False, **more):
        host = tmp_path / name
        given = {"release": typed_json.dump(builds.RELEASE), "build": typed_json.dump(build)}
        given.update(prefix=str(host / "prefix"), cache=str(host / "cache"), cluster=cluster)
        plugin = actions.made(action, check_mode=check, **given, **more)

        def on_the_host(**arguments):
            return call(check, module, **arguments)

        def compile_there(_job, **arguments):
            compiled.append(name)
            place(host, f"built by {name}")
            return on_the_host(**arguments)

        monkeypatch.setattr(plugin, "run_module", on_the_host)
        monkeypatch.setattr(plugin, "run_in_background", compile_there)
        monkeypatch.setattr(plugin, "_transfer_source", lambda *_arguments: None)
        return plugin.run(task_vars={"inventory_hostname": name})

    run.compiled = compiled
    return run


def place(host, text):
    builds.place(host / "prefix", BUILD, f"echo usage: {text}", {})


def program(host):
    return (host / "prefix" / "releases" / BUILD.id / "bin" / "llama-server").read_text()


def cached(cluster="one", builder="head"):
    return cache.CachedBuild(cluster, builder, BUILD.id)


def test_a_build_goes_to_the_hosts_that_share_it(install, tmp_path):
    assert install("head", check=True, share=True)["changed"]
    assert install("head")["manifest"]["id"] == BUILD.id
    assert cached().find_archive() is None, "no other host needs it"
    install("head", share=True)
    assert install("worker1")["changed"]
    assert "built by head" in program(tmp_path / "worker1")
    assert install("worker1")["changed"] is False
    assert install.compiled == ["head"]


def test_what_the_builder_changes_later_goes_to_no_other_host(install, tmp_path):
    """The first archive stays. A builder that lost its release gets that one back."""
    install("head", share=True)
    place(tmp_path / "head", "changed")
    install("head", share=True)
    install("worker1")
    assert "built by head" in program(tmp_path / "worker1")
    shutil.rmtree(tmp_path / "head" / "prefix")
    assert install("head", share=True)["manifest"]["received_from"] == "head"
    assert "built by head" in program(tmp_path / "head")
    assert install("head", share=True)["changed"] is False
    assert install.compiled == ["head"]


def test_a_host_gets_what_its_builder_compiled(install, tmp_path):
    """The head was compromised, and worker1 is named as the builder: what it has was compiled on the head."""
    for name in ("head", "worker1", "worker2"):
        install(name, share=True)
    assert install("worker1", build=BY_WORKER, check=True)["changed"]
    install("worker1", build=BY_WORKER, share=True)
    assert install.compiled == ["head", "worker1"]
    assert install("worker2", build=BY_WORKER)["changed"]
    assert "built by worker1" in program(tmp_path / "worker2")
    assert install("worker1", build=BY_WORKER, share=True)["changed"] is False


def test_a_moved_head_compiles_nothing_and_hands_on_what_the_old_one_compiled(install, tmp_path):
    install("head", share=True)
    install("worker1")
    assert not install("worker1", build=MOVED, share=True)["changed"]
    shutil.rmtree(tmp_path / "worker1" / "prefix")
    for name in ("worker1", "worker2"):
        assert install(name, build=MOVED, share=True)["manifest"]["received_from"] == "head"
    assert install.compiled == ["head"]
    for name in ("worker1", "worker2"):
        install(name, build=BY_WORKER, share=True)
        assert "built by worker1" in program(tmp_path / name), "the old head is not trusted now"


def test_a_builder_hands_on_nothing_that_it_received(install, tmp_path, controller):
    install("head", share=True)
    install("worker1")
    shutil.rmtree(controller)
    install("worker1", build=MOVED, share=True)
    assert install("worker2", build=MOVED)["manifest"]["received_from"] == "worker1"
    assert "built by worker1" in program(tmp_path / "worker2")


def test_a_host_does_not_build_where_its_builder_did_not(install):
    said = "has not built .* for this host: fix the error on .*, or run without --limit"
    with pytest.raises(AnsibleActionFail, match=said):
        install("worker1")
    assert install.compiled == []


def test_an_archive_that_changes_on_its_way_is_not_unpacked(install, tmp_path, monkeypatch):
    install("head", share=True)
    transfer = Action.copy_to_tmp

    def change(plugin, source, name):
        target = transfer(plugin, source, name)
        with open(target, "ab") as stream:
            stream.write(b"x")
        return target

    monkeypatch.setattr(Action, "copy_to_tmp", change)
    failed = install("worker1")
    assert failed["failed"]
    assert "does not match the controller's file" in failed["msg"]
    assert not (tmp_path / "worker1").exists(), "the archive lies in the task's folder alone"


def test_an_archive_that_cannot_be_fetched(install, monkeypatch):
    monkeypatch.setattr(Action, "fetch", lambda *_arguments: {"failed": True, "msg": "the disk is full"})
    with pytest.raises(AnsibleActionFail, match=r"b1-cpu-1\.tar\.gz could not be fetched to the controller: the disk"):
        install("head", share=True)
    assert cached().find_archive() is None


def test_builds_are_kept_for_one_cluster_and_one_builder(install):
    install("head", share=True)
    assert cached(cluster="two").find_archive() is cached(builder="worker1").find_archive() is None
    with pytest.raises(AnsibleActionFail, match=r"head has not built .* excludes head"):
        install("worker1", cluster="two")


def test_names_stay_below_the_cache(controller):
    for name in ("..", "a/b", "../../x", "/etc", ".", "fe80::1"):
        build = cache.CachedBuild(name, name, "x")
        with build.receive() as target:
            target.write_text("packed")
        folder = build.find_archive().parent
        assert folder.parent.parent == controller / "releases"
        assert folder.resolve() == folder
