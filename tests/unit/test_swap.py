"""llama-swap in front of several models: its configuration by its published schema, and what the plan says of it."""

import hashlib
import io
import json
import shlex
import tarfile
from pathlib import Path

import jsonschema_rs
import pytest
from ansible_collections.llamacpp.cluster.plugins.action import plan_history
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.launcher import server as llama_server
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import plan_text
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import cluster_inputs
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.several import swap
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import SwapProgram
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.sources import sources
from conftest import CATALOGUE, SCHEMA, Cluster, complete, make, typed
from model_server import answer
from support.clusters import FORK, TREE, strix_halo
from support.sources import cache
from test_several import DEEP, SMALL, files_of, several

__all__ = ["cache"]

PUBLISHED = jsonschema_rs.validator_for(
    json.loads((Path(__file__).parent / "fixtures" / "llama_swap.schema.json").read_text())
)
"""Of llama-swap v250: what of it a configuration of ours may have."""
PROGRAM = SwapProgram("/home/me/llama-swap", "ab" * 32, 1000)
AT = f"/opt/llamacpp/llama-swap/llama-swap-{'ab' * 6}"
KEPT = {**SMALL, "keep": True}
THIRD = {**SMALL, "name": "third", "aliases": ["t"]}


def swapping(pair, *entries, program=PROGRAM, **variables):
    several(pair, *entries, llama_server_engine="llama-swap", **variables)
    hosts = cluster_inputs.settle("llama_cluster", pair.hosts)
    cluster = cluster_inputs.read("llama_cluster", hosts)._replace(swap=program)
    plan = make(cluster, {}, CATALOGUE, "runtime-id")
    SCHEMA.validate(plan)
    return plan


def configured(plan):
    found = json.loads(files_of(complete(plan))["swap.yaml"]["content"])
    PUBLISHED.validate(found)
    return found


def test_kept_models_are_beside_those_that_take_turns(pair):
    plan = swapping(pair, KEPT, DEEP, THIRD, llama_server_idle_seconds=600)
    assert not plan["refused"], plan["reasons"]
    kept, *others = plan["head"]["models"]
    endpoints = [[entry["endpoint"] for entry in model["placement"]] for model in (kept, *others)]
    assert endpoints[0] == ["192.0.2.11:50252", "192.0.2.12:50252"]
    assert endpoints[1] == endpoints[2] == ["192.0.2.11:50052", "192.0.2.12:50052"]
    found = configured(plan)
    assert found["routing"]["router"]["settings"]["groups"] == {
        "turns": {"swap": True, "exclusive": False, "members": ["deep", "third"]},
        "kept": {"swap": False, "exclusive": False, "persistent": True, "members": ["small"]},
    }
    assert found["hooks"]["on_startup"]["preload"] == ["small"]
    assert {name: model["ttl"] for name, model in found["models"].items()} == {"small": 0, "deep": 900, "third": 600}
    assert found["models"]["third"]["aliases"] == ["t"]
    assert (plan["head"]["start_timeout"], found["healthCheckTimeout"], found["startPort"]) == (900, 1024, 8081)
    assert [port["port"] for port in plan["hosts"]["head"]["ports"]][-3:] == [8081, 8082, 8083]
    text = " ".join(plan_text.plan_table(typed(plan)).split())
    assert "small is always loaded. The others take turns: a request for another one waits until" in text


def test_each_model_is_a_launcher_with_its_llama_server(pair):
    plan = swapping(pair, KEPT, DEEP)
    found = configured(plan)["models"]
    small, deep = (shlex.split(found[name]["cmd"]) for name in ("small", "deep"))
    for words, name in ((small, "small"), (deep, "deep")):
        launcher, argv = words[: words.index("--")], words[words.index("--") + 1 :]
        assert launcher[:3] == ["/usr/bin/python3", "/opt/llamacpp/runtime/runtime-id/runtime.py", "head"]
        assert launcher[launcher.index("--url") + 1] == "http://127.0.0.1:${PORT}"
        assert launcher[launcher.index("--state") + 1] == f"/opt/llamacpp/state/{name}"
        assert launcher.count("--worker") == 2
        assert launcher[launcher.index("--patience") + 1] == "20"
        assert ("--again" in launcher) == (name == "small")
        assert argv[-6:] == ["--host", "127.0.0.1", "--port", "${PORT}", "--alias", name]
        assert argv.count("--port") == 1
        assert found[name]["proxy"] == "http://127.0.0.1:${PORT}"
    assert "--sleep-idle-seconds" not in deep
    assert {one.head.launcher for one in typed(plan).each()} == {tuple(plan["head"]["launcher"])}
    (own,) = [model for model in plan["head"]["models"] if model["name"] == "deep"]
    assert own["argv"] == deep[deep.index("--") + 1 : -6]


def test_the_head_runs_llama_swap(pair):
    variables = {
        "llama_server_host": "192.0.2.10",
        "llama_server_allowed": ["192.0.2.0/24"],
        "llama_server_api_key_file": "/etc/keys",
        "llama_server_tls_certificate_file": "/etc/cert",
        "llama_server_tls_key_file": "/etc/key",
    }
    plan = swapping(pair, KEPT, DEEP, **variables)
    handed = "/run/credentials/llamacpp-server.service/"
    head = plan["head"]
    assert (head["argv"][0], head["argv"][1:5]) == (
        AT,
        ["--config", "/opt/llamacpp/swap.yaml", "--listen", "192.0.2.10:8080"],
    )
    assert head["argv"][5:] == ["--tls-cert-file", handed + "tls-certificate", "--tls-key-file", handed + "tls-key"]
    assert head["launcher"][2:] == [
        *("head", "--url", "https://192.0.2.10:8080", "--state", "/opt/llamacpp/state", "--router"),
        *("--keys", handed + "api-keys"),
    ]
    assert head["engine"] == "llama-swap"
    assert configured(plan)["apiKeys"] == [f"${{env.{name}}}" for name in llama_server.KEY_VARIABLES]
    done = complete(plan)
    (program,) = [file for file in done["hosts"]["head"]["files"] if file["path"] == AT]
    assert program == {
        **{"path": AT, "bytes": 1000, "sha256": "ab" * 32, "mode": "0755", "source": PROGRAM.path},
    }
    assert {"path": "/opt/llamacpp/llama-swap", "owner": "root", "mode": "0755"} in done["hosts"]["head"]["folders"]
    (service,) = [one for one in done["hosts"]["head"]["services"] if one["kind"] == "head"]
    assert {"/opt/llamacpp/swap.yaml", AT} <= {*service["reads"]}
    assert "/opt/llamacpp/models.ini" not in service["reads"]
    assert "apiKeys" not in configured(
        swapping(
            pair,
            KEPT,
            DEEP,
            **{
                **variables,
                "llama_server_api_key_file": None,
                "llama_server_host": "127.0.0.1",
                "llama_server_allowed": [],
            },
        )
    )


def test_metrics_are_those_of_the_head(pair):
    pair.hosts["head"]["variables"]["llama_metrics"] = "textfile"
    plan = swapping(pair, KEPT, DEEP)
    assert plan["head"]["launcher"][-3:] == ["--metrics", "/opt/llamacpp/metrics.json", "llamacpp-server"]
    launchers = [model["cmd"].partition(" -- ")[0] for model in configured(plan)["models"].values()]
    assert not any("--metrics" in launcher for launcher in launchers)
    pair.hosts["head"]["variables"]["llama_server_page_port"] = 9000
    plan = swapping(pair, KEPT, DEEP)
    assert plan["head"]["launcher"][-2:] == ["--page", f"{plan['head']['address']}:9000"]
    assert not any("--page" in model["cmd"] for model in configured(plan)["models"].values())
    pair.hosts["head"]["variables"]["llama_server_page_port"] = plan["head"]["port"] + 2
    (reason,) = swapping(pair, KEPT, DEEP)["reasons"]
    assert "llama-swap gives the 2 ports after llama_server_port to its models" in reason


def test_builds_without_a_router_are_served_too(pair):
    for host in pair.hosts.values():
        host["variables"].update(llama_release=FORK, llama_accept_advisories=["rpc-remote-code-execution"])
    plan = swapping(pair, KEPT, DEEP)
    assert not plan["refused"], plan["reasons"]
    assert configured(plan)["models"].keys() == {"small", "deep"}


@pytest.mark.parametrize(
    "words, reason",
    [
        (["--chat-template", "${PORT} ${x}"], "'${PORT} ${x}' is given, which llama-swap reads otherwise: change it"),
        (["--api-prefix", "/x"], "--api-prefix is given to llama-server, and clients reach llama-swap: remove it"),
    ],
)
def test_what_a_model_behind_llama_swap_cannot_have_is_refused(pair, words, reason):
    plan = swapping(pair, KEPT, {**DEEP, "extra_args": words})
    assert plan["refused"]
    assert plan["reasons"] == [f"deep in llama_models: {reason}"]


@pytest.fixture
def two_backends():
    """Devices that HIP drives with llama.cpp, and Vulkan with ik_llama.cpp."""
    cluster = Cluster()
    for index, group in enumerate(("head", "worker", "worker")):
        address, release = f"192.0.2.{10 + index}", {**TREE, "build": 8600}
        cluster.add(
            f"halo{index}",
            group,
            address=address,
            facts=strix_halo(),
            llama_backend=["hip", "vulkan"],
            llama_release=release,
            llama_release_vulkan=FORK,
            llama_accept_advisories=["rpc-remote-code-execution"],
        )
    return cluster


def test_a_model_may_have_a_backend_of_its_own_and_so_a_release(two_backends):
    plan = swapping(two_backends, KEPT, {**DEEP, "backend": "vulkan"}, THIRD)
    assert not plan["refused"], plan["reasons"]
    small, deep, third = plan["head"]["models"]
    builds = {build["backend"]: build["id"] for build in plan["hosts"]["halo0"]["builds"]}
    programs = [model["argv"][0].split("/")[-3] for model in (small, deep, third)]
    assert programs == [builds["hip"], builds["vulkan"], builds["hip"]]
    protocols = [model["command"][model["command"].index("--protocol") + 1] for model in (small, deep)]
    assert protocols == [plan["releases"][release]["protocol"] for release in plan["releases"]]
    workers = {worker["endpoint"]: worker for host in plan["hosts"].values() for worker in host["workers"]}
    lent = [[workers[word]["backend"] for word in model["command"] if word in workers] for model in (deep, third)]
    assert lent == [["vulkan", "vulkan"], ["hip", "hip"]]


def test_an_advisory_is_said_once_with_the_names_of_the_models_that_meet_it(two_backends):
    """The fork serves one of them alone, by Vulkan; a worker that has no graphics serves the other two."""
    two_backends.add("small", "worker", address="192.0.2.20", facts={}, llama_release={**TREE, "build": 8600})
    advisories = swapping(two_backends, SMALL, {**DEEP, "backend": "vulkan"}, THIRD)["advisories"]

    def said(identifier):
        found = [entry for entry in advisories if entry["id"] == identifier]
        return [(entry["message"].partition(": ")[0], entry["hosts"]) for entry in found]

    (unmaintained,) = said("backend-unmaintained")
    assert unmaintained[0] == "deep in llama_models"
    assert said("rpc-in-clear") == [
        ("small and third in llama_models", ["halo1", "halo2", "small"]),
        ("deep in llama_models", ["halo1", "halo2"]),
    ]


def test_what_a_kept_model_holds_is_missing_for_each_backend_of_its_device(two_backends):
    def room(keep):
        plan = swapping(two_backends, {**SMALL, "keep": keep}, {**DEEP, "backend": "vulkan"})
        return {entry["device"]: entry["capacity_mib"] for entry in plan["head"]["models"][1]["placement"]}

    before, beside = room(False), room(True)
    assert len(before) == 3
    assert all(before[device] > beside[device] for device in before)


def test_models_whose_backends_need_other_programs_are_refused(two_backends):
    entries = SMALL, {**THIRD, "backend": "vulkan"}
    files = {"llama_server_tls_certificate_file": "/srv/c.pem", "llama_server_tls_key_file": "/srv/k.pem"}
    reasons = swapping(two_backends, *entries, **files)["reasons"]
    assert any("third in llama_models: with this backend halo0 has other programs" in reason for reason in reasons)
    several(two_backends, *entries, **dict.fromkeys(files), llama_server_engine="router")
    assert "llama_models has different backends, and llama-server starts" in two_backends.plan()["reasons"][0]


def test_llama_swap_needs_its_program(pair):
    (reason,) = swapping(pair, KEPT, DEEP, program=None)["reasons"]
    assert reason.startswith("llama_server_engine is llama-swap, and llama_server_swap_program does not say where")


@pytest.fixture
def look_up(pair, cache):
    def look_up(program, checksum=None):
        variables = {"llama_server_swap_checksum": checksum} if checksum else {}
        several(pair, KEPT, DEEP, llama_server_engine="llama-swap", llama_server_swap_program=str(program), **variables)
        hosts = cluster_inputs.settle("llama_cluster", pair.hosts)
        return sources.look_up(str, cluster_inputs.read("llama_cluster", hosts), CATALOGUE).swap

    return look_up


def test_the_program_is_read_on_the_controller(look_up, tmp_path):
    path = tmp_path / "llama-swap"
    path.write_bytes(b"\x7fELF\xff")
    digest = "22de4ba53ed7a4ec3c0a5dd2ad3fa6f7ab5a3ef5e2d17a5b2c2c1d8a3a0dbf6e"
    program = look_up(path)
    assert (program.path, program.bytes) == (str(path), 5)
    assert look_up(path, f"sha256:{program.sha256}") == program
    with pytest.raises(
        Refusal, match=f"which has sha256:{program.sha256}, and llama_server_swap_checksum is sha256:{digest}"
    ):
        look_up(path, f"sha256:{digest}")
    path.unlink()
    with pytest.raises(Refusal, match=r"llama_server_swap_program is .*, which the controller cannot read"):
        look_up(path)


def packed(*names):
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as tar:
        for name in names:
            member = tarfile.TarInfo(name)
            member.size = 4
            tar.addfile(member, io.BytesIO(b"\x7fELF"))
    return stream.getvalue()


def test_the_program_is_taken_out_of_its_archive(look_up, server):
    archive = packed("README.md", "llama-swap")
    checksum = f"sha256:{hashlib.sha256(archive).hexdigest()}"
    server.faults["/swap.tar.gz"] = answer(200, archive)
    url = f"{server.url}/swap.tar.gz"
    with pytest.raises(Refusal, match=r"which is a URL: set llama_server_swap_checksum"):
        look_up(url)
    program = look_up(url, checksum)
    assert Path(program.path).read_bytes() == b"\x7fELF"
    server.faults["/swap.tar.gz"] = answer(404, b"")
    assert look_up(url, checksum) == program
    with pytest.raises(Refusal, match=r"which its server does not give \(HTTP 404\): correct it, or download it and"):
        look_up(url, f"sha256:{'ab' * 32}")
    server.faults["/swap.tar.gz"] = answer(200, b"a page")
    with pytest.raises(
        Refusal, match=r"swap.tar.gz, which has sha256:.* and llama_server_swap_checksum is sha256:abab"
    ):
        look_up(url, f"sha256:{'ab' * 32}")


@pytest.mark.parametrize("content", [packed("README.md"), packed("llama-swap")[:60]], ids=["another file", "cut off"])
def test_an_archive_without_the_program(look_up, tmp_path, content):
    path = tmp_path / "swap.tar.gz"
    path.write_bytes(content)
    with pytest.raises(Refusal, match=r"which is no archive with a file llama-swap: give one of its releases"):
        look_up(path)


def test_the_program_is_not_in_the_history(pair, tmp_path):
    text = tmp_path / "runtime.py"
    text.write_text("text")
    program, *_others = complete(swapping(pair, KEPT, DEEP))["hosts"]["head"]["files"]
    file = typed(complete(swapping(pair, KEPT, DEEP))).hosts["head"].files[0]
    assert program["path"] == file.path == AT
    assert plan_history._text(file) is None
    assert plan_history._text(file._replace(mode="0644", source=str(text))) == "text"


def test_planner_and_launcher_agree():
    assert names.KEY_VARIABLES == llama_server.KEY_VARIABLES
    assert names.folder_of_model("/state", "a/b c") == str(llama_server.folder_of_model(Path("/state"), "a/b c"))


def test_keys_are_variables(tmp_path):
    path = tmp_path / "keys"
    assert llama_server.key_variables(None) == {}
    path.write_text("one\n\n two \n")
    found = llama_server.key_variables(path)
    assert [*found] == list(llama_server.KEY_VARIABLES)
    assert [*found.values()][:3] == ["one", "two", "one"]
    for text, count in (("", 0), ("key\n" * 33, 33)):
        path.write_text(text)
        with pytest.raises(ValueError, match=f"has {count} keys: give it 1 to 32, one a line"):
            llama_server.key_variables(path)


def test_nothing_of_llama_swap_is_in_other_plans(pair):
    assert isinstance(pair, Cluster)
    plan = several(pair, SMALL, DEEP).plan()
    assert "engine" not in plan["head"]
    assert not any("command" in model for model in plan["head"]["models"])
    assert swap.STOP_SECONDS > llama_server.STOP_SECONDS
