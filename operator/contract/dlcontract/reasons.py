"""Reasons that the trainer reports for a failure, or for the completion of a training before its last step.

Failure rules (``failure_rules``) name reasons of failures.
"""

BAD_INPUT = "BadInput"
CHECKPOINT_FAILED = "CheckpointFailed"
COMMAND_NOT_FOUND = "CommandNotFound"
COORDINATOR_LOST = "CoordinatorLost"
DEVICE_FAILED = "DeviceFailed"
DEVICE_MISSING = "DeviceMissing"
DIVERGED = "Diverged"
HUNG = "Hung"
LAUNCH_FAILED = "LaunchFailed"
NO_RESULT = "NoResult"
OUT_OF_MEMORY = "OutOfMemory"
PARAMETERS_DIVERGED = "ParametersDiverged"
PEER_LOST = "PeerLost"
POD_LOST = "PodLost"
POD_STOPPED = "PodStopped"
RANK_CRASHED = "RankCrashed"
RANK_FAILED = "RankFailed"
RANK_KILLED = "RankKilled"
RANK_STOPPED = "RankStopped"
TRAINING_ERROR = "TrainingError"

UPLOAD_FAILED = "UploadFailed"
FOLDER_CHANGES = "FolderChanges"
PARTS_MISSING = "PartsMissing"
OF_UPLOADS = (UPLOAD_FAILED, FOLDER_CHANGES, PARTS_MISSING)
"""Reasons why the checkpoint folder of a script is not uploaded. They are no failures of ranks."""

TARGET_REACHED = "TargetReached"
NO_IMPROVEMENT = "NoImprovement"

OF_COMPLETION = (TARGET_REACHED, NO_IMPROVEMENT)
"""Reasons for which a training is complete before its last step. They are no failures."""

OF_PROGRAM = (COMMAND_NOT_FOUND, RANK_FAILED, RANK_CRASHED, RANK_STOPPED, NO_RESULT, TRAINING_ERROR)
"""Reasons of failures that the user's training script has caused, if the job runs one instead of a built-in model."""

OF_CLUSTER = (COORDINATOR_LOST, POD_LOST, POD_STOPPED)
"""Reasons of failures that the cluster has caused, such as a lost node. They never count towards the back-off limit."""

OF_RESTARTS = tuple(
    sorted(
        {
            *OF_PROGRAM, CHECKPOINT_FAILED, DEVICE_FAILED, DEVICE_MISSING, DIVERGED, HUNG, LAUNCH_FAILED,
            OUT_OF_MEMORY, PARAMETERS_DIVERGED, PEER_LOST, RANK_KILLED,
        }
    )
)  # fmt: skip
"""Reasons that failure rules may name: failures that restart the ranks and count towards the back-off limit."""
