"""Workload: the training costs per sample and per step. It is the input of the performance model."""

from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from typing import Literal

from dlcontract import Precision
from dljob.perf.workload.datasets import DATASETS, Dataset
from dljob.perf.workload.layer import Layer
from dljob.perf.workload.layers import Net
from dljob.perf.workload.models import MODELS
from dljob.perf.workload.references import REFERENCES

REAL_NBYTES = 4
"""Bytes of an element: parameters, gradients and, without autocast, activations have single precision."""
HALF_NBYTES = 2
"""Bytes of an element in 16 bits. With autocast, the backward pass keeps a copy of all parameters in 16 bits."""
HINTED_RATIO = 0.75
"""Assumed bytes of activations with autocast to 16 bits, divided by those in float32, of a model that only
``spec.model.hints`` describe. It is above that of most layer tables (0.5 to 0.65, GPT-2 0.56, BERT 0.64) and below that
of ResNets with group norms (1.2 to 1.3), whose norms have float32 inputs and outputs."""

OUTPUT_COPIES = 3.0
"""Tensors of the size of the model's output while its backward pass begins, which kept activations do not contain:
the output itself, the logarithms of probabilities, and their gradient (``cross_entropy``)."""

FROZEN_COPIES = 4.0
"""Tensors of the size of the largest activation that exist briefly in a model with frozen parameters. With LoRA, the
outputs of the frozen layer and of its correction are beside their sum. With two, as in other models, ranks with 75
million frozen parameters peaked at up to 1.03 times the plan (``benchmarks/training/model_split/script_memory.py``)."""

Optimizer = Literal["SGD", "Adam", "AdamW"]


@dataclass(frozen=True)
class StatedPairs:
    """The pairs of linear layers that tensor parallelism splits, of a model that only figures describe.

    ``count``: number of pairs. ``units``: those of the pair with the fewest. The other figures are those of all pairs
    together, for a sample: operations of both passes, kept activations of which each rank has its part, and activations
    and gradients that ranks sum; and the bytes of their parameters that are not trained.
    """

    count: int
    units: int
    parameters: int
    flops: float
    activation_nbytes: float
    reduced_nbytes: float
    frozen_nbytes: int = 0


@dataclass(frozen=True)
class Workload:
    """The cost of training one model on one dataset with one optimizer, per sample and per step."""

    name: str
    layers: tuple[Layer, ...]
    activation_nbytes: float
    """Bytes of activations per sample that are kept for the backward pass."""
    transient_nbytes: float
    """Bytes per sample of the largest activation and its gradient, which exist briefly besides the kept activations."""
    sample_nbytes: float
    optimizer_slots: float
    """Optimizer state divided by the size of the parameters: 0 (SGD), 1 (SGD with momentum), 2 (Adam). With a sharded
    optimizer, only one rank's part counts."""
    making_s: float = 0.0
    """Seconds that one core needs to generate a sample of synthetic data."""
    activation_16_nbytes: float = 0.0
    """``activation_nbytes`` with autocast to 16 bits."""
    precision: Precision = "FP32"
    """Number format of forward and backward pass. Parameters, gradients and optimizer state are always float32."""
    checkpointed_nbytes: float | None = None
    """``activation_nbytes`` with activation checkpointing; None if the model has no known blocks."""
    checkpointed_16_nbytes: float | None = None
    """``checkpointed_nbytes`` with autocast to 16 bits."""
    beside_ranks_nbytes: int = 0
    """Main memory in bytes that a pod needs besides its ranks and its agent, such as for the client of an object
    store. With strategy Sharded, each rank needs as much."""
    recomputes: bool = False
    """True with activation checkpointing: blocks keep only their inputs, and their forward pass runs twice."""
    stated_largest_nbytes: int | None = None
    """``largest_parameter_nbytes`` of a model that only figures describe; None if it is unknown."""
    stated_unit: float | None = None
    """Largest unit of strategy Sharded of a model that only figures describe, as a fraction of all parameters; None if
    it is unknown."""
    stated_activation_nbytes: float | None = None
    """Bytes of a sample in the largest activation of a model that only figures describe; None if it is unknown."""
    stated_dense: bool = False
    """True if a model that only figures describe has neither convolutions nor recurrent layers."""
    loss_nbytes: float = 0.0
    """Bytes of a sample in the model's output, the loss and the gradient of the output, if the layers are dense."""
    pairs: StatedPairs | None = None
    """What tensor parallelism splits of a model that only figures describe; None: unknown, or the layers show it."""
    host_calls: tuple[tuple[str, float], ...] | None = None
    """Counted calls of the host in a step by kind (``structure.CALL_S``) of an observed script; None: not counted."""
    frozen_nbytes: int = 0
    """Bytes of parameters that are not trained. They have no gradients and no optimizer state, and ranks exchange them
    only at the start. ``parameters`` does not count them."""
    copied_nbytes: int = 0
    """Bytes of the copy of the training state from which rank 0 writes checkpoints; 0 without checkpoints."""
    reuses_blocks: bool = False
    """True if a tensor fits into the block of a freed one in the heap of ranks on CPUs, as in the trainer image."""

    def __hash__(self) -> int:
        """Return a hash of a few fields. Functions with a cache hash a workload often, and it has many layers."""
        return hash((self.name, self.parameters, self.optimizer_slots, self.activation_nbytes, self.precision))

    @cached_property
    def parameters(self) -> int:
        return sum(layer.parameters for layer in self.layers)

    @cached_property
    def tensors(self) -> int:
        return sum(layer.tensors for layer in self.layers)

    @cached_property
    def largest_parameter_nbytes(self) -> int | None:
        """Return the bytes of the largest trainable tensor, such as an embedding; None if it is unknown."""
        if self.name in (HINTED, OBSERVED):
            return self.stated_largest_nbytes
        return REAL_NBYTES * max(layer.parameters for layer in self.layers)

    @cached_property
    def counts_once(self) -> bool:
        """Return True if ranks on CPUs need hardly more memory than their tensors, of which also the largest are known.

        Heaps that do not reuse blocks, and kernels that copy tensors, need a margin that covers the largest ones.
        """
        activation_known = self.name not in (HINTED, OBSERVED) or self.stated_activation_nbytes is not None
        return self.reuses_blocks and self.is_dense and activation_known and self.largest_parameter_nbytes is not None

    def briefly_nbytes(self, part_nbytes: float | None = None) -> float:
        """Return the bytes per sample of the largest activation and its gradient.

        ``part_nbytes``: the same by the layers of a part of the model, which counts if it is less, unless the largest
        activation is stated, of which nobody knows in which part it is.
        """
        if self.counts_once and self.stated_activation_nbytes is not None:
            return (FROZEN_COPIES if self.frozen_nbytes else 2.0) * self.stated_activation_nbytes
        return self.transient_nbytes if part_nbytes is None else min(self.transient_nbytes, part_nbytes)

    @cached_property
    def has_convolutions(self) -> bool:
        return any(layer.is_conv for layer in self.layers)

    @cached_property
    def is_convolutional(self) -> bool:
        """Return True if convolutions have most of the parameters, unlike in a vision transformer."""
        return 2 * sum(layer.parameters for layer in self.layers if layer.is_conv) > self.parameters

    @cached_property
    def is_dense(self) -> bool:
        """Return True if it is known that no layer is convolutional or recurrent.

        An observed script does not show which of its operations are those of recurrent layers.
        """
        return self.stated_dense or (self.name not in (HINTED, OBSERVED) and not self.has_convolutions)

    @property
    def gradient_nbytes(self) -> int:
        return REAL_NBYTES * self.parameters

    @property
    def parameter_copies_nbytes(self) -> int:
        """Return the bytes of the copies of parameters that autocast makes and the backward pass needs."""
        return 0 if self.precision == "FP32" else HALF_NBYTES * self.parameters

    @property
    def checkpoint_nbytes(self) -> float:
        """Return the bytes of all parameters and of the optimizer state: the most that a checkpoint contains."""
        return (1 + self.optimizer_slots) * REAL_NBYTES * self.parameters + self.frozen_nbytes

    @property
    def frozen_copies_nbytes(self) -> float:
        """Return the bytes of the copies of frozen parameters that autocast makes and the backward pass needs.

        They are assumed to be float32. Frozen parameters in 16 bits need no copies.
        """
        return 0.0 if self.precision == "FP32" else HALF_NBYTES / REAL_NBYTES * self.frozen_nbytes

    @property
    def loading_nbytes(self) -> float:
        """Return the bytes of all parameters and of the weights that the script loads into them, at the start.

        The result is 0 without frozen parameters: the training state then needs more.
        """
        return 2.0 * (self.frozen_nbytes + REAL_NBYTES * self.parameters) if self.frozen_nbytes else 0.0

    @property
    def flops_per_sample(self) -> float:
        """Return the floating-point operations per sample in the forward and backward pass together."""
        return sum(layer.forward_FLOPs + layer.backward_FLOPs for layer in self.layers)


@lru_cache(maxsize=64)
def in_precision(workload: Workload, precision: Precision) -> Workload:
    """Return the workload with forward and backward pass in ``precision``.

    ``workload``: in float32 and without activation checkpointing, as ``builtin`` and ``hinted`` return it. Its
    ``transient_nbytes`` does not change, because the largest activations may be the float32 ones of norms.
    """
    if precision == "FP32":
        return workload
    return replace(
        workload,
        precision=precision,
        activation_nbytes=workload.activation_16_nbytes,
        checkpointed_nbytes=workload.checkpointed_16_nbytes,
    )


@lru_cache(maxsize=64)
def recomputing(workload: Workload) -> Workload:
    """Return the workload with activation checkpointing. It has blocks (``checkpointed_nbytes`` is not None).

    Each block keeps only its input, and computes its forward pass again in the backward pass (Chen et al. 2016). So the
    step has one more forward pass of the blocks, up to the last tensor of each that the backward pass needs.
    """
    assert workload.checkpointed_nbytes is not None, "callers check that the model has blocks"
    return replace(
        workload,
        layers=tuple(layer.recomputed() for layer in workload.layers),
        activation_nbytes=workload.checkpointed_nbytes,
        recomputes=True,
    )


def _slots(optimizer: Optimizer, momentum: float) -> int:
    return 2 if optimizer in ("Adam", "AdamW") else int(momentum > 0)


def misfit(model: str, dataset: str) -> str | None:
    """Return the reason why a built-in model cannot use a built-in dataset, or None if it can."""
    shape, tokens = DATASETS[dataset].shape, DATASETS[dataset].tokens
    if tokens != (model == "gpt-mini"):
        return (
            "found samples that are tokens; expected images or tables"
            if tokens
            else "found samples that are not tokens; expected tokens"
        )
    if model in ("mlp", "gpt-mini") or (len(shape) == 3 and (model != "lenet" or shape[1:] in ((32, 32), (28, 28)))):
        return None
    expected = "images of 32 x 32 or 28 x 28" if model == "lenet" else "images"
    return f"found samples of shape {shape}; expected {expected}"


@cache
def builtin(model: str, dataset: str | None, optimizer: Optimizer = "SGD", momentum: float = 0.9) -> Workload:
    """Return the workload of a built-in model on a built-in dataset.

    ``dataset``: name of the dataset; None: the default dataset of the model in ``MODELS``. Raise ValueError if the
    model or the dataset is unknown, or if they do not fit together.
    """
    if model not in MODELS:
        raise ValueError(f"model: found {model!r}; expected one of {', '.join(MODELS)}")
    build, default = MODELS[model]
    if (dataset or default) not in DATASETS:
        raise ValueError(f"dataset: found {dataset!r}; expected one of {', '.join(DATASETS)}")
    data = DATASETS[dataset or default]
    if (problem := misfit(model, dataset or default)) is not None:
        raise ValueError(f"model {model} does not fit dataset {dataset}: {problem}. Choose another model or dataset")
    return of_layers(model, build(data), data, optimizer, momentum)


@cache
def reference(model: str, optimizer: Optimizer = "SGD", momentum: float = 0.9) -> Workload:
    """Return the workload of a model from the literature. Raise ValueError if the model is unknown."""
    if model not in REFERENCES:
        raise ValueError(f"model: found {model!r}; expected one of {', '.join(REFERENCES)}")
    build, data = REFERENCES[model]
    return of_layers(model, build(data), data, optimizer, momentum)


def of_layers(name: str, net: Net, data: Dataset, optimizer: Optimizer = "SGD", momentum: float = 0.9) -> Workload:
    """Return the workload of the network ``net``, trained with this optimizer on samples like those of ``data``."""
    elements = net.checkpointed_elements
    return Workload(
        name=name,
        layers=tuple(net.layers),
        activation_nbytes=REAL_NBYTES * net.kept_elements,
        transient_nbytes=REAL_NBYTES * 2.0 * net.largest_elements,
        sample_nbytes=data.sample_nbytes,
        making_s=data.making_s,
        optimizer_slots=_slots(optimizer, momentum),
        activation_16_nbytes=net.kept_16_nbytes,
        checkpointed_nbytes=None if elements is None else REAL_NBYTES * elements,
        checkpointed_16_nbytes=net.checkpointed_16_nbytes,
        loss_nbytes=OUTPUT_COPIES * REAL_NBYTES * net.layers[-1].output_elements,
    )


OBSERVED = "observed"
"""Name of the workloads of scripts whose structure an earlier run has shown."""
HINTED = "hinted"
"""Name of workloads whose layers are not known: their figures are divided evenly among equal layers."""
HINTED_LAYERS = 50
"""Assumed number of layers of a model that only ``spec.model.hints`` describe. It determines the overhead per step."""
LEAST_FLOPs = 1.0
"""Least operations of a sample. With fewer, rounding would hide the time of a sample in that of a step."""


@lru_cache(maxsize=64)
def hinted(
    parameters: int,
    flops_per_sample: float,
    activation_nbytes_per_sample: float,
    sample_nbytes: float | None = None,
    optimizer: Optimizer = "SGD",
    momentum: float = 0.9,
    checkpointed_nbytes_per_sample: float | None = None,
    dense_output_nbytes: float | None = None,
    pairs: StatedPairs | None = None,
    largest_parameter_nbytes: int | None = None,
    largest_activation_nbytes: int | None = None,
    frozen_nbytes: int = 0,
    largest_unit: int | None = None,
) -> Workload:
    """Return the workload of a model that only figures in ``spec.model.hints`` describe.

    The figures are the numbers of parameters, of operations per sample, and of activation bytes per sample. They are
    divided evenly among equal layers. Raise ValueError if a figure is out of range. ``checkpointed_nbytes_per_sample``:
    activation bytes per sample with activation checkpointing; None if they are unknown. If they are known, all layers
    count as parts of blocks, because the figures do not say which ones are. ``dense_output_nbytes``: bytes
    of a sample in the output of a model without convolutions and recurrent layers; None: it may have some. ``pairs``
    and ``largest_parameter_nbytes``: as in ``Workload``; pipeline stages do not divide a pair.
    ``largest_activation_nbytes``: bytes of a sample in the largest activation; None if it is unknown.
    ``frozen_nbytes``: bytes of the parameters that are not trained, which need no gradients in the backward pass.
    ``largest_unit``: parameters, also frozen ones, of the largest module that ranks gather at once; None: unknown.
    """
    if parameters < 1 or flops_per_sample <= 0 or activation_nbytes_per_sample < 0:
        raise ValueError(
            f"hints: found parameters {parameters}, flops_per_sample {flops_per_sample}, activation bytes "
            f"{activation_nbytes_per_sample}; expected at least 1 parameter, flops_per_sample above 0 and at least 0 "
            "activation bytes"
        )
    flops_per_sample = max(flops_per_sample, LEAST_FLOPs)
    n = min(HINTED_LAYERS, parameters)
    if pairs is not None and pairs.count < n:
        n = pairs.count * round(n / pairs.count)  # so that all pairs are equal
    elements = activation_nbytes_per_sample / REAL_NBYTES / n
    # The backward pass does the operations of the forward pass for activations, and again for trained weights.
    passes = 2 + parameters / (parameters + frozen_nbytes / REAL_NBYTES)
    layers = tuple(
        Layer(
            kind="linear",
            parameters=parameters // n + (i < parameters % n),
            tensors=2,
            forward_FLOPs=flops_per_sample / passes / n,
            backward_FLOPs=flops_per_sample * (passes - 1) / passes / n,
            moved_elements=5 * elements,
            moved_16_nbytes=5 * elements * REAL_NBYTES * HINTED_RATIO,
            output_elements=elements,
            # A stage has whole pairs, so that nine pairs in two stages are five and four.
            follows=pairs is not None and i > 0 and i * pairs.count // n == (i - 1) * pairs.count // n,
            recomputable=checkpointed_nbytes_per_sample is not None,
            forward_elements=2 * elements,
            forward_16_nbytes=2 * elements * REAL_NBYTES * HINTED_RATIO,
        )
        for i in range(n)
    )
    return Workload(
        name=HINTED,
        layers=layers,
        activation_nbytes=activation_nbytes_per_sample,
        transient_nbytes=2 * activation_nbytes_per_sample / n,
        sample_nbytes=sample_nbytes or 0.0,
        optimizer_slots=_slots(optimizer, momentum),
        activation_16_nbytes=HINTED_RATIO * activation_nbytes_per_sample,
        checkpointed_nbytes=checkpointed_nbytes_per_sample,
        # Inputs of residual blocks are sums, which are in float32 besides norms, so no bytes may be saved.
        checkpointed_16_nbytes=checkpointed_nbytes_per_sample,
        stated_largest_nbytes=largest_parameter_nbytes,
        stated_activation_nbytes=largest_activation_nbytes,
        stated_dense=dense_output_nbytes is not None,
        loss_nbytes=OUTPUT_COPIES * (dense_output_nbytes or 0.0),
        pairs=pairs,
        frozen_nbytes=frozen_nbytes,
        stated_unit=None if largest_unit is None else largest_unit / (parameters + frozen_nbytes / REAL_NBYTES),
    )
