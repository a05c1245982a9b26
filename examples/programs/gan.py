"""A GAN on the digits: two models and two optimizers under DDP.

torchrun --nproc-per-node 2 gan.py
"""

import os
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dltrain
import dltrain.data

STEPS, BATCH, NOISE = int(os.environ.get("STEPS", "300")), 32, 16
dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
rank, size = dist.get_rank(), dist.get_world_size()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
digits = dltrain.data.load("digits")
images = digits.train(np.arange(digits.train_samples))[0].flatten(1).to(device)
torch.manual_seed(0)
networks = {
    "generator": nn.Sequential(nn.Linear(NOISE, 128), nn.ReLU(), nn.Linear(128, 64)).to(device),
    "critic": nn.Sequential(nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1)).to(device),
}
optimizers = {name: torch.optim.Adam(net.parameters(), lr=2e-3, betas=(0.5, 0.999)) for name, net in networks.items()}
saved = Path(os.environ.get("DLJOB_CHECKPOINT_DIR") or tempfile.mkdtemp()) / "gan.pt"
first = 0
if saved.exists():
    state = torch.load(saved, map_location=device, weights_only=True)
    first = state["step"]
    for name in networks:
        networks[name].load_state_dict(state[name])
        optimizers[name].load_state_dict(state[f"{name} optimizer"])
if rank == 0:
    print(f"resumed from step {first}", flush=True)
# The critic sees real and made images in each step. Without this, DDP would broadcast buffers between its two passes.
generator, critic = (DistributedDataParallel(networks[name], broadcast_buffers=False) for name in networks)
judge = nn.functional.binary_cross_entropy_with_logits
for step in range(first + 1, STEPS + 1):
    draw = torch.Generator().manual_seed(step * size + rank)
    real = images[torch.randint(len(images), (BATCH,), generator=draw).to(device)]
    noise = torch.randn(BATCH, NOISE, generator=draw).to(device)
    scores = critic(torch.cat((real, generator(noise).detach())))
    truth = torch.cat((torch.ones(BATCH, 1), torch.zeros(BATCH, 1))).to(device)
    critic_loss = judge(scores, truth)
    optimizers["critic"].zero_grad()
    critic_loss.backward()
    optimizers["critic"].step()
    generator_loss = judge(networks["critic"](generator(noise)), torch.ones(BATCH, 1).to(device))
    optimizers["generator"].zero_grad()
    generator_loss.backward()
    optimizers["generator"].step()
    dltrain.report(step=step, steps=STEPS, loss=generator_loss.item(), critic_loss=critic_loss.item())
    if rank == 0 and step % 20 == 0:
        state = {name: net.state_dict() for name, net in networks.items()}
        state |= {f"{name} optimizer": optimizer.state_dict() for name, optimizer in optimizers.items()}
        torch.save({"step": step} | state, saved.with_suffix(".new"))
        saved.with_suffix(".new").replace(saved)  # The rank may be killed while it writes.
dist.destroy_process_group()
