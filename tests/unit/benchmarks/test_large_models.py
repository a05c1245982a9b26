"""Tests of benchmarks/perfmodel/large_models.py: predictions of published steps of large transformers."""

import pytest
from benchmarks.perfmodel import large_models
from benchmarks.perfmodel.large_models import FOUNDRY_PARAMETERS, ROWS, Shape, predicted


@pytest.mark.parametrize("shape", FOUNDRY_PARAMETERS, ids=str)
def test_decoders_have_the_published_parameters(shape: Shape) -> None:
    assert shape.gpt().parameters == FOUNDRY_PARAMETERS[shape]


def test_llamas_have_nearly_the_published_parameters() -> None:
    """13,015,864,320 and 68,976,648,192 in the files of the models; ours also have positions and biases of norms."""
    assert large_models.llama2_13b().parameters == pytest.approx(13_015_864_320, rel=0.005)
    assert large_models.llama2_70b().parameters == pytest.approx(68_976_648_192, rel=0.005)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.source}-{row.name}-{row.gpus}")
def test_first_predictions_are_within_a_factor_of_two(row: large_models.Row) -> None:
    """``SPREAD`` promises it nine times out of ten; docs/design/0016 shows the ratios."""
    assert 0.5 < predicted(row).ratio < 2


def test_scaling_from_8_to_64_gpus_is_predicted_within_a_twentieth() -> None:
    """The error is one of computing on a GPU, which a run corrects; the ratio hardly depends on the number of GPUs."""
    found = [predicted(row).ratio for row in ROWS if row.name == "GPT 7B" and row.device == large_models.A100_40]
    assert len(found) == 4
    assert max(found) < 1.05 * min(found)
