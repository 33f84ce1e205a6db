# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A proof on the head: the file of the first layers, a llama-server for each side, its answers, and the record of results."""

from __future__ import annotations

import functools
import json
import re
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import commands, locks, reading, typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.files import replace_file
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.names import LOOPBACK
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.units import MIB
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import printable
from ansible_collections.llamacpp.cluster.plugins.module_utils.launcher import progress
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import replies, words
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import first_layers, gguf, header_summary
from ansible_collections.llamacpp.cluster.plugins.module_utils.proof import questions
from ansible_collections.llamacpp.cluster.plugins.module_utils.proof.types import Compared, Proof, Record, Side, Work

PREFIX, LOCK_SECONDS = "first-layers-", 600
"""Of what is in the folder meanwhile, and for how long another proof is waited for: one whose playbook was killed goes on."""
HEALTH_SECONDS = 5.0
PAUSE_SECONDS, STOP_SECONDS = 0.1, 5.0
WORKER_SECONDS = 45
"""For which a worker that was just started is waited for."""
RESTART_SECONDS = 15
"""After which a worker is back that ended. Behind a tunnel it never seems away: that accepts on the head."""
ROOM = 1024 * MIB
"""Of the disk, that stays free."""
LOG_BYTES, RECORD_BYTES, KEPT = 65536, 1 << 20, 16
"""Of a log what is read; of the record what is read, and how many proofs."""
WHOLE = 'root ::= "1"'
"""Has it answer a token that is a whole character: of half of one it lists no others. Those that it lists are the likeliest before that."""
PLAIN = "--no-repack"
"""Without tiles of AMX, for which llama.cpp finds no place where attention is latent: ``GGML_ASSERT(*cur_backend_id != -1)``."""
AWAY, LOST = re.compile(r"[Ff]ailed to connect"), re.compile("Remote RPC server crashed")
LATE = re.compile(f"was not healthy|{replies.LATE}")
PLACED = "[.][a-z]+:[0-9]+: "
"""How llama.cpp names the place of what ended it. Lines of its other threads may come later."""
TELLING = f"error|assert|unsupported|not support|failed|crashed|missing|wrong|exception|{PLACED}"
"""In a line of a log that says why, whatever its case; a frame of a backtrace has none of it."""
Prompts = Sequence[tuple[Sequence[int], bool]]
"""Tokens, and whether they are those before and one more."""


class Ended(Exception):
    """A side, or its model, that gives no answers: why, with the line of the log of llama-server that tells most."""


def prove(work: Work) -> Any:
    """A Proof as JSON has it.

    :raises BusyError: another one goes on here for long.
    """
    began = time.monotonic()
    with locks.hold(Path(work.folder, "proof.lock"), LOCK_SECONDS):
        for old in Path(work.folder).glob(f"{PREFIX}*"):  # of one that was killed
            shutil.rmtree(old, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=PREFIX, dir=work.folder) as folder:
            model = Path(folder, "first-layers.gguf")
            try:
                found = _compared(work, model, _written(work, model))
            except Ended as ended:
                found = {"untested": printable(str(ended), 1000)}
    return typed_json.dump(Proof(work.id, round(time.monotonic() - began), **found))


def known(path: Path) -> dict[str, Proof]:
    """Id of the work → its proof; empty where there is no record that can be read."""
    try:
        found = typed_json.parse(Record, reading.read_object(path, RECORD_BYTES))
    except (OSError, ValueError):
        return {}
    return {proof.id: proof for proof in found.proofs}


def keep(path: Path, proof: Proof) -> None:
    """Adds a proof: those of a plan that a cluster may go back to stay.

    :raises OSError: the record cannot be written.
    """
    others = [one for one in known(path).values() if one.id != proof.id]
    replace_file(path, json.dumps(typed_json.dump(Record((*others[1 - KEPT :], proof)))) + "\n", 0o644)


def _written(work: Work, model: Path) -> list[int]:
    """Tokens of prompts for the model that is written.

    :raises Ended: it cannot be written.
    """
    free = shutil.disk_usage(work.folder).free
    if free < work.bytes + ROOM:
        raise Ended(
            f"a file of its first layers ({work.layers}) has {work.bytes // MIB} MiB, and {work.folder} has {free // MIB} MiB free: free so much there"
        )
    try:
        first_layers.write(work.model, model, work.layers)
        summary = header_summary.parse(header_summary.summarize(gguf.read_path(str(model))))
    except gguf.GGUFError as error:
        raise Ended(f"{work.model} {error}") from None
    except OSError as error:
        raise Ended(f"a file of the first layers of {work.model} cannot be made: {printable(error)}") from None
    return questions.tokens(summary.vocabulary)


def _compared(work: Work, model: Path, tokens: Sequence[int]) -> dict[str, Any]:
    """Fields of the Proof.

    :raises Ended: there is nothing to compare with.
    """
    asked = questions.questions(work.context)
    answers = functools.partial(_answers, work, model, [(one.prompt(tokens), one.goes_on) for one in asked])
    processor, name = work.processor, f"{work.processor.name} with the first layers ({work.layers})"
    try:
        right = answers(processor)
    except Ended as ended:
        why, right = f"{name} {ended}", []
        if not LATE.search(why):
            with suppress(Ended):
                right = answers(processor._replace(argv=(*processor.argv, PLAIN)))
        if not right:
            raise Ended(why) from None
    if not asked or min(map(len, right)) < 2:
        raise Ended(f"{name} computes no numbers")

    def compared(side: Side) -> Compared:
        try:
            return questions.compare(side, asked, right, answers(side))
        except Ended as ended:
            return Compared(side.name, 0, len(asked), (), str(ended))

    def remedied(side: Side, found: Compared) -> Compared:
        """With the first settings that make it right, where it is wrong."""
        if found.right or not work.remedies or LATE.search(found.ended or ""):
            return found
        for one in work.remedies:
            if compared(side._replace(argv=(*side.argv, *one.words))).right:
                return found._replace(remedy=f"with {one.setting} it computes right")
        return found._replace(remedy=f"none of {'; '.join(one.setting for one in work.remedies)} makes it right")

    together = compared(work.together) if work.together else None
    alone = () if together and together.right else tuple(remedied(side, compared(side)) for side in work.devices)
    if work.together and together and all(one.right for one in alone):
        together = remedied(work.together, together)
    return {"together": together, "devices": alone}


def _answers(work: Work, model: Path, prompts: Prompts, side: Side) -> list[questions.Answer]:
    """Of one side.

    :raises Ended: it does not answer all questions.
    """
    deadline, lost = time.monotonic() + WORKER_SECONDS, False
    while True:
        try:
            return _served(work, model, prompts, side)
        except Ended as ended:
            gone = LOST.search(str(ended))
            if gone and work.client:
                time.sleep(RESTART_SECONDS)
            if gone and not lost:  # an abort comes again, a network that broke does not
                deadline, lost = time.monotonic() + WORKER_SECONDS, True
            elif not AWAY.search(str(ended)) or time.monotonic() > deadline:
                raise
            time.sleep(1)


def _served(work: Work, model: Path, prompts: Prompts, side: Side) -> list[questions.Answer]:
    """By one llama-server."""
    with socket.socket() as listening:
        listening.bind((LOOPBACK, 0))
        port = listening.getsockname()[1]
    argv = [*work.client, *words.said_to_build([*side.argv, "--model", str(model), "--port", str(port)])]
    environment = {"PATH": commands.SEARCH, "HOME": str(model.parent), "GGML_NO_BACKTRACE": "1", **work.environment}
    output = model.with_name("log")
    with open(output, "wb") as log:
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, preexec_fn=progress.die_with_parent
        )
    server = _Server(process, output, f"{LOOPBACK}:{port}", work.patience)
    try:
        server.wait()
        return [server.ask(tokens, goes_on) for tokens, goes_on in prompts]
    finally:
        progress.stop_process(process, STOP_SECONDS)


class _Server(NamedTuple):
    """A llama-server of one side."""

    process: subprocess.Popen
    log: Path
    place: str
    patience: int

    def wait(self) -> None:
        """Until it is healthy."""
        deadline = time.monotonic() + self.patience
        while replies.ask(self.place, "/health", HEALTH_SECONDS).status != 200:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise self.ended(f"was not healthy within {self.patience} s")
            time.sleep(PAUSE_SECONDS)

    def ask(self, tokens: Sequence[int], goes_on: bool) -> questions.Answer:
        question = {"prompt": [*tokens], "cache_prompt": goes_on, "n_predict": 1, "n_probs": questions.LISTED}
        reply = replies.ask(
            self.place, "/v1/completions", self.patience, {**question, "temperature": 0, "grammar": WHOLE}
        )
        with suppress(ValueError, KeyError, TypeError, IndexError):
            return questions.answer_of(reading.parse(reply.text))
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(1)
        raise self.ended(f"answers a prompt of {len(tokens)} tokens with {printable(reply.text, 200)!r}")

    def ended(self, otherwise: str) -> Ended:
        """How it ended, else what it does otherwise, and the line of its log that tells most."""
        said = reading.end_of(self.log, LOG_BYTES).splitlines()
        telling = [line for line in said if re.search(TELLING, line, re.IGNORECASE)]
        telling = [line for line in telling if re.search(PLACED, line)] or telling or said[-1:]
        status = self.process.poll()
        how = otherwise if status is None else f"ends {progress.describe_exit(status)}"
        return Ended(printable(f"{how}: {telling[-1].strip() if telling else 'without a word'}", 600))
