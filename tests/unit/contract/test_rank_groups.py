"""Laws of the short form of a plan's ranks: it means the same, and only plans that need it have it."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from dlcontract import DatasetRef, ModelRef, Plan, Rank, Role
from dlcontract.plan import plan
from dlcontract.plan.rank_groups import RANK_GROUPS, expanded, grouped


def ranks(groups: list[tuple[str, bool, list[list[int]]]], domain: str = "svc.n.svc.cluster.local") -> tuple[Rank, ...]:
    """Return the ranks of groups, each with a device, True if it is a GPU, and the shares of each pod."""
    found: list[Rank] = []
    for number, (device, gpu, pods) in enumerate(groups):
        for index, shares in enumerate(pods):
            pod = f"job-g{number}-{index}"
            found += [
                Rank(
                    rank=len(found) + i, pod=pod, host=f"{pod}.{domain}", group=f"g{number}", device=device, gpu=gpu,
                    local_rank=i, share=share, role=Role.WORKER if share else Role.SERVER,
                )
                for i, share in enumerate(shares)
            ]  # fmt: skip
    return tuple(found)


def as_json(found: tuple[Rank, ...]) -> list[dict[str, Any]]:
    return [rank.model_dump(mode="json") for rank in found]


def plan_with(found: tuple[Rank, ...]) -> Plan:
    return Plan(
        job="job", namespace="n", uid="u", number=1, ranks=found, global_batch=sum(rank.share for rank in found),
        model=ModelRef(name="mlp"), dataset=DatasetRef(name="digits"), steps=1,
    )  # fmt: skip


@st.composite
def regular(draw: st.DrawFn) -> tuple[Rank, ...]:
    groups = []
    for _ in range(draw(st.integers(1, 3))):
        each = draw(st.integers(1, 4))
        pods = draw(st.lists(st.lists(st.integers(0, 3), min_size=each, max_size=each), min_size=1, max_size=4))
        groups.append((draw(st.sampled_from(["cpu", "gpu-a", "gpu-b"])), draw(st.booleans()), pods))
    return ranks(groups)


@settings(max_examples=100, deadline=None)
@given(regular())
def test_short_form_means_the_same(found: tuple[Rank, ...]) -> None:
    short = grouped(as_json(found))
    assert short is not None
    assert expanded(json.loads(json.dumps(short))) == as_json(found)


@pytest.mark.parametrize(
    "changes",
    [{"host": "elsewhere"}, {"local_rank": 3}, {"role": "server"}, {"pod": "job-g0-9"}],
    ids=lambda changes: next(iter(changes)),
)
def test_other_ranks_have_no_short_form(changes: dict[str, Any]) -> None:
    rows = as_json(ranks([("cpu", False, [[1, 2], [3, 4]])]))
    assert grouped([rows[0], rows[1] | changes, *rows[2:]]) is None


def test_large_plan_has_the_short_form_and_the_digest_of_the_full_one(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = plan_with(ranks([("cpu", False, [[2, 2]] * 8), ("gpu-a", True, [[5]] * 3)]))
    full, digest = whole.to_json(), whole.digest()
    assert RANK_GROUPS not in json.loads(full), "agents of earlier releases read it"
    monkeypatch.setattr(plan, "MAX_FULL_NBYTES", 500)
    short = json.loads(whole.to_json())
    assert "ranks" not in short and len(whole.to_json()) < len(full) / 3
    assert Plan.parse(whole.to_json()) == whole and whole.digest() == digest
    assert Plan.parse(whole.to_json(), ignore_unknown=True) == whole


@pytest.mark.parametrize(
    "groups",
    [
        [{"group": "g", "device": "cpu", "gpu": False, "pods": ["a", "b"], "shares": [[1, 3]]}],
        [{"group": "g", "device": "cpu", "gpu": False, "pods": [], "shares": []}],
        [{"group": "g", "pods": ["a"], "shares": [[1, 1]]}],
        [{"group": "g", "device": "cpu", "gpu": False, "pods": ["a"], "shares": [[1, "many"]]}],
        "none",
        None,
    ],
)
def test_invalid_short_form_is_rejected(groups: Any) -> None:
    document = json.loads(plan_with(ranks([("cpu", False, [[1]])])).to_json())
    del document["ranks"]
    with pytest.raises(ValidationError):
        Plan.parse(json.dumps(document | {"rank_groups": groups, "rank_domain": "d"}))


@pytest.mark.parametrize("entries", [[[[1, 20_000]]], [[[1, 9_000]], [[1, 9_000]]], [[[1, 9_000], [2, 9_000]]]])
def test_short_form_of_too_many_ranks_is_rejected_before_it_is_expanded(entries: list[list[list[int]]]) -> None:
    """Fixed bug: 400 bytes with a million ranks took 1.5 GiB and 26 s of the operator."""
    groups = [{"group": "g", "device": "cpu", "gpu": False, "pods": ["a"], "shares": shares} for shares in entries]
    with pytest.raises(ValueError, match="expected at most 16384"):
        expanded({"rank_groups": groups, "rank_domain": "d"})
