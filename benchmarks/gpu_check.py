"""Start ``benchmarks/gpu/check.py``, which describes the checks: ``python benchmarks/gpu_check.py``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.gpu.check import main

if __name__ == "__main__":
    sys.exit(main())
