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
def _min(a, b):
    """The smaller of two; NaN if either is NaN."""
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _prod(a, b):
    """Product of two: the combine function of a product reduction."""
    return a * b


@triton.jit
def reductions_f64_looped(
    x_ptr,  # f64 [2, 2, 6, 11]
    v_ptr,  # f64 [11]
    s_ptr,  # f64 [2]
    row_sum_ptr,  # out f64 [2, 2, 6]
    vec_sum_ptr,  # out f64 [1]
    one_sum_ptr,  # out f64 [2]
    col_sum_ptr,  # out f64 [2, 2, 1, 11]
    all_sum_ptr,  # out f64 [2, 2, 1]
    row_max_ptr,  # out f64 [2, 2, 6]
    vec_max_ptr,  # out f64 [1]
    one_max_ptr,  # out f64 [2]
    col_max_ptr,  # out f64 [2, 2, 1, 11]
    all_max_ptr,  # out f64 [2, 2, 1]
    row_min_ptr,  # out f64 [2, 2, 6]
    vec_min_ptr,  # out f64 [1]
    one_min_ptr,  # out f64 [2]
    col_min_ptr,  # out f64 [2, 2, 1, 11]
    all_min_ptr,  # out f64 [2, 2, 1]
    row_prod_ptr,  # out f64 [2, 2, 6]
    vec_prod_ptr,  # out f64 [1]
    one_prod_ptr,  # out f64 [2]
    col_prod_ptr,  # out f64 [2, 2, 1, 11]
    all_prod_ptr,  # out f64 [2, 2, 1]
    early: tl.constexpr = False,  # launched while the kernel before may still run
):
    """Reductions.

    Grid 4 x 1 (f=2, g=2); tile 4 of 6 rows x 11 columns as 8 + 4; num_warps=1, num_stages=2.
    """
    if early:
        _wait_for_kernel_before()
    fixed = tl.program_id(0)
    f = fixed // 2
    col_0 = tl.arange(0, 8)[None, :]
    col_1 = 8 + tl.arange(0, 4)[None, :]
    col_mask_1 = col_1 < 11
    v_0 = tl.load(v_ptr + col_0)
    v_1 = tl.load(v_ptr + col_1, mask=col_mask_1, other=0.0)
    s = tl.load(s_ptr + f)
    v_sum = tl.sum(v_0) + tl.sum(v_1)
    tl.store(vec_sum_ptr, v_sum)
    s_sum = s * 11.0
    tl.store(one_sum_ptr + f, s_sum)
    v_max = _max(tl.reduce(v_0, None, _max), tl.reduce(tl.where(col_mask_1, v_1, float("-inf")), None, _max))
    tl.store(vec_max_ptr, v_max)
    s_max = s
    tl.store(one_max_ptr + f, s_max)
    v_min = _min(tl.reduce(v_0, None, _min), tl.reduce(tl.where(col_mask_1, v_1, float("inf")), None, _min))
    tl.store(vec_min_ptr, v_min)
    s_min = s
    tl.store(one_min_ptr + f, s_min)
    v_prod = tl.reduce(v_0, None, _prod) * tl.reduce(tl.where(col_mask_1, v_1, 1.0), None, _prod)
    tl.store(vec_prod_ptr, v_prod)
    s_prod = libdevice.pow(s, tl.full((), 11.0, tl.float64))
    tl.store(one_prod_ptr + f, s_prod)
    c_sum_0 = tl.zeros([4, 8], tl.float64)
    c_sum_1 = tl.zeros([4, 4], tl.float64)
    r_sum = tl.zeros([4, 1], tl.float64)
    c_max_0 = tl.full([4, 8], float("-inf"), tl.float64)
    c_max_1 = tl.full([4, 4], float("-inf"), tl.float64)
    r_max = tl.full([4, 1], float("-inf"), tl.float64)
    c_min_0 = tl.full([4, 8], float("inf"), tl.float64)
    c_min_1 = tl.full([4, 4], float("inf"), tl.float64)
    r_min = tl.full([4, 1], float("inf"), tl.float64)
    c_prod_0 = tl.full([4, 8], 1.0, tl.float64)
    c_prod_1 = tl.full([4, 4], 1.0, tl.float64)
    r_prod = tl.full([4, 1], 1.0, tl.float64)
    for first_row in tl.range(0, 6, 4, num_stages=2):
        row = first_row + tl.arange(0, 4)[:, None]
        row_mask = row < 6
        x_0 = tl.load(x_ptr + fixed * 66 + row * 11 + col_0, mask=row_mask, other=0.0)
        x_1 = tl.load(x_ptr + fixed * 66 + row * 11 + col_1, mask=row_mask & col_mask_1, other=0.0)
        x_sum = tl.sum(x_0, 1, keep_dims=True) + tl.sum(x_1, 1, keep_dims=True)
        tl.store(row_sum_ptr + fixed * 6 + row, x_sum, mask=row_mask)
        c_sum_0 += tl.where(row_mask, x_0, 0.0)
        c_sum_1 += tl.where(row_mask, x_1, 0.0)
        r_sum += tl.where(row_mask, x_sum, 0.0)
        x_max_part_0 = tl.reduce(x_0, 1, _max, keep_dims=True)
        x_max_part_1 = tl.reduce(tl.where(col_mask_1, x_1, float("-inf")), 1, _max, keep_dims=True)
        x_max = _max(x_max_part_0, x_max_part_1)
        tl.store(row_max_ptr + fixed * 6 + row, x_max, mask=row_mask)
        c_max_0 = _max(c_max_0, tl.where(row_mask, x_0, float("-inf")))
        c_max_1 = _max(c_max_1, tl.where(row_mask, x_1, float("-inf")))
        r_max = _max(r_max, tl.where(row_mask, x_max, float("-inf")))
        x_min_part_0 = tl.reduce(x_0, 1, _min, keep_dims=True)
        x_min_part_1 = tl.reduce(tl.where(col_mask_1, x_1, float("inf")), 1, _min, keep_dims=True)
        x_min = _min(x_min_part_0, x_min_part_1)
        tl.store(row_min_ptr + fixed * 6 + row, x_min, mask=row_mask)
        c_min_0 = _min(c_min_0, tl.where(row_mask, x_0, float("inf")))
        c_min_1 = _min(c_min_1, tl.where(row_mask, x_1, float("inf")))
        r_min = _min(r_min, tl.where(row_mask, x_min, float("inf")))
        x_prod_part_0 = tl.reduce(x_0, 1, _prod, keep_dims=True)
        x_prod_part_1 = tl.reduce(tl.where(col_mask_1, x_1, 1.0), 1, _prod, keep_dims=True)
        x_prod = x_prod_part_0 * x_prod_part_1
        tl.store(row_prod_ptr + fixed * 6 + row, x_prod, mask=row_mask)
        c_prod_0 *= tl.where(row_mask, x_0, 1.0)
        c_prod_1 *= tl.where(row_mask, x_1, 1.0)
        r_prod *= tl.where(row_mask, x_prod, 1.0)
    c_sum_total_0 = tl.sum(c_sum_0, 0, keep_dims=True)
    tl.store(col_sum_ptr + fixed * 11 + col_0, c_sum_total_0)
    c_sum_total_1 = tl.sum(c_sum_1, 0, keep_dims=True)
    tl.store(col_sum_ptr + fixed * 11 + col_1, c_sum_total_1, mask=col_mask_1)
    r_sum_total = tl.sum(r_sum)
    tl.store(all_sum_ptr + fixed, r_sum_total)
    c_max_total_0 = tl.reduce(c_max_0, 0, _max, keep_dims=True)
    tl.store(col_max_ptr + fixed * 11 + col_0, c_max_total_0)
    c_max_total_1 = tl.reduce(c_max_1, 0, _max, keep_dims=True)
    tl.store(col_max_ptr + fixed * 11 + col_1, c_max_total_1, mask=col_mask_1)
    r_max_total = tl.reduce(r_max, None, _max)
    tl.store(all_max_ptr + fixed, r_max_total)
    c_min_total_0 = tl.reduce(c_min_0, 0, _min, keep_dims=True)
    tl.store(col_min_ptr + fixed * 11 + col_0, c_min_total_0)
    c_min_total_1 = tl.reduce(c_min_1, 0, _min, keep_dims=True)
    tl.store(col_min_ptr + fixed * 11 + col_1, c_min_total_1, mask=col_mask_1)
    r_min_total = tl.reduce(r_min, None, _min)
    tl.store(all_min_ptr + fixed, r_min_total)
    c_prod_total_0 = tl.reduce(c_prod_0, 0, _prod, keep_dims=True)
    tl.store(col_prod_ptr + fixed * 11 + col_0, c_prod_total_0)
    c_prod_total_1 = tl.reduce(c_prod_1, 0, _prod, keep_dims=True)
    tl.store(col_prod_ptr + fixed * 11 + col_1, c_prod_total_1, mask=col_mask_1)
    r_prod_total = tl.reduce(r_prod, None, _prod)
    tl.store(all_prod_ptr + fixed, r_prod_total)
