"""The 16-bit number formats in which a plan lets ranks compute, and the devices that have units for them."""

import torch

from dlcontract import Plan
from dltrain.protocol.errors import BadInputError

TYPES = {"BF16": torch.bfloat16, "FP16": torch.float16}
"""torch's type for each precision of a plan other than FP32."""


def check_units(plan: Plan, device: torch.device) -> None:
    """Raise BadInputError if the plan's precision is bfloat16 and this rank's GPU has no units for it.

    torch emulates them more slowly than float32. CPUs also compute bfloat16 without such units, which profiles measure.
    """
    if plan.precision == "BF16" and device.type == "cuda" and not torch.cuda.is_bf16_supported(False):
        name = torch.cuda.get_device_name(device)
        raise BadInputError(
            "spec.precision", f"BF16 on {name}", "a GPU with units for bfloat16", "choose FP16, FP32 or Auto"
        )
