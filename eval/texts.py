"""Texts to read: essays from a file, or generated ones, and words to make more of."""

from __future__ import annotations

import json
import random
import re
from functools import cache
from pathlib import Path


FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."

ADJECTIVES = (
    "able agile airy amber ample arid azure bitter blank bold brave brisk broad calm candid chilly civil clever coarse "
    "cosmic crisp curly damp daring dense dim distant dusty eager early elegant empty faint famous fancy fierce flat "
    "fluffy fond formal fresh frosty gentle giant glossy golden grand gray hardy hasty hazy hollow honest humble icy "
    "idle jolly keen kind large late lively local lofty loyal lucky mellow mild misty modest narrow neat nimble noble "
    "odd olive pale patient plain polite proud quick quiet rapid rare remote robust rough royal rural rustic salty "
    "scarce sharp shiny silent silver simple sleek slow smooth sober solid sour spare stark steady steep stern sturdy "
    "subtle sunny sweet swift tame tender thick timid tiny tough urban vague vast vivid warm wary weary wild wise witty"
).split()
NOUNS = (
    "acorn alley anchor apple arrow badge bakery barrel basin basket beacon bench berry blanket bottle bridge bucket "
    "cabin candle canoe canyon carpet castle cedar cellar chapel cherry circus cliff clock cloud comet compass copper "
    "coral cottage cradle cricket crystal curtain desert dragon drawer eagle engine falcon feather fence ferry fiddle "
    "forest fountain galaxy garden garlic glacier goblet granite guitar hammer harbor harvest helmet hermit hill honey "
    "island ivory jacket jungle juniper kettle kitten ladder lagoon lantern lemon library lighthouse lizard magnet "
    "mango maple marble meadow meteor mirror mitten monkey mosaic mountain museum napkin needle nickel oasis ocean "
    "octopus orchard orchid otter oven owl paddle panda parcel parrot pebble pencil pepper piano pigeon pillow planet "
    "plaza pocket pond prairie pumpkin quarry quartz rabbit raven ribbon river rocket saddle sailor salmon scarf "
    "shadow shelter signal spider spoon statue stone summit tablet teapot temple thunder ticket tiger timber tractor "
    "trumpet tulip tunnel turtle umbrella valley velvet violin volcano wagon walnut whistle willow window yogurt"
).split()


@cache
def read(path: Path | None) -> str:
    """The text of the essays in a JSON file `{"text": ...}`, or generated prose.

    Raises:
        ValueError: If the file is not of that kind.
    """
    if path is not None:
        try:
            held = json.loads(path.read_text())["text"]
        except (KeyError, TypeError, ValueError):
            held = None
        if not isinstance(held, str) or not held.strip():
            raise ValueError(f'{path} is not a JSON file of essays, {{"text": "..."}}')
        return held
    rng = random.Random(0)
    words = ADJECTIVES + NOUNS + 8 * "the a of and to in it was that had with as for on by at from".split()
    sentences = (" ".join(rng.choice(words) for _ in range(rng.randint(6, 14))).capitalize() for _ in range(20_000))
    return ". ".join(sentences) + "."


@cache
def words(path: Path | None) -> list[str]:
    """The words of the essays, in order."""
    return read(path).split()


def run(path: Path | None, start: int, count: int) -> list[str]:
    """So many words from the one at `start` on, and after the last one from the first."""
    known = words(path)
    found = known[start : start + count]
    while len(found) < count:
        found += known[: count - len(found)]
    return found


@cache
def vocabulary(path: Path | None) -> list[str]:
    """The different words of the essays that have four letters or more."""
    return sorted({word for word in words(path) if re.fullmatch("[a-z]{4,}", word)})


def essays(path: Path | None, start: int, characters: int) -> str:
    """A run of the essays that begins at a sentence.

    Raises:
        ValueError: If no sentence begins after `start`.
    """
    text = read(path)
    begin = text.find(". ", start) + 2
    if begin == 1:
        raise ValueError(f"{path} has no sentence that begins after {start:,} characters; use a longer text")
    return text[begin : begin + characters]


def sentences(text: str) -> list[str]:
    """The sentences of a text."""
    return re.split(r"(?<=[.!?])\s+", text)
