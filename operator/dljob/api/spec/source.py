"""``spec.trainer.source``: the files of a training script, from a ConfigMap, a git repository or an archive."""

import re
from typing import Annotated

from pydantic import Field

from dljob.api.base import FOLDER_PATTERN, GIT_URL_PATTERN, PATTERNS, SHA256_PATTERN, ApiModel, DnsSubdomain, Rule
from dljob.api.spec.dataset import REMOTE

_COMMIT = "^[0-9a-f]{40}$"
_CLAIM = r"pvc://[a-z0-9]([-a-z0-9.]*[a-z0-9])?/(\.?[^/.][^/]*/)*\.?[^/.][^/]*"
_URI_PATTERN = f"^({_CLAIM}|{REMOTE})$"
PATTERNS[_URI_PATTERN] = "pvc://CLAIM/PATH, http(s)://HOST/PATH or s3://BUCKET/KEY"

Folder = Annotated[
    str | None,
    Field(
        pattern=FOLDER_PATTERN,
        max_length=1024,
        description="Folder among the files that becomes the working directory, such as examples/digits. Default: the "
        "top folder.",
    ),
]


class ConfigMapSource(ApiModel):
    """The keys of a ConfigMap in the job's namespace, each as a file."""

    name: Annotated[DnsSubdomain, Field(description="Name of the ConfigMap.")]


class GitSource(ApiModel):
    """The files of a commit of a git repository, without its history, its submodules and files of Git LFS."""

    rules = (
        Rule(
            "revision",
            f"self.revision.matches('{_COMMIT}')",
            "revision must be the full hash of a commit (40 hex digits), so that all ranks and restarts run the same "
            "code: write the hash that git ls-remote URL BRANCH prints",
            lambda s: re.fullmatch(_COMMIT, s.revision) is not None,
        ),
    )

    url: Annotated[
        str,
        Field(
            pattern=GIT_URL_PATTERN,
            max_length=2048,
            description="https:// or http:// URL of the repository, without user and password.",
        ),
    ]
    revision: Annotated[str, Field(min_length=1, max_length=255, description="Full hash of a commit: 40 hex digits.")]
    path: Folder = None
    secret_name: Annotated[
        DnsSubdomain | None,
        Field(
            description="Secret with the credentials for fetching, as environment variables: GIT_PASSWORD (a password "
            "or token) and, if the server needs it, GIT_USERNAME."
        ),
    ] = None


class ArchiveSource(ApiModel):
    """The files of a tar archive, which may be compressed with gzip, bzip2 or xz, or of a zip archive."""

    rules = (
        Rule(
            "secretName",
            "!has(self.secretName) || !self.uri.startsWith('pvc:')",
            "secretName is for archives that are fetched: use an http, https or s3 uri, or remove secretName",
            lambda s: s.secret_name is None or s.claim is None,
        ),
    )

    uri: Annotated[
        str,
        Field(
            pattern=_URI_PATTERN,
            max_length=2048,
            description="Location of the archive: pvc://CLAIM/PATH (a claim in the job's namespace), http://, https:// "
            "or s3://BUCKET/KEY.",
        ),
    ]
    sha256: Annotated[
        str | None,
        Field(
            pattern=SHA256_PATTERN,
            max_length=64,
            description="SHA-256 checksum of the archive, as sha256sum prints it. With it, all ranks and restarts run "
            "the same code.",
        ),
    ] = None
    path: Folder = None
    secret_name: Annotated[
        DnsSubdomain | None,
        Field(
            description="Secret with the credentials for fetching, as environment variables: AWS_ACCESS_KEY_ID, "
            "AWS_SECRET_ACCESS_KEY and AWS_ENDPOINT_URL for s3, HTTP_AUTHORIZATION for http."
        ),
    ] = None

    @property
    def claim(self) -> str | None:
        """Return the name of the PersistentVolumeClaim that holds the archive; None if it is fetched."""
        return self.uri.removeprefix("pvc://").partition("/")[0] if self.uri.startswith("pvc:") else None


class Source(ApiModel):
    """Origin of the files of the training script. The files are read-only, in the working directory of command."""

    rules = (
        Rule(
            "configMap",
            "[has(self.configMap), has(self.git), has(self.archive)].filter(x, x).size() == 1",
            "set exactly one of configMap, git and archive",
            lambda s: [s.config_map, s.git, s.archive].count(None) == 2,
        ),
    )

    config_map: Annotated[ConfigMapSource | None, Field(description="The keys of a ConfigMap, each as a file.")] = None
    git: Annotated[GitSource | None, Field(description="The files of a commit of a git repository.")] = None
    archive: Annotated[ArchiveSource | None, Field(description="The files of a tar or zip archive.")] = None

    @property
    def path(self) -> str | None:
        """Return the folder among the files that becomes the working directory; None: the top folder."""
        return next((found.path for found in (self.git, self.archive) if found is not None), None)

    @property
    def text(self) -> str:
        """Return one line about the files for users, without what may be secret in a URL."""
        folder = f", folder {self.path}" if self.path else ""
        if self.git is not None:
            return f"commit {self.git.revision[:12]} of {self.git.url}{folder}"
        if self.archive is not None:
            later = "" if self.archive.sha256 else ". Without sha256, pods that start later may get another archive"
            return f"{self.archive.uri.partition('?')[0]}{folder}{later}"
        assert self.config_map is not None, "a rule requires one of the three"
        return f"ConfigMap {self.config_map.name}. Pods that start later get later changes of it"

    @property
    def secret(self) -> tuple[str, str] | None:
        """Return the field with the name of the Secret for fetching, as a path in ``source``, and this name.

        Return None if no Secret is named.
        """
        for kind, found in (("git", self.git), ("archive", self.archive)):
            if found is not None and found.secret_name is not None:
                return f"{kind}.secretName", found.secret_name
        return None
