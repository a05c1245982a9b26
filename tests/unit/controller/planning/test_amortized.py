"""Tests of values over all jobs that are computed again only if that takes little of the time."""

from dljob.controller.planning.amortized import FACTOR, Amortized


class Clock:
    def __init__(self, cost_s: float) -> None:
        self.now_s, self.cost_s, self.made = 0.0, cost_s, 0

    def __call__(self) -> float:
        return self.now_s

    def make(self) -> int:
        self.now_s += self.cost_s
        self.made += 1
        return self.made


def test_a_cheap_value_is_always_up_to_date() -> None:
    clock = Clock(0.0)
    value = Amortized(clock.make, clock)
    assert [value.of(state) for state in (1, 1, 2, 3)] == [1, 1, 2, 3]


def test_an_expensive_value_takes_a_small_part_of_the_time() -> None:
    clock = Clock(0.5)
    value = Amortized(clock.make, clock)
    for state in range(2000):
        value.of(state)
        clock.now_s += 0.1
    assert 0.5 * clock.made <= clock.now_s / FACTOR
    assert clock.made > 10, "but it is not forgotten"
    value.forget()
    before = clock.made
    value.of(0)
    assert clock.made == before + 1
