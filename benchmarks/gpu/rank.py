"""A rank of the built-in trainer that also writes the memory it needed, for ``benchmarks.gpu.predictions``."""

import json
import os
import resource
from pathlib import Path

import torch

from dltrain.builtin.rank import main
from dltrain.train import session

FOUND = "DLJOB_BENCHMARK_FOUND"
"""Variable with the path of the file that the rank writes."""

if __name__ == "__main__":
    code = main()
    found = {"host_nbytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        outside = total - free - torch.cuda.memory_reserved()
        found["allocated_nbytes"] = torch.cuda.max_memory_allocated()
        found["context_nbytes"] = outside
        found["reserved_nbytes"] = torch.cuda.max_memory_reserved()
        found["memory_nbytes"] = torch.cuda.max_memory_allocated() + outside
    Path(os.environ[FOUND]).write_text(json.dumps(found), encoding="utf-8")
    session.leave(code)
