"""Known fields that may be meant by one that does not exist."""

import pytest

from dljob.api.field_names import similar_fields


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("nodeSelector", ["scheduling.nodeSelector"]),
        ("gradientAccumulation", ["parallelism.gradientAccumulation"]),
        ("min", ["batchSizeRange.min", "nodes.min"]),
        ("batchSize", ["globalBatchSize", "batchSizeRange"]),
        ("checkpoint.intervall", ["checkpoint.interval"]),
        ("trainer.env.3.valu", ["trainer.env.3.value", "trainer.env.3.valueFrom"]),
        ("Epochs", ["epochs"]),
        ("lr", []),
        ("resources.gpu", []),
    ],
)
def test_fields_of_the_same_or_a_similar_name_are_found(given: str, expected: list[str]) -> None:
    assert similar_fields(f"spec.{given}") == tuple(f"spec.{each}" for each in expected)
