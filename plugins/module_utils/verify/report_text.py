# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The report of a verification as text for a person."""

from __future__ import annotations

from collections.abc import Sequence

from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import plan_text
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import ExternalWorkerPlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.verify import judge
from ansible_collections.llamacpp.cluster.plugins.module_utils.verify.types import Evidence, Report

MARKS = {"passed": "ok", "failed": "FAILED", "not tested": "not tested"}


def checks_table(report: Report) -> str:
    return plan_text.table(
        [[MARKS[check.status], check.name, check.subject, check.evidence] for check in report.checks]
    )


def failure(report: Report, evidence: Evidence, external_workers: Sequence[ExternalWorkerPlan]) -> str:
    """What failed, and what to do or where to look."""
    text = "Verification failed: " + " ".join(f"{check.sentence()}." for check in report.failed)
    return text if evidence.health.healthy else f"{text} {judge.advice(external_workers, evidence)}".rstrip()
