"""What follows from the speeds of models of random weights, and how it is measured, kept, used and shown."""

import copy
import json
import statistics
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from ansible.errors import AnsibleActionFail
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar, trust_as_template
from ansible_collections.llamacpp.cluster.plugins.action import calibrate
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.lifecycle import changes
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import calibration, device_rates, random_file
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import gguf, summary
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import plan_text
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.facts import Accelerator
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import cluster_inputs
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement import cost_model
from ansible_collections.llamacpp.cluster.plugins.module_utils.status import cluster_status, status_text
from ansible_collections.llamacpp.cluster.plugins.modules import calibration as module
from support import actions
from support.clusters import CARD
from test_benchmark import MEASURED, Measuring, cluster_of, served_by

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
import calibrated_figures as figures

ROOT = Path(__file__).resolve().parents[2]
RECORDED = figures.Results(Path(__file__).with_name("data") / "benchmark" / "calibration-h100.jsonl")
"""Of all devices and models of tests/benchmarks/calibrated_figures.py on one machine."""
WHAT = calibration.Measured("NVIDIA H100 80GB HBM3", "2026-11-25", "0.3.36", 11063)


def speeds(device, but=None):
    return figures.speeds_of(RECORDED, device, but)


def test_what_was_recorded_is_what_the_device_is():
    rates = calibration.fit(WHAT, speeds("CUDA0"))
    assert 1400 < rates.gb_per_s["Q6_K"] < rates.gb_per_s["Q4_K"] < rates.gb_per_s["F16"] < 3350
    assert (0.5 < rates.node_us < 2, 0.03 < rates.visit_ms < 0.2, rates.spread < 0.1) == (True, True, True)
    assert 1000 < rates.cache_gb_per_s < 3350
    assert rates.odd_nodes > rates.experts_nodes + 5, "steps in which it chooses among 96 experts"
    lent = calibration.fit(WHAT, speeds("CUDA0 lent"))
    assert lent.visit_ms > 3 * rates.visit_ms
    assert 3 < lent.gbit < 20 < rates.gbit


def test_behind_a_worker_is_what_the_device_is_by_itself_and_what_the_worker_adds():
    alone, found = speeds("CUDA0"), speeds("CUDA0 lent")
    own, lent = calibration.fit(WHAT, alone), calibration.fit(WHAT, found)
    both = calibration.behind_worker(own, alone, lent, found)
    assert both == own._replace(visit_ms=both.visit_ms, gbit=lent.gbit, spread=both.spread)
    assert own.visit_ms < both.visit_ms < 3 * lent.visit_ms
    wide, large = (calibration.Trial(kind, "Q4_K", layers, rapid=True) for kind, layers in (("wide", 8), ("large", 24)))
    took = 1000 / statistics.median(found[wide]["tg"][2:])
    slow = {**found, wide: {**found[wide], "tg": [1000 / (took + 0.8)] * 8}}
    noisy = {**slow, large: {"tg": [1000 / (1000 / statistics.median(found[large]["tg"][2:]) + 0.8)] * 8}}
    assert calibration.fit(WHAT, noisy).gb_per_s["Q4_K"] < 0.95 * lent.gb_per_s["Q4_K"], "its noise counts as bytes"
    later = took + 0.8 - 1000 / statistics.median(alone[wide]["tg"][2:])
    of_slow = both._replace(visit_ms=pytest.approx(own.visit_ms + later, abs=0.01))
    assert calibration.behind_worker(own, alone, lent, slow) == of_slow
    rested = {**found, large: {"tg": [1000 / (3 * took + 1)] * 8}}
    assert calibration.behind_worker(own, alone, lent, rested).visit_ms > both.visit_ms + 0.5, "nobody knows it alone"
    fast = {trial: {**of, "tg": [1e6] * 8} for trial, of in found.items() if "tg" in of}
    assert calibration.behind_worker(own, alone, lent, fast).visit_ms == own.visit_ms


LENT = "CPU lent 192.0.2.11"
WITHIN = {"tg": 0.15, "pp": 0.25, "tg8192": 0.2, "pp8192": 0.38}
"""Test → by how much what is planned may be off."""


@pytest.mark.parametrize(
    "key", [key for key in RECORDED.rows if key[0] == "model"], ids=lambda key: f"{key[1]} {key[2]}"
)
def test_other_models_are_predicted_from_what_was_measured(key):
    planned = figures.planned(RECORDED, key[1], key[2], "CUDA0", 11063)
    for test, samples in RECORDED.rows[key]["found"].items():
        assert planned[test] == pytest.approx(statistics.median(samples[1:]), rel=WITHIN[test]), test


def test_without_a_calibration_the_range_has_four_of_five_figures(monkeypatch):
    known, card = figures.facts_of, Accelerator("cuda", WHAT.name, "9.0", 81559, unified=False)
    monkeypatch.setattr(figures, "facts_of", lambda *given: known(*given)._replace(accelerators=(card,)))
    monkeypatch.setattr(figures, "speeds_of", lambda *_given: {})
    inside, factor = [], device_rates.FAMILIES["datacenter"].factor
    for key in (key for key in RECORDED.rows if key[0] == "model" and key[2] == figures.ALONE):
        planned = figures.planned(RECORDED, key[1], key[2], "CUDA0", 11063)
        for test, most in (("tg", factor), ("pp", factor**cost_model.PROMPT_SURE)):
            ratio = planned[test] / statistics.median(RECORDED.rows[key]["found"][test][1:])
            inside.append(1 / most <= ratio <= most)
    assert statistics.mean(inside) >= 0.8


def test_what_was_not_measured_is_as_the_table_says():
    """A filled cache, and experts of another number."""
    rates = calibration.fit(WHAT, speeds("CUDA0", but=("deep", "odd")))
    assert (rates.odd_nodes, rates.cache_gb_per_s, rates.attention_gflops) == (None, None, None)


def test_noise_widens_the_range_and_what_cannot_be_is_refused():
    quiet = calibration.fit(WHAT, speeds("CUDA0"))
    noisy = {
        trial: {
            test: [sample * (1 + 0.2 * (place % 2)) for place, sample in enumerate(samples)]
            for test, samples in found.items()
        }
        for trial, found in speeds("CUDA0").items()
    }
    assert calibration.fit(WHAT, noisy).spread > quiet.spread + 0.1
    wild = {
        trial: {
            test: [sample * (1 + place % 2) for place, sample in enumerate(samples)] for test, samples in found.items()
        }
        for trial, found in speeds("CUDA0").items()
    }
    with pytest.raises(Refusal, match=r"repetitions differ by .*%: something else computed there meanwhile"):
        calibration.fit(WHAT, wild)
    slow = {
        trial: {test: [sample / 1e4 for sample in samples] for test, samples in found.items()}
        for trial, found in speeds("CUDA0").items()
    }
    with pytest.raises(Refusal, match="were measured, and there are"):
        calibration.fit(WHAT, slow)
    with pytest.raises(Refusal, match="the models wide, half, link were not measured; the table"):
        calibration.fit(
            WHAT, {trial: found for trial, found in speeds("CUDA0").items() if trial.kind in ("short", "long")}
        )


@pytest.mark.parametrize("large", [True, False])
def test_a_visit_to_a_worker_that_sleeps_longer_does_not_make_bytes_slower(large):
    found = speeds("CUDA0")
    before = calibration.fit(WHAT, found)
    kind, rate = "Q4_K", before.gb_per_s["Q4_K"]
    if large:
        most, wide = calibration.Trial("large", kind, 24, rapid=True), calibration.Trial("wide", kind, 8, rapid=True)
        one = calibration._Counts(calibration.Trial("wide", kind, 1))
        layer_ms = one.read / rate / 1e6 + one.nodes * before.node_us / 1e3
        found[most] = {"tg": [1000 / (1000 / statistics.median(found[wide]["tg"][2:]) + 16 * layer_ms)] * 8}
    woken = {"short": 0.2, "long": 0.2}
    slept = {
        trial: {
            test: [
                1 / (1 / sample + woken.get(trial.kind, 0.4) / 1000) if test == "tg" else sample for sample in samples
            ]
            for test, samples in tests.items()
        }
        for trial, tests in found.items()
    }
    after = calibration.fit(WHAT, slept)
    assert (after.gb_per_s[kind] > 0.85 * rate) is large, "else what is slept longer counts as bytes"
    assert after.visit_ms == pytest.approx(before.visit_ms + (0.35 if large else 0.2), abs=0.03)


def test_a_worker_that_is_far_away_is_measured():
    near = speeds("CPU lent")
    far = {
        trial: {
            test: [tokens / (tokens / sample + 0.2) for sample in samples]
            for test, samples in found.items()
            for tokens in (calibration.PROMPT if test.startswith("pp") else 1,)
        }
        for trial, found in near.items()
    }
    expected = calibration.fit(WHAT, near).visit_ms + 200
    assert calibration.fit(WHAT, far).visit_ms == pytest.approx(expected, rel=0.02)


def named(trials):
    return [f"{trial.kind} {trial.type}" for trial in trials]


def test_what_the_served_model_needs_is_measured_first():
    found = calibration.trials(["Q8_0"], ["MXFP4"], 10_000, lent=False)
    assert [trial.kind for trial in found[:6]] == ["wide", "short", "long", "half", "link", "deep"]
    assert named(found[6:10]) == ["experts Q4_K", "odd Q4_K", "wide MXFP4", "wide Q4_K"]
    assert {trial.dense for trial in found[6:8]} == {"Q8_0"}
    behind_a_worker = calibration.trials(["MXFP4"], [], 10_000, lent=True)
    assert [trial for trial in behind_a_worker if trial.kind == "large"] == [
        calibration.Trial("large", "MXFP4", 24, rapid=True)
    ]
    of_worker = calibration.trials(["MXFP4"], [], 10_000, lent=True, is_known=True)
    assert [trial.kind for trial in of_worker] == ["wide", "short", "long", "half", "link", "large"]
    assert calibration.trials(["NVFP4"], [], 100, lent=False)[0].type == "Q4_K", "what it cannot make is left out"


def test_slow_devices_are_measured_with_experts_of_each_type_and_smaller_models():
    """Processors have kernels of their own for some types; a dense model of MXFP4 takes them a minute, and there is none."""
    few = calibration.trials(["Q8_0", "F16"], ["MXFP4", "Q6_K"], 1000, lent=True)
    assert named(few[6:11]) == ["experts MXFP4", "experts Q6_K", "wide F16", "experts Q4_K", "wide Q4_K"]
    assert "wide MXFP4" not in named(few)
    assert "odd" not in {trial.kind for trial in few}, "bytes take so long there that steps do not matter"
    without = calibration.trials(["F16"], [], 1000, lent=True)
    assert named(without[6:8]) == ["experts Q4_K", "experts MXFP4"], "models to come have them"
    fast = {trial.kind: trial for trial in reversed(calibration.trials(["Q8_0"], [], 10_000, lent=True))}
    assert few[6].layers < fast["experts"].layers
    assert few[0].layers == fast["wide"].layers
    assert calibration.trials(["Q8_0"], [], 100, lent=True)[0].layers < few[0].layers
    assert few[0].tests[1] < fast["wide"].tests[1], "the first tokens of a repetition take longer"


def test_experts_of_another_type_are_as_their_own_model_says():
    found = speeds("CPU lent")
    rates = calibration.fit(WHAT, found)
    of_experts = {
        kind: calibration._rate(rates.prompt_gflops, kind, 1) / longer
        for kind, longer in rates.experts_multiplied.items()
    }
    assert of_experts["Q4_K"] > 2 * of_experts["MXFP4"]
    late = {
        trial: {test: [1 / (1 / rate + 0.005 * (test == "tg")) for rate in of[test]] for test in of}
        for trial, of in found.items()
    }
    noisy = calibration.fit(WHAT, late)
    assert (noisy.experts_nodes, list(noisy.experts_read)) == (rates.experts_nodes, ["Q4_K", "MXFP4"]), (
        "steps do not matter there"
    )
    without = {trial: of for trial, of in found.items() if trial.type != "MXFP4"}
    assert list(calibration.fit(WHAT, without).experts_multiplied) == ["Q4_K"]
    for kind in ("MXFP4", "Q4_K", "Q6_K"):
        longer = calibration._longer(rates.experts_multiplied, kind)
        assert longer == rates.experts_multiplied["MXFP4" if kind == "MXFP4" else "Q4_K"]
    assert calibration._longer({}, "Q4_K") == 1


def test_what_is_planned_does_not_depend_on_the_order_that_a_file_has():
    rates = calibration.fit(WHAT, speeds("CUDA0"))
    kept = typed_json.parse(calibration.Rates, json.loads(json.dumps(typed_json.dump(rates), sort_keys=True)))
    rates, kept = (
        of._replace(gb_per_s={kind: rate for kind, rate in of.gb_per_s.items() if kind != "Q4_0"})
        for of in (rates, kept)
    )
    assert list(kept.gb_per_s) != list(rates.gb_per_s)
    for row in (row for key, row in RECORDED.rows.items() if key[0] == "summary"):
        model = summary.parse(row["summary"])
        assert calibration.for_model(kept, model, 0.1, 1e9, 1e9, 31) == calibration.for_model(
            rates, model, 0.1, 1e9, 1e9, 31
        )


def test_a_model_of_random_weights_is_one_that_llama_cpp_reads(tmp_path):
    names = []
    for trial in (
        calibration.Trial("short", "Q4_K", 4),
        calibration.Trial("short", "MXFP4", 4),
        calibration.Trial("experts", "MXFP4", 1, dense="Q8_0"),
    ):
        path = tmp_path / f"{trial.name}.gguf"
        names.append(trial.name)
        random_file.write(path, trial)
        model = gguf.read_path(str(path))
        assert {tensor.type for tensor in model.tensors.values()} == {"F32", "F16", trial.type, trial.dense} - {""}
        assert {tensor.type for name, tensor in model.tensors.items() if "_exps" in name} <= {"MXFP4"}
        assert path.stat().st_size > sum(row.number * row.bytes for row in trial.tensors())
    assert names[-1] == "calibration-experts-mxfp4-q8_0-1"


@pytest.fixture
def calibrated(monkeypatch):
    """A cluster, whose head measures."""

    def make(cards=False, **variables):
        """:param cards: whether each host has one, and workers lend them."""
        found = cluster_of("worker1", **{**MEASURED, **variables})
        if cards:
            found.hosts["head"]["groups"].append("worker")
            for host in found.hosts.values():
                host["facts"].update(copy.deepcopy(CARD))
                host["variables"]["llama_worker_endpoints"] = [{"device": "CUDA0"}]
        measuring = Measuring(monkeypatch, found)
        lent, own = ("CUDA0 lent", "CUDA0") if cards else ("CPU lent", "CPU lent")
        written = {
            (is_lent, trial.kind, trial.type): row
            for is_lent, device in ((True, lent), (False, own))
            for trial, row in speeds(device).items()
        }
        answer = measuring.host.answer

        def recorded(name, arguments):
            if name == "calibration":
                measuring.kept = arguments
                return {}
            if arguments.get("state") == "started":
                for load in arguments["job"]["loads"]:
                    load["argv"] += ["-d", "0"]
            found = answer(name, arguments)
            loads = {load["log"]: load for load in measuring.host.loads}
            load = loads.get(arguments.get("log"))
            return {**found, "lines": _log(load, written)} if load else found

        measuring.host.answer = recorded
        return measuring

    return make


def _log(load, written):
    """What llama-bench wrote of a model, where it was recorded."""
    kind, of = Path(load["argv"][2]).stem.split("-")[1:3]
    place = "-rpc" in load["argv"]
    row = written.get((place, kind, of.upper())) or written[place, kind.replace("large", "wide"), "Q4_K"]
    if kind == "large":  # of three times as many layers
        row = {"tg": [sample / 3 for sample in row["tg"]]}
    lines = [
        json.dumps(
            {
                "n_prompt": 512 if test.startswith("pp") else 0,
                "n_gen": int(dict(zip(load["argv"], load["argv"][1:]))["-n"]) if test.startswith("tg") else 0,
                "n_depth": int(test[2:] or 0),
                "samples_ts": samples,
                "avg_ts": statistics.fmean(samples),
                "stddev_ts": 0,
            }
        )
        for test, samples in row.items()
    ]
    return "\n".join([*(f"1.0000 out {line}" for line in lines), "2.0000 run ended with 0"])


def run(measuring, check=False):
    facts = {"head": {"facts": {"calibrations": {}}}}
    return actions.run(calibrate, check_mode=check, plan=measuring.plan, facts=facts, model=measuring.model)


def test_each_device_is_measured_and_its_rates_are_kept(calibrated):
    measuring = calibrated()
    result = run(measuring)
    assert "problem" not in result
    assert measuring.kept["rates"] == result["rates"]
    assert list(result["rates"]["worker1"]) == [LENT]
    assert result["rates"]["worker1"][LENT]["cache_gb_per_s"] == pytest.approx(9.6, rel=0.2)
    deep = next(load["argv"] for load in measuring.host.loads if "-deep-" in load["argv"][2])
    assert deep[deep.index("-d") + 1] == "1024,4096"
    argv = measuring.host.loads[0]["argv"]
    assert argv[argv.index("-rpc") : argv.index("-rpc") + 4] == ["-rpc", "192.0.2.11:50052", "-dev", "RPC0"]
    assert {load["share"] for load in measuring.host.loads} == {measuring.host.loads[0]["share"]}
    assert [load["needed"] for load in measuring.host.loads][:6] == [True] * 5 + [False]
    assert any("GB/s" in text and "ms a visit" in text for text in measuring.said)


def test_the_heads_processor_is_measured_where_it_has_layers(calibrated):
    measuring = calibrated(llama_server_gpu_layers=8)
    rates = run(measuring)["rates"]
    assert {name: list(own) for name, own in rates.items()} == {"head": ["CPU"], "worker1": [LENT]}
    argv = next(load["argv"] for load in measuring.host.loads if "-rpc" not in load["argv"])
    assert {"-dev": "none", "-ngl": "0"}.items() <= dict(zip(argv, argv[1:])).items()
    found = cluster_of("worker1", **MEASURED, llama_server_gpu_layers=8)
    assert changes.decide(served_by(found), {}).uncalibrated[0] == "CPU"
    for name, own in rates.items():
        found.hosts[name]["facts"]["calibrated"] = own
    assert changes.decide(served_by(found), {}).uncalibrated == [], "site.yml does not measure it each time"


def test_a_device_that_workers_lend_is_measured_without_them_once(calibrated):
    """The head lends its own, and the other host has one more of that kind."""
    measuring = calibrated(cards=True)
    result = run(measuring)
    assert "problem" not in result
    rates = result["rates"]
    assert {name: sorted(own) for name, own in rates.items()} == {
        "head": ["CUDA0", "CUDA0 lent 127.0.0.1"],
        "worker1": ["CUDA0 lent 192.0.2.11"],
    }
    assert len({json.dumps(own["gb_per_s"]) for host in rates.values() for own in host.values()}) == 1
    loads = measuring.host.loads
    alone = [load for load in loads if "-rpc" not in load["argv"]]
    assert {dict(zip(load["argv"], load["argv"][1:]))["-dev"] for load in alone} == {"CUDA0"}
    assert {load["environment"].get("CUDA_VISIBLE_DEVICES") for load in alone} == {None}
    assert {load["environment"].get("CUDA_VISIBLE_DEVICES") for load in loads if load not in alone} == {"-1"}
    assert [
        len([load for load in loads if f"{address}:" in str(load["argv"])]) for address in ("127.0.0.1", "192.0.2.11")
    ] == [6, 6]
    assert "DeviceAllow=char-nvidia*" in measuring.host.definition


def test_check_mode_measures_nothing(calibrated):
    measuring = calibrated()
    assert run(measuring, check=True)["changed"]
    assert "started" not in measuring.host.calls
    assert not hasattr(measuring, "kept")


def test_programs_that_cannot_measure_are_said(calibrated):
    with pytest.raises(
        AnsibleActionFail, match=r"has no llama-bench: set llama_benchmark_programs to true, run site.yml"
    ):
        run(calibrated(llama_benchmark_programs=False))


def test_what_was_measured_is_in_the_plan_and_older_than_another_release(calibrated):
    rates = run(calibrated())["rates"]["worker1"]
    found = cluster_of("worker1", **MEASURED)
    found.hosts["worker1"]["facts"]["calibrated"] = rates
    plan = served_by(found)
    device = next(one for one in plan.estimate.devices if one.host == "worker1")
    assert (device.source, device.measured) == ("measured", next(iter(rates.values()))["date"])
    assert f"Rates of devices are measured on {device.measured}" in " ".join(plan_text.speed_notes(plan))
    assert changes.decide(plan, {}).uncalibrated == []
    visits = "Visits to worker1 cost what was measured (calibrate.yml)."
    assert visits in " ".join(plan_text.plan_page(plan).split())
    found.hosts["worker1"]["ansible_host"] = "192.0.2.99"
    moved = served_by(found)
    assert changes.decide(moved, {}).uncalibrated == [moved.estimate.devices[0].device], (
        "it is reached over another link"
    )
    assert visits not in " ".join(plan_text.plan_page(moved).split())
    found.hosts["worker1"]["ansible_host"] = "192.0.2.11"
    found.hosts["worker1"]["facts"]["calibrated"] = {key: {**rate, "generation": 1} for key, rate in rates.items()}
    older = served_by(found)
    assert changes.decide(older, {}).uncalibrated == [device.device]
    assert "another release: calibrate.yml measures again" in " ".join(plan_text.speed_notes(older))
    status = cluster_status.of_cluster("llama_cluster", ["head"], older, {})
    one = next(one for one in older.estimate.devices if one.host == "worker1")
    said = f"measured {one.device} on {one.measured}, and another release serves: run playbooks/calibrate.yml"
    assert said in " ".join(status_text.text_of(status).split())
    assert cluster_status.of_cluster("llama_cluster", ["head"], plan, {}).cluster.calibrated is None
    found.hosts["worker1"]["facts"]["calibrated"] = {key: {**rate, "name": "other"} for key, rate in rates.items()}
    other = served_by(found)
    assert (other.estimate.devices[0].measured, changes.decide(other, {}).uncalibrated) == (None, [device.device])


@pytest.mark.parametrize(
    "wanted, devices, ends", [(True, ["CPU"], False), (True, [], True), (False, ["CPU"], True)], ids=str
)
def test_site_measures_devices_once_where_the_operator_says_so(wanted, devices, ends):
    play = next(
        play for play in yaml.safe_load((ROOT / "playbooks/site.yml").read_text()) if play["name"] == "Calibrate"
    )
    known = {"llama_calibrate": wanted, "ansible_check_mode": False}
    known["__llama_changes"] = {"uncalibrated": devices, "unreached": []}
    condition = trust_as_template("{{ " + play["tasks"][0]["when"] + " }}")
    assert Templar(DataLoader(), known).template(condition) is ends
    assert cluster_inputs.read("c", cluster_of("worker1", llama_calibrate=wanted).hosts).measures is wanted


def test_models_are_written_once_where_there_is_room_and_removed(tmp_path, monkeypatch):
    (tmp_path / "benchmarks").mkdir()
    models = [["short", "Q4_K", 4]]
    with monkeypatch.context() as full:
        full.setattr(module.shutil, "disk_usage", lambda _folder: SimpleNamespace(free=1000))
        with pytest.raises(
            Refusal, match=r"the models of the calibration need [\d.]+ MB on .*, which has 0.0 MB left: free some"
        ):
            module.apply(str(tmp_path), models, None, False)
    assert module.apply(str(tmp_path), models, None, True)
    assert module.apply(str(tmp_path), models, None, False)
    assert not module.apply(str(tmp_path), models, None, False)
    assert module.apply(str(tmp_path), [], {"head": {}}, False)
    assert not module.apply(str(tmp_path), [], {"head": {}}, False)
    assert [path.name for path in (tmp_path / "benchmarks").iterdir()] == []
