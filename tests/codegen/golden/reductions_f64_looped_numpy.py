import numpy as np


@np.errstate(all="ignore")
def reductions_f64_looped(
    x_buf,  # f64 [2, 2, 6, 11], flat
    v_buf,  # f64 [11], flat
    s_buf,  # f64 [2], flat
    row_sum_buf,  # out f64 [2, 2, 6], flat
    vec_sum_buf,  # out f64 [1], flat
    one_sum_buf,  # out f64 [2], flat
    col_sum_buf,  # out f64 [2, 2, 1, 11], flat
    all_sum_buf,  # out f64 [2, 2, 1], flat
    row_max_buf,  # out f64 [2, 2, 6], flat
    vec_max_buf,  # out f64 [1], flat
    one_max_buf,  # out f64 [2], flat
    col_max_buf,  # out f64 [2, 2, 1, 11], flat
    all_max_buf,  # out f64 [2, 2, 1], flat
    row_min_buf,  # out f64 [2, 2, 6], flat
    vec_min_buf,  # out f64 [1], flat
    one_min_buf,  # out f64 [2], flat
    col_min_buf,  # out f64 [2, 2, 1, 11], flat
    all_min_buf,  # out f64 [2, 2, 1], flat
    row_prod_buf,  # out f64 [2, 2, 6], flat
    vec_prod_buf,  # out f64 [1], flat
    one_prod_buf,  # out f64 [2], flat
    col_prod_buf,  # out f64 [2, 2, 1, 11], flat
    all_prod_buf,  # out f64 [2, 2, 1], flat
):
    """Reductions."""
    for fixed in range(4):
        col = np.arange(11)[None, :]
        row = np.arange(6)[:, None]
        x = x_buf[fixed * 66 + row * 11 + col]
        v = v_buf[col]
        s = s_buf[fixed // 2]
        x_sum = np.sum(x, axis=1, keepdims=True, dtype=np.float64)
        row_sum_buf[fixed * 6 + row] = x_sum
        v_sum = np.sum(v, axis=None, dtype=np.float64)
        vec_sum_buf[0] = v_sum
        s_sum = s * 11.0
        one_sum_buf[fixed // 2] = s_sum
        c_sum = np.sum(x, axis=0, keepdims=True, dtype=np.float64)
        col_sum_buf[fixed * 11 + col] = c_sum
        r_sum = np.sum(x_sum, axis=None, dtype=np.float64)
        all_sum_buf[fixed] = r_sum
        x_max = np.max(x, axis=1, keepdims=True)
        row_max_buf[fixed * 6 + row] = x_max
        v_max = np.max(v, axis=None)
        vec_max_buf[0] = v_max
        s_max = s
        one_max_buf[fixed // 2] = s_max
        c_max = np.max(x, axis=0, keepdims=True)
        col_max_buf[fixed * 11 + col] = c_max
        r_max = np.max(x_max, axis=None)
        all_max_buf[fixed] = r_max
        x_min = np.min(x, axis=1, keepdims=True)
        row_min_buf[fixed * 6 + row] = x_min
        v_min = np.min(v, axis=None)
        vec_min_buf[0] = v_min
        s_min = s
        one_min_buf[fixed // 2] = s_min
        c_min = np.min(x, axis=0, keepdims=True)
        col_min_buf[fixed * 11 + col] = c_min
        r_min = np.min(x_min, axis=None)
        all_min_buf[fixed] = r_min
        x_prod = np.prod(x, axis=1, keepdims=True, dtype=np.float64)
        row_prod_buf[fixed * 6 + row] = x_prod
        v_prod = np.prod(v, axis=None, dtype=np.float64)
        vec_prod_buf[0] = v_prod
        s_prod = np.prod(np.broadcast_to(s, (1, 11)), axis=None, dtype=np.float64)
        one_prod_buf[fixed // 2] = s_prod
        c_prod = np.prod(x, axis=0, keepdims=True, dtype=np.float64)
        col_prod_buf[fixed * 11 + col] = c_prod
        r_prod = np.prod(x_prod, axis=None, dtype=np.float64)
        all_prod_buf[fixed] = r_prod
