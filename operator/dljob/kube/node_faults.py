"""The stored record of node faults: a ConfigMap in the operator's namespace, so that it outlives the operator.

A node with repeated faults is left out: new plans do not use it for some time. The operator reads the ConfigMap again
from time to time, because an administrator may delete a node's key, so that new plans use the node at once. If the
ConfigMap has changed since it was read, a write to it is repeated on the newer version.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from time import monotonic

from dljob.faults import Fault, FaultPolicy, Ledger, LeftOut, active, expired, forgiven, left_out_nodes, recorded
from dljob.faults.stored import data, parse
from dljob.kube.answers import ApiError
from dljob.kube.kinds import CONFIG_MAP
from dljob.kube.objects.cache import Cache
from dljob.kube.rest import Api
from dljob.kube.transport import Body

log = logging.getLogger("dljob")

REREAD_S = 10.0
"""Seconds after which the record is read again before it is used."""
ATTEMPTS = 4
LABELS = {"app.kubernetes.io/managed-by": "dljob", "app.kubernetes.io/component": "node-faults"}


@dataclass(frozen=True)
class Noted:
    """Result of ``NodeFaults.note``: the faults that were new, and the nodes that are newly left out because of them.

    New plans do not use a node that is left out.
    """

    faults: tuple[Fault, ...] = ()
    left_out: tuple[LeftOut, ...] = ()


class NodeFaults:
    """The record of node faults. Only the leading operator may use it."""

    def __init__(
        self,
        api: Api,
        cache: Cache,
        namespace: str,
        name: str,
        policy: FaultPolicy | None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """``policy``: when nodes are left out of new plans; None: never. Nothing is then read or stored.

        ``namespace`` and ``name``: those of the ConfigMap. ``clock``: monotonic time in seconds.
        """
        self._api, self._cache, self._namespace, self._name = api, cache, namespace, name
        self._policy, self._clock = policy, clock
        self._ledger: Ledger = {}
        self._body: Body | None = None
        """The ConfigMap as it was last read or written; None if it does not exist."""
        self._read_at: float | None = None
        self._lock = asyncio.Lock()
        self._trouble = ""

    @property
    def on(self) -> bool:
        return self._policy is not None

    @property
    def _is_old(self) -> bool:
        return self._read_at is None or self._clock() - self._read_at > REREAD_S

    async def left_out(self, namespace: str, now: datetime) -> dict[str, LeftOut]:
        """Return name → entry of the nodes that new plans of jobs in ``namespace`` must not use now.

        If the API server does not answer, use what was read last: planning must not wait for this record.
        """
        if self._policy is None:
            return {}
        if self._is_old:
            async with self._lock:
                if self._is_old:  # Otherwise, another reconcile has read it meanwhile.
                    await self._try(self._read())
        return left_out_nodes(self._exempt(self._ledger), namespace, now)

    async def note(self, faults: Iterable[Fault], now: datetime) -> Noted:
        """Record faults of nodes. Return those that were new, and the nodes that are left out because of them.

        Faults that are recorded already, and faults of nodes that the administrator has exempted, change nothing. If
        the record cannot be stored, the faults count only until it is read again.
        """
        if self._policy is None:
            return Noted()
        policy = self._policy
        new = [fault for fault in faults if not self._cache.ignores_faults(fault.node)]
        new = [fault for fault in new if recorded(self._ledger, fault, policy, now) is not self._ledger]
        if not new:
            return Noted()
        async with self._lock:
            before: Ledger = self._ledger

            def change(ledger: Ledger) -> Ledger:
                nonlocal before, new
                before, new = ledger, [fault for fault in new if recorded(ledger, fault, policy, now) is not ledger]
                for fault in new:
                    ledger = recorded(ledger, fault, policy, now)
                return ledger

            if not await self._try(self._write(change, now)):
                self._ledger = change(self._ledger)
            known = set(active(before, now))
            return Noted(tuple(new), tuple(item for item in active(self._ledger, now) if item not in known))

    async def tidy(self, now: datetime) -> None:
        """Remove faults that no longer count, and old entries of nodes that were left out, from the stored record."""
        if self._policy is not None:
            async with self._lock:
                await self._try(self._write(lambda ledger: ledger, now))

    def active(self, now: datetime) -> tuple[LeftOut, ...]:
        """Return the entries of all nodes that new plans of any namespace must not use now, as they were last read."""
        return active(self._exempt(self._ledger), now)

    def _exempt(self, ledger: Ledger) -> Ledger:
        return forgiven(ledger, [node for node in ledger if self._cache.ignores_faults(node)])

    async def _try(self, work: Awaitable[None]) -> bool:
        """Await work on the ConfigMap. Return False if it failed; log failures of the same kind only once."""
        trouble = ""
        try:
            await work
        except ApiError as error:
            trouble = f"{error.code} {error.reason}"
            self._read_at = self._clock()
            if trouble != self._trouble:
                log.warning(
                    "ConfigMap %s/%s, the record of faults of nodes, could not be read or written (%s). The operator "
                    "continues with the faults in its memory. Check the API server and the operator's permissions",
                    self._namespace, self._name, error,
                )  # fmt: skip
        self._trouble = trouble
        return not trouble

    async def _read(self) -> None:
        try:
            body = await self._api.get(CONFIG_MAP, self._namespace, self._name)
        except ApiError as error:
            if not error.not_found:
                raise
            body = None
        self._hold(body)

    def _hold(self, body: Body | None) -> None:
        self._body, self._ledger, self._read_at = body, parse((body or {}).get("data") or {}), self._clock()

    async def _write(self, change: Callable[[Ledger], Ledger], now: datetime) -> None:
        """Apply ``change`` to the newest stored record, drop what has expired, and store the result if it differs."""
        assert self._policy is not None
        for attempt in range(1, ATTEMPTS + 1):
            await self._read()
            stored = dict((self._body or {}).get("data") or {})
            ledger = expired(self._exempt(change(self._ledger)), self._policy, now)
            self._ledger, wanted = ledger, data(ledger)
            if wanted == stored:
                return
            try:
                self._hold(await self._stored(wanted))
            except ApiError as error:
                if not error.conflict or attempt == ATTEMPTS:
                    raise
            else:
                return

    async def _stored(self, wanted: dict[str, str]) -> Body:
        if self._body is not None:
            return await self._api.replace(CONFIG_MAP, {**self._body, "data": wanted})
        metadata = {"name": self._name, "namespace": self._namespace, "labels": LABELS}
        body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": wanted}
        return await self._api.create(CONFIG_MAP, body)
