"""What a step frees is there for the next one."""

import sys

from support.trainer.ranks import run

STEPS = """
import resource
import numpy as np
from dltrain.host import heap

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

heap.keep()
for step in range(20):
    began = faults()
    activations = [np.ones(2**17) for _ in range(30)]
    del activations
print(faults() - began)
"""


def test_no_step_asks_the_kernel_for_the_pages_of_the_one_before() -> None:
    """30 blocks of 1 MiB: 7680 pages, which glibc gives back after each step unless it is told to keep them."""
    ended = run([sys.executable, "-c", STEPS])
    assert ended.code == 0, ended.output
    assert int(ended.output) < 100
