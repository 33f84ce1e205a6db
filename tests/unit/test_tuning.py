"""What a search for faster settings tries, when it measures that again, and what it says of it."""

import json
from pathlib import Path

import pytest
import test_benchmark
import yaml
from ansible.errors import AnsibleActionFail
from ansible_collections.llamacpp.cluster.plugins.action import tune
from ansible_collections.llamacpp.cluster.plugins.module_utils.benchmark import matrix, tuning
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner import planner
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import cluster_inputs
from ansible_collections.llamacpp.cluster.plugins.plugin_utils import inventory
from conftest import CATALOGUE
from support import actions
from test_benchmark import MEASURED, Measuring, cluster_of, served_by

ROOT = Path(__file__).resolve().parents[2]
SPLIT = "llama_server_tensor_split"
FAILED = "1.0000 err no room\n2.0000 run ended with 1"


def candidates_of(*prompts, **variables):
    found = cluster_of(**MEASURED, **variables)
    request = matrix.request_of(found.hosts["head"]["variables"])._replace(prompts=prompts)
    return tuning.candidates(served_by(found), 16, request)


def test_one_thing_changes_at_a_time_and_the_planner_takes_all_of_it():
    tried, found = candidates_of(8192), cluster_of(**MEASURED)
    assert {"llama_server_batch": 2048, "llama_server_micro_batch": 256} in tried
    assert {"llama_server_cache_type_k": "q8_0", "llama_server_cache_type_v": "q8_0"} in tried
    assert sum(SPLIT in settings for settings in tried) == 2
    own = served_by(found)
    planned = {entry.endpoint: entry.layers + entry.output for entry in own.placement}
    for settings in tried:
        changed = cluster_inputs.read("llama_cluster", inventory.with_values(found.hosts, "head", settings))
        plan = planner.make(changed, {}, CATALOGUE, "runtime")
        assert not plan.refused
        assert plan.head.argv != own.head.argv
        moved = sorted(entry.layers + entry.output - planned[entry.endpoint] for entry in plan.placement)
        assert moved == ([-1, 1] if SPLIT in settings else [0, 0])


def test_what_the_objective_or_the_hosts_do_not_have_is_not_tried():
    assert not {"llama_server_batch", "llama_server_threads"} & set().union(*candidates_of())
    pieces = [one["llama_server_batch"] for one in candidates_of(100, 1024) if "llama_server_batch" in one]
    assert pieces == [2048, 2048], "other batches would be whole prompts, too"
    tried = candidates_of(
        512,
        llama_server_gpu_layers=4,
        llama_server_threads=8,
        llama_server_micro_batch=32,
        llama_server_flash_attention="on",
    )
    assert [one["llama_server_threads"] for one in tried if "llama_server_threads" in one] == [16]
    assert {"llama_server_flash_attention": "on"} not in tried
    assert min(one.get("llama_server_micro_batch", 32) for one in tried) == 32


def test_a_second_backend_of_the_head_is_tried():
    plan = served_by(cluster_of(**MEASURED))
    host = plan.hosts["head"]
    builds = (*host.builds, *(host.builds[0]._replace(id=name, backend=name) for name in ("vulkan", "hip")))
    plan = plan._replace(hosts={**plan.hosts, "head": host._replace(builds=builds)})
    request = matrix.request_of(cluster_of(**MEASURED).hosts["head"]["variables"])
    backends = [one.get("llama_server_backend") for one in tuning.candidates(plan, 16, request)]
    assert [name for name in backends if name] == ["vulkan", "hip"]


def tried(settings, *speeds, first=0):
    return tuning.Tried(settings, {first + turn: {"tg128": speed} for turn, speed in enumerate(speeds)})


A, B, C, BOTH = {"a": 1}, {"b": 1}, {"a": 2}, {"a": 1, "b": 1}


def gains_of(*settings, own=(10, 10, 10)):
    return tuning.gains([tried({}, *own), *settings])


def best_of(*settings):
    top = tuning.best(gains_of(*settings))
    return top and top.settings


def test_turns_are_compared_with_the_plans_own_of_the_same_turn():
    (gain,) = gains_of(tried(A, 11, 8.8, 5.5), own=(10, 8, 5))
    assert (round(gain.mean, 6), round(gain.spread, 6), gain.turns) == (1.1, 0, 3)
    (late,) = gains_of(tried(A, 5.5, 5, first=2), own=(10, 8, 5))
    assert (late.mean, late.turns) == (1.1, 1), "the plan's own was not measured in the other turn"
    own, other = ({0: {"pp512": speed, "tg128": 10.0}} for speed in (100.0, 400.0))
    assert tuning.gains([tuning.Tried({}, own), tuning.Tried(A, other)])[0].mean == pytest.approx(2)


def test_the_plans_settings_are_the_best_where_the_next_is_within_noise():
    assert best_of(tried(A, 12, 12, 12)) == A
    assert best_of(tried(A, 12, 12)) is None, "measured twice"
    assert best_of(tried(A, 10.1, 10.1, 10.1)) is None, "1 %"
    assert best_of(tried(A, 16, 9, 9)) is None, "13 % with a spread of 40"
    assert best_of(tried(BOTH, 12.1, 12.6, 11.9), tried(A, 12, 12, 12)) == A, "fewer changes"
    assert best_of(tried(BOTH, 14, 14.1, 13.9), tried(A, 12, 12, 12)) == BOTH


def test_rounds_keep_what_may_still_be_the_best_and_combine_what_was_faster():
    first = gains_of(*(tried({"a": number}, 9 + number) for number in range(5)), own=(10,))
    assert tuning.chosen(first) == [{"a": 4}, {"a": 3}, {"a": 2}]
    found = gains_of(tried(A, 12, 12, 12), tried(B, 11, 11, 11), tried(C, 11, 11, 11.1), tried({"c": 1}, 11, 10, 10.1))
    assert tuning.chosen(found) == [A, C, B, BOTH], "of the others one is the same, and one is noise"
    assert tuning.chosen(gains_of(tried(A, 12, 12, 12), tried(B, 10, 10, 10))) == [A]
    assert tuning.chosen(gains_of(tried(A, 10, 10, 10))) == []


class Tuning(Measuring):
    """The action of a search, on a head whose programs are as fast as a function of their options says."""

    def __init__(self, monkeypatch, speed, **variables):
        super().__init__(monkeypatch, cluster_of(**{**MEASURED, **variables}))
        monkeypatch.setattr(test_benchmark, "written_by", self.log_of)
        self.speed, self.loads = speed, 0

    def log_of(self, argv):
        self.loads += 1
        given, rows = dict(zip(argv, argv[1:])), []
        if "-n" not in given:  # llama-server, which is asked
            given.update({"-p": "0", "-n": "128"})
        for name, word in (("n_prompt", "-p"), ("n_gen", "-n")):
            figure = self.speed(name, given) * (1 - self.loads / 100_000)  # the host gets slower
            row = {"n_prompt": 0, "n_gen": 0, "samples_ts": [figure], "avg_ts": figure, "stddev_ts": 0.0}
            rows += [{**row, name: int(number)} for number in given[word].split(",") if figure and number != "0"]
        written = [f"1.0000 out {json.dumps(row)}" for row in rows]
        return "\n".join([*written, "2.0000 run ended with 0"]) if rows else FAILED

    def tune(self, path=None, check=False):
        given = {"path": str(path)} if path else {}
        return actions.run(tune, check_mode=check, plan=self.plan, facts={}, model={}, **given).get("settings")


def small_pieces(name, given):
    """Prompts are faster in smaller pieces, and all is with flash attention. Without it there is no room."""
    flash = {"on": 1.1, "off": 0}.get(given.get("-fa"), 1)
    return flash * (10 if name == "n_gen" else 120 if given.get("-ub") == "256" else 100)


def test_a_faster_setting_is_found_and_written_with_its_evidence(monkeypatch, tmp_path):
    make, search = planner.make, Tuning(monkeypatch, small_pieces, llama_tune_for="prompts")

    def without_room(cluster, *arguments):
        plan = make(cluster, *arguments)
        return (
            plan._replace(refused=True, reasons=("40 MiB are missing",)) if cluster.server.micro_batch == 1024 else plan
        )

    monkeypatch.setattr(planner, "make", without_room)
    wanted = {"llama_server_batch": 2048, "llama_server_flash_attention": "on", "llama_server_micro_batch": 256}
    assert search.tune(tmp_path / "new") == wanted
    text = (tmp_path / "new" / "tuned.yml").read_text()
    assert yaml.safe_load(text) == wanted
    assert text.startswith("# batch=2048, flash_attention=on, micro_batch=256 is 32.0 ± 0.0 % faster than the plan's")
    assert "#   the plan's: pp512 99.9" in text
    assert "6 turns; 20.0 ± 0.0 %\n" in text
    assert "#   batch=2048, micro_batch=1024: not measured, 40 MiB are missing\n" in text
    assert "#   flash_attention=off: not measured, llama-bench ended with status 1: no room\n" in text
    assert [search.host.calls.count(state) for state in ("started", "absent")] == [3, 3]
    words = [load["argv"] for load in search.host.loads]
    assert not [argv for argv in words if ("-ub", "1024") in zip(argv, argv[1:])]
    assert sum("off" in argv for argv in words) == 1, "it is not measured again"
    assert {(argv[argv.index("-r") + 1], argv[argv.index("-n") + 1]) for argv in words} == {("1", "0")}


def test_the_plans_settings_are_said_to_be_the_best(monkeypatch, tmp_path):
    search = Tuning(monkeypatch, lambda _name, given: 50 if given.get("-ctk") == "q8_0" else 100)
    assert search.tune(tmp_path) == {}
    text = (tmp_path / "tuned.yml").read_text()
    assert yaml.safe_load(text) == {}
    assert text.startswith("# The plan's settings are the best: nothing is faster by 2 % and more than noise.\n")
    assert search.host.calls.count("started") == 2, "no third round"


def test_when_the_minutes_are_over_the_server_serves_and_the_plan_stays(monkeypatch):
    search, clock = Tuning(monkeypatch, small_pieces), iter(range(0, 100_000, 60))
    monkeypatch.setattr(tune.time, "monotonic", lambda: next(clock))
    assert search.tune() == {}
    assert "The plan's settings stay, since nothing was measured often enough. llama_tune_min" in search.said[-1]
    assert (search.host.calls.count("started"), search.host.calls[-1]) == (1, "absent")


def test_what_was_found_is_written_before_a_later_round_fails(monkeypatch, tmp_path):
    search = Tuning(monkeypatch, small_pieces, llama_tune_for="prompts")
    answer = search.host.answer

    def fails(name, arguments):
        last = arguments.get("state") == "started" and search.host.calls.count("started") == 2
        return {"failed": True, "msg": "no"} if last else answer(name, arguments)

    search.host.answer = fails
    with pytest.raises(AnsibleActionFail, match="benchmark_job on head: no"):
        search.tune(tmp_path)
    text = (tmp_path / "tuned.yml").read_text()
    assert "faster than the plan's settings. The search was cut off: run tune.yml again.\n" in text
    assert yaml.safe_load(text)["llama_server_micro_batch"] == 256
    assert "3 turns" in text


def test_a_search_that_somebody_ends_begins_anew(monkeypatch):
    search = Tuning(monkeypatch, small_pieces)
    search.host.lies = {"benchmark_info": {"running": False, "lines": ""}}
    with pytest.raises(AnsibleActionFail, match=r"restarted\. Run this playbook again, which begins anew\."):
        search.tune()


@pytest.mark.parametrize("fallback", [True, False])
def test_no_setting_takes_the_fallbacks_away(monkeypatch, tmp_path, fallback):
    search = Tuning(monkeypatch, small_pieces, llama_server_fallback=fallback)
    assert search.plan["fallbacks"]
    search.tune(tmp_path)
    lines = [line for line in (tmp_path / "tuned.yml").read_text().splitlines() if "tensor_split" in line]
    assert len(lines) == 2
    lost = "not measured, nothing could be served without worker1:cpu (llama_server_tensor_split says"
    assert [lost in line for line in lines] == [fallback] * 2


def test_predicted_tokens_are_compared_with_llama_server_as_it_continues_the_operators_text(monkeypatch, tmp_path):
    def speed(name, given):
        """llama-server is slower than the program that measures, but where it predicts."""
        return (24 if "--spec-type" in given else 8) if "--model" in given else small_pieces(name, given)

    search = Tuning(monkeypatch, speed, llama_benchmark_text="as I write", llama_benchmark_generated=[128])
    assert search.tune(tmp_path) == {"llama_server_speculation": "ngram"}
    text = (tmp_path / "tuned.yml").read_text()
    assert "speculation=ngram is 200.0 ± 0.0 % faster" in text
    assert "tg128 of the text 8.00" in text, "the plan's own"
    asked = [load["asks"]["text"] for load in search.host.loads if load["asks"]]
    assert asked == ["as I write"] * len(asked) != []
    assert not [load for load in search.host.loads if load["asks"] and "llama-bench" in load["argv"][0]]


@pytest.mark.parametrize(
    "variables", [{}, {"llama_benchmark_text": "x", "llama_server_speculation": "ngram"}, {"llama_tune_for": "prompts"}]
)
def test_tokens_are_not_predicted_of_no_text_twice_or_in_prompts(variables):
    text = {"llama_benchmark_text": "x", "llama_benchmark_generated": []} if "llama_tune_for" in variables else {}
    assert not [one for one in candidates_of(512, **{**variables, **text}) if matrix.SPECULATION in one]


def test_without_a_folder_the_file_is_shown(monkeypatch):
    search = Tuning(monkeypatch, small_pieces, llama_tune_for="prompts")
    wanted = search.tune()
    assert yaml.safe_load(search.said[-1].split("tune: ", 1)[1]) == wanted != {}


REFUSED = [
    ({"llama_benchmark_programs": False}, "the release on head has no llama-bench: set llama_benchmark_programs"),
    ({"llama_tune_minutes": 0}, "the plan's own settings cannot be measured: llama_tune_minutes are over"),
    ({"llama_tune_for": "prompts", "llama_benchmark_prompts": []}, "llama_benchmark_prompts is empty: give a number"),
    ({"llama_benchmark_generated": []}, "llama_tune_for is both, and llama_benchmark_generated is empty"),
    ({"llama_server_flash_attention": "off"}, "the plan's own settings cannot be measured: llama-bench ended with"),
]


@pytest.mark.parametrize("variables, message", REFUSED)
def test_what_cannot_be_searched_is_said(monkeypatch, tmp_path, variables, message):
    with pytest.raises(AnsibleActionFail, match=message):
        Tuning(monkeypatch, small_pieces, **variables).tune(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_head_that_does_not_measure_fails_the_task_and_check_mode_asks_nothing_of_it(monkeypatch):
    search = Tuning(monkeypatch, small_pieces)
    search.tune(check=True)
    said = (
        "  [head] tune: 9 settings to measure, 0 not possible; what is found is only shown, since llama_benchmark_path"
    )
    assert ([text.startswith(said) for text in search.said], search.host.calls) == ([True], [])
    search.host.lies = {"started": {"failed": True, "msg": "it is there already"}}
    with pytest.raises(AnsibleActionFail, match="benchmark_job on head: it is there already"):
        search.tune()


def test_the_playbook_is_that_of_benchmarks_with_other_tasks():
    (play,) = yaml.safe_load((ROOT / "playbooks" / "tune.yml").read_text())
    assert play["ansible.builtin.import_playbook"] == "benchmark.yml"
    assert 'tasks_from: "{{ __llama_benchmark_tasks |' in (ROOT / "playbooks/tasks/measure.yml").read_text()
    assert (ROOT / "roles/llama_benchmark/tasks" / f"{play['vars']['__llama_benchmark_tasks']}.yml").exists()
