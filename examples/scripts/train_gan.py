"""A GAN with dltrain: two models, two optimizers, and each opt.step() reduces its gradients. It runs in three ways:

python examples/scripts/train_gan.py
mpirun -n 2 python examples/scripts/train_gan.py
in a DLJob with spec.trainer.command: [python, train_gan.py]; the manifest then sets batch and epochs
"""

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

import dltrain

t = dltrain.init(batch=120, epochs=10)

digits = dltrain.data.load("digits")
gen = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 64))
disc = nn.Sequential(nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1))
gen_opt = torch.optim.Adam(gen.parameters(), lr=2e-3, betas=(0.5, 0.999))
disc_opt = torch.optim.Adam(disc.parameters(), lr=2e-3, betas=(0.5, 0.999))

(gen, disc), (gen_opt, disc_opt) = t.wrap([gen, disc], [gen_opt, disc_opt])
for x, _ in t.steps(t.loader(digits)):
    real, fake = x.flatten(1), gen(torch.randn(len(x), 16, device=t.device))
    ones, zeros = torch.ones(len(x), 1, device=t.device), torch.zeros(len(x), 1, device=t.device)

    disc_opt.zero_grad()
    binary_cross_entropy_with_logits(disc(real), ones).backward()
    binary_cross_entropy_with_logits(disc(fake.detach()), zeros).backward()  # adds to the gradients of the first pass
    disc_opt.step()

    gen_opt.zero_grad()
    loss = binary_cross_entropy_with_logits(disc(fake), ones)
    loss.backward()
    gen_opt.step()
    t.log(generator=loss.item())  # a metric, because the losses of a GAN need not fall

x, _ = digits.test(torch.arange(digits.test_samples).numpy())
with torch.no_grad():
    made = gen(torch.randn(len(x), 16, generator=torch.Generator().manual_seed(0)).to(t.device))
    distance = (made.mean(0) - x.flatten(1).to(t.device).mean(0)).abs().mean()
t.log(distance=distance.item())
