"""The ConfigMap with the output and the run report of a job that has ended."""

import base64
import gzip
from typing import Any

from dljob.kube.kinds import CONFIG_MAP
from support.servers.threaded_api import ThreadedApiServer


def stored_records(files: dict[str, bytes], job: str = "a", namespace: str = "team-a") -> dict[str, Any]:
    """Return the ConfigMap ``<job>-logs`` with these contents of its entries."""
    data = {name: base64.b64encode(content).decode() for name, content in files.items()}
    return {"metadata": {"name": f"{job}-logs", "namespace": namespace}, "binaryData": data}


def put_records(api: ThreadedApiServer, files: dict[str, str]) -> None:
    """Store records of job ``a`` with these texts, compressed as the pods of a job do."""
    api.put(CONFIG_MAP, stored_records({name: gzip.compress(text.encode()) for name, text in files.items()}))
