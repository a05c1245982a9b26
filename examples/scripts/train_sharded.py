"""Your own model in parts: each rank stores a part of every layer, and gathers a layer while it computes. It runs in
three ways:

python examples/scripts/train_sharded.py
mpirun -n 2 python examples/scripts/train_sharded.py
in a DLJob with spec.trainer.command: [python, train_sharded.py] and spec.parallelism.strategy: Sharded or any other
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import dltrain


class Block(nn.Module):
    """A transformer layer."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.before(x)).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        mixed = scaled_dot_product_attention(*(part.transpose(-2, -3) for part in (query, key, value)))
        x = x + self.out(mixed.transpose(-2, -3).flatten(-2))
        return x + self.feed(self.after(x))


class Net(nn.Module):
    """Reads an image of 8 x 8 pixels as a sequence of eight rows."""

    def __init__(self, width: int = 80, blocks: int = 3) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(8, width), nn.Linear(width, 10)
        self.place = nn.Parameter(torch.zeros(8, width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))  # each element is gathered by itself

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x.view(-1, 8, 8)) + self.place
        for block in self.blocks:
            x = block(x)
        return self.leave(x.mean(1))


t = dltrain.init(batch=96, epochs=8, strategy="Sharded")
digits = dltrain.data.load("digits")
torch.manual_seed(0)
model = t.create(Net)  # with deferredInit, no rank ever has the whole model
model, opt = t.wrap(model, torch.optim.AdamW(model.parameters(), lr=2e-3))
t.checkpoint_activations(model.blocks)  # does nothing unless the plan checkpoints activations
scaler = t.grad_scaler()  # does nothing unless the plan computes in float16
for images, labels in t.steps(t.loader(digits), accumulate=True):
    opt.zero_grad()
    with t.autocast():  # the precision of the plan
        loss = cross_entropy(model(images), labels)
    t.log(loss=loss)
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()

model.eval()
x, y = digits.test(torch.arange(digits.test_samples).numpy())
with torch.no_grad():
    found = dltrain.evaluate((model(a), b) for a, b in t.held_out(t.loader((x, y))))
t.log(accuracy=found.classification.accuracy)
