"""Your own model in a pipeline: each rank has some of its layers, and no rank has all of it. It runs in three ways:

python examples/scripts/train_pipeline.py
mpirun -n 2 python examples/scripts/train_pipeline.py
in a DLJob with spec.trainer.command: [python, train_pipeline.py] and spec.parallelism.strategy: Pipeline or any other
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu

import dltrain


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.enter = nn.Sequential(nn.Flatten(), nn.Linear(64, width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(4))
        self.leave = nn.Linear(width, 10)

    def layers(self) -> list[nn.Module]:  # for strategy Pipeline: the modules in the order in which they run
        return [self.enter, *self.blocks, self.leave]

    def pairs(self) -> list[tuple[nn.Linear, nn.Linear]]:  # for strategy Tensor
        return [(block.up, block.down) for block in self.blocks]

    def forward(self, x: Tensor) -> Tensor:  # for all other strategies
        for layer in self.layers():
            x = layer(x)
        return x


t = dltrain.init(batch=96, epochs=8, strategy="Pipeline")
digits = dltrain.data.load("digits")
x, y = digits.test(torch.arange(digits.test_samples).numpy())

model = t.create(Net)  # in place of Net()
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, opt = t.wrap(model, opt, sample=x[:1])
for images, labels in t.steps(t.loader(digits)):
    t.run(model, images, labels, cross_entropy)  # forward pass, loss, and backward pass
    opt.step()

model.eval()
found = dltrain.evaluate((t.predict(model, a), b) for a, b in t.held_out(t.loader((x, y))))
t.log(accuracy=found.classification.accuracy)
