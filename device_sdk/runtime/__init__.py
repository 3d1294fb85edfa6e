"""What the Trainer is made of: the onnxruntime session, the state banks, bindings, checkpoints."""

from __future__ import annotations

from device_sdk.errors import RuntimeMissing

try:
    import onnxruntime as _onnxruntime  # noqa: F401 - asked for here, before any file beside needs it
except ImportError as error:
    raise RuntimeMissing(
        f"this trains or runs an artifact, which takes onnxruntime, and that cannot be loaded here "
        f"({error}): `pip install onnxruntime`, where there is a wheel for this machine"
    ) from error
