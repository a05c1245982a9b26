"""Rules of a DLJobSpec that involve several sections."""

from dljob.api.base import Rule
from dljob.api.compatibility import COMPATIBLE, Condition, chosen, compatible, compatible_with_field
from dljob.api.spec.model import PAIRED_MODELS
from dljob.api.spec.optimizer import ScalingRule
from dljob.api.spec.parallelism import ParallelismStrategy
from dljob.api.spec.rules.computation import COMPUTATION_RULES
from dljob.api.spec.rules.sharded import SHARDED_RULES
from dljob.api.spec.rules.task import TASK_RULES

SPLITS_MODEL = chosen("strategy", "Pipeline", "Tensor")
ASYNCHRONOUS = chosen("synchronization", "Asynchronous", "StaleSynchronous")
_SPLITS, _ASYNCHRONOUS = f"({SPLITS_MODEL.cel})", f"({ASYNCHRONOUS.cel})"

_OPTIMIZER_COLLECTIVE = compatible("strategy", "Optimizer", other="collective")
_SPLIT_COLLECTIVE = compatible("strategy", "Pipeline", "Tensor", other="collective")
_ASYNCHRONOUS_COLLECTIVE = compatible("synchronization", "Asynchronous", "StaleSynchronous", other="collective")
_LAYERED_SERVER = chosen("collective", "LayeredServer")
_COMPRESSION = compatible_with_field("gradientCompression", "gradient_compression")
_RANGE_STRATEGY = compatible_with_field("batchSizeRange", "batch_size_range", "strategy", "synchronization")
_RANGE_FRAMEWORK = compatible_with_field("batchSizeRange", "batch_size_range", "framework")
_IS_TORCHRUN = chosen("framework", "Torchrun")
_SHARDED = chosen("framework", "DLTrain") & (
    chosen("strategy", "Data", "Optimizer") & chosen("synchronization", "Synchronous")
)
_OWN_GRADIENTS = chosen("framework", "Torchrun", "MPI")
_WITHOUT_MODEL = f"({_OWN_GRADIENTS.cel}) && has(self.trainer.command) && size(self.trainer.command) > 0"
_HAS_MODEL = "has(self.model)"
_HAS_NO_MODEL = "!has(self.model)"
_HAS_NO_BATCH = "!has(self.globalBatchSize)"


def _unless(exempt: str, cel: str) -> str:
    """Return the CEL rule ``cel``, relaxed: objects that fulfil the CEL condition ``exempt`` need not fulfil it.

    The API policy (``hack/api_policy.py``) allows this change of a rule of an earlier release, because every object
    that was valid stays valid.
    """
    return f"{exempt} || ({cel})"


_TORCHRUN_TABLE = compatible("framework", "Torchrun", other="collective") & compatible(
    "framework", "Torchrun", other="strategy"
)
_TORCHRUN_ALONE = _TORCHRUN_TABLE & _IS_TORCHRUN.implies(
    Condition(
        "!has(self.optimizer) || !has(self.optimizer.learningRateScaling)",
        lambda s: s.optimizer.learning_rate_scaling is None,
    )
)
_TORCHRUN_MODEL = _TORCHRUN_TABLE & _IS_TORCHRUN.implies(
    Condition(
        "(!has(self.model.syncBatchNorm) || !self.model.syncBatchNorm) && "
        "(!has(self.optimizer) || !has(self.optimizer.learningRateScaling))",
        lambda s: not s.model.sync_batch_norm and s.optimizer.learning_rate_scaling is None,
    )
)
# What the script does, so that predictions fit it. Everything else is as with strategy Data.
_TORCHRUN_SHARDS = _IS_TORCHRUN & (
    chosen("strategy", "Optimizer", "Sharded")
    & chosen("collective", *COMPATIBLE["Torchrun"]["collective"])
    & Condition(
        "(!has(self.model.syncBatchNorm) || !self.model.syncBatchNorm) && "
        "(!has(self.optimizer) || !has(self.optimizer.learningRateScaling))",
        lambda s: not s.model.sync_batch_norm and s.optimizer.learning_rate_scaling is None,
    )
)
_TORCHRUN_WITH_MODEL = Condition(
    _unless(f"{_HAS_NO_MODEL} || ({_TORCHRUN_SHARDS.cel})", _TORCHRUN_MODEL.cel),
    lambda s: not s.model.given or _TORCHRUN_SHARDS.holds(s) or _TORCHRUN_MODEL.holds(s),
)
_TORCHRUN_WITHOUT_MODEL = Condition(
    _unless(_HAS_MODEL, _TORCHRUN_ALONE.cel), lambda s: s.model.given or _TORCHRUN_ALONE.holds(s)
)
_TORCHRUN_TEXT = (
    "trainer.framework Torchrun runs scripts that reduce gradients and update parameters themselves: remove "
    "collective (other than Torch), parallelism.strategy (other than Optimizer and Sharded, which with model say what "
    "the script does), model.syncBatchNorm and optimizer.learningRateScaling, which would have no effect, or choose "
    "DLTrain"
)
_MPI_ALONE = compatible("framework", "MPI", other="collective") & (
    compatible("framework", "MPI", other="strategy") & compatible("framework", "MPI", other="synchronization")
)
_IS_MPI = chosen("framework", "MPI")
_MPI = _IS_MPI.implies(
    _MPI_ALONE
    & Condition(
        "(!has(self.model) || !has(self.model.syncBatchNorm) || !self.model.syncBatchNorm) && "
        "(!has(self.optimizer) || !has(self.optimizer.learningRateScaling))",
        lambda s: not s.model.sync_batch_norm and s.optimizer.learning_rate_scaling is None,
    )
)


RULES = (
    *TASK_RULES,
    Rule(
        "model",
        f"has(self.model) && has(self.dataset) && has(self.globalBatchSize) || ({_WITHOUT_MODEL}) || has(self.task)",
        "model, dataset and globalBatchSize must all be set: set those that are missing. Or run a program of your own, "
        "which needs none of them: set trainer.framework to Torchrun or MPI, and set trainer.command. Or set task, so "
        "that dljob chooses the model",
        lambda s: (
            s.task is not None
            or (s.model.given and s.dataset.given and s.global_batch_size is not None)
            or (_OWN_GRADIENTS.holds(s) and bool(s.trainer.command))
        ),
    ),
    Rule(
        "epochs",
        _unless(
            f"has(self.task) || {_WITHOUT_MODEL} && !has(self.epochs) && !has(self.steps)",
            "has(self.epochs) != has(self.steps)",
        ),
        "set exactly one of epochs and steps",
        lambda s: (
            s.task is not None
            or (s.epochs is None) != (s.steps is None)
            or (_OWN_GRADIENTS.holds(s) and bool(s.trainer.command) and s.epochs is None and s.steps is None)
        ),
    ),
    Rule(
        "trainer.command",
        _unless(
            _HAS_NO_MODEL,
            "!has(self.model.hints) || (has(self.trainer) && has(self.trainer.command) && "
            "size(self.trainer.command) > 0)",
        ),
        "model.hints needs trainer.command: set it to your training script, or choose a built-in model with model.name",
        lambda s: s.model.hints is None or bool(s.trainer.command),
    ),
    Rule(
        "trainer.command",
        _unless(
            _HAS_MODEL,
            "!has(self.trainer) || !has(self.trainer.command) || size(self.trainer.command) == 0 || "
            "!(self.trainer.command[0] == 'deepspeed' || self.trainer.command[0].endsWith('/deepspeed'))",
        ),
        # For jobs with a model, stored jobs must stay valid. The trainer refuses these.
        "trainer.command must not begin with the launcher deepspeed, because the plan decides about nodes and ranks: "
        "replace 'deepspeed OPTIONS train.py ARGS' by 'torchrun train.py ARGS'. The script can still use the "
        "deepspeed library",
        lambda s: s.model.given or not s.trainer.command or s.trainer.command[0].rpartition("/")[2] != "deepspeed",
    ),
    Rule(
        "parallelism.strategy",
        _OPTIMIZER_COLLECTIVE.cel,
        "parallelism.strategy Optimizer needs collective Ring or Torch: remove collective, or set collective to Ring "
        "or Torch",
        _OPTIMIZER_COLLECTIVE.holds,
    ),
    Rule(
        "parallelism.strategy",
        _unless(
            _HAS_NO_MODEL,
            "!has(self.parallelism) || !has(self.parallelism.strategy) || self.parallelism.strategy != 'Tensor' "
            f"|| !has(self.model.name) || self.model.name in {list(PAIRED_MODELS)}",
        ),
        "parallelism.strategy Tensor needs a model with pairs of linear layers: choose "
        f"{', '.join(PAIRED_MODELS)}, or another strategy",
        lambda s: (
            s.parallelism.strategy is not ParallelismStrategy.TENSOR
            or s.model.name is None
            or s.model.name in PAIRED_MODELS
        ),
    ),
    Rule(
        "collective",
        _SPLIT_COLLECTIVE.cel,
        "collective must be Auto with parallelism.strategy Pipeline, and must not be DDP or ParameterServer with "
        "Tensor: remove collective",
        _SPLIT_COLLECTIVE.holds,
    ),
    Rule(
        "collective",
        f"!({_LAYERED_SERVER.cel}) || (!has(self.trainer) || !has(self.trainer.command) || "
        "size(self.trainer.command) == 0)",
        "collective LayeredServer supports built-in models only: remove trainer.command, or choose another collective",
        lambda s: not _LAYERED_SERVER.holds(s) or not s.trainer.command,
    ),
    Rule(
        "collective",
        f"!({_LAYERED_SERVER.cel}) || !has(self.batchSizeRange) && (!has(self.optimizer) || "
        "((!has(self.optimizer.findLearningRate) || !self.optimizer.findLearningRate) && "
        "(!has(self.optimizer.learningRateScaling) || self.optimizer.learningRateScaling.rule != 'AdaScale'))) && "
        "(!has(self.parallelism) || (!has(self.parallelism.microBatches) && "
        "!has(self.parallelism.gradientAccumulation)))",
        "collective LayeredServer gives workers no gradient of the whole batch, which batchSizeRange, "
        "optimizer.findLearningRate, AdaScale and micro-batches need: remove them, or choose another collective",
        lambda s: (
            not _LAYERED_SERVER.holds(s)
            or not (
                s.batch_size_range is not None
                or s.parallelism.micro_batches is not None
                or s.parallelism.gradient_accumulation is not None
                or s.optimizer.find_learning_rate
                or (
                    s.optimizer.learning_rate_scaling is not None
                    and s.optimizer.learning_rate_scaling.rule is ScalingRule.ADA_SCALE
                )
            )
        ),
    ),
    Rule(
        "planning.groups",
        f"!{_SPLITS} || !has(self.planning) || !has(self.planning.groups) || "
        "(size(self.planning.groups) <= 1 && self.planning.groups.all(g, !has(g.batchPerRank)))",
        "parallelism.strategy Pipeline and Tensor need one device type, and every rank processes the whole batch: set "
        "one group without batchPerRank",
        lambda s: (
            not s.parallelism.strategy.splits_model
            or (len(s.planning.groups) <= 1 and all(g.batch_per_rank is None for g in s.planning.groups))
        ),
    ),
    Rule(
        "parallelism.microBatches",
        _unless(
            _HAS_NO_BATCH,
            "!has(self.parallelism) || !has(self.parallelism.microBatches) || "
            "self.parallelism.microBatches <= self.globalBatchSize",
        ),
        "parallelism.microBatches must not exceed globalBatchSize: lower parallelism.microBatches or raise "
        "globalBatchSize",
        lambda s: (
            s.parallelism.micro_batches is None
            or s.global_batch_size is None
            or s.parallelism.micro_batches <= s.global_batch_size
        ),
    ),
    Rule(
        "parallelism.synchronization",
        _unless(
            _HAS_NO_MODEL,
            f"!{_ASYNCHRONOUS} || has(self.model.name) && "
            "(!has(self.trainer) || !has(self.trainer.command) || size(self.trainer.command) == 0)",
        ),
        "parallelism.synchronization Asynchronous and StaleSynchronous support built-in models only: remove "
        "trainer.command, or choose Synchronous",
        lambda s: (
            not s.parallelism.asynchronous or not s.model.given or (s.model.name is not None and not s.trainer.command)
        ),
    ),
    Rule(
        "parallelism.synchronization",
        _ASYNCHRONOUS_COLLECTIVE.cel,
        "parallelism.synchronization Asynchronous and StaleSynchronous need collective ParameterServer: remove "
        "collective, or choose ParameterServer",
        _ASYNCHRONOUS_COLLECTIVE.holds,
    ),
    Rule(
        "parallelism.synchronization",
        f"!{_ASYNCHRONOUS} || !has(self.optimizer) || ((!has(self.optimizer.findLearningRate) || "
        "!self.optimizer.findLearningRate) && (!has(self.optimizer.learningRateScaling) || "
        "self.optimizer.learningRateScaling.rule != 'AdaScale'))",
        "optimizer.findLearningRate and the rule AdaScale of optimizer.learningRateScaling need the gradient of the "
        "whole batch, which only parallelism.synchronization Synchronous computes: choose Synchronous, or remove them",
        lambda s: (
            not s.parallelism.asynchronous
            or not (
                s.optimizer.find_learning_rate
                or (
                    s.optimizer.learning_rate_scaling is not None
                    and s.optimizer.learning_rate_scaling.rule is ScalingRule.ADA_SCALE
                )
            )
        ),
    ),
    Rule(
        "optimizer.findLearningRate",
        f"!{_SPLITS} || !has(self.optimizer) || !has(self.optimizer.findLearningRate) || "
        "!self.optimizer.findLearningRate",
        "optimizer.findLearningRate needs parallelism.strategy Data or Optimizer: remove optimizer.findLearningRate, "
        "or choose Data or Optimizer",
        lambda s: not s.parallelism.strategy.splits_model or not s.optimizer.find_learning_rate,
    ),
    Rule(
        "optimizer.findLearningRate",
        "!has(self.optimizer) || !has(self.optimizer.findLearningRate) || !self.optimizer.findLearningRate || "
        "!has(self.trainer) || !has(self.trainer.command) || size(self.trainer.command) == 0",
        "optimizer.findLearningRate supports built-in models only: remove optimizer.findLearningRate or "
        "trainer.command",
        lambda s: not s.optimizer.find_learning_rate or not s.trainer.command,
    ),
    Rule(
        "optimizer.learningRateScaling.rule",
        "!has(self.optimizer) || !has(self.optimizer.learningRateScaling) || "
        "self.optimizer.learningRateScaling.rule != 'AdaScale' || !has(self.parallelism) || "
        "!has(self.parallelism.strategy) || self.parallelism.strategy == 'Data'",
        "optimizer.learningRateScaling.rule AdaScale needs parallelism.strategy Data, because with other strategies "
        "no rank has the whole gradient: choose Data, or another rule",
        lambda s: (
            s.optimizer.learning_rate_scaling is None
            or s.optimizer.learning_rate_scaling.rule is not ScalingRule.ADA_SCALE
            or s.parallelism.strategy is ParallelismStrategy.DATA
        ),
    ),
    Rule(
        "gradientCompression",
        _COMPRESSION.cel,
        "gradientCompression has its own all-reduce and needs parallelism.strategy Data, parallelism.synchronization "
        "Synchronous and trainer.framework DLTrain: remove gradientCompression, or remove collective and choose "
        "these three values",
        _COMPRESSION.holds,
    ),
    Rule(
        "dataset.distribution",
        "!has(self.dataset) || !has(self.dataset.distribution) || self.dataset.distribution != 'Sharded' || "
        f"({_SHARDED.cel})",
        "dataset.distribution Sharded needs trainer.framework DLTrain, parallelism.strategy Data or Optimizer and "
        "parallelism.synchronization Synchronous: choose Full, or choose these values",
        lambda s: not s.dataset.sharded or _SHARDED.holds(s),
    ),
    Rule(
        "dataset.distribution",
        "!has(self.dataset) || !has(self.dataset.distribution) || self.dataset.distribution != 'Sharded' || "
        "!has(self.batchSizeRange)",
        "dataset.distribution Sharded needs a fixed globalBatchSize, because each step takes one sample of each shard: "
        "choose Full, or remove batchSizeRange",
        lambda s: not s.dataset.sharded or s.batch_size_range is None,
    ),
    *SHARDED_RULES,
    *COMPUTATION_RULES,
    Rule(
        "globalBatchSize",
        _unless(_HAS_NO_BATCH, "!has(self.nodes) || !has(self.nodes.min) || self.globalBatchSize >= self.nodes.min"),
        "globalBatchSize must not be below nodes.min, because every rank needs a sample: raise globalBatchSize or "
        "lower nodes.min",
        lambda s: s.global_batch_size is None or s.global_batch_size >= s.nodes.min,
    ),
    Rule(
        "batchSizeRange",
        _unless(
            _HAS_NO_BATCH,
            "!has(self.batchSizeRange) || (has(self.batchSizeRange.min) ? "
            "self.batchSizeRange.min > self.batchSizeRange.max || self.batchSizeRange.min <= self.globalBatchSize && "
            "self.globalBatchSize <= self.batchSizeRange.max : self.globalBatchSize <= self.batchSizeRange.max)",
        ),
        "batchSizeRange must contain globalBatchSize, to which epochs, steps and learningRate refer: widen "
        "batchSizeRange",
        lambda s: (
            s.batch_size_range is None
            or s.global_batch_size is None
            or (s.batch_size_range.min or 1) <= s.global_batch_size <= s.batch_size_range.max
        ),
    ),
    Rule(
        "batchSizeRange.min",
        "!has(self.batchSizeRange) || !has(self.batchSizeRange.min) || !has(self.nodes) || !has(self.nodes.min) || "
        "self.batchSizeRange.min >= self.nodes.min",
        "batchSizeRange.min must not be below nodes.min, because every rank needs a sample: raise batchSizeRange.min "
        "or lower nodes.min",
        lambda s: s.batch_size_range is None or s.batch_size_range.min is None or s.batch_size_range.min >= s.nodes.min,
    ),
    Rule(
        "batchSizeRange",
        _RANGE_STRATEGY.cel,
        "batchSizeRange needs parallelism.strategy Data and parallelism.synchronization Synchronous: remove "
        "batchSizeRange, or choose Data and Synchronous",
        _RANGE_STRATEGY.holds,
    ),
    Rule(
        "batchSizeRange",
        "!has(self.batchSizeRange) || !has(self.planning) || !has(self.planning.groups) || "
        "self.planning.groups.all(g, !has(g.batchPerRank))",
        "batchSizeRange cannot be combined with fixed local batch sizes: remove batchSizeRange, or remove "
        "batchPerRank from planning.groups",
        lambda s: s.batch_size_range is None or all(g.batch_per_rank is None for g in s.planning.groups),
    ),
    Rule(
        "batchSizeRange",
        _RANGE_FRAMEWORK.cel,
        "batchSizeRange needs trainer.framework DLTrain, because the scripts of other frameworks set their own batch "
        "size: remove batchSizeRange, or choose DLTrain",
        _RANGE_FRAMEWORK.holds,
    ),
    Rule(
        "trainer.framework",
        _TORCHRUN_WITH_MODEL.cel,
        _TORCHRUN_TEXT,
        _TORCHRUN_WITH_MODEL.holds,
    ),
    Rule(
        "trainer.framework",
        _TORCHRUN_WITHOUT_MODEL.cel,
        _TORCHRUN_TEXT,
        _TORCHRUN_WITHOUT_MODEL.holds,
    ),
    Rule(
        "trainer.framework",
        _MPI.cel,
        "trainer.framework MPI runs programs that reduce gradients and update parameters themselves: remove collective "
        "(other than MPI), parallelism.strategy, parallelism.synchronization, model.syncBatchNorm and "
        "optimizer.learningRateScaling, which would have no effect, or choose DLTrain",
        _MPI.holds,
    ),
)
