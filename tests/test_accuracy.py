"""`eval.accuracy`: prompts that have an answer, scores that say what they say, and runs that can be interrupted."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from eval import accuracy, longbench, readme_tables, report, ruler, texts
from eval.needle import NeedleGrid
from eval.records import Records
from eval.tasks import Reader, contained, contains_any, largest
from hf_hisparse import HierarchicalSparseCache
from hf_hisparse.models import cache_argument
from tests.helpers import DEVICE, dense_cache, make_model
from tests.tokens import save_tokenizer


LENGTH = 9000
"""Tokens of a prompt, which are letters here."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A model, its tokenizer, essays, and questions about documents, on disk."""
    path = tmp_path_factory.mktemp("accuracy")
    make_model("llama", vocab_size=260, max_position_embeddings=4096).save_pretrained(path)
    save_tokenizer(path)
    sentences = [f"{a.capitalize()} {b} {texts.NOUNS[i % 9]}." for i, (a, b) in enumerate(zip(*words(), strict=True))]
    (path / "essays.json").write_text(json.dumps({"text": " ".join(sentences * 3)}))
    (path / "questions").mkdir()
    articles = [
        [{"context": f"{noun} {n} stands in {texts.NOUNS[n]}. " * 4, "qas": [asked(noun, n)]} for n in range(3)]
        for noun in texts.NOUNS[50:90]
    ]
    squad = {"data": [{"paragraphs": article} for article in articles]}
    (path / "questions" / "squad.json").write_text(json.dumps(squad))
    hotpot = [
        {
            "question": f"Where is {noun}?",
            "answer": f"in {noun}land",
            "context": [[noun, [f"It is in {noun}land.", " So it is." * 9]], [f"{noun} two", [" Nothing." * 9]]],
        }
        for noun in texts.NOUNS[:60]
    ]
    (path / "questions" / "hotpotqa.json").write_text(json.dumps(hotpot))
    return path


def words() -> tuple[list[str], list[str]]:
    """Pairs of words, all different."""
    pairs = [(a, b) for b in texts.NOUNS for a in texts.ADJECTIVES[:20]]
    return [a for a, _ in pairs], [b for _, b in pairs]


def asked(noun: str, number: int) -> dict[str, Any]:
    possible = number != 2
    answers = [{"text": f"in {texts.NOUNS[number]}"}] if possible else []
    return {"question": f"Where is {noun} {number}?", "is_impossible": not possible, "answers": answers}


@pytest.fixture(scope="module")
def reader(folder) -> Reader:
    return Reader(AutoTokenizer.from_pretrained(folder))


@pytest.fixture(scope="module")
def sources(folder) -> ruler.Sources:
    return ruler.Sources(folder / "essays.json", folder / "questions")


# ---- prompts ---------------------------------------------------------------------------------------------------------


def solve_needles(text: str) -> list[str]:
    found: dict[str, list[str]] = {}
    for key, value in re.findall(r"One of the special magic \w+ for ([\w-]+) is: ([\w-]+)\.", text):
        found.setdefault(key, []).append(value)
    query = re.search(r"the special magic \w+ for (.*) mentioned in the provided text\?", text)
    assert query
    return [value for key in re.split(r", and |, ", query[1]) for value in found[key]]


def solve_variables(text: str) -> list[str]:
    value = re.findall(r"assigned the value (\d+) in the text above\.", text)[-1]
    assigned = dict(re.findall(r"VAR ([A-Z]+) = (?:VAR )?(\w+)", text))

    def end(name: str) -> str:
        return end(assigned[name]) if name in assigned else name

    return [name for name in assigned if end(name) == value]


def solve_common(text: str) -> list[str]:
    counts = Counter(re.findall(r"\d+\. ([a-z]+)", text.rpartition("Below is a numbered list")[2]))
    common = counts.most_common(11)
    assert common[9][1] > common[10][1]
    return [word for word, _ in common[:10]]


def solve_frequent(text: str) -> list[str]:
    coded = text.partition("coded words. ")[2].partition("\nQuestion:")[0]
    counts = Counter(word for word in coded.split() if word != "...")
    common = counts.most_common(4)
    assert common[2][1] > common[3][1]
    return [word for word, _ in common[:3]]


def solve_question(text: str) -> list[str]:
    subject = re.search(r"Question: Where is (.*)\?", text)
    assert subject
    (document,) = [part for part in text.split("Document ")[1:] if re.search(rf"^{subject[1]}\b(?! two)", part, re.M)]
    place = re.search(r"(?:stands|is) (in \w+)", document)
    assert place
    return [place[1]]


SOLVERS: dict[str, Callable[[str], list[str]]] = {
    "vt": solve_variables,
    "cwe": solve_common,
    "fwe": solve_frequent,
    "qa_1": solve_question,
    "qa_2": solve_question,
}
NEEDLES = {"niah_multikey_1": 4, "niah_multivalue": 4, "niah_multiquery": 4}


@pytest.mark.parametrize("name", ruler.TASKS)
def test_ruler(name, reader, sources):
    """A prompt has one answer, which its text alone tells; it fills its length, and is the same every time."""
    task = ruler.TASKS[name](name, LENGTH, reader, sources, 1)
    again = ruler.TASKS[name](name, LENGTH, reader, sources, 1)
    other = ruler.TASKS[name](name, LENGTH, reader, sources, 2)
    samples = [task.sample(index) for index in (0, 1, 2)]
    for index, sample in enumerate(samples):
        text = reader.tokenizer.decode(sample.ids)
        assert 0.93 * LENGTH < len(sample.ids) + task.new_tokens <= LENGTH
        assert text.startswith("[user] ") and "\n[assistant] " in text and not text.endswith(" ")
        solved = SOLVERS.get(name, solve_needles)(text)
        assert sorted(solved) == sorted(sample.answers) and len(set(solved)) == len(solved)
        assert task.score(" and ".join(sample.answers).upper(), sample) == 1 and task.score("nothing", sample) == 0
        assert again.sample(index).ids == sample.ids != other.sample(index).ids
        if name.startswith("niah") and task.haystack != "needle":
            assert len(re.findall("One of the special magic", text)) == NEEDLES.get(name, 1)
    assert len({tuple(sample.ids) for sample in samples}) == 3
    if len(samples[0].answers) > 1:
        share = task.score(samples[0].answers[0], samples[0])
        assert share == pytest.approx(1 / len(samples[0].answers))


def test_ruler_that_lacks_data(reader, sources):
    assert "`--essays`" in (ruler.missing("cwe", ruler.Sources()) or "")
    assert "dev-v2.0.json" in (ruler.missing("qa_1", ruler.Sources(sources.essays)) or "")
    assert ruler.missing("vt", ruler.Sources()) is None is ruler.missing("qa_2", sources)
    with pytest.raises(ValueError, match=r"niah_single_2 at 500 tokens: the shortest prompt takes \d+ tokens"):
        ruler.TASKS["niah_single_2"]("niah_single_2", 500, reader, sources).sample(0)


@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
def test_needles_lie_where_they_should(depth, reader, sources):
    """The first at its depth, the others evenly after it; each sentence of the essays is some 25 letters."""
    for count in (1, 3):
        sample = NeedleGrid(count, depth, LENGTH, reader, sources).sample(0)
        text = reader.tokenizer.decode(sample.ids)
        assert sorted(solve_needles(text)) == sorted(sample.answers)
        hay = text.partition("afterwards.\n")[2].partition("\nWhat ")[0]
        places = sorted(hay.index(answer) / len(hay) for answer in sample.answers)
        expected = [depth + at * (1 - depth) / count for at in range(count)]
        assert places == pytest.approx(expected, abs=0.03)


@given(st.integers(1, 40), st.integers(0, 500), st.integers(1, 30), st.integers(0, 5000))
@example(2, 40, 1, 85)
def test_the_largest_size(unit, fixed, smallest, room):
    """Fits; and one more unit would not, or no more than a hundredth of the room is left."""

    def tokens(size: int) -> int:
        return fixed + unit * size + size % 3

    if tokens(smallest) > room:
        with pytest.raises(ValueError, match="use a greater length"):
            largest(tokens, room, smallest)
        return
    size = largest(tokens, room, smallest)
    assert size >= smallest and tokens(size) <= room
    assert tokens(size + 1) > room or room - tokens(size) < room / 100


def test_parts_of_an_answer():
    assert contained("It was Rome, then paris.", ["Paris", "rome", "Oslo", "Bern"]) == 0.5
    assert contains_any("it was paris", ["Oslo", "Paris"]) == 1 and contains_any("none", ["Oslo"]) == 0


# ---- LongBench -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "answer", "expected", "score"),
    [
        ("qasper", "The Red, fox!", "a red dog", 0.5),
        ("qasper", "", "red", 0.0),
        # As `rouge` 1.0.1 has it.
        ("gov_report", "the cat sat. on the mat today", "The cat sat on. the mat", 0.8333333283333335),
        ("gov_report", "a b. c d", "a c d. b", 0.9999999950000002),
        ("gov_report", ".", "a", 0.0),
        ("passage_retrieval_en", "Paragraph 3 or 4", "Paragraph 3", 0.5),
        ("passage_retrieval_en", "Paragraph 33", "Paragraph 3", 0.0),
        ("passage_count", "7", "7", 1.0),
        ("passage_count", "7 of 10 and 7 of 9", "7", 0.5),
        # As `fuzzywuzzy` 0.18 has it, over difflib.
        ("lcc", "# no\nx = f(1)\ny", "x = g(1)", 0.88),
        ("samsum", "\nfirst line\nanother", "first line", 0.9999999950000002),
        ("triviaqa", "Paris\nQuestion: what", "paris", 1.0),
    ],
)
def test_metrics_of_longbench(name, answer, expected, score, reader, folder, tmp_path):
    longbench.write(tmp_path, 1, 200)
    for file in ("dataset2prompt.json", "dataset2maxlen.json"):
        found = json.loads((tmp_path / file).read_text())
        (tmp_path / file).write_text(json.dumps(found | {name: found.get(name, found["qasper"])}))
    entry = {"context": "c", "input": "i", "answers": ["zz", expected], "all_classes": None}
    (tmp_path / f"{name}.jsonl").write_text(json.dumps(entry))
    if name.startswith("passage"):
        entry["answers"] = [expected]
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(entry))
    task = longbench.LongBench(name, 1000, reader, tmp_path)
    assert task.score(answer, task.sample(0)) == pytest.approx(score, abs=1e-9)


def test_classes_of_longbench():
    """A class whose name is part of the right one's is not named by that."""
    classes = ["Place", "Place, city", "Person"]
    assert longbench.classification("It is a Place, city", "Place, city", classes) == 1
    assert longbench.classification("Place, city or Person", "Place, city", classes) == 0.5
    assert longbench.classification("A Place", "Place, city", classes) == 0


def test_a_set_in_longbench_s_format(reader, tmp_path):
    """Everything in the made-up set can be answered rightly, and a prompt that is too long loses its middle."""
    longbench.write(tmp_path / "data", 3, 600)
    for file in ("dataset2prompt.json", "dataset2maxlen.json"):
        (tmp_path / "config").mkdir(exist_ok=True)
        (tmp_path / "data" / file).rename(tmp_path / "config" / file)
    names = longbench.datasets(tmp_path)
    assert set(names) == set(longbench.PROMPTS)
    for name in names:
        task, short = (longbench.LongBench(name, length, reader, tmp_path) for length in (20_000, 600))
        assert task.available == 3
        sample, cut = task.sample(1), short.sample(1)
        assert task.score(sample.answers[0], sample) == pytest.approx(1, abs=1e-6)
        text, left = (reader.tokenizer.decode(s.ids) for s in (sample, cut))
        assert text.startswith("[user]") != (name in longbench.NO_CHAT)
        assert 600 - task.new_tokens - 4 <= len(cut.ids) <= 600 - task.new_tokens < len(sample.ids)
        assert left[:200] == text[:200] and left[-200:] == text[-200:]
    with pytest.raises(ValueError, match="has no `narrativeqa.jsonl`; fetch it from data.zip"):
        (tmp_path / "config" / "dataset2prompt.json").write_text('{"narrativeqa": ""}')
        (tmp_path / "config" / "dataset2maxlen.json").write_text('{"narrativeqa": 1}')
        longbench.LongBench("narrativeqa", 1000, reader, tmp_path)
    with pytest.raises(ValueError, match="fetch data.zip of"):
        longbench.datasets(None)


# ---- runs ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(folder, tmp_path, monkeypatch) -> Callable[..., dict[str, Any]]:
    """`run(name, *arguments)`: the results that a run writes, with its tables and its records."""
    monkeypatch.setattr(accuracy, "quiet", lambda: None)
    monkeypatch.setattr(NeedleGrid, "new_tokens", 9)
    monkeypatch.setattr(report, "plots", lambda *args: [])
    monkeypatch.setenv("HISPARSE_COMMIT", "abc1234")
    monkeypatch.delenv("HISPARSE_ESSAYS", raising=False)

    def measure(name: str, *more: str) -> dict[str, Any]:
        output = tmp_path / name
        assert accuracy.main([*arguments(folder, output), *more]) == 0
        found = json.loads(Path(f"{output}.json").read_text())
        lines = Path(f"{output}.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines[1:]]
        return found | {"tables": Path(f"{output}.md").read_text(), "records": records}

    return measure


SIZES = "--tasks needles --lengths 700 1K --depths 0.5 --needles 1 --samples 3 --batch 2 --no-chat --dtype float32"


def arguments(folder: Path, output: Path) -> list[str]:
    settings = "--algorithm quest rabitq --page-size 4 --top-k 128 1024"
    where = ["--model", str(folder), "--device", str(DEVICE), "--output", str(output)]
    return [*SIZES.split(), *settings.split(), *where, "--essays", str(folder / "essays.json")]


def measured(found: dict[str, Any]) -> Any:
    """What of a run's results must not depend on how often it was interrupted."""
    records = sorted(({k: v for k, v in r.items() if k != "seconds"} for r in found["records"]), key=json.dumps)
    return found["rows"], found["summary"], found["tables"], records


def test_a_run(run, folder):
    """Every answer is what `generate` gives from the beginning, and so are the hits, in batches and all."""
    found = run("whole")
    rows = found["rows"]
    assert len(rows) == 2 * 5 and len(found["records"]) == 2 * 2 * 5 and len(found["summary"]) == 2 * 5
    assert found["model"] == str(folder) and not found["chat"] and found["left_out"] == []
    for row in rows:
        if row["method"] == "dense" or row["budget"] >= row["length"]:
            assert (row["difference"], row["low"], row["high"]) == (0, 0, 0)
            assert row["hit_rate"] is None and row["device_bytes"] == row["dense_bytes"]
        else:
            assert 0 < row["hit_rate"] < 1 and row["device_bytes"] < row["dense_bytes"] < row["host_bytes"]
    model = make_model("llama", vocab_size=260, max_position_embeddings=4096)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    said = set()
    for record in found["records"]:
        task = NeedleGrid(
            1, 0.5, record["length"], Reader(tokenizer, False), ruler.Sources(folder / "essays.json"), found["seed"]
        )
        prompts = [task.sample(record["first"] + at).ids for at in range(record["count"])]
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(own)) + own for own in prompts], device=DEVICE)
        mask = torch.tensor([[0] * (longest - len(own)) + [1] * len(own) for own in prompts], device=DEVICE)
        cache: Any = dense_cache(model)
        if record["method"] != "dense":
            name = record["method"].partition(",")[0]
            cache = HierarchicalSparseCache(model, top_k=record["budget"], algorithm=name, page_size=4)
        with torch.no_grad():
            # A prompt but for its last token, as all that is generated is decoded.
            positions = (mask.cumsum(1) - 1).clamp(min=0)
            own = {cache_argument(model): cache}
            model(ids[:, :-1], attention_mask=mask[:, :-1], position_ids=positions[:, :-1], **own)
        output = model.generate(ids, attention_mask=mask, max_new_tokens=9, do_sample=False, pad_token_id=0, **own)
        answers = [tokenizer.decode(row[longest:], skip_special_tokens=True) for row in output]
        assert [answer["said"] for answer in record["answers"]] == answers
        assert [answer["tokens"] for answer in record["answers"]] == [len(own) for own in prompts]
        said.update((record["budget"], answer) for answer in answers)
        if record["method"] != "dense" and all(len(answer) == 9 for answer in answers):
            assert (record["hits"], record["misses"]) == (cache.stats().hits, cache.stats().misses)
    # The selection changes something.
    assert {answer for budget, answer in said if budget == 128} != {answer for budget, answer in said if budget is None}


def test_a_run_interrupted_anywhere(run, tmp_path, monkeypatch):
    """The records are only ever added to: an interrupted run is one of which a part of the file is there."""
    expected = run("whole")
    data = (tmp_path / "whole.jsonl").read_bytes()
    ends = [at + 1 for at, letter in enumerate(data) if letter == ord("\n")]
    add = Records.add
    for number, cut in enumerate([ends[0] - 9, ends[0], ends[2] - 1, ends[7], ends[-2] + 40, ends[-1]]):
        (tmp_path / f"{number}.jsonl").write_bytes(data[:cut])
        added: list[Any] = []
        monkeypatch.setattr(Records, "add", lambda self, record, added=added: (added.append(record), add(self, record)))
        assert measured(run(str(number))) == measured(expected)
        assert len(added) == len(ends) - 1 - max(0, sum(end <= cut for end in ends) - 1)


def test_a_run_that_is_killed(run, folder, tmp_path):
    """By a signal that no program can catch, and then started again."""
    program = (
        "import sys; from eval import accuracy, needle; needle.NeedleGrid.new_tokens = 9; "
        "sys.exit(accuracy.main(sys.argv[1:]))"
    )
    output = tmp_path / "killed"
    process = subprocess.Popen(
        [sys.executable, "-c", program, *arguments(folder, output)],
        cwd=Path(__file__).parents[1],
        env=os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    records = Path(f"{output}.jsonl")
    while not (records.exists() and records.read_bytes().count(b"\n") > 4):
        assert process.poll() is None, process.stderr and process.stderr.read().decode()[-4000:]
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not Path(f"{output}.json").exists()
    assert measured(run("killed")) == measured(run("whole"))


def test_a_run_that_goes_further(run, tmp_path):
    """More samples and more settings, of which the file has some."""
    run("grown", "--samples", "2", "--top-k", "128")
    assert measured(run("grown"))[:3] == measured(run("whole"))[:3]


def test_another_run(run, capsys):
    run("other", "--lengths", "700")
    for more, what in (("--seed 5", "seed 0 and not 5"), ("--batch 3", "batch 2 and not 3")):
        with pytest.raises(SystemExit):
            run("other", "--lengths", "700", *more.split())
        assert f"the records of another run, with {what}; name another file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("--tasks nothing", "`--tasks` names 'nothing'"),
        ("--tasks qa_1", "qa_1 needs `squad.json`: fetch https://"),
        ("--tasks longbench", "LongBench is read from a folder: fetch data.zip"),
        ("--lengths 8K", "`--lengths` has 8192, and the model takes 4096 positions"),
        ("--lengths 300", "needles_1 at 300 tokens: the shortest prompt takes"),
        ("--essays nowhere.json", "there is no nowhere.json"),
        ("--top-k 8", "no cache to compare: quest, pages of 4, top-k 8: `top_k=8` holds 2 items"),
        ("--lengths 4.5K", "'4.5K' is not a number of tokens, such as 4096 or 4K"),
        ("--lengths 0", "'0' is not a number of tokens"),
        ("--needles 1 0", "`--needles` must be at least 1"),
        ("--depths 0 1.5", "`--depths` must lie between 0 and 1"),
        ("--depths -0.5", "`--depths` must lie between 0 and 1"),
        ("--depths nan", "`--depths` must lie between 0 and 1"),
        ("--dtype float12", "invalid choice: 'float12'"),
        ("--batch 0", "must be at least 1"),
        ("--model llama-tiny", "`--model llama-tiny` has no tokenizer"),
    ],
)
def test_arguments_that_do_not_fit(more, message, run, capsys):
    with pytest.raises(SystemExit):
        run("refused", *more.split())
    assert message in capsys.readouterr().err


BROKEN = ("", "[]", "{}", '{"text": 5}', '{"text": " "}', '{"data": [{}]}', '[{"context": 1}]', '{"text": "cut', "\x80")
"""What files of data are not, each of which is not what some of them are."""


@pytest.mark.parametrize("content", BROKEN)
@pytest.mark.parametrize("task", ["needles", "qa_1", "qa_2", "qasper", "trec"])
def test_data_that_is_not_what_it_should_be(task, content, run, tmp_path, capsys):
    """The file is named, and nothing is measured."""
    longbench.write(tmp_path / "set", 1, 50)
    files = {"needles": "essays.json", "qa_1": "squad.json", "qa_2": "hotpotqa.json", "qasper": "set/qasper.jsonl"}
    broken = tmp_path / files.get(task, "set/dataset2maxlen.json")
    broken.write_bytes(content.encode("latin-1"))
    where = ["--questions", str(tmp_path), "--longbench", str(tmp_path / "set")]
    if task == "needles":
        where += ["--essays", str(broken)]
    with pytest.raises(SystemExit):
        run("broken", "--tasks", task, *where)
    assert str(broken) in capsys.readouterr().err and not (tmp_path / "broken.jsonl").exists()


def test_lines_of_longbench(reader, tmp_path):
    """End where JSON's do, and not at what else parts lines of text."""
    longbench.write(tmp_path, 3, 50)
    path = tmp_path / "qasper.jsonl"
    said = "one\u2028two\x85three"
    entries = [json.loads(line) | {"context": said} for line in path.read_text().splitlines()]
    path.write_text("\n".join(json.dumps(entry, ensure_ascii=False) for entry in entries))
    task = longbench.LongBench("qasper", 1000, reader, tmp_path)
    assert task.available == 3 and said in reader.tokenizer.decode(task.sample(2).ids)


@pytest.mark.parametrize("more", [["--samples", "0"], ["--tokens", "19"]])
def test_a_made_up_set_of_nothing(more, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("sys.argv", ["longbench", str(tmp_path / "set"), *more])
    with pytest.raises(SystemExit):
        longbench.main()
    assert "--samples is at least 1, and --tokens 20" in capsys.readouterr().err and not [*tmp_path.iterdir()]


def test_the_smallest_made_up_set(reader, tmp_path):
    longbench.write(tmp_path, 1, 20)
    for name in longbench.datasets(tmp_path):
        task = longbench.LongBench(name, 2000, reader, tmp_path)
        sample = task.sample(0)
        assert task.score(sample.answers[0], sample) == pytest.approx(1, abs=1e-6)


def test_chinese_answers_without_what_parts_their_words(run, tmp_path, capsys, monkeypatch):
    """Are left out of the whole, and refused where they are named, before anything is measured."""
    folder, names = tmp_path / "set", ["multifieldqa_zh", "dureader", "vcsum"]
    longbench.write(folder, 1, 50)
    for file in ("dataset2prompt.json", "dataset2maxlen.json"):
        held = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps(dict.fromkeys(("qasper", *names), held["qasper"])))
    for file in folder.glob("*.jsonl"):
        if file.stem != "qasper":
            file.unlink()
    for name in names:
        (folder / f"{name}.jsonl").write_text((folder / "qasper.jsonl").read_text())
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    where = ["--longbench", str(folder), *"--algorithm quest --top-k 128".split()]
    with pytest.raises(SystemExit):
        run("refused", "--tasks", "qasper", "dureader", *where)
    assert "dureader is scored by Chinese words: `pip install jieba`" in capsys.readouterr().err
    assert not (tmp_path / "refused.jsonl").exists()
    found = run("most", "--tasks", "longbench", *where)
    assert {row["task"] for row in found["rows"]} == {"qasper"}
    assert [reason.partition(" ")[0] for reason in found["left_out"]] == names


def test_tasks_of_which_none_is_there(run, tmp_path, capsys):
    longbench.write(tmp_path / "set", 1, 50)
    for file in (tmp_path / "set").glob("*.jsonl"):
        file.unlink()
    with pytest.raises(SystemExit):
        run("none", "--tasks", "longbench", "--longbench", str(tmp_path / "set"))
    assert f"there are no data sets in {tmp_path / 'set'}" in capsys.readouterr().err


@pytest.mark.parametrize("cut", [None, 1, 12])
def test_records_of_nothing_are_of_any_run(cut, tmp_path):
    """A run that was refused, or stopped, before it measured anything stands in no other's way."""
    path, names = tmp_path / "records.jsonl", ("at",)
    Records(path, {"seed": 0, "batch": 1}, names)
    if cut:
        run = {"seed": 0, "batch": 1}
        path.write_bytes(path.read_bytes()[:cut])
    else:
        run = {"seed": 1, "batch": 1}
    Records(path, run, names).add({"at": 1})
    assert [json.loads(line) for line in path.read_text().splitlines()] == [run, {"at": 1}]
    assert {"at": 1} in Records(path, run, names)


OTHER_FILES = [
    "notes",
    "notes\nmore",
    '{"a": 1}',
    '{"a": 1}\n',
    '{"a": 1}\n{"b": 2}',
    "[1]\n[2]\n",
    '{"seed": 1}\n{"at": 1}\n{"a',
]


@pytest.mark.parametrize("content", OTHER_FILES)
def test_a_file_of_another_kind_stays_as_it_is(content, tmp_path):
    path = tmp_path / "notes.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match="name another"):
        Records(path, {"seed": 0}, ("at",))
    assert path.read_text() == content


def test_a_group_of_tasks_of_which_data_is_missing(run, capsys, monkeypatch):
    """And settings that cannot be: both are said, and the rest is done."""
    monkeypatch.setattr(ruler, "TASKS", {name: ruler.TASKS[name] for name in ("niah_single_1", "qa_1")})
    found = run(
        "ruler", *"--tasks ruler niah_single_1 --lengths 1200 --samples 1 --page-size 4 128 --top-k 128 --chat".split()
    )
    assert {row["task"] for row in found["rows"]} == {"niah_single_1"} and found["chat"]
    assert [line.partition(":")[0] for line in found["left_out"]] == [
        "qa_1 needs `squad.json`",
        "quest, pages of 128, top-k 128",
        "rabitq, pages of 128, top-k 128",
    ]
    assert capsys.readouterr().out.count("Left out: ") == 3


def test_settings(tiny):
    """A budget that is not given is what the cache takes by itself, here what the model was trained with."""
    found, refused = accuracy.make_settings(tiny("deepseek_v32"), ["auto"], [None], [None])
    assert [(setting.method, setting.budget) for setting in found] == [("dense", None), ("auto", 32)] and not refused
    found, refused = accuracy.make_settings(tiny("llama"), ["quest", "none"], [None, 8], [None])
    assert [(setting.method, setting.budget) for setting in found[1:]] == [("quest", 2048), ("quest, pages of 8", 2048)]
    assert len(refused) == 2 and "`algorithm` must be" in refused[0]


def test_longbench_runs(run, tmp_path):
    longbench.write(tmp_path / "set", 2, 120)
    found = run("set", "--longbench", str(tmp_path / "set"), *"--tasks longbench --top-k 128 --algorithm quest".split())
    assert {row["task"] for row in found["rows"]} == set(longbench.PROMPTS)
    assert {(row["length"], row["samples"]) for row in found["rows"]} == {(1024, 2)}


# ---- what it comes to ------------------------------------------------------------------------------------------------


def test_an_interval():
    """Around a normal mean it is that mean and 1.96 standard errors; groups count alike, whatever their size."""
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randn(500, generator=generator, dtype=torch.float64) + 0.3
    mean, low, high = report.interval([drawn])
    error = float(drawn.std()) / 500**0.5
    assert mean == pytest.approx(float(drawn.mean()))
    assert (low, high) == pytest.approx((mean - 1.96 * error, mean + 1.96 * error), abs=0.15 * error)
    fewer = torch.full((5,), 2.0, dtype=torch.float64)
    both, least, most = report.interval([drawn, fewer])
    assert both == pytest.approx((mean + 2) / 2) and most - least == pytest.approx((high - low) / 2, rel=0.05)
    assert report.interval([torch.zeros(9)]) == (0, 0, 0)


def record(method: str, budget: int | None, task: str, first: int, scores: list[float], **more: Any) -> dict[str, Any]:
    answers = [{"score": score} for score in scores]
    counts = {"hits": 0, "misses": 0, "device_bytes": 100, "host_bytes": 0, "dense_bytes": 100}
    where = {"task": task, "length": 4096, "depth": None, "first": first, "count": len(scores)}
    return where | {"method": method, "budget": budget, "answers": answers} | counts | more


RECORDS = [
    record("dense", None, "a", 0, [1, 1]),
    record("quest", 64, "a", 0, [1, 0], hits=3, misses=1, device_bytes=20, host_bytes=120),
    # A batch that came later, out of order.
    record("quest", 64, "a", 2, [0], hits=0, misses=4, device_bytes=10, host_bytes=60),
    record("dense", None, "a", 2, [0.5], device_bytes=50, dense_bytes=50),
    record("dense", None, "b", 0, [0]),
    record("quest", 64, "b", 0, [1], hits=8, misses=0),
]


def test_rows_and_tables():
    dense, quest = report.summary(RECORDS)
    assert (dense["score"], dense["difference"], dense["kept"], dense["dense_right"]) == (2.5 / 3 / 2, 0, 2, 2)
    assert quest["score"] == pytest.approx((1 / 3 + 1) / 2) and quest["difference"] == pytest.approx((-1.5 / 3 + 1) / 2)
    assert (quest["kept"], quest["dense_right"], quest["samples"]) == (1, 2, 4)
    assert quest["hit_rate"] == 11 / 16 and quest["device_bytes"] == 130 / 4 and quest["host_bytes"] == 180 / 4
    rows = report.rows(RECORDS)
    assert [(row["task"], row["method"], round(row["score"], 3)) for row in rows] == [
        ("a", "dense", 0.833),
        ("a", "quest", 0.333),
        ("b", "dense", 0.0),
        ("b", "quest", 1.0),
    ]
    # Whatever is drawn of the one difference of "b" is the same.
    assert (rows[3]["low"], rows[3]["high"]) == (1, 1) and rows[1]["low"] == -1 and rows[1]["high"] == 0
    text = report.tables(rows, [dense, quest])
    assert "| 4,096  | quest, top-k 64 | 66.7  | +25.0" in text and "1 of 2" in text and "68.8%" in text
    assert re.search(r"\| b +\| 4,096 +\| 0\.0 +\| 100\.0\* +\|", text) and re.search(r"\| a .*\| 33\.3 +\|", text)


def test_the_table_of_the_readme(tmp_path, monkeypatch):
    monkeypatch.setattr(readme_tables, "RESULTS", tmp_path)
    where = {"device": "a device", "torch": "1", "transformers": "2"}
    records = [record | {"task": f"niah_{record['task']}"} for record in RECORDS] + RECORDS
    results = {"environment": where, "rows": report.rows(records)}
    (tmp_path / "accuracy-smollm2.json").write_text(json.dumps(results))
    text = readme_tables.fill("<!-- table: accuracy -->\nold\n<!-- end -->")
    for kind in ("needles", "variables and words"):
        assert re.search(rf"\| 4,096 +\| 2 of {kind} +\| quest +\| 41\.7 +\| 66\.7 +\|", text)
    assert "accuracy-smollm2.json" in text and "old" not in text
    # A file that no table is made of may be missing.
    (tmp_path / "accuracy-smollm2.json").unlink()
    assert readme_tables.fill("no table") == "no table"


def test_what_there_is_of_a_run_that_has_not_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "plots", lambda *args: [])
    where = {"commit": "abc", "torch": "1", "transformers": "2", "device": "a device"}
    more = [record | {"first": 1000} for record in RECORDS] + [record | {"length": 9} for record in RECORDS]
    lines = [where | {"model": "a model"}, *RECORDS]
    file = tmp_path / "run.jsonl"
    # Prompts that only some settings have answered count in none, and a task of which there are no others not at all.
    for extra in ([], [record for record in more if record["method"] == "dense"]):
        file.write_text("".join(json.dumps(line) + "\n" for line in lines + extra))
        report.main([str(file)])
        found = json.loads((tmp_path / "run.json").read_text())
        assert found["rows"] == json.loads(json.dumps(report.rows(RECORDS)))
        assert found["summary"] == json.loads(json.dumps(report.summary(RECORDS)))
        assert found["model"] == "a model" and found["environment"] == where | {"command": ANY}
        assert len(found["left_out"]) == (2 if extra else 0)
        assert (tmp_path / "run.md").read_text() == report.tables(report.rows(RECORDS), report.summary(RECORDS))
        whole = file.read_text()
        file.write_text(whole + json.dumps(RECORDS[0])[:-9])
        report.main([str(file)])
        assert json.loads((tmp_path / "run.json").read_text()) == found
    some = "".join(json.dumps(line) + "\n" for line in [lines[0], RECORDS[0], RECORDS[-1] | {"first": 7}])
    for text in (some, "", "{", "[]\n", "1\n2\n"):
        file.write_text(text)
        with pytest.raises(SystemExit):
            report.main([str(file)])


def test_plots(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    grid = [row | {"depth": depth} for depth in (0.0, 1.0) for row in RECORDS]
    said = report.plots(report.rows(grid), report.summary(grid), tmp_path / "out")
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"out-budget.png", "out-a.png", "out-b.png"} and len(said) == 3


def test_no_plots(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    (said,) = report.plots([], [], tmp_path / "out")
    assert "pip install matplotlib" in said and not list(tmp_path.iterdir())


def test_a_report_of_results(tmp_path, monkeypatch, capsys):
    """Says of the file what the run said."""
    drawn: list[Any] = []
    monkeypatch.setattr(report, "plots", lambda *args: drawn.append(args) or ["drawn"])
    rows, summary, output = report.rows(RECORDS), report.summary(RECORDS), tmp_path / "of-3.1"
    Path(f"{output}.json").write_text(json.dumps({"rows": rows, "summary": summary}))
    report.main([f"{output}.json"])
    text = report.tables(rows, summary)
    assert Path(f"{output}.md").read_text() == text and capsys.readouterr().out == f"{text}\ndrawn\n"
    assert drawn == [(rows, summary, output)]
