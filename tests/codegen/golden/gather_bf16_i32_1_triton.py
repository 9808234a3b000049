import triton
import triton.language as tl


@triton.jit
def _wait_for_kernel_before():
    """Wait until the kernel launched before this one has ended, and what it wrote can be read (sm_90 and later)."""
    tl.inline_asm_elementwise("griddepcontrol.wait;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def gather_bf16_i32_1(
    table_ptr,  # bf16 [9, 11]
    by_row_ptr,  # i32 [7]
    by_col_ptr,  # i32 [11]
    each_ptr,  # i32 [7, 11]
    one_ptr,  # i32 [1]
    rows_out_ptr,  # out f32 [7, 11]
    cols_out_ptr,  # out f32 [7, 11]
    each_out_ptr,  # out f32 [7, 11]
    both_out_ptr,  # out f32 [7, 11]
    cut_out_ptr,  # out f32 [7, 11]
    one_out_ptr,  # out f32 [11]
    total_out_ptr,  # out f32 [7]
    early: tl.constexpr = False,  # launched while the kernel before may still run
):
    """Loads by index.

    Grid 4 x 1 (chunks=4); tile 1 of 7 rows (2 a program) x 11 columns as 8 + 4; num_warps=1, num_stages=1.
    """
    if early:
        _wait_for_kernel_before()
    chunk = tl.program_id(0)
    col_0 = tl.arange(0, 8)
    col_1 = 8 + tl.arange(0, 4)
    col_mask_1 = col_1 < 11
    by_col_0 = tl.load(by_col_ptr + col_0)
    by_col_1 = tl.load(by_col_ptr + col_1, mask=col_mask_1, other=0)
    by_col_within_0 = (by_col_0 >= 0) & (by_col_0 < 11)
    by_col_within_1 = (by_col_1 >= 0) & (by_col_1 < 11)
    one = tl.load(one_ptr)
    one_within = (one >= 0) & (one < 9)
    f_raw_0 = tl.load(table_ptr + one.to(tl.int64) * 11 + col_0, mask=one_within, other=0.0)
    f_raw_1 = tl.load(table_ptr + one.to(tl.int64) * 11 + col_1, mask=col_mask_1 & one_within, other=0.0)
    f_found_0 = tl.where(one_within, f_raw_0, float("nan"))
    f_found_1 = tl.where(one_within, f_raw_1, float("nan"))
    f_0 = f_found_0.to(tl.float32)
    f_1 = f_found_1.to(tl.float32)
    tl.store(one_out_ptr + col_0, f_0)
    tl.store(one_out_ptr + col_1, f_1, mask=col_mask_1)
    for first_row in range(2):
        row = chunk * 2 + first_row
        row_mask = row < 7
        by_row = tl.load(by_row_ptr + row, mask=row_mask, other=0)
        by_row_within = (by_row >= 0) & (by_row < 9)
        each_0 = tl.load(each_ptr + row * 11 + col_0, mask=row_mask, other=0)
        each_1 = tl.load(each_ptr + row * 11 + col_1, mask=row_mask & col_mask_1, other=0)
        each_within_0 = (each_0 >= 0) & (each_0 < 9)
        each_within_1 = (each_1 >= 0) & (each_1 < 9)
        a_raw_0 = tl.load(table_ptr + by_row.to(tl.int64) * 11 + col_0, mask=row_mask & by_row_within, other=0.0)
        a_raw_1 = tl.load(
            table_ptr + by_row.to(tl.int64) * 11 + col_1, mask=row_mask & col_mask_1 & by_row_within, other=0.0
        )
        a_found_0 = tl.where(by_row_within, a_raw_0, float("nan"))
        a_found_1 = tl.where(by_row_within, a_raw_1, float("nan"))
        a_0 = a_found_0.to(tl.float32)
        a_1 = a_found_1.to(tl.float32)
        b_raw_0 = tl.load(table_ptr + by_col_0.to(tl.int64) + row * 11, mask=row_mask & by_col_within_0, other=0.0)
        b_raw_1 = tl.load(
            table_ptr + by_col_1.to(tl.int64) + row * 11, mask=row_mask & col_mask_1 & by_col_within_1, other=0.0
        )
        b_found_0 = tl.where(by_col_within_0, b_raw_0, float("nan"))
        b_found_1 = tl.where(by_col_within_1, b_raw_1, float("nan"))
        b_0 = b_found_0.to(tl.float32)
        b_1 = b_found_1.to(tl.float32)
        d_raw_0 = tl.load(table_ptr + each_0.to(tl.int64) * 11 + col_0, mask=row_mask & each_within_0, other=0.0)
        d_raw_1 = tl.load(
            table_ptr + each_1.to(tl.int64) * 11 + col_1, mask=row_mask & col_mask_1 & each_within_1, other=0.0
        )
        d_found_0 = tl.where(each_within_0, d_raw_0, float("nan"))
        d_found_1 = tl.where(each_within_1, d_raw_1, float("nan"))
        d_0 = d_found_0.to(tl.float32)
        d_1 = d_found_1.to(tl.float32)
        e_raw_0 = tl.load(
            table_ptr + by_row.to(tl.int64) * 11 + by_col_0.to(tl.int64),
            mask=row_mask & by_row_within & by_col_within_0,
            other=0.0,
        )
        e_raw_1 = tl.load(
            table_ptr + by_row.to(tl.int64) * 11 + by_col_1.to(tl.int64),
            mask=row_mask & col_mask_1 & by_row_within & by_col_within_1,
            other=0.0,
        )
        e_within0_0 = by_row_within & by_col_within_0
        e_within0_1 = by_row_within & by_col_within_1
        e_found_0 = tl.where(e_within0_0, e_raw_0, float("nan"))
        e_found_1 = tl.where(e_within0_1, e_raw_1, float("nan"))
        e_0 = e_found_0.to(tl.float32)
        e_1 = e_found_1.to(tl.float32)
        g_raw_0 = tl.load(
            table_ptr + by_row.to(tl.int64) * 11 + col_0, mask=row_mask & (col_0 < 7) & by_row_within, other=0.0
        )
        g_raw_1 = tl.load(
            table_ptr + by_row.to(tl.int64) * 11 + col_1,
            mask=row_mask & col_mask_1 & (col_1 < 7) & by_row_within,
            other=0.0,
        )
        g_found_0 = tl.where(by_row_within, g_raw_0, float("nan"))
        g_found_1 = tl.where(by_row_within, g_raw_1, float("nan"))
        g_0 = g_found_0.to(tl.float32)
        g_1 = g_found_1.to(tl.float32)
        tl.store(rows_out_ptr + row * 11 + col_0, a_0, mask=row_mask)
        tl.store(rows_out_ptr + row * 11 + col_1, a_1, mask=row_mask & col_mask_1)
        tl.store(cols_out_ptr + row * 11 + col_0, b_0, mask=row_mask)
        tl.store(cols_out_ptr + row * 11 + col_1, b_1, mask=row_mask & col_mask_1)
        tl.store(each_out_ptr + row * 11 + col_0, d_0, mask=row_mask)
        tl.store(each_out_ptr + row * 11 + col_1, d_1, mask=row_mask & col_mask_1)
        tl.store(both_out_ptr + row * 11 + col_0, e_0, mask=row_mask)
        tl.store(both_out_ptr + row * 11 + col_1, e_1, mask=row_mask & col_mask_1)
        tl.store(cut_out_ptr + row * 11 + col_0, g_0, mask=row_mask)
        tl.store(cut_out_ptr + row * 11 + col_1, g_1, mask=row_mask & col_mask_1)
        total = tl.sum(a_0) + tl.sum(tl.where(col_mask_1, a_1, 0.0))
        tl.store(total_out_ptr + row, total, mask=row_mask)
