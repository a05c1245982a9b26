"""On two ranks: a GPU that one of them lacks, and what making a process group leaves as it was."""

import sys

import torch

from dltrain.comm.selection import choose
from dltrain.device import rank_device as devices
from dltrain.protocol.errors import DeviceMissingError
from support.trainer.bodies.harness import ranks
from support.trainer.plans import make_plan


def main() -> None:
    world = ranks()
    plan = make_plan(world.size, gpu=True, device="Tesla-T4")
    mine = torch.device("cpu") if world.rank else torch.device("cuda", 0)
    try:
        devices.check(world, plan, mine)
    except DeviceMissingError as error:
        assert str(error).startswith("found no GPU on rank 1 (pod digits-cpu-1) of 2, expected one on each"), error
        assert ("see docs/how-to/gpus.md" in str(error)) is bool(world.rank), "only who lacks it knows why"
    else:
        raise AssertionError("rank 1 has no GPU")
    devices.check(world, plan, torch.device("cpu"))  # alike, if slow
    devices.check(world, make_plan(world.size), mine)  # none was promised

    hook = sys.excepthook
    collective = choose("Torch", world.comm, [torch.ones(3)])
    assert sys.excepthook is hook, "an exit in it would lose what was told"
    collective.allreduce(0)
    assert collective.buffers[0].tolist() == [2.0] * 3
    collective.close()
    sys.stdout.write("is well\n")
    world.close()


if __name__ == "__main__":
    main()
