"""Words that the programs of each fork take."""

import functools
from pathlib import Path

import yaml
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.words import MAINLINE

WORDS = yaml.safe_load((Path(__file__).parents[1] / "fixtures" / "options.yml").read_text())


@functools.cache
def help_of(program, fork=MAINLINE):
    """What its help would list."""
    return {
        word: valued
        for group in WORDS[program]
        if fork in group["forks"]
        for valued, words in ((True, group.get("with_value", "")), (False, group.get("without", "")))
        for word in words.split()
    }
