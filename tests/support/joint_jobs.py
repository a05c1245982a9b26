"""Random jobs and free devices for the properties of joint assignments, as strategies of Hypothesis."""

from collections.abc import Sequence

from hypothesis import strategies as st

from dljob.scheduling.assignment import Candidate, Option

OPTIONS = st.builds(
    Option, st.sampled_from(["a100", "t4"]), st.integers(1, 3), st.sampled_from([1, 2, 4]), st.floats(1.0, 1e5)
)
JOBS = st.lists(st.lists(OPTIONS, max_size=4).map(tuple), max_size=7)
FREE = st.fixed_dictionaries({"a100": st.integers(0, 8), "t4": st.integers(0, 12)})


def equal(jobs: Sequence[tuple[Option, ...]]) -> list[Candidate]:
    """Return the jobs with these options, all of the lowest priority and without deadlines."""
    return [Candidate(0, options) for options in jobs]
