"""A plugin of pytest (`-p support.at_once`) that prints each failure when it happens.

pytest prints failures at the end, so a run that is stopped before its end would lose them.
"""

import sys

import pytest


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        text = f"\n==== {report.nodeid} failed\n{report.longreprtext[-4000:]}\n"
        print(text, file=sys.__stdout__, flush=True)
