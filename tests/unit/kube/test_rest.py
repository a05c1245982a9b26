"""Tests of REST calls against a faulty server: retries, time limits, rejections and metrics."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from dljob.kube import Api, ApiError, rest, transport
from dljob.kube.kinds import CONFIG_MAP, DLJOB, NODE, POD_GROUPS

Answers = list[tuple[int, dict[str, Any], dict[str, str]]]
MAP = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a", "namespace": "n"}}


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(transport, "RETRY_FIRST_S", 0.001)
    yield


def against(answers: Answers, call: Callable[[Api], Awaitable[Any]]) -> tuple[Any, list[web.Request], list[Any]]:
    """Return the call's result or error, the requests that the server received, and the counted requests."""
    requests: list[web.Request] = []
    counted: list[Any] = []

    async def answer(request: web.Request) -> web.Response:
        await request.read()
        requests.append(request)
        code, body, headers = answers[min(len(requests), len(answers)) - 1]
        return web.json_response(body, status=code, headers=headers)

    async def main() -> Any:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", answer)
        async with TestServer(app) as server, aiohttp.ClientSession() as session:
            api = Api(session, str(server.make_url("")), lambda *seen: counted.append(seen[:3]))
            try:
                return await call(api)
            except ApiError as error:
                return error

    return asyncio.run(main()), requests, counted


@pytest.mark.parametrize("code", [429, 500, 502, 503, 504])
def test_temporary_errors_are_retried(code: int) -> None:
    answers: Answers = [(code, {}, {}), (code, {}, {}), (200, {"ok": True}, {})]
    found, requests, counted = against(answers, lambda api: api.get(NODE, None, "n1"))
    assert found == {"ok": True} and len(requests) == 3
    assert counted == [("get", "nodes", code), ("get", "nodes", code), ("get", "nodes", 200)]


def test_retries_are_limited() -> None:
    found, requests, _ = against([(503, {"message": "overloaded"}, {})], lambda api: api.get(NODE, None, "n1"))
    assert isinstance(found, ApiError) and found.code == 503 and not found.rejected
    assert len(requests) == transport.ATTEMPTS


def test_longest_wait_before_a_retry_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "MAX_RETRY_AFTER_S", 0.01)
    waits = list[float]()
    sleep = asyncio.sleep

    async def sleeping(seconds: float) -> None:
        waits.append(seconds)
        await sleep(0)

    monkeypatch.setattr(transport.asyncio, "sleep", sleeping)
    answers: Answers = [(429, {}, {"Retry-After": "86400"}), (200, {"ok": True}, {})]
    found, _, _ = against(answers, lambda api: api.get(NODE, None, "n1"))
    assert found == {"ok": True} and max(waits) == 0.01


@pytest.mark.parametrize("code", [400, 403, 404, 409, 422])
def test_rejection_is_not_retried(code: int) -> None:
    found, requests, _ = against(
        [(code, {"reason": "No", "message": "never"}, {})], lambda api: api.apply(CONFIG_MAP, MAP)
    )
    assert isinstance(found, ApiError) and (found.code, found.message) == (code, "never") and len(requests) == 1
    assert found.rejected == (code != 409) and found.conflict == (code == 409)


def test_unreachable_server_is_an_error() -> None:
    async def main() -> ApiError:
        async with aiohttp.ClientSession() as session:
            with pytest.raises(ApiError) as error:
                await Api(session, "http://127.0.0.1:9").get(NODE, None, "n1")
            return error.value

    assert asyncio.run(main()).code == 0


def test_request_to_a_hanging_server_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "CALL_LIMIT_S", 0.05)

    async def main() -> ApiError:
        async def hang(request: web.Request) -> web.Response:
            await asyncio.Event().wait()
            raise AssertionError

        app = web.Application()
        app.router.add_get("/{path:.*}", hang)
        async with TestServer(app) as server, aiohttp.ClientSession() as session:
            with pytest.raises(ApiError) as error:
                await Api(session, str(server.make_url(""))).get(NODE, None, "n1")
            return error.value

    error = asyncio.run(main())
    assert (error.code, error.reason) == (0, "TimeoutError")
    assert error.message.endswith("/api/v1/nodes/n1: no whole answer within 0.05 s"), "Regression: it had no text"


def test_response_without_json_is_an_error() -> None:
    async def main() -> ApiError:
        async def answer(request: web.Request) -> web.Response:
            return web.Response(status=404, text="<html>proxy</html>")

        app = web.Application()
        app.router.add_get("/{path:.*}", answer)
        async with TestServer(app) as server, aiohttp.ClientSession() as session:
            with pytest.raises(ApiError) as error:
                await Api(session, str(server.make_url(""))).get(NODE, None, "n1")
            return error.value

    assert "proxy" in asyncio.run(main()).message


@pytest.mark.parametrize("text", ["<html>login</html>", "[]", '"text"'])
def test_success_without_a_json_object_is_an_error_of_a_proxy(text: str) -> None:
    """Fixed bug: the page of a proxy was an empty list, as if there were no objects."""

    async def main() -> ApiError:
        async def answer(request: web.Request) -> web.Response:
            return web.Response(text=text)

        app = web.Application()
        app.router.add_get("/{path:.*}", answer)
        async with TestServer(app) as server, aiohttp.ClientSession() as session:
            with pytest.raises(ApiError) as error:
                await Api(session, str(server.make_url(""))).find(NODE, None)
            return error.value

    error = asyncio.run(main())
    assert (error.code, error.reason) == (502, "NoObject")
    assert error.message.startswith(f"GET /api/v1/nodes: found an answer that is no JSON object ({text!r})")


def test_apply_is_a_server_side_patch() -> None:
    _, [request], _ = against([(200, {}, {})], lambda api: api.apply(CONFIG_MAP, MAP))
    assert (request.method, request.path) == ("PATCH", "/api/v1/namespaces/n/configmaps/a")
    assert request.query == {"fieldManager": "dljob-operator", "force": "true"}
    assert request.headers["Content-Type"] == "application/apply-patch+yaml"


def test_status_is_patched_as_a_subresource() -> None:
    call = against([(200, {}, {})], lambda api: api.merge(DLJOB, "n", "a", {"status": {}}, subresource="status"))
    assert call[1][0].path == "/apis/dljob.dev/v1alpha1/namespaces/n/dljobs/a/status"


@pytest.mark.parametrize("code", [404, 409])
def test_deleting_a_missing_object_is_not_an_error(code: int) -> None:
    found, requests, _ = against([(code, {}, {})], lambda api: api.delete(CONFIG_MAP, "n", "a", uid="u", grace_s=0))
    assert found is None and len(requests) == 1


def test_list_returns_items_and_version() -> None:
    body = {"metadata": {"resourceVersion": "7"}, "items": [{"metadata": {"uid": "u"}}]}
    first = {"metadata": {"resourceVersion": "7", "continue": "next"}, "items": [{"metadata": {"uid": "t"}}]}
    found, requests, _ = against([(200, first, {}), (200, body, {})], lambda api: api.uids(NODE, None, "a=b"))
    assert found == (["t", "u"], 7)
    assert [dict(request.query) for request in requests] == [
        {"labelSelector": "a=b", "limit": "100"}, {"labelSelector": "a=b", "limit": "100", "continue": "next"},
    ]  # fmt: skip
    assert all("PartialObjectMetadataList" in request.headers["Accept"] for request in requests)
    assert against([(200, {"items": None}, {})], lambda api: api.find(NODE, None))[0] == []


@pytest.mark.parametrize("metadata", [False, True])
def test_list_of_large_objects_is_read_in_small_pages(metadata: bool) -> None:
    """100 ConfigMaps of 1 MiB on one page would take all memory of the operator, again after each restart."""
    asked: list[int] = []

    async def answer(request: web.Request) -> web.Response:
        limit, begin = int(request.query["limit"]), int(request.query.get("continue", 0))
        end = min(begin + limit, len(sizes))
        asked.append(end - begin)
        items = [{"metadata": {"uid": str(i), "annotations": {"a": "<" * sizes[i]}}} for i in range(begin, end)]
        meta = {"resourceVersion": "7"} | ({"continue": str(end)} if end < len(sizes) else {})
        return web.json_response({"metadata": meta, "items": items})

    async def main() -> list[str]:
        app = web.Application()
        app.router.add_get("/{path:.*}", answer)
        async with TestServer(app) as server, aiohttp.ClientSession() as session:
            api = Api(session, str(server.make_url("")), max_nbytes=10_000)
            if metadata:
                return (await api.uids(CONFIG_MAP, None, ""))[0]
            found, token = list[str](), ""
            while True:
                page = await api.page(CONFIG_MAP, None, "", 100, token)
                found += (item["metadata"]["uid"] for item in page["items"])
                if not (token := page["metadata"].get("continue", "")):
                    return found

    sizes = [*(3000,) * 20, 20_000, *(10,) * 300]
    assert asyncio.run(main()) == [str(i) for i in range(len(sizes))], "also the one beyond the limit"
    assert len(asked) < 60 and max(asked[-2:]) > 25, "pages get longer again"


def test_answer_that_would_fill_the_memory_is_an_error() -> None:
    """Everybody may create many large events about an object."""

    async def find(api: Api) -> Any:
        api._max_nbytes = 100
        return await api.find(NODE, None)

    found, requests, _ = against([(200, {"items": [{"a": "x" * 1000}]}, {})], find)
    assert isinstance(found, ApiError) and found.code == 413 and len(requests) == 1


def page_of(*names: str, token: str = "") -> tuple[int, dict[str, Any], dict[str, str]]:
    meta = {"continue": token} if token else {}
    return 200, {"metadata": meta, "items": [{"metadata": {"name": name}} for name in names]}, {}


EXPIRED: tuple[int, dict[str, Any], dict[str, str]] = (
    410,
    {"reason": "Expired", "message": "the continue parameter is too old"},
    {},
)


def test_found_objects_are_read_in_pages() -> None:
    """Regression: one answer had all objects, and thousands of pods took longer than the time limit of an answer."""
    answers = [page_of("a", "b", token="next"), page_of("c")]
    found, requests, _ = against(answers, lambda api: api.find(NODE, None, labelSelector="a=b"))
    assert [each["metadata"]["name"] for each in found] == ["a", "b", "c"]
    first = {"labelSelector": "a=b", "limit": str(rest.FIND_PAGE)}
    assert [dict(each.query) for each in requests] == [first, first | {"continue": "next"}]


def test_list_begins_again_if_its_next_page_is_gone() -> None:
    answers = [page_of("a", token="old"), EXPIRED, page_of("b", token="new"), page_of("c")]
    found, requests, _ = against(answers, lambda api: api.find(NODE, None))
    assert [each["metadata"]["name"] for each in found] == ["b", "c"]
    assert [each.query.get("continue") for each in requests] == [None, "old", None, "new"]


def test_list_whose_next_page_is_always_gone_is_an_error() -> None:
    found, requests, _ = against([page_of("a", token="old"), EXPIRED] * 20, lambda api: api.find(NODE, None))
    assert isinstance(found, ApiError) and (found.code, found.reason) == (410, "Expired")
    assert len(requests) == 2 * rest.MAX_LISTS


def test_all_pages_of_found_objects_together_have_a_maximum_size() -> None:
    async def find(api: Api) -> Any:
        api._max_nbytes = 1000
        return await api.find(NODE, None)

    found, requests, _ = against([page_of("x" * 400, token="next")] * 9, find)
    assert isinstance(found, ApiError) and found.code == 413 and len(requests) == 3


def test_versions_of_managed_servers_are_parsed() -> None:
    answer = {"major": "1", "minor": "27+"}
    assert against([(200, json.loads(json.dumps(answer)), {})], lambda api: api.version())[0] == (1, 27)


@pytest.mark.parametrize(
    ("code", "resources", "expected"),
    [(404, [], False), (200, [{"name": "workloads"}], False), (200, [{"name": "podgroups"}], True)],
)
def test_server_says_whether_it_serves_a_kind(code: int, resources: list[Any], expected: bool) -> None:
    kind = POD_GROUPS[0]
    found, requests, _ = against([(code, {"resources": resources}, {})], lambda api: api.serves(kind))
    assert found is expected
    assert [request.path for request in requests] == [f"/apis/{kind.api_version}"]


def test_unanswered_discovery_is_an_error() -> None:
    found, _, _ = against([(403, {"message": "no"}, {})], lambda api: api.serves(POD_GROUPS[0]))
    assert isinstance(found, ApiError) and found.forbidden
