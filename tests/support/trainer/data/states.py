"""Random states of a script's objects, as their ``state_dict()`` returns them."""

from typing import Any

from hypothesis import strategies as st


def states(*others: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Return a strategy for states that JSON does not have: lists, tuples and dictionaries, inside each other.

    ``others``: strategies for further parts, beside numbers and strings.
    """
    return st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), *others),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.lists(inner, max_size=3).map(tuple),
            st.dictionaries(st.one_of(st.text(), st.integers()), inner, max_size=3),
        ),
    )
