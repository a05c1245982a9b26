"""Copy the trained model of a job from its checkpoint volume to this machine.

A pod mounts the volume while the files are copied. It is deleted afterwards.
"""

import asyncio
import hashlib
import json
import os
import secrets
import shutil
import stat
import sys
import tarfile
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from dlcontract import CHECKPOINT_DIR
from dlcontract.checkpoint.parts import MODEL
from dljob.api.defaults import NO_DEFAULTS, JobDefaults
from dljob.client import model_parts, operator_pods, reader_pod
from dljob.client.errors import BadInputError
from dljob.client.operator_pods import OperatorPod
from dljob.client.pod_exec import ExecError, output
from dljob.job.task.suggestion import FILES

LOOK_S = 0.5
ENDED = ("Complete", "Failed", "Suspended")
MANIFEST = "manifest.json"


def source(job: Mapping[str, Any], *, whole: bool) -> tuple[str, str]:
    """Return (name of the claim, folder on the volume) of a job. Raise BadInputError if there is no model to copy.

    ``whole``: True to copy the whole folder.
    """
    meta, spec, status = job["metadata"], job.get("spec") or {}, job.get("status") or {}
    name, checkpoint = meta["name"], (job.get("spec") or {}).get("checkpoint") or {}
    if checkpoint.get("enabled") is False:
        raise BadInputError(
            f"{name}: found spec.checkpoint.enabled: false; expected a job with checkpoints. Its model is not stored; "
            "run it with checkpoints"
        )
    phase = status.get("phase")
    if phase not in ENDED:
        raise BadInputError(
            f"{name}: found phase {phase or 'none'}; expected a job that has ended ({', '.join(ENDED)}). Wait for it, "
            "or copy files from its first pod with kubectl cp"
        )
    if uri := checkpoint.get("uri"):
        saved = status.get("lastCheckpoint") or {}
        # The path of an upload, which has a name, is that of its commit marker. Its files are in several folders.
        last = None if whole or "name" in saved else saved.get("path")
        path = last or f"{uri.rstrip('/')}/{name}-{meta['uid']}"
        sharded = (spec.get("parallelism") or {}).get("strategy") == "Sharded"
        command = f"python -m dltrain.checkpoint.sharded.export model {MODEL}"
        joining = f"If the copy has no {MODEL}, join its parts with {command}. "
        raise BadInputError(
            f"{name}: found spec.checkpoint.uri: {uri}; expected a job with a checkpoint volume. "
            f"{joining if sharded and not whole else ''}Copy the model from the object store, for example with: "
            f"aws s3 cp --recursive {path} model"
        )
    claim = (checkpoint.get("volume") or {}).get("claimName") or f"{name}-checkpoints"
    if whole:
        return claim, f"{CHECKPOINT_DIR}/{name}-{meta['uid']}"
    path = (status.get("result") or {}).get("checkpoint") or (status.get("lastCheckpoint") or {}).get("path")
    if not path:
        own = bool((spec.get("trainer") or {}).get("command"))
        remedy = (
            "If the script writes its own checkpoints to $DLJOB_CHECKPOINT_DIR, copy them with --all"
            if own
            else "See kubectl describe dljob for how far it got"
        )
        raise BadInputError(
            f"{name}: found no checkpoint in its status (phase {phase}); expected one that dltrain has "
            f"written. {remedy}"
        )
    return claim, str(path)


@dataclass(frozen=True)
class CopyOptions:
    whole: bool = False
    """True: copy the whole folder of the job. False: copy the files of its last checkpoint that a model needs."""
    image: str | None = None
    """Image of the pod, with python3. None: the image of the job."""
    timeout_s: float = 300.0
    """Time limit for the start of the pod."""


async def copy_model(api: Any, namespace: str, name: str, folder: Path, options: CopyOptions) -> list[str]:
    """Copy the model of a job that has ended to the new folder ``folder``, and return the names of the files.

    A pod mounts the volume meanwhile. It is deleted in any case. Raise BadInputError if there is no model to copy, if
    the folder is not empty or cannot be written, or if the pod does not run.
    """
    try:
        _check_folder(folder)
        return await _fetch(api, namespace, name, folder, options)
    except OSError as error:
        raise BadInputError(f"DIR: found {folder}, which cannot be written: {error.strerror or error}") from error


async def _fetch(api: Any, namespace: str, name: str, folder: Path, options: CopyOptions) -> list[str]:
    from dljob.kube import ApiError
    from dljob.kube.kinds import CLAIM, DLJOB, POD

    try:
        job = await api.get(DLJOB, namespace, name)
    except ApiError as error:
        if not error.not_found or "requested resource" in error.message:
            raise
        raise BadInputError(
            f"JOB: found no DLJob {name} in namespace {namespace}; expected an existing job. Correct the name or "
            "set --namespace"
        ) from None
    claim, path = source(job, whole=options.whole)
    with suppress_forbidden(ApiError):
        try:
            await api.get(CLAIM, namespace, claim)
        except ApiError as error:
            if not error.not_found:
                raise
            raise BadInputError(
                f"{name}: found no volume claim {claim} in namespace {namespace}; expected the claim of its "
                "checkpoints. It has been deleted, and the model with it"
            ) from None
    operators = await _operators(api)
    image = options.image or ((job.get("spec") or {}).get("trainer") or {}).get("image") or _default_image(operators)
    body = reader_pod.manifest(job, claim, image, secrets.token_hex(3), _defaults(operators, namespace))
    pod = body["metadata"]["name"]
    try:
        await api.create(POD, body)
        await _started(api, namespace, pod, options.timeout_s)
        parts = output(api, namespace, pod, reader_pod.CONTAINER, reader_pod.command(path, whole=options.whole))
        try:
            names = await receive(parts, folder)
            return [*names, *await _written_scripts(api, namespace, job, folder)]
        except ExecError as error:
            raise BadInputError(f"pod {pod}: cannot copy {path} from claim {claim}: {error}") from None
    finally:
        with suppress(ApiError):
            await asyncio.shield(api.delete(POD, namespace, pod, grace_s=0))


async def _written_scripts(api: Any, namespace: str, job: Mapping[str, Any], folder: Path) -> list[str]:
    """Write the scripts of a job with ``spec.task`` to the folder of its model, and return their names.

    They use the model (``predict.py``), or train the baseline anew (``baseline.py``). No file is replaced. Files with
    other names than those that dljob writes are left out.
    """
    from dljob.kube import ApiError
    from dljob.kube.kinds import CONFIG_MAP

    name = ((job.get("status") or {}).get("suggestion") or {}).get("configMap")
    if not name:
        return []
    found: Mapping[str, Any] = {}
    try:
        with suppress_forbidden(ApiError):
            found = (await api.get(CONFIG_MAP, namespace, name)).get("data") or {}
    except ApiError as error:
        if not error.not_found:
            raise
    written = [each for each in FILES if each in found and not (folder / each).exists()]
    for each in written:
        (folder / each).write_text(found[each], encoding="utf-8")
    return written


class suppress_forbidden:  # noqa: N801 - used like contextlib.suppress
    """A context that suppresses the API server's error 403: the user may not read an object, which is then not used."""

    def __init__(self, kind: type[Exception]) -> None:
        self._kind = kind

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        return isinstance(error, self._kind) and bool(getattr(error, "forbidden", False))


async def _operators(api: Any) -> tuple[OperatorPod, ...]:
    """Return the pods of operators in the cluster. Return an empty tuple if the user may not list them."""
    from dljob.kube import ApiError
    from dljob.kube.kinds import POD

    with suppress_forbidden(ApiError):
        label, active = f"{operator_pods.NAME_LABEL}=dljob", "status.phase!=Succeeded,status.phase!=Failed"
        return operator_pods.operator_pods(await api.find(POD, None, labelSelector=label, fieldSelector=active))
    return ()


def _default_image(operators: Sequence[OperatorPod]) -> str:
    """Return the trainer image of the operator, which jobs without an image run. Raise BadInputError if unknown."""
    if image := operator_pods.trainer_image(operators):
        return image
    raise BadInputError(
        "--image: found no image in this option, in spec.trainer.image or in the pod of an operator; expected an image "
        "with python3. Set --image"
    )


def _defaults(operators: Sequence[OperatorPod], namespace: str) -> JobDefaults:
    """Return the administrator's defaults for pods of jobs, such as pull secrets; ``NO_DEFAULTS`` if unknown."""
    try:
        return operator_pods.of_namespace(operators, namespace)
    except BadInputError:  # Operators of two releases, or of another one than this command.
        return NO_DEFAULTS


async def _started(api: Any, namespace: str, name: str, limit_s: float) -> None:
    from dljob.kube.kinds import POD

    deadline_s = asyncio.get_running_loop().time() + limit_s
    while True:
        pod = await api.get(POD, namespace, name)
        if reader_pod.running(pod):
            return
        late = asyncio.get_running_loop().time() >= deadline_s
        if (why := reader_pod.trouble(pod, late=late)) is not None:
            raise BadInputError(
                f"pod {name} does not run: {why}; expected it to run within {limit_s:g} s with the volume mounted. "
                "Correct the cause, choose another --image, or raise --timeout"
            )
        await asyncio.sleep(LOOK_S)


async def receive(parts: AsyncIterator[bytes], folder: Path) -> list[str]:
    """Unpack a tar archive that arrives in ``parts`` to ``folder``, and return the names of its files.

    The folder appears, in place of an empty one, when all files have arrived and match the checksums in
    ``manifest.json``, if there is one. Raise BadInputError if they do not, ExecError if the archive ends early, and
    OSError if a file cannot be written.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        reading, writing = os.pipe()
        unpacking = asyncio.create_task(asyncio.to_thread(_unpack, reading, temporary))
        try:
            with os.fdopen(writing, "wb", buffering=0) as pipe:
                async for part in parts:
                    await asyncio.to_thread(pipe.write, part)
        except BrokenPipeError:  # The error of the other end says why.
            pass
        except BaseException:
            with suppress(OSError, tarfile.TarError):
                await unpacking
            raise
        try:
            names = await unpacking
        except tarfile.TarError as error:
            raise ExecError(f"the archive is damaged: {error}. Try again") from None
        names = await asyncio.to_thread(_checked, temporary, names)
        temporary.chmod(stat.S_IMODE(folder.stat().st_mode) if folder.is_dir() else 0o755)
        temporary.replace(folder)
        return names
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _unpack(reading: int, folder: Path) -> list[str]:
    """Write the files of the archive in the pipe ``reading`` to ``folder``, and return their names.

    Leave out links, and paths that leave the folder.
    """
    names = []
    with os.fdopen(reading, "rb") as pipe, tarfile.open(fileobj=pipe, mode="r|") as archive:
        for member in archive:
            path = PurePosixPath(member.name)
            if not member.isfile() or path.is_absolute() or ".." in path.parts:
                continue
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            content = archive.extractfile(member)
            assert content is not None, "a regular file"
            with target.open("wb") as file:
                shutil.copyfileobj(content, file, 2**20)
            names.append(str(path))
        while pipe.read(2**16):  # The padding of the archive, without which the sender would see a broken pipe.
            pass
    return sorted(names)


def _manifest(folder: Path) -> dict[str, Any]:
    """Return the content of ``manifest.json``, with the key ``files``; both are empty if it is missing or invalid."""
    try:
        found = json.loads((folder / MANIFEST).read_bytes()) if (folder / MANIFEST).is_file() else {}
    except ValueError:
        found = {}
    manifest = found if isinstance(found, dict) else {}
    return manifest | {"files": manifest.get("files") or {}}


def _checked(folder: Path, names: list[str]) -> list[str]:
    """Check the files that have arrived, join a model that is in parts, and return the names of the files.

    ``names``: those that have arrived. This reads all files, so a thread of its own must run it.
    """
    manifest = _manifest(folder)
    _check_sums(folder, manifest)
    if not model_parts.only_in_parts(manifest):
        return names
    model_parts.join(folder, manifest)
    return sorted({name for name in names if not name.startswith(model_parts.PART)} | {MODEL})


def _check_sums(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Raise BadInputError if a file differs from its checksum in ``manifest``, and ExecError if one has not arrived."""
    parts = () if model_parts.only_in_parts(manifest) else (model_parts.PART,)
    not_sent = (model_parts.OPTIMIZER_PART, *parts)
    for name, claim in manifest["files"].items():
        path, expected = folder / str(name), claim.get("sha256") if isinstance(claim, dict) else None
        if not path.is_file() and name not in reader_pod.LEFT_OUT and not str(name).startswith(not_sent):
            raise ExecError(f"{name} has not arrived. Try again")
        if path.is_file() and expected:
            with path.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
            if found != expected:
                raise BadInputError(
                    f"{name}: found SHA-256 {found}; expected {expected}, as in {MANIFEST}. The file is damaged on the "
                    "volume, or was changed while it was copied. Try again, or copy an earlier checkpoint with --all"
                )


def _check_folder(folder: Path) -> None:
    """Raise BadInputError if ``receive`` could not put a folder in the place of ``folder``, which remains."""
    if folder.is_symlink() or (folder.is_dir() and folder.is_mount()) or folder.name in ("", ".."):
        raise BadInputError(
            f"DIR: found {folder}, which is a link, a mount point or a relative path to an existing folder; expected a "
            "new or empty folder, which is replaced. Name a new folder in it"
        )
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise BadInputError(
            f"DIR: found {folder}, which exists and is not empty; expected a new folder. Choose another"
        )
    if sys.platform == "win32":
        raise BadInputError("dljob get-model: found Windows; expected Linux or macOS. Use kubectl cp instead")
