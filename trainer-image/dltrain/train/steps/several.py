"""Several models and optimizers in ``t.wrap``, such as those of a GAN: their checks, and one model that has all."""

from collections.abc import Sequence
from typing import Any, TypeVar, cast

from torch import Tensor, nn
from torch.optim import Optimizer

from dlcontract import SERVERS, Plan
from dltrain.elastic.team import Team
from dltrain.optim.combined import CombinedOptimizer, parts_of
from dltrain.protocol.errors import MisuseError
from dltrain.train import usage_checks

Models = TypeVar("Models", bound=nn.Module | Sequence[nn.Module])
_REMEDY = "t.wrap([gen, disc], [gen_opt, disc_opt])"


def checked(
    model: nn.Module | Sequence[nn.Module], optimizer: Optimizer | Sequence[Optimizer], sample: Any, team: Team
) -> tuple[nn.Module, Optimizer]:
    """Return the arguments of ``t.wrap`` as one model and one optimizer, which may be a combined one.

    The names of a list's tensors are those of an ``nn.ModuleList``: ``0.weight`` is the ``weight`` of the first model.
    Raise MisuseError if the arguments are invalid.
    """
    models: list[Any] = list(model) if isinstance(model, list | tuple) else [model]
    optimizers: list[Any] = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
    for name, given in (("model", models), ("optimizer", optimizers)):
        if not given:
            raise MisuseError(f"t.wrap: {name}: found an empty list; expected at least one. Call {_REMEDY}")
        if len({id(each) for each in given}) < len(given):
            raise MisuseError(f"t.wrap: {name}: found the same object twice in the list; expected each once")
    _check_plan(team.plan, "models", len(models))
    _check_plan(team.plan, "optimizers", len(optimizers))
    if isinstance(model, list | tuple) and (team.shards_model or team.splits_model):
        raise MisuseError(
            f"t.wrap: model: found a list with spec.parallelism.strategy {team.plan.parallelism}; expected a model, "
            "whose layers ranks divide. Call t.wrap(model, optimizer)"
        )
    for each in models:
        usage_checks.check_wrapped(each, optimizers[0], sample, team)
    for one in optimizers:
        usage_checks.check_wrapped(models[0], one, sample, team)
    whole: nn.Module = nn.ModuleList(models) if isinstance(model, list | tuple) else models[0]
    if len(optimizers) == 1:
        return whole, optimizers[0]
    _check_parameters(optimizers)
    return whole, CombinedOptimizer(optimizers)


def like(given: Models, wrapped: nn.Module) -> Models:
    """Return ``wrapped``, the one model of ``checked``, in the form of ``given``: a model, or a list of models."""
    if isinstance(given, list | tuple):
        return cast(Models, type(given)(cast(nn.ModuleList, wrapped)))
    return cast(Models, wrapped)


def number_of(given: Optimizer | None, wrapped: Optimizer) -> int:
    """Return the number of the optimizer that a script has passed to ``t.clip_gradients``, from 0.

    ``wrapped``: the optimizer of ``checked``. Raise MisuseError if it is another one, or None although there are
    several.
    """
    optimizers = parts_of(wrapped)
    if given is None and len(optimizers) == 1:
        return 0
    for number, each in enumerate(optimizers):
        if each is given:
            return number
    found = "no optimizer" if given is None else f"a {type(given).__name__} that t.wrap does not know"
    raise MisuseError(
        f"t.clip_gradients: optimizer: found {found}; expected one of t.wrap, whose gradients are clipped. Call "
        "t.clip_gradients(max_norm, opt)"
    )


def _check_plan(plan: Plan, what: str, count: int) -> None:
    """Raise MisuseError if ranks cannot train ``count`` models or optimizers with the plan."""
    if count == 1 or len(plan.ranks) == 1:
        return
    field = None
    if plan.parallelism != "Data":
        field, expected = f"spec.parallelism.strategy {plan.parallelism}", "Data"
        remedy = "Set spec.parallelism.strategy: Data"
    elif plan.collective in SERVERS:
        field, expected = f"spec.collective {plan.collective}", "a collective without parameter servers"
        remedy = "Set spec.collective: Auto"
    elif plan.optimizer.scaling == "AdaScale":
        field, expected = "spec.optimizer.learningRateScaling AdaScale", "a rule without gradient norms"
        remedy = "Set spec.optimizer.learningRateScaling: SquareRoot, or remove it"
    if field is not None and (what == "optimizers" or plan.parallelism != "Data"):
        raise MisuseError(f"t.wrap: {what}: found {count} with {field}; expected {expected}. {remedy}")


def _check_parameters(optimizers: Sequence[Optimizer]) -> None:
    """Raise MisuseError if an optimizer has no trainable parameter, or one that another optimizer has, too."""
    owner: dict[Tensor, int] = {}
    for number, optimizer in enumerate(optimizers):
        own = [p for group in optimizer.param_groups for p in group["params"]]
        if not any(parameter.requires_grad for parameter in own):
            raise MisuseError(
                f"t.wrap: optimizer: found no trainable parameter in optimizer {number} of the list; expected at least "
                "one in each. Set requires_grad of its parameters before t.wrap, or leave it out"
            )
        for parameter in own:
            if owner.setdefault(parameter, number) != number:
                raise MisuseError(
                    f"t.wrap: optimizer: found a parameter of shape {tuple(parameter.shape)} in optimizers "
                    f"{owner[parameter]} and {number} of the list; expected each parameter in one, because its "
                    "gradient is reduced in the step of its optimizer. Use one optimizer with several parameter groups"
                )
