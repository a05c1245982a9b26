"""Find out which API of PodGroups the API server serves. Jobs need it for gang scheduling.

With gang scheduling, the scheduler places all pods of a job together, or none of them. The API is part of the settings
with which jobs are planned.
"""

import asyncio
import logging
from collections.abc import Sequence

from dljob.kube import Api, ApiError
from dljob.kube.kinds import Kind

log = logging.getLogger("dljob")

RECHECK_S = 1.0


async def pod_group_api(api: Api, wanted: Sequence[Kind]) -> str | None:
    """Return the API version of the first kind in ``wanted`` that the API server serves; None if it serves none.

    ``wanted``: kinds of PodGroups that the chart value ``gangScheduling`` allows; empty without gang scheduling. If the
    API server does not answer, ask again until it does.
    """
    while True:
        try:
            served = await _first_served(api, wanted)
        except ApiError as error:
            log.warning(
                "cannot read which PodGroups the API server serves (%s); asking again in %.0f s", error, RECHECK_S
            )
            await asyncio.sleep(RECHECK_S)
            continue
        if served is not None:
            log.info("gang scheduling: jobs get PodGroups of %s", served)
        elif wanted:
            log.warning(
                "gangScheduling: found an API server without PodGroups of %s; expected this API. Enable this API, or "
                "set gangScheduling to none. Until then, the scheduler places the pods of a job one by one",
                " or ".join(kind.api_version for kind in wanted),
            )
        return served


async def until_changed(api: Api, wanted: Sequence[Kind], served: str | None, interval_s: float) -> None:
    """Wait until ``pod_group_api`` would no longer return ``served``, and then raise RuntimeError.

    ``wanted``: as in ``pod_group_api``; if it is empty, return at once. ``interval_s``: seconds between checks. After
    the error, the operator ends, and its Deployment starts it again, so that new plans use the PodGroups that the API
    server serves now. An upgrade of the cluster may, for example, remove an alpha API.
    """
    while wanted:
        await asyncio.sleep(interval_s)
        try:
            now = await _first_served(api, wanted)
        except ApiError as error:
            log.warning(
                "cannot read which PodGroups the API server serves (%s); asking again in %.0f s", error, interval_s
            )
            continue
        if now != served:
            found, expected = (f"PodGroups of {version}" if version else "no PodGroups" for version in (now, served))
            raise RuntimeError(f"API server: found {found}; expected {expected}, as at the start of the operator")


async def _first_served(api: Api, wanted: Sequence[Kind]) -> str | None:
    for kind in wanted:
        if await api.serves(kind):
            return kind.api_version
    return None
