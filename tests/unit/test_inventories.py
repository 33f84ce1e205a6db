"""The inventories of inventories/, planned as playbooks/plan.yml plans them: read by Ansible, with no host contacted."""

import copy
import functools
import json
import re
from pathlib import Path

import pytest
from ansible.inventory.manager import InventoryManager
from ansible.parsing.dataloader import DataLoader
from ansible.vars.hostvars import HostVars
from ansible.vars.manager import VariableManager
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import tables
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import cluster_inputs as entry
from ansible_collections.llamacpp.cluster.plugins.plugin_utils import inventory
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.report import plan_text
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.sources import sources
from conftest import CATALOGUE, make, refused, typed
from support.clusters import IK_LLAMA

FOLDER = Path(__file__).resolve().parents[2] / "inventories"
GIB = 1 << 30
MIB = 1 << 20


def of_file(name):
    """What ``-e @inventories/NAME`` sets."""
    return DataLoader().load_from_file(str(FOLDER / name), trusted_as_template=True)


PLANS = {}
"""What was planned: many tests look at the same plan."""


def plan(name, **extra):
    """The plan of a folder of inventories/ with extra variables."""
    asked = (name, repr(extra))
    if asked not in PLANS:
        PLANS[asked] = plan_of(name, **extra)
    return copy.deepcopy(PLANS[asked])


@functools.cache
def parsed(source):
    """An inventory, which no test changes, as Ansible reads it."""
    loader = DataLoader()
    return loader, InventoryManager(loader, sources=[str(FOLDER / source)])


def variables_of(source, extra):
    """What a task sees of an inventory, a folder of inventories/ or the path of a file, with extra variables."""
    loader, manager = parsed(source)
    variables = VariableManager(loader, manager)
    variables._extra_vars = extra
    return {
        **variables.get_vars(),
        "groups": manager.get_groups_dict(),
        "hostvars": HostVars(manager, variables, loader),
        "inventory_dir": str(FOLDER / source),
    }


def plan_of(source, **extra):
    """The plan of an inventory with extra variables."""
    return planned_of(variables_of(source, extra))


def planned_of(task_vars, answers=None):
    cluster, hosts = inventory.cluster_hosts(task_vars, answers)
    try:
        read = sources.look_up(str, entry.read_cluster(cluster, hosts), CATALOGUE)
        return make(read, {}, CATALOGUE, "runtime-id")
    except Refusal as refusal:
        return refused(cluster, refusal)


@pytest.mark.parametrize(
    "extra",
    [
        {"llama_model_path": "/models/x.gguf"},
        {"llama_model_huggingface": {"repo": "ggml-org/gpt-oss-20b-GGUF"}},
        {"llama_model_url": "https://example.org/x.gguf"},
        {"llama_model_ollama": "gpt-oss:20b"},
        {"llama_model_copy": "x.gguf"},
        {"llama_models": [{"name": "x", "path": "/models/x.gguf"}]},
        {},
    ],
)
def test_a_model_that_is_named_for_the_demo_takes_the_place_of_the_known_answer(extra):
    _cluster, hosts = inventory.cluster_hosts(variables_of("local", extra))
    assert (hosts["localhost"]["variables"]["llama_model_known_answer"] is None) == bool(extra)


def accepted(planned):
    """Ids of the errors of a plan that is not refused for them."""
    return [advisory["id"] for advisory in planned["advisories"] if advisory["severity"] == "error"]


def reason(planned):
    assert planned["refused"]
    return " ".join(planned["reasons"])


@pytest.mark.parametrize(
    "name, gib",
    [
        ("models/gpt_oss_20b.yml", 12.83),
        ("models/gpt_oss_120b.yml", 60.87),
        ("models/tulu3_405b.yml", 226.37),
        ("strix_halo_quad/group_vars/llama_cluster/model.yml", 211.03),
        ("models/deepseek_r1_q4_k_m.yml", 376.65),
        ("models/qwen3_coder_480b.yml", 380.01),
        ("strix_halo_pair/group_vars/llama_cluster/model.yml", 137.78),
        ("models/qwen3_5_397b.yml", 205),
        ("models/qwen3_coder_next.yml", 46),
        ("mac_loopback/group_vars/llama_cluster/model.yml", 16.97),
        ("models/qwen3_coder_30b.yml", 17.28),
    ],
)
def test_a_constructed_model_has_the_size_of_the_real_one(name, gib):
    """Sizes as llama-bench and the documents print them."""
    summary = of_file(name)["llama_model_gguf_summary"]
    size = sum(summary["layer_bytes"]) + summary["input_bytes"] + summary["output_bytes"]
    assert size / GIB == pytest.approx(gib, abs=0.006)


def written(data, **extra):
    """The plan of an inventory that is given as data: groups with hosts, those of clusters with variables."""
    hostvars = {}
    for group in data.values():
        for name, own in group["hosts"].items():
            hostvars.setdefault(name, {}).update({**group.get("vars", {}), **(own or {}), **extra})
    groups = {name: list(group["hosts"]) for name, group in data.items()}
    return planned_of({"groups": groups, "hostvars": hostvars, **extra})


def test_a_file_with_types_that_the_program_does_not_have_is_refused_by_the_variable_of_the_release():
    for variable in ("llama_release", "llama_release_cuda"):
        said = reason(plan("cuda_triple", llama_server_extra_args=[], **{variable: "b11434"}))
        assert "types that only ik_llama.cpp supports (IQ2_K_R4, IQ3_K_R4, IQ5_K, IQ5_KS)" in said
        assert f"set {variable} to a release of ik_llama.cpp" in said
    model = of_file("strix_halo_pair/group_vars/llama_cluster/model.yml")
    row = {"name": "output.weight", "type": "NVFP4", "shape": [64], "bytes": 36, "layers": None}
    model["llama_model_gguf_summary"]["tensors"] = [row]
    plain = {"llama_server_extra_args": [], "llama_server_load_mode": "none", "llama_backend": "cpu"}
    said = reason(plan("strix_halo_pair", llama_release=IK_LLAMA, **model, **plain))
    assert "types that only llama.cpp supports (NVFP4)" in said


# Inventories that nobody has seen before

KNOWN_ANSWER = {"layers": 16, "width": 128, "type": "f32"}
CPU_HOST = {"memory_mib": 65536}
GPU = {"backend": "cuda", "name": "GPU", "architecture": "8.6", "memory_mib": 24564}


def cluster_of(head, found, group="llama_cluster", **common):
    """An inventory as data: hosts by name with their variables; the first one is the head, and a worker if ``head`` says so."""
    names = list(found)
    return {
        group: {"hosts": copy.deepcopy(found), "vars": {"llama_hardware": CPU_HOST, **common}},
        "llama_head": {"hosts": {names[0]: None}},
        "llama_workers": {"hosts": dict.fromkeys(names if head else names[1:])},
    }


def with_card(*names, card=GPU, memory_mib=65536):
    """Hosts of which each has one card."""
    hardware = {"memory_mib": memory_mib, "accelerators": [card]}
    return {
        name: {"ansible_host": f"192.0.2.{place}", "llama_hardware": hardware} for place, name in enumerate(names, 1)
    }


def big(layers=40):
    """A model with 1 GiB a layer."""
    summary = of_file("models/gpt_oss_20b.yml")["llama_model_gguf_summary"]
    return {
        "llama_model_known_answer": None,
        "llama_model_path": "/models/big.gguf",
        "llama_model_gguf_summary": {
            **summary,
            "architecture": "llama",
            "keys": {},
            "layers": layers,
            "layer_bytes": [GIB] * layers,
            "expert_bytes": [0] * layers,
        },
    }


@pytest.mark.parametrize("workers, own", [(15, 0), (16, 0), (11, 4), (12, 4), (16, 4)])
def test_as_many_devices_as_llama_cpp_uses(workers, own):
    """The head's own are counted, and so is its processor: 15 beside it."""
    found = {f"host{number}": {"ansible_host": f"192.0.2.{number + 1}"} for number in range(workers + 1)}
    found["host0"]["llama_hardware"] = {**CPU_HOST, "accelerators": [GPU] * own}
    placement = written(cluster_of(False, found, llama_model_known_answer={**KNOWN_ANSWER, "layers": 40}))["placement"]
    assert len(placement) == 15
    assert [entry["endpoint"] for entry in placement].count(None) == own


def test_of_too_many_devices_those_are_left_out_that_the_model_can_spare():
    found = {f"host{number}": {"ansible_host": f"192.0.2.{number + 1}"} for number in range(17)}
    hosts = [*found.values()]
    hosts[3]["llama_hardware"] = {"memory_mib": 8192}
    data = cluster_of(False, found, **big(200), llama_hardware={"memory_mib": 16384})
    said = reason(written(data))
    assert "the model does not fit: " in said
    assert "host3" not in {entry["host"] for entry in written(data)["placement"]}
    split = [1] * 16
    assert "to 0 in llama_server_tensor_split" in reason(written(data, **big(20), llama_server_tensor_split=split))
    assert not written(data, **big(20), llama_server_tensor_split=[*split[1:], 0])["refused"]


@pytest.mark.parametrize(
    "names, remedy", [(["head"], "Remove"), (["head", "one"], "Leave llama_workers empty, remove")]
)
def test_a_head_that_is_faster_without_workers_that_others_run(names, remedy):
    outside = {"endpoint": "192.0.2.77:50052", "memory_mib": 24000, "host": "gaming-pc", "backend": "cuda"}
    card = {**GPU, "name": "NVIDIA GeForce RTX 3090"}
    found = with_card(*names, card=card)
    common = {**big(16), "llama_server_context": 2048}
    more = {"llama_external_workers": [outside], "llama_accept_advisories": ["external-worker"]}
    planned = written(cluster_of(False, found, **common, **more, llama_server_tensor_split=[1] * (len(names) + 1)))
    (advisory,) = [entry for entry in planned["advisories"] if entry["id"] == "slower-than-one-host"]
    assert advisory["host"] == "head"
    assert advisory["remedy"].startswith(
        f"{remedy} llama_server_tensor_split and remove llama_external_workers. Or set"
    )
    alone = written(cluster_of(False, {"head": found["head"]}, **common))
    assert not alone["refused"], alone["reasons"]
    assert alone["advisories"] == []


def test_a_worker_that_is_the_head_under_another_name():
    found = {name: {"ansible_host": "192.0.2.1"} for name in ("head", "one")}
    said = reason(written(cluster_of(False, found, llama_model_known_answer=KNOWN_ANSWER)))
    assert "one has the same address as the head head (192.0.2.1)" in said
    assert "add head to llama_workers" in said


@pytest.mark.parametrize(
    "name, extra, measured",
    [
        ("strix_halo_pair", {}, 15.85),
        ("cuda_triple", {"llama_server_tensor_split": [1] * 12}, 5.49),
        ("mac_loopback", {}, 60.2),
    ],
)
def test_a_plan_predicts_the_speed_that_was_measured_there(name, extra, measured):
    """Tokens per second of the documents. By hand the twelve cards had equal shares; the plan's own are faster."""
    estimate = plan(name, **extra)["estimate"]
    assert estimate["generation_tokens_per_s"] == pytest.approx(measured, rel=0.2)


# Clusters that others published

CLUSTERS = Path(__file__).resolve().parent / "fixtures" / "clusters"
SIXTEEN = 16
"""Devices that llama.cpp takes, with the processor's."""


def dense(gib, layers=80):
    """Llama 3 70B on paper, or one of another size."""
    rest = 591 * MIB + 862 * MIB
    return {
        "llama_model_path": "/srv/dense.gguf",
        "llama_model_gguf_summary": {
            **{"name": "dense", "architecture": "llama", "layers": layers, "width": 8192, "heads": 64, "kv_heads": 8},
            **{"key_dimension": 128, "value_dimension": 128, "context": 131072, "vocabulary": 128256, "keys": {}},
            "input_bytes": 591 * MIB,
            "output_bytes": 862 * MIB,
            "layer_bytes": [int((gib * GIB - rest) / layers)] * layers,
        },
    }


def check_placement(planned, own_split=False):
    """What any right plan fulfils, wherever its layers are.

    :param own_split: whether the operator gave llama_server_tensor_split, which need not be in layers.
    """
    assert not planned["refused"], planned["reasons"]
    placed = planned["placement"]
    assert sum(entry["layers"] for entry in placed) + planned["head"]["cpu"]["layers"] == planned["model"]["layers"]
    assert all(entry["weights_mib"] + entry["kv_mib"] <= entry["capacity_mib"] for entry in placed)
    assert len(placed) < SIXTEEN
    used = {worker["endpoint"] for host in planned["hosts"].values() for worker in host["workers"] if worker["used"]}
    assert used == {entry["endpoint"] for entry in placed if entry["endpoint"]}
    argv = planned["head"]["argv"]
    assert set(filter(None, argv[argv.index("--rpc") + 1].split(",") if "--rpc" in argv else [])) == used
    if len(placed) > 1 and not own_split:
        split = argv[argv.index("--tensor-split") + 1].split(",")
        assert sum(map(float, split)) == planned["model"]["layers"] + 1 - planned["head"]["cpu"]["layers"]


@pytest.mark.parametrize(
    "name, model, hosts",
    [
        ("spark_trio", of_file("strix_halo_quad/group_vars/llama_cluster/model.yml"), 2),
        ("spark_trio", of_file("models/qwen3_5_397b.yml"), 2),
        ("spark_trio", of_file("models/gpt_oss_120b.yml"), 1),
        ("mac_and_linux", dense(56), 3),
        ("jetsons", dense(39.59), 8),
        ("pis", dense(39.59), 4),
        ("bc250_pair", of_file("models/gpt_oss_20b.yml"), 2),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_published_clusters(name, model, hosts):
    """The model is on as many hosts as its size asks for."""
    planned = plan(CLUSTERS / f"{name}.yml", **model)
    check_placement(planned)
    assert len({entry["host"] for entry in planned["placement"]} | {planned["head"]["host"]}) >= hosts
    assert not accepted(planned)


def test_a_host_that_is_only_declared_has_the_processor_and_the_link_that_are_declared():
    estimate = plan(CLUSTERS / "pis.yml", **dense(39.59))["estimate"]
    assert estimate["rates"] == "table"
    links = {(link["kind"], link["gbit_per_s"], link["measured"]) for link in estimate["links"]}
    assert links == {("ethernet", 1, False), ("loopback", 11.0, False)}


REMEDIES = (
    (r"set (llama_server_context) to (\d+)", int),
    (r"[Ss]et (llama_server_backend) to (\w+)", str),
    (r"[Ss]et (llama_placement) to (\w+)", str),
    (r"[Ss]et (llama_server_load_mode) to (\w+)", str),
    (r"add ([a-z0-9-]+) to llama_accept_advisories", None),
)
"""Words of a remedy that set a variable for the whole cluster → how its value is read."""


def remedied(planned):
    """Each variable with a value that a refusal recommends, as extra variables."""
    for expression, read in REMEDIES:
        for found in re.finditer(expression, reason(planned)):
            yield {"llama_accept_advisories": [found[1]]} if read is None else {found[1]: read(found[2])}


@pytest.mark.parametrize(
    "name, model, extra",
    [
        ("spark_trio", of_file("strix_halo_quad/group_vars/llama_cluster/model.yml"), {"llama_server_context": 131072}),
        ("jetsons", dense(39.59), {"llama_server_context": 131072}),
        ("pis", dense(110), {"llama_server_context": 131072}),
        ("mac_and_linux", dense(39.59), {"llama_server_context": 131072}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_remedies_of_a_refusal_work(name, model, extra):
    """Whatever is refused says what to set, and with each of these alone the plan is accepted."""
    refusing = plan(CLUSTERS / f"{name}.yml", **{**model, **extra})
    assert refusing["refused"]
    tried = list(remedied(refusing))
    assert tried, refusing["reasons"]
    for remedy in tried:
        check_placement(plan(CLUSTERS / f"{name}.yml", **{**model, **extra, **remedy}))


@pytest.mark.parametrize(
    "gib, variables, remedy",
    [
        (30, {}, r"set (llama_server_gpu_layers) to (\d+)"),
        (30, {"llama_server_micro_batch": 2048}, r"set (llama_server_gpu_layers) to (\d+)"),
        (12, {"llama_server_memory_mib": {"CUDA0": 2000}}, "remove (llama_server_memory_mib)"),
        (12, {"llama_server_reserve_mib": 20000}, "remove (llama_server_reserve_mib)"),
    ],
)
def test_a_head_alone_is_told_how_the_model_fits(gib, variables, remedy):
    data = cluster_of(False, with_card("head"), llama_server_context=2048, **big(gib), **variables)
    said = re.search(f"To make the model fit, .*{remedy}", reason(written(data)))
    data["llama_cluster"]["vars"].pop(said[1], None)
    planned = written(data, **({said[1]: int(said[2])} if said.lastindex == 2 else {}))
    check_placement(planned)
    assert "compute-over-capacity" not in [entry["id"] for entry in planned["advisories"]]


def test_two_remedies_together_are_told_where_none_alone_helps():
    data = cluster_of(False, with_card("head", memory_mib=16384), llama_server_context=131072, **big(30))
    said = re.search(
        r"To make the model fit, set llama_server_context to (\d+) and llama_server_gpu_layers to (\d+)",
        reason(written(data)),
    )
    context, layers = map(int, said.groups())
    check_placement(written(data, llama_server_context=context, llama_server_gpu_layers=layers))
    assert context < 131072


@pytest.mark.parametrize(
    "own",
    [
        {"llama_server_tensor_split": [10, 1]},
        {"llama_server_gpu_layers": 2},
        {"llama_server_gpu_layers": 0},
        {"llama_server_override_tensor": ["blk=CUDA0"]},
    ],
    ids=str,
)
def test_a_model_that_fits_where_the_plan_divides_it(own):
    names = {"llama_model_known_answer": {"layers": 32, "width": 8192, "type": "f16"}}
    found = with_card("head", "one", memory_mib=16384)
    variables = {"llama_server_context": 2048, **(names if "llama_server_override_tensor" in own else big(30))}
    assert f"To make the model fit, remove {next(iter(own))}" in reason(
        written(cluster_of(False, found, **variables, **own))
    )
    check_placement(written(cluster_of(False, found, **variables)))


def test_an_override_that_moves_nothing_is_named_where_the_model_does_not_fit():
    found = with_card("head")
    model = {"llama_model_known_answer": {"layers": 32, "width": 8192, "type": "f16"}, "llama_server_context": 2048}
    own = ["feed_forward=CPU", "ffn_down=CPU"]
    said = reason(written(cluster_of(False, found, **model, llama_server_override_tensor=own)))
    assert "'feed_forward=CPU', which matches no tensor of the model" in said
    assert "ffn_down" not in said
    assert not written(cluster_of(False, found, **model, llama_server_override_tensor=["ffn=CPU"]))["refused"]


@pytest.mark.parametrize("limit", [{"llama_server_memory_mib": {"CUDA0": 6000}}, {"llama_server_reserve_mib": 18000}])
def test_a_host_alone_has_the_memory_that_it_may_use(limit):
    """The head's limits hold for the head; another host that would be faster in its place is to have none."""
    found = with_card("head", "one", card={**GPU, "name": "NVIDIA GeForce RTX 3090"})
    (variable,) = limit
    data = cluster_of(False, found, llama_server_context=2048, **big(16), **limit)
    (advisory,) = [entry for entry in written(data)["advisories"] if entry["id"] == "slower-than-one-host"]
    assert advisory["remedy"] == (
        f"Replace head with one in llama_head (move the model's files too), leave llama_workers empty and remove {variable}. "
        "Or set llama_placement to all to use all workers anyway."
    )
    common = {key: value for key, value in data["llama_cluster"]["vars"].items() if key != variable}
    alone = written(cluster_of(False, {"one": found["one"]}, **common))
    assert not alone["refused"], alone["reasons"]
    assert "{low:g} to {high:g} for one alone.".format(**alone["estimate"]["generation_range"]) in advisory["message"]


@pytest.mark.parametrize("count", [55, 99, 102])
def test_a_cluster_may_leave_to_the_heads_processor_what_devices_do_not_hold(count):
    """As many layers as fit on devices, also where the head has room for no more than the others."""
    data = cluster_of(False, with_card("head", "one"), llama_server_context=2048, **big(count))
    layers = int(re.search(r"set llama_server_gpu_layers to (\d+)", reason(written(data)))[1])
    check_placement(written(data, llama_server_gpu_layers=layers))
    assert written(data, llama_server_gpu_layers=layers + 1)["refused"]


@pytest.mark.parametrize(
    "mode, others, fits", [(None, 0, True), (None, 1, True), ("mmap", 0, True), ("none", 0, False)]
)
def test_pages_of_the_models_file_may_take_half_of_the_reserve_of_the_head(mode, others, fits):
    """Also where the head has a device that shares its memory, and does not use it."""
    found, other = with_card("head", "one"), {**GPU, "memory_mib": 1024, "unified": True}
    found["head"]["llama_hardware"] = {"memory_mib": 65536, "accelerators": [GPU, *[other] * others]}
    data = cluster_of(False, found, llama_server_context=2048, **big(102))
    planned = written(data, llama_server_load_mode=mode, llama_server_gpu_layers=44)
    assert planned["refused"] != fits, planned["reasons"]


def test_a_model_that_no_context_saves_is_refused_without_that_remedy():
    said = reason(plan(CLUSTERS / "bc250_pair.yml", **dense(39.59)))
    assert "it exceeds the devices' capacity by " in said
    assert "llama_server_context" not in said


# Plans as they were recorded

RECORDED = {
    "mac_loopback": ("mac_loopback", {}),
    "strix_halo_quad": ("strix_halo_quad", {}),
    "strix_halo_pair": ("strix_halo_pair", {}),
    "cuda_triple": ("cuda_triple", {}),
    "spark_trio": (CLUSTERS / "spark_trio.yml", {**of_file("models/qwen3_5_397b.yml"), "llama_placement": "all"}),
    "mac_and_linux": (CLUSTERS / "mac_and_linux.yml", dense(56)),
}
"""What is recorded → inventory and extra variables."""


def record_of(planned):
    """What a reader of a plan looks at, but for sentences: builds and tools of each host, and parts of the page."""
    typed_plan = typed(planned)
    parts = plan_text.plan_sections(typed_plan)
    kinds = {}
    for name, host in typed_plan.hosts.items():
        options = [" ".join(f"{key}={value}" for key, value in one.cmake_options.items()) for one in host.builds]
        kind = "; ".join([f"{host.service_manager} {host.scope}", ", ".join(host.tools), *options])
        kinds.setdefault(kind, []).append(name)
    hosts = [f"  {', '.join(alike)}  {kind}" for kind, alike in kinds.items()]
    speeds = [line for line in parts["Predicted speed"] if "limited by" in line]
    advisories = [f"  {plan_text.advisory_title(one)}" for one in typed_plan.advisories]
    shown = [
        *parts["Topology"],
        *parts["Memory"],
        *hosts,
        *parts["Commands"],
        *parts["Open ports"],
        *advisories,
        *speeds,
        *parts["Shapes"],
    ]
    return "\n".join(shown)


@pytest.mark.parametrize("name", RECORDED)
def test_a_plan_is_as_it_was_recorded(name, monkeypatch, request):
    """`make plans` records them again: look at each line of the difference."""
    monkeypatch.setattr(tables, "MAX_LINE_LENGTH", 240)
    source, extra = RECORDED[name]
    path = Path(__file__).parent / "data" / "plans" / f"{name}.txt"
    record = f"{record_of(plan(source, **extra))}\n"
    if request.config.getoption("--record-plans"):
        path.write_text(record)
    assert record == path.read_text()


# The tables of inventories/*/README.md

READMES = sorted(path.parent.name for path in FOLDER.glob("*/README.md"))


def table_of(name):
    """Rows of the table: manual, planned, reason."""
    rows = [line.split("|") for line in (FOLDER / name / "README.md").read_text().splitlines()]
    table = [[cell.strip() for cell in row[1:-1]] for row in rows if len(row) == 5]
    assert table[0] == ["manual", "planned", "reason"]
    return table[2:]


def said_of(name, planned):
    """Everything that an inventory and its plan say, as one text."""
    hosts = planned["hosts"].values()
    programs = [*(worker["argv"] for host in hosts for worker in host["workers"]), planned["head"]["argv"]]
    options = [
        f"-D{option}={value}"
        for host in hosts
        for build in host["builds"]
        for option, value in build["cmake_options"].items()
    ]
    services = [f"{service['name']}.service" for host in hosts for service in host["services"]]
    given = [path.read_text() for path in sorted((FOLDER / name).rglob("*.yml"))]
    variants = [path.name for path in (FOLDER / "variants").iterdir()]
    words = [*map(" ".join, programs), *options, *services, *given, *variants, *inventory.specification()]
    return "\n".join([*words, json.dumps(planned)])


@pytest.mark.parametrize("name", READMES)
def test_a_readme_says_what_is_planned(name, generate):
    """Every word in its column is part of the plan or of the inventory, but those after «no»."""
    planned = plan(name)
    path = FOLDER / name / "README.md"
    assert path.read_text() == generate.inventory_page(path.read_text(), planned), "run make docs"
    said = said_of(name, planned)
    for _by_hand, cell, _why in table_of(name):
        for no, span in re.findall(r"(no )?`([^`]+)`", cell):
            assert (f" {span} " in said) is False if no else span in said, f"{name}: {span}"


@pytest.mark.parametrize("name", READMES)
def test_what_a_readme_calls_the_same_is_the_same(name):
    said = said_of(name, plan(name))
    for by_hand, cell, _why in table_of(name):
        if cell.startswith("the same"):
            for word in re.findall(r"(-\w[\w=-]*[A-Z]|(?<=`)--[\w-]+ \w+)", by_hand):
                assert word in said, f"{name}: {word}"


def commands():
    """The plans that READMEs show: inventory, and extra variables as an operator writes them."""
    for name in READMES:
        for line in (FOLDER / name / "README.md").read_text().splitlines():
            found = re.fullmatch(rf"ansible-playbook playbooks/plan\.yml -i inventories/{name}(.*)", line)
            if found:
                yield name, found[1].strip()


COMMANDS = list(commands())


@pytest.mark.parametrize("name, given", COMMANDS)
def test_the_commands_of_a_readme_are_planned(name, given):
    extra = {}
    for word in given.split("-e ")[1:]:
        file, _equals, value = word.strip().partition("=")
        extra.update(of_file(file[len("@inventories/") :]) if file.startswith("@") else {file: value})
    planned = plan(name, **extra)
    assert not planned["refused"], planned["reasons"]
    check_placement(planned, own_split="cuda_cpu_workers" in given)


def test_a_board_alone_serves_what_has_room_beside_its_tables_and_its_compute_buffer():
    """Its driver lends 12 of 16 GiB: the tables are in the rest. With the bound of the compute buffer the model is too large for one of two."""
    model = of_file("models/gpt_oss_20b.yml")
    pair = DataLoader().load_from_file(str(CLUSTERS / "bc250_pair.yml"))["llama_cluster"]
    alone = written(cluster_of(False, pair["children"]["llama_head"]["hosts"], **pair["vars"], **model))
    check_placement(alone)
    assert not plan(CLUSTERS / "bc250_pair.yml", **model)["estimate"]["best_single_host"]["faster"]
