# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Tests the programs of a release on this host's processor before they may replace the serving programs.

llama-server computes with a small quantised model and must give the right answer. A worker must complete a handshake; it computes nothing, because
the format of a graph depends on the protocol. Accelerators are not tested: the serving programs may need all their memory.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import commands, reading
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.names import LOOPBACK
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import backends, options, replies, rpc
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import known_answer, known_answer_file

MAX_PROGRAM_SECONDS = 60
"""Time limit for testing a program, which usually takes one or two seconds."""
POLL_SECONDS = 0.05
TAIL_LINES, TAIL_BYTES = 8, 4096
HIDING_VARIABLES = {
    backend.visibility_variable.name: backend.visibility_variable.hide_all_value
    for backend in backends.BY_NAME.values()
    if backend.visibility_variable and backend.visibility_variable.hide_all_value is not None
}
"""Variables that hide all accelerators from programs."""
SIGILL_REMEDY = (
    "The program contains an instruction that this host's processor or hypervisor does not support. Set GGML_NATIVE: 'OFF' in llama_build_cmake_options for "
    "this host. If the programs were compiled elsewhere (source: prebuilt, binary or package), compile them here with source: git"
)
GENERAL_REMEDY = "Set llama_release to another build, or fix the problem that the program reports"

MODEL_ARGUMENTS = (1, 128, "q8_0")
"""Layers, width and type of the known-answer model (210 kB). Code for particular processors (AMX, repacked weights) computes with matrices of this
type and shape, and a question of several tokens tests the code for prompts."""
QUESTION_LENGTH, ANSWER_LENGTH = 12, 8
"""Numbers of tokens in the question and in the answer."""


class TrialSettings(NamedTuple):
    folder: Path
    """Empty folder that every account may enter."""
    environment: Mapping[str, str]
    account: str | None
    """Account that runs the programs; None for the current account."""


class _Program(NamedTuple):
    name: str
    process: subprocess.Popen
    log: IO[bytes]
    deadline: float

    def check_running(self) -> None:
        """Fail if the program has exited or exceeds its time limit."""
        status = self.process.poll()
        if status is not None:
            exit_text = f"crashed with {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"
            raise self.failure(exit_text, SIGILL_REMEDY if status == -signal.SIGILL else GENERAL_REMEDY)
        if time.monotonic() > self.deadline:
            raise self.failure(f"did not answer within {MAX_PROGRAM_SECONDS} s", GENERAL_REMEDY)

    def seconds_left(self) -> float:
        return max(self.deadline - time.monotonic(), POLL_SECONDS)

    def failure(self, outcome: str, remedy: str) -> Refusal:
        descriptor = self.log.fileno()
        offset = max(os.fstat(descriptor).st_size - TAIL_BYTES, 0)
        output = os.pread(descriptor, TAIL_BYTES, offset).decode("utf-8", "replace").splitlines()[-TAIL_LINES:]
        return Refusal(
            f"{self.name} was tested on this host's processor and {outcome}. {remedy}. The release was not installed, and no running service was "
            "touched. Last output of the program:\n" + "\n".join(output)
        )


def test_programs(folder: Path, help_by_program: Mapping[str, Collection[str]], trial: TrialSettings) -> bool | None:
    """Test the programs of the release, except benchmarks. Return whether llama-server has its chat page; None without llama-server.

    :param help_by_program: program → options in its help.
    :raises Refusal: a program does not work on this host.
    """
    home_folder = trial.folder / "home"
    home_folder.mkdir()
    run_as_options = commands.run_as_options(trial.account)
    os.chown(home_folder, run_as_options.get("user", -1), run_as_options.get("group", -1))
    has_page = None
    for name, help_options in help_by_program.items():
        if name == options.SERVER:
            has_page = _check_server(folder / name, help_options, trial)
        elif name != options.BENCH and options.render_listed_option("worker-device", "CPU", help_options):
            _check_worker(folder / name, help_options, trial)
    return has_page


def _check_server(program: Path, help_options: Collection[str], trial: TrialSettings) -> bool:
    """Return whether llama-server has its chat page."""
    model_path = trial.folder / "small.gguf"
    known_answer_file.write_model(model_path, *MODEL_ARGUMENTS)
    port = replies.find_free_port()
    settings = {"model": str(model_path), "host": LOOPBACK, "port": str(port), "gpu-layers": "0", "context": "128"}
    settings.update(parallel="1", threads="2")
    arguments = [word for setting in settings.items() for word in options.render_listed_option(*setting, help_options)]
    with _start([str(program), *arguments], trial) as server:
        _wait_for_answer(server, port, "/health")
        reply = _wait_for_answer(
            server, port, "/completion", {"prompt": question_tokens(), "n_predict": ANSWER_LENGTH, "temperature": 0}
        )
        text = str(reply.get("content", "")).strip()
        if text != expected_answer():
            raise server.failure(f"gave a wrong answer: {text[:100]!r}, expected {expected_answer()!r}", GENERAL_REMEDY)
        return replies.has_page(replies.ask(f"{LOOPBACK}:{port}", "/", server.seconds_left()))


def _check_worker(program: Path, help_options: Collection[str], trial: TrialSettings) -> None:
    port = replies.find_free_port()
    settings = {"address": LOOPBACK, "worker-port": str(port), "worker-device": "CPU"}
    arguments = [word for setting in settings.items() for word in options.render_listed_option(*setting, help_options)]
    processor_option = options.render_listed_option("processor", "", help_options)[:1] if help_options else []
    with _start([str(program), *arguments, *processor_option], trial) as worker:
        while True:
            answer = rpc.probe(LOOPBACK, port, worker.seconds_left())
            if answer.state == "ok":
                return
            worker.check_running()
            if answer.state != "refused":
                raise worker.failure(f"did not answer like a worker ({answer.state}: {answer.detail})", GENERAL_REMEDY)
            time.sleep(POLL_SECONDS)


@contextmanager
def _start(argv: list[str], trial: TrialSettings) -> Iterator[_Program]:
    home_folder = str(trial.folder / "home")
    environment = {"PATH": commands.SEARCH_PATH, "HOME": home_folder, "LLAMA_CACHE": home_folder, "LC_ALL": "C"}
    with tempfile.TemporaryFile() as log:
        try:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd="/",
                env={**environment, **trial.environment, **HIDING_VARIABLES},
                **commands.run_as_options(trial.account),
            )
        except OSError as error:
            raise Refusal(f"{Path(argv[0]).name} does not run on this host: {error.strerror}") from error
        try:
            yield _Program(Path(argv[0]).name, process, log, time.monotonic() + MAX_PROGRAM_SECONDS)
        finally:
            process.kill()
            process.wait()


def _wait_for_answer(server: _Program, port: int, path: str, body: dict[str, Any] | None = None) -> Any:
    """Return the answer of llama-server, which may still be starting."""
    while True:
        reply = replies.ask(f"{LOOPBACK}:{port}", path, server.seconds_left(), body)
        with suppress(ValueError):
            if reply.status == 200:
                return reading.parse(reply.text)
        server.check_running()
        time.sleep(POLL_SECONDS)


def question_tokens() -> list[int]:
    return [1, *range(known_answer.first_piece_token(), known_answer.first_piece_token() + QUESTION_LENGTH)]


def expected_answer() -> str:
    pieces = known_answer.pieces()[QUESTION_LENGTH : QUESTION_LENGTH + ANSWER_LENGTH]
    return "".join(pieces).replace("\u2581", " ").strip()
