"""Pictures of a cache: hit rates by layer and step, and which of its tokens lie on the device."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

import torch
from torch import Tensor

from hf_hisparse.stats import CacheStats


COLUMNS = 512
"""The most columns of a map of tokens; of a longer history there are several in each."""


def plot(stats: CacheStats, residency: Tensor) -> Any:
    """A matplotlib `Figure` of two maps with a line for each layer.

    Args:
        stats: Of a cache.
        residency: `[layers, tokens]`, the share of rows that have a token on the device.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError("a plot needs matplotlib: `pip install 'hf-hisparse[plot]'`") from error
    layers = [str(layer.layer) for layer in stats.layers]
    height = 1.6 + 0.12 * min(max(len(layers), 4), 32)
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, height), layout="constrained")
    # A notebook shows what is returned, and would show again what pyplot has open.
    pyplot.close(figure)
    rates, places = hit_rates(stats), binned(residency, COLUMNS)
    rate = "" if stats.hit_rate is None else f", {stats.hit_rate:.1%} in all"
    _map(figure, left, rates, rates.shape[1], layers, f"hit rate{rate}", "latest decode steps")
    share = f", {residency.mean():.1%} in all" if residency.numel() else ""
    _map(figure, right, places, residency.shape[1], layers, f"on the device{share}", "tokens of the history")
    return figure


def _map(figure: Any, axes: Any, values: Tensor, columns: int, layers: list[str], title: str, label: str) -> None:
    """Shares `[layers, any number]` as colours, over an axis of `columns`."""
    axes.set(title=title, xlabel=label, ylabel="layer")
    if not values.numel():
        axes.text(0.5, 0.5, "nothing yet", ha="center", va="center", transform=axes.transAxes)
        axes.set(xticks=[], yticks=[])
        return
    extent = (0, columns, len(layers) - 0.5, -0.5)
    image = axes.imshow(
        values.numpy(), aspect="auto", interpolation="nearest", vmin=0, vmax=1, extent=extent, cmap="viridis"
    )
    shown = range(0, len(layers), -(-len(layers) // 8))
    axes.set_yticks(shown, [layers[i] for i in shown])
    figure.colorbar(image, ax=axes)


def hit_rates(stats: CacheStats) -> Tensor:
    """The hit rate of every layer at each of the latest steps, `[layers, steps]`; NaN where nothing was selected."""
    steps = min((len(layer.steps) for layer in stats.layers), default=0)
    counts = torch.tensor([layer.steps[len(layer.steps) - steps :] for layer in stats.layers], dtype=torch.float32)
    counts = counts.view(len(stats.layers), steps, 2)
    return counts[..., 0] / counts.sum(-1)


def binned(values: Tensor, columns: int) -> Tensor:
    """`[lines, n]` as means over neighbours, `[lines, columns]` or fewer."""
    if values.shape[1] <= columns:
        return values
    return torch.nn.functional.adaptive_avg_pool1d(values.unsqueeze(0), columns).squeeze(0)


def html(title: str, facts: Sequence[tuple[str, str]], stats: CacheStats) -> str:
    """A table of facts for a notebook, with a strip of the layers' hit rates.

    Args:
        title: What it is about.
        facts: Names and values.
        stats: Of a cache.
    """
    lines = [
        f"<tr><th style='text-align:left'>{escape(name)}</th><td style='text-align:left'>{escape(value)}</td></tr>"
        for name, value in facts
    ]
    cells = []
    for layer in stats.layers:
        if layer.hit_rate is not None:
            style = f"display:inline-block;width:8px;height:{1 + round(24 * layer.hit_rate)}px;background:#3a7ebf"
            cells.append(f"<span title='layer {layer.layer}: {layer.hit_rate:.1%}' style='{style}'></span>")
    if cells:
        strip = "&nbsp;".join(cells)
        lines.append(f"<tr><th style='text-align:left'>by layer</th><td style='text-align:left'>{strip}</td></tr>")
    return f"<table><caption>{escape(title)}</caption>{''.join(lines)}</table>"
