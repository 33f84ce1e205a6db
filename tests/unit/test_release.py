"""The module as Ansible calls it: what it reports, and a disk that is really full."""

import os
import re
from unittest import mock

import pytest
from ansible.errors import AnsibleActionFail, AnsibleConnectionFailure
from ansible_collections.llamacpp.cluster.plugins.action import release as action
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import locks, names, typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.files import sha256
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.builds import installer, smoke_test, store
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.drift import state
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.words import adapt_argv
from ansible_collections.llamacpp.cluster.plugins.modules import release, uninstall
from ansible_collections.llamacpp.cluster.plugins.plugin_utils import action as base
from support import actions, builds
from support.hosts import build_plan, executable, host_plan
from test_installer import pack_folder

MODULE = release
pytestmark = [pytest.mark.programs, pytest.mark.usefixtures("untried")]
LEFT, PLANNED = (f"b860{number}-cpu-0123abcd" for number in range(2))
PROGRAM = "#!/bin/sh\necho usage: --rpc --fit\n"


@pytest.fixture
def programs(tmp_path):
    """Arguments for the installation of an archive of programs."""
    folder = tmp_path / "llama-b11434"
    for name in ("llama-server", "ggml-rpc-server"):
        executable(folder / name, PROGRAM)
    (folder / "libggml.so").write_bytes(os.urandom(1 << 20))
    return {
        "release": typed_json.dump(builds.RELEASE._replace(source="binary", build=11434)),
        "build": typed_json.dump(builds.BUILD._replace(id="new")),
        "prefix": str(tmp_path / "prefix"),
        "cache": str(tmp_path / "cache"),
        "fetched_source": typed_json.dump(builds.source_of(pack_folder(tmp_path, folder))),
    }


def host(programs, *others):
    """:param others: further planned builds."""
    builds = tuple(build_plan(identity) for identity in (programs["build"]["id"], *others))
    prefix, cache = programs["prefix"], programs["cache"]
    planned = host_plan(prefix=prefix, cache=cache, units=f"{prefix}/units", builds=builds)
    return typed_json.dump(planned)


def test_a_release_is_installed_once(call, programs):
    assert call(check=True, **programs)["changed"]
    assert not os.path.exists(programs["prefix"])
    assert call(**programs)["manifest"]["id"] == "new"
    assert call(**programs)["changed"] is False


def test_programs_that_do_not_work_here_are_not_installed(call, programs, tmp_path, monkeypatch):
    call(**{**programs, "build": {**programs["build"], "id": "old"}})
    tried = []

    def check(folder, listed, place):
        tried.append(
            (sorted(path.name for path in folder.iterdir()), list(listed), place.folder.exists(), place.account)
        )
        raise Refusal("llama-server was tested on this host's processor and crashed with SIGILL.")

    monkeypatch.setattr(smoke_test, "test_programs", check)
    assert call(**{**programs, "build": {**programs["build"], "id": "old"}})["changed"] is False
    assert not tried
    failed = call(**programs)
    assert failed["failed"]
    assert failed["msg"].startswith("Installing new: llama-server was tested on this host's processor")
    programs = ["ggml-rpc-server", "llama-server"]
    assert tried == [(["ggml-rpc-server", "libggml.so", "llama-server"], programs, True, None)]
    assert [path.name for path in (tmp_path / "prefix/releases").glob("[!.]*")] == ["old"]
    assert not list(tmp_path.glob("prefix/releases/.new/trial"))


@pytest.mark.parametrize(
    "page, ui", [(None, "auto"), (False, "auto"), (False, "true"), (True, "true"), (False, "false")]
)
def test_compiled_programs_without_the_chat_page(call, programs, monkeypatch, page, ui):
    monkeypatch.setattr(smoke_test, "test_programs", lambda *_arguments: page)
    programs["build"]["ui"] = ui
    result = call(**programs)
    if (page, ui) == (False, "true"):
        assert (
            "llama_server_ui is true, but this release's llama-server has no chat page: set llama_server_ui to auto"
            in result["msg"]
        )
        return
    assert result["manifest"]["page"] is page
    warning = ["llama-server of new has no chat page: use a release that the hosts compile, such as source: pypi"]
    assert result["option_warnings"] == warning * ((page, ui) == (False, "auto"))
    assert call(**programs)["option_warnings"] == []


def test_old_releases_are_removed_and_what_is_put_to_use_counts_as_new(call, programs, tmp_path, monkeypatch):
    monkeypatch.setattr(state.retention, "RETAINED_RELEASES", 1)
    call(**programs)
    folder = tmp_path / "prefix" / "releases"
    os.utime(folder / "new", (1, 1))
    (folder / LEFT / "bin").mkdir(parents=True)
    (tmp_path / "cache" / "builds").mkdir(parents=True)
    for name in (f"{LEFT}.log", "mine.log"):
        (tmp_path / "cache" / "builds" / name).write_text("")
    told = call(check=True, module=uninstall, unneeded=True, host=host(programs))
    assert (told["changed"], told["removed"], told["diff"]) == (True, [LEFT], {"before": f"{LEFT}\n", "after": ""})
    assert (folder / LEFT).exists()
    monkeypatch.setattr(state.retention, "RETAINED_RELEASES", 2)
    assert call(module=uninstall, unneeded=True, host=host(programs))["changed"] is False
    monkeypatch.setattr(state.retention, "RETAINED_RELEASES", 1)
    assert (folder / "new").stat().st_mtime > 1
    assert call(module=uninstall, unneeded=True, host=host(programs))["removed"] == [LEFT]
    assert [path.name for path in folder.iterdir()] == ["new"]
    (folder / "mine").mkdir()
    assert call(module=uninstall, unneeded=True, host=host(programs))["removed"] == ["mine"]
    assert [path.name for path in (tmp_path / "cache" / "builds").iterdir()] == ["mine.log"]
    assert call(module=uninstall, unneeded=True, host=host(programs))["changed"] is False


def test_builds_that_never_ended_go_with_a_prune(call, programs, tmp_path):
    call(**programs)
    builds = tmp_path / "cache" / "builds"
    for identity in (LEFT, PLANNED):
        (builds / identity / "source").mkdir(parents=True)
        for ending in (".log", ".unpacked"):
            (builds / (identity + ending)).write_text("")
    for name in ("mine/file", "mine.log", "notes.unpacked"):  # an operator's
        (builds / name).parent.mkdir(exist_ok=True)
        (builds / name).write_text("")
    planned = host(programs, PLANNED)
    (tmp_path / "prefix" / "releases" / PLANNED).mkdir()
    with locks.hold(store.lock_path(tmp_path / "cache")):
        assert call(module=uninstall, unneeded=True, host=planned)["unfinished_builds"] == []
    told = call(check=True, module=uninstall, unneeded=True, host=planned)
    assert (told["changed"], told["removed"], told["unfinished_builds"]) == (True, [], [LEFT])
    assert told["diff"]["before"] == f"builds/{LEFT}\n"
    assert (builds / LEFT).exists()
    assert call(module=uninstall, unneeded=True, host=planned)["unfinished_builds"] == [LEFT]
    assert call(module=uninstall, unneeded=True, host=planned)["changed"] is False
    assert {path.name for path in builds.iterdir()} == {
        *("mine", "mine.log", "notes.unpacked", PLANNED),
        *(PLANNED + end for end in (".log", ".unpacked")),
    }


def test_a_teardown_does_not_begin_while_a_killed_run_still_builds(call, programs, tmp_path):
    cache = tmp_path / "cache"
    (cache / "builds" / LEFT / "source").mkdir(parents=True)
    planned = {**host(programs), "builds": []}
    (tmp_path / "prefix" / names.MARKER_FOLDER).mkdir(parents=True)
    with locks.hold(store.lock_path(cache)):
        failed = call(module=uninstall, host=planned)
    assert failed["msg"].startswith(
        f"A build of a killed run is still running on this host (process {os.getpid()}): stop it"
    )
    assert call(check=True, module=uninstall, host=planned)["unfinished_builds"] == [LEFT]
    assert call(module=uninstall, host=planned)["unfinished_builds"] == [LEFT]
    assert list((cache / "builds").iterdir()) == []


@pytest.fixture
def plugin(monkeypatch):
    made = actions.made(action)
    made.variables = {"inventory_hostname": "strix1"}
    monkeypatch.setattr(made, "get_shell_option", lambda *_arguments, **_more: "/a")
    monkeypatch.setattr(action, "POLL_SECONDS", 0)
    return made


def not_built(plugin, said):
    with pytest.raises(AnsibleActionFail, match=said) as raised:
        plugin._build(installer.ReleaseArguments(builds.RELEASE, builds.BUILD, "/p", "/c"))
    assert str(raised.value).isprintable()


@pytest.mark.parametrize("job", [None, "../x", {"a": 1}, "j123456.42"])
def test_a_build_that_does_not_begin_or_whose_connection_is_lost(monkeypatch, plugin, job):
    """async_status gets the name of a job as a path below a folder."""
    answers = iter([{"ansible_job_id": job, "msg": "\x1b[2Jno room"}, {"failed": True, "msg": "\x1b[2Jgone"}])
    monkeypatch.setattr(plugin, "_execute_module", lambda **_arguments: next(answers))
    lost = job == "j123456.42"
    begun = r"^strix1 did not start the build in the background \("
    not_built(plugin, r"the build \(job j123456.42\) has no readable status: " if lost else begun)


@pytest.mark.parametrize("dies", ["ssh: connect: no route", None])
def test_a_host_that_dies_or_restarts_during_a_build_ends_in_a_sentence(monkeypatch, plugin, dies):
    """async_status of a host that was restarted still finds the job's file, which says that it began."""
    answers = [{"ansible_job_id": "j12.34"}, *[{}] * base.POLLS_PER_CHECK]
    ask = mock.Mock(side_effect=[answers[0], AnsibleConnectionFailure(dies)] if dies else answers)
    monkeypatch.setattr(plugin, "_execute_module", ask)
    monkeypatch.setattr(plugin, "_low_level_execute_command", lambda command, **_more: {"rc": int("j12 " in command)})
    said = f"strix1 disconnected during the build: {dies}" if dies else r"^strix1: the build \(job j12.34\) disappeared"
    not_built(plugin, f"{said}.*Run the playbook again to resume")
    assert ask.call_count == (2 if dies else len(answers))


@pytest.mark.parametrize("said, limit", [(lambda looks: "7\n[1/9]", 99999), (lambda looks: f"{looks}\n[1/9]", 600)])
def test_a_build_that_a_host_never_ends_is_given_up(monkeypatch, plugin, said, limit):
    looks = []  # each a minute after the one before
    monkeypatch.setattr(plugin, "_execute_module", lambda **_more: looks.append(1) or {"ansible_job_id": "j1.2"})
    monkeypatch.setattr(plugin, "_low_level_execute_command", lambda *_arguments, **_more: {"stdout": said(len(looks))})
    monkeypatch.setattr(action, "BUILD_LIMIT_SECONDS", limit)
    monkeypatch.setattr(base.time, "monotonic", lambda: 60.0 * len(looks))
    monkeypatch.setattr(action.display, "display", lambda _text: len(looks) < 999 or pytest.fail("it goes on"))
    not_built(plugin, r"^strix1: the build \(job j1.2\) .* for 70 minutes, or ")


def test_a_module_that_is_killed_is_reported_in_a_sentence(monkeypatch, plugin):
    """The status was recorded from ansible-core 2.19's async_wrapper."""
    trace = (
        "Traceback (most recent call last):\n  File ...\njson.decoder.JSONDecodeError: Expecting value: line 1 column 1"
    )
    status = {"finished": True, "failed": True, "cmd": "/m", "data": "", "stderr": "noise\nKilled\n", "msg": trace}
    answers = iter([{"ansible_job_id": "j1.2"}, status, {}])
    monkeypatch.setattr(plugin, "_execute_module", lambda **_arguments: next(answers))
    job = base.BackgroundJob("proof", 60, 60, [0], str, "")
    message = base.failure_reason(plugin.run_in_background(job))
    assert message.startswith("the process was killed or crashed without a result: Killed. Check the host's kernel log")
    assert "Traceback" not in message


def test_a_release_that_cannot_be_removed(call, programs, tmp_path):
    (tmp_path / "prefix" / "releases").mkdir(parents=True)
    told = call(module=uninstall, unneeded=True, host=host(programs))
    assert told["failed"]
    assert "/releases/new: No such file or directory. Fix this on the host" in told["msg"]


def test_a_full_disk_is_named(call, programs, small_disk):
    told = call(**{**programs, "prefix": str(small_disk)})
    assert told["failed"]
    said = rf"Installing new: No space left on device\. Free space on {small_disk} or /\S* and run the playbook again\."
    assert re.fullmatch(said, told["msg"])
    assert list((small_disk / "releases").iterdir()) == []


def test_a_build_that_goes_on_is_named_as_such(call, programs, tmp_path):
    """Only a build does: what is copied is copied again."""
    (tmp_path / "cache").write_text("")
    compiled = {**programs, "release": typed_json.dump(builds.RELEASE), "cache": str(tmp_path / "cache")}
    assert call(**compiled)["msg"].endswith("The next run resumes the build.")
    received = {"path": str(tmp_path / "none"), "sha256": "0" * 64}
    assert "continues" not in call(**{**compiled, "received": received, "fetched_source": None})["msg"]


def test_a_disk_that_a_build_fills_is_named(call, programs, small_disk, tmp_path):
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "CMakeLists.txt").write_bytes(os.urandom(1 << 20))
    programs["fetched_source"]["sha256"] = sha256(pack_folder(tmp_path, tree, tree.name))
    told = call(**{**programs, "release": typed_json.dump(builds.RELEASE), "cache": str(small_disk)})
    assert told["failed"]
    assert f"unpack failed: the disk that holds {small_disk} is full" in told["msg"]


HELP_OF_SERVER = """----- common params -----

-c,    --ctx-size N                     size
--rpc SERVERS                           x
-fa,   --flash-attn [on|off|auto]       x
--draft N                               the argument has been removed. use --spec-draft-n-max
                                        (env: LLAMA_ARG_DRAFT_MAX)
--usage                                 x
"""
HELP_OF_WORKER = (
    "Usage: rpc-server [options]\n  -H, --host HOST   x\n  -p, --port PORT  x\n  -d, --device <dev1,dev2,...>  x\n"
)


@pytest.fixture
def printing(programs, tmp_path):
    """Arguments for the installation of programs that print such help."""

    def arguments(server=HELP_OF_SERVER, worker=HELP_OF_WORKER, **release):
        for name, text in (("llama-server", server), ("ggml-rpc-server", worker)):
            path = tmp_path / "llama-b11434" / name
            path.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\n")
        programs["fetched_source"]["sha256"] = sha256(pack_folder(tmp_path, tmp_path / "llama-b11434"))
        return {
            **programs,
            "release": {**programs["release"], **release},
            "services": [
                command(programs, "llama-server", "--rpc", "127.0.0.1:50052", "--ctx-size", "4096"),
                command(programs, "ggml-rpc-server", "-H", "127.0.0.1", "-p", "50052", "-d", "CPU"),
            ],
            "host_name": "strix1",
        }

    return arguments


def command(programs, program, *argv, release="new", **values):
    process = (f"{programs['prefix']}/releases/{release}/bin/{program}", *argv)
    return {**typed_json.dump(builds.SERVICE._replace(process=process)), **values}


def test_a_renamed_option_ends_the_run_before_anything_is_stopped(call, printing):
    arguments = printing(HELP_OF_SERVER.replace("--rpc", "--rpc-servers"))
    assert call(check=True, **arguments)["changed"], "it is not installed yet, so nothing is compared"
    for check in (False, True):
        told = call(check=check, **arguments)
        assert told["failed"]
        assert told["msg"] == (
            "Installing new: llama-server of new on strix1 does not know --rpc (its help has --rpc-servers), which llama_worker_endpoints sets: set "
            "llama_release to a build that has this option, or use a version of this collection that knows this build. No running service was touched."
        )


@pytest.mark.parametrize(
    "planned, said, told",
    [
        ("--ctx-size 8 --rpc x", "-c 8 --rpc x", "--ctx-size: the launcher passes -c instead"),
        ("--fit off --alias x", "--alias x", "--fit: the launcher omits it, and llama-server's default applies"),
        ("--cache-ram 4096", "", "--cache-ram: the launcher omits it"),
        ("--cache-ram 4095", None, "--cache-ram, which llama_server_prompt_cache_mib sets"),
        ("--ctx-checkpoints 31", None, "--ctx-checkpoints, which the plan sets"),
        ("--threads 1 --metrics --log-verbosity 4", "", "--metrics: the launcher omits it"),
        ("--model x", None, "--model, which llama_model_path sets"),
        ("--no-repack", None, "--no-repack, which"),
        ("--mmproj x", None, "--mmproj, which"),
    ],
)
def test_an_option_that_only_tunes_or_has_another_name_ends_no_run(call, printing, planned, said, told):
    """The launcher says it otherwise, of which the run warns each time."""
    help_of_server = (
        HELP_OF_SERVER.replace("--ctx-size", "--context-size") + "--alias X   x\n-mmu X   x\n--fit-ctx N   x\n"
    )
    arguments = printing(help_of_server)
    service = command(arguments, "llama-server", *planned.split())
    for _run in range(2):
        result = call(**{**arguments, "services": [service]})
        assert result.get("failed", False) == (said is None)
        assert f"does not know {told}" in " ".join([result.get("msg", ""), *result.get("option_warnings", ())])
    assert said is None or adapt_argv(service["process"])[1:] == said.split()
    assert call(**{**printing(f"{help_of_server}{planned} X   x\n"), "services": []})["changed"] is False


def test_what_is_said_otherwise_is_warned_of(monkeypatch, plugin):
    warned = []
    monkeypatch.setattr(action.display, "warning", warned.append)
    answer = {"manifest": {}, "option_warnings": ["it\x1b is left out"]}
    monkeypatch.setattr(plugin, "run_module", lambda **_arguments: answer)
    plugin.perform(installer.ReleaseArguments(builds.RELEASE._replace(source="binary"), builds.BUILD, "/p", "/c"))
    assert warned == [r"it\x1b is left out"]


WITH_TLS = f"{HELP_OF_SERVER}--ssl-cert-file FNAME   x\n"
CHILD = ["/releases/new/bin/llama-server", "--no-such-option"]


@pytest.mark.parametrize(
    "words, given, said",
    [
        ("llama-server --rpc x --ctx-size 8", {}, ""),
        ("llama-server --no-such-option", {}, "which llama_server_extra_args sets: remove it, or use an option"),
        ("llama-server --no-such-option", {"release": "other"}, ""),
        ("llama-server --no-such-option", {"help": "usage: none, but --rpc"}, ""),
        ("llama-server --rpc x", {"children": [CHILD]}, "does not know --no-such-option"),
        ("llama-server --draft 4", {}, "does not know --draft, which"),
        ("llama-server --fit off", {"fork": "ik_llama.cpp"}, "--fit, which the plan sets"),
        ("llama-server --ssl-cert-file x", {"help": WITH_TLS}, ""),
        ("llama-server --ssl-cert-file x", {"help": f"{WITH_TLS}built without SSL support"}, "was built without TLS"),
        ("llama-server --ssl-cert-file x", {"help": WITH_TLS, "fork": "ik_llama.cpp"}, "was built without TLS"),
        ("llama-server --ssl-cert-file x", {"help": f"{WITH_TLS}Running with SSL", "fork": "ik_llama.cpp"}, ""),
        ("ggml-rpc-server -c", {}, "rpc-server of new on strix1 does not know -c, which llama_worker_endpoints sets"),
        ("llama-server --n-gpu-layers 4 --seed 1", {"fork": "ik_llama.cpp"}, ""),
        ("llama-server --model x", {"fork": "ik_llama.cpp"}, "does not know --model"),
    ],
)
def test_planned_options_are_compared_with_the_help_of_the_programs(call, printing, words, given, said):
    """That of the fork does not list all."""
    fork = {"fork": given["fork"]} if "fork" in given else {}
    arguments = printing(given.get("help", HELP_OF_SERVER), **fork)
    one = command(arguments, *words.split(), release=given.get("release", "new"))
    children = [[arguments["prefix"] + CHILD[0], CHILD[1]] for _child in given.get("children", ())]
    told = call(**{**arguments, "services": [{**one, "children": children}]})
    assert told.get("failed", False) == bool(said)
    assert said in told.get("msg", "")
