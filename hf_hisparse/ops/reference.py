"""The ops in plain PyTorch: what they mean, on any device.

A faster implementation must equal them bit for bit, except that scores may differ by the rounding of float32. Of two
items whose scores differ by no more than that, it may then select the other one, but always the same one.

An LRU row is described by four tensors that the ops read and write:

- `item_slot [rows, items]` int32: an entry for an item that a slot holds, -1 for any other. The low 15 bits are the
  slot; above are the low 16 bits of the step that brought the item (what that is for, the CUDA kernel says);
- `slot_item [rows, slots]` int32: the item that a slot holds, or -1;
- `last_used [rows, slots]` int32: the step at which a slot was last used, 0 for a slot that never was;
- `clock [rows]` int32: the number of steps taken. `swap_in` takes a step; `append` stamps the step to come. A row that
  selects nothing (a padded batch row) takes no step, and nothing of it is touched.

A history lies in host memory in slabs: `slab_table [rows, slabs]` int64 holds the address of a row's slabs, each of
`items_per_slab` items.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache, reduce
from typing import Any

import torch
from torch import Tensor


SLOT_BITS = 15
MAX_SLOTS = 1 << SLOT_BITS
"""Slots a row: what an entry of `item_slot` has room for."""


def check_slots(op: str, buffer: Tensor) -> None:
    """Raises `ValueError` if a row of `buffer` has more slots than an entry can name."""
    if buffer.shape[1] > MAX_SLOTS:
        raise ValueError(f"{op}: `buffer` holds {buffer.shape[1]} items a row; {MAX_SLOTS} is the most")


def entry(slot: Tensor, step: Tensor) -> Tensor:
    """What `item_slot` says of an item that a step brought to a slot; both int32."""
    return slot | (step & 0xFFFF) << SLOT_BITS


def slot_of(entry: Tensor) -> Tensor:
    """The slot that an entry of `item_slot` names, or -1."""
    return torch.where(entry < 0, entry, entry & MAX_SLOTS - 1)


def in_pytorch(op: Any, *args: Any) -> Any:
    """What an op gives in PyTorch, on any device. To disable its kernel, as PyTorch can, would be for all threads."""
    return op._init_fn(*args)


def host_elements(first: int, count: int, dtype: torch.dtype) -> Tensor:
    """A tensor over `count` elements of this process's memory at address `first`. Only mapped parts may be touched."""
    size = count * dtype.itemsize
    return torch.frombuffer((ctypes.c_char * size).from_address(first), dtype=dtype, count=count)


def _host_rows(addresses: Tensor, elements: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A view of host memory in which row `i` of the result's first dimension is the item at the `i`-th address.

    Returned as `(view, index)`: `view[index]` gathers and `view[index] = x` scatters. The view is made of overlapping
    windows over one span of addresses, so that one indexing call reaches every item wherever its slab lies.
    """
    base, last = int(addresses.min()), int(addresses.max())
    span = (last - base) // dtype.itemsize + elements
    windows = host_elements(base, span, dtype).as_strided((span - elements + 1, elements), (1, 1))
    return windows, (addresses - base) // dtype.itemsize


def _item_addresses(slab_table: Tensor, rows: Tensor, items: Tensor, items_per_slab: int, item_bytes: int) -> Tensor:
    slabs = slab_table[rows, items // items_per_slab]
    return (slabs + items % items_per_slab * item_bytes).cpu()


@torch.library.custom_op(
    "hf_hisparse::swap_in",
    mutates_args=("buffer", "item_slot", "slot_item", "last_used", "clock", "totals", "log", "progress"),
)
def swap_in(
    selection: Tensor,
    slab_table: Tensor,
    items_per_slab: int,
    buffer: Tensor,
    item_slot: Tensor,
    slot_item: Tensor,
    last_used: Tensor,
    clock: Tensor,
    totals: Tensor,
    log: Tensor,
    progress: Tensor,
) -> Tensor:
    """Makes every selected item resident and says where: one LRU step.

    Hits are stamped with this step. Each row's `m` misses take the `m` slots used longest ago (ties: the lowest slot),
    never one hit in this step; in order of selection they take those victims in order of slot, and their bytes are
    copied from host memory.

    Args:
        selection: `[rows, k]` int32 item ids, unique in a row, -1 for none; `k <= slots`.
        slab_table: `[rows, slabs]` int64 host addresses.
        items_per_slab: Items a slab.
        buffer: `[rows, slots, elements]`, the device buffer.
        item_slot, slot_item, last_used, clock: The LRU state (see this module).
        totals: `[rows, 2]` int64, hits and misses so far.
        log: `[rows, steps, 2]` int32, hits and misses of the last `steps` steps, at `step % steps`.
        progress: `[rows, 2]` int32, zero before and after: where the blocks of a kernel meet.

    Returns:
        `[rows, k]` int32: the slot of each selected item, -1 where the selection is -1.
    """
    check_slots("swap_in", buffer)
    rows, _ = selection.shape
    slots = buffer.shape[1]
    row = torch.arange(rows, device=selection.device).unsqueeze(1)
    wanted = selection >= 0
    active = wanted.any(1)
    clock += active
    now = clock.unsqueeze(1)

    found = slot_of(item_slot.gather(1, selection.clamp(min=0).long()))
    found = torch.where(wanted, found, -1)
    hit = found >= 0
    miss = wanted & ~hit
    hits, misses = hit.sum(1), miss.sum(1)

    is_hit_slot = torch.zeros(rows, slots + 1, dtype=torch.bool, device=selection.device)
    is_hit_slot.scatter_(1, torch.where(hit, found, slots).long(), True)
    is_hit_slot = is_hit_slot[:, :slots]
    last_used.copy_(torch.where(is_hit_slot, now, last_used))

    age = last_used.long() * slots + torch.arange(slots, device=selection.device)
    age.masked_fill_(is_hit_slot, torch.iinfo(torch.int64).max)
    rank = age.argsort(dim=1).argsort(dim=1)
    is_victim = rank < misses.unsqueeze(1)
    victims = torch.where(is_victim, torch.arange(slots, device=selection.device), slots).sort(dim=1).values
    order = (miss.cumsum(1) - 1).clamp(min=0)
    found = torch.where(miss, victims.gather(1, order).to(torch.int32), found)

    r, c = miss.nonzero(as_tuple=True)
    if len(r):
        slot, item = found[r, c].long(), selection[r, c].long()
        evicted = slot_item[r, slot]
        gone = evicted >= 0
        item_slot[r[gone], evicted[gone].long()] = -1
        item_slot[r, item] = entry(slot.to(torch.int32), clock[r])
        slot_item[r, slot] = item.to(torch.int32)
        last_used[r, slot] = clock[r]
        item_bytes = buffer.shape[2] * buffer.element_size()
        addresses = _item_addresses(slab_table, r, item, items_per_slab, item_bytes)
        windows, index = _host_rows(addresses, buffer.shape[2], buffer.dtype)
        buffer[r, slot] = windows[index].to(buffer.device)

    counts = torch.stack((hits, misses), dim=1)
    totals += counts
    log[row.squeeze(1)[active], (clock % log.shape[1]).long()[active]] = counts[active].to(torch.int32)
    return found


@swap_in.register_fake
def _(selection, slab_table, items_per_slab, buffer, item_slot, slot_item, last_used, clock, totals, log, progress):
    return torch.empty_like(selection)


@torch.library.custom_op("hf_hisparse::append", mutates_args=("buffer", "item_slot", "slot_item", "last_used"))
def append(
    token: Tensor,
    position: Tensor,
    page_size: int,
    widths: list[int],
    slab_table: Tensor,
    items_per_slab: int,
    buffer: Tensor,
    item_slot: Tensor,
    slot_item: Tensor,
    last_used: Tensor,
    clock: Tensor,
) -> None:
    """Writes one new token a row through to host memory and to the device buffer, as most recently used.

    A token that opens an item takes the slot used longest ago (ties: the lowest), unless the item is resident already;
    one that continues an item is written to the buffer where that item is resident, and to host memory alone where it
    is not. Its slot is stamped with the coming step.

    Args:
        token: `[rows, sum(widths)]`, the token's parts side by side.
        position: `[rows]` int64, the token's index in the history; negative for a row that takes none.
        page_size: Tokens an item.
        widths: Elements a token in each part (see `ItemLayout`).
        slab_table, items_per_slab, buffer, item_slot, slot_item, last_used, clock: As for `swap_in`.
    """
    check_slots("append", buffer)
    active = (position >= 0).nonzero().squeeze(1)
    if not len(active):
        return
    token, position, row = token[active], position[active], active
    item, within = position // page_size, position % page_size
    columns = []
    offset = 0
    for width in widths:
        columns.append(offset + within.unsqueeze(1) * width + torch.arange(width, device=token.device))
        offset += page_size * width
    column = torch.cat(columns, dim=1)

    item_bytes = buffer.shape[2] * buffer.element_size()
    addresses = _item_addresses(slab_table, row, item, items_per_slab, item_bytes)
    windows, index = _host_rows(addresses, buffer.shape[2], buffer.dtype)
    windows[index.unsqueeze(1), column.cpu()] = token.cpu()

    slot = slot_of(item_slot[row, item])
    opens = (within == 0) & (slot < 0)
    slots = buffer.shape[1]
    age = last_used[row].long() * slots + torch.arange(slots, device=token.device)
    slot = torch.where(opens, age.argmin(dim=1).to(torch.int32), slot)
    resident = slot >= 0

    r, s, i = row[opens], slot[opens].long(), item[opens]
    evicted = slot_item[r, s]
    gone = evicted >= 0
    item_slot[r[gone], evicted[gone].long()] = -1
    item_slot[r, i] = entry(s.to(torch.int32), clock[r])
    slot_item[r, s] = i.to(torch.int32)

    r, s = row[resident], slot[resident].long()
    buffer[r.unsqueeze(1), s.unsqueeze(1), column[resident]] = token[resident]
    last_used[r, s] = clock[r] + 1


@append.register_fake
def _(
    token,
    position,
    page_size,
    widths,
    slab_table,
    items_per_slab,
    buffer,
    item_slot,
    slot_item,
    last_used,
    clock,
):
    return None


# ---- selection -------------------------------------------------------------------------------------------------------


def valid_tokens(tokens: int, lengths: Tensor) -> Tensor:
    """Which of `tokens` tokens can be attended to: a row's first `lengths`. `[rows, tokens]` bool."""
    return torch.arange(tokens, device=lengths.device) < lengths.unsqueeze(1)


def softmax_mass(logits: Tensor, valid: Tensor) -> Tensor:
    """The attention that each entry would draw, summed over a group's query heads.

    Heads are normalised before they are summed: a head with large logits would otherwise choose for its whole group.
    Invalid entries at the end change no bit of the others: a head's weights are summed in fixed point, in which every
    order of addition gives the same, and heads one after the other.

    Args:
        logits: `[rows, group, entries]` float32.
        valid: `[rows, entries]` bool.
    """
    logits = logits.masked_fill(~valid.unsqueeze(1), -torch.inf)
    weights = (logits - logits.amax(dim=-1, keepdim=True)).exp().nan_to_num(0.0)
    # The largest weight is 1, so that 40 bits behind the point lose nothing that float32 could hold of the sum.
    total = (weights * 2.0**40).long().sum(dim=-1, keepdim=True).clamp(min=1).float() / 2.0**40
    return reduce(torch.add, (weights / total).unbind(1))


@torch.library.custom_op("hf_hisparse::top_k", mutates_args=())
def top_k(
    scores: Tensor,
    k: int,
    lengths: Tensor | None = None,
    page_size: int = 1,
    sink_tokens: int = 0,
    recent_tokens: int = 0,
) -> Tensor:
    """Selects the `k` best scored items of every row, exactly.

    Of equal scores the lowest items are taken, and -0 equals 0. Items that score -inf or NaN are never selected.

    Args:
        scores: `[rows, items]` float32.
        k: Items to select.
        lengths: `[rows]` int64: only items of the first `lengths` tokens are selected. None for all.
        page_size: Tokens an item.
        sink_tokens, recent_tokens: Where there are `lengths`, the items of so many of the first and of the last tokens
            rank as if they scored +inf.

    Returns:
        `[rows, k]` int32 item ids, unique and ascending, padded with -1 at the end.
    """
    rows, items = scores.shape
    item = torch.arange(items, device=scores.device)
    scores = scores.masked_fill(scores.isnan(), -torch.inf)
    if lengths is not None:
        first, length = item * page_size, lengths.unsqueeze(1)
        scores = scores.masked_fill(first < sink_tokens, torch.inf)
        if recent_tokens:
            scores = scores.masked_fill(item >= (length - recent_tokens) // page_size, torch.inf)
        scores = scores.masked_fill(first >= length, -torch.inf)
    count = min(k, items)
    threshold = scores.topk(count, dim=1).values[:, -1:] if count else scores.new_full((rows, 1), torch.inf)
    above, ties = scores > threshold, scores == threshold
    taken = above | (ties & (ties.cumsum(1) <= count - above.sum(1, keepdim=True)))
    taken &= scores > -torch.inf
    place = torch.where(taken, taken.cumsum(1) - 1, k)
    selection = torch.full((rows, k + 1), -1, dtype=torch.int32, device=scores.device)
    return selection.scatter_(1, place, item.to(torch.int32).expand(rows, -1))[:, :k].contiguous()


@top_k.register_fake
def _(scores, k, lengths=None, page_size=1, sink_tokens=0, recent_tokens=0):
    return scores.new_empty(scores.shape[0], k, dtype=torch.int32)


def quest_bound(query: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """The most that any key within a page's bounding box scores, `[rows, group, pages]` float32.

    Args:
        query: `[rows, group, width]`.
        low, high: `[rows, pages, width]`.
    """
    query = query.float()
    low, high = low.float().transpose(1, 2), high.float().transpose(1, 2)
    return query.clamp(min=0) @ high + query.clamp(max=0) @ low


@torch.library.custom_op("hf_hisparse::score_quest", mutates_args=())
def score_quest(
    query: Tensor,
    low: Tensor,
    high: Tensor,
    items: int,
    page_size: int,
    scale: float,
    lengths: Tensor,
) -> Tensor:
    """Quest's scores: the softmax over pages of the bound on their keys' logits, summed over a group's query heads.

    Args:
        query: `[rows, group, width]`, the query heads that share a row's KV head.
        low, high: `[rows, capacity, width]`, the bounding boxes of pages; `items <= capacity`.
        items: How many pages the history has.
        page_size: Tokens a page.
        scale: The softmax scale of the attention.
        lengths: `[rows]` int64: the first `lengths` tokens of a row can be attended to.

    Returns:
        `[rows, items]` float32; 0 for a page of no such token.
    """
    valid = valid_tokens(items * page_size, lengths).unflatten(1, (items, page_size)).any(2)
    return softmax_mass(quest_bound(query, low[:, :items], high[:, :items]) * scale, valid)


@score_quest.register_fake
def _(query, low, high, items, page_size, scale, lengths):
    return query.new_empty(query.shape[0], items, dtype=torch.float32)


@torch.library.custom_op("hf_hisparse::select_quest", mutates_args=())
def select_quest(
    query: Tensor,
    low: Tensor,
    high: Tensor,
    items: int,
    page_size: int,
    scale: float,
    lengths: Tensor,
    k: int,
    sink_tokens: int,
    recent_tokens: int,
) -> Tensor:
    """`top_k` of `score_quest`, whose arguments it takes."""
    scores = score_quest(query, low, high, items, page_size, scale, lengths)
    return top_k(scores, k, lengths, page_size, sink_tokens, recent_tokens)


@select_quest.register_fake
def _(query, low, high, items, page_size, scale, lengths, k, sink_tokens, recent_tokens):
    return query.new_empty(query.shape[0], k, dtype=torch.int32)


ROTATION_SIGNS = (
    (0x4A64E8A8, 0xABF7CE3E, 0xBE7C9446, 0xBF342A8C, 0xB9907BF4, 0x96C31F65, 0x27548474, 0x1370462C),
    (0x377276B7, 0x307C2456, 0x3C665AB9, 0x409CE8B3, 0x95C2ECAF, 0x40F5E438, 0xB533AFCF, 0x69FEA2A0),
    (0x9F479A05, 0xAEC58714, 0xA0ED2194, 0x1FEAA33A, 0x047F0C17, 0xD8FFC64A, 0x63B76AA1, 0x03045A67),
    (0xF054BB76, 0x91CB2AF0, 0x2A8F5F8D, 0x133F8C27, 0x9CB2E35F, 0xC198CA28, 0x7A720844, 0x237719D0),
)
"""Of every round of RaBitQ's rotation, the channels that change their sign, 32 a word."""


@lru_cache
def rotation(width: int, device: torch.device) -> Tensor:
    """RaBitQ's fixed random rotation, `[width, width]` float32: rounds of random signs and a Hadamard transform.

    After it no channel stands out. A width that is no power of two is an odd number of blocks that are one, which a
    cosine transform mixes.

    Args:
        width: Channels.
    """
    block = width & -width
    odd = width // block
    hadamard = torch.ones(1, 1, dtype=torch.float64)
    while len(hadamard) < block:
        hadamard = torch.cat((torch.cat((hadamard, hadamard), 1), torch.cat((hadamard, -hadamard), 1))) / 2**0.5
    own, other = torch.arange(odd, dtype=torch.float64), torch.arange(odd, dtype=torch.float64).unsqueeze(1) + 0.5
    mixing = (torch.pi * other * own / odd).cos() * ((1 + (own > 0)) / odd).sqrt()
    found = torch.eye(width, dtype=torch.float64)
    for words in ROTATION_SIGNS:
        bits = torch.tensor([word >> i & 1 for word in words for i in range(32)]).repeat(-(-width // 256))[:width]
        found = found * (1 - 2 * bits) @ torch.kron(mixing, hadamard)
    return found.float().to(device)


def rabitq_bits(centred: Tensor) -> tuple[Tensor, Tensor]:
    """What RaBitQ keeps of centred keys.

    Args:
        centred: `[rows, n, width]` float32.

    Returns:
        Bits `[rows, n, width / 8]` uint8, least significant first, and scales `[rows, n]` float16.
    """
    x = centred @ rotation(centred.shape[-1], centred.device)
    scale = x.square().sum(-1) / x.abs().sum(-1).clamp(min=torch.finfo(torch.float32).tiny)
    bits = (x >= 0).unflatten(-1, (-1, 8)).to(torch.uint8) << torch.arange(8, dtype=torch.uint8, device=x.device)
    return bits.sum(-1, dtype=torch.uint8), scale.to(torch.float16)


GRAIN = 2.0**-32
"""Keys are summed as whole multiples of it, in int64: in any order, and of any parts, their sum is the same."""
LARGEST = 2.0**22
"""What is larger counts as this, so that a block of 256 keys cannot overflow; what is no number, as zero."""


def grains(keys: Tensor) -> Tensor:
    """Keys as int64 multiples of `GRAIN`."""
    return (keys.double().nan_to_num(0.0).clamp(-LARGEST, LARGEST) / GRAIN).round().long()


def mean_of_grains(total: Tensor, count: Tensor) -> Tensor:
    """The mean, float32, of `count` keys whose grains sum to `total`; zero for none."""
    return (total.double() / count.clamp(min=1) * GRAIN).float()


@torch.library.custom_op("hf_hisparse::encode_rabitq", mutates_args=("bits", "scales", "centres", "total", "count"))
def encode_rabitq(
    key: Tensor,
    position: Tensor,
    bits: Tensor,
    scales: Tensor,
    centres: Tensor,
    total: Tensor,
    count: Tensor,
    block: int,
) -> None:
    """Adds one new token a row to what RaBitQ keeps of the keys.

    A token that opens a block makes the mean of the block before it the centre of its own.

    Args:
        key: `[rows, width]`.
        position: `[rows]` int64, the token's index in the history.
        bits, scales, centres: As for `score_rabitq`.
        total, count: `[rows, width]` and `[rows, 1]` int64, sum, in grains, and number of the keys of the newest block.
        block: Tokens a block.
    """
    rows = torch.arange(len(key), device=key.device)
    opens = (position % block == 0).unsqueeze(1)
    centre = torch.where(opens, mean_of_grains(total, count).to(key.dtype), centres[rows, position // block])
    centres[rows, position // block] = centre
    total.copy_(torch.where(opens, 0, total) + grains(key))
    count.copy_(torch.where(opens, 0, count) + 1)
    entries = rabitq_bits((key.float() - centre.float()).unsqueeze(1))
    bits[rows, position], scales[rows, position] = (entry.squeeze(1) for entry in entries)


@encode_rabitq.register_fake
def _(key, position, bits, scales, centres, total, count, block):
    return None


@torch.library.custom_op("hf_hisparse::encode_quest", mutates_args=("low", "high"))
def encode_quest(key: Tensor, position: Tensor, low: Tensor, high: Tensor, page_size: int) -> None:
    """Widens the bounding box of the page that each row's new token lies in. A token that opens a page is its box.

    Args:
        key: `[rows, width]`.
        position: `[rows]` int64, the token's index in the history.
        low, high: As for `score_quest`, of the key's dtype.
        page_size: Tokens a page.
    """
    rows, page = torch.arange(len(key), device=key.device), position // page_size
    opens = (position % page_size == 0).unsqueeze(1)
    for box, widened in ((low, torch.minimum), (high, torch.maximum)):
        box[rows, page] = torch.where(opens, key, widened(box[rows, page], key))


@encode_quest.register_fake
def _(key, position, low, high, page_size):
    return None


TOKENS_UNPACKED = 1 << 14
"""Tokens whose bits are unpacked at a time: unpacked signs are 32 times the bits."""


@torch.library.custom_op("hf_hisparse::score_rabitq", mutates_args=())
def score_rabitq(
    query: Tensor,
    bits: Tensor,
    scales: Tensor,
    centres: Tensor,
    block: int,
    items: int,
    page_size: int,
    scale: float,
    lengths: Tensor,
) -> Tensor:
    """RaBitQ's scores: the softmax over tokens of the estimated logits, summed over items and a group's query heads.

    A token's logit is estimated as `scale * (q . centre + (q R) . (token_scale * signs))`.

    Args:
        query: `[rows, group, width]`, the query heads that share a row's KV head.
        bits: `[rows, capacity, width / 8]` uint8, of every token the signs of its key, least significant bit first.
        scales: `[rows, capacity]` float16, the token's scale.
        centres: `[rows, blocks, width]`, the centre of each block of tokens.
        block: Tokens a block.
        items: How many items the history has.
        page_size: Tokens an item.
        scale: The softmax scale of the attention.
        lengths: `[rows]` int64: the first `lengths` tokens of a row can be attended to.

    Returns:
        `[rows, items]` float32; 0 for an item of no such token.
    """
    tokens = min(items * page_size, bits.shape[1])
    query = query.float() * scale
    rotated = query @ rotation(query.shape[-1], query.device)
    offset = query @ centres.float().transpose(1, 2)
    logits = query.new_full((*query.shape[:2], items * page_size), -torch.inf)
    shifts = torch.arange(8, dtype=torch.uint8, device=query.device)
    for low in range(0, tokens, TOKENS_UNPACKED):
        high = min(low + TOKENS_UNPACKED, tokens)
        signs = (bits[:, low:high].unsqueeze(-1) >> shifts & 1).flatten(-2).float() * 2 - 1
        blocks = torch.arange(low, high, device=query.device) // block
        products = rotated @ signs.transpose(1, 2) * scales[:, low:high].float().unsqueeze(1)
        logits[:, :, low:high] = products + offset[:, :, blocks]
    valid = valid_tokens(items * page_size, lengths)
    return softmax_mass(logits, valid).unflatten(1, (items, page_size)).sum(2)


@score_rabitq.register_fake
def _(query, bits, scales, centres, block, items, page_size, scale, lengths):
    return query.new_empty(query.shape[0], items, dtype=torch.float32)


@torch.library.custom_op("hf_hisparse::select_rabitq", mutates_args=())
def select_rabitq(
    query: Tensor,
    bits: Tensor,
    scales: Tensor,
    centres: Tensor,
    block: int,
    items: int,
    page_size: int,
    scale: float,
    lengths: Tensor,
    unscored: int,
    k: int,
    sink_tokens: int,
    recent_tokens: int,
) -> Tensor:
    """`top_k` of `score_rabitq`, whose arguments it takes, of all but the `unscored` newest tokens.

    What is kept of those is not looked at: they may be encoded at the same time. To be selected they must be recent.
    """
    scores = score_rabitq(query, bits, scales, centres, block, items, page_size, scale, lengths - unscored)
    return top_k(scores, k, lengths, page_size, sink_tokens, recent_tokens)


@select_rabitq.register_fake
def _(query, bits, scales, centres, block, items, page_size, scale, lengths, unscored, k, sink, recent):
    return query.new_empty(query.shape[0], k, dtype=torch.int32)


PRODUCTS = 1 << 24
"""Elements of `[batch, queries, heads, tokens]` in flight."""


@torch.library.custom_op("hf_hisparse::score_indexer", mutates_args=())
def score_indexer(
    query: Tensor,
    weights: Tensor,
    keys: Tensor,
    tokens: int,
    scale: float,
    positions: Tensor,
) -> Tensor:
    """The lightning indexer's scores (DeepSeek-V3.2): `sum_h w_h relu(scale q_h . k)`, in float32.

    A row's queries are consecutive tokens, and each sees the tokens before it and itself. Only what is summed over
    heads is kept, so that memory is that of the scores.

    Args:
        query: `[batch, queries, heads, width]`.
        weights: `[batch, queries, heads]` float32, the weight of each head's score.
        keys: `[batch, capacity, width]`, in the query's dtype; `tokens <= capacity`.
        tokens: How many keys are scored.
        scale: Multiplies `q . k`; positive.
        positions: `[batch]` int64, which token a row's first query is.

    Returns:
        `[batch, queries, tokens]` float32; -inf for what a query does not see.
    """
    batch, queries, heads, _ = query.shape
    scores = query.new_empty(batch, queries, tokens, dtype=torch.float32)
    token = torch.arange(tokens, device=query.device)
    last = (positions.unsqueeze(1) + torch.arange(queries, device=query.device)).unsqueeze(-1)
    key_block = max(1, min(tokens, PRODUCTS // (batch * heads)))
    query_block = max(1, PRODUCTS // (batch * heads * key_block))
    for low in range(0, queries, query_block):
        some = slice(low, low + query_block)
        q, w = query[:, some].float(), weights[:, some].unsqueeze(-2)
        for first in range(0, tokens, key_block):
            part = slice(first, min(first + key_block, tokens))
            products = q.flatten(1, 2) @ keys[:, part].float().transpose(1, 2) * scale
            scores[:, some, part] = (w @ products.relu_().unflatten(1, q.shape[1:3])).squeeze(-2)
        scores[:, some].masked_fill_(token > last[:, some], -torch.inf)
    return scores


@score_indexer.register_fake
def _(query, weights, keys, tokens, scale, positions):
    return query.new_empty(*query.shape[:2], tokens, dtype=torch.float32)


@torch.library.custom_op("hf_hisparse::list_tokens", mutates_args=())
def list_tokens(
    slots: Tensor,
    selection: Tensor,
    lengths: Tensor,
    page_size: int,
    row_stride: int,
    slot_stride: int,
    runs: int,
    run_tokens: int,
) -> tuple[Tensor, Tensor]:
    """The tokens that a selection sees, without the holes, in its order: a page table of pages of one token.

    A row's list is cut into runs, of which the last ones may be empty.

    Args:
        slots, selection, lengths: See `AttentionBackend.attend`.
        page_size: Tokens an item.
        row_stride, slot_stride: Token `t` of slot `s` of row `r` is listed as `r * row_stride + s * slot_stride + t`.
        runs, run_tokens: How the list is cut; it holds `k * page_size` tokens or more.

    Returns:
        `[rows, runs, run_tokens]` int32, -1 after the last token, and how many there are: `[rows, runs]` int32.
    """
    rows, k = selection.shape
    device = selection.device
    within = torch.arange(page_size, device=device)
    position = selection.long().unsqueeze(-1) * page_size + within
    seen = ((selection >= 0) & (slots >= 0)).unsqueeze(-1)
    seen = (seen & (position < lengths.view(-1, 1, 1))).flatten(1)
    first = torch.arange(rows, device=device).unsqueeze(1) * row_stride + slots.long() * slot_stride
    listed = (first.unsqueeze(-1) + within).flatten(1)
    total = seen.sum(1, keepdim=True)
    listed = listed.gather(1, (~seen).byte().argsort(dim=1, stable=True))
    tokens = torch.full((rows, runs * run_tokens), -1, dtype=torch.int32, device=device)
    column = torch.arange(k * page_size, device=device)
    tokens[:, : k * page_size] = torch.where(column < total, listed, -1).int()
    counts = (total - torch.arange(runs, device=device) * run_tokens).clamp(0, run_tokens).int()
    return tokens.unflatten(1, (runs, run_tokens)), counts


@list_tokens.register_fake
def _(slots, selection, lengths, page_size, row_stride, slot_stride, runs, run_tokens):
    rows = selection.shape[0]
    shapes = (rows, runs, run_tokens), (rows, runs)
    return tuple(selection.new_empty(shape, dtype=torch.int32) for shape in shapes)


@torch.library.custom_op("hf_hisparse::merge_runs", mutates_args=())
def merge_runs(partial: Tensor, weights: Tensor, counts: Tensor, sinks: Tensor | None = None) -> Tensor:
    """Attention over some runs of tokens, from attention over each (flash-decoding), in float32.

    Args:
        partial: `[rows, runs, heads, width]`, attention over each run.
        weights: `[rows, runs, heads]` float32, the log of the sum of the exponents of a run's logits.
        counts: `[rows, runs]` int32, tokens a run. Nothing else of an empty one counts.
        sinks: `[rows, heads]`, a logit a head that takes part in the softmax and has no value, if given.

    Returns:
        `[rows, heads, width]` in the dtype of `partial`; zeros where all runs are empty.
    """
    some = (counts > 0).unsqueeze(-1)
    weights = weights.masked_fill(~some, -torch.inf)
    high = weights.amax(1)
    if sinks is not None:
        high = torch.maximum(high, sinks.float())
    high = high.masked_fill(high == -torch.inf, 0)
    shares = torch.exp(weights - high.unsqueeze(1))
    total = shares.sum(1)
    if sinks is not None:
        total += torch.exp(sinks.float() - high)
    values = partial.float().masked_fill(~some.unsqueeze(-1), 0)
    merged = (shares.unsqueeze(-1) * values).sum(1) / total.masked_fill(total == 0, 1).unsqueeze(-1)
    return merged.to(partial.dtype)


@merge_runs.register_fake
def _(partial, weights, counts, sinks=None):
    return partial.new_empty(partial.shape[0], *partial.shape[2:])
