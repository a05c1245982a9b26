"""Tests of the speeds of identical devices, which probes beside each other measure differently by chance."""

from dltrain.batch.shares import Speed, of_identical, worthwhile


def speeds(*seconds: float) -> list[Speed]:
    return [Speed(0.0, each / 40) for each in seconds]


def test_noise_of_probes_does_not_decide_the_split_of_identical_devices() -> None:
    """Regression: three equal nodes that shared two cores were given 62 + 23 + 35 samples for the whole run."""
    probed = speeds(0.0267, 0.0478, 0.0393)
    assert worthwhile(probed, (40, 40, 40), 120) is not None
    assert worthwhile(of_identical(probed, ["cpu"] * 3, 40), (40, 40, 40), 120) is None


def test_two_of_three_ranks_on_the_same_core_do_not_decide_the_split() -> None:
    """Regression: gpt-mini on three equal nodes that shared two cores had 1 + 1 + 4 samples.

    During the probe, the third rank had a core to itself.
    """
    probed = [Speed(0.01, 0.05), Speed(0.009, 0.05), Speed(0.009, 0.0198)]
    assert worthwhile(probed, (2, 2, 2), 6) == (1, 1, 4)
    assert worthwhile(of_identical(probed, ["cpu"] * 3, 2), (2, 2, 2), 6) is None


def test_different_devices_keep_their_speeds() -> None:
    found = of_identical(speeds(0.01, 0.012, 0.03, 0.036), ["a", "a", "b", "b"], 40)
    assert found[0] == found[1] and found[2] == found[3]
    assert found[2].step_s(40) > 2.5 * found[0].step_s(40)


def test_much_slower_device_of_a_kind_is_believed() -> None:
    probed = speeds(0.01, 0.01, 0.05)
    assert of_identical(probed, ["cpu"] * 3, 40) == tuple(probed)
