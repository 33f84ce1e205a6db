# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the head serves, and llama-server's command line."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.refusal import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import caches, gguf, known_answer, options
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import devices, placement, workers

PRIVATE_FOLDERS = ("/tmp/", "/var/tmp/")
"""The unit has its own ones (PrivateTmp)."""

Variables = dict[str, Any]
Summary = dict[str, Any]
Release = dict[str, Any]
Model = dict[str, Any]
Head = dict[str, Any]
Facts = dict[str, Any]

SERVICE = "llamacpp-server"
STAGING_DISTANCE = 100
KEYS = "api-keys"
CREDENTIALS = "/run/credentials/{service}.service/"
"""Where systemd puts what LoadCredential names, for the service alone."""


LEAST = {
    "llama_server_context": 1,
    "llama_server_parallel": 1,
    "llama_server_threads": 1,
    "llama_server_gpu_layers": 0,
    "llama_server_start_timeout": 1,
}
"""Variable of the server → its smallest value."""


def settings_of(variables: Variables, summary: Summary) -> caches.Settings:
    """The settings of llama-server's cache."""
    given = _memory_arguments(variables["llama_server_extra_args"])
    tokens = caches.MICRO_BATCH
    if "micro_batch" in given:
        word, number = given["micro_batch"]
        if not number.isdigit() or not int(number):
            raise Refusal(f"llama_server_extra_args has {word} {number!r}: give the number of tokens")
        tokens = int(number)
    return caches.Settings(
        context_of(variables, summary),
        variables["llama_server_parallel"],
        variables["llama_server_cache_type_k"],
        variables["llama_server_cache_type_v"],
        variables["llama_server_flash_attention"],
        "unified" in given and options.meaning(given["unified"][0]) != "off",
        "full_window" in given,
        tokens,
    )


def _memory_arguments(arguments: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Field of caches.Settings → the further argument that sets it, and the one after it. The last one counts."""
    given = {}
    for word, following in zip(arguments, [*arguments[1:], ""]):
        option = options.of_word(word)
        if option and option.memory:
            given[option.memory] = (word, following)
    return given


def overrides_of(variables: Variables, devices: list[str]) -> list[tuple[str, str]]:
    """Expressions for names of tensors and the device of each, from ``llama_server_override_tensor``.

    :param devices: names that may stand there.
    """
    found = []
    for entry in variables["llama_server_override_tensor"]:
        pattern, _equals, device = entry.partition("=")
        if not pattern or device not in devices or "," in pattern:
            raise Refusal(
                f"llama_server_override_tensor has {entry!r}: give an expression for names of tensors without , and =, then = and one of "
                + ", ".join(devices)
            )
        try:
            re.compile(pattern)
        except re.error as error:
            raise Refusal(f"llama_server_override_tensor has {entry!r}, whose expression is wrong: {error}") from None
        found.append((pattern, device))
    return found


def as_planned(variables: Variables) -> bool:
    """Whether neither a further argument nor the environment changes what devices hold."""
    given = [
        *(options.of_word(word) for word in variables["llama_server_extra_args"]),
        *(options.of_variable(name) for name in variables["llama_server_environment"]),
    ]
    return not any(option and option.memory == options.UNPLANNED for option in given)


def check(name: str, head: Head, release: Release) -> None:
    """Refuses settings of the server that cannot be."""
    variables = head["variables"]
    for variable, least in LEAST.items():
        if variables[variable] is not None and variables[variable] < least:
            raise Refusal(f"{variable} is {variables[variable]}: give {least} or more, or leave it out")
    _check_extra_arguments(variables["llama_server_extra_args"], release)
    _check_environment(variables["llama_server_environment"])
    if variables["llama_server_api_key_file"]:
        _check_whole("llama_server_api_key_file", variables["llama_server_api_key_file"])
    for variable in ("llama_server_cache_type_k", "llama_server_cache_type_v"):
        if variables[variable] not in caches.CACHE_TYPES:
            raise Refusal(f"{variable} is {variables[variable]!r}: use one of {', '.join(caches.CACHE_TYPES)}")
    host, port = variables["llama_server_host"], variables["llama_server_port"]
    try:
        ipaddress.IPv4Address(host)
    except ValueError:
        raise Refusal(f"llama_server_host is {host!r}: give the numeric IPv4 address to listen on") from None
    staging_port = staging_port_of(variables)
    for variable, number in (("llama_server_port", port), ("llama_server_staging_port", staging_port)):
        if not 0 < number < 65536:
            raise Refusal(f"{variable} is {number}: use 1 to 65535")
        if number in {used for worker in head["workers"] for used in (worker["port"], worker["staging_port"])}:
            raise Refusal(f"{variable} is {number}, which a worker of {name} has too: give one of them another port")
    if port == staging_port:
        raise Refusal(
            f"llama_server_staging_port is {port}, which is llama_server_port too: give one of them another port"
        )


def _check_extra_arguments(arguments: Sequence[str], release: Release) -> None:
    """Refuses what the plan decides, and options that llama-server of this release does not have: it would not start."""
    for word in arguments:
        if re.match(r"--?\w[\w-]*\s", word):
            raise Refusal(
                f"llama_server_extra_args has {word!r} as one argument: give a list, with option and value as entries of their own"
            )
    given = {word: option for word in arguments if (option := options.of_word(word))}
    _check_fork(given, release)
    for word, option in given.items():
        if option.owned:
            raise Refusal(
                f"llama_server_extra_args has {word.split('=', 1)[0]}, which the plan decides: {option.instead()}"
            )


def _check_fork(given: Mapping[str, options.Option], release: Release) -> None:
    """Refuses options that only the other one of llama.cpp and ik_llama.cpp has, or that only older builds have.

    :param given: argument → its option.
    """
    fork, build = release.get("fork", options.MAINLINE), release["generation"]
    strange = [word for word in given if fork not in options.forks_of(word)]
    if strange:
        mainline = fork == options.MAINLINE
        owner = options.IK_LLAMA if mainline else options.MAINLINE
        remedy = (
            f"set llama_release to a release of {owner}" if mainline else "use the variables llama_server_... instead"
        )
        raise Refusal(
            f"llama_server_extra_args has {', '.join(strange)}, which {owner} alone knows, and {release['ref']} is one of {fork}: "
            f"take them out, or {remedy}"
        )
    for word, option in given.items():
        since = max((spelling.last or 0 for spelling in option.spellings), default=0) + 1
        if option.replaced and build >= since:
            raise Refusal(
                f"llama_server_extra_args has {word}, which {fork} {option.replaced} since its commit {since}, and does not know any more: "
                "take it out"
            )


def _check_environment(environment: Mapping[str, object]) -> None:
    """Refuses what stands for an option that the plan decides, or that it takes into account as a further argument only."""
    for name in environment:
        option = options.of_variable(name)
        if option and option.owned:
            raise Refusal(f"llama_server_environment has {name}, which the plan decides: {option.instead()}")
        if option and option.memory not in ("", options.UNPLANNED):
            raise Refusal(
                f"llama_server_environment has {name}, which changes the KV cache: give {option.spellings[0].words[0]} in "
                "llama_server_extra_args instead, where the plan takes it into account"
            )


def staging_port_of(variables: Variables) -> int:
    port: int = variables["llama_server_staging_port"] or variables["llama_server_port"] + STAGING_DISTANCE
    return port


def backend_of(hosts: dict[str, Head], name: str) -> str:
    """The backend whose build of llama-server the head runs, and whose workers it uses where a host has several."""
    wanted: str | None = hosts[name]["variables"]["llama_server_backend"]
    own: list[str] = hosts[name]["backends"]
    known = {backend for host in hosts.values() for backend in host["backends"]}
    if wanted and wanted not in known:
        raise Refusal(
            f"llama_server_backend is {wanted!r}, which no host of this cluster has: use one of {', '.join(sorted(known))}, or add it to llama_backend"
        )
    return wanted if wanted and wanted in own else own[0]


def planned(
    name: str,
    head: Head,
    release: Release,
    model: Model,
    placed: placement.Placed,
    runtime_id: str,
    state: str,
) -> dict[str, Any]:
    """The plan's part for the head: llama-server's command line, and the launcher's before it.

    :param state: folder for what the launcher writes down.
    """
    variables, prefix = head["variables"], head["facts"]["prefix"]
    address, port = variables["llama_server_host"], variables["llama_server_port"]
    url = f"http://{'127.0.0.1' if address == '0.0.0.0' else address}:{port}"
    runtime = f"{prefix}/runtime/{runtime_id}"
    kept, own = placed.on_head(), placed.own()
    launcher = [head["facts"]["python"], runtime + "/runtime.py", "head", "--url", url, "--state", state]
    launcher += ["--protocol", release["protocol"]] if release["protocol"] else []
    for worker in placed.lent():
        launcher += ["--worker", worker["endpoint"]]
    return {
        "host": name,
        "argv": argv_of(
            head,
            release,
            model,
            placed,
            f"{prefix}/releases/{head['builds'][head['serves']]['id']}/bin/llama-server",
        ),
        "launcher": launcher,
        "runtime": runtime,
        "environment": {
            **workers.environment_of_head(head, head["serves"], own, placed.lent()),
            **{key: str(value) for key, value in variables["llama_server_environment"].items()},
        },
        "devices": [device["device"] for device in own],
        "backends": sorted({device["backend"] for device in own}),
        "url": url,
        "address": address,
        "port": port,
        "api_key_file": variables["llama_server_api_key_file"],
        "start_timeout": variables["llama_server_start_timeout"],
        "context": context_of(variables, model["summary"]),
        "load_mode": variables["llama_server_load_mode"],
        "cpu": {
            "layers": kept.layers,
            "weights_mib": round(kept.weights / placement.MIB, 2),
            "kv_mib": round(kept.kv / placement.MIB, 2),
        },
    }


def argv_of(head: Head, release: Release, model: Model, placed: placement.Placed, binary: str) -> list[str]:
    """llama-server's command line. Devices of workers have to be known before --device and --override-tensor name them."""
    variables = head["variables"]
    build, fork = release["generation"], release.get("fork", options.MAINLINE)
    key_file = variables["llama_server_api_key_file"]
    values: list[tuple[str, str | list[str] | None]] = [
        ("rpc", [worker["endpoint"] for worker in placed.lent()]),
        ("device", _device_names(release, placed)),
        ("override-tensor", variables["llama_server_override_tensor"] if placed.devices else None),
        ("model", model["path"]),
        ("host", variables["llama_server_host"]),
        ("port", str(variables["llama_server_port"])),
        ("gpu-layers", str(placed.gpu_layers)),
        ("tensor-split", [f"{share:.9g}" for share in placed.split] if len(placed.devices) > 1 else None),
        ("context", str(context_of(variables, model["summary"]))),
        ("parallel", str(variables["llama_server_parallel"])),
        ("cache-type-k", variables["llama_server_cache_type_k"]),
        ("cache-type-v", variables["llama_server_cache_type_v"]),
        ("flash-attention", variables["llama_server_flash_attention"]),
        ("threads", str(variables["llama_server_threads"] or "")),
        ("load-mode", variables["llama_server_load_mode"]),
        ("warmup", "on" if variables["llama_server_warmup"] else "off"),
        ("api-key-file", key_path(head["facts"], key_file) if key_file else None),
        ("fit", "off"),
        ("log-verbosity", "4"),
    ]
    argv = [binary]
    for name, value in values:
        try:
            argv += options.render(name, value, build, fork)
        except options.UnknownOption:
            raise Refusal(_unknown(name, value, release)) from None
    return [*argv, *variables["llama_server_extra_args"]]


def _device_names(release: Release, placed: placement.Placed) -> list[str] | None:
    """What --device names, workers first; None where llama-server has no such option."""
    name = release["capabilities"]["device_name"]
    if name is None:
        return None
    lent = [name.format(index=index, endpoint=worker["endpoint"]) for index, worker in enumerate(placed.lent())]
    return [*lent, *(device["device"] for device in placed.own())]


def _unknown(name: str, value: object, release: Release) -> str:
    """Why a setting cannot be said to this release."""
    option = options.of_name(name)
    spellings = option.spelled(release["generation"], release.get("fork", options.MAINLINE))
    known = [*option.implied, *(spelling.means for spelling in spellings if spelling.means)]
    newer = "" if "fork" in release else f", or a build from b{options.DIRECT_IO[0]} on"
    return f"{option.variable} is {value}, which {release['ref']} does not know: use {' or '.join(known)}{newer}"


def key_path(facts: Facts, path: str) -> str:
    """Where the service finds the API keys: systemd hands them over, so that the file itself may be root's alone."""
    return CREDENTIALS.format(service=SERVICE) + KEYS if facts["service_manager"] == "systemd" else path


def load_mode_of(wanted: str | None, able: dict[str, Any], used: list[devices.Device]) -> str | None:
    """How the model is read where nothing is said of it: not by mmap where HIP was seen to hang or crawl on it. None is llama-server's default.

    :param used: the devices that get layers.
    """
    if wanted or not any(device.hangs_on_mmap or device.slow_on_mmap for device in used):
        return wanted
    return "dio" if {"direct-io", "load-mode"} & set(able["server_flags"]) else "none"


def context_of(variables: Variables, summary: Summary) -> int:
    least: int = min(variables["llama_server_context"], summary["context"])
    return least


def _check_whole(variable: str, path: str) -> None:
    """``~`` and relative paths mean other places on the controller, to Ansible's account on the head, and to the service's."""
    if not path.startswith("/"):
        raise Refusal(f"{variable} is {path!r}: give the whole path on the head, from / on")


def model_of(variables: Variables, found: dict[str, Any], facts: Facts) -> Model:
    """Path and summary of the model that the head serves.

    :param found: what gguf_info found at ``llama_model_path``: ``summary``, and ``closed``, what keeps the service from reading it.
    """
    path, wanted = variables["llama_model_path"], variables["llama_model_known_answer"]
    if bool(path) == bool(wanted is not None):
        raise Refusal(
            "give either llama_model_path, a GGUF file on the head, or llama_model_known_answer: "
            + ("both are set" if path else "none is set")
        )
    if path:
        _check_whole("llama_model_path", path)
        summary, problem = found.get("summary"), None
        if summary is None:
            summary = variables["llama_model_gguf_summary"]
            problem = summary is not None and gguf.problem(summary)
        if summary is None:
            raise Refusal(
                f"llama_model_path is {path!r}, and nothing is known of that file: planning needs the head to be reachable, or "
                "llama_model_gguf_summary"
            )
        if problem:
            raise Refusal(f"llama_model_gguf_summary {problem}: give it what gguf_info returns as summary")
        if facts["scope"] == "system" and found.get("closed"):
            raise Refusal(
                f"llama_model_path is {path!r}, and {found['closed']} is closed to the account llamacpp, which serves it: open it with "
                f"chmod o+rX {found['closed']}, or move the model to /srv"
            )
        if facts["service_manager"] == "systemd" and path.startswith(PRIVATE_FOLDERS):
            raise Refusal(
                f"llama_model_path is {path!r}: services do not see {path.split('/')[1]} of the host; move the model to /srv"
            )
        return {"path": path, "known_answer": None, "summary": summary}
    size = {"layers": wanted["layers"], "width": wanted["width"], "type": wanted["type"]}
    problem = known_answer.problem(size["layers"], size["width"], size["type"])
    if problem:
        raise Refusal(f"llama_model_known_answer asks for a model that cannot be made: {problem}")
    return {
        "path": f"{facts['prefix']}/models/{known_answer.file_name(size['layers'], size['width'], size['type'])}",
        "known_answer": size,
        "summary": known_answer.summary(size["layers"], size["width"], size["type"]),
    }
