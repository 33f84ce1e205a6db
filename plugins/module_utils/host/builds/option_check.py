# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Compares the command lines of planned services with the help of the installed programs, before any service stops."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import capabilities, options
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.words import IK_LLAMA
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import ServicePlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import ReleasePlan

WITH_TLS, WITHOUT_TLS = b"unning with SSL", b"built without SSL support"
"""What llama-server has to say where it can do TLS, and where it cannot. Its help does not tell."""


def check(
    programs: Path,
    listed: Mapping[str, Mapping[str, bool]],
    services: Iterable[ServicePlan],
    release: ReleasePlan,
    host: str,
) -> list[str]:
    """A sentence for each planned option that a program does not know, or cannot do.

    :param programs: folder of the installed programs.
    :param listed: program → the options of its help. One that lists nothing is not compared with.
    :param host: its name in messages.
    """
    fork = release.fork
    sentences = []
    started = [argv for service in services for argv in (service.process, *(service.children or ()))]
    for argv in [argv for argv in started if Path(argv[0]).parent == programs]:
        name = Path(argv[0]).name
        program = options.SERVER if name == options.SERVER else options.WORKER
        known = listed[name]
        for word in capabilities.unknown_options(program, argv[1:], known, fork) if known else ():
            option = options.owned(program, word)
            if option or fork in options.LISTS_ALL:
                sentences.append(f"{name} of {programs.parent.name} on {host} does not know {word}, {_remedy(option)}")
        if "--ssl-cert-file" in argv and _lacks_tls(programs, fork):
            sentences.append(
                f"{name} of {programs.parent.name} on {host} was built without TLS, which llama_server_tls_certificate_file needs: serve without TLS, "
                f"have it compiled with source: git, or, where it was, install OpenSSL's development files (3.0 or newer) and remove {programs.parent}"
            )
    return list(dict.fromkeys(sentences))


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
