"""Leader election by a Lease, so that only one of several operators works.

A leader that cannot renew the Lease stops before another operator can take it. A leader that shuts down releases the
Lease at once. Node clocks may differ, so each operator measures times with its own clock, from when it saw a change.
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
"""Seconds without renewal after which another operator may take the Lease."""
RENEW_S = 2.5
RETRY_S = 1.0
GIVE_UP_S = 14.0
"""Seconds without renewal after which a leader stops, before another starts."""


class LeaseLostError(Exception):
    """Another operator took the Lease, or it could not be renewed."""


class Leader:
    def __init__(self, api: Api, namespace: str, identity: str, clock: Callable[[], float] = monotonic) -> None:
        self._api, self._namespace, self._identity, self._clock = api, namespace, identity, clock
        self._seen: tuple[str, float] | None = None
        """The last resourceVersion of the Lease, and when it was seen first."""
        self._asked = clock()
        """Time of the last request. Other operators count from its write, which may be long before a late answer."""

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
        """Renew the Lease until it is lost, then raise LeaseLostError."""
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
        """Take or renew the Lease. Return True if this operator holds it now."""
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
        """Return True if the write succeeded. A conflict means that another operator was faster."""
        try:
            lease = await call
        except ApiError as error:
            if error.conflict:
                return False
            raise
        self._seen = lease["metadata"]["resourceVersion"], self._clock()
        return True
