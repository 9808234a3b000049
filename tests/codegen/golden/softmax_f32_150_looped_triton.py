import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def _wait_for_kernel_before():
    """Wait until the kernel launched before this one has ended, and what it wrote can be read (sm_90 and later)."""
    tl.inline_asm_elementwise("griddepcontrol.wait;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _max(a, b):
    """The larger of two; NaN if either is NaN."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def softmax_f32_150_looped(
    x_ptr,  # f32 [7, 150]
    y_ptr,  # out f32 [7, 150]
    early: tl.constexpr = False,  # launched while the kernel before may still run
):
    """Softmax over the columns.

    Grid 2 x 1 (chunks=2); tile 2 of 7 rows (4 a program) x 150 columns in blocks of 64; num_warps=4, num_stages=1.
    """
    if early:
        _wait_for_kernel_before()
    chunk = tl.program_id(0)
    for first_row in range(0, 4, 2):
        row = chunk * 4 + first_row + tl.arange(0, 2)[:, None]
        row_mask = row < 7
        peak_acc = tl.full([2, 64], float("-inf"), tl.float32)
        for first_col in range(0, 150, 64):
            col = first_col + tl.arange(0, 64)[None, :]
            col_mask = col < 150
            x = tl.load(x_ptr + row * 150 + col, mask=row_mask & col_mask, other=0.0)
            peak_acc = _max(peak_acc, tl.where(col_mask, x, float("-inf")))
        peak = tl.reduce(peak_acc, 1, _max, keep_dims=True)
        total_acc = tl.zeros([2, 64], tl.float32)
        for first_col in range(0, 150, 64):
            col = first_col + tl.arange(0, 64)[None, :]
            col_mask = col < 150
            x = tl.load(x_ptr + row * 150 + col, mask=row_mask & col_mask, other=0.0)
            shifted = x - peak
            e = libdevice.exp(shifted)
            total_acc += tl.where(col_mask, e, 0.0)
        total = tl.sum(total_acc, 1, keep_dims=True)
        scale = tl.math.div_rn(1.0, total)
        for first_col in range(0, 150, 64):
            col = first_col + tl.arange(0, 64)[None, :]
            col_mask = col < 150
            x = tl.load(x_ptr + row * 150 + col, mask=row_mask & col_mask, other=0.0)
            shifted = x - peak
            e = libdevice.exp(shifted)
            y = e * scale
            tl.store(y_ptr + row * 150 + col, y, mask=row_mask & col_mask)
