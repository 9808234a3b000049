import triton
import triton.language as tl


@triton.jit
def _wait_for_kernel_before():
    """Wait until the kernel launched before this one has ended, and what it wrote can be read (sm_90 and later)."""
    tl.inline_asm_elementwise("griddepcontrol.wait;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def chain_sums_100_bf16(
    x_ptr,  # bf16 [100, 20]
    g_ptr,  # bf16 [33, 100]
    dw_ptr,  # out f32 [3, 20, 33]
    early: tl.constexpr = False,  # launched while the kernel before may still run
):
    """Sums alone.

    Sums over all rows: 20 x 33. 3 programs; tiles of 16 of 100 rows (48 a program), the last rows first; num_warps=4,
    num_stages=3.
    """
    if early:
        _wait_for_kernel_before()
    chunk = tl.program_id(0)
    col = tl.arange(0, 32)[None, :]
    col_mask = col < 20
    col_v2 = tl.arange(0, 64)[None, :]
    col_mask_v2 = col_v2 < 33
    offs_32 = tl.arange(0, 32)
    offs_64 = tl.arange(0, 64)
    sums0 = tl.zeros((32, 64), tl.float32)
    for step in tl.range(0, 48, 16, num_stages=3):
        first_row = 32 - step
        row = chunk * 48 + first_row + tl.arange(0, 16)[:, None]
        row_mask = row < 100
        x_v1 = tl.load(x_ptr + row * 20 + col, mask=row_mask & col_mask, other=0.0)
        g_v1 = tl.load(g_ptr + row + col_v2 * 100, mask=row_mask & col_mask_v2, other=0.0)
        sums0 = tl.dot(tl.trans(x_v1), g_v1, sums0)
    tl.store(
        dw_ptr + chunk * 660 + offs_32[:, None] * 33 + offs_64[None, :],
        sums0,
        mask=(offs_32[:, None] < 20) & (offs_64[None, :] < 33),
    )
