"""Soft labels, class probabilities a sample, as few bytes.

``float16`` takes two bytes a probability, ``uint8`` one: 255ths, rounded so that a row's sum stays
255 (largest remainders). With ``top`` only the largest ones travel, with their classes; the reader
spreads what is missing to 1 evenly over the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from device_sdk.wire.codec.errors import WireError

__all__ = ["LabelForm", "decode_soft_labels", "encode_soft_labels"]

LabelForm = Literal["float16", "uint8"]
# float16 rounds each of them by up to 2^-12 of its size, and small ones by 2^-25.
_SUM_ERROR = 0.01
_WHOLE = 255


def encode_soft_labels(
    probabilities: NDArray[np.float32], form: LabelForm, top: int = 0
) -> dict[str, NDArray[Any]]:
    """``labels`` [samples, classes or top], and with ``top`` ``classes`` of the same shape.

    Args:
        probabilities: [samples, classes], each row a distribution.

    Raises ValueError where a row is none.
    """
    sums = probabilities.sum(axis=1, keepdims=True, dtype=np.float64)
    if not (np.isfinite(sums).all() and (probabilities >= 0).all() and (sums > 0).all()):
        raise ValueError("soft labels must be distributions: finite, none negative, not all zero")
    exact = probabilities / sums
    if form == "float16":
        coded: NDArray[Any] = exact.astype(np.float16)
    else:
        coded = _in_255ths(exact)
    if top == 0:
        return {"labels": coded}
    order = np.argsort(-exact, axis=1, kind="stable")[:, :top]
    kind = np.uint8 if probabilities.shape[1] <= 256 else np.uint16
    return {
        "labels": np.take_along_axis(coded, order, axis=1),
        "classes": order.astype(kind),
    }


def decode_soft_labels(
    tensors: Mapping[str, NDArray[Any]], classes: int, form: LabelForm, top: int = 0
) -> NDArray[np.float32]:
    """Distributions, float32 [samples, classes], from what :func:`encode_soft_labels` made.

    Raises ``WireError("bad-labels")`` for other names, dtypes or shapes and for rows that are no
    distributions.
    """
    if set(tensors) != ({"labels", "classes"} if top else {"labels"}):
        raise WireError("bad-labels", f"expected labels{' and classes' if top else ''}")
    labels = tensors["labels"]
    width = top or classes
    if labels.dtype != np.dtype(form) or labels.ndim != 2 or labels.shape[1] != width:
        raise WireError(
            "bad-labels",
            f"labels are {labels.dtype} {labels.shape}; expected {form} [samples, {width}]",
        )
    values = labels.astype(np.float64)
    if form == "uint8":
        values /= _WHOLE
    sums = values.sum(axis=1)
    # NaN fails the comparisons too.
    lowest = 0.0 if top else 1 - _SUM_ERROR
    fits = (values >= 0).all() and (sums > 0).all() and (sums >= lowest).all()
    if not fits or not (sums <= 1 + _SUM_ERROR).all():
        raise WireError("bad-labels", "a row of the labels is no distribution")
    if top:
        values = _spread(values, tensors["classes"], classes)
    found: NDArray[np.float32] = (values / values.sum(axis=1, keepdims=True)).astype(np.float32)
    return found


def _spread(values: NDArray[np.float64], order: NDArray[Any], classes: int) -> NDArray[np.float64]:
    kind = np.uint8 if classes <= 256 else np.uint16
    if order.dtype != kind or order.shape != values.shape:
        raise WireError("bad-labels", f"classes are {order.dtype} {order.shape}")
    ranked = np.sort(order, axis=1)
    if order.size and (int(order.max()) >= classes or (ranked[:, 1:] == ranked[:, :-1]).any()):
        raise WireError("bad-labels", "classes must be distinct in a row, and known")
    missing = np.maximum(0.0, 1 - values.sum(axis=1, keepdims=True))
    full = np.repeat(missing / max(1, classes - values.shape[1]), classes, axis=1)
    np.put_along_axis(full, order.astype(np.int64), values, axis=1)
    return full


def _in_255ths(exact: NDArray[np.floating[Any]]) -> NDArray[np.uint8]:
    scaled = exact.astype(np.float64) * _WHOLE
    codes = np.floor(scaled)
    left = np.rint(_WHOLE - codes.sum(axis=1)).astype(np.int64)
    order = np.argsort(codes - scaled, axis=1, kind="stable")
    ranks = np.empty_like(order)
    np.put_along_axis(ranks, order, np.arange(exact.shape[1])[None, :], axis=1)
    codes += ranks < left[:, None]
    return codes.astype(np.uint8)
