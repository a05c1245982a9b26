"""Tests of a script from a git repository, which a pod of the cluster serves. The example own-script.yaml uses a ConfigMap."""

from pathlib import Path
from typing import Any

import pytest

from support.cluster.kubectl import Kubectl, condition, example
from support.cluster.pod_server import pod_server, trainer_image

pytestmark = pytest.mark.e2e

SERVER = '''
import os
from wsgiref.simple_server import make_server
from dulwich import porcelain
from dulwich.repo import Repo
from dulwich.server import DictBackend
from dulwich.web import WSGIRequestHandlerLogger, WSGIServerLogger, make_wsgi_chain

def repository(folder):
    os.makedirs(f"{folder}/examples")
    repo = Repo.init(folder)
    for name, text in {"train.py": "from helper import check\\ncheck()\\n", "helper.py": HELPER}.items():
        with open(f"{folder}/examples/{name}", "w") as file:
            file.write(text)
        porcelain.add(repo, paths=[f"{folder}/examples/{name}"])
    who = b"test <test@example.org>"
    times = {f"{kind}_{what}": 0 for kind in ("author", "commit") for what in ("timestamp", "timezone")}
    return repo, porcelain.commit(repo, message=b"first", author=who, committer=who, sign=False, **times).decode()

HELPER = """import os
def check():
    found = os.getcwd(), os.environ["WORLD_SIZE"], os.access(".", os.W_OK)
    if found != ("/var/lib/dljob/source/files/examples", "2", False):
        raise SystemExit(f"found {found}")
"""
if __name__ == "__main__":
    backend = DictBackend({"/training": repository("/tmp/training")[0]})
    classes = {"handler_class": WSGIRequestHandlerLogger, "server_class": WSGIServerLogger}
    make_server("", 8080, make_wsgi_chain(backend), **classes).serve_forever()
'''


def revision(folder: Path) -> str:
    """Return the hash of the commit that the server makes: a commit with the same content has the same hash."""
    found: dict[str, Any] = {"__name__": "server"}
    exec(SERVER, found)
    return str(found["repository"](str(folder / "training"))[1])


def job(name: str, commit: str, **source: str) -> dict[str, Any]:
    git = {"url": "http://git:8080/training", "revision": commit, "path": "examples", **source}
    return example(
        "script-from-git.yaml", job=name, checkpoint={"enabled": False}, resources={"memory": "1Gi"},
        trainer={"framework": "Torchrun", "command": ["torchrun", "train.py"], "source": {"git": git}},
    )  # fmt: skip


@pytest.mark.long
def test_script_from_git_runs_and_a_missing_commit_is_one_clear_condition(
    admin: Kubectl, kubectl: Kubectl, tmp_path: Path
) -> None:
    image = trainer_image(admin)
    commit = revision(tmp_path)
    kubectl.apply(*pod_server("git", image, SERVER), job("from-git", commit))
    kubectl.wait_phase("from-git", "Complete", 240)
    kubectl.apply(job("no-folder", commit, path="nowhere"))

    def reported(found: dict[str, Any]) -> bool:
        failed = condition(found, "Failed")
        return failed is not None and failed["reason"] == "BadInput" and "source.git.path" in failed["message"]

    kubectl.wait_job("no-folder", "Failed/BadInput naming the folder", reported, 120)
