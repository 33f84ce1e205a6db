# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Counters of llama-server since its start, from its /metrics; of several models, those of the one that is loaded."""

from collections.abc import Sequence
from typing import Annotated, NamedTuple, Optional

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import Number
from ansible_collections.llamacpp.cluster.plugins.module_utils.launcher import metrics, server
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import HeadPlan, ServedModel
from ansible_collections.llamacpp.cluster.plugins.module_utils.verify.types import ModelStatus

OPTION = "--metrics"
Count = Annotated[float, Number(real=True)]


class Counters(NamedTuple):
    """A request counts when it ends."""

    prompt_tokens: Count
    prompt_s: Count
    generated_tokens: Count
    generation_s: Count


NAMES = tuple(metrics.OF_SERVER)[: len(Counters._fields)]


def counters(text: str) -> Optional[Counters]:
    """From the text of /metrics; None where one of them is missing."""
    found = server.counts_of(text)
    return Counters(*(found[name] for name in NAMES)) if set(NAMES) <= set(found) else None


def loaded(head: HeadPlan, found: Sequence[ModelStatus]) -> Optional[ServedModel]:
    """The one of several models that is loaded, which a question for its counters neither loads nor wakes."""
    names = {model.name for model in found if model.state == "loaded"}
    return next((model for model in head.models or () if model.name in names), None)
