# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the head serves, and llama-server's command line."""

from __future__ import annotations

import ipaddress
import math
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, cast

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names, service_managers, untrusted
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.refusal import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.units import MIB
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import (
    caches,
    compute,
    gguf,
    known_answer,
    model_files,
    options,
    tensor_types,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import devices, model_source, placement
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.entry import MOST_THREADS
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.values import (
    Facts,
    Host,
    Model,
    ModelRequest,
    ModelSource,
    Release,
    Server,
    Worker,
)

PRIVATE_FOLDERS = ("/tmp/", "/var/tmp/")
"""The unit has its own ones (PrivateTmp)."""

EVERY_ADDRESS = "0.0.0.0"
KEYS, CERTIFICATE, KEY = "api-keys", "tls-certificate", "tls-key"
CREDENTIALS = {KEYS: "api_key_file", CERTIFICATE: "tls_certificate_file", KEY: "tls_key_file"}
"""Name of a credential → field of Server, and key of the head's plan, with the file on the head."""
HANDED_OVER = "/run/credentials/{service}.service/"
"""Where systemd puts what LoadCredential names, for the service alone."""


LOADS, START_SECONDS = 5, (900, 86400)
"""A run waits so many times as long as a load is predicted to take, since what is assumed of links and disks may be wrong by as much, and workers
compute hashes of what they get; and at least and at most so many seconds."""

FURTHER = {model_files.MMPROJ: "projector", model_files.DRAFT: "draft"}
"""Role of a file → the option of llama-server that names it."""
CLOSED = untrusted.Text(longest=4096)
"""A path."""
LIMITS = {
    "context": (1, (1 << 31) - 1),
    "parallel": (1, 1024),
    "threads": (1, MOST_THREADS),
    "gpu_layers": (0, (1 << 31) - 1),
    "start_timeout": (1, 7 * 86400),
    "fallback_after": (1, 7 * 86400),
}
"""Field of Server → its smallest and its largest value."""


def settings_of(server: Server, summary: Mapping[str, Any], fork: str = options.MAINLINE) -> caches.Settings:
    """The settings of llama-server's cache and compute buffers."""
    given = _memory_arguments(server.extra_args)
    return caches.Settings(
        context=context_of(server, summary),
        parallel=server.parallel,
        type_k=server.cache_type_k,
        type_v=server.cache_type_v,
        flash_attention=server.flash_attention,
        unified="unified" in given and options.meaning(given["unified"][0]) != "off",
        full_window="full_window" in given,
        micro_batch=_whole_number(given, "micro_batch", 1, "a number of tokens") or caches.MICRO_BATCH,
        batch=_whole_number(given, "batch", 1, "a number of tokens") or caches.BATCH,
        fork=fork,
        latent_attention=_whole_number(given, "latent_attention", 0, "a number"),
        attention_batch=_whole_number(given, "attention_batch", 0, "a number of MiB"),
    )


def _whole_number(given: Mapping[str, tuple[str, str]], field: str, least: int, what: str) -> int | None:
    """The value of a further argument; None where it is not given.

    :param what: it is, for the message.
    """
    if field not in given:
        return None
    word, number = given[field]
    whole = number_of(number)
    if whole is None or whole < least:
        raise Refusal(f"llama_server_extra_args has {word} {gguf.short(number)}: use {what}, {least} or more")
    return whole


def number_of(text: str) -> int | None:
    """The whole number of a further argument, 0 or more; None of what llama-server would not read as one."""
    number = int(text) if text.isascii() and text.isdigit() and len(text) <= len(str(1 << 31)) else None
    return number if number is None or number < 1 << 31 else None


def _memory_arguments(arguments: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Field of caches.Settings → the further argument that sets it, and the one after it. The last one counts."""
    given = {}
    for word, following in zip(arguments, [*arguments[1:], ""]):
        option = options.of_word(word)
        if option and option.memory:
            given[option.memory] = (word, following)
    return given


def overrides_of(server: Server, devices: list[str]) -> list[tuple[str, str]]:
    """Expressions for names of tensors and the device of each, from ``llama_server_override_tensor``.

    :param devices: names that may stand there.
    """
    overrides = []
    for entry in server.override_tensor:
        pattern, _equals, device = entry.partition("=")
        if not pattern or device not in devices or "," in pattern:
            raise Refusal(
                f"llama_server_override_tensor has {entry!r}: use an expression for tensor names without , and =, then = and one of "
                + ", ".join(devices)
            )
        try:
            re.compile(pattern)
        except re.error as error:
            raise Refusal(
                f"llama_server_override_tensor has {entry!r}, whose expression is not valid: {error}"
            ) from None
        overrides.append((pattern, device))
    return overrides


def _given_options(server: Server) -> list[options.Option]:
    """Of the further arguments and the environment, those that are known."""
    found = [
        *(options.of_word(word) for word in server.extra_args),
        *(options.of_variable(name) for name in server.environment),
    ]
    return [option for option in found if option]


def _unplanned(server: Server, drafts: bool) -> list[options.Option]:
    """Given options with which devices hold something else than planned.

    :param drafts: whether a draft model is counted: what it is used for changes nothing then.
    """
    given = [option for option in _given_options(server) if option.memory == options.UNPLANNED]
    return [option for option in given if not (drafts and option.name == options.SPECULATION)]


def as_planned(server: Server, drafts: bool = False) -> bool:
    """Whether neither a further argument nor the environment changes what devices hold. ``drafts`` as of ``_unplanned``."""
    return not _unplanned(server, drafts)


def uncounted(server: Server, drafts: bool = False) -> list[str]:
    """What llama-server is told to load beside the model, and the plan does not count. ``drafts`` as of ``_unplanned``."""
    return list(dict.fromkeys(option.adds for option in _unplanned(server, drafts) if option.adds))


def size_of_further(model: Model, role: str) -> str:
    """A further model and its size, where that is known."""
    sizes = [file.bytes for file in model.files if file.role == role]
    mib = f" ({sum(size for size in sizes if size) // MIB} MiB)" if all(sizes) else ""
    return f"{model_source.VARIABLES[role]}{mib}"


def check_further(server: Server, request: ModelRequest) -> None:
    """Refuses options for a further model that a variable gives already."""
    for source in request.sources():
        option = options.of_name(FURTHER[source.role]) if source.role in FURTHER else None
        words = [word for word in server.extra_args if option and options.of_word(word) == option]
        words += [name for name in server.environment if option and options.of_variable(name) == option]
        if words:
            raise Refusal(f"{source.variable} is set, and {words[0]} is given to llama-server too: remove one of them")


def check(name: str, server: Server, declared: Sequence[Worker], release: Release) -> None:
    """Refuses settings of the server that cannot be.

    :param name: of the head.
    :param declared: workers of the head.
    """
    for field, (least, most) in LIMITS.items():
        limit = untrusted.limit(getattr(server, field), least, most)
        if limit:
            raise Refusal(f"llama_server_{field} is {getattr(server, field)}: {limit}, or leave it out")
    _check_extra_arguments(server.extra_args, release)
    _check_environment(server.environment)
    _check_files(server)
    for field in ("cache_type_k", "cache_type_v"):
        if getattr(server, field) not in caches.CACHE_TYPES:
            raise Refusal(
                f"llama_server_{field} is {getattr(server, field)!r}: use one of {', '.join(caches.CACHE_TYPES)}"
            )
    _check_flash(server, release)
    try:
        ipaddress.IPv4Address(server.host)
    except ValueError:
        raise Refusal(f"llama_server_host is {server.host!r}: use the numeric IPv4 address to listen on") from None
    _check_ports(name, server, declared)


def _check_flash(server: Server, release: Release) -> None:
    """Refuses quantised values without flash attention, of which llama-server and that of ik_llama.cpp make no context."""
    asked, kind = server.flash_attention, server.cache_type_v
    by_itself = release.generation >= (compute.AUTO_FLASH_SINCE if release.mainline else options.FUSED_SINCE)
    if kind in caches.WHOLE or asked == "on" or (by_itself and asked != "off"):
        return
    given = "'off'" if asked == "off" else f"{repr(asked) if asked else 'not set'}, which is off in {release.ref}"
    raise Refusal(
        f"llama_server_cache_type_v is {kind}, which needs flash attention, and llama_server_flash_attention is {given}: set it to 'on', or "
        "llama_server_cache_type_v to f16"
    )


def _check_files(server: Server) -> None:
    for field in CREDENTIALS.values():
        if getattr(server, field):
            _check_whole(f"llama_server_{field}", getattr(server, field))
    given = [name for name in ("certificate", "key") if getattr(server, f"tls_{name}_file")]
    if len(given) == 1:
        other = "key" if given == ["certificate"] else "certificate"
        raise Refusal(
            f"llama_server_tls_{given[0]}_file is set and llama_server_tls_{other}_file is not: TLS needs both, so set or remove both"
        )


def _check_ports(name: str, server: Server, declared: Sequence[Worker]) -> None:
    taken = {port for worker in declared for port in (worker.port, worker.staging_port)}
    for variable, number in (("llama_server_port", server.port), ("llama_server_staging_port", server.staging_port)):
        if not 0 < number < 65536:
            raise Refusal(f"{variable} is {number}: use 1 to 65535")
        if number in taken:
            raise Refusal(f"{variable} is {number}, which a worker of {name} uses too: give one of them another port")
    if server.port == server.staging_port:
        raise Refusal(
            f"llama_server_staging_port is {server.port}, which is llama_server_port too: give one of them another port"
        )


def _check_extra_arguments(arguments: Sequence[str], release: Release) -> None:
    """Refuses what the plan decides, and options that llama-server of this release does not have: it would not start."""
    for word in arguments:
        name = re.split(r"[\s=]", word, maxsplit=1)[0]
        option = options.of_word(name)
        if option and option.secret:
            raise Refusal(f"llama_server_extra_args has {name}, which the plan decides: {option.instead()}")
        if re.match(r"--?\w[\w-]*\s", word):
            raise Refusal(
                f"llama_server_extra_args has {word!r} as one argument: use a list, with option and value as separate entries"
            )
    given = {word: option for word in arguments if (option := options.of_word(word))}
    _check_fork(given, release)
    for word, option in given.items():
        if option.owned:
            raise Refusal(
                f"llama_server_extra_args has {word.split('=', 1)[0]}, which the plan decides: {option.instead()}"
            )
    stray = options.stray(arguments)
    if stray is not None:
        raise Refusal(
            f"llama_server_extra_args has {stray!r}, which is neither an option nor the value of one, so llama-server would not start: remove it"
        )


def _check_fork(given: Mapping[str, options.Option], release: Release) -> None:
    """Refuses options that only the other one of llama.cpp and ik_llama.cpp has, or that only older builds have.

    :param given: argument → its option.
    """
    fork, build = release.fork, release.generation
    strange = [word for word in given if fork not in options.forks_of(word)]
    if strange:
        owner = options.IK_LLAMA if release.mainline else options.MAINLINE
        remedy = (
            f"set llama_release to a release of {owner}"
            if release.mainline
            else "use the variables llama_server_... instead"
        )
        raise Refusal(
            f"llama_server_extra_args has {', '.join(strange)}, which only {owner} knows, but {release.ref} is a release of {fork}: "
            f"remove them, or {remedy}"
        )
    for word, option in given.items():
        since = max((spelling.last or 0 for spelling in option.spellings), default=0) + 1
        if option.replaced and build >= since:
            raise Refusal(
                f"llama_server_extra_args has {word}, which {fork} {option.replaced} since its commit {since} and no longer knows: "
                "remove it"
            )


def _check_environment(environment: Mapping[str, str]) -> None:
    """Refuses what stands for an option that the plan decides, or that it takes into account as a further argument only."""
    for name in environment:
        option = options.of_variable(name)
        if option and option.owned:
            raise Refusal(f"llama_server_environment has {name}, which the plan decides: {option.instead()}")
        if option and option.memory not in ("", options.UNPLANNED):
            raise Refusal(
                f"llama_server_environment has {name}, which changes the KV cache: put {option.spellings[0].words[0]} into "
                "llama_server_extra_args instead, where the plan counts it"
            )


def backend_of(server: Server, head: Sequence[str], known: Collection[str]) -> str:
    """The backend whose build of llama-server the head runs, and whose workers it uses where a host has several.

    :param head: the head's backends.
    :param known: those of all hosts.
    """
    wanted = server.backend
    if wanted and wanted not in known:
        raise Refusal(
            f"llama_server_backend is {wanted!r}, which no host of this cluster has: use one of {', '.join(sorted(known))}, or add it to llama_backend"
        )
    return wanted if wanted and wanted in head else head[0]


def is_local(server: Server) -> bool:
    """Whether only the head itself reaches the server."""
    return ipaddress.IPv4Address(server.host).is_loopback


def _address_for_clients(server: Server, host: Host) -> str:
    """Where the server listens; where that is every address, one of the head's own: of a network of its clients if there is one."""
    if server.host != names.EVERY_ADDRESS:
        return server.host
    own = [host.address, *(link.address.partition("/")[0] for link in host.links), *host.facts.addresses]
    reachable = [address for address in own if address != "localhost" and not names.is_loopback(address)]
    networks = [ipaddress.IPv4Network(network) for network in server.allowed]
    return next((address for address in reachable if _is_in(address, networks)), [*reachable, host.name][0])


def _is_in(address: str, networks: Sequence[ipaddress.IPv4Network]) -> bool:
    try:
        return any(ipaddress.IPv4Address(address) in network for network in networks)
    except ValueError:
        return False


class Serving(NamedTuple):
    """What llama-server's command line is made of."""

    server: Server
    host: Host
    release: Release
    model: Model
    placed: placement.Placed
    build: str
    """Id of the build whose llama-server runs."""
    runtime: str | None
    """Folder of the launcher."""
    state: str
    """Folder for what the launcher writes down."""
    service: str
    """Name of the service."""
    beside: Sequence[tuple[str, str]] = ()
    """Options that say where models beside it are, and values."""

    @property
    def facts(self) -> Facts:
        return self.host.facts


def plan_of(serving: Serving, environment: Mapping[str, str]) -> dict[str, Any]:
    """The plan's part for the head: llama-server's command line, and the launcher's before it.

    :param environment: that llama-server needs to use its devices as planned.
    """
    server, placed, protocol = serving.server, serving.placed, serving.release.protocol
    scheme = "https" if server.tls else "http"
    own_url = f"{scheme}://{'127.0.0.1' if server.host == names.EVERY_ADDRESS else server.host}:{server.port}"
    kept, own = placed.on_head(), placed.own()
    launcher = [
        str(serving.facts.python),
        f"{serving.runtime}/runtime.py",
        "head",
        "--url",
        own_url,
        "--state",
        serving.state,
    ]
    launcher += ["--protocol", protocol] if protocol else []
    for worker in placed.lent():
        launcher += ["--worker", worker.endpoint]
    if server.fallback:
        launcher += ["--fallbacks", f"{serving.facts.prefix}/{names.FALLBACKS}"]
        launcher += ["--fallback-after", str(server.fallback_after)]
    return {
        "host": serving.host.name,
        "service": serving.service,
        "argv": argv_of(serving),
        "launcher": launcher,
        "runtime": serving.runtime,
        "environment": {**environment, **server.environment},
        "devices": [device.name for device in own],
        "url": f"{scheme}://{_address_for_clients(server, serving.host)}:{server.port}",
        "own_url": own_url,
        "address": server.host,
        "allowed": list(server.allowed),
        "port": server.port,
        **{field: getattr(server, field) for field in CREDENTIALS.values()},
        "fallback_after": server.fallback_after if server.fallback else None,
        "context": context_of(server, serving.model.summary),
        "context_per_request": context_per_request(server, serving.model.summary),
        "load_mode": server.load_mode,
        "cpu": {
            "layers": kept.layers,
            "weights_mib": round(kept.weights / MIB, 2),
            "kv_mib": round(kept.kv / MIB, 2),
        },
    }


def argv_of(serving: Serving) -> list[str]:
    """llama-server's command line. Devices of workers have to be known before --device and --override-tensor name them."""
    server, placed, release = serving.server, serving.placed, serving.release
    values: list[tuple[str, str | Sequence[str] | None]] = [
        ("rpc", [worker.endpoint for worker in placed.lent()]),
        ("device", _device_names(release, placed)),
        ("override-tensor", server.override_tensor if placed.devices else None),
        ("model", serving.model.path),
        *((option, serving.model.path_of(role)) for role, option in FURTHER.items()),
        *serving.beside,
        ("host", server.host),
        ("port", str(server.port)),
        ("gpu-layers", str(placed.gpu_layers)),
        ("tensor-split", [f"{share:.9g}" for share in placed.split] if len(placed.devices) > 1 else None),
        ("context", str(context_of(server, serving.model.summary))),
        ("parallel", str(server.parallel)),
        ("cache-type-k", server.cache_type_k),
        ("cache-type-v", server.cache_type_v),
        ("flash-attention", server.flash_attention),
        ("threads", str(server.threads or "")),
        ("load-mode", server.load_mode),
        ("repack", "off" if _crashes_with_amx(serving) else None),
        ("warmup", "on" if server.warmup else "off"),
        ("api-key-file", _readable(serving, KEYS)),
        ("tls-certificate", _readable(serving, CERTIFICATE)),
        ("tls-key", _readable(serving, KEY)),
        ("fit", "off"),
        ("log-verbosity", "4"),
    ]
    argv = [f"{serving.facts.prefix}/releases/{serving.build}/bin/llama-server"]
    for name, value in values:
        try:
            argv += options.render(name, value, release.generation, release.fork)
        except options.UnknownOption:
            raise Refusal(_unknown(name, value, release)) from None
    return [*argv, *server.extra_args]


def _crashes_with_amx(serving: Serving) -> bool:
    """Whether AMX would hold attn_k_b of MLA on the head. Its buffers cannot be read back, so llama-server ends with SIGSEGV when the
    scheduler moves that tensor (ggml-org/llama.cpp#11115, seen with 0.3.36)."""
    if not serving.facts.cpu.get("amx") or not serving.release.mainline:
        return False
    units = {None, *serving.placed.units_of(None)}
    return any(
        ".attn_k_b." in part.name and part.device is None and part.unit in units for part in serving.placed.load.parts
    )


def _device_names(release: Release, placed: placement.Placed) -> list[str] | None:
    """What --device names, in the order of the plan; None where llama-server has no such option. Workers are numbered as --rpc lists them."""
    name: str | None = release.capabilities["device_name"]
    if name is None:
        return None
    endpoints = [worker.endpoint for worker in placed.lent()]
    return [
        name.format(index=endpoints.index(device.endpoint), endpoint=device.endpoint)
        if device.endpoint
        else device.name
        for device in placed.devices
    ]


def _unknown(name: str, value: object, release: Release) -> str:
    """Why a setting cannot be said to this release."""
    known = options.sayable(name, release.generation, release.fork)
    first = options.first_saying(name, str(value), release.generation, release.fork)
    newer = f", or a build from b{first} on" if first and release.mainline else ""
    return f"{options.of_name(name).variable} is {value}, which {release.ref} does not know: use {' or '.join(known)}{newer}"


def _readable(serving: Serving, name: str) -> str | None:
    """Where the service finds a credential: systemd hands it over, so that the file itself may be root's alone. None without one."""
    path: str | None = getattr(serving.server, CREDENTIALS[name])
    handed_over = service_managers.MANAGERS[serving.facts.service_manager].hands_over_keys
    return HANDED_OVER.format(service=serving.service) + name if path and handed_over else path


def start_timeout_of(server: Server, load_s: float | None) -> int:
    """Seconds until llama-server has to be healthy.

    :param load_s: what a load takes by the estimate; None where there is none.
    """
    if server.start_timeout is not None:
        return server.start_timeout
    shortest, longest = START_SECONDS
    return min(longest, max(shortest, math.ceil(LOADS * (load_s or 0))))


def load_mode_of(wanted: str | None, release: Release, used: Sequence[devices.Holder], head: str) -> str | None:
    """How the model is read where nothing is said of it: not by mmap where HIP or a GB10 was seen to hang or crawl on it. None is llama-server's
    default.

    :param used: the devices that get layers.
    :param head: the host that reads the model.
    """
    if not wanted and any(device.is_gb10 and device.host == head for device in used):
        return "none"
    if wanted:
        return wanted
    if any(device.hangs_on_mmap or device.slow_on_mmap for device in used):
        return unmapped_mode(release)
    return None


def unmapped_mode(release: Release) -> str:
    """The fastest way to read a model without mmap."""
    return "dio" if {"direct-io", "load-mode"} & set(release.capabilities["server_flags"]) else "none"


def context_of(server: Server, summary: Mapping[str, Any]) -> int:
    """Tokens of context, no more than the model has: what its file says, or ``--override-kv`` in place of that."""
    key = re.escape(context_key(summary))
    given = re.findall(rf"(?<![\w.-]){key}=int:(\d{{1,18}})(?![^,\s])", " ".join(server.extra_args))
    return min(server.context, int(given[-1]) if given else int(summary["context"]))


def context_key(summary: Mapping[str, Any]) -> str:
    """What a model's file calls the context for which it was trained."""
    return f"{summary['architecture']}.context_length"


def check_types(path: str, summary: Mapping[str, Any], release: Release, variable: str) -> None:
    """Refuses a model with types of tensors that llama-server of this release does not have: it would not load it.

    :param variable: that sets the release.
    """
    kinds = {row["type"] for row in summary.get("tensors", ())}
    strange = tensor_types.of_others(kinds, release.fork)
    if strange:
        other = options.IK_LLAMA if release.mainline else options.MAINLINE
        raise Refusal(
            f"llama_model_path is {path!r}, whose tensors have types that only {other} has ({', '.join(strange)}), but {release.ref} is a "
            f"release of {release.fork}: set {variable} to a release of {other}, or use a file of the model without these types"
        )
    later = tensor_types.of_later_builds(kinds, release.fork, release.generation)
    if later:
        raise Refusal(
            f"llama_model_path is {path!r}, whose tensors have types that {release.ref} does not have ({', '.join(sorted(later))}): set "
            f"{variable} to build {max(later.values())} of {release.fork} or a newer one, or use a file of the model without these types"
        )


def context_per_request(server: Server, summary: Mapping[str, Any]) -> int:
    """Tokens that each of the requests at the same time may have: they divide the context, unless they share one cache."""
    settings = settings_of(server, summary)
    if settings.unified:
        return settings.context
    if settings.context < settings.parallel:
        raise Refusal(
            f"llama_server_parallel is {settings.parallel}, more than the {settings.context} tokens of context that requests divide: use a longer "
            "llama_server_context, or fewer requests"
        )
    return settings.context // settings.parallel


def _check_whole(variable: str, path: str) -> None:
    """``~`` and relative paths mean other places on the controller, to Ansible's account on the head, and to the service's."""
    if not path.startswith("/"):
        raise Refusal(f"{variable} is {path!r}: use the absolute path on the head")


def model_of(request: ModelRequest, report: Mapping[str, Any], facts: Facts, account: str) -> Model:
    """Path and summary of the model that the head serves.

    :param report: what gguf_info reports of ``llama_model_path``: ``summary``, and ``closed``, what keeps the service from reading it.
    :param facts: of the head.
    :param account: as which its services run in scope system.
    """
    if request.known_answer:
        problem = known_answer.problem(*request.known_answer)
        if problem:
            raise Refusal(f"llama_model_known_answer describes a model that is not possible: {problem}")
        path = known_answer.path_of(facts.prefix, *request.known_answer)
        own = Model(path, request.known_answer, known_answer.summary(*request.known_answer), "known-answer")
        return _with_files(own, request, report, facts.prefix)
    source = cast(ModelSource, request.source)
    _check_report(source, report)
    if report.get("refused"):
        raise Refusal(report["refused"])
    summary = report.get("summary") or _given_summary(source, request.summary)
    if request.instead_bytes:
        summary = model_source.scaled(summary, request.instead_bytes)
    model = _with_files(Model("", None, summary), request._replace(summary=summary), report, facts.prefix)
    path = str(model.path_of(model_files.MODEL))
    if facts.scope == "system" and report.get("closed"):
        raise Refusal(
            f"{source.variable} is {path!r}, but the account {account}, which serves it, cannot read {report['closed']}: open it with "
            f"chmod o+rX {shlex.quote(report['closed'])}, or move the model to /srv"
        )
    for file in model.files:
        if service_managers.MANAGERS[facts.service_manager].hides_homes and file.path.startswith(PRIVATE_FOLDERS):
            variable = source.variable if file.role == source.role else model_source.VARIABLES[file.role]
            raise Refusal(
                f"{variable} names {file.path!r}: services cannot see /{file.path.split('/')[1]} of the host; move the model to /srv"
            )
    return model._replace(path=path)


def _with_files(model: Model, request: ModelRequest, report: Mapping[str, Any], prefix: str) -> Model:
    resolved = model_source.resolve(request, report, prefix)
    roles = [source.role for source in request.sources() if source.role in FURTHER]
    return model._replace(
        source=model.source or resolved.source,
        revision=resolved.revision,
        files=resolved.files,
        records=resolved.records,
        fetched_by=resolved.fetched_by,
        offered=resolved.offered,
        further={role: one for role, one in (report.get("further") or {}).items() if role in roles},
    )


def summary_of(request: ModelRequest, report: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What is known of the model that is asked for; None where ``model_of`` refuses it or nothing is known.

    :param report: as of ``model_of``.
    """
    if request.known_answer:
        size = request.known_answer
        return None if known_answer.problem(*size) else known_answer.summary(*size)
    summary = report.get("summary") or request.summary
    return summary if isinstance(summary, Mapping) and not gguf.problem(summary) else None


def _check_report(source: ModelSource, report: Mapping[str, Any]) -> None:
    """Refuses what cannot have been found of a model."""
    summary, closed = report.get("summary"), report.get("closed")
    problem = (
        untrusted.problem("summary", summary)
        or untrusted.problem("closed", closed)
        or untrusted.mismatch("closed", closed, untrusted.Maybe(CLOSED))
    )
    wrong = f"{problem.where} {problem.why}" if problem else None
    if not wrong and summary:
        wrong = gguf.problem(summary) if isinstance(summary, Mapping) else "is not a mapping"
    wrong = wrong or model_source.check(report)
    if wrong:
        raise Refusal(f"{_named(source)}, for which {untrusted.not_possible('the head', wrong)}")


def _named(source: ModelSource) -> str:
    """The beginning of a sentence about a model."""
    return (
        f"{source.variable} is {source.path!r}" if source.path else f"{source.variable} is {model_source.shown(source)}"
    )


def _given_summary(source: ModelSource, summary: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """``llama_model_gguf_summary``, where the file itself was not read."""
    if summary is None:
        raise Refusal(
            f"{_named(source)}, but that file was not read: planning needs a reachable head, or "
            "llama_model_gguf_summary"
        )
    problem = gguf.problem(summary)
    if problem:
        raise Refusal(f"llama_model_gguf_summary {problem}: set it to the summary that gguf_info returns")
    return summary
