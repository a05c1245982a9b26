"""Run several requests at the same time."""

import asyncio
from collections.abc import Iterable
from typing import Any


async def complete_all(calls: Iterable[Any], *, wait_only: bool = False) -> list[Any]:
    """Run all calls at the same time, and return their results in the order of the calls.

    If a call fails, wait for the others, and then raise the first error, so that no call is left running in the
    background. ``wait_only``: True: raise no error; a failed call has its exception as its result.
    """
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException) and not (wait_only and isinstance(result, Exception)):
            raise result
    return results
