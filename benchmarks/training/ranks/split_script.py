"""Run a rank of a training script whose model ranks split, and print its main memory at several times.

The script is what a user writes with ``t.create`` and ``t.run``: a network of the kind ``SCRIPT_KIND`` with
``SCRIPT_BLOCKS`` blocks of ``SCRIPT_WIDTH`` numbers for each position. With the kind ``lora``, it loads its frozen base
from the file ``SCRIPT_BASE``, which ``python -m benchmarks.training.ranks.split_script FILE`` writes before.
"""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from benchmarks.training.ranks.model_part_memory import peak_nbytes, resident_nbytes, train_tiny_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, group_norm, relu, scaled_dot_product_attention

from dltrain.train import session
from dltrain.train.trainer import Trainer

WORDS, POSITIONS, HEADS, SIDE = 64, 32, 8, 16
STEPS = 3
KIND_ENV, WIDTH_ENV, BLOCKS_ENV = "SCRIPT_KIND", "SCRIPT_WIDTH", "SCRIPT_BLOCKS"
BASE_ENV = "SCRIPT_BASE"


class Block(nn.Module):
    """A transformer layer."""

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


class Mixer(nn.Module):
    """A residual block of two linear layers, without attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.down(relu(self.up(self.norm(x))))
        return found


class Recurrent(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.cell = nn.LSTM(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.cell(x)[0]
        return found


class Convolutional(nn.Module):
    """A residual block of two convolutions, on images of ``SIDE`` x ``SIDE``."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.second(relu(group_norm(self.first(relu(group_norm(x, HEADS))), HEADS)))
        return found


class Net(nn.Module):
    """Blocks over a sequence of words."""

    def __init__(self, block: Callable[[int], nn.Module], width: int, blocks: int) -> None:
        super().__init__()
        self.token = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(block(width) for _ in range(blocks))
        self.leave = nn.Linear(width, WORDS)

    def layers(self) -> list[nn.Module]:
        return [self.token, *self.blocks, self.leave]

    def pairs(self) -> list[object]:
        blocks = [block for block in self.blocks if isinstance(block, Block)]
        attention: list[object] = [((b.query, b.key, b.value), b.out, HEADS) for b in blocks]
        linear = [b for b in self.blocks if isinstance(b, Block | Mixer) and isinstance(b.up, nn.Linear)]
        return attention + [(b.up, b.down) for b in linear]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers():
            x = layer(x)
        return x


class LoRA(nn.Module):
    """A frozen linear layer with a trained correction of low rank."""

    def __init__(self, layer: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.layer = layer
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x) + self.up(self.down(x))
        return found


def adapted(width: int, blocks: int) -> Net:
    """Return a decoder with a frozen base, which it loads from a file if there is one, and trained corrections."""
    model = Net(Block, width, blocks)
    if base := os.environ.get(BASE_ENV):
        model.load_state_dict(load_file(base))
    model.requires_grad_(False)
    for block in model.blocks:
        assert isinstance(block, Block), "made above"
        block.add_module("up", LoRA(block.up))
    return model


class Images(nn.Sequential):
    """Blocks over images. Each pixel has a class."""

    def __init__(self, width: int, blocks: int) -> None:
        between = [Convolutional(width) for _ in range(blocks)]
        super().__init__(nn.Conv2d(3, width, 3, padding=1), *between, nn.Conv2d(width, WORDS, 1))


def words(samples: int, seed: int) -> tuple[Tensor, Tensor]:
    x = torch.randint(WORDS, (samples, POSITIONS), generator=torch.Generator().manual_seed(seed))
    return x, x.roll(-1, 1)


def images(samples: int, seed: int) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 3, SIDE, SIDE, generator=drawn)
    return x, torch.randint(WORDS, (samples, SIDE, SIDE), generator=drawn)


@dataclass(frozen=True)
class Kind:
    """A kind of network. ``net``: makes one of a width and a number of blocks. ``data``: (samples, seed) → x, y."""

    net: Callable[[int, int], nn.Module]
    data: Callable[[int, int], tuple[Tensor, Tensor]] = words
    shape: tuple[int, ...] = (POSITIONS,)
    dtype: torch.dtype = torch.int64


KINDS = {
    "decoder": Kind(lambda width, blocks: Net(Block, width, blocks)),
    "lora": Kind(adapted),
    "mixer": Kind(lambda width, blocks: Net(Mixer, width, blocks)),
    "recurrent": Kind(lambda width, blocks: Net(Recurrent, width, blocks)),
    "convolutional": Kind(Images, images, (3, SIDE, SIDE), torch.float32),
}


def net() -> nn.Module:
    return KINDS[os.environ[KIND_ENV]].net(int(os.environ[WIDTH_ENV]), int(os.environ[BLOCKS_ENV]))


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    if outputs.dim() == 4:
        return cross_entropy(outputs, targets)
    return cross_entropy(outputs.flatten(0, 1), targets.flatten())


def train(t: Trainer) -> None:
    train_tiny_model()
    row = {"rank": t.rank, "started": resident_nbytes(), "anonymous": resident_nbytes("RssAnon")}
    x, y = KINDS[os.environ[KIND_ENV]].data(t.plan.global_batch * STEPS, 1)
    model = t.create(net)
    opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    if t.plan.activation_checkpointing:
        blocks = model.blocks
        assert isinstance(blocks, nn.ModuleList), "it is one in all networks with blocks"
        t.checkpoint_activations(blocks)
    model, opt = t.wrap(model, opt, sample=x[:1], save="trained")
    row["created"] = peak_nbytes()
    for inputs, targets in t.steps(t.loader((x, y))):
        t.run(model, inputs, targets, loss_of)
        opt.step()
    row |= {"peak": peak_nbytes(), "shared": resident_nbytes("RssShmem")}
    sys.stderr.write(f"memory {json.dumps(row)}\n")


def main() -> None:
    """Run the script under the plan in ``$DLTRAIN_PLAN``, with one thread. Exit the process."""
    torch.set_num_threads(1)
    session.leave(session.run(train))


if __name__ == "__main__":
    save_file(Net(Block, int(os.environ[WIDTH_ENV]), int(os.environ[BLOCKS_ENV])).state_dict(), sys.argv[1])
