"""Which part of a full model an artifact is, and what its tensors then are."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from device_sdk.artifact import ArtifactError, Manifest
from device_sdk.artifact.submodels import Basis, Piece, Submodel, Units, part_of, slice_of, stand_in
from tests.fakes.handmade import frozen_manifest, linear_parts

ID = "0" * 64
LINEAR = linear_parts()[0]


ROLES = ("left", "scale", "right")


def submodel(**pieces: Piece) -> Submodel:
    """With the other factors of those that are."""
    others = {
        f"{name}.{role}": Piece(piece.of, role, piece.blocks)
        for name, piece in pieces.items()
        for role in ROLES
        if piece.role != "slice" and role != piece.role
    }
    return Submodel(1, 2, ID, {**pieces, **others})


@given(
    full=st.lists(st.integers(1, 6), min_size=1, max_size=3),
    data=st.data(),
)
def test_a_slice_has_the_first_rows_of_each_block(full: list[int], data: st.DataObject) -> None:
    blocks = [data.draw(st.integers(1, 3)) for _ in full]
    sizes = [n * b for n, b in zip(full, blocks, strict=True)]
    part = [data.draw(st.integers(1, n)) * b for n, b in zip(full, blocks, strict=True)]
    whole = np.arange(np.prod(sizes)).reshape(sizes)
    found = whole[slice_of(tuple(part), tuple(sizes), tuple(blocks))]
    expected = whole
    for axis, (size, own, count) in enumerate(zip(sizes, part, blocks, strict=True)):
        kept = [r for r in range(size) if r % (size // count) < own // count]
        expected = np.take(expected, kept, axis=axis)
    np.testing.assert_array_equal(found, expected)


@given(
    units=st.integers(1, 5),
    each=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    blocks=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    data=st.data(),
)
def test_a_slice_of_chosen_units_has_their_rows_of_every_block(
    units: int, each: tuple[int, int], blocks: tuple[int, int], data: st.DataObject
) -> None:
    chosen = sorted(data.draw(st.sets(st.integers(0, units - 1), min_size=1)))
    full = tuple(units * n * count for n, count in zip(each, blocks, strict=True))
    part = tuple(len(chosen) * n * count for n, count in zip(each, blocks, strict=True))
    whole = np.arange(np.prod(full)).reshape(full)
    found = whole[slice_of(part, full, blocks, Units(units, np.array(chosen)))]
    expected = whole
    for axis, n in enumerate(each):
        rows = [r for r in range(full[axis]) if r // n % units in chosen]
        expected = np.take(expected, rows, axis=axis)
    np.testing.assert_array_equal(found, expected)


def test_a_slice_that_is_not_of_so_many_units_is_refused() -> None:
    for shape, full in (((2, 4), (4, 8)), ((3, 4), (6, 8)), ((2, 2), (5, 5))):
        with pytest.raises(ArtifactError, match="is not of 3 units"):
            slice_of(shape, full, (), Units(3, np.array([1])))


@given(
    shape=st.tuples(st.integers(1, 7), st.integers(1, 7)),
    scale=st.sampled_from([0.0, 1e-20, 1.0, 1e20]),
    seed=st.integers(0, 99),
)
def test_factors_make_the_best_approximation_and_neither_is_zero(
    shape: tuple[int, int], scale: float, seed: int
) -> None:
    matrix = (scale * np.random.default_rng(seed).standard_normal(shape)).astype(np.float32)
    basis = Basis.of(matrix)
    for rank in range(1, min(shape) + 1):
        left, scales, right = (basis.factor(role, rank) for role in ROLES)
        assert left.shape == (shape[0], rank) and right.shape == (rank, shape[1])
        assert all(np.isfinite(each).all() for each in (left, scales, right))
        # One that is zero lets the other's gradient be zero too: the left one never is.
        assert (np.abs(left).max(axis=0) > 0).all()
    np.testing.assert_allclose(
        (left * scales) @ right, matrix, atol=1e-5 * max(scale, 1e-30), rtol=1e-4
    )


@given(rank=st.integers(1, 5), size=st.sampled_from([1.0, 30.0, 1e3]), seed=st.integers(0, 99))
def test_a_step_on_factors_is_the_matrix_s_own_within_their_directions(
    rank: int, size: float, seed: int
) -> None:
    """However unequal the singular values are, down to a tenth of the largest, and to 0.1."""
    rng = np.random.default_rng(seed)
    u, v = (np.linalg.qr(rng.standard_normal((n, 5)))[0] for n in (6, 8))
    matrix = (size * (u * np.geomspace(1, 0.11, 5)) @ v.T).astype(np.float32)
    gradient = rng.standard_normal(matrix.shape)
    basis = Basis.of(matrix)
    left, scale, right = (basis.factor(role, rank).astype(np.float64) for role in ROLES)
    d_left = gradient @ (scale[:, None] * right).T
    d_right = (left * scale).T @ gradient
    u, v = u[:, :rank], v[:, :rank]
    expected = gradient @ v @ v.T + u @ u.T @ gradient
    found = (d_left * scale) @ right + (left * scale) @ d_right
    np.testing.assert_allclose(found, expected, atol=1e-3)
    told = basis.moved("left", d_left) @ basis.right[:rank]
    told = told + basis.left[:, :rank] @ basis.moved("right", d_right)
    np.testing.assert_allclose(told, expected, atol=1e-3)


def test_a_basis_that_is_kept_in_part_is_made_anew() -> None:
    matrix = np.random.default_rng(0).standard_normal((6, 8)).astype(np.float32)
    basis = Basis.of(matrix)
    whole = {"w": matrix, **basis.kept_as("w", 4)}
    assert all(map(np.array_equal, Basis.found(whole, "w"), basis.kept_as("w", 4).values()))
    del whole["w..strength"]
    assert all(map(np.array_equal, Basis.found(whole, "w"), basis))


@given(shape=st.lists(st.integers(0, 5), max_size=4))
def test_stand_ins_are_small_positive_and_unequal(shape: list[int]) -> None:
    found = stand_in(tuple(shape))
    assert found.dtype == np.float32 and found.shape == tuple(shape)
    assert ((found > 0) & (found < 1.61)).all()
    assert len(np.unique(found)) == found.size


def test_stand_ins_neither_grow_nor_vanish_over_many_wide_layers() -> None:
    rows = np.ones((4, 1024), np.float32)
    for _ in range(100):
        rows = rows @ stand_in((1024, 1024)).T
    assert ((rows > 0.5) & (rows < 2)).all()


FULL = {"w": np.ones((6, 8), np.float32), "b": np.ones(6, np.float32)}


@pytest.mark.parametrize(
    ("piece", "shape", "said"),
    [
        (Piece("v"), (2, 2), "which the full model lacks"),
        (Piece("w"), (7, 2), "does not lie in"),
        (Piece("w"), (2,), "a slice"),
        (Piece("w", "slice", (4, 1)), (4, 8), "does not lie in"),
        (Piece("w", "slice", (2,)), (4, 8), "in blocks"),
        (Piece("b", "left"), (6, 1), "one is no matrix"),
        (Piece("w", "left"), (6, 7), "rank 7"),
        (Piece("w", "left"), (5, 2), r"makes it \[6, 2\]"),
        (Piece("w", "right"), (2, 9), r"makes it \[2, 8\]"),
        (Piece("w", "scale"), (2, 2), "one is no matrix"),
        (Piece("w", "scale"), (7,), "rank 7"),
    ],
)
def test_what_is_no_part_of_the_full_model_is_refused(
    piece: Piece, shape: tuple[int, ...], said: str
) -> None:
    with pytest.raises(ArtifactError, match=said):
        part_of(FULL, submodel(x=piece), {"x": shape})


@given(data=st.data())
def test_whatever_a_manifest_says_the_parts_are_right_or_refused(data: st.DataObject) -> None:
    piece = Piece(
        data.draw(st.sampled_from(["w", "b", "v"])),
        data.draw(st.sampled_from(["slice", *ROLES])),
        tuple(data.draw(st.lists(st.integers(1, 4), max_size=3))),
    )
    shape = tuple(data.draw(st.lists(st.integers(0, 9), max_size=3)))
    try:
        found = part_of(FULL, submodel(x=piece), {"x": shape})
    except ArtifactError:
        return
    assert found["x"].shape == shape


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"rung": 3, "rungs": 2}, "rung 3 of 2"),
        ({"rung": 0}, "submodel.rung"),
        ({"full": "abc"}, "submodel.full"),
        ({"units": 4, "kept": 5}, "5 of 4 units"),
        ({"units": 4}, "0 of 4 units"),
        ({"held": ["linear.weight"]}, "'linear.weight' is not held"),
        ({"pieces": {"nothing": {"of": "w"}}}, "'nothing' is no tensor that a step moves"),
        ({"pieces": {"w": {"of": "w", "role": "middle"}}}, "role"),
        ({"pieces": {"w": {"of": "w", "role": "left"}}}, "'w' is to have one each of left, scale"),
        ({"pieces": {"w": {"of": "w", "blocks": [0]}}}, "blocks"),
        ({"more": 1}, "more"),
    ],
)
def test_a_manifest_that_makes_no_submodel_is_refused(changed: dict[str, Any], said: str) -> None:
    plain = json.loads(replace(LINEAR, submodel=submodel()).to_json())
    plain["submodel"] |= changed
    text = json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()
    with pytest.raises(ArtifactError, match=said):
        Manifest.parse(text)


@pytest.mark.parametrize(
    ("manifest", "scale", "right", "said"),
    [
        (LINEAR, "linear.bias", "mean", "'linear.bias' is the scale of factors, and is not held"),
        (frozen_manifest(), "mean", "linear.bias", "'w' has factors of ranks 3 and 4"),
    ],
)
def test_factors_that_make_no_product_are_refused(
    manifest: Manifest, scale: str, right: str, said: str
) -> None:
    roles = {"linear.weight": "left", scale: "scale", right: "right"}
    pieces = {name: Piece("w", role) for name, role in roles.items()}
    held = tuple(sorted(manifest.frozen_members))
    with pytest.raises(ArtifactError, match=said):
        replace(manifest, submodel=Submodel(1, 2, ID, pieces, held))


def test_a_submodel_s_own_values_are_those_that_no_step_moves() -> None:
    assert LINEAR.given == frozenset()
    part = replace(LINEAR, submodel=Submodel(1, 2, ID, {"linear.weight": Piece("w")}))
    assert {"linear.weight", "linear.bias"} <= part.given
    assert not part.given & part.frozen_members
    assert Manifest.parse(part.to_json()) == part
    frozen = replace(frozen_manifest(), submodel=submodel())
    assert frozen.given and not frozen.given & frozen.frozen_members
