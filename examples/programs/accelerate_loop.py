"""A loop with Hugging Face's Accelerate: one tracker reports to the job.

accelerate launch accelerate_loop.py, or torchrun --nproc-per-node 2 accelerate_loop.py
"""

import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dltrain.data
from dltrain.integrations.accelerate import ReportTracker

STEPS, SAVE_STEPS = int(os.environ.get("STEPS", "400")), 20
accelerator = Accelerator(cpu=not torch.cuda.is_available(), log_with=ReportTracker(steps=STEPS))
accelerator.init_trackers("digits")
folder = Path(os.environ.get("DLJOB_CHECKPOINT_DIR") or tempfile.mkdtemp())
torch.manual_seed(0)
digits = dltrain.data.load("digits")
train = TensorDataset(*digits.train(np.arange(digits.train_samples)))
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, opt, loader = accelerator.prepare(model, opt, DataLoader(train, batch_size=32, shuffle=True))


class Position:
    """The number of completed steps, which Accelerate saves with the rest."""

    step = 0

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]


position = Position()
accelerator.register_for_checkpointing(position)
found = next((path for name in ("state", "old") if (path := folder / name).exists()), None)
if found is not None:
    accelerator.load_state(found)
accelerator.print(f"resumed from step {position.step}", flush=True)
while position.step < STEPS:
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y)
        accelerator.backward(loss)
        opt.step()
        opt.zero_grad()
        position.step += 1
        accelerator.log({"loss": loss.item()}, step=position.step)
        if position.step % SAVE_STEPS == 0:
            accelerator.save_state(folder / "new", safe_serialization=True)
            accelerator.wait_for_everyone()
            if accelerator.is_main_process:
                shutil.rmtree(folder / "old", ignore_errors=True)
                if (folder / "state").exists():
                    (folder / "state").rename(folder / "old")
                (folder / "new").rename(folder / "state")
            accelerator.wait_for_everyone()
        if position.step == STEPS:
            break
x, y = (part.to(accelerator.device) for part in digits.test(np.arange(digits.test_samples)))
accuracy = (model(x).argmax(1) == y).float().mean().item()
accelerator.log({"accuracy": accuracy}, step=STEPS)
accelerator.print(f"accuracy {accuracy:.3f}", flush=True)
accelerator.end_training()
