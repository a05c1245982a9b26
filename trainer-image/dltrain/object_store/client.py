"""Objects in an S3 bucket: written in parts, read by ranges, listed and deleted, repeated after transient errors.

All errors are OSErrors, so that callers treat an object store like a volume (``host.volume_access``). The error number
says what to do: EIO for a fault that may pass, EACCES for a missing permission, EINVAL for a wrong bucket or setting,
ENOENT for a missing object, EEXIST for a conditional write of an object that exists, ENOSPC for an exceeded quota.
"""

import errno
import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from math import ceil
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from dlcontract import CHECKPOINT_SECRET_DIR
from dltrain.host.volume_access import retry
from dltrain.protocol.errors import BadInputError

T = TypeVar("T")

FIELD = "spec.checkpoint.uri"
PART_NBYTES = 8 * 2**20
"""Size in bytes of the parts in which a large object is written and read. The last part may be smaller."""
MAX_PARTS = 10_000
"""Maximum number of parts of an object in S3. Very large objects have larger parts."""
STREAMS = 4
"""Number of parts that are transferred at the same time, because stores limit the bandwidth of one connection."""
CONNECT_S, SILENCE_S = 5.0, 20.0
_DELETED_AT_ONCE = 1000
_PERMISSIONS = {
    "ListObjectsV2": "s3:ListBucket",
    "ListMultipartUploads": "s3:ListBucketMultipartUploads",
    "GetObject": "s3:GetObject",
    "HeadObject": "s3:GetObject",
    "DeleteObjects": "s3:DeleteObject",
    "AbortMultipartUpload": "s3:AbortMultipartUpload",
}
"""S3 operation → the permission that it needs. All others, which write, need ``s3:PutObject``."""
_DENIED = {
    "AccessDenied", "AllAccessDisabled", "AccountProblem", "InvalidAccessKeyId", "SignatureDoesNotMatch",
    "InvalidToken", "ExpiredToken", "TokenRefreshRequired", "InvalidSecurity", "403", "401",
}  # fmt: skip
_PASSING_AT_STS = {"Throttling", "ThrottlingException", "TooManyRequestsException", "IDPCommunicationError"}
_PASSING_STATUSES = (0, 408, 409, 425, 429)
"""HTTP status codes below 500 after which a request is sent again. 0: the error has no code."""
_MISSING = {"NoSuchKey", "404", "NoSuchUpload"}
_SKEWED = "RequestTimeTooSkewed"
"""Error code if the clock of this node is wrong. A retry, perhaps on another node, may succeed."""
_FULL = {"QuotaExceeded", "XMinioStorageFull", "InsufficientStorage", "EntityTooLarge"}


class ObjectStore:
    """The objects of a bucket whose keys begin with a prefix. Keys in arguments and results are relative to it."""

    def __init__(self, uri: str, secret: Path = Path(CHECKPOINT_SECRET_DIR)) -> None:
        """Create the client without a request. ``uri``: ``s3://BUCKET/PREFIX``.

        ``secret``: folder with one file for each of AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN,
        AWS_ENDPOINT_URL and AWS_REGION. If it is missing or empty, AWS's usual environment variables and files apply,
        such as those of a workload identity. Raise BadInputError if the client cannot be created.
        """
        parts = urlsplit(uri)
        self.uri, self._bucket, self._prefix = uri.rstrip("/"), parts.netloc, parts.path.strip("/")
        self._secret, self._settings = secret, _settings(secret)
        self._client = _client(self._settings, uri)

    def path(self, key: str) -> str:
        """Return the full URI of an object or prefix, for messages."""
        return f"{self.uri}/{key}".rstrip("/")

    def read(self, key: str) -> bytes:
        """Return the content of a small object. Raise OSError."""
        return self._call("GetObject", key, lambda client: _body(client.get_object(**self._at(key))))

    def read_range(self, key: str, begin: int, nbytes: int) -> bytes:
        """Return ``nbytes`` bytes of an object, which are at least one, from byte ``begin`` on. Raise OSError."""
        at = self._at(key) | {"Range": f"bytes={begin}-{begin + nbytes - 1}"}
        return self._call("GetObject", key, lambda client: _body(client.get_object(**at), nbytes))

    def write(self, key: str, content: bytes) -> None:
        """Write a small object, in place of an existing one. Raise OSError."""
        self._call("PutObject", key, lambda client: client.put_object(**self._at(key), Body=content))

    def create(self, key: str, content: bytes, *, conditional: bool = True) -> None:
        """Write a small object that must not exist. Raise FileExistsError if it exists, and OSError if writing fails.

        Raise FileExistsError also if an earlier request wrote the object and its answer was lost. ``conditional``:
        False for a store without conditional writes. If such a store gets True, raise NotImplementedError.
        """
        condition = {"IfNoneMatch": "*"} if conditional else {}
        self._call("PutObject", key, lambda client: client.put_object(**self._at(key), Body=content, **condition))

    def size(self, key: str) -> int:
        """Return the size of an object in bytes. Raise OSError."""
        return int(self._call("HeadObject", key, lambda client: client.head_object(**self._at(key))["ContentLength"]))

    def list(self, prefix: str) -> dict[str, int]:
        """Return key → size in bytes of all objects whose keys begin with ``prefix``. Raise OSError."""
        found: dict[str, int] = {}
        more: dict[str, str] = {}
        while True:
            page = self._call(
                "ListObjectsV2",
                prefix,
                lambda client: client.list_objects_v2(Bucket=self._bucket, Prefix=self._full(prefix), **more),  # noqa: B023
            )
            found |= {self._relative(each["Key"]): int(each["Size"]) for each in page.get("Contents", ())}
            if not page.get("IsTruncated"):
                return found
            more = {"ContinuationToken": page["NextContinuationToken"]}

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects. Raise OSError if the store does not delete some of them."""
        rest = list(keys)
        while rest:
            some, rest = rest[:_DELETED_AT_ONCE], rest[_DELETED_AT_ONCE:]
            which = {"Objects": [{"Key": self._full(key)} for key in some], "Quiet": True}
            answer = self._call(
                "DeleteObjects",
                some[0],
                lambda client: client.delete_objects(Bucket=self._bucket, Delete=which),  # noqa: B023
            )
            for error in answer.get("Errors", ()):
                raise self._meaning_of_code(error.get("Code", ""), error.get("Message", ""), "DeleteObjects", some[0])

    def upload(self, key: str, pieces: Iterable[bytes | memoryview], nbytes: int) -> tuple[int, str]:
        """Write an object from consecutive ``pieces``. Return (its size in bytes, its SHA-256 in hex digits).

        ``nbytes``: expected size, which only decides the size of parts. The store shows the object when it is complete.
        A part is sent again after a transient error. Memory: ``STREAMS`` + 1 parts. Raise OSError; the upload is then
        aborted.
        """
        part_nbytes = max(PART_NBYTES, ceil(nbytes / (MAX_PARTS - 1)))
        digest = hashlib.sha256()
        parts = _parts(pieces, part_nbytes, digest.update)
        first = next(parts, b"")
        second = next(parts, None)
        if second is None:
            self.write(key, first)
            return len(first), digest.hexdigest()
        begun = self._call(
            "CreateMultipartUpload", key, lambda client: client.create_multipart_upload(**self._at(key))
        )["UploadId"]
        try:
            total = self._upload_parts(key, begun, (first, second), parts)
        except BaseException:
            self._abort(self._full(key), begun)
            raise
        return total, digest.hexdigest()

    def _upload_parts(self, key: str, upload: str, first: Sequence[bytes], rest: Iterator[bytes]) -> int:
        done: list[dict[str, Any]] = []
        waiting: deque[Future[dict[str, Any]]] = deque()
        total = number = 0

        def send(number: int, part: bytes) -> dict[str, Any]:
            at = self._at(key) | {"UploadId": upload, "PartNumber": number}
            answer = self._call("UploadPart", key, lambda client: client.upload_part(**at, Body=part))
            return {"PartNumber": number, "ETag": answer["ETag"]}

        with ThreadPoolExecutor(STREAMS, "upload") as pool:
            try:
                for group in (first, rest):
                    for part in group:
                        number, total = number + 1, total + len(part)
                        if len(waiting) == STREAMS:
                            done.append(waiting.popleft().result())
                        waiting.append(pool.submit(send, number, part))
                        del part  # Otherwise, the last part would stay in memory while the next one is collected.
                done += [each.result() for each in waiting]
            finally:
                pool.shutdown(cancel_futures=True)
        at = self._at(key) | {"UploadId": upload, "MultipartUpload": {"Parts": done}}
        try:
            self._call("CompleteMultipartUpload", key, lambda client: client.complete_multipart_upload(**at))
        except FileNotFoundError:
            # The answer to an earlier request may have been lost, and the store has forgotten the complete upload.
            if self.size(key) != total:
                raise
        return total

    def download(self, key: str, nbytes: int, take: Callable[[bytes], object]) -> None:
        """Read an object of ``nbytes`` bytes in parts, and call ``take`` with each part, in order.

        Several parts are read at the same time. A part is read again after a transient error. Raise OSError, with the
        number ENOENT if the object is missing.
        """

        def part(begin: int) -> bytes:
            return self.read_range(key, begin, min(PART_NBYTES, nbytes - begin))

        with ThreadPoolExecutor(STREAMS, "download") as pool:
            waiting: deque[Future[bytes]] = deque()
            try:
                for begin in range(0, nbytes, PART_NBYTES):
                    if len(waiting) == STREAMS:
                        take(waiting.popleft().result())
                    waiting.append(pool.submit(part, begin))
                while waiting:
                    take(waiting.popleft().result())
            finally:
                pool.shutdown(cancel_futures=True)

    def abort_uploads(self, prefix: str, unwanted: Callable[[str], bool]) -> None:
        """Abort the incomplete uploads of objects below ``prefix`` for whose keys ``unwanted`` is true. Raise OSError.

        Their parts take space, although no listing shows them.
        """
        answer = self._call(
            "ListMultipartUploads",
            prefix,
            lambda client: client.list_multipart_uploads(Bucket=self._bucket, Prefix=self._full(prefix)),
        )
        for each in answer.get("Uploads", ()):
            if unwanted(self._relative(each["Key"])):
                self._abort(each["Key"], each["UploadId"])

    def _abort(self, full_key: str, upload: str) -> None:
        with suppress(Exception):  # The next run, or a rule of the bucket, aborts it.
            self._client.abort_multipart_upload(Bucket=self._bucket, Key=full_key, UploadId=upload)

    def _full(self, key: str) -> str:
        return f"{self._prefix}/{key}" if self._prefix else key

    def _relative(self, full_key: str) -> str:
        return full_key.removeprefix(f"{self._prefix}/") if self._prefix else full_key

    def _at(self, key: str) -> dict[str, Any]:
        return {"Bucket": self._bucket, "Key": self._full(key)}

    def _call(self, operation: str, key: str, request: Callable[[Any], T]) -> T:
        """Return the result of ``request``, a function of the client. Raise OSError, also for botocore's errors.

        Repeat the request after transient errors. If the Secret has changed since, use its new content. ``operation``:
        its name in S3, for messages.
        """

        def attempt() -> T:
            try:
                return request(self._client)
            except Exception as error:
                meaning = self._meaning(error, operation, key)
                if meaning.errno != errno.EACCES or not self._renewed():
                    raise meaning from error
            try:
                return request(self._client)
            except Exception as error:
                raise self._meaning(error, operation, key) from error

        return retry(attempt, self.path(key))

    def _renewed(self) -> bool:
        """Return True if the files of the Secret have changed. The client then uses their new content."""
        if (found := _settings(self._secret)) == self._settings:
            return False
        self._settings, self._client = found, _client(found, self.uri)
        return True

    def _meaning(self, error: Exception, operation: str, key: str) -> OSError:
        """Return the OSError for an error of botocore, or of the network.

        Raise NotImplementedError if the store answers that it does not implement the operation.
        """
        from botocore.exceptions import ClientError, NoCredentialsError, PartialCredentialsError

        if isinstance(error, ClientError):
            code = str(error.response.get("Error", {}).get("Code", ""))
            status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
            said = str(error.response.get("Error", {}).get("Message", ""))
            if error.operation_name.startswith("AssumeRole"):  # the request for keys failed, not the one to the store
                passing = code in _PASSING_AT_STS or status in _PASSING_STATUSES or status >= 500
                role = os.environ.get("AWS_ROLE_ARN", "of the pod")
                text = f"no keys for the role {role}: {code or status}: {' '.join(said.split())[:200]}"
                return OSError(errno.EIO if passing else errno.EACCES, text)
            return self._meaning_of_code(code, said, operation, key, status)
        if isinstance(error, NoCredentialsError | PartialCredentialsError):
            return OSError(errno.EACCES, "no credentials for the object store")
        if isinstance(error, FileNotFoundError):
            return OSError(errno.EACCES, f"no file {error.filename}, which the environment names for credentials")
        text = " ".join(str(error).split())[:300]
        return OSError(errno.EIO, f"{operation} at {self._client.meta.endpoint_url}: {type(error).__name__}: {text}")

    def _meaning_of_code(self, code: str, said: str, operation: str, key: str, status: int = 0) -> OSError:
        text = f"{operation} of {self.path(key)}: {code or status}: {' '.join(said.split())[:200]}"
        if code == "PreconditionFailed" or status == 412:
            return FileExistsError(errno.EEXIST, text)
        if code == "NotImplemented" or status == 501:
            raise NotImplementedError(text)
        if code == "NoSuchBucket":
            return OSError(errno.EINVAL, f"no bucket {self._bucket!r}")
        if code != _SKEWED and (code in _DENIED or status in (401, 403)):
            needed = _PERMISSIONS.get(operation, "s3:PutObject")
            return PermissionError(
                errno.EACCES,
                f"no permission {needed} on bucket {self._bucket!r} ({code or status} for {self.path(key)})",
            )
        if code in _MISSING or status == 404:
            return FileNotFoundError(errno.ENOENT, text)
        if code in _FULL or status == 507:
            return OSError(errno.ENOSPC, text)
        transient = code in (_SKEWED, "RequestTimeout", "BadDigest", "IncompleteBody") or status in _PASSING_STATUSES
        return OSError(errno.EIO if transient or status >= 500 else errno.EINVAL, text)


def _parts(
    pieces: Iterable[bytes | memoryview], part_nbytes: int, digest: Callable[[bytes | memoryview], object]
) -> Iterator[bytes]:
    """Yield the ``pieces`` in parts of ``part_nbytes`` bytes each; the last one may be smaller. Pass all to digest."""
    collected = bytearray()
    for piece in pieces:
        digest(piece)
        rest = memoryview(piece)
        while len(rest):
            count = part_nbytes - len(collected)
            collected += rest[:count]
            rest = rest[count:]
            if len(collected) == part_nbytes:
                yield bytes(collected)
                collected.clear()
    if collected:
        yield bytes(collected)


def _body(answer: Any, nbytes: int | None = None) -> bytes:
    """Return the body of an answer. Raise OSError with EIO if it does not have ``nbytes`` bytes."""
    with answer["Body"] as body:
        content: bytes = body.read()
    if nbytes is not None and len(content) != nbytes:
        raise OSError(errno.EIO, f"found {len(content)} bytes; expected {nbytes} bytes")
    return content


def _settings(secret: Path) -> dict[str, str]:
    """Return the content of a mounted Secret: name → value. Empty if there is none."""
    try:
        files = [path for path in secret.iterdir() if not path.name.startswith(".")]
        return {path.name: path.read_text().strip() for path in files}
    except FileNotFoundError:
        return {}


@cache
def _loader() -> Any:
    """Return botocore's loader. It keeps the description of S3, because reading this takes longer than a request."""
    from botocore.loaders import create_loader

    return create_loader()


def _client(settings: dict[str, str], uri: str) -> Any:
    try:
        import botocore.session
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError
    except ImportError:
        raise BadInputError(
            FIELD, "no package botocore in the Python of the image", "botocore, which writes checkpoints to s3",
            "install it in the image (pip install botocore), or use checkpoint.volume",
        ) from None  # fmt: skip
    config = Config(
        connect_timeout=CONNECT_S,
        read_timeout=SILENCE_S,
        retries={"total_max_attempts": 1},
        max_pool_connections=2 * STREAMS,
        # Some S3-compatible stores reject the newer checksums. The SHA-256 of each object is in the commit marker.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    given = {
        "aws_access_key_id": settings.get("AWS_ACCESS_KEY_ID"),
        "aws_secret_access_key": settings.get("AWS_SECRET_ACCESS_KEY"),
        "aws_session_token": settings.get("AWS_SESSION_TOKEN"),
        "endpoint_url": settings.get("AWS_ENDPOINT_URL_S3") or settings.get("AWS_ENDPOINT_URL"),
        "region_name": settings.get("AWS_REGION") or settings.get("AWS_DEFAULT_REGION"),
    }
    session = botocore.session.Session()
    session.register_component("data_loader", _loader())
    if given["region_name"] is None and session.get_config_variable("region") is None:
        given["region_name"] = "us-east-1"  # S3 redirects requests to the bucket's region.
    try:
        return session.create_client("s3", config=config, **{name: each for name, each in given.items() if each})
    except (BotoCoreError, ValueError, OSError) as error:
        found = f"{uri}, for which no client can be created: {' '.join(str(error).split())[:300]}"
        raise BadInputError(
            FIELD,
            found,
            "a bucket and valid settings",
            "correct the Secret of checkpoint.secretName, or the environment variables AWS_…",
        ) from None
