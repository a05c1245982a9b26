"""Render the projects that learn from documents: classification, and language modelling."""

from dljob.suggest.inspection.columns import MISSING
from dljob.suggest.inspection.text import TextFacts
from dljob.suggest.project.render import Source, project_files, reader, scoring, with_mark
from dljob.suggest.reading.text import CLASS_FOLDERS, FILE, FOLDER, SUFFIXES, Texts
from dljob.suggest.recommendation.model import Settings

FILES = f"""\
    files = [file for file in sorted(Path(path).rglob("*")) if file.suffix.lower() in {sorted(SUFFIXES)!r}]
    files = [f for f in files if not any(p.startswith(".") for p in f.relative_to(path).parts) and f.stat().st_size]
"""
LABELLED = {
    CLASS_FOLDERS: FILES
    + """\
    files = [(file, file.relative_to(path).parts[0]) for file in files if file.parent != Path(path)]
    found = [(file.read_text(encoding=ENCODING).strip(), label) for file, label in files]
""",
    "table": """\
    found = [(row.get(TEXT, ""), row.get(TARGET, "")) for row in records(path)]
""",
}
UNLABELLED = {
    FILE: """\
    found = [Path(path).read_text(encoding=ENCODING)]
""",
    FOLDER: FILES
    + """\
    found = [file.read_text(encoding=ENCODING) for file in files]
""",
    "table": """\
    found = [row.get(TEXT, "") for row in records(path)]
""",
}


def text_project(
    texts: Texts, facts: TextFacts, source: Source, settings: Settings, limit_s: float | None
) -> dict[str, str]:
    """Return file name → content of the project that learns from documents."""
    classify = bool(facts.classes)
    readers, modules = (LABELLED, ("hashlib", "math", "re")) if classify else (UNLABELLED, ("hashlib",))
    values = {
        **reader(texts.table, *modules),
        "encoding": repr(with_mark(texts.encoding)),
        "delimiter": repr(texts.table.delimiter if texts.table else None),
        "missing": "{" + ", ".join(map(repr, sorted(MISSING))) + "}",
        "text": repr(texts.text or None),
        "target": repr(texts.target or None),
        "documents": readers["table" if texts.table else texts.form].rstrip("\n"),
        "vocabulary": repr(settings.vocabulary),
        "length": repr(settings.length),
        "in_order": repr(settings.layers > 0),
        "width": repr(settings.width),
        "layers": repr(settings.layers),
        "dropout": repr(settings.dropout),
        "weight_decay": "0.01" if settings.layers or settings.width else "0.0",
        "penalty": f"{settings.penalty:.4g}",
        "scoring": repr(scoring(facts)) if classify else "'bits_per_byte'",
    }
    return project_files("text" if classify else "language", values, settings, source, facts, limit_s)
