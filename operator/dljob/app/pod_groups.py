"""Find out which PodGroups the API server serves. The answer is part of the settings with which jobs are planned."""

import asyncio
import logging
from collections.abc import Sequence

from dljob.kube import Api, ApiError
from dljob.kube.kinds import Kind

log = logging.getLogger("dljob")

RECHECK_S = 1.0


async def pod_group_api(api: Api, wanted: Sequence[Kind]) -> str | None:
    """Wait for the answer of the API server. Return the API version of the first of ``wanted`` that it serves, or None.

    ``wanted``: kinds of PodGroups that the chart value ``gangScheduling`` allows; empty without gang scheduling.
    """
    while True:
        try:
            served = await _first_served(api, wanted)
        except ApiError as error:
            log.warning("waiting to learn which PodGroups the API server serves: %s", error)
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
    """Raise RuntimeError when the API server's PodGroups change, so that ``pod_group_api`` would not return ``served``.

    ``interval_s``: seconds between checks. After the error, the operator ends, and its Deployment starts it again. An
    upgrade of the cluster may remove an alpha API, and plans made afterwards must not name its PodGroups. Return at
    once if ``wanted`` is empty.
    """
    while wanted:
        await asyncio.sleep(interval_s)
        try:
            now = await _first_served(api, wanted)
        except ApiError as error:
            log.warning("cannot learn which PodGroups the API server serves: %s", error)
            continue
        if now != served:
            found, expected = (f"PodGroups of {version}" if version else "no PodGroups" for version in (now, served))
            raise RuntimeError(f"API server: found {found}; expected {expected}, as at the start of the operator")


async def _first_served(api: Api, wanted: Sequence[Kind]) -> str | None:
    for kind in wanted:
        if await api.serves(kind):
            return kind.api_version
    return None
