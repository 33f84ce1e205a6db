"""Bad input on the way of a model, from its name to its files: a hub on this machine is asked, or Ollama's registry is asked, what
that has is resolved to files, and the module fetches them. One sentence says why it does not work, what served stays as it is, and nothing that is not
whole gets its name.

What a repository does not have, forty quantisations and none named, parts of two models, and names that cannot be are refused while the model is
looked up: test_model_sources.py.
"""

import hashlib
import json
import re
import threading
from pathlib import Path
from unittest import mock
from urllib.parse import urlsplit

import gguf_files
import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.models import download, download_record
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import model_source
from ansible_collections.llamacpp.cluster.plugins.modules import model as model_module
from conftest import fill_disk
from test_model_sources import REPO, TOKEN, looked_up, on_huggingface, play, refusal, request_of

MODULE = model_module
NAME = "some-model-Q4_K_M.gguf"
CONTENT = gguf_files.model() + bytes(range(250)) * 100
WHOLE = hashlib.sha256(CONTENT).hexdigest()
SIZE = len(CONTENT)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(download, "PAUSES", (0.0, 0.01, 0.01))
    monkeypatch.setattr(download, "SAID_SECONDS", 0.05)
    served = play.Hub(tmp_path / "hub").start()
    (tmp_path / "hub" / REPO).mkdir(parents=True)
    (tmp_path / "hub" / REPO / NAME).write_bytes(CONTENT)
    library = tmp_path / "hub" / "ollama" / "library" / "some-model"
    library.mkdir(parents=True)
    (library / "4b.gguf").write_bytes(CONTENT)
    monkeypatch.setenv("HF_ENDPOINT", served.url)
    yield served
    served.stop()


class Host:
    """Where the model goes; another one is there and serves."""

    def __init__(self, prefix, call, hub, kind="huggingface"):
        self.models, self._call = prefix / "models", call
        ollama = request_of(llama_model_ollama=f"{hub.url}/library/some-model:4b")
        self.request = ollama if kind == "ollama" else on_huggingface(quantisation="Q4_K_M")
        serving = self.models / "serving-0123abcd"
        serving.mkdir(parents=True)
        (serving / "m.gguf").write_bytes(b"GGUF, and somebody reads it")
        (serving / download_record.RECORD).write_text("{}")
        self.prefix, self.serving = prefix, self.state(serving)

    def state(self, folder):
        return {path: (path.read_bytes(), path.stat().st_mtime_ns, path.stat().st_ino) for path in folder.iterdir()}

    def resolved(self, token=None):
        """What the hub has now of what is wanted, as the plan has it."""
        found = looked_up(self.request, token)
        said = {"role": "model", "source": found.source, "revision": found.revision}
        report = {"files": [{**file, "role": "model"} for file in found.files], "sources": [said]}
        assert model_source.check({**report, "offered": list(found.offered)}) is None
        return model_source.resolve(self.request, model_source.report_of(report), str(self.prefix))

    def fetch(self, resolved, token=None):
        """The module's result."""
        files = [file._asdict() for file in resolved.files]
        given = {"files": files, "folder": str(self.models), "records": [dict(one) for one in resolved.records]}
        with mock.patch.object(download, "take_token", lambda pipe: pipe):
            return self._call(state="fetched", token_pipe=token, **given)

    def refused(self, resolved, token=None):
        """Why it cannot be fetched: one sentence, the rest of what is said is the remedy."""
        result = self.fetch(resolved, token)
        assert result["failed"], result
        assert "\n" not in result["msg"]
        assert "Traceback" not in result["msg"]
        assert not token or token not in result["msg"]
        self.check_untouched()
        return result["msg"]

    def check_untouched(self, whole=None):
        """What served is as it was, and nothing else has a record, or the name of a model without being that.

        :param whole: content that a file may have.
        """
        serving = self.models / "serving-0123abcd"
        assert self.state(serving) == self.serving
        others = [path for path in self.models.rglob("*") if path.is_file() and serving not in path.parents]
        strange = [path for path in others if path.name != ".fetching" and path.suffix != ".part"]
        assert all(path.suffix == ".gguf" and path.read_bytes() == whole for path in strange)

    def check_whole(self, resolved):
        (file,), (record,) = resolved.files, resolved.records
        assert Path(file.path).read_bytes() == CONTENT
        assert json.loads(Path(record["path"]).read_text())["checked"][file.path]["sha256"] == WHOLE
        assert not Path(f"{file.path}.part").exists()


@pytest.fixture(params=["huggingface", "ollama"])
def host(tmp_path, call, hub, request):
    return Host(tmp_path / "llamacpp", call, hub, request.param)


@pytest.fixture
def of_hub(tmp_path, call, hub):
    """A host whose model is on Hugging Face."""
    return Host(tmp_path / "llamacpp", call, hub)


def at(hub, resolved, answer):
    """Lets the server answer so where it has the file."""
    hub.faults[urlsplit(resolved.files[0].url).path] = answer


def breaks_after(hub, count):
    """Sends so many bytes for each request, then ends the connection; returns what it sent."""
    sent = []

    def write(handler, path, offset, wanted):
        with path.open("rb") as stream:
            stream.seek(offset)
            data = stream.read(min(wanted, count))
        sent.append(len(data))  # before the client can have all of it
        handler.wfile.write(data)
        handler.close_connection = True

    hub.write = write
    return sent


def test_a_transfer_that_breaks_off_goes_on_there(hub, host):
    resolved = host.resolved()
    sent = breaks_after(hub, SIZE // 3)
    assert "failed" not in host.fetch(resolved)
    host.check_whole(resolved)
    assert sum(sent) == SIZE
    assert len(sent) >= 3


def test_a_transfer_that_breaks_off_for_good_keeps_what_came(hub, host):
    resolved = host.resolved()
    breaks_after(hub, SIZE // 3)
    real = hub.send

    def once(handler, path):
        hub.send = lambda handler, path: hub.reply(handler, 503, b"", {})
        real(handler, path)

    hub.send = once
    message = host.refused(resolved)
    assert re.search(r"HTTP 503.*are kept: the next run goes on there", message), message
    hub.send = real
    sent = breaks_after(hub, SIZE)
    assert "failed" not in host.fetch(resolved)
    host.check_whole(resolved)
    assert sum(sent) == SIZE - SIZE // 3


@pytest.mark.parametrize(
    "content, said",
    [
        (CONTENT + b"more", rf"has {SIZE + 4} bytes, and had {SIZE} when it was planned"),
        (CONTENT[: SIZE // 2], rf"has {SIZE // 2} bytes, and had {SIZE} when it was planned"),
        (CONTENT[:-1] + b"x", rf"has the sha256 [0-9a-f]{{64}}, planned is {WHOLE}: what was fetched is removed"),
    ],
)
def test_a_file_of_another_size_or_hash_than_its_source_said(hub, host, tmp_path, content, said):
    resolved = host.resolved()
    (tmp_path / "other").write_bytes(content)
    at(hub, resolved, lambda handler: hub.send(handler, tmp_path / "other"))
    message = host.refused(resolved)
    assert re.search(rf"{re.escape(resolved.files[0].url)} {said}", message), message
    assert not list(host.models.rglob("*.part"))


@pytest.mark.parametrize(
    "token, code, said",
    [
        (None, 401, "accept the model's licence on its page, and set llama_model_token_file to a file with a token"),
        ("hf_of_somebody_else", 403, "the token of llama_model_token_file is not entitled to it"),
    ],
)
def test_a_model_that_is_closed_after_it_was_planned(hub, of_hub, token, code, said):
    """Before that it is refused while it is looked up: test_a_repository_that_is_not_given_to_everybody."""
    resolved = of_hub.resolved()
    hub.tokens[REPO] = TOKEN
    message = of_hub.refused(resolved, token)
    assert f"needs permission (HTTP {code}): " in message
    assert said in message
    assert sum("/resolve/" in path and status == code for path, _headers, status in hub.asked) == 1


def test_a_file_that_is_gone_after_it_was_planned(hub, host):
    resolved = host.resolved()
    at(hub, resolved, lambda handler: hub.reply(handler, 404, b"", {}))
    assert f"{resolved.files[0].url} does not exist (HTTP 404)" in host.refused(resolved)


def test_a_quantisation_that_is_gone_is_answered_with_those_that_are_there(hub, of_hub):
    (hub.folder / REPO / NAME).rename(hub.folder / REPO / "other-Q8_0.gguf")
    assert "has no quantisation Q4_K_M: it has Q8_0" in refusal(of_hub.resolved)


def test_a_token_does_not_follow_a_redirect_to_another_host(hub, of_hub, tmp_path):
    other = play.Hub(tmp_path / "other").start()
    (other.folder / "plain").mkdir(parents=True)
    (other.folder / "plain" / "unsloth").symlink_to(hub.folder / "unsloth")
    hub.tokens[REPO], hub.redirect = TOKEN, other.url
    try:
        resolved = of_hub.resolved(TOKEN)
        assert "failed" not in of_hub.fetch(resolved, TOKEN)
    finally:
        other.stop()
    of_hub.check_whole(resolved)
    assert other.asked
    assert not any("authorization" in map(str.lower, headers) for _path, headers, _code in other.asked)
    assert f"Bearer {TOKEN}" in {headers.get("Authorization") for _path, headers, _code in hub.asked}


@pytest.mark.parametrize("what", ["folder", "file", "part"])
def test_a_symbolic_link_out_of_the_folder(hub, host, tmp_path, what):
    resolved = host.resolved()
    file = Path(resolved.files[0].path)
    link = {"folder": file.parent, "file": file, "part": Path(f"{file}.part")}[what]
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(tmp_path / "elsewhere")
    before = len(hub.asked)
    message = host.fetch(resolved)["msg"]
    assert host.state(host.models / "serving-0123abcd") == host.serving
    assert re.search(r"leads to .*elsewhere.*, out of .*/models: remove the symbolic link", message)
    assert not (tmp_path / "elsewhere").exists()
    assert len(hub.asked) == before


def test_two_runs_at_once(hub, host):
    """One waits for the other, and every byte comes once."""
    resolved, failed = host.resolved(), []
    sent = breaks_after(hub, SIZE // 8)
    given = [{**file._asdict()} for file in resolved.files]

    def run():
        try:
            files = download.downloaded.of_plan(given, resolved.records)
            download.fetch(files, host.models, [dict(one) for one in resolved.records], None)
        except Exception as error:
            failed.append(error)

    runs = [threading.Thread(target=run) for _number in range(3)]
    for one in runs:
        one.start()
    for one in runs:
        one.join(30)
    assert not failed
    host.check_whole(resolved)
    assert sum(sent) == SIZE


def test_a_disk_without_room_for_it_is_named_before_a_byte_is_fetched(hub, small_disk, call):
    host = Host(small_disk, call, hub)
    (hub.folder / REPO / NAME).write_bytes(CONTENT + bytes(300_000))
    resolved = host.resolved()
    before = len(hub.asked)
    message = host.refused(resolved)
    assert re.search(r"need 0\.4 MB more on .*: free 0\.1 MB there.*Nothing was written", message), message
    assert len(hub.asked) == before


@pytest.mark.programs
@pytest.mark.parametrize("pages", range(16))
def test_a_disk_that_fills_meanwhile(hub, small_disk, call, monkeypatch, pages):
    """Each step in turn finds it full, since somebody else writes after the room was looked at; the run after it goes on."""
    host = Host(small_disk, call, hub)
    resolved, filler = host.resolved(), small_disk / "filler"

    def fill(needs, folder):
        fill_disk(filler, pages)

    with monkeypatch.context() as patched:
        patched.setattr(download, "check_room", fill)
        result = host.fetch(resolved)
    if result.get("failed"):
        assert re.search(r"No space left on device\. Free some space .*run the playbook again", result["msg"])
        host.check_untouched(whole=CONTENT)
    assert result.get("failed") or 4096 * pages > SIZE
    filler.unlink()
    assert "failed" not in host.fetch(resolved)
    host.check_whole(resolved)
    assert not host.fetch(resolved)["changed"]
