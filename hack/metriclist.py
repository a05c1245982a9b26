"""List every metric that the code exports, as its metric registries contain them."""

from collections.abc import Iterable
from dataclasses import dataclass

from prometheus_client.core import Metric

from dlcontract import DatasetRef, ModelRef, Plan, Rank
from dljob.controller.metrics import Metrics
from dltrain.agent.member.local_ranks import LocalRanks
from dltrain.agent.member.member import Member
from dltrain.agent.metrics import TrainerCollector
from dltrain.record.ledger import Ledger

_SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}


@dataclass(frozen=True)
class Exported:
    """A metric family: its name in queries (for a counter, it ends in ``_total``), its type and its help text."""

    name: str
    type: str
    help: str

    @property
    def series(self) -> tuple[str, ...]:
        """Return the names of the time series that a query may use."""
        stem = self.name.removesuffix("_total") if self.type == "counter" else self.name
        return tuple(stem + suffix for suffix in _SUFFIXES[self.type])


def _listed(families: Iterable[Metric], prefix: str) -> list[Exported]:
    found = [f for f in families if f.name.startswith(prefix)]
    return [Exported(f.name + ("_total" if f.type == "counter" else ""), f.type, f.documentation) for f in found]


def operator() -> list[Exported]:
    return _listed(Metrics().registry.collect(), "dljob_operator_")


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
    local.running, local.last_ranks = {}, {}
    return _listed(TrainerCollector(member, local, lambda: ledger).collect(), "dljob_trainer_")
