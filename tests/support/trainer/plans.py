"""Plans for the trainer tests."""

from pathlib import Path
from typing import Any

from dlcontract import CheckpointRef, DatasetRef, ModelRef, Plan, Rank, Role
from dltrain.batch.shares import apportion


def make_plan(ranks: int = 1, **changes: Any) -> Plan:
    """Return a plan for digits on equal CPU ranks without checkpoints. ``changes`` are fields of Plan or ``shares``."""
    batch = changes.pop("global_batch", 120)
    shares = changes.pop("shares", apportion(batch, [1] * ranks))
    device, gpu = changes.pop("device", "cpu"), changes.pop("gpu", False)
    fields: dict[str, Any] = {
        "job": "digits",
        "namespace": "default",
        "uid": "0001",
        "number": 1,
        "ranks": tuple(
            Rank(
                rank=r, pod=f"digits-cpu-{r}", host="127.0.0.1", group="cpu", device=device, gpu=gpu, share=share,
                role=Role.WORKER if share else Role.SERVER,
            )
            for r, share in enumerate(shares)
        ),
        "global_batch": batch,
        "model": ModelRef(name="mlp"),
        "dataset": DatasetRef(name="digits"),
        "checkpoint": CheckpointRef(enabled=False),
        "rebalance": False,
    }  # fmt: skip
    if "steps" not in changes:
        fields["epochs"] = 2
    return Plan(**fields | changes)


def saving(folder: Path, **changes: Any) -> CheckpointRef:
    return CheckpointRef(directory=str(folder), **changes)


def write(plan: Plan, folder: Path) -> str:
    """Write the plan to a file and return its path, for $DLTRAIN_PLAN."""
    path = folder / "plan.json"
    path.write_text(plan.to_json())
    return str(path)
