"""Train a GAN with an average of its generator, and print a hash of all state at the end.

Arguments: the number of ranks, a folder for checkpoints, and then any of: ``kill`` to kill rank 1 between the two updates
of a step, ``other`` for an optimizer of another kind, ``swapped`` for the models in another order.
"""

import hashlib
import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import ExponentialLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from dlcontract import CheckpointRef, ModelRef
from dltrain.batch.shares import apportion
from dltrain.protocol.reporter import RankReporter
from dltrain.train.trainer import Trainer
from support.trainer.bodies.harness import flat, print_on_rank_0, start_process_group
from support.trainer.bodies.several.exactness import SAMPLES, WIDTH, judge, network
from support.trainer.plans import make_plan

STEPS, KILLED_AT, BATCH = 12, 7, 12


def main() -> None:
    group, folder, flags = start_process_group(), Path(sys.argv[2]), sys.argv[3:]
    plan = make_plan(
        shares=apportion(BATCH, [1 + rank for rank in range(group.size)]), global_batch=BATCH, steps=STEPS,
        model=ModelRef(command=("gan.py",)), collective="Ring",
        checkpoint=CheckpointRef(directory=str(folder), interval_s=1e-6), min_ranks=1,
    )  # fmt: skip
    t = Trainer(plan, group, RankReporter(None), torch.device("cpu"), "cpu")
    torch.manual_seed(0)
    gen, disc = nn.Sequential(network(WIDTH, 1), nn.Dropout(0.1)), network(1, 2)
    gen_opt = Adam(gen.parameters(), 0.02)
    disc_opt = Adam(disc.parameters(), 0.02) if "other" in flags else SGD(disc.parameters(), 0.05, momentum=0.9)
    if "swapped" in flags:
        t.wrap([disc, gen], [gen_opt, disc_opt])
    else:
        t.wrap([gen, disc], [gen_opt, disc_opt])
    ema = AveragedModel(gen, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    t.schedule(ExponentialLR(gen_opt, 0.9))
    t.schedule(ExponentialLR(disc_opt, 0.8))
    t.keep(ema=ema)
    generator = torch.Generator().manual_seed(7)
    for (real,) in t.steps(t.loader((torch.randn(SAMPLES, WIDTH, generator=generator),))):
        fake = gen(torch.randn(len(real), WIDTH))
        disc_opt.zero_grad()
        (judge(disc(real), 1.0) + judge(disc(fake.detach()), 0.0)).backward()
        disc_opt.step()
        if "kill" in flags and t.step == KILLED_AT:
            t.checkpoint_manager.wait()
            group.sum([0.0])
            if t.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
        gen_opt.zero_grad()
        judge(disc(fake), 1.0).backward()
        gen_opt.step()
        ema.update_parameters(gen)
    states = [
        value
        for opt in (gen_opt, disc_opt)
        for _, entry in sorted(opt.state_dict()["state"].items())
        for _, value in sorted(entry.items())
    ]
    tensors = [flat(gen), flat(disc), flat(ema), *states]
    rates = [opt.param_groups[0]["lr"] for opt in (gen_opt, disc_opt)]
    digest = hashlib.sha256(b"".join(tensor.contiguous().numpy().tobytes() for tensor in tensors))
    print_on_rank_0(group, f"state {digest.hexdigest()} {rates} after {t.step} steps, sum {float(flat(gen).sum()):.5f}")
    t.close()
    group.close()


if __name__ == "__main__":
    main()
