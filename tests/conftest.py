"""Where continuous integration runs, a skipped test is a failed one: nobody would see that a program is missing there."""

import os

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    report = yield
    if report.skipped and os.environ.get("LLAMA_TEST_NO_SKIPS"):
        report.outcome = "failed"
        report.longrepr = f"skipped, which nothing may be with LLAMA_TEST_NO_SKIPS: {report.longrepr[2]}"
    return report
