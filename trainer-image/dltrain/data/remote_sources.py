"""Access to remote files with fsspec: metadata, contents, and translation of errors of fsspec's backends."""

import os
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlsplit

import fsspec
from aiohttp import ClientConnectorCertificateError, ClientError, ClientResponseError, ClientTimeout

from dltrain.protocol.errors import BadInputError

CHUNK_NBYTES = 8 * 2**20
"""Initial and largest size of a ranged request in bytes.

If its connection breaks, at most this much must be downloaded again.
"""
_SHRINK_FACTOR, _MAX_SHRINK, _REGROW_AFTER = 4, 128, 16
"""Adaptation of the request size, because some networks break all long requests.

When a connection breaks, the request size is divided by ``_SHRINK_FACTOR``, but is at least ``CHUNK_NBYTES`` divided by
``_MAX_SHRINK``. After every ``_REGROW_AFTER`` requests, the size doubles up to ``CHUNK_NBYTES``.
"""
STREAMS = 4
"""Number of parallel requests.

Several are needed, because object stores limit the bandwidth of each connection to less than the node's bandwidth.
"""
CONNECT_S, SILENCE_S = 5.0, 20.0
_CREDENTIALS = (
    "AWS_ACCESS_KEY_ID",
    "AWS_PROFILE",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
)
"""Environment variables with S3 credentials.

If any of these variables is set, requests to S3 are signed. Otherwise the bucket must be public.
"""

_S3_SETTINGS = {
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_SESSION_TOKEN": "token",
    "AWS_ENDPOINT_URL": "endpoint_url",
}
"""Key of a Secret → the argument of s3fs for it."""


@dataclass(frozen=True)
class Fields:
    """Paths of the fields of the spec that messages about a remote file name.

    ``uri``: its location. ``sha256``: its checksum. ``secret``: the Secret for it. ``size``: the space for it; None if
    the space is fixed.
    """

    uri: str
    sha256: str
    secret: str
    size: str | None


DATASET = Fields("spec.dataset.uri", "spec.dataset.sha256", "spec.dataset.secretName", "spec.dataset.size")


class TransientError(OSError):
    """A fault of the network or the server, or a full disk. A retry resumes the transfer and may succeed."""


class NoRangesError(Exception):
    """The server does not support ranged requests, which ask for a part of a file. Use ``Source.stream`` instead."""


@dataclass(frozen=True)
class Remote:
    """Metadata of a remote file."""

    nbytes: int | None
    version: str
    """ETag or time of the last change, which changes with the file. Empty if the server reports neither."""


class Source:
    """One file at an ``http``, ``https`` or ``s3`` URI. ``fields``: fields of the spec that messages name."""

    def __init__(self, uri: str, fields: Fields = DATASET, secret: Mapping[str, str] | None = None) -> None:
        """Store the URI. ``secret``: credentials by name of environment variable, such as AWS_ACCESS_KEY_ID.

        If ``secret`` is None, the environment variables of this process are used.
        """
        self.uri, self.fields, self.secret = uri, fields, secret
        parts = urlsplit(uri)
        self.shown = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
        """The URI for messages, without user, password and query, which may be secret."""
        self._chunk_nbytes = CHUNK_NBYTES
        options = (
            _s3_options(secret) if parts.scheme == "s3" else _http_options(os.environ if secret is None else secret)
        )
        self._fs, self._path = fsspec.core.url_to_fs(uri, use_listings_cache=False, **options)

    def beside(self, name: str) -> "Source":
        """Return the source of another file. ``name``: its path relative to the folder of this file."""
        address, mark, query = self.uri.partition("?") if self.uri.startswith("http") else (self.uri, "", "")
        name = quote(name) if mark or self.uri.startswith("http") else name
        return Source(f"{address.rpartition('/')[0]}/{name}{mark}{query}", self.fields, self.secret)

    def describe(self) -> Remote:
        """Return the file's metadata.

        Raise BadInputError if there is no such file or no permission to read it, and TransientError for other faults.
        """
        try:
            info = self._fs.info(self._path)
        except Exception as error:
            raise self._meaning(error) from error
        version = info.get("ETag") or info.get("Last-Modified") or info.get("LastModified") or ""
        return Remote(info.get("size"), str(version))

    def read(self, begin: int, nbytes: int) -> Iterator[bytes]:
        """Yield the bytes from position ``begin`` to ``nbytes``, the size of the file, in order.

        Several ranged requests, which ask for a part of the file, run in parallel. Raise NoRangesError if the server
        does not support them, BadInputError if no retry can succeed, and TransientError for other faults.
        """
        with ThreadPoolExecutor(STREAMS) as pool:
            count = min(STREAMS, -(-(nbytes - begin) // self._chunk_nbytes))
            handles = list(pool.map(lambda _: self._open(self._chunk_nbytes), range(count)))
            window: deque[Future[bytes]] = deque()
            number = 0
            try:
                while begin < nbytes or window:
                    if begin < nbytes and len(window) < count:
                        # The previous request on this handle has finished, because its result has been yielded.
                        end = min(begin + self._chunk_nbytes, nbytes)
                        window.append(pool.submit(self._chunk, handles[number % count], begin, end))
                        begin, number = end, number + 1
                        if number % _REGROW_AFTER == 0:
                            self._chunk_nbytes = min(2 * self._chunk_nbytes, CHUNK_NBYTES)
                    else:
                        yield window.popleft().result()
            finally:
                pool.shutdown(cancel_futures=True)

    def shrink_requests(self) -> None:
        """Reduce the size of the next ranged requests after a connection broke. Some networks break long requests."""
        self._chunk_nbytes = max(self._chunk_nbytes // _SHRINK_FACTOR, CHUNK_NBYTES // _MAX_SHRINK)

    def stream(self) -> Iterator[bytes]:
        """Yield the whole file from one request, for servers that do not support ranged requests.

        Raise BadInputError if no retry can succeed, and TransientError for other faults.
        """
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
            raise TransientError(
                f"{self.shown}: found {len(data)} bytes from byte {begin} on; expected {end - begin} bytes"
            )
        return data

    def _meaning(self, error: Exception) -> Exception:
        """Return the BadInputError or TransientError that corresponds to an error of fsspec's backend."""
        chain = list(_chain(error))
        status = next((one.status for one in chain if isinstance(one, ClientResponseError)), None)
        said = f" (HTTP {status})" if status else ""
        if status in (401, 403) or any(
            isinstance(one, PermissionError) or type(one).__name__ == "NoCredentialsError" for one in chain
        ):
            return BadInputError(
                self.fields.uri, f"no permission to read {self.shown}{said}", "data that the job may read",
                f"name a Secret with credentials in {self.fields.secret}, or correct its credentials",
            )  # fmt: skip
        missing = isinstance(error, FileNotFoundError) and not any(isinstance(one, ClientError) for one in chain)
        if missing or status in (404, 410):
            return BadInputError(
                self.fields.uri, f"nothing at {self.shown}{said}", "a file", "correct the URI, or put the file there"
            )
        if status is not None and 400 <= status < 500 and status not in (408, 425, 429):
            found = f"{self.shown}, which the server refused{said}"
            return BadInputError(self.fields.uri, found, "a file that can be read", "correct the URI")
        if any(isinstance(one, ClientConnectorCertificateError) for one in chain):
            return BadInputError(
                self.fields.uri, f"{self.shown}, whose server has a certificate of an unknown authority",
                "a certificate of a known authority",
                "add the authority's certificate to the image, and set SSL_CERT_FILE to its path in spec.trainer.env",
            )  # fmt: skip
        last = chain[-1]
        return TransientError(f"{self.shown}: {type(last).__name__}: {' '.join(str(last).split())[:300]}{said}")


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _http_options(environment: Mapping[str, str]) -> dict[str, Any]:
    headers = {"Accept-Encoding": "identity"}  # otherwise ranges could refer to a compressed form of the file
    if authorization := environment.get("HTTP_AUTHORIZATION"):
        headers["Authorization"] = authorization
    timeout = ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=SILENCE_S)
    return {"client_kwargs": {"trust_env": True, "timeout": timeout, "headers": headers}}


def _s3_options(secret: Mapping[str, str] | None) -> dict[str, Any]:
    given: dict[str, Any] = {name: value for key, name in _S3_SETTINGS.items() if (value := (secret or {}).get(key))}
    if region := (secret or {}).get("AWS_REGION"):
        given["client_kwargs"] = {"region_name": region}
    return {
        "anon": "key" not in given and not any(os.environ.get(name) for name in _CREDENTIALS),
        **given,
        "config_kwargs": {"connect_timeout": CONNECT_S, "read_timeout": SILENCE_S, "retries": {"max_attempts": 1}},
    }
