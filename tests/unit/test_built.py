"""Builds that go from host to host: who builds, what the controller records of it, and what it does not believe."""

import json
import os
import shutil
import tarfile
from unittest import mock

import archives
import pytest
from ansible.errors import AnsibleActionFail, AnsibleError
from ansible.module_utils.testing import patch_module_args
from ansible_collections.llamacpp.cluster.plugins.action import release as action
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.files import sha256
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.builds import building, store
from ansible_collections.llamacpp.cluster.plugins.module_utils.lifecycle import changes
from ansible_collections.llamacpp.cluster.plugins.modules import release as module
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.action import Action
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.sources import build_registry, cache
from conftest import typed
from support.drift import drifts
from test_cache import at_once

pytestmark = [pytest.mark.programs, pytest.mark.usefixtures("untried")]
BUILD = {
    "id": "b1-cpu-1",
    "release": "b1",
    "cmake_options": {},
    "environment": {},
    "targets": ["llama-server"],
    "builder": "head",
}
SOURCE = {"source": "git", "build": 1, "member": ""}


@pytest.fixture(autouse=True)
def controller(tmp_path, monkeypatch):
    """Its cache. What Ansible copies between hosts is copied here."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "controller"))

    def copied(_action, source, target):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        shutil.copy(source, target)
        return {}

    monkeypatch.setattr(Action, "copy", copied)
    monkeypatch.setattr(Action, "fetch", copied)
    return tmp_path / "controller" / "llamacpp"


@pytest.fixture
def install(tmp_path, capsys, monkeypatch):
    """Runs the action for a host, with the module itself on that host. What is «compiled» says where."""
    compiled = []

    def run(name, cluster="one", build=None, check=False, **more):
        host = tmp_path / name
        task = mock.Mock(check_mode=check, async_val=0)
        task.args = {
            "release": SOURCE,
            "build": build or BUILD,
            "prefix": str(host / "prefix"),
            "cache": str(host / "cache"),
            "cluster": cluster,
            **more,
        }
        plugin = action.ActionModule(task, *(mock.Mock() for _index in range(5)))

        def on_the_host(module_args, task_vars):
            with patch_module_args({**module_args, "_ansible_check_mode": check}), pytest.raises(SystemExit):
                module.main()
            return json.loads(capsys.readouterr().out)

        def compile_there(arguments):
            compiled.append(name)
            place(host, f"built by {name}")
            return on_the_host({**arguments, "recorded": {}}, {})

        monkeypatch.setattr(plugin, "_execute_module", on_the_host)
        monkeypatch.setattr(plugin, "_build", compile_there)
        monkeypatch.setattr(plugin, "_bring", lambda *_arguments: {})
        return plugin.run(task_vars={"inventory_hostname": name})

    run.compiled = compiled
    return run


def place(host, said, identity=BUILD["id"]):
    """Installs a program that prints something, as a build would."""
    installer = building.Installer(str(host / "prefix"), {**BUILD, "id": identity}, None)
    partial = installer._begin()
    (partial / "bin" / "llama-server").write_text(f"#!/bin/sh\necho usage: {said}\n")
    (partial / "bin" / "llama-server").chmod(0o755)
    return installer._publish(partial, {"source": {}, "seconds": 1, "options_ignored": []})


def program(host):
    return (host / "prefix" / "releases" / BUILD["id"] / "bin" / "llama-server").read_text()


def kept(cluster="one", builder="head"):
    return build_registry.CachedBuild(cluster, builder, BUILD["id"])


def test_a_build_is_recorded_and_goes_to_the_others(install, tmp_path, controller):
    assert install("head", check=True, share=True)["changed"]
    assert kept().record() is None, "nothing is recorded in check mode"
    manifest = install("head")["manifest"]
    assert kept().record() == (manifest["files"], str(tmp_path / "head" / "prefix"), None)
    assert kept().archive() is None, "nobody else needs it"
    install("head", share=True)
    assert install("worker1")["changed"]
    assert "built by head" in program(tmp_path / "worker1")
    assert install.compiled == ["head"]
    assert kept().record().files == manifest["files"]
    assert kept().record().sha256 == sha256(kept().archive())
    assert install("worker1")["changed"] is False


def test_a_host_that_says_that_it_has_a_build_gives_it_to_nobody(install, tmp_path):
    place(tmp_path / "worker1", "built by a stranger")
    install("head", share=True)
    assert install.compiled == ["head"]
    assert install("worker1")["changed"]
    assert "built by head" in program(tmp_path / "worker1")


BY_WORKER = {**BUILD, "builder": "worker1"}


def test_what_a_host_received_is_not_its_own_build(install, tmp_path):
    """The head was compromised, and worker1 is named as the builder: what it has was compiled on the head."""
    install("head", share=True)
    install("worker1")
    assert install("worker1", build=BY_WORKER, check=True)["changed"]
    assert install.compiled == ["head"]
    install("worker1", build=BY_WORKER, share=True)
    assert install.compiled == ["head", "worker1"]
    assert "built by worker1" in program(tmp_path / "worker1")
    assert install("head", build=BY_WORKER)["changed"]
    assert "built by worker1" in program(tmp_path / "head")
    assert install("worker1", build=BY_WORKER, share=True)["changed"] is False


def test_a_record_of_a_builder_counts_more_than_its_note(install, tmp_path):
    """A host may write anything into its manifest."""
    install("head", share=True)
    manifest = install("worker1")["manifest"]
    build_registry.CachedBuild("one", "worker1", BUILD["id"], str(tmp_path / "worker1/prefix")).record_files(manifest)
    assert install("worker1", build=BY_WORKER)["changed"] is False
    assert install.compiled == ["head"]


def test_a_builder_that_gets_its_own_build_back_keeps_it(install, tmp_path):
    install("head", share=True)
    shutil.rmtree(tmp_path / "head" / "prefix")
    assert install("head", share=True)["manifest"]["received"] == "head"
    shutil.rmtree(kept().folders[-1])
    assert install("head", share=True)["changed"] is False
    assert install.compiled == ["head"]


def test_another_run_may_have_compiled_it_while_this_one_waited_for_the_lock(tmp_path):
    manifest = place(tmp_path, "built elsewhere")
    builder = building.Builder(
        str(tmp_path / "prefix"), str(tmp_path / "cache"), BUILD, {"sha256": "0" * 64, "patches": []}, None
    )
    with mock.patch.object(builder, "_prepare", side_effect=building.BuildError("compiles")):
        assert builder.install({})["files"] == manifest["files"]
        path = tmp_path / "prefix" / "releases" / BUILD["id"] / "manifest.json"
        path.write_text(json.dumps({**manifest, "received": "worker1"}))
        with pytest.raises(building.BuildError, match="compiles"):
            builder.install({})


def test_a_host_does_not_build_where_its_builder_did_not(install):
    with pytest.raises(AnsibleActionFail, match="and did not: see the error of that host, or run without --limit"):
        install("worker1")
    assert install.compiled == []


def test_a_release_from_before_the_records_is_recorded_of_its_builder_once(install, tmp_path):
    place(tmp_path / "head", "built long ago")
    install("head", share=True)
    install("worker1")
    assert "built long ago" in program(tmp_path / "worker1")
    assert install.compiled == []
    place(tmp_path / "head", "changed later")
    assert install("head", share=True)["changed"]
    assert "built long ago" in program(tmp_path / "head")


def test_a_builder_that_was_changed_builds_again_where_the_archive_is_gone(install, tmp_path):
    install("head", share=True)
    kept().archive().unlink()
    place(tmp_path / "head", "changed")
    before = kept().record()
    install("head", share=True)
    assert install.compiled == ["head", "head"]
    assert kept().record().files == before.files
    assert kept().archive()


def test_an_archive_with_other_programs_than_recorded_is_refused(install, tmp_path, monkeypatch):
    """The builder says that nothing has changed, and packs something else."""
    install("head")
    place(tmp_path / "liar", "something else")
    pack = building.pack
    monkeypatch.setattr(
        building, "pack", lambda _prefix, cache, build: pack(str(tmp_path / "liar/prefix"), cache, build)
    )
    with pytest.raises(AnsibleError) as refused:
        install("head", share=True)
    assert "The release b1-cpu-1 that head has packed is not what the controller recorded of it" in str(refused.value)
    assert kept().archive() is None
    assert [path.name for path in kept().folders[-1].iterdir() if path.name != ".lock"] == ["b1-cpu-1.json"]


def test_an_archive_that_was_changed_on_the_controller_is_packed_again(install, tmp_path):
    install("head", share=True)
    kept().archive().write_bytes(os.urandom(999))
    with pytest.raises(AnsibleActionFail, match="head should build"):
        install("worker1")
    install("head", share=True)
    assert install("worker1")["changed"]
    assert install.compiled == ["head"]


def test_an_archive_that_changes_on_its_way_is_not_unpacked(install, tmp_path, monkeypatch):
    install("head", share=True)
    copy = Action.copy

    def changed(plugin, source, target):
        copy(plugin, source, target)
        with open(target, "ab") as stream:
            stream.write(b"x")
        return {}

    monkeypatch.setattr(Action, "copy", changed)
    failed = install("worker1")
    assert failed["failed"]
    assert "does not have the sha256" in failed["msg"]
    assert not (tmp_path / "worker1" / "prefix").exists()


def test_a_record_that_cannot_be_read_counts_as_none(install):
    manifest = install("head", share=True)["manifest"]
    for text in ("", "[]", '{"files": {}, "sha256": null}', "[" * 100000, '{"files": {"x": 1}}'):
        (kept().folders[-1] / "b1-cpu-1.json").write_text(text)
        assert kept().record() is kept().archive() is None, text
    install("head", share=True)
    assert kept().record().files == manifest["files"]
    assert install.compiled == ["head"]


def test_builds_are_kept_for_one_cluster_and_one_builder_and_one_account(install, controller, monkeypatch):
    install("head", share=True)
    for folder in kept().folders:
        assert folder.stat().st_mode & 0o777 == 0o700
    assert kept(cluster="two").archive() is kept(builder="worker1").archive() is None
    with pytest.raises(AnsibleActionFail, match="head should build"):
        install("worker1", cluster="two")
    monkeypatch.setattr(cache.os, "geteuid", lambda: 4711)
    with pytest.raises(AnsibleError, match=r"cache .* belongs to .*, and this run to uid 4711"):
        install("worker1")


def test_another_installation_on_the_same_host_has_builds_of_its_own(install, tmp_path):
    """One host as root and as a user, each as a cluster of the same name: neither takes the other for a host that was changed."""
    install("head")
    other = str(tmp_path / "other")
    assert build_registry.CachedBuild("one", "head", BUILD["id"], other).record() is None
    assert kept().record()
    installer = building.Installer(other, BUILD, None)
    place(tmp_path / "head", "built by root")
    shutil.copytree(tmp_path / "head" / "prefix", other)
    assert install("head", prefix=other)["changed"] is False
    assert store.installed(installer.release)


def test_names_stay_below_the_cache(controller):
    for name in ("..", "a/b", "../../x", "/etc", ".", "fe80::1"):
        folder = build_registry.CachedBuild(name, name, "x").folders[-1]
        assert folder.parent.parent == controller / "releases"
        assert folder.resolve() == folder


def test_a_cache_that_cannot_be_written(install, small_disk, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(small_disk))
    (small_disk / "full").write_bytes(os.urandom(200 << 10))
    with pytest.raises(AnsibleError, match=r"llama_build_share does not fit on the controller: the disk of .* is full"):
        kept().record_files({"files": {f"bin/{number}": "0" * 64 for number in range(2000)}})
    assert kept().record() is None
    (small_disk / "full").unlink()
    install("head")
    assert kept().record()


def test_controllers_that_keep_a_build_of_two_clusters_at_once(tmp_path):
    (tmp_path / "llama-server").write_bytes(os.urandom(1 << 20))
    with tarfile.open(tmp_path / "packed.tar.gz", "w:gz", format=tarfile.USTAR_FORMAT) as packed:
        packed.add(tmp_path / "llama-server", "bin/llama-server")
    files = {"bin/llama-server": sha256(tmp_path / "llama-server")}
    code = f"""
import shutil
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.sources import build_registry
said = []
for cluster in ("one", "two"):
    for turn in range(20):
        kept = build_registry.CachedBuild(cluster, "head", f"b{{turn}}-cpu-1")
        if not kept.record():
            kept.record_files({{"files": {files!r}}})
        if not kept.archive():
            with kept.receive() as target:
                shutil.copy({str(tmp_path / "packed.tar.gz")!r}, target)
        said.append((sources.sha256(kept.archive()), *kept.record()))
print(len(said), len(set(map(str, said))))
"""
    assert at_once(code) == ["40 1"] * 3
    assert not list(tmp_path.glob("controller/llamacpp/releases/*/*/.work-*"))


def test_a_builder_that_does_not_say_what_it_built():
    for files in ({}, {"bin/x": "no hash"}, {"/dev/zero": "0" * 64}, {"bin/../x": "0" * 64}, None):
        for manifest in ({"files": files}, files):
            with pytest.raises(AnsibleError, match="head does not say which files its build b1-cpu-1 has"):
                kept().record_files(manifest)


def test_a_packed_release_that_is_torn_or_too_large_is_not_whole(tmp_path, monkeypatch):
    place(tmp_path, "x" * 5000)
    archive = building.pack(str(tmp_path / "prefix"), str(tmp_path / "cache"), BUILD)
    names = {"bin/llama-server"}
    whole = store.packed_files(archive, names)
    assert set(whole) == names
    assert store.packed_files(archive, {"bin/other"}) == {}
    with open(archive, "rb") as stream:
        data = stream.read()
    for end in (0, 1, 10, len(data) // 2):
        (tmp_path / "torn").write_bytes(data[:end])
        assert store.packed_files(tmp_path / "torn", names) != whole
    with tarfile.open(tmp_path / "twice", "w") as packed:
        for _time in range(2):
            packed.add(tmp_path / "prefix" / "releases" / BUILD["id"] / "bin/llama-server", "bin/llama-server")
    assert store.packed_files(tmp_path / "twice", names) == {}
    monkeypatch.setattr(store.archives, "LIMIT_BYTES", 1 << 10)
    assert store.packed_files(archive, names) == {}


USTAR, PAX = tarfile.USTAR_FORMAT, tarfile.PAX_FORMAT


@pytest.mark.parametrize("form, packing, files", [(USTAR, "gz", ["file"]), (PAX, "gz", []), (USTAR, "xz", [])])
def test_what_a_host_packs_has_one_form(tmp_path, form, packing, files):
    (tmp_path / "file").write_text("x")
    os.utime(tmp_path / "file", (1.5, 1.5))
    with tarfile.open(tmp_path / "packed", f"w:{packing}", format=form) as packed:
        packed.add(tmp_path / "file", "file")
    assert list(store.packed_files(tmp_path / "packed", ["file"])) == files


def test_an_archive_that_python_cannot_read_holds_nothing(tmp_path):
    for name, data in archives.ODD.items():
        (tmp_path / "odd").write_bytes(data)
        assert store.packed_files(tmp_path / "odd", {"bin/llama-server"}) == {}, name


def known(plan, files, packed=True):
    return {("head", plan["hosts"]["head"]["builds"][0]["id"]): changes.Recorded(files, packed)}


FILES = {"bin/llama-server": "1" * 64}


def installed(plan, **others):
    """Answers of hosts that have FILES, or what is given."""
    identity = plan["hosts"]["head"]["builds"][0]["id"]
    found = drifts(plan)
    for name, drift in found.items():
        drift["installed"] = others.get(name, {identity: FILES})
    return {name: {"drift": drift} for name, drift in found.items()}


@pytest.mark.parametrize("claim", [{"x": FILES}, {}, None, [], "x"])
def test_a_host_with_other_programs_than_recorded_is_named_and_gets_the_right_ones(pair, claim):
    plan = pair.plan()
    identity = plan["hosts"]["head"]["builds"][0]["id"]
    compared = changes.compare(typed(plan), installed(plan, worker2=claim), known(plan, FILES))
    text = f"release {identity} on worker2 is not the one that the controller recorded of head"
    assert compared.unlike == [text]
    assert compared.drifts["worker2"]["differences"] == [{"kind": "release", "subject": identity, "text": text}]
    decided = changes.decide(typed(plan), compared.drifts)
    assert decided.shared == {identity: "head"}
    assert decided.restarts["worker2"] == ["llamacpp-worker-cpu"]


def test_a_builder_that_received_its_build_compiles_it_and_all_get_that_one(pair):
    plan = pair.plan()
    identity = plan["hosts"]["head"]["builds"][0]["id"]
    found = installed(plan)
    for host in ("head", "worker2"):
        found[host]["drift"]["received"] = {identity: "worker1"}
    compared = changes.compare(typed(plan), found)
    text = f"release {identity} on head was compiled on worker1, and head has to compile it itself"
    assert compared.drifts["head"]["differences"] == [{"kind": "release", "subject": identity, "text": text}]
    assert compared.unlike == [
        f"release {identity} on {name} is not the one that head has to build again" for name in ("worker1", "worker2")
    ]
    decided = changes.decide(typed(plan), compared.drifts)
    assert (decided.builders, decided.shared) == (["head"], {identity: "head"})
    assert decided.restarts["head"]
    compared = changes.compare(typed(plan), found, known(plan, FILES))
    assert not any(drift["differences"] for drift in compared.drifts.values()), "its record counts more"
    found["head"]["drift"]["received"] = {identity: "head"}
    compared = changes.compare(typed(plan), found)
    assert not any(drift["differences"] for drift in compared.drifts.values())


def test_without_a_record_nothing_is_compared(pair):
    plan = pair.plan()
    assert not changes.compare(typed(plan), installed(plan, worker2=None)).unlike
    assert not changes.compare(typed(plan), installed(plan), known(plan, FILES)).unlike


@pytest.mark.parametrize("packed", [True, False])
def test_where_the_builder_builds_again_all_others_get_that_build(pair, packed):
    plan = pair.plan()
    identity = plan["hosts"]["head"]["builds"][0]["id"]
    found = installed(plan)
    found["head"]["drift"]["missing_builds"] = [identity]
    compared = changes.compare(typed(plan), found, known(plan, FILES, packed))
    lacking = [name for name, drift in compared.drifts.items() if identity in drift["missing_builds"]]
    assert lacking == (["head"] if packed else ["head", "worker1", "worker2"])


def test_the_controller_says_what_it_keeps_of_a_plan(pair, install):
    plan = pair.plan()
    assert build_registry.recorded(typed(plan)) == {}
    build = plan["hosts"]["head"]["builds"][0]
    one = build_registry.CachedBuild(plan["cluster"], "head", build["id"], plan["hosts"]["head"]["prefix"])
    one.record_files({"files": FILES})
    assert build_registry.recorded(typed(plan)) == {("head", build["id"]): changes.Recorded(FILES, False)}
    assert cache.root() == one.folders[0]


def test_a_builder_that_says_it_has_moved_gives_the_others_nothing_new(install, tmp_path):
    """A host says itself where its installation is. What others got from it stays what was recorded."""
    install("head", share=True)
    install("worker1")
    before = kept().record()
    place(tmp_path / "elsewhere", "taken over")
    shutil.move(tmp_path / "elsewhere" / "prefix", tmp_path / "head" / "moved")
    install("head", share=True, prefix=str(tmp_path / "head" / "moved"))
    assert kept().record() == before
    assert install("worker1")["changed"] is False
    assert "built by head" in program(tmp_path / "worker1")
    assert "built by head" in program(tmp_path / "head")
    assert install.compiled == ["head"]
