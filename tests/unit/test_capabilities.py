"""What builds understand; what the real programs say is held against this in the integration tests."""

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import capabilities, options
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.words import IK_LLAMA, MAINLINE
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.builds import releases
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import release_request
from support.helps import help_of


@pytest.mark.parametrize(
    "build, protocol",
    [(11063, "7.0.0"), (11064, None), (11449, None), (11450, "8.0.0"), (11669, "8.0.0"), (11670, None)],
)
def test_protocol_by_build_is_said_only_where_it_is_known(build, protocol):
    assert capabilities.of_build(build).protocol == protocol


@pytest.mark.parametrize("fork, build", [(MAINLINE, 11062), (IK_LLAMA, 4839)])
def test_a_build_before_the_window_is_refused(fork, build):
    given = {"source": "git", "ref": "a" * 40, "build": build, "fork": fork}
    assert releases.release_of(release_request.request_of({**given, "build": build + 1}), {}).build == build + 1
    with pytest.raises(
        Refusal, match=f"llama_release is build {build} of {fork}, and the oldest that .* is {build + 1}: use"
    ):
        releases.release_of(release_request.request_of(given), {})


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


def problems(argv, fork=MAINLINE, program=options.SERVER, known=None):
    return capabilities.problems(program, argv, known or help_of(program, fork), fork)


def test_a_renamed_option_is_named_with_the_nearest_one():
    known = dict(help_of(options.SERVER).known)
    known["--context-size"] = known.pop("--ctx-size")
    assert problems(["--ctx-size", "8"]) == []
    assert problems(["--ctx-size", "8", "--parallel", "1"], known=capabilities.Help(known, {})) == [
        ("--ctx-size", "does not know --ctx-size", "--context-size")
    ]


@pytest.mark.parametrize(
    "argv, fork, why",
    [
        (["--no-such-option"], MAINLINE, "does not know --no-such-option"),
        (["--draft", "4"], MAINLINE, "no longer knows --draft: argument has been removed. use --spec-draft"),
        (["--lora=x.gguf"], MAINLINE, "does not know --lora=x.gguf: make its value a separate entry"),
        (["-lm", "dio"], IK_LLAMA, "does not know -lm"),
    ],
)
def test_what_a_program_would_not_take(argv, fork, why):
    (problem,) = problems(argv, fork)
    assert problem.why.startswith(why)


@pytest.mark.parametrize(
    "argv, fork",
    [
        (["--flash-attn", "on", "--fit", "off", "--n-predict", "-1"], MAINLINE),
        (["--ctx_size", "8"], MAINLINE),
        (["--chat-template", "--no-such-option"], MAINLINE),
        (["--control-vector-layer-range", "1", "2"], MAINLINE),
        (["--n-gpu-layers", "9", "--no-mmap", "-mla", "3"], IK_LLAMA),
    ],
)
def test_what_a_program_takes(argv, fork):
    assert problems(argv, fork) == []


def test_what_a_worker_would_not_take():
    argv = ["-H", "127.0.0.1", "-p", "50052", "-d", "CPU", "-m", "64"]
    assert [problem.word for problem in problems(argv, program=options.WORKER)] == ["-m"]
