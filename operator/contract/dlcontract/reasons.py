"""Reasons of failures that the trainer reports and the operator acts on."""

BAD_INPUT = "BadInput"
COMMAND_NOT_FOUND = "CommandNotFound"
NO_RESULT = "NoResult"
PARAMETERS_DIVERGED = "ParametersDiverged"
RANK_CRASHED = "RankCrashed"
RANK_FAILED = "RankFailed"
RANK_STOPPED = "RankStopped"
TRAINING_ERROR = "TrainingError"

OF_PROGRAM = (COMMAND_NOT_FOUND, RANK_FAILED, RANK_CRASHED, RANK_STOPPED, NO_RESULT, TRAINING_ERROR)
"""Reasons of failures that the user's training script has caused, if the job runs one instead of a built-in model."""
