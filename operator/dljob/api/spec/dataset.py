"""``spec.dataset``: the source of the training data, and its place in the pod."""

import hashlib
import re
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from dlcontract import DATASET_DIR, DATASET_SUMS
from dljob.api.base import PATTERNS, SHA256_PATTERN, ApiModel, Bytes, DnsSubdomain, Rule

_LOCAL = r"pvc://[a-z0-9]([-a-z0-9.]*[a-z0-9])?/.+|file:///.+"
REMOTE = r"https?://[^/?#]+/[^?#]*[^/?#.](\?.*)?|s3://[^/?#]+/.*[^/.]"
_URI_PATTERN = f"^({_LOCAL}|{REMOTE})$"
PATTERNS[_URI_PATTERN] = "pvc://CLAIM/PATH, file:///PATH in the image, http(s)://HOST/PATH or s3://BUCKET/KEY"
_IS_REMOTE = "has(self.uri) && (self.uri.startsWith('http') || self.uri.startsWith('s3:'))"


class BuiltinDataset(StrEnum):
    DIGITS = "digits"
    DIGITS_32 = "digits-32"
    BREAST_CANCER = "breast-cancer"
    WINE = "wine"
    IRIS = "iris"
    PYTHON_SOURCE = "python-source"
    SYNTHETIC_IMAGES = "synthetic-images"
    SYNTHETIC_TOKENS = "synthetic-tokens"


BUILTIN_DATASETS = tuple(member.value for member in BuiltinDataset)


class Distribution(StrEnum):
    FULL = "Full"
    SHARDED = "Sharded"


DEFAULT_SIZE = "2Gi"
"""Size limit of the volume for fetched data on each node, if the spec sets no ``dataset.size``."""
_SHARDS = "!has(self.distribution) || self.distribution != 'Sharded'"
SHARDED_FILE = r"^[^\x3f]*[.](npz|npy|bin)([\x3f].*|)$"
"""Pattern of the URIs of files of which nodes can fetch a part. ``\\x3f`` is a question mark, which begins a query: the
policy of the API refuses new rules with a question mark, because it could be the ternary operator."""


class Dataset(ApiModel):
    """The training data: a built-in dataset by name, or a URI."""

    rules = (
        Rule(
            "name",
            "has(self.name) != has(self.uri)",
            "set exactly one of name (a built-in dataset) and uri (pvc://CLAIM/PATH, file:///PATH, https://… or "
            "s3://…)",
            lambda d: (d.name is not None) != (d.uri is not None),
        ),
        Rule(
            "sha256",
            "!has(self.sha256) || has(self.uri)",
            "sha256 needs uri, because it is the checksum of that file: set uri, or remove sha256",
            lambda d: d.sha256 is None or d.uri is not None,
        ),
        Rule(
            "uri",
            f"!(has(self.size) || has(self.secretName) || has(self.cacheClaimName)) || ({_IS_REMOTE})",
            "size, secretName and cacheClaimName are for data that is fetched: use an http, https or s3 uri, or remove "
            "them",
            lambda d: d.remote or (d.size is d.secret_name is d.cache_claim_name is None),
        ),
        Rule(
            "size",
            "!has(self.size) || !has(self.cacheClaimName)",
            "size cannot be combined with cacheClaimName, because size limits the copy on each node, and a cache claim "
            "replaces that copy: remove one of them",
            lambda d: d.size is None or d.cache_claim_name is None,
        ),
        Rule(
            "distribution",
            f"{_SHARDS} || ({_IS_REMOTE}) && !has(self.cacheClaimName) && self.uri.matches('{SHARDED_FILE}')",
            "distribution Sharded needs an http, https or s3 uri of one .npz, .npy or .bin file, and no "
            "cacheClaimName, because nodes can fetch a part of such files only: choose Full, or store the data in such "
            "a file",
            lambda d: not d.sharded or d.divisible,
        ),
        Rule(
            "distribution",
            f"{_SHARDS} || has(self.size) && has(self.sampleBytes)",
            "distribution Sharded needs size and sampleBytes, because the plan gives no node more data than it has "
            "space for: set both, or choose Full",
            lambda d: not d.sharded or (d.size is not None and d.sample_bytes is not None),
        ),
    )

    name: Annotated[
        BuiltinDataset | None,
        Field(
            description="A built-in dataset of the trainer image. python-source is the source code of Python's "
            "standard library, as bytes, for language models."
        ),
    ] = None
    uri: Annotated[
        str | None,
        Field(
            pattern=_URI_PATTERN,
            max_length=2048,
            description="Location of the data: pvc://CLAIM/PATH (a claim in the job's namespace), file:///PATH (in the "
            "image), or http://, https:// or s3://BUCKET/KEY, which is fetched to each node before training. A file "
            "named SHA256SUMS stands for the folder with all files that it lists. Built-in models read an .npz with "
            "x, y, x_test and y_test, or tokens in a .npy or .bin.",
        ),
    ] = None
    samples: Annotated[int | None, Field(ge=1, description="Number of training samples at uri.")] = None
    sample_bytes: Annotated[int | None, Field(ge=1, description="Bytes of one stored sample, for planning.")] = None
    distribution: Annotated[
        Distribution,
        Field(
            description="Full: each node has all data. Sharded: each node fetches and stores only the part that its "
            "ranks compute, in proportion to their local batch sizes. Samples then have another order."
        ),
    ] = Distribution.FULL
    sha256: Annotated[
        str | None,
        Field(
            pattern=SHA256_PATTERN,
            max_length=64,
            description="SHA-256 checksum of the file at uri, as sha256sum prints it. It is verified before training. "
            "With distribution Sharded, the checksum of the file FILE.blocks beside it, as "
            "dltrain.data.sharded.block_sums prints it.",
        ),
    ] = None
    size: Annotated[
        Bytes | None,
        Field(
            description="Space for fetched data on each node, such as 20Gi, requested as ephemeral storage. "
            "Default: 2Gi."
        ),
    ] = None
    secret_name: Annotated[
        DnsSubdomain | None,
        Field(
            description="Secret with the credentials for fetching, as environment variables: AWS_ACCESS_KEY_ID, "
            "AWS_SECRET_ACCESS_KEY and AWS_ENDPOINT_URL for s3, HTTP_AUTHORIZATION for http."
        ),
    ] = None
    cache_claim_name: Annotated[
        DnsSubdomain | None,
        Field(
            description="An existing claim (ReadWriteMany for several nodes) that caches fetched data, so that it is "
            "fetched once for all pods and all jobs. Default: each pod fetches it."
        ),
    ] = None

    @property
    def given(self) -> bool:
        """Return True if the job has a dataset (``name`` or ``uri``). Jobs with framework Torchrun or MPI need none."""
        return self.name is not None or self.uri is not None

    @property
    def remote(self) -> bool:
        """Return True if the data must be downloaded before training (http, https or s3)."""
        return (self.uri or "").startswith(("http://", "https://", "s3://"))

    @property
    def sharded(self) -> bool:
        """Return True if each node fetches only the part of the data that its ranks compute."""
        return self.distribution is Distribution.SHARDED

    @property
    def divisible(self) -> bool:
        """Return True if the data is in a file of which nodes can fetch a part."""
        return self.remote and self.cache_claim_name is None and re.search(SHARDED_FILE, self.uri or "") is not None

    @property
    def checked(self) -> bool:
        """Return True if the data at the URI can be verified after a download.

        This is the case if the spec has a checksum, or if the URI names a SHA256SUMS file, which lists checksums.
        """
        return self.sha256 is not None or self._source.endswith(f"/{DATASET_SUMS}")

    @property
    def claim(self) -> str | None:
        """Return the name of the PersistentVolumeClaim that holds or caches the data; None if there is none."""
        if self._source.startswith("pvc://"):
            return self._source.removeprefix("pvc://").partition("/")[0]
        return self.cache_claim_name

    @property
    def folder(self) -> str:
        """Return the folder in the pod into which data at an http, https or s3 URI is downloaded.

        If a claim caches the data, each combination of URI and checksum has its own folder.
        """
        if self.cache_claim_name is None:
            return DATASET_DIR
        return f"{DATASET_DIR}/{hashlib.sha256(f'{self.uri} {self.sha256}'.encode()).hexdigest()[:16]}"

    @property
    def file(self) -> str | None:
        """Return the path in the pod of the file that the URI names; None without a URI.

        The file may be a SHA256SUMS file, which lists the files with the data; see ``path``.
        """
        scheme, _, rest = self._source.partition("://")
        match scheme:
            case "":
                return None
            case "file":
                return rest
            case "pvc":
                return f"{DATASET_DIR}/{rest.partition('/')[2]}"
            case _:
                return f"{self.folder}/{rest.rpartition('/')[2]}"

    @property
    def path(self) -> str | None:
        """Return the path in the pod at which training scripts find the data; None without a URI.

        It is the path of the file that the URI names. If this is a SHA256SUMS file, it is the folder that contains it.
        """
        return self.file and self.file.removesuffix(f"/{DATASET_SUMS}")

    @property
    def _source(self) -> str:
        """Return the URI without the query of an http or https URL; empty for a built-in dataset."""
        uri = self.uri or ""
        return uri.partition("?")[0] if uri.startswith("http") else uri


NO_DATASET = Dataset.model_construct()
"""The dataset of a job without ``spec.dataset``. It is not valid in a manifest."""
