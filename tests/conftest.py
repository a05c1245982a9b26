"""Shared by all tests: the repository's root, and failing instead of skipped tests in hack/test."""

import fcntl
import gc
import os
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Property tests draw the same examples in every run: all of them in hack/test full and in a stage that is named, the
# first sixth in hack/test. hack/test explore draws more and new ones. A counterexample is printed as "Falsifying
# example". Pin it with @example and fix the code.
EXPLORE = os.environ.get("DLJOB_HYPOTHESIS") == "explore"
FACTOR = {"explore": 10.0, "sixth": 1 / 6}.get(os.environ.get("DLJOB_HYPOTHESIS", ""), 1.0)
_SLOW = (HealthCheck.too_slow,)  # depends on the machine's load, not on the code
settings.register_profile("pinned", derandomize=True, deadline=None, database=None, suppress_health_check=_SLOW)
settings.register_profile("explore", deadline=None, database=None, print_blob=True, suppress_health_check=_SLOW)
settings.load_profile("explore" if EXPLORE else "pinned")

SHOWN_NCHARS = 4000
"""Number of characters of a failure that are printed at once while exploring. Counterexamples are at its end."""
ROOT = Path(__file__).resolve().parent.parent
IN_TURN = "DLJOB_COLLECT_IN_TURN"
"""Variable of the workers of pytest-xdist: if it is set, they import the tests one after another."""


@pytest.fixture(scope="session")
def root() -> Path:
    """Return the repository's root folder."""
    return ROOT


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Under hack/test, report a skipped test as failed, because missing programs must be installed."""
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and os.environ.get("DLJOB_NO_SKIP"):
        report.outcome = "failed"
        report.longrepr = f"skipped under hack/test, where nothing may be skipped: {report.longrepr}"
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """While exploring, print a failure at once: a run that is ended early must not lose its counterexamples."""
    if EXPLORE and report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        sys.stderr.write(f"\nFAILED {report.nodeid}\n{str(report.longrepr)[-SHOWN_NCHARS:]}\n")
        sys.stderr.flush()


def pytest_configure(config: pytest.Config) -> None:
    """In a new clone, let the workers of pytest-xdist import the tests one after another.

    Half of the time of the first import is spent on compiling the tests, and workers that import at once compile each
    module once for each worker. Once there is bytecode, imports at the same time are faster.
    """
    if "PYTEST_XDIST_WORKER" not in os.environ:
        compiled = [any(Path(argument.split("::")[0]).rglob("test_*.pyc")) for argument in config.args]
        os.environ[IN_TURN] = "" if all(compiled) else "1"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without looking for garbage, and let no later search look at the tests and their modules again."""
    with _turn():
        gc.disable()
        try:
            return (yield)
        finally:
            gc.collect()
            gc.freeze()
            gc.enable()


@contextmanager
def _turn() -> Generator[None]:
    """Wait until no other worker of this run is in this context, if ``IN_TURN`` is set."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    if run is None or not os.environ.get(IN_TURN):
        yield
        return
    path = Path(tempfile.gettempdir(), f"dljob-collect-{run}")
    with path.open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        yield
        path.unlink(missing_ok=True)  # Workers that wait have opened it.


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Under hack/test and hack/test explore, give each property test a sixth or ten times its number of examples."""
    changed = set()  # Items of a parametrized test share their function: a factor counts once.
    for item in items if FACTOR != 1 else ():
        function = getattr(item, "obj", None)
        function = getattr(function, "__func__", function)
        if hasattr(function, "hypothesis") and function not in changed:
            changed.add(function)
            own: settings = getattr(function, "_hypothesis_internal_use_settings", None) or settings()
            examples = max(round(own.max_examples * FACTOR), min(own.max_examples, 10))
            function._hypothesis_internal_use_settings = settings(  # type: ignore[union-attr]
                own, max_examples=examples, deadline=None
            )
