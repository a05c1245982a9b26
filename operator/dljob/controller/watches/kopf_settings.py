"""Settings of kopf, which watches the DLJobs: it writes nothing, and stores nothing about them."""

from collections.abc import Iterable
from typing import Any

import kopf
from kopf._core.reactor import inventory

from dljob.controller.tasks import STOP_S

PAGE = 20
"""Number of DLJobs on one page of a list. Each DLJob may have 1.5 MB.

Of these, the operator decodes up to 512 KiB of each, and each MB of dense JSON takes 25 MB of memory.
"""


class NoMemories(inventory.ResourceMemories):
    """Keeps kopf from storing a record of each DLJob, which takes 0.9 KiB. The handler of events needs none."""

    async def recall(self, raw_body: kopf.RawBody, **options: Any) -> inventory.ResourceMemory:
        return await super().recall(raw_body, **{**options, "ephemeral": True})


class NoDiffs(kopf.DiffBaseStorage):
    """Keeps kopf from copying each DLJob to find out what has changed. No handler of this operator needs to know it."""

    def build(self, *, body: kopf.Body, extra_fields: Iterable[Any] | None = None) -> kopf.BodyEssence:
        return kopf.BodyEssence()

    def fetch(self, *, body: kopf.Body) -> kopf.BodyEssence | None:
        return None

    def store(self, *, body: kopf.Body, patch: kopf.Patch, essence: kopf.BodyEssence) -> None:
        """Store nothing: the operator must not write annotations into users' objects."""


def settings() -> kopf.OperatorSettings:
    """Return settings for kopf.

    With them, kopf posts no events, ignores other kopf operators, does not look for new kinds, and limits the time of
    each request.
    """
    found = kopf.OperatorSettings()
    found.posting.enabled = False
    found.peering.standalone = True
    found.scanning.disabled = True
    found.watching.server_timeout = 300
    found.watching.connect_timeout = 10
    found.networking.connect_timeout = 10
    found.networking.request_timeout = 60
    found.process.ultimate_exiting_timeout = STOP_S
    found.watching.inactivity_timeout = 86_400  # ``bounded_responses`` ends silent watches.
    found.watching.chunk_size = PAGE
    # After an event, a task of kopf holds the DLJob in memory until this time has passed.
    found.queueing.idle_timeout = 0.1
    found.persistence.diffbase_storage = NoDiffs()
    return found
