# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Proof on the head: writes the file with the layers, runs a llama-server for the processor and for each device, and records verdicts."""

from __future__ import annotations

import json
import math
import re
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import commands, reading, typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.files import replace_file, text_of
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.names import LOOPBACK
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.units import MIB
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import printable
from ansible_collections.llamacpp.cluster.plugins.module_utils.facts import resources
from ansible_collections.llamacpp.cluster.plugins.module_utils.launcher import progress
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import plain_text, replies, words
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import gguf, header_summary, layer_sample
from ansible_collections.llamacpp.cluster.plugins.module_utils.proof import questions, types
from ansible_collections.llamacpp.cluster.plugins.module_utils.proof.leftovers import PROOF_FOLDER, PROOF_SOCKET_FILE
from ansible_collections.llamacpp.cluster.plugins.module_utils.proof.questions import Answer, Bounds, Question, Tokens

HEALTH_TIMEOUT_SECONDS = 5.0
POLL_SECONDS, STOP_SECONDS = 0.1, 12.0
LAUNCHER_TIMEOUT_SECONDS = 30
"""Time limit for the programs' launcher to answer after its start."""
WORKER_TIMEOUT_SECONDS = 45
"""Time limit for a worker to answer after its start."""
WORKER_RESTART_SECONDS = 15
"""Time in which a crashed worker restarts. Behind a tunnel it never seems to be absent, because the tunnel accepts connections on the head."""
MIN_FREE_DISK_BYTES = 1024 * MIB
MIN_FREE_MEMORY_BYTES = 1536 * MIB
"""Memory to keep available while the processor computes next to a server, for KV cache, buffers and the system."""
MAX_LOG_BYTES, MAX_RECORD_BYTES, MAX_VERDICTS, MAX_REFERENCES = 65536, 1 << 20, 64, 4
CHARACTER_GRAMMAR = 'root ::= "1"'
"""Grammar for a whole character: llama-server lists no tokens for half a character. The listed tokens are the likeliest without the grammar."""
UNREACHABLE_PATTERN, LOST_PATTERN = re.compile(r"[Ff]ailed to connect"), re.compile("Remote RPC server crashed")
TIMEOUT_PATTERN = re.compile(f"was not healthy|{replies.TIMEOUT_TEXT}")
ABORT_PATTERN = "[.][a-z]+:[0-9]+: "
"""Pattern for the log line with the source line at which llama.cpp aborts. Lines of other threads may follow."""
REASON_LINE_PATTERN = f"error|assert|unsupported|not support|failed|crashed|missing|wrong|exception|{ABORT_PATTERN}"
"""Pattern for a log line with a reason, regardless of case. No line of a backtrace matches it."""
REASON_PATTERNS = (ABORT_PATTERN, "error loading model", REASON_LINE_PATTERN)
OwnsPort = Callable[[int], bool]
"""Function that returns whether only processes of this account listen on a port."""


class ProofError(Exception):
    """Failure of a side, or of its model, to answer. The message has the reason and the most relevant line of llama-server's log."""


class Reference(NamedTuple):
    """Reference for the devices: the processor's answers."""

    tokens: Tokens
    answers: Sequence[Answer]
    bounds: Bounds


def prepare_reference(work: types.ProofWork, owns_port: OwnsPort) -> bool:
    """Write the model and compute the reference while the server is running, if there is enough memory; return whether both exist."""
    if (resources.available_memory_mib(text_of(Path("/proc/meminfo"))) or 0) * MIB < work.bytes + MIN_FREE_MEMORY_BYTES:
        return False
    folder = _clean_folder(work)
    with suppress(ProofError), _run_launcher(work):
        _ensure_reference(work, folder, owns_port)
        return True
    _clean_folder(work)
    return False


def prove(work: types.ProofWork, owns_port: OwnsPort) -> Any:
    """Compare the devices with the processor; return a Proof as JSON."""
    start_time = time.monotonic()
    folder = Path(work.folder, PROOF_FOLDER)
    try:
        if not (_sample_path(work, folder).exists() and _read_reference(work, folder)):
            _clean_folder(work)
        with _run_launcher(work), ThreadPoolExecutor(len(work.devices)) as executor:
            reference = _ensure_reference(work, folder, owns_port)
            verdicts = executor.map(lambda side: _judge_side(work, folder, owns_port, reference, side), work.devices)
            proof = types.Proof(0, devices=tuple(verdicts))
            if len(reference.answers) < len(questions.list_questions(work.context)):
                _reference_path(work, folder).unlink()  # the head may be less busy next time
    except ProofError as failure:
        proof = types.Proof(0, untested=printable(str(failure), 1000))
    finally:
        _clean_folder(work)
    return typed_json.dump(proof._replace(seconds=round(time.monotonic() - start_time)))


def read_record(path: Path) -> types.VerdictRecord:
    """Return the verdicts recorded on the head; none if they cannot be read."""
    return typed_json.read_file(types.VerdictRecord, path, MAX_RECORD_BYTES) or types.VerdictRecord(())


def record_verdicts(path: Path, proof: types.Proof) -> None:
    """Add verdicts to the record. Keep older verdicts, because the cluster may return to their plan.

    :raises OSError: the record cannot be written.
    """
    record = read_record(path).with_verdicts(proof.devices, MAX_VERDICTS)
    replace_file(path, json.dumps(typed_json.dump(record)) + "\n", 0o644)


def _clean_folder(work: types.ProofWork) -> Path:
    """Remove everything from the folder of the proof except the last references, because models are large; return the folder."""
    folder = Path(work.folder, PROOF_FOLDER)
    folder.mkdir(mode=0o700, exist_ok=True)
    reference_paths = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
    for path in {*folder.iterdir()} - {*reference_paths[-MAX_REFERENCES:]}:
        if path.is_dir():  # drivers' caches, because this folder is llama-server's home
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()
    return folder


def _reference_path(work: types.ProofWork, folder: Path) -> Path:
    """Return the path of the reference, which depends on the version of the model's file."""
    return folder / f"{work.processor.id}-{Path(work.model).stat().st_mtime_ns}.json"


def _sample_path(work: types.ProofWork, folder: Path) -> Path:
    return folder / f"{work.processor.id}.gguf"


def _read_reference(work: types.ProofWork, folder: Path) -> Reference | None:
    try:
        tokens, answers, bounds = json.loads(_reference_path(work, folder).read_text())
        parsed_answers = [{int(token): 1.0 * value for token, value in answer.items()} for answer in answers]
        return Reference(Tokens(*map(tuple, tokens)), parsed_answers, Bounds(*(1.0 * bound for bound in bounds)))
    except (OSError, *reading.PARSE_ERRORS):
        return None


def _ensure_reference(work: types.ProofWork, folder: Path, owns_port: OwnsPort) -> Reference:
    """Return the processor's answers, and the bounds derived from its variants. Write the model and the reference if they are missing.

    :raises ProofError: there is no reference for a comparison.
    """
    if not _sample_path(work, folder).exists():
        _write_sample(work, folder)
    reference = _read_reference(work, folder)
    if not reference:
        reference = _compute_reference(work, folder, owns_port)
        _reference_path(work, folder).write_text(json.dumps(reference))
    return reference


def _write_sample(work: types.ProofWork, folder: Path) -> None:
    """Write the layers as a model.

    :raises ProofError: the disk is too full, or the file is not a model.
    """
    free_bytes = shutil.disk_usage(work.folder).free
    if free_bytes < work.bytes + MIN_FREE_DISK_BYTES:
        raise ProofError(
            f"{work.folder} has {free_bytes // MIB} MiB free, too little for a {len(work.layers)}-layer file of {work.bytes // MIB} MiB: free space there"
        )
    try:
        partial_path = folder / "partial"
        layer_sample.write_sample(work.model, partial_path, work.layers)
        partial_path.replace(_sample_path(work, folder))
    except gguf.GGUFError as error:
        raise ProofError(f"{work.model} {error}") from None
    except OSError as error:
        raise ProofError(f"a file with layers of {work.model} cannot be written: {printable(error)}") from None


def _compute_reference(work: types.ProofWork, folder: Path, owns_port: OwnsPort) -> Reference:
    """Collect the answers of the processor and of its variants.

    :raises ProofError: the processor computes no probabilities to compare.
    """
    summary = header_summary.parse(header_summary.summarize(gguf.read_local_headers(str(_sample_path(work, folder)))))
    prompts = questions.list_questions(work.context)
    name = f"{work.processor.name} with a {len(work.layers)}-layer model"
    try:
        with _run_server(work, folder, owns_port, work.processor) as server:
            tokens = server.tokens(summary.vocabulary)
            processor_answers = server.answers(prompts, tokens, work.limit_s)
    except ProofError as failure:
        raise ProofError(f"{name} {failure}") from None
    fewest_tokens = min(map(len, processor_answers), default=1)
    if fewest_tokens < 2:
        reason = "gives one token all probability: nothing to compare" if prompts else "needs more context for a prompt"
        raise ProofError(f"{name} {reason if fewest_tokens else 'produces NaN results'}")
    variant_answers = []
    for variant in work.variants:
        variant_side = work.processor._replace(argv=(*work.processor.argv, *variant))
        with suppress(ProofError), _run_server(work, folder, owns_port, variant_side) as server:
            answers = server.answers(questions.variant_questions(prompts), tokens)
            if all(answers):
                variant_answers.append(answers)
    bounds = questions.bounds(prompts, processor_answers, variant_answers)
    if summary.number("expert_count"):  # a correct device may choose other experts if they are nearly equal
        bounds = bounds._replace(position=1.0)
    return Reference(tokens, processor_answers, bounds)


def _judge_side(
    work: types.ProofWork, folder: Path, owns_port: OwnsPort, reference: Reference, side: types.Side
) -> types.Verdict:
    """Return the verdict on a device; if it computes incorrectly, with the first settings that help."""
    verdict = _compare_side(work, folder, owns_port, reference, side)
    if verdict.is_correct or not work.remedies or TIMEOUT_PATTERN.search(verdict.failure or ""):
        return verdict
    for remedy in work.remedies:
        changed_side = side._replace(argv=(*side.argv, *remedy.words))
        if _compare_side(work, folder, owns_port, reference, changed_side).is_correct:
            return verdict._replace(remedy=f"the device computes correctly with {remedy.setting}")
    return verdict._replace(
        remedy=f"none of these settings helps: {'; '.join(remedy.setting for remedy in work.remedies)}"
    )


def _compare_side(
    work: types.ProofWork, folder: Path, owns_port: OwnsPort, reference: Reference, side: types.Side
) -> types.Verdict:
    verdict = types.Verdict(side.id, side.name, work.micro_batch)
    prompts = questions.list_questions(work.context)
    try:
        answers = _collect_answers(work, folder, owns_port, reference, side)
    except ProofError as failure:
        return verdict._replace(failure=str(failure))
    distances = questions.distances(prompts, reference.answers, answers)
    value, bound, prompt_kind = questions.worst_distance(distances, reference.bounds)
    if len(answers) < len(prompts):
        verdict = verdict._replace(max_compared_tokens=max(question.length for question in prompts[: len(answers)]))
    return verdict._replace(distance=round(value, 4), bound=round(bound, 4), place=prompt_kind)


def _collect_answers(
    work: types.ProofWork, folder: Path, owns_port: OwnsPort, reference: Reference, side: types.Side
) -> list[Answer]:
    """Return the answers of a device, whose worker may have just been started.

    :raises ProofError: it does not answer all questions.
    """
    deadline, is_retry = time.monotonic() + WORKER_TIMEOUT_SECONDS, False
    while True:
        try:
            with _run_server(work, folder, owns_port, side) as server:
                prompts = questions.list_questions(work.context)[: len(reference.answers)]
                return server.answers(prompts, reference.tokens)
        except ProofError as failure:
            is_lost = bool(LOST_PATTERN.search(str(failure)))
            if is_lost and not is_retry:  # an abort would happen again, unlike a broken connection
                time.sleep(WORKER_RESTART_SECONDS)
                deadline, is_retry = time.monotonic() + WORKER_TIMEOUT_SECONDS, True
            elif not UNREACHABLE_PATTERN.search(str(failure)) or time.monotonic() > deadline:
                raise
            time.sleep(1)


class _Server(NamedTuple):
    """The llama-server of a side, which the launcher runs."""

    connection: socket.socket
    """connection to the launcher, which sends the exit status"""
    log_path: Path
    address: str
    timeout_s: int
    owns_port: OwnsPort

    def wait_until_healthy(self) -> None:
        """Wait until the server is healthy.

        :raises ProofError: the server crashes, or is not healthy in time.
        """
        deadline = time.monotonic() + self.timeout_s
        while self._ask("/health", HEALTH_TIMEOUT_SECONDS).status != 200:
            if self.exit_status() is not None or time.monotonic() > deadline:
                raise self.failure(f"was not healthy within {self.timeout_s} s")
            time.sleep(POLL_SECONDS)

    def exit_status(self, seconds: float = 0) -> int | None:
        """Wait for the exit status, and return it; None if the program is still running."""
        if not select.select([self.connection], [], [], seconds)[0]:
            return None
        with suppress(OSError, ValueError):
            return int(self.connection.recv(9, socket.MSG_PEEK))
        return -signal.SIGKILL  # killed with its launcher

    def tokens(self, vocabulary_size: int) -> Tokens:
        """Return the tokens for prompts, in the model's own vocabulary.

        :raises ProofError: the server does not convert the text.
        """
        token_lists = []
        for adds_special in (False, True):
            body = {"content": plain_text.TEXT, "add_special": adds_special}
            reply = self._ask("/tokenize", self.timeout_s, body)
            with suppress(ValueError, KeyError, TypeError):
                token_lists.append([int(token) for token in reading.parse(reply.text)["tokens"]])
        plain_tokens, prefixed_tokens = token_lists if len(token_lists) == 2 and token_lists[0] else ((), ())
        if not plain_tokens or plain_tokens[0] not in prefixed_tokens:
            raise self.failure("did not convert text into tokens")
        prefix = prefixed_tokens[: prefixed_tokens.index(plain_tokens[0])]
        return Tokens(tuple(prefix), tuple(plain_tokens), questions.random_tokens(vocabulary_size))

    def answers(self, prompts: Sequence[Question], tokens: Tokens, seconds: float = math.inf) -> list[Answer]:
        """Return the answers to questions.

        :param seconds: time after which no further long prompts are sent.
        :raises ProofError: the server does not answer them.
        """
        answers, deadline = [], time.monotonic() + seconds
        for question in prompts:
            if question.length > questions.MAX_SHORT_LENGTH and time.monotonic() > deadline:
                break
            answers.append(self._answer(tokens.prompt(question), question.continues))
        return answers

    def _answer(self, prompt: Sequence[int], continues: bool) -> Answer:
        body = {"prompt": [*prompt], "cache_prompt": continues, "n_predict": 1, "n_probs": questions.LISTED_TOKEN_COUNT}
        reply = self._ask("/v1/completions", self.timeout_s, {**body, "temperature": 0, "grammar": CHARACTER_GRAMMAR})
        with suppress(ValueError, KeyError, TypeError, IndexError):
            return questions.parse_answer(reading.parse(reply.text))
        self.exit_status(1)
        verb = "answered" if reply.status else "did not answer"
        raise self.failure(f"{verb} a prompt of {len(prompt)} tokens: {printable(reply.text, 200)!r}")

    def _ask(self, path: str, seconds: float, body: Any = None) -> replies.Reply:
        """Send a request to this process, not to a program of another account that uses the port before it."""

        def veto() -> str | None:
            _host, colon, port = self.address.rpartition(":")
            return "another program is listening on its port" if colon and not self.owns_port(int(port)) else None

        return replies.ask(self.address, path, seconds, body, veto=veto)

    def failure(self, default_text: str) -> ProofError:
        """Return an error that says how the server crashed, or else the default text, with the most relevant line of its log."""
        lines = reading.read_tail(self.log_path, MAX_LOG_BYTES).splitlines()
        reason_lines = lines[-1:]
        for pattern in REASON_PATTERNS:
            matches = [line for line in lines if re.search(pattern, line, re.IGNORECASE)]
            if matches:
                reason_lines = matches
                break
        status = self.exit_status()
        text = default_text if status is None else f"crashes {progress.describe_exit(status)}"
        return ProofError(printable(f"{text}: {reason_lines[-1].strip() if reason_lines else 'its log is empty'}", 600))


@contextmanager
def _run_launcher(work: types.ProofWork) -> Iterator[None]:
    """Start the launcher of the programs unless a service runs it, and keep it alive.

    :raises ProofError: it does not answer.
    """
    streams: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(work.launcher, preexec_fn=progress.die_with_parent, **streams) if work.launcher else None
    try:
        with _connect_to_launcher(work):
            yield
    finally:
        if process:
            progress.stop_process(process, STOP_SECONDS)


def _connect_to_launcher(work: types.ProofWork) -> socket.socket:
    """Return a connection to the launcher.

    :raises ProofError: it does not answer.
    """
    deadline = time.monotonic() + LAUNCHER_TIMEOUT_SECONDS
    while True:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(str(Path(work.folder, PROOF_SOCKET_FILE)))
            return connection
        except OSError as error:
            connection.close()
            if time.monotonic() > deadline:
                raise ProofError(f"the launcher of the proof does not answer: {printable(error)}") from None
        time.sleep(POLL_SECONDS)


@contextmanager
def _run_server(work: types.ProofWork, folder: Path, owns_port: OwnsPort, side: types.Side) -> Iterator[_Server]:
    """Run llama-server where no other account can reach it, wait until it is healthy, and stop it afterwards.

    :raises ProofError: the server does not become healthy.
    """
    with tempfile.TemporaryDirectory(prefix="", dir=folder) as private_folder, _connect_to_launcher(work) as connection:
        address = f"{private_folder}/s.sock" if work.sockets else f"{LOOPBACK}:{replies.find_free_port()}"
        host, _colon, port = address.rpartition(":")
        address_options = ["--host", host, "--port", port] if host else ["--host", address]
        argv = words.adapt_argv([*side.argv, "--model", str(_sample_path(work, folder)), *address_options])
        environment = {"PATH": commands.SEARCH_PATH, "HOME": str(folder), "GGML_NO_BACKTRACE": "1", **work.environment}
        log_path = Path(private_folder, "log")
        connection.sendall(json.dumps([argv, environment, str(log_path)]).encode() + b"\n")
        server = _Server(connection, log_path, address, work.timeout_s, owns_port)
        try:
            server.wait_until_healthy()
            yield server
        finally:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_WR)
            server.exit_status(STOP_SECONDS)
