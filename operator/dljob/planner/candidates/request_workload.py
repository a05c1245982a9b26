"""The workload of a request, and the dataset that its job reads from files."""

from dataclasses import replace

from dljob.perf.step import input_data
from dljob.perf.workload.frozen import with_frozen_base
from dljob.perf.workload.observed import observed
from dljob.perf.workload.workload import Workload, builtin, hinted, reference
from dljob.planner.types import Request


def workload_of(request: Request) -> Workload:
    """Return the request's workload. Raise ValueError if the model is unknown or does not fit the dataset."""
    found = replace(_described(request), reuses_blocks=request.reuses_blocks)
    if not request.checkpoints or request.structure is not None:  # An observed script writes its own checkpoints.
        return found
    return replace(found, copied_nbytes=int(found.checkpoint_nbytes))


def _described(request: Request) -> Workload:
    if request.parameters is not None and request.flops_per_sample is not None:
        return hinted(
            request.parameters,
            request.flops_per_sample,
            float(request.activation_nbytes_per_sample or 0),
            request.sample_nbytes,
            request.optimizer,
            request.momentum,
            request.checkpointed_nbytes_per_sample,
            request.dense_output_nbytes,
            request.pairs,
            request.largest_parameter_nbytes,
            request.largest_activation_nbytes,
            request.frozen_nbytes,
            request.largest_unit,
        )
    if request.structure is not None:
        return replace(observed(request.structure), sample_nbytes=float(request.sample_nbytes or 0))
    if request.like is not None:
        known = reference(request.like, request.optimizer, request.momentum)
        if request.trained_parameters is not None:
            known = with_frozen_base(known, request.trained_parameters, request.frozen_nbytes)
        return replace(known, sample_nbytes=float(request.sample_nbytes or known.sample_nbytes))
    if request.model is None:
        raise ValueError(
            "found neither a model nor its size; expected spec.model.name (a built-in model) or spec.model.hints (the "
            "size of your own model). Set one of them"
        )
    return builtin(request.model, request.dataset, request.optimizer, request.momentum)


def stored_of(request: Request) -> input_data.Stored | None:
    """Return the dataset that the job reads from files while it trains, or None.

    Training scripts and built-in token models read files; other built-in models hold their data in memory. Also return
    None if the spec does not give the size of the dataset.
    """
    in_files = request.model is None or request.model == "gpt-mini"
    if not (in_files and request.dataset_samples and request.sample_nbytes):
        return None
    epochs = request.total_steps * request.global_batch / request.dataset_samples
    return input_data.Stored(request.dataset_samples, request.sample_nbytes, epochs)
