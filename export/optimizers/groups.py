"""Groups of parameters, each with an optimizer or with settings of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch

from export.axes import Shape
from export.errors import SettingError
from export.layout import LayoutSlot
from export.optimizers.protocol import (
    Optimizer,
    OptimizerUpdate,
    StateSpec,
    Tensors,
    bound,
    packs,
    require,
    turns,
)

Choice = str | Sequence[str] | Callable[[str, Shape], bool]


@dataclass(frozen=True)
class Group:
    """Some of the parameters, and what trains them.

    ``parameters``: a name, a pattern (``"head.*"``; ``*`` stands for dots, too) or several, or a
    function of name and shape (``lambda name, shape: len(shape) < 2``: biases and norms).
    ``optimizer``: an optimizer, or settings that differ from those of the groups' first one:
    ``{"weight_decay": 0.0}``. A group with a ``name`` has run-time inputs of its own, ``name.lr``.
    """

    parameters: Choice
    optimizer: Optimizer | Mapping[str, object]
    name: str = ""

    def __post_init__(self) -> None:
        require(
            not self.name or (self.name.isidentifier() and self.name != "rest"),
            f"a group's name is {self.name!r}; expected letters, digits, underscores, not 'rest'",
        )

    def chosen(self, shapes: Mapping[str, Shape]) -> set[str]:
        """The names that it is about."""
        if callable(self.parameters):
            choose = self.parameters
            return {name for name, shape in shapes.items() if choose(name, shape)}
        return {name for pattern in self._patterns() for name in _fitting(pattern, shapes)}

    def check(self, shapes: Mapping[str, Shape]) -> None:
        """ValueError where a pattern, or the function, is about none of these."""
        if callable(self.parameters):
            chooses = bool(self.chosen(shapes))
            require(chooses, f"the function of group {self.name!r} chooses no parameter")
            return
        for pattern in self._patterns():
            require(
                bool(_fitting(pattern, shapes)),
                f"no parameter is called {pattern!r}; there are {', '.join(shapes)}",
            )

    def _patterns(self) -> Sequence[str]:
        given = self.parameters
        return [given] if isinstance(given, str) else [] if callable(given) else given


def _fitting(pattern: str, shapes: Mapping[str, Shape]) -> set[str]:
    return {name for name in shapes if name == pattern or fnmatchcase(name, pattern)}


@dataclass(frozen=True)
class _Share:
    """One group's optimizer, and the positions of its state tensors among all."""

    label: str
    optimizer: Optimizer
    own_inputs: bool
    positions: tuple[int, ...] = ()
    names: tuple[str, ...] = ()


class Groups:
    """Several optimizers, each for its share of the parameters.

    ``rest`` trains what no group takes; of several groups that fit a parameter the first does.
    Each optimizer keeps its own settings and state. ``lr`` is the base rate of all groups without a
    name: ``rest``'s by default (where that is 0, the first group's that is not), and each group
    keeps its ratio to it. A group with a name has its own, which a step may set to 0 and later not.

    Raises ValueError for a setting that ``rest`` has not, and two groups of one name.
    """

    name = "groups"

    def __init__(self, rest: Optimizer, *groups: Group) -> None:
        self._groups = groups
        self._shares = (
            _Share("rest", rest, own_inputs=False),
            *(
                _Share(group.name or str(at), _optimizer(group, rest), bool(group.name))
                for at, group in enumerate(groups, start=1)
            ),
        )
        labels = [share.label for share in self._shares]
        require(len(set(labels)) == len(labels), f"two groups have one name: {', '.join(labels)}")
        shared = [share.optimizer.hyper() for share in self._shares if not share.own_inputs]
        self._base = next((hyper["lr"] for hyper in shared if hyper.get("lr")), 0.0)
        self.hyper()

    def packs(self, shapes: Mapping[str, Shape]) -> dict[str, str]:
        """By a parameter's name, its group's pack, "" for the rest's.

        ValueError where a group is about no parameter, or is left without one.
        """
        for group in self._groups:
            group.check(shapes)
        found: dict[str, str] = {}
        for share, names in zip(self._shares, self._assigned(shapes), strict=True):
            require(
                bool(names) or share is self._shares[0],
                f"group {share.label!r} is left without a parameter: earlier groups take its own",
            )
            inner = packs(share.optimizer, {name: shapes[name] for name in names})
            for name, pack in inner.items():
                # No group is called "rest": groups in the rest share no pack with those here.
                whole = "" if share is self._shares[0] and not pack else share.label
                found[name] = f"{whole}.{pack}" if pack else whole
        return {name: found[name] for name in shapes}

    def bound(self, slots: Sequence[LayoutSlot]) -> Groups:
        """The groups that know their state tensors; ValueError where one has none."""
        shapes = {member.name: member.shape for slot in slots for member in slot.members}
        shares = []
        for share, names in zip(self._shares, self._assigned(shapes), strict=True):
            positions = tuple(i for i, slot in enumerate(slots) if slot.members[0].name in names)
            if positions:
                optimizer = bound(share.optimizer, [slots[i] for i in positions])
                shares.append(
                    replace(share, optimizer=optimizer, positions=positions, names=tuple(names))
                )
        return self._with(shares)

    def _assigned(self, shapes: Mapping[str, Shape]) -> list[list[str]]:
        """The names of each share, in the model's order."""
        left = dict(shapes)
        assigned: list[list[str]] = []
        for group in self._groups:
            chosen = group.chosen(shapes)
            assigned.append([name for name in left if name in chosen])
            left = {name: shape for name, shape in left.items() if name not in chosen}
        return [list(left), *assigned]

    def assigned(self, shapes: Mapping[str, Shape]) -> list[tuple[Optimizer, list[str]]]:
        """The groups' optimizers, the rest's first, with the names of their parameters."""
        names = self._assigned(shapes)
        return [(share.optimizer, own) for share, own in zip(self._shares, names, strict=True)]

    def with_optimizers(self, optimizers: Sequence[Optimizer]) -> Groups:
        """These groups with other optimizers, in the order of ``assigned``."""
        pairs = zip(self._shares, optimizers, strict=True)
        return self._with([replace(share, optimizer=optimizer) for share, optimizer in pairs])

    def _with(self, shares: Sequence[_Share]) -> Groups:
        changed = Groups.__new__(Groups)
        changed._groups, changed._base, changed._shares = self._groups, self._base, tuple(shares)
        return changed

    def settings(self) -> dict[str, object]:
        """The groups' names, settings and parameters, each key behind the group's name."""
        found: dict[str, object] = {}
        for share, ratio in zip(self._shares, self._ratios(), strict=True):
            facts: dict[str, object] = {"optimizer": share.optimizer.name}
            if share.label != "rest":
                facts["parameters"] = list(share.names)
            if not share.own_inputs:
                facts["rate"] = ratio
            facts.update(share.optimizer.settings())
            found.update({f"{share.label}.{key}": value for key, value in facts.items()})
        return found

    def hyper(self) -> dict[str, float]:
        """``lr``, and of each group with a name its own inputs."""
        found: dict[str, float] = {}
        for share in self._shares:
            for key, value in share.optimizer.hyper().items():
                if share.own_inputs:
                    found[f"{share.label}.{key}"] = value
                elif key == "lr":
                    found["lr"] = self._base
                else:
                    require(
                        found.setdefault(key, value) == value,
                        f"groups differ in the run-time input {key!r}: give one of them a name",
                    )
        return found

    def _ratios(self) -> list[float]:
        base = self._base
        rates = [share.optimizer.hyper().get("lr", base) for share in self._shares]
        return [rate / base if base else 1.0 for rate in rates]

    def turns(self) -> set[int]:
        return set().union(*(turns(share.optimizer) for share in self._shares))

    def state(self) -> tuple[StateSpec, ...]:
        return tuple(
            replace(
                spec,
                name=f"{share.label}.{spec.name}",
                of=_positions(share, spec) if spec.per_parameter else None,
            )
            for share in self._shares
            for spec in share.optimizer.state()
        )

    def update(
        self,
        parameters: Tensors,
        gradients: Tensors,
        state: Mapping[str, list[torch.Tensor]],
        step: torch.Tensor,
        hyper: Mapping[str, torch.Tensor],
    ) -> OptimizerUpdate:
        moved: dict[int, torch.Tensor] = {}
        new: dict[str, list[torch.Tensor]] = {}
        for share, ratio in zip(self._shares, self._ratios(), strict=True):
            prefix = f"{share.label}."
            given = dict(hyper)
            if share.own_inputs:
                given = {k: hyper[prefix + k] for k in share.optimizer.hyper()}
            elif ratio != 1 and "lr" in given:
                given["lr"] = given["lr"] * ratio
            update = share.optimizer.update(
                [parameters[i] for i in share.positions],
                [gradients[i] for i in share.positions],
                {spec.name: state[prefix + spec.name] for spec in share.optimizer.state()},
                step,
                given,
            )
            moved.update(zip(share.positions, update.parameters, strict=True))
            new.update({prefix + kind: held for kind, held in update.state.items()})
        return OptimizerUpdate([moved[i] for i in range(len(parameters))], new)


def _positions(share: _Share, spec: StateSpec) -> tuple[int, ...]:
    """Where the state tensors that the share's optimizer keeps this for lie among all."""
    return share.positions if spec.of is None else tuple(share.positions[i] for i in spec.of)


def _optimizer(group: Group, rest: Any) -> Optimizer:
    if not isinstance(group.optimizer, Mapping):
        return group.optimizer
    if not hasattr(rest, "with_settings"):
        raise SettingError(
            f"a group sets {', '.join(group.optimizer)}, and {type(rest).__name__} has no settings "
            "to change: give the group an optimizer of its own"
        )
    changed: Optimizer = rest.with_settings(group.optimizer)
    return changed
