"""Frozen parameters that checkpoints do not contain, because the script builds them again at each start.

With ``t.wrap(…, save="trained")``, such as for LoRA, a checkpoint has the trained parameters, the buffers and the
optimizer's state. In place of each parameter that is frozen in ``t.wrap``, it has the SHA-256 of its values. A resumed
run compares these digests with those of the model that its script has built, so that it never trains on another base.
"""

import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

from dltrain.checkpoint.tensor_file import content
from dltrain.comm.process_group import ProcessGroup
from dltrain.models.deferred import initial_values, temporary
from dltrain.protocol.errors import BadInputError, MisuseError

ALL, TRAINED = "all", "trained"
"""Values of the argument ``save`` of ``t.wrap``."""
_SHOWN = 12
"""Hex digits of a digest in messages."""
_THREADS = 4
"""Maximum number of threads that compute digests. If the model is on a GPU, each has a parameter in main memory."""


class FrozenBase:
    """The parameters of a model that checkpoints do not contain. By default, there are none."""

    def __init__(self, digests: Mapping[str, str] | None = None) -> None:
        self.digests = digests or {}
        """Name of each parameter in ``state_dict()``, in the order of the model → SHA-256 of its values."""
        self._watched: list[tuple[str, nn.Parameter, int]] = []
        """Name, parameter and version of its values, of which torch increases the number with each change in place."""

    def check_same(self, stored: Mapping[str, str]) -> None:
        """Raise BadInputError unless a checkpoint was trained on the same base. ``stored``: its digests.

        The error names the first parameter that differs.
        """
        elsewhere = "or use another checkpoint volume"
        if self.digests and not stored:
            expected, remedy = "'all', as in the checkpoint, which has the whole model", "pass save='all'"
            raise BadInputError("t.wrap: save", repr(TRAINED), expected, f"{remedy}, {elsewhere}")
        if stored and not self.digests:
            raise BadInputError(
                "t.wrap: save",
                f"{ALL!r}, or no frozen parameter",
                f"{TRAINED!r} and {len(stored)} frozen parameters such as {next(iter(stored))}, as in the checkpoint",
                f"pass save={TRAINED!r} and freeze the same parameters before t.wrap, {elsewhere}",
            )
        for first in (name for name in (*stored, *self.digests) if (name in stored) != (name in self.digests)):
            found, expected = "a frozen parameter", "a trained one"
            if first in stored:
                found, expected = "a trained parameter", "a frozen one"
            remedy = f"freeze the same parameters before t.wrap, {elsewhere}"
            raise BadInputError(f"model: {first}", found, f"{expected}, as in the checkpoint", remedy)
        if differing := [name for name, digest in stored.items() if self.digests[name] != digest]:
            first = differing[0]
            raise BadInputError(
                f"model: {first}",
                f"values with SHA-256 {self.digests[first][:_SHOWN]}… (it is the first of {len(differing)} frozen "
                f"parameters that differ, of {len(stored)})",
                f"{stored[first][:_SHOWN]}…, as in the model on which the checkpoint was trained",
                f"build the model from the same pretrained weights in the same dtype before t.wrap, {elsewhere}",
            )

    def watch(self, model: nn.Module) -> None:
        """Begin to watch the frozen parameters of ``model``, which is complete. ``check_unchanged`` finds changes."""
        self._watched = [
            (name, parameter, parameter._version)
            for name, parameter in model.named_parameters()
            if name in self.digests
        ]

    def check_unchanged(self) -> None:
        """Raise MisuseError if a parameter of the base has become trainable, or if the script has changed its values.

        Changes of ``p.data`` are not found.
        """
        for name, parameter, version in self._watched:
            if parameter.requires_grad or parameter._version != version:
                found = "a trainable parameter" if parameter.requires_grad else "a change of its values"
                raise MisuseError(
                    f"model: {name}: found {found} after t.wrap; expected it to stay as it was, because it was frozen "
                    f"in t.wrap, and checkpoints with save={TRAINED!r} do not have it. Change it before t.wrap, "
                    f"freeze it only after t.wrap, or pass save={ALL!r}"
                )


def check_save(save: object) -> None:
    """Raise MisuseError unless ``save`` is a valid argument of ``t.wrap``."""
    if save not in (ALL, TRAINED):
        raise MisuseError(
            f"t.wrap: save: found {save!r}; expected {ALL!r}, or {TRAINED!r} to leave frozen parameters out of "
            "checkpoints"
        )


def frozen_base(model: nn.Module, process_group: ProcessGroup) -> FrozenBase:
    """Return the base of ``model``: its frozen parameters, which are equal on all ranks. All ranks must call it.

    Rank 0 computes the digests, once for each start, in up to ``_THREADS`` threads. SHA-256 takes 1.4 to 1.8 GB/s on a
    core of an AMD EPYC with SHA instructions. If the model is deferred, rank 0 computes one parameter at a time. Raise
    PeerLostError if a rank is lost.
    """
    digests = _digests(model) if process_group.rank == 0 else {}
    return FrozenBase(json.loads(process_group.broadcast(json.dumps(digests).encode())))


def _digests(model: nn.Module) -> dict[str, str]:
    """Return the SHA-256 of each frozen parameter by its name in ``state_dict()``. Tied weights have several names.

    Parameters that the model converts for its ``state_dict()`` are left out, so that checkpoints contain them.
    """
    state, initial = model.state_dict(), initial_values(model)
    frozen = {
        name: parameter
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if not parameter.requires_grad and name in state and state[name].data_ptr() == parameter.data_ptr()
    }
    first = {parameter: name for name, parameter in reversed(frozen.items())}

    def digest(parameter: nn.Parameter) -> str:
        if initial is None or not parameter.is_meta:
            whole = parameter.detach().cpu().contiguous()
        else:
            whole = temporary(tuple(parameter.shape), parameter.dtype)
            initial.fill(first[parameter], whole, parameter)
        return hashlib.sha256(content(whole).data).hexdigest()

    # The initial values of a deferred model draw from one generator of random numbers.
    with ThreadPoolExecutor(min(torch.get_num_threads(), _THREADS) if initial is None else 1) as pool:
        found = dict(zip(first, pool.map(digest, first), strict=True))
    return {name: found[parameter] for name, parameter in frozen.items()}
