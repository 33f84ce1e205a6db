"""Each change that a run makes on a host fails once, on a full, read-only or broken disk, without the right, or since the run is killed.
The next run brings what an undisturbed one brings, and the one after it changes nothing."""

import contextlib
import errno
import importlib
import itertools
import json
import os
import re
import stat
import tarfile
from pathlib import Path

import benchmarks
import faults
import pytest
import test_firewall
import test_links
import test_services
from ansible_collections.llamacpp.cluster.plugins.module_utils.benchmark import history
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import commands, errors, files, typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.facts.host import Place, place_in
from ansible_collections.llamacpp.cluster.plugins.module_utils.host import (
    ownership,
    plan_history,
    services,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.builds import builder, installer, manifest
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.firewall import managers
from ansible_collections.llamacpp.cluster.plugins.module_utils.models import download, model_files
from ansible_collections.llamacpp.cluster.plugins.modules import release_prune
from model_server import DATA, download_record_of, parsed, planned
from support import builds, rollbacks
from support.hosts import build_plan, host_plan
from test_services import HEAD, OTHER, WORKER

KINDS = pytest.mark.parametrize("kind", faults.KINDS)
SOME_KINDS = pytest.mark.parametrize("kind", ["full disk", "read-only", "killed"])
"""For what takes long: with another number, the same changes fail as on a disk that is read-only."""


def failed_runs(broken, make, run, state, *place):
    """Repeats a run in which one change more succeeds each time, until all do. Each time, the run after it, with the fault gone, has to
    bring the state that an undisturbed run brings, and the one after that must change nothing.

    :param make: a new host, from the number of the try, or «whole».
    :param run: does the work on it; returns whether it changed something.
    :param state: of the host.
    :param place: where it works, for errors that name no path.
    :returns: how many runs failed.
    """
    whole = make("whole")
    run(whole)
    expected = state(whole)
    for number in itertools.count(1):
        host = make(number)
        broken.at, broken.count, said = number, 0, []
        try:
            run(host)
        except faults.Killed:
            pass
        except OSError as error:
            said.append(error)
        reached = broken.count >= number
        broken.at = None
        remedy = r"\. [A-Z].*(run the playbook again|\(become\))"
        path = r"(\S+: )?" if place else r"/.*: "
        assert all(re.match(f"^{path}{error.strerror}{remedy}", errors.sentence(error, *place)) for error in said)
        if not reached:
            return number - 1
        run(host)
        assert state(host) == expected, f"after change {number}"
        assert not run(host), f"after change {number}"


def with_old_services(root, name, monkeypatch):
    """A host on which a head and a worker run by an old definition, and a worker that is not planned any more."""
    root.mkdir()
    machine = test_services.machine_with(name, root, monkeypatch)
    machine.apply(*(test_services.defined(each, f"{each} 0") for each in (HEAD, WORKER, OTHER)))
    return machine


def of_services(machine):
    left_out = ("calls", "events", "known", "loaded")
    return faults.tree(machine.folder, *left_out)


def changes(argv):
    return any(word.startswith(test_services.CHANGING) for word in argv[1:])


def renew(machine):
    return bool(machine.apply(HEAD, WORKER, remove=[OTHER]))


@pytest.mark.faults
@pytest.mark.parametrize(
    "name, kind",
    [
        *((name, kind) for name in services.CLASSES if name != "systemd_user" for kind in ("full disk", "killed")),
        ("launchd", "read-only"),
    ],
)
def test_services_after_a_fault(tmp_path, monkeypatch, name, kind):
    broken = faults.Faults(monkeypatch, kind, tmp_path)
    monkeypatch.setattr(commands, "run", broken.command(commands.run, changes))

    def make(number):
        return with_old_services(tmp_path / str(number), name, monkeypatch)

    assert failed_runs(broken, make, renew, of_services) > 1


def break_commands(monkeypatch, machine, broken):
    """Has each command of such a machine fail once."""
    run = machine.run
    monkeypatch.setattr(machine, "run", lambda host, argv, **_more: broken.command(lambda argv: run(host, argv))(argv))


PLANNED = [test_links.link(), test_links.link(interface="eth2", address="10.98.0.12/24", mtu=None)]
machine, any_manager = test_links.machine, test_links.any_manager


@pytest.mark.faults
@KINDS
def test_links_after_a_fault(any_manager, tmp_path, monkeypatch, kind):
    def make(number):
        """A host that has a link which is not planned any more, and another address on one that is."""
        host = test_links.Machine(tmp_path / str(number))
        host.manager = any_manager.manager
        host.add("eth2").add("eth3")
        host.apply(test_links.link(address="10.99.0.13/24"), test_links.link(interface="eth3", address="10.97.0.12/24"))
        return host

    def run(host):
        before, after = host.apply(*PLANNED)
        return before != after

    def state(host):
        return faults.tree(host.root / "etc"), {name: sorted(held) for name, held in host.addresses.items()}

    broken = faults.Faults(monkeypatch, kind, *(tmp_path / str(number) / "etc" for number in range(1, 99)))
    break_commands(monkeypatch, test_links.Machine, broken)
    assert failed_runs(broken, make, run, state) > 1


def nftables(root):
    """nftables that has the rules that it is given, and no others."""
    held = {}

    def ruleset(line):
        if "--json" not in line:
            return ""
        chain = {"family": "inet", "table": "llamacpp", "chain": "input", "expr": []}
        rules = [{"rule": {**chain, "handle": 1, "comment": comment}} for comment in held.get("rules", [])]
        return test_firewall.json.dumps({"nftables": rules})

    host = test_firewall.Host(root, "nftables", programs=["nft"], nft=ruleset)
    host.path("/etc/systemd/system/nftables.service.wants").mkdir(parents=True)

    def run(argv, text="", may_fail=False):
        if argv == ["nft", "-f", "-"]:
            held["rules"] = re.findall(r"^\t\t.* comment (\S+)$", text, re.MULTILINE)
        if argv[:2] == ["systemctl", "enable"]:
            host.on = ("nftables", "firewall-llamacpp.service")
            link = host.path(managers.Nftables(host).link)
            link.unlink(missing_ok=True)
            link.symlink_to("../" + "firewall-llamacpp.service")
        return test_firewall.Host.run(host, argv, text, may_fail)

    host.run = run
    return host, lambda: held["rules"]


@pytest.mark.faults
@KINDS
@pytest.mark.parametrize(
    "manager, kept", [("nftables", nftables), ("firewalld", test_firewall.firewalld_that_remembers)]
)
def test_the_firewall_after_a_fault(tmp_path, monkeypatch, manager, kept, kind):
    def apply(host, rules):
        before, after = managers.apply(manager, rules, check=False, system=host)
        return before != after

    def make(number):
        host, host.kept = kept(tmp_path / str(number))
        apply(host, [test_firewall.rule(50061)])
        host.run = broken.command(host.run)
        return host

    def run(host):
        return apply(host, test_firewall.BOTH)

    def state(host):
        return faults.tree(host.root), host.kept()

    broken = faults.Faults(monkeypatch, kind, tmp_path)
    assert failed_runs(broken, make, run, state) > 0


def test_a_file_is_on_the_disk_before_it_takes_its_place(tmp_path, monkeypatch):
    done = []
    fsync, replace = os.fsync, os.replace

    def synced(descriptor):
        done.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        fsync(descriptor)

    def replaced(*paths):
        done.append("replace")
        replace(*paths)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    files.replace_file(tmp_path / "unit", "text", 0o640)
    assert done == ["file", "replace", "folder"]
    assert faults.tree(tmp_path) == {"unit": (0o640, b"text")}


@pytest.mark.parametrize("number, raised", [(errno.EINVAL, False), (errno.EIO, True)])
def test_a_file_system_that_cannot_sync_a_folder_is_no_error(tmp_path, monkeypatch, number, raised):
    """As shares of a virtual machine and some network mounts, where a plan may be written."""
    fsync = os.fsync

    def synced(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", synced)
    with pytest.raises(OSError, match=os.strerror(number)) if raised else contextlib.nullcontext():
        files.replace_file(tmp_path / "unit", "text", 0o640)
    assert (tmp_path / "unit").read_text() == "text"


@pytest.mark.parametrize("number", errors.REMEDIES)
def test_an_error_names_its_path_the_file_system_and_a_remedy(tmp_path, number):
    said = errors.sentence(OSError(number, os.strerror(number), str(tmp_path / "no" / "file")))
    mount = errors.file_system(str(tmp_path))
    assert os.path.ismount(mount)
    assert said.startswith(f"{tmp_path}/no/file: {os.strerror(number)}. ")
    assert (f" {mount}" in said) == (number not in (errno.EACCES, errno.EPERM))
    assert "{" not in said
    if number == errno.ENOSPC:
        assert re.search(rf" on {mount} \(\d+ MiB( and room for \d+ files)? left\) and run the playbook again\.$", said)


def test_an_error_without_a_path(tmp_path):
    said = errors.sentence(OSError(errno.EIO, "Input/output error"), str(tmp_path), str(tmp_path))
    remedy = (
        "Input/output error. See dmesg for what is wrong with the disk of {}, and run the playbook again when it works."
    )
    assert said == remedy.format(errors.file_system(str(tmp_path)))
    relative = errors.sentence(OSError(errno.EIO, "Input/output error", "bin"), "/")
    assert relative == "bin: " + remedy.format("/")
    assert errors.sentence(OSError("odd")) == "odd. Fix that on the host and run the playbook again."


def test_a_file_system_that_does_not_answer(tmp_path, monkeypatch):
    def stale(path):
        raise OSError(errno.ESTALE, "Stale file handle", path)

    monkeypatch.setattr(os, "statvfs", stale)
    assert " on / and run" in errors.sentence(OSError(errno.ENOSPC, "No space left on device", "/"))


EMPTY = typed_json.dump(host_plan(service_manager="launchd", scope="system"))
BUILD, RELEASE = typed_json.dump(builds.BUILD), typed_json.dump(builds.RELEASE)
PLUGINS = "ansible_collections.llamacpp.cluster.plugins.modules"
MODULES = {
    "benchmark_info": ("job.Job", {"host": EMPTY}),
    "benchmark_job": ("job.Job", {"host": EMPTY, "state": "absent"}),
    "firewall": ("managers.apply", {"rules": []}),
    "cluster_lock": ("files.is_marked", {"prefix": "/", "state": "absent", "run": {"user": "x"}}),
    "discovery_info": ("discovery.read", {}),
    "gguf_info": ("gguf.read_path", {"path": "/m.gguf"}),
    "host_info": ("host.facts", {}),
    "host_status": ("host_status.read", {}),
    "plan_history": ("plan_history.mark_served", {"state": "served", "prefix": "/p", "id": "x"}),
    "plan_history_info": ("plan_history.read_all", {"prefix": "/p"}),
    "link": ("configuration.apply", {"links": []}),
    "link_throughput": ("throughput.measure", {"address": "192.0.2.1"}),
    "model_info": ("local_models.report", {}),
    "model": ("model_files.pending", {"files": [], "folder": "/p"}),
    "release": ("manifest.installed", {"release": RELEASE, "build": BUILD, "prefix": "/p", "cache": "/c"}),
    "release_prune": ("state.unneeded_releases", {"host": EMPTY}),
    "rpc_info": ("rpc.probe", {"address": "192.0.2.1", "port": 50052}),
    "service": ("services.apply", {"host": EMPTY}),
    "tunnel_key": ("tunnel_keys.add", {"path": "/p/key", "key": "ab" * 32}),
    "uninstall": ("ownership.remove", {"host": EMPTY}),
    "verify": ("typed_json.parse", {"plan": {}}),
}
"""Module → what does its work, and arguments."""


@pytest.mark.parametrize("name", MODULES)
def test_a_module_ends_with_a_sentence(call, monkeypatch, name):
    worker, arguments = MODULES[name]
    module = importlib.import_module(f"{PLUGINS}.{name}")

    def fail(*_arguments, **_named):
        raise OSError(errno.EIO, os.strerror(errno.EIO), "/proc/1/fd")

    monkeypatch.setattr(f"{PLUGINS}.{name}.{worker}", fail)
    said = call(module=module, **arguments)
    assert said["failed"]
    assert re.search(r"/proc/1/fd.*Input/output error|Input/output error.*/proc/1/fd", said["msg"])
    assert said["msg"].endswith(".")


def test_every_module_that_runs_on_hosts_is_tried():
    folder = Path(release_prune.__file__).parent
    assert {path.stem for path in folder.glob("*.py") if "def main()" in path.read_text()} == set(MODULES)


def test_ufw_after_a_run_that_was_killed(tmp_path, monkeypatch):
    def make(number):
        added = ["ufw allow 22/tcp"]
        host = test_firewall.ufw_host(tmp_path / str(number), added)
        managers.apply("ufw", [test_firewall.rule(50061)], check=False, system=host)
        host.run, host.added = broken.command(host.run), added
        return host

    def run(host):
        before, after = managers.apply("ufw", test_firewall.BOTH, check=False, system=host)
        return before != after

    broken = faults.Faults(monkeypatch, "killed")
    assert failed_runs(broken, make, run, lambda host: host.added) > 5


@pytest.mark.faults
@SOME_KINDS
def test_a_model_after_a_fault(server, tmp_path, monkeypatch, kind):
    """Two files, of which one was fetched in part before."""
    data = DATA[:10_000]
    server.files.update({"/m.gguf": data, "/n.gguf": data})
    record = model_files.download_record.RECORD

    def make(number):
        part = tmp_path / str(number) / "source" / "m.gguf.part"
        part.parent.mkdir(parents=True)
        part.write_bytes(data[:100])
        return tmp_path / str(number)

    def run(folder):
        files = [planned(server, folder, name, data=data) for name in ("m.gguf", "n.gguf")]
        wanted, records = parsed(files, [download_record_of(folder / "source")])
        differs = model_files.differences(wanted, records)
        download.download(wanted, folder, records, None)
        return any(differs)

    def state(folder):
        found = faults.tree(folder, model_files.LOCK)
        mode, text = found[f"source/{record}"]
        said = json.loads(text.decode().replace(str(folder), ""))
        for entry in said["checked"].values():
            entry.pop("modified")
        return {**found, f"source/{record}": (mode, said)}

    broken = faults.Faults(monkeypatch, kind, tmp_path)
    assert failed_runs(broken, make, run, state, str(tmp_path)) > 5
    assert sorted(state(tmp_path / "whole")) == ["source/.source.json", "source/m.gguf", "source/n.gguf"]


@pytest.mark.faults
@KINDS
def test_a_record_of_a_benchmark_after_a_fault(tmp_path, monkeypatch, kind):
    """Whoever reads it meanwhile finds the one before it, whole."""
    before = benchmarks.read({**benchmarks.example(), "cells": [], "ended": None})
    after = benchmarks.read(benchmarks.example())

    def make(number):
        (tmp_path / str(number)).mkdir()
        history.write(str(tmp_path / str(number)), before)
        return tmp_path / str(number)

    def run(host):
        found = benchmarks.read(history.find(str(host), "1a2b3c4d"))
        assert found in (before, after)
        history.write(str(host), after)
        return found != after

    broken = faults.Faults(monkeypatch, kind, tmp_path)
    assert failed_runs(broken, make, run, faults.tree, str(tmp_path)) >= 3


PROGRAM = "#!/bin/sh\necho usage: --rpc\n"
TARGETS = ["ggml-rpc-server", "llama-server"]


NEW = builds.BUILD._replace(id="new", targets=tuple(TARGETS))


def run_logged(builder, step, _argv):
    """What cmake and tar would make, with a line in the log."""
    made = {"unpack": ["source/CMakeLists.txt"], "compile": [f"build/bin/{name}" for name in TARGETS]}
    with builder.log.open("ab") as log:
        log.write(f"== {step}\n".encode())
    for name in made.get(step, []):
        (builder.work / name).parent.mkdir(parents=True, exist_ok=True)
        (builder.work / name).write_text(PROGRAM)
    return 0, []


def compiled(root, archive):
    builder.Builder(
        str(root / "prefix"), str(root / "cache"), NEW, builds.RELEASE, builds.source_of(archive), None
    ).install()


def unpacked(root, archive):
    if not manifest.installed(root / "prefix/releases/new"):
        installer.Installer(str(root / "prefix"), NEW, None).unpack(builds.source_of(archive), 7)


def packed(root, _archive):
    if not manifest.installed(root / "prefix/releases/new"):
        path = installer.pack(str(root.parent / "builder/prefix"), str(root / "cache"), NEW)
        installer.Installer(str(root / "prefix"), NEW, None).receive(builds.packed_of(Path(path)))


@pytest.mark.faults
@SOME_KINDS
@pytest.mark.parametrize("install", [compiled, unpacked, packed])
def test_a_release_after_a_fault(tmp_path, monkeypatch, untried, install, kind):
    monkeypatch.setattr(builder.Builder, "_run_logged", run_logged)
    folder = tmp_path / "llama-b9900"
    folder.mkdir()
    for name in (*TARGETS, "libggml.so"):
        (folder / name).write_text(PROGRAM)
        (folder / name).chmod(0o755)
    archive = tmp_path / "programs.tar"
    with tarfile.open(archive, "w") as opened:
        opened.add(folder, folder.name)

    def make(number):
        (tmp_path / str(number)).mkdir()
        return tmp_path / str(number)

    def run(root):
        before = state(root)
        install(root, archive)
        return state(root) != before

    def state(root):
        found = faults.tree(root, "cache/builds/new.log", "cache/builds/new.tar.gz")
        release = root / "prefix/releases/new"
        return found, release.stat().st_mtime if release.exists() else None, sorted(release.parent.glob(".*"))

    monkeypatch.setattr(builder.time, "monotonic", lambda: 1.0)
    compiled(tmp_path / "builder", archive)
    broken = faults.Faults(monkeypatch, kind, tmp_path)
    assert failed_runs(broken, make, run, state, str(tmp_path)) > 5


def test_a_full_disk_is_not_filled_further_by_an_archive_that_is_not_whole(tmp_path, monkeypatch, untried):
    release = tmp_path / "prefix/releases/new/bin"
    release.mkdir(parents=True)
    (release / "llama-server").write_text(PROGRAM)
    (release.parent / manifest.NAME).write_text("{}")
    broken = faults.Faults(monkeypatch, "full disk", tmp_path / "cache")
    broken.at = 5
    with pytest.raises(OSError, match="No space left"):
        installer.pack(str(tmp_path / "prefix"), str(tmp_path / "cache"), NEW._replace(targets=("llama-server",)))
    assert faults.tree(tmp_path / "cache") == {}


@pytest.mark.faults
@SOME_KINDS
def test_a_removal_of_releases_after_a_fault(tmp_path, monkeypatch, call, kind):
    """What is planned stays; a release, a build that never ended, and what they left beside them, go."""
    gone, left = ("b8600-cpu-0123abcd", "b8601-cpu-0123abcd")
    said = []

    def make(number):
        root = tmp_path / str(number)
        for name in (gone, "new"):
            (root / "prefix/releases" / name / "bin").mkdir(parents=True)
            (root / "prefix/releases" / name / "bin/llama-server").write_text(PROGRAM)
        (root / "cache/builds" / left / "source").mkdir(parents=True)
        for name in (f"{gone}.log", f"{gone}.tar.gz", f"{gone}.lock", f"{left}.log", f"{left}.lock", "new.log"):
            (root / "cache/builds" / name).write_text("text")
        return root

    def run(root):
        places = {"prefix": str(root / "prefix"), "cache": str(root / "cache"), "units": str(root)}
        planned = host_plan(builds=(build_plan("new"),), **places)
        result = call(module=release_prune, host=typed_json.dump(planned))
        if result.get("failed"):
            said.append(result["msg"])
        return result.get("changed")

    def state(root):
        return faults.tree(root), sorted(str(path.relative_to(root)) for path in root.rglob("*"))

    broken = faults.Faults(monkeypatch, kind, tmp_path)
    failed_runs(broken, make, run, state)
    left = ["cache/builds/new.log", "prefix/releases/new/bin/llama-server"]
    assert sorted(faults.tree(tmp_path / "whole")) == left
    assert all(re.search(r"\. [A-Z].*(run the playbook again|\(become\))", sentence) for sentence in said)


@pytest.mark.faults
@pytest.mark.parametrize("kind", ["read-only", "killed"])
def test_a_teardown_after_a_fault(tmp_path, monkeypatch, kind):
    def make(number):
        for name in (ownership.names.FOLDER_MARK, "releases/new", "models"):
            (tmp_path / str(number) / name).mkdir(parents=True)
        for name in ("known-answer-1.gguf", ".fetching"):
            (tmp_path / str(number) / "models" / name).touch()
        return tmp_path / str(number)

    def run(prefix):
        place = place_in(host_plan(prefix=str(prefix), units="/no"))
        return bool(ownership.remove(place, ownership.names.of("test"), "head", False)[0])

    broken = faults.Faults(monkeypatch, kind, tmp_path)
    assert failed_runs(broken, make, run, lambda prefix: list(prefix.rglob("*"))) > 6
    assert not [*(tmp_path / "whole").rglob("*")]


OLD = "b8600-cpu-0123abcd"


@pytest.mark.faults
@pytest.mark.parametrize("new", ["b8601-cpu-0123abcd", OLD], ids=["upgrade", "repair"])
def test_a_power_cut_leaves_what_serves(tmp_path, monkeypatch, call, untried, pair, new):
    """At each change of an upgrade, and where a release is installed once more, the definition names programs and a launcher that are whole."""
    archive, root = tmp_path / "programs.tar", tmp_path / "host"
    with tarfile.open(archive, "w") as opened:
        for name in TARGETS:
            (tmp_path / name).write_text(PROGRAM)
            (tmp_path / name).chmod(0o755)
            opened.add(tmp_path / name, name)
    root.mkdir()
    machine = test_services.machine_with("systemd", root, monkeypatch)
    prefix, unit = machine.prefix, str(machine.manager.path(HEAD).relative_to(root))
    (prefix / "plans").mkdir()
    record = rollbacks.record_of(rollbacks.placed(rollbacks.completed(pair), prefix), "head")

    def upgrade(identity, launcher):
        installer.Installer(str(prefix), NEW._replace(id=identity), None).unpack(builds.source_of(archive), 7)
        (prefix / "runtime" / launcher).mkdir(parents=True)
        (prefix / "runtime" / launcher / "new").write_text(launcher)  # as Ansible's module copy does
        os.replace(prefix / "runtime" / launcher / "new", prefix / "runtime" / launcher / "runtime.py")
        kept = rollbacks.with_id(record, len(launcher))
        rollbacks.begin(prefix, kept)
        machine.apply(test_services.defined(HEAD, f"runtime/{launcher}/runtime.py releases/{identity}/ -- "))
        plan_history.mark_served(str(prefix), kept["id"])
        places = {name: machine.host[name] for name in Place._fields}
        planned = host_plan(**{**places, "cache": str(root / "cache"), "builds": (build_plan(identity),)})
        return call(module=release_prune, host=typed_json.dump(planned)).get("removed")

    def serves(left):
        launcher, programs = left[unit].decode().split()[:2]
        assert left[f"prefix/{launcher}"].decode() == launcher.split("/")[1]
        manifest = json.loads(left[f"prefix/{programs}manifest.json"])
        assert [name for name in manifest["files"] if left[f"prefix/{programs}{name}"] != PROGRAM.encode()] == []
        assert any(json.loads(left[path])["state"] == "served" for path in left if re.match(r"prefix/plans/\w", path))

    assert upgrade(OLD, "first") == []
    cuts = faults.PowerCuts(monkeypatch, root, serves)
    assert upgrade(new, "second") == [OLD] * (new != OLD)
    cuts.step()
    assert cuts.count > 30
    assert f"releases/{new}/" in (root / unit).read_text()


def test_a_file_on_a_disk_that_is_really_full(small_disk):
    target = small_disk / "unit"
    files.replace_file(target, "old", 0o644)
    with (small_disk / "ballast").open("wb", buffering=0) as ballast:
        ballast.write(bytes(1 << 20))
    with pytest.raises(OSError, match="No space left") as raised:
        files.replace_file(target, "new" * 4096, 0o644)
    said = f"{target}: No space left on device. Free some space on {small_disk} (0 MiB and room for "
    assert errors.sentence(raised.value).startswith(said)
    assert faults.tree(small_disk, "ballast") == {"unit": (0o644, b"old")}
    assert sorted(path.name for path in small_disk.iterdir()) == ["ballast", "unit"]
    (small_disk / "ballast").unlink()
    files.replace_file(target, "new" * 4096, 0o644)
    assert faults.tree(small_disk) == {"unit": (0o644, b"new" * 4096)}
