// Prints what the host knows of an instance of the decode kernel, from the kernel's own constants:
// static_report.py compiles this with a main() that calls it for every instance.
#pragma once

#include <cstdio>

#include "kernels/decode_mma.cuh"

namespace paged_attn {

template <DType kKv, int kDim, int kRows>
void print_facts() {
  using Kernel = DecodeMma<kKv, kDim, kRows>;
  using Ring = typename Kernel::Ring;
  // K and V rows without their padding: of a tile, and of all tiles that a CTA's rings hold.
  constexpr int kTileBytes = 2 * Ring::kTokens * Ring::kRowBytes;
  constexpr int kRingBytes = Kernel::kRings * Ring::kStages * kTileBytes;
  std::printf("%d %d %d %d %d %d %d\n", static_cast<int>(kKv), kDim, kRows, Kernel::kThreads,
              static_cast<int>(sizeof(typename Kernel::Smem)), kTileBytes, kRingBytes);
}

}  // namespace paged_attn
