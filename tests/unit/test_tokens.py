"""What the launcher notes of /metrics, and what that says of the last hour."""

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.launcher import tokens

NOW = 1_800_000_000


def note(ago, counted, start=0):
    """:param ago: seconds."""
    return {"time": NOW - ago, "start": start, **dict.fromkeys(tokens.COUNTERS, float(counted))}


@pytest.mark.parametrize(
    "notes, counted, seconds",
    [
        ([note(0, 5)], 0, 0),
        ([note(600, 0), note(0, 5)], 5, 600),
        ([note(7000, 1), note(3900, 10), note(3599, 12), note(0, 15)], 5, 3900),
        ([note(7000, 10), note(4000, 90)], 0, 4000),
        ([note(900, 0), note(700, 9), note(500, 0, start=1), note(0, 2, start=1)], 11, 900),
        ([note(5000, 1), note(4500, 99), note(500, 0, start=1), note(0, 2, start=1)], 2, 4500),
        ([note(900, 50), note(0, 2)], 0, 900),
    ],
    ids=["one", "a new server", "the last hour", "nothing since", "two starts", "an old start", "it went backwards"],
)
def test_the_last_hour(notes, counted, seconds):
    assert tokens.of_last_hour(notes, NOW) == {**dict.fromkeys(tokens.COUNTERS, counted), "seconds": seconds}


def test_nothing_is_known_without_notes():
    assert tokens.of_last_hour([], NOW) is None


@pytest.fixture
def notes(tmp_path, monkeypatch):
    """Notes into a list, and the clock of the file."""
    written, clock = [], [NOW]
    monkeypatch.setattr(tokens.time, "time", lambda: clock[0])
    made = tokens.Notes(tmp_path, [], lambda _path, content: written.append(content) is None)
    return made, written, clock


TEXT = "".join(f"llamacpp:{name} 7\r\n" for name in tokens.COUNTERS.values())


def test_the_first_note_is_zero_and_a_question_without_an_answer_is_asked_again_soon(notes):
    made, written, _clock = notes
    made.look(lambda: pytest.fail("nothing is counted yet"), 0.0)
    assert written[-1]["notes"][-1]["generated_tokens"] == 0.0
    made.look(lambda: pytest.fail("it is too early"), tokens.EVERY_SECONDS - 1)
    made.look(lambda: "", tokens.EVERY_SECONDS)
    assert len(written) == 1
    made.look(lambda: TEXT, tokens.EVERY_SECONDS + tokens.AGAIN_SECONDS)
    assert written[-1]["notes"][-1]["generated_tokens"] == 7.0
    assert written[-1]["notes"][-1]["start"] == NOW


def test_the_file_is_bounded_and_forgets_what_is_old_or_of_the_future(notes):
    made, written, clock = notes
    made.kept = [note(0, 0)]
    for number in range(200):
        made.look(lambda: TEXT, number * tokens.EVERY_SECONDS)
    assert len(written[-1]["notes"]) == tokens.MOST_NOTES
    clock[0] += tokens.KEPT_SECONDS + 1
    made.look(lambda: TEXT, 200 * tokens.EVERY_SECONDS)
    assert len(written[-1]["notes"]) == 1
    clock[0] -= 86400
    made.look(lambda: TEXT, 201 * tokens.EVERY_SECONDS)
    assert [kept["time"] for kept in written[-1]["notes"]] == [clock[0]]


@pytest.mark.parametrize(
    "odd",
    [
        *(None, [], {}, {"notes": 7}, {"notes": [7]}, {"notes": [{"time": 1}]}),
        *({"notes": [{**note(0, 0), "time": when}]} for when in (-1, -(10**400), 10**400, float("inf"))),
        *({"notes": [{**note(0, 0), "generation_s": seconds}]} for seconds in (float("nan"), float("inf"), 1e300, -1)),
    ],
)
def test_a_file_of_another_form_is_forgotten(odd):
    assert tokens.kept_notes(odd) == []


def test_what_was_noted_is_read_again():
    kept = [note(number, number) for number in range(tokens.MOST_NOTES + 5)]
    assert tokens.kept_notes({"notes": kept}) == kept[-tokens.MOST_NOTES :]
