from __future__ import annotations

import numpy as np
import pytest

from device_sdk.artifact.flat_layout import flat_layout
from device_sdk.methods.attention.contract import AttentionTraining, layouts_to_text
from device_sdk.methods.attention.fleet import read_fleet
from device_sdk.methods.learner import LearnerError
from device_sdk.wire.arrays.exchange import Broadcast


def test_a_layout_of_a_million_millions_is_refused_before_memory_is_taken_for_it() -> None:
    own = flat_layout({"a.weight": (2, 2)})
    widest = flat_layout({"a.weight": (2**20, 2**20)})
    settings = {**AttentionTraining().as_scalars(), "layouts": layouts_to_text([own, widest])}
    broadcast = Broadcast(1, 0, {"global": np.ones(4, np.float32)}, settings)
    with pytest.raises(LearnerError, match=r"'global' of the broadcast is \(4,\)"):
        read_fleet(broadcast, own)
