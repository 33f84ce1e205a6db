"""Decisions about a run, from the JSON of a plan."""

from ansible_collections.llamacpp.cluster.plugins.module_utils.lifecycle import changes
from conftest import typed

from support.drift import typed_drifts


def decide(plan, drifts):
    return changes.decide(typed(plan), typed_drifts(drifts))


def missing_tools(plan, *arguments):
    return changes.missing_tools(typed(plan), *arguments)
