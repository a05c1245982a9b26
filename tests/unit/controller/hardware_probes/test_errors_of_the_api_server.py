"""The operator's hardware probes while the API server refuses requests, or does not answer them."""

import copy
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest

from dljob.kube import ApiError
from dljob.kube.kinds import POD, Kind
from dljob.reconcile.probes import MAX_STARTS, RETRY_S
from dljob.render.helpers.probe import DEVICE_ANNOTATION
from support.controller.probing_operator import MEASURE, Operator


def failed_look(operator: Operator) -> bool:
    """Look once. Return True if the look raised an error of the API server."""
    try:
        operator.look()
    except ApiError:
        return True
    return False


def paces(operator: Operator, seconds: int) -> list[int]:
    """Look each second, and return the seconds between the looks that raised an error."""
    failed = []
    for second in range(seconds):
        if failed_look(operator):
            failed.append(second)
        operator.now += timedelta(seconds=1)
    return [after - before for before, after in pairwise(failed)]


def test_errors_of_the_api_server_use_up_no_tries() -> None:
    """Fixed bug: after three outages, the operator measured nothing before it was restarted."""
    operator = Operator("n0")
    operator.api.uncreated["Pod"] = ApiError(503, "ServiceUnavailable", "no leader")
    assert paces(operator, 400) == [10, 20, 40, 80, 160]
    operator.api.uncreated.clear()
    operator.now += timedelta(seconds=320)
    assert len(operator.look()) == 1
    for tries in range(1, MAX_STARTS + 1):
        operator.end("ModuleNotFoundError", "Failed")
        operator.look()
        assert operator.count("failed") == tries
        operator.now += timedelta(seconds=RETRY_S)
        assert len(operator.look()) == (tries < MAX_STARTS)


def test_a_pod_whose_creation_got_no_answer_uses_up_a_try(monkeypatch: pytest.MonkeyPatch) -> None:
    operator = Operator("n0")
    create = operator.api.create

    async def unanswered(kind: Kind, body: dict[str, Any]) -> dict[str, Any]:
        created = await create(kind, body)
        if kind is POD:
            raise ApiError(0, "TimeoutError", "")
        return created

    monkeypatch.setattr(operator.api, "create", unanswered)
    for tries in range(1, MAX_STARTS + 1):
        assert failed_look(operator)
        assert len(operator.look()) == 1, "no second pod"
        operator.end("ModuleNotFoundError", "Failed")
        assert operator.look() == [] and operator.count("failed") == tries
        operator.now += timedelta(seconds=RETRY_S)
    assert operator.look() == []


def test_a_profile_that_is_refused_is_stored_later_with_pauses() -> None:
    """Fixed bug: the request was sent each second, and other probes waited for it."""
    operator = Operator("n0")
    operator.look()
    operator.end(MEASURE.to_json())
    operator.api.refused.add("DLProfile")
    assert paces(operator, 200) == [10, 20, 40, 80]
    operator.api.refused.clear()
    operator.now += timedelta(seconds=160)
    assert operator.look() == [] and len(operator.profiles) == 1


def test_an_error_of_one_probe_does_not_delay_the_end_of_another() -> None:
    operator = Operator("n0")
    operator.look()
    operator.end(MEASURE.to_json())
    operator.api.refused.add("DLProfile")
    late = copy.deepcopy(next(body for (plural, _, _), body in operator.api.objects.items() if plural == POD.plural))
    late["metadata"] |= {"name": "late", "annotations": {**late["metadata"]["annotations"], DEVICE_ANNOTATION: "other"}}
    late["status"] = {"phase": "Failed"}
    operator.api.objects[POD.plural, "dljob-system", "late"] = late
    assert failed_look(operator)
    assert (POD.plural, "dljob-system", "late") not in operator.api.objects
