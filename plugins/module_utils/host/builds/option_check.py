# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Compares the command lines of planned services with the help of the installed programs, before any service stops."""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.files import replace_file, text_of
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import capabilities, options
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.words import IK_LLAMA, WORDS_INSTEAD
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import ServicePlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import ReleasePlan

WITH_TLS, WITHOUT_TLS = b"unning with SSL", b"built without SSL support"
"""What llama-server has to say where it can do TLS, and where it cannot. Its help does not tell."""


def check(
    programs: Path,
    options_by_program: Mapping[str, Mapping[str, bool]],
    services: Iterable[ServicePlan],
    release: ReleasePlan,
    host: str,
) -> tuple[list[str], list[str]]:
    """Sentences on planned options that a program does not know, or cannot do; and on those that the launcher says otherwise, or leaves out.

    :param programs: folder of the installed programs.
    :param options_by_program: program → the options of its help. One that lists nothing is not compared with.
    :param host: its name in messages.
    """
    fork = release.fork
    refusals, notes = [], []
    commands = [
        (argv, service.process) for service in services for argv in (service.process, *(service.children or ()))
    ]
    for argv, launched in [pair for pair in commands if Path(pair[0][0]).parent == programs]:
        name = Path(argv[0]).name
        program = options.SERVER if name == options.SERVER else options.WORKER
        known_options = options_by_program[name]
        replacements = (
            options.words_instead(known_options, fork) if argv == launched and program == options.SERVER else {}
        )
        values = {word: rest for word, *rest in options.pairs(argv)}
        for word in capabilities.unknown_options(program, argv[1:], known_options, fork) if known_options else ():
            option, replacement = options.owned(program, word), replacements.get(word)
            text = f"{name} of {programs.parent.name} on {host} does not know {word}"
            if replacement:
                notes.append(f"{text}: it is said to it as {replacement}")
            elif replacement == "" and options.may_be_left_out(word, values[word]):
                notes.append(
                    f"{text}{_similar_option(word, known_options)}: it is left out, and llama-server's default holds"
                )
            elif option or fork in options.LISTS_ALL:
                refusals.append(f"{text}{_similar_option(word, known_options)}, {_remedy(option)}")
        if "--ssl-cert-file" in argv and _lacks_tls(programs, fork):
            refusals.append(
                f"{name} of {programs.parent.name} on {host} was built without TLS, which llama_server_tls_certificate_file needs: serve without TLS, "
                f"have it compiled with source: git, or, where it was, install OpenSSL's development files (3.0 or newer) and remove {programs.parent}"
            )
    return list(dict.fromkeys(refusals)), list(dict.fromkeys(notes))


def record(release: Path, known_options: Mapping[str, bool], fork: str) -> None:
    """Leaves for the launcher what it says in place of words that a build's llama-server does not know, the same for each plan of the build.

    :param release: folder of the build.
    """
    path, text = release / WORDS_INSTEAD, json.dumps(options.words_instead(known_options, fork), sort_keys=True)
    if text_of(path) != text:
        replace_file(path, text, 0o644)


def _similar_option(word: str, known_options: Collection[str]) -> str:
    """The word of a help that looks most like it, of those that no read build has for another option."""
    new = [candidate for candidate in known_options if not options.is_known(candidate)]
    longer = [candidate for candidate in new if candidate.startswith(f"{word}-")]
    matches = longer or difflib.get_close_matches(word, new, 1, 0.7)
    return f" (its help has {matches[0]})" if matches else ""


def _lacks_tls(programs: Path, fork: str) -> bool:
    """Whether llama-server, with its library beside it, cannot do TLS. That of ik_llama.cpp would serve without it then, and not say so."""
    content = b"".join(path.read_bytes() for path in programs.glob("*server*"))
    return WITH_TLS not in content if fork == IK_LLAMA else WITHOUT_TLS in content


def _remedy(option: options.Option | None) -> str:
    """Which variable sets an option, and what to do."""
    if option is None:
        return "which llama_server_extra_args sets: remove it, or give one that its --help lists"
    return (
        f"which {option.variable or 'the plan'} sets: set llama_release to a build that has it, or use a version of this collection that "
        "knows this build"
    )
