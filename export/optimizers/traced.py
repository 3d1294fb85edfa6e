"""torch's optimizers, and others' of the same kind, as pure functions: their steps, recorded."""

from __future__ import annotations

import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from export.axes import Shape
from export.errors import ExportError, SettingError
from export.insides import FakeTensorMode, adafactor
from export.layout import LayoutMember, LayoutSlot
from export.optimizers import published
from export.optimizers.places import MAXIMUM, AsksForNumbers, Places
from export.optimizers.protocol import (
    Delegated,
    OptimizerUpdate,
    PerTensor,
    StateSpec,
    Tensors,
    alone,
    refuse_unknown,
    require,
    require_rate,
)
from export.rewrites.patch import patched

# Between ways of torch's that compute the same.
_SWITCHES = ("capturable", "differentiable", "foreach", "fused")
# In place of a learning rate: the one that the class has by default.
_ITS_OWN: Any = object()


class Traced:
    """A ``torch.optim.Optimizer`` with one group of parameters.

    ``kind``: its class; ``lr`` and ``settings`` are the class's own, with its defaults. Its step is
    recorded as it is written; state that it makes in its first step, and counts of its steps, are
    found by running it. It is then held against itself: ExportError where a step does not follow
    from parameters, gradients, its state and the count of steps, or branches on what only a device
    knows.
    """

    def __init__(self, kind: Any, lr: float = _ITS_OWN, **settings: Any) -> None:
        given = settings if lr is _ITS_OWN else {"lr": lr, **settings}
        require_rate(given.get("lr", 0.0), given.get("weight_decay", 0.0))
        try:
            made = kind([nn.Parameter(torch.zeros(2, 2))], **given)
        except ValueError as error:
            raise SettingError(f"{kind.__name__}: {error}") from error
        self._hold(made, made.param_groups[0])

    @classmethod
    def taken(cls, made: torch.optim.Optimizer, group: Mapping[str, Any]) -> Traced:
        """One group of an optimizer that somebody made."""
        found = Traced.__new__(Traced)
        found._hold(made, group)
        return found

    def _hold(self, made: torch.optim.Optimizer, group: Mapping[str, Any]) -> None:
        self._made = made
        own = {key: _plain(value) for key, value in group.items() if not key.startswith("param")}
        self._switches = {key: False for key in _SWITCHES if key in own}
        self._group = {key: value for key, value in own.items() if key not in _SWITCHES}
        if not isinstance(self._group.get("lr"), float | int):
            raise ExportError(f"{self._named} has no learning rate lr, which is a run-time input")
        require_rate(self._group["lr"], self._group.get("weight_decay", 0.0))
        eps, momentum = self._group.get("eps", 1.0), self._group.get("momentum", 0.0)
        require(not isinstance(eps, float) or eps > 0, f"eps is {eps}; it must be above 0")
        require(0 <= momentum < 1, f"momentum is {momentum}; expected 0 <= momentum < 1")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Traced):
            return NotImplemented
        return (type(self._made), self._group) == (type(other._made), other._group)

    def __hash__(self) -> int:
        return hash((type(self._made), str(self._group)))

    def __repr__(self) -> str:
        return f"{type(self._made).__name__}({self._group})"

    @property
    def _named(self) -> str:
        kind = type(self._made)
        return f"{kind.__module__}.{kind.__name__}"

    @property
    def name(self) -> str:
        return type(self._made).__name__.lower()

    def settings(self) -> dict[str, object]:
        values = {key: value for key, value in self._group.items() if key != "lr"}
        return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}

    def hyper(self) -> dict[str, float]:
        return {"lr": float(self._group["lr"])}

    def with_settings(self, changes: Mapping[str, object]) -> Traced:
        """The same with some other settings; SettingError for one that it has not."""
        kind = type(self._made)
        refuse_unknown(kind.__name__, changes, self._group)
        taken = inspect.signature(kind).parameters
        given = {key: value for key, value in self._group.items() if key in taken}
        made = Traced(kind, **{**given, **changes})
        group = made._made.param_groups[0]
        return Traced.taken(made._made, {**group, **self._group, **changes})

    def state(self) -> tuple[StateSpec, ...]:
        """None before it is bound to parameters, which show what it keeps."""
        return ()

    def bound(self, slots: Sequence[LayoutSlot]) -> Delegated:
        """The same for these parameters: on whole packs where it treats each element alike."""
        single = [alone(slot, member) for slot in slots for member in slot.members]
        plan, whole = self._tried(single)
        kept = tuple(self._kept(plan, single))
        if whole and all(own is None for each in kept for own, _ in each.values()):
            at = {slot.members[0].name: each for slot, each in zip(single, kept, strict=True)}
            kept = tuple(at[slot.members[0].name] for slot in slots)
            found = _Bound(self, plan, tuple(slots), kept)
            return replace(found, unguarded=_unguarded(found))
        return PerTensor(_Bound(self, plan, tuple(single), kept), tuple(slots))

    def update(self, *of: Any) -> OptimizerUpdate:
        raise NotImplementedError("bound to parameters first")

    # Its own step.

    def run(
        self,
        places: Places,
        parameters: Tensors,
        gradients: Tensors,
        held: Sequence[dict[str, Any]],
        lr: Tensor,
        *,
        capturable: bool,
        count: Tensor | None = None,
    ) -> list[Tensor]:
        """One step of torch's; ``held``, one for each parameter, is what it kept and then keeps.

        Returns the places of the parameters.
        """
        found = [places.place(parameter) for parameter in parameters]
        for place, gradient in zip(found, gradients, strict=True):
            place.grad = places.place(gradient)
        switches = self._switches
        if capturable:
            switches = {**switches, "capturable": True}
        group = {**self._group, **switches, "lr": places.place(lr)}
        if count is not None and group.get("dampening"):
            # SGD's first step goes without, which is the same with momentum that begins as zero.
            group["dampening"] = group["dampening"] * (count > 0).to(count.dtype)
        made = self._copied(group, found)
        made.state.update(zip(found, held, strict=True))
        try:
            with torch.no_grad(), _recordable(), places:
                made.step()
        finally:
            for place in found:
                place.grad = None
        return found

    def _copied(self, group: Mapping[str, Any], parameters: Sequence[Tensor]) -> Any:
        made: Any = object.__new__(type(self._made))
        vars(made).update(vars(self._made))
        vars(made).pop("step", None)  # another's, where somebody counts its calls
        made.param_groups = [{**group, "params": list(parameters)}]
        made.state = defaultdict(dict)
        return made

    def _torchs(
        self, start: Tensors, gradients: Sequence[Tensors], rates: Sequence[float]
    ) -> Iterator[tuple[list[Tensor], list[dict[str, Any]]]]:
        """Parameters and state after each step, as torch makes it."""
        parameters = [nn.Parameter(value.clone()) for value in start]
        made = self._copied({**self._group, **self._switches}, parameters)
        for these, rate in zip(gradients, rates, strict=True):
            made.param_groups[0]["lr"] = rate
            for parameter, gradient in zip(parameters, these, strict=True):
                parameter.grad = gradient.clone()
            with _Exact():
                made.step()
            values = [parameter.detach().clone() for parameter in parameters]
            yield values, [_copies(made.state[parameter]) for parameter in parameters]

    # What is found out by running it, on small tensors in double.

    def _tried(self, slots: Sequence[LayoutSlot]) -> tuple[_Plan, bool]:
        """How its steps are made functions, and whether whole packs may be given to them."""
        draw = torch.Generator().manual_seed(0)

        def normal(shape: Sequence[int]) -> Tensor:
            return torch.randn(tuple(shape), generator=draw, dtype=torch.float64)

        of_rank = {max(len(slot.shape), 1): slot for slot in slots}
        shapes = [(3, 4, 2, 3, 2, 2)[:rank] for rank in of_rank or (1,) for _ in range(2)]
        start = [normal(shape) for shape in shapes]
        gradients = [[normal(shape) for shape in shapes] for _ in range(_STEPS)]
        rates = [self.hyper()["lr"] or 0.1] * _STEPS
        rates[2] /= 2
        with _in_double():
            for slot, value, g in zip(of_rank.values(), start[::2], gradients[0][::2], strict=True):
                self._require_training(slot, value, g)
            after = list(self._torchs(start, gradients, rates))
            path = _Path(shapes, start, gradients, rates, after)
            try:
                plan = self._plan(path)
                for each in plan.candidates():
                    if self._follows(each, path):
                        return each, self._follows(each, path.flat())
            except AsksForNumbers as error:
                raise ExportError(
                    f"a step of {self._named} asks a tensor for what only a device knows ({error})",
                    instead="torch.where, torch.maximum and math.sqrt in place of if and max, or "
                    "an export.Optimizer of your own",
                ) from error
        raise ExportError(
            f"a step of {self._named} goes by something else than parameters, gradients, tensors "
            "that it keeps in self.state, lr and the count of steps: recorded, it is another one",
            instead="that in self.state[parameter], as a tensor, or an export.Optimizer of your "
            "own; export.Clipped and export.Scheduled for what changes gradients and rates",
        )

    def _require_training(self, slot: LayoutSlot, value: Tensor, gradient: Tensor) -> None:
        try:
            next(self._torchs([value], [[gradient]], [0.1]))
        except Exception as error:
            raise SettingError(
                f"{self._named} does not train {slot.name!r} of shape {list(slot.shape)} "
                f"({error}): give it a group, export.Groups(export.AdamW(...), "
                "export.Group(lambda name, shape: len(shape) == 2, export.Muon(...)))"
            ) from error

    def _plan(self, path: _Path) -> _Plan:
        places, empty = Places(), _unknown(path.start)
        capturable = False
        lr = torch.tensor(path.rates[0])
        try:
            self.run(places, path.start, path.gradients[0], empty, lr, capturable=False)
        except AsksForNumbers:
            if "capturable" not in self._switches:
                raise
            places, empty, capturable = Places(), _unknown(path.start), True
            self.run(places, path.start, path.gradients[0], empty, lr, capturable=True)
        kinds = path.kinds()
        begins: dict[str, str] = {}
        for each in empty:
            for key, value in each.first.items():
                if isinstance(value, Tensor) and kinds[key] != "count" and bool(value.any()):
                    same = bool((value == value.reshape(-1)[0]).all())
                    begins[key] = "number" if same and begins.get(key) != "tensor" else "tensor"
        plan = _Plan(capturable, kinds, begins=begins, chooses=places.chooses)
        return self._settled(self._scaled(plan, path), path)

    def _scaled(self, plan: _Plan, path: _Path) -> _Plan:
        """The plan with the numbers that state is kept divided by, which have to come out again."""
        for plain in ((), (MAXIMUM,)):
            found = replace(plan, plain=frozenset(plain))
            for _ in range(3):
                before, found = found, self._after(found, path)
                if found == before:
                    return found
        return replace(plan, scales={})

    def _after(self, plan: _Plan, path: _Path) -> _Plan:
        places, entered = self._third_step(plan, path, 2.0, path.rates[2])
        return replace(plan, scales=plan.emerging(places, entered))

    def _settled(self, plan: _Plan, path: _Path) -> _Plan:
        """The plan with those numbers that may not stand apart from a tensor."""
        while True:
            found: set[int] = set()
            for count, lr in product((0.0, 10.0, 1e3, 1e6, 1e9), (0.0, path.rates[0])):
                numbers = self._third_step(plan, path, count, lr)[0].numbers
                found |= {at for at, each in enumerate(numbers) if not 1e-6 < float(each) < 1e6}
            if found <= plan.plain:
                return plan
            plan = replace(plan, plain=plan.plain | found)

    def _third_step(
        self, plan: _Plan, path: _Path, count: float, lr: float
    ) -> tuple[Places, list[dict[str, Any]]]:
        values, held = path.after[1]
        places = Places(plan.plain)
        entered = plan.entered(places, plan.divided(held), torch.tensor(count))
        gradients, rate = path.gradients[2], torch.tensor(lr)
        self.run(
            places, values, gradients, entered, rate, capturable=plan.capturable,
            count=torch.tensor(count),
        )  # fmt: skip
        return places, entered

    def _follows(self, plan: _Plan, path: _Path) -> bool:
        """Whether the function gives what torch's steps do."""
        slots = tuple(_slot(f"p{at}", tuple(v.shape)) for at, v in enumerate(path.start))
        try:
            states = path.after[-1][1][: len(slots)]
            common = set.intersection(*map(set, path.after[-1][1]))
            kept = tuple(map(plan.kept, states, path.shapes, [common] * len(slots)))
            bound = _Bound(self, plan, slots, kept)
            values, state = path.start, bound.zeros()
            for step, (gradients, rate) in enumerate(zip(path.gradients, path.rates, strict=True)):
                hyper = {"lr": torch.tensor(rate)}
                update = bound.update(values, gradients, state, torch.tensor(step), hyper)
                values, state = update.parameters, update.state
                for value, wanted in zip(values, path.after[step][0], strict=True):
                    if not torch.allclose(value, wanted, rtol=1e-9, atol=1e-11):
                        return False
        except AsksForNumbers:
            raise
        except Exception:  # not for tensors of these shapes
            return False
        return True

    def _kept(self, plan: _Plan, slots: Sequence[LayoutSlot]) -> list[_Kept]:
        """What its steps keep for each parameter, by running one without numbers."""
        states: dict[Shape, tuple[tuple[int, ...], _Noting]] = {}
        for slot in slots:
            # A free size is taken to be one that no other is.
            shape = tuple(size if isinstance(size, int) else 7919 for size in slot.shape) or (1,)
            if slot.shape not in states:
                states[slot.shape] = shape, _Noting()
                with FakeTensorMode():
                    value, lr = torch.empty(shape), torch.zeros((), dtype=torch.float64)
                    held = [states[slot.shape][1]]
                    self.run(Places(), [value], [value], held, lr, capturable=plan.capturable)
        common = set.intersection(*(set(noting) for _, noting in states.values()))
        found = []
        for slot in slots:
            shape, noting = states[slot.shape]
            found.append(plan.kept(noting, shape, common))
            require(
                slot.shape in (shape, ()) or all(own is None for own, _ in found[-1].values()),
                f"{self._named} trains parameters of fixed sizes, not {slot.name!r} of shape "
                f"{list(slot.shape)}: give it a group with another optimizer",
            )
        return found


_STEPS = 6
_Kept = Mapping[str, tuple[tuple[int, ...] | None, torch.dtype]]
"""By its key, the shape of what is kept (None: the parameter's, or one for all), and its dtype."""


@dataclass(frozen=True)
class _Path:
    """Some steps of torch's: what goes in, and parameters and state after each."""

    shapes: Sequence[tuple[int, ...]]
    start: Tensors
    gradients: Sequence[Tensors]
    rates: Sequence[float]
    after: Sequence[tuple[list[Tensor], list[dict[str, Any]]]]

    def flat(self) -> _Path:
        """The same with all parameters in one vector."""

        def joined(tensors: Tensors) -> list[Tensor]:
            return [torch.cat([each.reshape(-1) for each in tensors])]

        after = [(joined(values), held) for values, held in self.after]
        return replace(
            self,
            start=joined(self.start),
            gradients=[joined(these) for these in self.gradients],
            after=after,
        )

    def kinds(self) -> dict[str, str]:
        """What each key of the state is: a count of steps, shared, like the parameter, ..."""
        keys = dict.fromkeys(key for _, held in self.after for each in held for key in each)
        return {key: self._kind(key) for key in keys}

    def _kind(self, key: str) -> str:
        series = [[each[key] for each in held if key in each] for _, held in self.after]
        every = [value for values in series for value in values]
        numbers = [v for v in every if not isinstance(v, Tensor) or v.dim() == 0]
        if len(numbers) < len(every):
            return "like"
        if all(v is not None and v == at for at, vs in enumerate(series, start=1) for v in vs):
            return "count"
        if not all(isinstance(value, Tensor) for value in every):
            return "fixed"
        return "shared" if all(v == values[0] for values in series for v in values) else "own"


@dataclass(frozen=True)
class _Plan:
    """How steps are made a function of parameters, gradients, state, rate and count of steps.

    ``kinds``: of state, by key; ``scales``: what it is kept divided by; ``plain``: see `Places`;
    ``begins``: the keys of what begins as a "number" other than zero, or as a "tensor", which the
    first step makes; ``otherwise``: the first step is another one altogether; ``chooses``: a step
    does something else at some counts of steps than at others.
    """

    capturable: bool
    kinds: Mapping[str, str]
    scales: Mapping[str, float] = field(default_factory=dict)
    plain: frozenset[int] = frozenset()
    begins: Mapping[str, str] = field(default_factory=dict)
    otherwise: bool = False
    chooses: bool = False

    def kept(self, held: Mapping[str, Any], shape: Shape, common: Collection[str]) -> _Kept:
        """What of this is state of a parameter of this shape; ``common`` is what all have."""
        found: dict[str, tuple[tuple[int, ...] | None, torch.dtype]] = {}
        for key, value in held.items():
            kind = self.kinds.get(key)
            if isinstance(value, Tensor) and kind not in ("count", "fixed"):
                same = kind == "like" and value.shape == shape and key in common
                dtype = torch.float32 if value.is_floating_point() else value.dtype
                found[key] = None if same or kind == "shared" else tuple(value.shape), dtype
        return found

    def candidates(self) -> Iterator[_Plan]:
        """From what costs least."""
        yield replace(self, begins={})
        yield self
        yield replace(self, begins={}, otherwise=True)

    def divided(self, held: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """State as it is kept."""
        scales = self.scales
        return [{k: v / scales[k] if k in scales else v for k, v in e.items()} for e in held]

    def entered(
        self, places: Places, held: Sequence[Mapping[str, Any]], count: Tensor
    ) -> list[dict[str, Any]]:
        """Places for what is kept."""

        def entry(key: str, value: Any) -> Any:
            if self.kinds.get(key) == "count":
                return places.place(count)
            scale = self.scales.get(key, 1.0)
            return places.place(value, scale) if isinstance(value, Tensor) else value

        return [{key: entry(key, value) for key, value in each.items()} for each in held]

    def left(self, places: Places, held: Mapping[str, Any], key: str) -> Tensor:
        """What is there after a step, as it is kept."""
        base, factor = places.parts(held[key])
        scale = self.scales.get(key, 1.0)
        same = not isinstance(factor, Tensor) and math.isclose(factor, scale, rel_tol=1e-12)
        return base if same else places.value(held[key]) / scale

    def emerging(self, places: Places, held: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """The numbers that state is multiplied by after a step, where all tensors agree."""
        found: dict[str, set[Any]] = {}
        for each in held:
            for key, value in each.items():
                if self.kinds.get(key) == "like" and isinstance(value, Tensor):
                    found.setdefault(key, set()).add(places.parts(value)[1])
        every = {key: next(iter(factors)) for key, factors in found.items() if len(factors) == 1}
        return {
            key: factor
            for key, factor in every.items()
            if not isinstance(factor, Tensor) and 1e-6 < factor < 1e6 and abs(factor - 1) > 1e-12
        }


@dataclass(frozen=True)
class _Bound(Delegated):
    """The function for these parameters, with what it keeps for each."""

    optimizer: Traced
    plan: _Plan
    slots: tuple[LayoutSlot, ...]
    kept: tuple[_Kept, ...]
    unguarded: frozenset[str] = frozenset()

    def turns(self) -> set[int]:
        """Early and late, where it goes by the count of steps."""
        return {7, 2_000_000} if self.plan.chooses else set()

    def state(self) -> tuple[StateSpec, ...]:
        found: dict[str, StateSpec] = {}
        for slot, kept in zip(self.slots, self.kept, strict=True):
            for key, (shape, dtype) in kept.items():
                name, each = self._name(key, shape, slot), self._is_like(key, shape)
                guarded = key not in self.unguarded
                found[name] = StateSpec(name, each, shape or (), dtype, guarded)
        return tuple(found.values())

    def _name(self, key: str, shape: tuple[int, ...] | None, slot: LayoutSlot) -> str:
        return key if shape is None else f"{key}.{slot.name}"

    def _is_like(self, key: str, shape: tuple[int, ...] | None) -> bool:
        return shape is None and self.plan.kinds[key] == "like"

    def zeros(self) -> dict[str, list[Tensor]]:
        """State as it is before the first step, of the default dtype and sizes that are fixed."""
        shapes = [[int(size) for size in slot.shape] for slot in self.slots]
        return {
            spec.name: [torch.zeros(s) for s in (shapes if spec.per_parameter else [spec.lead])]
            for spec in self.state()
        }

    def update(
        self,
        parameters: Tensors,
        gradients: Tensors,
        state: Mapping[str, list[Tensor]],
        step: Tensor,
        hyper: Mapping[str, Tensor],
    ) -> OptimizerUpdate:
        # Numbers without axes are what steps count by; a parameter of this kind is given one.
        shapes = [parameter.shape for parameter in parameters]
        parameters, gradients = _with_axes(parameters), _with_axes(gradients)
        alike = [spec.name for spec in self.state() if spec.per_parameter]
        given = {**state, **{name: _with_axes(state[name]) for name in alike}}
        moved, new = self._updated(parameters, gradients, given, step, hyper)

        def shaped(tensors: Tensors) -> list[Tensor]:
            return [t.reshape(s) if s == () else t for t, s in zip(tensors, shapes, strict=True)]

        return OptimizerUpdate(shaped(moved), {**new, **{n: shaped(new[n]) for n in alike}})

    def _updated(
        self,
        parameters: Tensors,
        gradients: Tensors,
        state: Mapping[str, list[Tensor]],
        step: Tensor,
        hyper: Mapping[str, Tensor],
    ) -> tuple[list[Tensor], dict[str, list[Tensor]]]:
        plan, count, lr = self.plan, step.to(torch.float64), hyper["lr"].to(torch.float64)
        held, begins = self._held(state), step == 0
        for key, value in self._first(parameters, gradients, lr):
            for each, first in zip(held, value, strict=True):
                if key in each and plan.begins[key] == "number":
                    each[key] = each[key] + first * begins.to(each[key].dtype)
                elif key in each:
                    each[key] = torch.where(begins, first, each[key])
        moved, new, _ = self._stepped(parameters, gradients, held, lr, count)
        if plan.otherwise:
            once, kept, _ = self._stepped(parameters, gradients, _unknown(held), lr, None)
            moved = [torch.where(begins, a, b) for a, b in zip(once, moved, strict=True)]
            new = [
                {key: torch.where(begins, first[key], value) for key, value in each.items()}
                for first, each in zip(kept, new, strict=True)
            ]
        return moved, self._named(new)

    def _first(
        self, parameters: Tensors, gradients: Tensors, lr: Tensor
    ) -> Iterator[tuple[str, list[Any]]]:
        """By its key, the state of each parameter that does not begin as zero, as it is kept."""
        small = [torch.zeros([1] * p.dim(), dtype=p.dtype) for p in parameters]
        for how, of in (("number", (small, small)), ("tensor", (parameters, gradients))):
            keys = [key for key, each in self.plan.begins.items() if each == how]
            if not keys:
                continue
            _, _, noted = self._stepped(*of, _unknown(parameters), lr, None)
            for key in keys:
                scale, first = self.plan.scales.get(key, 1.0), []
                for each, p in zip(noted, parameters, strict=True):
                    value = each.first.get(key, 0.0)
                    if isinstance(value, Tensor) and how == "number":
                        value = value.reshape(()).to(p.dtype)
                    first.append(value / scale)
                yield key, first

    def _stepped(
        self, parameters: Tensors, gradients: Tensors, held: Any, lr: Tensor, count: Tensor | None
    ) -> tuple[list[Tensor], list[dict[str, Tensor]], Any]:
        """Parameters and state after a step; ``count`` is None in the first one, without state."""
        places, plan = Places(self.plan.plain), self.plan
        if count is not None:
            fixed = {key: 0 for key, kind in plan.kinds.items() if kind == "count"}
            held = plan.entered(places, [{**fixed, **each} for each in held], count)
        found = self.optimizer.run(
            places, parameters, gradients, held, lr, capturable=plan.capturable, count=count
        )
        new = [
            {key: plan.left(places, each, key) for key in kept}
            for each, kept in zip(held, self.kept, strict=True)
        ]
        return [places.value(place) for place in found], new, held

    def _held(self, state: Mapping[str, list[Tensor]]) -> list[dict[str, Tensor]]:
        return [
            {
                key: state[self._name(key, shape, slot)][at if self._is_like(key, shape) else 0]
                for key, (shape, _) in kept.items()
            }
            for at, (slot, kept) in enumerate(zip(self.slots, self.kept, strict=True))
        ]

    def _named(self, new: Sequence[Mapping[str, Tensor]]) -> dict[str, list[Tensor]]:
        found: dict[str, list[Tensor]] = {spec.name: [] for spec in self.state()}
        for slot, kept, each in zip(self.slots, self.kept, new, strict=True):
            for key, (shape, _) in kept.items():
                tensors = found[self._name(key, shape, slot)]
                if self._is_like(key, shape) or not tensors:
                    tensors.append(each[key])
        return found


def _unguarded(bound: _Bound) -> frozenset[str]:
    """The kinds of state that are not finite only where a parameter is not either.

    Tried on all combinations of numbers from nothing to the largest, and gradients beyond.
    """
    keys = [spec.name for spec in bound.state() if spec.per_parameter]
    if len(keys) > 3:
        return frozenset()
    finite = [0.0, 1e-30, -1e-30, 1.0, -1.0, 1e19, -1e19, 3.4e38, -3.4e38]
    beyond = [*finite, math.inf, -math.inf, math.nan]
    grid = torch.cartesian_prod(*map(torch.tensor, [finite, beyond, *(finite for _ in keys)]))
    p, g, *rest = (column.contiguous() for column in grid.unbind(1))
    slot = _slot("all", (len(p),))
    one = replace(bound, slots=(slot,), kept=bound.kept[:1])
    state = {spec.name: [torch.full((), 0.5)] for spec in one.state() if not spec.per_parameter}
    state.update({key: [value] for key, value in zip(keys, rest, strict=True)})
    found = set(keys)
    for step, lr in product((0, 1, 1000), (1e-3, 1.0)):
        update = one.update([p], [g], state, torch.tensor(step), {"lr": torch.tensor(lr)})
        still = torch.isfinite(update.parameters[0])
        found -= {key for key in found if bool((still & ~update.state[key][0].isfinite()).any())}
    return frozenset(found)


def _unknown(of: Sequence[object]) -> list[_Noting]:
    return [_Noting() for _ in of]


class _Noting(dict[str, Any]):
    """State of a parameter before its first step, that notes what is put into it at first."""

    def __init__(self) -> None:
        super().__init__()
        self.first: dict[str, Any] = {}

    def __setitem__(self, key: str, value: Any) -> None:
        self._note(key, value)
        super().__setitem__(key, value)

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def _note(self, key: str, value: Any) -> None:
        # As a value: the place that it is will hold another.
        self.first.setdefault(key, value.clone() if isinstance(value, Tensor) else value)


class _Exact(Places):
    """Inside, what torch rounds for a GPU's sake stays as it is; all else is torch's."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return args[0].clone() if func is Tensor.bfloat16 else func(*args, **(kwargs or {}))


@contextmanager
def _in_double() -> Iterator[None]:
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(default)


def _slot(name: str, shape: tuple[int, ...]) -> LayoutSlot:
    member = LayoutMember(name, shape, 0)
    return LayoutSlot(name, "parameter", torch.float32, shape, (member,), packed=False)


def _with_axes(tensors: Tensors) -> list[Tensor]:
    return [tensor if tensor.dim() else tensor.reshape(1) for tensor in tensors]


def _copies(held: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v.detach().clone() if isinstance(v, Tensor) else v for k, v in held.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor | np.generic):
        return value.item()
    return tuple(map(_plain, value)) if isinstance(value, (tuple, list)) else value


def _of_tensors(plain: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of numbers that also takes tensors without axes."""

    def either(*of: Any) -> Any:
        if not any(isinstance(each, Tensor) for each in of):
            return plain(*of)
        return function(*(torch.as_tensor(each, dtype=torch.float64) for each in of))

    return either


def _recordable() -> AbstractContextManager[None]:
    """Inside, torch's steps go by tensors where they would by numbers, as when it compiles them."""
    return patched(
        [
            (torch.compiler, "is_compiling", lambda: True),
            (torch.autograd.profiler, "record_function", lambda name: nullcontext()),
            (math, "sqrt", _of_tensors(math.sqrt, torch.sqrt)),
        ],
        [
            (adafactor, "min", _of_tensors(min, torch.minimum)),
            (adafactor, "max", _of_tensors(max, torch.maximum)),
        ],
    )


# By the names of their classes: each takes lr, and the settings of its class with their defaults.
ASGD = partial(Traced, torch.optim.ASGD)
Adadelta = partial(Traced, torch.optim.Adadelta)
Adafactor = partial(Traced, torch.optim.Adafactor)
Adagrad = partial(Traced, torch.optim.Adagrad)
Adam = partial(Traced, torch.optim.Adam)
Adamax = partial(Traced, torch.optim.Adamax)
AdamW = partial(Traced, torch.optim.AdamW)
Lamb = partial(Traced, published.Lamb)
Lion = partial(Traced, published.Lion)
Muon = partial(Traced, torch.optim.Muon)
NAdam = partial(Traced, torch.optim.NAdam)
RAdam = partial(Traced, torch.optim.RAdam)
RMSprop = partial(Traced, torch.optim.RMSprop)
Rprop = partial(Traced, torch.optim.Rprop)
SgdW = partial(Traced, published.SgdW)


def Sgd(lr: float = 0.01, momentum: float = 0.0, **settings: Any) -> Traced:
    """``torch.optim.SGD``, at a rate that torch had as no default for long."""
    return Traced(torch.optim.SGD, lr, momentum=momentum, **settings)
