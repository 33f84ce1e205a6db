"""Conversations that survive a restart: the launcher's part, against a stand-in for llama-server that writes files of the real form."""

import http.server
import json
import os
import shutil
import struct
import threading
from types import SimpleNamespace
from urllib.parse import parse_qs, urlsplit

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import units
from ansible_collections.llamacpp.cluster.plugins.module_utils.launcher import conversations, metrics, progress
from ansible_collections.llamacpp.cluster.plugins.module_utils.launcher import server as llama_server

IDLE = progress.ProcessSample(progress.Activity("S", 0.0, 0, 0), [], {})
LIMITS = (100, 10, 60, 1000)


class Stub:
    """A llama-server with two slots. ``broken`` is what it does instead of the next action."""

    def __init__(self, folder):
        self.folder, self.slots, self.busy, self.broken, self.asked = folder, {0: [], 1: []}, set(), "", []
        stub = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                entries = [stub.entry(slot) for slot in stub.slots]
                self.answer(200, entries)

            def do_POST(self):
                place, body = urlsplit(self.path), json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                action, slot = parse_qs(place.query)["action"][0], int(place.path.rsplit("/", 1)[1])
                stub.asked.append((action, slot, body["filename"]))
                if stub.broken == "hangs" or slot in stub.busy:
                    stub.release.wait(30)
                if stub.broken == "refuses":
                    self.answer(400, {"error": {"code": 400, "message": "invalid slot save file"}})
                elif stub.broken != "ends":
                    self.answer(200, getattr(stub, action)(slot, stub.folder / body["filename"]))

            def answer(self, status, content):
                self.send_response(status)
                self.end_headers()
                self.wfile.write(json.dumps(content).encode())

            def log_message(self, *_words):
                pass

        self.release = threading.Event()
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.head = SimpleNamespace(
            **{"headers": {}, "argv": [], "endpoints": [], "is_ready": True, "is_asleep": False, "last_sample": None},
            base_url=f"http://127.0.0.1:{self.server.server_address[1]}",
            listens=lambda _sample: True,
            idle_timer=SimpleNamespace(last_activity_time=0.0),
        )

    def entry(self, slot):
        tokens = self.slots[slot]
        task = {"id_task": sum(tokens), "n_prompt_tokens": len(tokens)} if tokens else {}
        return {"id": slot, "is_processing": slot in self.busy, **task}

    def save(self, slot, path):
        words = [-1, 1, len(self.slots[slot]), 0, *self.slots[slot]]
        path.write_bytes(struct.pack(f"<III{len(words)}i", 7, 2, len(words), *words))
        return {"n_saved": len(self.slots[slot])}

    def restore(self, slot, path):
        self.slots[slot] = conversations._tokens_of(path).tolist()
        return {"n_restored": len(self.slots[slot])}


@pytest.fixture
def place(tmp_path):
    """A state folder, a stub, and a function that makes the keeper of a new start."""
    (tmp_path / "model.gguf").write_bytes(b"model")
    stub, logged = Stub(tmp_path / conversations.CONVERSATIONS_FOLDER), []
    argv = ["/build/bin/llama-server", "--model", str(tmp_path / "model.gguf"), "--ctx-size", "8192"]
    argv += ["--parallel", "2", "--cache-type-k", "q8_0", conversations.SLOT_PATH_OPTION, str(stub.folder)]

    def start(*words, settings=LIMITS):
        keeper = conversations.open_store([*argv, *words], tmp_path, settings, logged.append)
        if keeper:
            keeper.head, keeper.check_interval_s = stub.head, 0
        return keeper

    yield SimpleNamespace(stub=stub, start=start, argv=argv, state=tmp_path, logged=logged, folder=stub.folder)
    stub.release.set()
    stub.server.shutdown()


def step(keeper, times=1):
    """Let the keeper do what is due."""
    for _time in range(times):
        assert keeper.fault() is None
        keeper.job_thread.join(10)


def names(place):
    return sorted(path.suffix for path in place.folder.iterdir())


def saved(place, *slots):
    """The folder after conversations were saved from these slots."""
    keeper = place.start()
    for number, tokens in enumerate(slots):
        place.stub.slots[number] = tokens
    step(keeper, 3)
    place.stub.slots = {0: [], 1: []}
    place.stub.asked.clear()
    return keeper


def conversation(first, length=300):
    return [*range(first, first + length)]


def test_a_conversation_is_saved_when_its_slot_rests_and_is_there_after_a_restart(place):
    keeper = place.start()
    place.stub.slots[0] = conversation(1)
    step(keeper, 2)  # restores nothing, then looks for the first time
    assert names(place) == []
    step(keeper)
    (path,) = place.folder.iterdir()
    assert (path.stat().st_mode & 0o777, place.folder.stat().st_mode & 0o777) == (0o600, 0o700)
    step(keeper, 2)
    assert len(place.stub.asked) == 1
    place.stub.slots = {0: [], 1: []}
    again = place.start()
    again.watch_output(b"0.14.692 I srv  llama_server: model loaded\n")
    again.job_thread.join(10)
    assert place.stub.slots[0] == conversation(1)
    assert names(place) == [conversations.SAVED_SUFFIX]
    assert again.record[metrics.CONVERSATION_METRIC_NAMES[0]] == 1
    assert again.record[metrics.CONVERSATION_METRIC_NAMES[1]] == 300
    assert 70 < again.record[metrics.CONVERSATION_METRIC_NAMES[2]] <= 1000 * 300 / 4096
    third = place.start()
    assert third.record[metrics.CONVERSATION_METRIC_NAMES[1]] == 300
    assert place.logged == ["restored 300 tokens of conversations in 0.0 s"]


def test_a_longer_conversation_replaces_its_older_file_and_no_other(place):
    keeper = saved(place, conversation(1), conversation(5000))
    assert names(place) == [conversations.SAVED_SUFFIX] * 2
    place.stub.slots = {0: [*conversation(1), 7, 7, 7], 1: conversation(9000)}
    step(keeper, 2)
    lengths = sorted(len(conversations._tokens_of(path)) for path in place.folder.iterdir())
    assert lengths == [300, 300, 303]
    again = place.start()
    step(again)
    assert sorted(len(tokens) for tokens in place.stub.slots.values()) == [300, 303], "the newest two are restored"


def test_a_truncated_file_has_the_tokens_before_its_end(tmp_path):
    (tmp_path / "file").write_bytes(bytes(8) + struct.pack("<I4i2i", 6, 0, 0, 0, 0, 7, 8)[:-1])
    assert conversations._tokens_of(tmp_path / "file").tolist() == [7]


def test_short_conversations_and_busy_slots_are_left_alone(place):
    keeper = place.start()
    place.stub.slots = {0: conversation(1, conversations.MIN_TOKENS - 1), 1: conversation(1)}
    place.stub.busy = {1}
    step(keeper, 3)
    assert (names(place), place.stub.asked) == ([], [])


def test_before_a_stop_every_changed_slot_is_saved_at_once(place):
    keeper = place.start()
    step(keeper)
    place.stub.slots[1] = conversation(1)
    keeper.save_now()
    assert names(place) == [conversations.SAVED_SUFFIX]
    place.stub.slots[1], place.stub.head.is_asleep = conversation(9), True
    keeper.save_now()
    assert len(place.stub.asked) == 1, "a server that sleeps must not be woken"


@pytest.mark.parametrize(
    "words, is_same",
    [
        (["--rpc", "192.0.2.1:50052"], True),
        (["--threads", "-1", "--sleep-idle-seconds", "60"], True),
        (["--flash-attn", "on"], False),
        (["--cache-type-v", "q8_0"], False),
        (["--parallel", "4"], False),
        (["--ctx-size", "16384", "--parallel", "4"], True),
    ],
)
def test_files_of_other_settings_are_never_offered(place, words, is_same):
    saved(place, conversation(1))
    step(place.start(*words))
    assert [action for action, _slot, _name in place.stub.asked] == ["restore"] * is_same
    assert names(place) == [conversations.SAVED_SUFFIX]


def test_files_of_another_model_or_build_are_never_offered(place):
    saved(place, conversation(1))
    (place.state / "model.gguf").write_bytes(b"another")
    step(place.start())
    place.argv[0] = "/other/bin/llama-server"
    step(place.start())
    assert place.stub.asked == []


def test_a_file_that_llama_server_refuses_is_deleted(place):
    saved(place, conversation(1))
    place.stub.broken = "refuses"
    step(place.start())
    assert names(place) == []
    assert place.logged == ["deleted a saved conversation that could not be restored: invalid slot save file"]


def test_a_truncated_file_is_never_offered(place):
    saved(place, conversation(1))
    (path,) = place.folder.iterdir()
    os.truncate(path, 100)
    step(place.start())
    assert (names(place), place.stub.asked) == ([], [])
    assert place.logged == ["deleted a truncated file: its conversation cannot be restored"]


def test_a_file_with_which_llama_server_ends_is_tried_once(place):
    saved(place, conversation(1))
    place.stub.broken = "ends"
    step(place.start())
    assert names(place) == [conversations.TRIED_SUFFIX]
    step(place.start())
    assert names(place) == []
    assert place.logged == ["deleted a saved conversation, because llama-server exited while restoring it"]


def test_a_slot_that_computes_is_not_overwritten(place):
    saved(place, conversation(1))
    place.stub.busy = {0}
    keeper = place.start()
    step(keeper)
    assert place.stub.slots[0] == []
    assert (names(place), place.logged) == ([conversations.SAVED_SUFFIX], [])


@pytest.mark.parametrize(
    "broken, reason", [("refuses", "invalid slot save file"), ("ends", "llama-server did not answer")]
)
def test_a_save_that_fails_is_explained_once(place, broken, reason):
    keeper = place.start()
    step(keeper)
    place.stub.broken = broken
    for number in (1, 2):
        place.stub.slots[0] = conversation(number)
        step(keeper, 2)
    assert place.logged == [f"a conversation was not saved in {place.folder}: {reason}"]
    assert names(place) == []


def test_a_save_that_hangs_ends_llama_server_and_nothing_is_kept_for_a_while(place):
    keeper = place.start(settings=(100, 10, 0, 1000))
    step(keeper)
    place.stub.slots[0], place.stub.broken, place.stub.head.last_sample = conversation(1), "hangs", IDLE
    keeper.has_pending_slots = True
    keeper.fault()
    keeper.job_thread.join(10)
    assert keeper.fault() is None
    fault = keeper.fault()
    assert fault.is_silent
    assert fault.finding.endswith("has hung for 0 s: nothing is saved for the next 60 minutes")
    place.stub.broken = ""
    again = place.start()
    assert again.fault() is None
    assert again.job_thread is None, "the next start does not try again"


def test_no_more_than_the_limit_is_used_and_the_oldest_file_goes_first(place):
    saved(place, conversation(1), conversation(5000))
    sizes = [path.stat().st_size for path in place.folder.iterdir()]
    other = place.folder / "other-1.slot"
    other.write_bytes(b"x" * units.MIB)
    keeper = place.start(settings=(2, 10, 60, 1000))
    assert keeper._evict(units.MIB - 2 * sum(sizes))
    assert len(names(place)) == 3
    assert keeper._evict(units.MIB)
    assert not other.exists(), "files with another key go first"
    newest = keeper._paths(conversations.SAVED_SUFFIX)[-1]
    assert keeper._evict(2 * units.MIB - sizes[0])
    assert [*place.folder.iterdir()] == [newest]
    assert not keeper._evict(3 * units.MIB)
    assert newest.exists(), "what can never fit deletes nothing"


def test_the_last_part_of_a_disk_stays_free(place, monkeypatch):
    keeper, total = place.start(), 1000 * units.MIB
    step(keeper)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(total=total, free=51 * units.MIB))
    place.stub.slots[0] = conversation(1)
    step(keeper, 2)
    assert place.logged == [f"a conversation of 300 tokens was not saved: it does not fit into {place.folder}"]
    assert place.stub.asked == []


def test_ten_thousand_files_hide_no_conversation(place):
    saved(place, conversation(1))
    for number in range(10000):
        os.mknod(place.folder / f"other-{number}.slot")
    step(place.start())
    assert place.stub.slots[0] == conversation(1)


def test_a_folder_that_cannot_be_made_stops_nothing(place):
    place.folder.write_text("a file")
    argv = [*place.argv]
    assert conversations.open_store(argv, place.state, LIMITS, place.logged.append) is None
    assert argv == place.argv[:-2]
    assert place.logged[0].startswith("conversations are not kept: [Errno 17]")


def test_switched_off_nothing_is_written_and_what_was_kept_is_deleted(place):
    assert place.start(settings=()) is None
    assert not place.folder.exists()
    saved(place, conversation(1))
    assert place.start(settings=()) is None
    assert not place.folder.exists()
    assert place.logged == [f"conversations are no longer kept: {place.folder} was deleted"]


def test_an_idle_server_is_not_asked_so_that_it_can_sleep(place):
    keeper = place.start(llama_server.SLEEP_OPTION, "60")
    step(keeper)
    place.stub.head.last_sample, place.stub.slots[0] = IDLE, conversation(1)
    step(keeper, 3)
    assert names(place) == []
    busy = IDLE._replace(activity=IDLE.activity._replace(processor_seconds=1.0))
    place.stub.head.last_sample = busy
    step(keeper, 2)
    assert names(place) == [conversations.SAVED_SUFFIX]


def test_a_server_that_falls_asleep_is_restored_only_when_it_wakes(place):
    keeper = saved(place, conversation(1))
    keeper.watch_output(b"0.42.560.052 I srv  handle_sleep: server is entering sleeping state\n")
    step(keeper)
    assert place.stub.asked == []
    keeper.watch_output(b"0.42.692.925 I srv  handle_sleep: server is exiting sleeping state\n")
    keeper.job_thread.join(10)
    assert [action for action, _slot, _name in place.stub.asked] == ["restore"]


def test_another_process_on_the_port_gets_no_key(place):
    keeper = place.start()
    place.stub.head.last_sample, place.stub.head.listens = IDLE, lambda _sample: False
    place.stub.slots[0] = conversation(1)
    keeper.save_now()
    assert (names(place), place.stub.asked) == ([], [])
