"""A short form of the ranks of a plan, for plans that are too large for a ConfigMap otherwise.

A rank takes about 300 bytes of JSON, and a ConfigMap has at most 1 MiB. The short form names each pod once and counts
equal local batch sizes, so 4,096 ranks take at most about 0.3 MiB.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

RANK_GROUPS = "rank_groups"
"""Key of the short form in a plan's JSON. It replaces the key ``ranks``."""
DOMAIN = "rank_domain"
"""Key of the DNS domain that all pods have in common, in the short form. A pod's host name is ``<pod>.<domain>``."""
MAX_RANKS = 2**14
"""Maximum number of ranks in the short form.

A few hundred bytes can state any number, whoever may edit ConfigMaps can write them, and the operator reads the plans
of all namespaces. With 2**14 ranks, a plan takes 24 MiB of memory and 0.2 s.
"""
_COMMON = ("group", "device", "gpu")


def grouped(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the short form of a plan's ranks as JSON fields; None if the short form cannot express these ranks.

    ``ranks``: the ranks in rank order, each with all fields of a Rank as JSON. The result has the keys ``DOMAIN`` and
    ``RANK_GROUPS``. ``RANK_GROUPS`` has one entry for each series of consecutive ranks of the same group (the nodes of
    the plan that have one device type). An entry has what these ranks have in common, the names of their pods, and a
    list of (local batch size, number of consecutive ranks with this size). All pods of an entry have equally many
    ranks.
    """
    entries = []
    for common, members in groupby(ranks, lambda rank: tuple(rank[key] for key in _COMMON)):
        rows = list(members)
        shares = [rank["share"] for rank in rows]
        entry: dict[str, Any] = dict(zip(_COMMON, common, strict=True))
        entry["pods"] = list(dict.fromkeys(rank["pod"] for rank in rows))
        entry["shares"] = [[share, sum(1 for _ in equal)] for share, equal in groupby(shares)]
        entries.append(entry)
    pod, host = ranks[0]["pod"], ranks[0]["host"]
    short = {DOMAIN: host.removeprefix(f"{pod}."), RANK_GROUPS: entries}
    try:
        return short if expanded(short) == list(ranks) else None
    except ValueError:  # Pods with different numbers of ranks.
        return None


def expanded(plan: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Turn the short form of the ranks in ``plan`` back into the full list of ranks, in rank order.

    ``plan``: the JSON fields of a plan, or the result of ``grouped``. Each rank of the result has all fields of a Rank.
    Raise ValueError if there are more than ``MAX_RANKS``, or if the ranks of an entry cannot be divided equally among
    its pods. Raise KeyError or TypeError if an entry has another form.
    """
    ranks: list[dict[str, Any]] = []
    total = sum(max(0, count) for entry in plan[RANK_GROUPS] for _, count in entry["shares"])
    if total > MAX_RANKS:
        raise ValueError(f"{RANK_GROUPS}: found more than {MAX_RANKS} ranks; expected at most {MAX_RANKS}")
    for entry in plan[RANK_GROUPS]:
        shares = [share for share, count in entry["shares"] for _ in range(count)]
        pods, of_pod = entry["pods"], len(shares) // max(1, len(entry["pods"]))
        if of_pod * len(pods) != len(shares):
            raise ValueError(
                f"{RANK_GROUPS}: found {len(shares)} ranks in {len(pods)} pods; expected the same number of ranks in "
                "each pod"
            )
        for i, share in enumerate(shares):
            pod = pods[i // of_pod]
            ranks.append(
                {
                    "rank": len(ranks),
                    "pod": pod,
                    "host": f"{pod}.{plan[DOMAIN]}",
                    **{key: entry[key] for key in _COMMON},
                    "local_rank": i % of_pod,
                    "share": share,
                    "role": "worker" if share else "server",
                }
            )
    return ranks
