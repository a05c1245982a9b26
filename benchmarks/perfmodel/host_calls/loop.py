"""The training loop that most of the small programs have in common."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

SAMPLES, CLASSES = 256, 10
Step = Callable[[], object]
Optimizer = Callable[..., torch.optim.Optimizer]


def loop(
    model: nn.Module, optimizer: torch.optim.Optimizer, *shape: int, then: Callable[[Tensor], object] = id
) -> Step:
    """Return the step of a usual loop over random batches. ``then``: what follows the backward pass, given the loss."""
    x, y = torch.randn(SAMPLES, *shape), torch.randint(CLASSES, (SAMPLES,))

    def step() -> None:
        chosen = torch.randint(SAMPLES, (16,))
        loss = functional.cross_entropy(model(x[chosen]), y[chosen])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        then(loss)
        optimizer.step()

    return step
