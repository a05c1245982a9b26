"""Power and clock limits of GPUs that an administrator has set and stated in labels of the nodes.

dljob sets no limits, because its pods may not. GPUs of one product under different limits are different device types,
with their own predictions, profiles and pods. ``perf.resources.power`` predicts their speed and power.
"""

import re
from collections.abc import Mapping

from dlcontract.pods import with_limits, without_limits
from dljob.cluster.catalogue import MIG, gpu

POWER_LIMIT_LABEL = "dljob.dev/power-limit"
"""Label of GPU nodes with the power limit in watts under which each of their GPUs runs."""
CLOCK_LIMIT_LABEL = "dljob.dev/clock-limit"
"""Label of GPU nodes with the highest clock in MHz at which each of their GPUs runs."""
MAX_LIMIT_W = 9999
"""Largest plausible power limit in watts of a GPU that is not in the catalogue."""
MIN_CLOCK_MHZ, MAX_CLOCK_MHZ = 100, 9999
"""Smallest plausible clock limit in MHz, and the largest of a GPU that is not in the catalogue.

The lowest clock that NVIDIA's drivers offer is 135 MHz on a V100, 210 MHz on an A100 and 345 MHz on an H100."""
MAX_NAME = 63
"""Maximum length of the name of a device type, as that of a label's value."""
_WHOLE = re.compile(r"[1-9][0-9]{0,5}")


def device_type(product: str, is_gpu: bool, labels: Mapping[str, str]) -> str:
    """Return the device type of a node: ``product``, together with the limits that a GPU node's labels state.

    Limits do not count if ``limit_error`` rejects the node.
    """
    if not is_gpu or wrong_limits(product, is_gpu, labels):
        return product
    return _named(product, _stated(product, labels)[0])


def limit_error(node: str, product: str, is_gpu: bool, labels: Mapping[str, str]) -> str | None:
    """Return why new plans must not use a node: a label states a limit that its GPUs cannot have.

    Return None if the limits are possible, if there are no such labels, and for CPU nodes, which need none. If both
    labels are wrong, the reason names both. ``node``: its name. ``product``: product or device type of its GPUs.
    """
    errors = [
        f"label {label} of node {node}: found {labels[label]!r}; expected {expected}"
        for label, expected in wrong_limits(product, is_gpu, labels).items()
    ]
    return f"{'; '.join(errors)}. Set the label to the limit that nvidia-smi shows, or remove it" if errors else None


def wrong_limits(product: str, is_gpu: bool, labels: Mapping[str, str]) -> dict[str, str]:
    """Return {label with a limit that the GPUs of a node cannot have: the value that is expected instead}.

    Return an empty mapping for CPU nodes. ``product``: product or device type of the GPUs.
    """
    if not is_gpu:
        return {}
    product = without_limits(product).product
    stated, wrong = _stated(product, labels)
    excess = len(_named(product, stated)) - MAX_NAME
    if not wrong and stated and excess > 0:
        return {min(stated): f"a product name that is shorter by {excess}"}
    return wrong


def _named(product: str, stated: Mapping[str, int]) -> str:
    return with_limits(product, stated.get(POWER_LIMIT_LABEL), stated.get(CLOCK_LIMIT_LABEL))


def _stated(product: str, labels: Mapping[str, str]) -> tuple[dict[str, int], dict[str, str]]:
    """Return ({label: limit that it states}, {label with an impossible limit: expected value})."""
    part = MIG.match(product)
    known = gpu(part[1] if part else product)
    if known is None:
        watts, clocks = f"above 0 and at most {MAX_LIMIT_W}", f"from {MIN_CLOCK_MHZ} to {MAX_CLOCK_MHZ}"
        power_W, clock_MHz = (0.0, float(MAX_LIMIT_W)), float(MAX_CLOCK_MHZ)
    else:
        power_W, clock_MHz = (known.idle_power_W, known.peak_power_W), known.max_clock_MHz
        watts = f"above {power_W[0]:g} and at most {power_W[1]:g}, the idle and the peak power of {known.name}"
        clocks = f"from {MIN_CLOCK_MHZ} to {clock_MHz:g}, the maximum clock of {known.name}"
    stated, wrong = dict[str, int](), dict[str, str]()
    for label, expected, above, highest in (
        (POWER_LIMIT_LABEL, f"watts {watts}", *power_W),
        (CLOCK_LIMIT_LABEL, f"MHz {clocks}", MIN_CLOCK_MHZ - 1, clock_MHz),
    ):
        found = labels.get(label)
        if found is None:
            continue
        limit = int(found) if _WHOLE.fullmatch(found) else 0
        if above < limit <= highest:
            stated[label] = limit
        else:
            wrong[label] = f"a whole number of {expected}"
    return stated, wrong
