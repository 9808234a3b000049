import triton
import triton.language as tl


@triton.jit
def _wait_for_kernel_before():
    """Wait until the kernel launched before this one has ended, and what it wrote can be read (sm_90 and later)."""
    tl.inline_asm_elementwise("griddepcontrol.wait;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


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
def _one_plus_tanh(x):
    """1 + tanh(x) = 2 / (1 + e**(-2 x)), with the error of that power and of two roundings."""
    return 2.0 * _sigmoid(2.0 * x)


@triton.jit
def gelu_bf16_150(
    x_ptr,  # bf16 [5, 150]
    y_ptr,  # out bf16 [5, 150]
    early: tl.constexpr = False,  # launched while the kernel before may still run
):
    """Tanh GELU.

    Grid 3 x 3 (chunks=3); tile 2 of 5 rows x 64 of 150 columns; num_warps=1, num_stages=1.
    """
    if early:
        _wait_for_kernel_before()
    chunk = tl.program_id(0)
    col = tl.program_id(1) * 64 + tl.arange(0, 64)[None, :]
    col_mask = col < 150
    row = chunk * 2 + tl.arange(0, 2)[:, None]
    row_mask = row < 5
    x_bf16 = tl.load(x_ptr + row * 150 + col, mask=row_mask & col_mask, other=0.0)
    x = x_bf16.to(tl.float32)
    x2 = x * x
    x3 = x2 * x
    cubic = x3 * 0.044715
    poly = x + cubic
    arg = poly * 0.7978845608028654
    t1 = _one_plus_tanh(arg)
    half = x * 0.5
    y = half * t1
    y_out = y.to(tl.bfloat16)
    tl.store(y_ptr + row * 150 + col, y_out, mask=row_mask & col_mask)
