"""Functions with a gradient in closed form, which can be differentiated again.

The gradient of a loss is then itself a function of the step: a gradient penalty's, the inner step's
of meta-learning, a Hessian times a vector.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from export.errors import ExportError


class ShortGradient(Function):
    """A function of autograd whose ``backward`` may use what ``forward`` computed on its way.

    To autograd a tensor that ``forward`` saves beside its inputs and results is a constant, and a
    derivative of the gradient lacks what it depends on. So where a gradient is taken to be
    differentiated again, ``forward`` is computed once more, recorded, and ``backward`` is taken of
    that: plain arithmetic of the inputs, right to any order. Otherwise nothing is computed twice.

    The transforms of ``torch.func``, which take no such functions, get the plain ``forward``.
    """

    plain = True
    """Whether autograd's derivative of ``forward`` is right, too."""

    @staticmethod
    def only_once(*inputs: Any) -> str:
        """Why this cannot be differentiated twice, with these inputs; "" where it can."""
        return ""

    @classmethod
    def apply(cls, *inputs: Any) -> Any:
        """The results for these inputs."""
        if not torch._C._are_functorch_transforms_active():
            return super().apply(*inputs)  # type: ignore[no-untyped-call]
        why = cls.only_once(*inputs) or ("" if cls.plain else "its gradient is its own")
        if why:
            raise ExportError(
                f"a transform of torch.func of {_named(cls.__name__)}: {why}",
                operator=_named(cls.__name__),
                instead="torch.autograd.grad(..., create_graph=True)",
            )
        return cls.plainly(*inputs)

    @staticmethod
    def plainly(*inputs: Any) -> Any:
        """The results by operators that autograd differentiates."""

    def __init_subclass__(cls) -> None:
        own: Any = cls
        forward, backward = own.forward, own.backward

        def noted_forward(ctx: Any, *inputs: Any) -> Any:
            notes = _Notes()
            results = forward(notes, *inputs)
            every = results if isinstance(results, tuple) else (results,)
            ctx.save_for_backward(*notes.saved_tensors)
            ctx.mark_non_differentiable(*notes.without_gradient)
            ctx.set_materialize_grads(notes.materialised)
            known = {id(each) for each in (*inputs, *every, None)}
            ctx.on_its_way = any(id(each) not in known for each in notes.saved_tensors)
            # Not saved: what is written into them later is no matter to the first gradient.
            ctx.inputs = [(each, _version(each)) for each in inputs]
            ctx.notes, notes.saved_tensors = notes, ()
            return results

        def noted_backward(ctx: Any, *grads: Any) -> Any:
            notes: _Notes = ctx.notes
            notes.needs_input_grad = ctx.needs_input_grad
            if not torch.is_grad_enabled():
                return _of_saved(backward, notes, ctx, grads)
            inputs = [each for each, _ in ctx.inputs]
            if why := own.only_once(*inputs):
                with torch.no_grad():
                    found = _of_saved(backward, notes, ctx, grads)
                return _last(cls.__name__, why, found, (*inputs, *grads))
            if not ctx.on_its_way:
                return _of_saved(backward, notes, ctx, grads)
            if any(version != _version(each) for each, version in ctx.inputs):
                raise ExportError(
                    f"a second derivative of {_named(cls.__name__)}, whose input was written into "
                    "after it was used",
                    instead="the out-of-place form of that write (x = x + y)",
                )
            again = _Notes()
            again.needs_input_grad = ctx.needs_input_grad
            forward(again, *inputs)
            return backward(again, *grads)

        own.plainly = staticmethod(lambda *inputs: forward(_Notes(), *inputs))
        own.forward, own.backward = staticmethod(noted_forward), staticmethod(noted_backward)


class _Notes:
    """Stands for the context that ``forward`` and ``backward`` are given."""

    needs_input_grad: tuple[bool, ...] = ()
    saved_tensors: tuple[Any, ...] = ()
    without_gradient: tuple[Tensor, ...] = ()
    materialised = True

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def mark_non_differentiable(self, *results: Tensor) -> None:
        self.without_gradient = results

    def set_materialize_grads(self, value: bool) -> None:
        self.materialised = value


def _of_saved(backward: Any, notes: _Notes, ctx: Any, grads: Any) -> Any:
    notes.saved_tensors = ctx.saved_tensors
    try:
        return backward(notes, *grads)
    finally:
        notes.saved_tensors = ()


def _version(value: Any) -> int | None:
    return value._version if isinstance(value, Tensor) and not value.is_inference() else None


def _named(name: str) -> str:
    return name.lstrip("_").lower()


class _Last(Function):
    """A gradient that has none itself, which is said where one is asked for."""

    @staticmethod
    def forward(ctx: Any, said: tuple[str, str], gradient: Tensor, *of: Tensor) -> Tensor:
        ctx.said = said
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        name, why = ctx.said
        raise ExportError(
            f"a second derivative of {_named(name)}: {why}",
            operator=_named(name),
            instead="create_graph=False there, or x.detach() as its input",
        )


def _last(name: str, why: str, found: Any, of: Any) -> Any:
    depends = [each for each in of if isinstance(each, Tensor) and each.requires_grad]

    def marked(gradient: Any) -> Any:
        if gradient is None:
            return None
        return _Last.apply((name, why), gradient, *depends)  # type: ignore[no-untyped-call]

    return tuple(map(marked, found)) if isinstance(found, tuple) else marked(found)
