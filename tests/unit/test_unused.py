"""What nothing uses on a host's disk: that it is found, that nothing else is, and that exactly what is named goes."""

import errno
import fcntl
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names, typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.facts import host
from ansible_collections.llamacpp.cluster.plugins.module_utils.host import prune
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.builds import store
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.drift import processes, state
from ansible_collections.llamacpp.cluster.plugins.module_utils.models import download, model_files
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.drift import Drift
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import ModelFilePlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import Plan
from ansible_collections.llamacpp.cluster.plugins.module_utils.status import host_status
from ansible_collections.llamacpp.cluster.plugins.modules import prune as prune_module
from model_server import SHA, download_record_of, parsed, planned
from support import playbook_runs
from support.rollbacks import completed, record_of, serve
from test_status import answers_of, written

MODULE = prune_module
DAY = 86400


class Installation:
    """A cluster of one host, whose folders are in a folder of the test."""

    def __init__(self, folder, cluster):
        self.folder, self.prefix = folder, folder / "llamacpp"
        places = {
            "/opt/llamacpp": self.prefix,
            "/var/cache/llamacpp": folder / "cache",
            "/etc/systemd/system": folder / "units",
        }
        text = json.dumps(completed(cluster))
        for before, after in places.items():
            text = text.replace(before, str(after))
            after.mkdir()
        self.plan = json.loads(text)
        plan = typed_json.parse(Plan, self.plan)
        self.host, self.model = plan.hosts["here"], plan.model
        for name in ("plans", names.FOLDER_MARK):
            (self.prefix / name).mkdir()

    def write(self, path, size=1000, age=2 * DAY):
        """A file below the prefix that was used so long ago."""
        path = self.prefix / path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(size))
        os.utime(path, (time.time() - age,) * 2)
        return path

    def found(self, kinds=prune.KINDS):
        found = prune.find(self.host, self.model, kinds)
        return {entry.path[len(str(self.prefix)) + 1 :]: entry for entry in found}

    def remove(self, *kinds, check=False):
        removed = prune.remove(self.host, self.model, kinds, check)
        return [entry.path[len(str(self.prefix)) + 1 :] for entry in removed]

    def call(self, call, check=False, **changes):
        """Runs the module."""
        planned = {**self.plan["hosts"]["here"], **changes.pop("plan", {})}
        return call(check=check, plan=planned, model=self.plan["model"], **changes)

    def left(self):
        return {str(path.relative_to(self.prefix)) for path in self.prefix.rglob("*") if path.is_file()}


OF_PROCESSES = prune._of_processes


@pytest.fixture
def here(tmp_path, local, monkeypatch):
    """A host without other processes: reading those of this machine takes longer than a test."""
    monkeypatch.setattr(prune, "_of_processes", lambda: ())
    local.hosts["here"]["variables"]["llama_worker_endpoints"] = [
        {"name": "one", "port": 50052, "cache": True},
        {"name": "two", "port": 50053},
    ]
    made = Installation(tmp_path, local)
    monkeypatch.setattr(host, "place_of", lambda _scope, _cluster: host.place_in(made.host))
    return made


def old_things(here):
    """Something of each kind that nothing uses, and something of each that the plan uses."""
    model = Path(here.model.path).relative_to(here.prefix)
    build = here.host.builds[0].id
    for path in (model, f"{model}.1.sha256", "state/cache/one/rpc/abc", f"releases/{build}/bin/llama-server"):
        here.write(path)
    kept = here.left()
    here.write("models/known-answer-9x9-f32.gguf", 70)
    here.write("models/owner-repo-0123abcd/Q4_K_M.gguf", 5000, age=9 * DAY)
    here.write("models/owner-repo-0123abcd/.source.json", 10, age=9 * DAY)
    here.write("models/owner-repo-0123abcd/Q8_0.gguf.part", 7, age=9 * DAY)
    here.write("models/broken-89abcdef/a-00001-of-00002.gguf", 300)
    here.write("models/broken-89abcdef/a-00002-of-00002.gguf.part", 30)
    here.write("state/cache/two/rpc/0123", 200)
    here.write("state/cache/one-fast/rpc/0123", 150)
    here.write("releases/cpu-old/bin/llama-server", 400)
    here.write("llama-swap/llama-swap-old", 80)
    return kept


def test_what_nothing_uses_is_listed_with_its_size_and_age(here):
    old_things(here)
    found = here.found()
    assert {path: (item.kind, item.bytes) for path, item in found.items()} == {
        "models/owner-repo-0123abcd": ("models", 5017),
        "models/known-answer-9x9-f32.gguf": ("models", 70),
        "models/broken-89abcdef": ("parts", 330),
        "state/cache/two": ("caches", 200),
        "state/cache/one-fast": ("caches", 150),
        "releases/cpu-old": ("releases", 400),
        "llama-swap/llama-swap-old": ("releases", 80),
    }
    assert [item.bytes for item in found.values()] == sorted((item.bytes for item in found.values()), reverse=True)
    assert 9 * DAY <= next(iter(found.values())).age_s < 9 * DAY + 600
    assert set(here.found(["parts"])) == {"models/owner-repo-0123abcd/Q8_0.gguf.part", "models/broken-89abcdef"}


@pytest.mark.parametrize(
    "kind, gone",
    [
        ("models", ["models/owner-repo-0123abcd", "models/known-answer-9x9"]),
        ("parts", ["models/owner-repo-0123abcd/Q8_0.gguf.part", "models/broken-89abcdef"]),
        ("caches", ["state/cache/two", "state/cache/one-fast"]),
        ("releases", ["releases/cpu-old", "llama-swap/llama-swap-old"]),
    ],
)
def test_exactly_what_is_named_goes(here, kind, gone):
    old_things(here)
    before = here.left()
    removed = here.remove(kind, check=True)
    assert here.left() == before
    assert here.remove(kind) == removed
    assert len(removed) == 2
    assert here.left() == {path for path in before if not path.startswith(tuple(gone))}
    assert here.remove(kind) == []


def test_models_of_a_calibration_that_was_killed_go_and_no_record_of_a_benchmark(here):
    here.write("benchmarks/calibration-wide-q4_k-8.gguf", 60)
    here.write("benchmarks/20251122-150000-1a2b3c4d.json", 60)
    assert here.remove("models") == ["benchmarks/calibration-wide-q4_k-8.gguf"]


def test_a_name_that_begins_like_a_used_one_is_not_used(here):
    here.write("state/cache/one/rpc/x")
    here.write("state/cache/on/rpc/x")
    assert set(here.found()) == {"state/cache/on"}


def by_another_plan(here):
    """A kept plan of this cluster names it."""
    other = record_of(here.plan, "here")
    other["model"].update(path=f"{here.prefix}/models/owner-repo-0123abcd/Q4_K_M.gguf", known_answer=None)
    other["host"]["services"][0]["environment"]["LLAMA_CACHE"] = f"{here.prefix}/state/cache/two"
    other["host"]["builds"] = [{**other["host"]["builds"][0], "id": "cpu-old", "targets": ["llama-server"]}]
    serve(here.prefix, {**other, "id": f"{1:016x}"})


def by_another_cluster(here):
    """A kept plan of another cluster on the host names it."""
    prefix = here.folder / "llamacpp-night"
    (prefix / "plans").mkdir(parents=True)
    other = json.loads(json.dumps(record_of(here.plan, "here")).replace(str(here.prefix), str(prefix)))
    other["model"].update(path=f"{here.prefix}/models/owner-repo-0123abcd/Q4_K_M.gguf", known_answer=None)
    words = ["--cache", f"{here.prefix}/state/cache/two", f"{here.prefix}/releases/cpu-old/bin/x"]
    other["host"]["services"][0]["argv"] += words
    serve(prefix, {**other, "id": f"{2:016x}"})


def by_a_definition(here):
    words = [
        f"{here.prefix}/{path}"
        for path in ("models/owner-repo-0123abcd/Q4_K_M.gguf", "state/cache/two", "releases/cpu-old/bin/x")
    ]
    (here.folder / "units" / "mine.service").write_text(
        f"[Service]\nExecStart=/x {words[0]}\nEnvironment=A={words[1]} B={words[2]}\n"
    )


@pytest.mark.parametrize("use", [by_another_plan, by_another_cluster, by_a_definition])
def test_what_somebody_names_stays(here, use):
    old_things(here)
    use(here)
    assert set(here.found()) == {
        "models/known-answer-9x9-f32.gguf",
        "models/broken-89abcdef",
        "state/cache/one-fast",
        "llama-swap/llama-swap-old",
    }
    here.remove(*prune.KINDS)
    named = {f"models/owner-repo-0123abcd/{name}" for name in ("Q4_K_M.gguf", "Q8_0.gguf.part")}
    assert {*named, "state/cache/two/rpc/0123", "releases/cpu-old/bin/llama-server"} <= here.left()


def test_files_of_a_download_that_stopped_between_two_of_them_are_listed(here, server):
    """The second one is not what was planned, so neither a part nor a record is there."""
    folder = here.prefix / "models" / "owner-two-0123abcd"
    files = [
        planned(server, folder, name, path=str(folder / name), url=f"{server.url}/m.gguf", sha256=sha)
        for name, sha in (("a-00001-of-00002.gguf", SHA), ("a-00002-of-00002.gguf", "0" * 64))
    ]

    def run():
        wanted, records = parsed(files, [download_record_of(folder)])
        download.download(wanted, here.prefix / "models", records, None)

    with pytest.raises(Refusal, match="has the sha256"):
        run()
    found = here.found()["models/owner-two-0123abcd"]
    assert found.kind == "parts"
    files[1]["sha256"] = SHA
    run()
    assert here.found()["models/owner-two-0123abcd"].kind == "models"
    assert not list(folder.glob(f"*{model_files.PART}"))


@pytest.mark.skipif(sys.platform == "darwin", reason="what processes have open is read from /proc")
@pytest.mark.parametrize("how", ["open", "mapped", "named"])
def test_what_a_process_uses_stays(here, monkeypatch, how):
    monkeypatch.setattr(prune, "_of_processes", OF_PROCESSES)
    old_things(here)
    path = here.prefix / "models/owner-repo-0123abcd/Q4_K_M.gguf"
    program = {
        "open": "f = open(sys.argv[1].split('=')[1])",
        "mapped": "import mmap; f = open(sys.argv[1].split('=')[1]); m = mmap.mmap(f.fileno(), 0, prot=1); f.close()",
        "named": "",
    }[how]
    argument = f"x={path}" if how == "named" else f"x={path.parent}/../owner-repo-0123abcd/{path.name}"
    code = f"import sys, time; {program}\nprint('ready', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code, argument], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        found = here.found()
        process.kill()
    assert "models/owner-repo-0123abcd" not in found
    assert "models/owner-repo-0123abcd" in here.found()


def test_a_download_keeps_models_and_parts(here):
    old_things(here)
    part = ModelFilePlan("a", f"{here.prefix}/models/broken-89abcdef/a-00002-of-00002.gguf", None, 1, None, "model")
    here.model = here.model._replace(files=(part,))
    assert "models/broken-89abcdef" not in here.found()
    lock = os.open(here.write("models/.fetching"), os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    assert {item.kind for item in here.found().values()} == {"caches", "releases"}
    before = here.left()
    with pytest.raises(
        Refusal, match="fetches a model on this host: wait for it, or leave models and parts out of llama_clean"
    ):
        here.remove("parts", "caches")
    assert here.left() == before
    assert here.remove("caches")
    os.close(lock)
    assert here.remove("models")


def test_what_is_not_ours_is_left_alone(here, tmp_path):
    """An operator's models below the installation, and whatever links lead to."""
    old_things(here)
    mine = [f"models/mine{name}" for name in (".gguf", "/x.gguf", ".gguf.part", "-20250101/x.gguf")]
    for path in mine:
        here.write(path)
    elsewhere = tmp_path / "elsewhere-0123abcd"
    elsewhere.mkdir()
    (elsewhere / "x.gguf").write_text("x")
    (here.prefix / "models" / "linked-0123abcd").symlink_to(elsewhere)
    (here.prefix / "models" / "known-answer-1x1-f32.gguf").symlink_to(elsewhere / "x.gguf")
    (here.prefix / "models" / "owner-repo-0123abcd" / "link.gguf").symlink_to(elsewhere / "x.gguf")
    (here.prefix / "state" / "cache" / "linked").symlink_to(elsewhere)
    (here.prefix / "releases" / "linked").symlink_to(elsewhere)
    assert not [path for path in here.found() if "mine" in path or "linked" in path or "1x1" in path]
    here.remove(*prune.KINDS)
    assert (elsewhere / "x.gguf").read_text() == "x"
    assert set(mine) <= here.left()
    assert not (here.prefix / "models" / "owner-repo-0123abcd").exists()


@pytest.mark.parametrize("folder", ["state", "state/cache", "releases"])
def test_a_folder_of_ours_that_is_a_link_is_not_looked_into(here, tmp_path, folder):
    old_things(here)
    real = tmp_path / "real"
    (here.prefix / folder).rename(real)
    (here.prefix / folder).symlink_to(real)
    assert not [path for path in here.found() if path.startswith(folder)]


def test_a_folder_that_becomes_a_link_meanwhile_is_not_followed(here, tmp_path):
    """The account of workers owns the folder of caches, and may put a link there when root removes."""
    old_things(here)
    (item,) = (item for item in here.found().values() if item.path.endswith("cache/two"))
    real = tmp_path / "real"
    (here.prefix / "state" / "cache").rename(real)
    (here.prefix / "state" / "cache").symlink_to(real)
    with pytest.raises(OSError, match=r"Not a directory|Too many levels") as raised:
        prune._remove(here.host, item)
    assert raised.value.errno in (errno.ELOOP, errno.ENOTDIR)
    assert (real / "two" / "rpc" / "0123").exists()


def test_where_a_kept_plan_cannot_be_read_nothing_is_removed(here):
    old_things(here)
    (here.prefix / "plans" / f"{1:016x}.json").write_text("torn")
    before = here.left()
    with pytest.raises(Refusal, match=r"it is not known what a kept plan uses: .*Remove that file"):
        here.remove(*prune.KINDS)
    assert here.left() == before


def test_in_a_folder_without_our_mark_nothing_is_found_and_nothing_removed(here, call):
    old_things(here)
    (here.prefix / names.FOLDER_MARK).rmdir()
    before = here.left()
    assert not here.found()
    said = here.call(call, kinds=list(prune.KINDS))["msg"]
    assert said.startswith(f"{here.prefix} has no .llamacpp.cluster, so")
    assert said.endswith("nothing is removed there: run site.yml first")
    assert here.left() == before


def on_another_disk(here, tmp_path):
    """``models`` as a link to a folder on another disk, as an operator makes it."""
    disk = tmp_path / "disk"
    (here.prefix / "models").rename(disk)
    (here.prefix / "models").symlink_to(disk)
    return disk


def test_the_folder_of_models_may_be_a_link_to_another_disk(here, tmp_path):
    old_things(here)
    expected, disk = set(here.found()), on_another_disk(here, tmp_path)
    assert set(here.found()) == expected
    assert here.remove("models", "parts")
    assert sorted(path.name for path in disk.iterdir()) == [
        Path(here.model.path).name,
        f"{Path(here.model.path).name}.1.sha256",
    ]
    assert (here.prefix / "models").is_symlink()


def test_a_model_behind_that_link_which_a_process_has_open_is_used(here, tmp_path, monkeypatch):
    """The process names it by the path behind the link."""
    old_things(here)
    disk = on_another_disk(here, tmp_path)
    monkeypatch.setattr(prune, "_of_processes", lambda: [f"{disk}/owner-repo-0123abcd/Q4_K_M.gguf"])
    monkeypatch.setattr(processes, "of_account", lambda *_arguments: {})
    if sys.platform != "darwin":
        assert "models/owner-repo-0123abcd" not in here.found()
    assert "models/known-answer-9x9-f32.gguf" in here.found()


def test_a_model_that_is_named_by_where_the_link_leads_is_used(here, tmp_path):
    """That path has a link in it, too."""
    old_things(here)
    disk = on_another_disk(here, tmp_path)
    (tmp_path / "data").symlink_to(tmp_path)
    (here.prefix / "models").unlink()
    (here.prefix / "models").symlink_to("../data/disk")
    assert disk.samefile(here.prefix / "models")
    assert "models/owner-repo-0123abcd" in here.found()
    here.model = here.model._replace(path=f"{tmp_path}/data/disk/owner-repo-0123abcd/Q4_K_M.gguf")
    assert "models/owner-repo-0123abcd" not in here.found()


def test_a_model_of_another_cluster_that_shares_the_folder_behind_the_link_is_used(here, tmp_path):
    """The other cluster is stopped, and its plan names the model by its own link."""
    old_things(here)
    disk, other = on_another_disk(here, tmp_path), tmp_path / "llamacpp-other"
    (other / "plans").mkdir(parents=True)
    (other / "models").symlink_to(disk)
    assert "models/owner-repo-0123abcd" in here.found()
    text = json.dumps(record_of(here.plan, "here"))
    kept = json.loads(text.replace(str(here.prefix), str(other)))
    kept["model"]["path"] = f"{other}/models/owner-repo-0123abcd/Q4_K_M.gguf"
    (other / "plans" / f"{kept['id']}.json").write_text(json.dumps(kept))
    assert prune.plan_history.read_all(str(other)).records
    assert "models/owner-repo-0123abcd" not in here.found()
    assert "models/owner-repo-0123abcd" not in here.remove("models", "parts")


@pytest.mark.parametrize("mode", [0o775, 0o757])
def test_a_link_of_models_that_another_account_can_have_put_there_is_not_followed(here, tmp_path, mode):
    old_things(here)
    disk = on_another_disk(here, tmp_path)
    before = sorted(disk.rglob("*"))
    here.prefix.chmod(mode)
    assert not any(path.startswith("models") for path in here.found())
    assert not here.remove("models", "parts")
    assert sorted(disk.rglob("*")) == before


def test_a_prefix_that_is_a_link(here, tmp_path):
    """As where /opt is on another disk: definitions may name either path."""
    old_things(here)
    real = tmp_path / "disk"
    here.prefix.rename(real)
    here.prefix.symlink_to(real)
    (here.folder / "units" / "mine.service").write_text(
        f"[Service]\nExecStart=/x {real}/models/owner-repo-0123abcd/Q4_K_M.gguf\n"
    )
    found = here.found()
    assert "models/owner-repo-0123abcd" not in found
    assert "state/cache/one" not in found
    assert {"state/cache/two", "releases/cpu-old"} <= set(found)


def test_a_release_that_is_built_now_stays(here, monkeypatch):
    old_things(here)
    here.write("releases/.cpu-new/bin/x")
    monkeypatch.setattr(store, "under_way", lambda _cache, identity: identity == "cpu-new")
    assert "releases/.cpu-new" not in here.found()
    monkeypatch.setattr(store, "under_way", lambda _cache, _identity: False)
    assert "releases/.cpu-new" in here.remove("releases")
    assert not (here.prefix / "releases" / ".cpu-new").exists()


@pytest.mark.programs
def test_the_playbook_says_what_is_wrong_with_the_names_before_it_takes_the_lease(tmp_path):
    (tmp_path / "llamacpp").mkdir()
    variables = {"llama_host_scope": "user", "llama_model_known_answer": {"layers": 2, "width": 256, "type": "f32"}}
    groups = {"llama_head": {"hosts": {"localhost": playbook_runs.LOCAL}}, "llama_workers": {"hosts": {}}}
    _status, printed = playbook_runs.run(
        tmp_path,
        playbook_runs.ROOT / "playbooks/clean.yml",
        {"llama_cluster": {"children": groups, "vars": variables}},
        XDG_DATA_HOME=str(tmp_path),
        XDG_CACHE_HOME=str(tmp_path / "cache"),
    )
    assert "llama_clean names nothing: use models, parts" in printed
    assert not (tmp_path / "llamacpp" / "lease.lock").exists()


def test_the_module(here, call):
    old_things(here)
    assert here.call(call, kinds=[])["msg"] == (
        "llama_clean names nothing: use models, parts, caches, releases, one or several. playbooks/status.yml lists what nothing uses."
    )
    assert "value of kinds must be one or more of" in here.call(call, kinds=["all"])["msg"]
    before = here.left()
    shown = here.call(call, check=True, kinds=["caches"])
    assert (shown["changed"], here.left()) == (True, before)
    done = here.call(call, kinds=["caches"])
    assert done["lines"] == shown["lines"]
    assert (
        done["lines"][0] == f"caches {here.prefix}/state/cache/two, 0.0 MB: no planned worker and no kept plan uses it"
    )
    assert here.call(call, kinds=["caches"])["changed"] is False
    (here.prefix / "plans" / f"{1:016x}.json").write_text("torn")
    assert "it is not known what a kept plan uses" in here.call(call, kinds=["caches"])["msg"]


@pytest.mark.parametrize("key", ["scope", "service_manager", "prefix", "cache", "units"])
def test_a_head_does_not_choose_where_files_are_removed(here, call, tmp_path, key):
    """The plan is made of the facts that it keeps, and root removes."""
    old_things(here)
    before = here.left()
    said = here.call(call, plan={key: str(tmp_path / "evil")}, kinds=["caches"])["msg"]
    assert f"{key} is '{tmp_path}"[:30] in said
    assert "in the facts that the head keeps" in said
    assert "run site.yml" in said
    assert here.left() == before


def test_a_removal_that_fails_names_the_path_and_the_next_run_goes_on(here, call, monkeypatch):
    old_things(here)

    def refuse(*_arguments, **_named):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), "0123")

    with monkeypatch.context() as broken:
        broken.setattr(prune.os, "unlink", refuse)
        said = here.call(call, kinds=["caches"])
    assert said["failed"]
    assert f"{here.prefix}/state/cache/two: Read-only file system" in said["msg"]
    assert len(here.remove("caches")) == 2


def test_a_host_reports_it_with_its_condition(here, monkeypatch):
    old_things(here)
    monkeypatch.setattr(state, "drift", lambda _planned: Drift({}, *[()] * 10))
    found = host_status.read("llama_cluster", "user", here.host, None, here.model)[1].unused
    assert {entry.kind for entry in found} == set(prune.KINDS)
    assert host_status.read("llama_cluster", "user", here.host, None)[1].unused is None

    def refuse(*_arguments):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(prune, "_measure", refuse)
    assert host_status.read("llama_cluster", "user", here.host, None, here.model)[1].unused is None


def entry(kind, size, age):
    found = {"kind": kind, "bytes": size, "age_s": age}
    return {**found, "path": "/opt/llamacpp/models/x-0123abcd", "why": "no plan names it"}


def test_status_shows_it(pair, tmp_path):
    plan = pair.plan()
    answers = answers_of(plan)
    told, error, shown = written(plan, answers, tmp_path)
    assert (error, told["hosts"][0]["unused"], "unused" in shown) == ("", None, False)
    unused = (("models", 120 * 10**9, 3 * DAY), ("models", 10**9, 2 * DAY), ("parts", 10**8, 60))
    answers["head"]["condition"]["unused"] = [entry(*one) for one in unused]
    told, error, shown = written(plan, answers, tmp_path)
    assert error == ""
    assert len(told["hosts"][0]["unused"]) == 3
    text = " ".join(shown.split())
    assert (
        "unused head: 121.0 GB of models (2, the newest unused for 2 d), 100 MB of parts (1, the newest unused for 1 min)"
        in text
    )
    assert "playbooks/clean.yml removes what llama_clean names" in text
    answers["head"]["condition"]["unused"] = [entry("everything", 1, 1)]
    assert "could not be examined" in written(plan, answers, tmp_path)[1]
