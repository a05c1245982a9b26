"""Valid and invalid specs, each with the text of its error message."""

from typing import Any

from support.specs.planning_cases import PLANNING
from support.specs.small_specs import COMMIT, Json
from support.specs.training_cases import TRAINING

CASES: dict[str, tuple[Json, str]] = {**TRAINING, **PLANNING}
"""Changes to a minimal spec, and a part of the message of the rule that they break ("" for valid specs)."""

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
    "fraction without quotes": ("resources.cpu", 0.5, ("resources.cpu",)),
    "truth for a quantity": ("resources.cpuLimit", True, ("resources.cpuLimit",)),
    "negative integer for a quantity": ("resources.memory", -1, ("resources.memory", "-1")),
    "no bytes on a volume": ("checkpoint.volume.size", -1, ("checkpoint.volume.size", "-1")),
    "no bytes of scratch space": ("trainer.scratch", {"size": 0}, ("scratch", "size", "0")),
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
