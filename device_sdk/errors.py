"""What can go wrong on the device, one class per thing that a caller would handle differently."""

from __future__ import annotations

from device_sdk.artifact.errors import ArtifactError

__all__ = [
    "ArtifactError",
    "BatchError",
    "CheckpointError",
    "DeviceError",
    "GraphRunError",
    "NonFiniteStep",
    "ProviderError",
    "StateError",
]


class DeviceError(Exception):
    """Base of the errors below."""


class BatchError(DeviceError, ValueError):
    """A batch or hyper-parameter is not what the artifact expects; the message says what is."""


class StateError(DeviceError, ValueError):
    """A parameter or state tensor that was given does not fit the artifact."""


class NonFiniteStep(DeviceError, ArithmeticError):
    """A step met NaN or infinity. The trainer is as it was before the step."""

    def __init__(self, loss: float, guard: float) -> None:
        super().__init__(
            f"the step's loss is {loss} and the sum of its new state is {guard}: one of them is "
            "not finite, so the step was dropped and the parameters are as before. Look for NaN "
            "in the batch, or lower the learning rate"
        )
        self.loss = loss
        self.guard = guard

    def __reduce__(self) -> tuple[type[NonFiniteStep], tuple[float, float]]:
        # Without this, unpickling (in a pool of processes) would call __init__ with the message.
        return NonFiniteStep, (self.loss, self.guard)


class GraphRunError(DeviceError, RuntimeError):
    """onnxruntime failed inside the graph (an index out of range, say); nothing has changed."""


class ProviderError(DeviceError, RuntimeError):
    """No onnxruntime session could be made with the execution providers that were asked for."""


class CheckpointError(DeviceError, ValueError):
    """A checkpoint is corrupt or belongs to another artifact. The trainer is unchanged."""
