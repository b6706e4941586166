#include "tensor_core.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "config.h"
#include "formats.h"
#include "memory.h"
#include "runtime.h"
#include "shared_window.h"

namespace emu {
namespace {

constexpr uint32_t kAllLanes = 0xffffffffu;
constexpr unsigned kRows = 8, kColumns = 8;  // of the matrices that ldmatrix and movmatrix move
constexpr size_t kRowBytes = kColumns * sizeof(uint16_t);

using Matrix = uint16_t[kRows][kColumns];

// Word `lane` of a matrix: row lane / 4, two columns from lane % 4 * 2.
uint32_t word_of(const Matrix& matrix, unsigned lane, bool transposed) {
  const unsigned row = lane / 4, column = lane % 4 * 2;
  const uint32_t low = transposed ? matrix[column][row] : matrix[row][column];
  const uint32_t high = transposed ? matrix[column + 1][row] : matrix[row][column + 1];
  return high << 16 | low;
}

struct LoadOperands {
  const unsigned char* row;
  uint32_t* result;
};

template <unsigned kCount, bool kTranspose>
void combine_load(uint32_t, void* const* operands) {
  for (unsigned i = 0; i < kCount; ++i) {
    Matrix matrix;
    for (unsigned r = 0; r < kRows; ++r) {
      std::memcpy(matrix[r], static_cast<LoadOperands*>(operands[i * kRows + r])->row, kRowBytes);
    }
    for (unsigned lane = 0; lane < kWarpSize; ++lane) {
      static_cast<LoadOperands*>(operands[lane])->result[i] = word_of(matrix, lane, kTranspose);
    }
  }
}

constexpr Collective kLoadMatrices[] = {
    {"ldmatrix.x1", combine_load<1, false>}, {"ldmatrix.x1.trans", combine_load<1, true>},
    {"ldmatrix.x2", combine_load<2, false>}, {"ldmatrix.x2.trans", combine_load<2, true>},
    {"ldmatrix.x4", combine_load<4, false>}, {"ldmatrix.x4.trans", combine_load<4, true>}};

void combine_transpose(uint32_t, void* const* operands) {
  Matrix matrix;
  for (unsigned lane = 0; lane < kWarpSize; ++lane) {
    std::memcpy(&matrix[lane / 4][lane % 4 * 2], operands[lane], sizeof(uint32_t));
  }
  for (unsigned lane = 0; lane < kWarpSize; ++lane) {
    *static_cast<uint32_t*>(operands[lane]) = word_of(matrix, lane, true);
  }
}

constexpr Collective kTransposeMatrix{"movmatrix", combine_transpose};

struct MmaOperands {
  float* c;
  const uint32_t* a;
  const uint32_t* b;
};

// Values of all half bit patterns: thousands of conversions belong to each tile of a kernel.
const float* half_values() {
  static const std::vector<float> values = [] {
    std::vector<float> result(65536);
    for (uint32_t bits = 0; bits < 65536; ++bits) {
      result[bits] = half_to_float(static_cast<uint16_t>(bits));
    }
    return result;
  }();
  return values.data();
}

struct Half {
  const float* values = half_values();
  float operator()(uint16_t bits) const { return values[bits]; }
};

struct Bfloat16 {
  float operator()(uint16_t bits) const { return bfloat16_to_float(bits); }
};

// Whatever NaN went in, tensor cores give this one.
float canonical(double x) {
  return std::isnan(x) ? std::bit_cast<float>(kFloatNan) : static_cast<float>(x);
}

// With g = lane / 4 and t = lane % 4: word 2 h + s of A is row g + 8 s, columns 8 h + 2 t and the
// next; word h of B is rows 8 h + 2 t and the next, column g; element 2 s + i of C is row g + 8 s,
// column 2 t + i.
template <unsigned kDepth, class Format>
void combine_mma(uint32_t, void* const* operands) {
  const Format to_float;
  double a[16][kDepth], b[kDepth][8];
  for (unsigned lane = 0; lane < kWarpSize; ++lane) {
    const auto& mine = *static_cast<const MmaOperands*>(operands[lane]);
    const unsigned g = lane / 4, t = lane % 4;
    for (unsigned h = 0; h < kDepth / 8; ++h) {
      for (unsigned i = 0; i < 2; ++i) {
        const unsigned depth = 8 * h + 2 * t + i, shift = 16 * i;
        a[g][depth] = to_float(static_cast<uint16_t>(mine.a[2 * h] >> shift));
        a[g + 8][depth] = to_float(static_cast<uint16_t>(mine.a[2 * h + 1] >> shift));
        b[depth][g] = to_float(static_cast<uint16_t>(mine.b[h] >> shift));
      }
    }
  }
  for (unsigned row = 0; row < 16; ++row) {
    double sums[8] = {};
    for (unsigned k = 0; k < kDepth; ++k) {
      for (unsigned column = 0; column < 8; ++column) sums[column] += a[row][k] * b[k][column];
    }
    for (unsigned column = 0; column < 8; ++column) {
      const unsigned lane = row % 8 * 4 + column / 2;
      float& c = static_cast<MmaOperands*>(operands[lane])->c[row / 8 * 2 + column % 2];
      c = canonical(sums[column] + c);
    }
  }
}

constexpr Collective kMmaF16{"mma.m16n8k16.f16", combine_mma<16, Half>};
constexpr Collective kMmaBf16{"mma.m16n8k16.bf16", combine_mma<16, Bfloat16>};
constexpr Collective kMmaF16Depth8{"mma.m16n8k8.f16", combine_mma<8, Half>};

void run_mma(const Collective& kind, int arch, float* c, const uint32_t* a, const uint32_t* b,
             const Site& site) {
  require_code_for(arch, kind.name, site);
  MmaOperands operands{c, a, b};
  rendezvous(kind, kAllLanes, &operands, site);
}

}  // namespace

void load_matrices(uint32_t* result, size_t count, bool transpose, uint32_t row_address,
                   const Site& site) {
  LoadOperands operands{nullptr, result};
  // Each row counts as an access of the lane that gives its address.
  if (lane_id() < count * kRows) {
    operands.row = shared_pointer(row_address, kRowBytes, Access::kRead, site);
  }
  rendezvous(kLoadMatrices[count / 2 * 2 + (transpose ? 1 : 0)], kAllLanes, &operands, site);
}

uint32_t transpose_matrix(uint32_t word, const Site& site) {
  rendezvous(kTransposeMatrix, kAllLanes, &word, site);
  return word;
}

void mma_m16n8k16_f16(float* c, const uint32_t* a, const uint32_t* b, const Site& site) {
  run_mma(kMmaF16, 80, c, a, b, site);
}

void mma_m16n8k16_bf16(float* c, const uint32_t* a, const uint32_t* b, const Site& site) {
  run_mma(kMmaBf16, 80, c, a, b, site);
}

void mma_m16n8k8_f16(float* c, const uint32_t* a, const uint32_t* b, const Site& site) {
  run_mma(kMmaF16Depth8, 75, c, a, b, site);
}

}  // namespace emu
