import numpy as np


@np.errstate(all="ignore")
def joint_sums_bf16_4_16_16_16(
    x_buf,  # bf16 [7, 45], flat
    s1_buf,  # out f32 [7], flat
    s2_buf,  # out f32 [7], flat
    s3_buf,  # out f32 [7], flat
    s4_buf,  # out f32 [7], flat
):
    """Sums of powers."""
    col = np.arange(45)[None, :]
    for start in range(0, 7, 11650):
        row = np.arange(start, min(start + 11650, 7))[:, None]
        x_bf16 = x_buf[row * 45 + col]
        x = x_bf16.astype(np.float32)
        x2 = x * x
        x3 = x2 * x
        x4 = x3 * x
        sum_x = np.sum(x, axis=1, keepdims=True, dtype=np.float32)
        sum_x2 = np.sum(x2, axis=1, keepdims=True, dtype=np.float32)
        sum_x3 = np.sum(x3, axis=1, keepdims=True, dtype=np.float32)
        sum_x4 = np.sum(x4, axis=1, keepdims=True, dtype=np.float32)
        s1_buf[row] = sum_x
        s2_buf[row] = sum_x2
        s3_buf[row] = sum_x3
        s4_buf[row] = sum_x4
