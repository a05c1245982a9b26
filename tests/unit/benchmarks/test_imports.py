"""Tests that benchmarks import only modules and names of this repository that exist. Some need a cluster to run."""

import ast
import importlib.util
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("benchmarks", "devcluster", "dlcontract", "dljob", "dltrain", "support")


def imports(path: Path) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield each imported module of this repository with the imported names."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, ()) for alias in node.names if alias.name.split(".")[0] in PACKAGES)
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in PACKAGES:
            yield node.module, tuple(alias.name for alias in node.names)


@cache
def names(module: str) -> set[str] | None:
    """Return the top-level names and submodules of a module, or None if there is no such module."""
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        return None
    if spec is None:
        return None
    found = {path.stem for folder in spec.submodule_search_locations or () for path in Path(folder).iterdir()}
    if spec.origin is None:
        return found
    for node in ast.walk(ast.parse(Path(spec.origin).read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    return found


def test_imports_of_benchmarks_exist() -> None:
    missing = []
    for path in sorted((ROOT / "benchmarks").rglob("*.py")):
        for module, wanted in imports(path):
            found = names(module)
            if found is None:
                missing.append(f"{path.relative_to(ROOT)}: {module}")
            else:
                missing += [f"{path.relative_to(ROOT)}: {module}.{name}" for name in wanted if name not in found]
    assert missing == []
