"""torch's optimizers, and others' of the same kind, as pure functions: their steps, recorded."""

from __future__ import annotations

import builtins
import inspect
import math
from collections import UserDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from export.axes import Shape
from export.errors import ExportError, SettingError
from export.hooks import refuse_changed
from export.insides import FakeTensorMode
from export.layout import LayoutSlot
from export.optimizers import published
from export.optimizers.combinators import Around
from export.optimizers.groups import Group, Groups
from export.optimizers.places import AsksForNumbers, Places, Source, has_axes
from export.optimizers.protocol import (
    Delegated,
    Optimizer,
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
_Held = dict[str, Tensor]


class Traced:
    """A ``torch.optim.Optimizer`` with one group of parameters.

    ``kind``: its class; all else is what the class takes behind the parameters. Without ``lr`` it
    ``leaves_rate_open``, which then has torch's default until a trial finds another. Its step is
    recorded as it is written; state that it makes in its first step, and counts of its steps, are
    found by running it. It is then held against itself: ExportError where a step does not follow
    from parameters, gradients, its state and the count of steps, or branches on what only a device
    knows.
    """

    def __init__(self, kind: Any, *placed: Any, **settings: Any) -> None:
        _, *names = inspect.signature(kind).parameters
        given = {**dict(zip(names, placed, strict=False)), **settings}
        self.leaves_rate_open = "lr" not in given
        require_rate(given.get("lr", 0.0), given.get("weight_decay", 0.0))
        try:
            made = kind([nn.Parameter(torch.zeros(2, 2))], *placed, **settings)
        except ValueError as error:
            raise SettingError(f"{kind.__name__}: {error}") from error
        self._hold(made, made.param_groups[0])

    @classmethod
    def taken(cls, made: torch.optim.Optimizer, group: Mapping[str, Any]) -> Traced:
        """One group of an optimizer that somebody made."""
        found = Traced.__new__(Traced)
        found._hold(made, group)
        return found

    leaves_rate_open = False

    def _hold(self, made: torch.optim.Optimizer, group: Mapping[str, Any]) -> None:
        self._made = made
        self._found: dict[frozenset[int], tuple[_Stepped, bool]] = {}
        own = {key: _plain(value) for key, value in group.items() if not key.startswith("param")}
        self.switches = {key: False for key in _SWITCHES if key in own}
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
        wanted = {**self._group, **changes}
        made = Traced(kind, **{k: v for k, v in wanted.items() if k in taken})._made
        return Traced.taken(made, {**made.param_groups[0], **wanted})

    def state(self) -> tuple[StateSpec, ...]:
        """None before it is bound to parameters, which show what it keeps."""
        return ()

    def bound(self, slots: Sequence[LayoutSlot]) -> Delegated:
        """The same for these parameters: on whole packs where it treats each element alike."""
        # Numbers without axes are what steps count by; a parameter of this kind is given one.
        slots = [
            replace(slot, members=tuple(replace(m, shape=m.shape or (1,)) for m in slot.members))
            for slot in slots
        ]
        single = [alone(slot, member) for slot in slots for member in slot.members]
        plan, whole = self._tried(single)
        (one,) = self._kept(plan, single[:1])
        if whole and all(spec.name == key for key, spec in one.items()):
            free = _unguarded(plan, one)
            one = {key: replace(s, guarded=key not in free) for key, s in one.items()}
            return _Bound(self, plan, (one,) * len(slots))
        return PerTensor(_Bound(self, plan, tuple(self._kept(plan, single))), tuple(slots))

    def update(self, *of: Any) -> OptimizerUpdate:
        raise NotImplementedError("bound to parameters first")

    # Its own step.

    def standing(
        self, parameters: Sequence[Tensor], held: Iterable[Any], **changes: object
    ) -> torch.optim.Optimizer:
        """Its equal for these parameters, with this state of each and other settings."""
        made: Any = object.__new__(type(self._made))
        vars(made).update(vars(self._made))
        vars(made).pop("step", None)  # another's, where somebody counts its calls
        group = {**self._group, **self.switches, **changes}
        made.param_groups = [{**group, "params": list(parameters)}]
        made.state = defaultdict(dict, zip(parameters, held, strict=True))
        return made  # type: ignore[no-any-return]

    def _torchs(
        self, start: Tensors, gradients: Sequence[Tensors], rates: Sequence[float]
    ) -> Iterator[tuple[list[Tensor], list[dict[str, Any]]]]:
        """Parameters and state after each step, as torch makes it."""
        parameters = [nn.Parameter(value.clone()) for value in start]
        made = self.standing(parameters, [{} for _ in parameters])
        for these, rate in zip(gradients, rates, strict=True):
            made.param_groups[0]["lr"] = rate
            for parameter, gradient in zip(parameters, these, strict=True):
                parameter.grad = gradient.clone()
            with _Exact():
                made.step()
            values = [parameter.detach().clone() for parameter in parameters]
            yield values, [_copies(made.state[parameter]) for parameter in parameters]

    # What is found out by running it, on small tensors in double.

    def _tried(self, slots: Sequence[LayoutSlot]) -> tuple[_Stepped, bool]:
        """How its steps are made functions, and whether whole packs may be given to them."""
        draw = torch.Generator().manual_seed(0)

        def normal(shape: Sequence[int]) -> Tensor:
            return torch.randn(tuple(shape), generator=draw, dtype=torch.float64)

        of_rank = {len(slot.shape): slot for slot in slots}
        for ranks, found in self._found.items():
            if of_rank.keys() <= ranks:
                return found
        shapes = [(3, 4, 2, 3, 2, 2)[:rank] for rank in of_rank or (1,) for _ in range(2)]
        start = [normal(shape) for shape in shapes]
        gradients = [[normal(shape) for shape in shapes] for _ in range(_STEPS)]
        rates = [self.hyper()["lr"] or 0.1] * _STEPS
        rates[2] /= 2
        with _in_double():
            for slot, value, g in zip(of_rank.values(), start[::2], gradients[0][::2], strict=True):
                self._require_training(slot, value, g)
            path = _Path(start, gradients, rates, list(self._torchs(start, gradients, rates)))
            try:
                for plan in self._plans(path):
                    if plan.follows(path):
                        found = self._found[frozenset(of_rank)] = plan, plan.follows(path.flat())
                        return found
            except AsksForNumbers as error:
                raise ExportError(
                    f"a step of {self._named} asks a tensor for what only a device knows ({error})",
                    instead="torch.where in place of if, or an export.Optimizer of your own",
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

    def _plans(self, path: _Path) -> Iterator[_Stepped]:
        """How its steps may be made functions, from what costs least."""
        plan, lr = _Stepped(self, path.kinds()), torch.tensor(path.rates[0])
        try:
            places, _, noted = plan.stepped(path.start, path.gradients[0], None, lr, None)
        except AsksForNumbers:
            if "capturable" not in self.switches:
                raise
            plan = replace(plan, capturable=True)
            places, _, noted = plan.stepped(path.start, path.gradients[0], None, lr, None)
        plan = replace(plan, chooses=places.chooses)
        for _ in range(3):
            before, plan = plan, replace(plan, scales=plan.emerging(*plan.probed(path, 2.0, lr)))
            if plan == before:
                break
        else:
            plan = replace(plan, scales={})
        counts, rates = (0.0, 10.0, 1e3, 1e6, 1e9), (lr * 0, lr)
        while True:
            of = [plan.probed(path, *each)[0].numbers for each in product(counts, rates)]
            odd = {at for each in of for at, v in each.items() if not all(map(_is_moderate, v))}
            if odd <= plan.plain:
                break
            plan = replace(plan, plain=plan.plain | odd)
        yield plan
        first: dict[str, list[Tensor]] = defaultdict(list)
        elsewhere = plan.stepped(path.after[0][0], path.gradients[1], None, lr * 2, None)
        for each in (*noted, *elsewhere[2]):
            for key, value in each.first.items():
                if plan.keeps(key, value):
                    first[key].append(value.reshape(-1))
        made = {key: torch.cat(values) for key, values in first.items()}
        begins = {key: _only_number(values) for key, values in made.items() if values.any()}
        yield replace(plan, begins=begins)
        yield replace(plan, otherwise=True)

    def _kept(self, plan: _Stepped, slots: Sequence[LayoutSlot]) -> list[_Kept]:
        """What its steps keep for each parameter, by running one without numbers."""
        held: dict[Shape, Mapping[str, Tensor]] = {}
        # A free size is taken to be one that no other is.
        sizes = {s.shape: [n if isinstance(n, int) else 7919 for n in s.shape] for s in slots}
        for shape, fixed in sizes.items():
            with FakeTensorMode():
                values, lr = [torch.empty(fixed)], torch.zeros((), dtype=torch.float64)
                places, _, entered = plan.stepped(values, values, None, lr, None)
                (held[shape],) = plan.kept(places, entered)
        alike = {
            key
            for key in plan.kinds
            if all(key in each and list(each[key].shape) == sizes[s] for s, each in held.items())
        }

        def spec(slot: LayoutSlot, key: str, value: Tensor) -> StateSpec:
            dtype = torch.float32 if value.is_floating_point() else value.dtype
            if key in alike and plan.kinds[key] == "like":
                return StateSpec(key, dtype=dtype)
            if plan.kinds.get(key) == "shared":
                return StateSpec(key, per_parameter=False, dtype=dtype)
            require(
                sizes[slot.shape] == list(slot.shape),
                f"{self._named} trains parameters of fixed sizes, not {slot.name!r} of shape "
                f"{list(slot.shape)}: give it a group with another optimizer",
            )
            return StateSpec(f"{key}.{slot.name}", False, tuple(value.shape), dtype)

        return [{k: spec(slot, k, v) for k, v in held[slot.shape].items()} for slot in slots]


_STEPS = 6
_Kept = Mapping[str, StateSpec]
"""By its key, what is kept for a parameter: a tensor like it, one for all, or one of its own."""


@dataclass(frozen=True)
class _Path:
    """Some steps of torch's: what goes in, and parameters and state after each."""

    start: Tensors
    gradients: Sequence[Tensors]
    rates: Sequence[float]
    after: Sequence[tuple[Tensors, Sequence[Mapping[str, Any]]]]

    def flat(self) -> _Path:
        """The same with all parameters in one vector."""

        def joined(tensors: Iterable[Tensor]) -> Tensor:
            return torch.cat([each.reshape(-1) for each in tensors])

        def one(held: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
            return {
                key: joined(each[key] for each in held if key in each) if has_axes(value) else value
                for key, value in held[0].items()
            }

        gradients = [[joined(these)] for these in self.gradients]
        after = [([joined(values)], [one(held)]) for values, held in self.after]
        return replace(self, start=[joined(self.start)], gradients=gradients, after=after)

    def kinds(self) -> dict[str, str]:
        """What each key of the state is: a count of steps, shared, like the parameter, ..."""
        keys = dict.fromkeys(key for _, held in self.after for each in held for key in each)
        return {key: self._kind(key) for key in keys}

    def _kind(self, key: str) -> str:
        series = [[each[key] for each in held if key in each] for _, held in self.after]
        every = [value for values in series for value in values]
        if any(map(has_axes, every)):
            return "like"
        if all(v is not None and v == at for at, vs in enumerate(series, start=1) for v in vs):
            return "count"
        if not all(isinstance(value, Tensor) for value in every):
            return "fixed"
        return "shared" if all(v == values[0] for values in series for v in values) else "own"


@dataclass(frozen=True)
class _Stepped:
    """A step as a function of parameters, gradients, state, rate and count of steps.

    ``kinds``: of state, by key; ``scales``: what it is kept divided by; ``plain``: see `Places`;
    ``begins``: what the first step makes other than zero, a number or None where it has to be run;
    ``otherwise``: the first step is another one altogether; ``chooses``: a step does something else
    at some counts of steps than at others.
    """

    optimizer: Traced
    kinds: Mapping[str, str]
    capturable: bool = False
    scales: Mapping[str, float] = field(default_factory=dict)
    plain: frozenset[Source] = frozenset()
    begins: Mapping[str, float | None] = field(default_factory=dict)
    otherwise: bool = False
    chooses: bool = False

    def moved(
        self,
        parameters: Tensors,
        gradients: Tensors,
        held: Sequence[_Held],
        lr: Tensor,
        step: Tensor,
    ) -> tuple[list[Tensor], list[_Held]]:
        """Parameters and state after a step; state is as it is kept, and begins as zero."""
        lr, begins = lr.to(torch.float64), step == 0
        once: Any = None
        first: Sequence[Mapping[str, Any]] = [self.begins] * len(held)
        if self.otherwise or None in self.begins.values():
            once = self.stepped(parameters, gradients, None, lr, None)
            first = [{**self.begins, **each.first} for each in once[2]]
        held = [self._begun(*each, begins) for each in zip(held, first, strict=True)]
        places, found, entered = self.stepped(
            parameters, gradients, held, lr, step.to(torch.float64)
        )
        values, new = [places.value(place) for place in found], self.kept(places, entered)
        if self.otherwise:
            others = [once[0].value(place) for place in once[1]]
            values = [torch.where(begins, a, b) for a, b in zip(others, values, strict=True)]
            new = [
                {key: torch.where(begins, first[key], value) for key, value in each.items()}
                for first, each in zip(self.kept(once[0], once[2]), new, strict=True)
            ]
        return values, new

    def _begun(self, held: _Held, first: Mapping[str, Any], begins: Tensor) -> _Held:
        made = {k: first[k] / self.scales.get(k, 1) for k in self.begins if k in held}
        return {**held, **{k: held[k] + m * begins.to(held[k].dtype) for k, m in made.items()}}

    def stepped(
        self, parameters: Tensors, gradients: Tensors, held: Any, lr: Tensor, count: Tensor | None
    ) -> tuple[Places, list[Tensor], list[Any]]:
        """The places of parameters and state after a step; the first has no state and no count."""
        places = Places(self.plain)
        values = [places.place(parameter) for parameter in parameters]
        for place, gradient in zip(values, gradients, strict=True):
            place.grad = places.place(gradient)
        changes: dict[str, object] = {"capturable": True} if self.capturable else {}
        entered: list[Any] = [_Noting() for _ in parameters]
        if count is not None:
            counts = [key for key, kind in self.kinds.items() if kind == "count"]
            entered = [
                {
                    **{key: places.place(count) for key in counts},
                    **{k: places.place(v, self.scales.get(k, 1.0)) for k, v in each.items()},
                }
                for each in held
            ]
            dampening: Any = self.optimizer.settings().get("dampening")
            if dampening:
                # SGD's first step goes without: the same with momentum that begins as zero.
                changes["dampening"] = (count > 0).to(count.dtype) * dampening
        made: Any = self.optimizer.standing(values, entered, lr=places.place(lr), **changes)
        try:
            with torch.no_grad(), _recordable(), places:
                made.step()
        finally:
            for place in values:
                place.grad = None
        return places, values, entered

    def keeps(self, key: str, value: Any) -> bool:
        """Whether this is state of the artifact's."""
        return isinstance(value, Tensor) and self.kinds.get(key) not in ("count", "fixed")

    def kept(self, places: Places, entered: Sequence[Mapping[str, Any]]) -> list[_Held]:
        """What is there after a step, as it is kept."""

        def left(key: str, place: Tensor) -> Tensor:
            base, factor = places.parts(place)
            scale = self.scales.get(key, 1.0)
            same = not isinstance(factor, Tensor) and math.isclose(factor, scale, rel_tol=1e-12)
            return base if same else places.value(place) / scale

        return [{k: left(k, v) for k, v in each.items() if self.keeps(k, v)} for each in entered]

    def probed(self, path: _Path, count: float, lr: Tensor) -> tuple[Places, list[Any]]:
        """A step after the path's second one, of one tensor a rank, at any count and rate."""
        values, held = path.after[1]
        places, _, entered = self.stepped(
            values[::2], path.gradients[2][::2], self._divided(held[::2]), lr, torch.tensor(count)
        )
        return places, entered

    def _divided(self, held: Sequence[Mapping[str, Any]]) -> list[_Held]:
        scales = self.scales
        return [{k: v / scales.get(k, 1) for k, v in e.items() if self.keeps(k, v)} for e in held]

    def emerging(self, places: Places, held: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """The numbers that state is multiplied by after a step, where all tensors agree."""
        found: dict[str, set[Any]] = {}
        for each in held:
            for key, value in each.items():
                if self.kinds.get(key) == "like" and isinstance(value, Tensor):
                    found.setdefault(key, set()).add(places.parts(value)[1])
        every = {key: factor for key, (factor, *others) in found.items() if not others}
        return {
            key: factor
            for key, factor in every.items()
            if not isinstance(factor, Tensor) and 1e-6 < factor < 1e6 and abs(factor - 1) > 1e-12
        }

    def follows(self, path: _Path) -> bool:
        """Whether it gives what torch's steps do."""
        values = path.start
        held = [{k: 0 * v for k, v in each.items()} for each in self._divided(path.after[-1][1])]
        steps = zip(path.gradients, path.rates, path.after, strict=True)
        try:
            for step, (gradients, rate, (wanted, _)) in enumerate(steps):
                values, held = self.moved(
                    values, gradients, held, torch.tensor(rate), torch.tensor(step)
                )
                for value, right in zip(values, wanted, strict=True):
                    if not torch.allclose(value, right, rtol=1e-9, atol=1e-11):
                        return False
        except AsksForNumbers:
            raise
        except Exception:  # not for tensors of these shapes
            return False
        return True


@dataclass(frozen=True)
class _Bound(Delegated):
    """The function, with what it keeps for each parameter."""

    optimizer: Traced
    plan: _Stepped
    kept: tuple[_Kept, ...]

    def turns(self) -> set[int]:
        """Early and late, where it goes by the count of steps."""
        return {7, 2_000_000} if self.plan.chooses else set()

    def state(self) -> tuple[StateSpec, ...]:
        return tuple({spec.name: spec for each in self.kept for spec in each.values()}.values())

    def update(
        self,
        parameters: Tensors,
        gradients: Tensors,
        state: Mapping[str, list[Tensor]],
        step: Tensor,
        hyper: Mapping[str, Tensor],
    ) -> OptimizerUpdate:
        held = [
            {key: state[s.name][at if s.per_parameter else 0] for key, s in kept.items()}
            for at, kept in enumerate(self.kept)
        ]
        moved, after = self.plan.moved(parameters, gradients, held, hyper["lr"], step)
        new: dict[str, list[Tensor]] = {spec.name: [] for spec in self.state()}
        for each, kept in zip(after, self.kept, strict=True):
            for key, spec in kept.items():
                if spec.per_parameter or not new[spec.name]:
                    new[spec.name].append(each[key])
        return OptimizerUpdate(moved, new)


def _unguarded(plan: _Stepped, kept: _Kept) -> set[str]:
    """The kinds of state that are not finite only where a parameter is not either.

    Tried on all combinations of numbers from nothing to the largest, and gradients beyond.
    """
    found = {key for key, spec in kept.items() if spec.per_parameter}
    if len(found) > 3:
        return set()
    finite = [0.0, 1e-30, -1e-30, 1.0, -1.0, 1e19, -1e19, 3.4e38, -3.4e38]
    beyond = [*finite, math.inf, -math.inf, math.nan]
    grid = torch.cartesian_prod(*map(torch.tensor, [finite, beyond, *(finite for _ in found)]))
    p, g, *rest = (column.contiguous() for column in grid.unbind(1))
    held = {key: torch.full((), 0.5) for key in kept.keys() - found}
    held.update(zip(found, rest, strict=True))
    for step, lr in product((0, 1, 1000), (1e-3, 1.0)):
        (moved,), (new,) = plan.moved([p], [g], [held], torch.tensor(lr), torch.tensor(step))
        still = torch.isfinite(moved)
        found -= {key for key in found if bool((still & ~new[key].isfinite()).any())}
    return found


class _Noting(UserDict[str, Any]):
    """State of a parameter before its first step, that notes what is put into it at first."""

    def __init__(self) -> None:
        super().__init__()
        self.first: dict[str, Any] = {}

    def __setitem__(self, key: str, value: Any) -> None:
        # As a value: the place that it is will hold another.
        self.first.setdefault(key, value.clone() if isinstance(value, Tensor) else value)
        super().__setitem__(key, value)


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


def _only_number(values: Tensor) -> float | None:
    """What all of these are; None where they differ."""
    return float(values[0]) if (values == values[0]).all() else None


def _is_moderate(number: Tensor) -> bool:
    return 1e-6 < float(number) < 1e6


def _copies(held: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v.detach().clone() if isinstance(v, Tensor) else v for k, v in held.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor | np.generic):
        return value.item()
    return tuple(map(_plain, value)) if isinstance(value, (tuple, list)) else value


def _of_tensors(plain: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of numbers that also takes tensors without axes."""

    def either(*of: Any, **how: Any) -> Any:
        if not any(isinstance(each, Tensor) for each in of):
            return plain(*of, **how)
        return function(*(torch.as_tensor(each, dtype=torch.float64) for each in of))

    return either


def _recordable() -> AbstractContextManager[None]:
    """Inside, torch's steps go by tensors where they would by numbers, as when it compiles them."""
    return patched(
        [
            (torch.compiler, "is_compiling", lambda: True),
            (torch.autograd.profiler, "record_function", lambda name: nullcontext()),
            (math, "sqrt", _of_tensors(math.sqrt, torch.sqrt)),
            (builtins, "min", _of_tensors(min, torch.minimum)),
            (builtins, "max", _of_tensors(max, torch.maximum)),
        ]
    )


def _recorded(kind: type[torch.optim.Optimizer]) -> Callable[..., Traced]:
    """What makes the optimizer of a class: its settings and defaults, without its parameters."""

    def made(*placed: Any, **settings: Any) -> Traced:
        return Traced(kind, *placed, **settings)

    own: Any = made
    signature = inspect.signature(kind)
    own.__signature__ = signature.replace(parameters=[*signature.parameters.values()][1:])
    own.__name__ = own.__qualname__ = kind.__name__
    own.__doc__ = f"The step of ``{kind.__module__}.{kind.__name__}``, with its settings."
    return made


# By the names of their classes.
ASGD = _recorded(torch.optim.ASGD)
"""``torch.optim.ASGD``: averaged SGD (Polyak and Juditsky 1992)."""
Adadelta = _recorded(torch.optim.Adadelta)
"""``torch.optim.Adadelta`` (Zeiler 2012)."""
Adafactor = _recorded(torch.optim.Adafactor)
"""``torch.optim.Adafactor`` (Shazeer and Stern 2018), for parameters of fixed sizes."""
Adagrad = _recorded(torch.optim.Adagrad)
"""``torch.optim.Adagrad`` (Duchi et al. 2011)."""
Adam = _recorded(torch.optim.Adam)
"""``torch.optim.Adam`` (Kingma and Ba 2015), AMSGrad with ``amsgrad=True``."""
Adamax = _recorded(torch.optim.Adamax)
"""``torch.optim.Adamax`` (Kingma and Ba 2015, section 7.1)."""
AdamW = _recorded(torch.optim.AdamW)
"""``torch.optim.AdamW`` (Loshchilov and Hutter 2019)."""
Lamb = _recorded(published.Lamb)
"""LAMB (You et al. 2020, algorithm 2), with norms parameter by parameter."""
Lion = _recorded(published.Lion)
"""Lion (Chen et al. 2023, algorithm 2)."""
Muon = _recorded(torch.optim.Muon)
"""``torch.optim.Muon`` without its rounding to bfloat16, for matrices."""
NAdam = _recorded(torch.optim.NAdam)
"""``torch.optim.NAdam`` (Dozat 2016)."""
RAdam = _recorded(torch.optim.RAdam)
"""``torch.optim.RAdam`` (Liu et al. 2020)."""
RMSprop = _recorded(torch.optim.RMSprop)
"""``torch.optim.RMSprop`` (Hinton's lecture 6e)."""
Rprop = _recorded(torch.optim.Rprop)
"""``torch.optim.Rprop`` (Riedmiller and Braun 1993)."""
SgdW = _recorded(published.SgdW)
"""SGD with decoupled weight decay (Loshchilov and Hutter 2019, algorithm 1)."""


def Sgd(lr: float | None = None, momentum: float = 0.0, **settings: Any) -> Traced:
    """``torch.optim.SGD``; where a trial finds no rate, at 0.01."""
    made = Traced(torch.optim.SGD, 0.01 if lr is None else lr, momentum=momentum, **settings)
    made.leaves_rate_open = lr is None
    return made


def as_optimizer(given: object, model: nn.Module) -> Optimizer:
    """The given optimizer of ours, or the equal of torch's.

    Raises ExportError for what is neither, naming the one that is meant.
    """
    if isinstance(given, torch.optim.Optimizer):
        return _converted(given, model)
    if isinstance(given, Around):
        around: Any = replace(given, optimizer=as_optimizer(given.optimizer, model))
        return around  # type: ignore[no-any-return]
    if isinstance(given, type | FunctionType | partial):
        kind: Any = given.args[0] if isinstance(given, partial) and given.args else given
        name = getattr(kind, "__name__", type(kind).__name__)
        torchs = isinstance(given, type) and issubclass(given, torch.optim.Optimizer)
        of = "model.parameters(), " if torchs else ""
        raise ExportError(f"optimizer is {name} itself, not made", instead=f"{name}({of}lr=...)")
    if all(hasattr(given, name) for name in ("name", "settings", "hyper", "state", "update")):
        return given  # type: ignore[return-value]
    kind = type(given)
    raise ExportError(
        f"optimizer is a {kind.__module__}.{kind.__name__}, which is no part of a graph",
        instead="export.AdamW(lr=...), export.Sgd(lr=..., momentum=...), another of "
        "docs/export/optimizers.md, a torch.optim.Optimizer made of the model's parameters, or an "
        "export.Optimizer of your own",
    )


def trained_by(given: object, model: nn.Module) -> set[str]:
    """Names of the parameters that the optimizer moves: of torch's, those that it was given."""
    names = {n: id(p) for n, p in model.named_parameters() if p.requires_grad}
    if isinstance(given, Around):
        return trained_by(given.optimizer, model)
    if not isinstance(given, torch.optim.Optimizer):
        return set(names)
    held = {id(parameter) for group in given.param_groups for parameter in group["params"]}
    return {name for name, key in names.items() if key in held}


def _converted(given: torch.optim.Optimizer, model: nn.Module) -> Optimizer:
    names = {id(p): n for n, p in model.named_parameters() if p.requires_grad}
    ours: list[Optimizer] = []
    choices: list[list[str]] = []
    for group in given.param_groups:
        if "initial_lr" in group:
            raise ExportError(
                "a torch scheduler changes this optimizer's learning rate, which an export "
                "would not see",
                instead="export.Scheduled(export.AdamW(lr=...), export.schedules.Cosine(...)), or "
                "Trainer.step(batch, hyper={'lr': ...})",
            )
        strange = [p for p in group["params"] if p.requires_grad and id(p) not in names]
        if strange:
            raise ExportError(
                f"optimizer holds a parameter of shape {list(strange[0].shape)} that is none of "
                "the model's",
                instead="an optimizer made of this model's parameters",
            )
        chosen = [names[id(p)] for p in group["params"] if id(p) in names]
        if chosen:
            ours.append(Traced.taken(given, group))
            choices.append(chosen)
    refuse_changed(given)
    if not ours:
        raise ExportError("optimizer holds no parameter of the model that requires a gradient")
    rest, *others = ours
    if not others:
        return rest
    # Names, not patterns: each group's are known.
    groups = [Group(chosen, one) for chosen, one in zip(choices[1:], others, strict=True)]
    return Groups(rest, *groups)
