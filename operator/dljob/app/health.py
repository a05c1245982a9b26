"""HTTP server for /metrics, /healthz and /readyz on one port."""

import logging
from collections.abc import Awaitable, Callable

from aiohttp import web

from dljob.controller.metrics import CONTENT_TYPE, Metrics

log = logging.getLogger("dljob")

Problem = Callable[[], str | None]
"""Type of a function that returns the description of a problem of the operator, or None if it has no problem."""
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def serve(
    port: int, metrics: Metrics, ill: Problem, not_ready: Problem, scraped: Callable[[], None]
) -> web.AppRunner:
    """Start the HTTP server for metrics and probes. Call ``cleanup`` on the result to stop the server.

    ``ill``: function that returns the problem that /healthz reports; None: the process is healthy. ``not_ready``:
    likewise for /readyz. With a problem, the answer has the code 503, otherwise 200. ``scraped``: called before each
    answer to /metrics, so that it can update metrics.
    """

    async def exposition(request: web.Request) -> web.Response:
        scraped()
        return web.Response(body=metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    def probe(problem: Problem, *, logged: bool = False) -> Handler:
        async def answer(request: web.Request) -> web.Response:
            found = problem()
            # After three of these, the kubelet restarts the container, and shows only the code 503.
            if found and logged:
                log.error("the liveness probe fails: %s", found)
            return web.Response(status=503 if found else 200, text=f"{found or 'ok'}\n")

        return answer

    app = web.Application()
    app.router.add_get("/metrics", exposition)
    app.router.add_get("/healthz", probe(ill, logged=True))
    app.router.add_get("/readyz", probe(not_ready))
    runner = web.AppRunner(app, access_log=None, handle_signals=False)
    await runner.setup()
    await web.TCPSite(runner, port=port).start()
    return runner
