"""Sixteen float32 numbers as one value inside numba code, and the few operations the kernels are built from.

numba has no vector type, and a loop that LLVM may or may not vectorise may also be reassociated or kept in memory.
So registers are written down: a `vector` is a register (two of them where registers are half as wide), a tuple of
vectors is a tile of them. Every operation is one IEEE operation a lane, `fma` is always the fused one, and sums over
lanes have one order. A kernel built from these gives the same bits on every machine. It knows no model.

Proof: tests/test_kernels.py. Story: kernels.
"""

# numba reads the signatures of an intrinsic from its arguments at compile time; there is nothing to annotate.
# mypy: disallow_untyped_defs=False, disallow_incomplete_defs=False

from __future__ import annotations

from llvmlite import ir  # type: ignore[import-untyped]
from llvmlite.binding import get_host_cpu_features  # type: ignore[import-untyped]
from numba import config, types
from numba.core import cgutils
from numba.core.datamodel import models
from numba.extending import register_model

from fast.kernels.kernel import intrinsic

LANES = 16

# With registers of eight lanes a vector is two of sixteen, and a tile has to be smaller to stay in them.
WIDE = "+avx512f" in (config.CPU_FEATURES or get_host_cpu_features().flatten())  # type: ignore[attr-defined]

_F32, _I32, _I16 = ir.FloatType(), ir.IntType(32), ir.IntType(16)
_VECTOR = ir.VectorType(_F32, LANES)


class VectorType(types.Type):
    """The numba type of sixteen float32 lanes."""

    def __init__(self):
        super().__init__(name="float32x16")


@register_model(VectorType)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, _VECTOR)


vector = VectorType()


def _address(context, builder, array_type, array, index, element):
    """Pointer to `element` at flat `index` of a C-contiguous array."""
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), element.as_pointer())


def _splat(builder, scalar, count=LANES):
    one = builder.insert_element(ir.Constant(ir.VectorType(scalar.type, count), ir.Undefined), scalar, _I32(0))
    lanes = ir.Constant(ir.VectorType(_I32, count), [0] * count)
    return builder.shuffle_vector(one, ir.Constant(one.type, ir.Undefined), lanes)


def _constant(value):
    return ir.Constant(_VECTOR, [value] * LANES)


def _load(context, builder, array_type, array, index):
    """A vector from float32 storage, or from half precision kept as uint16."""
    if array_type.dtype == types.uint16:
        bits = ir.VectorType(_I16, LANES)
        loaded = builder.load(_address(context, builder, array_type, array, index, bits), align=2)
        return builder.fpext(builder.bitcast(loaded, ir.VectorType(ir.HalfType(), LANES)), _VECTOR)
    return builder.load(_address(context, builder, array_type, array, index, _VECTOR), align=4)


def _is_array(array, *dtypes):
    return isinstance(array, types.Array) and array.layout == "C" and array.dtype in dtypes


@intrinsic
def load(typingctx, array, index):
    """array.flat[index : index + 16], widened when the storage is half precision."""
    if not _is_array(array, types.float32, types.uint16):
        return None

    def codegen(context, builder, sig, args):
        return _load(context, builder, sig.args[0], args[0], args[1])

    return vector(array, types.intp), codegen


@intrinsic
def store(typingctx, array, index, value):
    """array.flat[index : index + 16] = value, rounded to nearest when the storage is half precision."""
    if not _is_array(array, types.float32, types.uint16) or value != vector:
        return None

    def codegen(context, builder, sig, args):
        stored = args[2]
        if sig.args[0].dtype == types.uint16:
            halves = builder.fptrunc(stored, ir.VectorType(ir.HalfType(), LANES))
            stored = builder.bitcast(halves, ir.VectorType(_I16, LANES))
        address = _address(context, builder, sig.args[0], args[0], args[1], stored.type)
        builder.store(stored, address, align=2 if sig.args[0].dtype == types.uint16 else 4)
        return context.get_dummy_value()

    return types.void(array, types.intp, vector), codegen


@intrinsic
def get(typingctx, array, index):
    """array.flat[index], one number."""
    if not _is_array(array, types.float32):
        return None

    def codegen(context, builder, sig, args):
        return builder.load(_address(context, builder, sig.args[0], args[0], args[1], _F32))

    return types.float32(array, types.intp), codegen


@intrinsic
def put(typingctx, array, index, value):
    """array.flat[index] = value, one number, rounded to nearest when the storage is half precision."""
    if not _is_array(array, types.float32, types.uint16):
        return None

    def codegen(context, builder, sig, args):
        stored = args[2]
        if sig.args[0].dtype == types.uint16:
            stored = builder.bitcast(builder.fptrunc(stored, ir.HalfType()), _I16)
        builder.store(stored, _address(context, builder, sig.args[0], args[0], args[1], stored.type))
        return context.get_dummy_value()

    return types.void(array, types.intp, types.float32), codegen


@intrinsic
def scatter(typingctx, array, index, step, value):
    """array.flat[index + lane * step] = value[lane]."""
    if not _is_array(array, types.float32):
        return None

    def codegen(context, builder, sig, args):
        array, index, step, value = args
        for lane in range(LANES):
            at = builder.add(index, builder.mul(step, ir.Constant(step.type, lane)))
            one = builder.extract_element(value, _I32(lane))
            builder.store(one, _address(context, builder, sig.args[0], array, at, _F32))
        return context.get_dummy_value()

    return types.void(array, types.intp, types.intp, vector), codegen


@intrinsic
def prefetch(typingctx, array, index):
    """Ask for the cache line of array.flat[index], which may lie past the end; nothing is read."""

    def codegen(context, builder, sig, args):
        address = _address(context, builder, sig.args[0], args[0], args[1], ir.IntType(8))
        kind = ir.FunctionType(ir.VoidType(), [address.type, _I32, _I32, _I32])
        hint = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(hint, [address, _I32(0), _I32(3), _I32(1)])
        return context.get_dummy_value()

    return types.void(array, types.intp), codegen


@intrinsic
def splat(typingctx, value):
    """The same number in every lane."""
    return vector(types.float32), lambda context, builder, sig, args: _splat(builder, args[0])


@intrinsic
def fma(typingctx, a, b, c):
    """a * b + c, rounded once."""
    return vector(vector, vector, vector), lambda context, builder, sig, args: _fma(builder, *args)


@intrinsic
def fma1(typingctx, a, b, c):
    """a * b + c of three numbers, rounded once."""
    three = (types.float32,) * 3
    return types.float32(*three), lambda context, builder, sig, args: _fma(builder, *args)


@intrinsic
def add(typingctx, a, b):
    """a + b."""
    return vector(vector, vector), lambda context, builder, sig, args: builder.fadd(*args)


@intrinsic
def sub(typingctx, a, b):
    """a - b."""
    return vector(vector, vector), lambda context, builder, sig, args: builder.fsub(*args)


@intrinsic
def mul(typingctx, a, b):
    """a * b."""
    return vector(vector, vector), lambda context, builder, sig, args: builder.fmul(*args)


@intrinsic
def div(typingctx, a, b):
    """a / b."""
    return vector(vector, vector), lambda context, builder, sig, args: builder.fdiv(*args)


def _fma(builder, a, b, c):
    """One rounding for product and sum; llvmlite's own `fma` names scalars only."""
    name = "llvm.fma.f32" if a.type == _F32 else f"llvm.fma.v{LANES}f32"
    return builder.call(
        cgutils.get_or_insert_function(builder.module, ir.FunctionType(a.type, [a.type] * 3), name), [a, b, c]
    )


def _max(builder, a, b):
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


@intrinsic
def larger(typingctx, a, b):
    """The larger of a and b lane by lane; b where they cannot be compared."""
    return vector(vector, vector), lambda context, builder, sig, args: _max(builder, *args)


@intrinsic
def first_lanes(typingctx, value, count, fill):
    """Lanes 0..count-1 of value, `fill` in the others."""

    def codegen(context, builder, sig, args):
        value, count, fill = args
        lanes = ir.Constant(ir.VectorType(_I32, LANES), list(range(LANES)))
        kept = builder.icmp_signed("<", lanes, _splat(builder, builder.trunc(count, _I32)))
        return builder.select(kept, value, _splat(builder, fill))

    return vector(vector, types.intp, types.float32), codegen


def _fold(builder, value, combine):
    """Halves onto each other until one lane is left: ((0+8)+(4+12)) + ((2+10)+(6+14)) + ..., always in this order."""
    width = LANES
    while width > 1:
        width //= 2
        low, high = (ir.Constant(ir.VectorType(_I32, width), [*range(at, at + width)]) for at in (0, width))
        undefined = ir.Constant(value.type, ir.Undefined)
        value = combine(
            builder.shuffle_vector(value, undefined, low),
            builder.shuffle_vector(value, undefined, high),
        )
    return builder.extract_element(value, _I32(0))


@intrinsic
def lane_sum(typingctx, value):
    """The sum of the lanes, halves folded onto each other."""
    return types.float32(vector), lambda context, builder, sig, args: _fold(builder, args[0], builder.fadd)


@intrinsic
def lane_max(typingctx, value):
    """The largest lane."""

    def codegen(context, builder, sig, args):
        return _fold(builder, args[0], lambda a, b: _max(builder, a, b))

    return types.float32(vector), codegen


# 2**f = sum of these times f**i for f in -0.5..0.5, fitted for relative error; lowest power last.
EXP2_COEFFICIENTS = (
    0.00015353361959569156,
    0.0013398875016719103,
    0.00961843691766262,
    0.055503323674201965,
    0.24022647738456726,
    0.6931471824645996,
    1.0,
)
_ROUNDER = 12582912.0


@intrinsic
def exp2(typingctx, value):
    """2 ** value for value <= 127, relative error below 2e-7; exactly 0 below -126, so nothing is subnormal."""

    def codegen(context, builder, sig, args):
        x = args[0]
        clamped = _max(builder, x, _constant(-126.0))
        # Adding 1.5 * 2**23 leaves no room for a fraction: the sum is rounded to the nearest whole number.
        whole = builder.fsub(builder.fadd(clamped, _constant(_ROUNDER)), _constant(_ROUNDER))
        part = builder.fsub(clamped, whole)  # exact: both are multiples of the same power of two
        power = _constant(EXP2_COEFFICIENTS[0])
        for coefficient in EXP2_COEFFICIENTS[1:]:
            power = _fma(builder, power, part, _constant(coefficient))
        integers = ir.VectorType(_I32, LANES)
        shift = builder.shl(builder.fptosi(whole, integers), ir.Constant(integers, [23] * LANES))
        scaled = builder.bitcast(builder.add(builder.bitcast(power, integers), shift), _VECTOR)
        return builder.select(builder.fcmp_ordered("<", x, _constant(-126.0)), _constant(0.0), scaled)

    return vector(vector), codegen


# ---- tiles: tuples of vectors that stay in registers -----------------------------------------------------------------


@intrinsic(prefer_literal=True)
def zeros(typingctx, count):
    """A tile of `count` vectors of zeros; `count` is a literal."""
    if not isinstance(count, types.IntegerLiteral):
        return None
    tile = types.UniTuple(vector, count.literal_value)

    def codegen(context, builder, sig, args):
        return cgutils.pack_array(builder, [_constant(0.0)] * sig.return_type.count)

    return tile(count), codegen


@intrinsic
def fma_outer(typingctx, tile, array, index, stride, columns):
    """tile[r][c] += array.flat[index + r * stride] * columns[c], each an `fma`: one step of a product's depth."""
    if not _is_array(array, types.float32):
        return None

    def codegen(context, builder, sig, args):
        tile, array, index, stride, columns = args
        width = sig.args[4].count
        loaded = [builder.extract_value(columns, c) for c in range(width)]
        before = [builder.extract_value(tile, n) for n in range(sig.args[0].count)]
        for r in range(sig.args[0].count // width):
            at = builder.add(index, builder.mul(stride, ir.Constant(stride.type, r)))
            one = builder.load(_address(context, builder, sig.args[1], array, at, _F32))
            spread = _splat(builder, one)
            for c in range(width):
                n = r * width + c
                tile = builder.insert_value(tile, _fma(builder, spread, loaded[c], before[n]), n)
        return tile

    return tile(tile, array, types.intp, types.intp, columns), codegen


@intrinsic(prefer_literal=True)
def store_tile(typingctx, array, index, stride, tile, columns):
    """array.flat[index + r * stride + 16 * c : ... + 16] = tile[r][c]; `columns` is a literal."""
    if not (_is_array(array, types.float32) and isinstance(columns, types.IntegerLiteral)):
        return None
    width = columns.literal_value

    def codegen(context, builder, sig, args):
        array, index, stride, tile, _ = args
        for n in range(sig.args[3].count):
            skip = builder.mul(stride, ir.Constant(stride.type, n // width))
            at = builder.add(builder.add(index, skip), ir.Constant(stride.type, n % width * LANES))
            address = _address(context, builder, sig.args[0], array, at, _VECTOR)
            builder.store(builder.extract_value(tile, n), address, align=4)
        return context.get_dummy_value()

    return types.void(array, types.intp, types.intp, tile, columns), codegen


@intrinsic(prefer_literal=True)
def fold_tile(typingctx, array, index, stride, factors, first, tile, columns):
    """As `store_tile`, but what the array holds is kept: row r of it times factors[first + r], plus the tile's."""
    if not (_is_array(array, types.float32) and isinstance(columns, types.IntegerLiteral)):
        return None
    width = columns.literal_value

    def codegen(context, builder, sig, args):
        array, index, stride, factors, first, tile, _ = args
        for n in range(sig.args[5].count):
            row = ir.Constant(stride.type, n // width)
            factor = _address(context, builder, sig.args[3], factors, builder.add(first, row), _F32)
            at = builder.add(builder.add(index, builder.mul(stride, row)), ir.Constant(stride.type, n % width * LANES))
            address = _address(context, builder, sig.args[0], array, at, _VECTOR)
            kept = builder.fmul(builder.load(address, align=4), _splat(builder, builder.load(factor)))
            builder.store(builder.fadd(kept, builder.extract_value(tile, n)), address, align=4)
        return context.get_dummy_value()

    return types.void(array, types.intp, types.intp, factors, types.intp, tile, columns), codegen
