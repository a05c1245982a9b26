"""Copy a file from a URI, with the package fsspec."""

from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from dljob.suggest.errors import DataError
from dljob.suggest.reading.table import MAX_NBYTES, is_html

CHUNK_NBYTES = 2**20
CLAIM = "pvc"
"""Scheme of volumes, which only pods of a cluster can read."""
PAGES = (".html", ".htm", ".txt", ".text", ".md", ".rst")
"""Suffixes of files in which HTML may be meant."""
SILENT_S = 60.0
"""A server that neither answers nor sends for so long is given up."""


def is_uri(data: str) -> bool:
    """Return True for a URI such as https://host/data.csv or s3://bucket/data.csv."""
    return "://" in data


def copy_of(uri: str, folder: Path) -> Path:
    """Copy the file at ``uri`` to a folder, and return its path. Raise DataError if that is impossible."""
    parts = urlsplit(uri)
    name = Path(unquote(parts.path)).name
    if parts.scheme == CLAIM:
        raise DataError(
            f"{uri}: found a volume of a cluster, which this machine cannot read; expected a file here, or a URI such "
            f"as https://host/data.csv. Pass a copy of the data with --dataset-uri {uri}, or set spec.task in a DLJob."
        )
    if name in ("", ".", ".."):
        raise DataError(f"{uri}: found no name of a file; expected a URI such as https://host/data.csv. Correct it.")
    try:
        import fsspec
    except ImportError:
        raise DataError(
            f"{uri}: found a URI, but no Python package fsspec; expected this package. Run pip install fsspec (and "
            "aiohttp for https, s3fs for s3), or download the file."
        ) from None
    path = folder / name
    try:
        with fsspec.open(uri, "rb", **_options(parts.scheme)) as source:
            _copy(uri, source, path)
    except DataError:
        path.unlink(missing_ok=True)
        raise
    except Exception as error:  # noqa: BLE001 - each backend of fsspec has its own exceptions
        path.unlink(missing_ok=True)
        raise DataError(f"{uri}: found no readable file ({_reason(error)}); expected one. {_remedy(error)}") from None
    with path.open("rb") as file:
        if path.suffix.lower() not in PAGES and is_html(file.read(CHUNK_NBYTES)):
            raise DataError(
                f"{uri}: found a page of HTML; expected the file itself. Pass the address from which browsers download "
                "it. If it needs a login, download it and pass its path."
            )
    return path


def _options(scheme: str) -> dict[str, Any]:
    """Return options of fsspec: a server that stops sending is an error, unlike a slow download of a large file."""
    if scheme not in ("http", "https"):
        return {}
    from aiohttp import ClientTimeout

    return {"client_kwargs": {"timeout": ClientTimeout(total=None, sock_connect=SILENT_S, sock_read=SILENT_S)}}


def _cause(error: BaseException) -> BaseException:
    """Return the error of the server. fsspec raises FileNotFoundError for a server that cannot be reached, too."""
    while isinstance(error, FileNotFoundError) and error.__cause__ is not None:
        error = error.__cause__
    return error


def _reason(error: Exception) -> str:
    cause = _cause(error)
    if isinstance(cause, FileNotFoundError):
        return "it does not exist"
    if isinstance(cause, TimeoutError):
        return f"no answer for {SILENT_S:.0f} s"
    if isinstance(status := getattr(cause, "status", None), int) and status > HTTPStatus.BAD_REQUEST:
        return f"the server answered {status} {getattr(cause, 'message', '')}".strip()
    text = " ".join(str(getattr(cause, "message", cause)).split())[:200]
    return text or type(cause).__name__  # such as TooManyRedirects


def _remedy(error: Exception) -> str:
    cause = _cause(error)
    if isinstance(cause, ImportError):
        return "Install the package, or download the file."
    refused = getattr(cause, "status", None) in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
    if refused or isinstance(cause, PermissionError) or "redential" in type(cause).__name__:
        return "Set the credentials of the server, or download the file and pass its path."
    if isinstance(cause, FileNotFoundError):
        return "Correct the URI."
    return "Correct the URI, or try again later."


def _copy(uri: str, source: Any, path: Path) -> None:
    nbytes = 0
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        while chunk := source.read(CHUNK_NBYTES):
            nbytes += len(chunk)
            if nbytes > MAX_NBYTES:
                raise DataError(
                    f"{uri}: found more than {MAX_NBYTES >> 20} MiB; expected at most this. Make a smaller sample."
                )
            file.write(chunk)
    whole = getattr(source, "size", None)
    if isinstance(whole, int) and nbytes != whole:
        raise DataError(f"{uri}: found {nbytes:,} bytes of {whole:,}; expected the whole file. Try again.")
