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
    [(11063, "7.0.0"), (11434, "7.0.0"), (11435, None), (11450, "8.0.0"), (11739, "8.0.0"), (11740, None)],
)
def test_protocol_by_build_is_said_only_where_it_is_known(build, protocol):
    assert capabilities.protocol_of(build) == protocol


@pytest.mark.parametrize(
    "architecture, fork, lacking, having",
    [
        ("clef", MAINLINE, 11063, 11434),
        ("maion-coder", MAINLINE, 11549, 11669),
        ("beam", MAINLINE, 11669, 11739),
        ("xing4_0", MAINLINE, 11739, 12211),
        ("not-yet", MAINLINE, 12211, None),
        ("lfm2", IK_LLAMA, 4840, None),
    ],
)
def test_between_which_builds_an_architecture_appeared(architecture, fork, lacking, having):
    assert capabilities.support_of(architecture, fork) == (lacking, having)
    assert capabilities.support_of("llama", fork) is None


@pytest.mark.parametrize("fork, build", [(MAINLINE, 11062), (IK_LLAMA, 4839)])
def test_a_build_before_the_window_is_refused(fork, build):
    given = {"source": "git", "ref": "a" * 40, "build": build, "fork": fork}
    assert releases.release_of(release_request.request_of({**given, "build": build + 1}), {}).build == build + 1
    said = f"llama_release is build {build} of {fork}, but the oldest supported build is {build + 1}: use"
    with pytest.raises(Refusal, match=said):
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
    assert capabilities.parse_help(line + "\n") == known


def test_what_a_help_says_is_removed_is_not_known():
    """As 0.3.36 prints it, with the heading of the next section."""
    rest = " " * 40 + "--spec-n (env: X)"
    text = f"--draft, --draft-max N    the argument has been removed. use\n{rest}\n\n----- more -----\n\n-h  help\n"
    assert capabilities.parse_help(text) == {"-h": False}


@pytest.mark.parametrize(
    "argv, program, fork, unknown",
    [
        (["--no-such-option"], options.SERVER, MAINLINE, ["--no-such-option"]),
        (["--lora=x.gguf"], options.SERVER, MAINLINE, ["--lora=x.gguf"]),
        (["-lm", "dio"], options.SERVER, IK_LLAMA, ["-lm"]),
        (["--flash-attn", "on", "--fit", "off", "--n-predict", "-1"], options.SERVER, MAINLINE, []),
        (["--ctx_size", "8"], options.SERVER, MAINLINE, []),
        (["--chat-template", "--no-such-option"], options.SERVER, MAINLINE, []),
        (["--control-vector-layer-range", "1", "2"], options.SERVER, MAINLINE, []),
        (["--n-gpu-layers", "9", "--no-mmap", "-mla", "3"], options.SERVER, IK_LLAMA, []),
        (["--jinja", "true", "--verbose"], options.SERVER, MAINLINE, ["--jinja true"]),
        (["-H", "127.0.0.1", "-p", "50052", "-d", "CPU", "-m", "64"], options.WORKER, MAINLINE, ["-m"]),
    ],
)
def test_what_a_program_does_not_know_of_its_command_line(argv, program, fork, unknown):
    assert capabilities.unknown_options(program, argv, help_of(program, fork), fork) == unknown
