"""Tests of how the operator learns which optional APIs the API server serves, in virtual time."""

import pytest

from dljob.app.optional_apis import RECHECK_S, pod_group_api, provisioning_api, until_changed
from dljob.app.settings import Settings
from dljob.kube import ApiError
from dljob.kube.kinds import Kind
from dljob.render.gang import KUBERNETES_ALPHA, KUBERNETES_BETA
from support.virtual_time import now_s, run

WANTED = Settings.of({"DLJOB_TRAINER_IMAGE": "r/t:1", "DLJOB_GANG_SCHEDULING": "kubernetes"}).pod_groups
DOWN = ApiError(503, "ServiceUnavailable", "starting")


class Server:
    """An API server that serves other API versions with each second. None: it does not answer in that second."""

    def __init__(self, *served: set[str] | None) -> None:
        self._served = served

    async def serves(self, kind: Kind) -> bool:
        now = self._served[min(int(now_s()), len(self._served) - 1)]
        if now is None:
            raise DOWN
        return kind.api_version in now


@pytest.mark.parametrize(
    ("served", "expected"),
    [
        (set[str](), None),
        ({KUBERNETES_ALPHA}, KUBERNETES_ALPHA),
        ({KUBERNETES_ALPHA, KUBERNETES_BETA}, KUBERNETES_BETA),
        ({"scheduling.volcano.sh/v1beta1"}, None),
    ],
)
def test_preferred_version_is_chosen(served: set[str], expected: str | None) -> None:
    assert run(pod_group_api(Server(served), WANTED)) == expected  # type: ignore[arg-type]


def test_operator_waits_for_an_answer() -> None:
    async def body() -> tuple[str | None, float]:
        return await pod_group_api(Server(None, None, {KUBERNETES_ALPHA}), WANTED), now_s()  # type: ignore[arg-type]

    assert run(body()) == (KUBERNETES_ALPHA, 2 * RECHECK_S)


@pytest.mark.parametrize("starting", [True, False])
def test_outage_of_discovery_is_logged_when_it_begins_and_when_it_ends(
    starting: bool, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server(*(() if starting else ({KUBERNETES_ALPHA},)), *[None] * 20, {KUBERNETES_ALPHA}, {KUBERNETES_BETA})
    caplog.set_level("INFO", "dljob")

    async def body() -> None:
        if starting:
            await pod_group_api(server, WANTED)  # type: ignore[arg-type]
        else:
            with pytest.raises(RuntimeError, match="PodGroups"):
                await until_changed(server, WANTED, KUBERNETES_ALPHA, 1.0)  # type: ignore[arg-type]

    run(body())
    lines = [each for each in caplog.records if "discovery of PodGroups" in each.getMessage()]
    assert [each.levelname for each in lines] == ["WARNING", "INFO"]
    assert str(DOWN) in lines[0].getMessage()


def test_missing_api_is_logged_with_the_remedy(caplog: pytest.LogCaptureFixture) -> None:
    run(pod_group_api(Server(set()), WANTED))  # type: ignore[arg-type]
    assert KUBERNETES_ALPHA in caplog.text and "set gangScheduling to none" in caplog.text


@pytest.mark.parametrize("later", [set[str](), {KUBERNETES_BETA}, {KUBERNETES_ALPHA, KUBERNETES_BETA}])
def test_operator_ends_when_the_api_changes(later: set[str]) -> None:
    server = Server({KUBERNETES_ALPHA}, {KUBERNETES_ALPHA}, None, later)

    async def body() -> float:
        with pytest.raises(RuntimeError, match="PodGroups"):
            await until_changed(server, WANTED, KUBERNETES_ALPHA, 1.0)  # type: ignore[arg-type]
        return now_s()

    assert run(body()) == 3.0


def test_without_gang_scheduling_nothing_is_asked() -> None:
    assert run(pod_group_api(Server(None), ())) is None  # type: ignore[arg-type]
    run(until_changed(Server(None), (), None, 1.0))  # type: ignore[arg-type]


def test_operator_without_the_api_of_provisioning_requests_says_so_and_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    name = "best-effort-atomic-scale-up.autoscaling.x-k8s.io"
    settings = Settings.of({"DLJOB_TRAINER_IMAGE": "r/t:1", "DLJOB_PROVISIONING_CLASS": name})
    [kind] = settings.provisioning
    assert run(provisioning_api(Server({kind.api_version}), settings.provisioning)) == kind.api_version  # type: ignore[arg-type]
    assert not caplog.text
    assert run(provisioning_api(Server(set()), settings.provisioning)) is None  # type: ignore[arg-type]
    assert "autoscaling.provisioningRequests.enabled" in caplog.text
    assert settings.render(provisions=True).provisioning_class == name
    assert settings.render().provisioning_class == ""


def test_operator_ends_when_the_api_of_provisioning_requests_appears() -> None:
    settings = Settings.of({"DLJOB_TRAINER_IMAGE": "r/t:1", "DLJOB_PROVISIONING_CLASS": "a.example"})
    [kind] = settings.provisioning
    server = Server(set(), {kind.api_version})

    async def body() -> None:
        with pytest.raises(RuntimeError, match="ProvisioningRequests"):
            await until_changed(server, settings.provisioning, None, 1.0, "ProvisioningRequests")  # type: ignore[arg-type]

    run(body())
