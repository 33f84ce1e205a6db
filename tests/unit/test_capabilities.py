"""Build numbers against facts of real trees; what the real programs say is held against this in the integration tests."""

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import capabilities, options
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.builds import releases
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import release_request
from support.helps import GENERATIONS, help_of

MMAP = {"no-mmap", "mmap", "mlock", "direct-io", "no-direct-io"}
NUMBERED = "RPC0[{endpoint}]", "RPC{index}"
"""Names of a buffer and of a device."""


@pytest.mark.parametrize(
    "version, binary, worker_flags, load_modes, protocol, names_of_devices",
    [
        ("0.3.16", "rpc-server", "Hpmctd", {"no-mmap", "mlock"}, "2.0.0", ("RPC[{endpoint}]", "RPC[{endpoint}]")),
        ("0.3.20", "rpc-server", "Hpctd", {*MMAP, "fit", "flash-attn"}, "3.6.1", NUMBERED),
        ("0.3.36", "ggml-rpc-server", "Hpctd", {"load-mode", "fit", "flash-attn"}, "7.0.0", NUMBERED),
    ],
)
def test_trees_of_the_package_index(version, binary, worker_flags, load_modes, protocol, names_of_devices):
    tree = capabilities.PYPI_TREES[version]
    able = capabilities.of_build(tree["generation"], tree.get("protocol"))
    names = ("flash-attention", "load-mode", "fit")
    changing = {word[2:] for name in names for word in options.of_name(name).words() if word.startswith("--")}
    server_flags = set(able.server_flags)
    assert server_flags & changing == load_modes
    assert server_flags >= {"rpc", "ctx-size", "n-gpu-layers", "tensor-split"}
    own = binary, tuple(sorted(worker_flags)), able.server_flags, protocol, *names_of_devices
    assert able == capabilities.Capabilities(*own)


@pytest.mark.parametrize(
    "build, protocol",
    [
        (6097, "2.0.0"),
        (8802, "4.0.0"),
        (10496, "5.1.0"),
        (10566, "5.1.0"),
        (10567, None),
        (11000, None),
        (11450, "8.0.0"),
        (11669, "8.0.0"),
        (11670, None),
    ],
)
def test_protocol_by_build_is_said_only_where_it_is_known(build, protocol):
    assert capabilities.of_build(build).protocol == protocol


@pytest.mark.parametrize(
    "build, commit, protocol",
    [
        (11063, "0c1e570", "7.0.0"),
        (11063, "0c1e570" + "a" * 33, "7.0.0"),
        (11063, "unknown", None),
        (11063, "4227c9b", None),
        (9900, "0c1e570", "4.0.0"),
    ],
)
def test_compiled_programs_speak_what_their_build_or_a_commit_that_was_read_says(build, commit, protocol):
    given = {"source": "binary", "path": "/b.tar.gz", "checksum": "sha256:" + "a" * 64, "build": build}
    given.update({"commit": commit} if commit != "unknown" else {})
    assert releases.release_of(release_request.request_of(given), {}).protocol == protocol


@pytest.mark.parametrize(
    "day, protocol, build",
    [
        ("2025-08-14", "2.0.0", 6170),
        ("2026-06-01", "4.0.0", 9434),
        ("2026-08-16", "5.0.0", 10456),
        ("2026-10-01", "7.0.0", 11184),
        ("2026-08-20", "5.0.0", 10495),
        ("2026-08-10", "5.1.0", 10496),
        ("2026-04-10", None, 8729),
        ("2024-01-01", None, None),
    ],
)
def test_the_build_of_a_day(day, protocol, build):
    """0.3.25 and 0.3.35 stand in the table with the numbers of their days; the protocol of a tree bounds its number."""
    assert capabilities.build_of_day(day, protocol) == build


@pytest.mark.parametrize("generation", GENERATIONS)
def test_what_the_help_lists_is_what_planning_takes_for_granted(generation):
    build, fork = GENERATIONS[generation]
    assumed = capabilities.of_build(build, fork=fork)
    worker, server = (help_of(program, generation).known for program in (options.WORKER, options.SERVER))
    assert set(assumed.worker_flags) == {word[1:] for word in worker if not word.startswith("--")} - {"h"}
    assert {f"--{name}" for name in assumed.server_flags} <= set(server)
    valued = {word for word in options.OF_TWO_FORMS & set(server) if server[word]}
    assert valued == {f"--{name}" for name in assumed.server_flags} & options.OF_TWO_FORMS


@pytest.mark.parametrize(
    "line, known",
    [
        ("-ngl, --gpu-layers, --n-gpu-layers N    max", {"-ngl": True, "--gpu-layers": True, "--n-gpu-layers": True}),
        ("--mmap, --no-mmap                       whether to map", {"--mmap": False, "--no-mmap": False}),
        ("-t,      --threads        number of threads", {"-t": False, "--threads": False}),
        ("  -d DEV,  --device         device to use", {"-d": True, "--device": True}),
        ("  -d, --device <dev1,dev2,...>     devices", {"-d": True, "--device": True}),
        ("  -ctx-ckpt N, --ctx-checkpoints N", {"-ctx-ckpt": True, "--ctx-checkpoints": True}),
        ("  -cpu                                enable", {"-cpu": False}),
        ("-ts,   --tensor-split N0,N1,N2,...      fraction", {"-ts": True, "--tensor-split": True}),
        ("--fim-qwen-1.5b-default                 use", {"--fim-qwen-1.5b-default": False}),
        (" " * 40 + "- none: --no-mmap of older builds", {}),
        ("usage: llama-server [options] --model", {}),
    ],
)
def test_a_line_of_a_help(line, known):
    assert capabilities.parse_help(line + "\n") == capabilities.Help(known, {})


def test_what_a_help_says_is_removed_is_not_known():
    """As 0.3.36 prints it, with the heading of the next section."""
    rest = " " * 40 + "--spec-n (env: X)"
    text = f"--draft, --draft-max N    the argument has been removed. use\n{rest}\n\n----- more -----\n\n-h  help\n"
    reason = "argument has been removed. use --spec-n"
    assert capabilities.parse_help(text) == ({"-h": False}, {"--draft": reason, "--draft-max": reason})


def problems(argv, generation="0.3.36", program=options.SERVER, known=None):
    build, fork = GENERATIONS[generation]
    return capabilities.problems(program, argv, known or help_of(program, generation), build, fork)


def test_a_renamed_option_is_named_with_the_nearest_one():
    known = dict(help_of(options.SERVER, "0.3.36").known)
    known["--context-size"] = known.pop("--ctx-size")
    assert problems(["--ctx-size", "8"]) == []
    assert problems(["--ctx-size", "8", "--parallel", "1"], known=capabilities.Help(known, {})) == [
        ("--ctx-size", "does not know --ctx-size", "--context-size")
    ]


@pytest.mark.parametrize(
    "argv, generation, why",
    [
        (["--no-such-option"], "0.3.36", "does not know --no-such-option"),
        (["--draft", "4"], "0.3.36", "no longer knows --draft: argument has been removed. use --spec-draft"),
        (["--flash-attn", "--port", "1"], "0.3.20", "takes --flash-attn with a value"),
        (["--flash-attn"], "0.3.20", "takes --flash-attn with a value"),
        (["--flash-attn", "on"], "0.3.16", "takes --flash-attn without a value"),
        (["--lora=x.gguf"], "0.3.36", "does not know --lora=x.gguf: make its value a separate entry"),
        (["--load-mode", "dio"], "0.3.20", "does not know --load-mode"),
        (["-lm", "dio"], "ik-4840", "does not know -lm"),
    ],
)
def test_what_a_program_would_not_take(argv, generation, why):
    (problem,) = problems(argv, generation)
    assert problem.why.startswith(why)


@pytest.mark.parametrize(
    "argv, generation",
    [
        (["--flash-attn", "on", "--fit", "off", "--n-predict", "-1"], "0.3.36"),
        (["--ctx_size", "8"], "0.3.36"),
        (["--chat-template", "--no-such-option"], "0.3.36"),
        (["--control-vector-layer-range", "1", "2"], "0.3.36"),
        (["--n-gpu-layers", "9", "--no-mmap", "-mla", "3"], "ik-4840"),
        (["--override-tensor", "a=CPU", "--flash-attn"], "ik-3775"),
    ],
)
def test_what_a_program_takes(argv, generation):
    assert problems(argv, generation) == []


def test_what_a_worker_would_not_take():
    argv = ["-H", "127.0.0.1", "-p", "50052", "-d", "CPU", "-m", "64"]
    assert [problem.word for problem in problems(argv, program=options.WORKER)] == ["-m"]
    assert problems(argv, "0.3.16", options.WORKER) == []
