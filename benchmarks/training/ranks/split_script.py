"""Run a rank of a training script whose model ranks split, and print its main memory at several times.

The script is what a user writes with ``t.create`` and ``t.run``: a decoder of ``SCRIPT_WIDTH`` numbers for each
position.
"""

import json
import os
import sys

import torch
from benchmarks.training.ranks.model_part_memory import peak_nbytes, resident_nbytes, train_tiny_model
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

from dltrain.train import session
from dltrain.train.trainer import Trainer

WORDS, POSITIONS, HEADS = 64, 32, 8
STEPS = 3
WIDTH_ENV, BLOCKS_ENV = "SCRIPT_WIDTH", "SCRIPT_BLOCKS"


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out, self.up, self.down = nn.Linear(width, width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        split = (*x.shape[:2], -1, x.shape[-1] // HEADS)
        query, key, value = (layer(y).view(split).transpose(1, 2) for layer in (self.query, self.key, self.value))
        x = x + self.out(scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2))
        found: Tensor = x + self.down(gelu(self.up(self.after(x))))
        return found


class Net(nn.Module):
    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.token = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.leave = nn.Linear(width, WORDS)

    def layers(self) -> list[nn.Module]:
        return [self.token, *self.blocks, self.leave]

    def pairs(self) -> list[object]:
        blocks = [block for block in self.blocks if isinstance(block, Block)]
        attention: list[object] = [((b.query, b.key, b.value), b.out, HEADS) for b in blocks]
        return attention + [(b.up, b.down) for b in blocks]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers():
            x = layer(x)
        return x


def net() -> Net:
    return Net(int(os.environ[WIDTH_ENV]), int(os.environ[BLOCKS_ENV]))


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(outputs.flatten(0, 1), targets.flatten())


def train(t: Trainer) -> None:
    train_tiny_model()
    row = {"rank": t.rank, "started": resident_nbytes(), "anonymous": resident_nbytes("RssAnon")}
    x = torch.randint(WORDS, (t.plan.global_batch * STEPS, POSITIONS), generator=torch.Generator().manual_seed(1))
    model = t.create(net)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, opt = t.wrap(model, opt, sample=x[:1])
    row["created"] = peak_nbytes()
    for words, following in t.steps(t.loader((x, x.roll(-1, 1)))):
        t.run(model, words, following, loss_of)
        opt.step()
    row |= {"peak": peak_nbytes(), "shared": resident_nbytes("RssShmem")}
    sys.stderr.write(f"memory {json.dumps(row)}\n")


def main() -> None:
    """Run the script under the plan in ``$DLTRAIN_PLAN``, with one thread. Exit the process."""
    torch.set_num_threads(1)
    session.leave(session.run(train))


if __name__ == "__main__":
    main()
