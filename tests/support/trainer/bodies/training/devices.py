"""Check on two ranks that a missing GPU is reported, and that a process group does not change ``sys.excepthook``."""

import sys

import torch

from dltrain.comm.selection import choose
from dltrain.device import rank_device as devices
from dltrain.protocol.errors import DeviceMissingError
from support.trainer.bodies.harness import start_process_group
from support.trainer.plans import make_plan


def main() -> None:
    group = start_process_group()
    plan = make_plan(group.size, gpu=True, device="Tesla-T4")
    device = torch.device("cpu") if group.rank else torch.device("cuda", 0)
    try:
        devices.check(group, plan, device)
    except DeviceMissingError as error:
        assert str(error).startswith(
            "device: found no GPU on rank 1 (pod digits-cpu-1) of 2 ranks; expected a GPU on each"
        ), error
        assert ("see docs/how-to/gpus.md" in str(error)) is bool(group.rank), (
            "only the rank without a GPU gives the reason"
        )
    else:
        raise AssertionError("rank 1 has no GPU")
    devices.check(group, plan, torch.device("cpu"))  # slow, but the same on all ranks
    devices.check(group, make_plan(group.size), device)  # the plan has no GPU

    hook = sys.excepthook
    collective = choose("Torch", group.comm, [torch.ones(3)])
    assert sys.excepthook is hook, "a hook that exits would lose messages to the agent"
    collective.allreduce(0)
    assert collective.buffers[0].tolist() == [2.0] * 3
    collective.close()
    sys.stdout.write("is well\n")
    group.close()


if __name__ == "__main__":
    main()
