# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""llama-swap in front of several models: its command line, and its configuration, in which each model is a launcher with its llama-server.

Read in v250 (config-schema.json, internal/config, internal/process): it waits for a model as long as ``healthCheckTimeout``, which is rounded up so that other
estimates rarely change the file, ends it by SIGTERM, and after ``unloadTimeout`` by SIGKILL. It would keep questions and answers in memory, and ask the
devices for their load.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from typing import Any

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import options
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import (
    FilePlan,
    FolderPlan,
    HostPlan,
    PortPlan,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import SWAP, HeadPlan, Plan, ServedModel
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import turns
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.several import presets
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import SwapProgram, Turn

MACRO = "${"
"""How one of its macros begins."""
PORT = "${PORT}"
"""Where it writes the port of a model."""
OWN_URL = f"http://{names.LOOPBACK}:{PORT}"
"""Of a model. Its own default is localhost, which may be an IPv6 address."""
REQUESTS = 1000
"""To a model at the same time: beyond its own limit of 10 it answers 429, and llama-server has them wait."""
STOP_SECONDS = 15
"""The launcher gives llama-server two seconds, and llama-swap starts the next model when it has ended."""
METRICS, PAGE, TUNNEL, TUNNEL_KEYS = "--metrics", "--page", "--tunnel", "--tunnel-keys"
"""At the end of the head's launcher. Those of models write no metrics, as they would all write the same file, and have no keys: they know of the tunnels,
and keep none."""
PATIENCE = 20
"""Seconds for which a question waits for workers that are away."""


def program_of(prefix: str, program: SwapProgram) -> str:
    """Where it is on the head: a new one does not replace it, so that going back finds the old one."""
    return f"{prefix}/{names.SWAP_PROGRAMS}/llama-swap-{program.sha256[:12]}"


def check(program: SwapProgram | None) -> SwapProgram:
    """:raises Refusal: there is none."""
    if program is None:
        raise Refusal(
            f"llama_server_engine is {SWAP}, and llama_server_swap_program does not say where its program is on the controller: set it"
        )
    return program


def head_of(head: HeadPlan, prefix: str, program: SwapProgram) -> HeadPlan:
    """The head's part of the plan, of that of one model.

    :param head: with ``models``.
    """
    server_argv = options.pairs(head.argv[1:])
    said = {option.name: pair[1] for pair in server_argv if (option := options.of_word(pair[0])) and len(pair) == 2}
    secured = (
        ("--tls-cert-file", said["tls-certificate"], "--tls-key-file", said["tls-key"]) if "tls-key" in said else ()
    )
    start, own = head.launcher[: head.launcher.index("--state") + 2], _from(head.launcher, METRICS, TUNNEL)
    if head.page_port in range(head.port + 1, head.port + 1 + len(head.models or ())):
        raise Refusal(
            f"{names.PAGE_PORT} is {head.page_port}, and {SWAP} gives the {len(head.models or ())} ports after llama_server_port to its models: "
            "give it another port"
        )
    keys = ("--keys", said["api-key-file"]) if head.api_key_file else ()
    listens = f"{head.address}:{head.port}"
    return head._replace(
        argv=(program_of(prefix, program), "--config", f"{prefix}/{names.SWAP}", "--listen", listens, *secured),
        launcher=(*start, "--router", *keys, *own),
        engine=SWAP,
    )


def _from(launcher: tuple[str, ...], *options: str) -> tuple[str, ...]:
    """The words from the first of these options on."""
    return launcher[min((launcher.index(word) for word in options if word in launcher), default=len(launcher)) :]


def host_of(host: HostPlan, head: HeadPlan, program: SwapProgram) -> HostPlan:
    """The head's host, with the program, and the ports of the models, which no other cluster of the host may have."""
    number = len(head.models or ())
    ports = [PortPlan(head.service, names.LOOPBACK, head.port + 1 + index) for index in range(number)]
    path = program_of(host.prefix, program)
    folder = FolderPlan(path.rpartition("/")[0], "root" if host.account else None, "0755")
    file = FilePlan(path, program.bytes, program.sha256, mode="0755", source=program.path)
    return host._replace(ports=(*host.ports, *ports), folders=(*host.folders, folder), files=(*host.files, file))


def command(plan: Plan, argv: Sequence[str], turn: Turn) -> tuple[str, ...]:
    """What it starts for a model.

    :param plan: of the model as if it were alone.
    :param argv: of its llama-server, without address and port.
    :raises Refusal: the configuration cannot say it.
    """
    for word in argv:
        if MACRO in word or "\n" in word:
            raise Refusal(turns.sentence(turn.name, f"{word!r} is given, which {SWAP} reads otherwise: change it"))
        if options.is_option(word) and presets.OF_CLIENTS.fullmatch(word.lstrip("-")):
            wrong = f"{word} is given to llama-server, and clients reach {SWAP}: remove it"
            raise Refusal(turns.sentence(turn.name, wrong))
    others = {
        *_from(plan.head.launcher, METRICS)[:3],
        *_from(plan.head.launcher, PAGE)[:2],
        *_from(plan.head.launcher, TUNNEL_KEYS),
    }
    launcher = [word for word in plan.head.launcher if word not in others]
    launcher[launcher.index("--url") + 1] = OWN_URL
    state = launcher.index("--state") + 1
    launcher[state] = names.folder_of_model(launcher[state], turn.name)
    again = ("--again",) if turn.keep else ()
    own = ("--host", names.LOOPBACK, "--port", PORT, "--alias", turn.name)
    return (*launcher, "--patience", str(PATIENCE), *again, "--", *argv, *own)


def configuration(head: HeadPlan) -> str:
    """Its configuration, as JSON, which is YAML too."""
    models = head.models or ()
    kept = [model.name for model in models if model.keep]
    others = [model.name for model in models if not model.keep]
    groups = {
        "turns": {"swap": True, "exclusive": False, "members": others},
        "kept": {"swap": False, "exclusive": False, "persistent": True, "members": kept},
    }
    members = {name: group for name, group in groups.items() if group["members"]}
    said = {
        "logLevel": "warn",
        "logToStdout": "both",
        "captureBuffer": 0,
        "performance": {"disabled": True},
        "healthCheckTimeout": 1 << max(4, (head.start_timeout - 1).bit_length()),
        "unloadTimeout": STOP_SECONDS,
        "startPort": head.port + 1,
        "models": {model.name: _model(model) for model in models},
        "routing": {"router": {"use": "group", "settings": {"groups": members}}},
        "hooks": {"on_startup": {"preload": kept}},
    }
    keys = {"apiKeys": [f"${{env.{name}}}" for name in names.KEY_VARIABLES]} if head.api_key_file else {}
    return json.dumps({**said, **keys}, indent=1, ensure_ascii=False) + "\n"


def _model(model: ServedModel) -> dict[str, Any]:
    words = [word if PORT in word else shlex.quote(word) for word in model.command or ()]
    return {
        "cmd": " ".join(words),
        "proxy": OWN_URL,
        "aliases": list(model.aliases),
        "ttl": model.idle_seconds or 0,
        "concurrencyLimit": REQUESTS,
    }
