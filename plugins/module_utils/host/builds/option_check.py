# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Compares the command lines of planned services with the help of the installed programs, before any service stops."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.host.builds.manifest import Manifest
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import capabilities, options
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.words import MAINLINE
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import ServicePlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import ReleasePlan


class OptionCheck(NamedTuple):
    """Sentences about planned options."""

    errors: list[str]
    """Options that a program does not accept."""
    warnings: list[str]
    """What could not be compared, or where a help does not list all."""


def check(
    programs: Path, manifest: Manifest, services: Iterable[ServicePlan], release: ReleasePlan, host: str
) -> OptionCheck:
    """:param programs: folder of the installed programs.
    :param host: its name in messages.
    """
    fork = release.fork or MAINLINE
    checked = OptionCheck([], [])
    started = [argv for service in services for argv in (service.process, *(service.children or ()))]
    for argv in [argv for argv in started if Path(argv[0]).parent == programs]:
        name = Path(argv[0]).name
        known = manifest.options[name]
        program = options.SERVER if name == options.SERVER else options.WORKER
        where = f"{name} of the release {manifest.id} on {host}"
        if not known.known:
            checked.warnings.append(f"{where} lists no options in its help: the planned options were not checked")
            continue
        for problem in capabilities.problems(program, argv[1:], known, fork):
            option = options.owned(program, problem.word)
            sentences = checked.errors if option or fork in options.LISTS_ALL else checked.warnings
            sentences.append(f"{where} {_sentence(problem, option)}")
    return OptionCheck(*(list(dict.fromkeys(sentences)) for sentences in checked))


def _sentence(problem: capabilities.Problem, option: options.Option | None) -> str:
    """What is wrong with an argument, which variable sets it, and what to do."""
    near = f" (the nearest option that it lists is {problem.near})" if problem.near else ""
    if option is None:
        return f"{problem.why}, which llama_server_extra_args sets{near}: remove it, or give one that its --help lists"
    remove = f"leave {option.variable} out, or " if option.optional else ""
    return (
        f"{problem.why}, which {option.variable or 'the plan'} sets{near}: {remove}set llama_release to a build that has it, "
        "or use a version of this collection that knows this build"
    )
