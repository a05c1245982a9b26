"""LoRA with Hugging Face PEFT and the five lines of dltrain: checkpoints have the adapters, and not the frozen base.

python lora.py, or mpirun -n 2 python lora.py
"""

import os

import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

import dltrain
import dltrain.data

PIXELS, GREYS = 64, 17

t = dltrain.init(batch=int(os.environ.get("BATCH", "64")), epochs=int(os.environ.get("EPOCHS", "20")))  # 1
digits = dltrain.data.load("digits")
# An image is a sequence of pixels. A real script calls from_pretrained here: the base must be the same at each start.
config = GPT2Config(
    vocab_size=GREYS, n_positions=PIXELS, n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
)
adapters = LoraConfig(r=8, target_modules=["c_attn", "c_fc", "c_proj"], fan_in_fan_out=True)
model = get_peft_model(GPT2LMHeadModel(config), adapters)
opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
model, opt = t.wrap(model, opt, save="trained")  # 2
if t.rank == 0:
    print(f"resumed from step {t.step}", flush=True)
for x, _ in t.steps(t.loader(digits)):  # 3, 4
    tokens = (x.flatten(1) * (GREYS - 1)).round().long()
    loss = model(input_ids=tokens, labels=tokens).loss
    t.log(loss=loss)  # 5
    loss.backward()
    opt.step()
    opt.zero_grad()
