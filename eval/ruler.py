"""The thirteen tasks of RULER (Hsieh et al., COLM 2024, arXiv 2404.06654), made here, without any data set but texts.

Tasks, numbers of things and wording of the questions are the benchmark's, so that scores compare; the samples are
made by this file. No prompt ends in a space, after which many tokenizers have no word; an essay begins anywhere. A
prompt is as long as its length allows. Every sample depends on its task, length, number and the seed alone.
"""

from __future__ import annotations

import json
import math
import random
import string
import uuid
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import NamedTuple

from eval import texts
from eval.tasks import Reader, Sample, Task, contained, contains_any, largest


@dataclass(frozen=True)
class Sources:
    """Where texts come from.

    Attributes:
        essays: JSON file `{"text": ...}`; None where there is none.
        questions: Folder with `squad.json` and `hotpotqa.json`; None where there is none.
    """

    essays: Path | None = None
    questions: Path | None = None


class Question(NamedTuple):
    """What a task asks: the question, how its answer begins, and what answers it."""

    text: str
    prefix: str
    answers: list[str]


class RulerTask(Task):
    """A task whose prompts are made of as many units as there is room for.

    Args:
        name: What it is called.
        length: Tokens of a prompt and its answer.
        reader: Turns them into tokens.
        sources: Where texts come from.
        seed: Other samples for every other one.
    """

    smallest = 5
    """The fewest units that make sense."""

    def __init__(self, name: str, length: int, reader: Reader, sources: Sources, seed: int = 0):
        self.name, self.length, self.reader, self.sources, self.seed = name, length, reader, sources, seed

    @abstractmethod
    def make(self, rng: random.Random, index: int, size: int) -> Question:
        """The prompt of a number with `size` units."""

    def sample(self, index: int) -> Sample:
        def made(size: int) -> Sample:
            rng = random.Random(f"{self.seed} {self.name} {self.length} {self.depth} {index}")
            asked = self.make(rng, index, size)
            return Sample(self.reader.encode(asked.text, asked.prefix), asked.answers)

        try:
            size = largest(lambda size: len(made(size).ids), self.length - self.new_tokens, self.smallest)
        except ValueError as error:
            raise ValueError(f"{self.name} at {self.length} tokens: {error}") from error
        return made(size)

    def score(self, answer: str, sample: Sample) -> float:
        return contained(answer, sample.answers)


def number(rng: random.Random) -> str:
    return str(rng.randint(1_000_000, 9_999_999))


def word(rng: random.Random) -> str:
    return f"{rng.choice(texts.ADJECTIVES)}-{rng.choice(texts.NOUNS)}"


def identifier(rng: random.Random) -> str:
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def distinct(make: Callable[[random.Random], str], rng: random.Random, wanted: int, taken: set[str]) -> list[str]:
    """So many different ones, that are then taken too."""
    found: list[str] = []
    while len(found) < wanted:
        made = make(rng)
        if made not in taken:
            taken.add(made)
            found.append(made)
    return found


KINDS: dict[str, Callable[[random.Random], str]] = {"words": word, "numbers": number, "uuids": identifier}


class Needles(RulerTask):
    """Values that are to be found by their keys.

    Args:
        haystack: `"noise"` (the same sentences over and over), `"essay"`, or `"needle"` (others like the needles).
        keys, values: What they are, of `KINDS`.
        num_keys, num_values, num_queries: Keys hidden, values of each, and keys asked for.
    """

    new_tokens = 128

    def __init__(
        self,
        *args,
        haystack: str = "essay",
        keys: str = "words",
        values: str = "numbers",
        num_keys: int = 1,
        num_values: int = 1,
        num_queries: int = 1,
    ):
        super().__init__(*args)
        self.haystack, self.keys, self.values = haystack, keys, values
        self.num_keys, self.num_values, self.num_queries = max(num_keys, num_queries), num_values, num_queries
        self.smallest = 40 if haystack == "essay" else max(5, self.num_keys * num_values)

    def depths(self, rng: random.Random, count: int) -> list[float]:
        """Where the needles go, ascending, 0 to 1: at some of forty places."""
        return sorted(place / 39 for place in rng.sample(range(40), count))

    def needle(self, key: str, value: str) -> str:
        return f"One of the special magic {self.values} for {key} is: {value}."

    def context(self, rng: random.Random, size: int, needles: list[str], taken: set[str]) -> str:
        """The haystack with the needles in it."""
        if self.haystack == "essay":
            essays = self.sources.essays
            start = rng.randrange(len(texts.words(essays)))
            hay, gap = texts.sentences(" ".join(texts.run(essays, start, size))), " "
        elif self.haystack == "noise":
            hay, gap = [texts.FILLER] * size, "\n"
        else:
            # No other needle has a key that is asked for.
            free = (key for key in (KINDS[self.keys](rng) for _ in count()) if key not in taken)
            hay = [self.needle(next(free), KINDS[self.values](rng)) for _ in range(size)]
            gap = "\n"
        places = [int(depth * len(hay)) for depth in self.depths(rng, len(needles))]
        for place, needle in sorted(zip(places, needles, strict=True), key=lambda pair: -pair[0]):
            hay.insert(place, needle)
        return gap.join(hay)

    def make(self, rng: random.Random, index: int, size: int) -> Question:
        taken: set[str] = set()
        keys = distinct(KINDS[self.keys], rng, self.num_keys, taken)
        found = {key: distinct(KINDS[self.values], rng, self.num_values, taken) for key in keys}
        asked = rng.sample(keys, self.num_queries)
        needles = [self.needle(key, value) for key, values in found.items() for value in values]
        rng.shuffle(needles)
        context = self.context(rng, size, needles, taken)
        query = asked[0] if len(asked) == 1 else f"{', '.join(asked[:-1])}, and {asked[-1]}"
        answers = [value for key in asked for value in found[key]]
        if len(answers) == 1:
            kind, some, hidden, what = self.values[:-1], "A", "is", "is"
        else:
            kind, some, hidden, what = self.values, "Some", "are", "are all"
        text = (
            f"{some} special magic {kind} {hidden} hidden within the following text. Make sure to memorize it. I will "
            f"quiz you about the {kind} afterwards.\n{context}\n"
            f"What {what} the special magic {kind} for {query} mentioned in the provided text?"
        )
        prefix = f"The special magic {kind} for {query} mentioned in the provided text {hidden}"
        return Question(text, prefix, answers)


class VariableTracking(RulerTask):
    """A chain of variables, each assigned the one before, of which all are to be named."""

    new_tokens = 30
    hops = 4

    def assignments(self, rng: random.Random, size: int, letters: int) -> Question:
        def name(rng: random.Random) -> str:
            return "".join(rng.choices(string.ascii_uppercase, k=letters))

        names, value = distinct(name, rng, self.hops + 1, set()), str(rng.randint(10_000, 99_999))
        chain = [
            f"VAR {name} = {before}" for name, before in zip(names, [value, *(f"VAR {n}" for n in names)], strict=False)
        ]
        hay = [texts.FILLER] * size
        places = sorted(rng.sample(range(size), len(chain)), reverse=True)
        for place, link in zip(places, reversed(chain), strict=True):
            hay.insert(place, link)
        context = "\n".join(hay)
        text = (
            "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
            f"{context}\nQuestion: Find all variables that are assigned the value {value} in the text above."
        )
        prefix = (
            f"Answer: According to the chain(s) of variable assignment in the text above, {len(names)} variables are "
            f"assigned the value {value}, they are:"
        )
        return Question(text, prefix, names)

    def make(self, rng: random.Random, index: int, size: int) -> Question:
        # The example before the question is of some 500 tokens.
        shown = self.assignments(rng, 10, letters=3)
        asked = self.assignments(rng, size, letters=5)
        example = f"{shown.text} {shown.prefix}{' '.join(shown.answers)}\n\n"
        return Question(example + asked.text, asked.prefix, asked.answers)


class CommonWords(RulerTask):
    """A list of words, of which ten are there more often."""

    new_tokens = 120
    smallest = 20
    common = 10

    def listed(self, rng: random.Random, size: int, often: int, seldom: int) -> Question:
        known = texts.vocabulary(self.sources.essays)
        words = rng.sample(known, min(size, len(known)))
        answers, others = words[: self.common], words[self.common :]
        every = answers * often + others * seldom
        rng.shuffle(every)
        context = " ".join(f"{place}. {word}" for place, word in enumerate(every, 1))
        text = (
            "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones "
            f"that appear most often.\n{context}\n"
            f"Question: What are the {self.common} most common words in the above list?"
        )
        prefix = f"Answer: The top {self.common} words that appear most often in the list are:"
        return Question(text, prefix, answers)

    def make(self, rng: random.Random, index: int, size: int) -> Question:
        short = self.length < 4096
        shown = self.listed(rng, *((20, 3, 1) if short else (40, 10, 3)))
        asked = self.listed(rng, size, *((6, 1) if short else (30, 3)))
        said = " ".join(f"{place}. {word}" for place, word in enumerate(shown.answers, 1))
        return Question(f"{shown.text} {shown.prefix} {said}\n{asked.text}", asked.prefix, asked.answers)


class FrequentWords(RulerTask):
    """Coded words, as often as a zeta distribution of exponent 2 has it, of which the three most frequent are asked
    for. The most frequent of all are dots, to be left out."""

    new_tokens = 50
    smallest = 100

    def make(self, rng: random.Random, index: int, size: int) -> Question:
        def coded(rng: random.Random) -> str:
            return "".join(rng.choices(string.ascii_lowercase, k=6))

        ranked = ["...", *distinct(coded, rng, max((self.length - self.new_tokens) // 50, 4) - 1, set())]
        zeta = math.pi**2 / 6
        every = [word for rank, word in enumerate(ranked, 1) for _ in range(int(size / rank**2 / zeta))]
        rng.shuffle(every)
        text = (
            "Read the following coded text and track the frequency of each coded word. Find the three most frequently "
            f"appeared coded words. {' '.join(every)}\nQuestion: Do not provide any explanation. Please ignore the "
            "dots '....'. What are the three most frequently appeared words in the above coded text?"
        )
        prefix = "Answer: According to the coded text above, the three most frequently appeared words are:"
        return Question(text, prefix, ranked[1:4])


class Asked(NamedTuple):
    """A question about documents, by their numbers: those that answer it, and others of the same article."""

    text: str
    answers: list[str]
    documents: list[int]
    related: list[int]


@cache
def squad(path: Path) -> tuple[list[Asked], list[str]]:
    """Questions and documents of a file of SQuAD 2.0; those without an answer are left out."""
    articles = [article["paragraphs"] for article in json.loads(path.read_text())["data"]]
    documents = sorted({paragraph["context"] for article in articles for paragraph in article})
    place = {document: at for at, document in enumerate(documents)}
    found = []
    for article in articles:
        for paragraph in article:
            own = place[paragraph["context"]]
            related = [place[other["context"]] for other in article if place[other["context"]] != own]
            for asked in paragraph["qas"]:
                if not asked["is_impossible"]:
                    answers = [answer["text"] for answer in asked["answers"]]
                    found.append(Asked(asked["question"], answers, [own], related))
    return found, documents


@cache
def hotpotqa(path: Path) -> tuple[list[Asked], list[str]]:
    """Questions and documents of a file of HotpotQA."""
    entries = [
        (entry, [f"{title}\n{''.join(lines)}" for title, lines in entry["context"]])
        for entry in json.loads(path.read_text())
    ]
    documents = sorted({document for _, held in entries for document in held})
    place = {document: at for at, document in enumerate(documents)}
    return [
        Asked(entry["question"], [entry["answer"]], list(dict.fromkeys(place[d] for d in held)), [])
        for entry, held in entries
    ], documents


QUESTIONS = {
    "qa_1": ("squad.json", squad, "https://rajpurkar.github.io/SQuAD-explorer/dataset/dev-v2.0.json"),
    "qa_2": ("hotpotqa.json", hotpotqa, "http://curtis.ml.cmu.edu/datasets/hotpot/hotpot_dev_distractor_v1.json"),
}


class DocumentQuestions(RulerTask):
    """A question about one of many documents."""

    new_tokens = 32

    def __init__(self, *args):
        super().__init__(*args)
        file, load, address = QUESTIONS[self.name]
        assert self.sources.questions is not None
        path = self.sources.questions / file
        try:
            self.asked, self.documents = load(path)
        except (AttributeError, KeyError, TypeError, ValueError):
            self.asked = []
        if not self.asked:
            raise ValueError(f"{path} holds no questions as {address} does; fetch that")
        self.available = len(self.asked)

    def make(self, rng: random.Random, index: int, size: int) -> Question:
        asked = self.asked[index]
        first = asked.documents + rng.sample(asked.related, len(asked.related))
        others = [at for at in range(len(self.documents)) if at not in set(first)]
        others = rng.sample(others, len(others))
        chosen = [self.documents[at] for at in (first + others)[: max(size, len(asked.documents))]]
        rng.shuffle(chosen)
        context = "\n\n".join(f"Document {place}:\n{document}" for place, document in enumerate(chosen, 1))
        order = (
            "Answer the question based on the given documents. Only give me the answer and do not output any other "
            "words."
        )
        text = f"{order}\n\nThe following are given documents.\n\n{context}\n\n{order}\n\nQuestion: {asked.text}"
        return Question(text, "Answer:", asked.answers)

    def score(self, answer: str, sample: Sample) -> float:
        return contains_any(answer, sample.answers)


TASKS: dict[str, Callable[..., RulerTask]] = {
    "niah_single_1": partial(Needles, haystack="noise"),
    "niah_single_2": Needles,
    "niah_single_3": partial(Needles, values="uuids"),
    "niah_multikey_1": partial(Needles, num_keys=4),
    "niah_multikey_2": partial(Needles, haystack="needle"),
    "niah_multikey_3": partial(Needles, haystack="needle", keys="uuids", values="uuids"),
    "niah_multivalue": partial(Needles, num_values=4),
    "niah_multiquery": partial(Needles, num_queries=4),
    "vt": VariableTracking,
    "cwe": CommonWords,
    "fwe": FrequentWords,
    "qa_1": DocumentQuestions,
    "qa_2": DocumentQuestions,
}
OF_ESSAYS = {"niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multivalue", "niah_multiquery", "cwe"}


def missing(name: str, sources: Sources) -> str | None:
    """What a task needs that is not there, and where it is to be had; None where nothing is missing."""
    if name in OF_ESSAYS and sources.essays is None:
        return (
            f"{name} needs the essays: make `PaulGrahamEssays.json` with RULER's `download_paulgraham_essay.py` "
            '(github.com/NVIDIA/RULER), or any JSON file `{"text": ...}`, and name it by `--essays`'
        )
    if name in QUESTIONS:
        file, _, address = QUESTIONS[name]
        if sources.questions is None or not (sources.questions / file).is_file():
            return f"{name} needs `{file}`: fetch {address}, call it that, and give its folder by `--questions`"
    return None
