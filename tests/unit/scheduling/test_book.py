"""Tests of the book of reservations: what counts, and when it ends."""

from hypothesis import given
from hypothesis import strategies as st

from dljob.scheduling import Reservation, ReservationBook
from dljob.scheduling.book import PATIENCE_S

A, B = ("team-a", "a"), ("team-b", "b")


def on(nodes: int) -> tuple[Reservation, ...]:
    return (Reservation("gpu", nodes, 1, 1.0, 2**30),)


def test_own_reservation_does_not_count_for_a_job() -> None:
    book = ReservationBook()
    book.accept(A, on(1), 0.0)
    book.derive(B, "state", on(2), 0.0)
    assert book.current() == (*on(1), *on(2)) and book.current(without=A) == on(2) and book.current(without=B) == on(1)


def test_accepted_plan_replaces_the_stored_one_until_it_is_stored() -> None:
    book = ReservationBook()
    book.derive(A, "old", on(1), 0.0)
    book.accept(A, on(3), 0.0)
    assert book.current() == on(3) and book.accepted(A)
    book.derive(A, "new", on(2), 1.0)
    book.release(A)
    assert book.current() == on(2) and not book.accepted(A) and book.holds(A)
    book.drop(A)
    assert book.current() == () and not book.holds(A)


def test_reservation_ends_without_progress() -> None:
    book = ReservationBook()
    book.derive(A, "none placed", on(2), 0.0)
    book.derive(A, "one placed", on(1), PATIENCE_S - 1)
    book.expire(PATIENCE_S + 1)
    assert book.current() == on(1), "a pod was placed"
    book.expire(2 * PATIENCE_S)
    assert book.current() == () and not book.holds(A)
    book.derive(A, "one placed", on(1), 2 * PATIENCE_S)
    assert book.current() == (), "nothing has changed since"
    book.derive(A, "none placed", on(2), 3 * PATIENCE_S)
    assert book.current() == on(2), "the pod is gone, and its successor gets its device back"


def test_plan_that_is_never_stored_ends() -> None:
    book = ReservationBook()
    book.accept(A, on(1), 0.0)
    book.expire(PATIENCE_S)
    assert book.current() == () and not book.accepted(A)


def test_renewed_reservation_of_an_unstored_plan_does_not_end() -> None:
    """Fixed bug: it ended after 60 s, although the pods of the plan before still wrote their checkpoint."""
    book = ReservationBook()
    book.accept(A, on(1), 0.0)
    assert book.ageing(PATIENCE_S / 2 - 1) == [] and book.ageing(PATIENCE_S / 2) == [A]
    book.renew(A, PATIENCE_S / 2)
    book.expire(PATIENCE_S)
    assert book.accepted(A) and book.ageing(PATIENCE_S) == [A]
    book.expire(1.5 * PATIENCE_S)
    book.renew(A, 1.5 * PATIENCE_S)
    assert book.current() == () and book.ageing(2 * PATIENCE_S) == [], "a reservation that has ended does not return"
    book.renew(B, 0.0)
    assert not book.holds(B)


steps = st.tuples(
    st.sampled_from(["accept", "release", "derive", "drop", "expire"]), st.sampled_from([A, B]), st.integers(0, 3)
)


@given(st.lists(steps, max_size=30))
def test_version_changes_with_the_reservations(history: list[tuple[str, tuple[str, str], int]]) -> None:
    book, now_s = ReservationBook(), 0.0
    for what, key, number in history:
        before, version = book.current(), book.version
        now_s += 20.0
        match what:
            case "accept":
                book.accept(key, on(number) if number else (), now_s)
            case "derive":
                book.derive(key, number, on(number) if number else (), now_s)
            case "expire":
                book.expire(now_s)
            case "release":
                book.release(key)
            case "drop":
                book.drop(key)
        assert book.version > version or book.current() == before


def test_plan_that_replaces_another_needs_more_as_the_old_pods_stop() -> None:
    book = ReservationBook()
    book.accept(A, (), 0.0)
    book.adjust(A, on(2), 10.0)
    assert book.current() == on(2) and book.accepted(A)
    book.expire(PATIENCE_S + 5)
    book.adjust(A, on(3), PATIENCE_S + 5)
    assert book.current() == on(3)
    version = book.version
    book.adjust(A, on(3), PATIENCE_S + 6)
    assert book.version == version
    book.expire(2 * PATIENCE_S + 5)
    book.adjust(A, on(2), 2 * PATIENCE_S + 6)
    assert book.current() == (), "a reservation that has ended does not return"
