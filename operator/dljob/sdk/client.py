"""The entry point of the SDK: a client of one cluster."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from dljob.client import files, preview, submission
from dljob.client.errors import BadInputError
from dljob.client.preview import ClusterState
from dljob.cluster import cluster_view
from dljob.job.plan.recommendation import parse_job
from dljob.sdk import requests
from dljob.sdk.errors import DLJobError
from dljob.sdk.job import Job
from dljob.sdk.manifests import JobLike, manifest_of
from dljob.sdk.plan import Plan
from dljob.sdk.session import Session, translated


class Client:
    """Plan, submit and find the jobs of a cluster.

    Use it in a ``with`` statement, or call ``close``. The connection is opened for the first request that needs it.
    """

    def __init__(
        self,
        kubeconfig: str | os.PathLike[str] | None = None,
        context: str | None = None,
        namespace: str | None = None,
    ) -> None:
        """``kubeconfig``: path of a kubeconfig. ``context``: name of a context in it.

        If both are None, use the service account in a pod, and elsewhere KUBECONFIG or ``~/.kube/config`` with its
        current context. ``namespace``: that of all jobs; None: that of a manifest, of the context or of the pod.
        """
        self._session = Session(None if kubeconfig is None else os.fspath(kubeconfig), context)
        self._namespace = namespace

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection. Jobs of the client cannot be used afterwards; on the cluster, they continue."""
        self._session.close()

    @property
    def namespace(self) -> str:
        """Namespace of jobs whose manifest names none."""
        return self._namespace or self._session.default_namespace()

    def submit(self, job: JobLike, name: str | None = None) -> Job:
        """Create the job on the cluster, or change the existing job of its name (server-side apply). Return the job.

        ``job``: path of a manifest with one DLJob, the manifest, or only its spec as a mapping or ``DLJobSpec``.
        ``name``: replaces the name in the manifest; required for a spec. An existing job gets the whole manifest: this
        ends a change by ``Job.suspend``, ``resume`` or ``scale`` that the manifest lacks. Raise InvalidJobError if
        dljob or the API server rejects the job or the change.
        """
        manifest = manifest_of(job, name, self._namespace)
        manifest = submission.with_namespace(manifest, manifest["metadata"].get("namespace") or self.namespace)
        return Job(self._session, self._session.call(lambda api: submission.apply(api, manifest)))

    def job(self, name: str) -> Job:
        """Return the existing job of this name in the client's namespace. Raise JobNotFoundError if there is none."""
        namespace = self.namespace
        return Job(self._session, self._session.call(lambda api: requests.found(api, namespace, name)))

    def jobs(self) -> list[Job]:
        """Return the jobs of the client's namespace, sorted by name."""
        namespace = self.namespace
        bodies = self._session.call(lambda api: requests.listed(api, namespace))
        return sorted((Job(self._session, body) for body in bodies), key=lambda job: job.name)

    def plan(
        self, job: JobLike, name: str | None = None, cluster: str | Path | Mapping[str, Any] | None = None
    ) -> Plan:
        """Return the plan that a job would get now. Nothing on the cluster changes.

        ``job`` and ``name``: see ``submit``; a spec needs no name here. ``cluster``: plan for this cluster instead of
        the current one, without a connection: a file or mapping with the key ``nodes``, as ``dljob plan --cluster``
        reads it. The plan then uses neither measured profiles nor an administrator's defaults.
        """
        manifest = manifest_of(job, name or _unnamed(job), self._namespace)
        wanted = parse_job(manifest)
        try:
            if cluster is not None:
                found, points = preview.planned(wanted, _cluster(cluster))
                return Plan(preview.document(found, points))
            namespace = wanted.namespace or self.namespace
            state = self._session.call(preview.observe)
            state = self._session.call(lambda api: preview.with_volumes(api, state, [(wanted, namespace)]))
            refused = self._session.call(lambda api: preview.refusals(api, [(wanted, namespace)]))
            settings = preview.defaults_of(state, namespace)
            found, points = preview.planned(wanted, state.of_job(namespace, wanted.name), *settings, namespace)
        except BadInputError as error:
            raise translated(error) from None
        return Plan(preview.document(found, points), refused[0] if refused else None, state.warning)


def _unnamed(job: JobLike) -> str | None:
    """Return a name for a job that is only a spec; None for a manifest."""
    is_path = isinstance(job, str | Path)
    return None if is_path or (isinstance(job, Mapping) and "metadata" in job) else "unnamed"


def _cluster(given: str | Path | Mapping[str, Any]) -> ClusterState:
    if isinstance(given, str | Path):
        return ClusterState(files.cluster(str(given)), {})
    try:
        return ClusterState(cluster_view(given), {})
    except ValueError as error:
        raise DLJobError(str(error)) from None
