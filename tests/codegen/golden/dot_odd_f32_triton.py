import triton
import triton.language as tl


@triton.jit
def _wait_for_kernel_before():
    """Wait until the kernel launched before this one has ended, and what it wrote can be read (sm_90 and later)."""
    tl.inline_asm_elementwise("griddepcontrol.wait;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def dot_odd_f32(
    a_ptr,  # f32 [2146]
    b_ptr,  # f32 [3538]
    bias_ptr,  # f32 [2, 61]
    residual_ptr,  # f32 [4514]
    y_ptr,  # out f32 [4514]
    early: tl.constexpr = False,  # launched while the kernel before may still run
):
    """h = a @ b and what follows.

    Product: 2 of [37, 29] x [29, 61]. 3 programs walk 4 tiles of 32 x 64, 16 deep; num_warps=4, num_stages=2.
    """
    if early:
        _wait_for_kernel_before()
    zero = tl.program_id(2) * 16384  # 0; not known to be, so indices are not narrowed to 16 bits (a ptxas fault)
    for tile in tl.range(tl.program_id(0), 4, 3):
        p = (tile + zero) // 2
        at = (tile + zero) % 2 + zero
        pid_m = at % 2 + zero
        pid_n = at // 2 + zero
        offs_m = (pid_m * 32 + tl.arange(0, 32))[:, None]
        offs_n = (pid_n * 64 + tl.arange(0, 64))[None, :]
        acc = tl.zeros((32, 64), tl.float32)
        for k in range(0, 29, 16):
            offs_k_a = (k + zero + tl.arange(0, 16))[None, :]
            a = tl.load(a_ptr + p * 1073 + offs_m * 29 + offs_k_a, mask=(offs_m < 37) & (offs_k_a < 29), other=0.0)
            offs_k_b = (k + zero + tl.arange(0, 16))[:, None]
            b = tl.load(b_ptr + p * 1769 + offs_n + offs_k_b * 61, mask=(offs_n < 61) & (offs_k_b < 29), other=0.0)
            acc = tl.dot(a, b, acc, input_precision="ieee")
        acc_0, acc_1 = acc.reshape(32, 2, 32).permute(0, 2, 1).split()
        row = pid_m * 32 + tl.arange(0, 32)[:, None]
        row_mask = row < 37
        col = pid_n * 64 + tl.arange(0, 32)[None, :]
        col_mask = col < 61
        # src[block.py:7]: h = x @ w + b
        product = acc_0
        bias_x = tl.load(bias_ptr + p * 61 + col, mask=col_mask, other=0.0)
        h = product + bias_x
        residual_x = tl.load(residual_ptr + p * 2257 + row * 61 + col, mask=row_mask & col_mask, other=0.0)
        y = h + residual_x
        tl.store(y_ptr + p * 2257 + row * 61 + col, y, mask=row_mask & col_mask)
        col = pid_n * 64 + 32 + tl.arange(0, 32)[None, :]
        col_mask = col < 61
        # src[block.py:7]: h = x @ w + b
        product = acc_1
        bias_x = tl.load(bias_ptr + p * 61 + col, mask=col_mask, other=0.0)
        h = product + bias_x
        residual_x = tl.load(residual_ptr + p * 2257 + row * 61 + col, mask=row_mask & col_mask, other=0.0)
        y = h + residual_x
        tl.store(y_ptr + p * 2257 + row * 61 + col, y, mask=row_mask & col_mask)
