"""Leader election with a Kubernetes Lease, so that only one of several operators is active.

A leader that cannot renew the Lease stops before another operator can acquire the Lease. A leader that shuts down
releases the Lease immediately. The clocks of nodes may differ. Each operator therefore ignores the times in the Lease,
and measures with its own clock how long ago it saw the Lease change.
"""

import asyncio
import logging
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from math import inf
from time import monotonic
from typing import Any

from dljob.kube.answers import TOO_LARGE, ApiError
from dljob.kube.kinds import LEASE
from dljob.kube.rest import Api

log = logging.getLogger("dljob.kube.leader")

LEASE_NAME = "dljob-operator"
LEASE_LABEL = {"app.kubernetes.io/part-of": "dljob"}
MANAGES_ANNOTATION = "dljob.dev/manages"
"""Annotation of the Lease: the namespaces that the release manages, separated by commas; empty: all."""
DURATION_S = 9
"""Duration of the Lease in seconds. If the leader has not renewed it for so long, another operator may acquire it."""
RENEW_S = 1.5
RETRY_S = 0.5
GIVE_UP_S = 7.0
"""A leader that has not been able to renew the Lease for this many seconds stops.

This is less than ``DURATION_S``, so that two leaders are never active at the same time."""
RIVALS_S = 10.0
"""Seconds between two checks whether another Helm release of the operator manages the same namespaces."""
YIELD_S = 20.0
"""Seconds for which a release that returns waits until a later one, which leads meanwhile, has given up its Lease."""
MAX_DURATION_S = 60.0
"""Seconds after which the Lease of another release counts as expired, whatever its duration says.

Every user who may create Leases can write one that looks like a release's.
"""


class LeaseLostError(Exception):
    """This operator is no longer the leader: another one acquired the Lease, or the Lease could not be renewed."""


class Leader:
    """The Lease of one Helm release of the operator, for leader election among its replicas.

    It also checks that no other release manages the same namespaces.
    """

    def __init__(
        self,
        api: Api,
        namespace: str,
        identity: str,
        name: str = LEASE_NAME,
        manages: tuple[str, ...] = (),
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """``manages``: the namespaces that the release manages; empty: all."""
        self._api, self._namespace, self._identity, self._name = api, namespace, identity, name
        self._manages, self._clock = manages, clock
        self._seen: tuple[str, float] | None = None
        """The latest resourceVersion of the Lease, and the time when this operator first saw it."""
        self._asked = clock()
        """Time when this operator began its last attempt to write the Lease.

        The deadline for the next renewal counts from here, because other operators may see the write before its answer
        arrives here.
        """
        self._alive_at = -inf
        """Last time at which this operator saw that its release, maybe another replica, renewed the Lease."""
        self._returned_at: float | None = None
        """Time when this operator took the Lease of its release while a later release was active; None otherwise."""
        self._renewed: float | None = None
        """Start of the last successful attempt to write the Lease; None while this operator is not the leader."""
        self._rivals_seen: dict[str, tuple[str, float]] = {}
        """Lease of another Helm release → its latest resourceVersion, and the time when this operator first saw it."""
        self._rivals_asked = -RIVALS_S
        self._active_at: float | None = None
        """Time when ``acquire`` or ``hold`` last began a round; None while neither runs."""
        self.blocked_by: str | None = None
        """Message if this operator must not lead, because another Helm release manages the same namespaces; or None."""

    def leads(self) -> bool:
        """Return True if this operator is the leader now.

        It is not the leader after ``GIVE_UP_S`` seconds without a renewal, for example if the process was paused.
        ``kube/rest.py`` therefore calls this method before each write to the cluster (``may_write``).
        """
        return self._renewed is not None and self._clock() - self._renewed < GIVE_UP_S

    def stuck(self, limit_s: float) -> str | None:
        """Return a message if the task that acquires or renews the Lease has hung for ``limit_s`` seconds, or None.

        The message makes the liveness probe fail.
        """
        active_at = self._active_at
        silent_s = 0.0 if active_at is None else self._clock() - active_at
        return f"the Lease has not been acquired or renewed for {silent_s:.0f} s" if silent_s > limit_s else None

    async def acquire(self) -> None:
        """Wait until this operator holds the Lease, and no other release manages the same namespaces."""
        self._returned_at = None
        while True:
            self._active_at = self._clock()
            try:
                earlier, later = await self._rivals(await self._own())
                self._block(earlier)
                if self.blocked_by is None and await self._take() and not self._must_wait(later):
                    log.info("%s is the leader", self._identity)
                    self._renewed = self._asked
                    return
            except ApiError as error:
                log.warning("the Lease cannot be acquired (%s); trying again", error)
            await asyncio.sleep(RETRY_S if self.blocked_by is None else RIVALS_S)

    async def _own(self) -> dict[str, Any] | None:
        """Return the Lease of this release; None if it does not exist yet."""
        try:
            return await self._api.get(LEASE, self._namespace, self._name)
        except ApiError as error:
            if not error.not_found:
                raise
            return None

    def _must_wait(self, later: str | None) -> bool:
        """Return True if this operator, which holds its Lease, must not lead yet: a later release may still lead.

        ``later``: that release, if there is one. It gives up as soon as it sees the Lease of this one. It cannot lead
        if this release was active a moment ago, nor ``YIELD_S`` seconds after this release has become active.
        """
        now = self._clock()
        if later is None or now - self._alive_at < RIVALS_S + DURATION_S:
            return False
        if self._returned_at is None:
            self._returned_at = now
            log.warning("waiting at most %.0f s until the later release has stopped (%s)", YIELD_S, later)
        return now - self._returned_at < YIELD_S

    async def hold(self) -> None:
        """Renew the Lease periodically, and never return. Raise LeaseLostError when this operator loses the Lease.

        It loses the Lease if another operator holds it, if it could not renew it for ``GIVE_UP_S`` seconds, or if an
        earlier Helm release manages the same namespaces. ``app.main`` runs this method in the background loop, so that
        a busy main event loop does not delay renewals.
        """
        renewed, failed = self._asked, False
        try:
            while True:
                self._active_at = self._clock()
                await asyncio.sleep(RENEW_S if not failed else RETRY_S)
                left_s = max(0.1, GIVE_UP_S - (self._clock() - renewed))
                try:
                    # In case this connection is dead, half of the time is left for another one.
                    end_s = asyncio.get_running_loop().time() + left_s
                    async with asyncio.timeout(left_s if failed else left_s / 2) as limit:
                        held = await self._take(partial(limit.reschedule, end_s))
                except (ApiError, TimeoutError) as error:
                    failed = True
                    log.warning("the Lease was not renewed (%r); trying again", error)
                    if self._clock() - renewed >= GIVE_UP_S:
                        raise LeaseLostError(f"not renewed for {GIVE_UP_S:g} s") from error
                else:
                    if not held:
                        raise LeaseLostError("another operator holds the Lease")
                    self._renewed = self._alive_at = renewed = self._asked
                    failed = False
                    await self._yield_to_rival()
        finally:
            self._renewed = self._active_at = None

    async def _yield_to_rival(self) -> None:
        """Give up the Lease and raise LeaseLostError if an earlier Helm release manages the same namespaces.

        Check this every ``RIVALS_S`` seconds only, and otherwise do nothing.
        """
        if self._clock() - self._rivals_asked < RIVALS_S:
            return
        try:
            async with asyncio.timeout(RENEW_S):
                rival, _ = await self._rivals(await self._own())
        except (ApiError, TimeoutError):
            return  # The Lease itself decides whether this operator may go on.
        if rival is not None:
            self._block(rival)
            await self.release()
            raise LeaseLostError(rival)

    def _block(self, rival: str | None) -> None:
        if rival is not None and rival != self.blocked_by:
            log.error("%s", rival)
        self.blocked_by = rival

    async def _rivals(self, mine: dict[str, Any] | None) -> tuple[str | None, str | None]:
        """Describe other Helm releases that are active for the same namespaces: an earlier one, and a later one.

        Each is None if there is none, or if the operator may not list Leases. ``mine``: the Lease of this release. If
        it is None, each other release is an earlier one. The release whose Lease was created first is the earlier one:
        the API server sets this time. All other fields can be forged by every user who may create Leases, and a user's
        Lease must not stop an operator that is installed.
        """
        later = None
        self._rivals_asked = now = self._clock()
        selector = ",".join(f"{key}={value}" for key, value in LEASE_LABEL.items())
        try:
            leases = await self._api.find(LEASE, None, labelSelector=selector)
        except ApiError as error:
            # Users' Leases can make the list too large. They must not keep the operator from its own Lease.
            if error.code in (403, TOO_LARGE):
                return None, None
            raise
        listed = {_place(lease) for lease in leases}
        self._rivals_seen = {where: seen for where, seen in self._rivals_seen.items() if where in listed}
        for lease in leases:
            meta, spec = lease["metadata"], lease.get("spec") or {}
            where = _place(lease)
            manages = str((meta.get("annotations") or {}).get(MANAGES_ANNOTATION, ""))
            if where == f"{self._namespace}/{self._name}" or not spec.get("holderIdentity"):
                continue
            version, since = self._rivals_seen.get(where, ("", now))
            if version != meta["resourceVersion"]:
                version, since = meta["resourceVersion"], now
            self._rivals_seen[where] = version, since
            if now - since > min(spec.get("leaseDurationSeconds", DURATION_S), MAX_DURATION_S):
                continue
            if self._overlaps(manages):
                found = (
                    f"the release of Lease {meta['name']} in namespace {meta['namespace']} already manages "
                    f"{manages or 'all namespaces'}; expected no other release for {self._described()}. Uninstall one "
                    "of the two, or set watchNamespaces so that they do not overlap"
                )
                if mine is None or _order(lease) < _order(mine):
                    return found, later
                later = found
        return None, later

    def _overlaps(self, manages: str) -> bool:
        return not manages or not self._manages or not set(manages.split(",")).isdisjoint(self._manages)

    def _described(self) -> str:
        return ", ".join(self._manages) or "all namespaces"

    async def release(self) -> None:
        """Clear the holder of the Lease if it is this operator, so that the next one need not wait until it expires.

        An error of the API server is only logged.
        """
        try:
            lease = await self._api.get(LEASE, self._namespace, self._name)
            if lease["spec"].get("holderIdentity") == self._identity:
                lease["spec"] |= {"holderIdentity": "", "leaseDurationSeconds": 1}
                await self._api.replace(LEASE, lease)
                self._seen = None  # This change of the Lease does not show that another replica renews it.
        except ApiError as error:
            log.warning("the Lease was not released (%s); it ends when it expires", error)

    async def _take(self, read: Callable[[], None] = lambda: None) -> bool:
        """Try to acquire or renew the Lease. Return True if this operator is the holder of the Lease now.

        Return False if another operator holds it, or was the first to write it. A conflict alone does not show that: a
        renewal whose answer was lost is sent again, and somebody may have edited the Lease. ``read`` is called when
        the Lease was read, which shows that the connection works.
        """
        held = await self._try_to_take(read)
        return bool(await self._try_to_take(read) if held is None else held)

    async def _try_to_take(self, read: Callable[[], None]) -> bool | None:
        """Read and write the Lease once. Return None after a conflict, and otherwise as ``_take`` does."""
        self._asked = self._clock()
        try:
            lease = await self._api.get(LEASE, self._namespace, self._name)
            read()
        except ApiError as error:
            if not error.not_found:
                raise
            return await self._written(self._api.create(LEASE, self._body({}, transitions=0)))
        spec, version = lease.get("spec") or {}, lease["metadata"]["resourceVersion"]
        holder = spec.get("holderIdentity") or ""
        if self._seen is None or self._seen[0] != version:
            self._alive_at = self._alive_at if self._seen is None else self._clock()
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
            "metadata": {
                **(lease.get("metadata") or {"name": self._name, "namespace": self._namespace}),
                "labels": LEASE_LABEL,
                "annotations": {MANAGES_ANNOTATION: ",".join(self._manages)},
            },
            "spec": {
                "holderIdentity": self._identity,
                "leaseDurationSeconds": DURATION_S,
                "acquireTime": old.get("acquireTime", now) if mine else now,
                "renewTime": now,
                "leaseTransitions": transitions,
            },
        }

    async def _written(self, call: Any) -> bool | None:
        """Await ``call``, which writes the Lease. Return True, or None after a conflict."""
        try:
            lease = await call
        except ApiError as error:
            if error.conflict:
                return None
            raise
        self._seen = lease["metadata"]["resourceVersion"], self._clock()
        return True


def _place(lease: dict[str, Any]) -> str:
    return f"{lease['metadata']['namespace']}/{lease['metadata']['name']}"


def _order(lease: dict[str, Any]) -> tuple[str, str, str]:
    """Return a sort key (time of creation, namespace, name) that tells which of two Helm releases was first.

    The release whose Lease has the smaller key was first. Both releases read the same Leases, and therefore agree.
    """
    meta = lease["metadata"]
    return str(meta.get("creationTimestamp", "")), meta["namespace"], meta["name"]
