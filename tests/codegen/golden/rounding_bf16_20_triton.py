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
def _round_bf16_alone(x):
    """One element rounded to bf16 and back."""
    return tl.inline_asm_elementwise(
        "{ .reg .b32 pair; cvt.rn.bf16x2.f32 pair, $1, $1; and.b32 $0, pair, 0xffff0000; }",
        "=r,r",
        [x],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def rounding_bf16_20(
    in_tile_ptr,  # f32 [5, 20]
    out_tile_ptr,  # out f32 [5, 20]
    in_row_ptr,  # f32 [5]
    out_row_ptr,  # out f32 [5]
    in_col_ptr,  # f32 [20]
    out_col_ptr,  # out f32 [20]
    in_scalar_ptr,  # f32 [1]
    out_scalar_ptr,  # out f32 [1]
    early: tl.constexpr = False,  # launched while the kernel before may still run
):
    """Through bf16.

    Grid 2 x 1 (chunks=2); tile 2 of 5 rows (4 a program) x 20 columns as 16 + 4; num_warps=1, num_stages=1.
    """
    if early:
        _wait_for_kernel_before()
    chunk = tl.program_id(0)
    col_0 = tl.arange(0, 16)[None, :]
    col_1 = 16 + tl.arange(0, 4)[None, :]
    x_col_0 = tl.load(in_col_ptr + col_0)
    x_col_1 = tl.load(in_col_ptr + col_1)
    y_col_0 = _round_bf16(x_col_0)
    y_col_1 = _round_bf16(x_col_1)
    tl.store(out_col_ptr + col_0, y_col_0)
    tl.store(out_col_ptr + col_1, y_col_1)
    x_scalar = tl.load(in_scalar_ptr)
    y_scalar = _round_bf16_alone(x_scalar)
    tl.store(out_scalar_ptr, y_scalar)
    for first_row in range(0, 4, 2):
        row = chunk * 4 + first_row + tl.arange(0, 2)[:, None]
        row_mask = row < 5
        x_tile_0 = tl.load(in_tile_ptr + row * 20 + col_0, mask=row_mask, other=0.0)
        x_tile_1 = tl.load(in_tile_ptr + row * 20 + col_1, mask=row_mask, other=0.0)
        y_tile_0 = _round_bf16(x_tile_0)
        y_tile_1 = _round_bf16(x_tile_1)
        tl.store(out_tile_ptr + row * 20 + col_0, y_tile_0, mask=row_mask)
        tl.store(out_tile_ptr + row * 20 + col_1, y_tile_1, mask=row_mask)
        x_row = tl.load(in_row_ptr + row, mask=row_mask, other=0.0)
        y_row = _round_bf16(x_row)
        tl.store(out_row_ptr + row, y_row, mask=row_mask)
