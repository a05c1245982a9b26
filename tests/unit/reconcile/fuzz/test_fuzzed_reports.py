"""Generated reports through reconcile, status and profiles. The script of a tenant may write any report.

No report makes a reconcile fail, each status and each profile passes the schema of its CRD, and plans can still be made
with profiles that such reports have taught.
"""

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, event, example, given, settings
from hypothesis import strategies as st

from dlcontract import Report, RunPhase
from dljob.api import DLProfileStatus
from dljob.job.observed import Observed
from dljob.job.profiles import learned_by_model, updated_profile
from dljob.kube.objects import trim
from dljob.kube.objects.bounds import MAX_REPORT_NBYTES
from dljob.reconcile import Desired, RunMeasurements, parse_observed, reconcile
from support.builders import CONFIG, NOW, after, report, seen, settled
from support.manifests.admission import closed, schema_of

Json = dict[str, Any]
STATUS = jsonschema.Draft202012Validator(closed(schema_of("DLJob", "status")))
PROFILE = jsonschema.Draft202012Validator(closed(schema_of("DLProfile", "status")))

seconds = st.sampled_from((0.0, 5e-324, 1e-9, 0.5, 1.0, 1e9)) | st.floats(0, 1e9)
counts = st.sampled_from((0, 1, 2, 3, 32, 75, 2**31, 2**53)) | st.integers(0, 100)
times = st.sampled_from((0.0, NOW.timestamp() - 60, NOW.timestamp(), NOW.timestamp() + 1e6, 2.5e11))
devices = st.sampled_from(("cpu", "NVIDIA-A100-SXM4-80GB", "", "x" * 63, "ü/\n", "\x00"))
texts = st.sampled_from(("", "it failed", "a\nb\r\x00\x1b[2K", "ü" * 200, "\U0001f600", "%s {0} {a}")) | st.text(
    max_size=20
)
reasons = st.sampled_from(("RankKilled", "OutOfMemory", "BadInput", "Succeeded", "X" * 64))
losses = st.none() | st.floats(allow_nan=False, allow_infinity=False)


def some(required: Json, **optional: st.SearchStrategy[Any]) -> st.SearchStrategy[Json]:
    return st.fixed_dictionaries(required, optional=optional)


measures = some(
    {"rank": st.integers(0, 4) | st.just(100_000)}, device=devices, share=counts, compute_s=seconds, wait_s=seconds,
    comm_s=seconds, data_s=seconds, forward_s=seconds, backward_s=seconds, sum_s=seconds, agree_s=seconds,
    wait_cpu_s=seconds, fetch_s=seconds,
)  # fmt: skip
positive = st.sampled_from((5e-324, 1e-9, 0.1, 1.0, 1e9))
probes = some({"device": devices, "batch": st.sampled_from((1, 2, 64, 2**31, 2**53)), "compute_s": positive})
failures = some(
    {"reason": reasons, "message": texts}, rank=counts, host=texts, exit_code=st.sampled_from((-(2**31), -1, 0, 137, 2**32 - 1)),
    log_tail=texts, counts=st.booleans(), retry=st.booleans(), unreachable=st.booleans(),
)  # fmt: skip
stops = some({"reason": st.sampled_from(("TargetReached", "NoImprovement", "X" * 64)), "message": texts})
finite = st.floats(allow_nan=False, allow_infinity=False)
scores = some({"name": st.text(max_size=64), "f1": st.floats(0, 1), "samples": counts})
analyses = some(
    {"task": st.sampled_from(("classification", "ranking")), "samples": counts, "metric": st.sampled_from(("R2", "a/b")),
     "value": finite}, baseline=finite, calibration_error=st.floats(0, 1), worst_classes=st.lists(scores, max_size=3),
    other_models=st.lists(some({"name": st.text(max_size=64), "value": finite}), max_size=5),
)  # fmt: skip
findings = some({"name": st.sampled_from(("Overfitting", "X" * 64)), "message": st.text(max_size=512)})
outcomes = some(
    {"steps": counts, "seconds": seconds}, loss=losses, accuracy=st.floats(0, 1), checkpoint=texts, report=texts,
    stopped=stops, analysis=analyses, findings=st.lists(findings, max_size=8),
)  # fmt: skip
steps = {"step": counts, "earliest_step": counts, "latest_step": counts}
values = st.floats(allow_nan=False, allow_infinity=False)
targets = some({"value": values, "best": values}, forecast=st.none() | some(steps))
sizes = st.sampled_from((1, 2, 650, 10**9, 10**15))
works = some(
    {"kind": st.sampled_from(("convolution", "product", "pool", "other", "X" * 32)), "count": st.integers(1, 10**6)},
    forward_flops=st.sampled_from((0.0, 5e-324, 1e9, 1e27)), moved_nbytes=st.sampled_from((0, 1, 10**18)),
)  # fmt: skip
structures = some(
    {"parameters": sizes, "samples": st.sampled_from((1, 32, 10**9)), "flops": st.sampled_from((5e-324, 1.0, 1e9, 1e27))},
    sample_nbytes=st.just(0) | sizes, activation_nbytes=st.sampled_from((0, 1, 10**6, 10**18)),
    optimizer_slots=st.integers(0, 2), work=st.lists(works, max_size=8), steps=counts, step_s=st.none() | seconds,
    world_size=st.sampled_from((1, 2, 100_000)),
)  # fmt: skip
memories = some(
    {"pod": st.sampled_from(("digits-cpu-0", "digits-cpu-1", "x")), "ranks": st.sampled_from((1, 2, 4096)),
     "peak_nbytes": st.sampled_from((1, 10**8, 2**50))},
    parts=st.lists(st.sampled_from((0, 1, 10**8, 2**50)), max_size=64),
)  # fmt: skip
uploads = some(
    {"unix_s": times, "path": texts}, name=st.text(max_size=253), nbytes=counts, files=counts, new_nbytes=counts,
    duration_s=st.none() | seconds, step=st.none() | counts,
)  # fmt: skip
problems = some({"reason": st.sampled_from(("UploadFailed", "Complete", "X" * 64)), "message": texts, "unix_s": times})
marks = ("agents_up", "launched", "imported", "rendezvous", "first_step")
PARTS: dict[str, st.SearchStrategy[Any]] = {
    "step": counts,
    "steps": counts,
    "epoch": counts,
    "step_s": st.none() | seconds,
    "samples_per_s": st.none() | st.floats(0, 1e15),
    "loss": losses,
    "accuracy": st.none() | st.floats(0, 1),
    "metrics": st.dictionaries(st.sampled_from(("perplexity", "a/b", "_")), st.floats(allow_nan=False, allow_infinity=False)),
    "world_size": counts,
    "unix_s": times,
    "ranks": st.lists(measures, max_size=4),
    "probes": st.lists(probes, max_size=4),
    "noise": st.none() | some({"samples": st.sampled_from((0.0, 1e-300, 100.0, 1e9)), "steps": counts}),
    "restarts": st.dictionaries(reasons, counts, max_size=3),
    "failures": counts,
    "steps_repeated": counts,
    "checkpoints_skipped": counts,
    "energy": st.none() | some({"joules": st.sampled_from((0.0, 5e-324, 1e3, 1e18)), "part": st.floats(0, 1)}),
    "target": st.none() | targets,
    "failure": st.none() | failures,
    "last_checkpoint": st.none() | some({"step": counts, "unix_s": times}, path=texts, nbytes=counts),
    "uploads": st.none() | some(
        {}, count=counts, failures=counts, seconds=seconds, nbytes=counts, last=st.none() | uploads,
        problem=st.none() | problems,
    ),
    "startup": some({}, **{f"{name}_unix_s": st.none() | times for name in marks}),
    "outcome": st.none() | outcomes,
    "mismatches": st.lists(some({"rank": counts, "planned": devices, "found": devices}), max_size=3),
    "waits_for": st.none() | texts,
    "refused_sizes": st.lists(some({"ranks": counts, "message": texts}), max_size=3),
    "link_latency_s": st.none() | seconds,
    "structure": st.none() | structures,
    "pod_memory": st.none() | memories,
    "bound_ranks": st.none() | st.sampled_from((1, 3, 2**31)),
    "link_bandwidth_Bps": st.none() | st.sampled_from((5e-324, 1.0, 1e9, 1e15)),
}  # fmt: skip
assert PARTS.keys() | {"schema_", "uid", "plan_number", "plan_digest", "term", "phase"} == Report.model_fields.keys()
JUNK = (
    st.none() | st.booleans() | st.floats() | st.text(max_size=20) | st.lists(st.integers(), max_size=2)
    | st.sampled_from((-1, 2**53 + 1, 2**64, 10**400, 1e308, "x" * 9000, {"a": {"b": []}}, [[[[[]]]]]))
)  # fmt: skip
DEEP = 20_000
HIDING = {"reason": "RankKilled", "message": ""}
"""A failure that followed an end at the memory limit before the operator saw it."""
RAW: dict[str, Callable[[str, int], str]] = {
    "cut": lambda text, at: text[: at % (len(text) + 1)],
    "doubled": lambda text, at: text + text,
    "with a byte order mark": lambda text, at: "\ufeff" + text,
    "with a repeated key": lambda text, at: '{"step":1,"phase":"Failed",' + text[1:],
    "with a huge number": lambda text, at: text[:1] + f'"step":{"9" * (at % 5000 + 1)},' + text[1:],
    "with a huge exponent": lambda text, at: text[:1] + f'"step_s":1e{at},' + text[1:],
    "with an unknown deep field": lambda text, at: text[:1] + f'"x":{"[" * DEEP}{"]" * DEEP},' + text[1:],
    "with another character": lambda text, at: text[: at % len(text)] + chr(at % 0xD7FF) + text[at % len(text) + 1 :],
    "with a lone surrogate": lambda text, at: text[:1] + '"failure":{"reason":"A","message":"\\ud800"},' + text[1:],
    "deep lists": lambda text, at: "[" * DEEP,
    "deep maps": lambda text, at: '{"a":' * DEEP,
    "no map": lambda text, at: ("[]", "null", '"x"', "1", "", " ", "NaN")[at % 7],
    "too long": lambda text, at: text + " " * MAX_REPORT_NBYTES,
}  # fmt: skip


def places(node: Any, place: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Yield the paths of all values in a JSON document except the document itself."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        yield (*place, key)
        yield from places(value, (*place, key))


@st.composite
def reports(draw: st.DrawFn) -> tuple[Json, str | None, int]:
    """Return (fields of a report, kind of a change of its text or None, number for the change)."""
    fields = copy.deepcopy(draw(some({"phase": st.sampled_from(list(RunPhase))}, **PARTS)))
    for _ in range(draw(st.integers(0, 2))):
        place = draw(st.sampled_from([*places(fields), ("uid",), ("plan_number",), ("term",), ("schema",)]))
        holder: Any = fields
        for part in place[:-1]:
            holder = holder[part]
        holder[place[-1]] = copy.deepcopy(draw(JUNK))
    how = draw(st.none() | st.none() | st.sampled_from(sorted(RAW)))
    return fields, how, draw(st.integers(0, 100_000))


def written(observed: Observed, generated: tuple[Json, str | None, int]) -> Observed:
    """Return the job with a generated report in its ConfigMap, as the operator reads it."""
    fields, how, number = generated
    text = json.dumps({**json.loads(report(observed)), **fields})
    text = text if how is None else RAW[how](text, number)
    owner = {"apiVersion": "dljob.dev/v1alpha1", "kind": "DLJob", "name": "digits", "controller": True}
    meta = {"name": "digits-report", "labels": {"dljob.dev/job": "digits"}, "ownerReferences": [owner]}
    body = {"metadata": meta, "data": {"report.json": text}}
    found = trim.config_map(body)
    return replace(observed, report=found.report, report_problem=found.report_problem)


def checked(desired: Desired) -> Desired:
    """Check that the API server would accept the status, and that it can be written as JSON."""
    assert desired.status is not None
    document = json.loads(json.dumps(desired.status.manifest(), allow_nan=False).encode())
    errors = [f"{error.json_path}: {error.message:.300}" for error in STATUS.iter_errors(document)]
    assert not errors
    assert all(len(item.message) <= 1024 for item in desired.events)
    return desired


def taught(found: RunMeasurements) -> None:
    """Update a profile twice, check it, and plan the same job with it."""
    profiles = []
    for device in found.devices:
        status = DLProfileStatus()
        for _ in range(2):
            status = updated_profile(status, found.model, device, found.report, NOW, found.place, found.data)
            document = json.loads(json.dumps(status.manifest(), allow_nan=False))
            assert not [f"{error.json_path}: {error.message:.300}" for error in PROFILE.iter_errors(document)]
            status = DLProfileStatus.model_validate(document)
        profiles.append({"spec": {"model": found.model, "device": device}, "status": document})
    observed = replace(seen(), learned=learned_by_model(profiles, "team-a"))
    checked(reconcile(observed, CONFIG, NOW))


@pytest.fixture(scope="module")
def running() -> Observed:
    observed = seen()
    return settled(after(observed, reconcile(observed, CONFIG, NOW)))


@settings(
    max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(reports())
@example(({"phase": RunPhase.RESTARTING, "failure": HIDING, "restarts": {"OutOfMemory": 1}}, None, 0))
def test_no_report_makes_a_reconcile_fail(running: Observed, generated: tuple[Json, str | None, int]) -> None:
    reported = written(running, generated)
    desired = checked(reconcile(reported, CONFIG, NOW))
    assert desired.status is not None
    valid = parse_observed(reported).report is not None
    event(f"{'valid' if valid else 'invalid'}, {generated[0]['phase'] if valid else generated[1]}")
    if not valid:
        assert desired.status.phase.value not in ("Complete", "Failed") and desired.measurements is None
    following = after(reported, desired)
    again = checked(reconcile(following, CONFIG, NOW))
    # A report that shows another end at the memory limit leads to a plan with more memory, whose pods replace the others.
    raises = any((each.type, each.reason) == ("MemoryExceeded", "Raising") for each in desired.status.conditions)
    assert again.status is not None and (raises or again.status.phase == desired.status.phase)


def of_device(strategy: st.SearchStrategy[Json], name: str) -> st.SearchStrategy[Json]:
    return strategy.map(lambda fields: {**fields, "device": name})


@st.composite
def measured(draw: st.DrawFn) -> Json:
    """Return the fields of a report that ends a run and has measurements of the planned device."""
    fields: Json = copy.deepcopy(draw(some({"phase": st.just(RunPhase.SUCCEEDED)}, **PARTS)))
    fields["mismatches"] = []
    fields["ranks"] = draw(st.lists(of_device(measures, "cpu"), min_size=1, max_size=4))
    fields["probes"] = draw(st.lists(of_device(probes, "cpu"), max_size=4))
    return fields


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(measured())
def test_no_report_teaches_a_profile_that_breaks_planning(running: Observed, generated: Json) -> None:
    desired = checked(reconcile(written(running, (generated, None, 0)), CONFIG, NOW))
    assert desired.measurements is not None
    event(f"teaches {len(desired.measurements.devices)} profiles")
    taught(desired.measurements)
