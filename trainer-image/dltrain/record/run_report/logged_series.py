"""Store the metrics that a script logs in bounded memory, in the order of their steps."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence

from dltrain.protocol.metric_values import merged
from dltrain.record.run_report.document import CAPACITY, LoggedValues, thinned


def with_logged(entries: Sequence[LoggedValues], new: LoggedValues, capacity: int = CAPACITY) -> list[LoggedValues]:
    """Return ``entries``, which are in the order of their steps, together with the values of ``new``.

    There is one entry for each step, and at most ``capacity`` of them. If there are more, values of the metrics that
    were logged most often are omitted, so that a validation loss of each epoch outlasts a learning rate of each step.
    """
    found = list(entries)
    at = bisect_left(found, new.step, key=lambda entry: entry.step)
    if at < len(found) and found[at].step == new.step:
        found[at] = new.model_copy(update={"values": merged(found[at].values, new.values)})
    else:
        found.insert(at, new)
    while len(found) > capacity:
        fewer = _halved(found)
        found = fewer if fewer != found else thinned(found, capacity)
    return found


def _halved(entries: Sequence[LoggedValues]) -> list[LoggedValues]:
    """Omit about half of the values of the metrics with more than half as many values as the most frequent one.

    Those that stay are about equally many steps apart, so that the whole run is shown. They include the first and the
    last value of each metric. The values of an entry are omitted together, or none of them.
    """
    counts = Counter(name for entry in entries for name in entry.values)
    first = {name: entry.step for entry in reversed(entries) for name in entry.values}
    last = {name: entry.step for entry in entries for name in entry.values}
    apart = {
        name: 2 * (last[name] - first[name]) / count
        for name, count in counts.items()
        if 2 * count > max(counts.values())
    }
    """Frequent metric → minimum number of steps between two values that stay."""
    stayed: dict[str, int] = {}
    """Frequent metric → step of the last value that stays."""
    found: list[LoggedValues] = []
    for entry in entries:
        names = apart.keys() & entry.values.keys()
        if any(entry.step in (first[n], last[n]) or entry.step - stayed[n] >= apart[n] for n in names):
            stayed |= dict.fromkeys(names, entry.step)
            found.append(entry)
        elif values := {name: value for name, value in entry.values.items() if name not in names}:
            found.append(entry.model_copy(update={"values": values}))
    return found
