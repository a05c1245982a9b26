"""Tests of jobs whose predecessor of the same name still has objects."""

from dataclasses import replace

from dljob.reconcile import needs_view
from support.builders import (
    after,
    plan_of,
    seen,
)
from support.job_lifecycle import (
    DOWN,
    condition_of,
    done,
    kinds,
    nothing_done,
    step,
    training,
    verdict,
)


class TestPredecessors:
    def test_job_waits_until_its_names_are_free(self) -> None:
        desired = step(seen(leftovers=("StatefulSet digits-cpu",)))
        assert nothing_done(desired)
        assert verdict(desired, "PodsReady") == ("False", "NamesTaken")
        assert "StatefulSet digits-cpu" in condition_of(desired, "PodsReady").message
        assert desired.requeue_after_s == 1

    def test_job_starts_when_its_names_are_free(self) -> None:
        first = seen(leftovers=("StatefulSet digits-cpu",))
        assert kinds(step(replace(after(first, step(first)), leftovers=())))[-1] == "StatefulSet"

    def test_copy_of_a_stateful_set_does_not_keep_a_running_job_from_ending(self) -> None:
        """Fixed bug: a StatefulSet that somebody had copied for debugging, with its labels, held up the job."""
        copied = replace(done(), leftovers=("StatefulSet debug",))
        ended = step(copied)
        assert ended.scales == DOWN and verdict(ended, "Complete") == ("True", "Complete")
        taken = replace(done(), leftovers=("ConfigMap digits-plan",))
        assert nothing_done(step(taken)), "without its plan, the job waits and its pods run on"

    def test_plan_of_a_former_job_of_the_same_name_is_not_used(self) -> None:
        old = training()
        new = replace(seen(), job=replace(old.job, uid="another", status={}), plan=old.plan, report=old.report)
        assert needs_view(new)
        assert plan_of(after(new, step(new))).plan.uid == "another"
