"""Remote files through fsspec: what is there, its bytes, and what a backend's errors mean."""

import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlsplit

import fsspec
from aiohttp import ClientConnectorCertificateError, ClientError, ClientResponseError, ClientTimeout

from dltrain.protocol.errors import BadInputError

CHUNK_NBYTES = 8 * 2**20
"""Of one ranged request at first: what a cut connection costs."""
_FINER, _FINEST, _GOOD = 4, 128, 16
"""After a cut requests become so much smaller, down to that part, and larger again once so many in a row went well:
some networks cut all that takes long."""
STREAMS = 4
"""Requests under way: object stores give each connection a part of what a node can take."""
CONNECT_S, SILENCE_S = 5.0, 20.0
_FIELD = "spec.dataset.uri"
_CREDENTIALS = (
    "AWS_ACCESS_KEY_ID",
    "AWS_PROFILE",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
)
"""Where there is any, requests to S3 are signed; else the bucket must be public."""


class TransientError(OSError):
    """Network, server or a full disk: another try may succeed, and goes on where this one ended."""


class NoRangesError(Exception):
    """The server sends whole files alone."""


@dataclass(frozen=True)
class Remote:
    """A file as its server describes it."""

    nbytes: int | None
    version: str
    """Changes when the file does; empty where the server says nothing that would."""


class Source:
    """One file at an ``http``, ``https`` or ``s3`` URI."""

    def __init__(self, uri: str) -> None:
        self.uri = uri
        parts = urlsplit(uri)
        self.shown = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
        """Without what may be a secret."""
        self._chunk_nbytes = CHUNK_NBYTES
        options = _s3_options() if parts.scheme == "s3" else _http_options()
        self._fs, self._path = fsspec.core.url_to_fs(uri, use_listings_cache=False, **options)

    def beside(self, name: str) -> "Source":
        """The file of that relative name in this one's folder."""
        address, mark, query = self.uri.partition("?") if self.uri.startswith("http") else (self.uri, "", "")
        name = quote(name) if mark or self.uri.startswith("http") else name
        return Source(f"{address.rpartition('/')[0]}/{name}{mark}{query}")

    def describe(self) -> Remote:
        """Raises BadInputError when there is no such file, or it is not ours to read; TransientError otherwise."""
        try:
            info = self._fs.info(self._path)
        except Exception as error:
            raise self._meaning(error) from error
        version = info.get("ETag") or info.get("Last-Modified") or info.get("LastModified") or ""
        return Remote(info.get("size"), str(version))

    def read(self, begin: int, nbytes: int) -> Iterator[bytes]:
        """From ``begin`` to ``nbytes``, in order, by ranged requests of which several are under way."""
        with ThreadPoolExecutor(STREAMS) as pool:
            count = min(STREAMS, -(-(nbytes - begin) // self._chunk_nbytes))
            handles = list(pool.map(lambda _: self._open(self._chunk_nbytes), range(count)))
            window: deque[Future[bytes]] = deque()
            number = 0
            try:
                while begin < nbytes or window:
                    if begin < nbytes and len(window) < count:
                        # The request before on this handle is done: its result has been given out.
                        end = min(begin + self._chunk_nbytes, nbytes)
                        window.append(pool.submit(self._chunk, handles[number % count], begin, end))
                        begin, number = end, number + 1
                        if number % _GOOD == 0:
                            self._chunk_nbytes = min(2 * self._chunk_nbytes, CHUNK_NBYTES)
                    else:
                        yield window.popleft().result()
            finally:
                pool.shutdown(cancel_futures=True)

    def be_careful(self) -> None:
        """Ask for less at a time from now on."""
        self._chunk_nbytes = max(self._chunk_nbytes // _FINER, CHUNK_NBYTES // _FINEST)

    def stream(self) -> Iterator[bytes]:
        """All of it, by one request: for servers without ranges."""
        file = self._open(0)
        try:
            while data := file.read(2**20):
                yield data
        except Exception as error:
            raise self._meaning(error) from error
        finally:
            file.close()

    def _open(self, block_nbytes: int) -> Any:
        try:
            return self._fs.open(self._path, "rb", block_size=block_nbytes, cache_type="none")
        except Exception as error:
            raise self._meaning(error) from error

    def _chunk(self, file: Any, begin: int, end: int) -> bytes:
        try:
            file.seek(begin)
            data: bytes = file.read(end - begin)
        except ValueError as error:
            raise NoRangesError(str(error)) from error
        except Exception as error:
            raise self._meaning(error) from error
        if len(data) != end - begin:
            raise TransientError(f"{self.shown}: got {len(data)} bytes of {end - begin} at {begin}")
        return data

    def _meaning(self, error: Exception) -> Exception:
        """What the error of a backend comes to for a user."""
        chain = list(_chain(error))
        status = next((one.status for one in chain if isinstance(one, ClientResponseError)), None)
        said = f" (HTTP {status})" if status else ""
        if status in (401, 403) or any(
            isinstance(one, PermissionError) or type(one).__name__ == "NoCredentialsError" for one in chain
        ):
            return BadInputError(
                _FIELD, f"no permission to read {self.shown}{said}", "data that the job may read",
                "name a Secret with credentials in spec.dataset.secretName, or correct them",
            )  # fmt: skip
        missing = isinstance(error, FileNotFoundError) and not any(isinstance(one, ClientError) for one in chain)
        if missing or status in (404, 410):
            return BadInputError(
                _FIELD, f"nothing at {self.shown}{said}", "a file", "correct the URI, or put the file there"
            )
        if status is not None and 400 <= status < 500 and status not in (408, 425, 429):
            return BadInputError(_FIELD, f"{self.shown} refused{said}", "a file that can be read", "correct the URI")
        if any(isinstance(one, ClientConnectorCertificateError) for one in chain):
            return BadInputError(
                _FIELD, f"{self.shown} with a certificate that nobody here vouches for", "a known authority's",
                "put yours into the image and name its file as SSL_CERT_FILE in spec.trainer.env",
            )  # fmt: skip
        last = chain[-1]
        return TransientError(f"{self.shown}: {type(last).__name__}: {' '.join(str(last).split())[:300]}{said}")


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _http_options() -> dict[str, Any]:
    headers = {"Accept-Encoding": "identity"}  # ranges are of the file, not of what a compressor makes of it
    if authorization := os.environ.get("HTTP_AUTHORIZATION"):
        headers["Authorization"] = authorization
    timeout = ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=SILENCE_S)
    return {"client_kwargs": {"trust_env": True, "timeout": timeout, "headers": headers}}


def _s3_options() -> dict[str, Any]:
    return {
        "anon": not any(os.environ.get(name) for name in _CREDENTIALS),
        "config_kwargs": {"connect_timeout": CONNECT_S, "read_timeout": SILENCE_S, "retries": {"max_attempts": 1}},
    }
