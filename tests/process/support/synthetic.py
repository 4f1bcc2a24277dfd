"""The gradients of `lockstep worker --job synthetic`, computed once more (Philox4x32-10)."""

from array import array

from gradient_client import f32

VECTOR = 0
COMPONENTS = 0xFFFFFF00  # plus the component; a block is its number plus one
LOSS = 0xFFFFFFFF
_MASK = 0xFFFFFFFF


def philox(counter, key):
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & _MASK, (a >> 32) ^ c3 ^ k1, a & _MASK
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return c0, c1, c2, c3


def _unit(word):
    return f32((word >> 8) * 2.0**-23 - 1.0)


def gradient(seed, step, worker, part, count):
    key = (seed & _MASK, seed >> 32)
    values = array("f")
    for group in range((count + 3) // 4):
        values.extend(_unit(word) for word in philox((group, part, step & _MASK, worker), key))
    return values[:count]


def loss(seed, step, worker):
    return f32(gradient(seed, step, worker, LOSS, 1)[0] + 2.0)


def block_sizes(hidden, intermediate):
    square, wide = hidden * hidden, hidden * intermediate
    return [square] * 4 + [wide] * 3 + [hidden] * 2


def component_size(component, hidden, vocab):
    return hidden if component == 1 else hidden * vocab
