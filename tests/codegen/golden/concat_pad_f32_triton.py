import triton
import triton.language as tl


@triton.jit
def _wait_for_kernel_before():
    """Wait until the kernel launched before this one has ended, and what it wrote can be read (sm_90 and later)."""
    tl.inline_asm_elementwise("griddepcontrol.wait;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def concat_pad_f32(
    a_ptr,  # f32 [6, 5]
    b_ptr,  # f32 [6, 8]
    keep_ptr,  # bool [6]
    cat_ptr,  # out f32 [6, 13]
    up_ptr,  # out f32 [6, 13]
    number_ptr,  # out i64 [6, 13]
    flag_ptr,  # out bool [6, 13]
    b_copy_ptr,  # out f32 [6, 8]
    early: tl.constexpr = False,  # launched while the kernel before may still run
):
    """Concat, shift, iota, bools.

    Grid 2 x 1 (chunks=2); tile 4 of 6 rows x 13 columns as 16; num_warps=1, num_stages=1.
    """
    if early:
        _wait_for_kernel_before()
    chunk = tl.program_id(0)
    col = tl.arange(0, 16)[None, :]
    col_mask = col < 13
    row = chunk * 4 + tl.arange(0, 4)[:, None]
    row_mask = row < 6
    a = tl.load(a_ptr + row * 5 + col, mask=row_mask & col_mask & (col < 5), other=0.0)
    b = tl.load(b_ptr + row * 8 + col - 5, mask=row_mask & col_mask & (col >= 5), other=0.0)
    is_a = col < 5
    both = tl.where(is_a, a, b)
    tl.store(cat_ptr + row * 13 + col, both, mask=row_mask & col_mask)
    up = tl.load(a_ptr + row * 5 + col - 5, mask=row_mask & col_mask & (row >= 1) & (col < 5), other=-1.0)
    tl.store(up_ptr + row * 13 + col, up, mask=row_mask & col_mask)
    tl.store(b_copy_ptr + row * 8 + col - 5, b, mask=row_mask & col_mask & (col >= 5))
    n = (row * 13 + col + 3).to(tl.int64)
    keep = tl.load(keep_ptr + row, mask=row_mask, other=0) != 0
    odd = n & 1
    is_odd = odd == 1
    flag = is_odd & keep
    number = tl.where(flag, n, -1)
    tl.store(number_ptr + row * 13 + col, number, mask=row_mask & col_mask)
    tl.store(flag_ptr + row * 13 + col, flag, mask=row_mask & col_mask)
