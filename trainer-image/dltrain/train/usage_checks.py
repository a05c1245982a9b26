"""Checks of a training script's API calls, so that an incorrect call fails itself instead of a later call."""

import warnings
from collections.abc import Iterable, Sequence
from math import inf
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer, SparseAdam

from dlcontract import DATASET_VARIABLE, Plan
from dltrain.elastic.team import Team
from dltrain.models.deferred import initial_values
from dltrain.protocol.errors import BadInputError, MisuseError
from dltrain.protocol.metric_values import NO_NUMBER, element, shown

NO_UPDATE = (
    "t.steps: found no opt.step() (or scaler.step(opt)) in the loop's body; expected one for each batch. "
    "To accumulate gradients, use t.steps(loader, accumulate=True), or split one batch into micro-batches and use "
    "t.no_sync()"
)
SECOND_UPDATE = (
    "opt.step(): found a second call for the same batch; expected one. Ranks sum gradients once for each batch, so "
    "that parameters would differ between ranks after a second update. Take another batch of t.steps for each update"
)


def check_wrapped(model: Any, optimizer: Any, sample: Any, team: Team) -> None:
    """Raise MisuseError if the arguments of ``t.wrap`` are invalid, or if this is its second call."""
    for name, given, kind in (("model", model, nn.Module), ("optimizer", optimizer, Optimizer)):
        if not isinstance(given, kind):
            found = f"{type(given).__module__}.{type(given).__name__}"
            raise MisuseError(f"t.wrap: {name}: found {found}; expected a torch {kind.__name__}")
    if lazy := [name for name, parameter in model.named_parameters() if is_lazy(parameter)]:
        raise MisuseError(
            f"t.wrap: model: found uninitialized parameters {', '.join(lazy)} of lazy layers; expected parameters "
            "with shapes. Call the model once on a sample before you create the optimizer"
        )
    if odd := [name for name, value in model.state_dict().items() if not isinstance(value, Tensor)]:
        raise MisuseError(
            f"t.wrap: model: found extra state in {', '.join(odd)} that is not a tensor; expected tensors only. "
            "Register a buffer, or drop get_extra_state and set the attribute in your script"
        )
    if odd := [name for name, parameter in model.named_parameters() if parameter.is_complex()]:
        raise MisuseError(
            f"t.wrap: model: found complex parameters {', '.join(odd)}; expected real ones, which ranks can reduce. "
            "Store torch.view_as_real of them, and use torch.view_as_complex in forward"
        )
    if isinstance(optimizer, SparseAdam):
        raise MisuseError(
            "t.wrap: optimizer: found SparseAdam; expected an optimizer for dense gradients, which ranks can reduce. "
            "Use SGD if an embedding has sparse=True, otherwise Adam"
        )
    if team.taken:
        raise MisuseError(
            "t.wrap: found a second call; expected one with all models and optimizers, whose state one checkpoint "
            "contains. For a GAN: (gen, disc), (gen_opt, disc_opt) = t.wrap([gen, disc], [gen_opt, disc_opt])"
        )
    if team.splits_model:
        _check_split(model, sample, team.plan)
    elif team.defers_model:
        _check_deferred(model, "with parallelism.deferredInit")


def _check_split(model: nn.Module, sample: Any, plan: Plan) -> None:
    """Raise MisuseError if ranks cannot split ``model``, or without a ``sample`` for a pipeline."""
    by = f"with parallelism.strategy {plan.parallelism}"
    _check_deferred(model, by)
    if plan.parallelism == "Pipeline" and not (isinstance(sample, Tensor) and sample.dim() and len(sample)):
        found = f"shape {tuple(sample.shape)}" if isinstance(sample, Tensor) else type(sample).__name__
        raise MisuseError(
            f"t.wrap: sample: found {found} {by}; expected a tensor of inputs with at least one row, from which a "
            "pipeline counts the cost of each layer. Pass t.wrap(model, opt, sample=x[:1])"
        )


def _check_deferred(model: nn.Module, by: str) -> None:
    initial = initial_values(model)
    if initial is None:
        found = "another module around the model of t.create"
        if not any(parameter.is_meta for parameter in model.parameters()):
            found = "a model with parameters in memory"
        raise MisuseError(
            f"t.wrap: model: found {found} {by}; expected the result of t.create, because no "
            "rank may need memory for the whole model. Replace model = Net() by model = t.create(lambda: Net())"
        )
    if changed := initial.changed(model):
        raise MisuseError(
            f"t.wrap: model: found {changed[0]} changed after t.create {by}; expected the tensors that t.create "
            "has made, because they have no memory that could get other values. Change them in the function that "
            "t.create calls, such as by load_state_dict or torch.nn.init"
        )


def check_divides_samples(call: str, plan: Plan) -> None:
    """Raise MisuseError if ranks split the model, so that ``call`` cannot work."""
    if plan.splits_model and len(plan.ranks) > 1:
        raise MisuseError(
            f"{call}: found a call with parallelism.strategy {plan.parallelism}; expected none, because ranks do not "
            "divide the samples of a batch. Use a loss that is a mean over samples, or another strategy"
        )


def check_function(what: str, given: Any) -> None:
    """Raise MisuseError unless ``given``, the argument ``what``, is a function."""
    if (isinstance(given, nn.Module) and what == "t.create: make") or not callable(given):
        raise MisuseError(f"{what}: found {type(given).__name__}; expected a function. Pass lambda: Net(…)")


def check_tensor(call: str, given: Any, kind: str = "") -> None:
    """Raise MisuseError unless ``given``, the argument of ``call``, is a tensor.

    ``kind``: which tensor, for the error.
    """
    if not isinstance(given, Tensor):
        raise MisuseError(f"{call}: found {type(given).__name__}; expected a tensor{kind}")


def number(loss: Any) -> Tensor:
    """Return the ``loss`` that a script logs as a tensor of shape () without gradient.

    Raise MisuseError if the loss is not a single number.
    """
    try:
        found = loss.detach() if isinstance(loss, Tensor) else torch.as_tensor(loss, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        raise MisuseError(f"t.log: loss: found {type(loss).__name__}; expected a number") from None
    if found.numel() != 1:
        raise MisuseError(f"t.log: loss: found shape {tuple(found.shape)}; expected one number, the batch's mean")
    if found.is_complex():
        raise MisuseError("t.log: loss: found a complex number; expected a real one, such as its absolute value")
    return found.reshape(())


def numbers(values: Any) -> Sequence[float]:
    """Return ``values``, the argument of ``t.sum``, as numbers. They may be tensors, also on a GPU.

    Raise MisuseError if it is a single number, or if an item is no number.
    """
    if not hasattr(values, "__len__") or (isinstance(values, Tensor) and not values.dim()):
        raise MisuseError(
            f"t.sum: found a single {type(values).__name__}; expected a list, such as t.sum([right, seen])"
        )
    found: list[float] = []
    for index, value in enumerate(values.tolist() if isinstance(values, Tensor) else values):
        try:
            found.append(float(element(value)))
        except NO_NUMBER:
            kind = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise MisuseError(f"t.sum: found {kind} as item {index}; expected a number") from None
    return found


def check_samples(rows: Iterable[Iterable[float]]) -> None:
    """Raise MisuseError if the dataset does not have the same number of samples on all ranks, or if samplers differ.

    ``rows``: the result of ``Loader.identity`` of each rank.
    """
    found = list(rows)
    counts = [int(count) for count, _ in found]
    if len(set(counts)) > 1:
        raise MisuseError(
            f"t.steps: found {', '.join(map(str, counts))} samples in the dataset on ranks 0, 1, …; expected the whole "
            "dataset on each rank. Pass the whole dataset to t.loader: dltrain divides it among the ranks"
        )
    if len({checksum for _, checksum in found}) > 1:
        raise MisuseError(
            "t.steps: found a sampler that draws different samples on ranks 0, 1, …; expected the same on all, because "
            "dltrain divides each batch among the ranks. Pass the same sampler on each rank, and do not shard by rank"
        )


def check_batch_size(batch_size: int | None, plan: Plan) -> None:
    """Raise MisuseError if the DataLoader of ``t.loader`` has another batch size than the job.

    ``batch_size``: that of the DataLoader; None: not chosen.
    """
    if batch_size not in (None, plan.global_batch):
        raise MisuseError(
            f"t.steps: found a DataLoader with batch_size {batch_size}; expected {plan.global_batch}, the job's global "
            "batch size, which the ranks divide. Pass batch_size=t.plan.global_batch, leave it out, or set "
            f"spec.globalBatchSize (without a manifest: dltrain.init(batch=…)) to {batch_size}"
        )


def warn_of_equal_streams(checksums: Sequence[int], rank: int) -> None:
    """Warn that ranks read the same stream, if two ``checksums`` of their first samples are equal. 0: unknown.

    ``rank``: this rank's number. Only rank 0 warns.
    """
    known = [checksum for checksum in checksums if checksum]
    if len(set(known)) < len(known) and rank == 0:
        warnings.warn(
            "t.steps: found the same first samples in the streams of several ranks; expected other samples on each, "
            "because each rank reads its own stream. Split the stream in the dataset by t.rank and t.size, and by "
            "torch.utils.data.get_worker_info() if it has workers",
            stacklevel=2,
        )


def warn_of_differing_buffers(names: Sequence[str], rank: int) -> None:
    """Warn that model buffers differ between ranks after a step, if ``names`` (of these buffers) is not empty.

    ``rank``: this rank's number. Only rank 0 warns.
    """
    if names and rank == 0:
        some = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
        warnings.warn(
            f"t.wrap: model: found buffers that differ between ranks ({some}); expected equal ones. Store t.mean(…) of "
            "the value in forward: otherwise results depend on how the batch is split, and checkpoints hold rank 0's "
            "buffers",
            stacklevel=2,
        )


def warn_of_another_optimizer(kind: str, count: int) -> None:
    """Warn that an optimizer of the class ``kind`` has updated ``count`` parameters that are not the model's."""
    warnings.warn(
        f"t.steps: found an update by a second optimizer ({kind}) of {count} parameters that t.wrap does not know; "
        "expected only optimizers of t.wrap, because ranks do not sum the gradients of other parameters, and "
        "checkpoints do not have them. Pass all models and optimizers to t.wrap, as lists",
        stacklevel=4,
    )


def check_weighed(weighed: int, micro_batches: int) -> None:
    """Raise MisuseError if the script called ``t.weigh`` in some micro-batches of a step, but not in all.

    ``weighed``: number of micro-batches with a call. ``micro_batches``: number of all; 0 if the batch is not divided.
    """
    if micro_batches and 0 < weighed < micro_batches:
        raise MisuseError(
            f"t.weigh: found calls in {weighed} of {micro_batches} micro-batches of a step; expected one call in each "
            "micro-batch, or none"
        )


def check_accumulates(plan: Plan, *, accumulate: bool) -> None:
    """Raise MisuseError if the plan divides batches into micro-batches and the script does not iterate over these."""
    if plan.micro_batches > 1 and not accumulate and not plan.splits_model:
        raise MisuseError(
            f"t.steps: found accumulate=False with a plan of {plan.micro_batches} micro-batches per step "
            "(spec.parallelism.gradientAccumulation or microBatches); expected t.steps(loader, accumulate=True), "
            "because a whole batch may not fit into memory. Pass accumulate=True, or remove these fields"
        )


def warn_of_a_second_pass(step: int) -> None:
    """Warn that ``t.steps`` was called again after all ``step`` steps, for example in a loop over epochs."""
    warnings.warn(
        f"t.steps: found another call after all {step} steps; expected one, because t.steps covers all epochs. Remove "
        "the loop over epochs around it, and use t.epoch and t.end_of_epoch inside",
        stacklevel=3,
    )


def check_tokens(tokens: Any) -> float:
    """Return ``tokens``, the argument of ``t.weigh``, as a number. Raise MisuseError unless it is 0 or more."""
    if (found := _number(tokens)) is None or not 0 <= found < inf:
        what = shown(tokens) if found is None else tokens
        raise MisuseError(f"t.weigh: found {what} tokens; expected the number of tokens in the loss, 0 or more")
    return found


def check_max_norm(max_norm: Any) -> float:
    """Return ``max_norm`` as a number. Raise MisuseError if it is not a finite number above 0."""
    if (found := _number(max_norm)) is None or not 0 < found < inf:
        what = shown(max_norm) if found is None else max_norm
        raise MisuseError(f"t.clip_gradients: max_norm: found {what}; expected a finite number above 0")
    return found


def _number(given: Any) -> float | None:
    """Return ``given`` as a number, and None if it is a text or no number."""
    try:
        return None if isinstance(given, str | bytes) else float(element(given))
    except NO_NUMBER:
        return None


def dataset_path(plan: Plan) -> Path:
    """Return the local path of the job's dataset. Raise BadInputError if the job has no dataset."""
    if plan.dataset.path is None:
        found = f"nothing, and no environment variable {DATASET_VARIABLE}"
        remedy = f"set spec.dataset.uri, or {DATASET_VARIABLE} for a run without an operator"
        raise BadInputError("spec.dataset.uri", found, "the location of the data", remedy)
    return Path(plan.dataset.path)
