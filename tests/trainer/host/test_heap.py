"""Tests of the heap settings: memory that a step frees stays available for the next step."""

import sys

from support.trainer.ranks import run

STEPS = """
import resource
import numpy as np
from dltrain.host import heap

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

heap.retain_freed_memory()
for step in range(20):
    began = faults()
    activations = [np.ones(2**17) for _ in range(30)]
    del activations
print(faults() - began)
"""


def test_steps_reuse_freed_pages_without_page_faults() -> None:
    """Allocate 30 blocks of 1 MiB, which are 7680 pages. By default, glibc returns them after each step."""
    ended = run([sys.executable, "-c", STEPS])
    assert ended.code == 0, ended.output
    assert int(ended.output) < 100
