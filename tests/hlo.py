"""Kernels of the SGD step in a compiled program."""

from __future__ import annotations

import collections
import re

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$")
_OPERATION = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = .*? ([a-z\-]+)\(")
_KERNELS = ("fusion", "dot", "copy", "concatenate", "call", "sort", "reduce", "custom-call")


def kernels_of_sgd_step(text: str) -> int:
    """Kernels of one SGD step, which is the loop body with the matrix products of `learn`.

    Args:
        text: A compiled iteration, `compiled.as_text()`.
    """
    kernels: collections.Counter[str] = collections.Counter()
    products: set[str] = set()
    bodies: set[str] = set()
    own = ""
    for line in text.splitlines():
        if begins := _COMPUTATION.match(line):
            own = begins[1]
        elif operation := _OPERATION.match(line):
            kernels[own] += operation[1] in _KERNELS
            if operation[1] == "dot" and "/learn/" in line:
                products.add(own)
            bodies |= set(re.findall(r"body=%?([\w.\-]+)", line))
    (step,) = products & bodies
    return kernels[step]
