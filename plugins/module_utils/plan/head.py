# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the head serves, and llama-server's command line."""

from __future__ import annotations

import ipaddress
import re

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import service_managers
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.refusal import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import caches, capabilities, gguf, known_answer
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import devices, placement, workers

PRIVATE_FOLDERS = ("/tmp/", "/var/tmp/")
"""The unit has its own ones (PrivateTmp)."""

SERVICE = "llamacpp-server"
STAGING_DISTANCE = 100
KEYS = "api-keys"
CREDENTIALS = "/run/credentials/{service}.service/"
"""Where systemd puts what LoadCredential names, for the service alone."""


FLAGS_OF_CACHE = {
    "full_window": ("--swa-full",),
    "unified": ("--kv-unified", "-kvu"),
    "micro_batch": ("--ubatch-size", "-ub"),
}
"""Further arguments that planning takes into account, by what they are in caches.Settings."""
_UNPLANNED = """
-b --batch-size -cmoe --cpu-moe -kvo --kv-offload --lora --lora-scaled -md --model-draft --mmproj -ncmoe --n-cpu-moe -nkvo --no-kv-offload
-sm --split-mode --spec-type
"""
FLAGS_UNPLANNED = frozenset(_UNPLANNED.split())
"""Further arguments after which devices hold something else than is planned."""


_PLANNED = {
    "llama_server_host": "--host",
    "llama_server_port": "--port",
    "llama_server_context": "-c --ctx-size",
    "llama_server_parallel": "-np --parallel",
    "llama_server_threads": "-t --threads",
    "llama_server_flash_attention": "-fa --flash-attn",
    "llama_server_gpu_layers": "-ngl --gpu-layers --n-gpu-layers",
    "llama_server_tensor_split": "-ts --tensor-split",
    "llama_server_override_tensor": "-ot --override-tensor",
    "llama_server_cache_type_k": "-ctk --cache-type-k",
    "llama_server_cache_type_v": "-ctv --cache-type-v",
    "llama_server_load_mode": "--load-mode --mmap --no-mmap -dio --direct-io -ndio --no-direct-io",
    "llama_server_warmup": "--warmup --no-warmup",
    "llama_server_api_key_file": "--api-key --api-key-file",
    "llama_model_path": "-m --model",
    "llama_worker_endpoints": "--rpc -dev --device",
}
VARIABLE_OF = {flag: variable for variable, flags in _PLANNED.items() for flag in flags.split()}
"""Options of llama-server that the plan decides → variable that says it."""

LEAST = {
    "llama_server_context": 1,
    "llama_server_parallel": 1,
    "llama_server_threads": 1,
    "llama_server_gpu_layers": 0,
    "llama_server_start_timeout": 1,
}
"""Variable of the server → its smallest value."""


def settings_of(variables: dict, summary: dict) -> caches.Settings:
    """What llama-server is told of its cache."""
    extra = variables["llama_server_extra_args"]
    given = {name: next((flag for flag in flags if flag in extra), None) for name, flags in FLAGS_OF_CACHE.items()}
    tokens = caches.MICRO_BATCH
    if given["micro_batch"]:
        told = [*extra, ""][extra.index(given["micro_batch"]) + 1]
        if not told.isdigit() or not int(told):
            raise Refusal(f"llama_server_extra_args has {given['micro_batch']} {told!r}: give the number of tokens")
        tokens = int(told)
    return caches.Settings(
        context_of(variables, summary),
        variables["llama_server_parallel"],
        variables["llama_server_cache_type_k"],
        variables["llama_server_cache_type_v"],
        variables["llama_server_flash_attention"],
        bool(given["unified"]),
        bool(given["full_window"]),
        tokens,
    )


def overrides_of(variables: dict, devices: list[str]) -> list[tuple[str, str]]:
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


def as_planned(variables: dict) -> bool:
    """Whether no further argument changes what devices hold."""
    return not FLAGS_UNPLANNED & {word.split("=", 1)[0] for word in variables["llama_server_extra_args"]}


def check(name: str, head: dict, release: dict) -> None:
    """Refuses settings of the server that cannot be."""
    variables = head["variables"]
    for variable, least in LEAST.items():
        if variables[variable] is not None and variables[variable] < least:
            raise Refusal(f"{variable} is {variables[variable]}: give {least} or more, or leave it out")
    _check_extra_arguments(variables["llama_server_extra_args"], release)
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


def _check_extra_arguments(arguments: list[str], release: dict) -> None:
    """Refuses what the plan decides, and options that only the other one of llama.cpp and ik_llama.cpp has: llama-server would not start."""
    for word in arguments:
        if re.match(r"--?\w[\w-]*\s", word):
            raise Refusal(
                f"llama_server_extra_args has {word!r} as one argument: give a list, with option and value as entries of their own"
            )
        flag = word.split("=", 1)[0]
        if flag in VARIABLE_OF:
            raise Refusal(
                f"llama_server_extra_args has {flag}, which the plan decides: set {VARIABLE_OF[flag]} instead"
            )
    fork = release.get("fork", capabilities.MAINLINE)
    if fork == capabilities.MAINLINE:
        strange = [word for word in arguments if word in capabilities.IK_LLAMA_FLAGS]
        owner, remedy = capabilities.IK_LLAMA, f"set llama_release to a release of {capabilities.IK_LLAMA}"
    else:
        strange = [word for word in arguments if word in capabilities.MAINLINE_FLAGS]
        owner, remedy = capabilities.MAINLINE, "say what they say with the variables llama_server_..."
    if strange:
        raise Refusal(
            f"llama_server_extra_args has {', '.join(strange)}, which {owner} alone knows, and {release['ref']} is one of {fork}: "
            f"take them out, or {remedy}"
        )
    dropped = [word for word in arguments if word in capabilities.FUSED]
    if dropped and release["generation"] >= capabilities.IK_LLAMA_FUSED_BY_DEFAULT_SINCE:
        raise Refusal(
            f"llama_server_extra_args has {dropped[0]}, which {fork} does by itself since its commit "
            f"{capabilities.IK_LLAMA_FUSED_BY_DEFAULT_SINCE}, and does not know any more: take it out"
        )


def staging_port_of(variables: dict) -> int:
    return variables["llama_server_staging_port"] or variables["llama_server_port"] + STAGING_DISTANCE


def backend_of(hosts: dict, name: str) -> str:
    """The backend whose build of llama-server the head runs, and whose workers it uses where a host has several."""
    wanted = hosts[name]["variables"]["llama_server_backend"]
    known = {backend for host in hosts.values() for backend in host["backends"]}
    if wanted and wanted not in known:
        raise Refusal(
            f"llama_server_backend is {wanted!r}, which no host of this cluster has: use one of {', '.join(sorted(known))}, or add it to llama_backend"
        )
    return wanted if wanted in hosts[name]["backends"] else hosts[name]["backends"][0]


def planned(
    name: str,
    head: dict,
    release: dict,
    model: dict,
    placed: placement.Placed,
    runtime_id: str,
    state: str,
) -> dict:
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


def argv_of(head: dict, release: dict, model: dict, placed: placement.Placed, binary: str) -> list[str]:
    variables, used = head["variables"], placed.devices
    lent = placed.lent()
    able = release["capabilities"]
    argv = [binary]
    if lent:
        argv += ["--rpc", ",".join(worker["endpoint"] for worker in lent)]
    if used and able["device_name"]:
        names = [
            able["device_name"].format(index=index, endpoint=worker["endpoint"]) for index, worker in enumerate(lent)
        ]
        argv += ["--device", ",".join([*names, *(device["device"] for device in placed.own())])]
    if used and variables["llama_server_override_tensor"]:
        argv += ["--override-tensor", ",".join(variables["llama_server_override_tensor"])]
    argv += [
        "--model",
        model["path"],
        "--host",
        variables["llama_server_host"],
        "--port",
        str(variables["llama_server_port"]),
    ]
    argv += ["--n-gpu-layers", str(placed.gpu_layers)]
    if len(used) > 1:
        argv += ["--tensor-split", ",".join(f"{share:.9g}" for share in placed.split)]
    argv += [
        "--ctx-size",
        str(context_of(variables, model["summary"])),
        "--parallel",
        str(variables["llama_server_parallel"]),
    ]
    for flag, variable, default in (
        ("--cache-type-k", "llama_server_cache_type_k", "f16"),
        ("--cache-type-v", "llama_server_cache_type_v", "f16"),
    ):
        if variables[variable] != default:
            argv += [flag, variables[variable]]
    argv += flash_attention_arguments(variables["llama_server_flash_attention"], able)
    if variables["llama_server_threads"]:
        argv += ["--threads", str(variables["llama_server_threads"])]
    argv += load_mode_arguments(variables["llama_server_load_mode"], able, release)
    if not variables["llama_server_warmup"]:
        argv.append("--no-warmup")
    if variables["llama_server_api_key_file"]:
        argv += ["--api-key-file", key_path(head["facts"], variables["llama_server_api_key_file"])]
    if "fit" in able["server_flags"]:
        argv += ["--fit", "off"]
    if "load-mode" in able["server_flags"]:
        argv += ["--log-verbosity", "4"]
    return argv + variables["llama_server_extra_args"]


def key_path(facts: dict, path: str) -> str:
    """Where the service finds the API keys: systemd hands them over, so that the file itself may be root's alone."""
    handed_over = service_managers.MANAGERS[facts["service_manager"]].hands_over_keys
    return CREDENTIALS.format(service=SERVICE) + KEYS if handed_over else path


def load_mode_of(wanted: str | None, able: dict, used: list[devices.Device]) -> str | None:
    """How the model is read where nothing is said of it: not by mmap where HIP was seen to hang or crawl on it. None is llama-server's default.

    :param used: the devices that get layers.
    """
    if wanted or not any(device.hangs_on_mmap or device.slow_on_mmap for device in used):
        return wanted
    return "dio" if {"direct-io", "load-mode"} & set(able["server_flags"]) else "none"


def flash_attention_arguments(wanted: str | None, able: dict) -> list[str]:
    """Where the option is a switch, nothing stands for ``auto``, nor for ``off`` where that is the default."""
    if wanted is None:
        return []
    if "flash-attn" in able["server_flags"]:
        return ["--flash-attn", wanted]
    if "no-flash-attn" in able["server_flags"]:
        return ["--no-flash-attn"] * (wanted == "off")
    return ["--flash-attn"] * (wanted == "on")


def load_mode_arguments(wanted: str | None, able: dict, release: dict) -> list[str]:
    if wanted is None:
        return []
    if "load-mode" in able["server_flags"]:
        return ["--load-mode", wanted]
    if wanted == "mmap":
        return []
    if wanted == "none":
        return ["--no-mmap"]
    if "direct-io" in able["server_flags"]:
        return ["-dio"]
    other = "" if "fork" in release else ", or a build from b7668 on"
    raise Refusal(f"llama_server_load_mode is dio, which {release['ref']} does not know: use mmap or none{other}")


def context_of(variables: dict, summary: dict) -> int:
    return min(variables["llama_server_context"], summary["context"])


def _check_whole(variable: str, path: str) -> None:
    """``~`` and relative paths mean other places on the controller, to Ansible's account on the head, and to the service's."""
    if not path.startswith("/"):
        raise Refusal(f"{variable} is {path!r}: give the whole path on the head, from / on")


def model_of(variables: dict, found: dict, facts: dict) -> dict:
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
        if service_managers.MANAGERS[facts["service_manager"]].hides_homes and path.startswith(PRIVATE_FOLDERS):
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
