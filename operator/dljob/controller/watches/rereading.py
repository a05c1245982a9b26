"""Read objects again that the cache had no room for, once it has room: no event of their own says so."""

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from dljob.job.log_fields import log_fields
from dljob.job.observed import JOB_LABEL
from dljob.kube import Api, ApiError, Cache
from dljob.kube.kinds import DLJOB, Kind

log = logging.getLogger("dljob.watches")

Body = Mapping[str, Any]
MAX_READS = 20
"""Maximum number of objects that one round reads. Each may have 1 MiB."""


class Rereader:
    """Reads objects again whose texts exceeded the limit of their namespace (``StoredTexts``), and fit now.

    This is the case once another object of the namespace was deleted or has become shorter.
    """

    def __init__(
        self,
        cache: Cache,
        api: Api,
        put_job: Callable[[Body], Awaitable[None]],
        changed: Callable[[Kind, Body], None],
    ) -> None:
        """``put_job``: puts a DLJob into the cache. ``changed``: called after a change of an object in the cache."""
        self._cache, self._api, self._put_job, self._changed = cache, api, put_job, changed

    async def round(self) -> None:
        """Read all objects that fit now, at most ``MAX_READS``. Errors of the API server are left to the next round."""
        for kind, key in self._cache.texts.fitting(MAX_READS):
            try:
                body = await self._api.get(kind, *key)
                labels = body["metadata"].get("labels") or {}
                if kind is DLJOB:
                    await self._put_job(body)
                elif JOB_LABEL in labels and self._cache.put(kind, body):
                    self._changed(kind, body)
            except ApiError as error:
                if not error.not_found:  # The watch tells of a deletion.
                    log.warning("%s %s/%s could not be read again (%s)", kind.plural, *key, error)
            except Exception:
                log.exception("an object cannot be parsed and is ignored", extra=log_fields(key, None))
