"""A worker that inspects the memory of its arguments. Workers import this module by name."""

from __future__ import annotations

import os

import torch


def mapping_of(tensor):
    """The lines of `/proc/self/smaps` about the mapping that holds `tensor`: its head, and its fields in KiB."""
    found = None
    with open("/proc/self/smaps") as maps:
        for line in maps:
            name, _, rest = line.partition(" ")
            if not name.endswith(":"):
                if found:
                    return found
                start, end = (int(bound, 16) for bound in name.split("-"))
                found = {"head": line} if start <= tensor.data_ptr() < end else None
            elif found and rest.strip().endswith("kB"):
                found[name[:-1]] = int(rest.split()[0])
    return found


class Memory:
    """Returns where its arguments are in memory; writes to them and keeps them on request."""

    def __init__(self, context):
        self.context = context
        self.kept = None

    def look(self, value):
        """Read all of `value`, a dictionary of tensors; return where each is mapped and how much of it was copied."""
        sums = {key: float(tensor.double().sum()) for key, tensor in value.items() if torch.is_tensor(tensor)}
        told = {}
        for key in sums:
            lines = mapping_of(value[key])
            told[key] = {
                "sum": sums[key],
                "private": lines["head"].split()[1].endswith("p"),
                "stored": "plasma" in lines["head"],
                "copied": lines["Private_Dirty"] + lines["Anonymous"],
            }
        return told

    def spoil(self, value):
        """Write to the argument in place; return the kilobytes that were copied."""
        before = mapping_of(value["ids"])["Anonymous"]
        value["ids"][0, 0] = -1
        return mapping_of(value["ids"])["Anonymous"] - before

    def keep(self, value):
        self.kept = value["ids"]

    def kept_sum(self):
        return int(self.kept.sum())

    def zeros(self, size):
        """Return a large tensor of its own, with a gradient that is not sent."""
        weight = torch.ones(2, requires_grad=True)
        return {
            "own": torch.zeros(size),
            "view": torch.arange(2 * size)[::2],
            "grad": weight,
            "rank": self.context.rank,
        }

    def pid(self):
        return os.getpid()
