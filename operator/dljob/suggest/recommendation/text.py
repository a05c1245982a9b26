"""Choose a model for documents, and its settings. Constants name the reason or the measurement behind them."""

from math import ceil

from dljob.suggest.inspection.text import TextFacts
from dljob.suggest.recommendation.model import FLOPS_PER_WEIGHT, Baseline, Settings, evaluation, power_of_two

MAX_WORDS = 20_000
"""Vocabulary of a classifier. Rarer words are in too few documents to learn from."""
MAX_BAG, MAX_IN_ORDER = 256, 128
"""Words that a model reads of a document: each once, and in their order."""
LARGE_DOCUMENTS = 20_000
"""Documents from which embeddings are recommended. Chosen, not measured: with fewer, a linear model is as good."""
MIN_STEPS, MAX_EPOCHS = 600, 60
POSITIONS = 128
BYTE_PASSES = 5_000_000
"""Bytes that a language model reads in its training. Chosen, not measured: minutes on a few CPUs."""
MAX_HELD_OUT = 100_000
"""As in the written data.py: characters of the test part at most."""
SMALL_NBYTES, LARGE_NBYTES = 300_000, 5_000_000
"""Bytes of text up to which the smallest, and from which the largest language model is recommended."""


def text_models(facts: TextFacts, baseline: Baseline | None) -> list[Settings]:
    """Return the recommended classifier of documents, then two alternatives."""
    strength = baseline.strength if baseline else 0.1
    large = facts.documents >= LARGE_DOCUMENTS
    why = f"{'with' if large else 'there are'} {facts.documents:,} documents"
    linear = _bag(facts, "linear model of words (TF-IDF)", f"{why}, too few for embeddings to pay", 0, strength)
    bag = _bag(facts, "bag of word embeddings of 64", f"{why}, words can get a meaning beside their class", 64, 0.0)
    ordered = _transformer(facts, "Transformer of 2 layers of 64", "it reads words in their order", 64, 2)
    return [bag, linear, ordered] if large else [linear, bag, ordered]


def _train(facts: TextFacts) -> int:
    return facts.documents if facts.test_documents else round(0.8 * facts.documents)


def _words(facts: TextFacts) -> int:
    return min(MAX_WORDS, max(facts.frequent, 1))


def _length(facts: TextFacts, most: int) -> int:
    return max(8, min(most, facts.long_words))


def _bag(facts: TextFacts, name: str, why: str, width: int, strength: float) -> Settings:
    train, words, length = _train(facts), _words(facts), _length(facts, MAX_BAG)
    classes = len(facts.classes)
    batch = power_of_two(train / 16, 16, 128)
    own = (words + 2) * (width or classes) + (width or classes)
    head = width * classes + classes if width else 0
    return Settings(
        name=name,
        why=why,
        parameters=own + head,
        flops_per_sample=FLOPS_PER_WEIGHT * (length * (width or classes) + head),
        activation_nbytes=4 * (3 * length + 4 * (width or classes)),
        loss="cross-entropy",
        batch=batch,
        batch_range=(max(16, batch // 2), min(4 * batch, max(batch, train))),
        epochs=_epochs(train, batch),
        learning_rate=0.01 if width else 0.1,
        width=width,
        dropout=0.5 if width else 0.0,
        penalty=0.0 if width else strength / train / 2,
        class_weights=facts.rare,
        evaluation=evaluation(facts.test_documents, train),
        vocabulary=words,
        length=length,
    )


def _transformer(facts: TextFacts, name: str, why: str, width: int, layers: int) -> Settings:
    train, words, length = _train(facts), _words(facts), _length(facts, MAX_IN_ORDER)
    batch = power_of_two(train / 16, 16, 64)
    body = 12 * width * width * layers
    return Settings(
        name=name,
        why=why,
        parameters=(words + 2 + length) * width + body + 15 * width * layers + (width + 1) * len(facts.classes),
        flops_per_sample=length * (FLOPS_PER_WEIGHT * body + 12 * layers * length * width),
        activation_nbytes=4 * length * (18 * width + 8 * length) * layers,
        loss="cross-entropy",
        batch=batch,
        batch_range=(max(16, batch // 2), min(4 * batch, max(batch, train))),
        epochs=max(3, _epochs(train, batch) // 2),
        learning_rate=0.002,
        width=width,
        layers=layers,
        dropout=0.2,
        class_weights=facts.rare,
        evaluation=evaluation(facts.test_documents, train),
        vocabulary=words,
        length=length,
    )


def _epochs(train: int, batch: int) -> int:
    return min(MAX_EPOCHS, max(5, ceil(MIN_STEPS / ceil(train / batch))))


def language_models(facts: TextFacts) -> list[Settings]:
    """Return the recommended language model, then two alternatives."""
    small = _gpt(facts, "GPT of 2 layers of 64", "the text is short", 64, 2)
    middle = _gpt(facts, "GPT of 3 layers of 128", "the text has some millions of bytes at most", 128, 3)
    large = _gpt(facts, "GPT of 6 layers of 256", "the text is long", 256, 6)
    if facts.nbytes <= SMALL_NBYTES:
        return [small, middle, large]
    return [middle, small, large] if facts.nbytes < LARGE_NBYTES else [large, middle, small]


def language_sequences(facts: TextFacts) -> int:
    """Return the number of sequences with which the language model is trained."""
    train = facts.nbytes if facts.test_documents else facts.nbytes - min(0.1 * facts.nbytes, MAX_HELD_OUT)
    return max(1, int(train) // POSITIONS)


def _gpt(facts: TextFacts, name: str, why: str, width: int, layers: int) -> Settings:
    sequences = language_sequences(facts)
    batch = power_of_two(sequences / 256, 8, 32)
    body = 12 * width * width * layers
    return Settings(
        name=name,
        why=f"{why} ({facts.nbytes:,})",
        parameters=(256 + POSITIONS) * width + 256 * 256 + body + 13 * width * layers + 2 * width,
        flops_per_sample=POSITIONS * (FLOPS_PER_WEIGHT * (body + 256 * width) + 12 * layers * POSITIONS * width),
        activation_nbytes=4 * POSITIONS * (18 * width * layers + 3 * 256),
        loss="cross-entropy of the next byte",
        batch=batch,
        batch_range=(max(8, batch // 2), 4 * batch),
        epochs=max(1, min(40, round(BYTE_PASSES / POSITIONS / sequences))),
        learning_rate=0.003 if width <= 128 else 0.001,
        width=width,
        layers=layers,
        dropout=0.1,
        length=POSITIONS,
        evaluation=evaluation(facts.test_nbytes, facts.nbytes),
    )
