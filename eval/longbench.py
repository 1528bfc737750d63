"""LongBench (Bai et al., ACL 2024, arXiv 2308.14508) from a folder, with its metrics.

`python -m eval.longbench FOLDER` writes a small made-up set in the same format, to try things out with.
"""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import json
import random
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from eval import texts
from eval.tasks import Reader, Sample, Task


def normalize(text: str) -> list[str]:
    """The words of an answer: lower case, no punctuation, no articles."""
    kept = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", kept).split()


def segment(text: str) -> list[str]:
    """The words of a Chinese text."""
    try:
        import jieba
    except ImportError as error:
        raise ModuleNotFoundError("LongBench scores Chinese answers by words: `pip install jieba`") from error
    return list(jieba.cut(text))


def normalize_zh(text: str) -> list[str]:
    """The words of a Chinese answer: lower case, no punctuation, no spaces."""
    marks = (
        string.punctuation
        + "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃》「」『』【】"
    )
    marks += "〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏."
    words = ("".join(letter for letter in word.lower() if letter not in marks).split() for word in segment(text))
    return ["".join(word) for word in words if word]


def f1(answer: list[str], expected: list[str]) -> float:
    """The harmonic mean of precision and recall of words, counted."""
    same = sum((Counter(answer) & Counter(expected)).values())
    return 2 * same / (len(answer) + len(expected)) if same else 0.0


def common_words(expected: Sequence[str], answer: Sequence[str]) -> set[str]:
    """The words of a longest common subsequence."""
    lengths = [[0] * (len(answer) + 1)]
    for word in expected:
        above, row = lengths[-1], [0]
        for column, other in enumerate(answer):
            row.append(above[column] + 1 if word == other else max(above[column + 1], row[-1]))
        lengths.append(row)
    found, i, j = set(), len(expected), len(answer)
    while i and j:
        if expected[i - 1] == answer[j - 1]:
            i, j = i - 1, j - 1
            found.add(expected[i])
        elif lengths[i - 1][j] > lengths[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return found


def rouge_l(answer: str, expected: str) -> float:
    """ROUGE-L of a summary, over different words: the longest common subsequences of every two sentences, united."""

    def split(text: str) -> list[list[str]]:
        return [" ".join(part.split()).split(" ") for part in text.split(".") if part]

    answers, references = split(answer), split(expected)
    if not answers or not references:
        return 0.0
    shared = set().union(*(common_words(r, a) for r in references for a in answers))
    precision, recall = (len(shared) / len(set().union(*part)) for part in (answers, references))
    return 2 * precision * recall / (precision + recall + 1e-8)


def qa_f1(answer: str, expected: str, classes: Sequence[str]) -> float:
    return f1(normalize(answer), normalize(expected))


def qa_f1_zh(answer: str, expected: str, classes: Sequence[str]) -> float:
    return f1(normalize_zh(answer), normalize_zh(expected))


def rouge(answer: str, expected: str, classes: Sequence[str]) -> float:
    return rouge_l(answer, expected)


def rouge_zh(answer: str, expected: str, classes: Sequence[str]) -> float:
    return rouge_l(" ".join(segment(answer)), " ".join(segment(expected)))


def classification(answer: str, expected: str, classes: Sequence[str]) -> float:
    """One over the number of classes named, if the right one is; parts of its name do not count as named."""
    named = [name for name in classes if name in answer and (name == expected or name not in expected)]
    return 1 / len(named) if expected in named else 0.0


def count(answer: str, expected: str, classes: Sequence[str]) -> float:
    """The share of right ones among the numbers named."""
    numbers = re.findall(r"\d+", answer)
    return numbers.count(expected) / len(numbers) if numbers else 0.0


def retrieval(answer: str, expected: str, classes: Sequence[str]) -> float:
    """The same, for a paragraph's number."""
    return count(answer, re.findall(r"\d+", expected)[0], classes)


def code_similarity(answer: str, expected: str, classes: Sequence[str]) -> float:
    """How alike the first line that is neither a comment nor a fence is, in hundredths."""
    lines = answer.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    return round(100 * difflib.SequenceMatcher(None, line, expected).ratio()) / 100


METRICS: dict[str, Callable[[str, str, Sequence[str]], float]] = {
    "narrativeqa": qa_f1,
    "qasper": qa_f1,
    "multifieldqa_en": qa_f1,
    "multifieldqa_zh": qa_f1_zh,
    "hotpotqa": qa_f1,
    "2wikimqa": qa_f1,
    "musique": qa_f1,
    "dureader": rouge_zh,
    "gov_report": rouge,
    "qmsum": rouge,
    "multi_news": rouge,
    "vcsum": rouge_zh,
    "trec": classification,
    "triviaqa": qa_f1,
    "samsum": rouge,
    "lsht": classification,
    "passage_retrieval_en": retrieval,
    "passage_count": count,
    "passage_retrieval_zh": retrieval,
    "lcc": code_similarity,
    "repobench-p": code_similarity,
}
FIRST_LINE = {"trec", "triviaqa", "samsum", "lsht"}
"""Of an answer to these the first line counts."""
WORDS_ZH = (qa_f1_zh, rouge_zh)
"""These need `segment`."""
NO_CHAT = FIRST_LINE | {"lcc", "repobench-p"}
"""These are texts to be continued, whatever the model."""


def find(folder: Path | None, name: str) -> Path:
    """A file of the benchmark's, in a folder or in its `data` or `config`.

    Raises:
        ValueError: If it is not there; the message says where it is to be had.
    """
    if folder is None:
        raise ValueError(
            "LongBench is read from a folder: fetch data.zip of https://huggingface.co/datasets/THUDM/LongBench, and "
            "`dataset2prompt.json` and `dataset2maxlen.json` from LongBench/config of github.com/THUDM/LongBench, and "
            "name the folder that they are in by `--longbench`"
        )
    for place in (folder, folder / "data", folder / "config"):
        if (place / name).is_file():
            return place / name
    source = "data.zip of the data set" if name.endswith(".jsonl") else "LongBench/config of the repository"
    raise ValueError(f"{folder} has no `{name}`; fetch it from {source} (THUDM/LongBench)")


def datasets(folder: Path | None) -> list[str]:
    """The data sets that are there, in the order of `METRICS`."""
    find(folder, "dataset2prompt.json")
    assert folder is not None
    return [name for name in METRICS if any((place / f"{name}.jsonl").is_file() for place in (folder, folder / "data"))]


def missing(name: str) -> str | None:
    """What a data set's metric needs that is not installed; None where nothing is missing."""
    if METRICS.get(name) in WORDS_ZH and importlib.util.find_spec("jieba") is None:
        return f"{name} is scored by Chinese words: `pip install jieba`"
    return None


class LongBench(Task):
    """One data set. Longer prompts than there is room for lose their middle.

    Args:
        name: Its name.
        length: Tokens of a prompt and its answer, at most.
        reader: Turns them into tokens.
        folder: Where the benchmark's files are.

    Raises:
        ValueError: If there is no such data set, or a file is missing or not the benchmark's.
    """

    def __init__(self, name: str, length: int, reader: Reader, folder: Path | None):
        if name not in METRICS:
            raise ValueError(f"LongBench has no {name!r}; its data sets are {', '.join(METRICS)}")
        self.name, self.length, self.reader, self.chat = name, length, reader, name not in NO_CHAT
        self.template: str = self._said(find(folder, "dataset2prompt.json"))
        self.new_tokens: int = self._said(find(folder, "dataset2maxlen.json"))
        path = find(folder, f"{name}.jsonl")
        try:
            self.entries = [json.loads(line) for line in path.read_text().split("\n") if line.strip()]
        except ValueError:
            self.entries = []
        if not all(isinstance(entry, dict) and {"answers", "all_classes"} <= entry.keys() for entry in self.entries):
            self.entries = []
        if not self.entries:
            raise ValueError(f"{path} is not a data set of LongBench's, or not whole; fetch it anew")
        self.available = len(self.entries)

    def _said(self, path: Path) -> Any:
        try:
            return json.loads(path.read_text())[self.name]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} says nothing of {self.name}, or is not LongBench's; fetch it anew") from error

    def sample(self, index: int) -> Sample:
        entry = self.entries[index]
        text = self.template.format(**entry)
        room = self.length - self.new_tokens
        ids = self.reader.encode(text, chat=self.chat)
        if len(ids) > room:
            own = self.reader.tokenizer(text, add_special_tokens=False).input_ids
            # Halves that are joined may come to a few tokens more than both.
            half = (len(own) - (len(ids) - room)) // 2
            while len(ids) > room:
                if half < 1:
                    raise ValueError(f"{self.name} at {self.length} tokens: there is no room for a prompt")
                decode = self.reader.tokenizer.decode
                text = decode(own[:half], skip_special_tokens=True) + decode(own[-half:], skip_special_tokens=True)
                ids = self.reader.encode(text, chat=self.chat)
                half -= max(1, (len(ids) - room + 1) // 2)
        return Sample(ids, entry["answers"], {"classes": entry["all_classes"] or []})

    def score(self, answer: str, sample: Sample) -> float:
        if self.name in FIRST_LINE:
            answer = answer.lstrip("\n").split("\n")[0]
        metric = METRICS[self.name]
        return max(metric(answer, expected, sample.facts["classes"]) for expected in sample.answers)


# ---- a made-up set ---------------------------------------------------------------------------------------------------


def made_up(rng: random.Random, tokens: int) -> dict[str, dict[str, Any]]:
    """An entry for one data set of each metric that needs no other package, of some `tokens` tokens."""

    def sentence() -> str:
        words = (rng.choice(texts.ADJECTIVES + texts.NOUNS) for _ in range(9))
        return " ".join(words).capitalize() + "."

    def name() -> str:
        return f"{rng.choice(texts.ADJECTIVES)} {rng.choice(texts.NOUNS)}"

    def entry(context: str, asked: str, *answers: str, classes: list[str] | None = None) -> dict[str, Any]:
        return {"input": asked, "context": context, "answers": list(answers), "all_classes": classes}

    lines = [sentence() for _ in range(tokens // 14)]
    paragraphs = [" ".join(sentence() for _ in range(6)) for _ in range(tokens // 90 + 2)]
    numbered = "\n\n".join(f"Paragraph {place}: {text}" for place, text in enumerate(paragraphs, 1))
    place, keeper, thing = rng.randrange(len(paragraphs)), name(), rng.choice(texts.NOUNS)
    told = list(lines)
    told.insert(rng.randrange(len(told) + 1), f"The keeper of the {thing} is the {keeper}.")
    classes = ["Place", "Place, city", "Person", "Number"]
    shown = "\n".join(f"Question: {sentence()}\nType: {rng.choice(classes)}" for _ in range(tokens // 20))
    code = [f"{rng.choice(texts.NOUNS)} = {rng.randrange(1000)}" for _ in range(tokens // 8)]
    repeated = [*paragraphs, rng.choice(paragraphs)]
    rng.shuffle(repeated)
    counted = "\n\n".join(f"Paragraph {place}: {text}" for place, text in enumerate(repeated, 1))
    return {
        "qasper": entry(" ".join(told), f"Who is the keeper of the {thing}?", f"the {keeper}", keeper),
        "gov_report": entry(" ".join(lines), "", " ".join(lines[:3])),
        "trec": entry(shown, f"Question: {sentence()}\nType:", rng.choice(classes), classes=classes),
        "passage_retrieval_en": entry(numbered, paragraphs[place], f"Paragraph {place + 1}"),
        "passage_count": entry(counted, "", str(len(paragraphs))),
        "lcc": entry("\n".join(code) + "\n", "", code[0]),
    }


PROMPTS = {
    "qasper": "{context}\n\nQuestion: {input}\nAnswer:",
    "gov_report": "{context}\n\nSummary:",
    "trec": "{context}\n{input}",
    "passage_retrieval_en": "{context}\n\nWhich paragraph is this?\n\n{input}\n\nAnswer:",
    "passage_count": "{context}\n\nHow many different paragraphs are there? Answer:",
    "lcc": "{context}",
}
NEW_TOKENS = {name: 48 if name == "gov_report" else 16 for name in PROMPTS}


def write(folder: Path, samples: int, tokens: int, seed: int = 0) -> None:
    """Writes the made-up set."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "dataset2prompt.json").write_text(json.dumps(PROMPTS, indent=1))
    (folder / "dataset2maxlen.json").write_text(json.dumps(NEW_TOKENS, indent=1))
    entries = [made_up(random.Random(f"{seed} {index}"), tokens) for index in range(samples)]
    for name in PROMPTS:
        own = [
            found[name]
            | {"length": len(found[name]["context"].split()), "dataset": name, "language": "en", "_id": index}
            for index, found in enumerate(entries)
        ]
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(entry)}\n" for entry in own))


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes a small made-up set in the format of LongBench.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--samples", type=int, default=20, help="of each data set")
    parser.add_argument("--tokens", type=int, default=2000, help="of a prompt, about")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.samples < 1 or args.tokens < 20:
        parser.error("--samples is at least 1, and --tokens 20")
    write(args.folder, args.samples, args.tokens, args.seed)


if __name__ == "__main__":
    main()
