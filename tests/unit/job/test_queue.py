"""Tests of what a stored admission by Kueue may add to pods."""

from dljob.job.queue import Placement


def test_annotations_that_select_a_security_profile_are_left_out() -> None:
    """A stored plan can be edited by users who may not create pods."""
    found = Placement.model_validate(
        {
            "annotations": {
                "container.apparmor.security.beta.kubernetes.io/trainer": "unconfined",
                "seccomp.security.alpha.kubernetes.io/pod": "unconfined",
                "example.com/pool": "a",
            }
        }
    )
    assert found.annotations == {"example.com/pool": "a"}
