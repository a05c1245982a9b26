"""What the quotas and limit ranges of a namespace leave for a new plan of a job."""

from collections.abc import Iterable
from dataclasses import replace

from dljob.kube import Cache, JobKey
from dljob.scheduling import NamespaceLimits, Reservation


def limits_for(
    key: JobKey, cache: Cache, reserved: Iterable[Reservation], ended: Iterable[JobKey] = ()
) -> NamespaceLimits:
    """Return the limits for a job: its own pods leave with its old plan, and what other plans will create counts.

    ``reserved``: what the other jobs of the namespace reserve. ``ended``: jobs whose pods do not count. The watches of
    quotas and pods are not ordered: for a moment, a new pod may be in neither the quota's usage nor a reservation. If a
    plan counts on its share meanwhile, the API server rejects a pod, and the job is planned again after
    ``scheduling.startTimeout``.
    """
    found = cache.limits(key[0])
    if not found.quotas:
        return found
    gone = {key, *(each for each in ended if each[0] == key[0])}
    usage = [(pod.charge, -1) for each in gone for pod in cache.pods_of(each) if pod.charge is not None]
    usage += [(item.charge, item.uncreated) for item in reserved if item.charge is not None]
    return replace(found, quotas=tuple(quota.with_usage(usage) for quota in found.quotas))
