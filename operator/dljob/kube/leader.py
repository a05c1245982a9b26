"""Leader election with a Kubernetes Lease, so that only one of several operators is active.

A leader that cannot renew the Lease stops before another operator can acquire the Lease. A leader that shuts down
releases the Lease immediately. The clocks of nodes may differ. Each operator therefore ignores the times in the Lease,
and measures with its own clock how long ago it saw the Lease change.
"""

import asyncio
import logging
from collections.abc import Callable
from datetime import UTC, datetime
from time import monotonic
from typing import Any

from dljob.kube import Api, ApiError
from dljob.kube.kinds import LEASE

log = logging.getLogger("dljob.kube.leader")

LEASE_NAME = "dljob-operator"
DURATION_S = 18
"""Seconds after the last renewal when another operator may acquire the Lease."""
RENEW_S = 2.5
RETRY_S = 1.0
GIVE_UP_S = 14.0
"""Seconds after the last renewal when a leader stops. Less than ``DURATION_S``: two leaders are never active."""


class LeaseLostError(Exception):
    """This operator is no longer the leader: another one acquired the Lease, or the Lease could not be renewed."""


class Leader:
    def __init__(self, api: Api, namespace: str, identity: str, clock: Callable[[], float] = monotonic) -> None:
        self._api, self._namespace, self._identity, self._clock = api, namespace, identity, clock
        self._seen: tuple[str, float] | None = None
        """The latest resourceVersion of the Lease, and the time when this operator first saw it."""
        self._asked = clock()
        """Time when this operator began its last attempt to write the Lease.

        The deadline for the next renewal counts from here, because other operators may see the write before its answer
        arrives here.
        """

    async def acquire(self) -> None:
        """Wait until this operator holds the Lease."""
        while True:
            try:
                if await self._take():
                    log.info("%s is the leader", self._identity)
                    return
            except ApiError as error:
                log.warning("the Lease cannot be acquired: %s", error)
            await asyncio.sleep(RETRY_S)

    async def hold(self) -> None:
        """Renew the Lease periodically. Raise LeaseLostError when this operator loses the Lease."""
        renewed = self._asked
        while True:
            await asyncio.sleep(RENEW_S)
            try:
                async with asyncio.timeout(max(0.1, GIVE_UP_S - (self._clock() - renewed))):
                    held = await self._take()
            except (ApiError, TimeoutError) as error:
                log.warning("the Lease was not renewed: %s", error)
                if self._clock() - renewed >= GIVE_UP_S:
                    raise LeaseLostError(f"not renewed for {GIVE_UP_S:g} s") from error
            else:
                if not held:
                    raise LeaseLostError("another operator holds the Lease")
                renewed = self._asked

    async def release(self) -> None:
        """Release the Lease, so that another operator need not wait until it expires."""
        try:
            lease = await self._api.get(LEASE, self._namespace, LEASE_NAME)
            if lease["spec"].get("holderIdentity") == self._identity:
                lease["spec"] |= {"holderIdentity": "", "leaseDurationSeconds": 1}
                await self._api.replace(LEASE, lease)
        except ApiError as error:
            log.warning("the Lease was not released: %s", error)

    async def _take(self) -> bool:
        """Acquire or renew the Lease. Return True if this operator is the holder of the Lease now."""
        self._asked = self._clock()
        try:
            lease = await self._api.get(LEASE, self._namespace, LEASE_NAME)
        except ApiError as error:
            if not error.not_found:
                raise
            return await self._written(self._api.create(LEASE, self._body({}, transitions=0)))
        spec, version = lease.get("spec") or {}, lease["metadata"]["resourceVersion"]
        holder = spec.get("holderIdentity") or ""
        if self._seen is None or self._seen[0] != version:
            self._seen = version, self._clock()
        expired = self._clock() - self._seen[1] > spec.get("leaseDurationSeconds", DURATION_S)
        if holder not in ("", self._identity) and not expired:
            return False
        transitions = spec.get("leaseTransitions", 0) + (holder != self._identity)
        return await self._written(self._api.replace(LEASE, self._body(lease, transitions)))

    def _body(self, lease: dict[str, Any], transitions: int) -> dict[str, Any]:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        old = lease.get("spec") or {}
        mine = old.get("holderIdentity") == self._identity
        return {
            "apiVersion": LEASE.api_version,
            "kind": LEASE.kind,
            "metadata": lease.get("metadata") or {"name": LEASE_NAME, "namespace": self._namespace},
            "spec": {
                "holderIdentity": self._identity,
                "leaseDurationSeconds": DURATION_S,
                "acquireTime": old.get("acquireTime", now) if mine else now,
                "renewTime": now,
                "leaseTransitions": transitions,
            },
        }

    async def _written(self, call: Any) -> bool:
        """Await ``call``, which writes the Lease. Return False if another operator wrote it first (a conflict)."""
        try:
            lease = await call
        except ApiError as error:
            if error.conflict:
                return False
            raise
        self._seen = lease["metadata"]["resourceVersion"], self._clock()
        return True
