"""How a kernel is compiled, and the only memory of its own that it has: the stack of the thread that runs it.

A kernel's arrays belong to whoever calls it, so nobody counts references to them: numba's count is a locked write, at
every call, to memory that all threads share. In return a kernel cannot allocate. It knows nothing of what is computed.

Proof: tests/test_kernels.py. Story: kernels.
"""

# numba reads the signatures of an intrinsic from its arguments at compile time; there is nothing to annotate.
# mypy: disallow_untyped_defs=False, disallow_incomplete_defs=False

from __future__ import annotations

from typing import Any

import numba
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic as declare_intrinsic
from numba.np.arrayobj import populate_array

_njit: Any = numba.njit  # its annotations leave `_nrt`, numba's switch for counted memory, out
kernel: Any = _njit(nogil=True, cache=True, error_model="numpy", _nrt=False)

intrinsic: Any = declare_intrinsic  # what it makes is called with one argument less than its definition has


def _room(dtype):
    @intrinsic(prefer_literal=True)
    def room(typingctx, size):
        literal = size.literal_value if isinstance(size, types.IntegerLiteral) else None

        def codegen(context, builder, sig, args):
            element = context.get_value_type(dtype)
            if literal is None:
                space = builder.alloca(element, size=args[0])
            else:
                space = cgutils.alloca_once(builder, ir.ArrayType(element, literal))
            space.align = 64
            array = context.make_array(sig.return_type)(context, builder)
            itemsize = context.get_constant(types.intp, dtype.bitwidth // 8)
            populate_array(
                array,
                data=builder.bitcast(space, element.as_pointer()),
                shape=[context.get_constant(types.intp, literal) if literal else args[0]],
                strides=[itemsize],
                itemsize=itemsize,
                meminfo=None,
            )
            return array._getvalue()

        return types.Array(dtype, 1, "C")(types.intp if literal is None else size), codegen

    return room


# Room for `size` numbers on the stack of the calling function, as an array; its contents are noise.
stack, int_stack = _room(types.float32), _room(types.int64)
