"""The compiled part of `suffix_tree`: a compressed, depth-bounded suffix tree with counts, in flat arrays.

An edge is a run of tokens, stored as a place in the text. Nodes stand where continuations part and where sequences end,
so that all occurrences which entered an edge also went on to its end, but for those of the sequence that is still read.

All that is compiled is in this one file, because numba renews what it kept on disk only when the file itself changes;
assignments of whole rows are written out, because numba takes seconds to compile them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from foredraft.compiled import entry, inner

Ints = NDArray[np.int32]
Floats = NDArray[np.float64]

COLUMNS = 8
PARENT, TOKEN, START, LENGTH, COUNT, CHILD, NEXT, PREVIOUS = range(COLUMNS)
"""Of a node: its parent; the first token of its edge; where in the text the edge's newest full occurrence starts; the
edge's tokens; how many occurrences entered the edge; its first child; its siblings, newest entered first. 0 is none."""
NODE, OFFSET, GROWS = range(3)
"""Of a live suffix, one that is still read: the node whose edge it ends in, how many of the edge's tokens it has, and
whether it is the only one there, so that its leaf grows with the text."""
TOP, FREE, USED, END, OPEN = range(5)
"""Of the header: rows ever used, first free row, rows in use; end of the text, start of the sequence being read."""
ROOT = 0
NOBODY = -1


class Arrays(NamedTuple):
    """A tree: `nodes` `[rows, 8]`, hash `table` of rows by (parent, token), `text`, `live` `[depth, 3]`, `header`."""

    nodes: Ints
    table: Ints
    text: Ints
    live: Ints
    header: NDArray[np.int64]


class Limits(NamedTuple):
    """What a candidate draft may be; `SuffixSettings` documents the fields."""

    budget: int
    factor: float
    offset: float
    floor: float
    smoothing: float
    chain: bool


# The hash table: linear probing, at most half full. Slots hold rows; a row says itself what its key is.


@inner
def _home(parent: int, token: int, size: int) -> int:
    key = np.int64(parent) * np.int64(-7046029254386353131) + np.int64(token) * np.int64(-4417276706812531889)
    key ^= key >> 29
    key *= np.int64(-4658895280553007687)
    return int((((key >> 32) & 0xFFFFFFFF) * size) >> 32)


@inner
def _find(tree: Arrays, parent: int, token: int) -> int:
    size = len(tree.table)
    slot = _home(parent, token, size)
    while True:
        node = tree.table[slot]
        if node == 0 or (tree.nodes[node, PARENT] == parent and tree.nodes[node, TOKEN] == token):
            return int(node)
        slot = slot + 1 if slot + 1 < size else 0


@inner
def _slot_of(tree: Arrays, key_of: int, content: int) -> int:
    """The slot on the way of `key_of`'s key that holds `content`."""
    size = len(tree.table)
    slot = _home(tree.nodes[key_of, PARENT], tree.nodes[key_of, TOKEN], size)
    while tree.table[slot] != content:
        slot = slot + 1 if slot + 1 < size else 0
    return slot


@inner
def _enter(tree: Arrays, node: int) -> None:
    tree.table[_slot_of(tree, node, 0)] = node


@inner
def _leave(tree: Arrays, node: int) -> None:
    """Empty the node's slot and move up what had been pushed behind it."""
    size = len(tree.table)
    hole = _slot_of(tree, node, node)
    slot = hole
    while True:
        slot = slot + 1 if slot + 1 < size else 0
        other = tree.table[slot]
        if other == 0:
            break
        home = _home(tree.nodes[other, PARENT], tree.nodes[other, TOKEN], size)
        if (slot - home) % size >= (slot - hole) % size:
            tree.table[hole] = other
            hole = slot
    tree.table[hole] = 0


@entry
def rehash(tree: Arrays) -> None:
    """Fill an empty table with all nodes below the root, of a tree whose rows are all linked or free (parent -1)."""
    for node in range(1, tree.header[TOP]):
        if tree.nodes[node, PARENT] != NOBODY:
            _enter(tree, node)


# Nodes and their siblings.


@inner
def _new_node(tree: Arrays, parent: int, token: int, start: int, length: int, count: int) -> int:
    node = int(tree.header[FREE])
    if node:
        tree.header[FREE] = tree.nodes[node, NEXT]
    else:
        node = int(tree.header[TOP])
        tree.header[TOP] += 1
    tree.header[USED] += 1
    row = tree.nodes[node]
    row[PARENT], row[TOKEN], row[START], row[LENGTH], row[COUNT] = parent, token, start, length, count
    row[CHILD] = row[NEXT] = row[PREVIOUS] = 0
    return node


@inner
def _free(tree: Arrays, node: int) -> None:
    tree.nodes[node, PARENT] = NOBODY
    tree.nodes[node, NEXT] = tree.header[FREE]
    tree.header[FREE] = node
    tree.header[USED] -= 1


@inner
def _link(tree: Arrays, node: int) -> None:
    """Make it its parent's first child."""
    nodes = tree.nodes
    parent = nodes[node, PARENT]
    following = nodes[parent, CHILD]
    nodes[node, NEXT], nodes[node, PREVIOUS] = following, 0
    if following:
        nodes[following, PREVIOUS] = node
    nodes[parent, CHILD] = node


@inner
def _unlink(tree: Arrays, node: int) -> None:
    nodes = tree.nodes
    before, following = nodes[node, PREVIOUS], nodes[node, NEXT]
    if before:
        nodes[before, NEXT] = following
    else:
        nodes[nodes[node, PARENT], CHILD] = following
    if following:
        nodes[following, PREVIOUS] = before


@inner
def _replace(tree: Arrays, old: int, new: int) -> None:
    """Put `new`, which has the key of `old`, into its place in the table and among its siblings."""
    nodes = tree.nodes
    tree.table[_slot_of(tree, old, old)] = new
    before, following = nodes[old, PREVIOUS], nodes[old, NEXT]
    nodes[new, PREVIOUS], nodes[new, NEXT] = before, following
    if before:
        nodes[before, NEXT] = new
    else:
        nodes[nodes[old, PARENT], CHILD] = new
    if following:
        nodes[following, PREVIOUS] = new


@inner
def _split(tree: Arrays, node: int, offset: int, end: int) -> int:
    """A new node above `node`, at `offset` of its edge, for a live suffix that ends there and at `end` of the text.

    Only here are counts corrected: suffixes that entered the edge but have not got past `offset` have not entered its
    lower part. Every suffix splits once at most, so this search among the live ones is paid for by its extension.
    """
    nodes, live = tree.nodes, tree.live
    row = nodes[node]
    upper = _new_node(tree, row[PARENT], row[TOKEN], end - offset, offset, row[COUNT])
    _replace(tree, node, upper)
    row[START] += offset
    row[LENGTH] -= offset
    for slot in range(len(live)):
        if live[slot, NODE] == node:
            if live[slot, OFFSET] <= offset:
                live[slot, NODE] = upper
                row[COUNT] -= 1
            else:
                live[slot, OFFSET] -= offset
    row[PARENT], row[TOKEN] = upper, tree.text[row[START]]
    _enter(tree, node)
    _link(tree, node)
    return upper


# Reading: every live suffix takes one more token.


@inner
def _step(tree: Arrays, slot: int, at: int) -> None:
    """A live suffix reads the token at `at` of the text, where it is not the only one."""
    nodes, text, suffix = tree.nodes, tree.text, tree.live[slot]
    node, offset, token = suffix[NODE], suffix[OFFSET], text[at]
    if offset < nodes[node, LENGTH]:
        if text[nodes[node, START] + offset] == token:
            suffix[OFFSET] += 1
            if offset + 1 == nodes[node, LENGTH]:
                nodes[node, START] = at - offset
            return
        node = _split(tree, node, offset, at)
    else:
        child = _find(tree, node, token)
        if child:
            nodes[child, COUNT] += 1
            if nodes[child, LENGTH] == 1:
                nodes[child, START] = at
            if nodes[node, CHILD] != child:
                _unlink(tree, child)
                _link(tree, child)
            suffix[NODE], suffix[OFFSET] = child, 1
            return
    leaf = _new_node(tree, node, token, at, 1, 1)
    _enter(tree, leaf)
    _link(tree, leaf)
    suffix[NODE], suffix[OFFSET], suffix[GROWS] = leaf, 1, 1


@inner
def _extend(tree: Arrays, tokens: Ints) -> None:
    """Read tokens at the end of the open sequence. There must be room: two rows for each token and live suffix."""
    nodes, live = tree.nodes, tree.live
    for token in tokens:
        at = tree.header[END]
        tree.text[at] = token
        tree.header[END] += 1
        slot = at % len(live)  # a new suffix starts here, in the place of one that has its full depth
        live[slot, NODE] = live[slot, OFFSET] = live[slot, GROWS] = 0
        for start in range(max(tree.header[OPEN], at - len(live) + 1), at + 1):  # longest first: it makes others' way
            slot = start % len(live)
            if live[slot, GROWS]:
                nodes[live[slot, NODE], LENGTH] += 1
                live[slot, OFFSET] += 1
            else:
                _step(tree, slot, at)


@entry
def extend(tree: Arrays, tokens: Ints) -> None:
    """Read more tokens of the open sequence."""
    _extend(tree, tokens)


@entry
def close(tree: Arrays) -> None:
    """End the open sequence: where its last suffixes end inside an edge, a node marks that fewer occurrences go on."""
    depth, end = len(tree.live), tree.header[END]
    for start in range(max(tree.header[OPEN], end - depth), end):
        suffix = tree.live[start % depth]
        if suffix[OFFSET] < tree.nodes[suffix[NODE], LENGTH]:
            _split(tree, suffix[NODE], suffix[OFFSET], end)
    for slot in range(depth):
        tree.live[slot, NODE] = NOBODY
    tree.header[OPEN] = end


@inner
def _forget(tree: Arrays, start: int, end: int) -> None:
    """Take one occurrence off all prefixes of a suffix; a node that is nothing of its own any more joins its child."""
    nodes = tree.nodes
    node = ROOT
    while start < end:
        child = _find(tree, node, tree.text[start])
        nodes[child, COUNT] -= 1
        if nodes[child, COUNT] == 0:  # all below is of this occurrence only
            _unlink(tree, child)
            while child:
                below = nodes[child, CHILD]
                _leave(tree, child)
                _free(tree, child)
                child = below
            break
        node = child
        start += nodes[child, LENGTH]
    below = nodes[node, CHILD]
    if node != ROOT and below and not nodes[below, NEXT] and nodes[below, COUNT] == nodes[node, COUNT]:
        _leave(tree, below)
        nodes[below, START] -= nodes[node, LENGTH]
        nodes[below, LENGTH] += nodes[node, LENGTH]
        nodes[below, PARENT], nodes[below, TOKEN] = nodes[node, PARENT], nodes[node, TOKEN]
        _replace(tree, node, below)
        _free(tree, node)


@entry
def forget(tree: Arrays, start: int, end: int) -> None:
    """Take the closed sequence `text[start:end]`, the oldest, off the tree."""
    for position in range(start, end):
        _forget(tree, position, min(end, position + len(tree.live)))


# Matching and proposing.


@inner
def _count(tree: Arrays, node: int, offset: int) -> int:
    """Occurrences that have more than `offset` tokens of the node's edge."""
    count = int(tree.nodes[node, COUNT])
    if count > 1 and tree.header[OPEN] < tree.header[END]:
        for slot in range(len(tree.live)):
            if tree.live[slot, NODE] == node and tree.live[slot, OFFSET] <= offset:
                count -= 1
    return count


@inner
def _locate(tree: Arrays, tokens: Ints) -> tuple[int, int]:
    """The node whose edge `tokens` end in and how many of the edge's tokens they have; (-1, 0) if they do not occur."""
    nodes = tree.nodes
    node, offset = ROOT, 0
    for token in tokens:
        if offset < nodes[node, LENGTH]:
            if tree.text[nodes[node, START] + offset] != token:
                return NOBODY, 0
            offset += 1
        else:
            node, offset = _find(tree, node, token), 1
            if node == 0:
                return NOBODY, 0
    return node, offset


@entry
def count(tree: Arrays, tokens: Ints) -> int:
    """Occurrences of `tokens`, at least one and at most as many as the tree is deep."""
    node, offset = _locate(tree, tokens)
    return 0 if node == NOBODY else _count(tree, node, offset - 1)


@inner
def _insert(drafted: Ints, scores: Floats, size: int, score: float) -> tuple[int, int]:
    """Make room for a place behind all that are at least as likely; a full list loses its last, or takes none.

    Returns the row for it, or the full list's end, and the new size.
    """
    if size == len(scores):
        if scores[size - 1] >= score:
            return size, size
        size -= 1
    row = size
    while row > 0 and scores[row - 1] < score:
        scores[row] = scores[row - 1]
        for column in range(4):
            drafted[row, column] = drafted[row - 1, column]
        row -= 1
    scores[row] = score
    return row, size + 1


@inner
def _expand(tree: Arrays, drafted: Ints, scores: Floats, at: int, size: int, limits: Limits) -> int:
    """Insert what follows the place in row `at` in the tree. Returns the list's new size."""
    nodes = tree.nodes
    node, offset, depth = drafted[at, 0], drafted[at, 1], drafted[at, 3]
    above = scores[at]
    inside = offset < nodes[node, LENGTH]
    if inside:  # of an edge: one token can follow
        child, total = node, _count(tree, node, offset)
    else:
        child, total = nodes[node, CHILD], _sum_of_children(tree, node)
        if limits.chain:
            child = _likeliest_child(tree, node)
        offset = 0
    while child:
        seen = total if inside else nodes[child, COUNT]
        score = above * (seen / (total + limits.smoothing / depth))
        if score >= limits.floor:
            row, size = _insert(drafted, scores, size, score)
            if row < len(drafted):
                drafted[row, 0], drafted[row, 1], drafted[row, 2], drafted[row, 3] = child, offset + 1, at, depth + 1
        child = 0 if inside or limits.chain else nodes[child, NEXT]
    return size


@inner
def _sum_of_children(tree: Arrays, node: int) -> int:
    total = 0
    child = tree.nodes[node, CHILD]
    while child:
        total += tree.nodes[child, COUNT]
        child = tree.nodes[child, NEXT]
    return total


@inner
def _likeliest_child(tree: Arrays, node: int) -> int:
    best = child = tree.nodes[node, CHILD]
    while child:
        if tree.nodes[child, COUNT] > tree.nodes[best, COUNT]:
            best = child
        child = tree.nodes[child, NEXT]
    return int(best)


@inner
def _grow(
    tree: Arrays, place: tuple[int, int, int], budget: int, limits: Limits, costs: Floats
) -> tuple[Ints, Floats, float]:
    """The likeliest continuations of a place (node, offset, depth), likeliest first, below the place itself.

    The list holds what is drafted, up to `at`, and then what may be: a child is never likelier than its parent.

    Returns (node, offset, parent's row, depth) of each `[1+N, 4]`, scores `[1+N]`, and what they are worth.
    """
    drafted = np.empty((budget + 1, 4), dtype=np.int32)
    scores = np.empty(budget + 1, dtype=np.float64)
    drafted[0, 0], drafted[0, 1], drafted[0, 3] = place
    drafted[0, 2] = 0
    scores[0] = 1.0
    at, size, total, worth = 0, 1, 0.0, 0.0
    while at < size:
        size = _expand(tree, drafted, scores, at, size, limits)
        at += 1
        if at < size:
            total += scores[at]
            worth = max(worth, (total - costs[at]) / (1.0 + costs[at]))
    return drafted[:size], scores[:size], worth


@inner
def _propose(tree: Arrays, tail: Ints, limits: Limits, found: Any, costs: Floats, least: float) -> tuple[int, float]:
    matches = np.empty((len(tail), 2), dtype=np.int32)
    matched = 0
    while matched < len(tail):
        node, offset = _locate(tree, tail[len(tail) - matched - 1 :])
        if node == NOBODY or (offset == tree.nodes[node, LENGTH] and not tree.nodes[node, CHILD]):
            break  # nor does any longer suffix occur with something behind it
        matches[matched, 0], matches[matched, 1] = node, offset
        matched += 1
    best, best_scores, most = np.empty((1, 4), dtype=np.int32), np.empty(1, dtype=np.float64), least
    for length in range(matched, 0, -1):
        budget = min(limits.budget, len(found), int(limits.factor * length + limits.offset))
        if budget > most:  # else not even certain tokens would be a better candidate
            place = matches[length - 1, 0], matches[length - 1, 1], length
            drafted, scores, worth = _grow(tree, place, budget, limits, costs)
            if worth > most:
                best, best_scores, most = drafted, scores, worth
    for row in range(1, len(best)):
        node = found[row - 1]
        node.token = tree.text[tree.nodes[best[row, 0], START] + best[row, 1] - 1]
        node.parent = best[row, 2] - 1
        node.score = best_scores[row]
    return len(best) - 1, most


# Trees and limits come in their parts: to unpack a tuple that Python holds takes numba several times as long.


@entry
def propose(
    nodes: Ints, table: Ints, text: Ints, live: Ints, header: NDArray[np.int64],
    tail: Ints,
    budget: int, factor: float, offset: float, floor: float, smoothing: float, chain: bool,
    found: Any, costs: Floats, least: float,
) -> tuple[int, float]:  # fmt: skip
    """The best candidate of all match lengths, the longest of equals; see `SuffixTree.propose`."""
    tree, limits = Arrays(nodes, table, text, live, header), Limits(budget, factor, offset, floor, smoothing, chain)
    return _propose(tree, tail, limits, found, costs, least)


@entry
def follow(
    nodes: Ints, table: Ints, text: Ints, live: Ints, header: NDArray[np.int64],
    tokens: Ints, longest: int,
    budget: int, factor: float, offset: float, floor: float, smoothing: float, chain: bool,
    found: Any, costs: Floats,
) -> tuple[int, float]:  # fmt: skip
    """Read tokens, and propose what may come after the last `longest` tokens of the open sequence."""
    tree, limits = Arrays(nodes, table, text, live, header), Limits(budget, factor, offset, floor, smoothing, chain)
    _extend(tree, tokens)
    end = header[END]
    return _propose(tree, text[max(header[OPEN], end - longest) : end], limits, found, costs, 0.0)
