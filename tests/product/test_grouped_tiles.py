"""What the blocks of grouped GPU kernels do: every row and every piece of a sum exactly once, within the operands."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from haliax_fp8._product.grouped.tiles import ROWS as BUNDLE, Tile, groups_jobs, rows_jobs, with_edges, within_bounds
from haliax_fp8._product.grouped.tpu import visits


TILE = Tile(rows=16, columns=16, depth=4)

# Shapes are few, so that little is compiled; 62 rows are not a multiple of any tile.
ROWS = 62
of_members = st.lists(st.lists(st.integers(0, 20), min_size=3, max_size=3), min_size=1, max_size=2)

make_rows_jobs = jax.jit(rows_jobs, static_argnums=(1, 2, 3, 4, 5))
make_groups_jobs = jax.jit(groups_jobs, static_argnums=(1, 2, 3, 4))
make_edges = jax.jit(with_edges, static_argnums=(2, 3))


@given(of_members)
@settings(max_examples=50, deadline=None)
def test_each_row_is_written_once_and_by_the_kernel_of_its_group(sizes):
    rows, total = ROWS, len(sizes) * ROWS
    length = -(-total // BUNDLE) * BUNDLE
    jobs = make_rows_jobs(jnp.array(sizes, jnp.int32), rows, length, 32, TILE, 12)
    expected = np.full(total, -1)
    for member, of_member in enumerate(sizes):
        for group, start in enumerate(np.cumsum([0, *of_member[:-1]])):
            expected[member * rows + start :][: of_member[group]] = 3 * member + group
    written, found = np.zeros(total, int), np.full(total, -1)
    for a, b, out, skip, count, steps, first, edges, group in zip(*map(np.asarray, jobs), strict=True):
        assert a == out and 0 <= a <= length - TILE.rows
        assert count == 0 or (0 <= skip and skip + count <= TILE.rows)
        # Else a GPU copies zeros instead of rows, which JAX's interpreter does not.
        assert a % BUNDLE == 0
        assert steps in (0, 12 // TILE.depth) and first == 0 and edges == -1 and b == 32 * group
        own = slice(a + skip, a + skip + count)
        written[own] += 1
        found[own] = group if steps else -1
    assert (written == 1).all()
    np.testing.assert_array_equal(found, expected)


@given(of_members)
@settings(max_examples=50, deadline=None)
def test_sums_over_groups_take_each_row_once(sizes):
    rows, total = ROWS, len(sizes) * ROWS
    length = -(-total // TILE.depth) * TILE.depth
    x = np.zeros((length, 2), np.float32)
    x[:total] = np.arange(1, total + 1)[:, None]
    given_sizes = jnp.array(sizes, jnp.int32)
    jobs = make_groups_jobs(given_sizes, rows, length, 2 * TILE.rows, TILE)
    edged = np.asarray(make_edges(jnp.asarray(x), given_sizes, rows, TILE.depth))
    np.testing.assert_array_equal(edged[:length], x)
    seen = set()
    for a, b, out, skip, count, steps, first, edges, group in zip(*map(np.asarray, jobs), strict=True):
        assert (b, skip, count) == (0, 0, TILE.rows) and out == 2 * TILE.rows * group + a
        # As a GPU kernel reads them: the group's first and last piece from behind the rows.
        pieces = [edges if s == 0 else edges + 1 if s == steps - 1 else first + s for s in range(steps)]
        read = [edged[piece * TILE.depth :][: TILE.depth, 0] for piece in pieces]
        of_b = [x[(first + s) * TILE.depth :][: TILE.depth, 0] for s in range(steps)]
        begin = (group // 3) * rows + sum(sizes[group // 3][: group % 3])
        own = x[begin : begin + sizes[group // 3][group % 3], 0]
        # Rows of other groups are zero on one side, and lie at the same positions on both.
        assert sum(piece.sum() for piece in read) == own.sum()
        assert sum((p * q).sum() for p, q in zip(read, of_b, strict=True)) == (own**2).sum()
        seen.add((group, a))
    assert seen == {(group, tile) for group in range(3 * len(sizes)) for tile in (0, TILE.rows)}


make_visits = jax.jit(visits, static_argnums=(1, 2, 3), static_argnames="by_row")


@given(of_members)
@settings(max_examples=50, deadline=None)
def test_visits_of_a_tpu_meet_each_row_of_each_group_once(sizes):
    """Tiles are aligned there, so that several groups may visit one; visits to a tile follow each other."""
    total = len(sizes) * ROWS
    length = -(-total // TILE.rows) * TILE.rows
    for of_rows in (True, False):
        made = make_visits(jnp.array(sizes, jnp.int32), ROWS, length, TILE.rows, by_row=of_rows)
        found, order = np.full(total, -1), []
        firsts, lasts = Counter(), Counter()
        for tile, group, begin, end, edge, multiplies in zip(*map(np.asarray, made), strict=True):
            assert 0 <= tile < length // TILE.rows
            order.append((group, tile) if not of_rows else tile)
            firsts[group] += edge % 2
            lasts[group] += edge >= 2
            own = slice(max(begin, tile * TILE.rows), min(end, (tile + 1) * TILE.rows))
            if multiplies:
                assert (found[own] == -1).all()
                found[own] = group
        assert order == sorted(order)
        expected = np.full(total, -1)
        for member, of_member in enumerate(sizes):
            for group, start in enumerate(np.cumsum([0, *of_member[:-1]])):
                expected[member * ROWS + start :][: of_member[group]] = 3 * member + group
        np.testing.assert_array_equal(found, expected)
        if not of_rows:
            # Each group is a sum: begun once and written once, without rows too.
            every = {group: 1 for group in range(3 * len(sizes))}
            assert firsts == every and lasts == every


@pytest.mark.parametrize(
    "sizes, rows, expected",
    [((2, 0, 3), 5, (2, 0, 3)), ((-1, 3), 4, (0, 3)), ((3, 4, 1), 5, (3, 2, 0)), ((-5, -5), 4, (0, 0))],
)
def test_wrong_sizes_stay_within_the_operands(sizes, rows, expected):
    assert tuple(within_bounds(jnp.array(sizes), rows).tolist()) == expected
