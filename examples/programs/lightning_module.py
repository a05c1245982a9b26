"""A LightningModule with Lightning's Trainer: the callback is the only line that knows of dljob.

torchrun --nproc-per-node 2 lightning_module.py
"""

import os
import tempfile
from pathlib import Path

import lightning
import numpy as np
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dltrain.data
from dltrain.integrations.lightning import ReportCallback

STEPS = int(os.environ.get("STEPS", "400"))


class Digits(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.network = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch, index):
        x, y = batch
        loss = nn.functional.cross_entropy(self.network(x), y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, index):
        x, y = batch
        self.log("accuracy", (self.network(x).argmax(1) == y).float().mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def on_train_start(self):
        if self.global_rank == 0:
            print(f"resumed from step {self.global_step}", flush=True)


digits = dltrain.data.load("digits")
train = TensorDataset(*digits.train(np.arange(digits.train_samples)))
test = TensorDataset(*digits.test(np.arange(digits.test_samples)))
folder = Path(os.environ.get("DLJOB_CHECKPOINT_DIR") or tempfile.mkdtemp())
trainer = lightning.Trainer(
    accelerator="auto" if torch.cuda.is_available() else "cpu",
    devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
    num_nodes=int(os.environ.get("WORLD_SIZE", "1")) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
    strategy="ddp",
    max_steps=STEPS,
    callbacks=[ReportCallback(), ModelCheckpoint(dirpath=folder, every_n_train_steps=20, save_last=True)],
    default_root_dir=folder,
    logger=False,
    enable_progress_bar=False,
)
# Lightning saves last.ckpt, and the callback saves stopped.ckpt when the job stops. Resume from the newest one.
saved = sorted(folder.glob("*.ckpt"), key=lambda path: path.stat().st_mtime)
trainer.fit(
    Digits(),
    DataLoader(train, batch_size=32, shuffle=True),
    DataLoader(test, batch_size=32),
    ckpt_path=saved[-1] if saved else None,
)
