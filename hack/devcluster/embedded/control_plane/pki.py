"""A certificate authority for one cluster, its certificates (made with openssl), and kubeconfigs that contain them."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from pathlib import Path

from devcluster.shell import run

DAYS = "3650"
_EC_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


class Authority:
    """A certificate authority that writes its certificates into one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.certificate = folder / "ca.crt"
        self.key = folder / "ca.key"

    def create(self) -> None:
        """Create a new authority, and the key pair that signs service-account tokens."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o700)
        extensions = ["-addext", "keyUsage=critical,keyCertSign,cRLSign,digitalSignature"]
        run(
            [
                *("openssl", "req", "-x509", *_EC_KEY, "-days", DAYS, "-subj", "/CN=dljob development cluster"),
                *extensions,
                *("-keyout", self.key, "-out", self.certificate),
            ]
        )
        run(["openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", self.folder / "sa.key"])
        run(["openssl", "ec", "-in", self.folder / "sa.key", "-pubout", "-out", self.folder / "sa.pub"])

    def issue(self, name: str, subject: str, addresses: Sequence[str] = ()) -> None:
        """Issue a certificate: write NAME.crt and NAME.key.

        `subject`: as openssl expects it (`/O=…/CN=…`). `addresses`: alternative names (`IP:…` or `DNS:…`).
        """
        request, extensions = self.folder / f"{name}.csr", self.folder / f"{name}.ext"
        lines = ["keyUsage=critical,digitalSignature", "extendedKeyUsage=clientAuth,serverAuth"]
        if addresses:
            lines.append("subjectAltName=" + ",".join(addresses))
        extensions.write_text("\n".join(lines) + "\n")
        run(
            ["openssl", "req", *_EC_KEY, "-subj", subject, "-keyout", self.folder / f"{name}.key", "-out", request],
        )
        run(
            [
                *("openssl", "x509", "-req", "-in", request, "-CA", self.certificate, "-CAkey", self.key),
                *("-CAcreateserial", "-days", DAYS, "-extfile", extensions, "-out", self.folder / f"{name}.crt"),
            ]
        )
        request.unlink()
        extensions.unlink()

    def write_kubeconfig(self, path: Path, name: str, server: str, context: str = "dljob") -> None:
        """Write a kubeconfig (as JSON, which is valid YAML) that only its owner can read.

        It contains the authority's certificate, and the certificate and key that were issued for `name`.
        """

        def inline(file: Path) -> str:
            return base64.b64encode(file.read_bytes()).decode()

        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [
                {
                    "name": context,
                    "cluster": {"server": server, "certificate-authority-data": inline(self.certificate)},
                }
            ],
            "users": [
                {
                    "name": context,
                    "user": {
                        "client-certificate-data": inline(self.folder / f"{name}.crt"),
                        "client-key-data": inline(self.folder / f"{name}.key"),
                    },
                }
            ],
            "contexts": [{"name": context, "context": {"cluster": context, "user": context}}],
            "current-context": context,
        }
        scratch = path.with_name(path.name + ".new")
        scratch.touch(mode=0o600)
        scratch.write_text(json.dumps(config, indent=1) + "\n")
        scratch.replace(path)
