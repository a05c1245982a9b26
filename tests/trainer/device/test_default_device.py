"""torch's default device is a choice of the script, for its model. The trainer's own tensors do not depend on it."""

import ast
from pathlib import Path

import pytest

import dltrain
from support.trainer.plans import make_plan, saving, write
from support.trainer.ranks import BODIES, run_ranks

FACTORIES = {
    "arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "ones", "rand",
    "randint", "randn", "randperm", "scalar_tensor", "tensor", "zeros",
}  # fmt: skip
"""Functions of torch whose tensors are on the default device unless they name one."""
WITHOUT_SCRIPTS = {"models", "builtin", "hardware_probe"}
"""Packages with models, which a script may create on its default device, and packages that run without a script."""
ROOT = Path(dltrain.__file__).parent


def test_new_tensors_name_their_device() -> None:
    """Fixed bug: with ``torch.set_default_device("cuda")``, memory of messages and checkpoints was on the GPU."""
    without = []
    for path in sorted(ROOT.rglob("*.py")):
        place = path.relative_to(ROOT)
        if place.parts[0] in WITHOUT_SCRIPTS:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr=name)) if name in FACTORIES:
                    if all(keyword.arg != "device" for keyword in node.keywords):
                        without.append(f"{place}:{node.lineno}: {ast.unparse(node)}")
    assert not without


@pytest.mark.mpi
@pytest.mark.long
def test_training_and_resume_do_not_depend_on_the_default_device(tmp_path: Path) -> None:
    def trained(folder: str, device: str, epochs: int) -> str:
        (place := tmp_path / folder).mkdir(exist_ok=True)
        plan = make_plan(2, shares=[8, 4], global_batch=12, epochs=epochs, checkpoint=saving(place))
        output = run_ranks(
            2, str(BODIES / "training/scripts/default_device.py"), device, DLTRAIN_PLAN=write(plan, place)
        ).output
        (line,) = (line for line in output.splitlines() if line.startswith("trained"))
        return line

    expected = trained("whole", "cpu", 2)
    trained("resumed", "meta", 1)
    assert trained("resumed", "meta", 2) == expected
