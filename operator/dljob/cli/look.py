"""The program of a job's look pod: ``python -m dljob.cli.look DATA --type TYPE …``.

It looks at data with the code of ``dljob suggest`` and stores the suggestion with the scripts in a ConfigMap, or in a
folder. Data that has to be corrected is a suggestion too, so that the exit code is 0. Exit code 74: the suggestion was
not stored, and a retry may succeed.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dljob.api.base import duration_s
from dljob.api.spec import TaskType
from dljob.cli import remote
from dljob.cli.commands.suggest import this_machine
from dljob.client.errors import BadInputError
from dljob.job.task.suggestion import FILES, SUGGESTION_KEY, Suggestion
from dljob.suggest.bounded_trial import bounded
from dljob.suggest.look import Question, look

EXIT_NOT_STORED = 74
MARKER = "dljob-baseline-runs"
"""File on the volume for temporary files, which outlives the container: it exists while the baseline runs."""


def main(arguments: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(arguments)
    question = Question(
        data=given.data,
        uri=given.uri or str(given.data),
        task=TaskType(given.type),
        target=given.target,
        text=given.text,
        within_s=duration_s(given.within) if given.within else None,
        uid=given.uid,
        digest=given.digest,
    )
    marker = None if given.to is not None else Path(tempfile.gettempdir()) / MARKER
    judge = bounded(given.data, os.environ, len(os.sched_getaffinity(0)), marker)
    suggestion, scripts = look(question, this_machine(), time.monotonic, judge)
    if given.to is not None:
        given.to.mkdir(parents=True, exist_ok=True)
        for name, text in _files(suggestion, scripts).items():
            (given.to / name).write_text(text, encoding="utf-8")
    else:
        try:
            _store(given.namespace, given.config_map, _files(suggestion, scripts))
        except BadInputError as error:
            print(f"ConfigMap {given.config_map}: the suggestion was not stored: {error}", file=sys.stderr)
            return EXIT_NOT_STORED
    found, judged = suggestion.model, suggestion.baseline
    print(suggestion.error if found is None else f"{found.name}, because {found.why}")
    if judged is not None and judged.problem is not None:
        print(f"no baseline: {judged.problem}")
    return 0


def _files(suggestion: Suggestion, scripts: Mapping[str, str]) -> dict[str, str]:
    return {**scripts, SUGGESTION_KEY: suggestion.to_json()}


def _store(namespace: str, name: str, files: Mapping[str, str]) -> None:
    """Write files to a ConfigMap, and remove the scripts of an earlier suggestion. Raise BadInputError if it fails."""
    from dljob.kube.kinds import CONFIG_MAP

    data = {key: files.get(key) for key in (*FILES, SUGGESTION_KEY)}  # None removes a key.

    async def patch(api: Any) -> None:
        await api.merge(CONFIG_MAP, namespace, name, {"data": data})

    remote.reach(patch)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dljob.cli.look", description="Looks at the data of a job, and stores a suggestion."
    )
    parser.add_argument("data", type=Path, help="file or folder with the data")
    parser.add_argument("--uri", help="where a job reads the data, for messages (default: DATA)")
    parser.add_argument("--type", required=True, choices=[each.value for each in TaskType], help="type of the task")
    parser.add_argument("--target", help="column to predict")
    parser.add_argument("--text", help="column with the texts")
    parser.add_argument("--within", help="limit of the time of reading and training, such as 20m")
    parser.add_argument("--uid", default="", help="uid of the job")
    parser.add_argument("--digest", default="0" * 32, help="digest of the job's task")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--to", type=Path, metavar="DIR", help="folder for the suggestion and the scripts")
    where.add_argument("--config-map", metavar="NAME", help="ConfigMap for the suggestion and the scripts")
    parser.add_argument("--namespace", default="default", help="its namespace")
    return parser


if __name__ == "__main__":
    sys.exit(main())
