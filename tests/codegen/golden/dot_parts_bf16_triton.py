import triton
import triton.language as tl


@triton.jit
def _wait_for_kernel_before():
    """Wait until the kernel launched before this one has ended, and what it wrote can be read (sm_90 and later)."""
    tl.inline_asm_elementwise("griddepcontrol.wait;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def dot_parts_bf16(
    a_ptr,  # bf16 [46080]
    b_ptr,  # bf16 [61440]
    y_ptr,  # out f32 [5, 3, 48, 64]
    early: tl.constexpr = False,  # launched while the kernel before may still run
):
    """Sums over parts of K.

    Product: 3 of [48, 320] x [320, 64], each in 5 sums over 64 products. 3 programs walk 15 tiles of 64 x 64, 32 deep;
    num_warps=4, num_stages=2.
    """
    if early:
        _wait_for_kernel_before()
    zero = tl.program_id(2) * 16384  # 0; not known to be, so indices are not narrowed to 16 bits (a ptxas fault)
    a_desc = tl.make_tensor_descriptor(a_ptr, shape=[3, 320, 48], strides=[48, 144, 1], block_shape=[1, 32, 64])
    b_desc = tl.make_tensor_descriptor(b_ptr, shape=[3, 320, 64], strides=[64, 192, 1], block_shape=[1, 32, 64])
    y_desc = tl.make_tensor_descriptor(y_ptr, shape=[15, 48, 64], strides=[3072, 64, 1], block_shape=[1, 64, 64])
    for tile in tl.range(tl.program_id(0), 15, 3, flatten=True):
        problem = (tile + zero) // 1
        at = (tile + zero) % 1 + zero
        pid_m = at % 1 + zero
        pid_n = at // 1 + zero
        acc = tl.zeros((64, 64), tl.float32)
        matrix = problem % 3
        first_k = problem // 3 * 64
        for step in range(0, 64, 32):
            k = first_k + step
            a = a_desc.load([matrix, k, pid_m * 64]).reshape(32, 64)
            b = b_desc.load([matrix, k, pid_n * 64]).reshape(32, 64)
            acc = tl.dot(a.T, b, acc)
        y_desc.store([problem, pid_m * 64, pid_n * 64], acc.reshape(1, 64, 64))
