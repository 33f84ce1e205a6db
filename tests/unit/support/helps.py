"""Words that programs of several generations take."""

import functools
from pathlib import Path

import yaml
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import capabilities, options

WORDS = yaml.safe_load((Path(__file__).parents[1] / "fixtures" / "options.yml").read_text())
GENERATIONS = {
    "0.3.16": (6170, options.MAINLINE),
    "0.3.20": (8643, options.MAINLINE),
    "0.3.25": (9435, options.MAINLINE),
    "0.3.35": (10458, options.MAINLINE),
    "0.3.36": (11063, options.MAINLINE),
    "ik-3775": (3775, options.IK_LLAMA),
    "ik-3933": (3933, options.IK_LLAMA),
    "ik-4840": (4840, options.IK_LLAMA),
}
"""Name of a generation → build number and fork."""


@functools.cache
def help_of(program, generation):
    """What its help would list."""
    known = {
        word: valued
        for group in WORDS[program]
        if generation in group["generations"]
        for valued, words in ((True, group.get("with_value", "")), (False, group.get("without", "")))
        for word in words.split()
    }
    removed = {word: entry["reason"] for entry in WORDS["removed"] for word in entry["words"].split()}
    return capabilities.Help(known, removed if (program, generation) == (options.SERVER, "0.3.36") else {})
