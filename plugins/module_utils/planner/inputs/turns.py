# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""``llama_models``: each entry overrides variables of the cluster for one of several models."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal

VARIABLE = "llama_models"
MODEL_PREFIX, SERVER_PREFIX = "llama_model_", "llama_server_"
SHARED_VARIABLES = {f"{MODEL_PREFIX}token_file"}
"""Variables of a model that entries cannot set, because all models share them."""
SERVER_KEYS = ("context", "parallel", "idle_seconds", "extra_args")
"""Keys of an entry that override variables ``llama_server_…``."""
NAME_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}"
"""Form of a model's name: llama-server converts everything after a colon to upper case, and the name of a section in its presets ends at ]."""
ALIAS_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._/:@+-]{0,127}"
VARIABLE_PREFIX_PATTERN = re.compile(
    rf"\b(?!(?:{'|'.join(SHARED_VARIABLES)})\b)(?:{MODEL_PREFIX}|{SERVER_PREFIX}(?=(?:{'|'.join(SERVER_KEYS)})\b))"
)
"""Prefix of a variable that is a key without it in an entry."""
ALIAS_VARIABLE = f"{MODEL_PREFIX}alias"
"""Variable with the name of a single model; in an entry, its key is ``name``."""
RESERVED_NAME = "default"
"""Name that llama-server reserves for the options of all models."""


class EntryVariables(NamedTuple):
    name: str
    aliases: tuple[str, ...]
    variables: Mapping[str, Any]
    """Variables of the head, as if it served only this model."""
    server_variables: tuple[str, ...]
    """Variables ``llama_server_…`` that the entry overrides."""


def read_entries(variables: Mapping[str, Any]) -> tuple[EntryVariables, ...]:
    """Return the entries of ``llama_models``; empty if the cluster serves a single model.

    :param variables: variables of the head, with their defaults.
    :raises Refusal: the models cannot be served together.
    """
    entries: Sequence[Mapping[str, Any]] | None = variables[VARIABLE]
    model_variables = [name for name in variables if name.startswith(MODEL_PREFIX) and name not in SHARED_VARIABLES]
    conflicts = [name for name in model_variables if variables[name] not in (None, [])]
    if not entries:
        return ()
    if conflicts:
        raise Refusal(
            f"{VARIABLE} and {conflicts[0]} are both set: remove {conflicts[0]}, and set {with_entry_keys(conflicts[0])} in the model's entry"
        )
    if variables["llama_server_fallback"]:
        raise Refusal(f"llama_server_fallback is true, but models in {VARIABLE} have no fallbacks: set it to false")
    if variables["llama_server_keep_conversations"]:
        raise Refusal(
            f"llama_server_keep_conversations is true, but conversations with models in {VARIABLE} are not kept: set it to false"
        )
    _check_names(entries)
    return tuple(
        EntryVariables(
            entry["name"],
            tuple(entry.get("aliases") or ()),
            {
                **variables,
                VARIABLE: None,
                **{name: entry.get(name[len(MODEL_PREFIX) :]) for name in model_variables},
                ALIAS_VARIABLE: "",
                **{f"{SERVER_PREFIX}{key}": entry[key] for key in SERVER_KEYS if entry.get(key) is not None},
            },
            tuple(f"{SERVER_PREFIX}{key}" for key in SERVER_KEYS if entry.get(key) is not None),
        )
        for entry in entries
    )


def _check_names(entries: Sequence[Mapping[str, Any]]) -> None:
    earlier_names: set[str] = set()
    for index, entry in enumerate(entries):
        checks = (("name", NAME_PATTERN, [entry["name"]]), ("aliases", ALIAS_PATTERN, entry.get("aliases") or []))
        for key, pattern, names in checks:
            for name in names:
                place = f"{VARIABLE}[{index}] has {validation.quote(name)} in {key}"
                if not re.fullmatch(pattern, str(name), re.ASCII) or name == RESERVED_NAME:
                    raise Refusal(
                        f"{place}: use at most 128 letters, digits and . _ / -{' : @ +' * (key == 'aliases')}, with a letter or digit first, "
                        f"and not {RESERVED_NAME!r}"
                    )
                if name in earlier_names:
                    raise Refusal(f"{place}, which is not unique: give each model its own names")
                earlier_names.add(name)


def report_of(reports: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the report about a model, from the reports about all models; empty without one."""
    models = reports.get("models")
    report = models.get(name) if isinstance(models, Mapping) else None
    return report if isinstance(report, Mapping) else {}


def entry_sentence(name: str, reason: str) -> str:
    """Return a reason as a sentence about an entry, with the keys of the entry."""
    return f"{name} in {VARIABLE}: {with_entry_keys(reason)}"


def with_entry_keys(text: str) -> str:
    """Return a text about variables, with the keys of an entry in place of the variables that it can override."""
    return VARIABLE_PREFIX_PATTERN.sub("", text.replace(ALIAS_VARIABLE, "name"))
