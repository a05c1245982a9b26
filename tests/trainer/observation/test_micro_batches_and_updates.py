"""Tests of what the observer counts if a step has several forward passes, or an update has another one inside."""

from pathlib import Path

from support.trainer.observed_scripts import MLP, loop, observed


def test_activations_of_forward_passes_before_one_backward_pass_add_up(tmp_path: Path) -> None:
    alone, _ = observed(tmp_path, loop())
    found, _ = observed(tmp_path, loop(loss="nn.functional.cross_entropy(model(x) + model(2 * x), y)"))
    assert found[0].activation_nbytes == 2 * alone[0].activation_nbytes


def test_update_of_a_base_class_is_part_of_the_same_step(tmp_path: Path) -> None:
    """Fixed bug: if the script also had an optimizer of the base class, torch called the hook after both updates."""
    model = f"""
{MLP}
class Scaled(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.mul_(0.5)
        return super().step(closure)
torch.optim.Scaled = Scaled
other = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
"""
    found, _ = observed(tmp_path, loop(model=model, optimizer="Scaled(model.parameters(), lr=0.1)"))
    assert (found[0].steps, found[0].samples, found[-1].steps) == (3, 32, 30)


def test_models_of_two_optimizers_are_one_step_and_add_up(tmp_path: Path) -> None:
    """Fixed bug: the memory of the optimizers was that of the first one, such as SGD with momentum beside Adam."""
    model = f"""
{MLP}
critic = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
of_critic = torch.optim.SGD(critic.parameters(), lr=0.1, momentum=0.9)
"""
    after = "of_critic.zero_grad(); critic(model(x).detach()).mean().backward(); of_critic.step()"
    found, _ = observed(tmp_path, loop(model=model, optimizer="Adam(model.parameters())", after=after))
    generator, critic = 20 * 64 + 64 + 64 * 2 + 2, 2 * 8 + 8 + 8 + 1
    assert (found[0].parameters, found[0].optimizer_slots, found[-1].steps) == (generator + critic, 2, 30)
    # Each forward pass counts with a backward pass, also that of the generator whose result the critic gets detached.
    assert found[0].flops == 3 * 2 * 32 * (2 * (20 * 64 + 64 * 2) + 2 * 8 + 8)
