"""Report the variables in ``spec`` that have no effect, because dljob sets them itself.

The rules of the CRD cannot refuse them, because ``v1alpha1`` changes only additively. Manifests with such variables
were valid before, such as one that was a PyTorchJob with MASTER_PORT.
"""

from dlcontract import CHECKPOINT_VARIABLE, DATASET_VARIABLE, GLOBAL_BATCH_VARIABLE, LOCAL_BATCH_VARIABLE
from dlcontract.pods import MPI_NETWORK_VARIABLES, RANK_VARIABLES, TORCHELASTIC_VARIABLES
from dljob.api import DLJobSpec
from dljob.api.overrides import override_variables
from dljob.api.spec import Framework
from dljob.render.environment import OPERATORS_VARIABLES
from dljob.status import TRUE, Verdict

_MAX_VALUE = 64
"""Characters of a value that a message quotes."""
_MAX_LISTED = 4


def accepted_verdict(spec: DLJobSpec) -> Verdict:
    """Return Accepted=True for a valid spec, with the reason VariablesIgnored if variables of it have no effect."""
    taken = reserved(spec)
    found = [
        f"spec.trainer.env[{i}]: found {item.name}={'(valueFrom)' if item.value_from else item.value[:_MAX_VALUE]}"
        for i, item in enumerate(spec.trainer.env)
        if item.name in taken
    ]
    # An override does replace a variable of the pod, but the agent sets those of a rank after it has read the pod's.
    found += [
        f"{path}: found {name}={'(valueFrom)' if value is None else value[:_MAX_VALUE]}"
        for path, name, value in override_variables(spec)
        if name in taken.difference(OPERATORS_VARIABLES)
    ]
    if not found:
        return Verdict("Accepted", TRUE, "Accepted", "the spec is valid")
    more = f", and {len(found) - _MAX_LISTED} more" if len(found) > _MAX_LISTED else ""
    text = (
        f"the spec is valid, but these variables have no effect: {', '.join(found[:_MAX_LISTED])}{more}; expected "
        "other names, because dljob sets these in every rank. Remove them"
    )
    return Verdict("Accepted", TRUE, "VariablesIgnored", text)


def reserved(spec: DLJobSpec) -> frozenset[str]:
    """Return the names of the variables that the ranks of a job get from dljob, whatever the job sets."""
    framework = spec.trainer.framework
    names = {*OPERATORS_VARIABLES, *RANK_VARIABLES}
    if spec.dataset.path:
        names.add(DATASET_VARIABLE)
    if framework is Framework.TORCHRUN:
        names |= {*TORCHELASTIC_VARIABLES}
    if framework is Framework.MPI:
        names |= {*MPI_NETWORK_VARIABLES}
    if framework is not Framework.DLTRAIN:
        if spec.checkpoint.enabled:
            names.add(CHECKPOINT_VARIABLE)
        if spec.global_batch_size is not None:
            names |= {LOCAL_BATCH_VARIABLE, GLOBAL_BATCH_VARIABLE}
    return frozenset(names)
