"""An OCI image layout on disk, which stores built images for the clusters that load them.

One layout contains all images, so that common layers are stored only once. Adding a new version of an image adds only
the layers that have changed, and only these layers are sent to a node that has the older version.
"""

from __future__ import annotations

import hashlib
import io
import json
import platform
import tarfile
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import IO, Any

from devcluster.errors import ClusterError

_REF = "org.opencontainers.image.ref.name"
_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_CONFIG = "application/vnd.oci.image.config.v1+json"
_LAYER = "application/vnd.oci.image.layer.v1.tar"
_SETTINGS = {"Env": ["PATH=/usr/local/bin:/usr/bin:/bin"]}


class Layout:
    """The folder of one OCI image layout."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def create(self) -> None:
        """Create an empty layout if the folder contains none."""
        (self.folder / "blobs" / "sha256").mkdir(parents=True, exist_ok=True)
        marker, index = self.folder / "oci-layout", self.folder / "index.json"
        if not marker.exists():
            marker.write_text(json.dumps({"imageLayoutVersion": "1.0.0"}))
        if not index.exists():
            index.write_text(json.dumps({"schemaVersion": 2, "manifests": []}))

    def images(self) -> dict[str, str]:
        """Return image reference → digest of the image's manifest."""
        return {entry["annotations"][_REF]: entry["digest"] for entry in self._entries()}

    def _entries(self) -> list[dict[str, Any]]:
        try:
            index = json.loads((self.folder / "index.json").read_text())
        except FileNotFoundError:
            return []
        return [entry for entry in index["manifests"] if _REF in entry.get("annotations", {})]

    def _write_entries(self, entries: list[dict[str, Any]]) -> None:
        scratch = self.folder / "index.json.new"
        scratch.write_text(json.dumps({"schemaVersion": 2, "manifests": entries}, sort_keys=True))
        scratch.replace(self.folder / "index.json")

    def blob(self, digest: str) -> Path:
        """Return the path of the blob with the digest `sha256:…`."""
        return self.folder / "blobs" / Path(*digest.split(":", 1))

    def blobs(self, reference: str) -> list[str]:
        """Return the digests of all blobs of an image: manifest, configuration, layers."""
        digest = self.images().get(reference)
        if digest is None:
            raise ClusterError(
                f"image {reference}: found only {sorted(self.images())} in {self.folder}; expected it there. Build it "
                "with hack/images"
            )
        manifest = json.loads(self.blob(digest).read_text())
        return [digest, manifest["config"]["digest"], *(layer["digest"] for layer in manifest["layers"])]

    def keep_newest(self, count: int) -> list[str]:
        """Remove all but the newest `count` images of each name, and unused blobs. Return the removed references.

        The name of an image is its reference without the tag.
        """
        entries, seen = self._entries(), Counter[str]()
        kept, forgotten = [], []
        for entry in reversed(entries):
            reference = entry["annotations"][_REF]
            name = reference.rpartition(":")[0]
            seen[name] += 1
            if seen[name] <= count:
                kept.append(entry)
            else:
                forgotten.append(reference)
        self._write_entries(kept[::-1])
        wanted = {digest for reference in self.images() for digest in self.blobs(reference)}
        for path in (self.folder / "blobs" / "sha256").iterdir():
            if f"sha256:{path.name}" not in wanted:
                path.unlink()
        return forgotten

    def stream(self, references: Collection[str], present: Collection[str], output: IO[bytes]) -> None:
        """Write an archive of images to `output`, without the blobs `present`, which the reader already has."""
        entries = [entry for entry in self._entries() if entry["annotations"][_REF] in references]
        named = [
            {**entry, "annotations": {"io.containerd.image.name": entry["annotations"][_REF]}} for entry in entries
        ]
        wanted = {digest for reference in references for digest in self.blobs(reference)} - set(present)
        with tarfile.open(fileobj=output, mode="w|") as tar:
            _add(tar, "oci-layout", json.dumps({"imageLayoutVersion": "1.0.0"}).encode())
            for digest in sorted(wanted):
                tar.add(self.blob(digest), "blobs/" + digest.replace(":", "/"))
            _add(tar, "index.json", json.dumps({"schemaVersion": 2, "manifests": named}).encode())

    def add_program(self, reference: str, program: Path) -> None:
        """Add an image that contains only one static program. Equal programs give images with equal digests."""
        layer = io.BytesIO()
        with tarfile.open(fileobj=layer, mode="w") as tar:
            _add(tar, program.name, program.read_bytes(), mode=0o755)
        self._add_image(reference, layer.getvalue(), {"Entrypoint": [f"/{program.name}"], "User": "65535:65535"})

    def add_rootfs(self, reference: str, rootfs: Path) -> None:
        """Add an image with the files of the folder ``rootfs``. The image has a PATH, but no entry point."""
        layer = io.BytesIO()
        with tarfile.open(fileobj=layer, mode="w") as tar:
            tar.add(rootfs, ".")
        self._add_image(reference, layer.getvalue(), _SETTINGS)

    def add_layer(self, reference: str, base: str, folder: Path, at: str) -> None:
        """Add the image `reference`: the image `base` with the files of `folder` in its directory `at`."""
        layer = io.BytesIO()
        with tarfile.open(fileobj=layer, mode="w") as tar:
            tar.add(folder, at.strip("/"))
        manifest, config = self._read(base)
        stored = self._store(layer.getvalue())
        config["rootfs"]["diff_ids"].append(stored["digest"])
        manifest["layers"].append({"mediaType": _LAYER, **stored})
        self._write(reference, manifest, config)

    def add_up_to_largest_layer(self, reference: str, base: str) -> None:
        """Add the image `reference`: the layers of the image `base` up to the largest, with a PATH as only setting."""
        manifest, config = self._read(base)
        sizes = [layer["size"] for layer in manifest["layers"]]
        count = sizes.index(max(sizes)) + 1
        del manifest["layers"][count:], config["rootfs"]["diff_ids"][count:]
        self._write(reference, manifest, {**config, "config": _SETTINGS})

    def _read(self, reference: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the manifest and the configuration of an image."""
        manifest = json.loads(self.blob(self.images()[reference]).read_text())
        return manifest, json.loads(self.blob(manifest["config"]["digest"]).read_text())

    def _write(self, reference: str, manifest: dict[str, Any], config: dict[str, Any]) -> None:
        """Add or replace an image whose layers the folder has."""
        config.pop("history", None)  # It must have an entry for each layer, if there is one.
        manifest["config"] |= self._store(json.dumps(config).encode())
        entry = {"mediaType": manifest.get("mediaType", _MANIFEST), **self._store(json.dumps(manifest).encode())}
        others = [one for one in self._entries() if one["annotations"][_REF] != reference]
        self._write_entries([*others, {**entry, "annotations": {_REF: reference}}])

    def _add_image(self, reference: str, layer: bytes, settings: dict[str, Any]) -> None:
        """Add an image with one layer, an uncompressed tar. ``settings``: the part ``config`` of its configuration."""
        self.create()
        stored = self._store(layer)
        architecture = {"x86_64": "amd64", "aarch64": "arm64"}
        config = {
            "architecture": architecture.get(platform.machine(), platform.machine()),
            "os": "linux",
            "config": settings,
            "rootfs": {"type": "layers", "diff_ids": [stored["digest"]]},
        }
        layers = [{"mediaType": _LAYER, **stored}]
        manifest = {
            "schemaVersion": 2, "mediaType": _MANIFEST, "config": {"mediaType": _CONFIG}, "layers": layers,
        }  # fmt: skip
        self._write(reference, manifest, config)

    def _store(self, data: bytes) -> dict[str, Any]:
        digest = "sha256:" + hashlib.sha256(data).hexdigest()
        self.blob(digest).write_bytes(data)
        return {"digest": digest, "size": len(data)}


def _add(tar: tarfile.TarFile, name: str, data: bytes, mode: int = 0o644) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(data), mode
    tar.addfile(member, io.BytesIO(data))
