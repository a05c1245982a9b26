"""Complete the spec of a job with a task by the suggestion for its data, as if the user had written these fields."""

from math import ceil
from typing import Any

from pydantic import ValidationError

from dlcontract import CHECKPOINT_DIR
from dljob.api import DLJobSpec, NodeRange
from dljob.api.status.suggestion import BaselineScoreStatus, BaselineStatus, SuggestedAlternative, SuggestionStatus
from dljob.job.spec_errors import in_words
from dljob.job.task.suggestion import JudgedBaseline, Suggestion

MODEL_VARIABLE = "MODEL_DIR"
"""Environment variable of the written scripts: the folder for the trained model."""
MODEL_FOLDER = "suggested-model"
SMALL_DATA_NBYTES = 64 * 2**20
"""Up to this memory of the data, the planner's prediction of a pod's memory has room for it."""
LIBRARIES_NBYTES = 600 * 2**20
"""Memory of a rank's process before it has data and a model. Chosen: the planner predicts 426 MiB for a small model."""
TRAINING_STATE_NBYTES = 16
"""Bytes of a parameter with its gradient and the two moments of Adam, in float32."""


def suggested_spec(spec: DLJobSpec, suggestion: Suggestion, config_map: str, folder: str) -> DLJobSpec:
    """Return the spec with the suggested fields in place of ``task``.

    ``config_map``: name of the ConfigMap with the scripts. ``folder``: name of the job's folder on its volume.
    Raise ValueError if the completed spec breaks a rule of the API, with the field, what was found and what is
    expected.
    """
    found = suggestion.model
    assert found is not None, "the caller has checked that the suggestion is no error"
    manifest = spec.manifest()
    del manifest["task"]
    manifest["model"] = {
        "hints": {
            "parameters": found.parameters,
            "flopsPerSample": found.flops_per_sample,
            "activationBytesPerSample": found.activation_nbytes,
        }
    }
    manifest["dataset"] |= {"samples": found.samples, "sampleBytes": found.sample_nbytes}
    manifest |= {"globalBatchSize": found.batch, "epochs": found.epochs}
    trainer: dict[str, Any] = manifest["trainer"]
    trainer |= {"command": ["python", "train.py"], "source": {"configMap": {"name": config_map}}}
    if all(item["name"] != MODEL_VARIABLE for item in trainer.get("env") or ()):
        own = {"name": MODEL_VARIABLE, "value": f"{CHECKPOINT_DIR}/{folder}/{MODEL_FOLDER}"}
        trainer["env"] = [*(trainer.get("env") or ()), own]
    if spec.nodes == NodeRange():
        manifest["nodes"] = {"min": 1, "max": 1}
    if spec.resources.memory is None and found.data_nbytes > SMALL_DATA_NBYTES:
        state = TRAINING_STATE_NBYTES * found.parameters + found.batch * found.activation_nbytes
        nbytes = LIBRARIES_NBYTES + found.data_nbytes + state
        manifest["resources"] = {**manifest.get("resources", {}), "memory": f"{ceil(nbytes / 2**20)}Mi"}
    try:
        return DLJobSpec.model_validate(manifest)
    except ValidationError as error:
        raise ValueError(in_words(error)) from None


def suggestion_status(suggestion: Suggestion, config_map: str) -> SuggestionStatus:
    """Return ``status.suggestion``. ``config_map``: name of the ConfigMap with the scripts."""
    found = suggestion.model
    assert found is not None, "the caller has checked that the suggestion is no error"
    return SuggestionStatus(
        model=found.name,
        why=found.why,
        parameters=found.parameters,
        alternatives=tuple(
            SuggestedAlternative(model=each.model, parameters=each.parameters, why=each.why)
            for each in suggestion.alternatives
        ),
        data=suggestion.data,
        findings=suggestion.findings,
        baseline=None if suggestion.baseline is None else _baseline(suggestion.baseline),
        config_map=config_map,
    )


def _baseline(found: JudgedBaseline) -> BaselineStatus:
    return BaselineStatus(
        measure=found.measure,
        scores=tuple(
            BaselineScoreStatus(
                model=each.model,
                validation=float(f"{each.validation:.6g}"),
                error=float(f"{each.error:.6g}"),
                test=None if each.test is None else float(f"{each.test:.6g}"),
            )
            for each in found.scores
        )
        or None,
        seconds=round(found.seconds, 1),
        problem=found.problem,
    )
