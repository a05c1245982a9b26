"""Report the progress of a loop with Hugging Face Accelerate: ``Accelerator(log_with=ReportTracker(steps=1000))``."""

from __future__ import annotations

import warnings
from typing import Any

from accelerate.tracking import GeneralTracker

from dltrain.integrations.logged_values import report_arguments
from dltrain.reporting.script_reports import report


class ReportTracker(GeneralTracker):  # type: ignore[misc]  # The type checker does not see the library.
    """Report the values of ``accelerator.log(values, step=…)`` to the job, after ``accelerator.init_trackers(name)``.

    ``steps``: number of steps of the whole training; None: unknown. ``samples``: samples in a step, over all ranks;
    None: as in the job's spec.
    """

    name = "dltrain"
    requires_logging_directory = False
    main_process_only = False

    def __init__(self, steps: int | None = None, samples: int | None = None) -> None:
        super().__init__()
        self._steps, self._samples, self._step = steps, samples, 0
        self._counts = False
        """True once a step was given, or its absence was named in a warning."""

    @property
    def tracker(self) -> ReportTracker:
        """The tracker itself. Accelerate expects the run object of a tracking library here, but there is none."""
        return self

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Ignore the hyperparameters that Accelerate passes, because the manifest of a job contains them."""

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Report ``values`` to the job as those after ``step`` completed steps; None: the step of the last call."""
        if step is None and not self._counts:
            warnings.warn(
                "accelerator.log: found no step; expected step=N, the number of completed steps. Without it, the job "
                "stays at step 0. Call accelerator.log(values, step=N)",
                stacklevel=2,
            )
        self._counts = True
        self._step = self._step if step is None else step
        found = report_arguments(values)
        report(step=self._step, steps=self._steps, epoch=values.get("epoch"), samples=self._samples, **found)
