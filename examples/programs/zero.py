"""DeepSpeed: the state of the optimizer, and with ZERO_STAGE 2 and 3 gradients and parameters, divided among ranks.

torchrun --nproc-per-node 2 zero.py
"""

import os
import shutil
import tempfile
import warnings
from pathlib import Path

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import dltrain
import dltrain.data

STEPS, BATCH, STAGE = int(os.environ.get("STEPS", "200")), 32, int(os.environ.get("ZERO_STAGE", "2"))
if not torch.cuda.is_available():
    # On CPUs, DeepSpeed would compile an operator for inference, with g++ and ninja. Training does not need it.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
# DeepSpeed calls functions that PyTorch 2.13 deprecates. Their warnings, several in each step, would fill the log.
warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
deepspeed.init_distributed()  # nccl on GPUs, gloo on CPUs
rank, size = dist.get_rank(), dist.get_world_size()
digits = dltrain.data.load("digits")
images, labels = digits.train(np.arange(digits.train_samples))
torch.manual_seed(0)
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
config = {
    "train_micro_batch_size_per_gpu": BATCH,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": STAGE},
}
engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3), config=config)
folder = Path(os.environ.get("DLJOB_CHECKPOINT_DIR") or tempfile.mkdtemp())
engine.load_checkpoint(folder)
first = engine.global_steps
if rank == 0:
    print(f"resumed from step {first}", flush=True)
for step in range(first + 1, STEPS + 1):
    draw = torch.Generator().manual_seed(step * size + rank)
    chosen = torch.randint(len(labels), (BATCH,), generator=draw)
    loss = nn.functional.cross_entropy(engine(images[chosen].to(engine.device)), labels[chosen].to(engine.device))
    engine.backward(loss)
    engine.step()
    dltrain.report(step=step, steps=STEPS, loss=loss.item(), samples=BATCH * size)
    if step % 20 == 0:
        # DeepSpeed would name a checkpoint in the file latest before the other ranks have written their parts.
        engine.save_checkpoint(folder, tag=str(step), save_latest=False)
        if rank == 0:
            (folder / "latest.new").write_text(str(step))
            (folder / "latest.new").replace(folder / "latest")
            shutil.rmtree(folder / str(step - 40), ignore_errors=True)
engine.eval()
with torch.no_grad():
    x, y = (part.to(engine.device) for part in digits.test(np.arange(digits.test_samples)))
    accuracy = (engine(x).argmax(1) == y).float().mean().item()
dltrain.report(step=STEPS, steps=STEPS, accuracy=accuracy)
dist.destroy_process_group()
