// Every instruction of device/ptx.cuh, bare: what comes in is what goes out of it. Compiled for the
// GPU too.
#include "selftest.h"

using selftest::Args;
namespace ptx = selftest::ptx;

// data: a uint4 for each thread, of which x is read.
SELFTEST_KERNEL(lanes) {
  uint4* data = static_cast<uint4*>(args.data) + threadIdx.x;
  const uint32_t mine = ptx::load_global<uint4>(data).x;
  uint4 result;
  result.x = ptx::opaque(ptx::shuffle_up(mine, 3u));
  result.y = ptx::shuffle_down(mine, static_cast<unsigned>(args.option));
  result.z = ptx::ballot(mine % 3 == 0);
  result.w = (ptx::any(mine == 5) ? 1u : 0u) + (ptx::all(mine != 5) ? 2u : 0u);
  ptx::store_global(data, result);
}

// data: a uint4 for each thread, of which x is read. option 0: as int32_t, otherwise as uint32_t.
SELFTEST_KERNEL(reductions) {
  uint4* data = static_cast<uint4*>(args.data) + threadIdx.x;
  const uint32_t mine = ptx::load_global<uint4>(data).x;
  const auto value = static_cast<int32_t>(mine);
  uint4 result;
  result.x = ptx::shuffle(ptx::shuffle_xor(mine, 7), static_cast<int>(threadIdx.x) ^ 7);
  if (args.option == 0) {
    result.y = static_cast<uint32_t>(ptx::reduce_add(value));
    result.z = static_cast<uint32_t>(ptx::reduce_min(value));
    result.w = static_cast<uint32_t>(ptx::reduce_max(value));
  } else {
    result.y = ptx::reduce_add(mine);
    result.z = ptx::reduce_min(mine);
    result.w = ptx::reduce_max(mine);
  }
  ptx::store_global(data, result);
}

// data: uint4s, each replaced by what the words of it give.
SELFTEST_KERNEL(packed_arithmetic) {
  uint4* data = static_cast<uint4*>(args.data);
  for (int64_t i = threadIdx.x; i < args.size / 16; i += blockDim.x) {
    const uint4 in = ptx::load_global<uint4>(data + i);
    ptx::store_global(
        data + i,
        make_uint4(ptx::add_f16x2(in.x, in.y), ptx::multiply_f16x2(in.x, in.y),
                   ptx::fma_f16x2(in.x, in.y, in.z), ptx::byte_permute(in.x, in.y, in.w)));
  }
}

// x and y are floats, the low half of z is a pair of 8-bit ones; every second one is converted as
// two of four.
SELFTEST_KERNEL(packed_conversions) {
  uint4* data = static_cast<uint4*>(args.data);
  for (int64_t i = threadIdx.x; i < args.size / 16; i += blockDim.x) {
    const uint4 in = ptx::load_global<uint4>(data + i);
    const float low = ptx::bits_to_float(in.x), high = ptx::bits_to_float(in.y);
    const auto pair = static_cast<uint16_t>(in.z);
    uint32_t e4m3 = ptx::e4m3x2_to_f16x2(pair);
    if constexpr (ptx::kHasFp8) {
      if (i % 2 == 1) e4m3 = ptx::e4m3x4_to_f16x4(in.z).x;
    }
    ptx::store_global(data + i,
                      make_uint4(ptx::floats_to_f16x2(low, high), ptx::floats_to_bf16x2(low, high),
                                 e4m3, ptx::e5m2x2_to_f16x2(pair)));
  }
}

// Pairs of floats: 2 to the power of the first, the reciprocal of the second.
SELFTEST_KERNEL(approximations) {
  float2* data = static_cast<float2*>(args.data);
  for (int64_t i = threadIdx.x; i < args.size / 8; i += blockDim.x) {
    const float2 in = ptx::load_global<float2>(data + i);
    ptx::store_global(data + i, make_float2(ptx::exp2(in.x), ptx::reciprocal(in.y)));
  }
}

// The functions of one float, and the conversions of one: of float i into float4s 2 i and 2 i + 1
// after the `option` floats.
SELFTEST_KERNEL(scalar_functions) {
  const float* input = static_cast<const float*>(args.data);
  float4* output = static_cast<float4*>(args.data) + args.option / 4;
  for (int64_t i = threadIdx.x; i < args.option; i += blockDim.x) {
    const float x = ptx::bits_to_float(ptx::float_to_bits(ptx::load_global<float>(input + i)));
    ptx::store_global(output + 2 * i, make_float4(ptx::log2(x), ptx::tanh(x), ptx::divide(1.f, x),
                                                  static_cast<float>(ptx::round_to_int(x))));
    const auto fp8 = static_cast<uint16_t>(ptx::float_to_e4m3(x) | ptx::float_to_e5m2(x) << 8);
    const uint32_t bits16 = ptx::float_to_f16(x) | static_cast<uint32_t>(ptx::float_to_bf16(x))
                                                       << 16;
    ptx::store_global(output + 2 * i + 1,
                      make_float4(ptx::f16x2_to_float2(bits16).x, ptx::bf16x2_to_float2(bits16).y,
                                  ptx::e4m3x2_to_float2(fp8).x, ptx::e5m2x2_to_float2(fp8).y));
  }
}

// data: a counter, and for each thread of the grid what it found there. option 0: atomic_add of 3;
// otherwise atomic_increment up to it.
SELFTEST_KERNEL(atomics) {
  uint32_t* counter = static_cast<uint32_t*>(args.data);
  const unsigned index = blockIdx.x * blockDim.x + threadIdx.x;
  const uint32_t old = args.option == 0
                           ? ptx::atomic_add(counter, 3)
                           : ptx::atomic_increment(counter, static_cast<uint32_t>(args.option));
  ptx::store_global(counter + 1 + index, old);
}

struct TicketSmem {
  uint32_t ticket;
};

// The last CTA to finish merges what all have left. data: a ticket, which is 0 before and after,
// the sum of blockIdx.x + 1, and a value of each CTA.
SELFTEST_KERNEL(last_cta_merge) {
  uint32_t* ticket = static_cast<uint32_t*>(args.data);
  uint32_t* sum = ticket + 1;
  uint32_t* values = ticket + 2;
  uint32_t& shared_ticket = ptx::shared_memory<TicketSmem>().ticket;
  if (threadIdx.x == blockDim.x - 1) ptx::store_global(values + blockIdx.x, blockIdx.x + 1);
  ptx::fence_gpu();
  ptx::cta_sync();  // all of the CTA's values are written
  if (threadIdx.x == 0) shared_ticket = ptx::atomic_increment(ticket, gridDim.x - 1);
  ptx::cta_sync();  // the ticket is known
  if (shared_ticket != gridDim.x - 1) return;
  ptx::fence_gpu();
  if (threadIdx.x == 0) {
    uint32_t total = 0;
    for (unsigned i = 0; i < gridDim.x; ++i) total += ptx::load_global<uint32_t>(values + i);
    ptx::store_global(sum, total);
  }
}

struct ExchangeSmem {
  uint32_t words[64];
};

// data: a word for each thread of a warp, which becomes that of its neighbour, by shared memory.
SELFTEST_KERNEL(exchange) {
  uint32_t* data = static_cast<uint32_t*>(args.data) + threadIdx.x;
  uint32_t* words = ptx::shared_memory<ExchangeSmem>().words;
  words[threadIdx.x] = *data;
  ptx::fence_cta();
  ptx::warp_sync();
  *data = words[threadIdx.x ^ 1];
}

struct MatrixSmem {
  uint4 rows[32];
};

// data: for each lane the index of the row whose address it gives, then 32 rows of 16 bytes, which
// become what the lanes get. option: the number of matrices, negative for transposed ones.
SELFTEST_KERNEL(load_matrices) {
  auto& smem = ptx::shared_memory<MatrixSmem>();
  const unsigned lane = threadIdx.x;
  uint4* rows = static_cast<uint4*>(args.data) + 8;
  const uint32_t index = ptx::load_global<uint32_t>(static_cast<uint32_t*>(args.data) + lane);
  smem.rows[lane] = ptx::load_global<uint4>(rows + lane);
  ptx::warp_sync();
  const uint32_t address =
      ptx::shared_address(smem.rows) + index * static_cast<uint32_t>(sizeof(uint4));
  uint32_t one[1] = {}, two[2] = {}, four[4] = {};
  if (args.option == 1) ptx::ldmatrix(one, address);
  if (args.option == -1) ptx::ldmatrix_trans(one, address);
  if (args.option == 2) ptx::ldmatrix(two, address);
  if (args.option == -2) ptx::ldmatrix_trans(two, address);
  if (args.option == 4) ptx::ldmatrix(four, address);
  if (args.option == -4) ptx::ldmatrix_trans(four, address);
  ptx::store_global(rows + lane,
                    make_uint4(one[0] | two[0] | four[0], two[1] | four[1], four[2], four[3]));
}

// data: a word for each lane, of a matrix that is transposed.
SELFTEST_KERNEL(transpose_matrix) {
  uint32_t* data = static_cast<uint32_t*>(args.data) + threadIdx.x;
  ptx::store_global(data, ptx::movmatrix_trans(ptx::load_global<uint32_t>(data)));
}

// data: for each lane uint4s of A, of B and of C, which becomes the result. option: the depth,
// negative for bf16.
SELFTEST_KERNEL(multiply_matrices) {
  uint4* data = static_cast<uint4*>(args.data) + threadIdx.x * 3;
  const uint4 a = ptx::load_global<uint4>(data), b = ptx::load_global<uint4>(data + 1);
  const float4 in = ptx::load_global<float4>(data + 2);
  float c[4] = {in.x, in.y, in.z, in.w};
  if (args.option == 8) ptx::mma_m16n8k8_f16(c, {a.x, a.y}, {b.x});
  if (args.option == 16) ptx::mma_m16n8k16_f16(c, {a.x, a.y, a.z, a.w}, {b.x, b.y});
  if (args.option == -16) ptx::mma_m16n8k16_bf16(c, {a.x, a.y, a.z, a.w}, {b.x, b.y});
  ptx::store_global(data + 2, make_float4(c[0], c[1], c[2], c[3]));
}
