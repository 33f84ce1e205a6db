# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Compares the command lines of planned services with the help of the installed programs, before any service stops."""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.files import replace_file, text_of
from ansible_collections.llamacpp.cluster.plugins.module_utils.launcher import serving
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import capabilities, options
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.words import IK_LLAMA
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import ServicePlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import ReleasePlan

WITH_TLS, WITHOUT_TLS = b"unning with SSL", b"built without SSL support"
"""What llama-server has to say where it can do TLS, and where it cannot. Its help does not tell."""


class Compared(NamedTuple):
    """Sentences on planned options that a program does not know, or cannot do."""

    refused: list[str]
    changed: list[str]
    """On those that the launcher says otherwise, or leaves out."""


def check(
    programs: Path,
    listed: Mapping[str, Mapping[str, bool]],
    services: Iterable[ServicePlan],
    release: ReleasePlan,
    host: str,
) -> Compared:
    """Compares each planned command line.

    :param programs: folder of the installed programs.
    :param listed: program → the options of its help. One that lists nothing is not compared with.
    :param host: its name in messages.
    """
    fork = release.fork
    sentences, changed = [], []
    started = [(argv, service.process) for service in services for argv in (service.process, *(service.children or ()))]
    for argv, launched in [pair for pair in started if Path(pair[0][0]).parent == programs]:
        name = Path(argv[0]).name
        program = options.SERVER if name == options.SERVER else options.WORKER
        known = listed[name]
        instead = words_instead(listed, fork) if argv == launched and program == options.SERVER else {}
        values = {word: rest for word, *rest in options.pairs(argv)}
        for word in capabilities.unknown_options(program, argv[1:], known, fork) if known else ():
            option, does_not_know = (
                options.owned(program, word),
                f"{name} of {programs.parent.name} on {host} does not know {word}",
            )
            if instead.get(word) or (word in instead and options.may_be_left_out(word, values[word])):
                how = (
                    f"said to it as {instead[word]}" if instead[word] else "left out, and llama-server's default holds"
                )
                changed.append(f"{does_not_know}{_nearest(word, known)}: it is {how}")
            elif option or fork in options.LISTS_ALL:
                sentences.append(f"{does_not_know}{_nearest(word, known)}, {_remedy(option)}")
        if "--ssl-cert-file" in argv and _lacks_tls(programs, fork):
            sentences.append(
                f"{name} of {programs.parent.name} on {host} was built without TLS, which llama_server_tls_certificate_file needs: serve without TLS, "
                f"have it compiled with source: git, or, where it was, install OpenSSL's development files (3.0 or newer) and remove {programs.parent}"
            )
    return Compared(list(dict.fromkeys(sentences)), list(dict.fromkeys(changed)))


def words_instead(listed: Mapping[str, Mapping[str, bool]], fork: str) -> dict[str, str]:
    """What the launcher says to this build's llama-server in place of words that it does not know."""
    known = listed.get(options.SERVER)
    return options.words_instead(known) if known and fork in options.LISTS_ALL else {}


def record(release: Path, instead: Mapping[str, str]) -> None:
    """Leaves it for the launcher. It depends on the build alone, so that each plan of it may be started.

    :param release: folder of the build.
    """
    path, text = release / serving.WORDS_INSTEAD, json.dumps(instead, sort_keys=True)
    if text_of(path) != (text if instead else ""):
        replace_file(path, text, 0o644)


def _nearest(word: str, known: Collection[str]) -> str:
    """The word of a help that looks most like it, of those that no read build has for another option."""
    new = [other for other in known if not options.is_known(other)]
    longer = [other for other in new if other.startswith(f"{word}-")]
    found = longer or difflib.get_close_matches(word, new, 1, 0.7)
    return f" (its help has {found[0]})" if found else ""


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
