"""What a notebook shows of a cache, and the figures behind it."""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_hisparse import HierarchicalSparseCache, plotting
from hf_hisparse.stats import CacheStats, LayerStats
from tests.helpers import METHODS, decode, random_ids


PROMPT, NEW = 150, 12


@pytest.fixture(params=METHODS)
def cache(request, tiny) -> HierarchicalSparseCache:
    name, options = METHODS[request.param]
    cache = HierarchicalSparseCache(tiny(name), **options)
    decode(tiny(name), random_ids(2, PROMPT + NEW), cache, PROMPT)
    return cache


def resident_tokens(cache: HierarchicalSparseCache) -> Tensor:
    """The share of rows that have a token, looked up one by one."""
    lines = []
    for layer in cache.layers:
        memory, length = layer.coordinator.memory, layer.coordinator.length
        entries = memory.buffer.item_slot.cpu()
        page = memory.layout.page_size
        lines.append([sum(int(entries[r, t // page]) >= 0 for r in range(memory.rows)) for t in range(length)])
    return torch.tensor(lines) / memory.rows


def test_residency(cache):
    """What the map from items to slots says, within the history alone."""
    found = cache.residency()
    assert found.dtype == torch.float32 and torch.equal(found, resident_tokens(cache))
    assert 0 < found.mean() < 1 and (found[:, -1] == 1).all()
    cache.crop(-30)
    assert cache.residency().shape == (len(cache.layers), PROMPT + NEW - 30)
    assert torch.equal(cache.residency(), resident_tokens(cache))


def test_residency_of_what_is_all_on_the_device(tiny):
    _, options = METHODS["llama-quest"]
    short = HierarchicalSparseCache(tiny("llama"), **options)
    assert short.residency().shape == (2, 0)
    decode(tiny("llama"), random_ids(1, 30), short, 29)
    resident = HierarchicalSparseCache(tiny("llama"), **options, offload=False)
    decode(tiny("llama"), random_ids(1, 99), resident, 98)
    assert torch.equal(short.residency(), torch.ones(2, 30)) and torch.equal(resident.residency(), torch.ones(2, 99))


def stats(*steps: list[tuple[int, int]]) -> CacheStats:
    layers = [
        LayerStats(7 + i, sum(h for h, _ in one), sum(m for _, m in one), 0, 0, 0, one) for i, one in enumerate(steps)
    ]
    return CacheStats(layers, 0)


def test_hit_rates_line_up_at_the_latest_step():
    found = plotting.hit_rates(stats([(1, 3), (4, 0), (0, 2)], [(1, 1), (0, 0)]))
    assert torch.equal(found.nan_to_num(-1), torch.tensor([[1.0, 0.0], [0.5, -1.0]]))
    assert plotting.hit_rates(stats()).shape == (0, 0) and plotting.hit_rates(stats([], [])).shape == (2, 0)


@pytest.mark.parametrize("tokens", [1, 5, 6, 23, 24])
def test_bins_are_means_of_neighbours(tokens):
    values = torch.arange(2.0 * tokens).view(2, tokens)
    found, columns = plotting.binned(values, 6), min(tokens, 6)
    edges = [(i * tokens // columns, -(-(i + 1) * tokens // columns)) for i in range(columns)]
    torch.testing.assert_close(found, torch.stack([values[:, low:high].mean(1) for low, high in edges], dim=1))


class Cells(HTMLParser):
    """What is in the cells of a table, and that all that opens is closed."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.cells: list[str] = []
        self.titles: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        self.open.append(tag)
        self.titles += [value for name, value in attributes if name == "title"]
        if tag in ("th", "td"):
            self.cells.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1] in ("th", "td"):
            self.cells[-1] += data


def test_html(cache):
    shown, counted = Cells(cache._repr_html_()), cache.stats()
    found = dict(zip(shown.cells[::2], shown.cells[1::2], strict=True))
    assert found["tokens"] == f"{PROMPT + NEW} x 2" and f"{counted.hit_rate:.1%}" in found["hit rate"]
    assert f"{counted.device_bytes / 2**20:.1f} MiB" in found["on the device"]
    assert shown.titles == [f"layer {layer.layer}: {layer.hit_rate:.1%}" for layer in counted.layers]


def test_html_of_nothing_yet(tiny):
    cache = HierarchicalSparseCache(tiny("llama"))
    shown = Cells(cache._repr_html_())
    assert "hit rate" not in shown.cells and not shown.titles
    assert Cells(plotting.html("<a>", [("b", "1 < 2 & 3")], stats())).cells == ["b", "1 < 2 & 3"]


def test_plot(cache):
    """Its two maps are the figures, and pyplot has nothing open."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    figure = cache.plot()
    assert pyplot.get_fignums() == []
    rates, places = (axes.images[0] for axes in figure.axes[:2])
    assert torch.equal(torch.tensor(rates.get_array().data), plotting.hit_rates(cache.stats()))
    assert torch.equal(torch.tensor(places.get_array().data), cache.residency())
    assert f"{cache.stats().hit_rate:.1%}" in figure.axes[0].get_title()
    figure.canvas.draw()


def test_plot_of_nothing_yet(tiny):
    pytest.importorskip("matplotlib")
    figure = HierarchicalSparseCache(tiny("llama")).plot()
    figure.canvas.draw()
    assert [axes.texts[0].get_text() for axes in figure.axes] == ["nothing yet"] * 2


def test_plot_without_matplotlib(tiny, monkeypatch):
    cache = HierarchicalSparseCache(tiny("llama"))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=re.escape("`pip install 'hf-hisparse[plot]'`")):
        cache.plot()
