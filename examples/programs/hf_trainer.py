"""A language model with Hugging Face's Trainer: the callback is the only line that knows of dljob.

torchrun --nproc-per-node 2 hf_trainer.py
"""

import os
import tempfile
from pydoc_data.topics import topics  # Some 600 kB of English that comes with Python.

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

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
    save_steps=20,
    save_total_limit=2,
    logging_steps=10,
    report_to="none",
    use_cpu=not torch.cuda.is_available(),
    ddp_backend="nccl" if torch.cuda.is_available() else "gloo",
)
last = get_last_checkpoint(folder)
if arguments.process_index == 0:
    print(f"resumed from step {last.rpartition('-')[2] if last else 0}", flush=True)
Trainer(model, arguments, train_dataset=data, callbacks=[ReportCallback()]).train(resume_from_checkpoint=last)
