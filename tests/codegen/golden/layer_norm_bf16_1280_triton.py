import triton
import triton.language as tl


@triton.jit
def _wait_for_kernel_before():
    """Wait until the kernel launched before this one has ended, and what it wrote can be read (sm_90 and later)."""
    tl.inline_asm_elementwise("griddepcontrol.wait;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _rsqrt(x):
    """1 / sqrt(x) of fp32. What is below 2**-126, which the instruction takes for 0, is scaled first."""
    tiny = x < 1.1754943508222875e-38
    root = tl.rsqrt(tl.where(tiny, x * 16777216.0, x))
    return tl.where(tiny, root * 4096.0, root)


@triton.jit
def layer_norm_bf16_1280(
    x_ptr,  # bf16 [7, 1280]
    gamma_ptr,  # bf16 [1280]
    beta_ptr,  # bf16 [1280]
    y_ptr,  # out bf16 [7, 1280]
    mean_ptr,  # out f32 [7]
    rstd_ptr,  # out f32 [7]
    early: tl.constexpr = False,  # launched while the kernel before may still run
):
    """Layer norm over the columns.

    y = (x - mean) * rstd * gamma + beta
    Grid 2 x 1 (chunks=2); tile 2 of 7 rows (4 a program) x 1280 columns as 1024 + 256; num_warps=4, num_stages=1.
    """
    if early:
        _wait_for_kernel_before()
    chunk = tl.program_id(0)
    col_0 = tl.arange(0, 1024)[None, :]
    col_1 = 1024 + tl.arange(0, 256)[None, :]
    # mean and variance, two passes over the tile
    gamma_bf16_0 = tl.load(gamma_ptr + col_0)
    gamma_bf16_1 = tl.load(gamma_ptr + col_1)
    gamma_0 = gamma_bf16_0.to(tl.float32)
    gamma_1 = gamma_bf16_1.to(tl.float32)
    beta_bf16_0 = tl.load(beta_ptr + col_0)
    beta_bf16_1 = tl.load(beta_ptr + col_1)
    beta_0 = beta_bf16_0.to(tl.float32)
    beta_1 = beta_bf16_1.to(tl.float32)
    for first_row in range(0, 4, 2):
        row = chunk * 4 + first_row + tl.arange(0, 2)[:, None]
        row_mask = row < 7
        # src[block.py:31]: y = norm(x)
        x_bf16_0 = tl.load(x_ptr + row * 1280 + col_0, mask=row_mask, other=0.0, eviction_policy="evict_last")
        x_bf16_1 = tl.load(x_ptr + row * 1280 + col_1, mask=row_mask, other=0.0, eviction_policy="evict_last")
        x_0 = x_bf16_0.to(tl.float32)
        x_1 = x_bf16_1.to(tl.float32)
        # mean and variance, two passes over the tile
        sum_x = tl.sum(x_0, 1, keep_dims=True) + tl.sum(x_1, 1, keep_dims=True)
        mean = sum_x * 0.00078125
        diff_0 = x_0 - mean
        diff_1 = x_1 - mean
        square_0 = diff_0 * diff_0
        square_1 = diff_1 * diff_1
        sum_sq = tl.sum(square_0, 1, keep_dims=True) + tl.sum(square_1, 1, keep_dims=True)
        var = sum_sq * 0.00078125
        var_eps = var + 1e-05
        rstd = _rsqrt(var_eps)
        x_hat_0 = diff_0 * rstd
        x_hat_1 = diff_1 * rstd
        scaled_0 = x_hat_0 * gamma_0
        scaled_1 = x_hat_1 * gamma_1
        y_0 = scaled_0 + beta_0
        y_1 = scaled_1 + beta_1
        # store
        y_out_0 = y_0.to(tl.bfloat16)
        y_out_1 = y_1.to(tl.bfloat16)
        tl.store(y_ptr + row * 1280 + col_0, y_out_0, mask=row_mask)
        tl.store(y_ptr + row * 1280 + col_1, y_out_1, mask=row_mask)
        tl.store(mean_ptr + row, mean, mask=row_mask)
        tl.store(rstd_ptr + row, rstd, mask=row_mask)
