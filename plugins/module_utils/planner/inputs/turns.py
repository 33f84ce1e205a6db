# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""``llama_models``: each entry is an overlay, a cluster with other values of the variables of its one model."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal

VARIABLE = "llama_models"
MODEL, SERVER = "llama_model_", "llama_server_"
SHARED_VARIABLES = {f"{MODEL}token_file"}
"""Variables of models that no entry has."""
SERVER_KEYS = ("context", "parallel", "idle_seconds", "extra_args")
"""Keys of an entry that are variables of the server."""
NAME = r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}"
"""Form of a model's name: llama-server writes everything after a colon in capitals, and a section of its presets ends at ]."""
ALIAS = r"[A-Za-z0-9][A-Za-z0-9._/:@+-]{0,127}"
PREFIX = re.compile(rf"\b(?!(?:{'|'.join(SHARED_VARIABLES)})\b)(?:{MODEL}|{SERVER}(?=(?:{'|'.join(SERVER_KEYS)})\b))")
"""How a variable begins that an entry has as a key without this."""
ALIAS_VARIABLE = f"{MODEL}alias"
"""Variable with the name of a single model."""
RESERVED_NAMES = "default"
"""Name of llama-server for the options of all models."""


class EntryVariables(NamedTuple):
    name: str
    aliases: tuple[str, ...]
    variables: Mapping[str, Any]
    """Variables of the head, as if this were its only model."""
    server_variables: tuple[str, ...]
    """Variables of the server in the entry."""


def read_entries(variables: Mapping[str, Any]) -> tuple[EntryVariables, ...]:
    """The entries of ``llama_models``; none where one model is served.

    :param variables: of the head, with their defaults.
    :raises Refusal: they cannot be served together.
    """
    entries: Sequence[Mapping[str, Any]] | None = variables[VARIABLE]
    model_variables = [name for name in variables if name.startswith(MODEL) and name not in SHARED_VARIABLES]
    conflicts = [name for name in model_variables if variables[name] not in (None, [])]
    if not entries:
        return ()
    if conflicts:
        raise Refusal(
            f"{VARIABLE} and {conflicts[0]} are both set: add an entry for each model, and set {entry_keys(conflicts[0])} in it"
        )
    if variables[f"{SERVER}fallback"]:
        raise Refusal(f"{SERVER}fallback is true, but models in {VARIABLE} have no fallbacks: remove one of the two")
    if variables[f"{SERVER}keep_conversations"]:
        raise Refusal(
            f"{SERVER}keep_conversations is true, but conversations with models in {VARIABLE} are not kept: remove one of the two variables"
        )
    _check_names(entries)
    return tuple(
        EntryVariables(
            entry["name"],
            tuple(entry.get("aliases") or ()),
            {
                **variables,
                VARIABLE: None,
                **{name: entry.get(name[len(MODEL) :]) for name in model_variables},
                ALIAS_VARIABLE: "",
                **{f"{SERVER}{key}": entry[key] for key in SERVER_KEYS if entry.get(key) is not None},
            },
            tuple(f"{SERVER}{key}" for key in SERVER_KEYS if entry.get(key) is not None),
        )
        for entry in entries
    )


def _check_names(entries: Sequence[Mapping[str, Any]]) -> None:
    all_names: set[str] = set()
    for index, entry in enumerate(entries):
        for key, form, names in (("name", NAME, [entry["name"]]), ("aliases", ALIAS, entry.get("aliases") or [])):
            for name in names:
                place = f"{VARIABLE}[{index}] has {validation.quote(name)} in {key}"
                if not re.fullmatch(form, str(name), re.ASCII) or name == RESERVED_NAMES:
                    raise Refusal(
                        f"{place}: use at most 128 letters, digits and . _ / -{' : @ +' * (key == 'aliases')}, with a letter or digit first, "
                        f"and not {RESERVED_NAMES!r}"
                    )
                if name in all_names:
                    raise Refusal(f"{place}, which is not unique: give each model its own names")
                all_names.add(name)


def report_of(reports: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the report of a model, from the reports of all; empty if nobody looked for it."""
    models = reports.get("models")
    report = models.get(name) if isinstance(models, Mapping) else None
    return report if isinstance(report, Mapping) else {}


def entry_sentence(name: str, reason: str) -> str:
    """A reason that is one entry's, in the entry's words."""
    return f"{name} in {VARIABLE}: {entry_keys(reason)}"


def entry_keys(text: str) -> str:
    """A text about variables, with the keys of an entry in place of those that it may have of its own."""
    return PREFIX.sub("", text.replace(ALIAS_VARIABLE, "name"))
