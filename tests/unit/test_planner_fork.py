"""Plans with ik_llama.cpp, whose names, flags and numbers are its own. What its real programs say is held against this in the
integration tests."""

import pytest
from support.clusters import GPU, IK_LLAMA, model, serving

ACCEPTED = ["rpc-remote-code-execution"]


@pytest.fixture
def fork(local):
    local.hosts["here"]["variables"].update(llama_release=IK_LLAMA, llama_accept_advisories=ACCEPTED)
    return local


def test_the_local_cluster(fork):
    """The recorded plan of cuda_triple shows the rest of its command lines and options."""
    plan = fork.accepted()
    here, release = plan["hosts"]["here"], plan["release"]
    assert (release["fork"], release["build"], release["protocol"]) == ("ik_llama.cpp", 4840, "3.5.2")
    assert release["repository"] == "https://github.com/ikawrakow/ik_llama.cpp"
    assert here["workers"][0]["argv"][1:] == ["-H", "127.0.0.1", "-p", "50052", "-d", "CPU", "-cpu", "-t", "8"]
    assert [entry["device"] for entry in plan["placement"]] == ["RPC0[127.0.0.1:50052]", "RPC0[127.0.0.1:50053]"]
    assert here["builds"][0]["targets"] == ["llama-server", "rpc-server"]


@pytest.mark.parametrize(
    "repository, told",
    [
        ("https://host/u/ik_llama.cpp.git", "ik_llama.cpp"),
        ("/srv/git/ik_llama.cpp/", "ik_llama.cpp"),
        ("git@host:ik_llama.cpp", "ik_llama.cpp"),
        ("https://host/u/my_ik_llama.cpp", None),
        ("https://host/ik_llama.cpp/copy", None),
    ],
)
def test_the_repository_tells_the_fork_unless_it_is_said(local, repository, told):
    release = {"source": "git", "repository": repository, "ref": IK_LLAMA["ref"], "build": 12000}
    local.hosts["here"]["variables"].update(llama_release=release, llama_accept_advisories=ACCEPTED)
    assert local.plan()["release"].get("fork") == told
    ids = set()
    for said, expected in (("llama.cpp", None), ("ik_llama.cpp", "ik_llama.cpp")):
        local.hosts["here"]["variables"]["llama_release"] = {**release, "fork": said}
        planned = local.plan()["release"]
        assert planned.get("fork") == expected
        ids.add(planned["id"])
    assert len(ids) == 2


@pytest.mark.parametrize(
    "variables, said",
    [
        (
            {"llama_server_load_mode": "dio"},
            ["llama_server_load_mode is dio", "git-8337e4cd", "use mmap or none or mmap+mlock or auto"],
        ),
        (
            {"llama_server_extra_args": ["-kvu", "-lzm", "on"]},
            ["has -kvu, -lzm, which only llama.cpp supports", "git-8337e4cd is a release of ik_llama.cpp: remove them"],
        ),
        (
            {"llama_accept_advisories": []},
            ["With build 4840 of ik_llama.cpp, anyone who can reach a worker's port", "add rpc-remote-code-execution"],
        ),
        (
            {"llama_accept_advisories": [], "llama_release": {**IK_LLAMA, "build": 5000}},
            ["build 5000 of ik_llama.cpp (newer than 4840", "add rpc-remote-code-execution"],
        ),
    ],
)
def test_what_the_fork_lacks_is_refused(fork, variables, said):
    fork.hosts["here"]["variables"].update(variables)
    fork.reason(*said)


@pytest.mark.parametrize("build, said", [(4840, "build 4840 does not know"), (4841, "build 4841 has not been checked")])
def test_an_architecture_that_the_fork_lacks_is_said(fork, build, said):
    plan = serving(fork, model(1, 16, architecture="lfm2"), llama_release={**IK_LLAMA, "build": build}).plan()
    assert said in " ".join(advisory["message"] for advisory in plan["advisories"])


@pytest.mark.parametrize("kind, expected", [("f16", "OFF"), ("q8_0", "OFF"), ("q4_0", "ON")])
def test_flash_attention_is_compiled_for_what_the_cache_needs(fork, kind, expected):
    fork.hosts["here"]["variables"].update(llama_server_cache_type_k=kind, llama_server_cache_type_v=kind)
    options = fork.plan()["hosts"]["here"]["builds"][0]["cmake_options"]
    assert options["GGML_IQK_FA_ALL_QUANTS"] == expected


def test_rocm_is_refused(fork):
    facts = fork.hosts["here"]["facts"]
    facts["accelerators"] = [{**GPU, "backend": "hip", "architecture": "gfx1151"}]
    facts["toolchain"]["hipconfig"] = "7.2"
    fork.set("here", llama_worker_endpoints=[])
    fork.reason(
        "a release of ik_llama.cpp", "cannot build for hip (here)", "set llama_backend to cpu or vulkan for those hosts"
    )
