"""Tests of the origin of profiles: whose plans use them, which are deleted, and which image a key stands for."""

from datetime import timedelta
from typing import Any

import pytest

from dljob.api import DLJobSpec
from dljob.job.identity import profile_key, profile_name
from dljob.job.profiles import LIFE, MAX_PROFILES, expired, learned_by_model
from support.builders import DIGITS, NOW

Json = dict[str, Any]


def profile(name: str, namespace: str | None = None, seconds: float = 1.0, days: int = 0, *, mine: bool = True) -> Json:
    spec = {"model": "mlp", "device": "cpu"} | ({"namespace": namespace} if namespace else {})
    labels = {"app.kubernetes.io/managed-by": "dljob"} if mine else {}
    updated = (NOW - timedelta(days=days)).isoformat()
    status = {"compute": [{"batch": 8, "seconds": seconds}], "observedJobs": 1, "updated": updated}
    meta = {"name": name, "labels": labels, "creationTimestamp": updated}
    return {"metadata": meta, "spec": spec, "status": status}


def seconds_for(namespace: str, *profiles: Json) -> list[float]:
    return [point.compute_s for found in learned_by_model(profiles, namespace).values() for point in found.points]


def test_plans_use_profiles_of_their_own_namespace_only() -> None:
    mine, theirs = profile("a", "a", 1.0), profile("b", "b", 2.0)
    assert (seconds_for("a", mine, theirs), seconds_for("b", mine, theirs), seconds_for("c", mine, theirs)) == (
        [1.0], [2.0], [],
    )  # fmt: skip


def test_own_measurements_take_precedence_over_shared_ones() -> None:
    shared, mine = profile("s", None, 3.0), profile("a", "a", 1.0)
    assert seconds_for("a", mine, shared) == seconds_for("a", shared, mine) == [1.0]
    assert seconds_for("b", mine, shared) == [3.0]


def test_profile_that_does_not_parse_is_ignored() -> None:
    broken = profile("x", "a") | {"status": {"compute": [{"batch": -1}]}}
    assert seconds_for("a", broken) == []


def test_names_differ_by_namespace() -> None:
    names = {profile_name("mlp", "cpu", namespace) for namespace in (None, "a", "b")}
    assert len(names) == 3


def test_old_and_surplus_profiles_expire() -> None:
    many = [profile(f"p{i}", "a", days=i % 100) for i in range(MAX_PROFILES + 5)]
    old, handmade = profile("old", "b", days=LIFE.days + 1), profile("hand", None, days=999, mine=False)
    gone = set(expired([*many, old, handmade], NOW))
    assert "old" in gone and "hand" not in gone and len(gone) == 6
    oldest = sorted(many, key=lambda each: each["status"]["updated"])[:5]
    assert {each["status"]["updated"] for each in many if each["metadata"]["name"] in gone} <= {
        each["status"]["updated"] for each in oldest
    }


def test_structures_of_scripts_displace_no_measurements() -> None:
    """A sweep over a script's arguments stores a structure for each command."""
    measured = [profile(f"p{i}", "a", days=30) for i in range(9)]
    sweep = [profile(f"s{i}", "a", days=1) for i in range(MAX_PROFILES + 5)]
    sweep = [each | {"status": each["status"] | {"structure": {"parameters": 5}}} for each in sweep]
    gone = set(expired([*measured, *sweep], NOW))
    assert len(gone) == 5 and all(name.startswith("s") for name in gone)


@pytest.mark.parametrize("image", ["example.invalid/mine:1", "example.invalid/mine:2"])
def test_another_image_has_profiles_of_its_own(image: str) -> None:
    """Fixed bug: any image under the name of a built-in model taught the profile of that model."""
    spec = DLJobSpec.model_validate(DIGITS)
    custom = DLJobSpec.model_validate({**DIGITS, "trainer": {"image": image}})
    assert profile_key(custom) != profile_key(spec) == "digits-cnn"


def test_scripts_from_different_places_have_profiles_of_their_own() -> None:
    """Equal commands such as python train.py say nothing about a script. Its revision does not change its key."""

    def key(**source: Json) -> str:
        trainer = {"command": ["python", "train.py"], **({"source": source} if source else {})}
        return profile_key(DLJobSpec.model_validate({**DIGITS, "trainer": trainer}))

    def git(url: str, digit: str, **more: str) -> str:
        return key(git={"url": url, "revision": digit * 40, **more})

    assert git("https://a/b", "1") == git("https://a/b", "2")
    assert key(archive={"uri": "https://a/b.zip?signature=1"}) == key(archive={"uri": "https://a/b.zip?signature=2"})
    different = [
        key(), git("https://a/b", "1"), git("https://a/c", "1"), git("https://a/b", "1", path="p"),
        key(archive={"uri": "https://a/b.zip"}), key(configMap={"name": "a"}), key(configMap={"name": "b"}),
    ]  # fmt: skip
    assert len(set(different)) == len(different)
