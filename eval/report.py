"""What records of `eval.accuracy` come to: scores, their difference from the dense cache's, tables and plots.

`python -m eval.report FILE.json` makes the tables and plots of results anew, where matplotlib is; of `FILE.jsonl`, the
records of a run that has not ended, what it would write if it ended there.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eval.common import environment, table, write_results


RESAMPLES = 10_000
CONFIDENCE = 0.95


def interval(groups: Sequence[Tensor]) -> tuple[float, float, float]:
    """The mean of the groups' means, and a confidence interval of it by the bootstrap.

    Samples are drawn anew within each group, so that a mean over tasks is of the same tasks every time. With
    differences between two answers to the same prompt this is the paired bootstrap.

    Args:
        groups: `[samples]` each.
    """
    generator = torch.Generator().manual_seed(0)
    means = torch.zeros(RESAMPLES, dtype=torch.float64)
    for group in groups:
        drawn = torch.randint(len(group), (RESAMPLES, len(group)), generator=generator)
        means += group.double()[drawn].mean(1) / len(groups)
    tail = (1 - CONFIDENCE) / 2
    low, high = means.quantile(torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
    return float(torch.stack([group.double().mean() for group in groups]).mean()), low, high


def grouped(
    records: Iterable[dict[str, Any]], key: Callable[[dict[str, Any]], Hashable]
) -> dict[Any, list[dict[str, Any]]]:
    """The records by a key, in the order that they come in."""
    groups: dict[Hashable, list[dict[str, Any]]] = defaultdict(list)
    for record in records:
        groups[key(record)].append(record)
    return groups


def scores(records: Iterable[dict[str, Any]]) -> Tensor:
    """`[samples]`, of one task in one setting."""
    ordered = sorted(records, key=lambda record: record["first"])
    return torch.tensor([answer["score"] for record in ordered for answer in record["answers"]], dtype=torch.float64)


def compare(records: Sequence[dict[str, Any]], dense: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One setting against the dense cache, over all tasks of their records, each of which counts alike."""

    def cell(record: dict[str, Any]) -> Hashable:
        return record["task"], record["length"], record["depth"]

    ours = {name: scores(group) for name, group in grouped(records, cell).items()}
    theirs = {name: scores(group) for name, group in grouped(dense, cell).items()}
    difference, low, high = interval([ours[name] - theirs[name] for name in ours])
    right = torch.cat([theirs[name] == 1 for name in ours])
    kept = right & torch.cat([ours[name] == 1 for name in ours])
    count = sum(record["count"] for record in records)
    hits, misses = (sum(record[name] for record in records) for name in ("hits", "misses"))
    return {
        "samples": count,
        "score": float(torch.stack([score.mean() for score in ours.values()]).mean()),
        "difference": difference,
        "low": low,
        "high": high,
        "dense_right": int(right.sum()),
        "kept": int(kept.sum()),
        "hit_rate": hits / (hits + misses) if hits + misses else None,
        **{
            name: sum(record[name] for record in records) / count
            for name in ("device_bytes", "host_bytes", "dense_bytes")
        },
    }


def setting(record: dict[str, Any]) -> Hashable:
    """What tells a record's setting from other ones."""
    return record["method"], record["budget"]


def compared(records: Sequence[dict[str, Any]], names: Sequence[str]) -> list[dict[str, Any]]:
    """A row for each setting and each combination of the entries `names`."""

    def place(record: dict[str, Any]) -> Hashable:
        return tuple(record[name] for name in names)

    found = []
    for where, group in grouped(records, place).items():
        settings = grouped(group, setting)
        dense = settings["dense", None]
        for (method, budget), own in settings.items():
            found.append(
                dict(zip(names, where, strict=True)) | {"method": method, "budget": budget} | compare(own, dense)
            )
    return found


def rows(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each task, length, depth and setting."""
    return compared(records, ("task", "length", "depth"))


def summary(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each length and setting, over all tasks."""
    return compared(records, ("length",))


# ---- to read ---------------------------------------------------------------------------------------------------------


def label(row: dict[str, Any]) -> str:
    """The name of a row's setting."""
    return row["method"] if row["budget"] is None else f"{row['method']}, top-k {row['budget']}"


def summary_table(found: Sequence[dict[str, Any]]) -> str:
    """Settings against the dense cache, over all tasks of a length."""

    def mib(count: float) -> str:
        return f"{count / 2**20:.1f}"

    head = "length,cache,score,difference,95% interval,right answers kept,hit rate,device (MiB),host (MiB)".split(",")
    lines = []
    for row in found:
        dense = row["method"] == "dense"
        rate = row["hit_rate"]
        lines.append(
            [
                f"{row['length']:,}",
                label(row),
                f"{100 * row['score']:.1f}",
                "" if dense else f"{100 * row['difference']:+.1f}",
                "" if dense else f"{100 * row['low']:+.1f} to {100 * row['high']:+.1f}",
                "" if dense else f"{row['kept']} of {row['dense_right']}",
                "" if rate is None else f"{rate:.1%}",
                mib(row["device_bytes"]),
                mib(row["host_bytes"]) if row["host_bytes"] else "",
            ]
        )
    return table(head, lines)


def task_table(found: Sequence[dict[str, Any]]) -> str:
    """Scores by task and setting; those whose difference is not chance alone are marked."""
    settings = list(dict.fromkeys(label(row) for row in found))
    cells: dict[tuple[str, int, float | None], dict[str, str]] = {}
    for row in found:
        mark = "*" if row["low"] > 0 or row["high"] < 0 else ""
        where = cells.setdefault((row["task"], row["length"], row["depth"]), {})
        where[label(row)] = f"{100 * row['score']:.1f}{mark}"
    lines = [
        [
            task if depth is None else f"{task}, depth {depth:.0%}",
            f"{length:,}",
            *(found.get(setting, "") for setting in settings),
        ]
        for (task, length, depth), found in cells.items()
    ]
    return table(["task", "length", *settings], lines)


def tables(found: Sequence[dict[str, Any]], summed: Sequence[dict[str, Any]]) -> str:
    """Everything as Markdown."""
    return (
        f"{summary_table(summed)}\n\nScores are in hundredths, means over tasks; differences are from the dense cache, "
        f"on the same prompts, with a paired bootstrap; bytes are of one sequence.\n\n{task_table(found)}\n\n"
        "* the interval of the difference from the dense cache leaves out 0.\n"
    )


def plots(found: Sequence[dict[str, Any]], summed: Sequence[dict[str, Any]], output: Path) -> list[str]:
    """Draws scores against budgets, and scores of needles by depth and length. Returns what it has to say of that."""
    try:
        import matplotlib
    except ImportError:
        return [f"No plots: `pip install matplotlib`, and then `python -m eval.report {output}.json`."]
    matplotlib.use("Agg")
    written = [draw_budgets(summed, Path(f"{output}-budget.png"))]
    for task in dict.fromkeys(row["task"] for row in found if row["depth"] is not None):
        own = [row for row in found if row["task"] == task]
        written.append(draw_needles(own, Path(f"{output}-{task.replace('_', '-')}.png")))
    return [f"Wrote {path}" for path in written]


def draw_budgets(summed: Sequence[dict[str, Any]], path: Path) -> Path:
    """A panel for each length: the score of each method against its budget, with the interval of its difference."""
    from matplotlib import pyplot

    lengths = list(dict.fromkeys(row["length"] for row in summed))
    figure, panels = pyplot.subplots(1, len(lengths), figsize=(4.5 * len(lengths), 3.6), squeeze=False, sharey=True)
    for length, panel in zip(lengths, panels[0], strict=True):
        own = [row for row in summed if row["length"] == length]
        dense = next(row["score"] for row in own if row["method"] == "dense")
        panel.axhline(100 * dense, color="black", linewidth=1, linestyle="--", label="dense")
        for method in dict.fromkeys(row["method"] for row in own if row["budget"] is not None):
            points = sorted((row for row in own if row["method"] == method), key=lambda row: row["budget"])
            budgets = [row["budget"] for row in points]
            (line,) = panel.plot(budgets, [100 * row["score"] for row in points], marker="o", label=method)
            low, high = ([100 * (dense + row[name]) for row in points] for name in ("low", "high"))
            panel.fill_between(budgets, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
        budgets = sorted({row["budget"] for row in own if row["budget"] is not None})
        if budgets:
            panel.set_xscale("log", base=2)
            panel.set_xticks(budgets, [str(budget) for budget in budgets])
        panel.set(title=f"{length:,} tokens", xlabel="top-k", ylim=(0, 105))
    panels[0][0].set_ylabel("score")
    panels[0][0].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return path


def draw_needles(own: Sequence[dict[str, Any]], path: Path) -> Path:
    """A panel for each setting: scores by depth and length."""
    from matplotlib import pyplot

    settings = list(dict.fromkeys(label(row) for row in own))
    lengths, depths = (sorted({row[name] for row in own}) for name in ("length", "depth"))
    cells = {(label(row), row["depth"], row["length"]): row["score"] for row in own}
    across = min(len(settings), 5)
    down = -(-len(settings) // across)
    size = (2.2 + 0.5 * len(lengths), 1.2 + 0.3 * len(depths))
    figure, panels = pyplot.subplots(down, across, figsize=(size[0] * across, size[1] * down + 0.4), squeeze=False)
    for panel in panels.flat[len(settings) :]:
        panel.axis("off")
    for setting, panel in zip(settings, panels.flat, strict=False):
        grid = [[cells.get((setting, depth, length), float("nan")) for length in lengths] for depth in depths]
        panel.imshow(grid, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
        panel.set_title(setting, fontsize=9)
        panel.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], fontsize=7)
        panel.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths], fontsize=7)
        for row, depth in enumerate(depths):
            for column, length in enumerate(lengths):
                if (setting, depth, length) in cells:
                    panel.text(
                        column, row, f"{100 * cells[setting, depth, length]:.0f}", ha="center", va="center", fontsize=7
                    )
    figure.supxlabel("tokens", fontsize=8)
    figure.supylabel("depth", fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return path


def write(found: Sequence[dict[str, Any]], summed: Sequence[dict[str, Any]], output: Path) -> str:
    """Writes the tables, and the plots if it can. Returns what there is to read."""
    text = tables(found, summed)
    Path(f"{output}.md").write_text(text)
    return "\n".join([text, *plots(found, summed, output)])


def so_far(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of records of a run that has not ended, those of prompts that every setting has answered."""

    def prompts(record: dict[str, Any]) -> Hashable:
        return record["task"], record["length"], record["depth"], record["first"]

    settings = {setting(record) for record in records}
    groups = grouped(records, prompts).values()
    return [record for group in groups if {setting(one) for one in group} == settings for record in group]


def results_so_far(file: Path) -> dict[str, Any]:
    """Makes of OUTPUT.jsonl what the run would write to OUTPUT.json, and writes it."""
    # A line that was being written when the run was interrupted does not count.
    lines = file.read_text().split("\n")[:-1]
    common, *records = (json.loads(line) for line in lines) if lines else ({},)
    found = so_far(records)
    if not found:
        raise ValueError("no prompts that every setting has answered yet")
    began, ended = ({(record["task"], record["length"]) for record in some} for some in (records, found))
    left_out = [f"{task} at {length:,}: not measured in every setting yet" for task, length in sorted(began - ended)]
    here, measured = environment(), rows(found)
    where = {name: common.pop(name) for name in here if name in common} | {"command": here["command"]}
    run = {"environment": where, **common, "left_out": left_out, "summary": summary(found)}
    write_results(file.with_suffix(".json"), measured, **run)
    return run | {"rows": measured}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Makes the tables and plots of results of `eval.accuracy` anew.")
    parser.add_argument("file", type=Path, help="OUTPUT.json, or OUTPUT.jsonl of a run that has not ended")
    file = parser.parse_args(argv).file
    try:
        run = results_so_far(file) if file.suffix == ".jsonl" else json.loads(file.read_text())
        print(write(run["rows"], run["summary"], file.with_suffix("")))
    except OSError as error:
        parser.error(str(error))
    except (KeyError, TypeError, ValueError) as error:
        parser.error(f"{file} does not hold what `eval.accuracy` writes: {error}")


if __name__ == "__main__":
    main()
