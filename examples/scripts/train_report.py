"""A training without PyTorch that reports its progress with dltrain.report, and resumes from its own checkpoint.

python examples/scripts/train_report.py
in a DLJob with spec.trainer.framework: Torchrun and spec.trainer.command: [python, train_report.py]
"""

import json
import os
import random
from pathlib import Path

import dltrain

STEPS, BATCH = 300, 2000
rank = int(os.environ.get("RANK", "0"))
folder = Path(os.environ.get("DLJOB_CHECKPOINT_DIR", "/tmp"))
saved = folder / f"line-{rank}.json"
state = json.loads(saved.read_text()) if saved.exists() else {"step": 0, "slope": 0.0, "offset": 0.0}
while state["step"] < STEPS:
    random.seed(1000 * state["step"] + rank)
    samples = [(x, 3 * x + 1 + random.gauss(0, 0.1)) for x in (random.random() for _ in range(BATCH))]
    errors = [(x, state["slope"] * x + state["offset"] - y) for x, y in samples]
    state["slope"] -= 0.5 * sum(error * x for x, error in errors) / BATCH
    state["offset"] -= 0.5 * sum(error for _, error in errors) / BATCH
    state["step"] += 1
    loss = sum(error**2 for _, error in errors) / BATCH
    dltrain.report(step=state["step"], steps=STEPS, loss=loss, samples=BATCH, slope=state["slope"])
    stop = dltrain.stop_requested()
    if stop or state["step"] % 50 == 0:
        folder.mkdir(parents=True, exist_ok=True)
        written = saved.with_suffix(".new")
        written.write_text(json.dumps(state))
        written.replace(saved)  # The rank may be killed while it writes.
    if stop:
        break
print(f"y = {state['slope']:.2f} x + {state['offset']:.2f}", flush=True)
