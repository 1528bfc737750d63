"""What a model is asked: tasks, which make samples, and how a text becomes the tokens of a prompt."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Sample:
    """One prompt.

    Attributes:
        ids: Its token ids.
        answers: What answers it.
        facts: What else its score depends on.
    """

    ids: list[int]
    answers: list[str]
    facts: dict[str, Any] = field(default_factory=dict)


class Reader:
    """Turns questions into tokens.

    Args:
        tokenizer: The model's.
        chat: Whether a question is put into the tokenizer's chat template. None: if it has one.

    Raises:
        ValueError: If there is to be a chat template and the tokenizer has none.
    """

    def __init__(self, tokenizer: Any, chat: bool | None = None):
        has_template = bool(getattr(tokenizer, "chat_template", None))
        if chat and not has_template:
            raise ValueError("`chat=True`, but the tokenizer has no chat template; leave it out")
        self.tokenizer, self.chat = tokenizer, has_template if chat is None else chat

    def encode(self, question: str, prefix: str = "", chat: bool = True) -> list[int]:
        """Token ids of a question and of how its answer begins.

        Args:
            question: What is asked.
            prefix: Words that are put into the model's mouth.
            chat: False leaves the chat template out, whatever the reader does.
        """
        if not (self.chat and chat):
            return self.tokenizer(f"{question} {prefix}" if prefix else question).input_ids
        messages = [{"role": "user", "content": question}]
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return self.tokenizer(text + prefix, add_special_tokens=False).input_ids


class Task(ABC):
    """A kind of prompt at one length.

    Attributes:
        name: What it is called in the tables.
        length: Tokens of a prompt and its answer, at most.
        new_tokens: Tokens of an answer, at most.
        depth: Where in the prompt the answer is, 0 to 1, for tasks of a grid.
        available: How many samples there are; None for as many as are asked for.
    """

    name: str
    length: int
    new_tokens: int
    depth: float | None = None
    available: int | None = None

    @abstractmethod
    def sample(self, index: int) -> Sample:
        """The sample of that number, always the same."""

    @abstractmethod
    def score(self, answer: str, sample: Sample) -> float:
        """How right an answer is, 0 to 1."""


def largest(tokens: Callable[[int], int], room: int, smallest: int) -> int:
    """About the largest size whose tokens are no more than `room`: what is left is a hundredth of it, or less than one
    unit takes.

    Args:
        tokens: How many tokens a prompt of some size takes, about in proportion to it.
        room: The most that it may take.
        smallest: The smallest size that makes sense.

    Raises:
        ValueError: If that does not fit.
    """
    low, held = smallest, tokens(smallest)
    if held > room:
        raise ValueError(f"the shortest prompt takes {held} tokens, and there is room for {room}; use a greater length")
    # The first guess is by proportion, and too small where the text around is a large part.
    high, above, unit = 0, 0, held / smallest
    for _ in range(16):
        if room - held < room / 100 or high - low == 1:
            break
        if high:
            size = low + max(1, min(high - low - 1, int((high - low) * (room - held) / (above - held))))
        else:
            size = low + max(1, int((room - held) / unit))
        taken = tokens(size)
        if taken <= room:
            if taken > held:
                unit = (taken - held) / (size - low)
            low, held = size, taken
        else:
            high, above = size, taken
    return low


def contained(answer: str, expected: list[str]) -> float:
    """The share of what is expected that an answer contains, in any case of letters."""
    return sum(word.lower() in answer.lower() for word in expected) / len(expected)


def contains_any(answer: str, expected: list[str]) -> float:
    """1 if an answer contains any of what is expected, in any case of letters."""
    return float(any(word.lower() in answer.lower() for word in expected))
