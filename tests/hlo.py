"""Arrays that the loops of a compiled program copy, and kernels of its SGD step."""

from __future__ import annotations

import collections
import re

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$")
_CALLED = re.compile(r"(?:body|condition|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_OPERATION = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = .*? ([a-z\-]+)\(")
_KERNELS = ("fusion", "dot", "copy", "concatenate", "call", "sort", "reduce", "custom-call")
_COPY = re.compile(r"= [a-z]+(\d+)\[([\d,]*)\]\S* copy\(")


def copies_in_loops(text: str) -> dict[int, list[int]]:
    """Bytes of every `copy` inside a loop of `compiled.as_text()`, by the number of enclosing loops."""
    copies: dict[str, list[int]] = collections.defaultdict(list)
    called: dict[str, set[tuple[str, bool]]] = collections.defaultdict(set)
    own, entry = "", ""
    for line in text.splitlines():
        begins = _COMPUTATION.match(line)
        if begins:
            own = begins[1]
            entry = own if line.startswith("ENTRY") else entry
            continue
        names = _CALLED.findall(line) + [
            name.strip(" %") for group in _BRANCHES.findall(line) for name in group.split(",")
        ]
        called[own] |= {(name, f"body=%{name}" in line) for name in names}
        for bits, shape in _COPY.findall(line):
            size = int(bits) // 8
            for length in filter(None, shape.split(",")):
                size *= int(length)
            copies[own].append(size)
    found: dict[int, list[int]] = collections.defaultdict(list)
    seen: set[tuple[str, int]] = set()
    todo = [(entry, 0)]
    while todo:
        name, depth = todo.pop()
        if (name, depth) in seen:
            continue
        seen.add((name, depth))
        if depth:
            found[depth] += copies[name]
        todo += [(other, depth + is_body) for other, is_body in called[name]]
    return dict(found)


def kernels_of_sgd_step(text: str) -> int:
    """Kernels of one SGD step of an iteration, which is the loop body with the matrix products of `learn`."""
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
