"""Small specs of DLJobs, to which tests apply changes."""

import copy
from typing import Any

Json = dict[str, Any]
MINIMAL: Json = {"model": {"name": "mlp"}, "dataset": {"name": "digits"}, "globalBatchSize": 8, "epochs": 1}
HINTS = {"parameters": 1, "flopsPerSample": 1}
SHA256 = "0123456789abcdef" * 4
TORCHRUN_ONLY: Json = {
    **dict.fromkeys(MINIMAL), "trainer": {"image": "a", "command": ["torchrun", "a.py"], "framework": "Torchrun"},
}  # fmt: skip
SHARDED: Json = {
    "uri": "https://a.example/b.npz?c=d", "samples": 9, "sampleBytes": 4, "size": "9Gi", "distribution": "Sharded",
}  # fmt: skip
GPT: Json = {"model": {"name": "gpt-mini"}, "dataset": {"name": "synthetic-tokens"}}
OPTED_IN: Json = {"parallelism": {"gradientAccumulation": "Auto"}}
COMMIT = "0123456789" * 4
MPI_ONLY: Json = {**TORCHRUN_ONLY, "trainer": {"image": "a", "command": ["mpirun", "a"], "framework": "MPI"}}

TASK: Json = {
    **dict.fromkeys(MINIMAL), "task": {"type": "TabularClassification"}, "dataset": {"uri": "https://a.example/b.csv"},
}  # fmt: skip


def spec_of(changes: Json) -> Json:
    return {key: value for key, value in {**MINIMAL, **changes}.items() if value is not None}


JOB: Json = {
    "apiVersion": "dljob.dev/v1alpha1",
    "kind": "DLJob",
    "metadata": {"name": "a"},
    "spec": MINIMAL,
}


def with_field(path: str, value: Any) -> Json:
    job = copy.deepcopy(JOB)
    target = job["spec"]
    *parents, last = path.split(".")
    for name in parents:
        target = target.setdefault(name, {})
    target[last] = value
    return job
