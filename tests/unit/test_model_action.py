"""How a model gets onto a host: the action plugin, which compares, sends, waits and shows, run by ansible-playbook and by itself."""

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
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import reading, typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.host import services
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.drift import state
from ansible_collections.llamacpp.cluster.plugins.module_utils.models import download
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import FetchedModelPlan, ModelArguments
from ansible_collections.llamacpp.cluster.plugins.modules import (
    gguf_info,
    model,
    model_info,
)
from ansible_collections.llamacpp.cluster.plugins.plugin_utils import action as base
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.models import delivery, lookup, sender
from model_server import DATA, SHA, SIZE, answer, below, download_record_of, parsed, planned
from support import playbook_runs
from support.model_sources import request_of


class Playbook:
    """Runs the task of the role on this machine, in a process of its own."""

    def __init__(self, folder, models):
        self.folder, self.models = folder, models
        self.arguments = {"folder": str(models), "records": [download_record_of(models / "source")]}

    def start(self, files, *options, **more):
        task = {"llamacpp.cluster.model": {**self.arguments, "files": files, **more}}
        play = {"hosts": "localhost", "gather_facts": False, "tasks": [task]}
        (self.folder / "run.yml").write_text(yaml.safe_dump([play]))
        places = {f"ANSIBLE_{name}": f"{self.folder}/ansible/{name}" for name in ("REMOTE_TMP", "ASYNC_DIR")}
        hosts = {"all": {"hosts": {"localhost": playbook_runs.LOCAL}}}
        return playbook_runs.start(self.folder, "run.yml", hosts, *options, **places)

    def run(self, files, *options, **more):
        return " ".join(self.start(files, *options, **more).communicate(timeout=50)[0].split())


@pytest.fixture
def playbook(tmp_path, models):
    return Playbook(tmp_path, models)


@pytest.mark.programs
def test_check_mode_then_a_download_then_no_change(server, models, playbook):
    part = models / "source" / "m.gguf.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(DATA[:1_000_000])
    files = [planned(server, models)]
    output = playbook.run(files, "--check", "--diff")
    assert f"[localhost] m.gguf: 2.0 MB to download from {server.url}/m.gguf, 1.0 MB of it are there" in output
    assert f"+{models}/source/m.gguf ({SIZE} bytes)" in output
    assert "changed=1" in output
    assert not server.asked
    assert below(models) == ["source/m.gguf.part"]
    assert "changed=1" in playbook.run(files)
    assert below(models) == [".fetching", "source/.source.json", "source/m.gguf"]
    requests = len(server.asked)
    assert "changed=0" in playbook.run(files)
    assert len(server.asked) == requests


@pytest.mark.programs
def test_a_token_is_in_no_file_argument_environment_or_output(server, models, playbook, tmp_path):
    """While the model is downloaded. The server refuses it then, and the reason reaches the operator."""
    found = {}

    def look(handler):
        places = [path for path in (tmp_path / "ansible").rglob("*") if path.is_file()]
        for path in [*places, *Path("/proc").glob("[0-9]*/cmdline"), *Path("/proc").glob("[0-9]*/environ")]:
            with suppress(OSError):
                found[path] = b"hf_secret" in path.read_bytes()
        answer(403)(handler)

    server.faults["/m.gguf"] = look
    (tmp_path / "token").write_text("hf_secret\n")
    (tmp_path / "token").chmod(0o600)
    output = playbook.run([planned(server, models)], "-vvv", token_file=str(tmp_path / "token"))
    assert server.asked[0][1]["Authorization"] == "Bearer hf_secret"
    assert "m.gguf needs permission (HTTP 403): the token of llama_model_token_file is not entitled to it" in output
    assert "hf_secret" not in output
    assert any("AnsiballZ_model" in path.name for path in found), "the module lies there while it runs"
    assert not [path for path, has in found.items() if has]


def test_a_token_that_does_not_come_is_waited_for_with_an_end(tmp_path, monkeypatch):
    monkeypatch.setattr(download, "TOKEN_SECONDS", 0.01)
    with pytest.raises(Refusal, match="did not come: run the playbook again"):
        download.take_token(str(tmp_path / "pipe"))
    assert not list(tmp_path.iterdir())
    early = [sys.executable, "-c", delivery.HAND_OVER.replace("range(100)", "range(1)"), str(tmp_path / "pipe")]
    assert subprocess.run(early, input=b"secret\n", check=False).returncode == 1, "it is handed over again"


@pytest.mark.programs
def test_a_download_continues_when_the_controller_is_killed_and_the_next_run_waits_for_it(server, models, playbook):
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
    assert any("to download from" in line for line in second.stdout)
    waits.set()
    assert "changed=1" in second.communicate(timeout=40)[0]
    assert (models / "source" / "m.gguf").read_bytes() == DATA
    assert server.sent == SIZE
    assert len(server.asked) == 1


MODULE, FROM = model, types.SimpleNamespace(url="http://x")
READERS = {
    "model": lambda path, call: call(folder=path, files=[planned(FROM, Path(path))], _ansible_check_mode=True),
    "model_info": lambda path, call: call(paths=[path]),
    "gguf_info": lambda path, call: call(path=path),
    "drift": lambda path, call: state.model_differences(
        typed_json.parse(FetchedModelPlan, {"files": [planned(FROM, Path(path))], "records": []})
    ),
    "services": lambda path, call: services.versions([path]),
    "copy": lambda path, call: lookup.look_up(lookup.Query(request_of(llama_model_copy=path).source), 9),
    "sent": lambda path, call: sender._read(file_of_controller(path), 0, None),
}
MODULES = {"model_info": model_info, "gguf_info": gguf_info}


def file_of_controller(path):
    (file,), _records = parsed([planned(FROM, Path("/"), url=f"file:{path}")])
    return file


def hanging(original):
    return lambda path, *given, **more: ("hung" in str(path) and time.sleep(0.3)) or original(path, *given, **more)


@pytest.mark.parametrize("reader", READERS)
def test_a_mount_that_hangs_is_named_with_its_host(tmp_path, monkeypatch, call, reader):
    within, path = reading.within, str(tmp_path / "hung")
    for name in ("stat", "open"):
        monkeypatch.setattr(os, name, hanging(getattr(os, name)))
    monkeypatch.setattr(reading, "within", lambda _seconds, work: within(0.05, work))
    monkeypatch.setattr(sys.modules[__name__], "MODULE", MODULES.get(reader, model))
    try:
        message = str(READERS[reader](path, call))
    except (Refusal, OSError) as error:
        message = str(error)
    where = "" if reader == "copy" else rf"{path}\S* on {platform.node()} "
    assert re.search(rf"{where}could not be read within 0.05 s: check the (disk or )?network", message)


class Action(base.Action):
    """An action plugin whose host is this process."""

    def __init__(self, place, models, *files, **arguments):
        arguments = {"files": list(files), "folder": str(models), **arguments}
        self._task = types.SimpleNamespace(args=arguments, async_val=0, check_mode=False)
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
        if module_name == "ansible.builtin.async_status":
            return {"finished": True, **self.result}
        arguments = {"records": [], "fetched_by": "head", "token_pipe": None, **module_args}
        check_mode = self._task.check_mode
        self.calls.append("check" if check_mode else "download")
        self.pipes.append(arguments["token_pipe"])
        try:
            with mock.patch.object(download, "take_token", return_value="hf_secret"):
                result = json.loads(json.dumps(model.run(typed_json.parse(ModelArguments, arguments), check_mode)))
        except ValueError as error:
            result = {"failed": True, "msg": str(error)}
        if wrap_async:
            self.result = result
            return {"ansible_job_id": "j1.2"}
        return result

    def _low_level_execute_command(self, text, **_arguments):
        self.calls.append("command")
        done = subprocess.run(["sh", "-c", text], capture_output=True, text=True, check=False)
        return {"rc": done.returncode, "stdout": done.stdout, "stderr": done.stderr}

    def get_shell_option(self, _name, default):
        return default

    def run(self):
        self.variables = {"inventory_hostname": "head"}
        return delivery.run(self, typed_json.parse(ModelArguments, self._task.args))


@pytest.fixture(autouse=True)
def quick(tmp_path, monkeypatch):
    monkeypatch.setattr(sender, "PIECE", 1_000_000)
    monkeypatch.setattr(delivery, "PAUSES", ())
    monkeypatch.setattr(sender.C, "DEFAULT_LOCAL_TMP", str(tmp_path))
    clock = types.SimpleNamespace(sleep=lambda seconds: None, monotonic=time.monotonic)
    monkeypatch.setattr(base, "time", clock)


@pytest.fixture
def source(tmp_path):
    """A file of the controller."""
    path = tmp_path / "with space.gguf"
    path.write_bytes(DATA)
    return path


@pytest.fixture
def copied(source, models):
    """How that is planned."""
    return planned(FROM, models, url=source.as_uri(), sha256=None)


def test_a_file_of_the_controller_is_sent_in_pieces(copied, tmp_path, models):
    action = Action(tmp_path, models, copied)
    result = action.run()
    assert result["changed"]
    assert result["digests"] == {copied["path"]: SHA}
    assert action.calls == ["check", "check", *["transfer", "command"] * 3, "download"]
    assert Path(copied["path"]).read_bytes() == DATA
    again = Action(tmp_path, models, copied)
    assert not again.run()["changed"]
    assert again.calls == ["check"]
    Path(copied["path"]).with_name(".source.json").unlink()
    unrecorded = Action(tmp_path, models, copied)
    assert unrecorded.run()["digests"] == {copied["path"]: SHA}
    assert "transfer" not in unrecorded.calls, "its content is compared alone"


def test_sending_continues_where_it_stopped(copied, tmp_path, models):
    action = Action(tmp_path, models, copied)
    action.broken = 2
    with pytest.raises(AnsibleActionFail, match=r"piece of m\.gguf could not be sent .*No space left.*continues there"):
        action.run()
    assert Path(copied["path"] + ".part").stat().st_size == 2 << 20
    action = Action(tmp_path, models, copied)
    assert action.run()["digests"] == {copied["path"]: SHA}
    assert action.calls.count("transfer") == 1


@pytest.mark.parametrize("name", ["m.gguf.part", "m.gguf"])
def test_content_of_another_file_is_not_kept(copied, tmp_path, models, name):
    """A part of it, or a whole one of the same size."""
    path = models / "source" / name
    path.parent.mkdir(parents=True)
    path.write_bytes(bytes(SIZE))
    result = Action(tmp_path, models, copied).run()
    assert "planned is" in result["msg"]
    assert not path.exists()
    assert Action(tmp_path, models, copied).run()["digests"] == {copied["path"]: SHA}


def test_a_file_of_the_controller_that_has_changed_is_named(copied, source, tmp_path, models):
    source.write_bytes(DATA + b"x")
    with pytest.raises(
        AnsibleActionFail, match=rf"with space\.gguf has {SIZE + 1} bytes, and had {SIZE} when it was planned"
    ):
        Action(tmp_path, models, copied).run()
    source.unlink()
    with pytest.raises(AnsibleActionFail, match=r"On the controller: .*with space\.gguf: No such file"):
        Action(tmp_path, models, copied).run()


def test_a_piece_that_is_damaged_on_its_way_is_noticed(copied, tmp_path, models, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "copyfile", lambda source, target: Path(target).write_bytes(b"other"))
        with pytest.raises(
            AnsibleActionFail, match=r"could not add a piece to .*m\.gguf\.part \(it has 5 bytes, not 1048576\)"
        ):
            Action(tmp_path, models, copied).run()
        patched.setattr(
            shutil, "copyfile", lambda source, target: Path(target).write_bytes(bytes(os.path.getsize(source)))
        )
        assert "planned is" in Action(tmp_path, models, copied).run()["msg"]
    assert Action(tmp_path, models, copied).run()["digests"] == {copied["path"]: SHA}


def test_a_piece_that_finds_a_full_disk_is_continued(copied, tmp_path, small_disk, monkeypatch):
    models = small_disk / "models"
    file = {**copied, "path": str(models / "source" / "m.gguf")}
    monkeypatch.setattr(download, "check_room", lambda *_arguments: None)
    with pytest.raises(AnsibleActionFail, match=r"m\.gguf\.part \(.*No space left on device\).*continues there"):
        Action(tmp_path, models, file).run()
    part = (models / "source" / "m.gguf.part").read_bytes()
    assert 0 < len(part) < SIZE
    assert DATA.startswith(part)


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("other")])
def test_a_part_on_the_host_that_is_no_file_is_not_written_to(copied, tmp_path, models, make):
    part = models / "source" / "m.gguf.part"
    part.parent.mkdir(parents=True)
    make(part)
    with pytest.raises(AnsibleActionFail, match=r"could not add a piece to .*m\.gguf\.part"):
        Action(tmp_path, models, copied).run()
    assert not (models / "source" / "other").exists()


def test_the_controller_downloads_for_a_head_without_a_way_out(server, tmp_path, models):
    server.cut = 700_000
    file = planned(server, models)
    action = Action(tmp_path, models, file, fetched_by="controller")
    action.broken = 1
    with pytest.raises(AnsibleActionFail, match="continues there"):
        action.run()
    kept = Path(file["path"] + ".part").stat().st_size
    assert 1_000_000 <= kept < SIZE
    requests = len(server.asked)
    action = Action(tmp_path, models, file, fetched_by="controller")
    assert action.run()["digests"] == {file["path"]: SHA}
    assert server.asked[requests][1]["Range"] == f"bytes={kept}-{SIZE - 1}"
    assert Path(file["path"]).read_bytes() == DATA


@pytest.mark.parametrize("sha256", [SHA, None])
@pytest.mark.parametrize("fetched_by, given", [("head", True), ("controller", False)])
def test_a_head_that_downloads_nothing_gets_no_token(server, tmp_path, models, fetched_by, given, sha256):
    (tmp_path / "token").write_text("hf_secret")
    (tmp_path / "token").chmod(0o600)
    more = {
        "fetched_by": fetched_by,
        "records": [download_record_of(models / "source")],
        "token_file": str(tmp_path / "token"),
    }
    action = Action(tmp_path, models, planned(server, models, sha256=sha256), **more)
    assert list(action.run()["digests"].values()) == [SHA]
    assert server.asked[0][1]["Authorization"] == "Bearer hf_secret"
    assert bool(action.pipes[-1]) == given


def test_a_token_file_that_cannot_be_used_is_named(copied, tmp_path, models):
    with pytest.raises(Refusal, match=r"llama_model_token_file is .*token, which cannot be read on the contr"):
        Action(tmp_path, models, copied, token_file=str(tmp_path / "token")).run()


def test_a_host_that_reports_nonsense_is_named(copied, tmp_path, models):
    action = Action(tmp_path, models, copied)
    action._execute_module = lambda **_arguments: {"changed": True, "fetch": [{"path": 1}], "bytes": 0}
    with pytest.raises(AnsibleActionFail, match=r"head reports a value that is not possible \(python is missing"):
        action.run()


@pytest.mark.parametrize(
    "report, rate, sentence",
    [
        (("m.gguf", "fetch", 1, 12.3e9, 60.1e9), 112e6, "m.gguf: 12.3 GB of 60.1 GB, 112 MB/s, 7 min left"),
        (("m.gguf", "check", 3, 1e9, 2e9), 500e6, "checks m.gguf and 2 more: 1.0 GB of 2.0 GB, 500 MB/s, 2 s left"),
        (("m\x1b.gguf", "fetch", 1, 0, 2e9), 0, "m\\x1b.gguf: 0.0 MB of 2.0 GB, waiting for data"),
    ],
)
def test_progress_in_words(report, rate, sentence):
    assert delivery.sentence(download.ProgressReport(*report), rate) == sentence


def test_a_line_every_ten_seconds(monkeypatch):
    shown, clock = [], [0.0]
    monkeypatch.setattr(delivery.display, "display", shown.append)
    monkeypatch.setattr(delivery.time, "monotonic", lambda: clock[0])
    line = delivery.Line("head")
    for clock[0] in (0, 5, 10, 12, 19.4, 21):
        line.show(download.ProgressReport("m.gguf", "fetch", 1, int(1e9 + clock[0] * 1e8), 41 * 10**8))
    assert shown == [
        "  [head] m.gguf: 2.0 GB of 4.1 GB, 100 MB/s, 21 s left",
        "  [head] m.gguf: 2.9 GB of 4.1 GB, 100 MB/s, 11 s left",
    ]
