// Matrices spread over a warp: ldmatrix, movmatrix and mma.sync, with the fragments of the PTX ISA.
// All 32 lanes take part in each.
//
// What tensor cores round, and when, is not modelled: products and sums are exact to the 53 bits of
// double, and the result is rounded once to float.
#pragma once

#include <cstddef>
#include <cstdint>

#include "error.h"

namespace emu {

// Loads `count` (1, 2 or 4) matrices of 8 x 8 16-bit elements from shared memory. Lane 8 i + r
// gives the address of row r of matrix i; the addresses of further lanes are not looked at. Each
// lane gets `count` words.
void load_matrices(uint32_t* result, size_t count, bool transpose, uint32_t row_address,
                   const Site& site);

// The transpose of an 8 x 8 matrix of 16-bit elements, of which each lane holds one word.
uint32_t transpose_matrix(uint32_t word, const Site& site);

// C += A B with A 16 x 16, B 16 x 8, C 16 x 8: each lane holds four, two and four words of them.
void mma_m16n8k16_f16(float* c, const uint32_t* a, const uint32_t* b, const Site& site);
void mma_m16n8k16_bf16(float* c, const uint32_t* a, const uint32_t* b, const Site& site);

// A 16 x 8, B 8 x 8: two words and one.
void mma_m16n8k8_f16(float* c, const uint32_t* a, const uint32_t* b, const Site& site);

}  // namespace emu
