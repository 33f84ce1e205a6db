# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Hugging Face: lists the files of a repository at a commit, and chooses the files of the model."""

import os
import re
import stat
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple, cast
from urllib.parse import quote, urlsplit

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import reading, redaction, typed_json, validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import Text
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import split_files
from ansible_collections.llamacpp.cluster.plugins.module_utils.models import download_record, web
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import host_types
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import ModelFilePlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner import types

DEFAULT_ENDPOINT = "https://huggingface.co"
MAX_REPLY_BYTES = 8 << 20
"""Size limit of a reply: 20,000 files take 5.4 MB."""
MAX_NAMES = 60
"""Maximum number of names in a message."""
OFFLINE_REMEDY = "check HF_ENDPOINT, or use a model on the head (llama_model_path)"
MAX_TOKEN_BYTES = 4096
COMMIT_PATTERN = r"[0-9a-f]{40,64}"
QUANTISATION_PATTERN = re.compile(
    r"(?:^|[-._/ ])((?:UD-|i1-)?(?:I?Q\d(?:_[A-Z0-9]+)*|TQ\d_\d|BF16|FP?(?:16|32)|MXFP\d(?:_[A-Z]+)*|NVFP4))(?=$|[-._/ ])",
    re.IGNORECASE,
)
"""Pattern of a quantisation in the name of a file or a folder."""


class Listing(NamedTuple):
    """Files of a repository at a commit."""

    commit: Annotated[str, Text(COMMIT_PATTERN)]
    files: tuple[ModelFilePlan, ...]


def endpoint() -> str:
    """Return the URL of the server: ``HF_ENDPOINT`` on the controller, which Hugging Face's own programs read, too.

    :raises Refusal: HF_ENDPOINT is not an address, or contains a password, which plans and logs would show.
    """
    url = os.environ.get("HF_ENDPOINT", "").rstrip("/") or DEFAULT_ENDPOINT
    try:
        if urlsplit(url).hostname and urlsplit(url).port != 0 and not redaction.has_secret(url):
            return url
    except ValueError:
        pass
    raise Refusal(
        f"HF_ENDPOINT on the controller is {validation.quote(web.printable_url(url))}, which is not the address of a server, or contains a password or "
        f"token: use an address such as {DEFAULT_ENDPOINT}"
    )


def read_token(path: str | None) -> str | None:
    """Return the token in a file that only its owner can read; None without a file.

    :raises Refusal: the file has no token, or others can read it.
    """
    if path is None:
        return None
    subject = f"{web.TOKEN_FILE_VARIABLE} is {path}, which"
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise Refusal(f"{subject} is not a file: use a file that contains the token")
        if status.st_mode & 0o077:
            raise Refusal(f"{subject} is readable by other accounts: run chmod 600 {path}")
        with Path(path).open("rb") as stream:
            token = stream.read(MAX_TOKEN_BYTES).decode("utf-8", "replace").strip()
    except OSError as error:
        raise Refusal(
            f"{subject} cannot be read on the controller ({error.strerror}): correct the path, or make your account the file's owner"
        ) from None
    if not re.fullmatch(r"[!-~]+", token):
        raise Refusal(f"{subject} contains no token: write the token into the file as its only line")
    return token


def list_files(source: types.ModelSource, token: str | None) -> Listing:
    """Return the files of the repository.

    :raises Refusal: the hub cannot be reached, or has no such repository or revision.
    """
    repository = cast(types.HuggingFace, source.huggingface)
    url = f"{endpoint()}/api/models/{repository.repo}/revision/{quote(repository.revision, safe='')}?blobs=true"
    try:
        reply = reading.parse(web.fetch_content(url, {"Accept-Encoding": "identity"}, MAX_REPLY_BYTES, token))
        commit = str(reply.get("sha"))
        files = [
            {
                "name": file["rfilename"],
                "role": source.role,
                "url": url_of(repository, commit, file["rfilename"]),
                "bytes": file.get("size"),
                "sha256": (file.get("lfs") or {}).get("sha256"),
                "revision": commit,
            }
            for file in reply.get("siblings") or ()
        ]
        return typed_json.parse(Listing, {"commit": commit, "files": files})
    except web.RemoteError as error:
        reason = f"cannot be looked up: {endpoint()} {error}; {OFFLINE_REMEDY}"
        if error.status:
            reason = _refusal_reason(repository, error, token)
        raise Refusal(f"{_subject(source)} {reason}") from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        reason = f"{endpoint()} does not answer like Hugging Face ({validation.printable(error, 200)})"
        raise Refusal(f"{_subject(source)} cannot be looked up: {reason}; {OFFLINE_REMEDY}") from None


def _subject(source: types.ModelSource) -> str:
    return f"{source.variable} sets repo to {cast(types.HuggingFace, source.huggingface).repo}, which"


def _refusal_reason(repository: types.HuggingFace, error: web.RemoteError, token: str | None) -> str:
    """Return the meaning of a server's refusal, as the end of a sentence. The hub's answer is the same for a missing repository and a missing token."""
    url = f"{endpoint()}/{repository.repo}"
    if error.reason == "RevisionNotFound":
        return f"has no revision {repository.revision!r}: choose a revision on {url}/tree/main"
    if error.status in (401, 403, 404):
        remedy = f"and set {web.TOKEN_FILE_VARIABLE} to a file with your token"
        if token:
            remedy = f"with the account that owns the token in {web.TOKEN_FILE_VARIABLE}"
        return f"cannot be read (HTTP {error.status}): correct the name, or accept the conditions on {url} {remedy}"
    return f"cannot be looked up: {endpoint()} {error}"


def _names_text(names: Iterable[str]) -> str:
    """Return a list of limited length for a message."""
    printable_names = [validation.printable(name, 200) for name in dict.fromkeys(names)]
    omission_note = f" and {len(printable_names) - MAX_NAMES} more" if len(printable_names) > MAX_NAMES else ""
    return ", ".join(printable_names[:MAX_NAMES]) + omission_note


class RepositoryModel(NamedTuple):
    """A model in a repository: its files, and the name of its quantisation."""

    quantisation: str
    files: tuple[ModelFilePlan, ...]
    is_complete: bool

    @property
    def bytes(self) -> int:
        return sum(file.bytes or 0 for file in self.files)


def is_projector(name: str) -> bool:
    return "mmproj" in download_record.base_name(name).lower()


def repository_models(listing: Listing, role: str) -> list[RepositoryModel]:
    files = {file.name: file for file in listing.files}
    names = [
        name
        for name in files
        if name.lower().endswith(".gguf")
        and is_projector(name) == (role == host_types.MMPROJ)
        and "imatrix" not in download_record.base_name(name).lower()
    ]
    return [
        RepositoryModel(quantisation_of(model.names[0]), tuple(files[name] for name in model.names), model.is_complete)
        for model in split_files.group_files(names)
    ]


def quantisation_of(name: str) -> str:
    """Return the quantisation in the name of a file, or else in the name of its folder; empty if neither has one."""
    folder, _slash, base = _stem(name).rpartition("/")
    matches = QUANTISATION_PATTERN.findall(base) or QUANTISATION_PATTERN.findall(folder)
    return matches[-1] if matches else ""


def _stem(name: str) -> str:
    """Return the name of a file without its part number and suffix."""
    match = split_files.PART_PATTERN.fullmatch(name)
    return match[1] if match else re.sub(r"\.gguf$", "", name, flags=re.IGNORECASE)


def _strip_quantisation(name: str) -> str:
    """Return the name of a model's files without the quantisation."""
    return QUANTISATION_PATTERN.sub("", download_record.base_name(_stem(name))).lower()


def quantisations(listing: Listing, source: types.ModelSource, name: str) -> list[types.Quantisation]:
    """Return the complete models among which ``quantisation`` chooses, the smallest first."""
    models = repository_models(listing, source.role)
    quantisation_counts = Counter(model.quantisation.lower() for model in models)
    candidates = [
        types.Quantisation(model.quantisation, model.bytes)
        for model in models
        if quantisation_counts[model.quantisation.lower()] == 1
        and model.is_complete
        and _strip_quantisation(model.files[0].name) == _strip_quantisation(name)
    ]
    return sorted((candidate for candidate in candidates if candidate.name), key=lambda candidate: candidate.bytes)


def choose_files(listing: Listing, source: types.ModelSource) -> tuple[ModelFilePlan, ...]:
    """Return the requested files of the repository, parts in order.

    :raises Refusal: the repository lacks them, or the request matches several models.
    """
    repository = cast(types.HuggingFace, source.huggingface)
    if repository.files:
        return _choose_by_name(listing, source, repository.files)
    models = repository_models(listing, source.role)
    subject = f"{_subject(source)} has"
    if not models:
        kind = "projector (mmproj)" if source.role == host_types.MMPROJ else "GGUF file"
        available_names_text = _names_text(file.name for file in listing.files)
        raw_names = sorted(file.name for file in listing.files if split_files.RAW_PART_PATTERN.fullmatch(file.name))
        if raw_names:
            raise Refusal(
                f"{subject} no {kind}, but has parts of a split file ({', '.join(raw_names)}): download these parts, join them in order with cat, and set "
                "llama_model_path to the joined file"
            )
        raise Refusal(
            f"{subject} no {kind}: use another repository (files in this repository: {available_names_text or 'none'})"
        )
    quantisation = repository.quantisation
    matches = [model for model in models if quantisation is None or model.quantisation.lower() == quantisation.lower()]
    if not matches:
        raise Refusal(f"{subject} no quantisation {quantisation}: use one of {_quantisations_text(models)}")
    if len(matches) > 1:
        remedy = f"set quantisation to one of {_quantisations_text(models)}"
        if quantisation is not None or not all(model.quantisation for model in models):
            remedy = f"set files to one of {_names_text(model.files[0].name for model in matches)}"
        raise Refusal(f"{subject} {len(matches)} models{f' of {quantisation}' if quantisation else ''}: {remedy}")
    return _choose_by_name(listing, source, split_files.part_names(matches[0].files[0].name))


def _quantisations_text(models: Sequence[RepositoryModel]) -> str:
    return _names_text(
        model.quantisation or model.files[0].name for model in sorted(models, key=lambda model: model.bytes)
    )


def _choose_by_name(listing: Listing, source: types.ModelSource, names: Sequence[str]) -> tuple[ModelFilePlan, ...]:
    files = {file.name: file for file in listing.files}
    missing_names = [name for name in names if name not in files]
    if len(missing_names) == len(names) or (missing_names and not split_files.PART_PATTERN.fullmatch(names[0])):
        model_names = [name for name in files if name.lower().endswith(".gguf")]
        raise Refusal(f"{_subject(source)} has no {missing_names[0]}: use one of {_names_text(model_names or files)}")
    if missing_names:
        raise Refusal(
            f"{_subject(source)} lacks {len(missing_names)} of this model's parts, for example {missing_names[0]}: use another quantisation or revision"
        )
    return _check_files(source, [files[name] for name in names])


def _check_files(source: types.ModelSource, files: Sequence[ModelFilePlan]) -> tuple[ModelFilePlan, ...]:
    unusable_name = next(
        (file.name for file in files if file.bytes is None or download_record.problem_of_name(file.name)), None
    )
    if unusable_name:
        raise Refusal(
            f"{_subject(source)} has {validation.quote(unusable_name)}, whose size is unknown or whose name is not allowed: use another file"
        )
    return tuple(files)


def url_of(repository: types.HuggingFace, commit: str, name: str) -> str:
    return f"{endpoint()}/{repository.repo}/resolve/{quote(commit, safe='')}/{quote(name)}"
