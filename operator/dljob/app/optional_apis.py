"""Find out which optional APIs the API server serves: those of PodGroups and of ProvisioningRequests.

Jobs need PodGroups for gang scheduling: the scheduler then places all pods of a job together, or none of them. They
need ProvisioningRequests to ask an autoscaler for nodes. The APIs are part of the settings with which jobs are planned.
"""

import asyncio
import logging
from collections.abc import Sequence

from dljob.kube import Api, ApiError
from dljob.kube.kinds import Kind

log = logging.getLogger("dljob")

RECHECK_S = 1.0


class _Outage:
    """Logs once that the API server does not say which APIs it serves, and once that it does so again."""

    def __init__(self, what: str, effect: str) -> None:
        """``what``: name of the kinds. ``effect``: what the operator does without an answer."""
        self._what, self._effect = what, effect
        self._code: int | None = None
        """HTTP status code of the last answer; None if it was no error."""

    def continues(self, error: ApiError) -> None:
        """Record an error. Log a warning if it has another status code than the error before, or follows none."""
        if error.code == self._code:
            return
        self._code = error.code
        remedy = (
            "Bind the ClusterRole system:discovery to the operator's ServiceAccount"
            if error.forbidden
            else "Check the API server if this lasts"
        )
        log.warning(
            "discovery of %s: found an error (%s); expected a list of the APIs that the API server serves. Until then, "
            "%s. %s. The operator keeps asking, and logs when it gets an answer",
            self._what,
            error,
            self._effect,
            remedy,
        )

    def ended(self) -> None:
        """Record an answer. Log a line if an error came before."""
        if self._code is not None:
            self._code = None
            log.info("discovery of %s: the API server answers again", self._what)


async def pod_group_api(api: Api, wanted: Sequence[Kind]) -> str | None:
    """Return the API version of the first kind in ``wanted`` that the API server serves; None if it serves none.

    ``wanted``: kinds of PodGroups that the chart value ``gangScheduling`` allows; empty without gang scheduling. If the
    API server does not answer, ask again until it does.
    """
    served = await _answer(api, wanted, "PodGroups")
    if served is not None:
        log.info("gang scheduling: jobs get PodGroups of %s", served)
    elif wanted:
        log.warning(
            "gangScheduling: found an API server without PodGroups of %s; expected this API. Enable this API, or "
            "set gangScheduling to none. Until then, the scheduler places the pods of a job one by one",
            " or ".join(kind.api_version for kind in wanted),
        )
    return served


async def provisioning_api(api: Api, wanted: Sequence[Kind]) -> str | None:
    """Return the API version of ProvisioningRequests if the API server serves it; None otherwise.

    ``wanted``: the kind ProvisioningRequest; empty if the installation does not use it. If the API server does not
    answer, ask again until it does.
    """
    served = await _answer(api, wanted, "ProvisioningRequests")
    if wanted and served is None:
        log.warning(
            "autoscaling.provisioningRequests: found an API server without ProvisioningRequests of %s; expected this "
            "API. Install the CRD of the Cluster Autoscaler, or set autoscaling.provisioningRequests.enabled to false. "
            "Until then, pending pods make an autoscaler add nodes",
            wanted[0].api_version,
        )
    return served


async def _answer(api: Api, wanted: Sequence[Kind], what: str) -> str | None:
    """Return the API version of the first kind in ``wanted`` that the API server serves, as soon as it answers."""
    outage = _Outage(what, "the operator does not start")
    while True:
        try:
            served = await _first_served(api, wanted)
        except ApiError as error:
            outage.continues(error)
            await asyncio.sleep(RECHECK_S)
            continue
        outage.ended()
        return served


async def until_changed(
    api: Api, wanted: Sequence[Kind], served: str | None, interval_s: float, what: str = "PodGroups"
) -> None:
    """Wait until the API server no longer serves ``served`` as the first kind in ``wanted``. Then raise RuntimeError.

    If ``wanted`` is empty, return at once. ``served``: an API version; None: the API server serves no kind in
    ``wanted``. ``interval_s``: seconds between checks. ``what``: name of the kinds, for messages. After the error, the
    operator ends, and its Deployment starts it again, so that new plans use what the API server serves now. An upgrade
    of the cluster may, for example, remove an alpha API.
    """
    outage = _Outage(what, "plans use what the API server served at the start of the operator")
    while wanted:
        await asyncio.sleep(interval_s)
        try:
            now = await _first_served(api, wanted)
        except ApiError as error:
            outage.continues(error)
            continue
        outage.ended()
        if now != served:
            found, expected = (f"{what} of {version}" if version else f"no {what}" for version in (now, served))
            raise RuntimeError(f"API server: found {found}; expected {expected}, as at the start of the operator")


async def _first_served(api: Api, wanted: Sequence[Kind]) -> str | None:
    for kind in wanted:
        if await api.serves(kind):
            return kind.api_version
    return None
