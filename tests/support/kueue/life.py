"""A job in a queue of Kueue that is reconciled step by step, with its Workload; ``replay`` plays the part of Kueue."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

from dljob.job.observed import Observed
from dljob.job.queue import Flavor, QueueSeen
from dljob.kube.objects.trim import workload as trimmed
from dljob.planner import Infeasible
from dljob.reconcile import Desired, parse_observed, reconcile
from dljob.status import find
from support.builders import CONFIG, CPUS, DIGITS, NOW, after, nodes, seen, settled
from support.kueue import replay

Json = dict[str, Any]
API = "kueue.x-k8s.io/v1beta2"
FLAVORS = {"default": Flavor(), "zone-a": Flavor({"zone": "a"}, ({"key": "team", "operator": "Exists"},))}
ELASTIC = {**DIGITS, "nodes": {"min": 1, "max": 3}}
FEW = nodes({"name": "n", "count": 6, "cpu": 8, "memory": "16Gi"})


class Life:
    """A job, its objects and its Workload. Each ``step`` reconciles once and applies the result."""

    def __init__(self, spec: Json | None = None, **job: Any) -> None:
        observed = seen(spec)
        self.observed: Observed = replace(observed, job=replace(observed.job, queue="team-a", **job))
        self.body: Json | None = None
        self.api, self.flavors = API, FLAVORS
        self.view = CPUS
        self.priority: int | None = None
        self.now = NOW
        self.desired = Desired()
        self.infeasible: Infeasible | None = None
        """The result of planning in the place of the planner's; None: the planner plans."""

    def step(self) -> Desired:
        self.now += timedelta(seconds=1)
        seen_ = None if self.body is None else trimmed(self.body)
        queue = QueueSeen(self.api, "" if self.api else "no Kueue", seen_, self.flavors, self.priority)
        self.observed = replace(self.observed, queue=queue, view=self.view)
        parsed = None
        if self.infeasible is not None:
            parsed = replace(parse_observed(self.observed), decision=self.infeasible)
        self.desired = reconcile(self.observed, CONFIG, self.now, parsed)
        self.observed = after(self.observed, self.desired)
        if (change := self.desired.workload) is not None:
            if change.delete:
                self.body = None
            elif change.apply is not None:
                status = {} if self.body is None else self.body.get("status", {})
                meta = {**change.apply["metadata"], "uid": f"wl-{self.now}", "resourceVersion": "1", "generation": 1}
                self.body = {**change.apply, "metadata": meta, "status": status}
            else:
                assert self.body is not None
                part = {"spec": change.spec} if change.spec else {"status": change.status}
                self.body = replay.merged(self.body, part)
        return self.desired

    def steps(self, number: int = 4) -> "Life":
        for _ in range(number):
            self.step()
        return self

    def kueue(self, change: Any, *args: Any) -> "Life":
        assert self.body is not None
        self.body = change(self.body, *args)
        return self

    def wait(self, seconds: float) -> "Life":
        """Let time pass, and then reconcile a few times."""
        self.now += timedelta(seconds=seconds)
        return self.steps()

    def pods(self, *, ready: bool = True) -> "Life":
        self.observed = settled(self.observed, ready=ready)
        self.observed = replace(
            self.observed, sets=tuple(replace(item, made_replicas=item.replicas) for item in self.observed.sets)
        )
        return self

    def running(self) -> "Life":
        """Bring the job to the state in which all pods run under an admission."""
        return self.steps().kueue(replay.admitted).steps().pods().steps()

    @property
    def replicas(self) -> int:
        return sum(item.replicas for item in self.observed.sets)

    def condition(self, kind: str = "Admitted") -> tuple[str, str]:
        assert self.desired.status is not None
        found = find(self.desired.status.conditions, kind)
        assert found is not None, kind
        return found.status.value, found.reason

    def message(self, kind: str = "Admitted") -> str:
        assert self.desired.status is not None
        found = find(self.desired.status.conditions, kind)
        assert found is not None, kind
        return found.message

    def workload(self, kind: str) -> tuple[str, str] | None:
        assert self.body is not None
        found = [item for item in self.body.get("status", {}).get("conditions", ()) if item["type"] == kind]
        return (found[0]["status"], found[0]["reason"]) if found else None
