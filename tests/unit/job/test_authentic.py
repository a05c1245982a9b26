"""Tests of the signatures of stored plans, and of the record that identifies a plan in the status."""

from dataclasses import replace

import pytest

from dljob.job.observed import JobSeen
from dljob.job.plan.authentic import Edit, PlanKey, Record, digest, edit, record_of, serial_of, sign
from support.builders import job

KEY, OTHER = PlanKey(b"k" * 32), PlanKey(b"o" * 32)
KEYS = {KEY.id: KEY}
DATA = {"plan.json": '{"number": 1}', "operator.json": "{}"}
CONDITIONS = [{"type": "Accepted", "status": "True"}]


def recorded(serial: int, of: JobSeen, data: dict[str, str]) -> JobSeen:
    return replace(of, status={"conditions": CONDITIONS, "planRecord": str(Record(serial, digest(of, data)))})


@pytest.mark.parametrize("field", ["namespace", "name", "uid"])
def test_signature_is_bound_to_the_job(field: str) -> None:
    mine, theirs = job(), replace(job(), **{field: "other"})
    signature = sign(mine, DATA, 1, KEY)
    assert serial_of(mine, DATA, signature, KEYS) == 1
    assert serial_of(theirs, DATA, signature, KEYS) is None
    assert digest(mine, DATA) != digest(theirs, DATA)


@pytest.mark.parametrize("key", ["plan.json", "operator.json", "failures.json"])
def test_signature_is_of_the_data(key: str) -> None:
    signature = sign(job(), DATA, 1, KEY)
    assert edit(job(), {**DATA, key: '{"a": 1}'}, signature, KEYS) is Edit.WRONG


def test_keys_that_the_operator_does_not_read_are_not_signed() -> None:
    assert edit(job(), {**DATA, "note": "x"}, sign(job(), DATA, 1, KEY), KEYS) is None


@pytest.mark.parametrize(
    "signature",
    ["v1", "v1:::", "v2:{id}:1:{mac}", "v1:{id}:2:{mac}", "v1:{id}:1:", "v1:{id}:+1:{mac}", "v1:{id}:1:{mac}é",
     "v1:{id}:" + "9" * 5000 + ":{mac}"],
)  # fmt: skip
def test_malformed_signature_is_wrong(signature: str) -> None:
    _, key_id, _, mac = sign(job(), DATA, 1, KEY).split(":")
    assert edit(job(), DATA, signature.format(id=key_id, mac=mac), KEYS) is Edit.WRONG


def test_signature_of_another_key_is_wrong() -> None:
    assert edit(job(), DATA, sign(job(), DATA, 1, OTHER), KEYS) is Edit.WRONG
    assert OTHER.secret.hex() not in repr(OTHER) and "ooo" not in repr(OTHER)


def test_recorded_plan_needs_no_signature() -> None:
    """The key may have been replaced."""
    known = recorded(3, job(), DATA)
    assert edit(known, DATA, sign(job(), DATA, 3, OTHER), KEYS) is None
    assert edit(known, DATA, "", KEYS) is None


@pytest.mark.parametrize(("serial", "found"), [(2, Edit.OUTDATED), (3, Edit.OUTDATED), (4, None)])
def test_plan_is_newer_than_the_record(serial: int, found: Edit | None) -> None:
    known = recorded(3, job(), {**DATA, "plan.json": '{"number": 2}'})
    assert edit(known, DATA, sign(job(), DATA, serial, KEY), KEYS) is found


def test_plan_without_a_signature_counts_only_under_a_status_of_an_earlier_release() -> None:
    new = replace(job(), status={})
    earlier = replace(job(), status={"conditions": CONDITIONS})
    signing = replace(job(), status={"conditions": CONDITIONS, "planRecord": "0:"})
    assert edit(earlier, DATA, "", KEYS) is None
    assert edit(new, DATA, "", KEYS) is Edit.MISSING
    assert edit(signing, DATA, "", KEYS) is Edit.MISSING


@pytest.mark.parametrize("text", [None, 3, "", ":", "x:y", "-1:y", "9" * 5000 + ":y"])
def test_record_that_does_not_parse_is_none(text: object) -> None:
    assert record_of(replace(job(), status={"planRecord": text})) is None
