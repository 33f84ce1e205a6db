# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""llama-server as the router of several models: its command line, and the presets file with each model's options."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import options
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import Plan, ReleasePlan, ServedModel
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import turns

ROUTER_OPTIONS = ("host", "port", "api-key-file", "tls-certificate", "tls-key", "ui")
"""Options that the router gets instead of its children. Options on its command line override presets."""
CLIENT_OPTION_PATTERN = re.compile(r"(no-)?(cors-.*|path|reuse-port|threads-http|timeout|to|(web)?ui(-.*)?)")
"""Options about clients that the plan does not decide. They belong to the router, because clients never reach a model's server."""
VALUE_END_PATTERN = re.compile(r"[;#\r\n]")
PRESET_KEY_PATTERN = r"[A-Za-z_][A-Za-z0-9_.-]*"


def check_router(release: ReleasePlan) -> None:
    """:raises Refusal: the release has no router."""
    if not release.mainline:
        raise Refusal(
            f"{turns.VARIABLE} needs llama.cpp's own router, but llama_release is {release.ref}: use an upstream build of llama.cpp, or serve one model"
        )


def _is_router_option(word: str) -> bool:
    option = options.by_word(word)
    return option is not None and option.name in ROUTER_OPTIONS


def router_argv(plan: Plan, path: str) -> tuple[str, ...]:
    """Return the router's command line.

    :param path: path of the presets file.
    """
    program, *words = plan.head.argv
    router_words = [word for group in options.group_words(words) if _is_router_option(group[0]) for word in group]
    return (
        program,
        *options.render_option("models-preset", path),
        *options.render_option("models-max", "1"),
        *router_words,
        *options.render_option("log-verbosity", "4"),
    )


def model_argv(argv: Sequence[str]) -> tuple[str, ...]:
    """Return a model's command line without the router's options."""
    program, *words = argv
    groups = [group for group in options.group_words(words) if not _is_router_option(group[0])]
    return (program, *(word for group in groups for word in group))


def presets_text(models: Sequence[ServedModel]) -> str:
    """Return the text of the presets file.

    :raises Refusal: it cannot express a model's command line.
    """
    return "\n".join("\n".join([*_section_lines(model), ""]) for model in models)


def _section_lines(model: ServedModel) -> Iterator[str]:
    preset = {"alias": ",".join(model.aliases)} if model.aliases else {}
    words_by_option: dict[str, str] = {}
    for word, *values in options.group_words(model.argv[1:]):
        key, value = word.lstrip("-").replace("_", "-"), values[0] if values else "true"
        option = options.identifier_of(word)
        repetition_problem = f"a second time, after {words_by_option[option]}" if option in words_by_option else ""
        count_problem = "with several values" if len(values) > 1 else ""
        form_problem = "" if re.fullmatch(PRESET_KEY_PATTERN, key) else "as one word"
        content_problem = "with ; or #" if VALUE_END_PATTERN.search(value) or value != value.strip() else ""
        if CLIENT_OPTION_PATTERN.fullmatch(key):
            raise Refusal(
                turns.entry_sentence(
                    model.name,
                    f"llama-server gets {word}, but clients connect to the router: remove {word}, and set its environment variable in llama_server_environment",
                )
            )
        if problem := repetition_problem or count_problem or form_problem or content_problem:
            text = " ".join([word, *values])
            raise Refusal(
                turns.entry_sentence(
                    model.name,
                    f"llama-server gets {text!r} {problem}, which a preset cannot express: change this argument",
                )
            )
        preset[key], words_by_option[option] = value, word
    yield f"[{model.name}]"
    yield from (f"{key} = {value}" for key, value in preset.items())
