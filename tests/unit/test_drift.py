"""How a host differs from its plan: real processes, and an installation in which one thing after the other is not as planned."""

import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import locks, names, typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.facts.installation import planned_paths
from ansible_collections.llamacpp.cluster.plugins.module_utils.host import services, tunnel_keys
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.builds import store
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.drift import processes, state
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.words import REPLACEMENTS_FILE
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import host_types
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.drift import Difference, Drift, ServiceState
from ansible_collections.llamacpp.cluster.plugins.modules import host_info
from support import builds
from support.hosts import build_plan, executable, free_port, host_plan, service_plan
from test_links import Machine

MODULE = host_info


@pytest.fixture
def installation(tmp_path, popen):
    """A prefix with a program that listens on the port that it is given."""
    program = executable(
        tmp_path / "bin" / "listener",
        f"#!{sys.executable}\nimport socket, sys, time\ns = socket.create_server(('127.0.0.1', int(sys.argv[1])))\nprint(1, flush=True)\ntime.sleep(60)\n",
    )

    def start(port, **environment):
        argv = [sys.executable, str(program), str(port)]
        process = popen(argv, stdout=subprocess.PIPE, env={**os.environ, **environment})
        process.stdout.readline()
        return process

    return tmp_path, program, start


def service(program, port, **changes):
    return service_plan([sys.executable, program, port], f"127.0.0.1:{port}", **changes)


def state_of(prefix, planned):
    running, sockets = processes.account_processes(str(prefix), None), processes.read_sockets()
    return state.service_state(planned, running, sockets)


def test_the_state_of_a_service(installation):
    prefix, program, start = installation
    port = free_port()
    planned = service(program, port, environment={"LLAMA_X": "1"})
    assert state_of(prefix, planned).state == "stopped"
    process = start(port, LLAMA_X="1")
    assert state_of(prefix, planned) == ("running", process.pid, ("127.0.0.1",), (), None)
    for different in (
        planned._replace(environment={"LLAMA_X": "2"}),
        planned._replace(argv=(*planned.argv, "-c"), process=(*planned.argv, "-c")),
        planned._replace(argv=("/usr/bin/python3", f"{prefix}/runtime.py", "--", *planned.process)),
    ):
        assert state_of(prefix, different).state == "different"
    waiting = service(program, free_port())._replace(argv=tuple(process.args))
    assert state_of(prefix, waiting) == ("waiting", process.pid, (), (), None)
    with socket.create_server(("127.0.0.1", 0)) as other:
        assert state_of(prefix, service(program, other.getsockname()[1])).state == "foreign"


def test_a_service_in_the_words_of_its_build_runs_as_planned(installation, popen):
    prefix, program, _start = installation
    (prefix / REPLACEMENTS_FILE).write_text('{"--ctx-size": "-c", "--fit": ""}')
    port, server = free_port(), str(prefix / "bin" / "llama-server")
    words = [server, str(program), str(port)]
    process = popen([*words, "-c", "8"], executable=sys.executable, stdout=subprocess.PIPE)
    process.stdout.readline()
    planned = service(program, port, process=(*words, "--ctx-size", "8", "--fit", "off"))
    fallback = planned._replace(process=("x",), fallbacks=(host_types.ServiceFallback("worker1", planned.process),))
    assert [state_of(prefix, one).pid for one in (planned, fallback)] == [process.pid] * 2
    assert state_of(prefix, fallback).fallback == "worker1"


def test_a_port_that_something_else_has_is_reported_with_its_variable():
    for kind, variable in (("worker", "port in llama_worker_endpoints"), ("head", "llama_server_port")):
        planned = service("x", 1, kind=kind)
        states = {planned.name: ServiceState("foreign", None, (), ())}
        assert state.port_problem([planned], states) == (
            f"Another program already uses 127.0.0.1:1, the port for llamacpp-worker-x: stop that program, or change {variable}."
        )
        assert state.port_problem([planned], {planned.name: ServiceState("stopped", None, (), ())}) is None


def test_host_info_fails_where_something_else_has_a_port(planned, call):
    (service,) = planned.host.services
    with socket.create_server(("127.0.0.1", int(service.listens.split(":")[1]))):
        result = call(plan=typed_json.dump(planned.host))
    assert result["failed"]
    assert result["msg"].startswith(f"Another program already uses {service.listens}, the port for {service.name}: ")
    assert result["drift"]["services"][service.name]["state"] == "foreign"


DEFINED = "; Written by llamacpp.cluster; the next run overwrites changes to this file.\n"


class Planned:
    """A host's part of a plan that a test changes."""

    def __init__(self, host):
        self.host = host
        self.prefix = Path(host.prefix)

    def change(self, **changes):
        self.host = self.host._replace(**changes)

    def runs(self, prefix, *services):
        """The installation is elsewhere, with these services alone."""
        self.change(prefix=str(prefix), folders=(), files=(), builds=(), services=services)

    def drift(self):
        return state.compare_host(self.host)

    def definition(self):
        """Path of the definition of its service."""
        return services.manager_of(planned_paths(self.host)).path("llamacpp-worker-x")

    def unneeded(self):
        return state.unneeded_releases(self.host)


@pytest.fixture
def planned(tmp_path):
    """An installation of a user that is as planned, apart from its process, which does not run."""
    units = tmp_path / "services"
    prefix = tmp_path / "prefix"
    release = prefix / "releases" / "here"
    units.mkdir()
    (release / "bin").mkdir(parents=True)
    (release / "bin" / "worker").write_text("program")
    digest = hashlib.sha256(b"program").hexdigest()
    (release / "manifest.json").write_text(json.dumps(builds.manifest_of({"bin/worker": digest})))
    (prefix / "model").write_text("model")
    (prefix / names.MARKER_FOLDER).mkdir()
    (units / "llamacpp-worker-x.conf").write_text(DEFINED)
    prefix.chmod(0o755)
    return Planned(
        host_plan(
            prefix=str(prefix),
            cache=str(tmp_path / "cache"),
            state=str(prefix / "state"),
            units=str(units),
            folders=(host_types.FolderPlan(str(prefix), None, "0755"),),
            files=(host_types.FilePlan(f"{prefix}/model", 5, sha256=hashlib.sha256(b"model").hexdigest()),),
            builds=(build_plan("here", "worker"),),
            services=(service(prefix / "x", free_port(), definition=DEFINED),),
        )
    )


STOPPED = (
    Difference("manager", "supervisor", "supervisor is not running"),
    Difference("service", "llamacpp-worker-x", "llamacpp-worker-x is stopped"),
)


def test_only_what_does_not_run_differs(planned):
    found = planned.drift()
    assert found.differences == STOPPED
    assert not [*found.unplanned, *found.missing_builds, *found.changed_files, *found.redefined]
    assert typed_json.parse(Drift, typed_json.dump(found)) == found


def test_the_known_answer_model_is_compared_by_its_size_and_time(planned):
    path = planned.prefix / "known-answer.gguf"
    planned.change(files=(host_types.FilePlan(str(path), 5),))
    for size, modified, changed in (
        (5, names.KNOWN_ANSWER_MTIME, False),
        (4, names.KNOWN_ANSWER_MTIME, True),
        (5, 9, True),
    ):
        path.write_bytes(bytes(size))
        os.utime(path, (modified, modified))
        assert bool(planned.drift().changed_files) is changed


def under_systemd(monkeypatch, planned, **changes):
    """The host with systemd, without any rule, link or kernel parameter."""
    planned.change(service_manager="systemd", **changes)
    monkeypatch.setattr(state, "System", lambda: Machine(planned.prefix.parent / "root").system)


RULE = host_types.FirewallRule(50052, ("192.0.2.10",), "192.0.2.11")
NFTABLES = {"firewall_manager": "nftables", "firewall": (RULE,)}
LINK = host_types.LinkPlan("eth1", "192.0.2.1/24", None, None, manage=True)
TUNING = host_types.KernelTuning({"ttm.pages_limit": "1"}, False)


def without_lingering(monkeypatch, planned):
    planned.change(service_manager="systemd_user")
    monkeypatch.setattr(state.os.path, "exists", lambda path: False)


def with_model(planned, size=7, sha256="a" * 64, recorded="a" * 64):
    """A model that is fetched: planned with this sha256, and recorded with another, or not at all."""
    path = planned.prefix / "models" / "it" / "m.gguf"
    path.parent.mkdir(parents=True)
    path.write_text("a model"[:size])
    entry = {"name": "m.gguf", "bytes": 7, "sha256": recorded, "modified": int(path.stat().st_mtime)}
    if recorded:
        path.with_name(".source.json").write_text(json.dumps({"files": [entry]}))
    url = "https://models.example.org/m.gguf"
    planned.change(model=(host_types.ModelFilePlan("m.gguf", "model", str(path), url, 7, sha256),))
    return str(path)


@pytest.mark.parametrize(
    "more, text",
    [
        ({}, None),
        ({"sha256": None}, None),
        ({"size": 3}, "is missing or has different content"),
        ({"sha256": "b" * 64}, "is missing or has different content"),
        ({"recorded": None}, "has not been checked, or has changed since its check"),
        ({"recorded": None, "sha256": None}, "has not been checked, or has changed since its check"),
    ],
)
def test_a_model_that_is_fetched_is_compared_with_its_record(planned, more, text):
    path = with_model(planned, **more)
    found = planned.drift()
    texts = [entry.text.removeprefix(f"model file {path} ") for entry in found.differences if entry.kind == "model"]
    assert texts == ([text] if text else [])
    assert found.model_files == ((path,) if text and "missing" in text else ())
    if not text:
        os.utime(path, (1, 1))
        (touched,) = (entry for entry in planned.drift().differences if entry.kind == "model")
        assert touched.text == f"model file {path} has not been checked, or has changed since its check"


def with_account(planned, name, *groups):
    planned.change(accounts=(host_types.AccountPlan(name, groups, "/"),))


def with_folder(planned, path, owner=None):
    planned.change(folders=(host_types.FolderPlan(path, owner, "0755"),))


def with_key(planned, mode=None):
    path = planned.prefix / "keys" / "192.0.2.11"
    planned.change(tunnel_keys=(str(path),))
    if mode is not None:
        path.parent.mkdir()
        path.write_text(tunnel_keys.line_of("0" * 64))
        path.chmod(mode)


SPOILED = [
    ("account", "account no-such is missing", lambda p, m: with_account(p, "no-such")),
    ("account", "account nobody is not in group video", lambda p, m: with_account(p, "nobody", "video")),
    ("account", "root is not in group no-such-group", lambda p, m: with_account(p, "root", "no-such-group")),
    ("folder", "folder /no/such is missing", lambda p, m: with_folder(p, "/no/such")),
    ("folder", "has mode 0700, planned: 0755", lambda p, m: p.prefix.chmod(0o700)),
    ("folder", "planned: nobody", lambda p, m: with_folder(p, str(p.prefix), "nobody")),
    ("release", "here is not installed", lambda p, m: (p.prefix / "releases/here/bin/worker").write_text("other")),
    ("release", "release gone is not installed", lambda p, m: p.change(builds=(build_plan("gone"),))),
    ("file", "model is missing or has different content", lambda p, m: (p.prefix / "model").write_text("other")),
    ("file", "model is missing or has different content", lambda p, m: (p.prefix / "model").unlink()),
    ("model", "is missing or has different content", lambda p, m: Path(with_model(p)).unlink()),
    ("definition", "definition of llamacpp-worker-x does not match", lambda p, m: p.definition().write_text("y")),
    ("definition", "does not match the plan", lambda p, m: p.definition().write_bytes(b"\xff" + DEFINED.encode())),
    ("boot", "llamacpp-worker-x does not start at boot", lambda p, m: under_systemd(m, p)),
    ("manager", "supervisor is not running", lambda p, m: None),
    ("manager", "stop at logout", lambda p, m: without_lingering(m, p)),
    ("firewall", "nftables do not match", lambda p, m: under_systemd(m, p, **NFTABLES)),
    ("link", "links do not match the plan", lambda p, m: under_systemd(m, p, links=(LINK,))),
    ("tuning", "kernel parameters do not match", lambda p, m: under_systemd(m, p, tuning=TUNING)),
    ("service", "llamacpp-worker-x is stopped", lambda p, m: None),
    ("unplanned", "llamacpp-worker-x is no longer planned", lambda p, m: p.change(services=())),
    ("key", "keys/192.0.2.11 has no valid key, or a wrong owner or mode", lambda p, m: with_key(p)),
    ("key", "keys/192.0.2.11 has no valid key, or a wrong owner or mode", lambda p, m: with_key(p, 0o644)),
    ("record", "plan 0123456789abcdef is not the last plan", lambda p, m: p.change(id="0123456789abcdef")),
    ("unneeded", "release .left is no longer needed", lambda p, m: (p.prefix / "releases" / ".left").mkdir()),
]
"""Kind of a difference, a part of its text, and what makes it."""


@pytest.mark.parametrize("kind, said, spoil", SPOILED)
def test_each_difference_is_found(planned, monkeypatch, kind, said, spoil):
    spoil(planned, monkeypatch)
    found = [difference for difference in planned.drift().differences if said in difference.text]
    assert [difference.kind for difference in found] == [kind]
    assert all(difference.subject for difference in found)


def test_files_of_one_folder_are_one_difference(planned):
    planned.change(files=[host_types.FilePlan(f"/no/such/{name}", 1) for name in ("a", "deep/b", "c")])
    found = [difference.text for difference in planned.drift().differences if difference.kind == "file"]
    assert found == [
        "2 files in /no/such are missing or have different content",
        "/no/such/deep/b is missing or has different content",
    ]


def test_a_key_is_reported_by_its_identity_alone(planned):
    with_key(planned, 0o600)
    found = planned.drift()
    assert found.tunnel_keys == {f"{planned.prefix}/keys/192.0.2.11": (tunnel_keys.identity_of("0" * 64),)}
    assert found.differences == STOPPED


def test_every_kind_of_difference_is_found():
    assert {kind for kind, _said, _spoil in SPOILED} == set(get_args(state.drift.DifferenceKind))


def test_a_link_that_must_not_be_touched_stops_before_anything_is_changed(planned, monkeypatch):
    under_systemd(monkeypatch, planned, links=(LINK._replace(interface="eth0"),))
    with pytest.raises(Refusal, match="carries the connection"):
        planned.drift()


def test_ports_that_the_plan_names_are_probed(planned, monkeypatch):
    monkeypatch.setattr(state.interfaces, "addresses", lambda: ["127.0.0.1", "127.0.0.9"])
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = f"127.0.0.1:{listener.getsockname()[1]}"
        planned.change(port_probes=(endpoint,))
        assert planned.drift().port_probes == ((endpoint, "127.0.0.9", True),)


@pytest.fixture
def running(planned, installation):
    """The host's part of a plan whose service runs."""
    prefix, program, start = installation
    port = free_port()
    start(port)
    planned.runs(prefix, service(program, port, definition=DEFINED))
    planned.installed = prefix
    note_start(planned)
    return planned


def note_start(planned):
    """As the run does that starts the service."""
    (service,) = planned.host.services
    read = {service.name: state.start_records.digest_of(service.definition, service.reads)}
    state.start_records.write_digests(planned.host.prefix, read)


@pytest.mark.parametrize(
    "replace",
    [
        lambda key, other: other.rename(key),
        lambda key, other: shutil.copy2(other, key),
        lambda key, other: (key.unlink(), key.symlink_to(other)),
        lambda key, other: key.unlink(),
        lambda key, other: (key.parent / names.START_DIGESTS_FILE).write_text("[]"),
    ],
)
def test_a_file_that_was_replaced_since_the_service_read_it(running, replace):
    """However old the other file is."""
    key, other = running.installed / "key", running.installed / "other"
    for path, text in ((other, "two"), (key, "one")):
        path.write_text(text)
        os.utime(path, (9, 9))
    (planned,) = running.host.services
    running.change(services=(planned._replace(reads=(str(key), "/not/there")),))
    assert running.drift().redefined == (planned.name,)
    note_start(running)
    assert running.drift().redefined == ()
    replace(key, other)
    assert running.drift().redefined == (planned.name,)


def test_a_definition_that_was_written_since_the_service_started(running):
    assert running.drift().redefined == ()
    (planned,) = running.host.services
    newer = DEFINED + "; newer\n"
    running.definition().write_text(newer)
    running.change(services=(planned._replace(definition=newer),))
    assert running.drift().redefined == (planned.name,)
    note_start(running)
    assert running.drift().redefined == ()


def test_a_model_counts_as_replaced_by_its_size_or_time(tmp_path, monkeypatch):
    model = tmp_path / "m.gguf"
    model.write_text("one")
    small = state.start_records.digest_of("", [str(model)])
    os.utime(model, (9, 9))
    assert state.start_records.digest_of("", [str(model)]) == small
    monkeypatch.setattr(state.start_records, "LARGE_FILE_BYTES", 1)
    large = state.start_records.digest_of("", [str(model)])
    os.utime(model, (8, 8))
    assert state.start_records.digest_of("", [str(model)]) != large


def identity(name, backend):
    return f"{name}-{backend}-0123abcd"


OF_TWO_BACKENDS = (build_plan(identity("b4", "hip")), build_plan(identity("b2", "vulkan")))


@pytest.fixture
def releases(planned):
    """Adds releases to the installation, each older than the one before."""
    folder = planned.prefix / "releases"

    def add(*names):
        for age, name in enumerate(names, start=1):
            (folder / name / "bin").mkdir(parents=True)
            os.utime(folder / name, (1e9 - age, 1e9 - age))
        return planned.unneeded

    return add


def test_a_planned_release_counts_before_it_is_installed(planned, releases):
    unneeded = releases("second", "third")
    planned.change(builds=(build_plan("coming"),))
    assert unneeded() == ["third", "second"]
    planned.change(builds=(build_plan("third"),))
    assert unneeded() == ["second"]


def test_the_last_releases_of_each_backend_are_kept(planned, releases):
    """Two backends of which one changed three times, each time put to use after all that the other has."""
    planned.change(builds=OF_TWO_BACKENDS)
    hip = [identity(name, "hip") for name in ("b4", "b3", "b2", "b1")]
    vulkan = [identity(name, "vulkan") for name in ("b2", "b1", "b0")]
    cpu = [identity(name, "cpu") for name in ("b1", "b0")]
    unneeded = releases(*hip, *vulkan, *cpu)
    assert unneeded() == [cpu[1], vulkan[2], hip[3], hip[2]]
    planned.change(prefix=f"{planned.prefix}/none")
    assert unneeded() == []


def test_what_is_kept_with_a_plan_counts_for_its_own_backend(planned, releases, monkeypatch):
    held = identity("b1", "hip")
    unneeded = releases(identity("b4", "hip"), identity("b3", "hip"), held, identity("b1", "vulkan"))
    planned.change(builds=OF_TWO_BACKENDS)
    monkeypatch.setattr(state.kept_plans, "kept_build_ids", lambda _prefix: {held})
    assert unneeded() == [identity("b3", "hip")]


def test_a_release_that_runs_is_kept(planned, releases, popen):
    unneeded = releases("second", "third")
    inside = planned.prefix / "releases" / "third" / "bin" / "listener"
    shutil.copy(shutil.which("sleep"), inside)
    running = popen([inside, "60"])
    assert unneeded() == ["second"]
    running.kill()
    running.wait()
    assert unneeded() == ["third"]


def test_what_a_build_works_on_now_stays(planned, releases, tmp_path, monkeypatch):
    unneeded = releases(".left", ".here", "damaged")
    monkeypatch.setattr(state.retention, "RETAINED_RELEASES", 1)
    (tmp_path / "cache").mkdir()
    with locks.hold(store.lock_path(tmp_path / "cache")):
        assert unneeded() == []
    assert unneeded() == [".left", "damaged"]


ZERO = "0" * 64
EMPTY = hashlib.sha256(b"").hexdigest()
MANIFESTS = [
    *(
        json.dumps({**builds.manifest_of({}), "files": files})
        for files in (
            {"bin/other": ZERO},
            {"/dev/zero": ZERO},
            {"bin/../../../../../dev/zero": ZERO},
            {"bin/worker": EMPTY, "bin/pipe": ZERO},
            {"bin/worker": EMPTY, "bin/zero": ZERO},
        )
    ),
    "[]",
]


def test_a_manifest_is_not_believed(planned):
    """Nothing outside the release is read, and nothing is waited for."""
    release = planned.prefix / "releases" / "here"
    os.mkfifo(release / "bin" / "pipe")
    (release / "bin" / "zero").symlink_to("/dev/zero")
    (release / "bin" / "worker").write_bytes(b"")
    assert planned.drift().missing_builds == ("here",)
    for manifest in MANIFESTS:
        (release / "manifest.json").write_text(manifest)
        assert planned.drift().missing_builds == ("here",), manifest


def test_the_archive_of_what_is_installed_is_told(planned):
    path = planned.prefix / "releases" / "here" / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "source": {"sha256": "a" * 64}}))
    assert planned.drift().archives == {}, "it was compiled"
    planned.change(builds=(build_plan("here", "worker")._replace(archives=("x.tar.gz",)),))
    assert planned.drift().archives == {"here": "a" * 64}
    path.unlink()
    assert planned.drift().archives == {}


def test_a_build_of_an_untrusted_builder_is_missing(planned):
    """Its manifest names the host that compiled it. If the head moves, another host builds, but nothing is compiled again."""
    path = planned.prefix / "releases" / "here" / "manifest.json"
    manifest = json.loads(path.read_text())
    (build,) = planned.host.builds
    planned.change(builds=(build._replace(trusted_builders=("new head", "old head")),))
    missing = {}
    for received in (None, "new head", "old head", "retired head"):
        path.write_text(json.dumps({**manifest, "received_from": received}))
        missing[received] = planned.drift().missing_builds
    assert missing == {None: (), "new head": (), "old head": (), "retired head": ("here",)}
