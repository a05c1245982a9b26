"""Cut a training so that it fits into a limit of time: fewer epochs, or a smaller model."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from dljob.suggest.recommendation.model import RACE_PART, Settings
from dljob.suggest.recommendation.prediction import Prediction

START_S = 8.0
"""Start of Python, PyTorch and MPI. Measured on two busy cores: 4 to 6 s."""
MARGIN = 0.9
"""Part of the time left that a prediction may fill. The script stops itself if it takes longer."""
MIN_EPOCHS = 1 / 3
"""A model is preferred to a smaller one if this part of its epochs fits. Chosen, not measured."""

RACE_TIME = 1.7
"""A race takes this multiple of the training's time: four candidates a quarter of the epochs, two of them then a half.

Each trains on four fifths of the samples, which makes 1.6. The rest is the evaluation of the candidates.
"""
MAX_RACE_NBYTES = 32 * 2**20
"""Memory of the candidates of a race, at most. A prediction of memory has room for it."""
STATE_NBYTES = 16
"""Bytes of a parameter with its gradient and the two moments of Adam, in float32."""


def fitted(
    models: Sequence[Settings], predict: Callable[[Settings], Prediction], left_s: float, reading_s: float, pace: float
) -> list[tuple[Settings, Prediction]]:
    """Return (model, prediction) pairs with as many epochs as fit into the limit, the recommended model first.

    ``models``: settings of the models, in order of preference. ``predict``: predicts the training with given settings.
    ``left_s``: seconds left for the script. ``reading_s``: seconds that it reads the data. ``pace``: measured seconds
    of a step for each predicted second. If not even one epoch of any model fits, the first one is the fastest, with
    one epoch, which the script ends early.
    """
    found = [_cut(settings, predict, left_s, reading_s, pace) for settings in models]
    for i, (settings, _) in enumerate(found):
        if fraction(settings, models[i]) >= MIN_EPOCHS and total_s(found[i], reading_s, pace) <= left_s:
            return [found[i], *found[:i], *found[i + 1 :]]

    def rank(i: int) -> tuple[bool, float, float]:
        total = total_s(found[i], reading_s, pace)
        fits = total <= left_s
        return not fits, -fraction(found[i][0], models[i]) if fits else total, total

    best = min(range(len(found)), key=rank)
    return [found[best], *found[:best], *found[best + 1 :]]


def race_nbytes(settings: Settings) -> int:
    """Return the memory of the models of a race, with gradients and the state of their optimizers, in bytes."""
    return STATE_NBYTES * settings.parameters * len(settings.candidates) if settings.race else 0


def race_s(model: tuple[Settings, Prediction], pace: float) -> float:
    """Return the predicted seconds of a race between the settings of a model. ``pace``: as in ``fitted``."""
    return RACE_TIME * pace * model[1].time_s


NO_LIMIT = "none, because without --within no time is set aside for one"


def with_race(
    model: tuple[Settings, Prediction], whole: Sequence[Settings], left_s: float, reading_s: float, pace: float
) -> tuple[Settings, str]:
    """Return the settings with a race if one is of use and fits into the limit, and a line that says so, or why not.

    ``model``: the recommended model within the limit. ``whole``: the models without a limit. The others: as in
    ``fitted``.
    """
    settings, needed_s = model[0], race_s(model, pace)
    if not settings.rivals:
        return settings, "none, because other settings are not expected to be better"
    raced = replace(settings, race=True)
    if race_nbytes(raced) > MAX_RACE_NBYTES:
        return settings, "none, because the models of a race would need much more memory"
    if any(other.name == settings.name and other.epochs > settings.epochs for other in whole):
        return settings, "none, because the limit cuts the epochs"
    room_s = MARGIN * left_s - total_s(model, reading_s, pace)
    if needed_s > min(room_s, MARGIN * RACE_PART * (left_s - START_S - reading_s)):
        return settings, f"none, because it would take {needed_s:.0f} s more, for which there is no time"
    count = len(settings.candidates)
    line = f"{count} settings (learning rate, penalty, dropout) in about {needed_s:.0f} s before the training"
    return raced, line


def fraction(cut: Settings, whole: Settings) -> float:
    """Return the number of epochs of ``cut``, divided by that of ``whole``."""
    return cut.epochs / whole.epochs


def total_s(model: tuple[Settings, Prediction], reading_s: float, pace: float) -> float:
    """Return the seconds of a whole script: start, reading, training and evaluation. Without a plan: infinity.

    ``reading_s``, ``pace``: as in ``fitted``.
    """
    settings, found = model
    if found.problem:
        return math.inf
    return START_S + reading_s + pace * found.time_s * (1 + settings.evaluation / settings.epochs)


def _cut(
    settings: Settings, predict: Callable[[Settings], Prediction], left_s: float, reading_s: float, pace: float
) -> tuple[Settings, Prediction]:
    cut, found = settings, predict(settings)
    while not found.problem and cut.epochs > 1 and total_s((cut, found), reading_s, pace) > MARGIN * left_s:
        share = (MARGIN * left_s - START_S - reading_s) / (total_s((cut, found), reading_s, pace) - START_S - reading_s)
        # The loop ends: each pass takes at least one epoch away.
        cut = replace(cut, epochs=max(1, min(cut.epochs - 1, math.floor(cut.epochs * share))))
        found = predict(cut)
    return cut, found
