# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Compares the command lines of planned services with the help of the installed programs, before any service stops."""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.files import replace_file, text_of
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import capabilities, options
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.words import IK_LLAMA, REPLACEMENTS_FILE
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import ServicePlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import ReleasePlan

TLS_MARK, NO_TLS_MARK = b"unning with SSL", b"built without SSL support"
"""Texts in llama-server's binary with and without TLS. Its help does not differ."""


def check_options(
    programs_folder: Path,
    help_by_program: Mapping[str, Mapping[str, bool]],
    services: Iterable[ServicePlan],
    release: ReleasePlan,
    host: str,
) -> tuple[list[str], list[str]]:
    """Return an error for each planned option that a program does not support, and a note on each option that the launcher replaces or omits.

    :param help_by_program: program → options in its help; a program without options is not checked.
    :param host: name for messages.
    """
    fork = release.fork
    errors, notes = [], []
    pairs = [(argv, service.process) for service in services for argv in (service.process, *(service.children or ()))]
    for argv, server_argv in [pair for pair in pairs if Path(pair[0][0]).parent == programs_folder]:
        name = Path(argv[0]).name
        program = options.SERVER if name == options.SERVER else options.WORKER
        help_options = help_by_program[name]
        replacements = (
            options.replacement_words(help_options, fork) if argv == server_argv and program == options.SERVER else {}
        )
        values = {word: option_values for word, *option_values in options.group_words(argv)}
        for word in capabilities.unknown_options(program, argv[1:], help_options, fork) if help_options else ():
            option, replacement = options.exclusive_option(program, word), replacements.get(word)
            text = f"{name} of {programs_folder.parent.name} on {host} does not know {word}"
            if replacement:
                notes.append(f"{text}: the launcher passes {replacement} instead")
            elif replacement == "" and options.may_be_omitted(word, values[word]):
                notes.append(
                    f"{text}{_option_hint(word, help_options)}: the launcher omits it, and llama-server's default applies"
                )
            elif option or fork in options.COMPLETE_HELP_FORKS:
                errors.append(f"{text}{_option_hint(word, help_options)}, {_origin_and_remedy(option)}")
        if "--ssl-cert-file" in argv and _lacks_tls(programs_folder, fork):
            errors.append(
                f"{name} of {programs_folder.parent.name} on {host} was built without TLS, which llama_server_tls_certificate_file needs: serve without TLS, "
                f"or compile with source: git. If it was compiled here, install OpenSSL's development files (3.0 or newer) and remove {programs_folder.parent}"
            )
    return list(dict.fromkeys(errors)), list(dict.fromkeys(notes))


def write_replacements(release_folder: Path, help_options: Mapping[str, bool], fork: str) -> None:
    """Write replacements for options that a release's llama-server does not know. The launcher reads the file."""
    path, text = (
        release_folder / REPLACEMENTS_FILE,
        json.dumps(options.replacement_words(help_options, fork), sort_keys=True),
    )
    if text_of(path) != text:
        replace_file(path, text, 0o644)


def _option_hint(word: str, help_options: Collection[str]) -> str:
    """Describe the most similar option in a help text, among options that the collection does not know."""
    unknown_options = [option for option in help_options if not options.is_known(option)]
    longer_options = [option for option in unknown_options if option.startswith(f"{word}-")]
    matches = longer_options or difflib.get_close_matches(word, unknown_options, 1, 0.7)
    return f" (its help has {matches[0]})" if matches else ""


def _lacks_tls(programs_folder: Path, fork: str) -> bool:
    """Return whether llama-server and its library lack TLS. ik_llama.cpp would silently serve without TLS."""
    content = b"".join(path.read_bytes() for path in programs_folder.glob("*server*"))
    return TLS_MARK not in content if fork == IK_LLAMA else NO_TLS_MARK in content


def _origin_and_remedy(option: options.Option | None) -> str:
    """Name the variable that sets an option, and what to do."""
    if option is None:
        return "which llama_server_extra_args sets: remove it, or use an option that --help lists"
    return (
        f"which {option.variable or 'the plan'} sets: set llama_release to a build that has this option, or use a version of this collection that knows "
        "this build"
    )
