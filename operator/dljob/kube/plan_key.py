"""The key with which the operator signs the plans of jobs: a Secret in the operator's namespace.

All replicas and releases of the operator use the same Secret. The first operator creates it. An administrator who
deletes it lets the operator create another key. Jobs go on, because their status has a record of their plan.
"""

import asyncio
import base64
import binascii
import logging
import secrets

from dljob.job.plan.authentic import KEY_NBYTES, PlanKey
from dljob.kube.answers import ApiError
from dljob.kube.kinds import SECRET
from dljob.kube.objects.stored_plans import StoredPlans
from dljob.kube.rest import Api
from dljob.kube.transport import Body

log = logging.getLogger("dljob")

RETRY_S = 2.0
DATA_KEY = "key"
LABELS = {"app.kubernetes.io/managed-by": "dljob", "app.kubernetes.io/component": "plan-key"}


class PlanKeySecret:
    """The Secret with the key. ``api`` must also write while this operator does not lead."""

    def __init__(self, api: Api, namespace: str, name: str, plans: StoredPlans) -> None:
        self._api, self._namespace, self._name, self._plans = api, namespace, name, plans
        self._problem = ""

    @property
    def description(self) -> str:
        """The Secret and its purpose, for messages."""
        return f"Secret {self._namespace}/{self._name} with the key that signs plans"

    async def load(self) -> None:
        """Read the key, or create it, and sign plans with it from now on. Retry until the API server answers.

        If the Secret may not be read or created, or has no valid key, log that: plans are then not checked.
        """
        while True:
            try:
                self._plans.use(await self._key())
            except (ApiError, ValueError) as error:
                if isinstance(error, ValueError) or error.rejected:
                    self._report(str(error))
                    return
                log.warning("waiting for %s (%s); asking again in %.0f s", self.description, error, RETRY_S)
                await asyncio.sleep(RETRY_S)
            else:
                return

    async def refresh(self) -> None:
        """Read the key again, because somebody may have deleted it to replace it. If that fails, keep the key."""
        try:
            self._plans.use(await self._key())
        except (ApiError, ValueError) as error:
            self._report(str(error))
        else:
            self._problem = ""

    async def read_again(self) -> None:
        """Read the key again, because a plan has the signature of another key. Another replica may have replaced it.

        Raise ApiError if the API server does not answer now. If the Secret may not be read or has no valid key, log
        that, and keep the key.
        """
        try:
            self._plans.use(await self._key())
        except ValueError as error:
            self._report(str(error))
        except ApiError as error:
            if not error.rejected:
                raise
            self._report(str(error))

    async def _key(self) -> PlanKey:
        try:
            return self._parsed(await self._api.get(SECRET, self._namespace, self._name))
        except ApiError as error:
            if not error.not_found:
                raise
        text = base64.b64encode(secrets.token_bytes(KEY_NBYTES)).decode()
        metadata = {"name": self._name, "namespace": self._namespace, "labels": LABELS}
        body = {"apiVersion": "v1", "kind": "Secret", "type": "Opaque", "metadata": metadata, "data": {DATA_KEY: text}}
        try:
            made = await self._api.create(SECRET, body)
        except ApiError as error:
            if not error.conflict:
                raise
            made = await self._api.get(SECRET, self._namespace, self._name)  # Another replica was faster.
        else:
            log.info("created Secret %s/%s, the key that signs the plans of jobs", self._namespace, self._name)
        return self._parsed(made)

    def _parsed(self, body: Body) -> PlanKey:
        try:
            secret = base64.b64decode((body.get("data") or {}).get(DATA_KEY, ""), validate=True)
        except binascii.Error:
            secret = b""
        if len(secret) < KEY_NBYTES:
            raise ValueError(
                f"Secret {self._namespace}/{self._name}: found {len(secret)} bytes under {DATA_KEY!r}; expected at "
                f"least {KEY_NBYTES}. Delete the Secret, and the operator creates another one"
            )
        return PlanKey(secret)

    def _report(self, problem: str) -> None:
        """Log a lasting problem once."""
        if problem != self._problem:
            self._problem = problem
            state = "the key that was read before is used" if self._plans.signs else "plans are not checked"
            log.warning("the key that signs plans was not read (%s); %s", problem, state)
