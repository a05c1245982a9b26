"""Copy a file from a URI, with the package fsspec."""

from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from dljob.suggest.errors import DataError
from dljob.suggest.reading.table import MAX_NBYTES

CHUNK_NBYTES = 2**20


def is_uri(data: str) -> bool:
    """Return True for a URI such as https://host/data.csv or s3://bucket/data.csv."""
    return "://" in data


def copy_of(uri: str, folder: Path) -> Path:
    """Copy the file at ``uri`` to a folder, and return its path. Raise DataError if that is impossible."""
    name = Path(unquote(urlsplit(uri).path)).name
    if not name:
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
        with fsspec.open(uri, "rb") as source:
            _copy(uri, source, path)
    except DataError:
        path.unlink(missing_ok=True)
        raise
    except Exception as error:  # noqa: BLE001 - each backend of fsspec has its own exceptions
        path.unlink(missing_ok=True)
        text = " ".join(str(error).split())[:200] or type(error).__name__
        raise DataError(f"{uri}: found no readable file ({text}); expected one. Correct the URI.") from None
    return path


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
