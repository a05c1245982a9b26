"""Rules of a DLJobSpec about ``task``: the fields that it needs, and those that it chooses itself."""

from typing import Any

from dljob.api.base import Rule
from dljob.api.compatibility import chosen

_OTHER_FRAMEWORK = chosen("framework", "Torchrun", "MPI")
_SPLITS_MODEL = chosen("strategy", "Pipeline", "Tensor")


def _chooses(spec: Any) -> bool:
    """Return True if a DLJobSpec sets a field that a task chooses."""
    chosen_by_task = (spec.global_batch_size, spec.batch_size_range, spec.epochs, spec.steps)
    chosen_by_script = (spec.precision, spec.activation_checkpointing)
    return spec.model.given or any(value is not None for value in (*chosen_by_task, *chosen_by_script))


TASK_RULES = (
    Rule(
        "dataset.samples",
        "!has(self.dataset) || (!has(self.dataset.uri) || has(self.dataset.samples)) || has(self.task)",
        "dataset.samples is required with uri: set the number of training samples, so that epochs can be planned",
        lambda s: s.dataset.uri is None or s.dataset.samples is not None or s.task is not None,
    ),
    Rule(
        "task",
        "!has(self.task) || !(has(self.model) || has(self.globalBatchSize) || has(self.batchSizeRange) || "
        "has(self.epochs) || has(self.steps) || has(self.precision) || has(self.activationCheckpointing))",
        "task chooses model, globalBatchSize, batchSizeRange, epochs, steps, precision and activationCheckpointing: "
        "remove those that are set, or remove task",
        lambda s: s.task is None or not _chooses(s),
    ),
    Rule(
        "task",
        "!has(self.task) || !has(self.trainer) || !(has(self.trainer.command) && size(self.trainer.command) > 0 || "
        f"has(self.trainer.source) || {_OTHER_FRAMEWORK.cel})",
        "task writes the training script: remove trainer.command, trainer.source and trainer.framework (other than "
        "DLTrain), or remove task",
        lambda s: (
            s.task is None or not (s.trainer.command or s.trainer.source is not None or _OTHER_FRAMEWORK.holds(s))
        ),
    ),
    Rule(
        "task",
        "!has(self.task) || has(self.dataset) && has(self.dataset.uri) && !self.dataset.uri.startsWith('file:') && "
        "!has(self.dataset.samples) && !has(self.dataset.sampleBytes)",
        "task needs dataset.uri with pvc://CLAIM/PATH, https://…, http://… or s3://…, and counts the samples itself: "
        "set dataset.uri to such a location, and remove dataset.name, dataset.samples and dataset.sampleBytes",
        lambda s: (
            s.task is None
            or (
                s.dataset.uri is not None
                and not s.dataset.uri.startswith("file:")
                and s.dataset.samples is s.dataset.sample_bytes is None
            )
        ),
    ),
    Rule(
        "task",
        "!has(self.task) || !has(self.checkpoint) || "
        "(!has(self.checkpoint.enabled) || self.checkpoint.enabled) && !has(self.checkpoint.uri)",
        "task stores the model on the volume of the checkpoints: remove checkpoint.uri and checkpoint.enabled: false, "
        "or remove task",
        lambda s: s.task is None or s.checkpoint.on_volume,
    ),
    Rule(
        "task",
        f"!has(self.task) || !({_SPLITS_MODEL.cel})",
        "task does not support parallelism.strategy Pipeline and Tensor: choose another strategy, or remove task",
        lambda s: s.task is None or not _SPLITS_MODEL.holds(s),
    ),
)
