import numpy as np


def _matrix(buffer, start, shape, strides):
    """A strided matrix of a flat buffer, widened to fp32 at least; strides in elements."""
    steps = [step * buffer.itemsize for step in strides]
    return np.lib.stride_tricks.as_strided(buffer[start:], shape, steps).astype(np.result_type(buffer, np.float32))


@np.errstate(all="ignore")
def dot_parts_bf16(
    a_buf,  # bf16 [46080], flat
    b_buf,  # bf16 [61440], flat
    y_buf,  # out f32 [5, 3, 48, 64], flat
):
    """Sums over parts of K."""
    for fixed in range(15):
        matrix = fixed % 3
        first_k = fixed // 3 * 64
        size_k = min(64, 320 - first_k)
        acc = np.matmul(
            _matrix(a_buf, matrix * 48 + first_k * 144, (48, size_k), (1, 144)),
            _matrix(b_buf, matrix * 64 + first_k * 192, (size_k, 64), (192, 1)),
        )
        col = np.arange(64)[None, :]
        row = np.arange(48)[:, None]
        y_buf[fixed * 3072 + row * 64 + col] = acc
