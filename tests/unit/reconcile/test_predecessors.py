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

    def test_objects_of_an_earlier_job_of_this_name_are_no_fault_of_the_user(self) -> None:
        """Fixed bug: right after ``kubectl delete`` and ``apply``, the new job warned of another owner."""
        first = seen(being_deleted=("StatefulSet digits-cpu",))
        desired = step(first)
        assert nothing_done(desired) and desired.requeue_after_s == 1
        assert verdict(desired, "PodsReady") == ("False", "WaitingForDeletion")
        assert "StatefulSet digits-cpu" in condition_of(desired, "PodsReady").message
        assert [(each.type, each.reason) for each in desired.events] == [("Normal", "WaitingForDeletion")]
        assert kinds(step(replace(after(first, desired), being_deleted=())))[-1] == "StatefulSet"

    def test_another_owner_is_reported_although_an_earlier_job_has_objects_too(self) -> None:
        desired = step(seen(leftovers=("ConfigMap digits-plan",), being_deleted=("StatefulSet digits-cpu",)))
        assert verdict(desired, "PodsReady") == ("False", "NamesTaken")
        assert "StatefulSet" not in condition_of(desired, "PodsReady").message

    def test_pods_of_an_earlier_job_of_this_name_stop_first(self) -> None:
        old = training()
        new = replace(seen(), job=replace(old.job, uid="another", status={}), pods=old.pods)
        desired = step(new)
        assert verdict(desired, "Running") == ("False", "Replacing")
        assert "earlier job" in condition_of(desired, "Running").message

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
