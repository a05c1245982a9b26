"""Tests of example programs that resume after their last step, because a pod was lost before the end."""

from pathlib import Path

from support.trainer.ranks import environment, run_apart

PROGRAMS = Path(__file__).resolve().parents[3] / "examples/programs"


def test_program_that_has_taken_its_last_step_ends_again(tmp_path: Path) -> None:
    """Fixed bug: it failed at each restart, as there was no loss to report."""
    env = environment(STEPS="20", DLJOB_CHECKPOINT_DIR=str(tmp_path), OMP_NUM_THREADS="1")
    for first in (0, 20):
        ended = run_apart("-m", "dltrain.local", PROGRAMS / "fsdp.py", env=env, timeout_s=240)
        assert ended.returncode == 0 and f"resumed from step {first}\n" in ended.stdout, ended.stdout + ended.stderr
