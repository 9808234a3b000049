import numpy as np


def _load(buffer, offsets, inside, other):
    """Elements of a buffer where ``inside`` holds, ``other`` elsewhere."""
    return np.where(inside, buffer[np.where(inside, offsets, 0)], buffer.dtype.type(other))


def _store(buffer, offsets, inside, value):
    """Write ``value`` where ``inside`` holds."""
    offsets, inside, value = np.broadcast_arrays(offsets, inside, value)
    buffer[offsets[inside]] = value[inside]


@np.errstate(all="ignore")
def concat_pad_f32(
    a_buf,  # f32 [6, 5], flat
    b_buf,  # f32 [6, 8], flat
    keep_buf,  # bool [6], flat
    cat_buf,  # out f32 [6, 13], flat
    up_buf,  # out f32 [6, 13], flat
    number_buf,  # out i64 [6, 13], flat
    flag_buf,  # out bool [6, 13], flat
    b_copy_buf,  # out f32 [6, 8], flat
):
    """Concat, shift, iota, bools."""
    col = np.arange(13)[None, :]
    for start in range(0, 6, 40329):
        row = np.arange(start, min(start + 40329, 6))[:, None]
        a = _load(a_buf, row * 5 + col, col < 5, 0.0)
        b = _load(b_buf, row * 8 + col - 5, col >= 5, 0.0)
        is_a = col < 5
        both = np.where(is_a, a, b)
        cat_buf[row * 13 + col] = both
        up = _load(a_buf, row * 5 + col - 5, (row >= 1) & (col < 5), -1.0)
        up_buf[row * 13 + col] = up
        _store(b_copy_buf, row * 8 + col - 5, col >= 5, b)
        n = np.asarray(row * 13 + col + 3, np.int64)
        keep = keep_buf[row]
        odd = n & 1
        is_odd = odd == 1
        flag = is_odd & keep
        number = np.where(flag, n, np.int64(-1))
        number_buf[row * 13 + col] = number
        flag_buf[row * 13 + col] = flag
