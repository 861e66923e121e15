"""Fixtures that tests of many scripts share, and the list of what was skipped."""

import gc
import re
import sys
from collections import Counter

import cleanmarl.envs

import optional
import pytest
import torch
import toys


@pytest.fixture(autouse=True)
def same_weights_each_time():
    """Networks and samples drawn in a test are those of its last run: what passed once does not fail by chance."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def imports_stay_frozen():
    """Out of the garbage collector, where each run puts them: to search them takes longer than a small run trains."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "unfreeze", lambda: None)
        yield


@pytest.fixture
def toy(monkeypatch):
    """Makes toys.Toy an environment family like any other: `toy/each`, which is returned, and `toy/team`."""
    monkeypatch.setitem(cleanmarl.envs.FAMILIES, "toy", "three agents of known rules")
    monkeypatch.setitem(sys.modules, "cleanmarl.envs.toy", toys)
    return "toy/each"


@pytest.fixture
def team(toy):
    """The same; returns `toy/team`."""
    return "toy/team"


def pytest_addoption(parser):
    parser.addoption("--may-skip", metavar="PATTERN", help="fail if a test is skipped for a reason without PATTERN")


def why(report) -> str:
    """Why a test was skipped; for a module that could not be imported, the line that installs it."""
    reason = report.longrepr[2].removeprefix("Skipped: ")
    missing = re.search(r"could not import '(\w+)", reason)
    return optional.reason(missing[1]) if missing else reason


def skipped(config) -> Counter:
    """reason -> number of tests; empty in a worker of pytest-xdist, whose reports go to the one that started it."""
    reporter = config.pluginmanager.getplugin("terminalreporter")
    return Counter(map(why, reporter.stats.get("skipped", []))) if reporter else Counter()


def pytest_sessionfinish(session, exitstatus):
    allowed = session.config.getoption("--may-skip")
    if exitstatus == 0 and allowed and any(not re.search(allowed, reason) for reason in skipped(session.config)):
        session.exitstatus = 1


def pytest_terminal_summary(terminalreporter, config):
    """At the end: how many tests were skipped, and for each reason the line that would enable them."""
    if reasons := skipped(config):
        terminalreporter.section(f"{reasons.total()} skipped")
        for reason, number in sorted(reasons.items()):
            terminalreporter.write_line(f"{number:4} {reason}")
