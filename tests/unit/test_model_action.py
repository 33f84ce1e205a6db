"""How a model gets onto a host: the action plugin, which compares, sends, waits and shows, run by ansible-playbook and by itself."""

import hashlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import types
from contextlib import suppress
from pathlib import Path
from unittest import mock

import pytest
import yaml
from ansible.errors import AnsibleActionFail, AnsibleError
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import reading
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.host import services
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.drift import state
from ansible_collections.llamacpp.cluster.plugins.module_utils.models import download as on_host
from ansible_collections.llamacpp.cluster.plugins.module_utils.models import downloaded
from ansible_collections.llamacpp.cluster.plugins.modules import cache_prefill_info, gguf_info
from ansible_collections.llamacpp.cluster.plugins.modules import model as module
from ansible_collections.llamacpp.cluster.plugins.plugin_utils import background
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.models import push, resolver
from model_server import DATA, SHA, SIZE, answer
from test_fetching import below, planned
from test_model_sources import request_of

ROOT = Path(__file__).resolve().parents[2]


# ---------------------------------------------------------------------------------------------------------- ansible-playbook


class Playbook:
    """Runs the task of the role on this machine, in a process of its own."""

    def __init__(self, folder, models):
        self.folder, self.models = folder, models
        self.arguments = {"state": "fetched", "folder": str(models)}
        self.arguments["records"] = [{"path": str(models / "source" / ".source.json"), "asked": {"url": ["it"]}}]

    def start(self, files, *options, **more):
        task = {"llamacpp.cluster.model": {**self.arguments, "files": files, **more}}
        play = {"hosts": "localhost", "gather_facts": False, "tasks": [task]}
        (self.folder / "run.yml").write_text(yaml.safe_dump([play]))
        program = Path(sys.executable).with_name("ansible-playbook")
        return subprocess.Popen(
            [
                program,
                "-i",
                "localhost,",
                "-c",
                "local",
                "run.yml",
                "-e",
                f"ansible_python_interpreter={sys.executable}",
                *options,
            ],
            cwd=self.folder,
            env={
                **os.environ,
                "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
                "ANSIBLE_NOCOLOR": "1",
                "ANSIBLE_HOME": str(self.folder / "ansible"),
                "ANSIBLE_REMOTE_TMP": str(self.folder / "ansible" / "tmp"),
                "ANSIBLE_ASYNC_DIR": str(self.folder / "ansible" / "async"),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, files, *options, **more):
        return " ".join(self.start(files, *options, **more).communicate(timeout=50)[0].split())


@pytest.fixture
def playbook(tmp_path, models):
    return Playbook(tmp_path, models)


@pytest.mark.programs
def test_check_mode_says_what_would_be_fetched_and_asks_no_server(server, models, playbook):
    part = models / "source" / "m.gguf.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(DATA[:1_000_000])
    said = playbook.run([planned(server, models)], "--check", "--diff")
    assert f"[localhost] m.gguf: 2.0 MB to fetch from {server.url}/m.gguf, 1.0 MB of it are there" in said
    assert f"+{models}/source/m.gguf ({SIZE} bytes)" in said
    assert "changed=1" in said
    assert not server.asked
    assert below(models) == ["source/m.gguf.part"]


@pytest.mark.programs
def test_a_second_run_changes_nothing_and_asks_no_server(server, models, playbook):
    files = [planned(server, models)]
    assert "changed=1" in playbook.run(files)
    assert below(models) == [".fetching", "source/.source.json", "source/m.gguf"]
    asked = len(server.asked)
    assert "changed=0" in playbook.run(files)
    assert len(server.asked) == asked


@pytest.mark.programs
def test_why_a_server_refuses_reaches_the_operator_and_the_token_does_not(server, models, playbook, tmp_path):
    server.faults["/m.gguf"] = answer(403)
    (tmp_path / "token").write_text("hf_secret\n")
    (tmp_path / "token").chmod(0o600)
    said = playbook.run([planned(server, models)], "-vvv", token_file=str(tmp_path / "token"))
    assert "m.gguf needs permission (HTTP 403): the token of llama_model_token_file is not entitled to it" in said
    assert server.asked[0][1]["Authorization"] == "Bearer hf_secret"
    assert "hf_secret" not in said


@pytest.mark.programs
def test_while_a_model_is_fetched_its_token_is_in_no_file_argument_or_environment(server, models, playbook, tmp_path):
    seen = {}

    def look(handler):
        places = [path for path in (tmp_path / "ansible").rglob("*") if path.is_file()]
        for path in [*places, *Path("/proc").glob("[0-9]*/cmdline"), *Path("/proc").glob("[0-9]*/environ")]:
            with suppress(OSError):
                seen[path] = b"hf_secret" in path.read_bytes()
        server.send(handler, DATA)

    server.faults["/m.gguf"] = look
    (tmp_path / "token").write_text("hf_secret\n")
    (tmp_path / "token").chmod(0o600)
    assert "changed=1" in playbook.run([planned(server, models)], token_file=str(tmp_path / "token"))
    assert server.asked[0][1]["Authorization"] == "Bearer hf_secret"
    assert any("AnsiballZ_model" in path.name for path in seen), "the module lies there while it runs"
    assert not [path for path, has in seen.items() if has]


def test_a_token_that_does_not_come_is_waited_for_with_an_end(tmp_path, monkeypatch):
    monkeypatch.setattr(on_host, "TOKEN_SECONDS", 0.01)
    with pytest.raises(Refusal, match="did not come: run the playbook again"):
        on_host.take_token(str(tmp_path / "pipe"))
    assert not list(tmp_path.iterdir())
    early = [sys.executable, "-c", push.HAND_OVER.replace("range(100)", "range(1)"), str(tmp_path / "pipe")]
    assert subprocess.run(early, input=b"secret\n", check=False).returncode == 1, "it is handed over again"


@pytest.mark.programs
def test_a_download_goes_on_when_the_controller_is_killed_and_the_next_run_waits_for_it(server, models, playbook):
    waits = threading.Event()

    def slowly(handler):
        answer(206, Content_Range=f"bytes 0-{SIZE - 1}/{SIZE}", Content_Length=SIZE)(handler)
        while server.sent < SIZE:
            more = SIZE if waits.wait(0.2) else server.sent + 1000
            handler.wfile.write(DATA[server.sent : more])
            server.sent = min(more, SIZE)

    server.faults["/m.gguf"] = [slowly]
    files = [planned(server, models)]
    killed = playbook.start(files)
    part = models / "source" / "m.gguf.part"
    until = time.monotonic() + 30
    while not (part.exists() and part.stat().st_size) and time.monotonic() < until:
        time.sleep(0.1)
    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=10)
    second = playbook.start(files)
    assert any("to fetch from" in line for line in second.stdout)
    waits.set()
    assert "changed=1" in second.communicate(timeout=40)[0]
    assert (models / "source" / "m.gguf").read_bytes() == DATA
    assert server.sent == SIZE
    assert len(server.asked) == 1


# ------------------------------------------------------------------------------------------------------- a mount that hangs

MODULE, FROM, AT = module, types.SimpleNamespace(url="http://x"), {"prefix": None, "timeout": 9}
READERS = {
    "compared": lambda path, call: call(state="compared", folder=path, files=[planned(FROM, Path(path))]),
    "found": lambda path, call: call(paths=[path]),
    "header": lambda path, call: call(path=path),
    "tensors": lambda path, call: call(path=path),
    "fetched": lambda path, call: state._model({"files": [planned(FROM, Path(path))], "records": []}),
    "running": lambda path, call: services.versions([path]),
    "copy": lambda path, call: resolver._all(None, {}, request_of(llama_model_copy=path), AT),
    "sent": lambda path, call: push._Sender._send(None, downloaded.File("", None, f"file:{path}", 9, None, "", None)),
}


def hanging(real):
    return lambda path, *given, **more: ("hung" in str(path) and time.sleep(0.3)) or real(path, *given, **more)


@pytest.mark.parametrize("reader", READERS)
def test_a_mount_that_hangs_is_named_with_its_host(tmp_path, monkeypatch, call, reader):
    within, path = reading.within, str(tmp_path / "hung")
    for name in ("stat", "open"):
        monkeypatch.setattr(os, name, hanging(getattr(os, name)))
    monkeypatch.setattr(reading, "within", lambda _seconds, work: within(0.05, work))
    monkeypatch.setattr(resolver, "_known", lambda *_arguments: "known")
    monkeypatch.setattr(
        sys.modules[__name__], "MODULE", {"header": gguf_info, "tensors": cache_prefill_info}.get(reader, module)
    )
    try:
        said = str(READERS[reader](path, call))
    except (Refusal, OSError) as error:
        said = str(error)
    assert re.search(
        rf"{path}\S* on {platform.node()} could not be read within 0.05 s: check the disk or network", said
    )


# ------------------------------------------------------------------------------------------------------------ pieces and lines


class Action:
    """An action plugin whose host is this process."""

    def __init__(self, place, **arguments):
        self._task = types.SimpleNamespace(args={"state": "fetched", **arguments}, async_val=0, check_mode=False)
        self._connection = types.SimpleNamespace(_shell=types.SimpleNamespace(tmpdir=None, join_path=os.path.join))
        self.place, self.calls, self.broken, self.pipes = place, [], None, []

    def _make_tmp_path(self):
        self._connection._shell.tmpdir = str(self.place / "tmp")
        (self.place / "tmp").mkdir(exist_ok=True)
        return self._connection._shell.tmpdir

    def _transfer_file(self, local, remote):
        self.calls.append("transfer")
        if self.broken is not None and self.calls.count("transfer") > self.broken:
            raise AnsibleError("failed to transfer file: No space left on device")
        shutil.copyfile(local, remote)

    def _fixup_perms2(self, paths):
        pass

    def _execute_module(self, module_args, task_vars, module_name=None, wrap_async=False):
        if module_name:
            return {"finished": True, **self.result}
        given = {"records": [], "fetched_by": "head", "token_pipe": None, "digest": False, **module_args}
        self.calls.append(given["state"])
        self.pipes.append(given["token_pipe"])
        try:
            with mock.patch.object(on_host, "take_token", return_value="hf_secret"):
                result = json.loads(json.dumps(module.run(given, self._task.check_mode)))
        except ValueError as error:
            result = {"failed": True, "msg": str(error)}
        if wrap_async:
            self.result = result
            return {"ansible_job_id": "j1.2"}
        return result

    def get_shell_option(self, _name, default):
        return default

    def run(self):
        return push.run(self, {"inventory_hostname": "head"})


@pytest.fixture
def copied(tmp_path, models, monkeypatch):
    """A model of the controller, and how it is planned."""
    monkeypatch.setattr(push, "PIECE", 1_000_000)
    monkeypatch.setattr(push, "PAUSES", ())
    monkeypatch.setattr(push.C, "DEFAULT_LOCAL_TMP", str(tmp_path))
    monkeypatch.setattr(background.time, "sleep", lambda seconds: None)
    source = tmp_path / "with space.gguf"
    source.write_bytes(DATA)
    return source, {
        "name": "m.gguf",
        "path": str(models / "source" / "m.gguf"),
        "url": source.as_uri(),
        "bytes": SIZE,
        "sha256": None,
        "role": "model",
    }


def test_a_file_of_the_controller_is_sent_in_pieces(copied, tmp_path, models):
    action = Action(tmp_path, files=[copied[1]], folder=str(models))
    result = action.run()
    assert result["changed"]
    assert result["digests"] == {copied[1]["path"]: SHA}
    assert action.calls == ["compared", "held", *["transfer", "received"] * 3, "fetched"]
    assert Path(copied[1]["path"]).read_bytes() == DATA
    again = Action(tmp_path, files=[copied[1]], folder=str(models))
    assert not again.run()["changed"]
    assert again.calls == ["compared"]


def test_sending_goes_on_where_it_stopped(copied, tmp_path, models):
    action = Action(tmp_path, files=[copied[1]], folder=str(models))
    action.broken = 2
    with pytest.raises(AnsibleActionFail, match=r"piece of m\.gguf could not be sent .*No space left.*goes on there"):
        action.run()
    assert Path(copied[1]["path"] + ".part").stat().st_size == 2 << 20
    action = Action(tmp_path, files=[copied[1]], folder=str(models))
    assert action.run()["digests"] == {copied[1]["path"]: SHA}
    assert action.calls.count("transfer") == 1


def test_what_was_sent_of_another_file_is_not_kept(copied, tmp_path, models):
    part = Path(copied[1]["path"] + ".part")
    part.parent.mkdir(parents=True)
    part.write_bytes(bytes(1_000_000))
    action = Action(tmp_path, files=[copied[1]], folder=str(models))
    assert action.run()["digests"] == {copied[1]["path"]: SHA}
    assert action.calls.count("transfer") == 3


def test_a_file_of_the_controller_that_has_changed_is_named(copied, tmp_path, models):
    copied[0].write_bytes(DATA + b"x")
    with pytest.raises(
        AnsibleActionFail, match=rf"with space\.gguf has {SIZE + 1} bytes, and had {SIZE} when it was planned"
    ):
        Action(tmp_path, files=[copied[1]], folder=str(models)).run()
    copied[0].unlink()
    with pytest.raises(AnsibleActionFail, match=r"On the controller: .*with space\.gguf: No such file"):
        Action(tmp_path, files=[copied[1]], folder=str(models)).run()


def test_a_file_of_the_controller_that_is_not_what_its_checksum_says_is_removed(copied, tmp_path, models):
    file = {**copied[1], "sha256": SHA}
    copied[0].write_bytes(DATA[:-1] + b"x")
    result = Action(tmp_path, files=[file], folder=str(models)).run()
    assert result["failed"]
    assert f"has the sha256 {hashlib.sha256(copied[0].read_bytes()).hexdigest()}, planned is {SHA}" in result["msg"]
    assert not [path for path in models.rglob("*") if "m.gguf" in path.name]
    copied[0].write_bytes(DATA)
    assert Action(tmp_path, files=[file], folder=str(models)).run()["changed"]
    assert Path(file["path"]).read_bytes() == DATA


def test_a_piece_that_is_damaged_on_its_way_is_not_added(copied, tmp_path, models, monkeypatch):
    real = shutil.copyfile
    monkeypatch.setattr(shutil, "copyfile", lambda source, target: Path(target).write_bytes(b"other"))
    with pytest.raises(AnsibleActionFail, match=r"is not what the controller sent"):
        Action(tmp_path, files=[copied[1]], folder=str(models)).run()
    assert Path(copied[1]["path"] + ".part").stat().st_size == 0
    monkeypatch.setattr(shutil, "copyfile", real)
    assert Action(tmp_path, files=[copied[1]], folder=str(models)).run()["changed"]


def test_the_controller_fetches_for_a_head_without_a_way_out(copied, server, tmp_path, models):
    server.cut = 700_000
    file = planned(server, models)
    action = Action(tmp_path, files=[file], folder=str(models), fetched_by="controller")
    action.broken = 1
    with pytest.raises(AnsibleActionFail, match="goes on there"):
        action.run()
    kept = Path(file["path"] + ".part").stat().st_size
    assert 1_000_000 <= kept < SIZE
    asked = len(server.asked)
    action = Action(tmp_path, files=[file], folder=str(models), fetched_by="controller")
    assert action.run()["digests"] == {file["path"]: SHA}
    assert server.asked[asked][1]["Range"] == f"bytes={kept}-{SIZE - 1}"
    assert Path(file["path"]).read_bytes() == DATA


@pytest.mark.parametrize("fetched_by, given", [("head", True), ("controller", False)])
def test_a_head_that_fetches_nothing_gets_no_token(copied, server, tmp_path, models, fetched_by, given):
    (tmp_path / "token").write_text("hf_secret")
    (tmp_path / "token").chmod(0o600)
    file, more = planned(server, models), {"folder": str(models), "fetched_by": fetched_by}
    records = [{"path": str(models / "source" / ".source.json"), "asked": {}}]
    action = Action(tmp_path, files=[file], records=records, token_file=str(tmp_path / "token"), **more)
    assert action.run()["changed"]
    assert server.asked[0][1]["Authorization"] == "Bearer hf_secret"
    assert bool(action.pipes[-1]) == given


def test_a_token_file_that_cannot_be_used_is_named(copied, tmp_path, models):
    action = Action(tmp_path, files=[copied[1]], folder=str(models), token_file=str(tmp_path / "token"))
    with pytest.raises(
        AnsibleActionFail, match=r"llama_model_token_file is .*token, which cannot be read on the contr"
    ):
        action.run()


def test_a_host_that_reports_nonsense_is_named(copied, tmp_path, models):
    action = Action(tmp_path, files=[copied[1]], folder=str(models))
    action._execute_module = lambda **_given: {"changed": True, "fetch": [{"path": 1}], "bytes": 0}
    with pytest.raises(
        AnsibleActionFail, match=r"head reports a value that is not possible \(fetch\[0\]\.bytes is missing\)"
    ):
        action.run()


@pytest.mark.parametrize(
    "progress, said",
    [
        (("m.gguf", "fetch", 12.3e9, 60.1e9, 112e6), "m.gguf: 12.3 GB of 60.1 GB, 112 MB/s, 7 min left"),
        (("m.gguf", "check", 1e9, 2e9, 500e6), "checks m.gguf: 1.0 GB of 2.0 GB, 500 MB/s, 2 s left"),
        (("m.gguf", "fetch", 1e6, 400e9, 12e6), "m.gguf: 1.0 MB of 400.0 GB, 12 MB/s, 9 h 15 min left"),
        (("m\x1b.gguf", "fetch", 0, 2e9, 0), "m\\x1b.gguf: 0.0 MB of 2.0 GB, waiting for data"),
    ],
)
def test_how_far_a_download_is(progress, said):
    assert push.sentence(*progress) == said


def test_a_line_every_ten_seconds(monkeypatch):
    shown, clock = [], [0.0]
    monkeypatch.setattr(push.display, "display", shown.append)
    monkeypatch.setattr(push.time, "monotonic", lambda: clock[0])
    line = push.Line("head")
    for clock[0] in (1, 5, 9.6, 12, 19.4, 21):
        line.show("m.gguf", "fetch", 1e9, 2e9, 1e8)
    assert shown == ["  [head] m.gguf: 1.0 GB of 2.0 GB, 100 MB/s, 10 s left"] * 2


def test_progress_that_is_not_whole_is_not_shown():
    assert on_host.parse_progress('{"file": "m", "st') is None
    assert on_host.parse_progress("") is None
