"""Leader election by a Lease: of several operators one works.

A leader that cannot renew stops before its Lease can be taken; one that ends in order gives it up at once.
Times are judged by one's own clock, from when a change was seen: clocks of nodes may differ.
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
"""A Lease not renewed for so long may be taken."""
RENEW_S = 2.5
RETRY_S = 1.0
GIVE_UP_S = 14.0
"""A leader that could not renew for so long stops working, before another starts."""


class LeaseLostError(Exception):
    """The Lease went to another, or could not be renewed."""


class Leader:
    def __init__(self, api: Api, namespace: str, identity: str, clock: Callable[[], float] = monotonic) -> None:
        self._api, self._namespace, self._identity, self._clock = api, namespace, identity, clock
        self._seen: tuple[str, float] | None = None
        """The Lease's last resourceVersion seen, and when it was seen first."""
        self._asked = clock()
        """When the Lease was last asked for: others count from its writing, which a late answer tells late."""

    async def acquire(self) -> None:
        """Return once the Lease is held."""
        while True:
            try:
                if await self._take():
                    log.info("%s leads", self._identity)
                    return
            except ApiError as error:
                log.warning("the Lease cannot be had: %s", error)
            await asyncio.sleep(RETRY_S)

    async def hold(self) -> None:
        """Renew for ever. Raises LeaseLostError when that is over."""
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
        """Give the Lease up, so that another need not wait for it to run out."""
        try:
            lease = await self._api.get(LEASE, self._namespace, LEASE_NAME)
            if lease["spec"].get("holderIdentity") == self._identity:
                lease["spec"] |= {"holderIdentity": "", "leaseDurationSeconds": 1}
                await self._api.replace(LEASE, lease)
        except ApiError as error:
            log.warning("the Lease was not released: %s", error)

    async def _take(self) -> bool:
        """Take or renew the Lease; whether it is held now."""
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
        """Whether the write went through; a conflict means that another was faster."""
        try:
            lease = await call
        except ApiError as error:
            if error.conflict:
                return False
            raise
        self._seen = lease["metadata"]["resourceVersion"], self._clock()
        return True
