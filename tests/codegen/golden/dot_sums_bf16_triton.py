import triton
import triton.language as tl


@triton.jit
def _wait_for_kernel_before():
    """Wait until the kernel launched before this one has ended, and what it wrote can be read (sm_90 and later)."""
    tl.inline_asm_elementwise("griddepcontrol.wait;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


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
def _sigmoid(x):
    """1 / (1 + e**-x) with the error of e**-x and of two roundings; below 2**-126 it is 0."""
    return tl.inline_asm_elementwise(
        "{ .reg .f32 t; mul.f32 t, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 t, t; add.f32 t, t, 0f3F800000; "
        "rcp.approx.ftz.f32 $0, t; }",
        "=f,f",
        [x],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _add_bf16(a, b):
    """Sum of bf16 values, two at a time, rounded once: a * 1 + b."""
    return tl.inline_asm_elementwise(
        "{ .reg .b32 c; mov.b32 c, 0x3F803F80; fma.rn.bf16x2 $0, $1, c, $2; }",
        "=r,r,r",
        [a, b],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=2,
    )


@triton.jit
def _mul_bf16(a, b):
    """Product of bf16 values, two at a time, rounded once: a * b + -0."""
    return tl.inline_asm_elementwise(
        "{ .reg .b32 c; mov.b32 c, 0x80008000; fma.rn.bf16x2 $0, $1, $2, c; }",
        "=r,r,r",
        [a, b],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=2,
    )


@triton.jit
def dot_sums_bf16(
    a_ptr,  # bf16 [28800]
    b_ptr,  # bf16 [19584]
    bias_ptr,  # bf16 [2, 136]
    hidden_ptr,  # out bf16 [2, 200, 136]
    y_ptr,  # out bf16 [54400]
    sums_ptr,  # out f32 [2, 4, 136]
    early: tl.constexpr = False,  # launched while the kernel before may still run
):
    """h = a @ b and what follows.

    Product: 2 of [200, 72] x [72, 136]. 3 programs walk 16 tiles of 64 x 128, 32 deep; num_warps=8, num_stages=2.
    """
    if early:
        _wait_for_kernel_before()
    zero = tl.program_id(2) * 16384  # 0; not known to be, so indices are not narrowed to 16 bits (a ptxas fault)
    a_desc = tl.make_tensor_descriptor(a_ptr, shape=[2, 200, 72], strides=[72, 144, 1], block_shape=[1, 64, 32])
    b_desc = tl.make_tensor_descriptor(b_ptr, shape=[2, 72, 136], strides=[9792, 136, 1], block_shape=[1, 32, 128])
    hidden_desc = tl.make_tensor_descriptor(
        hidden_ptr, shape=[2, 200, 136], strides=[27200, 136, 1], block_shape=[1, 64, 64]
    )
    y_desc = tl.make_tensor_descriptor(y_ptr, shape=[2, 200, 136], strides=[136, 272, 1], block_shape=[1, 64, 64])
    for tile in tl.range(tl.program_id(0), 16, 3, flatten=True):
        p = (tile + zero) // 8
        at = (tile + zero) % 8 + zero
        first_m = at // 4 * 2
        pid_m = first_m + at % 2 + zero
        pid_n = at // 2 % 2 + zero
        acc = tl.zeros((64, 128), tl.float32)
        for k in range(0, 72, 32):
            a = a_desc.load([p, pid_m * 64, k]).reshape(64, 32)
            b = b_desc.load([p, k, pid_n * 128]).reshape(32, 128)
            acc = tl.dot(a, b, acc)
        acc_0, acc_1 = acc.reshape(64, 2, 64).permute(0, 2, 1).split()
        row = pid_m * 64 + tl.arange(0, 64)[:, None]
        row_mask = row < 200
        col = pid_n * 128 + tl.arange(0, 64)[None, :]
        col_mask = col < 136
        # src[block.py:7]: h = x @ w + b
        product_half = _to_bf16(acc_0)
        bias_x_bf16 = tl.load(bias_ptr + p * 136 + col, mask=col_mask, other=0.0)
        h_r_half = _add_bf16(product_half, bias_x_bf16)
        h_r = _widen_bf16(h_r_half)
        h_r_out = h_r.to(tl.bfloat16)
        hidden_desc.store([p, pid_m * 64, pid_n * 128], h_r_out.reshape(1, 64, 64))
        gate = _sigmoid(h_r)
        gate_r_half = _to_bf16(gate)
        active_r_half = _mul_bf16(h_r_half, gate_r_half)
        active_r = _widen_bf16(active_r_half)
        active_r_out = active_r.to(tl.bfloat16)
        y_desc.store([p, pid_m * 64, pid_n * 128], active_r_out.reshape(1, 64, 64))
        acc_sums_total = tl.sum(tl.where(row_mask, active_r, 0.0), 0, keep_dims=True)
        tl.store(sums_ptr + p * 544 + pid_m * 136 + col, acc_sums_total, mask=col_mask)
        col = pid_n * 128 + 64 + tl.arange(0, 64)[None, :]
        col_mask = col < 136
        # src[block.py:7]: h = x @ w + b
        product_half = _to_bf16(acc_1)
        bias_x_bf16 = tl.load(bias_ptr + p * 136 + col, mask=col_mask, other=0.0)
        h_r_half = _add_bf16(product_half, bias_x_bf16)
        h_r = _widen_bf16(h_r_half)
        h_r_out = h_r.to(tl.bfloat16)
        hidden_desc.store([p, pid_m * 64, pid_n * 128 + 64], h_r_out.reshape(1, 64, 64))
        gate = _sigmoid(h_r)
        gate_r_half = _to_bf16(gate)
        active_r_half = _mul_bf16(h_r_half, gate_r_half)
        active_r = _widen_bf16(active_r_half)
        active_r_out = active_r.to(tl.bfloat16)
        y_desc.store([p, pid_m * 64, pid_n * 128 + 64], active_r_out.reshape(1, 64, 64))
        acc_sums_total = tl.sum(tl.where(row_mask, active_r, 0.0), 0, keep_dims=True)
        tl.store(sums_ptr + p * 544 + pid_m * 136 + col, acc_sums_total, mask=col_mask)
