"""Power limits of GPUs that an administrator has set and stated in a label of the nodes (``POWER_LIMIT_LABEL``).

dljob sets no limits, because its pods may not. GPUs of one product under different limits are different device types,
with their own predictions, profiles and pods. ``perf.resources.power`` predicts their speed and power.
"""

import re
from collections.abc import Mapping

from dlcontract.pods import with_power_limit, without_power_limit
from dljob.cluster.catalogue import MIG, gpu

POWER_LIMIT_LABEL = "dljob.dev/power-limit"
"""Label of GPU nodes with the power limit in watts under which each of their GPUs runs."""
MAX_LIMIT_W = 9999
"""Largest plausible limit in watts of a GPU that is not in the catalogue."""
MAX_NAME = 63
"""Maximum length of the name of a device type, as that of a label's value."""
_WATTS = re.compile(r"[1-9][0-9]{0,5}")


def device_type(product: str, is_gpu: bool, labels: Mapping[str, str]) -> str:
    """Return the device type of a node: ``product``, together with the power limit that a GPU node's label states.

    A limit that ``power_limit_error`` rejects does not count.
    """
    limit = labels.get(POWER_LIMIT_LABEL)
    if limit is None or not is_gpu or power_limit_error("", product, is_gpu, labels) is not None:
        return product
    return with_power_limit(product, int(limit))


def power_limit_error(node: str, product: str, is_gpu: bool, labels: Mapping[str, str]) -> str | None:
    """Return why new plans must not use a node: its label states a power limit that its GPUs cannot have.

    Return None if the limit is possible, if there is no label, and for CPU nodes, which need none. ``node``: its name.
    ``product``: product or device type of its GPUs.
    """
    limit = labels.get(POWER_LIMIT_LABEL)
    if limit is None or not is_gpu:
        return None
    product, _ = without_power_limit(product)
    part = MIG.match(product)
    known = gpu(part[1] if part else product)
    low_W, high_W = (known.idle_power_W, known.peak_power_W) if known else (0.0, float(MAX_LIMIT_W))
    if _WATTS.fullmatch(limit) and low_W < int(limit) <= high_W:
        if len(with_power_limit(product, int(limit))) <= MAX_NAME:
            return None
        expected = f"a product name that is shorter by {len(with_power_limit(product, int(limit))) - MAX_NAME}"
    else:
        sheet = f", the idle and the peak power of {known.name}" if known else ""
        expected = f"a whole number of watts above {low_W:g} and at most {high_W:g}{sheet}"
    return (
        f"label {POWER_LIMIT_LABEL} of node {node}: found {limit!r}; expected {expected}. Set the label to the limit "
        "that nvidia-smi shows, or remove it"
    )
