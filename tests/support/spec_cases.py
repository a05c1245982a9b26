"""Valid and invalid specs, each with the text of its error message."""

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


def _from(source: Json) -> Json:
    """Return changes for a job whose script comes from ``source``."""
    return {"trainer": {"command": ["python", "train.py"], "source": source}}


def _without(field: str) -> Json:
    """Return the sharded dataset without one of its fields."""
    return {key: value for key, value in SHARDED.items() if key != field}


# Changes to a minimal spec, and a part of the message of the rule that they break ("" for valid specs).
CASES: dict[str, tuple[Json, str]] = {
    "minimal": ({}, ""),
    "epochs and steps": ({"steps": 1}, "exactly one of epochs and steps"),
    "neither epochs nor steps": ({"epochs": None}, "exactly one of epochs and steps"),
    "steps": ({"epochs": None, "steps": 5}, ""),
    "no model": ({"model": {}}, "exactly one of name (a built-in model) and hints"),
    "model twice": ({"model": {"name": "mlp", "hints": HINTS}, "trainer": {"command": ["a"]}}, "name (a built-in model)"),
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
        {**TASK, "task": {"type": "TextClassification", "target": "a", "text": "b", "within": "20m"},
         "dataset": {"uri": "pvc://a/b.csv", "sha256": SHA256}, "nodes": {"max": 2}}, "",
    ),
    "task with a model": ({**TASK, "model": {"name": "mlp"}}, "remove those that are set, or remove task"),
    "task with epochs": ({**TASK, "epochs": 1}, "remove those that are set, or remove task"),
    "task with a batch size": ({**TASK, "globalBatchSize": 1}, "remove those that are set, or remove task"),
    "task with a range of batch sizes": ({**TASK, "batchSizeRange": {"max": 2}}, "remove those that are set"),
    "task with a precision": ({**TASK, "precision": "BF16"}, "remove those that are set, or remove task"),
    "task with a script": (
        {**TASK, "trainer": {"command": ["python", "a.py"]}}, "remove trainer.command, trainer.source",
    ),
    "task with another framework": ({**TASK, "trainer": {"framework": "MPI"}}, "remove trainer.command"),
    "task with an image": ({**TASK, "trainer": {"image": "a"}}, ""),
    "task with a built-in dataset": ({**TASK, "dataset": {"name": "iris"}}, "task needs dataset.uri"),
    "task with a file of the image": ({**TASK, "dataset": {"uri": "file:///a.csv"}}, "task needs dataset.uri"),
    "task without a dataset": ({**TASK, "dataset": None}, "task needs dataset.uri"),
    "task with a number of samples": (
        {**TASK, "dataset": {"uri": "pvc://a/b.csv", "samples": 9}}, "counts the samples itself",
    ),
    "task without checkpoints": ({**TASK, "checkpoint": {"enabled": False}}, "on the volume of the checkpoints"),
    "task with checkpoints in S3": ({**TASK, "checkpoint": {"uri": "s3://bucket/a"}}, "on the volume of the checkpoints"),
    "task in parts": ({**TASK, "parallelism": {"strategy": "Tensor"}}, "does not support parallelism.strategy"),
    "target of a language model": (
        {**TASK, "task": {"type": "LanguageModelling", "target": "a"}}, "choose another type than LanguageModelling",
    ),
    "target of images": (
        {**TASK, "task": {"type": "ImageClassification", "target": "a"}}, "choose another type than LanguageModelling",
    ),
    "text of a table": ({**TASK, "task": {"type": "TabularRegression", "text": "a"}}, "text is for the types"),
    "task without time": ({**TASK, "task": {"type": "TabularRegression", "within": "0s"}}, "within must be more than 0"),
    "all of fetching": (
        {"dataset": {"uri": "s3://a/b", "samples": 9, "sha256": SHA256, "secretName": "s", "cacheClaimName": "c"}}, "",
    ),
    "fetching": ({"dataset": {"uri": "https://a.example/b.npz?c=d", "samples": 9, "size": "9Gi"}}, ""),
    "shards": ({"dataset": SHARDED}, ""),
    "shards from S3": ({"dataset": {**SHARDED, "uri": "s3://a/b.bin", "secretName": "s", "sha256": SHA256}}, ""),
    "shards of a built-in set": (
        {"dataset": {"name": "iris", "distribution": "Sharded", "sampleBytes": 1}}, "distribution Sharded needs",
    ),
    "shards of a folder": ({"dataset": {**SHARDED, "uri": "https://a/SHA256SUMS"}}, "of one .npz, .npy or .bin file"),
    "shards of a claim": (
        {"dataset": {**_without("size"), "uri": "pvc://a/b.npz"}}, "distribution Sharded needs",
    ),
    "shards in a cache": (
        {"dataset": {**_without("size"), "cacheClaimName": "c"}}, "distribution Sharded needs",
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
        {"dataset": SHARDED, "batchSizeRange": {"max": 16}}, "needs a fixed globalBatchSize",
    ),
    "shards with ZeRO-1": ({"dataset": SHARDED, "parallelism": {"strategy": "Optimizer"}}, ""),
    "checksum of a mounted file": ({"dataset": {"uri": "pvc://a/b", "samples": 9, "sha256": SHA256}}, ""),
    "checksum of a built-in set": ({"dataset": {"name": "iris", "sha256": SHA256}}, "set uri, or remove sha256"),
    "secret for what is mounted": (
        {"dataset": {"uri": "pvc://a/b", "samples": 9, "secretName": "s"}}, "use an http, https or s3 uri",
    ),
    "room for a built-in set": ({"dataset": {"name": "iris", "size": "9Gi"}}, "are for data that is fetched"),
    "cache and room": (
        {"dataset": {"uri": "http://a/b", "samples": 9, "size": "9Gi", "cacheClaimName": "c"}}, "remove one of them",
    ),
    "until a target": ({"until": {"metric": "accuracy", "atLeast": 0.97, "patience": 5}}, ""),
    "until a low value": ({"until": {"metric": "val/loss", "atMost": -1.5}}, ""),
    "until nothing": ({"until": {"metric": "loss"}}, "exactly one of atLeast and atMost"),
    "until two values": (
        {"until": {"metric": "loss", "atLeast": 1.0, "atMost": 2.0}}, "exactly one of atLeast and atMost",
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
        {"runPolicy": {"failureRules": [
            {"action": "Ignore", "onNodeConditions": [{"type": "Ready", "status": "Unknown"}, {"type": "example.com/Gpu"}]}
        ]}},
        "",
    ),
    "failure rule for conditions of pods": (
        {"runPolicy": {"failureRules": [{"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]}]}},
        "",
    ),
    "failure rule for nodes and pods": (
        {"runPolicy": {"failureRules": [
            {"action": "Count", "onNodeConditions": [{"type": "A"}], "onPodConditions": [{"type": "A"}]}
        ]}},
        "expected exactly one of onExitCodes",
    ),
    "failure rule for a condition of every pod": (
        {"runPolicy": {"failureRules": [{"action": "Ignore", "onPodConditions": [{"type": "Ready", "status": "False"}]}]}},
        "expected none of the types PodScheduled",
    ),
    "args without command": ({"trainer": {"args": ["-v"]}}, "args needs command"),
    "no args": ({"trainer": {"args": []}}, ""),
    "script from a config map": (_from({"configMap": {"name": "scripts"}}), ""),
    "script from git": (_from({"git": {"url": "https://git.example/team/train.git", "revision": COMMIT}}), ""),
    "script from git, with a folder and a secret": (
        _from({"git": {
            "url": "http://git.example:3000/a/b", "revision": COMMIT, "path": "examples/v1.2/.hidden", "secretName": "git",
        }}),
        "",
    ),
    "script from a branch": (
        _from({"git": {"url": "https://git.example/team/train.git", "revision": "main"}}), "full hash of a commit (40 hex",
    ),
    "script from a short hash": (
        _from({"git": {"url": "https://git.example/team/train.git", "revision": COMMIT[:12]}}), "full hash of a commit",
    ),
    "script from an archive": (_from({"archive": {"uri": "s3://scripts/v1.tar.gz", "sha256": SHA256, "path": "v1"}}), ""),
    "script from an archive on a claim": (_from({"archive": {"uri": "pvc://scripts/v1/a.zip"}}), ""),
    "script from a claim with a secret": (
        _from({"archive": {"uri": "pvc://scripts/a.zip", "secretName": "s"}}), "secretName is for archives that are fetched",
    ),
    "script from nowhere": (_from({}), "set exactly one of configMap, git and archive"),
    "script from two places": (
        _from({"configMap": {"name": "scripts"}, "archive": {"uri": "pvc://scripts/a.zip"}}), "set exactly one of configMap",
    ),
    "script that is not run": (
        {"trainer": {"source": {"configMap": {"name": "scripts"}}}}, "source needs command: set command",
    ),
    "no scratch space": ({"trainer": {"scratch": {"size": "0.0Gi"}}}, "size must be more than 0: set Auto or a size"),
    "scratch space of a given size": ({"trainer": {"scratch": {"size": "20Gi"}}}, ""),
    "scratch space that is to be chosen": ({"trainer": {"scratch": {"size": "Auto"}}}, ""),
    "no time between checkpoints": ({"checkpoint": {"interval": "0m0.0s"}}, "interval must be more than 0"),
    "a time between checkpoints that is to be chosen": ({"checkpoint": {"interval": "Auto"}}, ""),
    "a short time between checkpoints": ({"checkpoint": {"interval": "0m0.5s"}}, ""),
    "no time until the deadline": ({"objective": {"minimize": "Cost", "deadline": "0s"}}, "deadline must be more than 0"),
    "min above max": ({"nodes": {"min": 4, "max": 2}}, "lower min or raise max"),
    "max alone": ({"nodes": {"max": 1}}, ""),
    "min alone": ({"nodes": {"min": 4}}, ""),
    "batch smaller than ranks": ({"globalBatchSize": 2, "nodes": {"min": 3}}, "lower nodes.min"),
    "batch as large as ranks": ({"globalBatchSize": 3, "nodes": {"min": 3}}, ""),
    "range of batches": ({"batchSizeRange": {"max": 64}}, ""),
    "range of batches, both ends": ({"batchSizeRange": {"min": 2, "max": 64}, "nodes": {"min": 2}}, ""),
    "range of batches without the batch": ({"batchSizeRange": {"max": 4}}, "batchSizeRange must contain globalBatchSize"),
    "range of batches above the batch": (
        {"batchSizeRange": {"min": 16, "max": 64}}, "batchSizeRange must contain globalBatchSize",
    ),
    "range of batches the wrong way round": ({"batchSizeRange": {"min": 16, "max": 4}}, "lower min or raise max"),
    "range of batches below ranks": (
        {"batchSizeRange": {"min": 2, "max": 64}, "nodes": {"min": 3}}, "batchSizeRange.min must not be below nodes.min",
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
        {"batchSizeRange": {"max": 64}, "planning": {"mode": "Fixed", "groups": [{"device": "cpu", "nodes": 1}]}}, "",
    ),
    "range of batches for torchrun": (
        {"batchSizeRange": {"max": 64}, "trainer": {"command": ["a"], "framework": "Torchrun"}},
        "batchSizeRange needs trainer.framework DLTrain",
    ),
    "agent injected for torchrun": (
        {"trainer": {"command": ["a"], "framework": "Torchrun", "agent": "Injected"}}, ""
    ),
    "agent injected for MPI": ({"trainer": {"command": ["a"], "framework": "MPI", "agent": "Injected"}}, ""),
    "elastic script": ({"trainer": {"command": ["a"], "framework": "Torchrun", "elastic": True}}, ""),
    "elastic without torchrun": ({"trainer": {"command": ["a"], "elastic": True}}, "elastic needs framework Torchrun"),
    "agent chosen for dltrain": ({"trainer": {"command": ["a"], "agent": "FromImage"}}, ""),
    "agent injected for dltrain": (
        {"trainer": {"command": ["a"], "agent": "Injected"}}, "agent Injected needs framework Torchrun or MPI",
    ),
    "torchrun by torch": ({"collective": "Torch", "trainer": {"command": ["a"], "framework": "Torchrun"}}, ""),
    "torchrun by a tree": (
        {"collective": "Tree", "trainer": {"command": ["a"], "framework": "Torchrun"}},
        "trainer.framework Torchrun runs scripts that reduce gradients",
    ),
    "sharded optimizer for torchrun": (
        {"parallelism": {"strategy": "Optimizer"}, "trainer": {"command": ["a"], "framework": "Torchrun"}},
        "remove collective (other than Torch), parallelism.strategy",
    ),
    "batch norm for torchrun": (
        {"model": {"name": "mlp", "syncBatchNorm": True}, "trainer": {"command": ["a"], "framework": "Torchrun"}},
        "parallelism.strategy, model.syncBatchNorm",
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
        {**MPI_ONLY, "trainer": {"framework": "MPI"}, "epochs": 1}, "model, dataset and globalBatchSize must all be set",
    ),
    "mpi without a model by a tree": ({**MPI_ONLY, "collective": "Tree"}, "trainer.framework MPI runs programs"),
    "torchrun without a model": (TORCHRUN_ONLY, ""),
    "torchrun with a global batch alone": ({**TORCHRUN_ONLY, "globalBatchSize": 8, "steps": 3}, ""),
    "torchrun without a model by a tree": (
        {**TORCHRUN_ONLY, "collective": "Tree"}, "trainer.framework Torchrun runs scripts that reduce gradients",
    ),
    "deepspeed launcher": (
        {**TORCHRUN_ONLY, "trainer": {"command": ["/opt/bin/deepspeed", "a.py"], "framework": "Torchrun"}},
        "replace 'deepspeed OPTIONS train.py ARGS' by 'torchrun train.py ARGS'",
    ),
    "variables from objects": (
        {"trainer": {
            "env": [
                {"name": "A", "valueFrom": {"secretKeyRef": {"name": "s", "key": "a.b", "optional": True}}},
                {"name": "B", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "b"}}},
                {"name": "C", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['a.example/b']"}}},
            ],
            "envFrom": [{"prefix": "A_", "secretRef": {"name": "s"}}, {"configMapRef": {"name": "c"}}],
        }},
        "",
    ),
    "variable from two objects": (
        {"trainer": {"env": [{"name": "A", "valueFrom": {
            "secretKeyRef": {"name": "s", "key": "a"}, "fieldRef": {"fieldPath": "metadata.name"}}}]}},
        "set exactly one of secretKeyRef, configMapKeyRef and fieldRef",
    ),
    "variable with a value and a source": (
        {"trainer": {"env": [{"name": "A", "value": "a", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}]}},
        "valueFrom cannot be combined with value",
    ),
    "variables from nothing": ({"trainer": {"envFrom": [{"prefix": "A"}]}}, "set exactly one of secretRef and configMapRef"),
    "torchrun with both lengths": ({**TORCHRUN_ONLY, "epochs": 1, "steps": 3}, "exactly one of epochs and steps"),
    "torchrun without a model and a command": (
        {**TORCHRUN_ONLY, "trainer": {"framework": "Torchrun"}, "epochs": 1}, "model, dataset and globalBatchSize must all be set",
    ),
    "a script without a model": (
        {**TORCHRUN_ONLY, "trainer": {"command": ["a"]}, "epochs": 1}, "model, dataset and globalBatchSize must all be set",
    ),
    "no model at all": ({"model": None}, "model, dataset and globalBatchSize must all be set"),
    "no global batch size": ({"globalBatchSize": None}, "model, dataset and globalBatchSize must all be set"),
    "Fixed without groups": ({"planning": {"mode": "Fixed"}}, "list the node groups"),
    "groups without Fixed": ({"planning": {"groups": [{"device": "cpu", "nodes": 1}]}}, "list the node groups"),
    "Fixed": ({"planning": {"mode": "Fixed", "groups": [{"device": "cpu", "nodes": 1}]}}, ""),
    "planning without mode": ({"planning": {"candidates": 3}}, ""),
    "sharded optimizer": ({"parallelism": {"strategy": "Optimizer"}}, ""),
    "sharded optimizer by a ring": ({"parallelism": {"strategy": "Optimizer"}, "collective": "Ring"}, ""),
    "sharded optimizer by a tree": (
        {"parallelism": {"strategy": "Optimizer"}, "collective": "Tree"}, "needs collective Ring or Torch",
    ),
    "pipeline": ({"parallelism": {"strategy": "Pipeline", "stages": 2, "microBatches": 3}}, ""),
    "pipeline without stages": ({"parallelism": {"strategy": "Pipeline"}}, "strategy Pipeline, which needs it"),
    "stages of nothing": ({"parallelism": {"stages": 2}}, "stages is for parallelism.strategy Pipeline"),
    "micro-batches of nothing": (
        {"parallelism": {"strategy": "Tensor", "microBatches": 2}}, "microBatches needs strategy Data, Optimizer or Pipeline",
    ),
    "micro-batches of Auto": (
        {"parallelism": {"strategy": "Auto", "microBatches": 2}}, "microBatches needs strategy Data",
    ),
    "accumulated gradients": ({"parallelism": {"strategy": "Optimizer", "microBatches": 2}}, ""),
    "accumulation with Auto": ({"parallelism": {"strategy": "Auto", "gradientAccumulation": "Auto"}}, ""),
    "accumulated gradients of a script": ({**OPTED_IN, "trainer": {"command": ["a"]}}, ""),
    "accumulation in a pipeline": (
        {"parallelism": {"strategy": "Pipeline", "stages": 2, "gradientAccumulation": "Auto"}}, "remove gradientAccum",
    ),
    "a fixed number of chosen micro-batches": (
        {"parallelism": {"microBatches": 2, "gradientAccumulation": "Auto"}}, "remove one of the two",
    ),
    "asynchronous accumulation": (
        {"parallelism": {"synchronization": "Asynchronous", "gradientAccumulation": "Auto"}},
        "needs synchronization Synchronous",
    ),
    "automatic precision": ({"precision": "Auto"}, ""),
    "automatic precision of a pipeline": ({"precision": "Auto", "parallelism": {"strategy": "Tensor"}}, ""),
    "bfloat16": ({"precision": "BF16", "parallelism": {"strategy": "Optimizer"}, "collective": "Ring"}, ""),
    "bfloat16 of a script": ({"precision": "BF16", "trainer": {"command": ["a"]}}, ""),
    "bfloat16 in parts": ({"precision": "BF16", "parallelism": {"strategy": "Tensor"}}, "need parallelism.strategy Data"),
    "asynchronous float16": (
        {"precision": "FP16", "parallelism": {"synchronization": "Asynchronous"}}, "parallelism.synchronization Synchr",
    ),
    "bfloat16 with a layered server": ({"precision": "BF16", "collective": "LayeredServer"}, "other than LayeredServer"),
    "precision of a torchrun script": ({**TORCHRUN_ONLY, "precision": "FP32"}, "precision needs trainer.framework DLT"),
    "automatic precision of an MPI program": ({**MPI_ONLY, "precision": "Auto"}, "precision needs trainer.framework DLT"),
    "float16 with a range test": (
        {"precision": "FP16", "optimizer": {"findLearningRate": True}}, "precision FP16 scales losses",
    ),
    "search by the accuracy": ({"optimizer": {"findLearningRate": True, "learningRateCurve": "Accuracy"}}, ""),
    "curve without a search": (
        {"optimizer": {"learningRateCurve": "Loss"}}, "learningRateCurve is the curve of the learning-rate range test",
    ),
    "bfloat16 with a range test": ({"precision": "BF16", "optimizer": {"findLearningRate": True}}, ""),
    "automatic activation checkpointing": ({"activationCheckpointing": "Auto"}, ""),
    "automatic activation checkpointing of a pipeline": (
        {"activationCheckpointing": "Auto", "parallelism": {"strategy": "Tensor"}}, "",
    ),
    "activation checkpointing": ({**GPT, "activationCheckpointing": "Always", "parallelism": {"strategy": "Auto"}}, ""),
    "activation checkpointing without blocks": ({"activationCheckpointing": "Always"}, "needs a model with blocks: choo"),
    "activation checkpointing without hints": (
        {"activationCheckpointing": "Always", "model": {"hints": HINTS}, "trainer": {"command": ["a"]}},
        "set model.hints.checkpointedActivationBytesPerSample",
    ),
    "activation checkpointing of a script": (
        {
            "activationCheckpointing": "Always", "trainer": {"command": ["a"]},
            "model": {"hints": {**HINTS, "activationBytesPerSample": 9, "checkpointedActivationBytesPerSample": 3}},
        }, "",
    ),
    "activation checkpointing like GPT-2": (
        {"activationCheckpointing": "Always", "model": {"hints": {"like": "GPT-2"}}, "trainer": {"command": ["a"]}}, "",
    ),
    "activation checkpointing like VGG-16": (
        {"activationCheckpointing": "Always", "model": {"hints": {"like": "VGG-16"}}, "trainer": {"command": ["a"]}},
        "needs a model with blocks",
    ),
    "more bytes with activation checkpointing": (
        {"model": {"hints": {**HINTS, "checkpointedActivationBytesPerSample": 3}}, "trainer": {"command": ["a"]}},
        "must not exceed activationBytesPerSample",
    ),
    "bytes with activation checkpointing like GPT-2": (
        {"model": {"hints": {"like": "GPT-2", "checkpointedActivationBytesPerSample": 3}}, "trainer": {"command": ["a"]}},
        "must not exceed activationBytesPerSample",
    ),
    "activation checkpointing in parts": (
        {**GPT, "activationCheckpointing": "Always", "parallelism": {"strategy": "Tensor"}}, "Always needs parallelism.str",
    ),
    "asynchronous activation checkpointing": (
        {**GPT, "activationCheckpointing": "Always", "parallelism": {"synchronization": "Asynchronous"}},
        "activationCheckpointing Always needs parallelism.strategy",
    ),
    "activation checkpointing with a layered server": (
        {**GPT, "activationCheckpointing": "Always", "collective": "LayeredServer"}, "other than LayeredServer",
    ),
    "activation checkpointing of a torchrun script": (
        {**TORCHRUN_ONLY, "activationCheckpointing": "Never"}, "activationCheckpointing needs trainer.framework DLTrain",
    ),
    "more micro-batches than samples": (
        {"parallelism": {"strategy": "Pipeline", "stages": 2, "microBatches": 99}, "globalBatchSize": 9},
        "microBatches must not exceed globalBatchSize",
    ),
    "tensor": ({"parallelism": {"strategy": "Tensor"}, "collective": "Tree"}, ""),
    "tensor without pairs": (
        {"parallelism": {"strategy": "Tensor"}, "model": {"name": "resnet18"}}, "pairs of linear layers: choose mlp",
    ),
    "a part of a program": (
        {"parallelism": {"strategy": "Tensor"}, "trainer": {"command": ["a"]}}, "Tensor support built-in models only",
    ),
    "pipeline by a ring": (
        {"parallelism": {"strategy": "Pipeline", "stages": 2}, "collective": "Ring"}, "collective must be Auto",
    ),
    "tensor by a server": (
        {"parallelism": {"strategy": "Tensor"}, "collective": "ParameterServer"}, "must not be ParameterServer with Tensor",
    ),
    "pipeline on a group": (
        {
            "parallelism": {"strategy": "Pipeline", "stages": 2},
            "planning": {"mode": "Fixed", "groups": [{"device": "cpu", "nodes": 2}]},
        },
        "",
    ),
    "uneven pipeline": (
        {
            "parallelism": {"strategy": "Pipeline", "stages": 2},
            "planning": {"mode": "Fixed", "groups": [{"device": "cpu", "nodes": 2, "batchPerRank": 1}]},
        },
        "one group without batchPerRank",
    ),
    "search for a part": (
        {"parallelism": {"strategy": "Tensor"}, "optimizer": {"findLearningRate": True}},
        "findLearningRate needs parallelism.strategy Data or Optimizer",
    ),
    "layered server": ({"collective": "LayeredServer", "parallelism": {"strategy": "Auto"}}, ""),
    "layered server of a program": (
        {"collective": "LayeredServer", "trainer": {"command": ["a"]}}, "LayeredServer supports built-in models only",
    ),
    "layered server, asynchronous": (
        {"collective": "LayeredServer", "parallelism": {"synchronization": "Asynchronous"}}, "need collective ParameterServer",
    ),
    "layered server of a sharded optimizer": (
        {"collective": "LayeredServer", "parallelism": {"strategy": "Optimizer"}}, "Optimizer needs collective Ring or Torch",
    ),
    "layered server of a tensor": (
        {"collective": "LayeredServer", "parallelism": {"strategy": "Tensor"}}, "collective must be Auto with",
    ),
    "layered server and a search": (
        {"collective": "LayeredServer", "optimizer": {"findLearningRate": True}},
        "LayeredServer gives workers no gradient of the whole batch",
    ),
    "layered server and measured scaling": (
        {"collective": "LayeredServer", "optimizer": {"learningRateScaling": {"rule": "AdaScale", "baseBatchSize": 4}}},
        "LayeredServer gives workers no gradient of the whole batch",
    ),
    "compressed gradients, asynchronous": (
        {"gradientCompression": "BF16", "parallelism": {"synchronization": "Asynchronous"}},
        "gradientCompression has its own all-reduce",
    ),
    "compressed gradients": ({"gradientCompression": "BF16"}, ""),
    "compressed gradients, a collective": (
        {"gradientCompression": "FP16", "collective": "Ring"}, "gradientCompression has its own all-reduce",
    ),
    "asynchronous": ({"parallelism": {"synchronization": "Asynchronous"}, "collective": "ParameterServer"}, ""),
    "within a bound": ({"parallelism": {"synchronization": "StaleSynchronous", "stalenessBound": 3}}, ""),
    "no bound": ({"parallelism": {"synchronization": "StaleSynchronous"}}, "StaleSynchronous, which needs it"),
    "bound of nothing": ({"parallelism": {"stalenessBound": 3}}, "stalenessBound is for parallelism.synchronization StaleSynchronous"),
    "asynchronous parts": (
        {"parallelism": {"synchronization": "Asynchronous", "strategy": "Tensor"}}, "need strategy Data",
    ),
    "asynchronous ring": (
        {"parallelism": {"synchronization": "Asynchronous"}, "collective": "Ring"}, "need collective ParameterServer",
    ),
    "asynchronous program": (
        {"parallelism": {"synchronization": "Asynchronous"}, "trainer": {"command": ["a"]}},
        "StaleSynchronous support built-in models only",
    ),
    "asynchronous search": (
        {"parallelism": {"synchronization": "Asynchronous"}, "optimizer": {"findLearningRate": True}},
        "need the gradient of the whole batch",
    ),
    "measured scaling": ({"optimizer": {"learningRateScaling": {"rule": "AdaScale", "baseBatchSize": 4}}}, ""),
    "measured scaling of a sharded optimizer": (
        {
            "optimizer": {"learningRateScaling": {"rule": "AdaScale", "baseBatchSize": 4}},
            "parallelism": {"strategy": "Optimizer"},
        },
        "needs parallelism.strategy Data",
    ),
    "search": ({"optimizer": {"findLearningRate": True}}, ""),
    "search and scaling": (
        {"optimizer": {"findLearningRate": True, "learningRateScaling": {"rule": "Linear", "baseBatchSize": 4}}},
        "remove learningRateScaling",
    ),
    "search for a program": (
        {"optimizer": {"findLearningRate": True}, "trainer": {"command": ["a"]}}, "findLearningRate supports built-in models only",
    ),
    "claim and class": (
        {"checkpoint": {"volume": {"claimName": "a", "storageClassName": "b"}}}, "no effect on an existing claim",
    ),
    "shared claim": ({"checkpoint": {"volume": {"shared": True, "storageClassName": "b"}}}, ""),
    "claim name and a shared claim": (
        {"checkpoint": {"volume": {"claimName": "a", "shared": False}}}, "shared has no effect on an existing claim",
    ),
    "claim": ({"checkpoint": {"volume": {"claimName": "a"}}}, ""),
    "checkpoints in an object store": (
        {"checkpoint": {"uri": "s3://models.example/team-a/digits/", "secretName": "s3", "stagingSize": "9Gi"}}, "",
    ),
    "checkpoints in a bucket": ({"checkpoint": {"uri": "s3://models", "stagingSize": "Auto", "keep": 5}}, ""),
    "checkpoints in an object store, with a size": ({"checkpoint": {"uri": "s3://a-1", "volume": {"size": "2Gi"}}}, ""),
    "checkpoints at another scheme": ({"checkpoint": {"uri": "gs://models/a"}}, "other schemes"),
    "checkpoints without a bucket": ({"checkpoint": {"uri": "s3:///a"}}, "uri must name a bucket"),
    "checkpoints in a bucket with capitals": ({"checkpoint": {"uri": "s3://Models/a"}}, "uri must name a bucket"),
    "checkpoints with a query": ({"checkpoint": {"uri": "s3://models/a?b"}}, "other characters"),
    "checkpoints with a quote": ({"checkpoint": {"uri": "s3://models/a\"b"}}, "other characters"),
    "checkpoints with an empty folder": ({"checkpoint": {"uri": "s3://models//a"}}, "uri must name a bucket"),
    "object store and claim": (
        {"checkpoint": {"uri": "s3://models", "volume": {"claimName": "a"}}}, "need no claim: remove uri",
    ),
    "object store and storage class": (
        {"checkpoint": {"uri": "s3://models", "volume": {"storageClassName": "a"}}}, "need no claim: remove uri",
    ),
    "object store and shared claim": (
        {"checkpoint": {"uri": "s3://models", "volume": {"shared": True}}}, "need no claim: remove uri",
    ),
    "credentials without an object store": (
        {"checkpoint": {"secretName": "a"}}, "secretName is for checkpoints in an object store: set uri",
    ),
    "staging without an object store": ({"checkpoint": {"stagingSize": "1Gi"}}, "set uri, or remove stagingSize"),
    "staging without space": ({"checkpoint": {"uri": "s3://models", "stagingSize": "0Gi"}}, "must be more than 0"),
}  # fmt: skip


def spec_of(changes: Json) -> Json:
    return {key: value for key, value in {**MINIMAL, **changes}.items() if value is not None}


JOB: Json = {
    "apiVersion": "dljob.dev/v1alpha1",
    "kind": "DLJob",
    "metadata": {"name": "a"},
    "spec": MINIMAL,
}

# Field to set, its value, and the words that the error message must contain.
BAD: dict[str, tuple[str, Any, tuple[str, ...]]] = {
    "unknown field": ("batchSize", 3, ("batchSize",)),
    "unknown field inside": ("checkpoint.intervall", "5s", ("checkpoint", "intervall")),
    "unknown field in a list": ("trainer.env", [{"name": "A", "valu": "b"}], ("env", "valu")),
    "wrong type": ("globalBatchSize", "many", ("globalBatchSize", "integer")),
    "wrong type, a list for a map": ("model", [], ("model",)),
    "zero batch": ("globalBatchSize", 0, ("globalBatchSize", "0", "1")),
    "unknown model": ("model.name", "resnet-9000", ("model.name", "resnet-9000", "digits-cnn")),
    "unknown dataset": ("dataset.name", "mnist", ("dataset.name", "mnist", "digits")),
    "unknown collective": ("collective", "Telepathy", ("collective", "Telepathy", "Ring")),
    "unknown optimizer": ("optimizer.name", "sgd", ("optimizer.name", "sgd", "SGD")),
    "empty device": ("devices", [""], ("devices",)),
    "two overrides of a manager": (
        "podTemplateOverrides",
        [{"manager": "a"}, {"manager": "a"}],
        ("podTemplateOverrides", "manager"),
    ),
    "a variable twice": ("trainer.env", [{"name": "A"}, {"name": "B"}, {"name": "A"}], ("trainer.env", "name")),
    "learning rate of zero": ("optimizer.learningRate", 0, ("optimizer.learningRate", "0")),
    "momentum of one": ("optimizer.momentum", 1, ("optimizer.momentum", "1")),
    "no duration": ("objective.deadline", "soon", ("objective.deadline", "soon")),
    "no quantity": ("resources.memory", "lots", ("resources.memory", "lots")),
    "thousandths of bytes": ("resources.memory", "512m", ("resources.memory", "512m")),
    "thousandths of bytes on a volume": ("checkpoint.volume.size", "512m", ("checkpoint.volume.size", "512m")),
    "min above max": ("nodes", {"min": 4, "max": 2}, ("nodes", "lower min or raise max")),
    "batch smaller than ranks": ("nodes.min", 9, ("globalBatchSize", "lower nodes.min")),
    "a folder of a dataset": ("dataset", {"uri": "https://a/b/", "samples": 1}, ("dataset.uri", "https://a/b/")),
    "a dataset above its folder": ("dataset", {"uri": "http://a/..", "samples": 1}, ("dataset.uri", "http://a/..")),
    "thousandths of a byte of data": (
        "dataset",
        {"uri": "http://a/b", "samples": 1, "size": "5m"},
        ("dataset.size", "5m"),
    ),
    "unknown field of a pod": (
        "trainer.env",
        [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "spec.containers"}}}],
        ("fieldPath", "spec.containers"),
    ),
    "no checksum": ("dataset", {"uri": "http://a/b", "samples": 1, "sha256": "A1"}, ("dataset.sha256", "A1")),
    "password in the URL of a script": (
        "trainer.source",
        {"git": {"url": "https://a:b@git.example/c", "revision": COMMIT}},
        ("source.git.url", "a:b@git"),
    ),
    "script from ssh": (
        "trainer.source",
        {"git": {"url": "git@git.example:a/b.git", "revision": COMMIT}},
        ("source.git.url", "git@git.exa"),
    ),
    "folder above the script": (
        "trainer.source",
        {"archive": {"uri": "pvc://a/b", "path": "a/../../b"}},
        ("source.archive.path", "a/../../b"),
    ),
    "claim without a file for a script": (
        "trainer.source",
        {"archive": {"uri": "pvc://a/"}},
        ("archive.uri", "pvc://a/"),
    ),
    "script outside of its claim": (
        "trainer.source",
        {"archive": {"uri": "pvc://a/../b.zip"}},
        ("archive.uri", "pvc://a/../b.zip"),
    ),
    "archive in the image": ("trainer.source", {"archive": {"uri": "file:///a"}}, ("archive.uri", "file:///a")),
    "toleration of a value that no taint has": (
        "scheduling.tolerations",
        [{"key": "a", "value": "0" * 64}],
        ("tolerations", "value"),
    ),
    "unknown effect of a toleration": (
        "scheduling.tolerations",
        [{"key": "a", "effect": "Never"}],
        ("tolerations", "effect", "Never", "NoExecute"),
    ),
    "unknown scheme of a dataset": ("dataset", {"uri": "ftp://a/b", "samples": 1}, ("dataset.uri", "ftp://a/b")),
}


def with_field(path: str, value: Any) -> Json:
    job = copy.deepcopy(JOB)
    target = job["spec"]
    *parents, last = path.split(".")
    for name in parents:
        target = target.setdefault(name, {})
    target[last] = value
    return job
