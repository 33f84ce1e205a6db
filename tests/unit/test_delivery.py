"""How a model gets onto a host: the action plugin, which compares, sends, waits and shows, run by ansible-playbook and by itself."""

import os
import platform
import re
import signal
import subprocess
import threading
import time
import types
from contextlib import suppress
from pathlib import Path

import pytest
import yaml
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import reading
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.models import download, model_files
from ansible_collections.llamacpp.cluster.plugins.modules import model, model_info
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.models import delivery
from model_server import DATA, SIZE, answer, below, parsed, planned
from support import playbook_runs


class Playbook:
    """Runs the task of the role on this machine, in a process of its own."""

    def __init__(self, folder, models):
        self.folder, self.models = folder, models
        self.arguments = {"folder": str(models)}

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
    assert f"[localhost] m.gguf: 2.0 MB to download from {server.url}/m.gguf, 1.0 MB already present" in output
    assert f"+{models}/source/m.gguf ({SIZE} bytes)" in output
    assert "changed=1" in output
    assert not server.asked
    assert below(models) == ["source/m.gguf.part"]
    assert "changed=1" in playbook.run(files)
    assert below(models) == [".fetching", "source/.source.json", "source/m.gguf"]
    requests = len(server.asked)
    assert "changed=0" in playbook.run(files)
    assert len(server.asked) == requests


def is_readable_by_others(path):
    return path.stat().st_mode & 0o044 and all(folder.stat().st_mode & 0o001 for folder in path.parents)


@pytest.mark.programs
def test_a_token_is_in_no_argument_environment_output_or_file_that_others_can_read(server, models, playbook, tmp_path):
    """While the model is downloaded. The server refuses it then, and the reason reaches the operator."""
    found = {}

    def look(handler):
        for path in [path for path in (tmp_path / "ansible").rglob("*") if path.is_file()]:
            found[path] = b"hf_secret" in path.read_bytes() and is_readable_by_others(path)
        for path in [*Path("/proc").glob("[0-9]*/cmdline"), *Path("/proc").glob("[0-9]*/environ")]:
            with suppress(OSError):
                found[path] = b"hf_secret" in path.read_bytes()
        answer(403)(handler)

    server.faults["/m.gguf"] = look
    (tmp_path / "token").write_text("hf_secret\n")
    (tmp_path / "token").chmod(0o600)
    output = playbook.run([planned(server, models)], "-vvv", token_file=str(tmp_path / "token"))
    assert server.asked[0][1]["Authorization"] == "Bearer hf_secret"
    assert "(HTTP 403): use a token that has access in llama_model_token_file" in output
    assert "hf_secret" not in output
    assert any("AnsiballZ_model" in path.name for path in found), "the module lies there while it runs"
    assert not [path for path, has in found.items() if has]
    until = time.monotonic() + 20
    while (left := [*(tmp_path / "ansible").rglob("AnsiballZ_model.py")]) and time.monotonic() < until:
        time.sleep(0.2)
    assert not left, "Ansible removes it when the job has ended"


@pytest.mark.programs
def test_a_file_of_the_controller_is_copied(models, playbook, tmp_path):
    source = tmp_path / "with space.gguf"
    source.write_bytes(DATA)
    files = [planned(FROM, models, url=source.as_uri(), sha256=None)]
    output = playbook.run(files)
    assert f"[localhost] m.gguf: 3.0 MB to copy from file://{source.parent}/with%20space.gguf" in output
    assert "changed=1" in output
    assert (models / "source" / "m.gguf").read_bytes() == DATA
    assert (models / "source" / "m.gguf").stat().st_mode & 0o777 == 0o644
    source.unlink()
    assert "changed=0" in playbook.run(files)


def test_a_copy_that_is_not_what_was_planned_is_refused(models):
    (file,) = parsed(planned(FROM, models, url="file:///srv/m.gguf"))
    for content in (DATA[:-1], bytes(SIZE)):
        Path(file.path).parent.mkdir(parents=True, exist_ok=True)
        Path(file.path).write_bytes(content)
        with pytest.raises(Refusal, match="does not match the controller's copy in the plan"):
            download.download_files([file], models, None, 1)


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


FROM = types.SimpleNamespace(url="http://x")


@pytest.mark.parametrize(
    "module, given",
    [
        (model, lambda path: {"folder": path, "files": [planned(FROM, Path(path))], "_ansible_check_mode": True}),
        (model_info, lambda path: {"paths": [path]}),
    ],
)
def test_a_mount_that_hangs_is_named_with_its_host(tmp_path, monkeypatch, call, module, given):
    within, path, stat = reading.run_within, str(tmp_path / "hung"), os.stat
    monkeypatch.setattr(os, "stat", lambda path, *more, **named: time.sleep(0.3) or stat(path, *more, **named))
    monkeypatch.setattr(os, "open", lambda *_given, **_named: time.sleep(0.3))
    monkeypatch.setattr(reading, "run_within", lambda _seconds, work: within(0.05, work))
    message = call(module=module, **given(path))["msg"]
    said = rf"{path}\S* on {platform.node()} could not be read within 0.05 s: check the (disk|network)"
    assert re.search(said, message)


@pytest.mark.parametrize(
    "done, rate, sentence",
    [
        (12.3e9, 112e6, "m.gguf and 1 more: 12.3 GB of 60.1 GB, 112 MB/s, 7 min left"),
        (60.1e9, 0, "m.gguf and 1 more: checking"),
        (0, 0, "m.gguf and 1 more: 0.0 MB of 60.1 GB, waiting for data"),
    ],
)
def test_progress_in_words(done, rate, sentence):
    assert delivery.progress_text(["m.gguf", "n.gguf"], done, 60.1e9, rate) == sentence


def test_a_line_every_ten_seconds(server, models, monkeypatch):
    """Of what lies there of all files, in their places and beside them."""
    shown, clock = [], [0.0]
    monkeypatch.setattr(delivery.display, "display", shown.append)
    monkeypatch.setattr(delivery.time, "monotonic", lambda: clock[0])

    def run_command(text):
        done = subprocess.run(["sh", "-c", text], capture_output=True, text=True, check=False)
        return {"stdout": done.stdout}

    files = parsed(planned(server, models), planned(server, models, "n.gguf"))
    progress = delivery.DownloadProgress(types.SimpleNamespace(host="head", run_command=run_command), files)
    assert progress.show(0) == "0"
    Path(files[0].path).parent.mkdir(parents=True)
    Path(files[0].path).write_bytes(bytes(SIZE))
    for clock[0], size in ((5, 1_000_000), (10, 1_000_000), (12, 1_500_000), (20, 2_000_000)):
        model_files.part_path(files[1]).write_bytes(bytes(size))
        assert progress.show(clock[0]) == str(SIZE + size)
    assert shown == [
        "  [head] m.gguf and 1 more: 4.0 MB of 6.0 MB, 0.4 MB/s, 4 s left",
        "  [head] m.gguf and 1 more: 5.0 MB of 6.0 MB, 0.1 MB/s, 9 s left",
    ]


@pytest.mark.parametrize("fetch", [None, 5, [5], [{}], [{"path": "/m.gguf", "present_bytes": "many"}]])
def test_a_host_that_misreports_its_model_files_is_refused(fetch):
    action = types.SimpleNamespace(host="worker1", run_in_check_mode=lambda **_more: {"changed": True, "fetch": fetch})
    with pytest.raises(Refusal, match="The report from worker1 about its model files does not match"):
        delivery.deliver(action, download.ModelArguments("/models"))
