# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Counters of llama-server since its start, from its /metrics; of several models, those of the one that is loaded."""

import re
from collections.abc import Sequence
from typing import Annotated, NamedTuple, Optional

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import Number
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


NAMES = ("prompt_tokens_total", "prompt_seconds_total", "tokens_predicted_total", "tokens_predicted_seconds_total")
"""Of Counters in /metrics (tools/server/README.md of build 11063, server.cpp of ik_llama.cpp 4840)."""
VALUE = r"(?:\{[^}\n]*\})? (\d{1,15}(?:\.\d{1,9})?(?:e\+?\d{1,2})?)\r?$"


def counters(text: str) -> Optional[Counters]:
    """From the text of /metrics; None where one of them is missing."""
    found = [re.search(f"^llamacpp:{name}{VALUE}", text, re.M) for name in NAMES]
    values = [float(match.group(1)) for match in found if match]
    return Counters(*values) if len(values) == len(NAMES) else None


def loaded(head: HeadPlan, found: Sequence[ModelStatus]) -> Optional[ServedModel]:
    """The one of several models that is loaded, which a question for its counters neither loads nor wakes."""
    names = {model.name for model in found if model.state == "loaded"}
    return next((model for model in head.models or () if model.name in names), None)
