"""Inspect documents: lengths, vocabulary, scripts, classes, duplicates within and between the parts."""

import re
import unicodedata
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from dljob.suggest.errors import DataError
from dljob.suggest.inspection.columns import MISSING
from dljob.suggest.inspection.target import MAX_CLASSES, RARE, single_findings
from dljob.suggest.reading.text import Texts
from dljob.suggest.wording import counted

WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|\w+|[^\w\s]")
"""As TOKEN in the written data.py: each CJK character is a word."""
MIN_DOCUMENTS = 10
MIN_NBYTES = 10_000
"""Bytes of text from which a language model is possible: 80 sequences of 128 bytes."""
MIN_TEST_NBYTES = 1000
"""Bytes of a separate test part of a language model: 7 sequences. Without one, a tenth of MIN_NBYTES is held out."""
INSPECTED_NBYTES = 20_000_000
"""Vocabulary, lengths and scripts come from this much text, so that the inspection takes seconds."""
MIN_LINES = 50
"""If a text has more lines than this for each different one, it only repeats itself."""
MIN_COMPRESSED = 0.02
"""If a text compresses to a smaller part than this, it only repeats itself. Logs of machines compress to some 5 %."""
LONG_LINE = 40
"""Lines from this length on are unlikely to repeat by chance."""
MOJIBAKE = re.compile("[ÃÂ][\u0080-\u00bf]|â€")
"""UTF-8 that was read as Windows-1252 or Latin-1."""


@dataclass(frozen=True)
class TextFacts:
    """What documents hold. ``classes``: class → number of documents; empty for a language model."""

    documents: int
    test_documents: int
    """Number of documents of a separate test part that do not repeat training documents; 0 without one."""
    nbytes: int
    """Bytes of all documents in UTF-8."""
    words: int
    vocabulary: int
    """Number of distinct words."""
    frequent: int
    """Number of words in at least two documents."""
    median_words: int
    long_words: int
    """Words of a document that 95 % do not exceed."""
    scripts: dict[str, float]
    """Script, such as LATIN → its part of the letters, most frequent first."""
    classes: dict[str, int]
    findings: tuple[str, ...]
    test_nbytes: int = 0
    """Bytes of the test documents in UTF-8."""

    @property
    def rare(self) -> bool:
        """Return True if a class is so rare that accuracy says little about it."""
        return bool(self.classes) and min(self.classes.values()) < RARE * self.documents / len(self.classes)


def inspect_texts(texts: Texts, test: Texts | None = None) -> TextFacts:
    """Return the facts about documents. ``test``: a separate test part. Raise DataError if no model can be trained."""
    findings = list(texts.notes)
    classes = dict(Counter(texts.labels).most_common())
    if classes:
        findings += _of_classes(texts, classes)
    nbytes = sum(len(document.encode("utf-8", "replace")) for document in texts.documents)
    if not classes and nbytes < MIN_NBYTES:
        raise DataError(
            f"{texts.path}: found {nbytes:,} bytes of text; expected at least {MIN_NBYTES:,} for a language model. Add "
            "text."
        )
    if classes and test is None and len({*zip(texts.documents, texts.labels, strict=True)}) < 2 * len(classes):
        raise DataError(
            f"{texts.path}: found {len(set(texts.documents))} different documents of {len(classes)} classes; expected "
            "at least two for each class on average. Merge classes, or add documents."
        )
    sample = _sample(texts.documents)
    lengths: list[int] = []
    counts: Counter[str] = Counter()
    for document in sample:
        own = WORD.findall(document.lower())
        lengths.append(len(own))
        counts.update(set(own))
    lengths.sort()
    scripts = _scripts(sample)
    findings += _of_characters(texts, sample)
    if classes:
        findings += _duplicates(texts)
    else:
        _check_repeats(texts.path, sample)
        findings += _repeated_lines(texts.path, sample)
    test_documents = test_nbytes = 0
    if test is not None:
        test_documents, test_nbytes, found = _of_test(texts, test)
        findings += found
    facts = TextFacts(
        documents=len(texts.documents),
        test_documents=test_documents,
        nbytes=nbytes,
        words=sum(lengths),
        vocabulary=len(counts),
        frequent=sum(count > 1 for count in counts.values()),
        median_words=int(median(lengths)),
        long_words=lengths[int(0.95 * (len(lengths) - 1))],
        scripts=scripts,
        classes=classes,
        findings=tuple(findings),
        test_nbytes=test_nbytes,
    )
    if classes and not facts.words:
        raise DataError(f"{texts.path}: found no word in the documents; expected text. Choose another --text.")
    return facts


def _sample(documents: Sequence[str]) -> list[str]:
    """Return documents from all places of the data, of INSPECTED_NBYTES at most."""
    total = sum(map(len, documents))
    if total <= INSPECTED_NBYTES:
        return list(documents)
    if len(documents) < MIN_DOCUMENTS:
        return [document[: INSPECTED_NBYTES // len(documents)] for document in documents]
    return list(documents[:: -(-total // INSPECTED_NBYTES)])


def _of_classes(texts: Texts, classes: dict[str, int]) -> list[str]:
    count = len(texts.documents)
    if count < MIN_DOCUMENTS:
        raise DataError(
            f"{texts.path}: found {count} documents with a class; expected at least {MIN_DOCUMENTS}. Add documents."
        )
    if len(classes) < 2:
        raise DataError(
            f"{texts.path}: found the class {texts.labels[0]!r:.60} only; expected at least two classes. Add documents "
            "of another class, choose another --target, or pass --task language-modelling."
        )
    if len(classes) > MAX_CLASSES or len(classes) > count / 2:
        raise DataError(
            f"{texts.path}: found {len(classes):,} classes in {count:,} documents; expected at most {MAX_CLASSES:,}, "
            "with at least two documents each on average. Merge rare classes, or choose another --target."
        )
    rarest = min(classes, key=lambda name: classes[name])
    found = []
    if classes[rarest] < RARE * count / len(classes):
        found.append(
            f"Class {rarest!r} is rare: {classes[rarest]} of {count:,} documents ({classes[rarest] / count:.1%}). "
            "Classes are weighted, and balanced accuracy is the measure."
        )
    found += single_findings(classes, "document")
    told = sum(
        label.lower() in WORD.findall(document.lower())
        for document, label in zip(texts.documents, texts.labels, strict=True)
    )
    if told > 0.9 * count:
        found.append(
            f"{told:,} of {count:,} documents contain the name of their class as a word (a leak?). Remove it from the "
            "texts if new documents will not have it."
        )
    return found


def _scripts(sample: Sequence[str], letters: int = 20_000) -> dict[str, float]:
    """Return the scripts of the letters, from evenly spaced characters of the text."""
    step = max(1, sum(map(len, sample)) // letters)
    counts: Counter[str] = Counter()
    for document in sample:
        for character in document[::step]:
            if character.isalpha():
                counts[unicodedata.name(character, "UNKNOWN").partition(" ")[0]] += 1
    total = counts.total() or 1
    return {name: count / total for name, count in counts.most_common(5)}


def _of_characters(texts: Texts, sample: Sequence[str]) -> list[str]:
    found = []
    lost = sum(document.count("\ufffd") for document in sample)
    if lost:
        characters = counted(lost, "replacement character", "replacement characters")
        found.append(f"The text has {characters} (U+FFFD), in the place of what an earlier step lost.")
    broken = [i for i, document in enumerate(texts.documents) if MOJIBAKE.search(document)]
    if broken:
        found.append(
            f"{counted(len(broken), 'document looks', 'documents look')} like UTF-8 read in another encoding, first "
            f"{texts.places[broken[0]]}. Convert the text if accents look wrong."
        )
    words = [word for document in sample[:1000] for word in document[:10_000].split()]
    if words and sum(map(len, words)) / len(words) > 30:
        found.append("The text has hardly any blanks between words. Models of words will learn little from it.")
    return found


def _duplicates(texts: Texts) -> list[str]:
    found = []
    labels: dict[str, str] = {}
    conflicts = 0
    for document, label in zip(texts.documents, texts.labels, strict=True):
        conflicts += labels.setdefault(document, label) != label
    if repeated := len(texts.documents) - len(labels):
        words = counted(repeated, "document repeats another", "documents repeat others")
        found.append(f"{words}. Equal documents stay in one part, training or test.")
    if conflicts:
        words = counted(conflicts, "document is in two classes", "documents are in two classes")
        found.append(f"{words}. At most one of the two can be right.")
    return found


def _check_repeats(path: Path, sample: Sequence[str]) -> None:
    """Raise DataError if a short piece of text is repeated all the time, in one line or in many."""
    text = "".join(sample).encode("utf-8", "replace")
    nbytes = len(zlib.compress(text, level=1))
    if nbytes < MIN_COMPRESSED * len(text):
        raise DataError(
            f"{path}: found {len(text):,} bytes of text that compress to {nbytes:,}; expected text that does not "
            "repeat itself. A language model would have nothing to learn, and no other text to be judged by."
        )


def _repeated_lines(path: Path, sample: Sequence[str]) -> list[str]:
    lines = [line for document in sample for line in document.splitlines() if len(line) >= LONG_LINE]
    repeated = len(lines) - len(set(lines))
    if len(lines) >= MIN_LINES and len(set(lines)) * MIN_LINES < len(lines):
        raise DataError(
            f"{path}: found {len(set(lines))} different lines among {len(lines):,}; expected text that does not repeat "
            "itself. A language model would have nothing to learn, and no other text to be judged by."
        )
    if not lines or repeated < 0.05 * len(lines):
        return []
    return [
        f"{repeated:,} of {len(lines):,} lines of {LONG_LINE} characters or more repeat other lines. The test part "
        "will share lines with the training part, and look easier than new text."
    ]


def _of_test(texts: Texts, test: Texts) -> tuple[int, int, list[str]]:
    """Return the number of usable test documents, their bytes, and findings."""
    seen = set(texts.documents)
    usable = [document for document in test.documents if document not in MISSING]
    fresh = sum(document not in seen for document in usable)
    if not fresh:
        raise DataError(
            f"{test.path}: found {len(usable)} documents, all of which repeat documents of {texts.path}; expected "
            "documents that the model has not seen. Leave out the test part to hold some of the others out."
        )
    nbytes = sum(len(document.encode("utf-8", "replace")) for document in usable if document not in seen)
    if not test.labels and nbytes < MIN_TEST_NBYTES:
        raise DataError(
            f"{test.path}: found {nbytes:,} bytes of text that is not in {texts.path}; expected at least "
            f"{MIN_TEST_NBYTES:,}, by which a language model can be judged. Add text."
        )
    if unknown := sorted(set(test.labels) - set(texts.labels)):
        raise DataError(f"{test.path}: found the class {unknown[0]!r:.60}; expected the classes of {texts.path}.")
    if repeated := len(usable) - fresh:
        words = counted(repeated, "test document repeats", "test documents repeat")
        return fresh, nbytes, [f"{words} training documents. The evaluation leaves such documents out."]
    return fresh, nbytes, []
