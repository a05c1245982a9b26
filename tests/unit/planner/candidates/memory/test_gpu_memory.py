"""Tests of the memory of GPUs on which plans count: that of the catalogue, or of a label of the nodes."""

from dataclasses import replace

import pytest

from dljob.cluster import catalogue
from dljob.cluster.catalogue import MEMORY_LABEL, gpu_nbytes
from dljob.perf.resources import memory
from dljob.perf.workload.workload import builtin
from dljob.planner.candidates.pools import eligible
from support.builders import Json
from support.planner_questions import RESNET, T4, decided, rejected, view

X9000 = "NVIDIA-X9000"
ALONE = replace(RESNET, nodes_max=1)


def node(device: str, stated_MiB: int | None = None) -> Json:
    labels = {} if stated_MiB is None else {MEMORY_LABEL: str(stated_MiB)}
    return {"device": device, "gpu": True, "devices": 1, "cpu": 16, "memory": "256Gi", "labels": labels}


@pytest.mark.parametrize("name", catalogue.gpu_names())
def test_largest_batch_leaves_the_margin_in_the_memory_of_the_processes(name: str) -> None:
    workload, room = builtin("resnet50", None), gpu_nbytes(name, {})
    batch = memory.largest_batch(workload, room, is_gpu=True)
    tensors = memory.fixed_nbytes(workload) + batch * memory.sample_nbytes(workload)
    outside = memory.GPU_CONTEXT_NBYTES + memory.GPU_WORKSPACE_NBYTES
    assert 0.99 < (outside + memory.MARGIN * tensors) / room <= 1
    assert outside + tensors < 0.93 * room


def test_batch_that_only_the_nominal_memory_holds_is_rejected() -> None:
    """Regression: a rank that needs 15.7 GiB was planned on a T4, where PyTorch has 14.6."""
    assert "but a rank has 14.4 GiB" in rejected(ALONE, view(node(T4))).message
    assert decided(replace(ALONE, global_batch=256), view(node(T4))).chosen.prediction.memory_nbytes < 14 * 2**30


def test_label_of_a_node_says_how_much_memory_its_gpus_have() -> None:
    assert "but a rank has 14.4 GiB" in rejected(ALONE, view(node(X9000))).message
    found = decided(ALONE, view(node(X9000, 32768))).chosen
    assert 14 * 2**30 < found.prediction.memory_nbytes < 31.4 * 2**30
    assert "but a rank has 7.38 GiB" in rejected(ALONE, view(node(X9000, 8192))).message


def test_node_without_a_label_takes_no_memory_from_those_with_one() -> None:
    """Regression: the nodes that an autoscaler may add lack the label, and all GPUs of their type had that of a T4."""
    (pool,) = eligible(RESNET, view(node(X9000, 49140), node(X9000))).pools
    assert pool.gpu_nbytes == (49140 - 640) * 2**20


def test_pool_has_the_memory_of_its_smallest_gpus() -> None:
    cluster = view(node(X9000, 32768), node(X9000, 24576), node(T4), node(T4, 15109), {"cpu": 4})
    found = {pool.device: pool.gpu_nbytes for pool in eligible(RESNET, cluster).pools}
    assert found == {X9000: (24576 - 640) * 2**20, T4: (15109 - 640) * 2**20, "cpu": 0}
