"""Private windows into a file that others fill: they show the stored bytes, regardless of other writers."""

from __future__ import annotations

import gc
import mmap
import os
import random
import sys

import pytest

from rlframework.workers.ray import private_memory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is mapped on Linux only")
PAGES = 64
PAGE = mmap.PAGESIZE


class Store:
    """A file in memory, and the ranges of it that still have readers."""

    def __init__(self):
        self.file = os.memfd_create("store")
        os.ftruncate(self.file, PAGES * PAGE)
        self.memory = mmap.mmap(self.file, PAGES * PAGE)


@pytest.fixture
def store(monkeypatch):
    monkeypatch.setattr(private_memory, "_MAPPINGS", {})
    return Store()


class Keep:
    """Represents a reader's reference to a stored object."""


def open_windows(store):
    return private_memory._MAPPINGS[store.file].open


def test_a_window_shows_the_stored_bytes_and_its_writes_are_private(store):
    store.memory[100:200] = bytes(range(100))
    view = private_memory.window(store.file, 100, 100, Keep())
    assert bytes(view) == bytes(range(100))
    view[0] = 99
    assert store.memory[100] == 0
    assert view[0] == 99


def test_writes_are_discarded_when_the_window_closes(store):
    view = private_memory.window(store.file, 0, 3 * PAGE, Keep())
    view[5] = view[2 * PAGE] = 7
    part = view[:10]
    del view
    assert part[5] == 7  # a view of a part holds the window open
    del part
    gc.collect()
    assert not open_windows(store)
    store.memory[5] = 1
    store.memory[2 * PAGE] = 2
    again = private_memory.window(store.file, 0, 3 * PAGE, Keep())
    assert (again[5], again[2 * PAGE]) == (1, 2)


def test_the_owner_lives_as_long_as_a_view(store):
    gone = []

    class Told(Keep):
        def __del__(self):
            gone.append(True)

    view = private_memory.window(store.file, 0, PAGE, Told())
    part = view[3:5]
    del view
    gc.collect()
    assert not gone
    del part
    gc.collect()
    assert gone == [True]


def test_overlapping_windows_are_independent(store):
    store.memory[:PAGE] = b"x" * PAGE
    first, second = (private_memory.window(store.file, 10, 100, Keep()) for _ in range(2))
    neighbour = private_memory.window(store.file, 200, 100, Keep())  # another part of the same page
    first[0] = second[1] = neighbour[2] = ord("y")
    assert bytes(first[:3]) == b"yxx"
    assert bytes(second[:3]) == b"xyx"
    assert bytes(neighbour[:3]) == b"xxy"
    assert len(open_windows(store)) == 1


def test_without_pagemap_the_whole_range_is_discarded(store, monkeypatch):
    monkeypatch.setattr(private_memory, "open", lambda *args, **kwargs: (_ for _ in ()).throw(OSError()), raising=False)
    view = private_memory.window(store.file, 0, PAGE, Keep())
    view[0] = 5
    del view
    gc.collect()
    store.memory[0] = 6
    assert private_memory.window(store.file, 0, PAGE, Keep())[0] == 6


@pytest.mark.parametrize("seed", range(10))
def test_any_order_of_filling_reading_writing_and_closing(store, seed):
    """Ranges that nobody reads are filled anew, as a store does it; whatever is held stays as its holder left it."""
    dice = random.Random(seed)
    held = []  # [view, bytes expected, start, size]
    for _ in range(400):
        action = dice.random()
        if action < 0.45 or not held:
            start = dice.randrange(0, (PAGES - 4) * PAGE)
            size = dice.randrange(1, 3 * PAGE)
            if all(start + size <= other[2] or other[2] + other[3] <= start for other in held):
                store.memory[start : start + size] = content = dice.randbytes(size)
                held.append([private_memory.window(store.file, start, size, Keep()), bytearray(content), start, size])
        elif action < 0.6:  # the same again, while the first is still held
            _, _, start, size = dice.choice(held)
            content = bytearray(store.memory[start : start + size])
            held.append([private_memory.window(store.file, start, size, Keep()), content, start, size])
        elif action < 0.8:
            view, expected, _, size = dice.choice(held)
            place = dice.randrange(size)
            view[place] = expected[place] = dice.randrange(256)
        else:
            held.pop(dice.randrange(len(held)))
        for view, expected, _, _ in held:
            assert bytes(view) == expected
