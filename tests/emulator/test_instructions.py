"""The other instructions of device/ptx.cuh, against what numpy and torch say."""

import math

import numpy as np
import pytest
import torch

import emulator
from emulator.harness import Selftest, assert_message, line_of


def run(selftest: Selftest, kernel: str, words: np.ndarray, option: int = 0) -> np.ndarray:
    """Runs a kernel that replaces 32-bit words, by a warp."""
    data = selftest.runtime.place(torch.from_numpy(words.astype(np.uint32).view(np.int32)), "data")
    assert selftest.error(kernel, data, option=option, threads=32) is None
    result: np.ndarray = data.numpy().view(np.uint32).copy()
    return result


def random_words(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**32, shape, dtype=np.uint32)


@pytest.mark.parametrize("delta", [0, 1, 5, 31])
@pytest.mark.usefixtures("each_schedule")
def test_shuffles_and_votes(selftest: Selftest, delta: int) -> None:
    words = random_words(delta, 32, 4)
    mine = words[:, 0].copy()
    mine[9] = 5
    for votes, present in ((mine, True), (np.where(mine == 5, 6, mine), False)):
        words[:, 0] = votes
        up, down, ballot, flags = run(selftest, "lanes", words, delta).T
        lanes = np.arange(32)
        np.testing.assert_array_equal(up, votes[np.where(lanes < 3, lanes, lanes - 3)])
        beyond = lanes + delta > 31
        np.testing.assert_array_equal(down, votes[np.where(beyond, lanes, lanes + delta) % 32])
        assert (ballot == sum(1 << lane for lane in range(32) if votes[lane] % 3 == 0)).all()
        assert (flags == (1 if present else 2)).all()


@pytest.mark.usefixtures("each_schedule")
def test_reductions(selftest: Selftest) -> None:
    words = random_words(1, 32, 4)
    for option, dtype in ((0, np.int32), (1, np.uint32)):
        values = words[:, 0].view(dtype)
        result = run(selftest, "reductions", words, option).view(dtype)
        np.testing.assert_array_equal(result[:, 0], values)
        assert (result[:, 1] == values.sum(dtype=dtype)).all()
        assert (result[:, 2] == values.min()).all()
        assert (result[:, 3] == values.max()).all()


def round_to_half(exact: int) -> int:
    """The bits of the half nearest to `exact` units of 2^-48, ties to even; `exact` is not 0."""
    magnitude = abs(exact)
    # The distance of halves there: 11 significant bits, and 2^-24 at least.
    unit_bits = max(magnitude.bit_length() - 11, 24)
    quotient, rest = divmod(magnitude, 1 << unit_bits)
    half = 1 << (unit_bits - 1)
    quotient += rest > half or (rest == half and quotient % 2 == 1)
    # A subnormal has a zero exponent; a carry goes into the exponent, and at last to infinity.
    bits = min(quotient + ((unit_bits - 24) << 10), 0x7C00)
    return bits | (0x8000 if exact < 0 else 0)


def test_rounding_of_the_expectation() -> None:
    values = random_words(6, 2000).view(np.uint16).view(np.float16)
    for value in values[np.isfinite(values) & (values != 0)]:
        assert round_to_half(int(float(value) * 2**48)) == value.view(np.uint16)
    assert round_to_half(65519 << 48) == 0x7BFF
    assert round_to_half(65520 << 48) == 0x7C00


def arithmetic_of_halves(selftest: Selftest, cases: np.ndarray) -> np.ndarray:
    """a + b, a * b and a * b + c of triples of bits, an even number of them."""
    pairs = cases.reshape(-1, 2, 3).transpose(0, 2, 1).copy().view(np.uint32)[..., 0]
    packed = np.concatenate([pairs, np.zeros((len(pairs), 1), np.uint32)], 1)
    result = run(selftest, "packed_arithmetic", packed)[:, :3].copy()
    halves: np.ndarray = result.view(np.uint16).reshape(-1, 3, 2).transpose(0, 2, 1).reshape(-1, 3)
    return halves


def test_arithmetic_of_halves(selftest: Selftest) -> None:
    anything = random_words(2, 30000).view(np.uint16).reshape(-1, 3)
    # A product near an addend's last place, where rounding twice would show.
    generator = np.random.default_rng(3)
    near = generator.integers(0x3C00, 0x4400, (20000, 3), dtype=np.uint16)
    near[:, 1] = near[:, 1] & 0x03FF | generator.integers(0, 16, 20000, dtype=np.uint16) << 10
    near[:, 0] |= generator.integers(0, 2, 20000, dtype=np.uint16) << 15
    cases = np.concatenate([anything, near])
    cases = cases[np.isfinite(cases.view(np.float16)).all(1)]
    cases = cases[: len(cases) // 2 * 2]
    got = arithmetic_of_halves(selftest, cases)
    for triple, results in zip(cases.view(np.float16).tolist(), got.tolist(), strict=True):
        a, b, c = (int(x * 2**24) for x in triple)
        exact = ((a + b) << 24, a * b, a * b + (c << 24))
        expected = [round_to_half(x) if x != 0 else 0 for x in exact]
        assert [
            r if x != 0 else r & 0x7FFF for r, x in zip(results, exact, strict=True)
        ] == expected


@pytest.mark.filterwarnings("ignore:.*encountered in")
def test_arithmetic_of_special_halves(selftest: Selftest) -> None:
    special = np.array([0, 0x8000, 1, 0x8001, 0x3FF, 0x400, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00])
    grid = np.stack(np.meshgrid(special, special, special), -1).reshape(-1, 3).astype(np.uint16)
    nan = np.array([[0x7E01, 0, 0], [0, 0xFC01, 0x7C00]], np.uint16)
    cases = np.concatenate([grid, nan])
    got = arithmetic_of_halves(selftest, cases)
    # Doubles hold each product, and each sum of these but for what halves would lose too.
    a, b, c = cases.view(np.float16).astype(np.float64).T
    for i, exact in enumerate((a + b, a * b, a * b + c)):
        rounded = exact.astype(np.float16).view(np.uint16)
        np.testing.assert_array_equal(got[:, i], np.where(np.isnan(exact), 0x7FFF, rounded))


def half_fma(selftest: Selftest, a: float, b: float, c: float) -> float:
    bits = np.array([a, b, c], np.float16).view(np.uint16).astype(np.uint32)
    words = np.concatenate([bits, [0]])[None].astype(np.uint32)
    return float(run(selftest, "packed_arithmetic", words)[0, 2:3].view(np.float16)[0])


def test_fused_multiply_add_rounds_once(selftest: Selftest) -> None:
    # 2048 + 1 is a tie, of which a smaller part than any float next to it decides.
    tiny = 2.0**-24
    assert half_fma(selftest, 1 + 2.0**-10, 1 - 2.0**-10, 2048.0) == 2048
    assert half_fma(selftest, tiny, tiny, 2049.0) == 2048
    # 32768 + 16 is a tie between 32768 and 32800.
    assert half_fma(selftest, 4.0, 4.0, 32768.0) == 32768
    assert half_fma(selftest, 4.0, 4.0 + 2.0**-8, 32768.0) == 32800
    assert half_fma(selftest, 4.0, 4.0 - 2.0**-8, 32768.0) == 32768
    # 1 + 2^-11 is a tie; 2^-48 more or less decides, and is beyond a float's and a double's reach.
    assert half_fma(selftest, tiny, tiny, 1.0) == 1
    assert half_fma(selftest, 1 + 2.0**-10, 2.0**-11, 1.0) == 1 + 2.0**-10
    assert half_fma(selftest, 1 - 2.0**-11, 2.0**-11, 1.0) == 1


def test_byte_permute(selftest: Selftest) -> None:
    words = random_words(4, 1 << 12, 4)
    result = run(selftest, "packed_arithmetic", words)[:, 3]
    source = words[:, :2].copy().view(np.uint8)
    expected = np.zeros(len(words), np.uint32)
    for i in range(4):
        nibble = words[:, 3] >> np.uint32(4 * i) & 15
        byte = source[np.arange(len(words)), nibble & 7]
        byte = np.where(nibble & 8, np.where(byte & 0x80, 0xFF, 0), byte)
        expected |= byte.astype(np.uint32) << np.uint32(8 * i)
    np.testing.assert_array_equal(result, expected)


def test_packed_conversions(selftest: Selftest) -> None:
    words = random_words(5, 1 << 16, 4)
    words[:, 2] = np.arange(1 << 16)  # every pair of bytes
    # As many floats in the range of halves, ties among them.
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
    words[:, 0] = halves.view(np.uint32) + np.uint32(0x1000)
    f16, bf16, e4m3, e5m2 = run(selftest, "packed_conversions", words).T
    floats = torch.from_numpy(words[:, :2].copy().view(np.float32))
    for got, dtype in ((f16, torch.float16), (bf16, torch.bfloat16)):
        expected = floats.to(dtype).view(torch.uint16).numpy()
        expected = np.where(floats.isnan().numpy(), 0x7FFF, expected)
        np.testing.assert_array_equal(got.copy().view(np.uint16).reshape(-1, 2), expected)
    for got, fp8 in ((e4m3, torch.float8_e4m3fn), (e5m2, torch.float8_e5m2)):
        pairs = torch.from_numpy(words[:, 2].astype(np.uint16)).view(torch.uint8).view(fp8)
        exact = pairs.float().to(torch.float16)
        expected = np.where(exact.isnan().numpy(), 0x7FFF, exact.view(torch.uint16).numpy())
        np.testing.assert_array_equal(got.copy().view(np.uint16), expected)


def test_approximations(selftest: Selftest) -> None:
    x = np.concatenate([np.linspace(-160, 140, 6001), [0, math.inf, -math.inf, math.nan, 1e-40]])
    y = np.concatenate([np.geomspace(1e-45, 3e38, 6000), [-0.0, 3.0, math.inf, math.nan, 1e-40, 7]])
    pairs = np.stack([x, y], 1).astype(np.float32)
    result = run(selftest, "approximations", pairs.view(np.uint32)).view(np.float32)
    smallest = np.finfo(np.float32).smallest_normal
    with np.errstate(over="ignore", divide="ignore"):
        power = np.exp2(pairs[:, 0].astype(np.float64)).astype(np.float32)
        inverse = (1 / pairs[:, 1].astype(np.float64)).astype(np.float32)
    power[power < smallest] = 0
    inverse[np.abs(inverse) < smallest] = 0
    inverse[(pairs[:, 1] > 0) & (pairs[:, 1] < smallest)] = math.inf
    np.testing.assert_allclose(result[:, 0], power, rtol=3e-7)
    np.testing.assert_allclose(result[:, 1], inverse, rtol=2e-7)
    assert result[6001, 0] == 1


def test_scalar_functions(selftest: Selftest) -> None:
    x = torch.linspace(0.25, 100, 64)
    data = selftest.runtime.place(torch.cat([x, torch.zeros(64 * 8)]), "data")
    assert selftest.error("scalar_functions", data, option=64, threads=32) is None
    log2, tanh, inverse, rounded, f16, bf16, e4m3, e5m2 = data[64:].view(64, 8).T
    torch.testing.assert_close(log2, x.log2())
    torch.testing.assert_close(tanh, x.tanh())
    assert torch.equal(inverse, 1 / x)
    assert torch.equal(rounded, x.round())
    for got, dtype in (
        (f16, torch.float16),
        (bf16, torch.bfloat16),
        (e4m3, torch.float8_e4m3fn),
        (e5m2, torch.float8_e5m2),
    ):
        assert torch.equal(got, x.to(dtype).float())


@pytest.mark.usefixtures("each_schedule")
def test_atomics(selftest: Selftest) -> None:
    for option in (0, 99, 9, 1000):
        data = selftest.zeros(1 + 96, dtype=torch.int32)
        assert selftest.error("atomics", data, option=option, ctas=3, threads=32) is None
        found = sorted(data[1:].tolist())
        counts = (
            [3 * i for i in range(97)] if option == 0 else [i % (option + 1) for i in range(97)]
        )
        assert found == sorted(counts[:96])
        assert data[0] == counts[96]


def test_an_increment_beyond_the_last_gives_zero(selftest: Selftest) -> None:
    data = selftest.runtime.place(torch.tensor([50, -1], dtype=torch.int32))
    assert selftest.error("atomics", data, option=7, threads=1) is None
    assert data.tolist() == [0, 50]


def check_last_cta_merge(selftest: Selftest) -> None:
    data = selftest.zeros(2 + 9, dtype=torch.int32)
    assert selftest.error("last_cta_merge", data, ctas=9, threads=64, smem=16) is None
    assert data[:2].tolist() == [0, 45]


@pytest.mark.parametrize("schedule", emulator.SCHEDULES)
def test_merge_by_the_last_cta(selftest: Selftest, hooked: Selftest, schedule: str) -> None:
    for seed in range(5):
        for runs in (selftest, hooked):
            runs.runtime.configure(seed=seed, schedule=schedule)
            check_last_cta_merge(runs)


@pytest.mark.usefixtures("each_schedule")
def test_exchange_through_shared_memory(selftest: Selftest) -> None:
    data = selftest.runtime.place(torch.arange(64, dtype=torch.int32))
    assert selftest.error("exchange", data, threads=64, smem=256) is None
    assert data.tolist() == [i ^ 1 for i in range(64)]


def test_misaligned_atomic(selftest: Selftest) -> None:
    data = selftest.zeros(4)
    assert_message(
        selftest.error("misaligned_atomic", data, option=2, threads=1),
        "4 bytes misaligned",
        line_of("misaligned_atomic", "faulty_instructions.cpp"),
    )
