"""The closed set of shapes a decode step is padded to, so that few recordings cover every batch.

A decode step's rectangle has two moving axes: rows, which follow admissions, and width, which grows by one a step.
Each axis is rounded up to a bucket. Row buckets are powers of two unless a list is given (a linear kernel may
be exact only at some counts); width buckets are a stride. The maximum of either axis is always a bucket, on the
stride or not. A padded row has length 0 and writes to the sink slot, so it reads nothing and harms nothing. This
module counts what the padding costs, and knows no tensor and no table.

Gates: gates.buckets. Proof: tests/test_buckets.py. Story: buckets.
"""

from __future__ import annotations

from collections.abc import Sequence

from gates.buckets import check_bucket_covers

Shape = tuple[int, int]  # (rows, width)


def sink_slot(*, num_blocks: int, block_size: int) -> int:
    """The slot past the last one that any block can name: padded rows write there, nothing reads it."""
    return num_blocks * block_size


def power_of_two_rows(max_batch_size: int) -> tuple[int, ...]:
    """1, 2, 4, 8, ... below `max_batch_size`, and `max_batch_size` itself."""
    return (*(1 << power for power in range((max_batch_size - 1).bit_length())), max_batch_size)


def stride_widths(max_model_len: int, width_multiple: int) -> tuple[int, ...]:
    """Multiples of `width_multiple` below `max_model_len`, and `max_model_len` itself."""
    return (*range(width_multiple, max_model_len, width_multiple), max_model_len)


class BucketSet:
    """Every (rows, width) shape a decode step may have, and the map from any batch to its smallest one.

    `row_sizes` replaces the powers of two; `max_batch_size` joins the list whether it names it or not.

    Raises:
        ValueError: a limit, the multiple or a row size is out of range.
    """

    def __init__(
        self,
        *,
        max_batch_size: int,
        max_model_len: int,
        width_multiple: int = 128,
        row_sizes: Sequence[int] | None = None,
    ) -> None:
        limits = {"max_batch_size": max_batch_size, "max_model_len": max_model_len, "width_multiple": width_multiple}
        for name, value in limits.items():
            if value < 1:
                raise ValueError(f"{name}: {value} is not in 1..")
        wanted = power_of_two_rows(max_batch_size) if row_sizes is None else row_sizes
        outside = [size for size in wanted if not 1 <= size <= max_batch_size]
        if outside:
            raise ValueError(f"row_sizes: {outside} are not in 1..{max_batch_size}")
        self.row_sizes = tuple(sorted({*wanted, max_batch_size}))
        self.widths = stride_widths(max_model_len, width_multiple)
        self.width_multiple = width_multiple
        self._rows_for = _round_up_table(self.row_sizes)
        self.steps = self.real_rows = self.padded_rows = self.real_cells = self.padded_cells = 0
        self._check_covers(max_batch_size, max_model_len)

    @property
    def max_batch_size(self) -> int:
        """The largest row bucket."""
        return self.row_sizes[-1]

    @property
    def max_model_len(self) -> int:
        """The widest width bucket."""
        return self.widths[-1]

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """The whole set, rows then width, ascending."""
        return tuple((rows, width) for rows in self.row_sizes for width in self.widths)

    @property
    def num_shapes(self) -> int:
        """How many shapes there are: a product, which is why a warm list is trimmed on both axes."""
        return len(self.row_sizes) * len(self.widths)

    @property
    def row_padding_share(self) -> float:
        """Share of the rows counted so far that were padding, 0..1."""
        return _share(self.padded_rows, self.real_rows)

    @property
    def cell_padding_share(self) -> float:
        """Share of the rectangle cells counted so far that no live token stood in, 0..1."""
        return _share(self.padded_cells, self.real_cells)

    def bucket_for(self, rows: int, width: int) -> Shape:
        """The smallest shape that takes `rows` rows of up to `width` tokens.

        Raises:
            ValueError: more rows or tokens than the largest bucket has, or none.
        """
        if not 1 <= rows <= self.max_batch_size:
            raise ValueError(f"rows: {rows} is not in 1..{self.max_batch_size}")
        if not 1 <= width <= self.max_model_len:
            raise ValueError(f"width: {width} is not in 1..{self.max_model_len}")
        return self._rows_for[rows], self._width_for(width)

    def pad_rows(self, rows: int) -> int:
        """Rows to add to `rows` to reach its bucket."""
        return self.bucket_for(rows, 1)[0] - rows

    def count(self, *, rows: int, tokens: int, bucket: Shape) -> None:
        """Count one decode step: `rows` live rows with `tokens` live cells among them, run at `bucket`."""
        self.steps += 1
        self.real_rows += rows
        self.padded_rows += bucket[0] - rows
        self.real_cells += tokens
        self.padded_cells += bucket[0] * bucket[1] - tokens

    def _width_for(self, width: int) -> int:
        return min(-(-width // self.width_multiple) * self.width_multiple, self.max_model_len)

    def _check_covers(self, max_batch_size: int, max_model_len: int) -> None:
        # Once, at construction: a count without a bucket would otherwise show as one slow batch months later. The
        # limits are the caller's; the properties of that name are what the lists end at, and would agree with them.
        mapped = [self._width_for(width) for width in range(1, max_model_len + 1)]
        check_bucket_covers(axis="rows", sizes=self.row_sizes, limit=max_batch_size, mapped=self._rows_for[1:])
        check_bucket_covers(axis="width", sizes=self.widths, limit=max_model_len, mapped=mapped)


def _round_up_table(sizes: tuple[int, ...]) -> list[int]:
    """Entry n is the smallest size >= n; entry 0 stands for no rows and is 0."""
    table = [0]
    for size in sizes:
        table.extend([size] * (size - len(table) + 1))
    return table


def _share(part: int, rest: int) -> float:
    return part / (part + rest) if part + rest else 0.0
