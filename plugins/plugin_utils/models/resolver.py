# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Finds the files of a model and reads its headers: what the host has is asked there, all else on the controller."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast
from urllib.parse import quote, urlsplit, urlunsplit

from ansible.plugins.action import ActionBase
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import reading, validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import gguf, projector
from ansible_collections.llamacpp.cluster.plugins.module_utils.models import download, download_record, ollama, web
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import model_inputs, model_source
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import (
    HuggingFace,
    ModelRequest,
    ModelSource,
)
from ansible_collections.llamacpp.cluster.plugins.plugin_utils import copying, inventory
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.models import hub

MODULE = "llamacpp.cluster.model"
READER = "llamacpp.cluster.gguf_info"
FILES = [{"name": validation.Text(longest=1024), "bytes": validation.Number()}]
"""Of the files of a summary."""
SPECIFICATION: dict[str, dict[str, Any]] = {
    "state": {"type": "str", "choices": ["found"], "default": "found"},
    "prefix": {"type": "path"},
    "account": {"type": "str"},
    "timeout": {"type": "int", "default": 120},
}
DEFAULTS = {name: option["default"] for name, option in SPECIFICATION.items() if "default" in option}


class Found(NamedTuple):
    """What a source was resolved to; a file is a mapping as the plan has it, with ``path`` only where it is on the host already."""

    source: str
    revision: str | None
    files: Sequence[Mapping[str, Any]]
    summary: Mapping[str, Any] | None = None
    closed: str | None = None
    offered: Sequence[Mapping[str, Any]] = ()


class Asked(NamedTuple):
    """What is asked for a source on the controller."""

    source: ModelSource
    token: str | None
    base: str
    """Folder beside which the operator's relative paths are."""


def run(action: ActionBase, task_vars: dict) -> dict:
    """The result of the module for ``state: found``."""
    _checked, arguments = action.validate_argument_spec(argument_spec=SPECIFICATION)
    try:
        request = model_inputs.request_of(inventory.variables_of(task_vars))
    except Refusal:
        return {"changed": False}  # planning refuses it, and says so in the plan
    try:
        return found_of(action, task_vars, request, arguments)
    except Refusal as refusal:
        return {"changed": False, "refused": str(refusal)}  # in the plan as well, where a program reads it


def found_of(action: ActionBase, task_vars: dict, request: ModelRequest, arguments: Mapping[str, Any]) -> dict:
    """The result of the module for one model.

    :param arguments: ``prefix``, ``account`` and ``timeout``.
    :raises Refusal: it cannot be found, or not be read.
    """
    return _result(_all(action, task_vars, request, arguments))


def _result(found: Mapping[str, Found]) -> dict:
    served = found.get(download_record.MODEL, Found("", None, ()))
    return {
        "changed": False,
        **({"summary": served.summary} if served.summary else {}),
        "closed": served.closed,
        "source": served.source,
        "revision": served.revision,
        "files": [{**file, "role": role} for role, one in found.items() for file in one.files],
        "sources": [{"role": role, "source": one.source, "revision": one.revision} for role, one in found.items()],
        "offered": list(served.offered),
        "further": {role: one.summary for role, one in found.items() if one.summary and role != download_record.MODEL},
    }


def _all(action: ActionBase, task_vars: dict, request: ModelRequest, arguments: Mapping[str, Any]) -> dict[str, Found]:
    """Role → what was found."""
    there = _of_the_host(action, task_vars, request, arguments)
    base = task_vars.get("inventory_dir") or ""
    found = {}
    for source in request.sources():
        if source.path:
            found[source.role] = _at_path(action, task_vars, source, there, arguments)
            continue
        known = _known(source, there, arguments["prefix"], base)
        copy = _local(base, source.copy) if source.copy else None
        if known is None or (copy and reading.from_disk(copy, copy.exists, arguments["timeout"])):
            token = _token(request, source, base)
            pinned = _pin(source, there, arguments["prefix"])
            known = _look_up(Asked(pinned, token, base), arguments["timeout"])
        found[source.role] = known
    return found


def _token(request: ModelRequest, source: ModelSource, base: str) -> str | None:
    """The token, for the one server that gets it: that of the first source which takes one, as for the download."""
    own, first = _server(source), next(filter(None, map(_server, request.sources())), None)
    if not request.token_file or not own or not first or not web.same_server(own, first):
        return None
    return hub.read_token(_beside(base, request.token_file))


def _server(source: ModelSource) -> str | None:
    """A URL of the server that may ask for a token."""
    return hub.endpoint() if source.huggingface else next(iter(source.url), None)


def _beside(base: str, path: str) -> str:
    return os.path.join(base, os.path.expanduser(path))


# What the host has


def _module(action: ActionBase, task_vars: dict, name: str, arguments: dict) -> dict:
    result = action._execute_module(module_name=name, module_args=arguments, task_vars=task_vars)
    if result.get("failed"):
        raise Refusal(copying.why(result))
    return result


def _of_the_host(
    action: ActionBase, task_vars: dict, request: ModelRequest, arguments: Mapping[str, Any]
) -> Mapping[str, Any]:
    """What the module returns on the host; nothing where it need not be asked, or is not to be."""
    prefix, further = (
        arguments["prefix"],
        [source for source in request.sources() if source.role != download_record.MODEL],
    )
    asked = {
        "folders": [model_source.folder(prefix, source) for source in request.sources() if not source.path and prefix],
        "paths": [source.path for source in further if source.path and prefix],
        "ollama": [source.ollama for source in request.sources() if source.ollama and prefix],
    }
    if not any(asked.values()):
        return {}
    return _module(action, task_vars, MODULE, {**asked, **_account(arguments), "timeout": arguments["timeout"]})


def _account(arguments: Mapping[str, Any]) -> dict[str, Any]:
    account = arguments.get("account")
    return {"account": account} if account else {}


def _at_path(
    action: ActionBase, task_vars: dict, source: ModelSource, there: Mapping[str, Any], arguments: Mapping[str, Any]
) -> Found:
    """Files that an operator has put there."""
    name = model_source.shown(source)
    if source.role != download_record.MODEL:
        said = _entry(there.get("paths"), source.path)
        if said.get("error"):
            raise Refusal(
                f"{source.variable} is {source.path}, which cannot be read on the head: {validation.printable(said['error'])}"
            )
        if said.get("closed"):
            raise Refusal(_closed(source, source.path, said["closed"]))
        folder, _slash, base = str(source.path).rpartition("/")
        file = {"name": base, "path": source.path, "bytes": said.get("bytes"), "url": None, "sha256": None}
        return Found(name, None, [file], _summary(source.role, said.get("summary")))
    result = _module(action, task_vars, READER, {"path": source.path, **_account(arguments)})
    folder, reported = str(source.path).rpartition("/")[0], result.get("summary")
    summary: Mapping[str, Any] = reported if isinstance(reported, Mapping) else {}
    wrong = gguf.problem(summary)
    strange = None if wrong else validation.mismatch("files", summary.get("files"), FILES)
    if wrong or strange:
        why = f"{strange.where} {strange.why}" if strange else f"its summary {wrong}"
        raise Refusal(
            f"{source.variable} is {source.path}, for which {validation.not_possible(task_vars['inventory_hostname'], why)}"
        )
    files = [
        {"name": file["name"], "path": f"{folder}/{file['name']}", "bytes": file["bytes"], "url": None, "sha256": None}
        for file in summary["files"]
    ]
    return Found(name, None, files, summary, result.get("closed"))


def _summary(role: str, given: Any) -> Mapping[str, Any] | None:
    """A summary that a host gives, which planning checks; None of a projector in place of a model, and the other way round."""
    if not isinstance(given, Mapping):
        return None
    return given if (given.get("architecture") == projector.ARCHITECTURE) == (role == download_record.MMPROJ) else None


def _entry(value: Any, name: Any) -> Mapping[str, Any]:
    """An entry of what a host said, which may be anything."""
    entry = value.get(name) if isinstance(value, Mapping) else None
    return entry if isinstance(entry, Mapping) else {}


def _known(source: ModelSource, there: Mapping[str, Any], prefix: str | None, base: str) -> Found | None:
    """What the host has of a source, so that no server is asked; None where it has nothing whole."""
    if prefix is None:
        return None
    kept = _entry(there.get("folders"), model_source.folder(prefix, source))
    record, summary = _record_of(source, kept), kept.get("summary")
    wanted = source.role == download_record.MODEL
    if kept.get("whole") is True and bool(summary) >= wanted and record:
        revision = record.get("revision")
        named = [{key: file.get(key) for key in download_record.RESOLVED} for file in record["resolved"]]
        files = [{**file, "url": _url_of(source, file, str(revision), base)} for file in named]
        return Found(record["source"], revision, files, _summary(source.role, summary), kept.get("closed"))
    own = _entry(there.get("ollama"), source.ollama)
    return _in_its_folder(source, own) if own else None


def _pin(source: ModelSource, there: Mapping[str, Any], prefix: str | None) -> ModelSource:
    """The source, at the commit of its record where that has lost a file: a branch may have moved since."""
    record = _record_of(source, _entry(there.get("folders"), model_source.folder(prefix, source))) if prefix else None
    if not source.huggingface or not record:
        return source
    return source._replace(huggingface=source.huggingface._replace(revision=record["revision"]))


def _record_of(source: ModelSource, kept: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The record that a host keeps, where it is that of the source, and says enough to know where its files come from."""
    record = kept.get("record")
    if not isinstance(record, Mapping) or download_record.problem_of_record(record):
        return None
    if record["asked"] != model_source.asked(source):
        return None
    vague = (source.huggingface and not re.fullmatch(hub.COMMIT, record.get("revision") or "")) or (
        source.ollama and not all(file.get("sha256") for file in record["resolved"])
    )
    return None if vague else record


def _url_of(source: ModelSource, file: Mapping[str, Any], revision: str, base: str) -> str:
    """Where a file of a record comes from: the host that keeps the record has no say in whom a token is sent to, or what leaves the controller."""
    name = download_record.base_name(file["name"])
    if source.huggingface:
        return hub.url_of(source.huggingface, revision, file["name"])
    if source.ollama:
        return ollama.name_of(source.ollama).blob_url(file["sha256"])
    if source.copy:
        return _local(base, source.copy).with_name(name).as_uri()
    return _by_name(source.url).get(name) or _beside_url(source.url[0], name)


def _local(base: str, path: str) -> Path:
    return Path(_beside(base, path)).absolute()


def _by_name(urls: Sequence[str]) -> dict[str, str]:
    """Name of each file → its URL."""
    return {download_record.name_of_url(url): url for url in urls}


def _in_its_folder(source: ModelSource, own: Mapping[str, Any]) -> Found | None:
    """A blob that Ollama has on the host, whole by its size.

    :raises Refusal: it is a projector or a draft model that the service cannot read.
    """
    manifest, folder, said = own.get("manifest"), own.get("folder"), _entry(own.get("blobs"), source.role)
    if not isinstance(manifest, Mapping) or ollama.problem(manifest) or not isinstance(folder, str):
        return None
    blobs, wanted = ollama.blobs(manifest, source.role), source.role == download_record.MODEL
    if len(blobs) != 1 or said.get("bytes") != blobs[0].bytes or bool(said.get("summary")) < wanted:
        return None
    if said.get("closed") and not wanted:
        raise Refusal(_closed(source, source.ollama, said["closed"]))
    name = ollama.name_of(str(source.ollama))
    path = f"{folder}/{ollama.blob_path(blobs[0].sha256)}"
    file = {
        "name": name.file_name(source.role),
        "path": path,
        "bytes": blobs[0].bytes,
        "url": None,
        "sha256": blobs[0].sha256,
    }
    summary = _summary(source.role, said.get("summary"))
    return Found(model_source.shown(source), None, [file], summary, said.get("closed"))


def _closed(source: ModelSource, value: str | None, closed: Any) -> str:
    return f"{source.variable} is {value}, but its service cannot read {validation.printable(closed)}: open it with chmod o+rX"


# What servers and the controller have


def _look_up(asked: Asked, seconds: float) -> Found:
    source = asked.source
    look = _huggingface if source.huggingface else _ollama if source.ollama else _copy if source.copy else _url
    try:
        return reading.within(seconds, lambda: look(asked))
    except reading.TooSlowError as error:
        raise Refusal(
            f"{source.variable} {error}: check the network, and the server or disk that has {model_source.shown(source)}, and try again"
        ) from None


def _headers(
    source: ModelSource, read: Any, named: str, token: str | None = None
) -> tuple[gguf.Model, Mapping[str, Any] | None]:
    """The headers of a source, and their summary.

    :param read: returns a gguf.Model.
    :param named: where that is read from.
    :param token: with which that is asked.
    """
    try:
        model = read()
        if source.role == download_record.MMPROJ:
            return model, projector.summarize(model) if projector.is_one(model) else None
        return model, gguf.summarize(model, whole=source.role == download_record.MODEL)
    except gguf.GGUFError as error:
        raise Refusal(f"{source.variable} is {named}, which {_why_unread(source, error, token)}") from None


def _why_unread(source: ModelSource, error: gguf.GGUFError, token: str | None) -> str:
    if not isinstance(error, web.RemoteError):
        return str(error)
    if source.ollama and error.status in (401, 403):
        return f"needs permission (HTTP {error.status}), and registries of Ollama get no token: use its files from Hugging Face or a web server"
    return download.why(error, token)


def _from_urls(urls: Mapping[str, str], token: str | None) -> gguf.Model:
    """:param urls: name of each part → where it is; the first one is that of the model, whose server gets the token."""
    first = next(iter(urls))

    def open_part(name: str) -> web.RemoteFile:
        if name not in urls:
            raise FileNotFoundError(name)
        return web.RemoteFile(urls[name], token if web.same_server(urls[name], urls[first]) else None)

    return gguf.read(first, open_part)


def _huggingface(asked: Asked) -> Found:
    source, wanted = asked.source, cast(HuggingFace, asked.source.huggingface)
    there = hub.listing(source, asked.token)
    files = [
        {
            "name": file.name,
            "url": hub.url_of(wanted, there.commit, file.name),
            "bytes": file.bytes,
            "sha256": file.sha256,
        }
        for file in hub.choose(there, source)
    ]
    urls = {download_record.base_name(str(file["name"])): str(file["url"]) for file in files}
    named = f"{wanted.repo}, {files[0]['name']}"
    model, summary = _headers(source, lambda: _from_urls(urls, asked.token), named, asked.token)
    for file, read in zip(files, model.files):
        if file["bytes"] != read["bytes"]:
            raise Refusal(
                f"{source.variable} is {named}, whose size is {file['bytes']} in the repository and {read['bytes']} of the file itself: try again"
            )
    offered = [one._asdict() for one in hub.quantisations(there, source, str(files[0]["name"]))]
    offered = [{"quantisation": one["name"], "bytes": one["bytes"]} for one in offered]
    return Found(model_source.shown(source, there.commit), there.commit, files, summary, offered=offered)


def _url(asked: Asked) -> Found:
    source = asked.source
    urls = _by_name(source.url)
    one = len(urls) == 1
    read = partial(web.read, source.url[0], asked.token) if one else partial(_from_urls, urls, asked.token)
    model, summary = _headers(source, read, web.shown(source.url[0]), asked.token)
    sums = _checksums(source, model, web.shown(source.url[0]))
    files = [
        {
            "name": read_file["name"],
            "url": urls.get(read_file["name"]) or _beside_url(source.url[0], read_file["name"]),
            "bytes": read_file["bytes"],
            "sha256": checksum,
        }
        for read_file, checksum in zip(model.files, sums)
    ]
    return Found(model_source.shown(source), None, files, summary)


def _checksums(source: ModelSource, model: gguf.Model, named: str) -> Sequence[str | None]:
    """The sha256 of each file of a model, where the operator gives them."""
    if source.checksum and len(source.checksum) != len(model.files):
        raise Refusal(
            f"{source.variable} is {named}, a model of {len(model.files)} parts, and has {len(source.checksum)} checksums: give one for each part, in "
            "their order"
        )
    return source.checksum or (None,) * len(model.files)


def _beside_url(url: str, name: str) -> str:
    address = urlsplit(url)
    return urlunsplit(address._replace(path=f"{address.path.rpartition('/')[0]}/{quote(name)}"))


def _ollama(asked: Asked) -> Found:
    source, whole = asked.source, str(asked.source.ollama)
    name = ollama.name_of(whole)
    manifest, digest = _manifest(source, name)
    blobs = ollama.blobs(manifest, source.role)
    if len(blobs) != 1:
        kind = "projector" if source.role == download_record.MMPROJ else "model"
        raise Refusal(
            f"{source.variable} is {whole}, which has {len(blobs) or 'no'} files with a {kind}, not one: use its files from Hugging Face"
        )
    file = name.file_name(source.role)
    url = name.blob_url(blobs[0].sha256)
    model, summary = _headers(source, lambda: _from_urls({file: url}, None), whole)
    size = model.files[0]["bytes"]
    if size != blobs[0].bytes:
        raise Refusal(
            f"{source.variable} is {whole}, whose size is {blobs[0].bytes} in its manifest and {size} of the file itself: try again"
        )
    files = [{"name": file, "url": url, "bytes": blobs[0].bytes, "sha256": blobs[0].sha256}]
    return Found(model_source.shown(source), digest, files, summary)


def _manifest(source: ModelSource, name: ollama.Name) -> tuple[Mapping[str, Any], str]:
    """The manifest of a model in its registry, and its digest."""
    whole = source.ollama
    try:
        text = web.content(
            name.manifest_url, {"Accept": ollama.ACCEPT, "Accept-Encoding": "identity"}, ollama.MANIFEST_BYTES
        )
        manifest = reading.parse(text)
    except web.RemoteError as error:
        if error.status == 404:
            page = (
                f"https://ollama.com/{name.namespace}/{name.name}/tags"
                if name.host == model_inputs.OLLAMA_REGISTRY
                else name.host
            )
            raise Refusal(
                f"{source.variable} is {whole}, which {name.host} does not have (HTTP 404): {page} has the names that it has"
            ) from None
        if error.status in (401, 403):
            raise Refusal(f"{source.variable} is {whole}, which {_why_unread(source, error, None)}") from None
        if error.status:
            raise Refusal(
                f"{source.variable} is {whole}, which {name.host} does not give (HTTP {error.status}): try again later"
            ) from None
        raise Refusal(f"{source.variable} is {whole}, whose manifest {web.shown(name.manifest_url)} {error}") from None
    except ValueError as error:
        raise Refusal(
            f"{source.variable} is {whole}, for which {name.host} sends no manifest ({validation.printable(error, 200)}): correct the name"
        ) from None
    problem = ollama.problem(manifest)
    if problem:
        raise Refusal(
            f"{source.variable} is {whole}, for which {name.host} sends a manifest with a value that is not possible ({problem}): use another registry"
        )
    return manifest, f"sha256:{hashlib.sha256(text).hexdigest()}"


def _copy(asked: Asked) -> Found:
    source = asked.source
    path = _local(asked.base, str(source.copy))
    try:
        model, summary = _headers(source, lambda: gguf.read_path(str(path)), f"{path} of the controller")
    except OSError as error:
        raise Refusal(
            f"{source.variable} is {path} of the controller, which cannot be read ({error.strerror}): correct the path, or put the file there"
        ) from None
    files = [
        {"name": file["name"], "url": (path.parent / file["name"]).as_uri(), "bytes": file["bytes"], "sha256": checksum}
        for file, checksum in zip(model.files, _checksums(source, model, f"{path} of the controller"))
    ]
    return Found(model_source.shown(source), None, files, summary)
