"""Models of which only a small part is trained, such as adapters (LoRA) on a pretrained base."""

from dataclasses import replace
from itertools import accumulate, pairwise

from dljob.perf.workload.layer import largest_unit
from dljob.perf.workload.workload import REAL_NBYTES, Workload


def with_frozen_base(workload: Workload, trained: int, frozen_nbytes: int = 0) -> Workload:
    """Return the workload with all its parameters frozen, and ``trained`` parameters added to its layers.

    The added parameters are divided among the layers in proportion to the frozen ones. Their operations count only in
    this proportion, which is small: an adapter of rank r has r (n + m) parameters beside the n m of its layer, and as
    small a part of its operations (Hu et al. 2022, LoRA, arXiv 2106.09685). The backward pass computes gradients of
    activations everywhere, and of weights only for the added ones. Activations stay the same, because adapters need the
    inputs of their layers. ``workload``: a model with layers, of which all parameters are trained. ``frozen_nbytes``:
    bytes of its parameters; 0: they are float32. Raise ValueError if ``trained`` exceeds their number.
    """
    whole = workload.parameters
    if not 0 < trained <= whole:
        raise ValueError(
            f"hints.trainedParameters: found {trained}; expected 1 to {whole}, the number of parameters of "
            f"{workload.name}, which are frozen. Correct it, or remove it if the model itself is trained"
        )
    ends = (trained * end // whole for end in accumulate((each.parameters for each in workload.layers), initial=0))
    layers = tuple(
        replace(
            layer,
            parameters=end - begin,
            backward_FLOPs=layer.backward_FLOPs - layer.forward_FLOPs * (1 - trained / whole) * (layer.parameters > 0),
        )
        for layer, (begin, end) in zip(workload.layers, pairwise(ends), strict=True)
    )
    return replace(
        workload,
        layers=layers,
        frozen_nbytes=frozen_nbytes or REAL_NBYTES * whole,
        stated_unit=largest_unit(workload.layers) / whole,
    )
