"""Random train steps as Python source: drawn line by line, and made smaller while they fail."""

from __future__ import annotations

import linecache
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from tests.fuzz.train_steps.operations import Drawer, draw_operation

OPTIMIZERS: Mapping[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
}


def mixed(x: Tensor) -> Tensor:
    """A number that every element of ``x`` counts in differently."""
    return (x * torch.cos(torch.arange(x.numel()) + 0.5).reshape(x.shape)).sum()


TERMS = ("mixed({})", "mixed({})", "{}.sum()", "{}.mean()", "{}.square().mean()")
MOST_ELEMENTS, MOST_AXES, LARGEST = 300, 5, 1e3
ATTEMPTS = 60


@dataclass(frozen=True)
class Held:
    """A tensor that a program is given: parameter, buffer, or entry of the batch.

    dtype: "float", "int" or "bool". axes: those of free size, and the sizes' names.
    """

    kind: str
    dtype: str
    shape: tuple[int, ...]
    axes: Mapping[int, str]

    def drawn(self, rng: np.random.Generator, sizes: Mapping[str, int]) -> Tensor:
        shape = [sizes[self.axes[a]] if a in self.axes else s for a, s in enumerate(self.shape)]
        match self.dtype:
            case "float":
                return torch.asarray(rng.standard_normal(shape), dtype=torch.float32)
            case "int":
                return torch.asarray(rng.integers(0, 4, shape), dtype=torch.int64)
        return torch.asarray(rng.random(shape) < 0.6)


@dataclass(frozen=True)
class Program:
    """A model of random statements.

    free: names of free sizes, and the example's. lines: a name, and what assigns to it. terms:
    names, and what makes of each a number; the loss is their sum. shown: names of the outputs.
    """

    seed: int
    held: Mapping[str, Held]
    free: Mapping[str, int]
    lines: tuple[tuple[str, str], ...] = ()
    terms: tuple[tuple[str, str], ...] = ()
    shown: tuple[str, ...] = ()
    optimizer: str = "SGD"

    @property
    def dynamic(self) -> dict[str, dict[int, str]]:
        return {name: dict(held.axes) for name, held in self.held.items() if held.axes}

    @property
    def source(self) -> str:
        sizes = {
            f"{size} = batch[{name!r}].shape[{axis}]": size
            for name, axes in self.dynamic.items()
            for axis, size in axes.items()
        }
        first = {size: line for line, size in reversed(sizes.items())}
        given = [
            f"{name} = batch[{name!r}]" if held.kind == "batch" else f"{name} = self.{name}"
            for name, held in self.held.items()
        ]
        terms = " + ".join(term.format(name) for name, term in self.terms) or "None"
        shown = ", ".join(f"{name!r}: {name}" for name in self.shown)
        body = [*first.values(), *given, *(line for _, line in self.lines)]
        body += [f"return {terms}, {{{shown}}}"]
        return "def forward(self, batch):\n" + "".join(f"    {line}\n" for line in body)

    def model(self) -> nn.Module:
        source = self.source
        # By this the exporter finds the line that it refuses.
        file = f"<program {self.seed} {hash(source)}>"
        linecache.cache[file] = (len(source), None, source.splitlines(True), file)
        names = _names()
        exec(compile(source, file, "exec"), names)
        model: nn.Module = type("Model", (nn.Module,), {"forward": names["forward"]})()
        rng = np.random.default_rng(self.seed)
        for name, held in self.held.items():
            value = held.drawn(rng, self.free)
            if held.kind == "parameter":
                model.register_parameter(name, nn.Parameter(value))
            elif held.kind == "buffer":
                model.register_buffer(name, value)
        return model

    def batch(self, sizes: Mapping[str, int], number: int = 0) -> dict[str, Tensor]:
        rng = np.random.default_rng([self.seed, number])
        entries = {name: held for name, held in self.held.items() if held.kind == "batch"}
        return {name: held.drawn(rng, sizes) for name, held in entries.items()}

    def without(self, name: str) -> Program:
        """Less a line, and all that depends on it."""
        gone = {name}
        for each, line in self.lines:
            if any(_reads(line, other) for other in gone):
                gone.add(each)
        return replace(
            self,
            lines=tuple(line for line in self.lines if line[0] not in gone),
            terms=tuple(term for term in self.terms if term[0] not in gone),
            shown=tuple(each for each in self.shown if each not in gone),
        )

    def smaller(self) -> Iterator[Program]:
        """Programs with one thing less; not each is one that runs."""
        for name, _ in reversed(self.lines):
            yield self.without(name)
        for place in reversed(range(len(self.lines))):
            name, _ = self.lines[place]
            before = [*self.held, *(each for each, _ in self.lines[:place])]
            rest = self.lines[:place] + self.lines[place + 1 :]
            for other in reversed(before):
                lines = tuple((n, re.sub(rf"\b{name}\b", other, line)) for n, line in rest)
                yield replace(self, lines=lines).without(name)
        for term in self.terms:
            yield replace(self, terms=tuple(each for each in self.terms if each != term))
        for name in self.shown:
            yield replace(self, shown=tuple(each for each in self.shown if each != name))
        if self.optimizer != "SGD":
            yield replace(self, optimizer="SGD")
        for name, held in self.held.items():
            if held.axes:
                fixed = {**self.held, name: replace(held, axes={})}
                yield replace(self, held=fixed)
            rest_held = {each: other for each, other in self.held.items() if each != name}
            if not any(_reads(line, name) for _, line in self.lines):
                yield replace(self, held=rest_held)


def _reads(line: str, name: str) -> bool:
    return re.search(rf"\b{name}\b", line) is not None


def _names() -> dict[str, Any]:
    return {"torch": torch, "functional": functional, "mixed": mixed}


def draw_program(seed: int) -> Program:
    """One that torch runs at the example's sizes; ``terms`` may be empty."""
    rng = np.random.default_rng(seed)
    program = _draw_held(seed, rng)
    model = program.model()
    values: dict[str, Tensor] = program.batch(program.free)
    values |= {**dict(model.named_parameters()), **dict(model.named_buffers())}
    names = {**_names(), **program.free, "self": model}
    lines: dict[str, str] = {}
    for name in (f"v{number}" for number in range(int(rng.integers(12, 36)))):
        for _ in range(ATTEMPTS):
            try:
                code = Drawer(rng, values, program.free).drawn(draw_operation(rng))
                line = f"{code}; {name} = out" if "out = " in code else f"{name} = {code}"
                given = {**names, **values}
                exec(line, given)
            except Exception:
                continue
            if _fits(given[name]):
                values[name], lines[name] = given[name], line
                break
    return replace(
        program,
        lines=tuple(lines.items()),
        terms=tuple(_draw_terms(lines, values, rng)),
        shown=tuple(lines) if rng.random() < 0.3 else (),
        optimizer="SGD" if rng.random() < 0.5 else _one(rng, list(OPTIMIZERS)),
    )


def _draw_held(seed: int, rng: np.random.Generator) -> Program:
    free: dict[str, int] = {}
    if rng.random() < 0.3:
        # Seldom equal to a size that is fixed: torch would take no other one then.
        free["n"] = int(rng.integers(5, 8))
        if rng.random() < 0.25:
            free["m"] = free["n"] + 1
    # Few sizes, of which 1 is one: equal ones shall be frequent.
    pool = [1, *rng.integers(1, 6, 2).tolist()]

    def shape(least: int, most: int) -> tuple[int, ...]:
        return tuple(_one(rng, pool) for _ in range(int(rng.integers(least, most + 1))))

    held: dict[str, Held] = {}
    for number in range(int(rng.integers(2, 5))):
        held[f"p{number}"] = Held("parameter", "float", shape(0 if number else 1, 3), {})
    for number in range(int(rng.integers(1, 4))):
        dtype = _one(rng, ("float", "int", "int", "bool")) if number else "float"
        axes = dict(enumerate(free)) if rng.random() < 0.7 else dict(list(enumerate(free))[:1])
        own = (*(free[name] for name in axes.values()), *shape(0 if axes else 1, 2))
        held[f"x{number}"] = Held("batch", dtype, own, axes)
    held["b0"] = Held("buffer", "float", shape(0, 1), {})
    held["b1"] = Held("buffer", "int", (), {})
    used = {size for each in held.values() for size in each.axes.values()}
    return Program(seed, held, {name: size for name, size in free.items() if name in used})


def _one(rng: np.random.Generator, words: Sequence[Any]) -> Any:
    return words[int(rng.integers(len(words)))]


def _fits(value: Any) -> bool:
    if not isinstance(value, Tensor) or value.dim() > MOST_AXES:
        return False
    known = value.dtype in (torch.float32, torch.int64, torch.bool)
    small = 0 < value.numel() <= MOST_ELEMENTS
    return known and small and bool(value.detach().double().abs().max() < LARGEST)


def _draw_terms(
    lines: Mapping[str, str], values: Mapping[str, Tensor], rng: np.random.Generator
) -> Iterator[tuple[str, str]]:
    """What nothing else reads, and some of what something does."""
    for name in lines:
        ends = not any(_reads(line, name) for other, line in lines.items() if other != name)
        if ends or rng.random() < 0.2:
            whole = values[name].dtype != torch.float32
            yield name, "mixed({}.float())" if whole else _one(rng, TERMS)
