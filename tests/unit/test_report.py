"""The page that shows a plan to a person."""

import copy
from html.parser import HTMLParser

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import tables
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import DevicePlacement
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.report import (
    html_page,
    memory_text,
    plan_text,
    speed_text,
)
from conftest import Cluster, known_answer_of, typed
from support.clusters import serving, strix_halos
from support.drift import drifts, typed_drifts
from support.lifecycle import decide

EXACT = ("weights_mib", "kv_mib")
DEVICE = DevicePlacement("d", "host", None, None, 1, False, 0, 0, 0, 0, 0, 0, "the largest", EXACT, ())


def device(weights, kv, compute, capacity):
    return DEVICE._replace(
        weights_mib=weights, kv_mib=kv, compute_mib=compute, total_mib=weights + kv + compute, capacity_mib=capacity
    )


@pytest.mark.parametrize(
    "entry, drawn",
    [
        (device(50, 20, 10, 100), "█████▓▓▒··"),
        (device(0, 0, 0, 100), "··········"),
        (device(1, 1, 1, 100000), "█▓▒·······"),
        (device(80, 10, 10, 100), "████████▓▒"),
        (device(90, 20, 20, 100), "███████▓▓▒"),
        (device(80, 20, 15, 100), "███████▓▓▒"),
        (device(33.3, 33.3, 33.3, 100), "███▓▓▓▒▒▒·"),
        (device(98, 1, 1, 100), "████████▓▒"),
        (device(96, 1, 1, 100), "███████▓▒·"),
        (device(0, 0, 0, 0), "··········"),
    ],
)
def test_a_bar_shows_what_a_device_holds(entry, drawn):
    assert memory_text.memory_bar(entry, 10) == drawn


def test_a_device_over_its_capacity_looks_full_in_both_pages(pair):
    plan = typed(pair.plan())
    sizes = {"d100": (80, 20, 15, 100), "d115": (80, 20, 15, 115)}
    plan = plan._replace(placement=tuple(device(*size)._replace(device=name) for name, size in sizes.items()))
    rows = [line for line in plan_text.plan_page(plan).splitlines() if line.strip().startswith(("d100 ", "d115 "))]
    assert [memory_text.FREE_MEMORY_SIGN in row for row in rows] == [False, False]
    assert [row.endswith("100, ≤ 115 %") for row in rows] == [True, False]
    html = html_page.page(plan)
    assert (html.count('class="capacity over"'), html.count('class="capacity"'), html.count("≤ 115 %")) == (1, 1, 1)


def test_a_command_can_be_pasted_into_a_shell():
    argv = ["/opt/x/llama-server", "--host", "127.0.0.1", "--alias", "a b", *["--flag-that-is-long", "value"] * 6]
    lines = plan_text.command_lines(argv, {"A": "1 2"})
    assert lines[0].startswith("      A='1 2' /opt/x/llama-server --host 127.0.0.1 --alias 'a b'")
    assert all(line.endswith("\\") for line in lines[:-1])
    assert not lines[-1].endswith("\\")
    assert max(map(len, lines)) <= tables.MAX_LINE_LENGTH
    assert not any(line.strip().startswith("value") for line in lines)


def test_the_page_of_a_cluster():
    cluster = strix_halos(4, 377)
    for index in range(4):
        link = {"interface": "thunderbolt0", "address": f"192.168.128.{11 + index}/24"}
        cluster.hosts[f"strix{index}"]["variables"]["llama_links"] = [link]
    cluster.hosts["strix0"]["facts"]["measured"] = {"strix2": {"round_trip_ms": 0.4}}
    plan = cluster.plan()
    text = plan_text.plan_page(typed(plan))
    for part in (
        "llama_cluster serves on paper",
        "RPC protocol 7.0.0",
        "source: /tmp/x.tar.gz; compiled on strix0 (takes minutes the first time)",
        "strix1  ROCm0  192.168.128.12:50052  layers",
        "thunderbolt, 0.1 ms (assumed)",
        "thunderbolt, 0.2 ms",
        "Device rates",
        "No proof of the devices: the names of the model's tensors are unknown",
        "RPC0[192.168.128.12:50052]  ██",
        "strix0  llamacpp-server",
        "-H 192.168.128.12",
        "--load-mode dio",
        f"about {7 + plan['estimate']['load_s'] + (plan['head'].get('proof') or {}).get('outage_s', 0):.0f} seconds",
        "without answers if site.yml restarts the server",
        "strix1  192.168.128.12: 50052, 50051 for 192.168.128.11; blocked for everyone else",
        f"about {plan['estimate']['network_ms_per_token']:.1f} ms per token",
    ):
        assert part in text
    assert "What site.yml would change" not in text
    assert max(map(len, text.splitlines())) <= tables.MAX_LINE_LENGTH


@pytest.mark.parametrize(
    "gpu_layers, rows",
    [
        (None, ["layers 0 to 7", "layers 8 to 15, output"]),
        (7, ["head CPU layers 0 to 9", "layers 10 to 12", "layers 13 to 15, output"]),
        (16, ["head CPU layer 0", "layers 1 to 8", "layers 9 to 15, output"]),
        (1, ["head CPU layers 0 to 15", "output", "declared but unused: worker2"]),
    ],
)
def test_layers_are_counted_from_those_on_the_processor(pair, gpu_layers, rows):
    pair.hosts["head"]["variables"]["llama_server_gpu_layers"] = gpu_layers
    plan = pair.plan()
    found = plan_text.plan_sections(typed(plan))["Topology"][1:]
    assert len(found) == len(rows)
    for row, line in zip(rows, found):
        assert row in " ".join(line.split())
    page = " ".join(html_page.page(typed(plan)).split())
    for row in plan_text.topology_rows(typed(plan)):
        assert f"{row.device}{', ' if row.endpoint else ''}{row.endpoint}: {row.layers}" in page
    assert "\n".join(plan_text.plan_sections(typed(plan))["Topology"]) in plan_text.plan_summary(typed(plan))


def test_a_device_with_single_tensors_says_so(pair, big_model):
    device = "RPC0[192.0.2.12:50052]"
    own = {"llama_server_tensor_split": [1, 0], "llama_server_override_tensor": [f"blk.0.all={device}"]}
    big_model["tensors"][0]["bytes"] //= 8
    plan = serving(pair, big_model, **own).plan()
    found = plan_text.plan_sections(typed(plan))["Topology"]
    assert "layers 0 to 79, output" in found[1]
    assert "tensors from llama_server_override_tensor" in found[2]


def test_the_page_says_which_sizes_are_bounds(pair):
    def bounds():
        plan = pair.plan()
        return [
            page.count("≤ ")
            for page in (
                plan_text.plan_summary(typed(plan)),
                plan_text.plan_page(typed(plan)),
                html_page.page(typed(plan)),
            )
        ]

    known = bounds()
    pair.hosts["head"]["variables"]["llama_release"] = "b12000"
    assert [more - less for less, more in zip(known, bounds())] == [2 * 2] * 3, "weights and KV of two workers"


def test_the_page_of_a_head_alone():
    text = plan_text.plan_page(typed(Cluster().add("alone", "head", llama_model_known_answer=known_answer_of()).plan()))
    assert "the processor of alone, all layers" in text
    assert "none: no worker is used" in text
    assert "Memory" not in text


def test_the_page_tells_advisories_with_their_remedy_and_what_is_not_used(pair):
    pair.hosts["head"]["variables"].update(llama_server_host="192.0.2.10", llama_placement="fastest")
    plan = pair.plan()
    assert plan["refused"]
    text = " ".join(plan_text.plan_page(typed(plan)).split())
    assert "error: open-server on head" in text
    assert f"Remedy: {plan['advisories'][0]['remedy']}" in text
    assert "declared but unused: worker2 CPU 192.0.2.12:50052" in text
    pair.hosts["head"]["variables"]["llama_accept_advisories"] = ["open-server"]
    assert "error, accepted: open-server" in plan_text.plan_page(typed(pair.plan()))


LACKING = {"worker1": {"required": {"cmake": "cmake", "cc": "g++", "c++": "g++"}, "optional": {"ccache": "ccache"}}}


def changed(plan, found, lacking=None, **unasked):
    asked = {name: drift for name, drift in found.items() if name not in unasked}
    changes = decide(plan, asked)
    return "\n".join(plan_text.change_lines(typed(plan), changes.restarts, typed_drifts(asked), unasked, lacking or {}))


def test_what_would_change_is_told_like_a_difference(pair):
    plan = pair.plan()
    found = drifts(plan)
    identity = plan["hosts"]["worker1"]["builds"][0]["id"]
    found["worker1"].update(
        missing_builds=[identity],
        running_build_ids=["b6110-cpu-12345678"],
        differences=[
            {"kind": "release", "subject": identity, "text": f"release {identity} is not installed"},
            *({"kind": "folder", "subject": f"{n}", "text": f"folder {n} is missing"} for n in range(20)),
        ],
    )
    found["worker1"]["services"]["llamacpp-worker-cpu"]["state"] = "stopped"
    text = changed(plan, found, LACKING, worker2="it could not be reached")
    assert text.splitlines()[:2] == ["  head", "    ! llamacpp-server would be restarted"]
    for part in (
        "    - b6110-cpu-12345678 is running but not planned",
        f"    + {identity} would be installed",
        "    + packages would be installed: ccache, cmake, g++",
        "    ~ folder 11 is missing",
        "    ~ and 8 more",
        "    ! llamacpp-worker-cpu would be started",
        "  worker2  was not compared: it could not be reached",
    ):
        assert part in text.splitlines()
    assert "~ release" not in text
    assert "What site.yml would change" in plan_text.plan_page(typed(plan), text.splitlines())


def test_another_build_loses_the_conversations_that_are_kept(pair):
    lost = "    ! saved conversations would be lost, because another build cannot read them"
    for keeps, running in ((True, "b6110-cpu-12345678"), (False, "b6110-cpu-12345678"), (True, None)):
        pair.hosts["head"]["variables"]["llama_server_keep_conversations"] = keeps
        plan = pair.plan()
        found = drifts(plan)
        build = running or plan["hosts"]["head"]["builds"][0]["id"]
        found["head"].update(running_build_ids=[build], differences=[{"kind": "boot", "subject": "x", "text": "x"}])
        assert (lost in changed(plan, found).splitlines()) == (keeps and running is not None)


def test_where_all_is_as_planned(pair):
    plan = pair.plan()
    assert changed(plan, drifts(plan)).splitlines() == [f"  {name}  matches the plan" for name in plan["hosts"]]
    assert "worker1  matches the plan" not in changed(plan, drifts(plan), LACKING)
    running = copy.deepcopy(drifts(plan))
    running["head"]["running_build_ids"] = [plan["hosts"]["head"]["builds"][0]["id"]]
    assert "- runs" not in changed(plan, running)


class Tags(HTMLParser):
    """What is opened in a page, and what it refers to."""

    def __init__(self, text):
        super().__init__()
        self.opened, self.references = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.opened.append(tag)
        self.references += [value for name, value in attrs if name in ("src", "href")]


def test_the_page_as_html(pair):
    plan = pair.plan()
    text = html_page.page(typed(plan), ["  worker1  <was not> compared"])
    found = Tags(text)
    assert found.references
    assert all(reference.startswith("#") for reference in found.references)
    assert found.opened.count("tr") == 1 + len(plan["placement"]) + len(speed_text.speed_rows(typed(plan)))
    assert "&lt;was not&gt; compared" in text
    for part in ("RPC0[192.0.2.11:50052]", "Network overhead", "llama-server", "Advisories"):
        assert part in text
    assert "Refused" not in text


EVIL = "<script>alert(1)</script>\"'><b onclick=x>&lt;\n\r\x00\x1b[2J\x7f\x9b\u2028\u202e\ud800"


def spoiled(value, field=""):
    """A value in which every text ends in what must not reach a page as it is; names stand for the same thing afterwards, too."""
    if isinstance(value, str):
        return value if field in ("service_manager", "rates") else value + EVIL
    if isinstance(value, dict):
        return {name + EVIL if field == "hosts" else name: spoiled(part) for name, part in value.items()}
    if hasattr(value, "_fields"):
        return type(value)(*map(spoiled, value, value._fields))
    return tuple(map(spoiled, value)) if isinstance(value, tuple) else value


def test_nothing_that_a_host_says_becomes_part_of_the_page_of_a_refusal():
    refused = {"schema": 1, "cluster": "test", "refused": True, "fits": False, "reasons": ["no"]}
    page = html_page.page(spoiled(typed(refused)), ["  worker1 " + EVIL])
    assert Tags(page).opened == Tags(html_page.page(typed(refused), ["  worker1"])).opened
    assert "&lt;script&gt;" in page


def test_bad_input_has_a_page_too(pair):
    pair.hosts["head"]["variables"]["llama_release"] = "newest"
    plan = pair.plan()
    for text in (plan_text.plan_page(typed(plan)), html_page.page(typed(plan))):
        assert "llama_cluster has no plan" in text
        assert "llama_release is" in text
        assert "newest" in text


def test_both_pages_say_why_devices_get_what_they_get(pair):
    plan = pair.plan()
    first, second = plan["placement"]
    plan["placement"] = [{**first, "reason": "the largest"}, {**second, "reason": "what is left"}]
    for page in (plan_text.plan_page(typed(plan)), html_page.page(typed(plan))):
        for entry in plan["placement"]:
            assert f"  {entry['device']}: {entry['reason']}\n" in page.replace("</pre>", "\n")
    plan["placement"][1]["reason"] = "the largest"
    assert f"  {first['device']}, {second['device']}: the largest\n" in plan_text.plan_page(typed(plan))
