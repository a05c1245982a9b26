"""Rules of a DLJobSpec about forward and backward pass: precision, activation checkpointing, batches of replicas."""

from dljob.api.base import Rule
from dljob.api.compatibility import COMPATIBLE, Condition, chosen
from dljob.api.spec.model import BLOCK_MODELS, REFERENCES_WITHOUT_BLOCKS
from dljob.api.spec.parallelism import ActivationCheckpointing, Precision


def _of_plan(field: str) -> Condition:
    """Return the condition that the strategy, collective and synchronization allow the ``field`` in ``COMPATIBLE``."""
    return chosen("collective", *COMPATIBLE[field]["collective"]) & (
        chosen("strategy", *COMPATIBLE[field]["strategy"])
        & chosen("synchronization", *COMPATIBLE[field]["synchronization"])
    )


_16_BITS = "!has(self.precision) || !(self.precision in ['BF16', 'FP16']) || "
_PRECISION_FRAMEWORK = chosen("framework", *COMPATIBLE["precision"]["framework"])
_PRECISION_PLAN = _of_plan("precision")
_ALWAYS = "!has(self.activationCheckpointing) || self.activationCheckpointing != 'Always' || "
_CHECKPOINTING_FRAMEWORK = chosen("framework", *COMPATIBLE["activationCheckpointing"]["framework"])
_CHECKPOINTING_PLAN = _of_plan("activationCheckpointing")


def _described(name: str, attribute: str) -> Condition:
    """Return the condition that the job runs a script for Torchrun whose field says what it does.

    The field must not be Auto, because nothing can choose for the script, and the plan must know the model, because
    otherwise it predicts nothing.
    """
    return chosen("framework", "Torchrun") & Condition(
        f"has(self.model) && has(self.{name}) && self.{name} != 'Auto'",
        lambda s: s.model.given and getattr(s, attribute) is not None and getattr(s, attribute).value != "Auto",
    )


_PRECISION_DESCRIBED = _described("precision", "precision")
_CHECKPOINTING_DESCRIBED = _described("activationCheckpointing", "activation_checkpointing")
_HAS_BLOCKS = Condition(
    "!has(self.model) || !has(self.model.name) && !has(self.model.hints) || "
    f"has(self.model.name) && self.model.name in {list(BLOCK_MODELS)} || has(self.model.hints) && "
    f"(has(self.model.hints.like) && !(self.model.hints.like in {list(REFERENCES_WITHOUT_BLOCKS)}) || "
    "has(self.model.hints.checkpointedActivationBytesPerSample))",
    lambda s: not s.model.given or s.model.has_blocks,
)

COMPUTATION_RULES = (
    Rule(
        "parallelism.replicas",
        "!has(self.parallelism) || !has(self.parallelism.replicas) || !has(self.globalBatchSize) || "
        "self.parallelism.replicas <= self.globalBatchSize",
        "parallelism.replicas must not exceed globalBatchSize, because each replica needs a sample: lower "
        "parallelism.replicas or raise globalBatchSize",
        lambda s: (
            s.parallelism.replicas is None
            or s.global_batch_size is None
            or s.parallelism.replicas <= s.global_batch_size
        ),
    ),
    Rule(
        "precision",
        f"!has(self.precision) || ({_PRECISION_FRAMEWORK.cel}) || ({_PRECISION_DESCRIBED.cel})",
        "precision needs trainer.framework DLTrain, because scripts for Torchrun and MPI choose it themselves: remove "
        "precision, or choose DLTrain. Or say what a script for Torchrun does: set model, and set precision to FP32, "
        "BF16 or FP16",
        lambda s: s.precision is None or _PRECISION_FRAMEWORK.holds(s) or _PRECISION_DESCRIBED.holds(s),
    ),
    Rule(
        "precision",
        f"{_16_BITS}{_PRECISION_PLAN.cel}",
        "precision BF16 and FP16 need parallelism.strategy Data, Optimizer, Sharded or Auto, "
        "parallelism.synchronization Synchronous and a collective other than LayeredServer: set precision to Auto or "
        "FP32, or choose these values",
        lambda s: s.precision not in (Precision.BF16, Precision.FP16) or _PRECISION_PLAN.holds(s),
    ),
    Rule(
        "precision",
        "!has(self.precision) || self.precision != 'FP16' || !has(self.optimizer) || "
        "!has(self.optimizer.findLearningRate) || !self.optimizer.findLearningRate",
        "precision FP16 scales losses, which optimizer.findLearningRate does not: remove optimizer.findLearningRate, "
        "or choose BF16, FP32 or Auto",
        lambda s: s.precision is not Precision.FP16 or not s.optimizer.find_learning_rate,
    ),
    Rule(
        "activationCheckpointing",
        f"!has(self.activationCheckpointing) || ({_CHECKPOINTING_FRAMEWORK.cel}) || ({_CHECKPOINTING_DESCRIBED.cel})",
        "activationCheckpointing needs trainer.framework DLTrain, because scripts for Torchrun and MPI choose it "
        "themselves: remove activationCheckpointing, or choose DLTrain. Or say what a script for Torchrun does: set "
        "model, and set activationCheckpointing to Always or Never",
        lambda s: (
            s.activation_checkpointing is None or _CHECKPOINTING_FRAMEWORK.holds(s) or _CHECKPOINTING_DESCRIBED.holds(s)
        ),
    ),
    Rule(
        "activationCheckpointing",
        f"{_ALWAYS}{_CHECKPOINTING_PLAN.cel}",
        "activationCheckpointing Always needs parallelism.strategy Data, Optimizer, Sharded or Auto, "
        "parallelism.synchronization Synchronous and a collective other than LayeredServer: set "
        "activationCheckpointing to Auto or Never, or choose these values",
        lambda s: s.activation_checkpointing is not ActivationCheckpointing.ALWAYS or _CHECKPOINTING_PLAN.holds(s),
    ),
    Rule(
        "activationCheckpointing",
        f"{_ALWAYS}{_HAS_BLOCKS.cel}",
        f"activationCheckpointing Always needs a model with blocks: choose model.name {', '.join(BLOCK_MODELS)} or "
        f"a model.hints.like other than {', '.join(REFERENCES_WITHOUT_BLOCKS)}, set "
        "model.hints.checkpointedActivationBytesPerSample, or set activationCheckpointing to Never",
        lambda s: s.activation_checkpointing is not ActivationCheckpointing.ALWAYS or _HAS_BLOCKS.holds(s),
    ),
)
