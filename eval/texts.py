"""Texts to read: essays from a file, or generated filler, with a needle put in."""

from __future__ import annotations

import json
import random
from pathlib import Path


FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
TOPICS = (
    "amber harbor lantern meadow cedar falcon granite violet copper willow thunder marble canyon orchid beacon saddle "
    "timber velvet walnut glacier anchor compass harvest juniper kettle lagoon mosaic nectar opal pepper quartz raven"
).split()


def essays(path: Path | None, start: int, characters: int) -> str:
    """A run of prose that begins at a sentence: from the essays in a JSON file `{"text": ...}`, or generated."""
    if path is None:
        rng = random.Random(start)
        words = TOPICS + "the a of and to in it was that had with as for on by at from".split()
        sentences: list[str] = []
        while sum(map(len, sentences)) < characters:
            sentences.append(" ".join(rng.choice(words) for _ in range(rng.randint(6, 14))).capitalize() + ". ")
        return "".join(sentences)[:characters]
    text = json.loads(path.read_text())["text"]
    begin = text.index(". ", start) + 2
    return text[begin : begin + characters]


def filler(characters: int) -> str:
    """The same few sentences over and over."""
    return (FILLER * (characters // len(FILLER) + 1))[:characters]


def with_needle(haystack: str, topic: str, number: int, depth: float) -> str:
    """The haystack with a needle after the sentence at `depth`, 0 to 1."""
    at = haystack.index(". ", int(depth * (len(haystack) - 200))) + 2
    return f"{haystack[:at]}One of the special magic numbers for {topic} is: {number}. {haystack[at:]}"


def prompt(haystack: str, topic: str) -> str:
    """The question about a haystack, in words that RULER's needle task made common."""
    return (
        "Some special magic numbers are hidden within the following text. Make sure to memorize it. I will quiz you "
        f"about the numbers afterwards.\n{haystack}\n"
        f"What is the special magic number for {topic} mentioned in the provided text?"
    )


def answer_prefix(topic: str) -> str:
    """How the answer begins, so that a small model gives the number next."""
    return f"The special magic number for {topic} mentioned in the provided text is"
