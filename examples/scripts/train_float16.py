"""Train in float16 on devices without bfloat16 (P100, V100, T4), with torch's GradScaler and an average of the weights.

The loop is plain PyTorch. After a restart, scaler and average continue where they were. It runs in three ways:

python examples/scripts/train_float16.py
mpirun -n 2 python examples/scripts/train_float16.py
in a DLJob with spec.trainer.command: [python, train_float16.py]; the manifest then sets batch and epochs
"""

import torch
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import dltrain

t = dltrain.init(batch=120, epochs=10)
device = t.device.type

digits = dltrain.data.load("digits")
model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, opt = t.wrap(model, opt)
loader = t.loader(digits)

scaler = torch.amp.GradScaler(device)  # checkpoints include its scale automatically
ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.95))
t.keep(ema=ema)

for x, y in t.steps(loader):
    opt.zero_grad()
    with torch.autocast(device, dtype=torch.float16):
        loss = cross_entropy(model(x), y)
    t.log(loss=loss)
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    t.clip_gradients(1.0)
    scaler.step(opt)  # no rank updates if a gradient is not finite on any rank; the step still counts
    scaler.update()
    ema.update_parameters(model)  # after the optimizer's step

x, y = (part.to(t.device) for part in digits.test(torch.arange(digits.test_samples).numpy()))
with torch.no_grad():
    t.log(accuracy=(ema(x).argmax(1) == y).double().mean().item())
