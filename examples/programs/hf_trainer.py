"""A language model with Hugging Face's Trainer: the callback is the only line that knows of dljob.

torchrun --nproc-per-node 2 hf_trainer.py
"""

import os
import tempfile
from pathlib import Path
from pydoc_data.topics import topics  # Some 600 kB of English that comes with Python.

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from dltrain.integrations.huggingface import ReportCallback

STEPS, LENGTH = int(os.environ.get("STEPS", "200")), 64
text = torch.tensor(list("\n".join(topics.values()).encode()), dtype=torch.long)
pieces = text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)
data = [{"input_ids": piece, "labels": piece} for piece in pieces]
model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=2))
folder = os.environ.get("DLJOB_CHECKPOINT_DIR") or tempfile.mkdtemp()
arguments = TrainingArguments(
    output_dir=folder,
    max_steps=STEPS,
    per_device_train_batch_size=8,
    learning_rate=3e-3,
    save_steps=int(os.environ.get("SAVE_STEPS", "20")),
    save_total_limit=2,
    logging_steps=10,
    report_to="none",
    use_cpu=not torch.cuda.is_available(),
    ddp_backend="nccl" if torch.cuda.is_available() else "gloo",
)
# The Trainer writes trainer_state.json last. A checkpoint without it is incomplete.
saved = {
    int(path.parent.name.split("-")[1]): path.parent for path in Path(folder).glob("checkpoint-*/trainer_state.json")
}
step = max(saved, default=0)
if arguments.process_index == 0:
    print(f"resumed from step {step}", flush=True)
trainer = Trainer(model, arguments, train_dataset=data, callbacks=[ReportCallback()])
trainer.train(resume_from_checkpoint=str(saved[step]) if step else None)
