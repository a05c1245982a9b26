"""An ordinary GAN for torchrun: two DistributedDataParallel modules with an optimizer each, and an unused branch.

Prints the same sums of parameters on all ranks if gradients were reduced.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 5


class Generator(nn.Module):
    """A network with a branch that only every second step uses."""

    def __init__(self) -> None:
        super().__init__()
        self.main, self.branch = nn.Linear(4, 8), nn.Linear(4, 8)

    def forward(self, x: torch.Tensor, *, both: bool) -> torch.Tensor:
        return self.main(x) + self.branch(x) if both else self.main(x)


def main() -> None:
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    generator = DistributedDataParallel(Generator(), find_unused_parameters=True)
    critic = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)))
    of_generator = torch.optim.Adam(generator.parameters(), lr=0.01)
    of_critic = torch.optim.Adam(critic.parameters(), lr=0.01)
    torch.manual_seed(rank)
    loss_of = nn.functional.binary_cross_entropy_with_logits
    for step in range(STEPS):
        real, noise = torch.randn(6, 8) + 2, torch.randn(6, 4)
        fake = generator(noise, both=step % 2 == 0)
        of_critic.zero_grad()
        scores = critic(torch.cat([real, fake.detach()]))
        loss_of(scores, torch.cat([torch.ones(6, 1), torch.zeros(6, 1)])).backward()
        of_critic.step()
        of_generator.zero_grad()
        loss_of(critic.module(fake), torch.ones(6, 1)).backward()
        of_generator.step()
    totals = [sum(float(p.detach().double().sum()) for p in each.parameters()) for each in (generator, critic)]
    print(f"sums of parameters {totals[0]:.9f} {totals[1]:.9f}", flush=True)
    dist.destroy_process_group()


main()
