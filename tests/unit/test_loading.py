"""What is shown of a model that is loaded, and when a server is not waited for any more."""

import json

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.drift import serving_record
from ansible_collections.llamacpp.cluster.plugins.module_utils.launcher import loading, serving
from ansible_collections.llamacpp.cluster.plugins.module_utils.launcher.loading import LoadCounters
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import replies
from ansible_collections.llamacpp.cluster.plugins.module_utils.verify import judge
from ansible_collections.llamacpp.cluster.plugins.module_utils.verify.server_client import LOADING
from ansible_collections.llamacpp.cluster.plugins.module_utils.verify.types import Exits, Health
from ansible_collections.llamacpp.cluster.plugins.module_utils.verify.waiting import (
    WORKER_TIMEOUT_SECONDS,
    ServerWait,
    load_bytes_of,
)
from conftest import typed
from support.verification import subject, unhealthy

ONE, TWO = "192.0.2.11:50052", "192.0.2.12:50052"
GB = 10**9
EXPECTED = loading.ExpectedBytes({ONE: 4 * GB, TWO: 2 * GB}, 3 * GB, uses_cache=False)


def load_of(seconds, one, two, read=None):
    return LoadCounters(seconds, read, {ONE: one, TWO: two})


def test_what_a_plan_has_on_each_device(pair):
    plan = typed(pair.plan())
    expected = load_bytes_of(plan)
    used = {entry.endpoint: round(entry.weights_mib * 1024 * 1024) for entry in plan.placement if entry.endpoint}
    assert expected == loading.ExpectedBytes(used, round(plan.head.cpu.weights_mib * 1024 * 1024), False)
    assert expected.head_bytes > 0
    pair.hosts["worker1"]["variables"]["llama_worker_endpoints"] = [{"name": "cpu", "cache": True}]
    assert load_bytes_of(typed(pair.plan())).uses_cache
    assert load_bytes_of(subject(pair.plan())._replace(placement=())) == loading.ExpectedBytes()


@pytest.mark.parametrize(
    "load, rate, left",
    [
        (load_of(10, 1 * GB, 0), 100_000_000, 80),
        (load_of(20, 3 * GB, 1 * GB, read=6 * GB), 300_000_000, 10),
        (load_of(30, 4 * GB + 9, 2 * GB + 9, read=9 * GB + 99), 300_000_000, None),
    ],
)
def test_rate_and_what_is_left(load, rate, left):
    progress = loading.progress_of(load, EXPECTED)
    assert (progress.bytes_per_s, progress.left_s) == (rate, left)


def shown(load, expected=EXPECTED):
    return loading.progress_sentence(loading.progress_of(load, expected))


def test_what_a_person_is_shown():
    assert shown(load_of(20, 1_200_000_000, 0, read=3_400_000_000)) == (
        f"1.2 of 4.0 GB sent to worker {ONE}, 0.0 of 2.0 GB sent to worker {TWO}, 3.4 of 9.0 GB read from files, 170 MB/s, about 33 s left"
    )
    small = loading.ExpectedBytes({ONE: 80_000_000}, 0, uses_cache=True)
    assert (
        shown(LoadCounters(4, None, {ONE: 20_000_000}), small)
        == f"20 of 80 MB sent to worker {ONE}, 5.0 MB/s, at most 12 s left"
    )
    unplanned = loading.progress_of(load_of(10, GB, 0), loading.ExpectedBytes())
    assert (unplanned.planned_bytes, unplanned.left_s) == (None, None)
    assert f"1.0 GB sent to worker {ONE}, 0 MB sent to worker {TWO}, 100" in loading.progress_sentence(unplanned)


def test_where_the_kernel_does_not_count_bytes_what_is_known_is_shown():
    unknown = "bytes sent to workers are unknown, because the kernel does not report them"
    assert shown(LoadCounters(10, 3 * GB, {})) == f"{unknown}, 3.0 of 9.0 GB read from files, 300 MB/s, about 20 s left"
    assert shown(LoadCounters(10, None, {})) == unknown
    assert f"? of 2.0 GB sent to worker {TWO}" in shown(LoadCounters(10, None, {ONE: GB}))


@pytest.fixture
def launcher(tmp_path):
    """Writes what a launcher writes whose process is 42."""

    def write(**changes):
        load = {**load_of(1.5, 2, 3)._asdict(), "more": "x"}
        (tmp_path / serving.RECORD_FILE).write_text(
            json.dumps({"state": "loading", "process": 42, "load": load, **changes})
        )
        return serving_record.launcher_record(tmp_path, [42])

    return write


def test_what_the_launcher_wrote_is_believed_in_its_form_alone(launcher, tmp_path):
    assert serving_record.launcher_record(tmp_path, [42]) is None
    assert launcher().load == load_of(1.5, 2, 3)
    for change in (
        {"process": 7},
        {"load": {"seconds": "x", "read": 1, "sent": {}}},
        {"load": {"seconds": 1, "read": 1, "sent": {"\x1b[2J": 1}}},
        {"load": {"seconds": 1, "read": -1, "sent": {}}},
        {"load": {"seconds": 1, "read": 1, "sent": {str(number): 1 for number in range(9999)}}},
    ):
        assert launcher(**change) is None


def test_a_moment_has_no_rate(launcher):
    """A compromised launcher may write any time."""
    for seconds in (0, 5e-324, 1e-300, 1e-9):
        record = launcher(load={"seconds": seconds, "read": 9 * GB, "sent": {ONE: GB}})
        progress = loading.progress_of(record.load, EXPECTED)
        assert (progress.bytes_per_s, progress.left_s) == (None, None)
        assert loading.progress_sentence(progress).startswith("1.0 of")


# ------------------------------------------------------------------------------------------------------------- waiting


def wait(plan, evidence, each, patience=600):
    """The evidence to judge, the lines that were shown, and the seconds that it took.

    :param plan: as JSON.
    :param each: seconds between one evidence and the next.
    """
    waiting, lines = ServerWait(subject(plan), patience), []
    for number, found in enumerate(evidence, 1):
        final = waiting.final_evidence_of(found, number * each)
        if final:
            return final, lines, number * each
        lines += filter(None, [waiting.progress_line(found, number * each)])
    raise AssertionError("it waits on")


def loads(plan, each, moved, number):
    """Evidence of a server that loads its model.

    :param moved: bytes that the first worker gets in each step.
    """
    endpoint = plan["placement"][0]["endpoint"]
    loads = [LoadCounters(each * step, None, {endpoint: moved(step)}) for step in range(1, number)]
    return [unhealthy(LOADING, load=load) for load in loads]


def test_a_line_every_ten_seconds(pair):
    plan = pair.plan()
    healthy = unhealthy(health=Health(True, "ok"))
    _final, lines, _seconds = wait(plan, [*loads(plan, 5.0, lambda step: 1000 * step, 8), healthy], 5.0)
    assert [line.rsplit(", ", 1)[1] for line in lines] == ["10 s", "20 s", "30 s"]
    assert all(f"to worker {plan['placement'][0]['endpoint']}" in line for line in lines)
    _final, lines, _seconds = wait(plan, [*loads(plan, 4.9, lambda step: step, 2), healthy], 4.9)
    assert lines == []


def test_a_timeout_says_how_far_each_worker_came(pair):
    plan = pair.plan()
    first = plan["placement"][0]["endpoint"]

    def gate(evidence):
        final, _lines, _seconds = wait(plan, evidence, 10.0, 60)
        return judge.serving_failure(subject(plan), final)

    message = gate(loads(plan, 10.0, lambda step: 1000 * step, 9))
    assert "the limit of 60 s has passed (llama_server_start_timeout" in message
    assert f"to worker {first}" in message
    assert "; increase llama_server_start_timeout if loading continues" in message
    assert "by default several times the predicted load time); increase" in gate([unhealthy(LOADING)] * 9)
    assert gate([unhealthy("refused")] * 9).endswith("healthy: refused.")


def test_a_server_that_ends_at_each_start_is_not_waited_for(pair):
    """It is never seen to run, and its launcher was started often before."""
    log = ("error: invalid argument: --colour",)
    evidence = [unhealthy(exits=Exits(number, "with status 1", log)) for number in (7, 8, 8, 10, 11)]
    evidence[3] = evidence[3]._replace(waits_for=("the head waits for worker x",))
    final, _lines, seconds = wait(pair.plan(), evidence, 5.0)
    assert seconds == 20
    assert (final.log, final.waits_for) == (log, ())
    assert final.health.detail.startswith("llama-server exited 3 times while verify waited")


def test_a_server_with_another_certificate_is_not_waited_for(pair):
    evidence = unhealthy(replies.WRONG_CERTIFICATE_MESSAGE)
    assert wait(pair.plan(), [evidence], 5.0) == (evidence, [], 5.0)


def test_a_worker_is_waited_for_longer_than_the_launcher_does(pair):
    """Else it would end before the launcher gives the worker up."""
    waiting = [unhealthy(waits_for=("the head waits for worker x",))] * 99
    assert wait(pair.plan(), waiting, 5.0)[2] == WORKER_TIMEOUT_SECONDS
    pair.hosts["head"]["variables"]["llama_server_fallback"] = True
    assert wait(pair.plan(), waiting, 5.0)[2] == 60 + WORKER_TIMEOUT_SECONDS
