"""Valid and invalid specs: what a job trains, from which data, and with which program."""

from support.specs.small_specs import COMMIT, HINTS, MPI_ONLY, SHA256, SHARDED, TASK, TORCHRUN_ONLY, Json


def _from(source: Json) -> Json:
    """Return changes for a job whose script comes from ``source``."""
    return {"trainer": {"command": ["python", "train.py"], "source": source}}


def _without(field: str) -> Json:
    """Return the sharded dataset without one of its fields."""
    return {key: value for key, value in SHARDED.items() if key != field}


# Changes to a minimal spec, and a part of the message of the rule that they break ("" for valid specs).
TRAINING: dict[str, tuple[Json, str]] = {
    "minimal": ({}, ""),
    "epochs and steps": ({"steps": 1}, "exactly one of epochs and steps"),
    "neither epochs nor steps": ({"epochs": None}, "exactly one of epochs and steps"),
    "steps": ({"epochs": None, "steps": 5}, ""),
    "no model": ({"model": {}}, "exactly one of name (a built-in model) and hints"),
    "model twice": (
        {"model": {"name": "mlp", "hints": HINTS}, "trainer": {"command": ["a"]}},
        "name (a built-in model)",
    ),
    "hints without command": ({"model": {"hints": HINTS}}, "needs trainer.command"),
    "hints with an empty command": ({"model": {"hints": HINTS}, "trainer": {"command": []}}, "needs trainer.command"),
    "hints like a known model": ({"model": {"hints": {"like": "BERT-base"}}, "trainer": {"command": ["a"]}}, ""),
    "hints of two kinds": (
        {"model": {"hints": {"like": "GPT-2", "parameters": 1}}, "trainer": {"command": ["a"]}},
        "set hints.like (a known model",
    ),
    "half of the hints": (
        {"model": {"hints": {"parameters": 1}}, "trainer": {"command": ["a"]}},
        "set both hints.parameters and hints.flopsPerSample",
    ),
    "own program": ({"model": {"hints": HINTS}, "trainer": {"command": ["python", "a.py"]}}, ""),
    "no dataset": ({"dataset": {}}, "exactly one of name (a built-in dataset) and uri"),
    "dataset twice": ({"dataset": {"name": "iris", "uri": "file:///a", "samples": 1}}, "name (a built-in dataset)"),
    "uri without samples": ({"dataset": {"uri": "pvc://a/b"}}, "samples is required with uri"),
    "uri": ({"dataset": {"uri": "pvc://a/b", "samples": 9}}, ""),
    "task": (TASK, ""),
    "all of a task": (
        {
            **TASK,
            "task": {"type": "TextClassification", "target": "a", "text": "b", "within": "20m"},
            "dataset": {"uri": "pvc://a/b.csv", "sha256": SHA256},
            "nodes": {"max": 2},
        },
        "",
    ),
    "task with a model": ({**TASK, "model": {"name": "mlp"}}, "remove those that are set, or remove task"),
    "task with epochs": ({**TASK, "epochs": 1}, "remove those that are set, or remove task"),
    "task with a batch size": ({**TASK, "globalBatchSize": 1}, "remove those that are set, or remove task"),
    "task with a range of batch sizes": ({**TASK, "batchSizeRange": {"max": 2}}, "remove those that are set"),
    "task with a precision": ({**TASK, "precision": "BF16"}, "remove those that are set, or remove task"),
    "task with a script": (
        {**TASK, "trainer": {"command": ["python", "a.py"]}},
        "remove trainer.command, trainer.source",
    ),
    "task with another framework": ({**TASK, "trainer": {"framework": "MPI"}}, "remove trainer.command"),
    "task with an image": ({**TASK, "trainer": {"image": "a"}}, ""),
    "task with a built-in dataset": ({**TASK, "dataset": {"name": "iris"}}, "task needs dataset.uri"),
    "task with a file of the image": ({**TASK, "dataset": {"uri": "file:///a.csv"}}, "task needs dataset.uri"),
    "task without a dataset": ({**TASK, "dataset": None}, "task needs dataset.uri"),
    "task with a number of samples": (
        {**TASK, "dataset": {"uri": "pvc://a/b.csv", "samples": 9}},
        "counts the samples itself",
    ),
    "task without checkpoints": ({**TASK, "checkpoint": {"enabled": False}}, "on the volume of the checkpoints"),
    "task with checkpoints in S3": (
        {**TASK, "checkpoint": {"uri": "s3://bucket/a"}},
        "on the volume of the checkpoints",
    ),
    "task in parts": ({**TASK, "parallelism": {"strategy": "Tensor"}}, "does not support parallelism.strategy"),
    "target of a language model": (
        {**TASK, "task": {"type": "LanguageModelling", "target": "a"}},
        "choose another type than LanguageModelling",
    ),
    "target of images": (
        {**TASK, "task": {"type": "ImageClassification", "target": "a"}},
        "choose another type than LanguageModelling",
    ),
    "text of a table": ({**TASK, "task": {"type": "TabularRegression", "text": "a"}}, "text is for the types"),
    "task without time": (
        {**TASK, "task": {"type": "TabularRegression", "within": "0s"}},
        "within must be more than 0",
    ),
    "all of fetching": (
        {"dataset": {"uri": "s3://a/b", "samples": 9, "sha256": SHA256, "secretName": "s", "cacheClaimName": "c"}},
        "",
    ),
    "fetching": ({"dataset": {"uri": "https://a.example/b.npz?c=d", "samples": 9, "size": "9Gi"}}, ""),
    "shards": ({"dataset": SHARDED}, ""),
    "shards from S3": ({"dataset": {**SHARDED, "uri": "s3://a/b.bin", "secretName": "s", "sha256": SHA256}}, ""),
    "shards of a built-in set": (
        {"dataset": {"name": "iris", "distribution": "Sharded", "sampleBytes": 1}},
        "distribution Sharded needs",
    ),
    "shards of a folder": ({"dataset": {**SHARDED, "uri": "https://a/SHA256SUMS"}}, "of one .npz, .npy or .bin file"),
    "shards of a claim": (
        {"dataset": {**_without("size"), "uri": "pvc://a/b.npz"}},
        "distribution Sharded needs",
    ),
    "shards in a cache": (
        {"dataset": {**_without("size"), "cacheClaimName": "c"}},
        "distribution Sharded needs",
    ),
    "shards without size": ({"dataset": _without("size")}, "needs size and sampleBytes"),
    "shards of unknown samples": ({"dataset": _without("sampleBytes")}, "needs size and sampleBytes"),
    "shards for torchrun": (
        {"dataset": SHARDED, "trainer": {"framework": "Torchrun", "command": ["a"]}, "collective": "Torch"},
        "dataset.distribution Sharded needs trainer.framework DLTrain",
    ),
    "shards in a pipeline": (
        {"dataset": SHARDED, "parallelism": {"strategy": "Pipeline", "stages": 2}},
        "needs trainer.framework DLTrain, parallelism",
    ),
    "shards of several batch sizes": (
        {"dataset": SHARDED, "batchSizeRange": {"max": 16}},
        "needs a fixed globalBatchSize",
    ),
    "shards with ZeRO-1": ({"dataset": SHARDED, "parallelism": {"strategy": "Optimizer"}}, ""),
    "checksum of a mounted file": ({"dataset": {"uri": "pvc://a/b", "samples": 9, "sha256": SHA256}}, ""),
    "checksum of a built-in set": ({"dataset": {"name": "iris", "sha256": SHA256}}, "set uri, or remove sha256"),
    "secret for what is mounted": (
        {"dataset": {"uri": "pvc://a/b", "samples": 9, "secretName": "s"}},
        "use an http, https or s3 uri",
    ),
    "room for a built-in set": ({"dataset": {"name": "iris", "size": "9Gi"}}, "are for data that is fetched"),
    "cache and room": (
        {"dataset": {"uri": "http://a/b", "samples": 9, "size": "9Gi", "cacheClaimName": "c"}},
        "remove one of them",
    ),
    "until a target": ({"until": {"metric": "accuracy", "atLeast": 0.97, "patience": 5}}, ""),
    "until a low value": ({"until": {"metric": "val/loss", "atMost": -1.5}}, ""),
    "until nothing": ({"until": {"metric": "loss"}}, "exactly one of atLeast and atMost"),
    "until two values": (
        {"until": {"metric": "loss", "atLeast": 1.0, "atMost": 2.0}},
        "exactly one of atLeast and atMost",
    ),
    "failure rule for exit codes": (
        {"runPolicy": {"failureRules": [{"action": "FailJob", "onExitCodes": {"values": [3]}}]}},
        "",
    ),
    "failure rule for reasons": (
        {"runPolicy": {"failureRules": [{"action": "Ignore", "onReasons": ["Hung"]}]}},
        "",
    ),
    "failure rule for nothing": (
        {"runPolicy": {"failureRules": [{"action": "FailJob"}]}},
        "expected exactly one of onExitCodes",
    ),
    "failure rule for both": (
        {"runPolicy": {"failureRules": [{"action": "FailJob", "onExitCodes": {"values": [3]}, "onReasons": ["Hung"]}]}},
        "expected exactly one of onExitCodes, onReasons, onPodConditions and onNodeConditions",
    ),
    "failure rule for conditions of nodes": (
        {
            "runPolicy": {
                "failureRules": [
                    {
                        "action": "Ignore",
                        "onNodeConditions": [{"type": "Ready", "status": "Unknown"}, {"type": "example.com/Gpu"}],
                    }
                ]
            }
        },
        "",
    ),
    "failure rule for conditions of pods": (
        {"runPolicy": {"failureRules": [{"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]}]}},
        "",
    ),
    "failure rule for nodes and pods": (
        {
            "runPolicy": {
                "failureRules": [
                    {"action": "Count", "onNodeConditions": [{"type": "A"}], "onPodConditions": [{"type": "A"}]}
                ]
            }
        },
        "expected exactly one of onExitCodes",
    ),
    "failure rule for a condition of every pod": (
        {
            "runPolicy": {
                "failureRules": [{"action": "Ignore", "onPodConditions": [{"type": "Ready", "status": "False"}]}]
            }
        },
        "expected none of the types PodScheduled",
    ),
    "args without command": ({"trainer": {"args": ["-v"]}}, "args needs command"),
    "no args": ({"trainer": {"args": []}}, ""),
    "script from a config map": (_from({"configMap": {"name": "scripts"}}), ""),
    "script from git": (_from({"git": {"url": "https://git.example/team/train.git", "revision": COMMIT}}), ""),
    "script from git, with a folder and a secret": (
        _from(
            {
                "git": {
                    "url": "http://git.example:3000/a/b",
                    "revision": COMMIT,
                    "path": "examples/v1.2/.hidden",
                    "secretName": "git",
                }
            }
        ),
        "",
    ),
    "script from a branch": (
        _from({"git": {"url": "https://git.example/team/train.git", "revision": "main"}}),
        "full hash of a commit (40 hex",
    ),
    "script from a short hash": (
        _from({"git": {"url": "https://git.example/team/train.git", "revision": COMMIT[:12]}}),
        "full hash of a commit",
    ),
    "script from an archive": (
        _from({"archive": {"uri": "s3://scripts/v1.tar.gz", "sha256": SHA256, "path": "v1"}}),
        "",
    ),
    "script from an archive on a claim": (_from({"archive": {"uri": "pvc://scripts/v1/a.zip"}}), ""),
    "script from a claim with a secret": (
        _from({"archive": {"uri": "pvc://scripts/a.zip", "secretName": "s"}}),
        "secretName is for archives that are fetched",
    ),
    "script from nowhere": (_from({}), "set exactly one of configMap, git and archive"),
    "script from two places": (
        _from({"configMap": {"name": "scripts"}, "archive": {"uri": "pvc://scripts/a.zip"}}),
        "set exactly one of configMap",
    ),
    "script that is not run": (
        {"trainer": {"source": {"configMap": {"name": "scripts"}}}},
        "source needs command: set command",
    ),
    "no scratch space": ({"trainer": {"scratch": {"size": "0.0Gi"}}}, "size must be more than 0: set Auto or a size"),
    "scratch space of a given size": ({"trainer": {"scratch": {"size": "20Gi"}}}, ""),
    "scratch space that is to be chosen": ({"trainer": {"scratch": {"size": "Auto"}}}, ""),
    "no time between checkpoints": ({"checkpoint": {"interval": "0m0.0s"}}, "interval must be more than 0"),
    "a time between checkpoints that is to be chosen": ({"checkpoint": {"interval": "Auto"}}, ""),
    "a short time between checkpoints": ({"checkpoint": {"interval": "0m0.5s"}}, ""),
    "no time until the deadline": (
        {"objective": {"minimize": "Cost", "deadline": "0s"}},
        "deadline must be more than 0",
    ),
    "min above max": ({"nodes": {"min": 4, "max": 2}}, "lower min or raise max"),
    "max alone": ({"nodes": {"max": 1}}, ""),
    "min alone": ({"nodes": {"min": 4}}, ""),
    "batch smaller than ranks": ({"globalBatchSize": 2, "nodes": {"min": 3}}, "lower nodes.min"),
    "batch as large as ranks": ({"globalBatchSize": 3, "nodes": {"min": 3}}, ""),
    "range of batches": ({"batchSizeRange": {"max": 64}}, ""),
    "range of batches, both ends": ({"batchSizeRange": {"min": 2, "max": 64}, "nodes": {"min": 2}}, ""),
    "range of batches without the batch": (
        {"batchSizeRange": {"max": 4}},
        "batchSizeRange must contain globalBatchSize",
    ),
    "range of batches above the batch": (
        {"batchSizeRange": {"min": 16, "max": 64}},
        "batchSizeRange must contain globalBatchSize",
    ),
    "range of batches the wrong way round": ({"batchSizeRange": {"min": 16, "max": 4}}, "lower min or raise max"),
    "range of batches below ranks": (
        {"batchSizeRange": {"min": 2, "max": 64}, "nodes": {"min": 3}},
        "batchSizeRange.min must not be below nodes.min",
    ),
    "range of batches and a pipeline": (
        {"batchSizeRange": {"max": 64}, "parallelism": {"strategy": "Pipeline", "stages": 2, "microBatches": 4}},
        "batchSizeRange needs parallelism.strategy Data",
    ),
    "range of batches, asynchronous": (
        {"batchSizeRange": {"max": 64}, "parallelism": {"synchronization": "Asynchronous"}},
        "and parallelism.synchronization Synchronous",
    ),
    "range of batches and fixed shares": (
        {
            "batchSizeRange": {"max": 64},
            "planning": {"mode": "Fixed", "groups": [{"device": "cpu", "nodes": 1, "batchPerRank": 8}]},
        },
        "remove batchPerRank from planning.groups",
    ),
    "range of batches on a group": (
        {"batchSizeRange": {"max": 64}, "planning": {"mode": "Fixed", "groups": [{"device": "cpu", "nodes": 1}]}},
        "",
    ),
    "range of batches for torchrun": (
        {"batchSizeRange": {"max": 64}, "trainer": {"command": ["a"], "framework": "Torchrun"}},
        "batchSizeRange needs trainer.framework DLTrain",
    ),
    "agent injected for torchrun": ({"trainer": {"command": ["a"], "framework": "Torchrun", "agent": "Injected"}}, ""),
    "agent injected for MPI": ({"trainer": {"command": ["a"], "framework": "MPI", "agent": "Injected"}}, ""),
    "elastic script": ({"trainer": {"command": ["a"], "framework": "Torchrun", "elastic": True}}, ""),
    "elastic without torchrun": ({"trainer": {"command": ["a"], "elastic": True}}, "elastic needs framework Torchrun"),
    "agent chosen for dltrain": ({"trainer": {"command": ["a"], "agent": "FromImage"}}, ""),
    "agent injected for dltrain": (
        {"trainer": {"command": ["a"], "agent": "Injected"}},
        "agent Injected needs framework Torchrun or MPI",
    ),
    "torchrun by torch": ({"collective": "Torch", "trainer": {"command": ["a"], "framework": "Torchrun"}}, ""),
    "torchrun by a tree": (
        {"collective": "Tree", "trainer": {"command": ["a"], "framework": "Torchrun"}},
        "trainer.framework Torchrun runs scripts that reduce gradients",
    ),
    "sharded optimizer for torchrun": (
        {"parallelism": {"strategy": "Optimizer"}, "trainer": {"command": ["a"], "framework": "Torchrun"}},
        "",
    ),
    "batch norm for torchrun": (
        {"model": {"name": "mlp", "syncBatchNorm": True}, "trainer": {"command": ["a"], "framework": "Torchrun"}},
        "model.syncBatchNorm and optimizer.learningRateScaling",
    ),
    "range of batches for mpi": (
        {"batchSizeRange": {"max": 64}, "trainer": {"command": ["a"], "framework": "MPI"}},
        "batchSizeRange needs trainer.framework DLTrain",
    ),
    "mpi by mpi": ({"collective": "MPI", "trainer": {"command": ["a"], "framework": "MPI"}}, ""),
    "mpi by torch": (
        {"collective": "Torch", "trainer": {"command": ["a"], "framework": "MPI"}},
        "trainer.framework MPI runs programs that reduce gradients",
    ),
    "sharded optimizer for mpi": (
        {"parallelism": {"strategy": "Optimizer"}, "trainer": {"command": ["a"], "framework": "MPI"}},
        "remove collective (other than MPI), parallelism.strategy",
    ),
    "asynchronous mpi without a model": (
        {**MPI_ONLY, "parallelism": {"synchronization": "Asynchronous"}},
        "parallelism.strategy, parallelism.synchronization",
    ),
    "batch norm for mpi": (
        {"model": {"name": "mlp", "syncBatchNorm": True}, "trainer": {"command": ["a"], "framework": "MPI"}},
        "parallelism.synchronization, model.syncBatchNorm",
    ),
    "mpi without a model": (MPI_ONLY, ""),
    "mpi without a model and a command": (
        {**MPI_ONLY, "trainer": {"framework": "MPI"}, "epochs": 1},
        "model, dataset and globalBatchSize must all be set",
    ),
    "mpi without a model by a tree": ({**MPI_ONLY, "collective": "Tree"}, "trainer.framework MPI runs programs"),
    "torchrun without a model": (TORCHRUN_ONLY, ""),
    "torchrun with a global batch alone": ({**TORCHRUN_ONLY, "globalBatchSize": 8, "steps": 3}, ""),
    "torchrun without a model by a tree": (
        {**TORCHRUN_ONLY, "collective": "Tree"},
        "trainer.framework Torchrun runs scripts that reduce gradients",
    ),
    "deepspeed launcher": (
        {**TORCHRUN_ONLY, "trainer": {"command": ["/opt/bin/deepspeed", "a.py"], "framework": "Torchrun"}},
        "replace 'deepspeed OPTIONS train.py ARGS' by 'torchrun train.py ARGS'",
    ),
    "variables from objects": (
        {
            "trainer": {
                "env": [
                    {"name": "A", "valueFrom": {"secretKeyRef": {"name": "s", "key": "a.b", "optional": True}}},
                    {"name": "B", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "b"}}},
                    {"name": "C", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['a.example/b']"}}},
                ],
                "envFrom": [{"prefix": "A_", "secretRef": {"name": "s"}}, {"configMapRef": {"name": "c"}}],
            }
        },
        "",
    ),
    "variable from two objects": (
        {
            "trainer": {
                "env": [
                    {
                        "name": "A",
                        "valueFrom": {
                            "secretKeyRef": {"name": "s", "key": "a"},
                            "fieldRef": {"fieldPath": "metadata.name"},
                        },
                    }
                ]
            }
        },
        "set exactly one of secretKeyRef, configMapKeyRef and fieldRef",
    ),
    "variable with a value and a source": (
        {"trainer": {"env": [{"name": "A", "value": "a", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}]}},
        "valueFrom cannot be combined with value",
    ),
    "variables from nothing": (
        {"trainer": {"envFrom": [{"prefix": "A"}]}},
        "set exactly one of secretRef and configMapRef",
    ),
    "torchrun with both lengths": ({**TORCHRUN_ONLY, "epochs": 1, "steps": 3}, "exactly one of epochs and steps"),
    "torchrun without a model and a command": (
        {**TORCHRUN_ONLY, "trainer": {"framework": "Torchrun"}, "epochs": 1},
        "model, dataset and globalBatchSize must all be set",
    ),
    "a script without a model": (
        {**TORCHRUN_ONLY, "trainer": {"command": ["a"]}, "epochs": 1},
        "model, dataset and globalBatchSize must all be set",
    ),
    "no model at all": ({"model": None}, "model, dataset and globalBatchSize must all be set"),
    "no global batch size": ({"globalBatchSize": None}, "model, dataset and globalBatchSize must all be set"),
}  # fmt: skip
