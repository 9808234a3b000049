import triton
import triton.language as tl


@triton.jit
def _wait_for_kernel_before():
    """Wait until the kernel launched before this one has ended, and what it wrote can be read (sm_90 and later)."""
    tl.inline_asm_elementwise("griddepcontrol.wait;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _round_bf16(x):
    """fp32 values rounded to bf16 and back, two at a time (a single conversion runs at a quarter of the rate).

    cvt.rn rounds to nearest even, subnormals too; overflow gives infinity, NaN stays NaN. A bf16 number is the upper
    half of the fp32 number of the same value, so the shift and the mask widen exactly.
    """
    return tl.inline_asm_elementwise(
        "{ .reg .b32 pair; cvt.rn.bf16x2.f32 pair, $3, $2; shl.b32 $0, pair, 16; and.b32 $1, pair, 0xffff0000; }",
        "=r,=r,r,r",
        [x],
        dtype=tl.float32,
        is_pure=True,
        pack=2,
    )


@triton.jit
def _to_bf16(x):
    """fp32 values rounded to bf16, two at a time."""
    return tl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=tl.bfloat16, is_pure=True, pack=2
    )


@triton.jit
def _widen_bf16(x):
    """bf16 values as fp32, two at a time."""
    return tl.inline_asm_elementwise(
        "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [x], dtype=tl.float32, is_pure=True, pack=2
    )


@triton.jit
def chain_problems_bf16(
    x_ptr,  # bf16 [37, 3, 5]
    w1_ptr,  # bf16 [3, 20, 5]
    b1_ptr,  # bf16 [3, 20]
    w2_ptr,  # bf16 [3, 20, 3]
    y_ptr,  # out bf16 [3, 37, 3]
    dw_ptr,  # out f32 [2, 3, 5, 20]
    db_ptr,  # out f32 [2, 3, 20]
    early: tl.constexpr = False,  # launched while the kernel before may still run
):
    """A chain of two products.

    Rows times matrices: 5 -> 20, 20 -> 3. Sums over all rows: 5 x 20. 6 programs; tiles of 16 of 37 rows of each of 3
    problems (32 a program); num_warps=4, num_stages=1.
    """
    if early:
        _wait_for_kernel_before()
    pid = tl.program_id(0)
    chunk = pid % 2
    p = pid // 2
    col = tl.arange(0, 16)[None, :]
    col_mask = col < 5
    col_v2 = tl.arange(0, 32)[None, :]
    col_mask_v2 = col_v2 < 20
    col_v3 = tl.arange(0, 16)[None, :]
    col_mask_v3 = col_v3 < 3
    offs_32 = tl.arange(0, 32)
    offs_16 = tl.arange(0, 16)
    acc_db = tl.zeros([1, 32], tl.float32)
    sums0 = tl.zeros((16, 32), tl.float32)
    w1 = tl.load(
        w1_ptr + p * 100 + offs_32[:, None] * 5 + offs_16[None, :],
        mask=(offs_32[:, None] < 20) & (offs_16[None, :] < 5),
        other=0.0,
    )
    w2 = tl.load(
        w2_ptr + p * 60 + offs_32[:, None] * 3 + offs_16[None, :],
        mask=(offs_32[:, None] < 20) & (offs_16[None, :] < 3),
        other=0.0,
    )
    # src[mlp.py:7]: h = relu(x @ w1.T + b1)
    b1_v1_bf16 = tl.load(b1_ptr + p * 20 + col_v2, mask=col_mask_v2, other=0.0)
    b1_v1 = _widen_bf16(b1_v1_bf16)
    for first_row in range(0, 32, 16):
        row = chunk * 32 + first_row + tl.arange(0, 16)[:, None]
        row_mask = row < 37
        x_v1_bf16 = tl.load(x_ptr + p * 5 + row * 15 + col, mask=row_mask & col_mask, other=0.0)
        x_v1 = _widen_bf16(x_v1_bf16)
        acc0 = tl.dot(x_v1.to(tl.bfloat16), tl.trans(w1))
        # src[mlp.py:7]: h = relu(x @ w1.T + b1)
        z = acc0 + b1_v1
        z0 = _round_bf16(z)
        h = tl.maximum(z0, 0.0, propagate_nan=tl.PropagateNan.ALL)
        h0 = _to_bf16(h)
        acc_db += tl.sum(tl.where(row_mask, h, 0.0), 0, keep_dims=True)
        sums0 = tl.dot(tl.trans(tl.where(row_mask, x_v1.to(tl.bfloat16), 0.0)), tl.where(row_mask, h0, 0.0), sums0)
        acc1 = tl.dot(tl.where(offs_32[None, :] < 20, h0, 0.0), w2)
        acc1_out = _to_bf16(acc1)
        tl.store(y_ptr + p * 111 + row * 3 + col_v3, acc1_out, mask=row_mask & col_mask_v3)
    acc_db_total = acc_db
    tl.store(db_ptr + p * 20 + chunk * 60 + col_v2, acc_db_total, mask=col_mask_v2)
    tl.store(
        dw_ptr + (chunk * 3 + p) * 100 + offs_16[:, None] * 20 + offs_32[None, :],
        sums0,
        mask=(offs_16[:, None] < 5) & (offs_32[None, :] < 20),
    )
