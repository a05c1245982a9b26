"""Tests of the record of events that kopf has not processed yet."""

from typing import Any

from dljob.controller.watches.unprocessed import UnprocessedEvents

Json = dict[str, Any]
LIMIT_S = 90.0


def body(name: str, version: int = 1) -> Json:
    return {"metadata": {"name": name, "namespace": "team-a", "uid": f"uid-{name}", "resourceVersion": str(version)}}


def overdue(events: UnprocessedEvents, now_s: float, most: int = 10) -> list[str]:
    return [each.name for each in events.overdue(LIMIT_S, now_s, most)]


def test_processed_event_is_never_overdue() -> None:
    events = UnprocessedEvents()
    events.received(body("a"), 0)
    events.processed(body("a"), 1)
    assert overdue(events, 1e6) == []


def test_event_is_overdue_once_if_nothing_is_processed() -> None:
    events = UnprocessedEvents()
    events.received(body("a"), 1000)
    assert overdue(events, 1000 + LIMIT_S) == []
    assert overdue(events, 1001 + LIMIT_S) == ["a"]
    assert overdue(events, 1002 + LIMIT_S) == []


def test_event_is_overdue_if_later_events_are_processed() -> None:
    events = UnprocessedEvents()
    events.received(body("hangs"), 1000)
    for second in range(1, 120):
        events.received(body(f"x{second}"), 1000 + second)
        events.processed(body(f"x{second}"), 1000 + second)
    assert overdue(events, 1001 + LIMIT_S) == ["hangs"]


def test_long_backlog_is_not_overdue_while_it_gets_shorter() -> None:
    """kopf needs minutes for its first list of tens of thousands of jobs."""
    events, names = UnprocessedEvents(), [f"x{i}" for i in range(300)]
    for name in names:
        events.received(body(name), 1000)
    for second, name in enumerate(names):
        events.processed(body(name), 1000 + second)
        assert overdue(events, 1000 + second) == []


def test_older_event_does_not_end_the_wait_for_a_newer_one() -> None:
    events = UnprocessedEvents()
    events.received(body("a", 1), 1000)
    events.received(body("a", 2), 1001)
    events.processed(body("a", 1), 1050)
    assert overdue(events, 1051 + LIMIT_S) == ["a"]


def test_most_limits_one_round_to_the_oldest() -> None:
    events = UnprocessedEvents()
    for second, name in enumerate("bac"):
        events.received(body(name), 1000 + second)
    assert overdue(events, 2000, most=2) == ["b", "a"]
    assert overdue(events, 2000) == ["c"]


def test_bookmark_is_no_event() -> None:
    events = UnprocessedEvents()
    events.received({"metadata": {"resourceVersion": "7"}}, 0)
    events.received({}, 0)
    assert overdue(events, 1e6) == []


def test_jobs_of_earlier_pages_that_are_processed_before_the_list_ends_do_not_hold_up_the_start() -> None:
    """Regression: with more jobs than fit on one page of kopf's list, an operator that was restarted never got ready."""
    events = UnprocessedEvents()
    for name in ("first", "second"):
        events.received(body(name), 0)
    events.processed(body("first"), 1)
    events.received(body("third"), 2)
    events.listed(None, ["uid-first", "uid-second", "uid-third"])
    for name in ("second", "third"):
        assert not events.first_processed.is_set()
        events.processed(body(name), 3)
    assert events.first_processed.is_set()
