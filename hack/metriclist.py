"""List every metric that the code exports, as its metric registries contain them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from prometheus_client.core import Metric
from prometheus_client.metrics import MetricWrapperBase

from dlcontract import DatasetRef, ModelRef, Plan, Rank
from dljob.controller.metrics import Metrics
from dltrain.agent.member.local_ranks import LocalRanks
from dltrain.agent.member.member import Member
from dltrain.agent.member.rank_watch import RankWatch
from dltrain.agent.metrics import TrainerCollector
from dltrain.record.ledger import Ledger

_SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}


@dataclass(frozen=True)
class Exported:
    """A metric family: its name in queries (for a counter, it ends in ``_total``), its type, help text and labels."""

    name: str
    type: str
    help: str
    labels: tuple[str, ...] = ()

    @property
    def series(self) -> tuple[str, ...]:
        """Return the names of the time series that a query may use."""
        stem = self.name.removesuffix("_total") if self.type == "counter" else self.name
        return tuple(stem + suffix for suffix in _SUFFIXES[self.type])


def _listed(families: Iterable[Metric], prefix: str, labels: Mapping[str, tuple[str, ...]]) -> list[Exported]:
    """Return the families whose names begin with ``prefix``. ``labels``: the names of their labels, by family."""
    return [
        Exported(f.name + ("_total" if f.type == "counter" else ""), f.type, f.documentation, labels[f.name])
        for f in families
        if f.name.startswith(prefix)
    ]


def operator() -> list[Exported]:
    metrics = Metrics()
    own = [each for each in vars(metrics).values() if isinstance(each, MetricWrapperBase)]
    labels = {family.name: tuple(each._labelnames) for each in own for family in each.describe()}
    return _listed(metrics.registry.collect(), "dljob_operator_", labels)


def trainer() -> list[Exported]:
    """Return the metrics of the trainer pod that runs a job's coordinator, before ranks have reported anything."""
    rank = Rank(rank=0, pod="a-0", host="a-0.a", group="cpu", device="cpu", share=1)
    plan = Plan(
        job="a", namespace="a", uid="a", number=1, ranks=(rank,), global_batch=1, steps=1,
        model=ModelRef(name="mlp"), dataset=DatasetRef(name="digits"),
    )  # fmt: skip
    member, ledger = Member("a-0", "a"), Ledger(plan, None)
    member.plan = plan
    local = LocalRanks.__new__(LocalRanks)  # the constructor would take over this process's children
    local.watch = RankWatch(lambda _: None)
    local.watch.memory.peak_nbytes = 1
    local.running, local.last_ranks = {}, {}
    families = list(TrainerCollector(member, local, lambda: ledger).collect())
    labels = {family.name: tuple(getattr(family, "_labelnames", ())) for family in families}
    return _listed(families, "dljob_trainer_", labels)
