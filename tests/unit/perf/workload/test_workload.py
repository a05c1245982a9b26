"""Tests of the cost of a sample for built-in models and for workloads described by hints."""

from dataclasses import replace

import pytest

from dljob.perf.workload.datasets import DATASETS
from dljob.perf.workload.models import MODELS
from dljob.perf.workload.workload import builtin, hinted


class TestWorkload:
    def test_hints_determine_the_workload(self) -> None:
        w = hinted(1_000_001, 3e9, 5e6, 1e5, "Adam")
        assert w.parameters == 1_000_001
        assert w.flops_per_sample == pytest.approx(3e9)
        assert w.activation_nbytes == 5e6
        assert w.optimizer_slots == 2

    @pytest.mark.parametrize(
        ("model", "dataset", "message"),
        [
            ("vgg", None, "model: found 'vgg'; expected one of mlp"),
            ("mlp", "mnist", "dataset: found 'mnist'; expected one of digits"),
            ("digits-cnn", "iris", "model digits-cnn does not fit dataset iris"),
            ("mlp", "synthetic-tokens", "found samples that are tokens; expected images or tables"),
            ("gpt-mini", "digits", "does not fit dataset digits"),
            ("lenet", "digits", "does not fit dataset digits"),
            ("resnet18", "wine", "does not fit dataset wine"),
        ],
    )
    def test_unknown_or_mismatched_model_and_dataset_are_rejected(
        self, model: str, dataset: str | None, message: str
    ) -> None:
        with pytest.raises(ValueError, match="expected") as error:
            builtin(model, dataset)
        assert message in str(error.value)

    def test_invalid_hints_are_rejected(self) -> None:
        with pytest.raises(ValueError, match="hints: found parameters 0"):
            hinted(0, 1.0, 0.0)

    def test_resnets_match_published_sizes(self) -> None:
        """ResNets on ImageNet have 11.7 and 25.6 million parameters, and 1.8e9 and 4.1e9 multiply-adds."""
        imagenet = replace(DATASETS["synthetic-images"], shape=(3, 224, 224), classes=1000)
        for name, parameters, multiply_adds in (("resnet18", 11_689_512, 1.82e9), ("resnet50", 25_557_032, 4.1e9)):
            layers = MODELS[name][0](imagenet).layers
            assert sum(layer.parameters for layer in layers) == parameters
            forward = sum(layer.forward_FLOPs for layer in layers if layer.kind in ("conv", "linear"))
            assert forward == pytest.approx(2 * multiply_adds, rel=0.01)
