# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What people connect to the server: configuration of their tools, and a page that says how to use it. A key is in no file: tools take it from the
environment."""

from __future__ import annotations

import itertools
import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import yaml
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names, validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import plan_text
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import Plan
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.report import html_page

KEY = "LLAMACPP_API_KEY"
"""Variable of a client's environment that has the key."""
PAGE = "index.html"
URL = re.compile(r"https?://([\w.-]+|\[[0-9A-Fa-f:.]+\])(:\d{1,5})?(/[\w./~-]*)?")


class Served(NamedTuple):
    """A model that clients can ask for."""

    name: str
    context: int
    """tokens of a request and its answer"""

    @property
    def answer(self) -> int:
        """Tokens that tools leave for an answer: they cut the conversation before the rest is full."""
        return self.context // 4


Writer = Callable[[str, Sequence[Served]], str]
"""From the server's URL and its models to the text of a file."""


class Client(NamedTuple):
    """A tool that talks to the server."""

    name: str
    files: Mapping[str, Writer]
    command: str
    """in the folder with the files"""
    note: str
    authority: str
    """how it is told to trust the certificate of a private authority"""


def models_of(plan: Plan) -> tuple[Served, ...]:
    """What the server of a plan serves, the model that clients take by default first."""
    if plan.head.models:
        return tuple(Served(model.name, model.context_per_request) for model in plan.head.models)
    words = itertools.pairwise(plan.head.argv)
    alias = next((value for option, value in words if option in ("-a", "--alias")), None)
    return (Served(alias or PurePosixPath(plan.model.path).name, plan.head.context_per_request),)


def _json(value: Any) -> str:
    return json.dumps(value, indent=2) + "\n"


def _open_webui(url: str, _models: Sequence[Served]) -> str:
    return f"OPENAI_API_BASE_URL={url}/v1\nENABLE_OLLAMA_API=false\n"


def _opencode(url: str, models: Sequence[Served]) -> str:
    limits = {model.name: {"limit": {"context": model.context, "output": model.answer}} for model in models}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "llama.cpp",
        "options": {"baseURL": f"{url}/v1", "apiKey": f"{{env:{KEY}}}"},
        "models": limits,
    }
    return _json(
        {
            "$schema": "https://opencode.ai/config.json",
            "model": f"llamacpp/{models[0].name}",
            "provider": {"llamacpp": provider},
        }
    )


def _continue(url: str, models: Sequence[Served]) -> str:
    entries = [
        {
            "name": model.name,
            "provider": "openai",
            "model": model.name,
            "apiBase": f"{url}/v1",
            "apiKey": f"${{{{ secrets.{KEY} }}}}",
            "roles": ["chat", "edit", "apply"],
            "defaultCompletionOptions": {"contextLength": model.context, "maxTokens": model.answer},
        }
        for model in models
    ]
    return yaml.safe_dump({"name": "llama.cpp", "version": "1.0.0", "schema": "v1", "models": entries}, sort_keys=False)


def _aider(url: str, models: Sequence[Served]) -> str:
    return yaml.safe_dump({"openai-api-base": f"{url}/v1", "model": f"openai/{models[0].name}"}, sort_keys=False)


def _aider_models(_url: str, models: Sequence[Served]) -> str:
    return _json(
        {
            f"openai/{model.name}": {
                "max_input_tokens": model.context,
                "max_output_tokens": model.answer,
                "input_cost_per_token": 0,
                "output_cost_per_token": 0,
                "litellm_provider": "openai",
                "mode": "chat",
            }
            for model in models
        }
    )


def _claude_code(url: str, models: Sequence[Served]) -> str:
    """All of its roles get one model: where several take turns, another role's would have to be loaded."""
    roles = ("ANTHROPIC_MODEL", *(f"ANTHROPIC_DEFAULT_{role}_MODEL" for role in ("OPUS", "SONNET", "HAIKU")))
    environment = {
        "ANTHROPIC_BASE_URL": url,
        **dict.fromkeys(roles, models[0].name),
        "CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(models[0].context),
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(models[0].answer),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    return _json({"apiKeyHelper": f"printenv {KEY}", "env": environment})


def _curl(url: str, models: Sequence[Served]) -> str:
    """The shell itself prints the key, so that it is on no command line."""
    question = {"model": models[0].name, "messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 64}
    return (
        f"printf 'Authorization: Bearer %s' \"${KEY}\" | curl --fail-with-body -H @- -H 'Content-Type: application/json' \\\n"
        f'  -d {shlex.quote(json.dumps(question))} \\\n  {url}/v1/chat/completions "$@"\n'
    )


CLIENTS = (
    Client(
        "Open WebUI",
        {"open-webui.env": _open_webui},
        f'export OPENAI_API_KEY="${KEY}"\n'
        "podman run --network host -e OPENAI_API_KEY --env-file open-webui.env ghcr.io/open-webui/open-webui:main",
        "It reads this at its first start; later it is changed on its page Admin Settings, Connections.",
        "-v $PWD/ca.pem:/ca.pem -e SSL_CERT_FILE=/ca.pem",
    ),
    Client(
        "OpenCode",
        {"opencode.json": _opencode},
        "OPENCODE_CONFIG=$PWD/opencode.json opencode",
        "",
        "export NODE_EXTRA_CA_CERTS=$PWD/ca.pem",
    ),
    Client(
        "Continue",
        {"continue.yaml": _continue},
        f'cp -i continue.yaml ~/.continue/config.yaml\n(umask 077; echo "{KEY}=${KEY}" >> ~/.continue/.env)',
        "",
        "requestOptions: {caBundlePath: /path/of/ca.pem} in each entry of models",
    ),
    Client(
        "Aider",
        {"aider.conf.yml": _aider, "aider.model.metadata.json": _aider_models},
        f'OPENAI_API_KEY="${KEY}" aider --config aider.conf.yml --model-metadata-file aider.model.metadata.json',
        "Both are read from a home, too, as .aider.conf.yml and .aider.model.metadata.json.",
        "export SSL_CERT_FILE=$PWD/ca.pem",
    ),
    Client(
        "Claude Code",
        {"claude-code.json": _claude_code},
        "claude --settings claude-code.json",
        "It needs a llama.cpp of December 2025 or later, which has /v1/messages, and a context of 32768 tokens or more.",
        "export NODE_EXTRA_CA_CERTS=$PWD/ca.pem",
    ),
    Client("curl", {"curl.sh": _curl}, "sh curl.sh", "", "sh curl.sh --cacert ca.pem"),
)


def files_of(plan: Plan, url: str) -> dict[str, str]:
    """Name of a file → its text, for the clients of a plan's server.

    :param url: at which they reach it; empty for that of the plan.
    :raises Refusal: it is not a URL.
    """
    if url and not URL.fullmatch(url):
        raise Refusal(
            f"llama_clients_url is {validation.show(url)}, which is not a URL: use one like https://head.lan:8080"
        )
    url, models = url.rstrip("/").removesuffix("/v1") or plan.head.url, models_of(plan)
    view = {
        "cluster": plan.cluster,
        "head": plan.head,
        "url": url,
        "models": models,
        "turns": plan_text.TAKING_TURNS if len(models) > 1 else "",
        "key": KEY,
        "clients": CLIENTS,
        "chats": not any(
            build.cmake_options.get("LLAMA_BUILD_UI") == "OFF" for build in plan.hosts[plan.head.host].builds
        ),
        "local": names.is_loopback(urlsplit(url).hostname or ""),
    }
    written = {name: writer(url, models) for client in CLIENTS for name, writer in client.files.items()}
    return {**written, PAGE: html_page.render("clients.html.j2", view)}
