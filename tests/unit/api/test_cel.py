"""Tests that the CEL rules of the API server and the Python rules of the operator agree."""

import itertools
from collections.abc import Iterator
from typing import Any, get_args

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from dlcontract import CollectiveName
from dljob.api import DLJobSpec, Framework, ParallelismStrategy
from dljob.api.compatibility import Condition
from dljob.api.spec import Synchronization, parallelism
from dljob.api.spec.rules import combinations
from dljob.job.spec_errors import in_words
from support.manifests.admission import broken_rules, defaulted, holds, schema_of
from support.specs.cases import CASES
from support.specs.small_specs import HINTS, spec_of

Json = dict[str, Any]
SPEC = schema_of("DLJob", "spec")
# The first environment of celpy raises the recursion limit, and hypothesis would warn of that in an example.
assert holds("true", {})


def messages_of_cel(spec: Json) -> set[str]:
    return {broken.message for broken in broken_rules(SPEC, spec)}


def messages_of_python(spec: Json) -> set[str]:
    """Return the messages of broken rules. If inner types break a rule, pydantic does not check outer ones."""
    try:
        DLJobSpec.model_validate(spec)
    except ValidationError as error:
        assert {e["type"] for e in error.errors()} == {"value_error"}, f"expected only broken rules: {error}"
        return {part for e in error.errors() for part in e["msg"].removeprefix("Value error, ").split("; ")}
    return set()


@pytest.mark.parametrize("case", CASES)
def test_rules_of_cel_and_python_give_the_expected_message(case: str) -> None:
    """The API server evaluates CEL after it has set defaults. ``dljob plan`` reads specs without them."""
    changes, words = CASES[case]
    written = spec_of(changes)
    stored = defaulted(SPEC, written)
    for messages in (messages_of_cel(stored), messages_of_python(stored), messages_of_python(written)):
        assert bool(messages) == bool(words) and all(words in text for text in messages), messages


@pytest.mark.long  # The API server never does this. The test above evaluates CEL with defaults.
@pytest.mark.parametrize("case", CASES)
def test_rules_of_cel_need_no_defaults(case: str) -> None:
    changes, words = CASES[case]
    messages = messages_of_cel(spec_of(changes))
    assert bool(messages) == bool(words) and all(words in text for text in messages), messages


@pytest.mark.parametrize(
    ("case", "found"),
    [
        ("min above max", "spec.nodes.min must not be larger than max: lower min or raise max (found min: 4, max: 2)"),
        (
            "batch smaller than ranks",
            "raise globalBatchSize or lower nodes.min (found globalBatchSize: 2, nodes.min: 3)",
        ),
        ("neither epochs nor steps", "spec.epochs: set exactly one of epochs and steps (found none of these fields)"),
        ("search for a program", '(found optimizer.findLearningRate: true, trainer.command: ["a"])'),
        ("hints without command", '(found model.hints: {"parameters": 1, "flopsPerSample": 1})'),
    ],
)
def test_operator_message_contains_the_found_value(case: str, found: str) -> None:
    with pytest.raises(ValidationError) as refusal:
        DLJobSpec.model_validate(spec_of(CASES[case][0]))
    assert in_words(refusal.value).endswith(found)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"globalBatchSize": 0}, "spec.globalBatchSize: found 0; expected a number greater than or equal to 1"),
        ({"globalBatchSize": 1.5}, "found 1.5; expected a valid integer, got a number with a fractional part"),
        ({"collective": "Bus"}, "spec.collective: found 'Bus'; expected 'Auto', 'Ring'"),
        ({"objective": {"deadline": "soon"}}, "found 'soon'; expected a duration such as 90s, 1h30m or 500ms"),
        ({"resources": {"cpu": 0.5}}, 'spec.resources.cpu: found 0.5; expected text. Put the value in quotes: "0.5"'),
        (
            {"resources": {"memory": -1}},
            "spec.resources.memory: found '-1'; expected a quantity of bytes such as 512Mi",
        ),
        (
            {"trainer": {"imagePullSecrets": [{"name": "registry"}]}},
            "spec.trainer.imagePullSecrets.0: found {'name': 'registry'}; expected the name as text. Write the name "
            "alone: registry",
        ),
        ({"resources": {"memory": "4GB"}}, "found '4GB'; expected a quantity of bytes such as 512Mi or 4Gi"),
    ],
)
def test_invalid_value_is_reported_with_the_valid_ones(changes: Json, words: str) -> None:
    with pytest.raises(ValidationError) as refusal:
        DLJobSpec.model_validate(spec_of(changes))
    assert words in in_words(refusal.value)


def test_cases_break_every_rule() -> None:
    # Only the rules that a case names: a test above evaluates all rules for each case.
    broken = {
        rule.message
        for changes, words in CASES.values()
        if words
        for rule in broken_rules(SPEC, spec_of(changes), words=words)
    }
    assert broken == {rule["message"] for rule in _rules(SPEC)}


def _rules(schema: Json) -> list[Json]:
    inner = [*schema.get("properties", {}).values(), *([schema["items"]] if "items" in schema else [])]
    return [*schema.get("x-kubernetes-validations", ()), *(rule for field in inner for rule in _rules(field))]


def some(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Json]:
    """Generate objects with any subset of the fields."""
    return st.fixed_dictionaries({}, optional=fields)


small = st.integers(1, 4)
words = st.lists(st.sampled_from(["a", "b"]), max_size=2)
specs = st.fixed_dictionaries(
    {
        "model": some(name=st.sampled_from(["mlp", "lenet"]), hints=st.just(HINTS)),
        "dataset": some(name=st.just("digits"), uri=st.just("file:///a"), samples=small),
        "globalBatchSize": small,
    },
    optional={
        "epochs": small,
        "steps": small,
        "trainer": some(command=words, args=words),
        "nodes": some(min=small, max=small),
        "planning": some(
            mode=st.sampled_from(["Auto", "PlanOnly", "Fixed"]),
            groups=st.lists(
                st.sampled_from([{"device": "cpu", "nodes": 1}, {"device": "cpu", "nodes": 1, "batchPerRank": 1}]),
                max_size=2,
            ),
        ),
        "collective": st.sampled_from(["Auto", "Ring", "Tree", "ParameterServer", "LayeredServer"]),
        "optimizer": some(
            findLearningRate=st.booleans(),
            learningRateCurve=st.sampled_from(["Loss", "Accuracy"]),
            learningRateScaling=st.fixed_dictionaries(
                {"rule": st.sampled_from(["Linear", "AdaScale"]), "baseBatchSize": small}
            ),
        ),
        "gradientCompression": st.sampled_from(["BF16", "FP16"]),
        "parallelism": some(
            strategy=st.sampled_from(["Data", "Optimizer", "Pipeline", "Tensor", "Auto"]),
            stages=st.integers(2, 3),
            microBatches=small,
            synchronization=st.sampled_from(["Synchronous", "Asynchronous", "StaleSynchronous"]),
            stalenessBound=small,
        ),
        "checkpoint": some(volume=some(claimName=st.just("a"), storageClassName=st.just("b"))),
    },
)


ASYNCHRONOUS_PIPELINE: Json = {
    "model": {}, "dataset": {}, "globalBatchSize": 1, "epochs": 1, "checkpoint": {},
    "parallelism": {
        "strategy": "Pipeline", "stalenessBound": 1, "synchronization": "Asynchronous", "microBatches": 1,
    },
}  # fmt: skip


@example(spec=ASYNCHRONOUS_PIPELINE, with_defaults=False)  # Python gave a message that CEL did not give.
@settings(max_examples=150, deadline=None)
@given(spec=specs, with_defaults=st.booleans())
def test_cel_and_python_agree(spec: Json, with_defaults: bool) -> None:
    """Both accept or both reject, and CEL gives all messages of Python. Defaults make no difference."""
    given_spec = defaulted(SPEC, spec) if with_defaults else spec
    by_cel, by_python = messages_of_cel(given_spec), messages_of_python(given_spec)
    assert bool(by_cel) == bool(by_python)
    assert by_python <= by_cel


def product() -> Iterator[Json]:
    """Yield specs with every combination of the four axes of the table, also with unset axes."""
    axes = [(None, *get_args(CollectiveName), "Auto"), *((None, *map(str, kind)) for kind in KINDS)]
    for collective, strategy, framework, synchronization in itertools.product(*axes):
        fields: Json = {"model": {"name": "mlp"}, "dataset": {"name": "digits"}, "globalBatchSize": 32, "epochs": 1}
        section = {
            "strategy": strategy,
            "synchronization": synchronization,
            "stages": 2 if strategy == "Pipeline" else None,
            "stalenessBound": 2 if synchronization == "StaleSynchronous" else None,
        }
        yield fields | {
            name: value
            for name, value in {
                "collective": collective,
                "trainer": framework and {"framework": framework},
                "parallelism": {name: value for name, value in section.items() if value},
            }.items()
            if value
        }


KINDS = (ParallelismStrategy, Framework, Synchronization)


FROM_TABLE = [
    rule for schema in (SPEC, SPEC["properties"]["parallelism"]) for rule in schema["x-kubernetes-validations"]
    if any(condition.cel == rule["rule"] for condition in (*vars(combinations).values(), *vars(parallelism).values())
           if isinstance(condition, Condition))
]  # fmt: skip


def test_rules_are_generated_from_the_compatibility_table() -> None:
    assert len(FROM_TABLE) == 10


# Seven divides no length of an axis, so that each value of each axis is among every seventh combination.
@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.long)])
def test_cel_and_python_agree_on_the_combinations(every: int) -> None:
    """The table in ``compatibility`` determines both forms of the rules."""
    rejected = 0
    for one in itertools.islice(product(), None, None, every):
        broken = {
            rule["message"]
            for rule in FROM_TABLE
            if "parallelism" in one or rule not in SPEC["properties"]["parallelism"]["x-kubernetes-validations"]
            if not holds(rule["rule"], one.get("parallelism") if rule not in SPEC["x-kubernetes-validations"] else one)
        }
        by_python = messages_of_python(one) & {rule["message"] for rule in FROM_TABLE}
        assert bool(broken) == bool(by_python) and by_python <= broken, one
        rejected += bool(broken)
    assert rejected > 100 / every
