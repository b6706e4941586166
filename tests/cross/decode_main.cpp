// The CPU backend without torch, on small cases that are compared with plain loops: what
// tests/test_aarch64.py cross-compiles and runs. Prints one line a case; the exit status counts the
// wrong ones.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

#include "backend.h"
#include "cpu/parallel.h"

namespace paged_attn::cpu {

int64_t num_threads() { return 3; }

// In order, but cut as threads would cut it.
void parallel_for(int64_t count, int64_t /*grain*/, void (*body)(int64_t, int64_t, void*),
                  void* context) {
  for (int64_t i = 0; i < count; ++i) body(i, i + 1, context);
}

}  // namespace paged_attn::cpu

namespace {

using paged_attn::DType;

// Small numbers that every format holds exactly: multiples of 1/4 up to 1.75.
struct Numbers {
  uint32_t state = 12345;
  float next() {
    state = state * 1664525u + 1013904223u;
    return static_cast<float>(static_cast<int>(state >> 28) - 8) * 0.25f + 0.25f;
  }
};

uint32_t narrow(float x, int exponent_bits, int mantissa_bits) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  const uint32_t sign = bits >> 31 << (exponent_bits + mantissa_bits);
  if (x == 0.f) return sign;
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const uint32_t exponent = (bits >> 23 & 0xff) - 127 + bias;
  return sign | exponent << mantissa_bits | (bits & 0x7fffff) >> (23 - mantissa_bits);
}

void put(std::vector<char>& pool, int64_t index, DType dtype, float x) {
  const int size = paged_attn::element_size(dtype);
  uint32_t bits = 0;
  if (dtype == DType::kF32) std::memcpy(&bits, &x, 4);
  if (dtype == DType::kF16) bits = narrow(x, 5, 10);
  if (dtype == DType::kBf16) bits = narrow(x, 8, 7);
  if (dtype == DType::kF8E4m3) bits = narrow(x, 4, 3);
  if (dtype == DType::kF8E5m2) bits = narrow(x, 5, 2);
  if (dtype == DType::kI8) bits = static_cast<uint8_t>(static_cast<int8_t>(x * 4));
  std::memcpy(pool.data() + index * size, &bits, size);  // little-endian
}

struct Case {
  const char* name;
  DType dtype;
  int64_t seq_len;
  int32_t query_len;
  int32_t head_dim;
  int32_t block_size;
  int32_t window;
  float softcap;
};

constexpr int32_t kQueryHeads = 6, kKvHeads = 2;

bool is_right(const Case& c) {
  const int64_t blocks = (c.seq_len + c.block_size - 1) / c.block_size;
  const int64_t d = c.head_dim;
  const int64_t elements = blocks * c.block_size * kKvHeads * d;
  const float unit = c.dtype == DType::kI8 ? 0.25f : 1.f;
  Numbers numbers;
  std::vector<float> key(elements), value(elements), query(c.query_len * kQueryHeads * d);
  std::vector<char> stored[2];
  for (std::vector<char>& pool : stored) pool.resize(elements * element_size(c.dtype));
  for (int64_t i = 0; i < elements; ++i) {
    put(stored[0], i, c.dtype, key[i] = numbers.next());
    put(stored[1], i, c.dtype, value[i] = numbers.next());
  }
  for (float& x : query) x = numbers.next();
  std::vector<int32_t> table(blocks);
  for (int64_t i = 0; i < blocks; ++i) table[i] = static_cast<int32_t>(blocks - 1 - i);
  const auto seq_len = static_cast<int32_t>(c.seq_len);
  std::vector<float> out(query.size()), lse(c.query_len * kQueryHeads);

  paged_attn::DecodeParams p{};
  p.query = {query.data(), c.query_len * kQueryHeads * d, kQueryHeads * d, d};
  p.out = {out.data(), c.query_len * kQueryHeads * d, kQueryHeads * d, d};
  p.lse = lse.data();
  p.key_cache = {stored[0].data(), c.block_size * kKvHeads * d, kKvHeads * d, d};
  p.value_cache = {stored[1].data(), c.block_size * kKvHeads * d, kKvHeads * d, d};
  p.k_scale = p.v_scale = {nullptr, unit, 0, 0, 0};
  p.block_tables = {table.data(), blocks, 1, blocks};
  p.seq_lens = &seq_len;
  p.shape = {blocks, c.block_size, kKvHeads, c.head_dim};
  p.query_dtype = DType::kF32;
  p.kv_dtype = c.dtype;
  p.num_tokens = p.query_len = c.query_len;
  p.num_seqs = 1;
  p.num_q_heads = kQueryHeads;
  p.scale = 0.125f;
  p.softcap = c.softcap;
  p.sliding_window = c.window;
  p.causal = true;
  paged_attn::backend::decode({.params = p}, nullptr);

  double error = 0;
  for (int64_t row = 0; row < c.query_len * kQueryHeads; ++row) {
    const paged_attn::TokenRange visible =
        paged_attn::visible_keys(c.seq_len, c.query_len, row / kQueryHeads, true, c.window);
    const int64_t head = row % kQueryHeads / (kQueryHeads / kKvHeads);
    double sum = 0;
    std::vector<double> want(d);
    for (int64_t t = visible.begin; t < visible.end; ++t) {
      const int64_t slot = table[t / c.block_size] * int64_t{c.block_size} + t % c.block_size;
      const int64_t at = (slot * kKvHeads + head) * d;
      double score = 0;
      for (int64_t i = 0; i < d; ++i) score += double{query[row * d + i]} * key[at + i];
      score *= p.scale;
      if (c.softcap > 0) score = c.softcap * std::tanh(score / c.softcap);
      sum += std::exp(score);
      for (int64_t i = 0; i < d; ++i) want[i] += std::exp(score) * value[at + i];
    }
    for (int64_t i = 0; i < d; ++i) {
      error = std::fmax(error, std::fabs(out[row * d + i] - want[i] / sum));
    }
    error = std::fmax(error, std::fabs(lse[row] - std::log(sum)));
  }
  std::printf("%s: error %.3g\n", c.name, error);
  return error < 2e-5;
}

constexpr Case kCases[] = {
    {"f32", DType::kF32, 300, 1, 64, 16, 0, 0.f},
    {"f16", DType::kF16, 300, 2, 64, 16, 0, 0.f},
    {"bf16", DType::kBf16, 700, 1, 128, 16, 0, 0.f},
    {"e4m3", DType::kF8E4m3, 40, 1, 72, 5, 0, 2.f},
    {"e5m2", DType::kF8E5m2, 260, 3, 8, 1, 100, 0.f},
    {"i8", DType::kI8, 33, 5, 40, 7, 3, 0.5f},
};

}  // namespace

int main() {
  int wrong = 0;
  for (const Case& c : kCases) wrong += is_right(c) ? 0 : 1;
  return wrong;
}
