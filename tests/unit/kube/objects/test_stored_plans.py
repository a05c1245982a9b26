"""Tests of the plans that the cache returns: only those of the operator."""

from dataclasses import replace

import pytest

from dljob.job.observed import JobSeen, Observed
from dljob.job.plan.authentic import PlanKey
from dljob.job.plan.stored import PROBLEM_KEY
from dljob.kube.objects.stored_plans import StoredPlans
from dljob.kube.objects.trim import MapSeen
from support.builders import job

KEY, NEXT = PlanKey(b"k" * 32), PlanKey(b"n" * 32)
DATA = {"plan.json": '{"number": 1}', "operator.json": "{}"}
EDITED = {**DATA, "operator.json": '{"replans": 1}'}
NEW = replace(job(), status={})


def signed(plans: StoredPlans, of: JobSeen = NEW, data: dict[str, str] = DATA) -> MapSeen:
    return MapSeen("digits-plan", data, None, signature=plans.signature(of, data) or "")


def with_key(key: PlanKey | None = KEY) -> StoredPlans:
    plans = StoredPlans()
    if key is not None:
        plans.use(key)
    return plans


def seen(plans: StoredPlans, found: MapSeen | None, of: JobSeen = NEW) -> Observed:
    return plans.added_to(Observed(of), found)


@pytest.mark.parametrize(
    "found", [None, MapSeen("p", None, None), MapSeen("p", {PROBLEM_KEY: "too many"}, None), MapSeen("p", EDITED, None)]
)
def test_first_status_has_a_record_whatever_is_stored(found: MapSeen | None) -> None:
    """Without a record, the job would later seem to be one of an earlier release, whose plans are not signed."""
    assert seen(with_key(), found).plan_record == "0:"


def test_edited_plan_is_replaced_by_the_one_before() -> None:
    plans = with_key()
    assert seen(plans, signed(plans)).plan == DATA
    found = seen(plans, MapSeen("p", EDITED, None, signature=signed(plans).signature))
    assert (found.plan, found.plan_edit) == (DATA, "SignatureWrong")


def test_new_job_of_the_same_name_gets_no_plan_of_the_former() -> None:
    plans = with_key()
    seen(plans, signed(plans))
    other = replace(NEW, uid="other")
    found = seen(plans, signed(plans), other)
    assert found.plan is None and found.plan_edit == "SignatureWrong"


def test_without_a_key_every_plan_counts() -> None:
    plans = with_key(None)
    found = seen(plans, MapSeen("p", EDITED, None))
    assert (found.plan, found.plan_edit, found.plan_record) == (EDITED, None, None)
    plans.use(KEY)
    assert seen(plans, MapSeen("p", EDITED, None)).plan is None, "it was not checked before"


def test_plan_is_signed_again_with_a_new_key() -> None:
    plans = with_key()
    found = signed(plans)
    assert plans.stands(NEW, found, DATA)
    plans.use(NEXT)
    assert seen(plans, found).plan == DATA, "the former key counts while the operator runs"
    assert not plans.stands(NEW, found, DATA) and plans.stands(NEW, signed(plans), DATA)


def test_plan_of_an_unknown_key_counts_once_the_key_is_known() -> None:
    """Another replica signs with a key that an administrator has replaced."""
    plans, other = with_key(), with_key(NEXT)
    found = signed(other)
    assert seen(plans, found).plan_edit == "SignatureWrong" and plans.lacks_key_of(NEW.key)
    plans.use(NEXT)
    assert seen(plans, found).plan == DATA and not plans.lacks_key_of(NEW.key)


@pytest.mark.parametrize("signature", ["", "text", "v1", "v2:abcdefgh:1:0"])
def test_other_texts_name_no_unknown_key(signature: str) -> None:
    plans = with_key()
    seen(plans, MapSeen("p", DATA, None, signature=signature))
    assert not plans.lacks_key_of(NEW.key)


def test_plan_that_another_leader_has_replaced_does_not_come_back_by_an_edit() -> None:
    """Fixed bug: a former leader restored the plan that it knew, with a new signature."""
    former, later = with_key(), with_key()
    first = signed(former)
    record = seen(former, first).plan_record
    newer = {**DATA, "plan.json": '{"number": 2}'}
    of = replace(NEW, status={"planRecord": record})
    seen(later, first, of)
    record = seen(later, signed(later, of, newer), of).plan_record
    of = replace(NEW, status={"planRecord": record})
    found = seen(former, MapSeen("p", EDITED, None, signature=first.signature), of)
    assert found.plan is None and found.plan_edit == "SignatureWrong"
    found = seen(later, MapSeen("p", EDITED, None, signature=first.signature), of)
    assert found.plan == newer
